"""This module records the outputs of chosen target layers with forward hooks, in the same way in decoding and
training.

A tap on layer `i` records that layer's output. This is entry `i + 1` of Transformers' `hidden_states`, except for the
last layer, whose entry is normed there and not here. Tap -1 records the input of the first layer, which is entry 0.
DeepStack adds features of images between two layers. A tap after DeepStack records the input of the next layer.
`output_hidden_states=[...]` is not used, because its meaning shifted by one between Transformers 5.22 and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash_hf.undo import Hook, hooked


class Taps:
    """An instance records layer outputs while it is open: `with Taps(layers, ids).open() as taps: model(...);
    taps.take()`.

    It records only the forwards of the thread that opened it, because another thread may run the same layers at the
    same time.

    Args:
        layers (sequence of `nn.Module`): Decoder layers of the target.
        layer_ids (sequence of `int`): 0-based layers to tap, -1 for the first layer's input, in the order of
            concatenation.
        sink (callable, *optional*): Called with the concatenated states `[B, S, L * D]` as soon as a forward has
            passed the last tapped layer. Then nothing is kept. Without a sink, the states are kept for `take`.
        counts (callable): Returns whether a call of a tapped layer with these keywords is recorded. By default every
            call is recorded. A hook of the user may call the same layers inside a forward.
        after_deepstack (`bool`): Whether to record the outputs of layers after DeepStack has added to them. Nothing is
            added to the output of the last layer.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        layer_ids: Sequence[int],
        sink: Callable[[Tensor], None] | None = None,
        after_deepstack: bool = False,
        counts: Callable[[dict[str, Any]], bool] = lambda kwargs: True,
    ) -> None:
        self.layers = layers
        self.layer_ids = list(layer_ids)
        self.sink = sink
        self.after_deepstack = after_deepstack
        self._counts = counts
        self._states: dict[int, Tensor] = {}
        self.is_open = False

    @contextmanager
    def open(self) -> Generator[Taps]:
        """Records in this thread until the context is left."""
        # A layer that is tapped twice has one hook. Its states are concatenated twice.
        tapped = sorted(set(self.layer_ids))
        hooks = [self._hook(layer_id) for layer_id in tapped]
        with hooked(*hooks):
            self.is_open = True
            try:
                yield self
            finally:
                self.is_open = False
        # States that were not taken would keep their memory.
        self._states = {}

    def take(self) -> Tensor:
        """Returns the concatenated states `[B, S, L * D]` of the last forward and forgets them.

        Raises `RuntimeError` if a tapped layer did not run since the last call. A compiled module runs no hooks.
        """
        missing = sorted(set(self.layer_ids) - set(self._states))
        # States of an earlier forward may have the same number and shape. Therefore states are forgotten once they are
        # taken.
        if missing:
            raise RuntimeError(
                f"expected outputs of target layers {self.layer_ids}, got none from {missing}; a compiled target runs "
                "no hooks that are added later, use the model as it was before torch.compile"
            )
        # The states are in the order of the draft's config, for which the draft's first weight was trained.
        states = [self._states[layer_id] for layer_id in self.layer_ids]
        # Layers may be on several devices.
        device = states[0].device
        joined = torch.cat([of_layer.to(device) for of_layer in states], dim=-1)
        self._states = {}
        return joined

    def _hook(self, layer_id: int) -> Hook:
        """Returns the hook that records a tap: on its layer, or before the next layer."""
        is_last = layer_id + 1 == len(self.layers)
        # DeepStack adds to a layer's output before the next layer gets it.
        is_input_of_next = layer_id < 0 or (self.after_deepstack and not is_last)
        # Hooks are called with keywords, because the keywords show whose call it is.
        options = {"with_kwargs": True}

        def record_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._counts(kwargs):
                return
            # Some decoders pass the states as a keyword.
            states = args[0] if args else kwargs["hidden_states"]
            self._record(layer_id, states)

        def record_output(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if not self._counts(kwargs):
                return
            # Older layers return a tuple.
            states = output[0] if isinstance(output, tuple) else output
            self._record(layer_id, states)

        # Layer -1 is the embedding, whose output is the first layer's input.
        if is_input_of_next:
            next_layer = self.layers[layer_id + 1]
            return Hook(next_layer, record_input, before=True, options=options)
        return Hook(self.layers[layer_id], record_output, options=options)

    def _record(self, layer_id: int, states: Tensor) -> None:
        """Keeps the states of a tap. After the last tap, all states go to the sink, if there is one."""
        self._states[layer_id] = states
        # The first layer's input is recorded before any layer's output, so the largest id is the last tap.
        is_last_tap = layer_id == max(self.layer_ids)
        if is_last_tap and self.sink is not None:
            self.sink(self.take())
