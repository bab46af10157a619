"""`--algorithm` stands for options, refuses those that contradict it, and a draft may know frequent tokens alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import dflash_hf.cli.train_preflight as preflight
import dflash_hf.cli.train_stages as stages
from dflash_hf import load_draft
from dflash_hf.cli.train_algorithms import ALGORITHMS
from dflash_hf.cli.train_settings import OPTIONS, TrainSettings
from helpers.source_tree import ROOT
from helpers.training_command import SMALL, TOY, killed, said, train, write_rows


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


def test_an_algorithm_sets_what_its_help_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = asked(folder=tmp_path, patch=monkeypatch)
    assert plain == asked("--algorithm", "dflash", folder=tmp_path, patch=monkeypatch)
    (help,) = (item.metadata["help"] for item in OPTIONS if item.name == "algorithm")
    guide = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for name, algorithm in ALGORITHMS.items():
        words = ["--algorithm", name, "--draft-options", '{"num_taps": 2}']
        settings = asked(*words, folder=tmp_path, patch=monkeypatch)
        fields = {**algorithm.draft_options, **algorithm.sizes}
        assert settings.draft_options == {"num_taps": 2, **fields}
        for option in ("loss", "labels", "gamma"):
            wanted = algorithm.options.get(option, getattr(plain, option))
            assert getattr(settings, option) == wanted
        assert all(f"{field} {json.dumps(value)}" in help for field, value in fields.items())
        assert all(f"--{field} {value}" in help for field, value in algorithm.options.items())
        (line,) = (line for line in guide.splitlines() if line.startswith(f"  | `{name}`"))
        assert not fields or f"--draft-options '{json.dumps(fields)}'" in line
        assert all(f"--{field} {value}" in line for field, value in algorithm.options.items())


TAKEN: dict[str, tuple[list[object], str, object]] = {
    "rank": (
        ["--algorithm", "dspark", "--draft-options", '{"markov_rank": 64}'],
        "draft_options",
        {"sample_from_anchor": True, "markov_rank": 64},
    ),
    "loss of dflash2": (["--algorithm", "dflash2", "--loss", "lk"], "loss", "lk"),
    "decay of kl": (["--algorithm", "jetspec", "--gamma", 3], "gamma", 3),
    "what it sets": (["--algorithm", "jetspec", "--loss", "kl"], "loss", "kl"),
    "size": (
        ["--algorithm", "dflash2", "--draft-options", '{"selector_rank": 8}'],
        "draft_options",
        {**ALGORITHMS["dflash2"].sizes, "selector_rank": 8},
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_option_that_refines_an_algorithm_is_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, option, value = TAKEN[name]
    settings = asked(*words, folder=tmp_path, patch=monkeypatch)
    assert getattr(settings, option) == value


REFUSED: dict[str, tuple[list[object], str]] = {
    "unknown": (
        ["--algorithm", "x"],
        "expected --algorithm among dflash, dflash2, dspark, jetspec, got",
    ),
    "loss": (
        ["--algorithm", "jetspec", "--loss", "dpace"],
        "expected --loss kl with --algorithm jetspec, got 'dpace'; leave one of them out",
    ),
    "field": (
        ["--algorithm", "jetspec", "--draft-options", '{"is_causal": false}'],
        "expected is_causal true in --draft-options with --algorithm jetspec, got False",
    ),
    "loss of the default that is named": (
        ["--algorithm", "dflash", "--loss", "kl"],
        "expected --loss dpace with --algorithm dflash, got 'kl'; leave one of them out",
    ),
    "selector": (
        ["--algorithm", "dflash", "--draft-options", '{"selector_rank": 8}'],
        "expected no selector_rank in --draft-options with --algorithm dflash, got 8",
    ),
    "no selector": (
        ["--algorithm", "dflash2", "--draft-options", '{"selector_rank": null}'],
        "expected a size as selector_rank in --draft-options with --algorithm dflash2, got None",
    ),
    "two heads": (
        ["--algorithm", "dspark", "--draft-options", '{"selector_rank": 8}'],
        "expected no selector_rank in --draft-options with --algorithm dspark, got 8",
    ),
    "anchor that does not propose": (
        ["--algorithm", "dspark", "--draft-options", '{"sample_from_anchor": false}'],
        "expected sample_from_anchor true in --draft-options with --algorithm dspark, got False",
    ),
    "draft that is there": (
        ["--algorithm", "dflash2", "--draft", TOY / "draft"],
        "expected --algorithm without --draft, because the draft's config has this value",
    ),
    "two vocabularies": (
        ["--draft-vocab-size", 9, "--draft-options", '{"draft_token_ids": [1]}'],
        "expected no draft_token_ids in --draft-options beside --draft-vocab-size, got 9",
    ),
    "more tokens than there are": (
        ["--draft-vocab-size", 10**6],
        "tokens as --draft-vocab-size, got 1000000; leave it out for all tokens",
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


def test_a_vocabulary_without_room_for_the_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "end_tokens", lambda target: [2, 3])
    data = write_rows(tmp_path / "rows.jsonl")
    words = ["--dataset", data, "--output-dir", tmp_path / "out", *SMALL, "--draft-vocab-size", 1]
    result = train(*words)
    assert result.exit_code == 2, result.output
    sentence = "expected room for the 2 tokens that end an answer in --draft-vocab-size, got 1"
    assert sentence in said(result)
    assert not (tmp_path / "out").exists()


def test_another_algorithm_keeps_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    words = [*SMALL, "--algorithm", "jetspec", "--stages", "prepare"]
    result = train("--dataset", data, "--output-dir", out, *words)
    assert result.exit_code == 0, result.output
    written = yaml.safe_load((out / "settings.yaml").read_text())
    assert written["algorithm"] == "jetspec"
    assert written["draft_options"] == {"num_taps": 2}
    assert "loss" not in written
    found: list[TrainSettings] = []
    monkeypatch.setattr(stages, "run_stages", lambda settings, *rest: found.append(settings))
    for words in ([], ["--algorithm", "dflash"]):
        result = train("--output-dir", out, *words)
        assert result.exit_code == 0, result.output
    same, other = found
    assert (same.loss, same.draft_options) == ("kl", {"num_taps": 2, "is_causal": True})
    assert (other.loss, other.draft_options) == ("dpace", {"num_taps": 2})


def test_a_reduced_vocabulary_is_kept_by_resume_and_export(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    words = [*SMALL, "--draft-vocab-size", 40, "--formats", "speculators"]
    words += ["--stages", "prepare,regenerate,run,export"]
    outs = [tmp_path / "whole", tmp_path / "killed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stages.RUNNERS, "run", killed(stages.RUNNERS["run"]))
        assert train("--dataset", data, "--output-dir", outs[1], *words).exit_code == 130
    for out in outs:
        result = train("--dataset", data, "--output-dir", out, *words)
        assert result.exit_code == 0, result.output
    whole, resumed = (load_draft(out / "draft").state_dict() for out in outs)
    assert whole["lm_head.weight"].shape[0] == whole["d2t"].shape[0] <= 40
    exported = load_draft(outs[1] / "export" / "speculators").state_dict()
    for name, value in whole.items():
        assert value.equal(resumed[name]), name
        assert value.equal(exported[name]), name


@pytest.mark.parametrize(
    ("algorithm", "field"), [("dflash2", "selector_rank"), ("dspark", "markov_rank")]
)
def test_a_path_over_frequent_tokens_is_trained_and_loaded(
    algorithm: str, field: str, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    out = tmp_path / "out"
    words = ["--algorithm", algorithm, "--draft-vocab-size", 40, "--max-steps", 1]
    stages = ["--stages", "prepare,regenerate,run"]
    result = train("--dataset", data, "--output-dir", out, *SMALL, *words, *stages)
    assert result.exit_code == 0, result.output
    draft = load_draft(out / "draft")
    assert getattr(draft.config, field) == 256
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
