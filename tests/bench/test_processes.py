"""Several processes deal the rounds among themselves, and give one process's answers and counts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.bench import run as run_module
from dflash_hf.bench.run import run
from helpers import forked_python
from helpers.bench_runs import TOY, Asked, answers_in, counts_in, settings_in, write_set

Pretend = Callable[..., Asked]
ROOT = TOY.parents[1]


def test_two_processes_are_one(tmp_path: Path, held_out: list[str]) -> None:
    rows = [(held_out[0],), (held_out[1],), (held_out[0], "Thanks. Again?")]
    data = write_set(tmp_path / "few.jsonl", rows)
    settings = settings_in(
        tmp_path,
        data=(str(data),),
        batch=(1, 2),
        max_new_tokens=(8,),
        temperature=(2.0,),
        verify_width=(8,),
    )
    run(settings)
    words = [
        "--out",
        tmp_path / "two",
        "--data",
        data,
        "--target",
        TOY / "target",
        "--draft",
        TOY / "draft",
    ]
    words += [
        "--batch",
        "1,2",
        "--max-new-tokens",
        8,
        "--temperature",
        2,
        "--verify-width",
        8,
        "--threads",
        1,
    ]
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "kernels/torch-ext"))
    # Torchrun is forked, and forks the two: each start of Python would load torch and Transformers anew.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--start-method", "fork", "--run-path", str(ROOT / "src/dflash_hf/__main__.py")]
    done = forked_python.run([*torchrun, "bench", *words], {**os.environ, "PYTHONPATH": path}, 280)
    assert done.returncode == 0, done.stderr
    assert counts_in(tmp_path / "two") == counts_in(settings.out)
    assert not list((tmp_path / "two").glob("part*"))
    two: dict[str, Any] = json.loads((tmp_path / "two" / "run.json").read_text())
    assert two["provenance"]["processes"] == 2


class Alone:
    """One of several processes, as far as who asks what goes."""

    device_map = "cpu"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def wait(self) -> None:
        """The others are not there."""

    def end(self) -> None:
        """Nothing to leave."""


def test_rounds_are_dealt(
    tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks after the first one find its folder; what they write waits in files of their own until it is gone on."""
    settings = settings_in(
        tmp_path, methods=("plain", "dflash"), batch=(2,), repeats=2, temperature=(1.0,)
    )
    first = Counter((name, tuple(texts)) for name, texts in pretend(settings))
    split = replace(settings, out=tmp_path / "split")
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "questions.jsonl").write_bytes(
        (settings.out / "questions.jsonl").read_bytes()
    )
    asked = Counter[tuple[str, tuple[str, ...]]]()
    for rank in (2, 1):
        monkeypatch.setattr(run_module, "Processes", lambda device, rank=rank: Alone(rank, 3))
        asked.update((name, tuple(texts)) for name, texts in pretend(split))
        assert (split.out / f"part{rank}-answers-plain.jsonl").is_file()
    assert not asked - first
    assert 0 < sum(asked.values()) < sum(first.values())
    # A single process finds what three have left, and asks the rest.
    (split.out / "run.json").write_bytes((settings.out / "run.json").read_bytes())
    monkeypatch.setattr(run_module, "Processes", lambda device: Alone(0, 1))
    asked.update((name, tuple(texts)) for name, texts in pretend(replace(split, resume=True)))
    assert asked == first
    assert counts_in(split.out) == counts_in(settings.out)
    assert not list(split.out.glob("part*"))
    assert all(len(rows) == 16 for rows in answers_in(split.out).values())


@pytest.mark.parametrize(
    ("size", "batch", "sentence"),
    [
        (3, 4, ""),
        (4, 4, "1 of 4 processes have nothing to do: there are only 3 groups of up to 4 questions"),
        # No set has as many questions.
        (4, 8, "2 of 4 processes have nothing to do: there are only 2 groups of up to 8 questions"),
    ],
)
def test_processes_without_a_round_are_told(
    size: int,
    batch: int,
    sentence: str,
    tmp_path: Path,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(run_module, "Processes", lambda device: Alone(0, size))
    pretend(settings_in(tmp_path, methods=("plain",), batch=(1, batch)))
    assert sentence in caplog.text
    assert ("nothing to do" in caplog.text) == bool(sentence)


def test_each_process_loads_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher's file for FSDP, processes other than the first would leave a target's buffers unread."""
    variable = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    monkeypatch.setenv(variable, "true")
    run_module.Processes("cpu")
    assert os.environ[variable] == "False"
