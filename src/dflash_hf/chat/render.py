"""The page's HTML: the parts that `page.html` has macros for, and the questions to begin with that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dflash_hf.chat.image_files import data_url
from dflash_hf.evaluation.prompt_files import as_messages, prompt_of, read_rows, text_of

MAX_EXAMPLES = 4
MAX_BYTES = 64 * 2**10  # of an example's image: they are part of the page
# Gradio's own templates read `${}` and `{{}}`: what was written must never reach them as such.
_TEMPLATE = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def _escaped(value: Any) -> Markup:
    """What an expression of the template becomes on the page, attributes included."""
    return value if isinstance(value, Markup) else Markup(str(escape(value)).translate(_TEMPLATE))


_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_escaped,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_parts: Any = _environment.get_template("page.html", globals={"data_url": data_url}).module


def render(part: str, *values: object) -> str:
    """A part of the page as HTML: the macro of that name, with these values; whatever was written is escaped."""
    return str(getattr(_parts, part)(*values))


def find_examples(target: str, takes_images: bool) -> dict[str, list[Path]]:
    """Reads `held_out.jsonl` beside a target's folder: one question of each of the first kinds, none without the file.

    Only conversations of one turn, and small PNG images in that folder; for a target that sees images, all but one
    question have some.

    Returns:
        `dict[str, list[Path]]`: The images of each question, by its text.
    """
    path = Path(target).parent / "held_out.jsonl"
    found: dict[str, tuple[str, list[Path]]] = {}
    for number, row in read_rows(path) if Path(target).is_dir() and path.is_file() else []:
        prompt = prompt_of(row, f"line {number} of {path}", path.parent)
        [message, *others] = as_messages(prompt)
        parts: Any = [] if isinstance(message["content"], str) else message["content"]
        files = [Path(str(part.get("path"))) for part in parts if part["type"] == "image"]
        ours = [file for file in files if file.resolve().is_relative_to(path.parent.resolve()) and file.is_file()]
        small = [file for file in ours if file.suffix == ".png" and file.stat().st_size <= MAX_BYTES]
        if not others and small == files:
            found.setdefault(str(row.get("kind")), (text_of(prompt), files))
    seeing = [example for example in found.values() if example[1] and takes_images]
    reading = [example for example in found.values() if not example[1]]
    if len(seeing) > (number := MAX_EXAMPLES - bool(reading)):  # neighbouring kinds are alike
        seeing = [seeing[round(index * (len(seeing) - 1) / (number - 1))] for index in range(number)]
    return dict([*seeing, *reading][:MAX_EXAMPLES])


__all__ = ["find_examples", "render"]
