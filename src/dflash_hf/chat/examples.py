"""Questions to begin with: the first held-out prompts of each kind that lie beside a pair, pictures included."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_hf.evaluation.prompt_files import as_messages, prompt_of, read_rows

MAX_EXAMPLES = 4
MAX_BYTES = 64 * 2**10  # of a picture: they are part of the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question to click on.

    Args:
        text (`str`): The question.
        pictures (`tuple[str, ...]`): PNG pictures as `data:` addresses.
    """

    text: str
    pictures: tuple[str, ...] = ()


def find_examples(target: str, takes_pictures: bool) -> list[Example]:
    """Reads `held_out.jsonl` beside a target's folder: one example of each of the first kinds, none without the file.

    Only conversations of one turn; for a target that sees pictures, all but one have some.
    """
    path = Path(target).parent / "held_out.jsonl"
    if not Path(target).is_dir() or not path.is_file():
        return []
    found: dict[str, Example] = {}
    for number, row in read_rows(path):
        prompt = prompt_of(row, f"line {number} of {path}", Path())
        if len(messages := as_messages(prompt)) == 1 and (example := _example(messages[0]["content"], path.parent)):
            found.setdefault(str(row.get("kind")), example)
    with_pictures = [example for example in found.values() if example.pictures and takes_pictures]
    without = [example for example in found.values() if not example.pictures]
    return [*_spread(with_pictures, MAX_EXAMPLES - bool(without)), *without][:MAX_EXAMPLES]


def _spread(examples: list[Example], number: int) -> list[Example]:
    """So many of them, from the first to the last: neighbouring kinds are alike."""
    if len(examples) <= number:
        return examples
    return [examples[round(index * (len(examples) - 1) / (number - 1))] for index in range(number)]


def _example(content: Any, folder: Path) -> Example | None:
    """One message as an example, if its pictures are small files in the pair's folder."""
    if isinstance(content, str):
        return Example(text=content)
    files = [folder / str(part.get("path") or part.get("image")) for part in content if part["type"] == "image"]
    inside = all(file.resolve().is_relative_to(folder.resolve()) and file.is_file() for file in files)
    if not inside or any(file.suffix != ".png" or file.stat().st_size > MAX_BYTES for file in files):
        return None
    pictures = tuple("data:image/png;base64," + base64.b64encode(file.read_bytes()).decode() for file in files)
    return Example(text=" ".join(part["text"] for part in content if part["type"] == "text"), pictures=pictures)


__all__ = ["Example", "find_examples"]
