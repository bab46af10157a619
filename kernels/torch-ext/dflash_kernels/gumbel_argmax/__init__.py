"""This operation draws a sample of each row's distribution in one pass over the logits.

Its noise depends only on the seed, the stream, the row, the position and the token.
"""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, check_dtype, operation

MULTIPLIER = 0x45D9F3B37197344B
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
# In the key of the noise, a row's number is above this number of bits, which hold the position.
ROW_BITS = 40


def _mix(bits: Tensor) -> Tensor:
    """Returns the result of a 64-bit xor-multiply hash. int64 products wrap. The masks make the shifts logical."""
    for _ in range(2):
        bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * MULTIPLIER
    return bits ^ ((bits >> 32) & 0xFFFFFFFF)


def exponential_noise(
    seed: Tensor,
    positions_BK: Tensor,
    tokens: Tensor,
    stream: int = 0,
    rows_B: Tensor | None = None,
) -> Tensor:
    """Returns independent Exp(1) variables, one for each row, position and token.

    Args:
        seed (`torch.Tensor` of shape `[]`, int64): The seed of the run.
        positions_BK (`torch.Tensor` of shape `[B, K]`, int64): Index of the token that is drawn.
        tokens (`torch.Tensor` of shape `[N]` or `[B, K, N]`, int64): Tokens of the vocabulary.
        stream (`int`): Separates independent uses of noise at one position.
        rows_B (`torch.Tensor`, int64, *optional*): The number of each row. By default it is the row's place. A row
            that has moved keeps its number, so it draws the same tokens as in its old place.

    Returns:
        `torch.Tensor` of shape `[B, K, N]`, float32, positive.
    """
    if rows_B is None:
        rows_B = torch.arange(positions_BK.shape[0], device=positions_BK.device)
    # The number of the row is above the bits of the position.
    of_row = rows_B[:, None] << ROW_BITS
    lane = _mix(_mix(seed + stream) ^ of_row ^ positions_BK)
    bits = _mix(lane[..., None] + (tokens + 1) * GOLDEN)
    # The 32 bits are taken at the middle of their cell. So the result is never 0, and has a resolution of 2^-32 near
    # 0, where the winners of a Gumbel draw are. Near 1, float32 would round up to 1, whose exponential is infinite. If
    # only one token is left, it would then tie with the forbidden tokens.
    uniform = (
        ((bits >> 20) & 0xFFFFFFFF)
        .to(torch.float32)
        .add_(0.5)
        .mul_(2.0**-32)
        .clamp_(max=1 - 2.0**-24)
    )
    return -torch.log1p(-uniform)


def _check(given: Given, size: Sizes) -> None:
    if not 0 < size["V"] < 2**31:
        raise ValueError(
            f"expected a vocabulary of 1 to 2^31 - 1 tokens, got {size['V']}; pass at least one column"
        )
    if not given["temperature"] > 0:
        raise ValueError(
            f"expected a temperature above 0, got {given['temperature']}; 1 leaves logits as they are"
        )
    if given["first_BK"] is not None and given["least_BK"] is None:
        raise ValueError(
            "expected least_BK beside first_BK, got None; pass the logit that it is about"
        )
    check_dtype(given, (torch.int64,), "seed", "positions_BK", "rows_B", "first_BK")
    check_dtype(given, (torch.float32,), "least_BK")


@operation(
    check=_check,
    fake=lambda logits_BKV, seed, positions_BK, *_: positions_BK.new_empty(positions_BK.shape),
    covers=lambda logits_BKV, *_: runs_kernel(logits_BKV) and logits_BKV.numel() > 0,
)
def gumbel_argmax(
    logits_BKV: Tensor,
    seed: Tensor,
    positions_BK: Tensor,
    least_BK: Tensor | None = None,
    temperature: float = 1.0,
    stream: int = 0,
    rows_B: Tensor | None = None,
    first_BK: Tensor | None = None,
) -> Tensor:
    """Returns one token per position, drawn from `softmax(logits / temperature)`.

    The formula is `argmax {logits / temperature - log(noise)}` over the tokens whose logit is not below `least`. It is
    the Gumbel-max trick, with [`exponential_noise`] of all tokens. It is computed in float32. Ties go to the first
    token.

    Args:
        logits_BKV (`torch.Tensor`): Logits with any strides. The kernel supports float32, float16 and bfloat16.
        seed, positions_BK, stream, rows_B: See [`exponential_noise`]. `seed` has one element.
        least_BK (`torch.Tensor`, float32, *optional*): The lowest logit that may be drawn. For top-k it is the k-th
            logit.
        temperature (`float`): Temperature, above 0.
        first_BK (`torch.Tensor`, int64, *optional*): The first token that may be drawn among the tokens whose logit
            equals `least`, if not all of them may be drawn.

    Returns:
        `torch.Tensor` of shape `[B, K]`, int64. No host sync.

    Raises:
        ValueError: If sizes or dtypes do not fit, the vocabulary is empty, or the temperature is not positive.
    """
    scores = logits_BKV.to(torch.float32) / temperature
    tokens = torch.arange(scores.shape[-1], device=scores.device)
    if least_BK is not None:
        lowest = (least_BK / temperature)[..., None]
        is_left_out = scores < lowest
        if first_BK is not None:
            is_left_out = is_left_out | ((scores == lowest) & (tokens < first_BK[..., None]))
        scores = scores.masked_fill(is_left_out, float("-inf"))
    noise = exponential_noise(seed, positions_BK, tokens, stream, rows_B)
    return (scores - torch.log(noise)).argmax(dim=-1)


__all__ = ["exponential_noise", "gumbel_argmax"]
