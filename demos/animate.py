"""Draws one real run as a picture that moves: plain `generate` beside the same with a draft, with the times they took.

`python demos/animate.py --target T --draft D --out docs/images/run.svg "prompt"`; by default the bundled pair. Each
answer is written three times, and the fastest is drawn. Two answers that differ are not drawn.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dflash_hf import load_draft
from dflash_hf.pair.loading import load_target

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, LINE, LETTER, MARGIN, TOP = 44, 17, 7.22, 14, 66  # letters of a line; the rest in px
WIDTH = round(2 * MARGIN + COLUMNS * LETTER)
COLORS = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a3b5", "#cdb4db")
REPEATS, PAUSE = 3, 3.0  # seconds that the whole picture stands
# Seconds that the plain answer takes in the picture: what was faster is shown more slowly
LEAST = 6.0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one forward of the target committed.

    Args:
        text (`str`): Of its tokens.
        seconds (`float`): Since the call.
    """

    text: str
    seconds: float


def fastest(
    write: Callable[[], tuple[list[list[int]], list[float]]], tokenizer: Any
) -> tuple[list[int], list[Piece]]:
    """Returns the tokens of an answer and its pieces, of the run that took least time."""
    tokens, seconds = min((write() for _ in range(REPEATS)), key=lambda run: run[1][-1])
    pieces: list[Piece] = []
    before, ids = "", list[int]()
    for new, at in zip(tokens, seconds, strict=True):
        ids += new
        text = tokenizer.decode(ids, skip_special_tokens=True)
        pieces.append(Piece(text[len(before) :], at))
        before = text
    return ids, pieces


def plain_run(target: Any, inputs: Any, max_new_tokens: int) -> tuple[list[list[int]], list[float]]:
    """Returns plain `generate`'s tokens, one at a time, and when each was there."""

    class Clock:
        tokens: list[list[int]]
        seconds: list[float]

        def put(self, value: torch.Tensor) -> None:
            self.tokens.append(value.flatten().tolist())
            self.seconds.append(time.perf_counter() - began)

        def end(self) -> None:
            pass

    clock = Clock()
    clock.tokens, clock.seconds = [], []
    began = time.perf_counter()
    target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=clock)
    return clock.tokens[1:], clock.seconds[1:]  # the first is the prompt


