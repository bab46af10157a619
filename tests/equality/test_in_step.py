"""Rows in step: what plain `generate` calls once per column is called in the same way, with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import BaseStreamer

from dflash_hf import RunningBatch, SpeculativeStats
from helpers.half import half
from tiny import oracle_draft, prompts, shallow_target, truth_of

NEW = 20
EOS = [3, 9, 17, 30, 44, 58]


class Apart(LogitsProcessor):
    """Keeps rows from choosing what another one chose last, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[list[list[int]], Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shown.append((input_ids.tolist(), scores.clone()))
        scores = scores.clone()
        for row in range(scores.shape[0]):
            others = [input_ids[other, -1] for other in range(scores.shape[0]) if other != row]
            scores[row, others] -= 2.0
        scores[:, (7 * len(self.shown)) % scores.shape[1]] -= 20.0
        return scores


class Together(StoppingCriteria):
    """Stops a row after four even numbers in a row, and every row at a column that is all odd; remembers."""

    def __init__(self) -> None:
        self.shown: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shown.append(input_ids.tolist())
        even = input_ids[:, -4:] % 2 == 0
        return even.all(dim=1) | (len(self.shown) > 8 and bool((input_ids[:, -1] % 2 == 1).all()))


class Columns(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.got.append(value)

    def end(self) -> None:
        self.got.append(torch.tensor(-1))


CASES = ["processor", "criterion", "streamer", "all", "SynthID", "time"]


def settings_of(case: str) -> tuple[dict[str, Any], list[Any]]:
    """New settings for one call, and the objects in them that remember."""
    processor, criterion, streamer = Apart(), Together(), Columns()
    found: dict[str, dict[str, Any]] = {
        "processor": {"logits_processor": LogitsProcessorList([processor])},
        "criterion": {"stopping_criteria": StoppingCriteriaList([criterion])},
        "streamer": {"streamer": streamer},
        "SynthID": {
            "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 5], ngram_len=3)
        },
        "time": {"max_time": 1e6},
    }
    found["all"] = {**found["processor"], **found["criterion"], **found["streamer"]}
    return {"max_new_tokens": NEW, "do_sample": False, **found[case]}, [
        processor,
        criterion,
        streamer,
    ]


@pytest.mark.parametrize(
    ("case", "rows", "eos"), half(list(CASES), [1, 3], {"no eos": None, "eos": EOS})
)
def test_code_that_sees_the_batch_is_called_as_in_generate(
    case: str, rows: int, eos: list[int] | None
) -> None:
    target = shallow_target("qwen3")
    num_stopped, most = 0, 0.0
    for seed in range(2):
        inputs = prompts([7, 4, 6][:rows], seed)
        end = {"eos_token_id": eos, "pad_token_id": 0}
        settings, plain = settings_of(case)
        ref = target.generate(**inputs, **settings, **end)
        settings, ours = settings_of(case)
        draft = oracle_draft(target, truth_of(inputs, ref), seed, 8)
        out = target.generate(**inputs, **settings, **end, assistant_model=draft)
        assert torch.equal(out, ref)
        num_stopped += ref.shape[1] < inputs["input_ids"].shape[1] + NEW
        assert [ids for ids, _ in ours[0].shown] == [ids for ids, _ in plain[0].shown]
        for (ids, scores), (_, wanted) in zip(ours[0].shown, plain[0].shown, strict=True):
            # Plain generate goes on feeding padding to finished rows, whose scores nobody uses.
            answers = [set(row[inputs["input_ids"].shape[1] :]) for row in ids]
            going = torch.tensor([eos is None or not answer & set(EOS) for answer in answers])
            if case == "processor":
                torch.testing.assert_close(scores[going], wanted[going], rtol=1e-5, atol=1e-5)
        assert ours[1].shown == plain[1].shown
        if rows == 1:
            # One row's streamer gets a whole accepted run at a time.
            ours[2].got, plain[2].got = (
                [torch.cat([v.flatten() for v in s.got] or [out])] for s in (ours[2], plain[2])
            )
        assert [value.tolist() for value in ours[2].got] == [
            value.tolist() for value in plain[2].got
        ]
        most = max(most, draft.last_stats.acceptance_length)
    assert most > 1.5
    assert num_stopped or case not in ("criterion", "all")


class Keeper(LogitsProcessor, StoppingCriteria):
    """Keeps the ids that it is given, in one line."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        self.kept.append(input_ids.view(-1))
        # As a processor the scores, as a criterion no end.
        return scores if isinstance(scores, Tensor) else False


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_ids_are_contiguous_and_may_be_kept(name: str) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([7, 4], 0)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    plain, ours = Keeper(), Keeper()
    ref = target.generate(**inputs, **settings, **{name: [plain]})
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 8)
    out = target.generate(**inputs, **settings, **{name: [ours]}, assistant_model=draft)
    assert torch.equal(out, ref)
    assert [ids.tolist() for ids in ours.kept] == [ids.tolist() for ids in plain.kept]


@pytest.mark.parametrize("proposal", ["argmax", "shared_noise"])
def test_sampled_texts_in_step_are_the_same_at_every_block_size(proposal: Any) -> None:
    target = shallow_target("llama")
    inputs = prompts([7, 4, 6], 1)
    texts = []
    for block_size in (1, 4, 8):
        draft = oracle_draft(target, [[5] * 60] * 3, 3, 8)
        draft.generation_config.block_size = block_size
        draft.generation_config.proposal = proposal
        settings = {
            **settings_of("all")[0],
            "do_sample": True,
            "top_k": 20,
            "eos_token_id": EOS,
            "pad_token_id": 0,
        }
        torch.manual_seed(4)
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_rejection_sampling_in_step_stops_where_a_row_is_refused() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([7, 4], 1)
    draft = oracle_draft(target, [[5] * 60] * 2, 3, 8)
    draft.generation_config.proposal = "sample"
    torch.manual_seed(0)
    streamer = Columns()
    out = target.generate(
        **inputs, max_new_tokens=NEW, do_sample=True, streamer=streamer, assistant_model=draft
    )
    assert torch.equal(torch.stack(streamer.got[1:-1], dim=1), out[:, 7:])
    assert out.shape == (2, 7 + NEW)
    stats = draft.last_stats
    assert stats.num_committed[0] == stats.num_committed[1]


def advanced_together(stats: SpeculativeStats) -> bool:
    """Whether all rows committed as many tokens in every verify but a row's last."""
    first, *others = stats.num_committed
    return all(a == b for row in others for a, b in zip(first[:-1], row[:-1], strict=False))


class RowByRow(StoppingCriteria):
    """Stops a row after three even numbers in a row."""

    is_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -3:] % 2 == 0).all(dim=1)


