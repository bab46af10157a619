"""One CUDA graph per step: which engine a call gets, what is captured, replayed and kept, and what if it cannot be.

A graph belongs to fixed buffers, a number of K/V slots that are read (all of them, where the attention reads lengths
on the device), a number of tokens that are verified, and settings baked into it (`_settings`). All that a run may need
are captured before its first step, longest and widest first, into one pool of memory. Where the width is to be chosen,
the longest are replayed to see what each width costs, and widths that save nothing are dropped. Capturing runs the
step over rows that count as finished, which changes nothing but scratch. A graph knows addresses of weights: where one
of them, or what a module does, has changed since, it is captured again (`_fingerprint`).

During a capture the generator of the device counts for the graph: random CUDA operations of other threads raise then,
whatever their stream. A process has one capture at a time here.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf import ops
from dflash_hf.devices import Inventory, execution_devices, is_offloaded
from dflash_hf.generation.host_reads import HostReadError, NoHostReads, counts_groups
from dflash_hf.generation.run import Run
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation.widths import WidthChooser, useful_widths
from dflash_hf.generation_config import Engine
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.scopes import held
from dflash_hf.target_model.formulas import is_harmless
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.support import changing_ropes

T = TypeVar("T")
logger: Any = logging.get_logger(__name__)
Settings = tuple[object, ...]
Size = tuple[int, int]  # slots that are read, tokens that are verified
# Each has graphs for several lengths; a sampling temperature of its own is a setting of its own.
MAX_SETTINGS = 4
EAGER = "Steps with a DFlash draft run eagerly, not as CUDA graphs: {reason}"
# Replays that are timed to see what a width costs.
NUM_TIMED = 3
# One capture at a time: the beginning of one returns memory to the driver.
_capturing = threading.Lock()
# Graphs that CUDA has refused. Torch's allocators keep asking them which stream was theirs, also after their end.
_refused: list[Any] = []
# Drafts whose steps are not captured: see `uncaptured`.
_uncaptured: weakref.WeakSet[DFlashDraftModel] = weakref.WeakSet()
# Of experts that torch itself multiplies; those of quantised ones have functions of their own.
_GROUPED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class NotCapturableError(RuntimeError):
    """A step cannot be captured; the message is the reason."""


class Captured(NamedTuple):
    """A graph, or anything else with a `replay`, and what each replay overwrites.

    That is what the target returns, of a step that the host accepts, and the state's `draft_probs`.
    """

    graph: Any
    outputs: CausalLMOutputWithPast | None
    draft_probs: Tensor | None


class Kept(dict[Size, Captured]):
    """The graph of each size under some settings, and what steps cost there."""

    # Seconds that a step of each useful width takes, once that was asked.
    costs: dict[int, float] | None = None


@dataclass(slots=True)
class Graphs:
    """What has been captured over one set of buffers: per settings, or the reason why nothing can be."""

    fingerprint: int  # of the models at the time
    pool: Any = None  # of memory, which all graphs share; replays never overlap
    captured: dict[Settings, Kept] = field(default_factory=dict)
    reason: str | None = None


@contextmanager
def uncaptured(draft: DFlashDraftModel) -> Generator[None]:
    """Has a draft's steps of `"cuda_graph"` run uncaptured, on any device, in any thread; for tests and benchmarks."""
    _uncaptured.add(draft)
    try:
        yield
    finally:
        _uncaptured.discard(draft)


def is_uncaptured(draft: DFlashDraftModel) -> bool:
    """Returns True while a draft's steps are not to be captured: see [`uncaptured`]."""
    return draft in _uncaptured


def choose_engine(target: Target, draft: DFlashDraftModel) -> Engine:
    """Returns the engine that a call asks for, as far as it can be had; says once in the log why it cannot."""
    wanted = draft.generation_config.engine
    if wanted == "cuda_graph" and draft in _uncaptured:
        return wanted
    if wanted == "eager" or target.device.type != "cuda":
        return "eager"
    reason = why_not(target, draft)
    if reason is None:
        return "cuda_graph"
    logger.warning_once(EAGER.format(reason=reason))
    return "eager"


