"""This module makes a copy of a draft whose linear layers hold FP8 weights, for `draft_dtype="float8_e4m3fn"`.

A draft reads all of its weights, and those of the head, for the few tokens of a block. So on a GPU, its time is the
time of reading weights. FP8 weights have half the size of bfloat16 weights. The text is still the target's, because
the copy only makes proposals. Each row of a weight and the states of each token are scaled by their largest absolute
number before they are rounded. The scales are the row scales of `torch._scaled_mm`.

In the block's forward, these products are in FP8: attention, MLP, context (`fc`) and head. Prompts use the draft's own
weights. So does the context of verified tokens if a kernel writes it. The draft and the target are not changed. The
copy is a separate module tree, which shares everything except the rounded weights with the draft.
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
# The smallest value for the largest number of a row, so that a row of zeros causes no division by 0.
SMALLEST = 1e-12
# Limits of `torch._scaled_mm`: the oldest compute capability, and the number that divides both sizes of a weight.
MIN_CAPABILITY = (8, 9)
MULTIPLE = 16
# The number of rows of a weight that are rounded at once, because rows are in float32 while they are rounded.
NUM_ROWS = 4096
# The modules of a draft that are copied together with their children. The copy shares all other modules.
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
    """Rounds rows to FP8, with one scale per row from its largest absolute number.

    Args:
        states (`torch.Tensor` of shape `[N, K]`): The rows, in any floating dtype.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Numbers `[N, K]` in `torch.float8_e4m3fn`, and scales `[N, 1]` in float32.
        `numbers * scales` are the states, rounded to three bits after the leading one.
    """
    # The scale is in float32, because a rounded scale could push the largest number out of range.
    states = states.float()
    largest = torch.linalg.vector_norm(states, torch.inf, dim=-1, keepdim=True)
    scales = largest.clamp_min(SMALLEST) / LARGEST
    numbers = (states / scales).to(FLOAT8)
    return numbers, scales


def scaled_linear(states: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiplies states with a rounded weight in FP8: `states @ (weight * scales).T`. The states are rounded too.

    Args:
        states (`torch.Tensor` of shape `[..., K]`): The states, in any floating dtype.
        weight (`torch.Tensor` of shape `[N, K]`, float8_e4m3fn): The rounded rows of the weight.
        scales (`torch.Tensor` of shape `[N, 1]`, float32): The scales of these rows.

    Returns:
        `torch.Tensor` of shape `[..., N]`: The product in the states' dtype. It is rounded to bfloat16 before, because
        row scales give bfloat16 on every device that supports them.

    Source: `torch._scaled_mm` with row scales; the definition is [`scaled_linear_in_float32`].
    """
    # The operation takes two dimensions, so every token becomes a row.
    tokens = states.reshape(-1, states.shape[-1])
    numbers, own_scales = round_rows(tokens)
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    product = multiply(numbers, weight.T, own_scales, scales.T, out_dtype=torch.bfloat16)
    return product.to(states.dtype).view(*states.shape[:-1], -1)


