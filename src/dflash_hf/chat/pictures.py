"""Pictures that a person uploads: read within limits, whatever they are, or refused in one sentence.

Pillow is imported by the functions that need it: a chat about texts does without.
"""

from __future__ import annotations

import base64
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 20 * 2**20
MAX_PIXELS = 64_000_000  # decoded, before anything is shrunk: 192 MB
KEPT_PIXELS = 4_000_000  # larger ones are shrunk to this: what a conversation holds stays bounded
THUMBNAIL = 320
# No others: some of Pillow's readers start programs or follow references.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A picture of a conversation.

    Args:
        name (`str`): Name of the file that it came from.
        image (`PIL.Image.Image`): RGB, upright, at most `KEPT_PIXELS`.
        thumbnail (`str`): A small copy as a `data:` address, for the page.
        note (`str`): What was done to it that a person should know; empty mostly.
    """

    name: str
    image: Any
    thumbnail: str
    note: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return 3 * self.image.width * self.image.height + len(self.thumbnail)


class PictureError(ValueError):
    """Raised where a picture is the reason for a refusal, not the text beside it.

    Args:
        sentence (`str`): What a person is told.
        path (`Path`, *optional*): The file, where it is one of them.
    """

    def __init__(self, sentence: str, path: Path | None = None) -> None:
        super().__init__(sentence)
        self.path = path


def read_picture(path: Path, name: str | None = None) -> Picture:
    """Reads a picture: its first frame, upright, transparency on white, grey levels of 16 bits scaled to 8.

    Args:
        path (`Path`): The file.
        name (`str`, *optional*): What messages call it; default the file's name.

    Raises:
        PictureError: If it is too large, in bytes or (by its header, before anything is decoded) in pixels, or is no
            picture that can be read.
        ValueError: If there is no Pillow.
    """
    try:
        return _read(path, name or path.name)
    except ModuleNotFoundError as error:
        raise ValueError("expected Pillow for pictures, got no module PIL; pip install 'dflash-hf[vlm]'") from error
    except ValueError as error:
        raise PictureError(str(error), path) from error


def _read(path: Path, name: str) -> Picture:
    from PIL import Image, UnidentifiedImageError

    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(
            f"expected a picture of at most {MAX_FILE_BYTES // 2**20} MB, got {name} with {size / 2**20:.1f} MB; "
            "shrink it"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            with Image.open(path, formats=FORMATS) as file:
                _check_pixels(name, *file.size)
                frames = int(getattr(file, "n_frames", 1))
                file.seek(0)
                image = _upright_rgb(file)
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"expected a picture of at most {MAX_PIXELS // 10**6} megapixels, got {name}, which says it "
            "has far more; shrink it"
        ) from error
    except UnidentifiedImageError as error:
        raise ValueError(
            f"expected a picture ({', '.join(FORMATS)}), got {name}, which is none or is damaged; choose another file"
        ) from error
    except (OSError, SyntaxError, EOFError) as error:
        raise ValueError(f"expected a whole picture, got {name}, which is damaged; choose another file") from error
    note = f"first of {frames} frames" if frames > 1 else ""
    return Picture(name=name, image=image, thumbnail=_thumbnail(image), note=note)


def _check_pixels(name: str, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"expected a picture of at most {MAX_PIXELS // 10**6} megapixels, got {name} with {width} × {height} "
            f"({width * height / 10**6:.0f}); shrink it"
        )


def _upright_rgb(file: Any) -> Any:
    from PIL import Image, ImageOps

    image: Any = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        low, high = (0.0, 65535.0) if image.mode.startswith("I") else image.getextrema()
        scale = 255.0 / (float(high) - float(low) or 1.0)
        image = image.convert("F").point(lambda value: value * scale - float(low) * scale).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    if image.width * image.height > KEPT_PIXELS:
        factor = (KEPT_PIXELS / (image.width * image.height)) ** 0.5
        image = image.resize((max(1, int(image.width * factor)), max(1, int(image.height * factor))))
    return image


def _thumbnail(image: Any) -> str:
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


__all__ = ["EXTENSIONS", "MAX_FILE_BYTES", "MAX_PIXELS", "Picture", "PictureError", "read_picture"]
