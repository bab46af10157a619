"""Times the products with the weights of Qwen3-8B for few rows: by torch (cuBLAS on CUDA), and several in one launch.

A step is bound by reading weights as long as few rows go through them. What share of a copy's bandwidth these products
reach says how near to its floor of bytes a step can come with them. Products that share an input are timed in both
ways (`torch`, `one launch`), up to the number of rows that our kernels take.

    python benchmarks/gemm_times.py            on a GPU
    python benchmarks/gemm_times.py --tiny     anywhere, to try the script; times mean nothing

Definitions are in benchmarks/README.md. Writes `gemm.json` to `$OUT`, else to benchmarks/results, after every row, and
prints the record as the last line. What raises is a row too, and the exit status is 1.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from harness.machine import RESULTS, provenance
from harness.operations import no_stand_ins
from harness.rates import milliseconds
from harness.report import Column, finish, may_write, show, write
from harness.rows import Row, percentiles
from harness.shapes import SHAPES, Shape, shape_of
from harness.trial import bandwidth_of, check_device, device_of, dtype_of
from torch import Tensor
from torch.nn.functional import linear

from dflash_hf import ops

ROWS = (16, 32, 64, 128, 256, 512)
# Several times what an H200 keeps in its cache, so that every weight is read from memory.
COLD_BYTES = 256 * 2**20
CALLS = 12
# The ways in which products that share an input are made.
TORCH = "torch"
ONE_LAUNCH = "one launch"
COLUMNS: list[Column] = [
    ("weight", "weight"),
    ("way", "way"),
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


class Work(NamedTuple):
    """What is timed: products of one input, and how they are made."""

    weight: str
    way: str
    columns: tuple[int, ...]  # of the product with each weight
    in_features: int
    is_gated: bool = False  # SiLU joins two products
    has_residual: bool = False  # it is added to the product
    is_compared: bool = True  # both ways are timed, for as many rows as our kernels take


def works_of(shape: Shape) -> list[Work]:
    """Returns each weight of a model by itself, then what shares an input, in both ways."""
    found = [
        Work(name, TORCH, (out,), inner, is_compared=False)
        for name, (out, inner) in weight_shapes(shape).items()
    ]
    queries = shape.heads * shape.size
    keys = shape.groups * shape.size
    for way in (TORCH, ONE_LAUNCH):
        found += [
            Work("q with k and v", way, (queries, keys, keys), shape.hidden),
            Work("gate with up and silu", way, (shape.mlp, shape.mlp), shape.hidden, is_gated=True),
            Work("o alone", way, (shape.hidden,), queries),
            Work("down alone", way, (shape.hidden,), shape.mlp),
            Work("down with residual", way, (shape.hidden,), shape.mlp, has_residual=True),
        ]
    return found


def call_of(work: Work, states: Tensor, weights: list[Tensor], residual: Tensor | None) -> Any:
    """Makes the products of a work; of one that has no residual, `residual` is `None`."""
    if work.way == ONE_LAUNCH:
        if work.is_gated:
            return ops.gated_linear(states, *weights)
        return ops.linears(states, weights, [], residual)
    products = [linear(states, weight) for weight in weights]
    if work.is_gated:
        return ops.silu_mul(*products)
    if residual is not None:
        return residual + products[0]
    return products


def measure(
    work: Work,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    cold_bytes: int,
) -> list[float]:
    """Times products of `rows` states with weights that are not in the device's cache.

    Args:
        work (`Work`): The products.
        rows (`int`): Rows of states.
        dtype, device: Of states and weights.
        cold_bytes (`int`): Bytes of weights that are gone through in turn.

    Returns:
        `list[float]`: Microseconds of the work, one value per sample.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    num_bytes = sum(work.columns) * work.in_features * dtype.itemsize
    copies = max(1, -(-cold_bytes // num_bytes))
    states = random(rows, work.in_features)
    residual = random(rows, work.columns[0]) if work.has_residual else None
    calls: list[Callable[[], Any]] = []
    for _ in range(copies):
        weights = [random(each, work.in_features) for each in work.columns]
        calls.append(functools.partial(call_of, work, states, weights, residual))
    num_rounds = -(-max(CALLS, copies) // copies)
    calls *= num_rounds
    with no_stand_ins():
        spans = milliseconds(calls, device)
    return [span * 1e3 for span in spans]


def row_of(
    work: Work,
    rows: int,
    itemsize: int,
    spans: list[float],
    bandwidth: float,
) -> Row:
    """Returns a row of the record: a product's time, and what follows from it."""
    out_features = sum(work.columns)
    # What is read and written beside the weights, once each.
    num_states = work.in_features + out_features
    if work.is_gated:
        num_states -= work.columns[0]
    if work.has_residual:
        num_states += work.columns[0]
    num_bytes = itemsize * (out_features * work.in_features + rows * num_states)
    microseconds = percentiles(spans)
    median = microseconds["p50"]
    assert median is not None
    rate = num_bytes / (median / 1e6)
    return {
        "weight": work.weight,
        "way": work.way,
        "out_features": out_features,
        "in_features": work.in_features,
        "rows": rows,
        "bytes": num_bytes,
        "microseconds": microseconds,
        "gigabytes_per_second": rate / 1e9,
        "share_of_copy_bandwidth": rate / bandwidth,
        "teraflops": 2 * rows * out_features * work.in_features / (median / 1e6) / 1e12,
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
        "is_complete": False,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_second": bandwidth,
        **provenance(device),
    }
    found: list[Row] = []
    record: dict[str, Any] = {"provenance": facts, "rows": found}
    has_failed = False
    with torch.inference_mode():
        for work in works_of(shape):
            for number in (int(part) for part in rows.split(",")):
                if work.is_compared and number > ops.MAX_ROWS:
                    continue
                try:
                    spans = measure(work, number, dtype, device, cold_bytes)
                    found.append(row_of(work, number, dtype.itemsize, spans, bandwidth))
                except Exception as error:
                    has_failed = True
                    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    failed = {"weight": work.weight, "way": work.way, "rows": number}
                    found.append({**failed, "error": text})
                if may_write(path, quiet=not is_tiny):
                    write(record, path)  # a borrowed machine may be gone before the end
    show(f"Products with the weights of {model}, copy {bandwidth / 1e9:.0f} GB/s", found, COLUMNS)
    facts["is_complete"] = True
    # Tiny weights are never a record.
    finish(record, path, quiet=not is_tiny)
    if has_failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
