"""`dflash-hf bench` from end to end on the bundled pair, and what it says of what cannot be run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import StaticLayer
from typer.testing import CliRunner, Result

from dflash_hf.cli.main import app
from helpers.bench_runs import TOY, answers_in, write_set


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def said(result: Result) -> str:
    """What was written, as one line."""
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def done(
    held_out: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[object]]:
    """A run's folder, and its command line."""
    folder = tmp_path_factory.mktemp("bench")
    data = write_set(
        folder / "few.jsonl",
        [(held_out[0],), (held_out[1],), (held_out[2], "Thank you. Once more?")],
    )
    words: list[object] = [
        "--out",
        folder / "out",
        "--data",
        data,
        "--max-new-tokens",
        12,
        "--batch",
        "1,2",
    ]
    words += ["--methods", "plain,dflash,stock,lookup", "--verify-width", 8]
    words += [
        "--target",
        TOY / "target",
        "--draft",
        TOY / "draft",
        "--dtype",
        "float32",
        "--threads",
        1,
    ]
    result = bench(*words)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == str(folder / "out" / "report.html")
    assert "stock-batch2: expected batch 1 for stock" in result.output
    return folder / "out", words


def test_a_cell_that_transformers_refuses_says_so_in_one_line(
    held_out: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StaticLayer, "is_croppable", False, raising=False)
    data = write_set(tmp_path / "one.jsonl", [(held_out[0],)])
    words: list[object] = ["--out", tmp_path / "out", "--data", data, "--max-new-tokens", 4]
    words += ["--methods", "plain,stock-static", "--dtype", "float32", "--threads", 1]
    result = bench(*words, "--target", TOY / "target", "--draft", TOY / "draft")
    assert result.exit_code == 0, result.output
    assert (
        "stock-static: expected a Transformers whose own assisted decoding takes static caches"
        in said(result)
    )
    assert len(answers_in(tmp_path / "out")["answers-plain.jsonl"]) == 1
    assert not answers_in(tmp_path / "out").get("answers-stock-static.jsonl")


def test_what_a_run_leaves(done: tuple[Path, list[object]]) -> None:
    out, _ = done
    names = {path.name for path in out.iterdir()}
    cells = [
        f"{method}-batch{size}"
        for method in ("plain", "dflash", "stock", "lookup")
        for size in (1, 2)
    ]
    files = {
        "run.json",
        "questions.jsonl",
        "margins.jsonl",
        "summary.json",
        "report.html",
        "acceptance.csv",
    }
    assert files <= names
    assert {f"answers-{cell}.jsonl" for cell in cells} <= names
    answers = answers_in(out)
    texts = {
        name: [[turn.text for turn in a.turns] for a in rows]
        for name, rows in answers.items()
        if rows
    }
    assert len(texts) == 6, "two of the cells take one question at a time"
    assert all(found == texts["answers-plain-batch1.jsonl"] for found in texts.values())
    assert (out / "margins.jsonl").read_text() == ""
    run: dict[str, Any] = json.loads((out / "run.json").read_text())
    failed = {row["model_id"]: row["failed"] for row in run["methods"] if row["failed"]}
    assert set(failed) == {"stock-batch2", "lookup-batch2"}
    assert all(reason.startswith("expected batch 1 for") for reason in failed.values())
    described = run["provenance"]["models"]["float32"]
    assert described["dtype"] == "float32"
    assert described["attention"] == "sdpa"
    assert len(described["chat_template"]) == 16
    for part in ("target", "draft"):
        assert sorted(described[part]) == ["config", "weights"]
    assert {"torch", "transformers", "python"} <= set(run["provenance"]["versions"])


def test_it_is_not_begun_again_and_goes_on_with_nothing(done: tuple[Path, list[object]]) -> None:
    out, words = done
    before = answers_in(out)
    result = bench(*words)
    assert result.exit_code == 2
    assert "pass --resume to go on with the run in it" in said(result)
    result = bench(*words, "--resume")
    assert result.exit_code == 0, result.output
    assert answers_in(out) == before
    result = bench(*words, "--resume", "--seed", 1)
    assert result.exit_code == 2
    assert "whose seed was 0 and is 1" in said(result)
    assert answers_in(out) == before


def test_a_text_that_differs_is_measured(done: tuple[Path, list[object]]) -> None:
    out, words = done
    path = out / "answers-dflash-batch1.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    row["choices"][0]["token_ids"][0][7] += 1
    path.write_text("".join(f"{line}\n" for line in (lines[0], json.dumps(row), *lines[2:])))
    assert bench(*words, "--resume").exit_code == 0
    (found,) = [json.loads(line) for line in (out / "margins.jsonl").read_text().splitlines()]
    assert (found["model_id"], found["question_id"], found["turn"], found["token"]) == (
        "dflash-batch1",
        1,
        0,
        7,
    )
    assert found["is_tie"] is False
    assert found["margin"] > 0


