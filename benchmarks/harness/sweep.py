"""The attention kernel under other tiles, stages, warps and splits: whether the chosen ones are the best."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dflash_kernels.block_attention import kernel

from .kernel_cases import Sizes, attention_case
from .operations import no_stand_ins
from .rates import milliseconds
from .rows import Row, percentiles

# Slots of a tile, stages, warps; `None` is what `tile_sizes` chooses.
TILES: list[tuple[int, int, int] | None] = [
    None,
    (32, 3, 4),
    (64, 2, 4),
    (64, 4, 4),
    (128, 2, 4),
    (128, 2, 8),
]
SHARES = (1.0, 0.5, 2.0)  # of the splits that `choose_num_splits` chooses
CALLS = 8


@contextmanager
def _chosen(tile: tuple[int, int, int] | None, share: float) -> Generator[None]:
    sizes: Callable[..., Any] = kernel.tile_sizes
    splits: Callable[..., Any] = kernel.choose_num_splits

    def other_sizes(*args: Any, **kwargs: Any) -> Any:
        rows, *rest = sizes(*args, **kwargs)
        if tile is not None:
            return (rows, *tile)
        return (rows, *rest)

    def other_splits(*args: Any, **kwargs: Any) -> int:
        return max(1, round(share * splits(*args, **kwargs)))

    changed: Any = kernel
    changed.tile_sizes = other_sizes
    changed.choose_num_splits = other_splits
    try:
        yield
    finally:
        changed.tile_sizes = sizes
        changed.choose_num_splits = splits


def sweep(
    sizes: Sizes, cells: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> Iterator[Row]:
    """Times a target's attention in every way, a row for each; what does not compile or fit is a row that says why.

    Args:
        sizes (`Sizes`): Of the model.
        cells (`list[tuple[int, int]]`): Batches and contexts.
        dtype, device: Of keys and values.
    """
    for (batch, context), tile, share in itertools.product(cells, TILES, SHARES):
        case = attention_case(sizes, batch, context, dtype, device, causal=True)
        inputs = [case.make(seed) for seed in range(2)]
        row: Row = {
            "batch": batch,
            "context": context,
            "tile": tile,
            "share_of_splits": share,
            "error": None,
        }
        with _chosen(tile, share):
            try:
                calls = [functools.partial(case.ways["kernel"], x) for x in inputs * (CALLS // 2)]
                # A tile that does not fit would leave the definition to be timed, here and in all later rows.
                with no_stand_ins():
                    spans = milliseconds(calls, device)
                row["microseconds"] = percentiles([span * 1e3 for span in spans])
            except Exception as error:  # whatever a compiler raises
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        yield row
