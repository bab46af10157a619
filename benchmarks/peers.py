"""SmolLM2 with its draft beside its peers: the ways of `dflash-hf bench`, and servers. docs/peers.md is its page.

    make real
    .venv/bin/dflash-hf bench prepare gsm8k,humaneval,mt-bench --out build/smollm2/data
    .venv/bin/python benchmarks/peers.py --dtype float32 --server "llama.cpp=http://localhost:8081=PID"

The first turn of each question goes to all ways in turns, in this process, one row at a time, on one thread. Batches
have questions of the first set, for the ways that take them. A server must have the same weights, and one thread. The
seconds of a way are those that its process spent on a processor, so that neither other work nor a pause counts. Writes
`peers.json`, in which the rows of the other dtype stay.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from harness.machine import RESULTS, ROOT, LoadWatch, provenance
from harness.report import show, write
from harness.rows import Row

from dflash_hf import DFlashDraftModel
from dflash_hf.bench.cells import TAKES_ONE_ROW, Options
from dflash_hf.bench.methods import WAYS, Conversation, Models, Way, answers_of
from dflash_hf.bench.server import server_method
from dflash_hf.bench.sets import load_questions
from dflash_hf.bench.zlab import zlab_way
from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.errors import one_line
from dflash_hf.pair.answers import tokenizer_of
from dflash_hf.pair.loading import load_target

SMOLLM2 = ROOT / "build" / "smollm2"
PLAIN = "plain"
ALL = "all"
# No smaller model than SmolLM2-135M has its tokenizer.
WITHOUT_ASSISTANT = [name for name in WAYS if name != "assistant"]
IN_BATCHES = (PLAIN, "dflash", "undrafted")
WARM_UP_TOKENS = 8
COLUMNS = [
    ("way", "way"),
    ("rows", "rows"),
    ("set", "set"),
    ("tokens", "new_tokens"),
    ("tokens/s", "tokens_per_second"),
    ("over plain", "over_plain"),
    ("same text", "same_text"),
    ("of", "texts"),
    ("tokens per verify", "tokens_per_verify"),
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a way made of a batch: its texts, their tokens, processor seconds, and what its verifies committed."""

    texts: list[str]
    new_tokens: int
    seconds: float
    committed: int = 0
    verifies: int = 0


# Conversations -> what a way made of them.
Ask = Callable[[list[Conversation], Options], Answered]


@dataclass(slots=True)
class Total:
    """Sums over the batches of a way."""

    texts: int = 0
    same_text: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    committed: int = 0
    verifies: int = 0

    def add(self, answered: Answered, baseline: Answered) -> None:
        """Adds what a way made of a batch, beside what plain `generate` made of it."""
        self.texts += len(answered.texts)
        pairs = zip(answered.texts, baseline.texts, strict=True)
        self.same_text += sum(one == other for one, other in pairs)
        self.new_tokens += answered.new_tokens
        self.seconds += answered.seconds
        self.committed += answered.committed
        self.verifies += answered.verifies


def ask_here(
    way: Way, models: Models, conversations: list[Conversation], options: Options
) -> Answered:
    """Runs a way of this process."""
    inputs = models.encode(conversations)
    started = time.process_time()
    raw = way(models, inputs, options)
    seconds = time.process_time() - started
    answers = answers_of(models, inputs, raw)
    tokenizer = tokenizer_of(models.processor)
    committed = [steps["committed"] for steps in raw.steps]
    return Answered(
        texts=[str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers],
        new_tokens=sum(map(len, answers)),
        seconds=seconds,
        committed=sum(map(sum, committed)),
        verifies=sum(map(len, committed)),
    )


def ask_server(
    client: OpenAIClient, pid: int, conversations: list[Conversation], options: Options
) -> Answered:
    """Asks a server, whose process is `pid`."""
    method = server_method(client, {})
    before = seconds_of(pid)
    turns = method(conversations, options, 0)
    seconds = seconds_of(pid) - before
    counters = turns[0].counters or {}
    verifies = int(counters.get("num_drafts", 0))
    return Answered(
        texts=[turn.text for turn in turns],
        new_tokens=sum(turn.new_tokens for turn in turns),
        seconds=seconds,
        committed=verifies + int(counters.get("num_accepted_tokens", 0)),
        verifies=verifies,
    )


def seconds_of(pid: int) -> float:
    """Returns the seconds that a process has spent on processors, in its own code and in the kernel."""
    # Fields 14 and 15 of the file; the name before them may have spaces
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    after_name = text.rpartition(")")[2].split()
    ticks = int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def servers_of(given: list[str]) -> dict[str, Ask]:
    """Returns the servers of `NAME=URL=PID` by their names.

    Raises:
        typer.BadParameter: If one has another form.
    """
    found: dict[str, Ask] = {}
    for text in given:
        name, _, place = text.partition("=")
        url, _, pid = place.rpartition("=")
        if not name or not url or not Path(f"/proc/{pid}/stat").is_file():
            raise typer.BadParameter(
                f"expected NAME=URL=PID of a running server, got {text!r}; "
                "give llama.cpp=http://localhost:8081=1234 for instance"
            )
        found[name] = functools.partial(ask_server, OpenAIClient(url), int(pid))
    return found


def ways_of(models: Models, conversation: Conversation) -> tuple[dict[str, Ask], dict[str, str]]:
    """Returns the ways of this process that can be run, warmed up, and why the others cannot."""
    ways: dict[str, Ask] = {
        name: functools.partial(ask_here, WAYS[name], models) for name in WITHOUT_ASSISTANT
    }
    left_out: dict[str, str] = {}
    try:
        ways["zlab"] = functools.partial(ask_here, zlab_way(models), models)
    except ValueError as error:
        left_out["zlab"] = one_line(error)
    for name, ask in list(ways.items()):
        try:
            ask([conversation], Options(max_new_tokens=WARM_UP_TOKENS))
        except ValueError as error:
            left_out[name] = one_line(error)
            del ways[name]
    for name, reason in left_out.items():
        logger.warning("leaving out %s: %s", name, reason)
    return ways, left_out


