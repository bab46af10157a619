"""The folder of the Hugging Face Space: its header, what it installs, and the file that it starts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SPACE = ROOT / "demos" / "space"
# What the Hub takes as colours of a card, by its reference of a Space's configuration
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
MAX_DESCRIPTION = 60  # characters


def header() -> dict[str, Any]:
    """The YAML in front of the README."""
    text = (SPACE / "README.md").read_text(encoding="utf-8")
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert found
    return yaml.safe_load(found[1])


def project() -> dict[str, Any]:
    """The `project` table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_header_says_what_the_hub_needs() -> None:
    said = header()
    assert said["sdk"] == "gradio"
    assert (SPACE / said["app_file"]).is_file()
    assert {said["colorFrom"], said["colorTo"]} <= COLOURS
    assert len(said["short_description"]) <= MAX_DESCRIPTION
    assert said["license"] == project()["license"].lower()


def test_header_names_versions_that_the_package_takes() -> None:
    said = header()
    extra = project()["optional-dependencies"]["demo"]
    gradio = next(one for one in map(Requirement, extra) if one.name == "gradio")
    assert Version(said["sdk_version"]) in gradio.specifier
    # The Gradio under which the chat's tests ran
    pinned = re.search(r"^gradio==(.+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert pinned
    assert said["sdk_version"] == pinned[1]
    lowest = project()["requires-python"].removeprefix(">=")
    assert Version(said["python_version"]) >= Version(lowest)


def test_requirements_are_the_package_with_its_demo() -> None:
    lines = (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    named = [Requirement(line) for line in lines if not line.startswith(("#", "--"))]
    assert [(one.name, one.extras) for one in named] == [(project()["name"], {"demo"})]
