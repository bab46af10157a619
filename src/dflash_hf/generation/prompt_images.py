"""This module finds the images of a single prompt. A prefill cuts the prompt into chunks, but never within an image.

The vision tower merges squares of patches, so an image is a number of consecutive tokens. A chunk gets only the
patches of its own images, because the target expects exactly the patches of the image tokens in a forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PromptImage(NamedTuple):
    """An image among the tokens of a prompt. Two are equal if the same image is at the same place."""

    first: int  # column of the image's first token
    end: int  # column after the image's last token
    digest: bytes  # hash of the image's grid and patches


class PromptImages:
    """The places of a prompt's images among its tokens.

    Args:
        inputs (mapping of `str` to `Any`): Keywords for the target's prefill. A prompt with images has three of them:
            `mm_token_type_ids` `[1, T]`, which is 1 for tokens of images; `image_grid_thw` `[N, 3]`, the patches in
            time, height and width of each image; and `pixel_values` `[patches, ...]` of all images, one after the
            other. The numbers of tokens and patches must agree with the grids. A prompt of text has none of these.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.images: list[PromptImage] = []
        # For each image, its first patch and the patch after its last.
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
        """Returns the end of a chunk that begins at column `begin` and should end at `end`, but never within an image.

        The chunk ends before the image if it then has a token, and otherwise after the image.
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
            # With empty tensors, a forward would run the vision tower over nothing.
            return {"pixel_values": None, "image_grid_thw": None}
        patches = slice(self.patches[numbers[0]][0], self.patches[numbers[-1]][1])
        grids = slice(numbers[0], numbers[-1] + 1)
        return {
            "pixel_values": inputs["pixel_values"][patches],
            "image_grid_thw": inputs["image_grid_thw"][grids],
        }


def _digest(grid: Tensor, patches: Tensor) -> bytes:
    """Returns a hash that identifies an image `[patches, ...]` with its grid `[3]`."""
    found = hashlib.blake2b(str(grid.tolist()).encode(), digest_size=32)
    # The patches are viewed as bytes, because numpy has no bfloat16.
    found.update(patches.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.digest()
