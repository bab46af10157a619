"""This module reads the weights of quantised drafts, and dequantises them while it reads.

A draft is small, so no weight stays quantised. The draft computes with the dequantised weights, in their dtype. The
supported formats are compressed-tensors' layouts of integers and FP8 (`pack-quantized`, `int-quantized`,
`float-quantized`, `naive-quantized`) and the FP8 of Transformers (`quant_method: fp8`). These configs may also ask for
quantised activations. The draft's activations stay in the draft's dtype.

Source: compressed-tensors, `compressors/pack_quantized` and `compressors/naive_quantized`; Transformers,
`integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_hf.checkpoints.files import FLOAT_DTYPES, StoredTensor
from dflash_hf.errors import is_a, require

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
ADVICE = "take the draft in bfloat16 or float32"
# The tensors that a quantised layer has instead of a weight or beside one, by the last part of their names.
PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_shape",
    "weight_zero_point",
)
SCALES = ("weight_scale", "weight_scale_inv")


class Scheme(NamedTuple):
    """How the weights of a draft are quantised."""

    num_bits: int  # bits of a number
    is_packed: bool  # whether several numbers are packed into one int32
    block: (
        tuple[int, int] | None
    )  # rows and columns that share a scale; `None` if the shape of the scales says this


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme that a parsed `config.json` names; `None` if the draft is not quantised.

    Raises `ValueError` if the scheme is not supported.
    """
    given: Any = config.get("quantization_config")
    if not given:
        return None
    require(isinstance(given, dict), "a dictionary as quantization_config", given, ADVICE)
    method = given.get("quant_method")
    known = "quant_method 'compressed-tensors' or 'fp8' in quantization_config"
    require(method in ("compressed-tensors", "fp8"), known, method, ADVICE)
    if method == "fp8":
        block = _block(given.get("weight_block_size"))
        return Scheme(num_bits=8, is_packed=False, block=block)
    layout = given.get("format")
    require(
        layout in FORMATS, f"format {' or '.join(FORMATS)} in quantization_config", layout, ADVICE
    )
    weights = _of_weights(given)
    num_bits: Any = weights.get("num_bits")
    is_packed = layout == "pack-quantized"
    what = "4 or 8 as num_bits of the weights in quantization_config"
    require(
        is_a(num_bits, int) and num_bits in ((4, 8) if is_packed else (8,)), what, num_bits, ADVICE
    )
    order = weights.get("actorder")
    require(order in (None, "weight", "static"), "no actorder by groups", order, ADVICE)
    return Scheme(
        num_bits=num_bits, is_packed=is_packed, block=_block(weights.get("block_structure"))
    )


def _of_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how weights are quantised, by compressed-tensors' config. All weights must have the same scheme."""
    groups: Any = given.get("config_groups")
    require(
        isinstance(groups, dict) and bool(groups),
        "config_groups in quantization_config",
        groups,
        ADVICE,
    )
    ways: list[Any] = []
    for group in groups.values():
        way = group.get("weights") if isinstance(group, dict) else None
        if way not in ways:
            ways.append(way)
    is_one = len(ways) == 1 and isinstance(ways[0], dict)
    require(is_one, "one way to quantise all weights in config_groups", ways, ADVICE)
    return ways[0]


