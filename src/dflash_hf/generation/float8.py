"""Drafting in FP8: a copy of a draft whose linear layers hold 8-bit weights, for `draft_dtype="float8_e4m3fn"`.

A draft reads all of its weights, and the head's, for the few tokens of a block, so that on a GPU its time is the time
of reading them; in FP8 they are half of bfloat16's size. The text stays the target's: only proposals come from here.
Weights are rounded row by row and states token by token, each by its largest absolute number; these numbers are the
row scales of `torch._scaled_mm`.

In FP8 are the products of attention, MLP and context (`fc`) in the block's forward, and the head. Prompts go through
the draft's own weights, and so does the context of verified tokens where a kernel writes it. The draft and the target
are not changed: the copy is a module tree of its own, which shares all but the rounded weights with the draft's.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_hf.devices import free_memory, num_writes, plain_tensors
from dflash_hf.draft_model.dflash2 import DFlash2Layer
from dflash_hf.draft_model.gemma4 import DFlashGemma4Attention, DFlashGemma4Layer
from dflash_hf.draft_model.laguna import DFlashLagunaAttention, DFlashLagunaLayer
from dflash_hf.draft_model.layers import DFlashAttention, DFlashDecoderLayer, DFlashMLP
from dflash_hf.errors import one_line, require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.packed_weights import LINEAR_CLASSES
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.user_code import has_own_forward

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# The largest number that a row of zeros counts as having: nothing is divided by 0.
SMALLEST = 1e-12
# Limits of `torch._scaled_mm`: the oldest compute capability, and the number that divides both sizes of a weight.
MIN_CAPABILITY = (8, 9)
MULTIPLE = 16
# Rows of a weight that are rounded at once: meanwhile they are in float32.
NUM_ROWS = 4096
# Modules of a draft that are copied together with their children; others stay as they are.
COPIED = (
    nn.ModuleList,
    DFlashDecoderLayer,
    DFlash2Layer,
    DFlashAttention,
    DFlashGemma4Layer,
    DFlashGemma4Attention,
    DFlashLagunaLayer,
    DFlashLagunaAttention,
    DFlashMLP,
)


def round_rows(states: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows to FP8, each by its largest absolute number.

    Args:
        states (`torch.Tensor` of shape `[N, K]`): Of any floating dtype.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Numbers `[N, K]` in `torch.float8_e4m3fn` and scales `[N, 1]` in float32;
        `numbers * scales` are the states, to three bits behind the leading one.
    """
    # In float32: a scale that was rounded itself would push the largest number out of range.
    states = states.float()
    largest = torch.linalg.vector_norm(states, torch.inf, dim=-1, keepdim=True)
    scales = largest.clamp_min(SMALLEST) / LARGEST
    numbers = (states / scales).to(FLOAT8)
    return numbers, scales


