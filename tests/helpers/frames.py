"""A processor that takes videos where torchvision is missing: files of frames, of which every second one is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature

from dflash_hf.processing_qwen3_vl import Qwen3VLProcessor
from helpers.processors import picture, published_folder

FRAMES_A_SECOND = 4


class FramesProcessor(Qwen3VLProcessor):
    """Writes videos into texts and inputs as Transformers' `Qwen3VLProcessor` does, with pixels of its own."""

    def __call__(
        self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any
    ) -> BatchFeature:
        if videos is None:
            return super().__call__(images=images, text=text, **kwargs)
        texts = [text] if isinstance(text, str) else list(text)
        inputs: dict[str, Any] = {}
        replaced = {self.image_token: [], self.video_token: []}
        if images is not None:
            pictures = self.image_processor(_flat(images), return_tensors="pt")
            inputs |= pictures
            for grid in pictures["image_grid_thw"]:
                replaced[self.image_token].append(self.image_token * (int(grid.prod()) // 4))
        pixels: list[torch.Tensor] = []
        grids: list[torch.Tensor] = []
        for video in _flat(videos):
            frames = [Image.fromarray(frame) for frame in np.load(video)[::2]]
            seen = self.image_processor(frames, return_tensors="pt")
            pixels.append(seen["pixel_values"])
            grid = seen["image_grid_thw"][0]
            grids.append(torch.tensor([len(frames), *grid[1:].tolist()]))
            places = self.video_token * (int(grid.prod()) // 4)
            times = [(2 * at + 0.5) / FRAMES_A_SECOND for at in range(len(frames))]
            replaced[self.video_token].append(
                "".join(
                    f"<{time:.1f} seconds>{self.vision_start_token}{places}{self.vision_end_token}"
                    for time in times
                )
            )
        inputs |= {
            "pixel_values_videos": torch.cat(pixels),
            "video_grid_thw": torch.stack(grids),
        }
        for token, texts_of_kind in replaced.items():
            remaining = iter(texts_of_kind)
            texts = [_filled(each, token, remaining) for each in texts]
        encoded = self.tokenizer(texts, return_tensors="pt", add_special_tokens=False)
        ids = encoded["input_ids"]
        kinds = (ids == self.image_token_id) + 2 * (ids == self.video_token_id).long()
        return BatchFeature({**encoded, "mm_token_type_ids": kinds, **inputs})


def frames_processor(folder: Path) -> Any:
    """Builds the processor from the files of a published Qwen3-VL."""
    return FramesProcessor.from_pretrained(published_folder(folder))


def clip(path: Path, num_frames: int, width: int = 16, height: int = 16) -> Path:
    """Writes a file of frames that differ, and returns it."""
    frames = [np.asarray(picture(width, height, seed)) for seed in range(num_frames)]
    np.save(path, np.stack(frames))
    return path


def _flat(nested: Any) -> list[Any]:
    """Returns what is in lists of lists."""
    if not isinstance(nested, (list, tuple)):
        return [nested]
    return [leaf for part in nested for leaf in _flat(part)]


def _filled(text: str, token: str, replaced: Any) -> str:
    """Returns a text in which each token of a kind is replaced by the next text."""
    first, *others = text.split(token)
    return first + "".join(next(replaced) + other for other in others)
