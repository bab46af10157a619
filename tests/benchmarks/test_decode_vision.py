"""`benchmarks/decode.py --pair vision`: prompts with pictures, the methods that take them, and what is asked of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import decode
import pytest
import torch
from harness.pair import MIXED, Pair, load_pair
from harness.rows import PICTURES, TEXTS, vision_rows

from helpers.scripts import record_of, run_script
from helpers.vision_pair import KINDS, write_vision_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that is always right."""
    return write_vision_pair(tmp_path_factory.mktemp("known") / "pair", knows=True)


def load(folder: Path) -> Pair:
    places = folder / "target", folder / "draft"
    return load_pair(*places, torch.float64, torch.device("cpu"), vision=True)


run = partial(run_script, decode.main)


def test_batches_are_of_one_kind_or_of_all(folder: Path) -> None:
    pair = load(folder)
    assert pair.kinds == tuple(KINDS)
    assert pair.picture_kinds == ("count", "compare")
    start = pair.processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    for kind, pictures in (
        ("count", [1, 1, 1]),
        ("compare", [2, 2, 2]),
        ("talk", [0, 0, 0]),
        (MIXED, [1, 2, 0]),
    ):
        inputs = pair.inputs(kind, 0, 3)
        assert (inputs["input_ids"] == start).sum(dim=1).tolist() == pictures
        assert bool(inputs["attention_mask"][:, -1].all()), "padded on the left"
        assert len(inputs.get("image_grid_thw", [])) == sum(pictures)
    third, first = pair.inputs("count", 2, 1)["input_ids"], pair.inputs("count", 0, 1)["input_ids"]
    assert torch.equal(pair.inputs("count", 3, 1)["input_ids"], first), "prompts start again"
    assert torch.equal(pair.inputs(MIXED, 6, 1)["input_ids"], third)
    assert not torch.equal(first, third)


def test_prompts_run_out_before_groups_repeat(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = load(folder)
    assert [first for kind, first in decode.groups_of_prompts(pair, 1, 8) if kind == "talk"] == [
        0,
        1,
        2,
    ]
    assert not caplog.messages
    assert [first for kind, first in decode.groups_of_prompts(pair, 2, 8) if kind == MIXED] == [
        0,
        2,
        4,
        6,
    ]
    assert [first for kind, first in decode.groups_of_prompts(pair, 4, 8) if kind == "talk"] == [0]
    assert "batches of 4 repeat prompts of kind talk: there are 3" in caplog.messages


def test_decode_measures_prompts_with_pictures(
    folder: Path, results: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = [
        "--prompts",
        "2",
        "--repeats",
        "1",
        "--max-new-tokens",
        "24",
        "--dtype",
        "float64",
        "--batch",
        "1,3",
    ]
    places = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    result = run("--pair", "vision", *places, *options, "--force")
    assert result.exit_code == 0, result.output
    record = record_of(result)
    assert record["provenance"]["benchmark"] == "decode_vision"
    assert any("leaving out stock" in message for message in caplog.messages)
    assert any("leaving out zlab" in message for message in caplog.messages)
    rows = {(row["method"], row["batch"], row["kind"]): row for row in record["rows"]}
    names = [*KINDS, PICTURES, TEXTS, "all"]
    expected = {(method, 1, name) for method in ("plain", "ours") for name in names}
    assert rows.keys() == expected | {
        (m, 3, name) for m in ("plain", "ours") for name in [*names, MIXED]
    }
    assert all(row["identical"] for row in rows.values())
    assert rows["ours", 1, PICTURES]["new_tokens"] == 2 * 2 * 24
    assert rows["ours", 3, MIXED]["new_tokens"] == 3 * 24
    # 23 tokens after the prefill's, in two verifies.
    assert rows["ours", 1, "compare"]["acceptance_length"] == 11.5
    asked = {(row["what"], row["kind"], row["batch"]): row for row in record["vision_floors"]}
    speed = asked["tokens_per_second_against_plain", PICTURES, 1]
    ours, plain = rows["ours", 1, PICTURES], rows["plain", 1, PICTURES]
    assert speed["value"] == pytest.approx(
        ours["tokens_per_second"] / plain["tokens_per_second"], rel=1e-3
    )
    assert speed["required"] == 1.8
    for kind, floor in ((PICTURES, 5.0), (TEXTS, 4.0)):
        row = asked["acceptance_length", kind, 1]
        assert (row["value"], row["required"], row["reached"]) == (11.5, floor, True)
    assert asked["acceptance_length", TEXTS, 3]["required"] is None
    assert all(asked["share_identical", "all", batch]["reached"] for batch in (1, 3))
    assert not results.exists(), "nothing is recorded under --force"


def row(method: str, kind: str, **values: Any) -> dict[str, Any]:
    fields = {
        "batch": 1,
        "tokens_per_second": 100.0,
        "acceptance_length": 4.5,
        "num_identical": 3,
        "num_texts": 4,
    }
    return {"method": method, "kind": kind, "busy": False, **fields, **values}


def test_what_is_not_reached_is_said() -> None:
    rows = [row("plain", kind) for kind in (PICTURES, TEXTS, "all")]
    rows += [row("ours", kind, tokens_per_second=170.0) for kind in (PICTURES, TEXTS, "all")]
    assert [(r["what"], r["value"], r["reached"]) for r in vision_rows(rows)] == [
        ("tokens_per_second_against_plain", 1.7, False),
        ("acceptance_length", 4.5, False),
        ("acceptance_length", 4.5, True),
        ("share_identical", 0.75, False),
    ]


def test_random_weights_answer_no_pictures() -> None:
    result = run("--pair", "vision", "--random", "tiny", "--force")
    assert result.exit_code == 2
    assert "got both" in " ".join(result.output.split())
