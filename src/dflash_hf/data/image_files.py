"""Images of files: read within limits, whatever they are, or refused in one sentence; measured; named by contents.

Pillow is imported by the functions that need it: text does without.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 20 * 2**20
MAX_PIXELS = 64_000_000  # decoded, before anything is shrunk: 192 MB
# A conversation's larger images are shrunk to this: what it holds stays bounded.
KEPT_PIXELS = 4_000_000
# No others: some of Pillow's readers start programs or follow references.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# How files of a kind begin -> how they are called: whoever sends one to a server says its kind by its name.
KINDS = {
    b"\x89PNG": ".png",
    b"\xff\xd8": ".jpg",
    b"RIFF": ".webp",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}
ORIENTATION = 0x0112  # of Exif; from 5 on width and height are swapped
# What Pillow raises at an image that is none or is damaged, be it only in its tags (Exif): Transformers' and Datasets'
# readers refuse such an image too.
DAMAGED = (OSError, SyntaxError, EOFError, ValueError, IndexError, TypeError, struct.error)
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class ImageError(ValueError):
    """Raised where an image, the file at `path` if it is one of several, is the reason for a refusal."""

    def __init__(self, sentence: str, path: Path | None = None) -> None:
        super().__init__(sentence)
        self.path = path


def has_pillow() -> bool:
    """Whether there is Pillow, without which neither images nor their processors load."""
    return find_spec("PIL") is not None


def check_pillow() -> None:
    """Raises `ValueError` if there is no Pillow."""
    if not has_pillow():
        raise ValueError(
            "expected Pillow for images, got no module PIL; pip install 'dflash-hf[vlm]'"
        )


def read_image(
    path: Path, data: bytes | None = None, max_pixels: int = KEPT_PIXELS
) -> tuple[Any, int]:
    """Reads an image: its first frame, upright, transparency on white, grey levels of 16 bits scaled to 8.

    With `data` that is what would be in the file, and `path` only what to call it. An image of more than `max_pixels`
    is shrunk to that.

    Returns:
        `tuple[PIL.Image.Image, int]`: The frame, in RGB, and how many frames there are.

    Raises:
        ImageError: If it is too large, in bytes or (by its header, before anything is decoded) in pixels, or is no
            image that can be read.
        ValueError: If there is no Pillow.
    """
    check_pillow()
    from PIL import Image

    name = path.name
    size = path.stat().st_size if data is None else len(data)
    if size > MAX_FILE_BYTES:
        limit = f"{MAX_FILE_BYTES // 2**20} MB"
        got = f"{size / 2**20:.1f} MB"
        raise ImageError(
            f"expected an image of at most {limit}, got {name} with {got}; shrink it", path
        )
    try:
        with Image.open(path if data is None else io.BytesIO(data), formats=FORMATS) as file:
            if file.width * file.height > MAX_PIXELS:
                name += (
                    f" with {file.width} × {file.height} ({file.width * file.height / 10**6:.0f})"
                )
                raise Image.DecompressionBombError
            num_frames = int(getattr(file, "n_frames", 1))
            file.seek(0)
            image = _of_at_most(_upright_rgb(file), max_pixels)
    except Image.DecompressionBombError as error:  # Pillow's own comes before it says a size
        limit = f"{MAX_PIXELS // 10**6} megapixels"
        raise ImageError(
            f"expected an image of at most {limit}, got {name}; shrink it", path
        ) from error
    except DAMAGED as error:
        kinds = ", ".join(FORMATS)
        advice = "choose another file"
        sentence = f"expected an image ({kinds}), got {name}, which is none or is damaged; {advice}"
        raise ImageError(sentence, path) from error
    return image, num_frames


def shrunk_image(path: Path, data: bytes | None, max_pixels: int) -> bytes:
    """Returns an image of at most so many pixels, as PNG; arguments and errors as of [`read_image`]."""
    image, _ = read_image(path, data, max_pixels)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def content_name(data: bytes) -> str:
    """Returns a file name that says what is in it: a hash, and the kind of image by how it begins."""
    kind = next((kind for begin, kind in KINDS.items() if data.startswith(begin)), "")
    return hashlib.sha256(data).hexdigest()[:32] + kind


def store_image(data: bytes, folder: Path) -> Path:
    """Writes an image to a file of a folder, whole or not at all, named by its contents, and returns the file."""
    path = folder / content_name(data)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{path.name}.{os.getpid()}"
        try:
            scratch.write_bytes(data)
            os.replace(scratch, path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
    return path


def image_size(source: Any) -> tuple[int, int] | None:
    """Returns height and width of an image as it is shown, by its header: no pixel is decoded.

    Of a PIL image, an array, a file's path or its bytes as base64; `None` where that does not say it (an address).
    """
    shape = getattr(source, "shape", None)
    if isinstance(shape, tuple) and len(shape) in (2, 3):
        sides = shape[1:] if len(shape) == 3 and shape[0] in (1, 3, 4) else shape
        return int(sides[0]), int(sides[1])
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return None
    try:
        if isinstance(source, str) and not os.path.isfile(source):
            source = io.BytesIO(base64.b64decode(source.rpartition("base64,")[2], validate=True))
        with (
            contextlib.nullcontext(source)
            if isinstance(source, Image.Image)
            else Image.open(source) as file
        ):
            width, height = file.size
            # Pillow says a TIFF's sides as they are shown
            is_turned = file.getexif().get(ORIENTATION, 1) >= 5 and file.format != "TIFF"
    except (*DAMAGED, AttributeError, Image.DecompressionBombError):
        return None
    return (width, height) if is_turned else (height, width)


def _upright_rgb(file: Any) -> Any:
    """The pixels of an image file: RGB, upright, on white."""
    from PIL import Image, ImageOps

    image: Any = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        low, high = (0.0, 65535.0) if image.mode.startswith("I") else map(float, image.getextrema())
        scale = 255.0 / (high - low or 1.0)
        image = image.convert("F").point(lambda value: value * scale - low * scale).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _of_at_most(image: Any, max_pixels: int) -> Any:
    """An image of the same shape with at most so many pixels: itself, or a smaller one."""
    factor = (max_pixels / (image.width * image.height)) ** 0.5
    if factor >= 1:
        return image
    width = max(1, int(image.width * factor))
    height = max(1, int(image.height * factor))
    return image.resize((width, height))
