"""What `generate` promises around the tokens: streaming, stopping, results, refusals, and models left as they were."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModel,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import dflash_hf
from dflash_hf import DFlashDraftModel, DFlashGenerateOutput, SpeculativeStats, save_draft
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.target_model.reentry import RAGGED_BLOCK
from tiny import COMMON, VOCAB, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.ended = 0

    @property
    def runs(self) -> list[list[int]]:
        return [tensor.reshape(-1).tolist() for tensor in self.tensors]

    def put(self, value: torch.Tensor) -> None:
        self.tensors.append(value)

    def end(self) -> None:
        self.ended += 1


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_streamer_gets_the_prompt_and_every_accepted_run() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([6], 1)
    plain, ours = Recorder(), Recorder()
    ref = target.generate(**inputs, **GREEDY, streamer=plain)
    draft = oracle_draft(target, truth_of(inputs, ref), 3)
    target.generate(**inputs, **GREEDY, streamer=ours, assistant_model=draft)
    assert ours.runs[0] == plain.runs[0] == inputs["input_ids"][0].tolist()
    assert (
        [t for run in ours.runs for t in run]
        == [t for run in plain.runs for t in run]
        == ref[0].tolist()
    )
    assert ours.ended == 1
    assert [len(run) for run in ours.runs[2:]] == draft.last_stats.num_committed[0]


def test_the_result_has_sequences_and_statistics() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([6, 3], 1)
    draft = tiny_draft(target)
    out = target.generate(**inputs, **GREEDY, assistant_model=draft, return_dict_in_generate=True)
    assert isinstance(out, DFlashGenerateOutput)
    stats = out.speculative
    assert isinstance(stats, SpeculativeStats)
    assert stats.num_new_tokens == 24
    assert [sum(row) + 1 for row in stats.num_committed] == [12, 12]
    assert stats.num_target_forwards == 1 + max(len(row) for row in stats.num_committed)
    assert stats.num_draft_forwards == sum(width > 1 for width in stats.verify_widths)
    assert stats.prefill_seconds > 0
    assert stats.draft_seconds > 0
    assert stats.verify_seconds > 0
    assert stats.proposal == "greedy"
    assert set(stats.to_dict()) >= {"acceptance_length", "acceptance_per_position", "num_verifies"}


def test_statistics_by_hand() -> None:
    stats = SpeculativeStats(
        num_committed=[[3, 1, 2], [4]], num_accepted=[[2, 0, 3], [3]], num_proposed=3
    )
    assert stats.acceptance_length == 10 / 4
    assert stats.acceptance_length_per_row == [2.0, 4.0]
    assert stats.num_new_tokens == 12
    assert stats.acceptance_per_position() == [3 / 4, 3 / 4, 2 / 4]
    assert stats.acceptance_per_position(conditional=True) == [3 / 4, 1.0, 2 / 3]
    assert SpeculativeStats().acceptance_length == 0.0


class StopAfter(StoppingCriteria):
    """Stops a row once a token has been generated; works row by row as Transformers' own do."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_custom_stopping_criteria_stop_inside_a_block() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([6], 4)
    free = target.generate(**inputs, **GREEDY)
    criteria = StoppingCriteriaList([StopAfter(int(free[0, -8]))])
    # Plain `generate` pads finished rows only when it knows an EOS; one that never occurs makes it do so.
    settings = {
        **GREEDY,
        "stopping_criteria": criteria,
        "eos_token_id": VOCAB - 1,
        "pad_token_id": 0,
    }
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, free), 1)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)


def test_positional_arguments_and_generation_config_objects() -> None:
    target = tiny_target("llama")
    inputs = prompts([6], 4)
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0)
    ref = target.generate(inputs["input_ids"], config)
    draft = tiny_draft(target)
    draft.last_stats = None
    out = target.generate(inputs["input_ids"], config, None, None, None, None, draft)
    assert torch.equal(out, ref)
    assert draft.last_stats is not None


def test_num_return_sequences_at_two_widths() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([4, 7], 4)
    draft = tiny_draft(target)
    draft.generation_config.proposal = "shared_noise"
    settings: dict[str, Any] = {
        "max_new_tokens": 9,
        "do_sample": True,
        "num_return_sequences": 3,
        "assistant_model": draft,
    }
    torch.manual_seed(0)
    out = target.generate(**inputs, **settings)
    assert out.shape == (6, 16)
    assert len({tuple(row) for row in out[:3].tolist()}) > 1
    assert torch.equal(out[:, :7], inputs["input_ids"].repeat_interleave(3, dim=0))
    # A block of one token proposes nothing: the target draws each token by itself.
    draft.generation_config.block_size = 1
    torch.manual_seed(0)
    assert torch.equal(target.generate(**inputs, **settings), out)


