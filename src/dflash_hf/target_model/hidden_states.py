"""Recording the outputs of chosen target layers with forward hooks, the same in decoding and in training.

A tap on layer `i` records that layer's output: entry `i + 1` of Transformers' `hidden_states` for all but the last
layer (whose entry is normed there and is not here). Tap -1 records what the first layer is given: entry 0.
DeepStack adds features of images between two layers: a tap after it is what the next layer is given.
`output_hidden_states=[...]` is not used: its meaning shifted by one between Transformers 5.22 and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash_hf.scopes import Hook, hooked


class Taps:
    """Records layer outputs while it is open: `with Taps(layers, ids).open() as taps: model(...); taps.take()`.

    Only those of the thread that opened it: another one may run the same layers at the same time.

    Args:
        layers (sequence of `nn.Module`): Decoder layers of the target.
        layer_ids (sequence of `int`): 0-based layers to tap, -1 for the first one's input, in the order they are
            concatenated.
        sink (callable, *optional*): Called with the concatenated states `[B, S, L * D]` as soon as a forward has
            passed the last tapped layer; nothing is kept then. Without it they wait for `take`.
        counts (callable, *optional*): Says of the keywords of a tapped layer's call whether to record it; a hook of
            the user's may call the same layers inside a forward.
        after_deepstack (`bool`): Record what DeepStack has added to layers' outputs too. Nothing can be added to the
            last layer's.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        layer_ids: Sequence[int],
        sink: Callable[[Tensor], None] | None = None,
        after_deepstack: bool = False,
        counts: Callable[[dict[str, Any]], bool] | None = None,
    ) -> None:
        self.layers = layers
        self.layer_ids = list(layer_ids)
        self.sink = sink
        self.after_deepstack = after_deepstack
        self.counts = counts
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def open(self) -> Generator[Taps]:
        """Records in this thread until it is left."""
        by_input = {i for i in self.layer_ids if i < 0 or (self.after_deepstack and i + 1 < len(self.layers))}
        hooks = [
            Hook(self.layers[i + 1], self._hook(i), before=True, options={"with_kwargs": True})
            if i in by_input
            else Hook(self.layers[i], self._hook(i), options={"with_kwargs": True})
            for i in sorted(set(self.layer_ids))
        ]
        with hooked(*hooks):
            yield self
        self._states = {}

    def take(self) -> Tensor:
        """Returns the concatenated states `[B, S, L * D]` of the last forward and forgets them.

        Raises `RuntimeError` if a tapped layer did not run since the last call; a compiled module runs no hooks.
        """
        missing = sorted(set(self.layer_ids) - set(self._states))
        if missing:
            raise RuntimeError(
                f"expected outputs of target layers {self.layer_ids}, got none from {missing}; a compiled target runs "
                "no hooks that are added later, use the model as it was before torch.compile"
            )
        device = self._states[self.layer_ids[0]].device
        joined = torch.cat([self._states[i].to(device) for i in self.layer_ids], dim=-1)
        self._states = {}
        return joined

    def _hook(self, layer_id: int) -> Callable[..., None]:
        """Records what a layer gives, or, before its forward, what it is given."""

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
            if self.counts is not None and not self.counts(kwargs):
                return
            if output:
                states = output[0]
            else:
                states = args[0] if args else kwargs["hidden_states"]
            self._states[layer_id] = states[0] if isinstance(states, tuple) else states
            if layer_id == max(self.layer_ids) and self.sink is not None:
                self.sink(self.take())

        return record
