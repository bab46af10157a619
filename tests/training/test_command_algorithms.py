"""`--algorithm` stands for options, refuses those that contradict it, and a draft may know frequent tokens alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dflash_hf.cli.train_stages as stages
from dflash_hf import load_draft
from dflash_hf.cli.train_algorithms import ALGORITHMS
from dflash_hf.cli.train_settings import OPTIONS, TrainSettings
from helpers.training_command import SMALL, TOY, said, train, write_rows


def asked(*words: object, folder: Path, patch: pytest.MonkeyPatch) -> TrainSettings:
    """The settings that a command line comes to."""
    found: list[TrainSettings] = []
    patch.setattr(stages, "run_stages", lambda settings, *rest: found.append(settings))
    place = [
        "--target",
        TOY / "target",
        "--dataset",
        TOY / "held_out.jsonl",
        "--output-dir",
        folder,
    ]
    result = train(*place, *words)
    assert result.exit_code == 0, result.output
    return found[0]


def test_an_algorithm_is_the_options_that_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = asked(folder=tmp_path, patch=monkeypatch)
    assert plain == asked("--algorithm", "dflash", folder=tmp_path, patch=monkeypatch)
    for name, algorithm in ALGORITHMS.items():
        words = ["--algorithm", name, "--draft-options", '{"num_taps": 2}']
        settings = asked(*words, folder=tmp_path, patch=monkeypatch)
        assert settings.draft_options == {"num_taps": 2, **algorithm.draft_options}
        for option in ("loss", "labels", "gamma"):
            assert getattr(settings, option) == algorithm.options.get(
                option, getattr(plain, option)
            )
        (help,) = (item.metadata["help"] for item in OPTIONS if item.name == "algorithm")
        assert all(
            f"{field} {json.dumps(value)}" in help
            for field, value in algorithm.draft_options.items()
        )
        assert all(f"--{field} {value}" in help for field, value in algorithm.options.items())


REFUSED: dict[str, tuple[list[object], str]] = {
    "unknown": (["--algorithm", "x"], "expected --algorithm among dflash, dflash2, jetspec, got"),
    "loss": (
        ["--algorithm", "jetspec", "--loss", "dpace"],
        "expected --loss kl with --algorithm jetspec, got 'dpace'; leave one of them out",
    ),
    "field": (
        ["--algorithm", "jetspec", "--draft-options", '{"is_causal": false}'],
        "expected is_causal true in --draft-options with --algorithm jetspec, got False",
    ),
    "draft that is there": (
        ["--algorithm", "dflash2", "--draft", TOY / "draft"],
        "expected --algorithm without --draft, whose config says it",
    ),
    "two vocabularies": (
        ["--draft-vocab-size", 9, "--draft-options", '{"draft_token_ids": [1]}'],
        "expected no draft_token_ids in --draft-options beside --draft-vocab-size, got 9",
    ),
    "more tokens than there are": (
        ["--draft-vocab-size", 10**6],
        "expected different draft_token_ids from 0 to",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    words, sentence = REFUSED[name]
    place = ["--target", TOY / "target", "--dataset", TOY / "held_out.jsonl", "--threads", 1]
    result = train(*place, "--output-dir", tmp_path / "out", *words)
    assert result.exit_code == 2, result.output
    assert sentence in said(result)
    assert list(tmp_path.iterdir()) == []


def test_a_selector_over_frequent_tokens_is_trained_and_loaded(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    out = tmp_path / "out"
    words = ["--algorithm", "dflash2", "--draft-vocab-size", 40, "--max-steps", 1]
    stages = ["--stages", "prepare,regenerate,run"]
    result = train("--dataset", data, "--output-dir", out, *SMALL, *words, *stages)
    assert result.exit_code == 0, result.output
    draft = load_draft(out / "draft")
    assert draft.config.selector_rank == 256
    assert draft.lm_head is not None
    assert draft.d2t is not None
    ids = {at + int(shift) for at, shift in enumerate(draft.d2t)}
    assert len(ids) == draft.config.draft_vocab_size == draft.lm_head.weight.shape[0] <= 40
    rows = [json.loads(line) for line in (out / "answered" / "train.jsonl").open()]
    said_by_the_target = {token for row in rows for token in row["answer_ids"]}
    assert len(ids & said_by_the_target) >= min(39, len(said_by_the_target))
    again = train("--output-dir", out, *stages)
    assert again.exit_code == 0, again.output
    assert "run: done before" in again.output
