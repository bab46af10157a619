"""This module reads the images of a conversation, for the target and for the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_hf.data.image_files import read_image

THUMBNAIL = (320, 320)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatImage:
    """An image of a conversation."""

    name: str  # of its file
    image: Any  # a `PIL.Image.Image`: RGB, upright, of at most `KEPT_PIXELS`
    thumbnail: str  # a small copy as a `data:` address, for the page
    note: str = ""  # a change of the image that a person should know


def chat_image(path: Path) -> ChatImage:
    """Reads an image of a conversation. Raises the errors of [`read_image`]."""
    image, num_frames = read_image(path)
    small = image.copy()
    small.thumbnail(THUMBNAIL)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    thumbnail = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    note = f"first of {num_frames} frames" if num_frames > 1 else ""
    return ChatImage(name=path.name, image=image, thumbnail=thumbnail, note=note)
