"""One CUDA graph per step: whether steps can be captured, and the graphs that are captured, replayed and kept.

A graph belongs to fixed buffers, a number of K/V slots that are read (all of them, where the attention reads lengths
on the device), a number of tokens that are verified, and settings baked into it (`_settings`). All graphs that a run
may need are captured before its first step, longest and widest first, into one pool of memory. Where the width is to
be chosen, the longest are replayed to measure each width's cost, and widths that save nothing are dropped. Capturing
runs the step over rows that count as finished, which changes nothing but scratch. A graph holds addresses of weights:
where a weight has moved, or a module computes something else, it is captured again (`fingerprint_of`, `Code`).

`capture.py` makes one graph. A process has one capture at a time here.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf import joint_products, ops
from dflash_hf.devices import Inventory, execution_devices, is_offloaded
from dflash_hf.errors import first_line
from dflash_hf.generation.capture import HostNeededError, NotCapturableError, capture
from dflash_hf.generation.choice_costs import useful_widths
from dflash_hf.generation.graphs import Captured, Graphs, Kept, Settings
from dflash_hf.generation.host_reads import HostReadError, NoHostReads, counts_groups
from dflash_hf.generation.run import Run
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation.widths import WidthChooser
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.fast_by_kernels import multiplies_in_tf32
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.user_code import Code, has_own_forward, is_harmless
from dflash_hf.undo import held

logger: Any = logging.get_logger(__name__)
# Settings whose graphs are kept, for several lengths each; every sampling temperature is a setting of its own.
MAX_SETTINGS = 4
EAGER = "Steps with a DFlash draft run eagerly, not as CUDA graphs: {reason}"
# Replays that are timed to measure a width's cost.
NUM_TIMED = 3
# One capture at a time: the beginning of one returns memory to the driver.
_capturing = threading.Lock()
# Dtypes of experts that torch itself multiplies; quantised ones have functions of their own.
_GROUPED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Types of the settings that modules keep as attributes.
_PLAIN_TYPES = frozenset((bool, int, float, str))
# Forwards that users have put on modules, and a number for each. They are not held: a bound one holds its model.
_known_code = weakref.WeakKeyDictionary[Any, int]()
_code_numbers = itertools.count(1)


def why_not(target: Target, draft: DFlashDraftModel) -> str:
    """Returns why steps of this pair cannot be captured, as far as it shows without running one, or an empty text."""
    model = target.model
    # A graph holds addresses, and such weights have a new one in every forward.
    if is_offloaded(model) or is_offloaded(draft):
        return "weights that are offloaded"
    # One graph is of one device.
    parts = [*target.layers, target.embedding, target.head, draft]
    devices = {device for part in parts for device in execution_devices(Inventory.of(part))}
    if len(devices) > 1:
        return "parts on several devices"
    is_asked_for = draft.generation_config.engine == "cuda_graph"
    # Their kernels may read on the host, which shows only when a step is tried.
    if not target.takes_inference_mode and not is_asked_for:
        return (
            "weights that are no plain tensors (quantised or sharded); engine='cuda_graph' tries it"
        )
    if target.facts.ropes:
        rope = target.facts.ropes[0]
        return f"a RoPE of type {rope.kind}, which looks at positions on the host"
    # The copies live as long as the context of autocast, and a graph longer.
    if torch.is_autocast_enabled(target.device.type):
        return "autocast, which keeps copies of weights"
    counted = counted_experts(target)
    if counted:
        return f"{counted}; 'batched_mm' does not count (target.set_experts_implementation)"
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "a forward hook on all modules, which a replay would not call"
    for name, module in itertools.chain(model.named_modules(), draft.named_modules()):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(is_harmless, hooks)):
            return (
                f"a forward hook on {name or type(model).__name__}, which a replay would not call"
            )
    return ""


def start_engine(run: Run) -> StaticStep | None:
    """Returns the step that a run with fixed buffers takes, captured where it can be; `None` is the eager one."""
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
        # A copy of the draft in FP8 shares modules with it and has weights of its own.
        parts = [run.request.target.parts, run.request.draft_parts]
        if run.generator.drafter is not run.generator.draft:
            parts.append(Inventory.of(run.generator.drafter))
        found = fingerprint_of(run.request.target, parts)
        # Graphs of other weights, switches or code would give another text.
        graphs = run.buffers.graphs
        if graphs.fingerprint != found or not graphs.code.is_same():
            kinds = {type(module) for inventory in parts for module in inventory.modules}
            run.buffers.graphs = Graphs(found, Code(kinds))
        self.graphs = run.buffers.graphs
        self.kept = self.graphs.captured.get(self.settings, Kept())

    def capture(self) -> None:
        """Captures all steps that the run may need and that are not kept, longest first.

        Raises `NotCapturableError` if one cannot be, or there is no memory for it; nothing captured is kept then.
        """
        graphs = self.graphs
        # What failed once over these buffers and models would fail again, after the same work.
        reason = graphs.reason or graphs.needing_host.get(self.settings, "")
        if reason:
            raise NotCapturableError(reason)
        unknown = [name for name, value in self.run.extra.items() if not _is_plain(value)]
        if unknown:
            raise NotCapturableError(
                f"inputs of the caller's own in every forward: {', '.join(unknown)}"
            )
        # The settings go last: the first ones are those that were not asked for the longest.
        graphs.captured.pop(self.settings, None)
        graphs.captured[self.settings] = self.kept
        while len(graphs.captured) > MAX_SETTINGS:
            del graphs.captured[next(iter(graphs.captured))]
        try:
            with _finished_rows(self.run):
                self._capture_all()
        except HostNeededError as error:
            # Graphs of other settings stay: their steps need not do what this one does.
            del graphs.captured[self.settings]
            graphs.needing_host[self.settings] = str(error)
            raise
        except BaseException as error:
            # Graphs of one pool are kept or given up together, also where an interrupt comes between two of them.
            self.kept.clear()
            self.kept.costs.clear()
            graphs.captured.clear()
            if isinstance(error, torch.OutOfMemoryError):
                # The pool's memory goes back to the driver, for the eager steps that follow.
                torch.cuda.empty_cache()
                graphs.reason = f"no memory left to capture it ({first_line(error)})"
                raise NotCapturableError(graphs.reason) from error
            if isinstance(error, NotCapturableError):
                graphs.reason = str(error)
            raise

    def _capture_all(self) -> None:
        """Captures the steps of the run's widths, or of those widths that are worth having where the run chooses."""
        chooser = self.run.chooser
        bounds = self.bounds()
        widths = chooser.widths
        # A fixed width has no costs to be measured.
        if not isinstance(chooser, WidthChooser):
            self._capture_missing(bounds, widths)
            return
        costs = self._find_costs(widths, bounds[0])
        self._capture_missing(bounds, list(costs))
        chooser.set_costs(costs)

    def _capture_missing(self, bounds: list[int], widths: list[int]) -> None:
        """Captures the steps of these sizes that are not kept, in this order."""
        for bound, width in itertools.product(bounds, widths):
            if (bound, width) not in self.kept:
                # The views of block and tokens that are captured follow from it.
                self.run.state.width = width
                with _capturing:
                    self.kept[bound, width] = self.capture_one(bound)

    def _find_costs(self, widths: list[int], bound: int) -> dict[int, float]:
        """Returns the seconds of a step of each width that is worth having, widest first; measured once."""
        kept = self.kept
        if not kept.costs:
            # At the longest bound, where a verify costs the most.
            self._capture_missing([bound], widths)
            measured = {width: self.measure(kept[bound, width]) for width in widths}
            kept.costs = {width: measured[width] for width in useful_widths(measured)}
            for width in measured.keys() - kept.costs.keys():
                del kept[bound, width]
        return kept.costs

    def measure(self, captured: Captured) -> float:
        """Returns the seconds of a replay, by the device's clock; waits for it."""
        # The first replay also uploads the graph.
        captured.graph.replay()
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
        # The graph has written into its own tensor, which the state had when it was captured.
        self.run.state.draft_probs = captured.draft_probs
        return captured.outputs

    def capture_one(self, bound: int) -> Captured:
        """Captures the step over `bound` slots, of the state's width, after running it once on the same stream."""
        if self.graphs.pool is None:
            self.graphs.pool = torch.cuda.graph_pool_handle()
        device = self.run.buffers.shape.device
        pool = self.graphs.pool
        graph, outputs = capture(
            lambda: self.warm_up(bound), lambda: self.body(bound), device, pool
        )
        return Captured(graph, outputs, self.run.state.draft_probs, self.run.request.processors)

    def warm_up(self, bound: int) -> None:
        """Runs the step once, uncaptured: under guard if it is the first of its settings and width.

        Raises HostNeededError if it reads a tensor on the host.
        """
        # Another length runs the same operations, in which the guard would find nothing new.
        is_known = any(width == self.run.state.width for _, width in self.kept)
        if is_known:
            self.body(bound)
            return
        try:
            with held(NoHostReads()):
                self.body(bound)
        except HostReadError as error:
            name = type(self.run.request.target.model).__name__
            raise HostNeededError(f"a step of {name} needs the host ({error})") from error


