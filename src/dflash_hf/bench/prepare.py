"""Sets of questions as files for machines that have no network: JSONL, with images beside it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflash_hf.bench.images import place
from dflash_hf.bench.questions import Question
from dflash_hf.bench.sets import load_questions
from dflash_hf.errors import require
from dflash_hf.evaluation.image_files import content_name

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
    """Writes `OUT/NAME.jsonl` for each set, and images to `OUT/images`: what `--data-dir OUT` reads.

    Args:
        names (sequence of `str`): As [`dflash_hf.bench.sets.load_questions`] takes them.
        out (`Path`): Folder; made where there is none.
        data_dir, num_prompts, seed, template: As there.

    Returns:
        `list[Path]`: The files, in the order of the names.

    Raises:
        ValueError: If a set cannot be read, two have the same name, or a file of that name is there with something
            else in it. Nothing is written then.
    """
    with tempfile.TemporaryDirectory() as scratch:
        texts: dict[Path, str] = {}
        images: dict[str, Path] = {}
        for name in names:
            questions = load_questions(
                name,
                data_dir=data_dir,
                num_prompts=num_prompts,
                seed=seed,
                template=template,
                image_dir=Path(scratch) / IMAGES,
            )
            path = out / f"{questions[0].dataset.replace('/', '--').replace(':', '--')}.jsonl"
            require(path not in texts, f"sets of different names for {out}", path.name, "rename one")
            texts[path] = "".join(f"{json.dumps(_portable(question, images))}\n" for question in questions)
        for path, text in texts.items():
            is_free = not path.exists() or path.read_text(encoding="utf-8") == text
            require(
                is_free, f"no {path.name} with other questions in {out}", str(path), "remove it or name a new folder"
            )
        for name, image in images.items():
            named = Path(scratch) / name
            if image != named:
                named.write_bytes(image.read_bytes())
            place(named, out / IMAGES)
        out.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            unfinished = path.with_name(f".{path.name}.tmp")
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
    return list(texts)


def _portable(question: Question, images: dict[str, Path]) -> dict[str, object]:
    """The question's line, its images named by their contents in the folder beside it."""
    row = question.to_dict()
    names = [content_name(Path(path).read_bytes()) for path in question.images]
    images.update(zip(names, map(Path, question.images), strict=True))
    if names:
        row["images"] = [f"{IMAGES}/{name}" for name in names]
    return row


__all__ = ["prepare"]
