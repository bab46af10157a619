"""Drafting in FP8 on a GPU: `torch._scaled_mm` computes what its definition says, and the text stays plain's.

What can be shown without a GPU is in tests/equality/test_float8.py, with the definition in its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf.generation.float8 import round_rows, scaled_linear, scaled_linear_in_float32, why_not
from helpers.static import set_engine, tensor_oracle
from tiny import DFLASH2, prompts, tiny_target, truth_of

pytestmark = pytest.mark.gpu
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture(autouse=True)
def has_float8() -> None:
    """Skips GPUs that have no products in FP8."""
    if (lacking := why_not(torch.device("cuda", 0))) is not None:
        pytest.skip(f"no FP8: {lacking}")


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 128, 300])
@pytest.mark.parametrize("sizes", [(4096, 4096), (1024, 12288), (151936, 4096), (48, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_its_definition(
    num_rows: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    states = torch.randn(num_rows, sizes[1], device="cuda", dtype=dtype)
    weight = round_rows(torch.randn(*sizes, device="cuda", dtype=torch.bfloat16))
    product, wanted = scaled_linear(states, *weight), scaled_linear_in_float32(states, *weight)
    assert product.dtype == dtype
    # Sums of another order, and of fewer bits in the tensor cores, rounded to bfloat16.
    error = (product.float() - wanted.float()).norm() / wanted.float().norm()
    assert bool(error < 0.01)


@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
@pytest.mark.parametrize(
    "kind", [{}, {"own_lm_head": True}, DFLASH2], ids=["the target's head", "own", "DFlash 2"]
)
def test_the_text_is_plain_generates(engine: str, kind: dict[str, Any]) -> None:
    target: Any = tiny_target("qwen3").to("cuda", torch.float32)
    inputs = {name: tensor.cuda() for name, tensor in prompts([9], 1).items()}
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 1, intermediate_size=48, **kind).cuda()
    draft.rows = []  # the copy is made before the draft sees a prompt
    draft.generation_config.draft_dtype = "float8_e4m3fn"
    set_engine(draft, engine)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == engine
        assert draft.last_stats.float8_bytes > 0
