"""Targets whose positions are rows of a table: a verify looks up to a block further than plain decoding does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from dflash_hf import iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.target_model.parts import find_target
from helpers.half import pairs
from helpers.static import set_engine, tensor_oracle
from tiny import DEPTH, VOCAB, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

NUM = 40
TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT: dict[str, Any] = {"n_positions": NUM, "n_embd": 32, "n_layer": DEPTH, "n_head": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", GPT),
    "opt": (
        "OPTForCausalLM",
        {
            "max_position_embeddings": NUM,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": 4,
        },
    ),
}


def tabled_target(family: str) -> PreTrainedModel:
    """A target with learned positions for `NUM` tokens."""
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**TOKENS, **settings)).to(torch.float64).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize(
    ("family", "length", "lengths", "engine"),
    pairs(list(FAMILIES), [NUM, NUM + 1], {"one": [9], "three": [3, 9, 6]}, ["eager", "static"]),
)
def test_text_up_to_the_last_position(
    family: str, length: int, lengths: list[int], engine: Any
) -> None:
    target = tabled_target(family)
    inputs = prompts(lengths, 0)
    settings: dict[str, Any] = {**inputs, "max_length": length, "do_sample": False}
    ref = target.generate(**settings)
    assert ref.shape[1] == length
    for seed in range(3):
        draft = tensor_oracle(target, truth_of(inputs, ref), seed, 8)
        set_engine(draft, engine)
        assert torch.equal(target.generate(**settings, assistant_model=draft), ref)
        assert draft.last_stats.acceptance_length > 1.5


@pytest.mark.parametrize("family", FAMILIES)
def test_iterate_and_a_kept_cache(family: str) -> None:
    target = tabled_target(family)
    inputs = prompts([9], 0)
    settings: dict[str, Any] = {**inputs, "max_length": NUM, "do_sample": False}
    ref = target.generate(**settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    tokens = [
        token for step in iterate(target, draft, **settings) for token in step.committed[0].tolist()
    ]
    assert tokens == ref[0, 9:].tolist()
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    out = target.generate(**settings, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(out.sequences, ref)
    assert out[CACHE_NAME].get_seq_length() == NUM - 1


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_what_plain_generate_fails_on_is_said(engine: Any) -> None:
    """Where plain `generate` fails on the token after the last position, no text is made up."""
    target = tabled_target("gpt2")
    inputs = prompts([9], 0)
    settings: dict[str, Any] = {**inputs, "do_sample": False}
    truth = truth_of(inputs, target.generate(**settings, max_length=NUM + 1))
    for extra in (2, 9):
        with pytest.raises(IndexError):
            target.generate(**settings, max_length=NUM + extra)
        for seed in range(4):
            draft = tensor_oracle(target, truth, seed, 8)
            set_engine(draft, engine)
            with pytest.raises(
                ValueError, match=r"expected rows of at most 41 tokens .* lower max_new_tokens"
            ):
                target.generate(**settings, max_length=NUM + extra, assistant_model=draft)


@pytest.mark.parametrize("family", ["gpt2", "gpt-bigcode"])
def test_types_of_tokens_are_refused(family: str) -> None:
    """These targets add them to every token of the answer too, and plain `generate` goes on with the last one."""
    target = tabled_target(family)
    inputs = prompts([9], 0)
    settings: dict[str, Any] = {**inputs, "max_new_tokens": 8, "do_sample": False}
    ref = target.generate(**settings)
    types = torch.full_like(inputs["input_ids"], 5)
    assert not torch.equal(target.generate(**settings, token_type_ids=types), ref)
    calls: list[int] = []
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    settings["assistant_model"] = tiny_draft(target)
    with pytest.raises(ValueError, match="expected no token_type_ids for a target of text"):
        target.generate(**settings, token_type_ids=types)
    assert not calls


def test_rows_that_end_before_the_limit() -> None:
    """A limit beyond the table does no harm to a text that ends before."""
    target = tabled_target("gpt2")
    inputs = prompts([9], 0)
    settings: dict[str, Any] = {**inputs, "do_sample": False}
    ref = target.generate(**settings, max_length=NUM + 1)
    last = int(ref[0, -1])
    end = ref[0].tolist().index(last, 9)
    ref = ref[:, : end + 1]
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    out = target.generate(**settings, max_length=80, eos_token_id=last, assistant_model=draft)
    assert torch.equal(out, ref)


def test_rotary_targets_have_no_last_position() -> None:
    assert find_target(tiny_target("qwen3")).facts.num_positions is None
    assert {find_target(tabled_target(family)).facts.num_positions for family in FAMILIES} == {NUM}
