"""Random numbers keyed by what they are for: (seed, row, position, stream), not by how many were drawn before.

Keyed noise is what makes a sampled text the same at every block size: the token at a position is drawn with the same
noise whether the position is verified alone or as the ninth of a block. No generator state, no host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


__all__ = ["exponential_noise", "gumbel_noise", "new_key"]