def why_not(target: Target, draft: DFlashDraftModel) -> str | None:
    """Returns why steps of this pair cannot be captured, as far as it shows without running one, or `None`."""
    model = target.model
    rope = changing_ropes(target)
    parts = [*target.layers, target.embedding, target.head]
    if any(is_offloaded(part) for part in (model, draft)):
        return "weights that are offloaded"
    if len({device for part in (*parts, draft) for device in execution_devices(Inventory.of(part))}) > 1:
        return "parts on several devices"
    is_asked_for = draft.generation_config.engine == "cuda_graph"
    if not target.takes_inference_mode and not is_asked_for:
        return "weights that are no plain tensors (quantised or sharded); engine='cuda_graph' tries it"
    if rope:
        return f"a RoPE of type {rope[0].kind}, which looks at positions on the host"
    if torch.is_autocast_enabled(target.device.type):
        return "autocast, which keeps copies of weights"
    counted = counted_experts(target)
    if counted:
        return f"{counted}; 'batched_mm' does not count (target.set_experts_implementation)"
    for name, module in itertools.chain(model.named_modules(), draft.named_modules()):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(is_harmless, hooks)):
            return f"a forward hook on {name or type(model).__name__}, which a replay would not call"
    return None


def start_engine(run: Run) -> StaticStep | None:
    """Returns the step that a run with fixed buffers takes, captured where it can be; `None` is the eager one."""
    if run.generator.draft in _uncaptured:
        return StaticStep(run)
    step = GraphStep(run)
    try:
        step.capture()
    except NotCapturableError as reason:
        logger.warning_once(EAGER.format(reason=reason))
        run.stats.engine = "eager"
        return None
    return step


