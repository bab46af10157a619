"""This module writes sets of questions to files for machines without a network: JSONL, with images beside it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_hf.bench.questions import Question
from dflash_hf.bench.sets import load_questions
from dflash_hf.data.image_files import content_name, store_image
from dflash_hf.data.row_files import write_whole
from dflash_hf.errors import require

IMAGES = "images"


def prepare(
    names: Sequence[str],
    out: Path,
    *,
    data_dir: Path | None = None,
    num_prompts: int | None = None,
    seed: int = 0,
    template: str | None = None,
) -> list[Path]:
    """Writes `OUT/NAME.jsonl` for each set, and images to `OUT/images`. `--data-dir OUT` reads these files.

    Args:
        names (sequence of `str`): Names of sets. [`dflash_hf.bench.sets.load_questions`] explains them and the
            keywords.
        out (`Path`): The folder. It is created if it does not exist.

    Raises:
        ValueError: If a set cannot be read, if two sets have the same name, or if a file of that name exists with
            other content. Nothing is written then.
    """
    asked: dict[str, Any] = {
        "data_dir": data_dir,
        "num_prompts": num_prompts,
        "seed": seed,
        "template": template,
    }
    texts: dict[Path, str] = {}
    images: list[Path] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            questions = load_questions(name, **asked, image_dir=Path(scratch))
            path = out / f"{questions[0].dataset.replace('/', '--').replace(':', '--')}.jsonl"
            require(
                path not in texts, f"sets of different names for {out}", path.name, "rename one"
            )
            texts[path] = "".join(f"{json.dumps(_portable(question))}\n" for question in questions)
            images += [Path(image) for question in questions for image in question.image_files]
        for path, text in texts.items():
            is_free = not path.exists() or path.read_text(encoding="utf-8") == text
            require(
                is_free,
                f"no {path.name} with other questions in {out}",
                str(path),
                "remove it or name a new folder",
            )
        for image in images:
            store_image(image.read_bytes(), out / IMAGES)
    return [write_whole(path, text) for path, text in texts.items()]


def _portable(question: Question) -> dict[str, object]:
    """Returns the question's line, with images named by their contents in the folder beside the file."""
    row = question.to_dict()
    if question.images:
        row["images"] = [_stored_name(path) for path in question.images]
    if question.history:
        row["history"] = [
            {**message, "content": _portable_content(message["content"])}
            for message in question.history
        ]
    return row


def _portable_content(content: Any) -> Any:
    """Returns a message's content with the names of the copies of image files."""
    if isinstance(content, str):
        return content
    return [
        {**part, "path": _stored_name(part["path"])} if part.get("path") else part
        for part in content
    ]


def _stored_name(path: str) -> str:
    """Returns the path of an image's copy, relative to the folder of sets."""
    return f"{IMAGES}/{content_name(Path(path).read_bytes())}"