@pytest.mark.parametrize("eos", [None, EOS], ids=["no eos", "eos"])
def test_a_row_wise_criterion_keeps_no_row_back(
    eos: list[int] | None,
) -> None:
    target = shallow_target("qwen3")
    num_stopped, is_apart = 0, False
    for seed in range(3):
        inputs = prompts([7, 4, 6], seed)
        settings = {
            "max_new_tokens": NEW,
            "do_sample": False,
            "eos_token_id": eos,
            "pad_token_id": 0,
        }
        settings |= {"stopping_criteria": StoppingCriteriaList([RowByRow()])}
        ref = target.generate(**inputs, **settings)
        draft = oracle_draft(target, truth_of(inputs, ref), seed, 8)
        assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
        num_stopped += sum(row[-1] == 0 for row in ref.tolist())
        is_apart |= not advanced_together(draft.last_stats)
    assert is_apart == (eos is not None), (
        "without an end token stopped rows go on, so that all advance together"
    )
    assert num_stopped or eos is None


class NoRepeat(LogitsProcessor):
    """Forbids a token that equals the one before it."""

    is_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class Halves(LogitsProcessor):
    """Makes many scores equal, but for a difference that float32 does not have: the last of them is the greatest."""

    is_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        order = torch.arange(scores.shape[1], dtype=torch.float64)
        return scores.double().div(4).round() + 1e-12 * order


def test_a_row_wise_processor_may_return_float64() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([7, 4, 6], 0)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    settings |= {"logits_processor": [Halves()], "output_scores": True}
    settings |= {"return_dict_in_generate": True}
    ref: Any = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, ref.sequences), 0, 8)
    out: Any = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(out.sequences, ref.sequences)
    for ours, plain in zip(out.scores, ref.scores, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    # In a running batch beside rows that have float32.
    texts: dict[int, list[int]] = {0: [], 1: []}
    batch = RunningBatch(target, draft)
    ids = inputs["input_ids"][:1]
    limit: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    batch.add(ids, **limit, repetition_penalty=1.2)
    batch.add(ids, **limit, logits_processor=[Halves()])
    while batch.ids:
        for new in batch.step():
            texts[new.id] += new.token_ids
    assert texts[0] == target.generate(ids, **limit, repetition_penalty=1.2)[0, 7:].tolist()
    assert texts[1] == ref.sequences[0, 7:].tolist()


def test_a_row_wise_processor_keeps_no_row_back() -> None:
    target = shallow_target("qwen3")
    is_apart = False
    for seed in range(2):
        inputs = prompts([7, 4, 6], seed)
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        settings |= {"logits_processor": [NoRepeat()]}
        ref = target.generate(**inputs, **settings)
        draft = oracle_draft(target, truth_of(inputs, ref), seed, 8)
        assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
        is_apart |= not advanced_together(draft.last_stats)
    assert is_apart


def test_a_criterion_that_reads_its_streamer_stops_as_in_generate() -> None:
    """Older releases give a column to the streamer before they call the criteria."""
    target = shallow_target("qwen3")
    inputs = prompts([5], seed=0)
    truth = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    awaited = int(truth[0, inputs["input_ids"].shape[1] + 7])

    def answer(**draft: Any) -> Tensor:
        streamer = Columns()

        class Heard(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
                return any(awaited in column.flatten() for column in streamer.got[1:])

        settings = {"max_new_tokens": NEW, "do_sample": False, "streamer": streamer}
        criteria = StoppingCriteriaList([Heard()])
        return target.generate(**inputs, **settings, **draft, stopping_criteria=criteria)

    plain = answer()
    assert plain.shape[1] < truth.shape[1]
    draft = oracle_draft(target, truth_of(inputs, truth), 0, 8)
    assert torch.equal(answer(assistant_model=draft), plain)
