"""Every causal family that Transformers has: the same text as plain `generate`, or a refusal before any forward.

Nothing is known here about the families but which of them have worked: a new one in a later Transformers is held to
the same rule by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from helpers.families import NAMES, CannotBuildError, build
from helpers.static import set_engine
from tiny import oracle_draft, prompts, tiny_draft, truth_of

NEW = 24
WORKS = """
afmoe apertus arcee aria_text axk1 bamba beam bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3
diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text
gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 lfm2_moe
llama mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder moshi
moss_transcribe_diarize nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5
qwen3_5_moe qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Counts the model's forwards."""
    calls = [0]

    def count(module: nn.Module, args: object) -> None:
        calls[0] += 1

    handle = model.register_forward_pre_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_family_gives_the_plain_text_or_is_refused_early(name: str) -> None:
    works = name in WORKS.split()
    try:
        target = build(name)
    except CannotBuildError as error:
        if works:
            raise
        pytest.skip(f"cannot be built small: {error}"[:300])
    refusal = None
    with counted(target) as calls:
        try:
            target.generate(
                **prompts([5], 0),
                max_new_tokens=2,
                do_sample=False,
                assistant_model=tiny_draft(target),
            )
        except ValueError as error:
            refusal = str(error)
        except RuntimeError as error:
            with pytest.raises(RuntimeError):
                target.generate(**prompts([5], 0), max_new_tokens=2, do_sample=False)
            pytest.skip(f"plain generate fails too: {error}"[:300])
    if refusal is not None:
        assert not works, refusal
        assert refusal.startswith("expected")
        assert calls == [0], refusal
        return
    for seed, lengths in enumerate([[9], [4, 11, 7]]):
        inputs = prompts(lengths, seed)
        ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert target(**inputs).logits[:, -1].isfinite().all()
        draft = oracle_draft(target, truth_of(inputs, ref), seed)
        for engine in ("eager", "static"):
            set_engine(draft, engine)
            out = target.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft
            )
            assert torch.equal(out, ref), engine
            assert draft.last_stats.engine == engine
            assert 1.0 < draft.last_stats.acceptance_length < 8.0, (
                "the oracle has to be partly right"
            )
