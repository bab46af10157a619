"""The documentation site builds without a network and a warning, and its reference has every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_hf
import dflash_hf.training

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "no_proxy": "*"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_reference_has_every_public_name(site: Path) -> None:
    html = (site / "api" / "index.html").read_text(encoding="utf-8")
    headings = set(re.findall(r'id="(dflash_hf\.[\w.]+)"', html))
    public = [f"dflash_hf.{name}" for name in dflash_hf.__all__]
    public += [f"dflash_hf.training.{name}" for name in dflash_hf.training.__all__]
    # What the public ones return, and nobody has to import.
    public += [
        f"dflash_hf.generation.request_stats.{name}" for name in ("NewTokens", "RequestStats")
    ]
    missing = [
        name
        for name in public
        if name not in headings and not name.rsplit(".", 1)[1].startswith("__")
    ]
    assert not missing, f"docs/api.md has no {missing}"


def test_pages_fetch_nothing(site: Path) -> None:
    fetched = re.compile(
        r'<(?:script|img|iframe|source)[^>]*\bsrc="(https?:)?//|<link[^>]*rel="stylesheet"[^>]*href="https?:'
    )
    asking = [
        page.name
        for page in site.rglob("*.html")
        if fetched.search(page.read_text(encoding="utf-8"))
    ]
    assert not asking, asking
