"""This module reads images within limits, measures and stores them, and refuses other files with a sentence.

Only the functions that need Pillow import it, because text needs no Pillow.
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
MAX_PIXELS = 64_000_000  # before shrinking. The decoded image takes 192 MB
# Larger images of a conversation are shrunk to this number of pixels, so that its memory is bounded.
KEPT_PIXELS = 4_000_000
# Other formats are refused, because some of Pillow's readers start programs or follow references.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# First bytes of a file -> suffix of its name. Clients tell a server the format of an image by this suffix.
KINDS = {
    b"\x89PNG": ".png",
    b"\xff\xd8": ".jpg",
    b"RIFF": ".webp",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}
ORIENTATION = 0x0112  # a tag of Exif. From the value 5 on, width and height are swapped
# Pillow raises these errors for a file that is no image or is damaged, even if only its Exif tags are damaged. The
# readers of Transformers and Datasets refuse such an image too.
DAMAGED = (OSError, SyntaxError, EOFError, ValueError, IndexError, TypeError, struct.error)
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class ImageError(ValueError):
    """Raised if an image is refused. If it is one of several files, `path` is its file."""

    def __init__(self, sentence: str, path: Path | None = None) -> None:
        super().__init__(sentence)
        self.path = path


def has_pillow() -> bool:
    """Says whether Pillow is installed. Without it, neither images nor their processors can be loaded."""
    return find_spec("PIL") is not None


def is_of_image(error: Exception) -> bool:
    """Says whether Pillow raises such an error for a damaged image, or for one with far too many pixels.

    The error must come from code that has read images, because other code raises some of these errors too.
    """
    from PIL import Image

    return isinstance(error, (*DAMAGED, Image.DecompressionBombError))


def check_pillow() -> None:
    """Raises `ValueError` if Pillow is not installed."""
    if not has_pillow():
        raise ValueError(
            "expected Pillow for images, got no module PIL; pip install 'dflash-hf[vlm]'"
        )


def read_image(
    path: Path, data: bytes | None = None, max_pixels: int = KEPT_PIXELS
) -> tuple[Any, int]:
    """Reads the first frame of an image, upright and on white. Grey levels of 16 bits are scaled to 8 bits.

    Args:
        path (`Path`): The file of the image.
        data (`bytes`, *optional*): The bytes of the image. If they are given, `path` is only its name in messages.
        max_pixels (`int`): An image with more pixels is shrunk to this number.

    Returns:
        `tuple[PIL.Image.Image, int]`: The frame in RGB, and the number of frames.

    Raises:
        ImageError: If the image has too many bytes or pixels, or cannot be read. The pixels are checked by the header,
            before anything is decoded.
        ValueError: If Pillow is not installed.
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
    """Returns an image of at most `max_pixels` pixels as PNG. Arguments and errors are those of [`read_image`]."""
    image, _ = read_image(path, data, max_pixels)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def content_name(data: bytes) -> str:
    """Returns a file name for an image: a hash of its bytes, and the suffix of its format."""
    kind = next((kind for begin, kind in KINDS.items() if data.startswith(begin)), "")
    return hashlib.sha256(data).hexdigest()[:32] + kind


def store_image(data: bytes, folder: Path) -> Path:
    """Writes an image to a file in a folder, completely or not at all. The file's name is [`content_name`].

    Returns the path of the file.
    """
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
    """Returns the height and width of an image in its upright position, from its header. No pixel is decoded.

    The source is a PIL image, an array, the path of a file, or the bytes of a file as base64. The result is `None` for
    other sources, such as an address, and for files that cannot be read.
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
            # For a TIFF, Pillow returns width and height after the rotation.
            is_turned = file.getexif().get(ORIENTATION, 1) >= 5 and file.format != "TIFF"
    except (*DAMAGED, AttributeError, Image.DecompressionBombError):
        return None
    return (width, height) if is_turned else (height, width)


def _upright_rgb(file: Any) -> Any:
    """Returns the pixels of an image file in RGB, upright and on white."""
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
    """Returns an image, or a smaller copy with the same aspect ratio if it has more than `max_pixels` pixels."""
    factor = (max_pixels / (image.width * image.height)) ** 0.5
    if factor >= 1:
        return image
    width = max(1, int(image.width * factor))
    height = max(1, int(image.height * factor))
    return image.resize((width, height))
