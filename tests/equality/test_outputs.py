"""`output_scores`, `output_logits`, `output_hidden_states`; prompts as embeddings; token healing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation import generate
from dflash_hf.generation.decode import decode
from dflash_hf.generation.request import Request
from helpers.half import half, pairs
from helpers.static import set_engine
from tiny import oracle_draft, prompts, shallow_target, tiny_draft, truth_of

TOY = Path(__file__).parents[2] / "demos" / "toy"
EOS = [3, 9, 17, 30, 44, 58]
WANTED = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


def lengths_of(sequences: Tensor, columns: int, eos: list[int] | None) -> list[int]:
    """Tokens of each row's answer, up to its end."""
    if eos is None:
        return [sequences.shape[1] - columns] * sequences.shape[0]
    answers = sequences[:, columns:].tolist()
    return [
        next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in answers
    ]


def assert_rows_equal(ours: Any, plain: Any, lengths: list[int]) -> None:
    """Same shapes; same values as long as a row runs, zeros after it."""
    assert len(ours) == len(plain)
    for token, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        for row, length in enumerate(lengths):
            wanted = theirs[row] if token < length else torch.zeros_like(theirs[row])
            torch.testing.assert_close(mine[row], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "rows", "eos", "in_step"),
    pairs(["qwen3", "gemma3"], [1, 3], {"no eos": None, "eos": EOS}, [False, True]),
)
def test_scores_logits_and_hidden_states_equal_plain_generates(
    family: str, rows: int, eos: list[int] | None, in_step: bool
) -> None:
    target = shallow_target(family)
    inputs = prompts([7, 4, 6][:rows], 2)
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": eos,
        "pad_token_id": 0,
    }
    settings |= {**WANTED, "repetition_penalty": 1.2}
    if in_step:
        settings["max_time"] = 1e6
    plain = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, plain.sequences), 1, 8)
    ours = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(ours.sequences, plain.sequences)
    lengths = lengths_of(ours.sequences, 7, eos)
    assert_rows_equal(ours.scores, plain.scores, lengths)
    assert_rows_equal(ours.logits, plain.logits, lengths)
    assert len(ours.hidden_states) == len(plain.hidden_states)
    for mine, theirs in zip(ours.hidden_states[0], plain.hidden_states[0], strict=True):
        torch.testing.assert_close(mine, theirs)
    for layer in range(len(plain.hidden_states[0])):
        assert_rows_equal(
            [token[layer] for token in ours.hidden_states[1:]],
            [token[layer] for token in plain.hidden_states[1:]],
            [length - 1 for length in lengths],
        )
    transitions = [
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        for out in (ours, plain)
    ]
    for row, length in enumerate(lengths):
        torch.testing.assert_close(transitions[0][row, :length], transitions[1][row, :length])


def test_scores_and_logits_have_their_own_memory() -> None:
    """They can be reshaped and saved one by one."""
    target = shallow_target("qwen3")
    settings = {**prompts([5, 3], 0), "max_new_tokens": 4, "do_sample": False, **WANTED}
    out = target.generate(**settings, assistant_model=tiny_draft(target))
    later = [layer for token in out.hidden_states[1:] for layer in token]
    for tensor in (*out.scores, *out.logits, *later):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_scores_and_logits_come_back_where_the_ids_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain `generate` computes the scores there, and leaves hidden states on the target's device."""

    def given_elsewhere(request: Request, inputs: dict[str, Any]) -> Any:
        return decode(dataclasses.replace(request, given_on=torch.device("meta")), inputs)

    monkeypatch.setattr(generate, "decode", given_elsewhere)
    target = shallow_target("qwen3")
    settings = {**prompts([5, 3], 0), "max_new_tokens": 4, "do_sample": False, **WANTED}
    out = target.generate(**settings, assistant_model=tiny_draft(target))
    assert {one.device.type for one in (out.sequences, *out.scores, *out.logits)} == {"meta"}
    assert {layer.device.type for token in out.hidden_states for layer in token} == {"cpu"}


def test_only_what_was_asked_for_is_returned() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    out = target.generate(
        **prompts([6], 0), max_new_tokens=6, return_dict_in_generate=True, assistant_model=draft
    )
    assert out.scores is None
    assert out.logits is None
    assert out.hidden_states is None
    with pytest.raises(ValueError, match="output_attentions"):
        target.generate(
            **prompts([6], 0),
            max_new_tokens=6,
            return_dict_in_generate=True,
            output_attentions=True,
            assistant_model=draft,
        )


