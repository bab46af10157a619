"""The bundled pair for pictures at work, in float32: identical answers, and acceptance above the floors.

The pair is `demos/toy/vision`: `target/` with its processor, `draft/`, `held_out.jsonl` and the pictures it names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import DynamicCache
from typer.testing import CliRunner, Result

from dflash_hf import DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.main import app
from dflash_hf.data.prompt_files import image_names
from dflash_hf.doctor.diagnosis import diagnose
from dflash_hf.pair.answers import encode_prompt
from dflash_hf.pair.loading import load_pair
from helpers.whole_blocks import use_whole_blocks

VISION = Path(__file__).resolve().parents[2] / "demos" / "toy" / "vision"
GREEDY: dict[str, Any] = {"max_new_tokens": 192, "do_sample": False}
# Two turns go on for so long each.
SHORT = {**GREEDY, "max_new_tokens": 40}
# Of each kind, the prompts that the tests choose from.
CHOSEN = 2
# Of each kind in the file.
PER_KIND = 8
Row = dict[str, Any]


@cache
def pair() -> tuple[Any, DFlashDraftModel, Any]:
    target, draft, processor = load_pair(str(VISION / "target"), str(VISION / "draft"))
    use_whole_blocks(draft)
    return target, draft, processor


def prompts(per_kind: int) -> list[Row]:
    return read_prompts(VISION / "held_out.jsonl", per_kind)


def with_images(count: int) -> list[Row]:
    """Prompts of one user turn with so many pictures."""
    rows = [row for row in prompts(CHOSEN) if len(row["messages"]) == 1]
    found = [row for row in rows if len(image_names(row["messages"])) == count]
    assert found, f"no held-out prompt of one turn has {count} pictures"
    return found


def mixed_rows() -> list[Row]:
    """Prompts without a picture, with one, with two, and a conversation, if there is one."""
    chats = [
        row for row in prompts(CHOSEN) if len(row["messages"]) > 1 and image_names(row["messages"])
    ]
    return [with_images(1)[0], with_images(0)[0], with_images(2)[0], with_images(1)[-1], *chats[:1]]


def encode(row: Row) -> dict[str, Tensor]:
    return encode_prompt(pair()[2], row["messages"], torch.device("cpu"))


def batch_of(rows: list[Row]) -> dict[str, Tensor]:
    encoded = pair()[2].apply_chat_template(
        [row["messages"] for row in rows],
        add_generation_prompt=True,
        tokenize=True,
        return_tensors="pt",
        return_dict=True,
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    return dict(encoded)


def test_the_pair_is_small_and_float32() -> None:
    target, draft, processor = pair()
    assert target.dtype == draft.dtype == torch.float32
    files = [
        path
        for name in ("target", "draft")
        for path in (VISION / name).rglob("*")
        if path.is_file()
    ]
    assert sum(path.stat().st_size for path in files) <= 16e6
    assert draft.config.block_size == 16
    assert draft.config.mask_token_id == processor.tokenizer.mask_token_id


def batches(places: Sequence[int]) -> list[list[Row]]:
    """Prompts of each kind: one, or two if all are asked for, are compared alone. The others are answered together."""
    num_alone = CHOSEN if len(places) == PER_KIND else 1
    rows = list(enumerate(prompts(PER_KIND)))
    compared = [row for at, row in rows if at % PER_KIND in places[:num_alone]]
    others = [row for at, row in rows if at % PER_KIND in places[num_alone:]]
    together = [others[first : first + 18] for first in range(0, len(others), 18)]
    return [*([row] for row in compared), *together]


@pytest.mark.parametrize("places", [(0, 3), pytest.param(range(PER_KIND), marks=pytest.mark.slow)])
def test_answers_are_identical_and_acceptance_is_high(places: Sequence[int]) -> None:
    target, draft, processor = pair()
    verifies: dict[str, list[int]] = defaultdict(list)
    exact: list[bool] = []
    for rows in batches(places):
        is_compared = len(rows) == 1
        inputs = encode(rows[0]) if is_compared else batch_of(rows)
        out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        committed = draft.last_stats.num_committed
        answers = processor.tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for row, answer, counts in zip(rows, answers, committed, strict=True):
            verifies[row["kind"]] += counts
            exact.append(answer.split() == row["answer"].split())
        if is_compared:
            assert torch.equal(target.generate(**inputs, **GREEDY), out), rows
    assert len(exact) == len(prompts(1)) * len(places)
    shown = {row["kind"] for row in prompts(1) if image_names(row["messages"])}
    lengths = {kind: sum(counts) / len(counts) for kind, counts in verifies.items()}
    for kinds, floor in ((shown, 5.0), (verifies.keys() - shown, 4.0)):
        pooled = [count for kind in kinds for count in verifies[kind]]
        assert sum(pooled) / len(pooled) >= floor, lengths
    assert sum(exact) / len(exact) >= 0.9


def test_mixed_batches_are_identical_and_accept_as_rows_alone() -> None:
    target, draft, _ = pair()
    rows = mixed_rows()
    inputs = batch_of(rows)
    plain = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), plain)
    together = draft.last_stats.num_committed
    for index, row in enumerate(rows):
        target.generate(**encode(row), **GREEDY, assistant_model=draft)
        assert draft.last_stats.num_committed == [together[index]], row


def follow(first: Tensor, inputs: dict[str, Tensor], row: Row, follow_up: Row) -> dict[str, Tensor]:
    """What the processor makes of a conversation that went on: `row`'s prompt, its answer, another user turn."""
    processor = pair()[2]
    turn = follow_up["messages"][-1]
    later = [*row["messages"], {"role": "assistant", "content": "@@@"}, turn]
    text = processor.apply_chat_template(later, add_generation_prompt=True).partition("@@@")[2]
    parts = [] if isinstance(turn["content"], str) else turn["content"]
    pictures = [Image.open(part["path"]) for part in parts if part["type"] == "image"]
    more = dict(processor(text=text, images=pictures or None, return_tensors="pt"))
    # The answer may have been cut off before its end token.
    skip = int(first[0, -1] == more["input_ids"][0, 0])
    answer = first[:, inputs["input_ids"].shape[1] :]
    both: dict[str, Tensor] = {"input_ids": torch.cat([first, more["input_ids"][:, skip:]], dim=1)}
    both["attention_mask"] = torch.ones_like(both["input_ids"])
    types = [
        inputs["mm_token_type_ids"],
        torch.zeros_like(answer),
        more["mm_token_type_ids"][:, skip:],
    ]
    both["mm_token_type_ids"] = torch.cat(types, dim=1)
    for name in ("pixel_values", "image_grid_thw"):
        both[name] = torch.cat([turn[name] for turn in (inputs, more) if name in turn])
    return both


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_second_turn_goes_on_from_a_kept_cache(count: int) -> None:
    """The first turn has a picture; the second has `count` more of them."""
    target, draft, _ = pair()
    row, follow_up = with_images(1)[0], with_images(count)[-1]
    inputs = encode(row)
    first = target.generate(**inputs, **SHORT)
    both = follow(first, inputs, row, follow_up)
    plain = target.generate(**both, **SHORT)
    assert torch.equal(target.generate(**both, **SHORT, assistant_model=draft), plain)
    committed = draft.last_stats.num_committed
    cache = DynamicCache(config=target.config.get_text_config())
    settings = {**SHORT, "assistant_model": draft, CACHE_NAME: cache}
    assert torch.equal(target.generate(**inputs, **settings), first)
    assert torch.equal(target.generate(**both, **settings), plain)
    assert draft.last_stats.num_committed == committed


def test_the_doctor_finds_nothing() -> None:
    target, draft, processor = pair()
    asked = [row["messages"] for row in (with_images(1)[0], with_images(2)[0], with_images(0)[0])]
    diagnosis = diagnose(target, draft, processor, asked, max_new_tokens=32)
    assert [(check.name, check.sentence) for check in diagnosis.findings] == []


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_generate_asks_the_bundled_pair_about_an_image() -> None:
    part, question = with_images(1)[0]["messages"][0]["content"]
    result = run("generate", question["text"], "--image", part["path"], "--compare")
    assert result.exit_code == 0, result.output
    assert f"[{Path(part['path']).name}] {question['text']}" in " ".join(result.stderr.split())
    assert re.search(r"\byes\b +\d", result.stderr), result.stderr
