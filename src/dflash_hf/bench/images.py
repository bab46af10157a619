"""Images of questions: checked, and written to files where they are none yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflash_hf.bench.questions import Question
from dflash_hf.evaluation.image_files import ImageError, content_name, read_image, store_image
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
    for question, sources in pairs:
        for source in sources:
            _check(source, question)
    questions: list[Question] = []
    for question, sources in pairs:
        files = [source if isinstance(source, Path) else store_image(source, folder.resolve()) for source in sources]
        questions.append(replace(question, images=tuple(map(str, files))))
    return questions


def _check(source: ImageSource, question: Question) -> None:
    try:
        if isinstance(source, Path):
            read_image(source)
        else:
            read_image(Path(content_name(source)), source)
    except ImageError as error:
        raise ValueError(
            f"expected an image that can be read in question {question.question_id!r} of {question.dataset}, got one "
            f"that cannot ({error}); fetch the set again, or leave the question out"
        ) from error


__all__ = ["store_images"]