class GraphStep(StaticStep):
    """A step over a run's fixed buffers, which are on CUDA, replayed from CUDA graphs."""

    name = "cuda_graph"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.settings = _settings(run, self.accepts)
        parts = [run.request.target.parts, run.request.draft_parts]
        if run.generator.drafter is not run.generator.draft:
            parts.append(Inventory.of(run.generator.drafter))
        fingerprint = _fingerprint(run.request.target, parts)
        if run.buffers.graphs is None or run.buffers.graphs.fingerprint != fingerprint:
            run.buffers.graphs = Graphs(fingerprint)
        self.graphs: Graphs = run.buffers.graphs
        self.kept = self.graphs.captured.get(self.settings, Kept())

    def capture(self) -> None:
        """Captures all steps that the run may need and that are not kept, longest first.

        Raises `NotCapturableError` if one cannot be, or there is no memory for it; nothing captured is kept then.
        """
        if self.graphs.reason is not None:
            raise NotCapturableError(self.graphs.reason)
        run = self.run
        bounds = self.bounds()
        unknown = [name for name, value in run.extra.items() if not _is_plain(value)]
        if unknown:
            raise NotCapturableError(f"inputs of the caller's own in every forward: {', '.join(unknown)}")
        captured = self.graphs.captured
        state = run.state
        before = (run.state.done.clone(), run.state.width)
        captured.pop(self.settings, None)
        captured[self.settings] = self.kept
        while len(captured) > MAX_SETTINGS:
            del captured[next(iter(captured))]  # the one that was not asked for the longest
        try:
            # Rows that count as finished: a step changes nothing but scratch.
            state.done.fill_(True)
            widths = run.chooser.widths
            costs: dict[int, float] = {}
            if isinstance(run.chooser, WidthChooser):
                costs = self._find_costs(widths, bounds[0])
                widths = list(costs)
            self._capture_missing(bounds, widths)
        except BaseException as error:
            self.kept.clear()
            captured.clear()
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
                self.graphs.reason = f"no memory left to capture it ({_first_line(error)})"
                raise NotCapturableError(self.graphs.reason) from error
            if isinstance(error, NotCapturableError):
                self.graphs.reason = str(error)
            raise
        finally:
            state.done.copy_(before[0])
            state.width = before[1]
        if isinstance(run.chooser, WidthChooser):
            run.chooser.set_costs(costs)

    def _capture_missing(self, bounds: list[int], widths: list[int]) -> None:
        """Captures what is not kept of these sizes, in this order."""
        for bound, width in itertools.product(bounds, widths):
            if (bound, width) not in self.kept:
                self.run.state.width = width
                with _capturing:
                    self.kept[bound, width] = self.capture_one(bound)

    def _find_costs(self, widths: list[int], bound: int) -> dict[int, float]:
        """Returns the seconds of a step of each width that is worth having, widest first; measured once."""
        if self.kept.costs is None:
            self._capture_missing([bound], widths)
            measured = {width: self.measure(self.kept[bound, width]) for width in widths}
            self.kept.costs = {width: measured[width] for width in useful_widths(measured)}
            for width in measured.keys() - self.kept.costs.keys():
                del self.kept[bound, width]
        return self.kept.costs

    def measure(self, captured: Captured) -> float:
        """Returns the seconds of a replay, by the device's clock; waits for it."""
        captured.graph.replay()  # the first one is also uploaded
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(NUM_TIMED):
            captured.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / NUM_TIMED

    def launch(self, bound: int) -> CausalLMOutputWithPast | None:
        """Replays the step over the first `bound` slots; waits for nothing."""
        captured = self.kept[bound, self.run.state.width]
        captured.graph.replay()
        self.run.state.draft_probs = captured.draft_probs
        return captured.outputs

    def capture_one(self, bound: int) -> Captured:
        """Captures the step over `bound` slots, of the state's width, after running it once on the same stream."""
        if self.graphs.pool is None:
            self.graphs.pool = torch.cuda.graph_pool_handle()
        device = self.run.buffers.shape.device
        pool = self.graphs.pool
        graph, outputs = capture(lambda: self.warm_up(bound), lambda: self.body(bound), device, pool)
        return Captured(graph, outputs, self.run.state.draft_probs)

    def warm_up(self, bound: int) -> None:
        """Runs the step once, uncaptured: under guard if it is the first of its settings and width.

        Raises NotCapturableError if it reads a tensor on the host.
        """
        is_known = any(width == self.run.state.width for _, width in self.kept)
        if is_known:
            self.body(bound)
            return
        try:
            with held(NoHostReads()):
                self.body(bound)
        except HostReadError as error:
            name = type(self.run.request.target.model).__name__
            raise NotCapturableError(f"a step of {name} needs the host ({error})") from error


def _settings(run: Run, accepts: bool) -> Settings:
    """What is baked into a captured step of this run, besides the shapes of its buffers."""
    state = run.state
    generator = run.generator
    options = run.generator.draft.generation_config
    return (
        accepts,
        options.max_matching_ngram_size,
        None if state.key is None else generator.proposal,
        run.request.processors.settings(),
        generator.offset is None,
        ops.forced(),
        tuple(sorted((name, value) for name, value in run.extra.items() if _is_plain(value))),
    )


def _fingerprint(target: Target, parts: Sequence[Inventory]) -> int:
    """A number that changes when weights move or are replaced, or modules are switched.

    `parts` are those of the target, of the draft, and of what drafts in its place.
    """
    found: list[object] = [getattr(target.config, "_experts_implementation", None)]
    for inventory in parts:
        found.extend(_address(tensor) for tensor in (*inventory.weights, *inventory.buffers))
        kinds = list(map(type, inventory.modules))
        found.append(tuple(kinds))
        found.extend(module.training for module in inventory.modules)
        # Layers of PEFT's; a model of Transformers' has a method of that name.
        adapting = {k for k in set(kinds) if hasattr(k, "active_adapters") and not issubclass(k, PreTrainedModel)}
        for module in inventory.modules if adapting else ():
            if type(module) in adapting:
                layer: Any = module
                active = layer.active_adapters
                merged = getattr(layer, "merged_adapters", ())
                is_off = getattr(layer, "disable_adapters", False)
                scaling = getattr(layer, "scaling", None)
                found.append((str(active), str(merged), is_off, str(scaling)))
    return hash(tuple(found))