@pytest.mark.parametrize(
    ("family", "rows", "with_ids"), half(["qwen3", "gemma3", "gpt-oss"], [1, 3], [False, True])
)
def test_prompts_as_embeddings(family: str, rows: int, with_ids: bool) -> None:
    target = shallow_target(family)
    inputs = prompts([7, 4, 6][:rows], 2)
    torch.manual_seed(0)
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    # Not what any ids give.
    embeds = embeds + 0.1 * torch.randn_like(embeds)
    given: dict[str, Any] = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    if with_ids:
        given["input_ids"] = inputs["input_ids"]
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    ref = target.generate(**given, **settings)
    whole = ref if with_ids else torch.cat([inputs["input_ids"], ref], dim=1)
    draft = oracle_draft(target, truth_of(inputs, whole), 1, 8)
    out = target.generate(**given, **settings, assistant_model=draft)
    assert torch.equal(out, ref)
    assert out.shape[1] > 1
    assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma3"])
def test_embeddings_are_not_cut_into_chunks(family: str) -> None:
    """Plain `generate` cuts the ids beside them: most releases fail then, so that a draft is refused on all."""
    target, inputs = shallow_target(family), prompts([9, 4], 0)
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    beside: dict[str, Any] = {
        **inputs,
        "inputs_embeds": embeds,
        "max_new_tokens": 12,
        "do_sample": False,
    }
    alone = {name: value for name, value in beside.items() if name != "input_ids"}
    ref = target.generate(**beside)
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 6)
    for size in (9, 20):
        whole = {**beside, "prefill_chunk_size": size}
        assert torch.equal(target.generate(**whole), ref)
        assert torch.equal(target.generate(**whole, assistant_model=draft), ref)
    forwards: list[None] = []
    target.get_input_embeddings().register_forward_hook(lambda *args: forwards.append(None))
    for size in (4, 9, 20):
        with pytest.raises(RuntimeError):
            target.generate(**alone, prefill_chunk_size=size)
    for size in (4, 8):
        try:
            text = target.generate(**beside, prefill_chunk_size=size)
        except RuntimeError:
            continue
        assert torch.equal(text, ref)  # Transformers 5.16
    forwards.clear()
    for given, size in ((beside, 1), (beside, 8), (alone, 4), (alone, 20)):
        with pytest.raises(
            ValueError, match=f"expected no prefill_chunk_size beside inputs_embeds .*, got {size}"
        ):
            target.generate(**given, prefill_chunk_size=size, assistant_model=draft)
    assert not forwards


def test_embeddings_behind_a_cache_are_not_cut_into_chunks() -> None:
    target, inputs = shallow_target("llama"), prompts([9], 0)
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(inputs["input_ids"][:, :5], **{CACHE_NAME: cache})
    given: dict[str, Any] = {
        **inputs,
        "inputs_embeds": embeds,
        CACHE_NAME: cache,
        "prefill_chunk_size": 20,
    }
    with pytest.raises(ValueError, match="expected no prefill_chunk_size beside inputs_embeds"):
        target.generate(**given, assistant_model=tiny_draft(target))
    assert cache.get_seq_length() == 5


def test_token_healing() -> None:
    target = AutoModelForCausalLM.from_pretrained(TOY / "target")
    draft = DFlashDraftModel.from_pretrained(TOY / "draft")
    tokenizer = AutoTokenizer.from_pretrained(
        TOY / "target", padding_side="left", bos_token="<|MASK|>"
    )
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "token_healing": True,
        "tokenizer": tokenizer,
    }
    changed = 0
    for text in ("The final answer is \\bo", "Write a funct", "def total(valu", "Compute 4"):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        ref = target.generate(ids, **settings)
        assert torch.equal(target.generate(ids, **settings, assistant_model=draft), ref)
        changed += not torch.equal(ref[:, : ids.shape[1]], ids)
    assert changed
    with pytest.raises(ValueError, match="tokenizer="):
        target.generate(ids, max_new_tokens=3, token_healing=True, assistant_model=draft)


@pytest.mark.parametrize("pad_id", [None, 0, 9])
def test_healing_hides_no_token_that_plain_generate_sees(pad_id: int | None) -> None:
    target = shallow_target("qwen3")
    # It begins with padding, where pad tokens that end no text are some.
    ids = torch.tensor([[0, 5, 7, 11, 46, 7], [5, 9, 0, 11, 46, 7]])

    def healed(input_ids: Tensor, tokenizer: Any) -> Tensor:
        return torch.where(input_ids == 5, 0, input_ids)

    target.heal_tokens = healed
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "token_healing": True,
        "tokenizer": "any",
        "pad_token_id": pad_id,
        "eos_token_id": [9, 33],
    }
    ref = target.generate(ids, **settings)
    out = target.generate(ids, **settings, assistant_model=tiny_draft(target))
    assert torch.equal(out, ref)


