"""Which attention a draft is trained with: FlexAttention stands back for SDPA when it fails, and says why, once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as lowering
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import Qwen3ForCausalLM

from dflash_hf.block import attention
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.training import anchors as anchors_module
from dflash_hf.training import forward
from dflash_hf.training.anchors import Anchors, BlockMaskRule, all_anchors, sample_anchors
from dflash_hf.training.collators import Batch
from dflash_hf.training.forward import run_blocks, target_features
from helpers import flex_ranks, forked_python

Case = tuple[DFlashDraftModel, Target, Batch, Tensor, Anchors]


@pytest.fixture
def case(
    target: Qwen3ForCausalLM, make_draft: Callable[..., DFlashDraftModel], batch: Batch
) -> Case:
    found = find_target(target.requires_grad_(False))
    return (
        make_draft(),
        found,
        batch,
        target_features(found, [0, 2], batch).taps,
        all_anchors(batch.loss_mask, 6),
    )


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets "auto" try FlexAttention here; returns the reasons not to any more."""
    failures: list[str] = []
    monkeypatch.setattr(forward, "_flex_failures", failures)
    wants = forward._wants_flex
    monkeypatch.setattr(
        forward,
        "_wants_flex",
        lambda draft, asked, device: wants(draft, asked, torch.device("cuda")),
    )
    return failures


def break_flex(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    calls: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(attention, "flex_attention", fail)
    return calls


def test_sdpa_goes_on_where_flex_fails(
    case: Case,
    as_on_cuda: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = run_blocks(*case, "sdpa")
    calls = break_flex(monkeypatch, RuntimeError("NoValidChoicesError:\nno kernel fits"))
    with caplog.at_level("WARNING"):
        for _ in range(3):
            assert torch.equal(run_blocks(*case, "auto"), wanted)
    assert len(calls) == 1, "it is not tried again"
    assert as_on_cuda == ["NoValidChoicesError: no kernel fits"]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "attention='auto' goes on with SDPA: FlexAttention failed with NoValidChoicesError: no kernel fits"
    ]


def test_what_is_asked_for_and_what_is_out_of_memory_is_raised(
    case: Case, as_on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_flex(monkeypatch, RuntimeError("no kernel fits"))
    with pytest.raises(RuntimeError, match="no kernel fits"):
        run_blocks(*case, "flex")
    break_flex(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        run_blocks(*case, "auto")
    assert not as_on_cuda


def test_what_fails_behind_the_trial_is_raised(
    case: Case, as_on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of several would go another way than the others."""
    with torch.no_grad():
        run_blocks(*case, "auto")
        break_flex(monkeypatch, RuntimeError("no kernel fits"))
        with pytest.raises(RuntimeError, match="no kernel fits"):
            run_blocks(*case, "auto")
    assert not as_on_cuda


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_failure_in_one_process_is_one_in_all(kind: str, tmp_path: Path) -> None:
    """Else it would call a forward twice that waits for the others, and all would hang."""
    run = forked_python.run([flex_ranks.__file__, tmp_path, kind], os.environ, 120)
    assert run.returncode == 0, run.stderr[-4000:]
    told = [line for line in run.stdout.splitlines() if line.startswith(("0", "1"))]
    assert sorted(told) == ["0 3 an error in another process", "1 3 out of resource"]


def test_auto_is_sdpa_on_a_cpu_and_under_dropout(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = break_flex(monkeypatch, RuntimeError("not here"))
    run_blocks(*case, "auto")
    assert not calls
    cuda = torch.device("cuda")
    monkeypatch.setattr(forward, "_flex_failures", [])
    assert forward._wants_flex(case[0].train(), "auto", cuda)
    assert not forward._wants_flex(case[0], "sdpa", cuda)
    case[0].config.attention_dropout = 0.1
    with caplog.at_level("WARNING"):
        assert not forward._wants_flex(case[0], "auto", cuda)
    assert "FlexAttention has no dropout, and the draft has some" in caplog.text
    assert forward._wants_flex(case[0].eval(), "auto", cuda)


def test_one_compiled_function_serves_batches_of_every_shape() -> None:
    """Compiled for one shape it is compiled again for the next; past torch's limit a run goes on uncompiled."""
    counts = {"flex": CompileCounter(), "mask": CompileCounter()}
    flex = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=counts["flex"])
    make = torch.compile(create_block_mask, dynamic=True, backend=counts["mask"])
    shapes = [(2, 300, 20), (3, 417, 31), (2, 500, 40), (4, 139, 17), (4, 639, 33), (3, 280, 25)]
    after: list[int] = []
    for batch, length, number in shapes:
        loss_mask = torch.arange(length).expand(batch, -1) >= length // 3
        anchors = sample_anchors(loss_mask, number, 8)
        rule = BlockMaskRule(torch.ones_like(loss_mask), anchors)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(anchors_module, "create_block_mask", make)
            mask = rule.block_mask((64, True, False))
        _, num_queries, num_keys = rule.shape
        query = torch.randn(batch, 2, num_queries, 4)
        key, value = torch.randn(2, batch, 1, num_keys, 4)
        with torch.no_grad():
            out = flex(query, key, value, block_mask=mask, enable_gqa=True)
        dense = rule.dense((64, True, False))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=dense, enable_gqa=True
        )
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        after.append(counts["flex"].frame_count)
    assert counts["mask"].frame_count == 1
    assert after[-1] <= 4 < torch._dynamo.config.recompile_limit
    assert after[-1] == after[-3], "every shape is compiled anew"


def test_a_backward_that_does_not_compile_fails_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not hasattr(lowering, "force_non_lazy_backward_lowering"):
        pytest.skip("this torch compiles it when it comes")

    def fail(*args: Any) -> None:
        raise RuntimeError("no kernel fits")

    compile_ = torch.compile
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail)
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, **options, backend=backend)
    )
    monkeypatch.setattr(attention, "flex_attention", lambda query, key: query * key.sin())
    flex = attention._compiled_flex_attention.__wrapped__()
    with pytest.raises(Exception, match="no kernel fits"):
        flex(torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True))
