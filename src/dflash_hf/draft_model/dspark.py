"""What DSpark adds to a draft: a head that knows the token before a slot, and a walk along it.

A block's slots are drafted at once, so that each one's logits are those of no neighbour in particular. The Markov head
adds to the logits of a slot a row that follows from the token before it: a table of all pairs of tokens, of low rank.
The tokens of a block are then chosen one after the other. Like the model, this module knows nothing of decoding: no
acceptance, no sampling.

Shapes: `B` rows, `K` slots, `C` candidates per slot, `P` predecessors, `R` rank, `V` vocabulary. Sources: DeepSpec
`deepspec/modeling/dspark/markov_head.py::VanillaMarkov`; speculators 0.9 `models/dspark/model_definitions.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Logits [..., V] and the tokens before them [...] -> the logits behind these tokens.
Behind = Callable[[Tensor, Tensor], Tensor]


class MarkovHead(nn.Module):
    """What the token before a slot says of the slot's own: `W2 W1[token]`, to be added to the logits.

    In a new module `W2` is 0, so that it says nothing.

    Args:
        vocab_size (`int`): Tokens of the target, which may stand before a slot.
        num_ids (`int`): Tokens that the draft can propose.
        rank (`int`): Width of both tables.
        initializer_range (`float`): Standard deviation of a new `W1`.
    """

    def __init__(self, vocab_size: int, num_ids: int, rank: int, initializer_range: float) -> None:
        super().__init__()
        self.initializer_range = initializer_range
        # Two narrow tables: one for all pairs of tokens would be as large as the vocabulary squared.
        first = torch.empty(vocab_size, rank)
        second = torch.empty(num_ids, rank)
        self.markov_w1 = nn.Parameter(first)
        self.markov_w2 = nn.Parameter(second)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weights with which all that the head says is 0, and `W2` has a gradient."""
        # With both tables at 0 neither would have a gradient.
        nn.init.normal_(self.markov_w1, std=self.initializer_range)
        nn.init.zeros_(self.markov_w2)

    def forward(self, before: Tensor) -> Tensor:
        """Returns what tokens `[...]` say of the next one: `[..., num_ids]`, on the head's device."""
        # Ids are on the target's device.
        before = before.to(self.markov_w1.device)
        states = nn.functional.embedding(before, self.markov_w1)
        return nn.functional.linear(states, self.markov_w2)


def walk(
    logits: Tensor, anchors: Tensor, behind: Behind, choose: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """Walks through a block and chooses each token behind the one that was chosen before; no host sync.

    Args:
        logits (`torch.Tensor` of shape `[B, K, V]`): The slots' logits, without what the tokens before say.
        anchors (`torch.Tensor` of shape `[B]`, int64): Tokens before the first slot.
        behind (callable): Adds what the tokens before say.
        choose (callable): Takes the logits `[B, 1, V]` of a slot behind its token, and which slot it is; returns the
            slot's token `[B, 1]`.

    Returns:
        `torch.Tensor` of shape `[B, K]`, int64.
    """
    before = anchors.to(logits.device)[:, None]
    chosen: list[Tensor] = []
    # Slot by slot, because the logits of each one depend on the token chosen before it.
    for slot in range(logits.shape[1]):
        one = slice(slot, slot + 1)
        # The token stays on the device: it is looked up there for the next slot.
        before = choose(behind(logits[:, one], before), one)
        chosen.append(before)
    return torch.cat(chosen, dim=1)


def likeliest_transitions(
    logits: Tensor, anchors: Tensor, behind: Behind, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Finds the tokens of the block's likeliest paths, and what each one makes of the next; no host sync.

    A slot's candidates are the tokens in which the likeliest paths so far end. A tree of the likeliest paths of any
    length holds every path's beginnings too; so it lacks no path, as long as none of its levels has more nodes than
    there are candidates.

    Args:
        logits, anchors, behind: As in [`walk`].
        num_candidates (`int`): `C`, at most the tokens that the draft can propose.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Candidates `[B, K, C]`, int64, and log-probabilities `[B, K, C, C]`:
        `[b, t, i, j]` is that of candidate `j` at slot `t` behind candidate `i` of slot `t - 1`. At the first slot all
        `i` are the anchor.
    """
    before = anchors.to(logits.device)[:, None]
    # Whatever the dtype of the logits: a sum over many slots would lose its last digits in half precision.
    totals = torch.zeros_like(before, dtype=torch.float32)
    candidates: list[Tensor] = []
    scores: list[Tensor] = []
    for slot in range(logits.shape[1]):
        # Behind every candidate of the slot before: [B, P, V]. Normalised, because paths are compared by their whole
        # probability.
        log_probs = behind(logits[:, slot, None], before).log_softmax(dim=-1)
        # Of the paths that end in a token the likeliest one counts: [B, V].
        of_paths = (totals[..., None] + log_probs).amax(dim=1)
        totals, before = of_paths.topk(num_candidates, dim=-1)
        columns = before[:, None].expand(-1, log_probs.shape[1], -1)
        # At the first slot the anchor's row stands for those of all predecessors.
        rows = log_probs.gather(2, columns).expand(-1, num_candidates, -1)
        candidates.append(before)
        scores.append(rows)
    return torch.stack(candidates, dim=1), torch.stack(scores, dim=1)
