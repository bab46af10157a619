"""Choosing tokens: noise that is keyed by what it is for, and true rejection of proposals. No host sync.

Random numbers follow from (seed, row, position, stream), not from how many were drawn before. That is what makes a
sampled text the same at every block size: the token at a position is drawn with the same noise whether the position is
verified alone or as the ninth of a block.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf import ops

_MULTIPLIER = 0x45D9F3B37197344B
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _mix(bits: Tensor) -> Tensor:
    """One round of a 64-bit xor-multiply hash; int64 products wrap. The masks make the shifts logical."""
    for _ in range(2):
        bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * _MULTIPLIER
    return bits ^ ((bits >> 32) & 0xFFFFFFFF)


def exponential_noise(key: Tensor, positions_BK: Tensor, size: int, stream: int = 0) -> Tensor:
    """Draws independent Exp(1) variables for each row and position.

    Args:
        key (`torch.Tensor` of shape `[]`, int64): The run's seed.
        positions_BK (`torch.Tensor` of shape `[B, K]`, int64): Index of the token each draw is for.
        size (`int`): Draws per position (the vocabulary, or 1).
        stream (`int`): Separates independent uses at one position.

    Returns:
        `torch.Tensor` of shape `[B, K, size]`, float32, positive.
    """
    device = positions_BK.device
    rows = torch.arange(positions_BK.shape[0], device=device)[:, None]
    lane = _mix(_mix(key + stream) ^ (rows << 40) ^ positions_BK)
    bits = _mix(lane[..., None] + torch.arange(1, size + 1, device=device) * _GOLDEN)
    # 32 bits at the middle of their cell: never 0, and a resolution of 2^-32 where the winners of a Gumbel draw are.
    # Near 1 float32 would round up to 1, whose exponential is infinite: where one token is left, it would tie with
    # the forbidden ones.
    uniform = ((bits >> 20) & 0xFFFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


def gumbel_noise(key: Tensor, positions_BK: Tensor, size: int, stream: int = 0) -> Tensor:
    """Draws standard Gumbel noise: adding it to log-probabilities and taking the argmax samples from them.

    Arguments as [`exponential_noise`]. Returns `[B, K, size]`, float32.
    """
    return -torch.log(exponential_noise(key, positions_BK, size, stream))


def new_key(device: torch.device) -> Tensor:
    """Draws a run's seed from torch's global generator, so that `torch.manual_seed` makes a run repeatable."""
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device="cpu").to(device)


# Streams of keyed noise: what the target samples with (and, under shared_noise, the draft), what a draft that samples
# on its own draws with, and what a rejection test and the redraw after it use.
TARGET_STREAM, DRAFT_STREAM, REJECT_STREAM, RESIDUAL_STREAM = 0, 1, 2, 3


def choose(scores_BKV: Tensor, key: Tensor | None, positions_BK: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Chooses a token from processed scores: the argmax, or a sample by keyed Gumbel noise.

    Args:
        scores_BKV (`torch.Tensor` of shape `[B, K, V]`): Processed scores (log-probabilities up to a constant).
        key (`torch.Tensor`, *optional*): The run's seed; `None` is greedy.
        positions_BK (`torch.Tensor` of shape `[B, K]`): Index of the token being chosen.
        stream (`int`): See [`noise.exponential_noise`].

    Returns:
        `torch.Tensor` of shape `[B, K]`, int64.
    """
    if key is not None:
        scores_BKV = scores_BKV + gumbel_noise(key, positions_BK, scores_BKV.shape[-1], stream)
    return ops.best(scores_BKV)


def accept_rejection(
    proposals: Tensor, target_scores_BWV: Tensor, draft_probs: Tensor, key: Tensor, positions_BW: Tensor
) -> tuple[Tensor, Tensor]:
    """Keeps each proposal with probability `min(1, p / q)`; on the first refusal redraws from `max(p - q, 0)`.

    Args:
        proposals (`torch.Tensor` of shape `[B, W - 1]`): Tokens drawn from `draft_probs`.
        target_scores_BWV (`torch.Tensor` of shape `[B, W, V]`): The target's processed scores.
        draft_probs (`torch.Tensor` of shape `[B, W - 1, V]`): The distribution `q` the proposals were drawn from.
        key (`torch.Tensor`): The run's seed.
        positions_BW (`torch.Tensor` of shape `[B, W]`): Index of the token that each position decides.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Number accepted `[B]`, and tokens `[B, W]`: the proposals, with the
        redrawn or bonus token standing at index `num_accepted`.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    probs = torch.softmax(target_scores_BWV, dim=-1, dtype=torch.float32)
    chosen = proposals[..., None]
    p = probs[:, :-1].gather(-1, chosen)[..., 0]
    q = draft_probs.gather(-1, chosen)[..., 0]
    # u < p / q for uniform u, written with an exponential e = -log(1 - u).
    uniform = -torch.expm1(-exponential_noise(key, positions_BW[:, :-1], 1, REJECT_STREAM)[..., 0])
    num_accepted = (uniform * q < p).cumprod(dim=1).sum(dim=1)
    padded = torch.cat([draft_probs, torch.zeros_like(draft_probs[:, :1])], dim=1)
    at = num_accepted[:, None]
    residual = (probs - padded).clamp_min_(0).gather(1, at[..., None].expand(-1, -1, probs.shape[-1]))
    own = probs.gather(1, at[..., None].expand(-1, -1, probs.shape[-1]))
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, own)
    redrawn = choose(torch.log(residual), key, positions_BW.gather(1, at), RESIDUAL_STREAM)
    return num_accepted, torch.cat([proposals, redrawn], dim=1).scatter(1, at, redrawn)


def ends_row(tokens: Tensor, eos_ids: Tensor) -> Tensor:
    """Says which tokens, of any shape, are among the end-of-sequence ids `[N]`.

    Not `torch.isin`: with many ids it sorts, and reads how many different ones there are on the host.
    """
    return (tokens[..., None] == eos_ids).any(dim=-1)


__all__ = ["accept_rejection", "choose", "ends_row", "exponential_noise", "gumbel_noise", "new_key"]
