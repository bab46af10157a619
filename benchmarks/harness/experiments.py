"""Changes to a captured step that may make it faster, made from outside the package until numbers say otherwise.

Each is a context manager of `EXPERIMENTS`, under which a step is captured and timed beside one that is as it is. None
changes what is computed: the text has to stay the same.

* `pdl`: our Triton kernels are launched as programmatic dependents (compute capability 9): the launch of one overlaps
  with the end of the kernel before it, for which it then waits in its first instruction.
* `forked`: `k_proj` and `v_proj` run on streams of their own beside `q_proj`, and `up_proj` beside `gate_proj`.
* `prefetch`: while norms, RoPE and attention run, another stream reads the weight that comes next, so that it is in
  L2 then.
* `stacked`: queries, keys and values are one product with a copy of their weights. Its sums may have another order.
* `joint`: products are made by our kernels, several in one launch, where these are measured to be faster
  (`dflash_hf.joint_products`). Their sums have another order. On a CPU nothing is measured and nothing changes.

On a CPU there are no streams and no launches: the same changes are made and the same operations run one by one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dflash_hf import joint_products
from dflash_hf.generation.product_times import measure_products
from dflash_hf.packed_weights import LINEAR_CLASSES
from dflash_hf.target_model.user_code import MARK

from .operations import no_stand_ins
from .pair import Pair

WAIT = "tl.extra.cuda.gdc_wait()"
OUR_KERNELS = "dflash_kernels."
# Of one weight: less than the L2 of an H100 (50 MB), in which other things have to stay too.
PREFETCHED_BYTES = 32 * 2**20
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")


class Changed:
    """How many modules or kernels an experiment has changed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __len__(self) -> int:
        return len(self.names)


Experiment = Callable[[Pair], AbstractContextManager[Changed]]


@contextmanager
def unchanged(pair: Pair) -> Generator[Changed]:
    """Changes nothing: what the others are compared with, in the same process."""
    yield Changed()


# ---- programmatic dependent launches


def with_wait(source: str) -> str:
    """Returns the source of a Triton kernel that waits, first of all, for the kernel before it to be complete."""
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    has_docstring = ast.get_docstring(function) is not None
    first = function.body[1 if has_docstring else 0]
    lines = source.splitlines()
    lines.insert(first.lineno - 1, " " * first.col_offset + WAIT)
    return "\n".join(lines) + "\n"


@functools.cache
def waiting_copy(kernel: Any) -> Any:
    """Returns a copy of a Triton kernel with [`with_wait`]'s source; the kernel stays as it is."""
    copy = type(kernel)(kernel.fn, do_not_specialize=kernel.do_not_specialize)
    copy._unsafe_update_src(with_wait(kernel.src))
    return copy


@contextmanager
def dependent_launches(pair: Pair) -> Generator[Changed]:
    """Launches our kernels as programmatic dependents of what is before them in the stream.

    Raises `ImportError` without Triton, and `RuntimeError` if a kernel could not be had like that: its operation is
    then as it was before.
    """
    from triton.runtime.jit import JITFunction

    whole = JITFunction.run
    changed = Changed()

    def run(self: Any, *args: Any, **options: Any) -> Any:
        if not self.fn.__module__.startswith(OUR_KERNELS):
            return whole(self, *args, **options)
        changed.names.add(self.fn.__name__)
        return whole(waiting_copy(self), *args, **options, launch_pdl=True)

    with no_stand_ins("kernels that launch as dependents"):
        JITFunction.run = run
        try:
            yield changed
        finally:
            JITFunction.run = whole


# ---- streams beside the captured one


