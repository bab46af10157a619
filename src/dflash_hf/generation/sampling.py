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
from dflash_hf.generation.processors import BlockProcessors


def gumbel_noise(key: Tensor, positions_BK: Tensor, tokens: Tensor, stream: int = 0) -> Tensor:
    """Draws standard Gumbel noise: adding it to log-probabilities and taking the argmax samples from them.

    Arguments as `ops.exponential_noise`. Returns `[B, K, N]`, float32.
    """
    return -torch.log(ops.exponential_noise(key, positions_BK, tokens, stream))


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
        stream (`int`): See `ops.exponential_noise`.

    Returns:
        `torch.Tensor` of shape `[B, K]`, int64.
    """
    if key is not None:
        tokens = torch.arange(scores_BKV.shape[-1], device=scores_BKV.device)
        scores_BKV = scores_BKV + gumbel_noise(key, positions_BK, tokens, stream)
    return ops.best(scores_BKV)


def choose_from_logits(
    logits_BKV: Tensor,
    processors: BlockProcessors,
    key: Tensor | None,
    positions_BK: Tensor,
    stream: int = TARGET_STREAM,
) -> Tensor:
    """Chooses tokens as [`choose`] does from the scores that stateless processors make of logits.

    By one kernel, which makes neither scores nor noise, where there is one and the processors are a temperature and a
    top-k at most. What is below the k-th logit is not drawn; all that equal it may be.
    """
    warp = processors.temperature_and_top_k
    if key is None or warp is None or not ops.picks(logits_BKV):
        # As float32 a half's scores are in the same order, those of a double need not be.
        is_plain = not processors.warpers and key is None and logits_BKV.dtype.itemsize <= 4
        return choose(logits_BKV if is_plain else processors.warp(logits_BKV), key, positions_BK, stream)
    temperature, top_k = warp
    least = None if top_k is None else logits_BKV.topk(min(top_k, logits_BKV.shape[-1])).values[..., -1].float()
    return ops.gumbel_argmax(logits_BKV, key, positions_BK, least, temperature, stream)


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
    one = torch.zeros(1, dtype=torch.long, device=key.device)
    uniform = -torch.expm1(-ops.exponential_noise(key, positions_BW[:, :-1], one, REJECT_STREAM)[..., 0])
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


__all__ = ["accept_rejection", "choose", "choose_from_logits", "ends_row", "gumbel_noise", "new_key"]