def _block(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    is_pair = (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(is_a(one, int) and one > 0 for one in size)
    )
    require(is_pair, "two sizes of a block of weights in quantization_config", size, ADVICE)
    return int(size[0]), int(size[1])


class QuantisedTensor(NamedTuple):
    """A weight that is read from several tensors of a file. It replaces a [`StoredTensor`]."""

    parts: Mapping[str, StoredTensor]  # by the last part of their names
    name: str  # of the weight
    scheme: Scheme

    @property
    def file(self) -> Path:
        """The file with the quantised numbers."""
        return self._numbers.file

    @property
    def dtype(self) -> str:
        """The dtype of the dequantised weight, in the spelling of safetensors. It is the dtype of the scales."""
        return self._scale.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised weight."""
        if not self.scheme.is_packed:
            return self._numbers.shape
        return tuple(self.parts["weight_shape"].read().tolist())

    @property
    def _numbers(self) -> StoredTensor:
        return self.parts["weight_packed" if self.scheme.is_packed else "weight"]

    @property
    def _scale(self) -> StoredTensor:
        [scale] = [self.parts[name] for name in SCALES if name in self.parts]
        return scale

    def read(self) -> Tensor:
        """Reads the weight onto the CPU and dequantises it: `(number - zero point) * scale`."""
        rows, columns = self.shape
        numbers = self._numbers.read()
        if self.scheme.is_packed:
            numbers = unpacked(numbers, self.scheme.num_bits, columns)
        scale = self._scale.read()
        found = numbers.to(torch.float32)
        if "weight_zero_point" in self.parts:
            zero = self.parts["weight_zero_point"].read()
            if self.scheme.is_packed:
                # Zero points are packed along the first dimension.
                zero = unpacked(zero.T, self.scheme.num_bits, rows).T
            found = found - self._spread(zero, rows, columns)
        found = found * self._spread(scale, rows, columns)
        return found.to(scale.dtype)

    def _spread(self, values: Tensor, rows: int, columns: int) -> Tensor:
        """Expands values of blocks, rows or groups of columns to one float32 per number, `[rows, columns]`.

        A single value is returned as `[1, 1]`.
        """
        values = values.to(torch.float32)
        if values.numel() == 1:
            return values.reshape(1, 1)
        if values.dim() == 1:
            values = values[:, None]
        block = self.scheme.block
        if block is None:
            block = (rows // values.shape[0], columns // values.shape[1])
        values = values.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
        return values[:rows, :columns]


def unpacked(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """Returns the signed numbers `[rows, columns]` in int32s `[rows, words]`, whose lowest bits hold the first."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=packed.device)
    # An arithmetic shift fills up with the sign bit. The mask removes these bits.
    numbers = (packed[:, :, None] >> shifts) & (2**num_bits - 1)
    # The numbers are stored with an offset, so that none is negative.
    return numbers.flatten(1)[:, :columns] - 2 ** (num_bits - 1)


class StoredRows(NamedTuple):
    """Some rows of a stored weight that holds several weights of a draft."""

    whole: StoredTensor | QuantisedTensor
    start: int
    shape: tuple[int, ...]

    @property
    def file(self) -> Path:
        """The file that contains the whole weight."""
        return self.whole.file

    @property
    def name(self) -> str:
        """The name of the whole weight in the file."""
        return self.whole.name

    @property
    def dtype(self) -> str:
        """The dtype, in the spelling of safetensors."""
        return self.whole.dtype

    def read(self) -> Tensor:
        """Returns a copy of the rows, on the CPU. The whole weight is read for this."""
        return self.whole.read()[self.start : self.start + self.shape[0]].clone()


# A tensor of a checkpoint that has not been read yet.
Stored = StoredTensor | QuantisedTensor | StoredRows


def dequantised(
    stored: Mapping[str, StoredTensor], scheme: Scheme, source: object
) -> dict[str, Stored]:
    """Returns the tensors of a checkpoint by name, with one tensor for all the parts of each quantised weight.

    Only shapes are read. Raises `ValueError` if a quantised weight lacks a part, or if its parts do not fit together.
    """
    by_layer: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        if part in PARTS:
            by_layer.setdefault(layer, {})[part] = tensor
        elif part not in ("input_scale", "output_scale"):
            found[name] = tensor
    for layer, parts in by_layer.items():
        name = f"{layer}.weight"
        if parts.keys() == {"weight"} and parts["weight"].dtype in FLOAT_DTYPES:
            found[name] = parts["weight"]
            continue
        found[name] = _checked(QuantisedTensor(parts, name, scheme), source)
    return found


def _checked(weight: QuantisedTensor, source: object) -> QuantisedTensor:
    """Returns a quantised weight after checking that its parts are there and fit together."""
    needed = {"weight_packed", "weight_shape"} if weight.scheme.is_packed else {"weight"}
    names = sorted(weight.parts)
    scales = [name for name in SCALES if name in weight.parts]
    action = "download the draft again, or take it in bfloat16 or float32"
    what = f"{' and '.join(sorted(needed))} and one scale of {weight.name} in {source}"
    require(needed <= weight.parts.keys() and len(scales) == 1, what, names, action)
    scale = weight.parts[scales[0]]
    require(
        scale.dtype in FLOAT_DTYPES,
        f"a scale of {weight.name} in floating point",
        scale.dtype,
        action,
    )
    shape = weight.shape
    require(len(shape) == 2 and min(shape) > 0, f"two dimensions of {weight.name}", shape, action)
    rows, columns = shape
    if weight.scheme.is_packed:
        words = math.ceil(columns * weight.scheme.num_bits / 32)
        packed = weight.parts["weight_packed"]
        is_whole = packed.dtype == "I32" and packed.shape == (rows, words)
        require(
            is_whole,
            f"{(rows, words)} int32 of {weight.name}",
            (packed.dtype, packed.shape),
            action,
        )
    if math.prod(scale.shape) == 1:
        return weight
    sizes = (*scale.shape, 1)[:2]
    block = weight.scheme.block
    if block is None:
        fits = sizes[0] in (1, rows) and columns % sizes[1] == 0
    else:
        fits = sizes == (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    require(fits, f"scales of {weight.name} that fit its {shape} numbers", scale.shape, action)
    return weight