class InPlace(LogitsProcessor):
    """Writes into what it gets."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, 5] = -3.0
        scores += 1
        return scores


class Wider(LogitsProcessor):
    """Returns float64."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.double() / 3


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("lengths", [[9], [4, 9]])
def test_scores_of_processors_that_work_in_place_or_widen(lengths: list[int], engine: Any) -> None:
    target, inputs = shallow_target("qwen3"), prompts(lengths, 0)
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    settings |= {"output_scores": True, "output_logits": True}
    for processors in ([InPlace()], [Wider()], [InPlace(), Wider()]):
        ref: Any = target.generate(
            **inputs, **settings, logits_processor=LogitsProcessorList(processors)
        )
        draft = oracle_draft(target, truth_of(inputs, ref.sequences), 0)
        set_engine(draft, engine)
        out: Any = target.generate(
            **inputs,
            **settings,
            logits_processor=LogitsProcessorList(processors),
            assistant_model=draft,
        )
        assert torch.equal(out.sequences, ref.sequences)
        for ours, plain in zip(out.scores, ref.scores, strict=True):
            assert ours.dtype == plain.dtype
            assert torch.allclose(ours, plain, rtol=0, atol=1e-6)
        # Plain `generate` keeps the very tensor that a processor has written into.
        logits: Any = target(out.sequences[-1:, :-1]).logits  # the last row is not padded
        for ours, plain in zip(out.logits, ref.logits, strict=True):
            assert torch.allclose(ours, plain, rtol=0, atol=1e-6) == (
                type(processors[0]) is not InPlace
            )
        assert torch.allclose(out.logits[-1][-1], logits[-1, -1].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-sliding"])
def test_the_cache_that_comes_back_is_dynamic(family: str) -> None:
    target, inputs = shallow_target(family), prompts([9], 0)
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    ref: Any = target.generate(**inputs, **settings, cache_implementation="static")
    draft = oracle_draft(target, truth_of(inputs, ref.sequences), 0)
    out: Any = target.generate(
        **inputs, **settings, cache_implementation="static", assistant_model=draft
    )
    assert torch.equal(out.sequences, ref.sequences)
    assert (type(ref[CACHE_NAME]), type(out[CACHE_NAME])) == (StaticCache, DynamicCache)
    assert int(out[CACHE_NAME].get_seq_length()) == int(ref[CACHE_NAME].get_seq_length()) == 20


def test_a_cache_that_stays_on_the_device_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Without an accelerator torch makes no stream, and an offloaded cache has one.
    monkeypatch.setattr(torch, "Stream", lambda *args, **kwargs: None)
    target, inputs = shallow_target("qwen3"), prompts([9], 0)
    settings: dict[str, Any] = {**inputs, "max_new_tokens": 12, "do_sample": False}
    ref = target.generate(**settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    out = target.generate(**settings, cache_implementation="offloaded", assistant_model=draft)
    assert torch.equal(out, ref)
    assert caplog.text.count("the cache stays on the target's device") == 1


class Raising(BaseStreamer):
    """Raises at its end, or at the third `put`."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.num = 0

    def put(self, value: Any) -> None:
        self.num += 1
        if self.num == 3 and not self.at_end:
            raise KeyError("put")

    def end(self) -> None:
        raise KeyError("end")


@pytest.mark.parametrize("at_end", [True, False])
def test_a_streamer_that_raises_and_a_cache(at_end: bool) -> None:
    target, inputs = shallow_target("qwen3"), prompts([9], 0)
    settings: dict[str, Any] = {**inputs, "max_new_tokens": 12, "do_sample": False}
    draft = oracle_draft(target, truth_of(inputs, target.generate(**settings)), 0)
    caches = DynamicCache(config=target.config), DynamicCache(config=target.config)
    for cache, assistant in zip(caches, (None, draft), strict=True):
        with pytest.raises(KeyError, match="end" if at_end else "put"):
            target.generate(
                **settings,
                **{CACHE_NAME: cache},
                streamer=Raising(at_end),
                assistant_model=assistant,
            )
    assert draft.last_stats is not None
    lengths = [int(cache.get_seq_length()) for cache in caches]
    assert lengths == ([20, 20] if at_end else [10, 0])
