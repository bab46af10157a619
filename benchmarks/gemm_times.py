"""Times the products with the weights of Qwen3-8B, as torch computes them (cuBLAS on CUDA), for few rows.

A step is bound by reading weights as long as few rows go through them. What share of a copy's bandwidth these products
reach says how near to its floor of bytes a step can come with them, and which of them a kernel of ours could beat.

    python benchmarks/gemm_times.py            on a GPU
    python benchmarks/gemm_times.py --tiny     anywhere, to try the script; times mean nothing

Definitions are in benchmarks/README.md. Writes `gemm.json` to `$OUT`, else to benchmarks/results, after every row, and
prints the record as the last line. What raises is a row too, and the exit status is 1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.machine import RESULTS, provenance
from harness.rates import milliseconds
from harness.report import Column, finish, may_write, show, write
from harness.rows import Row, percentiles
from harness.shapes import SHAPES, Shape, shape_of
from harness.trial import bandwidth_of, check_device, device_of, dtype_of
from torch import Tensor
from torch.nn.functional import linear

ROWS = (16, 32, 64, 128, 256, 512)
# Several times what an H200 keeps in its cache, so that every weight is read from memory.
COLD_BYTES = 256 * 2**20
CALLS = 12
COLUMNS: list[Column] = [
    ("weight", "weight"),
    ("out", "out_features"),
    ("in", "in_features"),
    ("rows", "rows"),
    ("us p20", "microseconds.p20"),
    ("p50", "microseconds.p50"),
    ("p80", "microseconds.p80"),
    ("GB/s", "gigabytes_per_second"),
    ("of copy", "share_of_copy_bandwidth"),
    ("TFLOP/s", "teraflops"),
    ("error", "error"),
]


def weight_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Returns the shapes of a model's weights, `(out, in)`, by the projections that have them; no shape twice."""
    queries = shape.heads * shape.size
    keys = shape.groups * shape.size
    return {
        "q, o": (queries, shape.hidden),
        "k, v": (keys, shape.hidden),
        "gate, up": (shape.mlp, shape.hidden),
        "down": (shape.hidden, shape.mlp),
        "head": (shape.vocab, shape.hidden),
        "fc of the draft": (shape.hidden, len(shape.taps) * shape.hidden),
    }


def measure(
    out_features: int,
    in_features: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    cold_bytes: int,
) -> list[float]:
    """Times products of `rows` states with weights that are not in the device's cache.

    Args:
        out_features, in_features, rows (`int`): The product's sizes.
        dtype, device: Of states and weights.
        cold_bytes (`int`): Bytes of weights that are gone through in turn.

    Returns:
        `list[float]`: Microseconds per product, one value per sample.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    num_bytes = out_features * in_features * dtype.itemsize
    copies = max(1, -(-cold_bytes // num_bytes))
    weights = [random(out_features, in_features) for _ in range(copies)]
    states = random(rows, in_features)
    num_calls = max(CALLS, copies)
    calls = [
        lambda weight=weights[index % copies]: linear(states, weight) for index in range(num_calls)
    ]
    return [span * 1e3 for span in milliseconds(calls, device)]


def row_of(
    weight: str,
    sizes: tuple[int, int],
    rows: int,
    itemsize: int,
    spans: list[float],
    bandwidth: float,
) -> Row:
    """Returns a row of the record: a product's time, and what follows from it."""
    out_features, in_features = sizes
    num_bytes = itemsize * (out_features * in_features + rows * (out_features + in_features))
    microseconds = percentiles(spans)
    median = microseconds["p50"]
    assert median is not None
    rate = num_bytes / (median / 1e6)
    return {
        "weight": weight,
        "out_features": out_features,
        "in_features": in_features,
        "rows": rows,
        "bytes": num_bytes,
        "microseconds": microseconds,
        "gigabytes_per_second": rate / 1e9,
        "share_of_copy_bandwidth": rate / bandwidth,
        "teraflops": 2 * rows * out_features * in_features / (median / 1e6) / 1e12,
        "error": None,
    }


def main(
    is_tiny: Annotated[
        bool, typer.Option("--tiny", help="Tiny weights, on any device: to try the script.")
    ] = False,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "qwen3-8b",
    rows: Annotated[str, typer.Option(help="Numbers of rows, separated by commas.")] = ",".join(
        map(str, ROWS)
    ),
    out: Annotated[
        Path | None, typer.Option(help="The record; gemm.json in $OUT or benchmarks/results.")
    ] = None,
) -> None:
    """Time the products of a step; definitions in benchmarks/README.md."""
    device = device_of()
    check_device(device, is_tiny)
    if model not in SHAPES:
        raise typer.BadParameter(
            f"expected a model among {', '.join(SHAPES)}, got {model!r}; choose one of them"
        )
    shape = shape_of(model, is_tiny)
    dtype = dtype_of(is_tiny)
    cold_bytes = COLD_BYTES
    if is_tiny:
        cold_bytes = 2**12
    bandwidth = bandwidth_of(device, is_tiny)
    path = out or Path(os.environ.get("OUT", RESULTS)) / "gemm.json"
    facts: dict[str, Any] = {
        "benchmark": "gemm",
        "model": model,
        "is_tiny": is_tiny,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_second": bandwidth,
        **provenance(device),
    }
    found: list[Row] = []
    record: dict[str, Any] = {"provenance": facts, "rows": found}
    has_failed = False
    with torch.inference_mode():
        for weight, sizes in weight_shapes(shape).items():
            for number in (int(part) for part in rows.split(",")):
                try:
                    spans = measure(*sizes, number, dtype, device, cold_bytes)
                    found.append(row_of(weight, sizes, number, dtype.itemsize, spans, bandwidth))
                except Exception as error:
                    has_failed = True
                    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    found.append({"weight": weight, "rows": number, "error": text})
                if may_write(path, quiet=not is_tiny):
                    write(record, path)  # a borrowed machine may be gone before the end
    show(f"Products with the weights of {model}, copy {bandwidth / 1e9:.0f} GB/s", found, COLUMNS)
    # Tiny weights are never a record.
    finish(record, path, quiet=not is_tiny)
    if has_failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