@contextmanager
def _finished_rows(run: Run) -> Generator[None]:
    """Has all rows count as finished for a while: a step changes nothing but scratch then."""
    state = run.state
    done = state.done.clone()
    width = state.width
    try:
        state.done.fill_(True)
        yield
    finally:
        state.done.copy_(done)
        state.width = width


def _settings(run: Run, accepts: bool) -> Settings:
    """Returns the settings that are baked into a captured step of this run, besides the shapes of its buffers."""
    generator = run.generator
    options = generator.draft.generation_config
    proposal = "greedy"
    if run.state.host.is_sampled:
        proposal = generator.proposal
    # Inputs of the caller's own that are tensors were refused: their addresses would be captured.
    keywords = [(name, value) for name, value in run.extra.items() if _is_plain(value)]
    return (
        accepts,
        options.max_matching_ngram_size,
        proposal,
        run.request.processors.settings(),
        generator.newest.has_offset,
        ops.forced(),
        _rounding_of_products(),
        tuple(sorted(keywords)),
    )


def _rounding_of_products() -> tuple[object, ...]:
    """Returns torch's switches that say how products on CUDA may round."""
    switches = torch.backends.cuda.matmul
    return (
        multiplies_in_tf32(),
        switches.allow_fp16_reduced_precision_reduction,
        switches.allow_bf16_reduced_precision_reduction,
    )


