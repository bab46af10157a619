"""This module decides whether steps can be captured as CUDA graphs, and captures, replays and keeps the graphs.

One graph replays one step. A graph belongs to a set of fixed buffers, a number of K/V slots that it reads (all slots,
if the attention reads the lengths on the device), a number of tokens that it verifies, and the settings that are baked
into it (`_settings`). All graphs that a run may need are captured before its first step, longest and widest first,
into one pool of memory. If the width is chosen during the run, the longest graphs are replayed to measure each width's
cost. Widths that save nothing are dropped. A capture runs the step over rows that count as ended, which changes only
scratch memory. A graph holds the addresses of weights. So steps are captured again if a weight has moved or a module
computes something else (`fingerprint_of`, `Code`).

`capture.py` captures one graph. A process runs one capture at a time in this module.
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
# The number of settings whose graphs are kept. Each may have graphs of several lengths and widths. For example, two
# sampling temperatures are two settings.
MAX_SETTINGS = 4
EAGER = "Steps with a DFlash draft run eagerly, not as CUDA graphs: {reason}"
# The number of replays that are timed to measure a width's cost.
NUM_TIMED = 3
# Captures run one at a time, because the beginning of a capture returns memory to the driver.
_capturing = threading.Lock()
# The dtypes of experts that torch itself multiplies. Quantised experts have their own functions.
_GROUPED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The types of the settings that modules keep as attributes.
_PLAIN_TYPES = frozenset((bool, int, float, str))
# A number for each forward that a user has put on a module. The references are weak, because a bound forward keeps its
# model alive.
_known_code = weakref.WeakKeyDictionary[Any, int]()
_code_numbers = itertools.count(1)


def why_not(target: Target, draft: DFlashDraftModel) -> str:
    """Returns why steps of this pair cannot be captured, or an empty text if no reason shows without running one."""
    model = target.model
    # A graph holds addresses, and offloaded weights have a new address in every forward.
    if is_offloaded(model) or is_offloaded(draft):
        return "weights that are offloaded"
    # A graph runs on one device only.
    parts = [*target.layers, target.embedding, target.head, draft]
    devices = {device for part in parts for device in execution_devices(Inventory.of(part))}
    if len(devices) > 1:
        return "parts on several devices"
    is_asked_for = draft.generation_config.engine == "cuda_graph"
    # Kernels of quantised or sharded weights may read on the host. Only a capture that is tried shows this.
    if not target.takes_inference_mode and not is_asked_for:
        return (
            "weights that are no plain tensors (quantised or sharded); engine='cuda_graph' tries it"
        )
    if target.facts.ropes:
        rope = target.facts.ropes[0]
        return f"a RoPE of type {rope.kind}, which looks at positions on the host"
    # A graph may live longer than the copies of weights, which end with the context of autocast.
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
    """Returns the captured step of a run with fixed buffers, or `None` if the steps must run eagerly."""
    step = GraphStep(run)
    try:
        step.capture()
    except NotCapturableError as reason:
        logger.warning_once(EAGER.format(reason=reason))
        run.stats.engine = "eager"
        return None
    return step


class GraphStep(StaticStep):
    """Runs steps over a run's fixed buffers on CUDA, by replays of CUDA graphs."""

    name = "cuda_graph"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.settings = _settings(run, self.accepts)
        # An FP8 copy of the draft shares modules with the draft, and has its own weights.
        parts = [run.request.target.parts, run.request.draft_parts]
        if run.generator.drafter is not run.generator.draft:
            parts.append(Inventory.of(run.generator.drafter))
        found = fingerprint_of(run.request.target, parts)
        # Graphs that were captured with other weights, switches or code would give another text.
        graphs = run.buffers.graphs
        if graphs.fingerprint != found or not graphs.code.is_same():
            kinds = {type(module) for inventory in parts for module in inventory.modules}
            run.buffers.graphs = Graphs(found, Code(kinds))
        self.graphs = run.buffers.graphs
        self.kept = self.graphs.captured.get(self.settings, Kept())

    def capture(self) -> None:
        """Captures all steps that the run may need and that are not kept yet, longest first.

        Raises `NotCapturableError` if a step cannot be captured or there is no memory for it. If a step needs the
        host, the graphs of these settings are dropped, else all graphs over the buffers.
        """
        graphs = self.graphs
        # A capture that has failed once over these buffers and models would fail again, after the same work.
        reason = graphs.reason or graphs.needing_host.get(self.settings, "")
        if reason:
            raise NotCapturableError(reason)
        unknown = [name for name, value in self.run.extra.items() if not _is_plain(value)]
        if unknown:
            raise NotCapturableError(
                f"inputs of the caller's own in every forward: {', '.join(unknown)}"
            )
        # The settings move to the end of the dict, so that the first ones are the least recently used.
        graphs.captured.pop(self.settings, None)
        graphs.captured[self.settings] = self.kept
        while len(graphs.captured) > MAX_SETTINGS:
            del graphs.captured[next(iter(graphs.captured))]
        try:
            with _finished_rows(self.run):
                self._capture_all()
        except HostNeededError as error:
            # Graphs of other settings stay, because their steps may not need the host.
            del graphs.captured[self.settings]
            graphs.needing_host[self.settings] = str(error)
            raise
        except BaseException as error:
            # All graphs of a pool are dropped together, also if an interrupt comes between two captures.
            self.kept.clear()
            self.kept.costs.clear()
            graphs.captured.clear()
            if isinstance(error, torch.OutOfMemoryError):
                # The pool's memory is returned to the driver, for the eager steps that follow.
                torch.cuda.empty_cache()
                graphs.reason = f"no memory left to capture it ({first_line(error)})"
                raise NotCapturableError(graphs.reason) from error
            if isinstance(error, NotCapturableError):
                graphs.reason = str(error)
            raise

    def _capture_all(self) -> None:
        """Captures the steps of all widths of the run. If the run chooses widths, only useful widths are kept."""
        chooser = self.run.chooser
        bounds = self.bounds()
        widths = chooser.widths
        # For a fixed width no costs are measured.
        if not isinstance(chooser, WidthChooser):
            self._capture_missing(bounds, widths)
            return
        costs = self._find_costs(widths, bounds[0])
        self._capture_missing(bounds, list(costs))
        chooser.set_costs(costs)

    def _capture_missing(self, bounds: list[int], widths: list[int]) -> None:
        """Captures the steps of these sizes that are not kept yet, in this order."""
        for bound, width in itertools.product(bounds, widths):
            if (bound, width) not in self.kept:
                # The captured views of block and tokens depend on the width.
                self.run.state.width = width
                with _capturing:
                    self.kept[bound, width] = self.capture_one(bound)

    def _find_costs(self, widths: list[int], bound: int) -> dict[int, float]:
        """Returns the seconds of a step of each useful width, widest first. They are measured once."""
        kept = self.kept
        if not kept.costs:
            # The steps are measured at the longest bound, where a verify costs the most.
            self._capture_missing([bound], widths)
            measured = {width: self.measure(kept[bound, width]) for width in widths}
            kept.costs = {width: measured[width] for width in useful_widths(measured)}
            for width in measured.keys() - kept.costs.keys():
                del kept[bound, width]
        return kept.costs

    def measure(self, captured: Captured) -> float:
        """Returns the seconds of a replay by the device's clock, and waits for the replays."""
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
        """Replays the step over the first `bound` slots. It does not wait for the device."""
        captured = self.kept[bound, self.run.state.width]
        captured.graph.replay()
        # The graph writes into the tensor that the state had during the capture.
        self.run.state.draft_probs = captured.draft_probs
        return captured.outputs

    def capture_one(self, bound: int) -> Captured:
        """Captures the step of the state's width over `bound` slots, after one run of it on the same stream."""
        if self.graphs.pool is None:
            self.graphs.pool = torch.cuda.graph_pool_handle()
        device = self.run.buffers.shape.device
        pool = self.graphs.pool
        graph, outputs = capture(
            lambda: self.warm_up(bound), lambda: self.body(bound), device, pool
        )
        return Captured(graph, outputs, self.run.state.draft_probs, self.run.request.processors)

    def warm_up(self, bound: int) -> None:
        """Runs the step once without capturing it.

        The first step of its settings and width runs under [`NoHostReads`]. Raises `HostNeededError` if this step
        reads a tensor on the host.
        """
        # A step of another length runs the same operations, so that the guard would find nothing new.
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
    """Marks all rows as ended for a while, so that a step changes only scratch memory."""
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
    """Returns the settings that are baked into a captured step of this run, apart from the shapes of its buffers."""
    generator = run.generator
    options = generator.draft.generation_config
    proposal = "greedy"
    if run.state.host.is_sampled:
        proposal = generator.proposal
    # The caller's own inputs have no tensors here. Tensors were refused, because their addresses would be captured.
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
    """Returns a number that changes if weights move or are replaced, or if modules are replaced, switched or changed.

    `parts` are the inventories of the target, of the draft, and of a copy that drafts in its place. The number does
    not depend on the code of the modules' classes; see `Code`.
    """
    experts = getattr(target.config, "_experts_implementation", None)
    found: list[object] = [experts, joint_products.chosen()]
    # Every call reads all modules. So plain values are collected in a list, which is hashed once at the end.
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
        # The classes are checked first, because there are few classes and many modules.
        adapting = {kind for kind in set(kinds) if _is_adapting(kind)}
        if adapting:
            found.extend(
                _adapters_of(module) for module in inventory.modules if type(module) in adapting
            )
    return hash(tuple(found))


