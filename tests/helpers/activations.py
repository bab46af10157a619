"""Records what a draft computes, layer by layer, under the names that tests/parity/make_goldens.py writes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def recorded(context_norm: nn.Module, layers: nn.ModuleList) -> Iterator[dict[str, Tensor]]:
    """Yields a dictionary that fills up with `context` and `layer_<i>` as the model runs."""
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, name: str) -> torch.utils.hooks.RemovableHandle:
        def note(_module: nn.Module, _inputs: object, out: Tensor | tuple[Tensor, Tensor]) -> None:
            # Our layers leave the last sum to the norm behind them.
            kept[name] = out if isinstance(out, Tensor) else out[0] + out[1]

        return module.register_forward_hook(note)

    hooks = [
        keep(context_norm, "context"),
        *(keep(layer, f"layer_{i}") for i, layer in enumerate(layers)),
    ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got - expected).abs().max() / expected.abs().max())