def test_other_ways_of_generating_are_untouched() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([8], 4)
    draft = tiny_draft(target)
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    after = target.generate(**inputs, **GREEDY)
    lookup = target.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3)
    assistant = target.generate(**inputs, **GREEDY, assistant_model=tiny_target("qwen3", 5))
    dflash_hf.disable()
    dflash_hf.disable()
    try:
        assert not hasattr(GenerationMixin.generate, "_dflash_original")
        ref = target.generate(**inputs, **GREEDY)
        with pytest.raises(ValueError, match="import dflash_hf first"):
            target.generate(**inputs, **GREEDY, assistant_model=draft)
    finally:
        dflash_hf.enable()
        dflash_hf.enable()
    assert GenerationMixin.generate.__wrapped__.__name__ == "generate"
    assert not hasattr(GenerationMixin.generate._dflash_original, "_dflash_original")
    for out in (after, lookup, assistant):
        assert torch.equal(out, ref)


def test_stock_speculation_type_passes_through_and_agrees() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([8], 4)
    ref = target.generate(**inputs, **GREEDY)
    draft = tiny_draft(target)
    draft.last_stats = None
    out = target.generate(**inputs, **GREEDY, assistant_model=draft, speculation_type="dflash")
    assert torch.equal(out, ref)
    assert draft.last_stats is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=1"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    "dola": ({"dola_layers": "low"}, "dola_layers"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "no cache": ({"use_cache": False}, "use_cache=True"),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions",
    ),
    "quantized cache": ({"cache_implementation": "quantized"}, "no quantized cache"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "mtp": ({"use_mtp": True}, "no use_mtp"),
    "early exit": ({"assistant_early_exit": 1}, "no assistant_early_exit"),
    "ensemble": (
        {"assistant_ensemble_weight": 0.5, "do_sample": True},
        "no assistant_ensemble_weight",
    ),
    "forced words": ({"force_words_ids": [[5, 6]]}, "no force_words_ids"),
    "constraints": ({"generation_config": GenerationConfig(constraints=[1])}, "no constraints"),
    "cache": ({CACHE_NAME: ()}, CACHE_NAME),
    "stop strings": ({"stop_strings": ["x"]}, "tokenizer="),
    "healed penalty": (
        {"token_healing": True, "tokenizer": "any", "encoder_repetition_penalty": 1.5},
        "no encoder_repetition_penalty with token_healing",
    ),
    "healed n-grams": (
        {"token_healing": True, "tokenizer": "any", "encoder_no_repeat_ngram_size": 2},
        "no encoder_no_repeat_ngram_size with token_healing",
    ),
    "config": ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_before_any_forward(case: str) -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    calls: list[int] = []
    target.register_forward_pre_hook(lambda *args: calls.append(1))
    arguments, match = REFUSED[case]
    with pytest.raises(ValueError, match=match):
        target.generate(
            **prompts([6], 0), **{"max_new_tokens": 5, **arguments}, assistant_model=draft
        )
    assert not calls


def misfits() -> dict[str, tuple[Callable[[], Any], Callable[[Any], DFlashDraftModel], str]]:
    def target() -> Any:
        return tiny_target("qwen3")

    def with_narrow_embedding() -> Any:
        config = transformers.OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=16)
        return transformers.OPTForCausalLM(config).eval()

    return {
        "embedding": (with_narrow_embedding, tiny_draft, "an embedding of width 32 .* got 16"),
        "head": (
            with_narrow_embedding,
            lambda t: tiny_draft(t, own_embed_tokens=True),
            "a head of width 32 .* got 16",
        ),
        "width": (target, lambda t: tiny_draft(t, hidden_size=16), "hidden size 32"),
        "depth": (
            target,
            lambda t: tiny_draft(t, num_target_layers=9, target_layer_ids=[1, 7]),
            "taps below 4",
        ),
        "vocabulary": (target, lambda t: tiny_draft(t, vocab_size=100), "vocabulary of 64"),
        "mask": (
            target,
            lambda t: tiny_draft(t, vocab_size=100, mask_token_id=99),
            "mask_token_id below 64",
        ),
    }