class Streams:
    """Streams beside the current one of a device; on a CPU there are none and nothing waits."""

    def __init__(self, device: torch.device, num: int) -> None:
        self.is_cuda = device.type == "cuda"
        self.device = device
        self.sides = [torch.cuda.Stream(device) for _ in range(num)] if self.is_cuda else []

    def mark(self) -> Any:
        """Returns where the current stream is, for [`on`]."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def on(self, index: int, mark: Any, call: Callable[[], Any]) -> Any:
        """Calls a function whose launches go to a side stream, behind a mark; returns what it returned."""
        if not self.is_cuda:
            return call()
        side = self.sides[index]
        side.wait_event(mark)
        with torch.cuda.stream(side):
            return call()

    def join(self) -> None:
        """Has the current stream wait for all side streams."""
        for side in self.sides:
            torch.cuda.current_stream(self.device).wait_stream(side)


@contextmanager
def own_forwards(
    draft: nn.Module, forwards: dict[nn.Module, Callable[[Tensor], Tensor]]
) -> Generator[None]:
    """Gives modules forwards of their own, for as long as the block runs.

    Those of the draft are marked as this package's: behind a user's the layers write context one by one, without
    stacked weights. Those of the target are not, since its fast layers on a CPU do without marked forwards.
    """
    of_draft = set(draft.modules())
    for module, forward in forwards.items():
        if module in of_draft:
            setattr(forward, MARK, True)
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]


def projections(model: nn.Module) -> list[list[Any]]:
    """Returns, layer by layer, the plain projections of each: attention's four and the MLP's three.

    A layer without all seven is left out, and so is one whose projections are no plain linear layers.
    """
    found: list[list[Any]] = []
    for layer in model.modules():
        attention = getattr(layer, "self_attn", None)
        mlp = getattr(layer, "mlp", None)
        own = [getattr(attention, name, None) for name in ATTENTION] + [
            getattr(mlp, name, None) for name in GATED
        ]
        if all(type(part) in LINEAR_CLASSES for part in own):
            found.append(own)
    return found


def product(module: Any, states: Tensor) -> Tensor:
    """Returns what a plain projection makes of states `[..., K]`: `[..., N]`."""
    return linear(states, module.weight, module.bias)


class Group:
    """Projections of the same states, of which all but the first run on side streams.

    What a side stream has made is read on the main one behind the wait of the last projection. The side stream uses
    that memory again only behind a later mark of the main one. A projection that is called alone, as `k_proj` is for a
    prompt's context, runs where it is called.
    """

    def __init__(self, streams: Streams, modules: list[Any]) -> None:
        self.streams = streams
        self.modules = modules
        self.states: Tensor | None = None  # what the first was called with, until the last has been
        self.mark: Any = None

    def forwards(self) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
        """Returns a forward for each module."""
        return {
            module: functools.partial(self.run, index) for index, module in enumerate(self.modules)
        }

    def run(self, index: int, states: Tensor) -> Tensor:
        """Returns the projection `[..., N]` of states `[..., K]`: the first on the main stream, others beside it."""
        module = self.modules[index]
        if index == 0:
            self.states = states
            self.mark = self.streams.mark()
        if index == 0 or self.states is not states:
            return product(module, states)
        out = self.streams.on(index - 1, self.mark, lambda: product(module, states))
        if index == len(self.modules) - 1:
            self.states = None
            self.streams.join()
        return out


@contextmanager
def forked_projections(pair: Pair) -> Generator[Changed]:
    """Runs `k_proj` and `v_proj` beside `q_proj`, and `up_proj` beside `gate_proj`."""
    streams = Streams(pair.device, 2)
    changed = Changed()
    forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for number, own in enumerate([*projections(pair.draft), *projections(pair.target)]):
        query, key, value, _, gate, up, _ = own
        forwards |= Group(streams, [query, key, value]).forwards()
        forwards |= Group(streams, [gate, up]).forwards()
        changed.names |= {
            f"{number}.{name}" for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        }
    with own_forwards(pair.draft, forwards):
        yield changed


class Stacked:
    """Projections of the same states as one product with their weights, which are copied side by side.

    A projection that is called alone, as `k_proj` is for a prompt's context, is its own product.
    """

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules
        self.weight = torch.cat([module.weight.detach() for module in modules])
        self.sizes = [module.weight.shape[0] for module in modules]
        self.states: Tensor | None = None  # what the first was called with
        self.parts: tuple[Tensor, ...] = ()

    def forwards(self) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
        """Returns a forward for each module."""
        return {
            module: functools.partial(self.run, index) for index, module in enumerate(self.modules)
        }

    def run(self, index: int, states: Tensor) -> Tensor:
        """Runs one projection, or returns its part of the product that the first has made."""
        if index == 0:
            self.states = states
            self.parts = linear(states, self.weight).split(self.sizes, dim=-1)
        if self.states is not states:
            return product(self.modules[index], states)
        return self.parts[index]


@contextmanager
def stacked_projections(pair: Pair) -> Generator[Changed]:
    """Makes queries, keys and values by one product; layers whose projections have biases are left out."""
    changed = Changed()
    forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for number, own in enumerate([*projections(pair.draft), *projections(pair.target)]):
        stacked = own[:3]
        if any(module.bias is not None for module in stacked):
            continue
        forwards |= Stacked(stacked).forwards()
        changed.names |= {f"{number}.{name}" for name in ATTENTION[:3]}
    with own_forwards(pair.draft, forwards):
        yield changed


class Prefetch:
    """Reads a weight on another stream as soon as a product is done; the product with it waits for that.

    `o_proj` behind `v_proj`, `gate_proj` behind `o_proj`, `down_proj` behind `up_proj`, the next layer's `q_proj`
    behind `down_proj`. Each model is a chain of its own, so that all has been waited for at its end.
    """

    def __init__(self, pair: Pair) -> None:
        self.streams = Streams(pair.device, 1)
        self.greatest = torch.empty((), dtype=torch.int32, device=pair.device)  # nobody reads it
        self.next_of: dict[Any, Any] = {}
        for model in (pair.draft, pair.target):
            layers = projections(model)
            for number, (_, _, value, out, gate, up, down) in enumerate(layers):
                self.next_of |= {value: out, out: gate, up: down}
                if number + 1 < len(layers):
                    self.next_of[down] = layers[number + 1][0]
        self.awaited = set(self.next_of.values())

    def forwards(self) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
        """Returns a forward for every module behind or before which a weight is read."""
        modules = {*self.next_of, *self.awaited}
        return {module: functools.partial(self.run, module) for module in modules}

    def run(self, module: Any, states: Tensor) -> Tensor:
        """Returns the projection `[..., N]` of states `[..., K]`; the next weight is read meanwhile."""
        out = product(module, states)
        if module in self.awaited:
            self.streams.join()
        if module in self.next_of:
            mark = self.streams.mark()
            self.streams.on(0, mark, lambda: self.read(self.next_of[module].weight))
        return out

    def read(self, weight: Tensor) -> None:
        """Reads the first `PREFETCHED_BYTES` of a weight."""
        words = weight.detach().view(-1).view(torch.int32)
        torch.amax(words[: PREFETCHED_BYTES // 4], dim=0, out=self.greatest)


@contextmanager
def prefetched_weights(pair: Pair) -> Generator[Changed]:
    """Reads weights before they are needed, as [`Prefetch`] says."""
    forwards = Prefetch(pair).forwards()
    changed = Changed()
    changed.names |= {str(number) for number in range(len(forwards))}
    with own_forwards(pair.draft, forwards):
        yield changed


@contextmanager
def joint_launches(pair: Pair) -> Generator[Changed]:
    """Makes products in one launch where that is measured to be faster; what was chosen is forgotten behind it."""
    changed = Changed()
    if pair.device.type == "cuda":
        measure_products(pair.target, pair.draft)
        changed.names |= set(map(str, joint_products.chosen()))
    try:
        yield changed
    finally:
        joint_products.forget_products()


EXPERIMENTS: dict[str, Experiment] = {
    "unchanged": unchanged,
    "pdl": dependent_launches,
    "forked": forked_projections,
    "prefetch": prefetched_weights,
    "stacked": stacked_projections,
    "joint": joint_launches,
}
