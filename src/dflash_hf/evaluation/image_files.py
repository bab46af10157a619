"""Images of files: read within limits, whatever they are, or refused in one sentence.

Pillow is imported by the functions that need it: text does without.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 20 * 2**20
MAX_PIXELS = 64_000_000  # decoded, before anything is shrunk: 192 MB
KEPT_PIXELS = 4_000_000  # larger ones are shrunk to this: what a conversation holds stays bounded
THUMBNAIL = (320, 320)
# No others: some of Pillow's readers start programs or follow references.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatImage:
    """An image of a conversation."""

    name: str  # of its file
    image: Any  # `PIL.Image.Image`: RGB, upright, at most `KEPT_PIXELS`
    thumbnail: str  # a small copy as a `data:` address, for the page
    note: str = ""  # what was done to it that a person should know


class ImageError(ValueError):
    """Raised where an image, the file at `path` if it is one of several, is the reason for a refusal."""

    def __init__(self, sentence: str, path: Path | None = None) -> None:
        super().__init__(sentence)
        self.path = path


def read_image(path: Path) -> ChatImage:
    """Reads an image: its first frame, upright, transparency on white, grey levels of 16 bits scaled to 8.

    Raises `ImageError` if it is too large, in bytes or (by its header, before anything is decoded) in pixels, or is
    no image that can be read; `ValueError` if there is no Pillow.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ValueError("expected Pillow for images, got no module PIL; pip install 'dflash-hf[vlm]'") from error

    name, size = path.name, path.stat().st_size
    if size > MAX_FILE_BYTES:
        limit, got = f"{MAX_FILE_BYTES // 2**20} MB", f"{size / 2**20:.1f} MB"
        raise ImageError(f"expected an image of at most {limit}, got {name} with {got}; shrink it", path)
    try:
        with Image.open(path, formats=FORMATS) as file:
            if file.width * file.height > MAX_PIXELS:
                name += f" with {file.width} × {file.height} ({file.width * file.height / 10**6:.0f})"
                raise Image.DecompressionBombError
            frames = int(getattr(file, "n_frames", 1))
            file.seek(0)
            image = _upright_rgb(file)
    except Image.DecompressionBombError as error:  # Pillow's own comes before it says a size
        limit = f"{MAX_PIXELS // 10**6} megapixels"
        raise ImageError(f"expected an image of at most {limit}, got {name}; shrink it", path) from error
    except (OSError, SyntaxError, EOFError, ValueError) as error:
        kinds, advice = ", ".join(FORMATS), "choose another file"
        sentence = f"expected an image ({kinds}), got {name}, which is none or is damaged; {advice}"
        raise ImageError(sentence, path) from error
    small, buffer = image.copy(), io.BytesIO()
    small.thumbnail(THUMBNAIL)
    small.save(buffer, "JPEG", quality=85)
    thumbnail = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    note = f"first of {frames} frames" if frames > 1 else ""
    return ChatImage(name=path.name, image=image, thumbnail=thumbnail, note=note)


def _upright_rgb(file: Any) -> Any:
    """The pixels of an image file as a conversation keeps them."""
    from PIL import Image, ImageOps

    image: Any = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        low, high = (0.0, 65535.0) if image.mode.startswith("I") else map(float, image.getextrema())
        scale = 255.0 / (high - low or 1.0)
        image = image.convert("F").point(lambda value: value * scale - low * scale).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    factor = (KEPT_PIXELS / (image.width * image.height)) ** 0.5
    if factor < 1:
        image = image.resize((max(1, int(image.width * factor)), max(1, int(image.height * factor))))
    return image