def scaled_linear(states: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiplies states with a rounded weight in FP8: `states @ (weight * scales).T`, the states rounded too.

    Args:
        states (`torch.Tensor` of shape `[..., K]`): Of any floating dtype.
        weight (`torch.Tensor` of shape `[N, K]`, float8_e4m3fn): Rows of the weight, rounded.
        scales (`torch.Tensor` of shape `[N, 1]`, float32): Their scales.

    Returns:
        `torch.Tensor` of shape `[..., N]`: In the states' dtype, from a product in bfloat16, which is what row scales
        give on every device that has them.

    Source: `torch._scaled_mm` with row scales; the definition is [`scaled_linear_in_float32`].
    """
    # The operation takes two dimensions: every token is a row.
    tokens = states.reshape(-1, states.shape[-1])
    numbers, own_scales = round_rows(tokens)
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    product = multiply(numbers, weight.T, own_scales, scales.T, out_dtype=torch.bfloat16)
    return product.to(states.dtype).view(*states.shape[:-1], -1)


def scaled_linear_in_float32(states: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Computes [`scaled_linear`] in operations that every device has: its definition, and its stand-in in tests.

    Arguments and result are the same; the products of rounded numbers are summed in float32.
    """
    tokens = states.reshape(-1, states.shape[-1])
    numbers, own_scales = round_rows(tokens)
    product = numbers.float() @ weight.float().T
    scaled = product * own_scales * scales.T
    # Rounded as the operation rounds its result.
    rounded = scaled.to(torch.bfloat16).to(states.dtype)
    return rounded.view(*states.shape[:-1], -1)


class Rounded(NamedTuple):
    """A weight in FP8, and the weight that it was made of."""

    numbers: Tensor  # [N, K], float8_e4m3fn
    scales: Tensor  # [N, 1], float32
    source: tuple[object, ...]  # see `_source_of`


class Float8Linear(nn.Module):
    """Stands for a linear layer: its weight in FP8, its bias as it is."""

    weight: Tensor
    scales: Tensor

    def __init__(self, rounded: Rounded, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("weight", rounded.numbers)
        self.register_buffer("scales", rounded.scales)
        self.bias = bias

    def forward(self, states: Tensor) -> Tensor:
        """Returns the product `[..., N]` of states `[..., K]`, in their dtype."""
        product = scaled_linear(states, self.weight, self.scales)
        if self.bias is None:
            return product
        return product + self.bias


# Per draft, the rounded weights of its linear layers and of heads, until the draft or the layer is gone.
_kept = weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, Rounded]]()
_rounding = threading.Lock()


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Returns a description of a device that has no products in FP8, else `None`; it is tried once per device."""
    if device.type != "cuda":
        return str(device)
    if torch.version.hip is not None:
        return f"{device} of ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{device} of compute capability {capability[0]}.{capability[1]}"
    # A small product is tried: releases of torch differ in the devices on which they have row scales.
    numbers, scales = round_rows(torch.zeros(MULTIPLE, MULTIPLE, device=device))
    try:
        scaled_linear(torch.zeros(1, MULTIPLE, device=device), numbers, scales)
    except torch.OutOfMemoryError:
        raise  # says nothing of the device, and the answer is kept
    except RuntimeError as error:
        return f"{device}, where torch {torch.__version__} cannot multiply rows in FP8 ({one_line(error)})"
    return None


def drafting_copy(draft: DFlashDraftModel, target: Target) -> DFlashDraftModel:
    """Returns a copy of a draft in FP8, which computes the draft's blocks in its place.

    Rounded weights are kept for the next call, and made anew where torch has seen the weight written, moved or
    replaced. A write that it does not count (through `weight.data`) is not seen; `dflash_hf.free_buffers` drops all.
    The head is the draft's own or else the target's, if that is a plain linear layer on the draft's device. Raises
    `ValueError` if there is no memory for it.
    """
    # The head is the largest matrix that a step of the draft reads.
    head: nn.Module = target.head
    if draft.lm_head is not None:
        head = draft.lm_head
    device = draft.fc.weight.device
    layers: list[nn.Linear] = []
    for part in (draft.fc, draft.layers, head):
        layers.extend(_linear_layers(part, device))
    rounded = _all_rounded(draft, layers)
    found: dict[nn.Module, Float8Linear] = {}
    for layer in layers:
        found[layer] = Float8Linear(rounded[layer], layer.bias)
    # A shallow copy shares all modules with the draft, of which three are replaced in a dictionary of its own.
    twin: Any = copy.copy(draft)
    twin._modules = dict(draft._modules)
    twin._modules["fc"] = _copy_of(draft.fc, found)
    twin._modules["layers"] = _copy_of(draft.layers, found)
    if head in found:
        twin.lm_head = found[head]
    return twin


def _all_rounded(draft: DFlashDraftModel, layers: Sequence[nn.Linear]) -> dict[nn.Module, Rounded]:
    """Returns the rounded weights of a draft's layers, kept ones where they are still right.

    Raises `ValueError` if there is no memory for the others.
    """
    # Under the lock, so that two calls with one draft do not round its weights twice at a time.
    with plain_tensors(), _rounding:
        kept = _kept.setdefault(draft, weakref.WeakKeyDictionary[nn.Module, Rounded]())
        stale = [
            layer
            for layer in layers
            if layer not in kept or kept[layer].source != _source_of(layer)
        ]
        _check_room(stale)
        for layer in stale:
            # The old copy goes first, so that there are never two.
            kept.pop(layer, None)
            kept[layer] = _rounded(layer)
        return {layer: kept[layer] for layer in layers}


def float8_bytes(drafter: DFlashDraftModel) -> int:
    """Returns the size of a copy's rounded weights in bytes; 0 for a draft itself."""
    layers = [module for module in drafter.modules() if isinstance(module, Float8Linear)]
    return sum(layer.weight.nbytes + layer.scales.nbytes for layer in layers)