def fingerprint_of(target: Target, parts: Sequence[Inventory]) -> int:
    """Returns a number that changes when weights move or are replaced, or modules are switched or changed.

    `parts` are the inventories of the target, of the draft, and of a copy that drafts in its place. What classes
    compute by is no part of it; see `Code`.
    """
    experts = getattr(target.config, "_experts_implementation", None)
    found: list[object] = [experts, joint_products.chosen()]
    # Everything is looked at in every call: a list of plain values is hashed once, at the end.
    for inventory in parts:
        found.extend(_address(tensor) for tensor in (*inventory.weights, *inventory.buffers))
        kinds = list(map(type, inventory.modules))
        found.append(tuple(kinds))
        found.extend(map(_settings_of, inventory.modules))
        found.extend(
            _number_of_code(module.forward)
            for module in inventory.altered
            if has_own_forward(module)
        )
        # Looked for by class first: there are few classes and many modules.
        adapting = {kind for kind in set(kinds) if _is_adapting(kind)}
        if adapting:
            found.extend(
                _adapters_of(module) for module in inventory.modules if type(module) in adapting
            )
    return hash(tuple(found))


def _settings_of(module: nn.Module) -> tuple[object, ...]:
    """Returns the numbers and names that a module has: whether it is in training, its epsilon, sizes and factors."""
    return tuple(value for value in vars(module).values() if type(value) in _PLAIN_TYPES)


def _number_of_code(code: Any) -> int:
    """Returns a number that no other forward of a module's own has had in this process."""
    # Its address would not do: a forward that takes the place of a freed one may have the same.
    try:
        return _known_code.setdefault(code, next(_code_numbers))
    except TypeError:  # an object of a class that nothing can refer to weakly
        return -id(code)


def _is_adapting(kind: type) -> bool:
    """Returns True for a class of PEFT's layers; models of Transformers have a method of the same name."""
    return hasattr(kind, "active_adapters") and not issubclass(kind, PreTrainedModel)


def _adapters_of(layer: Any) -> tuple[object, ...]:
    """Returns the switches of one of PEFT's layers."""
    active = layer.active_adapters
    merged = getattr(layer, "merged_adapters", ())
    is_off = getattr(layer, "disable_adapters", False)
    scaling = getattr(layer, "scaling", None)
    return str(active), str(merged), is_off, str(scaling)


def _address(tensor: Tensor | None) -> tuple[object, ...]:
    """Returns where a tensor's numbers are, their dtype and how they are laid out."""
    if tensor is None:
        return ()
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    if is_plain:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    # A quantised tensor has several addresses.
    return id(tensor), tensor.dtype


def counted_experts(target: Target) -> str:
    """Returns which experts an operation of torch counts on the host, or an empty text."""
    for module in target.parts.modules:
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if implementation != "grouped_mm":
            continue
        weights = [
            weight
            for weight in module._parameters.values()
            if weight is not None and weight.dim() == 3
        ]
        if not weights or weights[0].dtype not in _GROUPED_DTYPES:
            continue
        weight = weights[0]
        if counts_groups(weight):
            capability = ".".join(map(str, torch.cuda.get_device_capability(weight.device)))
            return (
                f"experts under 'grouped_mm' in {weight.dtype} on compute capability {capability}, which torch counts "
                "on the host but for bfloat16 on 9 and 10"
            )
    return ""


def _is_plain(value: object) -> bool:
    """Returns True if a value can be part of a graph's settings."""
    return value is None or isinstance(value, bool | int | float | str)
