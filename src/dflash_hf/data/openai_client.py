"""What is sent to a server with an OpenAI-style interface: messages whose images are data URLs."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from dflash_hf.errors import require

TIMEOUT = httpx.Timeout(10.0, read=600.0)  # seconds; the second is between two pieces of an answer


def first_model(client: httpx.Client) -> str:
    """Returns the first model that a server names; raises `ValueError` if none, and what httpx raises."""
    response = client.get("/v1/models")
    response.raise_for_status()
    models = response.json().get("data") or []
    require(
        bool(models), f"a model at {client.base_url}/v1/models", models, "start the server with one"
    )
    return str(models[0]["id"])


def sent_content(content: Any) -> Any:
    """Returns a message's content with the images of its blocks (`path` or `image`) as data URLs."""
    if isinstance(content, str):
        return content
    return [_sent_image(part) if part["type"] == "image" else part for part in content]


def _sent_image(part: Mapping[str, Any]) -> dict[str, Any]:
    place = str(part.get("path") or part.get("url") or part["image"])
    if not place.startswith(("http://", "https://", "data:")):
        path = Path(place)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        place = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": "image_url", "image_url": {"url": place}}