@pytest.mark.parametrize("case", misfits())
def test_a_draft_for_another_target_is_refused(case: str) -> None:
    make_target, make_draft, match = misfits()[case]
    target = make_target()
    with pytest.raises(ValueError, match=match):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=make_draft(target))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block_size": 9}, "block_size at most 8"),
        ({"block_size": 0}, "a number of tokens, at least 1, as block_size, got 0"),
        ({"verify_width": 9}, "verify_width between"),
        (
            {"verify_width": "wide"},
            "a number of tokens, at least 1, or 'auto' as verify_width, got 'wide'",
        ),
        ({"verify_width": True}, "as verify_width, got True"),
        ({"verify_width": 0}, "as verify_width, got 0"),
        ({"block_size": "8"}, "a number of tokens, at least 1, as block_size, got '8'"),
        ({"block_size": 2.5}, "as block_size, got 2.5"),
        ({"synchronize": "yes"}, "True or False as synchronize, got 'yes'"),
        ({"synchronize": 1}, "True or False as synchronize, got 1"),
        ({"draft_window": 0}, "a number of tokens, at least 1, as draft_window, got 0"),
        ({"draft_window": "wide"}, "as draft_window, got 'wide'"),
        ({"engine": "warp"}, "engine in"),
        ({"proposal": "guess"}, "proposal in"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], match: str) -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target, 8)
    for name, value in options.items():
        setattr(draft.generation_config, name, value)
    with pytest.raises(ValueError, match=match):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)


UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chunked": (
        "Llama4Text",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention"] * 4,
        },
        "chunked attention",
    ),
    "length of the cache": (
        "Llama4Text",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "attention_chunk_size": None,
            "intermediate_size_mlp": 48,
            "no_rope_layer_interval": 2,
            "floor_scale": 4,
        },
        "attention scaled by the length of its cache|chunked attention",
    ),
    "alibi": ("Bloom", {"n_layer": 4, "n_head": 4}, "(ALiBi|AttentionInterface)"),
    "recurrent": (
        "FalconH1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 2,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
        "recurrent layers are gated delta nets",
    ),
    "shared": (
        "Gemma3nText",
        {
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 4,
        },
        "shared-K/V",
    ),
    "keywords": ("Nemotron", {}, "layers that do not hand keywords of the forward down"),
    "loops": ("Dory", {}, "layers that run several times in one forward"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_attention_is_refused_by_name(case: str) -> None:
    name, extra, match = UNSUPPORTED[case]
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this Transformers has no {name}")
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **extra})
    stem = name.removesuffix("Text")
    target = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    draft = tiny_draft(tiny_target("qwen3"))
    with pytest.raises(ValueError, match=match):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)


def test_audio_that_goes_on_with_the_answer_is_refused() -> None:
    if not hasattr(transformers, "VoxtralRealtimeConfig"):
        pytest.skip("this Transformers has no Voxtral Realtime")
    audio = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "num_mel_bins": 8,
    }
    text = {key: value for key, value in COMMON.items() if key != "initializer_range"}
    config = transformers.VoxtralRealtimeConfig(
        audio_config=audio, text_config={**text, "head_dim": 8}, hidden_size=32
    )
    target = transformers.VoxtralRealtimeForConditionalGeneration(config).eval()
    inputs = {"input_features": torch.randn(1, 8, 400), "num_delay_tokens": 2}
    with pytest.raises(ValueError, match="an encoder that goes on with every token"):
        target.generate(
            input_ids=torch.full((1, 6), 5),
            **inputs,
            max_new_tokens=5,
            do_sample=False,
            assistant_model=tiny_draft(target),
        )


def test_a_config_changed_in_place_is_looked_at_again() -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    inputs = prompts([6], 0)
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    target.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="shared-K/V"):
        target.generate(**inputs, **GREEDY, assistant_model=draft)


def test_a_soft_cap_that_plain_generate_leaves_out_is_refused() -> None:
    target = tiny_target("gemma2")
    target.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="set_attn_implementation\\('eager'\\)"):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=tiny_draft(target))


