"""Writes small weights that compressed-tensors has quantised, and what it makes of them again.

    python tests/parity/make_compressed_tensors_goldens.py    # wants compressed-tensors, 0.20.0 when it was last run

Each case is `CASE/PART` for the tensors that a file of a quantised draft has, and `CASE/expected`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

ROWS, COLUMNS, GROUP = 24, 64, 32
GOLDENS = Path(__file__).parent / "goldens" / "compressed_tensors" / "weights.safetensors"


def by_groups(weight: Tensor) -> Tensor:
    """Scales of groups of columns, for numbers up to 7."""
    groups = weight.float().view(ROWS, -1, GROUP)
    return (groups.abs().amax(-1) / 7).bfloat16()


def by_rows(greatest: int) -> Callable[[Tensor], Tensor]:
    """Scales of rows, for numbers up to the greatest."""
    return lambda weight: (weight.float().abs().amax(1, keepdim=True) / greatest).bfloat16()


def of_all(weight: Tensor) -> Tensor:
    """One scale, for FP8."""
    return (weight.float().abs().amax() / 448).bfloat16().reshape(1)


def by_blocks(weight: Tensor) -> Tensor:
    """Scales of blocks of 16 x 32; the last row of blocks is not a whole one."""
    return (torch.rand(2, 2) * 0.01 + 0.005).bfloat16()


INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "int4 groups": ("pack-quantized", by_groups, INT4),
    "int4 groups, zero points": ("pack-quantized", by_groups, {**INT4, "symmetric": False}),
    "int8 packed": ("pack-quantized", by_rows(127), INT8),
    "int8 rows": ("int-quantized", by_rows(127), INT8),
    "fp8 rows": ("float-quantized", by_rows(448), {**FP8, "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", of_all, {**FP8, "strategy": "tensor"}),
    "fp8 blocks": (
        "float-quantized",
        by_blocks,
        {**FP8, "strategy": "block", "block_structure": [16, 32]},
    ),
}


def main() -> None:
    """Writes the goldens."""
    torch.manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, (layout, scale_of, settings) in CASES.items():
        weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
        compressor = BaseCompressor.get_value_from_registry(layout)
        parts = {"weight": weight, "weight_scale": scale_of(weight)}
        if not settings.get("symmetric", True):
            parts["weight_zero_point"] = torch.randint(
                -4, 4, (ROWS, COLUMNS // GROUP), dtype=torch.int8
            )
        compressed = compressor.compress(parts, scheme)
        found |= {f"{name}/{part}": one.contiguous() for part, one in compressed.items()}
        found[f"{name}/expected"] = compressor.decompress(compressed, scheme)["weight"]
    GOLDENS.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, GOLDENS)


if __name__ == "__main__":
    main()
