"""Calls at the edges of `generate`: each was wrong once, or is refused because it would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import BaseStreamer
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from dflash_hf.ops import exponential_noise
from helpers.deprecations import DeprecationLog
from helpers.roundings import num_same_rows
from tiny import oracle_draft, prompts, shallow_target, tiny_draft, truth_of

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


class Criterion(StoppingCriteria):
    """Stops after three of a token; `eos_token_id` is only its own name for the token."""

    def __init__(self, token: int) -> None:
        self.eos_token_id = torch.tensor([token])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids == self.eos_token_id).sum(dim=1) >= 3


class Contrast(LogitsProcessor):
    """Runs the target itself, as self-contrast methods do."""

    def __init__(self, target: nn.Module) -> None:
        self.target = target

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 0.3 * self.target(input_ids[:, -2:]).logits[:, -1].float()


class Rereading(BaseStreamer):
    """Runs the target whenever it gets something."""

    def __init__(self, target: nn.Module) -> None:
        self.target, self.num = target, 0

    def put(self, value: torch.Tensor) -> None:
        self.num += self.target(value.reshape(1, -1)).logits.shape[1]

    def end(self) -> None:
        return


def test_padding_that_generate_infers_is_checked_too() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    ids = torch.tensor([[28, 62, 27, 11, 46, 0]])
    with pytest.raises(ValueError, match="left-padded"):
        target.generate(ids, **GREEDY, pad_token_id=0, eos_token_id=63, assistant_model=draft)
    ids = torch.tensor([[0, 0, 27, 11, 46, 7], [5, 9, 0, 11, 46, 7]])
    ref = target.generate(ids, **GREEDY, pad_token_id=0, eos_token_id=63)
    assert torch.equal(
        target.generate(ids, **GREEDY, pad_token_id=0, eos_token_id=63, assistant_model=draft), ref
    )


def test_a_criterion_with_an_eos_attribute_of_its_own_is_called() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([6], 4)
    free = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    token = max(set(free[0, 6:].tolist()), key=free[0, 6:].tolist().count)
    criteria = StoppingCriteriaList([Criterion(token)])
    ref = target.generate(**inputs, max_new_tokens=60, do_sample=False, stopping_criteria=criteria)
    assert 6 < ref.shape[1] < free.shape[1]
    draft = oracle_draft(target, truth_of(inputs, free), 1)
    out = target.generate(
        **inputs,
        max_new_tokens=60,
        do_sample=False,
        stopping_criteria=criteria,
        assistant_model=draft,
    )
    assert torch.equal(out, ref)


class LateEnd(EosTokenCriteria):
    """Stops at an end token, but not in the first ten columns of a text."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return super().__call__(input_ids, scores) & (input_ids.shape[1] > 10)


class LateLength(MaxLengthCriteria):
    """Stops five tokens behind its length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stops = input_ids.shape[1] >= self.max_length + 5
        return torch.full((input_ids.shape[0],), stops)


class Sevenths(StoppingCriteria):
    """Stops at every seventh token; plain `generate` pads behind it because of the attribute."""

    eos_token_id = 5

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0


class Number(Sevenths):
    """Says so by numbers."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return super().__call__(input_ids, scores).long()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["end", "length", "attribute", "number"])
def test_a_criterion_like_an_end_is_asked_and_not_guessed(kind: str, rows: int) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([6, 4, 5][:rows], 4)
    free = target.generate(**inputs, **GREEDY)
    made = {
        "end": LateEnd(int(free[0, 7])),
        "length": LateLength(10),
        "attribute": Sevenths(),
        "number": Number(),
    }
    settings: dict[str, Any] = {**GREEDY, "pad_token_id": 3}
    settings["stopping_criteria"] = StoppingCriteriaList([made[kind]])
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, free), 1)
    out = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(out, ref)


def test_processors_and_streamers_may_run_the_target() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([6], 4)
    settings = {**GREEDY, "logits_processor": LogitsProcessorList([Contrast(target)])}
    ref = target.generate(**inputs, **settings)
    streamer = Rereading(target)
    draft = oracle_draft(target, truth_of(inputs, ref), 2)
    assert torch.equal(
        target.generate(**inputs, **settings, streamer=streamer, assistant_model=draft), ref
    )
    assert streamer.num == ref.shape[1]