def halved_values(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the user's, which is not what a verify computes."""
    return sdpa_attention_forward(module, query, key, value * 0.5, attention_mask, **kwargs)


@pytest.mark.parametrize("name", ["halved", "sdpa"])
def test_an_attention_of_the_users_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    # One that looks like Transformers' own, too.
    function = functools.wraps(sdpa_attention_forward)(halved_values)
    monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
    target.set_attn_implementation(name)
    with pytest.raises(ValueError, match=f"one of Transformers' own attentions, got '{name}'"):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        (
            {
                "input_ids": torch.full((2, 3), 5),
                "attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]]),
            },
            "row of zeros",
        ),
        (
            {
                "input_ids": torch.full((2, 3), 5),
                "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
            },
            "left-padded",
        ),
        (
            {
                "inputs_embeds": torch.zeros(1, 3, 32, dtype=torch.float64),
                "attention_mask": torch.ones(1, 3, 3, dtype=torch.long).tril(),
            },
            r"attention_mask \[rows, tokens\]",
        ),
        (
            {
                "inputs_embeds": torch.zeros(1, 3, 32, dtype=torch.float64),
                "attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.long).tril(),
            },
            r"attention_mask \[rows, tokens\]",
        ),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(inputs: dict[str, Any], match: str) -> None:
    target = tiny_target("qwen3")
    with pytest.raises(ValueError, match=match):
        target.generate(**inputs, **GREEDY, assistant_model=tiny_draft(target))


class Failing(LogitsProcessor):
    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.after, self.error = after, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.after -= 1
        if self.after < 0:
            raise self.error("on purpose")
        return scores


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_or_interrupt_leaves_the_models_as_they_were(
    after: int, error: type[BaseException]
) -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    inputs = prompts([6], 0)
    ref = target.generate(**inputs, **GREEDY)
    hooks = hooks_of(target) + hooks_of(draft)
    with pytest.raises(error, match="on purpose"):
        target.generate(
            **inputs,
            **GREEDY,
            logits_processor=LogitsProcessorList([Failing(after, error)]),
            assistant_model=draft,
        )
    assert hooks_of(target) + hooks_of(draft) == hooks
    assert target.config._attn_implementation == "sdpa"
    assert torch.equal(target.generate(**inputs, **GREEDY), ref)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)


def test_two_threads_with_drafts_on_one_target_are_serialised() -> None:
    target = tiny_target("qwen3")
    batches = [prompts([6], seed) for seed in range(4)]
    refs = [target.generate(**inputs, **GREEDY) for inputs in batches]
    outs: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        outs[index] = target.generate(
            **batches[index], **GREEDY, assistant_model=tiny_draft(target, 4)
        )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(outs[index], refs[index]) for index in range(4))


def test_a_draft_on_its_own_explains_how_it_is_used() -> None:
    with pytest.raises(TypeError, match="assistant_model=draft"):
        tiny_draft(tiny_target("qwen3")).generate(torch.ones(1, 3, dtype=torch.long))


def test_the_ragged_attention_cannot_be_selected_by_hand() -> None:
    target = tiny_target("qwen3")
    target.set_attn_implementation(RAGGED_BLOCK)
    with pytest.raises(ValueError, match="set by dflash_hf during decoding only"):
        target(torch.ones(1, 3, dtype=torch.long))


def test_a_compiled_layer_that_runs_no_hooks_is_an_error() -> None:
    target = tiny_target("qwen3")
    layer = target.model.layers[2]

    class Hookless(nn.Module):
        """Calls what it holds, and never its own hooks, as code compiled before they were added does."""

        def __init__(self) -> None:
            super().__init__()
            self.self_attn = layer.self_attn

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return layer.forward(*args, **kwargs)

    target.model.layers[2] = Hookless()
    with pytest.raises(RuntimeError, match="compiled target runs no hooks"):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=tiny_draft(target))
    assert target.config._attn_implementation == "sdpa"


def test_a_zlab_checkpoint_loaded_by_auto_model_is_explained(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    save_draft(tiny_draft(target, layer_types=["full_attention"] * 2).float(), tmp_path, "zlab")
    stranger = AutoModel.from_pretrained(tmp_path)
    assert type(stranger).__name__ == "Qwen3Model"
    with pytest.raises(ValueError, match=r"dflash_hf\.load_draft"):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=stranger)


def test_the_prefill_cache_is_gone_before_decoding_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    alive: list[int] = []
    original = RaggedCache.take_prefill.__func__

    def spy(cls: type, prefill: Any, *args: Any, **kwargs: Any) -> Any:
        references = [
            weakref.ref(tensor) for layer in prefill.layers for tensor in (layer.keys, layer.values)
        ]
        cache = original(cls, prefill, *args, **kwargs)
        alive.append(sum(reference() is not None for reference in references))
        return cache

    monkeypatch.setattr(RaggedCache, "take_prefill", classmethod(spy))
    target.generate(**prompts([30, 12], 0), **GREEDY, assistant_model=tiny_draft(target))
    assert alive == [0]
