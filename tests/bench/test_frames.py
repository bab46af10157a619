"""Acceptance as data frames: the counts of the summary and of the statistics once more, token by token."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_hf.bench.frames import ACCEPTANCE_COLUMNS, TOKEN_COLUMNS, acceptance_frame, token_frame
from dflash_hf.bench.methods import Models
from dflash_hf.bench.summary import summarize
from dflash_hf.pair.answers import encode_prompt
from helpers.bench_run import simple_score, write_run

pytest.importorskip("pandas")


def test_acceptance_frame_has_the_counts_of_the_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    summary = summarize(folder, simple_score)
    frame = acceptance_frame(folder)
    assert list(frame.columns) == ACCEPTANCE_COLUMNS
    drafted = {m["model_id"]: m for m in summary["methods"] if m["all"]["acceptance"]}
    assert set(frame["method"]) == set(drafted)
    for name, method in drafted.items():
        for dataset, block in method["sets"].items():
            if not block["acceptance"]:
                continue
            here = frame[(frame["method"] == name) & (frame["dataset"] == dataset)]
            sums = here.groupby("position")[["num_tried", "num_accepted"]].sum()
            conditional = (sums["num_accepted"] / sums["num_tried"]).tolist()
            told = block["acceptance"]
            assert conditional == pytest.approx(told["conditional_acceptance_at_pos"])
            assert sums["num_accepted"].sum() == told["num_accepted_tokens"]


def test_acceptance_frame_has_a_line_per_category(tmp_path: Path) -> None:
    frame = acceptance_frame(write_run(tmp_path / "run"))
    talk = frame[(frame["method"] == "dflash") & (frame["dataset"] == "mt-bench")]
    assert set(talk["category"]) == {"math", "writing"}
    assert talk[talk["category"] == "math"]["position"].tolist() == list(range(1, 8))
    first = talk[talk["position"] == 1]
    assert (first["joint"] == first["conditional"]).all()


def test_acceptance_frame_refuses_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected "):
        acceptance_frame(tmp_path)


def test_token_frame_has_the_text_and_counts_of_generate(
    models: Models, held_out: list[str]
) -> None:
    target: Any = models.target
    draft: Any = copy.deepcopy(models.draft)
    draft.generation_config.verify_width = draft.config.block_size
    frame = token_frame(target, {"a": draft}, models.processor, {"t": held_out}, max_new_tokens=48)
    assert list(frame.columns) == TOKEN_COLUMNS
    for number, prompt in enumerate(held_out):
        inputs = encode_prompt(models.processor, prompt, target.device)
        out = target.generate(**inputs, assistant_model=draft, max_new_tokens=48)
        lines = frame[frame["prompt"] == number]
        # The first token is the prefill's.
        text = out[0, inputs["input_ids"].shape[1] + 1 :].tolist()
        assert lines["token_id"].tolist() == text
        stats = draft.last_stats
        assert lines["verify"].value_counts().sort_index().tolist() == stats.num_committed[0]
        assert len(text) / (lines["position"] == 1).sum() == pytest.approx(stats.acceptance_length)


def test_token_frame_has_the_targets_own_probabilities(models: Models, held_out: list[str]) -> None:
    target: Any = models.target
    drafts: Any = {"a": models.draft}
    frame = token_frame(target, drafts, models.processor, {"t": held_out[:1]}, max_new_tokens=24)
    inputs = encode_prompt(models.processor, held_out[0], target.device)
    out = target.generate(
        **inputs, max_new_tokens=24, return_dict_in_generate=True, output_logits=True
    )
    logits = torch.cat(out.logits)[1:]
    tokens = out.sequences[0, -len(logits) :]
    expected = logits.softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    assert frame["target_probability"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_two_drafts_are_compared_on_the_same_tokens(models: Models, held_out: list[str]) -> None:
    draft: Any = models.draft
    broken = copy.deepcopy(draft)
    broken.config.mask_token_id = 1
    drafts = {"healthy": draft, "broken": broken}
    target: Any = models.target
    frame = token_frame(target, drafts, models.processor, {"t": held_out}, max_new_tokens=32)
    texts = frame.groupby(["draft", "prompt"])["token_id"].apply(list)
    assert texts["healthy"].tolist() == texts["broken"].tolist()
    right = frame.groupby("draft")["is_right"].mean()
    assert right["healthy"] > right["broken"]


def test_texts_that_tie_are_cut_where_they_differ(
    models: Models, held_out: list[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from dflash_hf.bench import frames

    told_by = frames._told_by
    calls: list[int] = []

    def another_text(steps: Any) -> list[tuple[Any, ...]]:
        lines = told_by(steps)
        calls.append(len(lines))
        if len(calls) == 2:
            lines[5] = (*lines[5][:2], -1, *lines[5][3:])
        return lines

    monkeypatch.setattr(frames, "_told_by", another_text)
    drafts: Any = {"a": models.draft, "b": models.draft}
    target: Any = models.target
    with caplog.at_level(logging.WARNING):
        frame = token_frame(target, drafts, models.processor, {"t": held_out[:1]})
    assert frame["draft"].value_counts().to_dict() == {"a": 5, "b": 5}
    assert "differ behind 6 tokens" in caplog.text


def test_a_draft_that_checks_a_tree_is_refused(models: Models) -> None:
    draft: Any = copy.deepcopy(models.draft)
    draft.generation_config.num_tree_nodes = 8
    target: Any = models.target
    with pytest.raises(ValueError, match=r"without a tree, got .*num_tree_nodes=8"):
        token_frame(target, {"a": draft}, models.processor, {"t": ["Hello."]})
    with pytest.raises(ValueError, match="expected at least one draft"):
        token_frame(target, {}, models.processor, {"t": ["Hello."]})


def test_one_prompt_in_the_place_of_a_list_is_refused(models: Models) -> None:
    target: Any = models.target
    drafts: Any = {"a": models.draft}
    message = [{"role": "user", "content": "Hello."}]
    for prompts in ({"t": "Hello."}, {"t": message}):
        with pytest.raises(ValueError, match="expected a list of prompts"):
            token_frame(target, drafts, models.processor, prompts, max_new_tokens=4)
    with pytest.raises(ValueError, match="expected at least one task with prompts"):
        token_frame(target, drafts, models.processor, ["Hello."])  # type: ignore[arg-type]


def test_what_is_no_draft_is_refused(models: Models) -> None:
    target: Any = models.target
    draft: Any = models.draft
    with pytest.raises(ValueError, match="expected a DFlashDraftModel as draft"):
        token_frame(target, {"a": target}, models.processor, {"t": ["Hello."]})
    with pytest.raises(ValueError, match="expected at least one draft by name"):
        token_frame(target, draft, models.processor, {"t": ["Hello."]})
