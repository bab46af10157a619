"""`dflash-hf train` for a target that sees: rows with images and of text in every stage; questions of a bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.bench.sets import load_questions
from dflash_hf.cli import train_preflight
from dflash_hf.cli.train_arguments import loader_workers
from dflash_hf.cli.train_settings import TrainSettings
from dflash_hf.cli.train_stages import question_of
from dflash_hf.pair.loading import load_processor
from helpers.training_command import SMALL, TOY, said, train

PICTURES = TOY / "vision" / "pictures"


def ask(text: str, *images: object) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [*({"type": "image", "path": str(one)} for one in images), block(text)],
    }


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.usefixtures("without_figures")
def test_rows_with_images_and_of_text_go_through_every_stage(tmp_path: Path) -> None:
    (tmp_path / "pictures").symlink_to(PICTURES)
    rows = [
        {"messages": [ask("What is in this picture?", "pictures/describe-0.png")]},
        {
            "messages": [{"role": "user", "content": "How many objects are there?"}],
            "images": ["pictures/count-0.png"],
        },
        {"messages": [{"role": "user", "content": "Good morning, I am Yuri."}]},
        {
            "messages": [
                ask("Which has more objects?", "pictures/compare-0a.png", "pictures/compare-0b.png")
            ]
        },
        {"messages": [ask("What is written here?", "pictures/read-0.png")]},
        {
            "messages": [{"role": "user", "content": "What is in this picture?"}],
            "images": "pictures/describe-1.png",
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*SMALL, "--target", TOY / "vision" / "target", "--num-eval", 1, "--max-steps", 2]
    words += ["--dataloader-num-workers", 1]  # it decodes the images
    result = train("--dataset", tmp_path / "rows.jsonl", "--output-dir", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    answered = [
        json.loads(line)
        for line in (tmp_path / "out" / "answered" / "train.jsonl").read_text().splitlines()
    ]
    assert len(answered) == 5
    (answer,) = (tmp_path / "out" / "bench" / "answers-dflash.jsonl").read_text().splitlines()
    asked = json.loads(answer)["choices"][0]
    (held_out,) = (tmp_path / "out" / "answered" / "held_out.jsonl").read_text().splitlines()
    known = json.loads(held_out)
    assert asked["prompt_tokens"] == [known["num_tokens"] - len(known["answer_ids"])], (
        "with its image"
    )
    assert asked["token_ids"] == [known["answer_ids"]], (
        "what the target said while it was asked for training"
    )


def test_images_of_several_turns_go_through_every_stage(tmp_path: Path) -> None:
    """A column of images, each with its place in one of the user's turns, of which all are answered."""
    (tmp_path / "pictures").symlink_to(PICTURES)
    place = {"type": "image"}
    names = [f"pictures/{path.name}" for path in sorted(PICTURES.glob("*.png"))[:5]]
    rows: list[dict[str, Any]] = []
    for number in range(5):
        first = {"role": "user", "content": [place, block(f"What is in picture {number}?")]}
        second = {"role": "user", "content": [place, block("And in this one?")]}
        images = [names[number], names[number - 1]]
        rows.append({"messages": [first, second], "images": images})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*SMALL, "--target", TOY / "vision" / "target", "--turns", "all", "--num-eval", 1]
    words += ["--max-new-tokens", 48, "--max-steps", 2, "--stages", "prepare,regenerate,run,bench"]
    result = train("--dataset", tmp_path / "rows.jsonl", "--output-dir", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out" / "answered" / "train.jsonl").read_text().splitlines()
    answered = [json.loads(line) for line in lines]
    by_turns = {1: 0, 2: 0}
    for row in answered:
        asked = [turn for turn in row["messages"] if turn["role"] == "user"]
        assert len(row["images"]) == len(asked)
        by_turns[len(asked)] += 1
    assert by_turns[1] == 4
    assert by_turns[2] > 0
    assert "questions 0, left out 1" in result.output, "a bench asks about images first"


def test_images_are_decoded_by_workers_beside_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, vision = (load_processor(str(TOY / part)) for part in ("target", "vision/target"))
    asked, given = (
        TrainSettings(target="org/x", output_dir=tmp_path, arguments=arguments)
        for arguments in ({}, {"dataloader_num_workers": 0})
    )
    assert loader_workers(asked, vision) == {}, "a CPU has nothing else to do"
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(24), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert loader_workers(asked, vision) == {"dataloader_num_workers": 4}
    assert loader_workers(given, vision) == {}
    assert loader_workers(asked, text) == {}
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert loader_workers(asked, vision) == {"dataloader_num_workers": 3}
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert loader_workers(asked, vision) == {"dataloader_num_workers": 3}, "of four nodes"


def test_rows_with_images_are_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor such as LLaVA's gives the model more than tokens only where there are images."""
    monkeypatch.setattr(train_preflight, "_check_packed_text", lambda processor: None)
    monkeypatch.setattr(train_preflight, "check_packing", lambda target: None)
    (tmp_path / "pictures").symlink_to(PICTURES)
    rows = [{"messages": [{"role": "user", "content": f"Good morning {at}."}]} for at in range(5)]
    rows[3]["messages"] = [ask("What is in this picture?", "pictures/describe-0.png")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*SMALL, "--target", TOY / "vision" / "target", "--num-eval", 0]
    words += ["--dataset", tmp_path / "rows.jsonl"]
    packed = ["--packing-length", 3072]

    def refuse(out: Path, stages: str) -> None:
        result = train(*words, *packed, "--output-dir", out, "--stages", stages)
        assert result.exit_code == 2, result.output
        rows_file = out / "prepared" / "train.jsonl"
        sentence = f"expected text alone in line 4 of {rows_file} with --packing-length"
        assert sentence in said(result)
        assert not (out / "answered").exists()

    refuse(tmp_path / "at once", "prepare,regenerate,run")
    out = tmp_path / "in two commands"
    result = train(*words, "--output-dir", out, "--stages", "prepare")
    assert result.exit_code == 0, result.output
    refuse(out, "regenerate,run")


QUESTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "in its turn": ({"messages": [ask("What?", "images/a.png")]}, ["a.png"]),
    "beside the messages": (
        {"messages": [{"role": "user", "content": "What?"}], "images": ["images/a.png"]},
        ["a.png"],
    ),
    "text": ({"messages": [{"role": "user", "content": "What?"}]}, []),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_prepared_row_is_a_question(name: str, tmp_path: Path) -> None:
    row, images = QUESTIONS[name]
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes((PICTURES / "read-0.png").read_bytes())
    for turn in row["messages"]:  # as `prepare` writes them
        for part in turn["content"] if isinstance(turn["content"], list) else ():
            part |= {"image": part.pop("path")} if "path" in part else {}
    question = question_of({"id": "x", **row}, tmp_path)
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    (found,) = load_questions(
        str(tmp_path / "questions.jsonl"), data_dir=None, num_prompts=None, seed=0
    )
    assert found.turns == ("What?",)
    assert [Path(path).name for path in found.images] == images
    assert all(Path(path).is_file() for path in found.images)


def test_an_image_that_is_no_file_is_no_question(tmp_path: Path) -> None:
    for place in ("https://example.org/a.png", "data:image/png;base64,AAAA"):
        row = {"id": "x", "messages": [{"role": "user", "content": "What?"}], "images": [place]}
        assert question_of(row, tmp_path) == {}
