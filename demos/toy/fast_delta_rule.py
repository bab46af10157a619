"""The gated delta rule for training on a CPU: what Transformers' torch code computes, with fewer and larger products.

Legend: B rows, S tokens, N chunks, C tokens per chunk, G key heads, R value heads per key head, K size of a key, V of
a value. Within a chunk the rule is linear in the state before it, so that everything but the state itself is computed
for all chunks at once: one triangular solve, and a loop over chunks of two small products.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

# Short chunks make the solve cheap, long ones make the loop short.
CHUNK: Final = 32
_EPS: Final = 1e-6


def _chunks(x: torch.Tensor, heads: int, length: int) -> torch.Tensor:
    """Return (B, S, G*R, ...) as contiguous (B, G, R, N, C, ...), padded with zeros to a multiple of the chunk."""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, length - x.shape[1]))
    x = x.unflatten(2, (heads, -1)).unflatten(1, (-1, CHUNK))
    order = (0, 3, 4, 1, 2, *range(5, x.ndim))
    return x.permute(order).contiguous()


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the output (B, S, G*R, V) of the rule from an empty state; queries and keys are normalized here.

    Args:
        query, key (`torch.Tensor` of shape `(B, S, G, K)`): Before their normalization.
        value (`torch.Tensor` of shape `(B, S, G*R, V)`): Each key head serves R neighbouring value heads.
        g (`torch.Tensor` of shape `(B, S, G*R)`): Logarithm of the decay, at most 0.
        beta (`torch.Tensor` of shape `(B, S, G*R)`): Share of the old value that is overwritten.
    """
    size, heads, rows = query.shape[1], key.shape[2], value.shape[0]
    length = -(-size // CHUNK) * CHUNK
    scale = query.shape[-1] ** -0.5
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS) for x in (query, key))
    q, k, v = (_chunks(x, heads, length) for x in (query * scale, key, value))
    g, beta = (_chunks(x, heads, length) for x in (g, beta))
    g = g.cumsum(-1)
    hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(hidden, float("-inf")).exp()
    # One product per key head serves its value heads.
    keys_T = k.transpose(-1, -2)
    system = (k @ keys_T) * decay * beta[..., None]
    mixing = (q @ keys_T) * decay
    since_start = g.exp()[..., None]
    right = torch.cat([v, (k * since_start).expand(*v.shape[:-1], -1)], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, reading = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    readers = torch.cat([reading, q * since_start], dim=-2)
    writers = (
        (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2).expand(*v.shape[:4], -1, -1)
    )
    ends = g[..., -1].exp()[..., None, None]
    state = value.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    new, read = [], []
    # Unbound and not indexed: the backward of an index would fill a tensor of all chunks with zeros, once per chunk.
    parts = zip(*(part.unbind(3) for part in (readers, written, writers, ends)), strict=True)
    for reader, written_here, writer, end in parts:
        old, out = (reader @ state).chunk(2, dim=-2)
        new.append(written_here - old)
        read.append(out)
        state = state * end + writer @ new[-1]
    out = torch.stack(read, dim=3) + mixing @ torch.stack(new, dim=3)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(rows, length, -1, v.shape[-1])[:, :size]


@contextmanager
def fast_delta_rule() -> Generator[None]:
    """Let Qwen3.5 models compute their gated delta nets with `gated_delta_rule`; for forwards without a cache."""
    before: Any = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        return gated_delta_rule(query, key, value, g, beta), None

    modeling_qwen3_5.torch_chunk_gated_delta_rule = rule
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = before
