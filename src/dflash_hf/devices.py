"""Where a module computes, also when its weights are not there: accelerate's offload and `torch.compile`.

Offloaded weights live on `meta` between calls; accelerate's hooks, which every offloaded module with weights of its
own carries as `_hf_hook`, bring them in around its forward.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from dflash_hf.scopes import undoing

logger: Any = logging.get_logger(__name__)


def execution_device(module: nn.Module) -> torch.device:
    """Returns the device a module's first weight is on while it computes.

    Raises:
        ValueError: If that weight is on `meta` and nothing brings it in.
    """
    for part in module.modules():  # one by one: the first few decide
        weight = _first_weight(part)
        if weight is None:
            continue
        if weight.device.type != "meta":
            return weight.device
        device = next(
            (h.execution_device for h in _hooks(part) if getattr(h, "execution_device", None) is not None), None
        )
        if device is not None:
            return torch.device(device)
        break
    raise ValueError(
        f"expected weights in {type(module).__name__}, got none, or only on the device 'meta' without accelerate's "
        "hooks; load the model with from_pretrained"
    )


def _first_weight(module: nn.Module) -> Tensor | None:
    return next((weight for weight in module._parameters.values() if weight is not None), None)


class Inventory(NamedTuple):
    """All modules of a model, and what is on them, from one walk: they are far apart in memory.

    Args:
        modules (`list[nn.Module]`): Itself first, each once.
        weights, buffers (`list[torch.Tensor]`): Theirs, and `None` for those that are left out.
        altered (`list[nn.Module]`): Those with hooks, or with a forward or a compiled call of their own.
    """

    modules: list[nn.Module]
    weights: list[Tensor | None]
    buffers: list[Tensor | None]
    altered: list[nn.Module]

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        """Walks through a model, level by level: in a fraction of the time that `model.modules()` takes."""
        modules, seen = [model], {model}
        found = cls(modules, [], [], [])
        for module in modules:
            own = module.__dict__
            if children := own["_modules"]:
                for child in children.values():
                    if child is not None and child not in seen:
                        seen.add(child)
                        modules.append(child)
            if weights := own["_parameters"]:
                found.weights.extend(weights.values())
            if buffers := own["_buffers"]:
                found.buffers.extend(buffers.values())
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_compiled_call_impl" in own:
                found.altered.append(module)
        return found


def execution_devices(parts: Inventory) -> set[torch.device]:
    """Returns every device that those of a model's modules compute on that have weights of their own."""
    found = {weight.device for weight in parts.weights if weight is not None}
    if not any(device.type == "meta" for device in found):
        return found
    weights = {part: weight for part in parts.modules for weight in part._parameters.values() if weight is not None}
    return {
        execution_device(part) if weight.device.type == "meta" else weight.device for part, weight in weights.items()
    }


def free_memory(device: torch.device) -> int | None:
    """Returns how many bytes can still be allocated on a device; `None` where that is not known.

    On CUDA what the driver has free and what torch has reserved without using it; on a CPU all of its memory, because
    other programs give theirs back.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    return total_memory(device) if device.type == "cpu" else None


def total_memory(device: torch.device) -> int | None:
    """Returns the bytes of memory that a device has; `None` where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return _host_memory() if device.type == "cpu" else None


@functools.cache
def _host_memory() -> int | None:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def plain_tensors() -> AbstractContextManager[Any]:
    """Has what is made in it be no inference tensors: the next call may be outside inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def brought_in(module: nn.Module) -> Generator[None]:
    """Has a module's own weights on its execution device, for a use of them that is not a call of the module."""
    hooks = [hook for hook in _hooks(module) if getattr(hook, "offload", False)]
    for hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.post_forward(module, None)


def raw_embeddings(embedding: nn.Module, token_ids: Tensor) -> Tensor:
    """Looks ids `[...]` up in an embedding's weight as it stands there, wherever that is: `[..., D]`.

    What the embedding's own forward does to them (Gemma scales them) is left out.
    """
    with brought_in(embedding):
        weight: Any = embedding.weight
        if not hasattr(weight, "device_mesh"):
            return nn.functional.embedding(token_ids, weight)
        # Shared among processes, each of which has some of its rows.
        from torch.distributed.tensor import DTensor, Replicate

        replicated = DTensor.from_local(token_ids, weight.device_mesh, [Replicate()], run_check=False)
        found: Any = nn.functional.embedding(replicated, weight)
        return found.full_tensor()


def _hooks(module: nn.Module) -> list[Any]:
    """The accelerate hooks of a module: one, or several in a `SequentialHook`."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return []
    return list(getattr(hook, "hooks", [hook]))


def is_offloaded(module: nn.Module) -> bool:
    """Returns True if weights of a module or its parts are brought in for each call."""
    return any(getattr(hook, "offload", False) for part in module.modules() for hook in _hooks(part))


def is_compiled(parts: Inventory) -> bool:
    """Returns True if a call of one of these modules runs code of `torch.compile`, however that was asked for."""
    if any(hasattr(kind, "_torchdynamo_orig_callable") for kind in set(map(type, parts.modules))):
        return True
    for part in parts.altered:
        own = part.__dict__
        if ("_compiled_call_impl" in own and own["_compiled_call_impl"] is not None) or "_orig_mod" in own["_modules"]:
            return True
        if "forward" in own and any(
            hasattr(own.get(name), "_torchdynamo_orig_callable") for name in ("forward", "_old_forward")
        ):
            return True
    return False


_forcing = threading.Lock()
_forced: set[object] = set()
_stance: Any = None


@contextmanager
def eagerly(*models: Inventory) -> Generator[None]:
    """Runs compiled models as they were before `torch.compile`; does nothing where none is compiled.

    Compiled code runs no hooks that were added later, so it cannot be tapped. The stance is one for all threads: the
    first run sets it and the last one puts it back, and what other threads have compiled runs eagerly meanwhile.
    """
    compiled = [type(parts.modules[0]).__name__ for parts in models if is_compiled(parts)]
    if not compiled:
        yield
        return
    logger.warning_once(
        f"{' and '.join(compiled)} runs eagerly with a DFlash draft: hooks that record hidden states do not run in "
        "code of torch.compile"
    )
    run = object()

    def put_back() -> None:
        with _forcing:
            _forced.discard(run)
            _set_stance()

    with undoing(put_back):
        with _forcing:
            _forced.add(run)
            _set_stance()
        yield


def _set_stance() -> None:
    """Sets the stance for the first run that needs it and restores it after the last."""
    global _stance
    if _forced and _stance is None:
        _stance = torch.compiler.set_stance("force_eager")
    elif not _forced and _stance is not None:
        _stance.__exit__(None, None, None)
        _stance = None