@dataclass(slots=True)
class Comparison:
    """All ways over batches of questions.

    Args:
        ways: Each way, plain `generate` among them.
        options (`Options`): Of all ways.
        totals: By rows of a batch, set and way.
    """

    ways: dict[str, Ask]
    options: Options
    totals: dict[tuple[int, str, str], Total] = field(
        default_factory=lambda: defaultdict[tuple[int, str, str], Total](Total)
    )

    def ask(self, name: str, conversations: list[Conversation], num_rows: int) -> None:
        """Asks questions of a set in batches, each batch of all ways in turns."""
        several = [way for way in self.ways if way not in TAKES_ONE_ROW]
        if num_rows > 1:
            several = [way for way in several if way in IN_BATCHES or way not in WAYS]
        names = list(self.ways) if num_rows == 1 else several
        for first in range(0, len(conversations) - num_rows + 1, num_rows):
            batch = conversations[first : first + num_rows]
            start = first // num_rows % len(names)
            found = {way: self.ways[way](batch, self.options) for way in _turned(names, start)}
            for way, answered in found.items():
                for total in (name, ALL):
                    self.totals[num_rows, total, way].add(answered, found[PLAIN])
            typer.echo(f"{name}, {num_rows} rows: {first} of {len(conversations)}", err=True)

    def rows(self, dtype: str) -> list[Row]:
        """Returns a row per number of rows, set and way."""
        found: list[Row] = []
        for (num_rows, name, way), total in self.totals.items():
            plain = self.totals[num_rows, name, PLAIN]
            speed = total.new_tokens / total.seconds
            over = speed / (plain.new_tokens / plain.seconds)
            per_verify = round(total.committed / total.verifies, 2) if total.verifies else None
            found.append(
                {
                    "dtype": dtype,
                    "way": way,
                    "rows": num_rows,
                    "set": name,
                    "texts": total.texts,
                    "same_text": total.same_text,
                    "new_tokens": total.new_tokens,
                    "seconds": round(total.seconds, 2),
                    "tokens_per_second": round(speed, 2),
                    "over_plain": round(over, 3),
                    "tokens_per_verify": per_verify,
                }
            )
        return found


def _turned(names: list[str], start: int) -> list[str]:
    return [*names[start:], *names[:start]]


def load_models(target: Path, draft: Path, dtype: str) -> Models:
    """Loads the pair in one dtype."""
    model, processor = load_target(str(target), dtype, "cpu")
    tokenizer_of(processor).padding_side = "left"
    assistant = DFlashDraftModel.from_pretrained(str(draft), dtype=model.dtype)
    return Models(target=model, processor=processor, draft=assistant)


def conversations_of(path: Path, count: int) -> list[Conversation]:
    """Returns the first turns of some questions of a set."""
    questions = load_questions(str(path), data_dir=None, num_prompts=count, seed=0)
    return [[{"role": "user", "content": question.turns[0]}] for question in questions]


def main(
    dtype: Annotated[str, typer.Option(help="torch dtype of the models.")] = "float32",
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = SMOLLM2 / "target",
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")] = (
        ROOT / "demos" / "smollm2" / "draft"
    ),
    data: Annotated[
        Path, typer.Option(help="Folder with the test sets that `dflash-hf bench prepare` wrote.")
    ] = SMOLLM2 / "data",
    sets: Annotated[
        str, typer.Option(help="Test sets, with commas between; batches are of the first one.")
    ] = "gsm8k,humaneval,mt-bench",
    questions: Annotated[int, typer.Option(min=1, help="Questions of each set, one by one.")] = 8,
    batch: Annotated[str, typer.Option(help="Rows of a batch, with commas between.")] = "4,8,16",
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    server: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL=PID of a server with the same weights; may be given again."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "peers.json",
) -> None:
    """Compare this package with other ways to decode the same prompts with the same weights."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    servers = servers_of(server or [])
    sizes = [int(size) for size in batch.split(",")]
    torch.set_num_threads(1)
    models = load_models(target, draft, dtype)
    names = sets.split(",")
    asked = {name: conversations_of(data / f"{name}.jsonl", questions) for name in names}
    many = conversations_of(data / f"{names[0]}.jsonl", max(sizes))
    ways, left_out = ways_of(models, many[0])
    comparison = Comparison({**ways, **servers}, Options(max_new_tokens=max_new_tokens))
    watch = LoadWatch()
    watch.sample()
    watch.start()
    for name, conversations in asked.items():
        comparison.ask(name, conversations, 1)
    for size in sizes:
        comparison.ask(names[0], many, size)
    watch.stop()
    rows = comparison.rows(dtype)
    record: dict[str, Any] = {"provenance": {"benchmark": "peers"}, "rows": []}
    if out.is_file():
        record = json.loads(out.read_text(encoding="utf-8"))
    record["provenance"][dtype] = {
        "questions": questions,
        "max_new_tokens": max_new_tokens,
        "block_size": models.loaded_draft.config.block_size,
        "clock": "cpu",
        "load": watch.to_dict(),
        "left_out": left_out,
        **provenance(torch.device("cpu")),
    }
    others = [row for row in record["rows"] if row["dtype"] != dtype]
    record["rows"] = others + rows
    show(f"The same weights and prompts in {dtype}, one thread", rows, COLUMNS)
    write(record, out)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    typer.run(main)