def _address(tensor: Tensor | None) -> tuple[object, ...]:
    """Says where a tensor's numbers are, and of which type: of a quantised one, which has several, which one it is."""
    if tensor is None:
        return ()
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor.data_ptr() if is_plain else id(tensor), tensor.dtype


def counted_experts(target: Target) -> str | None:
    """Names the experts of a target that are counted on the host, inside an operation of torch's, or `None`."""
    for module in target.parts.modules:
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        weight = next((w for w in module._parameters.values() if w is not None and w.dim() == 3), None)
        if implementation != "grouped_mm" or weight is None or weight.dtype not in _GROUPED_DTYPES:
            continue
        if counts_groups(weight):
            capability = ".".join(map(str, torch.cuda.get_device_capability(weight.device)))
            return (
                f"experts under 'grouped_mm' in {weight.dtype} on compute capability {capability}, which torch counts "
                "on the host but for bfloat16 on 9 and 10"
            )
    return None


def _is_plain(value: object) -> bool:
    """Says whether a value can be part of a graph's settings."""
    return value is None or isinstance(value, bool | int | float | str)


# ---- one capture: what comes before and after it, and what a refused one has left behind


def capture(
    warm_up: Callable[[], object], body: Callable[[], T], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures what `body` launches; returns the graph, whose memory is the pool's, and what `body` returned.

    `warm_up` runs before, on the same stream: at their first calls libraries allocate, and kernels are compiled.
    Raises `NotCapturableError` if CUDA cannot capture it, with generator and allocator as before, and `RuntimeError`
    if the device has failed.
    """
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    _clear_workspaces()
    try:
        # The outer context puts the stream back also where `torch.cuda.graph` fails to: after a refused capture.
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),
            _capturing_on(graph, stream, pool),
        ):
            return graph, body()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        with device_errors_explained():
            torch.cuda.synchronize(device)  # a device that has failed does not get over it
        _end_refused(graph, device, stream, pool)
        raise NotCapturableError(f"CUDA could not capture it ({_first_line(error)})") from error
    finally:
        _clear_workspaces()


def _clear_workspaces() -> None:
    """Lets go of cuBLAS's workspaces: right before a capture and right after it, the graph's is its own.

    Others clear them too (Inductor, before captures of its own). A replay would then write into memory that has
    become someone's tensor, if its workspace was not of the graph's pool, or the pool's went on to be used outside.
    """
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()


def _end_refused(graph: torch.cuda.CUDAGraph, device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """Ends what torch ends behind CUDA's own end of a capture, which has raised.

    Else the generator would refuse every random CUDA operation, and the allocator look for a capture at each call.
    """
    _refused.append(graph)
    end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if end is not None:
        try:
            end(device.index, pool)
        except RuntimeError:
            release = None  # torch has ended it itself, and counts the pool's graphs
        if release is not None:
            release(device.index, pool)
    graph.reset()
    # The generator's flag falls at the end of a capture that works, whatever is captured.
    number = torch.zeros(1, device=device)
    trivial = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream(device)), _capturing_on(trivial, stream):
        number.add_(1)


@contextmanager
def _capturing_on(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Generator[None]:
    """Captures on a stream, begun and ended outside inference mode.

    The first capture makes the tensors of the device's generator, which stay as long as any graph lives. Made in
    inference mode, they could not be changed by captures of others outside of it (pytorch #166792).
    """
    is_inference = torch.is_inference_mode_enabled()
    with (
        torch.inference_mode(False),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        torch.inference_mode(is_inference),
    ):
        yield


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def device_errors_explained() -> Generator[None]:
    """Says what an error of the device means for the process."""
    try:
        yield
    except RuntimeError as error:
        if "CUDA error" not in str(error):  # older releases of torch have no class for them
            raise
        raise RuntimeError(
            f"expected the steps to run on CUDA, got {_first_line(error)}; a device that has failed stays so: restart "
            "the process, and set engine='eager' with CUDA_LAUNCH_BLOCKING=1 to see where it happens"
        ) from error


def _first_line(error: BaseException) -> str:
    """An error's class and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
