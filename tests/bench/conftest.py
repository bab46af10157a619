"""What the tests of `dflash-hf bench` share: the bundled pair, and runs whose methods are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dflash_hf.bench import run as run_module
from dflash_hf.bench.cells import Cell, RunSettings
from dflash_hf.bench.methods import Method, Models
from dflash_hf.pair.loading import load_pair
from helpers.bench_runs import TOY, Asked, Pretended


@pytest.fixture(scope="session")
def models() -> Models:
    """The bundled pair; its target is its own assistant, which is always right."""
    target, draft, processor = load_pair(str(TOY / "target"), str(TOY / "draft"))
    tokenizer: Any = processor
    tokenizer.padding_side = "left"
    return Models(target=target, processor=processor, draft=draft, assistant=target)


@pytest.fixture(scope="session")
def held_out() -> list[str]:
    """What the bundled pair is asked: of each kind the question with the shortest answer."""
    rows = [
        json.loads(line)
        for line in (TOY / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rows.sort(key=lambda row: -len(row["answer"]))
    kinds = {row["kind"]: row["messages"] for row in rows if len(row["messages"]) == 1}
    return [messages[0]["content"] for messages in kinds.values()]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """Runs settings with made-up methods in place of models, and returns who was asked what."""

    def start(
        settings: RunSettings, before: Callable[[str, list[str]], None] | None = None
    ) -> Asked:
        asked: Asked = []

        def make(settings: RunSettings, cells: Sequence[Cell], models: Any) -> dict[str, Method]:
            return {
                cell.model_id: Pretended(cell.model_id, asked, before)
                for cell in cells
                if cell.failed is None
            }

        monkeypatch.setattr(run_module, "_load_models", lambda *args: {})
        monkeypatch.setattr(run_module, "_make_methods", make)
        monkeypatch.setattr(run_module.Asker, "_warm_up", lambda *args: None)
        run_module.run(settings)
        return asked

    return start
