"""What only a GPU can show of the kernels: they wait for nothing, and a captured launch follows the lengths.

The same calls run on the CPU, by the kernels' definitions: a mistake in a call is found there.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels import block_attention
from dflash_kernels.accept_and_prepare import NUM_FIGURES
from helpers.host_reads import no_host_reads
from helpers.kernel_checks import OPERATIONS, POINTWISE, PRODUCTS, TREES

BATCH, WIDTH, HEADS, GROUPS, SIZE, RING = 2, 16, 32, 8, 128, 4112


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """One call of each operation, at the shapes of Qwen3-8B, in bfloat16."""
    ops = torch.ops.dflash_kernels

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def counts(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device, dtype=torch.long)

    query, lengths = normal(BATCH, HEADS, WIDTH, SIZE), counts(BATCH) + 100
    keys, values = ([normal(BATCH, RING, GROUPS, SIZE) for _ in range(3)] for _ in range(2))
    heads = [normal(BATCH, WIDTH, n, SIZE) for n in (HEADS, GROUPS, GROUPS)]
    angles = [normal(BATCH, WIDTH, SIZE) for _ in range(2)]
    block = [*heads, normal(SIZE), normal(SIZE), *angles, lengths, keys[0], values[0], 1e-6]
    context = [
        normal(BATCH, WIDTH, 3, 2, GROUPS, SIZE),
        normal(3, SIZE),
        *angles,
        lengths,
        keys,
        values,
        1e-6,
    ]
    state = [counts(BATCH), counts(BATCH) + 9, counts(BATCH).bool(), counts(BATCH, 300)]
    state += [counts(BATCH, WIDTH), counts(BATCH, WIDTH), counts(NUM_FIGURES + WIDTH, BATCH)]
    accept = [counts(BATCH, WIDTH), counts(BATCH, WIDTH), *state, counts(3) + 5]
    logits, states, weight = normal(BATCH, WIDTH, 151936), normal(BATCH, WIDTH, 4096), normal(4096)
    matrix = normal(4096, 4096)
    cache = [t.transpose(1, 2) for t in (keys[0], values[0])]
    # Log-probabilities, falling: a tree of other numbers has no end.
    best = -normal(BATCH, WIDTH - 1, 1, 15).float().abs().sort(dim=-1).values
    order = counts(BATCH, WIDTH - 1, 1, 15)
    text = [counts(BATCH, 300), counts(BATCH) + 290, torch.zeros(2, 5, device=device)]
    tree, block_of = counts(4, BATCH, WIDTH), [counts(BATCH, WIDTH) for _ in range(4)]
    return {
        "block_attention": lambda: block_attention(
            query, *cache, lengths, scaling=0.1, causal=True
        ),
        "norm_rope_write": lambda: ops.norm_rope_write(*block),
        "context_kv": lambda: ops.context_kv(*context),
        "rms_norm": lambda: ops.rms_norm(states, weight, 1e-6),
        "add_norm": lambda: ops.add_norm(states, states, weight, 1e-6),
        "silu_mul": lambda: ops.silu_mul(states, states),
        "rope_angles": lambda: ops.rope_angles(
            counts(BATCH, WIDTH), weight[: SIZE // 2].float(), 1.0, torch.bfloat16
        ),
        "linears": lambda: ops.linears(states, [matrix, matrix[:1024]], [], None),
        "gated_linear": lambda: ops.gated_linear(states, matrix, matrix),
        "argmax": lambda: ops.argmax(logits),
        "gumbel_argmax": lambda: ops.gumbel_argmax(
            logits, counts(1)[0], counts(BATCH, WIDTH), None, 0.6, 0
        ),
        "top_tokens": lambda: ops.top_tokens(logits[:, 1:, None], 15),
        # These two write into their arguments, which others read.
        "build_tree": lambda: ops.build_tree(
            best, order, tree.clone(), block_of[0].clone(), None, *text
        ),
        "follow_tree": lambda: ops.follow_tree(
            *tree[:2], tree[3][..., None], *[part.clone() for part in block_of]
        ),
        "keep_path": lambda: ops.keep_path(block_of[3], lengths, [*keys, *values]),
        "accept_and_prepare": lambda: ops.accept_and_prepare(*accept),
    }


def test_every_operation_is_called() -> None:
    assert sorted(calls("meta")) == sorted([*OPERATIONS, *POINTWISE, *PRODUCTS, *TREES])


@pytest.fixture(scope="module")
def calls_on_a_cpu() -> dict[str, Callable[[], Any]]:
    """Made once: random tensors of these shapes take half a second."""
    return calls("cpu")


@pytest.mark.parametrize("name", [*OPERATIONS, *POINTWISE, *PRODUCTS, *TREES])
def test_a_call_is_one_that_its_definition_takes(
    name: str, calls_on_a_cpu: dict[str, Callable[[], Any]]
) -> None:
    calls_on_a_cpu[name]()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*OPERATIONS, *POINTWISE, *PRODUCTS, *TREES])
def test_an_operation_waits_for_nothing(name: str) -> None:
    call = calls("cuda")[name]
    call()
    torch.cuda.synchronize()
    with no_host_reads("cuda"):
        call()


@pytest.mark.gpu
def test_a_captured_launch_follows_the_lengths() -> None:
    query = torch.randn(BATCH, HEADS, WIDTH, SIZE, device="cuda", dtype=torch.bfloat16)
    keys, values = (
        torch.randn(BATCH, GROUPS, RING, SIZE, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    lengths = torch.zeros(BATCH, device="cuda", dtype=torch.long)

    def attend() -> Tensor:
        return block_attention(query, keys, values, lengths, scaling=SIZE**-0.5, causal=True)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for now in ([0, 4000], [63, 64], [4096, 1]):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        wanted = block_attention.reference(
            query, keys, values, lengths, SIZE**-0.5, True, None, False, None, None
        )
        torch.testing.assert_close(out, wanted, rtol=0, atol=torch.finfo(torch.bfloat16).eps * 5)
