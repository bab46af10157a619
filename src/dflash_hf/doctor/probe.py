"""This module measures a draft's acceptance under changed settings, without decoding again.

The target writes its answers only once. Every token of an answer is taken as an anchor. So one forward of the draft
says how many proposals would be accepted at each anchor, and a change of the draft's settings needs forwards of the
draft only. The user's draft is never changed: a variant is a second model over the same weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.draft_model.layers import DFlashAttention, DFlashRotaryEmbedding
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target
from dflash_hf.training.collators import Batch, collate
from dflash_hf.training.example import Example
from dflash_hf.training.forward import target_features
from dflash_hf.training.walking import accepted_at_anchors, walk

# Fields of `DFlashConfig` whose values differ from the draft's own. `dtype` is the dtype in which the variant runs.
Setup = dict[str, Any]


def variant(draft: DFlashDraftModel, setup: Setup) -> DFlashDraftModel:
    """Builds a second model over the same weights, with other settings. With another dtype, the weights are copied."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in draft.parameters()}
    twin = copy.deepcopy(draft, shared)
    config = DFlashConfig.from_dict({**draft.config.to_dict(), **setup})
    twin.config = config
    twin.rotary_emb = DFlashRotaryEmbedding(config).to(draft.device)
    for module in twin.modules():
        if isinstance(module, DFlashAttention):
            module.kind = config.attention_kind(module.layer_idx)
    dtype = setup.get("dtype", draft.dtype)
    if dtype != draft.dtype:
        twin = copy.deepcopy(twin)
        for tensor in (*twin.parameters(), *twin.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return twin.eval()


@dataclass(frozen=True, slots=True)
class Measurement:
    """The acceptance of one setup."""

    # Mean number of tokens that a verify would commit, for each run of `block_size` anchors. Neighbouring anchors see
    # nearly the same tokens, but runs are almost independent.
    groups: tuple[float, ...]
    weights: tuple[int, ...]  # number of anchors in each run

    @property
    def mean(self) -> float:
        """Mean number of tokens that a verify would commit, over every anchor of every text; 1 if nothing is accepted.

        Decoding visits fewer anchors, so its mean differs (see `Probe.walked`). This mean averages over more anchors,
        and only differences between setups count.
        """
        total = sum(self.weights)
        if not total:
            return 1.0
        return sum(g * w for g, w in zip(self.groups, self.weights, strict=True)) / total

    def beats(self, other: Measurement) -> bool:
        """Returns whether this is better, by 3 % of the mean and three standard errors of the difference.

        Both measurements must be on the same texts.
        """
        gain = self.mean - other.mean
        count = len(self.groups)
        if count < 3 or gain < 0.03 * other.mean:  # two runs of anchors cannot show what is chance
            return False
        total = sum(self.weights)
        pairs = zip(self.groups, other.groups, self.weights, strict=True)
        variance = sum((w / total * (mine - theirs - gain)) ** 2 for mine, theirs, w in pairs)
        return gain >= 3 * math.sqrt(variance * count / (count - 1))


class Probe:
    """Measures setups of a pair on fixed texts.

    The target runs once over each text. The outputs of the tapped layers and of their neighbours are kept.

    Args:
        target (`Target`): The target, in eval mode.
        draft (`DFlashDraftModel`): The draft, which is not changed.
        examples (sequence of [`Example`]): The target's own greedy answers.
    """

    def __init__(
        self, target: Target, draft: DFlashDraftModel, examples: Sequence[Example]
    ) -> None:
        self.target = target
        self.draft = draft
        self.examples = list(examples)
        self.layer_ids = draft.config.target_layer_ids
        near = sorted({i for shift in (-1, 0, 1) for i in self.shifted(shift)})
        self.texts: list[tuple[Batch, dict[bool, dict[int, Tensor]]]] = []
        self._counted: dict[str, list[list[int]]] = {}
        for example in self.examples:
            batch = collate([example]).to(target.device)
            self.texts.append((batch.to(draft.device), self._states(batch, near)))

    def _states(self, batch: Batch, layer_ids: list[int]) -> dict[bool, dict[int, Tensor]]:
        """Returns the layers' outputs `[1, S, D]`, without (False) and with (True) what DeepStack adds to them.

        Equal outputs are stored once.
        """
        found: list[dict[int, Tensor]] = []
        ways = [False]
        if batch.model_inputs:
            ways.append(True)
        for after in ways:
            taps = target_features(self.target, layer_ids, batch, after_deepstack=after).taps
            found.append(dict(zip(layer_ids, taps.chunk(len(layer_ids), dim=-1), strict=True)))
        before = found[0]
        changed = {i: s for i, s in found[-1].items() if not torch.equal(before[i], s)}
        return {False: before, True: {**before, **changed}}

    @property
    def deepstack_differs(self) -> bool:
        """Whether taps before and after DeepStack's additions differ on these texts."""
        return any(
            states[True][i] is not states[False][i]
            for _, states in self.texts
            for i in self.layer_ids
        )

    def shifted(self, shift: int) -> list[int]:
        """Returns the tapped layers, moved by `shift`. -1, the embedding, is included only if the draft taps it."""
        first = min(0, *self.layer_ids)
        last = len(self.target.layers) - 1
        return [min(max(i + shift, first), last) for i in self.layer_ids]

    def measure(self, setup: Setup) -> Measurement:
        """Counts what a verify at every anchor would commit. Taps must be the draft's own or their neighbours."""
        size = self.draft.config.block_size
        runs = [
            accepted[start : start + size]
            for accepted in self._accepted(setup)
            for start in range(0, len(accepted), size)
        ]
        return Measurement(
            tuple(1.0 + sum(run) / len(run) for run in runs), tuple(len(run) for run in runs)
        )

    def walked(self, setup: Setup, is_tree: bool = False) -> float:
        """Returns the acceptance length that greedy `generate` would have on these texts, with a chain or a tree."""
        committed: list[int] = []
        for example, accepted in zip(self.examples, self._accepted(setup, is_tree), strict=True):
            first = example.prompt_length()
            committed += walk([0] * first + accepted, first, len(example.input_ids) - 1)
        if not committed:
            return 0.0
        return sum(committed) / len(committed)

    def _accepted(self, setup: Setup, is_tree: bool = False) -> list[list[int]]:
        """Returns, per text, the accepted proposals at each anchor (all answer tokens but the last), with a cache."""
        key = repr((setup, is_tree))
        if key in self._counted:
            return self._counted[key]
        draft = variant(self.draft, setup)
        found: list[list[int]] = []
        for example, (batch, states) in zip(self.examples, self.texts, strict=True):
            tapped = states[draft.config.tap_after_deepstack]
            features = torch.cat([tapped[i] for i in draft.config.target_layer_ids], dim=-1).to(
                draft.device
            )
            accepted = accepted_at_anchors(draft, self.target, batch, features, is_tree=is_tree)
            found.append(accepted[0, example.prompt_length() : -1].tolist())
        self._counted[key] = found
        return found
