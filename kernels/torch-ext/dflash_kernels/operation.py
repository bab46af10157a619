"""This module combines a definition in torch and the Triton kernel beside it into one operation of torch.library.

Both use the names of the definition's parameters, which are written only there. The name of a tensor ends in its
dimensions: `key_BGRE` is `[B, G, R, E]`. A letter stands for the same size throughout a call, and this is checked. The
kernel gets the arguments for which it has a parameter, such as `key`, and the strides, such as `stride_key_r`.

A kernel that cannot be built or does not fit on a device is not tried on that device again. The definition runs there
from then on, and the log contains the reason once. Such a launch has written nothing to the arguments, provided that a
first kernel writes only scratch memory of this package for the second one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ._dispatch import (
    has_triton,
    interprets,
    is_fault_of_kernel,
    launch_errors,
    on_device_of,
    runs_kernel,
)
from ._ops import add_op_namespace_prefix

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
# The arguments of a call by name, and the sizes of their dimensions by letter.
Given = dict[str, Any]
Sizes = dict[str, int]


class Operation(Generic[P, T]):
    """An instance is an operation, which is called in the same way as its definition. [`operation`] makes it and
    describes the arguments.
    """

    def __init__(
        self,
        reference: Callable[P, T],
        mutates: Sequence[str],
        check: Callable[[Given, Sizes], None],
        fake: Callable[..., Tensor | Sequence[Tensor]] | None,
        covers: Callable[..., bool],
    ) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.op = torch.library.custom_op(
            add_op_namespace_prefix(reference.__name__), reference, mutates_args=mutates
        )
        if fake is not None:
            self.op.register_fake(fake)
        if has_triton():
            self.op.register_kernel(("cuda", "cpu") if interprets() else "cuda")(self._run)
        self._check, self._covers = check, covers
        # The devices on which the kernel cannot run, and the reasons.
        self.failures: dict[torch.device, str] = {}
        parameters = inspect.signature(reference).parameters
        self._defaults: Given = {
            n: None if p.default is p.empty else p.default for n, p in parameters.items()
        }
        self._dims = {name: dims for name in parameters if (dims := split(name)[1])}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Checks the arguments and runs the operation."""
        given = self._named(args, kwargs)
        self._check(given, sizes_of(given, self._dims))
        return self.op(*args, **kwargs)

    def _run(self, *args: Any) -> Any:
        """Runs the kernel, or the definition if the kernel does not cover the arguments."""
        device, reference = args[0].device, cast(Callable[..., Any], self.reference)
        if device in self.failures or not self._covers(*args):
            return reference(*args)
        try:
            kernel: Any = importlib.import_module(".kernel", self.reference.__module__)
            with on_device_of(args[0]):
                return kernel.launch(self._named(args, {}))
        except launch_errors() as error:
            if not is_fault_of_kernel(error):
                raise
            self._give_up(device, error)
        return reference(*args)

    def _give_up(self, device: torch.device, error: Exception) -> None:
        """Makes the definition run on a device from now on, and logs the reason."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self.failures[device] = reason
        logger.warning(
            "%s runs in torch on %s, its kernel cannot: %s", self.reference.__name__, device, reason
        )

    def _named(self, args: Sequence[Any], kwargs: Given) -> Given:
        return self._defaults | dict(zip(self._defaults, args, strict=False)) | kwargs


def operation(
    *,
    check: Callable[[Given, Sizes], None],
    mutates: Sequence[str] = (),
    fake: Callable[..., Tensor | Sequence[Tensor]] | None = None,
    covers: Callable[..., bool] = lambda first, *_: runs_kernel(first),
) -> Callable[[Callable[P, T]], Operation[P, T]]:
    """Makes an operation from the definition below the decorator.

    The definition runs wherever the kernel does not run.

    The function `launch` of the module `kernel` beside the definition launches the kernel. It gets all arguments by
    name.

    Args:
        check (callable): Raises a `ValueError` for arguments that are wrong although their sizes fit each other.
        mutates (sequence of `str`): The names of the parameters that are written.
        fake (callable, *optional*): Makes a result without values, if the operation returns a result.
        covers (callable): Returns whether the kernel supports these arguments, which are on a device where it can run.
    """
    return lambda reference: Operation(reference, mutates, check, fake, covers)


def split(name: str) -> tuple[str, str]:
    """Returns `("key", "BGRE")` for `"key_BGRE"`. For a name without dimensions, the second string is empty."""
    bare, _, dims = name.rpartition("_")
    return (bare, dims) if dims.isupper() else (name, "")


def sizes_of(given: Given, dims_of: dict[str, str]) -> Sizes:
    """Returns the size of every dimension by its letter. Arguments and their dimensions are given by name.

    Raises:
        ValueError: If two tensors have different sizes for one letter, or a tensor has another number of dimensions
            than its name.
    """
    sizes: Sizes = {}
    for name, dims in dims_of.items():
        tensor = given[name]
        if tensor is None:
            continue
        shape = tensor.shape
        if tuple(map(sizes.setdefault, dims, shape)) != shape or len(dims) != len(shape):
            wanted = ", ".join(str(sizes.get(dim, dim)) for dim in dims)
            first = next(iter(given))
            raise ValueError(
                f"expected {name} of shape [{wanted}] beside {first}, got {list(shape)}; pass one that fits"
            )
    return sizes


def check_dtype(given: Given, dtypes: Sequence[torch.dtype], *names: str) -> None:
    """Raises a `ValueError` if one of these arguments is given and has another dtype."""
    for name in names:
        if given[name] is not None and given[name].dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"expected {name} of dtype {wanted}, got {given[name].dtype}; convert it"
            )


def run_kernel(kernel: Any, grid: tuple[int, ...], given: Given, **own: Any) -> None:
    """Launches a Triton kernel.

    Args:
        kernel (callable): The jit function.
        grid (`tuple[int, ...]`): Numbers of programs.
        given (`dict`): The operation's arguments. The kernel gets those for which it has a parameter.
        own: The other arguments of the kernel, and Triton's options.
    """
    taken = _taken_by(kernel.fn, tuple(given))
    arguments: Given = {bare: given[name] for name, bare, _ in taken}
    for name, _, strides in taken:
        if strides and given[name] is None:
            arguments.update({parameter: None for parameter, _ in strides})
        elif strides:
            of_tensor = given[name].stride()
            arguments.update({parameter: of_tensor[dim] for parameter, dim in strides})
    kernel[grid](**arguments | own)


@functools.cache
def _taken_by(
    function: Callable[..., None], names: tuple[str, ...]
) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """Returns the arguments for which a jit function has a parameter: both names, and the function's parameters for
    strides.
    """
    parameters = inspect.signature(function).parameters
    taken: list[tuple[str, str, list[tuple[str, int]]]] = []
    for name in names:
        bare, dims = split(name)
        asked = [(f"stride_{bare}_{dim}", at) for at, dim in enumerate(dims.lower())]
        if bare in parameters:
            taken.append((name, bare, [stride for stride in asked if stride[0] in parameters]))
    return taken


__all__ = ["Given", "Operation", "Sizes", "check_dtype", "operation", "run_kernel"]