@pytest.mark.parametrize("rows", [1, 3])
def test_guidance_as_a_processor_keeps_its_cache_in_step(rows: int) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([6, 4, 5][:rows], 4)

    def guided(**more: Any) -> torch.Tensor:
        nothing = torch.full((rows, 1), 3)
        processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target, nothing)
        processors = LogitsProcessorList([processor])
        return target.generate(**inputs, **GREEDY, logits_processor=processors, **more)

    ref = guided()
    draft = oracle_draft(target, truth_of(inputs, ref), 2)
    assert torch.equal(guided(assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1


def test_a_forward_keyword_of_the_callers_reaches_every_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = shallow_target("qwen3")
    forward = type(target).forward

    def biased(self: Any, *args: Any, bias_scale: float = 0.0, **kwargs: Any) -> Any:
        assert "kwargs" not in kwargs
        out = forward(self, *args, **kwargs)
        out.logits = out.logits + bias_scale * torch.sin(torch.arange(out.logits.shape[-1]) * 1.7)
        return out

    monkeypatch.setattr(type(target), "forward", biased)
    inputs = prompts([6, 6], 4)
    ref = target.generate(**inputs, **GREEDY, bias_scale=30.0)
    assert not torch.equal(ref, target.generate(**inputs, **GREEDY))
    out = target.generate(**inputs, **GREEDY, bias_scale=30.0, assistant_model=tiny_draft(target))
    assert torch.equal(out, ref)


def test_stop_strings_of_the_model_work_and_can_be_overridden(
    deprecations: DeprecationLog,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("demos/toy/target")
    target = shallow_target("qwen3", vocab_size=len(tokenizer))
    inputs = prompts([6], 4)
    free = target.generate(**inputs, **GREEDY)
    stop = tokenizer.decode(free[0, 15])
    ref = target.generate(**inputs, **GREEDY, stop_strings=[stop], tokenizer=tokenizer)
    draft = oracle_draft(target, truth_of(inputs, free), 1)
    config = GenerationConfig(**GREEDY, stop_strings=[stop])
    out = target.generate(
        **inputs, generation_config=config, tokenizer=tokenizer, assistant_model=draft
    )
    assert torch.equal(out, ref)
    assert not deprecations.messages
    target.generation_config.stop_strings = [stop]
    assert torch.equal(
        target.generate(**inputs, **GREEDY, tokenizer=tokenizer, assistant_model=draft), ref
    )
    assert target.generation_config.stop_strings == [stop]
    out = target.generate(
        **inputs, generation_config=config, tokenizer=tokenizer, assistant_model=draft
    )
    assert torch.equal(out, ref)
    assert config.stop_strings == [stop]
    # Only an argument beside the config keeps the model's own strings from being filled in again.
    deprecations.messages.clear()


def test_a_criterion_of_stop_strings_replaces_the_setting() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("demos/toy/target")
    target = shallow_target("qwen3", vocab_size=len(tokenizer))
    inputs = prompts([6], 4)
    free = target.generate(**inputs, **GREEDY)
    early, late = (tokenizer.decode(free[0, column]) for column in (15, 20))
    settings = {
        **GREEDY,
        "stop_strings": [early],
        "tokenizer": tokenizer,
        "stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, [late])]),
    }
    ref = target.generate(**inputs, **settings)
    assert (
        ref.shape[1] > target.generate(**inputs, **settings | {"stopping_criteria": None}).shape[1]
    )
    draft = oracle_draft(target, truth_of(inputs, free), 1)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)


def test_autocast_differs_by_at_most_a_rounding() -> None:
    target = shallow_target("qwen3").float()
    inputs = prompts([6, 9, 4, 11], 4)
    with torch.autocast("cpu", torch.bfloat16):
        plain = target.generate(**inputs, **GREEDY)
        draft = oracle_draft(target, truth_of(inputs, plain), 1)
        out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        num_same = num_same_rows(target, inputs, out, plain, torch.bfloat16)
    assert num_same >= 2
    assert draft.last_stats.acceptance_length > 1.5


@pytest.mark.parametrize("length", [3, 6, 7])
def test_a_length_below_the_prompt_still_gives_one_token(length: int) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([6], 4)
    settings = {**GREEDY, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(length)])}
    ref = target.generate(**inputs, **settings)
    assert ref.shape[1] == 7
    assert torch.equal(
        target.generate(**inputs, **settings, assistant_model=tiny_draft(target)), ref
    )


def test_noise_is_finite_so_that_no_forbidden_token_can_tie() -> None:
    # This entry came out infinite once: 32 random ones, rounded up to 1 in float32.
    noise = exponential_noise(torch.tensor(7), torch.tensor([[14]]), torch.arange(644_887))
    assert noise.isfinite().all()
    assert (noise > 0).all()


class HidesAll(LogitsProcessor):
    """Hides every token behind so many columns."""

    def __init__(self, num_columns: int, is_row_wise: bool) -> None:
        self.num_columns = num_columns
        self.is_row_wise = is_row_wise

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self.num_columns:
            return scores
        return torch.full_like(scores, -torch.inf)


NOTHING_TO_DRAW: dict[str, dict[str, Any]] = {
    "suppressed": {"suppress_tokens": list(range(64))},
    "a processor": {"logits_processor": [HidesAll(6, is_row_wise=True)]},
    "later": {"logits_processor": [HidesAll(9, is_row_wise=True)]},
    "column by column": {"logits_processor": [HidesAll(9, is_row_wise=False)]},
}


