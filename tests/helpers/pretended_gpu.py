"""A CUDA device that is not there: models of published shapes without weights, and the step that a graph captures.

Under torch's `FakeTensorMode` every operation is run for the shapes, types and places of what it returns. The prefill
is the engine's own; what it reads on the host is answered here. Then the body of a static step runs as the engine runs
it before a capture, and an operation that depends on data, reads on the host or copies from it raises.

What this cannot see:

* values: texts are the business of `tests/equality`;
* the bodies of custom operations (our kernels, `torch.library` in general): their fake implementations run instead;
* C++ inside an operation. `NoHostReads` has names for what is known to read (`isin`, `linalg.inv`, `_grouped_mm` off
  Hopper and Blackwell or outside bfloat16), anything else passes; and whether a library's own capture works
  (`linalg.solve_triangular` in gated delta nets);
* streams, events, memory, `torch.cuda.graph` itself, time;
* what Transformers does only where `torch.cuda.is_available()`, which stays false, or where packages are installed
  that are not (flash-attn, causal-conv1d, mamba-ssm, flash-linear-attention);
* the prefill's writes into caches, which index by masks and are left out, and its first token.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.initialization import no_init_weights

from dflash_hf import DFlashConfig, DFlashDraftModel, joint_products, ops
from dflash_hf.cache.ragged import RaggedLayer
from dflash_hf.devices import Inventory
from dflash_hf.generation import float8
from dflash_hf.generation import prefill as prefill_module
from dflash_hf.generation.host_reads import NoHostReads
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.request import Request
from dflash_hf.generation.run import Run
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation.user_cache import NoUserCache
from dflash_hf.target_model import known_layers
from dflash_hf.target_model.parts import find_target

PROMPT = 64
LIMIT = 4096
CUDA, META = 1, 14  # c10's numbers of these kinds of devices
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry


class Answers(TorchDispatchMode):
    """Answers the prefill's reads: a number is a prompt's last index, a truth is true.

    Args:
        last (`int`): That index.
    """

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else self.last
        return func(*args, **(kwargs or {}))


@contextmanager
def _device_guard() -> Generator[None]:
    """Gives a build of torch without CUDA a guard of CUDA devices that does nothing: what it has for `meta`.

    Builds with CUDA get one from `FakeTensorMode` where there is no device, and have their own where there is one.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (META + 1)).in_dll(library, GUARDS)
    before = registry[CUDA]
    if before is None:
        registry[CUDA] = registry[META]
    try:
        yield
    finally:
        registry[CUDA] = before


def _commit_nothing(run: Run, outputs: Any) -> None:
    """Stands for the prefill's token, which the host decides."""
    run.state.width = run.generator.verify_width


@contextmanager
def pretended_gpu(capability: tuple[int, int] = (9, 0)) -> Generator[None]:
    """One CUDA device of this compute capability and 1 TB of memory; what is made inside has shapes and no numbers."""
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (10**12, 10**12),
    }
    for asked in (ops._is_recent, ops._can_launch, float8.why_not):
        asked.cache_clear()
    with pytest.MonkeyPatch.context() as patch, _device_guard(), FakeTensorMode():
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(RaggedLayer, "write_rows", lambda *args: None)
        patch.setattr(prefill_module, "_commit_first", _commit_nothing)
        # Weights without numbers are of a class of their own, which would count as quantised.
        patch.setattr(known_layers, "_is_plain", lambda weight: True)
        patch.setattr(joint_products, "_is_plain", lambda weight: True)
        patch.setattr(float8, "_is_plain", lambda weight: True)
        patch.setattr(float8, "_source_of", lambda layer: ())
        yield
    for asked in (ops._is_recent, ops._can_launch, float8.why_not):
        asked.cache_clear()


def build_target(
    config: PreTrainedConfig, experts: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Builds a target on the pretended device."""
    takes_pictures = hasattr(config, "vision_config")
    model_class = AutoModelForImageTextToText if takes_pictures else AutoModelForCausalLM
    with torch.device("cuda"), no_init_weights():
        model = model_class.from_config(config, dtype=dtype).eval()
    if experts is not None:
        model.set_experts_implementation(experts)
    return model


def build_draft(config: DFlashConfig) -> DFlashDraftModel:
    """Builds a draft in bfloat16 on the pretended device."""
    with torch.device("cuda"), no_init_weights():
        return DFlashDraftModel._from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def begin(
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    batch: int = 1,
    processors: Any = (),
    do_sample: bool = False,
    prompt: int = PROMPT,
    limit: int = LIMIT,
    inputs: dict[str, Any] | None = None,
) -> Run:
    """Runs the engine's prefill over prompts of the pretended device, for `limit` new tokens.

    Args:
        inputs (`dict`, *optional*): More of what `generate` hands over.
    """
    ids: Any = torch.zeros(batch, prompt, dtype=torch.long, device="cuda")
    settings = GenerationConfig(max_length=prompt + limit, do_sample=do_sample)
    settings._pad_token_tensor = None
    kwargs: dict[str, Any] = {"use_cache": True, **(inputs or {})}
    if hasattr(model.config, "vision_config"):
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(
            ids, {"input_ids": ids, **kwargs}
        )
    criteria = [
        MaxLengthCriteria(prompt + limit),
        EosTokenCriteria(torch.tensor([1, 2], device="cuda")),
    ]
    with Answers(prompt - 1):
        request = Request(
            target=find_target(model),
            draft=draft,
            draft_parts=Inventory.of(draft),
            ranks=Ranks(model),
            streamer=None,
            cache=None,
            started=0.0,
            input_ids=ids,
            given_on=ids.device,
            processors=BlockProcessors(LogitsProcessorList(processors)),
            criteria=StoppingCriteriaList(criteria),
            config=settings,
        )
        return prefill_module.prefill(request, kwargs, NoUserCache(), keeps_buffers=True)


@dataclass(slots=True)
class Step:
    """What a step has done.

    Args:
        calls (`Counter[str]`): Operations that ran, how often each.
        written (`dict[str, bool]`): Whether it has written into each of the buffers that it must leave changed.
        decides (`bool`): Whether it ends by itself.
    """

    calls: Counter[str]
    written: dict[str, bool]
    decides: bool

    def num(self, name: str) -> int:
        """Returns how often an operation ran whose name has this in it."""
        return sum(count for other, count in self.calls.items() if name in other)


class _Count(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":
            self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def captured_step(run: Run) -> Step:
    """Runs the body of a step as the engine runs it before a capture, under guard.

    Raises:
        HostReadError: At the first operation that needs the host.
    """
    step = StaticStep(run)
    state = run.state
    changed = {"proposals": state.whole_block}
    if step.accepts:
        changed |= {
            "draft": state.draft_ids,
            "outcome": state.outcome,
            "ids": state.ids,
            "lengths": state.lengths,
        }
    caches = {"target": run.cache, "draft": run.generator.draft_cache}
    changed |= {
        f"{name} cache {i}": t
        for name, cache in caches.items()
        for i, t in enumerate(_written_by_step(cache))
    }
    before = {name: tensor._version for name, tensor in changed.items()}
    with torch.inference_mode(), _Count() as count, NoHostReads():
        step.body(step.bound(1))
    return Step(
        count.calls, {name: t._version > before[name] for name, t in changed.items()}, step.accepts
    )


def _written_by_step(cache: Any) -> list[Tensor]:
    """The buffers of a cache that every step writes."""
    constant = [t for group in cache.groups for t in (group._steps, group._columns)]
    empty = [group.projections for group in cache.groups if not group.projections.numel()]
    return [t for t in cache.buffers() if not any(t is other for other in (*constant, *empty))]
