"""This module finds the device on which a module computes, and handles accelerate's offload and `torch.compile`.

Offloaded weights are on the device `meta` between calls. Every offloaded module with weights of its own has hooks of
accelerate in its attribute `_hf_hook`. These hooks load the weights before its forward and remove them after it.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from transformers.utils import logging

from dflash_hf.errors import first_line
from dflash_hf.undo import shared

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger: Any = logging.get_logger(__name__)


def execution_device(module: nn.Module) -> torch.device:
    """Returns the device on which a module's first weight is used.

    Raises `ValueError` if the weight stays on `meta`.
    """
    for part in module.modules():  # a loop, because the first few modules are usually enough
        weight = next((weight for weight in part._parameters.values() if weight is not None), None)
        if weight is None:
            continue
        if weight.device.type != "meta":
            return weight.device
        device = next(
            (
                h.execution_device
                for h in _hooks(part)
                if getattr(h, "execution_device", None) is not None
            ),
            None,
        )
        if device is not None:
            return torch.device(device)
        break
    raise ValueError(
        f"expected weights in {type(module).__name__}, got none, or only on the device 'meta' without accelerate's "
        "hooks; load the model with from_pretrained"
    )


class Inventory(NamedTuple):
    """An inventory lists all modules of a model with their weights, buffers and changes.

    It is made in one walk, because the modules are far apart in memory.
    """

    modules: list[nn.Module]  # the model itself first, each module once
    # The weights and buffers of these modules, and `None` for those that a module leaves out.
    weights: list[Tensor | None]
    buffers: list[Tensor | None]
    altered: list[nn.Module]  # those with hooks, or with a forward or a compiled call of their own

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        """Lists a model level by level. This takes a fraction of the time that `model.modules()` takes."""
        modules = [model]
        seen = {model}
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
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or "forward" in own
                or "_compiled_call_impl" in own
            ):
                found.altered.append(module)
        return found


def num_writes(tensor: Tensor) -> int:
    """Returns how many writes to a tensor torch has counted. Writes to inference tensors are not counted."""
    if tensor.is_inference():
        return 0
    return tensor._version


def execution_devices(parts: Inventory) -> set[torch.device]:
    """Returns the devices on which a model's modules compute that have weights of their own."""
    found = {weight.device for weight in parts.weights if weight is not None}
    if not any(device.type == "meta" for device in found):
        return found
    weights = {
        part: weight
        for part in parts.modules
        for weight in part._parameters.values()
        if weight is not None
    }
    return {
        execution_device(part) if weight.device.type == "meta" else weight.device
        for part, weight in weights.items()
    }


def accelerator() -> torch.device | None:
    """Returns this machine's accelerator, without an index, or `None` if there is none.

    A build of torch for an accelerator names it also if it cannot be used because there is no card or no driver. In
    this case the result is `None`.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def device_name(device: torch.device) -> str:
    """Returns the name of a device: the model of its card or of its processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if device.type == "cpu" and info.is_file():
        return _cpu_model(info)
    return f"{device.type} {platform.processor() or platform.machine()}"


@functools.cache
def _cpu_model(info: Path) -> str:
    """Returns the model of the processor from the file in which Linux describes it."""
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def free_memory(device: torch.device) -> int | None:
    """Returns how many bytes can still be allocated on a device, or `None` if this is not known.

    On CUDA, this is the free memory of the driver plus the memory that torch has reserved and does not use. On a CPU
    it is the whole memory, because other programs give memory back.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    return total_memory(device) if device.type == "cpu" else None


def total_memory(device: torch.device) -> int | None:
    """Returns the number of bytes of a device's memory, or `None` if it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return _machine_memory() if device.type == "cpu" else None


@functools.cache
def _machine_memory() -> int:
    """Returns the number of bytes of memory that this machine has, or that a Linux container may use.

    Both are read once, because a call needs the value several times, and the limit is set before a container's
    processes begin.
    """
    of_machine = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return of_machine
    # Without a limit, the file contains "max".
    return min(of_machine, int(limit)) if limit.isdecimal() else of_machine