def free_float8(draft: DFlashDraftModel) -> None:
    """Drops the rounded weights that are kept for a draft."""
    with _rounding:
        _kept.pop(draft, None)


def _linear_layers(module: nn.Module, device: torch.device) -> list[nn.Linear]:
    """Returns the layers of a part that can be rounded: on this device, within modules that nobody has changed."""
    if _is_altered(module):
        return []
    if isinstance(module, nn.Linear):
        is_product = type(module) in LINEAR_CLASSES
        if is_product and _is_plain(module.weight) and _fits(module.weight, device):
            return [module]
        return []
    found: list[nn.Linear] = []
    if type(module) in COPIED:
        for child in module.children():
            found.extend(_linear_layers(child, device))
    return found


def _is_altered(module: nn.Module) -> bool:
    """Returns True if a call of a module runs hooks, or a forward of its own (compiled, offloaded)."""
    own = module.__dict__
    has_hooks = bool(own["_forward_hooks"] or own["_forward_pre_hooks"])
    is_compiled = own.get("_compiled_call_impl") is not None
    # A fast form of this package computes what the class does.
    return has_hooks or has_own_forward(module) or is_compiled


def _is_plain(weight: Tensor) -> bool:
    """Returns True if a weight is a parameter of torch's, not one that is quantised or shared among processes."""
    return type(weight) is nn.Parameter


def _fits(weight: Tensor, device: torch.device) -> bool:
    """Returns True if a weight `[N, K]` is on this device and has sizes that can be multiplied in FP8."""
    rows, columns = weight.shape
    return weight.device == device and rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def _source_of(layer: nn.Linear) -> tuple[object, ...]:
    """Returns values that change when a layer's weight is written, moved or replaced; see [`drafting_copy`]."""
    weight = layer.weight
    return weight.data_ptr(), num_writes(weight), weight.dtype, tuple(weight.shape)


def _rounded(layer: nn.Linear) -> Rounded:
    """Returns the rounded weight of a layer; made a few rows at a time."""
    weight = layer.weight.detach()
    num_rows = weight.shape[0]
    device = weight.device
    numbers = torch.empty(weight.shape, dtype=FLOAT8, device=device)
    scales = torch.empty(num_rows, 1, device=device, dtype=torch.float32)
    # A head of 150,000 rows would take gigabytes in float32 at once.
    for start in range(0, num_rows, NUM_ROWS):
        rows = slice(start, start + NUM_ROWS)
        some_numbers, some_scales = round_rows(weight[rows])
        numbers[rows].copy_(some_numbers)
        scales[rows].copy_(some_scales)
    return Rounded(numbers, scales, _source_of(layer))


def _check_room(layers: list[nn.Linear]) -> None:
    """Raises `ValueError` if the rounded weights of layers, all on one device, are larger than what is free there."""
    if not layers:
        return
    device = layers[0].weight.device
    needed = sum(layer.weight.numel() for layer in layers)
    free = free_memory(device)
    what = f"{needed:,} bytes free on {device} for the copy of the draft in FP8"
    require(free is None or needed <= free, what, free, "leave draft_dtype out")


def _copy_of(module: nn.Module, found: Mapping[nn.Module, Float8Linear]) -> nn.Module:
    """Returns a copy of a module with the rounded layers in place of their own; itself where it has none of them."""
    if module in found:
        return found[module]
    if _is_altered(module) or type(module) not in COPIED:
        return module
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, child in module._modules.items():
        if child is not None:
            twin._modules[name] = _copy_of(child, found)
    return twin
