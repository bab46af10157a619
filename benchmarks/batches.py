"""A target with its draft in batches: plain `generate`, the default with a draft, and the default's loop without one.

    make real
    .venv/bin/dflash-hf bench prepare gsm8k,humaneval,mt-bench --out build/smollm2/data
    .venv/bin/python benchmarks/batches.py --rows 1,2,4,8,16,32 --questions 32

Every way answers the same batches of questions in turns, in another order each round, all in this process. Its time is
the process's own time on a processor, the least of the rounds, summed over the batches. What the first call with a
draft does once for all later ones, such as copies of weights, is done before. The column "one token" is this
package's loop that verifies one token at a time, so what it has over plain is not the draft's. With `--fixed 2,4,8`
verifies of so many tokens are other ways, and the last column is the default's speed over that of the best of them.
With `--never-right` the draft has random weights. Writes `batches.json`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from harness.machine import RESULTS, ROOT, LoadWatch, provenance
from harness.pair import never_right
from harness.report import finish, show

from dflash_hf import DFlashDraftModel
from dflash_hf.bench.sets import load_questions
from dflash_hf.pair.loading import load_pair

SMOLLM2 = ROOT / "build" / "smollm2"
PLAIN = "plain"
DEFAULT = "default"
# The default's loop without guesses.
ONE_TOKEN = "one token"
# A call that makes all copies of weights: those of the draft are made at the first step with guesses.
WARM_UP = {"max_new_tokens": 4, "min_new_tokens": 0}
COLUMNS = [
    ("set", "set"),
    ("rows", "rows"),
    ("plain, s", "plain_seconds"),
    ("default / plain", "default_over_plain"),
    ("one token / plain", "one_token_over_plain"),
    ("tokens per verify", "tokens_per_verify"),
    ("default / best", "default_over_best"),
]


def encoded(tokenizer: Any, texts: list[str]) -> Any:
    """Returns questions as a left-padded batch `[B, S]` with its mask."""
    chats = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


def seconds_of(
    target: Any,
    draft: DFlashDraftModel,
    inputs: Any,
    way: str,
    width: int | None,
    settings: dict[str, Any],
) -> float:
    """Returns the seconds on a processor that a call takes; `width` is the `verify_width` of a way with a draft."""
    assistant: dict[str, Any] = {}
    if way != PLAIN:
        draft.generation_config.verify_width = width
        assistant["assistant_model"] = draft
    started = time.process_time()
    target.generate(**inputs, **settings, **assistant)
    return time.process_time() - started


def measured(
    target: Any,
    draft: DFlashDraftModel,
    batches: list[Any],
    rounds: int,
    fixed: list[int],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Returns the least seconds of each way, its speed over plain, and the default's acceptance."""
    ways: dict[str, int | None] = {PLAIN: None, DEFAULT: None, ONE_TOKEN: 1}
    ways |= {f"{width} tokens": width for width in fixed}
    names = list(ways)
    least = {way: [float("inf")] * len(batches) for way in names}
    seconds_of(target, draft, batches[0], DEFAULT, 2, settings | WARM_UP)
    num_tokens = 0
    num_verifies = 0
    for turn in range(rounds):
        for index, inputs in enumerate(batches):
            # The ways begin with another one each round.
            first = (turn + index) % len(names)
            for way in [*names[first:], *names[:first]]:
                seconds = seconds_of(target, draft, inputs, way, ways[way], settings)
                least[way][index] = min(least[way][index], seconds)
                if way == DEFAULT and turn == 0:
                    stats: Any = draft.last_stats
                    num_tokens += sum(map(sum, stats.num_committed))
                    num_verifies += sum(map(len, stats.num_committed))
    totals = {way: sum(seconds) for way, seconds in least.items()}
    plain = totals[PLAIN]
    best = min(seconds for way, seconds in totals.items() if way not in (PLAIN, DEFAULT))
    return {
        "plain_seconds": round(plain, 2),
        "default_over_plain": round(plain / totals[DEFAULT], 3),
        "one_token_over_plain": round(plain / totals[ONE_TOKEN], 3),
        "fixed_over_plain": {width: round(plain / totals[f"{width} tokens"], 3) for width in fixed},
        "default_over_best": round(best / totals[DEFAULT], 3),
        "tokens_per_verify": round(num_tokens / max(num_verifies, 1), 2),
    }


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = SMOLLM2 / "target-bf16",
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")] = (
        ROOT / "demos" / "smollm2" / "draft"
    ),
    data: Annotated[
        Path, typer.Option(help="Folder with the test sets that `dflash-hf bench prepare` wrote.")
    ] = SMOLLM2 / "data",
    sets: Annotated[str, typer.Option(help="Test sets, with commas between.")] = "gsm8k",
    rows: Annotated[str, typer.Option(help="Rows of a batch, with commas between.")] = "1,4,8,16",
    questions: Annotated[int, typer.Option(min=1, help="Questions at each number of rows.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="0 sets no minimum.")] = 0,
    fixed: Annotated[str, typer.Option(help="Tokens of other verifies, with commas.")] = "",
    is_never_right: Annotated[
        bool, typer.Option("--never-right", help="Take a draft with random weights.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="torch dtype of the models, or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "batches.json",
) -> None:
    """Compare plain decoding with the default in batches of several sizes."""
    sizes = [int(size) for size in rows.split(",")]
    if max(sizes) > questions:
        raise typer.BadParameter(
            f"expected at least {max(sizes)} --questions for {max(sizes)} rows, got {questions}; ask more"
        )
    torch.set_num_threads(1)
    model, assistant, tokenizer = load_pair(str(target), str(draft), dtype, "cpu")
    if is_never_right:
        assistant = never_right(assistant)
    tokenizer.padding_side = "left"
    widths = [int(width) for width in fixed.split(",") if width]
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    if min_new_tokens:
        settings["min_new_tokens"] = min_new_tokens
    watch = LoadWatch()
    watch.sample()
    watch.start()
    found: list[dict[str, Any]] = []
    for name in sets.split(","):
        asked = load_questions(
            str(data / f"{name}.jsonl"), data_dir=None, num_prompts=questions, seed=0
        )
        texts = [question.turns[0] for question in asked]
        if len(texts) < max(sizes):
            raise typer.BadParameter(
                f"expected {max(sizes)} questions in {name}, got {len(texts)}; ask fewer rows"
            )
        for num_rows in sizes:
            # Questions that fill no batch are left out: it would be one of fewer rows.
            firsts = range(0, len(texts) - num_rows + 1, num_rows)
            batches = [encoded(tokenizer, texts[first : first + num_rows]) for first in firsts]
            row = measured(model, assistant, batches, rounds, widths, settings)
            found.append({"set": name, "rows": num_rows, **row})
            typer.echo(f"{name}, {num_rows} rows: {row}", err=True)
    watch.stop()
    facts = {
        "benchmark": "batches",
        "dtype": str(model.dtype),
        "questions": questions,
        "rounds": rounds,
        "never_right": is_never_right,
        "clock": "cpu",
        "load": watch.to_dict(),
        **settings,
    }
    record = {"provenance": {**facts, **provenance(torch.device("cpu"))}, "rows": found}
    show("Seconds of plain generate, and speeds over it", found, COLUMNS)
    finish(record, out, watch.is_quiet())


if __name__ == "__main__":
    typer.run(main)
