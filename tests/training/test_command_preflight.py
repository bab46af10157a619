"""What `dflash-hf train` refuses before its first stage: nothing is answered, and nothing is written."""

from __future__ import annotations

import errno
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import dflash_hf.cli.train_stages as stages
from dflash_hf.cli import train_preflight
from dflash_hf.cli.train_arguments import evaluation, make_arguments
from dflash_hf.cli.train_errors import CHECKPOINTING, explained, less_memory
from dflash_hf.cli.train_settings import STAGES, TrainSettings, flag
from dflash_hf.cli.train_state import RunState
from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.checkpoints import STATE_FILE
from dflash_hf.training.failures import CheckpointError, NotFiniteError
from dflash_hf.training.identity import processor_identity, target_identity
from helpers.training_command import SMALL, TOY, said, train, write_rows

BARE: list[object] = ["--target", TOY / "target", "--threads", 1]

# Options -> a part of the sentence.
IDLE: dict[str, tuple[list[object], str]] = {
    "block of a draft that is there": (
        ["--draft", TOY / "draft", "--block-size", 16],
        "expected --block-size without --draft, because the draft's config has this value, got 16; leave one of them "
        "out",
    ),
    "fields of a draft that is there": (
        ["--draft", TOY / "draft", "--draft-options", '{"num_taps": 2}'],
        "expected --draft-options without --draft",
    ),
    "server beside the data's answers": (
        ["--answers", "data", "--server", "http://127.0.0.1:1"],
        "expected --server with --answers target",
    ),
    "nucleus of greedy answers": (
        ["--top-p", 0.9],
        "expected --top-p with a --temperature above 0, got 0.9",
    ),
    "name of no server": (["--server-model", "x"], "expected --server-model with --server"),
    "decay of D-PACE": (["--gamma", 4], "expected --gamma with another --loss than dpace"),
    "dtype of no cache": (
        ["--feature-dtype", "float8"],
        "expected --feature-dtype with --feature-cache, got 'float8'",
    ),
    "epochs beside steps": (
        ["--num-train-epochs", 2, "--max-steps", 8],
        "expected --num-train-epochs without --max-steps, got 2.0; leave one of them out",
    ),
    "steps of evaluations after epochs": (
        ["--eval-steps", 50, "--eval-strategy", "epoch"],
        "expected --eval-steps without --eval-strategy epoch, got 50.0; leave one of them out; of a run that began "
        "with it, name a --config without it, or a new --output-dir",
    ),
    "folder of no sets": (["--bench-data-dir", TOY], "expected --bench-data-dir with --bench-data"),
}


@pytest.mark.parametrize("name", IDLE)
def test_an_option_without_effect_is_refused(name: str, tmp_path: Path) -> None:
    words, sentence = IDLE[name]
    data = TOY / "held_out.jsonl"
    result = train(*BARE, "--dataset", data, "--output-dir", tmp_path / "out", *words)
    assert result.exit_code == 2, result.output
    assert sentence in said(result)
    assert list(tmp_path.iterdir()) == []


