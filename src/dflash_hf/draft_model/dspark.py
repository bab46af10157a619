"""This module defines the parts that DSpark adds to a draft: a Markov head, and a walk that chooses tokens with it.

The slots of a block are drafted at once, so the logits of a slot do not depend on the tokens that are chosen for its
neighbours. The Markov head adds a vector to the logits of a slot, which depends on the token before the slot. The
vector is a row of a low-rank table of all pairs of tokens. The tokens of a block are then chosen one after the other.
Like the model, this module does not decode: it has no acceptance and no sampling.

Shapes: `B` rows, `K` slots, `C` candidates per slot, `P` predecessors, `R` rank, `V` vocabulary. Sources: DeepSpec
`deepspec/modeling/dspark/markov_head.py::VanillaMarkov`; speculators 0.9 `models/dspark/model_definitions.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Takes logits [..., V] and the tokens before them [...], and returns the logits after these tokens.
Behind = Callable[[Tensor, Tensor], Tensor]


class MarkovHead(nn.Module):
    """The Markov head computes `W2 W1[token]` of the token before a slot, which is added to the slot's logits.

    In a new module `W2` is 0, so the head changes no logits.

    Args:
        vocab_size (`int`): Number of the target's tokens. Each of them may stand before a slot.
        num_ids (`int`): Number of tokens that the draft can propose.
        rank (`int`): Width of both tables.
        initializer_range (`float`): Standard deviation of a new `W1`.
    """

    def __init__(self, vocab_size: int, num_ids: int, rank: int, initializer_range: float) -> None:
        super().__init__()
        self.initializer_range = initializer_range
        # The head has two narrow tables. One table for all pairs of tokens would have the size of the vocabulary
        # squared.
        first = torch.empty(vocab_size, rank)
        second = torch.empty(num_ids, rank)
        self.markov_w1 = nn.Parameter(first)
        self.markov_w2 = nn.Parameter(second)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weights with which the output of the head is 0, and `W2` gets a gradient."""
        # With both tables at 0, neither would get a gradient.
        nn.init.normal_(self.markov_w1, std=self.initializer_range)
        nn.init.zeros_(self.markov_w2)

    def forward(self, before: Tensor) -> Tensor:
        """Returns the vectors `[..., num_ids]` for the logits after tokens `[...]`, on the head's device."""
        # The ids are on the target's device.
        before = before.to(self.markov_w1.device)
        states = nn.functional.embedding(before, self.markov_w1)
        return nn.functional.linear(states, self.markov_w2)


def walk(
    logits: Tensor, anchors: Tensor, behind: Behind, choose: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """Walks through a block and chooses each token after the token that was chosen before it; no host sync.

    Args:
        logits (`torch.Tensor` of shape `[B, K, V]`): Logits of the slots, without the vectors of the Markov head.
        anchors (`torch.Tensor` of shape `[B]`, int64): Tokens before the first slot.
        behind (callable): Adds the vector of the token before a slot to the slot's logits.
        choose (callable): Takes the logits `[B, 1, V]` of a slot after its predecessor, and the place of the slot as a
            slice. Returns the slot's token `[B, 1]`.

    Returns:
        `torch.Tensor` of shape `[B, K]`, int64.
    """
    before = anchors.to(logits.device)[:, None]
    chosen: list[Tensor] = []
    # The loop goes slot by slot, because the logits of a slot depend on the token chosen before it.
    for slot in range(logits.shape[1]):
        one = slice(slot, slot + 1)
        # The token stays on the device, where the next slot looks it up.
        before = choose(behind(logits[:, one], before), one)
        chosen.append(before)
    return torch.cat(chosen, dim=1)


def likeliest_transitions(
    logits: Tensor, anchors: Tensor, behind: Behind, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Finds the candidates of the block's likeliest paths, and the scores of the transitions between them; no host
    sync.

    The candidates of a slot are the last tokens of the likeliest paths up to this slot. A tree of the likeliest paths
    also holds the beginnings of every path. So it lacks no path if none of its levels has more nodes than there are
    candidates.

    Args:
        logits, anchors, behind: As in [`walk`].
        num_candidates (`int`): `C`, at most the number of tokens that the draft can propose.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Candidates `[B, K, C]`, int64, and log-probabilities `[B, K, C, C]`, of
        which `[b, t, i, j]` is the log-probability of candidate `j` at slot `t` after candidate `i` of slot `t - 1`.
        At the first slot every `i` stands for the anchor.
    """
    before = anchors.to(logits.device)[:, None]
    # The totals are in float32 for any dtype of the logits, because a sum over many slots would lose its last digits
    # in half precision.
    totals = torch.zeros_like(before, dtype=torch.float32)
    candidates: list[Tensor] = []
    scores: list[Tensor] = []
    for slot in range(logits.shape[1]):
        # These are the log-probabilities after every candidate of the slot before: [B, P, V]. They are normalised,
        # because paths are compared by their whole probability.
        log_probs = behind(logits[:, slot, None], before).log_softmax(dim=-1)
        # Only the likeliest of the paths that end in a token counts: [B, V].
        of_paths = (totals[..., None] + log_probs).amax(dim=1)
        totals, before = of_paths.topk(num_candidates, dim=-1)
        columns = before[:, None].expand(-1, log_probs.shape[1], -1)
        # At the first slot, the anchor's row is used for all predecessors.
        rows = log_probs.gather(2, columns).expand(-1, num_candidates, -1)
        candidates.append(before)
        scores.append(rows)
    return torch.stack(candidates, dim=1), torch.stack(scores, dim=1)
