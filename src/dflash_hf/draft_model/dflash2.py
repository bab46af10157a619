"""What DFlash 2 adds to a draft: a convolution around each sublayer, and a selector of paths through the block.

A block's slots are drafted at once, so each knows little of what its neighbours propose. The convolution lets a slot
see the few before it; the selector scores pairs of neighbouring proposals, so that a walk from the anchor picks tokens
that fit each other. Like the model, this module knows nothing of decoding: no acceptance, no sampling.

Shapes: `B` rows, `K` slots, `D` hidden, `C` candidates per slot, `R` rank, `V` vocabulary. Source: z-lab
`dflash/model.py` 0.1.0, `GroupedDynamicCausalConv` and `CandidateSelector`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class GroupedDynamicConvolution(nn.Module):
    """Convolves the slots of a block before and after a sublayer, with kernels that depend on the slot.

    `y_t[c] = sum_o (base[o, c] + dynamic_t[o, c // group_size]) * x_{t - o}[c]`, where `x` before the block is 0. Both
    dynamic kernels, of the input and of the output, are projected from the sublayer's normed input. A new module is
    the identity: `base` is 1 at tap 0 and 0 elsewhere, `dynamic` is 0.

    Args:
        hidden_size (`int`): Channels, a multiple of `group_size`.
        kernel_size (`int`): Taps: the slot itself and the slots before it.
        group_size (`int`): Neighbouring channels that share a dynamic kernel.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.group_size = group_size
        num_groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * num_groups, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights with which the convolution is the identity."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(
        self, states: Tensor, sublayer: Callable[[Tensor], Tensor], block_size: int
    ) -> Tensor:
        """Returns the convolution of `sublayer(convolution of states)`.

        Args:
            states (`torch.Tensor` of shape `[B, N * K, D]`): The sublayer's normed input, block after block.
            sublayer (callable): `[B, N * K, D]` to the same shape.
            block_size (`int`): `K`; nothing crosses from one block into the next.
        """
        blocks = states.unflatten(1, (-1, block_size))
        # Both kernels come from the input, so that one product gives both: [B, N, K, 2, taps, groups].
        kernels = self.kernel_projection(blocks).unflatten(-1, (2, self.kernel_size, -1))
        entering = self._convolve(blocks, self.base_kernel[0], kernels[..., 0, :, :])
        leaving = sublayer(entering.flatten(1, 2))
        leaving = leaving.unflatten(1, (-1, block_size))
        convolved = self._convolve(leaving, self.base_kernel[1], kernels[..., 1, :, :])
        return convolved.flatten(1, 2)

    def _convolve(self, blocks: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
        """Returns `[B, N, K, D]` convolved along `K`, with kernels `[taps, D]` and `[B, N, K, taps, groups]`."""
        grouped = blocks.unflatten(-1, (-1, self.group_size))
        base = base.to(blocks.dtype).unflatten(-1, (-1, self.group_size))
        out = torch.zeros_like(grouped)
        for tap in range(self.kernel_size):
            # The padding stands before the block and shifts its slots by `tap`.
            earlier = nn.functional.pad(grouped, (0, 0, 0, 0, tap, 0))[:, :, : grouped.shape[2]]
            out = out + base[tap] * earlier + dynamic[..., tap, :, None] * earlier
        return out.flatten(-2)


class CandidateSelector(nn.Module):
    """Scores each of the head's best tokens behind each predecessor: `S_t(a, b) = U_t(b) + <A[a] * (W h_t), B[b]>`.

    `U_t` are the draft's logits at slot `t`, whose `top_k` largest are candidates, and `h_t` is its state after the
    final norm. In a new module `B` is 0, so that every score is the logit.

    Args:
        vocab_size (`int`): Rows of the two codebooks, `A` of predecessors and `B` of successors.
        hidden_size (`int`): Width of the states.
        rank (`int`): Width of the codebooks.
        top_k (`int`): Candidates per slot.
        initializer_range (`float`): Standard deviation of a new `A`.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, rank: int, top_k: int, initializer_range: float
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.initializer_range = initializer_range
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weights with which every score is the logit, and the successors' codebook has a gradient."""
        nn.init.normal_(self.predecessor_codebook, std=self.initializer_range)
        nn.init.zeros_(self.successor_codebook)

    def score(
        self, hidden_states: Tensor, predecessors: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores every candidate of a slot behind each of the given tokens.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., D]`): States after the final norm.
            predecessors (`torch.Tensor` of shape `[..., P]`, int64): Tokens that may stand before the slot.
            logits (`torch.Tensor` of shape `[..., V]`): The draft's logits; may be on another device.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[..., C]`, int64, best logit first, and scores
            `[..., P, C]` in float32 or wider, on the device of the logits.
        """
        unary, candidates = logits.topk(self.top_k, dim=-1)
        return candidates, self._with_pairs(hidden_states, predecessors, unary, candidates)

    def forward(
        self, hidden_states: Tensor, logits: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores all transitions of a block at once; [`follow_path`] then walks through them.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): States of the slots after the anchor.
            logits (`torch.Tensor` of shape `[B, K, V]`): The draft's logits at these slots.
            anchors (`torch.Tensor` of shape `[B]`, int64): Tokens before the first slot.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[B, K, C]`, int64, and scores `[B, K, C, C]`:
            `scores[b, t, i, j]` is the score of candidate `j` at slot `t` behind candidate `i` of slot `t - 1`. At the
            first slot all `i` are the anchor.
        """
        unary, candidates = logits.topk(self.top_k, dim=-1)
        # The anchor stands in for the candidates of a slot before the first, so that all slots have one shape.
        first = anchors.to(candidates.device)[:, None, None].expand(-1, 1, self.top_k)
        predecessors = torch.cat([first, candidates[:, :-1]], dim=1)
        return candidates, self._with_pairs(hidden_states, predecessors, unary, candidates)

    def _with_pairs(
        self, hidden_states: Tensor, predecessors: Tensor, unary: Tensor, candidates: Tensor
    ) -> Tensor:
        """Returns the candidates' logits `[..., C]` plus the scores of the pairs: `[..., P, C]`."""
        device = hidden_states.device
        before = nn.functional.embedding(predecessors.to(device), self.predecessor_codebook)
        after = nn.functional.embedding(candidates.to(device), self.successor_codebook)
        projected = self.hidden_projection(hidden_states)[..., None, :]
        pairs = (before * projected) @ after.transpose(-1, -2)
        # Small differences of logits decide here; bfloat16 has steps of 1/16 at 16.
        dtype = torch.promote_types(unary.dtype, torch.float32)
        return unary.to(dtype)[..., None, :] + pairs.to(unary.device, dtype)


def follow_path(candidates: Tensor, scores: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Walks from the anchor through a block along the decided transitions; no host sync.

    Args:
        candidates (`torch.Tensor` of shape `[B, K, C]`, int64): Candidates of each slot.
        scores (`torch.Tensor` of shape `[B, K, C, C]`): Scores from [`CandidateSelector`], warped or not.
        best (`torch.Tensor` of shape `[B, K, C]`, int64): The candidate that follows each one of the slot before.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The tokens of the path `[B, K]`, and the scores `[B, K, C]` that the
        candidates had at each of its slots, behind the path so far.
    """
    num_candidates = best.shape[-1]
    # At the first slot every row of scores is the anchor's; the walk begins with row 0.
    candidate = torch.zeros_like(best[:, 0, :1])
    before = []
    chosen = []
    for slot in range(best.shape[1]):
        before.append(candidate)
        candidate = best[:, slot].gather(1, candidate)
        chosen.append(candidate)
    path = torch.stack(chosen, dim=1)
    tokens = candidates.gather(2, path)[..., 0]
    rows = torch.stack(before, dim=1)[..., None]
    rows = rows.expand(-1, -1, 1, num_candidates)
    return tokens, scores.gather(2, rows)[:, :, 0]
