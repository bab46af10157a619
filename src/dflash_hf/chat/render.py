"""This module renders the page's HTML with the macros of `page.html`, and finds the example questions."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dflash_hf.chat.branches import Tried
from dflash_hf.chat.images import chat_image
from dflash_hf.data.prompt_files import as_messages, read_rows, text_of

MAX_EXAMPLES = 4
# Gradio's own templates read `${}` and `{{}}`. Text that people or models write must never reach them in this form.
_TEMPLATE = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def _escaped(value: Any) -> Markup:
    """Returns an expression of the template as it is written into the page, also within attributes."""
    if isinstance(value, Markup):
        return value
    return Markup(str(escape(value)).translate(_TEMPLATE))


# Control characters appear as Unicode's pictures of them. Line breaks and tabs appear as the symbols on keyboards.
_VISIBLE: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32)},
    9: "⇥",
    10: "↵",
    127: 0x2421,
}


@lru_cache(maxsize=4096)
def tried_of(tried: Tried) -> Markup:
    """Returns the data of a verify for `page.js`: the number of further continuations, then a line for each one.

    A line has three fields with tabs between them: the number of tokens before the continuation, 1 if it came from the
    text (otherwise 0), and its own text. The data is one attribute and is cached, because an answer is drawn many
    times, but a person looks at its steps one by one.
    """
    lines = (
        f"{one.after}\t{one.from_text:d}\t{one.text.translate(_VISIBLE)}" for one in tried.branches
    )
    return _escaped("\n".join([str(tried.num_more), *lines]))


_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_escaped,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_parts: Any = _environment.get_template(
    "page.html", globals={"chat_image": chat_image, "tried_of": tried_of}
).module


def render(part: str, *values: object) -> str:
    """Renders a part of the page as HTML: the macro of that name, with these values. All values are escaped."""
    return str(getattr(_parts, part)(*values))


def find_examples(draft: str, takes_images: bool) -> dict[str, list[Path]]:
    """Reads `held_out.jsonl` beside a draft's folder. Returns the images of one question per kind, by its text.

    Only conversations of one turn whose images are in that folder are used. If the target takes images, all questions
    but one have images. Without the file there are no questions.
    """
    folder = Path(draft).resolve().parent
    path = folder / "held_out.jsonl"
    found: dict[str, tuple[str, list[Path]]] = {}
    if not Path(draft).is_dir() or not path.is_file():
        return {}
    for row, prompt in read_rows(path):
        [message, *others] = as_messages(prompt)
        parts: Any = message["content"]
        if isinstance(parts, str):
            parts = []
        files = [Path(str(part.get("path"))) for part in parts if part["type"] == "image"]
        if not others and all(
            file.resolve().is_relative_to(folder) and file.is_file() for file in files
        ):
            found.setdefault(str(row.get("kind")), (text_of(prompt), files))
    seeing = [example for example in found.values() if example[1] and takes_images]
    reading = [example for example in found.values() if not example[1]]
    # Neighbouring kinds are similar, so the questions are taken at equal distances.
    step = math.ceil(len(seeing) / (MAX_EXAMPLES - bool(reading))) or 1
    return dict([*seeing[::step], *reading][:MAX_EXAMPLES])
