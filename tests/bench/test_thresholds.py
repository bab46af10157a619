"""What the bundled pairs have to reach through `dflash-hf bench`, in the form of vLLM's GSM8K test: an acceptance
length and an accuracy, each with a tolerance; and MMStar's protocol on drawn rows of its schema.

Of a published pair the same, with a GPU and the Hub: `python -m pytest tests/bench/test_thresholds.py -m slow`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_hf.bench.cells import RunSettings
from dflash_hf.bench.run import run

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
TOLERANCE = 0.08  # vLLM's, of both numbers: tests/evals/gsm8k and tests/v1/spec_decode
LETTERS = {"one": "A", "two": "B", "three": "C", "four": "D"}


def measured(out: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    """Runs a benchmark; returns what the summary says of all its questions, by method."""
    run(RunSettings(out=out, threads=1, **settings))
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return {method["model_id"]: method["all"] for method in summary["methods"]}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "chosen", [(1, 3), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)], ids=str
)
def test_the_bundled_pair_reaches_its_numbers(chosen: tuple[int, ...], tmp_path: Path) -> None:
    """On these of each kind."""
    rows = rows_of(TOY / "held_out.jsonl")
    kinds = [
        [row for row in rows if row["kind"] == kind]
        for kind in dict.fromkeys(row["kind"] for row in rows)
    ]
    some = write(tmp_path / "some.jsonl", [kind[at] for kind in kinds for at in chosen])
    found = measured(
        tmp_path / "out",
        data=(str(some),),
        target=str(TOY / "target"),
        draft=str(TOY / "draft"),
        # All rows alone, as by default, if there is time for all.
        batch=(4,) if len(chosen) == 2 else (1,),
        max_new_tokens=(320,),
    )
    plain, dflash = found["plain"], found["dflash"]
    assert dflash["acceptance"]["acceptance_length"] >= 11.9 * (1 - TOLERANCE)
    assert dflash["accuracy"]["questions"] == 2 * len(chosen)
    assert dflash["accuracy"]["mean"] == plain["accuracy"]["mean"] >= 0.875 - TOLERANCE
    assert dflash["agreement"]["share"] == 1


def test_mmstars_protocol_on_drawn_images(tmp_path: Path) -> None:
    """Throughput, acceptance and accuracy by categories, of rows in MMStar's schema with the bundled pair's images.

    The pair was never shown options, nor a letter to answer with: what is tested is the way, not how well it sees.
    """
    counts = [row for row in rows_of(TOY / "vision" / "held_out.jsonl") if row["kind"] == "count"]
    drawn: list[dict[str, Any]] = []
    for row in counts:
        image, text = row["messages"][0]["content"]
        options = ", ".join(f"{letter}: {word}" for word, letter in LETTERS.items())
        word = next((word for word in LETTERS if word in row["answer"].split()[-3:]), None)
        if word is not None:
            drawn.append(
                {
                    "index": len(drawn),
                    "question": f"{text['text']}\nOptions: {options}",
                    "image": str(TOY / "vision" / image["path"]),
                    "answer": LETTERS[word],
                    "category": "instance reasoning",
                    "l2_category": "counting",
                }
            )
    assert len(drawn) >= 4
    (tmp_path / "mmstar").mkdir()
    write(tmp_path / "mmstar" / "drawn.jsonl", drawn[:4])
    found = measured(
        tmp_path / "out",
        data=("mmstar",),
        data_dir=tmp_path,
        target=str(TOY / "vision" / "target"),
        draft=str(TOY / "vision" / "draft"),
        max_new_tokens=(32,),
    )
    plain, dflash = found["plain"], found["dflash"]
    assert dflash["agreement"]["share"] == 1
    assert dflash["tokens_per_second"] > 0
    assert dflash["acceptance"]["acceptance_length"] > 1
    assert dflash["accuracy"] == plain["accuracy"]
    assert dflash["accuracy"]["questions"] == 4


# z-lab/dflash issue 166: GSM8K with Transformers, greedy, without thinking, answers of at most 512 tokens.
PUBLISHED = [("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 6.39)]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft", "acceptance_length"), PUBLISHED)
def test_a_published_pair_reaches_its_number(
    target: str, draft: str, acceptance_length: float, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and the Hub")
    found = measured(
        tmp_path / "out",
        data=("gsm8k",),
        num_prompts=128,
        target=target,
        draft=draft,
        methods=("dflash",),
        max_new_tokens=(512,),
        template_options={"enable_thinking": False},
    )["dflash"]
    assert found["acceptance"]["acceptance_length"] >= acceptance_length * (1 - TOLERANCE)