@pytest.mark.parametrize("case", NOTHING_TO_DRAW)
def test_nothing_is_drawn_where_processors_hide_all_tokens(case: str) -> None:
    target = shallow_target("qwen3")
    settings = {**prompts([4, 6], 8), **GREEDY, "do_sample": True, **NOTHING_TO_DRAW[case]}
    with pytest.raises(RuntimeError, match="probability tensor"):
        target.generate(**settings)
    with pytest.raises(ValueError, match="can be drawn from, got -inf as the greatest"):
        target.generate(**settings, assistant_model=tiny_draft(target))


class StopsAt(StoppingCriteria):
    """Stops a row at so many columns."""

    is_row_wise = True

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.num_columns])


def test_what_lies_behind_a_stop_needs_no_token_to_draw() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([6], 8)
    settings: dict[str, Any] = {
        **GREEDY,
        "do_sample": True,
        "logits_processor": [HidesAll(9, True)],
    }
    # The target's samples are the same at any width.
    narrow = tiny_draft(target)
    narrow.generation_config.verify_width = 1
    torch.manual_seed(1)
    ref = target.generate(
        **inputs, **settings, stopping_criteria=[StopsAt(9)], assistant_model=narrow
    )
    assert ref.shape == (1, 9)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    for num_columns in (8, 9):
        torch.manual_seed(1)
        criteria = [StopsAt(num_columns)]
        out = target.generate(
            **inputs, **settings, stopping_criteria=criteria, assistant_model=draft
        )
        assert torch.equal(out, ref[:, :num_columns])
    with pytest.raises(ValueError, match="can be drawn from, got -inf as the greatest"):
        target.generate(
            **inputs, **settings, stopping_criteria=[StopsAt(10)], assistant_model=draft
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_is_drawn_from_logits_that_are_no_numbers(value: float) -> None:
    target = shallow_target("qwen3")

    def spoil(module: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([5]), value)

    target.lm_head.register_forward_hook(spoil)
    settings = {**prompts([4, 6], 8), **GREEDY, "do_sample": True}
    with pytest.raises(RuntimeError, match="probability tensor"):
        target.generate(**settings)
    with pytest.raises(ValueError, match=f"can be drawn from, got {value} as the greatest"):
        target.generate(**settings, assistant_model=tiny_draft(target))
    settings["remove_invalid_values"] = True
    out = target.generate(**settings, assistant_model=tiny_draft(target))
    assert out.shape == target.generate(**settings).shape


def test_a_prefix_function_is_told_prompts_and_not_rows() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([4, 6], 8)
    seen = set[int]()

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        seen.add(prompt)
        return list(range(10 * prompt, 10 * prompt + 10))

    settings: dict[str, Any] = {**GREEDY, "do_sample": True, "num_return_sequences": 3}
    settings["prefix_allowed_tokens_fn"] = allowed
    target.generate(**inputs, **settings)
    plain = set(seen)
    seen.clear()
    out = target.generate(**inputs, **settings, assistant_model=tiny_draft(target))
    assert seen == plain
    prompt_of_row = [0, 0, 0, 1, 1, 1] if len(plain) == 2 else list(range(6))
    for prompt, row in zip(prompt_of_row, out[:, 6:].tolist(), strict=True):
        assert {token // 10 for token in row} == {prompt}


def test_a_prefix_function_sees_real_prefixes_only() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([4, 9, 6], 8)
    seen: list[tuple[int, tuple[int, ...]]] = []

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        seen.append((row, tuple(ids.tolist())))
        return [token for token in range(64) if token % 5 != row]

    settings = {**GREEDY, "prefix_allowed_tokens_fn": allowed}
    ref = target.generate(**inputs, **settings)
    plain, seen = set(seen), []
    draft = oracle_draft(target, truth_of(inputs, ref), 1)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert set(seen) == plain


def test_statistics_of_a_failed_run_are_not_the_last_ones() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    assert draft.last_stats is not None
    target.model.layers[1].register_forward_pre_hook(
        lambda *args: (_ for _ in ()).throw(RuntimeError("on purpose"))
    )
    with pytest.raises(RuntimeError, match="on purpose"):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    assert draft.last_stats is None


def test_a_call_without_a_prompt_begins_as_plain_generate_does() -> None:
    target = shallow_target("qwen3")
    target.generation_config.bos_token_id = 7
    ref = target.generate(**GREEDY)
    assert torch.equal(target.generate(**GREEDY, assistant_model=tiny_draft(target)), ref)
    assert ref[0, 0] == 7
    target.generation_config.bos_token_id = target.config.bos_token_id = None
    with pytest.raises(ValueError, match="at least one token"):
        target.generate(**GREEDY, assistant_model=tiny_draft(target))
