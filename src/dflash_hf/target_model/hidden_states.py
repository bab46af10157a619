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

from dflash_hf.undo import Hook, hooked


class Taps:
    """Records layer outputs while it is open: `with Taps(layers, ids).open() as taps: model(...); taps.take()`.

    Only those of the thread that opened it: another one may run the same layers at the same time.

    Args:
        layers (sequence of `nn.Module`): Decoder layers of the target.
        layer_ids (sequence of `int`): 0-based layers to tap, -1 for the first one's input, in the order they are
            concatenated.
        sink (callable, *optional*): Called with the concatenated states `[B, S, L * D]` as soon as a forward has
            passed the last tapped layer; nothing is kept then. Without it they wait for `take`.
        counts (callable): Returns whether a call of a tapped layer with these keywords is recorded, by default each
            one is; a hook of the user's may call the same layers inside a forward.
        after_deepstack (`bool`): Record what DeepStack has added to layers' outputs too. Nothing can be added to the
            last layer's.
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
        """Records in this thread until it is left."""
        # A layer that is tapped twice has one hook; its states are concatenated twice.
        tapped = sorted(set(self.layer_ids))
        hooks = [self._hook(layer_id) for layer_id in tapped]
        with hooked(*hooks):
            self.is_open = True
            try:
                yield self
            finally:
                self.is_open = False
        # States of a forward that nobody took would hold its memory.
        self._states = {}

    def take(self) -> Tensor:
        """Returns the concatenated states `[B, S, L * D]` of the last forward and forgets them.

        Raises `RuntimeError` if a tapped layer did not run since the last call; a compiled module runs no hooks.
        """
        missing = sorted(set(self.layer_ids) - set(self._states))
        # States of an earlier forward would be as many and of the same shape: they are forgotten once taken.
        if missing:
            raise RuntimeError(
                f"expected outputs of target layers {self.layer_ids}, got none from {missing}; a compiled target runs "
                "no hooks that are added later, use the model as it was before torch.compile"
            )
        # In the order of the draft's config, which its first weight is made for.
        states = [self._states[layer_id] for layer_id in self.layer_ids]
        # Layers may be on several devices.
        device = states[0].device
        joined = torch.cat([of_layer.to(device) for of_layer in states], dim=-1)
        self._states = {}
        return joined

    def _hook(self, layer_id: int) -> Hook:
        """Returns the hook that records a tap: on its layer, or before the layer behind it."""
        is_last = layer_id + 1 == len(self.layers)
        # DeepStack adds to a layer's output before the next layer gets it.
        is_input_of_next = layer_id < 0 or (self.after_deepstack and not is_last)
        # Hooks are called with keywords: they tell whose call it is.
        options = {"with_kwargs": True}

        def record_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._counts(kwargs):
                return
            # Some decoders pass the states by keyword.
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

        # The layer -1 is the embedding: its output is the first layer's input.
        if is_input_of_next:
            next_layer = self.layers[layer_id + 1]
            return Hook(next_layer, record_input, before=True, options=options)
        return Hook(self.layers[layer_id], record_output, options=options)

    def _record(self, layer_id: int, states: Tensor) -> None:
        """Keeps the states of a tap, and hands all of them on behind the last one."""
        self._states[layer_id] = states
        # The first layer's input comes before the output of any.
        is_last_tap = layer_id == max(self.layer_ids)
        if is_last_tap and self.sink is not None:
            self.sink(self.take())
