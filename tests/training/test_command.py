"""`dflash-hf train` from end to end on the bundled target: every stage, killed and resumed; and what it refuses."""

from __future__ import annotations

import errno
import gc
import json
import shlex
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dflash_hf.cli.train_stages as stages
from dflash_hf import load_draft
from dflash_hf.cli.train_arguments import make_arguments
from dflash_hf.cli.train_card import card_facts
from dflash_hf.cli.train_reading import as_words, read_arguments
from dflash_hf.cli.train_settings import OF_THE_TRAINER, OPTIONS, STAGES, TrainSettings
from dflash_hf.cli.train_state import RunState
from dflash_hf.cli.train_target import TargetOnce
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training import DFlashTrainingArguments, export
from dflash_hf.training.export import CardFacts
from helpers.source_tree import ROOT
from helpers.training_command import SMALL, TOY, killed, said, train, write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten conversations."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run's folder, and what its command said; killed in the middle of its training, and gone on with."""
    out = tmp_path_factory.mktemp("train") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stages.RUNNERS, "run", killed(stages.RUNNERS["run"]))
        result = train("--dataset", data, "--output_dir", out, *SMALL)
    assert result.exit_code == 130, result.output
    ended = f"dflash-hf train --output-dir {out} continues the run. It goes on from checkpoint-2."
    assert ended in said(result)
    assert not (out / "draft").exists()
    assert [path.name for path in (out / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    result = train("--output-dir", out)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_a_run_is_killed_goes_on_and_leaves_everything(done: tuple[Path, str]) -> None:
    out, told = done
    lines = told.splitlines()
    assert lines[0] == f"prepare: done before, {out / 'prepared'}"
    assert lines[1] == f"regenerate: done before, {out / 'answered'}"
    assert [line.partition(":")[0] for line in lines if line.split(":")[0] in STAGES] == list(
        STAGES
    )
    state = json.loads((out / "stages.json").read_text())
    assert [state[stage]["finished"] for stage in STAGES] == [True] * 5
    assert state["run"]["facts"]["steps"] == 4
    rows = [
        json.loads(line) for line in (out / "answered" / "train.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 8
    assert all(0 < len(row["answer_ids"]) <= 12 for row in rows)
    assert (out / "bench" / "report.html").is_file()
    draft = load_draft(out / "draft")
    for name in ("zlab", "speculators", "muse"):
        again = load_draft(out / "export" / name).state_dict()
        assert all(value.equal(again[key]) for key, value in draft.state_dict().items())


# When the draft is measured and saved -> options for four times.
TIMES: dict[str, list[object]] = {
    "steps": ["--eval-strategy", "steps", "--eval-steps", 1, "--save-steps", 1],
    "epochs": ["--save-strategy", "epoch", "--per-device-train-batch-size", 8],
}


@pytest.mark.parametrize("name", TIMES)
def test_the_acceptance_length_is_the_kept_drafts(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dflash_hf.training.trainer as trainer

    walk = trainer.DFlashTrainer.evaluation_loop
    lengths = iter([1.5, 3.0, 2.0, 1.25])
    drafts: list[torch.Tensor] = []

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = walk(self, *args, **kwargs)
        drafts.append(self.draft.fc.weight.detach().clone())
        found.metrics["eval_acceptance_length"] = next(lengths)
        return found

    monkeypatch.setattr(trainer.DFlashTrainer, "evaluation_loop", evaluate)
    out = tmp_path / "run"
    best = ("--load-best-model-at-end", "true", "--stages", "prepare,regenerate,run")
    result = train(*SMALL, "--dataset", data, "--output-dir", out, *TIMES[name], *best)
    assert result.exit_code == 0, said(result)
    state = json.loads((out / "stages.json").read_text())
    assert state["run"]["facts"]["acceptance_length"] == 3.0
    assert len(drafts) == 4
    assert not drafts[1].equal(drafts[3])
    assert load_draft(out / "draft").fc.weight.equal(drafts[1])


def test_only_checkpoints_have_pickles(done: tuple[Path, str]) -> None:
    pickles = {
        path.relative_to(done[0])
        for path in done[0].rglob("*")
        if path.suffix in (".bin", ".pt", ".pkl")
    }
    assert Path("run/checkpoint-4/training_args.bin") in pickles
    assert {path.parts[0] for path in pickles} == {"run"}


def test_a_finished_run_is_not_run_again(done: tuple[Path, str]) -> None:
    out, _ = done
    before = written(out)
    result = train("--output-dir", out)
    assert result.exit_code == 0, result.output
    assert [line.partition(",")[0] for line in result.output.splitlines()] == [
        f"{s}: done before" for s in STAGES
    ]
    after = written(out)
    assert [path for path in after if before.get(path) != after[path] and path.is_file()] == []


def test_a_killed_run_is_the_same_run(done: tuple[Path, str], data: Path, tmp_path: Path) -> None:
    out, _ = done
    words = [*SMALL, "--formats", "zlab"]
    result = train(
        "--dataset",
        data,
        "--output-dir",
        tmp_path / "whole",
        *words,
        "--stages",
        "prepare,regenerate,run",
    )
    assert result.exit_code == 0, result.output
    whole, killed = (
        load_draft(folder / "draft").state_dict() for folder in (tmp_path / "whole", out)
    )
    assert all(value.equal(killed[name]) for name, value in whole.items())


def test_the_card_says_what_it_is(done: tuple[Path, str], data: Path) -> None:
    out, _ = done
    for card in (out / "draft" / "README.md", out / "export" / "zlab" / "README.md"):
        _, front, body = card.read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(front)
        assert fields["license"] == "apache-2.0"
        assert fields["library_name"] == "transformers"
        assert "dflash" in fields["tags"]
        assert "base_model" not in fields, "a folder is no id on the Hub"
        measured = json.loads((out / "bench" / "summary.json").read_text())
        block = next(m for m in measured["methods"] if m["method"] == "dflash")["all"]
        cells = [
            f"{block['acceptance']['acceptance_length']:.2f}",
            f"{block['speedup']['ratio']:.2f}x",
            f"{block['own_speedup']['ratio']:.2f}x",
        ]
        assert f"| {' | '.join(cells)} |" in body
        assert (
            "| acceptance length | over plain `generate` | over dflash-hf without the draft |"
            in body
        )
        for words in (
            str(data),
            "torch 2.",
            "| answers | the target's own, greedy |",
            "| num_anchors | 4 |",
        ):
            assert words in body
    assert "sglang.launch_server" in body
    assert "vllm serve" in body


def test_the_card_says_how_many_batches_a_step_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a step are as many batches of --per-device-train-batch-size."""
    told: list[Any] = []
    for num_processes, arguments in ((1, {}), (2, {"gradient_accumulation_steps": 32})):
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))
        settings = TrainSettings(target="org/x", output_dir=tmp_path, arguments=arguments)
        training = card_facts(settings, RunState(settings, STAGES, redo=False)).training
        told.append(training.get("processes x gradient_accumulation_steps"))
    assert told == [None, 64]


@pytest.mark.parametrize(
    ("speedups", "cells"),
    [
        ({"speedup": {"ratio": 1.5}, "own_speedup": {"ratio": 1.25}}, "1.50x | 1.25x |"),
        ({"speedup": {"ratio": 1.5}, "own_speedup": None}, "1.50x |  |"),
        ({"speedup": None, "own_speedup": {"ratio": None}}, "|  |"),
    ],
    ids=["both", "one", "none"],
)
def test_a_ratio_that_was_not_measured_is_left_empty(
    speedups: dict[str, Any], cells: str, make_draft: Callable[[], DFlashDraftModel]
) -> None:
    block = {"questions": 8, "acceptance": {"acceptance_length": 3.0}, **speedups}
    facts = CardFacts(target="org/target", measured={"sets/gsm8k.jsonl": block})
    text = export.card(make_draft(), facts)
    assert 'dtype="auto", device_map={"": target.device})' in text, "a draft is on one device"
    (row,) = (line for line in text.splitlines() if "gsm8k.jsonl" in line)
    assert row.startswith("| gsm8k.jsonl | 8 | 3.00 | ")
    assert row.endswith(cells)
    assert row.count("|") == 6


def test_an_export_into_another_file_system_replaces_the_draft(
    make_draft: Callable[[], DFlashDraftModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, or a link to one: what is made beside it cannot be moved there."""
    place = tmp_path / "dflash"
    facts = CardFacts(target="org/target")
    assert export.export(make_draft(), tmp_path, facts, "dflash") is None
    (place / "model.safetensors").write_bytes(b"old")
    (place / "tokenizer_config.json").write_text("{}")
    files = sorted(file.name for file in place.iterdir())
    (place / "adapter_config.json").write_text("{}")
    move = Path.replace

    def move_within(self: Path, target: Path) -> Path:
        if place not in self.parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(self))
        return move(self, target)

    monkeypatch.setattr(Path, "replace", move_within)
    assert export.export(make_draft(), tmp_path, facts, "dflash") is None
    assert load_draft(place).config.block_size == make_draft().config.block_size
    assert sorted(file.name for file in place.iterdir()) == files
    assert [path.name for path in tmp_path.iterdir()] == ["dflash"]


def test_settings_are_another_runs_config(
    done: tuple[Path, str], data: Path, tmp_path: Path
) -> None:
    out, _ = done
    words = [
        "--config",
        out / "settings.yaml",
        "--output-dir",
        tmp_path / "other",
        "--num-prompts",
        5,
    ]
    result = train(*words, "--stages", "prepare")
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "other" / "stages.json").read_text())["prepare"]["made_from"]
    assert made["num_prompts"] == 5, "flags win"
    assert made["dataset"] == [str(data)]


CHANGED: dict[str, tuple[list[object], str, str]] = {
    "of the training": (
        ["--num-anchors", 3],
        "began, got a change: num_anchors was 4 and is 3",
        "make run, bench, export again",
    ),
    "of the answers": (
        ["--max-new-tokens", 13],
        "began, got a change: max_new_tokens was 12 and is 13",
        "make regenerate, run, bench, export again",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_that_loses_work_is_refused(name: str, done: tuple[Path, str]) -> None:
    words, sentence, advice = CHANGED[name]
    before = written(done[0])
    result = train("--output-dir", done[0], *words)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert f"add --redo to {advice}" in said(result)
    assert written(done[0]) == before


def written(folder: Path) -> dict[Path, int]:
    """When each file of a run was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.usefixtures("without_figures")
def test_redo_makes_a_changed_stage_and_those_behind_it(
    done: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    answers = out / "answered" / "train.jsonl"
    before = answers.stat().st_mtime_ns
    result = train("--output-dir", out, "--num-anchors", 3, "--redo")
    assert result.exit_code == 0, result.output
    assert "made again: run, bench, export; num_anchors was 4 and is 3" in result.output
    state = json.loads((out / "stages.json").read_text())
    assert [state[stage]["finished"] for stage in STAGES] == [True] * 5
    assert state["run"]["made_from"]["num_anchors"] == 3
    assert answers.stat().st_mtime_ns == before
    old, new = (load_draft(folder / "draft").state_dict() for folder in (done[0], out))
    assert not all(value.equal(old[name]) for name, value in new.items())
    # Begun again it goes on with the new value.
    assert "run: done before" in train("--output-dir", out).output


def test_what_takes_minutes_is_made_again_without_asking(
    done: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    result = train("--output-dir", out, "--formats", "zlab")
    assert result.exit_code == 0, result.output
    assert "made again: export; formats was" in result.output
    assert "bench: done before" in result.output
    assert [path.name for path in (out / "export").iterdir()] == ["zlab"]


def test_a_run_killed_while_it_was_discarded_goes_on(
    done: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    remove = shutil.rmtree

    def killed(folder: Path) -> None:
        remove(folder)
        if folder.name == "draft":
            raise KeyboardInterrupt

    monkeypatch.setattr("dflash_hf.cli.train_state.shutil.rmtree", killed)
    words = ["--output-dir", out, "--num-anchors", 3, "--stages", "prepare,regenerate,run"]
    assert train(*words, "--redo").exit_code == 130
    monkeypatch.undo()
    result = train(*words)
    assert result.exit_code == 2
    assert "num_anchors was 4 and is 3" in said(result)
    result = train(*words, "--redo")
    assert result.exit_code == 0, result.output


def test_a_training_frees_its_target_before_the_bench(
    done: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    for name in ("draft", "bench"):
        shutil.rmtree(out / name)
    taken: list[Callable[[], object]] = []
    take = TargetOnce.take

    def watched(self: TargetOnce) -> Any:
        found = take(self)
        taken.append(weakref.ref(found[0]))
        return found

    is_alive: list[bool] = []

    def bench(*args: object) -> dict[str, Any]:
        is_alive.extend(target() is not None for target in taken)
        return {}

    monkeypatch.setattr(TargetOnce, "take", watched)
    monkeypatch.setitem(stages.RUNNERS, "bench", bench)
    gc.disable()  # what it may free by chance
    try:
        result = train("--output-dir", out, "--stages", "run,bench")
    finally:
        gc.enable()
    assert result.exit_code == 0, result.output
    assert is_alive == [False]


def test_a_run_without_checkpoints_takes_another_batch(data: Path, tmp_path: Path) -> None:
    """As a first step that was too large for the memory leaves it."""
    words = ["--dataset", data, "--output-dir", tmp_path / "out", *SMALL]
    stages_ = ["--stages", "prepare,regenerate,run"]

    def full(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_hf.training.trainer.DFlashTrainer.compute_loss", full)
        result = train(*words, *stages_)
    assert result.exit_code == 2
    advice = "--per-device-train-batch-size 1 --gradient-accumulation-steps 2"
    what = "expected run to fit the memory, got CUDA out of memory. Tried to allocate 9 GiB.;"
    command = f"dflash-hf train --output-dir {tmp_path / 'out'} {advice}"
    assert f"{what} go on with {command}" in said(result)
    result = train("--output-dir", tmp_path / "out", *stages_, *advice.split())
    assert result.exit_code == 0, result.output
    assert "regenerate: done before" in result.output


def test_a_setting_that_changes_nothing_may_be_another(done: tuple[Path, str]) -> None:
    result = train("--output-dir", done[0], "--logging-steps", 3, "--save_total_limit", 1)
    assert result.exit_code == 0, result.output


def test_a_stage_whose_folder_is_removed_is_made_again(done: tuple[Path, str]) -> None:
    shutil.rmtree(done[0] / "export")
    result = train("--output-dir", done[0])
    assert result.exit_code == 0, result.output
    made = {path.name for path in (done[0] / "export").iterdir()}
    assert made == {"zlab", "speculators", "muse"}


def test_a_draft_that_is_removed_is_made_of_the_last_checkpoint(
    done: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    shutil.rmtree(out / "draft")
    result = train("--output-dir", out, "--stages", "prepare,regenerate,run")
    assert result.exit_code == 0, result.output
    assert "run: steps 4" in result.output
    old, new = (load_draft(folder / "draft").state_dict() for folder in (done[0], out))
    assert all(value.equal(old[name]) for name, value in new.items())


def test_a_target_that_changed_is_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(TOY / "target", tmp_path / "target")
    words = ["--dataset", data, *SMALL, "--target", tmp_path / "target"]
    words += ["--output-dir", tmp_path / "out"]
    assert train(*words, "--stages", "prepare,regenerate").exit_code == 0
    weights = tmp_path / "target" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    before = written(tmp_path / "out")
    result = train(*words)
    assert result.exit_code == 2
    assert f"target {tmp_path / 'target'} now has another weights" in said(result)
    assert "add --redo to make regenerate again" in said(result)
    assert written(tmp_path / "out") == before
    result = train(*words, "--stages", "prepare,regenerate", "--redo")
    assert result.exit_code == 0, result.output
    assert "prepare: done before" in result.output, "no row follows from the weights"


REFUSED: dict[str, tuple[list[object], str]] = {
    "no target": (["--output-dir", "x"], "expected --target, got None"),
    "no folder": (["--target", "x"], "expected --output-dir, got None"),
    "target": (
        ["--target", "/nowhere", "--output-dir", "x"],
        "as --target, got '/nowhere', which is not there",
    ),
    "no data": (
        ["--target", TOY / "target", "--output-dir", "x"],
        "expected conversations as --dataset, got None",
    ),
    "stage": (
        ["--stages", "trian"],
        "expected --stages among prepare, regenerate, run, bench, export, got 'trian'",
    ),
    "name": (["--learnin-rate", "1"], "got 'learnin_rate'; did you mean 'learning_rate'?"),
    "value": (["--weight-decay", "fast"], "expected arguments of the training, got"),
    "loss": (
        ["--loss", "mse"],
        "expected loss 'cross_entropy' or 'dpace' or 'kl' or 'tv' or 'lk', got 'mse'",
    ),
    "rate": (
        ["--learning-rate", "inf"],
        "expected a finite number as learning_rate, got inf; give another one",
    ),
    "heat": (["--temperature", "inf"], "expected 0 or more as --temperature, got inf"),
    "range": (["--num-anchors", "0"], "expected num_anchors > 0, got 0"),
    "word": (["--num-anchors", "4", "five"], "got 'five'; write -- before the name of an option"),
    "format": (
        ["--formats", "gguf"],
        "expected --formats among zlab, speculators, muse, got 'gguf'",
    ),
    "options": (["--draft-options", "[1]"], "expected a JSON object as --draft-options, got '[1]'"),
    "length": (["--max-length", "1"], "expected at least 2 as --max-length, got 1"),
    "server": (["--server", "localhost"], "expected a URL as --server, got 'localhost'"),
    "config": (
        ["--config", "nowhere.yaml"],
        "expected a YAML file as --config, got 'nowhere.yaml'",
    ),
    "stage that needs another": (
        ["--stages", "run"],
        "expected the results of prepare, regenerate for run",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_a_sentence_and_leaves_nothing(
    name: str, tmp_path: Path, data: Path
) -> None:
    words, sentence = REFUSED[name]
    if not {"--target", "--output-dir"} & set(words):
        words = [
            "--target",
            TOY / "target",
            "--dataset",
            data,
            "--output-dir",
            tmp_path / "out",
            *words,
        ]
    result = train(*words)
    assert result.exit_code == 2, result.output
    assert sentence in said(result)
    assert said(result).count("Error:") == 1
    assert list(tmp_path.iterdir()) == []


YAML: dict[str, tuple[str, str]] = {
    "no YAML": ("target: [x", "expected YAML in"),
    "no names": ("- target", "expected names and their values in"),
    "unknown": (
        "num_anchor: 3\ntarget: x\noutput_dir: y\nself_prompts: 1",
        "did you mean 'num_anchors'?",
    ),
}


@pytest.mark.parametrize("name", YAML)
def test_bad_yaml_is_a_sentence(name: str, tmp_path: Path) -> None:
    text, sentence = YAML[name]
    (tmp_path / "train.yaml").write_text(text)
    result = train("--config", tmp_path / "train.yaml")
    assert result.exit_code == 2
    assert sentence in said(result)


def test_a_folder_of_something_else_is_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    result = train("--target", TOY / "target", "--dataset", data, "--output-dir", tmp_path)
    assert result.exit_code == 2
    assert "expected a new folder or that of a run as --output-dir" in said(result)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_dataset_and_a_full_disk_are_sentences(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    words = ["--target", TOY / "target", "--stages", "prepare"]
    result = train(*words, "--dataset", empty, "--output-dir", tmp_path / "a")
    assert result.exit_code == 2
    assert str(empty) in said(result) or "conversations" in said(result)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(stages.RUNNERS, "prepare", full)
    result = train(*words, "--dataset", data, "--output-dir", tmp_path / "b")
    assert result.exit_code == 2
    assert "expected room on the disk of" in said(result)
    assert "make room, and continue with dflash-hf train" in said(result)


def test_flags_and_yaml_are_read_by_one_reader() -> None:
    given = {"learning_rate": 1e-3, "max_steps": 7, "disable_tqdm": True}
    assert read_arguments([*as_words(given), "--max-steps=9"]) == {**given, "max_steps": 9}
    for reporters in (["trackio"], ["trackio", "tensorboard"]):
        assert read_arguments(as_words({"report_to": reporters})) == {"report_to": reporters}
    assert read_arguments(["--learning_rate", "6e-4"]) == read_arguments(["--learning-rate=6e-4"])


def test_every_setting_but_the_machines_is_what_some_stage_is_made_from() -> None:
    made = TrainSettings(
        target="org/x", output_dir=Path("x"), arguments={"weight_decay": 3, "logging_steps": 1}
    )
    left_out = {
        "output_dir",
        "answer_batch",
        "server",
        "server_model",
        "streaming",
        "bench_data_dir",
        "chunk_blocks",
        "feature_cache",
        "feature_server",
        "device",
        "tensor_parallel_size",
        "threads",
        "logging_steps",
    }
    stages_of = [made.made_from(stage).keys() for stage in STAGES]
    assert set(made.plain()) - set().union(*stages_of) == left_out
    num_stages = Counter(name for names in stages_of for name in names)
    # Each belongs to one stage, but for who answers: rows without an answer are prepared for the target alone.
    assert {name for name, num in num_stages.items() if num > 1} == {"answers"}


def test_the_commands_defaults_are_the_trainers(tmp_path: Path) -> None:
    trainers = {item.name: item.default for item in fields(DFlashTrainingArguments)}
    own = {item.name: item.default for item in OPTIONS}
    assert {name: own[name] for name in OF_THE_TRAINER} == {
        name: trainers[name] for name in OF_THE_TRAINER
    }


@pytest.mark.parametrize("is_kept", [False, True])
def test_evaluations_may_come_at_other_steps_unless_the_best_draft_is_kept(is_kept: bool) -> None:
    given = {"max_steps": 9, "load_best_model_at_end": is_kept}
    seldom, often = (
        TrainSettings(
            target="org/x", output_dir=Path("x"), arguments={**given, "eval_steps": steps}
        ).made_from("run")
        for steps in (5, 2)
    )
    assert (seldom == often) is not is_kept


GUIDE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").replace("\\\n", " ")
COMMANDS = [
    line.partition("train ")[2] for line in GUIDE.splitlines() if "dflash-hf train --t" in line[:20]
]
COMMANDS += [
    line.partition("dflash_hf train ")[2]
    for line in GUIDE.splitlines()
    if line.startswith("accelerate")
]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_the_guides_commands_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    asked: list[TrainSettings] = []
    monkeypatch.setattr(
        "dflash_hf.cli.train_stages.run_stages", lambda settings, *rest: asked.append(settings)
    )
    (tmp_path / "demos").symlink_to(ROOT / "demos")
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "my-prompts.jsonl", "rows.jsonl"):
        (tmp_path / name).touch()
    words = shlex.split(command.replace("--report-to trackio", ""))
    if "..." not in words:
        result = train(*words)
        assert result.exit_code == 0, result.output
        make_arguments(asked[0])


def test_the_guides_yaml_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "train.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "more.jsonl"):
        (tmp_path / name).touch()
    asked: list[TrainSettings] = []
    monkeypatch.setattr(
        "dflash_hf.cli.train_stages.run_stages", lambda settings, *rest: asked.append(settings)
    )
    monkeypatch.setattr(
        "dflash_hf.cli.train.read_arguments", lambda words: {"words": " ".join(words)}
    )
    result = train("--config", tmp_path / "train.yaml", "--num-anchors", 3)
    assert result.exit_code == 0, result.output
    assert asked[0].dataset == ("prompts.jsonl", "more.jsonl")
    assert asked[0].max_new_tokens == 2048
    words = asked[0].arguments["words"]
    assert "--bf16 true" in words
    assert asked[0].num_anchors == 3, "flags win"
    assert asked[0].learning_rate == 6e-4


RECIPE = ROOT / "demos" / "smollm2" / "train.yaml"


def test_the_bundled_recipes_first_stages_run(data: Path, tmp_path: Path) -> None:
    """On the bundled target instead of its own, which has to be fetched."""
    words = ["--config", RECIPE, "--target", TOY / "target", "--dataset", data, "--threads", 1]
    words += ["--num-prompts", 6, "--self-prompts", 2, "--max-new-tokens", 8]
    words += ["--output-dir", tmp_path / "out", "--stages", "prepare,regenerate"]
    result = train(*words)
    assert result.exit_code == 0, result.output
    assert "regenerate: answers" in result.output
    settings = yaml.safe_load((tmp_path / "out" / "settings.yaml").read_text())
    recipe = yaml.safe_load(RECIPE.read_text())
    changed = {"target", "dataset", "output_dir", "threads"}
    changed |= {"num_prompts", "self_prompts", "max_new_tokens"}
    defaults = {item.name: item.default for item in OPTIONS}
    recipe["feature_cache"] = str(Path(recipe["feature_cache"]).resolve())
    for name in recipe.keys() - changed:
        assert settings.get(name, defaults.get(name)) == recipe[name], name


@pytest.mark.parametrize("name", ["muon", "adamw_torch"])
def test_every_optimizer_of_the_arguments_can_be_named(name: str) -> None:
    assert read_arguments(["--optim", name]) == {"optim": name}


def test_a_checkpoint_that_was_not_written_to_its_end_is_no_beginning(
    data: Path, tmp_path: Path
) -> None:
    """A process may end while it writes the first one: the training begins again."""
    words = ["--dataset", data, "--output-dir", tmp_path / "out", *SMALL]
    whole = ["--stages", "prepare,regenerate,run"]
    assert train(*words, "--stages", "prepare,regenerate").exit_code == 0
    torn = tmp_path / "out" / "run" / "checkpoint-2"
    torn.mkdir(parents=True)
    (torn / "trainer_state.json").write_text('{"global_st')
    result = train("--output-dir", tmp_path / "out", *whole)
    assert result.exit_code == 0, result.output
    state = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert state["run"]["facts"]["steps"] == 4