def scaled_linear_in_float32(states: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Computes [`scaled_linear`] in operations that every device supports.

    It is the definition of [`scaled_linear`], and replaces it in tests. Arguments and result are the same. The
    products of rounded numbers are summed in float32.
    """
    tokens = states.reshape(-1, states.shape[-1])
    numbers, own_scales = round_rows(tokens)
    product = numbers.float() @ weight.float().T
    scaled = product * own_scales * scales.T
    # The result is rounded to bfloat16, as in `torch._scaled_mm`.
    rounded = scaled.to(torch.bfloat16).to(states.dtype)
    return rounded.view(*states.shape[:-1], -1)


class Rounded(NamedTuple):
    """Holds a weight in FP8, and the identity of the weight that it was made from."""

    numbers: Tensor  # [N, K], float8_e4m3fn
    scales: Tensor  # [N, 1], float32
    source: tuple[object, ...]  # see `_source_of`


class Float8Linear(nn.Module):
    """Replaces a linear layer. Its weight is in FP8, and its bias is that of the layer."""

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


# For each draft, the rounded weights of its linear layers and of heads. An entry ends with its draft or its layer.
_kept = weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, Rounded]]()
_rounding = threading.Lock()


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Returns the description of a device that does not support products in FP8, else `None`. Tries a device once."""
    if device.type != "cuda":
        return str(device)
    if torch.version.hip is not None:
        return f"{device} of ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{device} of compute capability {capability[0]}.{capability[1]}"
    # A small product is tried, because the devices with row scales differ between releases of torch.
    numbers, scales = round_rows(torch.zeros(MULTIPLE, MULTIPLE, device=device))
    try:
        scaled_linear(torch.zeros(1, MULTIPLE, device=device), numbers, scales)
    except torch.OutOfMemoryError:
        raise  # this says nothing about the device, and a returned answer would be kept
    except RuntimeError as error:
        return f"{device}, where torch {torch.__version__} cannot multiply rows in FP8 ({one_line(error)})"
    return None


def drafting_copy(draft: DFlashDraftModel, target: Target) -> DFlashDraftModel:
    """Returns an FP8 copy of a draft, which computes the blocks instead of the draft.

    Rounded weights are kept for the next call. A weight is rounded again if torch has counted a write to it, or if it
    was moved or replaced. Torch does not count a write through `weight.data`. After such a write,
    `dflash_hf.free_buffers` drops all rounded weights. The head is the draft's own or else the target's. It is rounded
    if it is a plain linear layer on the draft's device. Raises `ValueError` if there is no memory for the copy.
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
    # A shallow copy shares all modules with the draft. Up to three of them are replaced in the copy's own dictionary.
    twin: Any = copy.copy(draft)
    twin._modules = dict(draft._modules)
    twin._modules["fc"] = _copy_of(draft.fc, found)
    twin._modules["layers"] = _copy_of(draft.layers, found)
    if head in found:
        twin.lm_head = found[head]
    return twin


def _all_rounded(draft: DFlashDraftModel, layers: Sequence[nn.Linear]) -> dict[nn.Module, Rounded]:
    """Returns the rounded weights of a draft's layers. Weights that have changed are rounded again.

    Raises `ValueError` if there is no memory for them.
    """
    # The lock keeps two calls with one draft from rounding its weights twice at the same time.
    with plain_tensors(), _rounding:
        kept = _kept.setdefault(draft, weakref.WeakKeyDictionary[nn.Module, Rounded]())
        stale = [
            layer
            for layer in layers
            if layer not in kept or kept[layer].source != _source_of(layer)
        ]
        _check_room(stale)
        for layer in stale:
            # The old copy is dropped first, so that there are never two.
            kept.pop(layer, None)
            kept[layer] = _rounded(layer)
        return {layer: kept[layer] for layer in layers}


def float8_bytes(drafter: DFlashDraftModel) -> int:
    """Returns the size of a copy's rounded weights in bytes. It is 0 for a draft that is not a copy."""
    layers = [module for module in drafter.modules() if isinstance(module, Float8Linear)]
    return sum(layer.weight.nbytes + layer.scales.nbytes for layer in layers)


def free_float8(draft: DFlashDraftModel) -> None:
    """Drops the rounded weights that are kept for a draft."""
    with _rounding:
        _kept.pop(draft, None)


def _linear_layers(module: nn.Module, device: torch.device) -> list[nn.Linear]:
    """Returns the linear layers of a part that can be rounded: those on this device within unchanged modules."""
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
    """Returns True if a call of a module runs hooks, or a forward that was put on the module (compiled, offloaded)."""
    own = module.__dict__
    has_hooks = bool(own["_forward_hooks"] or own["_forward_pre_hooks"])
    is_compiled = own.get("_compiled_call_impl") is not None
    # A fast form of this package does not count, because it computes the same as the class.
    return has_hooks or has_own_forward(module) or is_compiled


def _is_plain(weight: Tensor) -> bool:
    """Returns True if a weight is a plain parameter of torch, and not a quantised or sharded one."""
    return type(weight) is nn.Parameter


def _fits(weight: Tensor, device: torch.device) -> bool:
    """Returns True if a weight `[N, K]` is on this device and its sizes are supported by products in FP8."""
    rows, columns = weight.shape
    return weight.device == device and rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def _source_of(layer: nn.Linear) -> tuple[object, ...]:
    """Returns values that change when a layer's weight is written, moved or replaced; see [`drafting_copy`]."""
    weight = layer.weight
    return weight.data_ptr(), num_writes(weight), weight.dtype, tuple(weight.shape)


def _rounded(layer: nn.Linear) -> Rounded:
    """Returns the rounded weight of a layer."""
    weight = layer.weight.detach()
    num_rows = weight.shape[0]
    device = weight.device
    numbers = torch.empty(weight.shape, dtype=FLOAT8, device=device)
    scales = torch.empty(num_rows, 1, device=device, dtype=torch.float32)
    # A few rows are rounded at a time, because a head of 150,000 rows would take gigabytes in float32.
    for start in range(0, num_rows, NUM_ROWS):
        rows = slice(start, start + NUM_ROWS)
        some_numbers, some_scales = round_rows(weight[rows])
        numbers[rows].copy_(some_numbers)
        scales[rows].copy_(some_scales)
    return Rounded(numbers, scales, _source_of(layer))


def _check_room(layers: list[nn.Linear]) -> None:
    """Raises `ValueError` if the rounded weights of layers are larger than the free memory of their common device."""
    if not layers:
        return
    device = layers[0].weight.device
    needed = sum(layer.weight.numel() for layer in layers)
    free = free_memory(device)
    what = f"{needed:,} bytes free on {device} for the copy of the draft in FP8"
    require(free is None or needed <= free, what, free, "leave draft_dtype out")


def _copy_of(module: nn.Module, found: Mapping[nn.Module, Float8Linear]) -> nn.Module:
    """Returns a copy of a module in which rounded layers replace its own. A module that is not copied is returned."""
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
