"""The images of a single prompt, which is cut into chunks between them and never within one.

The vision tower merges squares of patches, so that an image is a number of tokens in a row. A chunk gets the patches
of its own images: the target wants as many patches as the tokens of a forward stand for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PromptImage(NamedTuple):
    """An image among the tokens of a prompt. Two are equal where the same image stands at the same place."""

    first: int  # column of its first token
    end: int  # column behind its last token
    digest: bytes  # of its grid and its patches


class PromptImages:
    """Where the images of a prompt stand among its tokens.

    Args:
        inputs (mapping of `str` to `Any`): Keywords for the target's prefill. Of images they have `mm_token_type_ids`
            `[1, T]`, 1 for tokens of images, `image_grid_thw` `[N, 3]`, patches in time, height and width of each
            image, and `pixel_values` `[patches, ...]` of all images one behind the other; of text none of them. There
            are as many tokens and patches as the grids say.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.images: list[PromptImage] = []
        # Of each image, its first patch and the one behind its last.
        self.patches: list[tuple[int, int]] = []
        grids = inputs.get("image_grid_thw")
        if grids is None:
            return
        sizes: list[int] = grids.prod(dim=-1).tolist()
        is_image = inputs["mm_token_type_ids"][0] == 1
        of_images: list[int] = is_image.nonzero()[:, 0].tolist()
        per_token = sum(sizes) // len(of_images)
        first = 0
        for size in sizes:
            end = first + size
            own = of_images[first // per_token : end // per_token]
            grid = grids[len(self.images)]
            digest = _digest(grid, inputs["pixel_values"][first:end])
            self.images.append(PromptImage(own[0], own[-1] + 1, digest))
            self.patches.append((first, end))
            first = end

    def end_of_chunk(self, begin: int, end: int) -> int:
        """Returns where a chunk from a column on ends that should end at another one: never within an image.

        Before the image, if something is left of the chunk then, else behind it.
        """
        for image in self.images:
            if image.first < end < image.end:
                return image.first if image.first > begin else image.end
        return end

    def of_chunk(self, inputs: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
        """Returns the images of `inputs` whose tokens are in the columns from `begin` to before `end`, as keywords."""
        if not self.images:
            return {}
        within = [begin <= image.first and image.end <= end for image in self.images]
        numbers = [number for number, is_within in enumerate(within) if is_within]
        if not numbers:
            # A forward is not given empty tensors: it would run the vision tower over nothing.
            return {"pixel_values": None, "image_grid_thw": None}
        patches = slice(self.patches[numbers[0]][0], self.patches[numbers[-1]][1])
        grids = slice(numbers[0], numbers[-1] + 1)
        return {
            "pixel_values": inputs["pixel_values"][patches],
            "image_grid_thw": inputs["image_grid_thw"][grids],
        }


def _digest(grid: Tensor, patches: Tensor) -> bytes:
    """Returns what tells an image `[patches, ...]` with its grid `[3]` from others."""
    found = hashlib.blake2b(str(grid.tolist()).encode(), digest_size=32)
    # As bytes: numpy has no bfloat16.
    found.update(patches.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.digest()