def test_the_bench_takes_a_length_beside_the_datas_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TrainSettings] = []
    monkeypatch.setattr(stages, "run_stages", lambda settings, *rest: asked.append(settings))
    words = ["--dataset", TOY / "held_out.jsonl", "--output-dir", tmp_path / "out"]
    result = train(*BARE, *words, "--answers", "data", "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
    assert asked[0].made_from("bench")["max_new_tokens"] == 3
    by_default = TrainSettings(target="org/x", output_dir=tmp_path / "out", answers="data")
    for stage in ("prepare", "regenerate", "run"):
        names = by_default.made_from(stage).keys() - {"target", "dataset"}
        assert all(asked[0].made_from(stage)[n] == by_default.made_from(stage)[n] for n in names)


# Options -> a part of the sentence.
REFUSED: dict[str, tuple[list[object], str]] = {
    "a file that is not there": (["--dataset", "gone.jsonl"], "expected a file as --dataset"),
    "a field that no draft has": (
        ["--draft-options", '{"num_tap": 2}'],
        "expected fields of DFlashConfig, got 'num_tap'; fix the name",
    ),
    "a number of another type": (
        ["--draft-options", '{"num_taps": "four"}'],
        "expected values of the fields' types as --draft-options, got {'num_taps': 'four'}",
    ),
    "a field of another type": (
        ["--draft-options", '{"sliding_window": "wide"}'],
        "expected values of the fields' types as --draft-options, got {'sliding_window': 'wide'}",
    ),
    "a tap that the target has not": (
        ["--draft-options", '{"target_layer_ids": [0, 99]}'],
        "target_layer_ids",
    ),
    "a reporter that nobody knows": (
        ["--report-to", "nobody"],
        "expected reporters that are installed as --report-to, got 'nobody'",
    ),
    "a set of questions that is not there": (["--bench-data", "gone.jsonl"], "gone.jsonl"),
    "an evaluation of nothing": (
        ["--eval-strategy", "epoch", "--num-eval", 0],
        "expected conversations that are held out for --eval-strategy epoch, got 0; give --num-eval "
        "64, or --eval-strategy no",
    ),
    "an evaluation of nothing at the start": (
        ["--eval-on-start", "true", "--num-eval", 0],
        "expected conversations that are held out for --eval-on-start true, got 0; give --num-eval "
        "64, or --eval-on-start false",
    ),
    "evaluations of nothing after steps": (
        ["--eval-steps", 50, "--num-eval", 0],
        "expected conversations that are held out for --eval-steps 50, got 0; give --num-eval "
        "64, or --eval-strategy no",
    ),
    "the best draft of no evaluation": (
        ["--save-strategy", "best", "--num-eval", 0],
        "expected an eval_strategy with save_strategy 'best', got 'no'; use epoch, and hold examples out",
    ),
    "a server that is not there": (
        ["--server", "http://127.0.0.1:9", "--server-model", "x"],
        "expected answers of http://127.0.0.1:9, got",
    ),
    "a server whose URL is none": (
        ["--server", "http://localhost:abc"],
        "expected the URL of a server, got 'http://localhost:abc'",
    ),
    "rows that are shorter than their examples": (
        ["--packing-length", 512],
        "expected --packing-length of 3072 (--max-length) or more, got 512; give a smaller --max-length",
    ),
    "packed rows of more than tokens": (
        ["--target", TOY / "vision" / "target", "--packing-length", 3072],
        "expected a target that reads only tokens with --packing-length, got",
    ),
    "a schedule without its options": (
        ["--lr-scheduler-type", "cosine_with_min_lr"],
        "expected options of the schedule cosine_with_min_lr as --lr-scheduler-kwargs, got None",
    ),
    "a schedule that fails behind the warm-up": (
        ["--lr-scheduler-type", "inverse_sqrt", "--lr-scheduler-kwargs", '{"timescale": 0}'],
        "expected options of the schedule inverse_sqrt as --lr-scheduler-kwargs, got {'timescale': 0}",
    ),
    "a momentum out of range": (
        ["--adam-beta1", 1.5],
        "expected options that the optimizer takes, got Invalid beta parameter at index 0: 1.5",
    ),
    "an optimizer's own option out of range": (
        ["--optim", "sgd", "--optim-args", "momentum=-1"],
        "expected options that the optimizer takes, got Invalid momentum value: -1.0",
    ),
    "an evaluation of no rows at once": (
        ["--per-device-eval-batch-size", 0],
        "expected positive batch sizes, gradient_accumulation_steps and chunk_blocks, got (2, 0, 1, 128)",
    ),
    "a mode of no compilation": (
        ["--torch-compile-mode", "nothing"],
        "expected a backend and a mode of torch.compile as --torch-compile-..., got",
    ),
    "workers that stay, of none": (
        ["--dataloader-persistent-workers", "true"],
        "expected options of workers that fit together as --dataloader-..., got",
    ),
    "a way to begin workers, of none": (
        ["--dataloader-multiprocessing-context", "spawn"],
        "expected options of workers that fit together as --dataloader-..., got",
    ),
    "a best draft that is not saved": (
        ["--load-best-model-at-end", "true", "--save-strategy", "no"],
        "expected a save_strategy with load_best_model_at_end, got 'no'",
    ),
    "a best draft that is never measured": (
        ["--save-strategy", "best", "--eval-strategy", "no"],
        "expected an eval_strategy with save_strategy 'best', got 'no'; use epoch, and hold examples out",
    ),
    "a best draft of a set that is not there": (
        ["--metric-for-best-model", "eval_gsm8k_acceptance_length"],
        "expected eval_acceptance_length as metric_for_best_model, got 'eval_gsm8k_acceptance_length'",
    ),
    "a device that is not there": (["--device", "cuda:99"], "as --device, got 'cuda:99'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_later_stage_lacks_is_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, sentence = REFUSED[name]
    for stage in STAGES:
        monkeypatch.setitem(stages.RUNNERS, stage, _unasked)
    data = TOY / "held_out.jsonl"
    result = train("--dataset", data, "--output-dir", tmp_path / "out", *SMALL, *words)
    assert result.exit_code == 2, result.output
    assert sentence in said(result)
    assert list(tmp_path.iterdir()) == []


def _unasked(*args: Any) -> Any:
    raise AssertionError("a stage was begun")


def test_several_gpus_in_one_process_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DFlashTrainingArguments, "n_gpu", 8)
    data = TOY / "held_out.jsonl"
    result = train("--dataset", data, "--output-dir", tmp_path / "out", *SMALL)
    assert result.exit_code == 2, result.output
    assert "expected one GPU per process, got 8 in this one; start it with" in said(result)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_of_another_target_is_refused_first(tmp_path: Path) -> None:
    words = ["--dataset", TOY / "held_out.jsonl", "--draft", TOY / "vision" / "draft"]
    result = train(*BARE, *words, "--output-dir", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "expected a draft for" in said(result)
    assert list(tmp_path.iterdir()) == []


def test_a_target_with_stop_strings_is_refused_first(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TOY / "target", target)
    config = GenerationConfig.from_pretrained(target, stop_strings=["x"])
    config.save_pretrained(target)
    words = ["--dataset", TOY / "held_out.jsonl", "--output-dir", tmp_path / "out"]
    result = train(*SMALL, *words, "--target", target)
    assert result.exit_code == 2, result.output
    assert "expected a target without stop_strings in its generation_config, got ['x']" in said(
        result
    )
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_disk_without_room_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    data = write_rows(tmp_path / "rows.jsonl")
    result = train("--dataset", data, "--output-dir", tmp_path / "out", *SMALL)
    assert result.exit_code == 2, result.output
    assert f"GB free on the disk of {tmp_path / 'out'} for answers, checkpoints" in said(result)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_a_run_has_written_needs_no_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint more than those that are kept does: it goes only when the next one is whole."""

    class Usage:
        free = 0

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    monkeypatch.setattr(train_preflight, "GB", 1)
    out = tmp_path / "out"
    given = ["--dataset", write_rows(tmp_path / "rows.jsonl"), "--output-dir", out, *SMALL]
    given += ["--num-prompts", 10, "--save-total-limit", 2]
    assert train(*given, "--stages", "prepare").exit_code == 0

    def needed() -> int:
        result = train(*given)
        assert result.exit_code == 2, result.output
        found = re.search(r"expected (\d+)\.0 GB free on the disk", said(result))
        assert found is not None, result.output
        return int(found[1])

    whole = needed()
    for name, size, credit in (
        ("answered/train.jsonl", 100, 100),
        ("run/checkpoint-2/model.safetensors", 1000, 1000),
        ("run/checkpoint-4/model.safetensors", 2000, 2000),
        (".draft/model.safetensors", 50, 50),
        # Larger than the forecast of its kind; the others need their room all the same
        ("answered/held_out.jsonl", 5000, 10 * 12 * train_preflight.TOKEN_BYTES - 100),
    ):
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
        whole -= credit
        assert needed() == whole, name
    for step in (2, 4, 6):
        folder = out / "run" / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / STATE_FILE).write_text("{}")
    # Those of 4 and 6 are kept, and their states are written
    assert needed() == whole + 1000 - 2 * len("{}")


def test_the_target_is_told_by_weights_template_and_vocabulary() -> None:
    target = AutoModelForCausalLM.from_pretrained(TOY / "target")
    tokenizer: Any = AutoTokenizer.from_pretrained(TOY / "target")
    first = {**target_identity(target), **processor_identity(tokenizer)}
    assert sorted(first) == ["chat_template", "config", "vocabulary", "weights"]
    tokenizer.chat_template += " "
    changed = processor_identity(tokenizer)
    assert changed["chat_template"] != first["chat_template"]
    assert changed["vocabulary"] == first["vocabulary"]
    tokenizer.add_tokens("a token that is new")
    assert processor_identity(tokenizer)["vocabulary"] != first["vocabulary"]
    with torch.no_grad():
        next(target.parameters())[-1, -1] += 1
    assert target_identity(target)["weights"] != first["weights"]


# Options of an evaluation, of which one of the two is given.
EVALUATIONS: list[list[object]] = [
    ["--eval-strategy", "epoch"],
    ["--eval-steps", 2],
    ["--load-best-model-at-end", "true", "--save-strategy", "epoch"],
    ["--eval-on-start", "true"],
    ["--save-strategy", "best"],
]


@pytest.mark.parametrize("words", EVALUATIONS)
def test_an_evaluation_of_too_few_rows_is_refused(words: list[object], tmp_path: Path) -> None:
    """At most a fifth of the conversations are held out: of four, none."""
    out = tmp_path / "out"
    data = write_rows(tmp_path / "rows.jsonl", count=4)
    given = ["--dataset", data, "--output-dir", out, *SMALL, "--stages", "prepare,regenerate,run"]
    result = train(*given, *words)
    assert result.exit_code == 2, result.output
    assert f"expected conversations that are held out in {out / 'prepared'} for" in said(result)
    assert not (out / "answered").exists()
    less = said(result).partition("other conversations or more, or add ")[2].split()
    result = train("--output-dir", out, "--stages", "prepare,regenerate,run", *less)
    assert result.exit_code == 0, result.output


def test_more_rows_are_taken_behind_too_few(tmp_path: Path) -> None:
    """As the refusal says; the first stage had written its rows, and did not end."""
    out = tmp_path / "out"
    data = write_rows(tmp_path / "rows.jsonl", count=4)
    given = ["--dataset", data, "--output-dir", out, *SMALL, "--stages", "prepare,regenerate,run"]
    assert train(*given, *EVALUATIONS[0]).exit_code == 2
    assert (out / "prepared" / "conversations.jsonl").exists()
    write_rows(data, count=10)
    result = train(*given, *EVALUATIONS[0])
    assert result.exit_code == 0, result.output
    assert (out / "prepared" / "train.jsonl").read_text().count("\n") == 8


# Options, what `accelerate launch` sets -> a part of the sentence.
SHARDED: dict[str, tuple[list[object], dict[str, str], str]] = {
    "DeepSpeed": (
        ["--deepspeed", '{"train_batch_size": 4}'],
        {},
        "expected None as deepspeed",
    ),
    "launched DeepSpeed": (
        [],
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        "expected no ACCELERATE_USE_DEEPSPEED, got 'true'; leave DeepSpeed out",
    ),
    "launched FSDP1": (
        [],
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
        "expected FSDP of version 2 for the draft, got 1; set fsdp_version: 2",
    ),
    "launched FSDP without a version": (
        [],
        {"ACCELERATE_USE_FSDP": "true"},
        "expected FSDP of version 2 for the draft, got 1; set fsdp_version: 2",
    ),
}


@pytest.mark.parametrize("name", SHARDED)
def test_shards_that_cannot_be_trained_are_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, environment, sentence = SHARDED[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    given = [*BARE, "--dataset", TOY / "held_out.jsonl", "--output-dir", tmp_path / "out"]
    result = train(*given, "--stages", "prepare", *words)
    assert result.exit_code == 2, result.output
    assert sentence in said(result)
    assert list(tmp_path.iterdir()) == []


def test_flex_attention_on_a_cpu_is_refused_first(tmp_path: Path) -> None:
    settings = TrainSettings(
        target="org/x", output_dir=tmp_path, attention="flex", arguments={"use_cpu": True}
    )
    with pytest.raises(ValueError, match="expected an accelerator for --attention flex, got 'cpu'"):
        train_preflight._check_attention(make_arguments(settings))


def test_features_of_another_draft_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "features"
    data = write_rows(tmp_path / "rows.jsonl")
    words = ["--dataset", data, *SMALL, "--stages", "prepare,regenerate,run"]
    words += ["--feature-cache", cache]
    result = train(*words, "--output-dir", tmp_path / "first")
    assert result.exit_code == 0, result.output
    for stage in STAGES:
        monkeypatch.setitem(stages.RUNNERS, stage, _unasked)
    other = ["--draft-options", '{"num_taps": 1}', "--output-dir", tmp_path / "second"]
    result = train(*words, *other)
    assert result.exit_code == 2, result.output
    assert "expected features with target_layer_ids" in said(result)
    assert not (tmp_path / "second").exists()


# Options of a run that is too large -> options that take less.
LESS: dict[str, tuple[dict[str, Any], str]] = {
    "a batch": (
        {"per_device_train_batch_size": 8},
        "--per-device-train-batch-size 4 --gradient-accumulation-steps 2",
    ),
    "an odd batch": (
        {"per_device_train_batch_size": 3, "arguments": {"gradient_accumulation_steps": 4}},
        "--per-device-train-batch-size 1 --gradient-accumulation-steps 12",
    ),
    "one row": ({"per_device_train_batch_size": 1}, "checkpointing true"),
    "few logits": (
        {"per_device_train_batch_size": 1, "arguments": {CHECKPOINTING: True}},
        "--chunk-blocks 64",
    ),
    "an evaluation of more rows than a step": (
        {"arguments": {"eval_strategy": "epoch", "per_device_eval_batch_size": 8}},
        "true --per-device-eval-batch-size 1",
    ),
}


@pytest.mark.parametrize("name", LESS)
def test_a_step_that_does_not_fit_names_what_takes_less(name: str, tmp_path: Path) -> None:
    options, advice = LESS[name]
    settings = TrainSettings(target="org/x", output_dir=tmp_path / "out", **options)
    arguments = make_arguments(settings)
    assert advice in less_memory(settings, arguments, "run")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory"),
    ):
        sentence = str(explained(error, settings, "run", advice))
        assert sentence.startswith("expected run to fit the memory, got ")
        assert advice in sentence
    other = RuntimeError("shapes differ")
    assert explained(other, settings, "run", advice) is other


def test_steps_of_evaluations_ask_for_evaluations_after_steps(tmp_path: Path) -> None:
    for asked, strategy in (
        ({}, {"eval_strategy": "epoch"}),
        ({"eval_steps": 50.0}, {"eval_strategy": "steps"}),
        ({"eval_steps": 50.0, "eval_strategy": "no"}, {}),
    ):
        settings = TrainSettings(target="org/x", output_dir=tmp_path, arguments=asked)
        assert evaluation(settings, has_held_out=True) == strategy
        assert evaluation(settings, has_held_out=False) == {}


def test_an_evaluation_has_as_many_rows_at_once_as_a_step(tmp_path: Path) -> None:
    settings = TrainSettings(target="org/x", output_dir=tmp_path, per_device_train_batch_size=1)
    assert make_arguments(settings).per_device_eval_batch_size == 1
    asked = replace(settings, arguments={"per_device_eval_batch_size": 3})
    assert make_arguments(asked).per_device_eval_batch_size == 3


def test_a_path_of_two_lines_leaves_a_sentence_on_one(tmp_path: Path) -> None:
    settings = TrainSettings(target="org/x", output_dir=tmp_path)
    for kind in (CheckpointError, NotFiniteError):
        error = kind("expected to read two\nlines, got none", "look")
        assert str(error) == "expected to read two lines, got none; look"
        said_of_it = str(explained(error, settings, "run", "on a larger device"))
        assert said_of_it.startswith("expected to read two lines, got none; ")


def test_a_run_of_several_processes_is_continued_by_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has steps of other rows, which are refused behind a checkpoint."""
    settings = TrainSettings(target="org/x", output_dir=tmp_path)
    launcher = "the same launcher of 8 processes"
    command = f"{launcher} and -m dflash_hf train --output-dir {tmp_path}"
    monkeypatch.setenv("WORLD_SIZE", "8")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        OSError(errno.ENOSPC, "No space left on device"),
        CheckpointError("expected to write checkpoint-2, got OSError", "make room"),
        NotFiniteError("expected finite gradients at step 3, got a norm of nan", "look"),
    ):
        assert f"with {command}" in str(explained(error, settings, "run", "on a larger device"))

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "run_stages", interrupted)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        result = train(*BARE, "--dataset", TOY / "held_out.jsonl", "--output-dir", tmp_path)
        assert result.exit_code == 130, result.output
        expected = "" if rank else f"Ended; {command} continues the run."
        assert said(result) == expected, "the first process alone speaks"


# Options of a run that has a checkpoint -> options that take less.
LESS_LATER: dict[str, tuple[dict[str, Any], str]] = {
    "a batch": ({}, f"{flag(CHECKPOINTING)} true --chunk-blocks 64"),
    "an evaluation": (
        {"arguments": {"eval_strategy": "epoch"}},
        f"--per-device-eval-batch-size 1 {flag(CHECKPOINTING)} true --chunk-blocks 64",
    ),
    "activations made again": (
        {"arguments": {CHECKPOINTING: True}},
        "--chunk-blocks 64",
    ),
    "nothing": (
        {"arguments": {CHECKPOINTING: True}, "chunk_blocks": 16},
        "on a larger device",
    ),
}


@pytest.mark.parametrize("name", LESS_LATER)
def test_less_memory_behind_a_checkpoint_is_of_the_same_run(name: str, tmp_path: Path) -> None:
    """Another batch would be refused there, as it loses the checkpoint."""
    options, advice = LESS_LATER[name]
    settings = TrainSettings(target="org/x", output_dir=tmp_path / "out", **options)
    (tmp_path / "out" / "run" / "checkpoint-2").mkdir(parents=True)
    assert less_memory(settings, make_arguments(settings), "run") == advice
    state = RunState(settings, STAGES, redo=False)
    state.write("run")
    lighter: dict[str, Any] = {
        "chunk_blocks": 64,
        "arguments": {CHECKPOINTING: True, "per_device_eval_batch_size": 1},
    }
    RunState(replace(settings, **lighter), STAGES, redo=False).check()
    with pytest.raises(ValueError, match="per_device_train_batch_size was 4 and is 2"):
        RunState(replace(settings, per_device_train_batch_size=2), STAGES, redo=False).check()


def test_a_step_that_is_not_finite_names_what_works(tmp_path: Path) -> None:
    """Answers stay, and the named options run."""
    data = write_rows(tmp_path / "rows.jsonl")
    out = tmp_path / "out"
    words = ["--dataset", data, "--output-dir", out, *SMALL, "--stages", "prepare,regenerate,run"]
    result = train(*words, "--learning-rate", 1e30)
    assert result.exit_code == 2, result.output
    assert "expected finite gradients at step" in said(result)
    assert "resume_from_checkpoint" not in said(result)
    advice = f"--output-dir {out} --redo and a --learning-rate below 1e+30"
    assert advice in said(result)
    assert f"the rows are those of {out / 'answered' / 'train.jsonl'}" in said(result)
    answers = (out / "answered" / "train.jsonl").stat().st_mtime_ns
    again = train(*words, "--learning-rate", 1e-3, "--redo")
    assert again.exit_code == 0, again.output
    assert (out / "answered" / "train.jsonl").stat().st_mtime_ns == answers


def test_a_target_that_does_not_fit_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("dflash_hf.cli.train_target.load_target", full)
    data = TOY / "held_out.jsonl"
    result = train("--dataset", data, "--output-dir", tmp_path / "out", *SMALL)
    assert result.exit_code == 2, result.output
    sentence = "expected a target that fits the memory, got CUDA out of memory.; add --dtype"
    assert sentence in said(result)
    assert list(tmp_path.iterdir()) == []


def test_defaults_in_a_yaml_are_not_asked_for(tmp_path: Path) -> None:
    """A file that names every option is one that leaves them as they are."""
    text = f"""
target: {TOY / "target"}
dataset: {TOY / "held_out.jsonl"}
output_dir: {tmp_path / "out"}
temperature: 0.0
top_p: 1.0
threads: 1
"""
    (tmp_path / "train.yaml").write_text(text)
    words = ["--config", tmp_path / "train.yaml", "--stages", "prepare"]
    assert train(*words).exit_code == 0
    assert train(*words, "--top-p", 1).exit_code == 2
