"""The page's HTML: the parts that `page.html` has macros for, and the questions to begin with that it shows."""

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
# Gradio's own templates read `${}` and `{{}}`: what was written must never reach them as such.
_TEMPLATE = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def _escaped(value: Any) -> Markup:
    """What an expression of the template becomes on the page, attributes included."""
    if isinstance(value, Markup):
        return value
    return Markup(str(escape(value)).translate(_TEMPLATE))


# As Unicode's pictures of them; line breaks and tabs as what keyboards show.
_VISIBLE: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32)},
    9: "⇥",
    10: "↵",
    127: 0x2421,
}


@lru_cache(maxsize=4096)
def tried_of(tried: Tried) -> Markup:
    """What `page.js` shows of a verify: how many continuations more there were, then a line for each one.

    Lines are of three fields with tabs between: after how many tokens, 1 where it came from the text, and its own
    text. In one attribute, and made once: an answer is drawn anew many times, and its steps are looked at one by one.
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
    """A part of the page as HTML: the macro of that name, with these values; whatever was written is escaped."""
    return str(getattr(_parts, part)(*values))


def find_examples(draft: str, takes_images: bool) -> dict[str, list[Path]]:
    """Reads `held_out.jsonl` beside a draft's folder: the images of one question of each kind, by its text.

    Only conversations of one turn, and images in that folder; for a target that sees images, all but one question
    have some. No questions without the file.
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
    # Neighbouring kinds are alike
    step = math.ceil(len(seeing) / (MAX_EXAMPLES - bool(reading))) or 1
    return dict([*seeing[::step], *reading][:MAX_EXAMPLES])