def plain_tensors() -> AbstractContextManager[Any]:
    """Returns a context in which tensors are made as plain tensors and not as inference tensors.

    The next call, which uses these tensors, may be outside inference mode.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def brought_in(module: nn.Module) -> Generator[None]:
    """Keeps a module's own weights on its execution device, for code that uses them without calling the module."""
    hooks = [hook for hook in _hooks(module) if getattr(hook, "offload", False)]
    for hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.post_forward(module, None)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of the processes that share a model, or `None` if this process holds the whole model."""
    # In this attribute Transformers keeps the mesh of devices over which a model is sharded.
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    if "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    if mesh.size() == 1:
        return None
    return mesh


def in_one_piece(weight: Tensor) -> Tensor:
    """Returns a weight as a plain tensor in its full shape. If several processes share it, it is gathered.

    In this case all of these processes must call the function.
    """
    shared: Any = weight
    if not hasattr(shared, "device_mesh"):
        return weight
    return shared.full_tensor()


def raw_embeddings(embedding: nn.Module, token_ids: Tensor) -> Tensor:
    """Looks ids `[...]` up in an embedding's raw weight, on any device, and returns `[..., D]`.

    The embedding's own forward is not called, although it may change the rows. Gemma's, for example, scales them.
    """
    with brought_in(embedding):
        weight: Any = embedding.weight
        if not hasattr(weight, "device_mesh"):
            return nn.functional.embedding(token_ids, weight)
        # The weight is shared by several processes, and each of them has some of its rows.
        from torch.distributed.tensor import DTensor, Replicate

        replicated = DTensor.from_local(
            token_ids, weight.device_mesh, [Replicate()], run_check=False
        )
        found: Any = nn.functional.embedding(replicated, weight)
        return found.full_tensor()


def _hooks(module: nn.Module) -> list[Any]:
    """Returns the accelerate hooks of a module: none, one, or several from a `SequentialHook`."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def is_offloaded(module: nn.Module) -> bool:
    """Returns True if weights of a module or of its submodules are loaded for each call."""
    return any(
        getattr(hook, "offload", False) for part in module.modules() for hook in _hooks(part)
    )


def is_compiled(parts: Inventory) -> bool:
    """Returns True if a call of one of these modules runs code of `torch.compile`, in whatever way
    this was requested.
    """
    if any(hasattr(kind, "_torchdynamo_orig_callable") for kind in set(map(type, parts.modules))):
        return True
    for own in (part.__dict__ for part in parts.altered):
        forwards = own.get("forward"), own.get("_old_forward")
        if own.get("_compiled_call_impl") is not None or "_orig_mod" in own["_modules"]:
            return True
        if any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards):
            return True
    return False


@contextmanager
def device_errors_explained() -> Generator[None]:
    """Raises an error of the device again, with an explanation of what it means for the process."""
    try:
        yield
    except RuntimeError as error:
        # The error is recognised by its text, because older releases of torch have no class for it.
        if "CUDA error" not in str(error):
            raise
        raise RuntimeError(
            f"expected the steps to run on CUDA, got {first_line(error)}; a device that has failed stays so: restart "
            "the process, and set engine='eager' with CUDA_LAUNCH_BLOCKING=1 to see where it happens"
        ) from error


_stance: Any = None


def _set_stance() -> None:
    """Makes torch run compiled code eagerly."""
    global _stance
    _stance = torch.compiler.set_stance("force_eager")


def _restore_stance() -> None:
    """Restores the stance that was set before. It may be called again if an interrupt has cut it short."""
    global _stance
    if _stance is not None:
        _stance.__exit__(None, None, None)
        _stance = None


@contextmanager
def eagerly(*models: Inventory) -> Generator[None]:
    """Runs compiled models as they were before `torch.compile`. If none is compiled, it does nothing.

    Compiled code does not run hooks that were added later, so it cannot be tapped. The stance of torch applies to all
    threads. The first run sets it, and the last run restores it. In between, code that other threads have compiled
    runs eagerly too.
    """
    compiled = [type(parts.modules[0]).__name__ for parts in models if is_compiled(parts)]
    if not compiled:
        yield
        return
    logger.warning_once(
        f"{' and '.join(compiled)} runs eagerly with a DFlash draft: hooks that record hidden states do not run in "
        "code of torch.compile"
    )
    with shared(torch.compiler, _set_stance, _restore_stance):
        yield
