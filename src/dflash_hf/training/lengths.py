"""How many tokens a row with images has, by their headers: none is decoded to put rows of similar length together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_hf.evaluation.image_files import image_size
from dflash_hf.evaluation.prompt_files import SOURCES


class ImageTokens:
    """Tokens that a processor makes of images, told by its own `_get_num_multimodal_tokens`.

    How many tokens of the text an image's replace differs from family to family: one example is built to see it. So
    lengths are exact where that is a constant (one placeholder in Qwen's), and near elsewhere.

    Args:
        processing_class: A tokenizer or a processor.
    """

    def __init__(self, processing_class: Any) -> None:
        self._count: Any = getattr(processing_class, "_get_num_multimodal_tokens", None)
        self._replaced: float | None = None

    def expanded(self, plain: int, messages: Sequence[Mapping[str, Any]], build: Callable[[], int]) -> int:
        """Returns the number of tokens after images are expanded.

        Args:
            plain (`int`): Tokens of the text, each image a placeholder.
            messages (sequence of mappings): As processors take them.
            build (callable): Builds the example and counts; called where the headers do not say it.
        """
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        images = [block for content in contents for block in content if block["type"] == "image"]
        if not images:
            return plain
        sizes = [image_size(next(block[key] for key in SOURCES if key in block)) for block in images]
        if self._count is None or None in sizes:
            return build()
        added = sum(self._count(image_sizes=[list(size) for size in sizes if size is not None]).num_image_tokens)
        if self._replaced is None:
            whole = build()
            self._replaced = (plain + added - whole) / len(images)
            return whole
        return round(plain + added - self._replaced * len(images))


__all__ = ["ImageTokens"]