REFUSED: dict[str, tuple[list[object], str]] = {
    "no folder": ([], "expected a folder to write as --out, got none"),
    "method": (["--methods", "plain,dflsh"], "got 'dflsh'; did you mean 'dflash'?"),
    "strange method": (["--methods", "zzz"], "got 'zzz'; name some of them"),
    "method twice": (["--methods", "plain,plain"], "every value of --methods once"),
    "number": (
        ["--batch", "1,two"],
        "expected whole numbers, separated by commas, as --batch, got 'two'",
    ),
    "no batch": (["--batch", "0"], "expected at least 1 as --batch, got 0"),
    "nothing": (["--batch", ","], "expected at least one value of --batch"),
    "temperature": (["--temperature", "-1"], "expected 0 or more as --temperature, got -1.0"),
    "endless": (["--temperature", "0,inf"], "expected 0 or more as --temperature, got inf"),
    "no number": (["--temperature", "nan"], "expected 0 or more as --temperature, got nan"),
    "top-p": (["--top-p", "0"], "at most 1 as --top-p, got 0.0"),
    "width": (
        ["--verify-width", "wide"],
        "expected whole numbers or auto, separated by commas, as --verify-width",
    ),
    "proposal": (
        ["--proposal", "best"],
        "expected --proposal in ('auto', 'argmax', 'shared_noise', 'sample')",
    ),
    "dtype": (["--dtype", "int8"], "floating-point dtype of torch's as --dtype, got 'int8'"),
    "template options": (
        ["--chat-template-kwargs", "[1]"],
        "expected a JSON object as --chat-template-kwargs",
    ),
    "target": (
        ["--target", "/nowhere", "--data", "x.jsonl"],
        "as --target, got '/nowhere', which is not there",
    ),
    "no data": (["--target", TOY / "target"], "expected sets of questions as --data, got none"),
    "no draft": (
        ["--target", TOY / "target", "--data", "x.jsonl"],
        "as --draft for dflash, got None",
    ),
    "no target": (["--draft", TOY / "draft", "--data", "x.jsonl"], "as --target for plain, dflash"),
    "assistant": (
        ["--methods", "assistant"],
        "expected --assistant-model and the method 'assistant' together",
    ),
    "server": (["--server", "http://x"], "expected --server and the method 'server' together"),
    "server's url": (
        ["--methods", "server", "--server", "x:1", "--data", "x.jsonl"],
        "expected a URL as --server",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_a_sentence_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    words, sentence = REFUSED[name]
    out = [] if name == "no folder" else ["--out", tmp_path / "out"]
    result = bench(*out, *words)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert said(result).count("Error:") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_target_with_stop_strings_is_refused(tmp_path: Path, held_out: list[str]) -> None:
    data = write_set(tmp_path / "made-up.jsonl", [(held_out[0],)])
    target = tmp_path / "target"
    shutil.copytree(TOY / "target", target)
    config = GenerationConfig.from_pretrained(target, stop_strings=["x"])
    config.save_pretrained(target)
    words = ["--target", target, "--data", data, "--methods", "plain", "--dtype", "float32"]
    result = bench(*words, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "expected a target without stop_strings in its generation_config, got ['x']" in said(
        result
    )
    assert not (tmp_path / "out").exists()


def test_a_width_that_does_not_fit_is_a_failed_cell(tmp_path: Path, held_out: list[str]) -> None:
    data = write_set(tmp_path / "one.jsonl", [(held_out[0],)])
    words = ["--data", data, "--methods", "dflash", "--verify-width", "4,40", "--max-new-tokens", 8]
    words += ["--target", TOY / "target", "--draft", TOY / "draft"]
    assert bench("--out", tmp_path / "out", *words).exit_code == 0
    first, second = json.loads((tmp_path / "out" / "run.json").read_text())["methods"]
    assert (first["model_id"], first["failed"]) == ("dflash-width4", None)
    assert "expected verify_width between 1 and 16" in second["failed"]


@pytest.mark.parametrize("place", ["asked", "before"])
def test_images_need_a_target_that_sees_them(place: str, tmp_path: Path) -> None:
    image = next((TOY / "vision" / "pictures").rglob("*.png"))
    data = tmp_path / "seen.jsonl"
    row: dict[str, object] = {"turns": ["What?"], "images": [str(image)]}
    if place == "before":
        seen = {"role": "user", "content": [{"type": "image", "path": str(image)}]}
        reply = {"role": "assistant", "content": "A cat."}
        row = {"messages": [seen, reply, {"role": "user", "content": "What?"}]}
    data.write_text(json.dumps({"question_id": 1, "category": "any", **row}))
    words = [
        "--data",
        data,
        "--target",
        TOY / "target",
        "--draft",
        TOY / "draft",
        "--out",
        tmp_path / "out",
    ]
    result = bench(*words)
    assert result.exit_code == 2
    assert "expected a target that sees images for seen" in said(result)
    assert not (tmp_path / "out").exists()


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    words = ["--out", tmp_path / "out", "--num-prompts", 1, "--max-new-tokens", 8]
    with monkeypatch.context() as patch:
        patch.setattr("dflash_hf.bench.run.Asker._ask", interrupted)
        result = bench(*words)
    assert result.exit_code == 130
    assert "the same command with --resume continues the run" in said(result)
    assert bench(*words, "--resume").exit_code == 0


def test_defaults_are_the_bundled_pairs(tmp_path: Path) -> None:
    result = bench("--out", tmp_path / "out", "--num-prompts", 1, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert set(answers_in(tmp_path / "out")) == {"answers-dflash.jsonl", "answers-plain.jsonl"}


def test_the_draft_is_loaded_in_the_targets_dtype(tmp_path: Path) -> None:
    """The bundled draft was saved in float32, and this target is saved in bfloat16."""
    target = AutoModelForCausalLM.from_pretrained(TOY / "target", dtype=torch.bfloat16)
    target.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(TOY / "target").save_pretrained(tmp_path / "target")
    words: list[object] = ["--target", tmp_path / "target", "--draft", TOY / "draft"]
    words += ["--data", write_set(tmp_path / "one.jsonl", [("Hello",)]), "--max-new-tokens", 4]
    result = bench("--out", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    loaded = json.loads((tmp_path / "out" / "run.json").read_text())["provenance"]["models"]["auto"]
    assert (loaded["dtype"], loaded["draft_dtype"]) == ("bfloat16", "bfloat16")
