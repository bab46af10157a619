"""Seconds and memory of preparing rows of chat, and of reading what `regenerate` asks of the prepared ones.

    python benchmarks/prepare.py --data rows.jsonl --target demos/toy/target --rows 200000

`prepare` is the stage, `map` a bare `datasets.map` of the same function, `questions` the part of `regenerate` that
needs no model. Each runs in a process of its own, with an empty cache. `largest` is the peak memory of its largest
process. `rss` and `pss` are of all of its processes together, looked at every 0.2 s: `rss` counts pages that they
share once for each of them, `pss` once in all. The last line on stdout is the result, as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import datasets
import datasets.config
from transformers import AutoTokenizer

from dflash_hf.data.row_files import RowFile
from dflash_hf.data.sources import num_cores, open_source
from dflash_hf.training.answer_rows import Answering, Regenerated, RegenerateSettings
from dflash_hf.training.chat_template import ChatTemplate
from dflash_hf.training.prepare import COLUMNS, PrepareSettings, prepare, prepare_row
from dflash_hf.training.progress import AnswerProgress
from dflash_hf.training.questions import first_questions

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


def write_data(path: Path, data: Path, num_rows: int) -> None:
    """Writes rows of chat, those of a file in turn, each made different by a number in its first message."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(islice(cycle(rows), num_rows)):
            first, *others = row["messages"]
            first = {**first, "content": f"{number}. {first['content']}"}
            file.write(json.dumps({"messages": [first, *others]}) + "\n")


def settings_in(folder: Path) -> PrepareSettings:
    """Returns how the rows in a folder are prepared, for answers of the target."""
    return PrepareSettings(
        datasets=[str(folder / "rows.jsonl")],
        output=folder / "prepared.jsonl",
        turns="none",
        max_length=3072,
    )


def prepared(folder: Path, tokenizer: Any) -> int:
    """Prepares rows and returns how many."""
    return prepare(settings_in(folder), tokenizer).num_rows


def questions_read(folder: Path, tokenizer: Any) -> int:
    """Reads what `regenerate` asks of the rows that [`prepared`] wrote, one after the other, and returns how many."""
    settings = RegenerateSettings(
        prompts=settings_in(folder).output, output=folder / "answers.jsonl"
    )
    common = Answering(
        settings=settings,
        processing_class=tokenizer,
        template=ChatTemplate(tokenizer),
        prompts=RowFile(settings.prompts),
        report=Regenerated(),
        progress=AnswerProgress(is_shown=False),
    )
    questions = first_questions(common, set())
    for at in range(len(questions)):
        row, question = questions[at]
        assert row == at
        assert question["messages"]
    return len(questions)


def mapped(folder: Path, tokenizer: Any) -> int:
    """Does what [`prepared`] does by `datasets.map` alone, and writes what it made by `datasets`."""
    settings = settings_in(folder)
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
    made.to_json(str(folder / "map.jsonl"))
    return len(made)


WAYS: dict[str, Callable[[Path, Any], int]] = {
    "prepare": prepared,
    "questions": questions_read,
    "map": mapped,
}


def measure(way: str, folder: Path, target: str) -> dict[str, Any]:
    """Returns seconds and peak memory of one way, in a process of its own; ends the script if that fails."""
    spawned = multiprocessing.get_context("spawn")
    receive, send = spawned.Pipe(duplex=False)
    process = spawned.Process(target=_measure_here, args=(way, folder, target, send))
    process.start()
    # The process has its own: once that is closed too, nothing more can come.
    send.close()
    process.join()
    try:
        return receive.recv()
    except EOFError:
        raise SystemExit(f"{way} failed with exit code {process.exitcode}, see above") from None


def _measure_here(way: str, folder: Path, target: str, send: Connection) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    with MemoryWatch() as watch:
        datasets.config.HF_DATASETS_CACHE = folder / f"cache-{way}"
        began = time.perf_counter()
        num_rows = WAYS[way](folder, tokenizer)
        seconds = time.perf_counter() - began
    times = os.times()
    cpu_seconds = times.user + times.system + times.children_user + times.children_system
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    watch.peak["largest"] = max(1024 * resource.getrusage(who).ru_maxrss for who in whose)
    memory = {f"{name}_gb": round(size / 1e9, 2) for name, size in watch.peak.items()}
    result = {"rows": num_rows, "seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
    send.send({**result, **memory})


def main() -> None:
    """Measures the ways one after the other."""
    parser = argparse.ArgumentParser(description="Seconds and memory of preparing rows")
    parser.add_argument("--data", type=Path, required=True, help="rows with messages, .jsonl")
    parser.add_argument("--rows", type=int, required=True, help="how many, repeated with a number")
    parser.add_argument("--target", default="demos/toy/target", help="folder of the tokenizer")
    parser.add_argument("--ways", default="prepare,questions,map", help="some of them, in order")
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": num_cores()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "rows.jsonl", options.data, options.rows)
        for way in options.ways.split(","):
            result[way] = measure(way, folder, options.target)
            print(json.dumps({way: result[way]}), flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
