"""Seconds and memory of preparing rows of chat, beside a bare `datasets.map` of the same function over them.

    python benchmarks/prepare.py --data rows.jsonl --target demos/toy/target

Each of the two runs in a process of its own, with an empty cache. Memory is that of the process and all of its
workers, looked at every 0.2 s: `rss` counts pages that they share once for each of them, `pss` once in all.
The last line on stdout is the result, as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import datasets
from transformers import AutoTokenizer

from dflash_hf.data.sources import num_cores, open_source
from dflash_hf.training.prepare import COLUMNS, PrepareSettings, prepare, prepare_row

SECONDS_BETWEEN = 0.2


class MemoryWatch:
    """The greatest memory of this process and its children, in bytes, while it is entered."""

    def __init__(self) -> None:
        self.peak = {"rss": 0, "pss": 0}
        self._done = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN):
            found = memory_of(process_tree(os.getpid()))
            for name, size in found.items():
                self.peak[name] = max(self.peak[name], size)


def process_tree(root: int) -> list[int]:
    """Returns a process and all below it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(after_name[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def memory_of(processes: list[int]) -> dict[str, int]:
    """Returns the bytes that processes have in memory."""
    sizes = {"rss": 0, "pss": 0}
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name = line.partition(":")[0].lower()
            if name in sizes:
                sizes[name] += 1024 * int(line.split()[1])
    return sizes


def prepared(settings: PrepareSettings, tokenizer: Any) -> int:
    """Prepares rows and returns how many."""
    return prepare(settings, tokenizer).num_rows


def mapped(settings: PrepareSettings, tokenizer: Any) -> int:
    """Does the same by `datasets.map` alone, and writes what it made by `datasets`."""
    source = open_source(settings.datasets[0])
    made = source.table.map(
        prepare_row,
        with_indices=True,
        with_rank=True,
        num_proc=num_cores(),
        remove_columns=source.table.column_names,
        features=datasets.Features({name: datasets.Value(kind) for name, kind in COLUMNS.items()}),
        fn_kwargs={
            "origin": source.origin,
            "settings": settings,
            "processing_class": tokenizer,
        },
    )
    made.to_json(str(settings.output))
    return len(made)


def measure(work: Callable[[PrepareSettings, Any], int], data: str, target: str) -> dict[str, Any]:
    """Returns seconds and peak memory of one way, in a process of its own."""
    receive, send = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_measure_here, args=(work, data, target, send)
    )
    process.start()
    process.join()
    return receive.recv()


def _measure_here(
    work: Callable[[PrepareSettings, Any], int], data: str, target: str, send: Connection
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    with tempfile.TemporaryDirectory() as folder, MemoryWatch() as watch:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        settings = PrepareSettings(
            datasets=[data], output=Path(folder) / "out.jsonl", turns="all", max_length=3072
        )
        began = time.perf_counter()
        num_rows = work(settings, tokenizer)
        seconds = time.perf_counter() - began
    times = os.times()
    cpu_seconds = times.user + times.system + times.children_user + times.children_system
    memory = {f"{name}_gb": round(size / 1e9, 2) for name, size in watch.peak.items()}
    result = {"rows": num_rows, "seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
    send.send({**result, **memory})


def main() -> None:
    """Measures both ways."""
    parser = argparse.ArgumentParser(description="Seconds and memory of preparing rows")
    parser.add_argument("--data", required=True, help="rows of chat, .jsonl")
    parser.add_argument("--target", default="demos/toy/target", help="folder of the tokenizer")
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": num_cores()}
    for name, work in (("prepare", prepared), ("map", mapped)):
        result[name] = measure(work, options.data, options.target)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