def _settings_of(module: nn.Module) -> tuple[object, ...]:
    """Returns the plain attributes of a module, such as its training mode, epsilon, sizes and factors."""
    return tuple(value for value in vars(module).values() if type(value) in _PLAIN_TYPES)


def _number_of_code(code: Any) -> int:
    """Returns the number of a forward that was put on a module. No other such forward in the process has it."""
    # The address is not enough, because a new forward may get the address of a freed one.
    try:
        return _known_code.setdefault(code, next(_code_numbers))
    except TypeError:  # an object of a class without weak references
        return -id(code)


def _is_adapting(kind: type) -> bool:
    """Returns True for a class of PEFT's layers. Models of Transformers have the same method, and are excluded."""
    return hasattr(kind, "active_adapters") and not issubclass(kind, PreTrainedModel)


def _adapters_of(layer: Any) -> tuple[object, ...]:
    """Returns the switches of one of PEFT's layers."""
    active = layer.active_adapters
    merged = getattr(layer, "merged_adapters", ())
    is_off = getattr(layer, "disable_adapters", False)
    scaling = getattr(layer, "scaling", None)
    return str(active), str(merged), is_off, str(scaling)


def _address(tensor: Tensor | None) -> tuple[object, ...]:
    """Returns the address, dtype, shape and strides of a tensor."""
    if tensor is None:
        return ()
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    if is_plain:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    # A tensor subclass, such as a quantised tensor, may have several addresses.
    return id(tensor), tensor.dtype


def counted_experts(target: Target) -> str:
    """Returns the reason why torch counts the tokens of experts on the host, or an empty text if it does not."""
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
