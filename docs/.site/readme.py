"""The site's first page is the README, with its links as they are seen from docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds `index.md`."""
    files.append(
        File.generated(
            config, "index.md", content=seen_from_docs((ROOT / "README.md").read_text("utf-8"))
        )
    )
    return files


def seen_from_docs(text: str) -> str:
    """Returns a text whose links into docs/ are relative to it; what lies elsewhere in the repository is its name."""

    def moved(link: re.Match[str]) -> str:
        return f"]({link[1].removeprefix('docs/')})"

    outside = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#|docs/)[^)\s]+\)")
    return LINK.sub(moved, outside.sub(r"\1", text))
