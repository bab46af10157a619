"""`dflash-hf train` from end to end on the bundled target: every stage, killed and resumed; and what it refuses."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dflash_hf.cli.train_stages as stages
from dflash_hf import load_draft
from dflash_hf.cli.train_settings import STAGES, TrainSettings, as_words, read_arguments
from dflash_hf.cli.train_state import fingerprint
from helpers.source_tree import ROOT
from helpers.training_command import SMALL, TOY, said, train, write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten conversations."""
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run's folder, and what its command said; killed in the middle of its training, and gone on with."""
    out = tmp_path_factory.mktemp("train") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stages.RUNNERS, "run", _killed(stages.RUNNERS["run"]))
        result = train("--dataset", data, "--output_dir", out, *SMALL)
    assert result.exit_code == 130, result.output
    assert f"dflash-hf train --output-dir {out} goes on" in said(result)
    assert not (out / "draft").exists()
    assert [path.name for path in (out / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    result = train("--output-dir", out)
    assert result.exit_code == 0, result.output
    return out, result.output


def _killed(runner: Any) -> Any:
    """The stage, interrupted behind its second step."""

    def run(*args: Any) -> Any:
        import dflash_hf.training.trainer as trainer

        name = (
            "_save_checkpoint"
            if hasattr(trainer.DFlashTrainer, "_save_checkpoint")
            else "save_checkpoint"
        )
        saved = getattr(trainer.DFlashTrainer, name)

        def save_and_stop(self: Any, *rest: Any, **named: Any) -> None:
            saved(self, *rest, **named)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.DFlashTrainer, name, save_and_stop)
            return runner(*args)

    return run


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
    before = {
        path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "settings.yaml"
    }
    result = train("--output-dir", out)
    assert result.exit_code == 0, result.output
    assert [line.partition(",")[0] for line in result.output.splitlines()] == [
        f"{s}: done before" for s in STAGES
    ]
    after = {
        path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "settings.yaml"
    }
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
        assert f"| {block['acceptance']['acceptance_length']:.2f} |" in body
        for words in (
            str(data),
            "torch 2.",
            "| answers | the target's own, greedy |",
            "| num_anchors | 4 |",
        ):
            assert words in body
    assert "sglang.launch_server" in body
    assert "vllm serve" in body


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


CHANGED: dict[str, tuple[list[object], str]] = {
    "of the training": (["--num-anchors", 3], "whose num_anchors was 4 and is 3"),
    "of the answers": (["--max-new-tokens", 13], "whose max_new_tokens was 12 and is 13"),
    "of the export": (["--formats", "zlab"], "as its stage export was begun"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_is_refused(name: str, done: tuple[Path, str]) -> None:
    words, sentence = CHANGED[name]
    state = (done[0] / "stages.json").read_text()
    result = train("--output-dir", done[0], *words)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert "to make it again" in said(result)
    assert (done[0] / "stages.json").read_text() == state


def test_a_setting_that_changes_nothing_may_be_another(done: tuple[Path, str]) -> None:
    result = train("--output-dir", done[0], "--logging-steps", 3, "--save_total_limit", 1)
    assert result.exit_code == 0, result.output


def test_a_stage_whose_folder_is_removed_is_made_again(done: tuple[Path, str]) -> None:
    shutil.rmtree(done[0] / "export")
    result = train("--output-dir", done[0], "--formats", "zlab")
    assert result.exit_code == 0, result.output
    assert [path.name for path in (done[0] / "export").iterdir()] == ["zlab"]
    shutil.rmtree(done[0] / "export")
    assert train("--output-dir", done[0], "--formats", "zlab,speculators,muse").exit_code == 0


def test_a_target_that_changed_is_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(TOY / "target", tmp_path / "target")
    words = ["--target", tmp_path / "target", "--dataset", data, "--output-dir", tmp_path / "out"]
    assert train(*words, "--stages", "prepare").exit_code == 0
    weights = tmp_path / "target" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    result = train(*words)
    assert result.exit_code == 2
    assert "its files have changed" in said(result)


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
    "value": (["--learning-rate", "fast"], "expected arguments of the training, got"),
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
        "expected what prepare, regenerate makes for run",
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
    assert "goes on" in said(result)


def test_flags_and_yaml_are_read_by_one_reader() -> None:
    given = {"learning_rate": 1e-3, "max_steps": 7, "disable_tqdm": True}
    assert read_arguments([*as_words(given), "--max-steps=9"]) == {**given, "max_steps": 9}
    assert read_arguments(["--learning_rate", "6e-4"]) == read_arguments(["--learning-rate=6e-4"])


def test_every_setting_but_the_machines_is_what_some_stage_is_made_from() -> None:
    made = TrainSettings(
        target="org/x", output_dir=Path("x"), arguments={"num_anchors": 3, "logging_steps": 1}
    )
    left_out = {
        "output_dir",
        "answer_batch",
        "streaming",
        "bench_data_dir",
        "device",
        "threads",
        "logging_steps",
    }
    every = set().union(*(made.made_from(stage) for stage in STAGES))
    assert set(made.plain()) - every == left_out


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


def test_fingerprint_sees_weights_template_and_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(TOY / "target", tmp_path / "target")
    first = fingerprint(str(tmp_path / "target"))
    assert first == fingerprint(str(TOY / "target"))
    for name in ("chat_template.jinja", "tokenizer.json", "model.safetensors"):
        path = tmp_path / "target" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert fingerprint(str(tmp_path / "target")) != first
        path.write_bytes(content)


def test_plan_says_steps_and_memory_and_loads_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--dataset", data, "--output-dir", tmp_path / "out", *SMALL, "--plan"]
    result = train(*words)
    assert result.exit_code == 0, result.output
    assert "steps │ 4" in said(result)
    assert "peak memory of a device" in said(result)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("dflash_hf.cli.train_plan.accelerator_memory", lambda: 2**20)
    result = train(*words)
    assert result.exit_code == 2
    assert "expected a training within 0.0 GB" in said(result)


def test_plan_goes_by_the_cpu_where_torch_has_an_accelerator_and_the_machine_none(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA build of torch without a driver names CUDA as its accelerator, and raises at its first use."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    result = train("--dataset", data, "--output-dir", tmp_path / "out", *SMALL, "--plan")
    assert result.exit_code == 0, result.output
    assert "hours of training, at least" in said(result)


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
    monkeypatch.setattr(
        "dflash_hf.cli.train_plan.print_plan", lambda settings, *rest: asked.append(settings)
    )
    (tmp_path / "demos").symlink_to(ROOT / "demos")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("--report-to trackio", ""))
    if "..." not in words:
        result = train(*words)
        assert result.exit_code == 0, result.output
        stages.make_arguments(asked[0])


def test_the_guides_yaml_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "train.yaml").write_text(text)
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
    assert words.index("--num_anchors 512") < words.index("--num-anchors 3")


@pytest.mark.parametrize("name", ["muon", "adamw_torch"])
def test_every_optimizer_of_the_arguments_can_be_named(name: str) -> None:
    assert read_arguments(["--optim", name]) == {"optim": name}