def drafted_run(
    target: Any, draft: Any, inputs: Any, max_new_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """Returns the tokens of each step of the same call with a draft, and when they were there."""
    from dflash_hf import iterate

    tokens, seconds = list[list[int]](), list[float]()
    began = time.perf_counter()
    for step in iterate(target, draft, **inputs, max_new_tokens=max_new_tokens, do_sample=False):
        tokens.append(step.committed[0].tolist())
        seconds.append(time.perf_counter() - began)
    return tokens, seconds


def lines_of(pieces: list[Piece]) -> Iterator[tuple[int, int, str, int]]:
    """Yields `(line, column, text, piece)`: the pieces, wrapped between words where a line has one."""
    owners = [number for number, piece in enumerate(pieces) for _ in piece.text]
    text, at, line = "".join(piece.text for piece in pieces), 0, 0
    while at < len(text):
        stop = text.find("\n", at, at + COLUMNS + 1) + 1
        if not stop:
            stop = min(at + COLUMNS, len(text))
            stop = stop if stop == len(text) else text.rfind(" ", at, stop) + 1 or stop
        for number, run in groupby(range(at, stop), key=owners.__getitem__):
            places = [*run]
            yield line, places[0] - at, text[places[0] : places[-1] + 1].rstrip("\n"), number
        at, line = stop, line + 1


def appearing(seconds: float, whole: float) -> str:
    """Returns the SVG that shows what it stands in from a moment on, again and again."""
    share = f"{min(seconds / whole, 0.999):.4f}"
    rest = f'dur="{whole:.2f}s" calcMode="discrete" repeatCount="indefinite"'
    return f'<animate attributeName="opacity" values="0;1" keyTimes="0;{share}" {rest}/>'


def panel(
    title: str, pieces: list[Piece], pace: float, whole: float, left: int, *, colored: bool
) -> str:
    """Returns the SVG of one answer that is being written."""
    out = [f'<text x="{left + MARGIN}" y="26" class="title">{html.escape(title)}</text>']
    for line, column, text, number in lines_of(pieces):
        if not text:
            continue
        x, y = left + MARGIN + column * LETTER, TOP + line * LINE
        color = COLORS[number % len(COLORS)]
        box = f'<rect x="{x:.1f}" y="{y - 13}" width="{len(text) * LETTER:.1f}" height="{LINE}" fill="{color}"/>'
        size = f'textLength="{len(text) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
        shown = f'<text x="{x:.1f}" y="{y}" {size} class="{"on" if colored else "off"}">{html.escape(text)}</text>'
        out.append(
            f"<g>{appearing(pace * pieces[number].seconds, whole)}{box if colored else ''}{shown}</g>"
        )
    told = f"{pieces[-1].seconds:.2f} s"
    done = f'<text x="{left + WIDTH - MARGIN}" y="26" text-anchor="end" class="title">{told}'
    out.append(f"{done}{appearing(pace * pieces[-1].seconds, whole)}</text>")
    return "\n".join(out)


def picture(plain: list[Piece], drafted: list[Piece], note: str) -> str:
    """Returns the SVG of both answers side by side."""
    pace = max(1.0, LEAST / plain[-1].seconds)
    whole = pace * plain[-1].seconds + PAUSE
    note += f" {pace:.0f}x slower." if pace > 1 else ""
    height = TOP + LINE * (max(line for line, *_ in lines_of(plain)) + 1) + 18
    style = (
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}"
        ".title,.note{font-family:system-ui,sans-serif}.title{font-size:15px;font-weight:600}"
        "text{fill:#1f2328}.on{fill:#111}.note{fill:#59636e}.back{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.note{fill:#9198a1}.back{fill:#0d1117}}"
    )
    size = f'width="{2 * WIDTH}" height="{height}" viewBox="0 0 {2 * WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} xml:space="preserve" role="img">',
        f"<title>Plain generate beside generate with a DFlash draft. {html.escape(note)}</title>",
        f'<style>{style}</style><rect class="back" width="100%" height="100%"/>',
        f'<text x="{MARGIN}" y="45" class="note">{html.escape(note)}</text>',
        panel("plain generate", plain, pace, whole, 0, colored=False),
        panel("with a DFlash draft", drafted, pace, whole, WIDTH, colored=True),
        "</svg>\n",
    ]
    return "\n".join(parts)


def main(
    prompt: Annotated[
        str, typer.Argument(help="What the user says.")
    ] = "Compute 41 + 80 - 99 + 14.",
    target: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(ROOT / "demos/toy/target"),
    draft: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(ROOT / "demos/toy/draft"),
    out: Annotated[Path, typer.Option(help="The SVG to write.")] = Path("run.svg"),
    name: Annotated[
        str, typer.Option(help="Name of the pair and the machine, shown in the picture.")
    ] = "The bundled pair",
    dtype: Annotated[str, typer.Option(help="torch dtype of the models, or auto.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 160,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Draw one real run as a picture that moves."""
    torch.set_num_threads(threads)
    model, processor = load_target(target, dtype, "auto")
    own = load_draft(draft, dtype=model.dtype)
    tokenizer = getattr(processor, "tokenizer", processor)
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    drafted_run(model, own, inputs, 8)  # what is made once is made here
    ids, plain = fastest(lambda: plain_run(model, inputs, max_new_tokens), tokenizer)
    same, drafted = fastest(lambda: drafted_run(model, own, inputs, max_new_tokens), tokenizer)
    if ids != same:
        raise typer.BadParameter(
            "expected a prompt that both answer alike, got a tie within rounding; take another"
        )
    note = f"The same {len(ids)} tokens, a colour for each step of the target. {name}, {str(model.dtype)[6:]}."
    out.write_text(picture(plain, drafted, note), encoding="utf-8")
    typer.echo(f"{out}: {plain[-1].seconds:.2f} s plain, {drafted[-1].seconds:.2f} s drafted")


if __name__ == "__main__":
    typer.run(main)
