"""Images of questions: checked, and written to files where they are none yet."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflash_hf.bench.questions import Question
from dflash_hf.evaluation.image_files import ImageError, content_name, read_image
from dflash_hf.evaluation.rows import ImageSource


def store_images(pairs: Sequence[tuple[Question, Sequence[ImageSource]]], folder: Path | None) -> list[Question]:
    """Returns questions with the paths of their images, those that are bytes written to files in a folder.

    Args:
        pairs (sequence): Questions, and where their images are.
        folder (`Path`, *optional*): Where to; a folder in the Hub's cache by default. Only made if there is need.

    Raises:
        ValueError: If one cannot be read; then nothing is written.
    """
    if folder is None:
        from huggingface_hub.constants import HF_HOME

        folder = Path(HF_HOME) / "dflash-hf" / "images"
    questions: list[Question] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for question, sources in pairs:
            files = [source if isinstance(source, Path) else _written(source, scratch) for source in sources]
            for file in files:
                _check(file, question)
            kept = [folder.resolve() / file.name if file.parent == scratch else file for file in files]
            questions.append(replace(question, images=tuple(map(str, kept))))
        for file in scratch.iterdir():
            place(file, folder)
    return questions


def place(file: Path, folder: Path) -> None:
    """Copies a file into a folder, whole or not at all; one of its name there is the same."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / file.name).exists():
        scratch = folder / f".{file.name}.{os.getpid()}"
        shutil.copyfile(file, scratch)
        os.replace(scratch, folder / file.name)


def _written(data: bytes, folder: Path) -> Path:
    path = folder / content_name(data)
    path.write_bytes(data)
    return path


def _check(file: Path, question: Question) -> None:
    try:
        read_image(file)
    except ImageError as error:
        raise ValueError(
            f"expected an image that can be read in question {question.question_id!r} of {question.dataset}, got one "
            f"that cannot ({error}); fetch the set again, or leave the question out"
        ) from error


__all__ = ["place", "store_images"]
