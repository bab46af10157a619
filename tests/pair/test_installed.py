"""The command line of an installed package, which has the pair for texts within it and no clone around it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.main import app
from dflash_hf.cli.pair import BUNDLED
from helpers.source_tree import ROOT

PROMPT = "Compute 41 + 80 - 99 + 14."
# Several commands where there is no Pillow, one behind the other: a start of Python loads torch for five seconds of a
# processor. The last one finds no pair in the package.
SEVERAL = """
import json, sys
sys.modules["PIL"] = None
from typer.testing import CliRunner
from dflash_hf.cli.main import app
from dflash_hf.cli.pair import BUNDLED

def run(words):
    done = CliRunner().invoke(app, words)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))

*commands, last = json.loads(sys.argv[1])
for words in commands:
    run(words)
away = BUNDLED.rename(BUNDLED.with_name("away"))
run(last)
away.rename(BUNDLED)
"""
DEMO = ("demo", "--per-kind", "1", "--max-new-tokens", "8", "--json")
ASKED = ("generate", PROMPT, "--compare")
OF_A_CLONE = ("chat", "--pair", "vision")
WITHOUT_PAIR = ("demo",)


def wheel_paths() -> Iterator[tuple[Path, str]]:
    """What pyproject.toml puts into the wheel: a path of this tree, and where the wheel has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for path in wheel["only-include"]:
        [(source, destination)] = [
            item for item in wheel["sources"].items() if path.startswith(f"{item[0]}/")
        ]
        yield ROOT / path, f"{destination}/{path.removeprefix(f'{source}/')}".lstrip("/")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages, as the wheel would leave it."""
    folder = tmp_path_factory.mktemp("site")
    for source, name in wheel_paths():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, place)
    return folder


class Ended(NamedTuple):
    """What a command has said, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def ended(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Ended]:
    """Commands of these packages in one process, which must leave them and its working folder as they were."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    before = sizes(site)
    commands = [DEMO, ASKED, OF_A_CLONE, WITHOUT_PAIR]
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert sizes(site) == before
    assert list(cwd.iterdir()) == []
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {command: Ended(*line) for command, line in zip(commands, lines, strict=True)}


def sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_the_demo_of_a_clone_reads_the_clone() -> None:
    assert BUNDLED == ROOT / "demos" / "toy"


def test_the_demo_needs_the_package_alone_and_keeps_it(ended: dict[tuple[str, ...], Ended]) -> None:
    done = ended[DEMO]
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    held_out = read_prompts(BUNDLED / "held_out.jsonl", 1)
    assert [row["kind"] for row in found["rows"]] == [prompt["kind"] for prompt in held_out]
    assert found["all"]["identical"] is True


def test_a_prompt_is_answered_by_the_pair_of_the_package(
    ended: dict[tuple[str, ...], Ended],
) -> None:
    done = ended[ASKED]
    assert done.returncode == 0, done.stderr
    assert "36" in done.stdout


def test_a_pair_that_comes_with_a_clone_only_is_a_sentence(
    ended: dict[tuple[str, ...], Ended],
) -> None:
    done = ended[OF_A_CLONE]
    assert_refused(
        done.returncode,
        done.stderr,
        "expected a clone for the pair vision, got an installed package",
    )


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["chat", "--pair", "smollm2"], "smollm2"), (["generate", "x", "--image", "x.png"], "vision")],
)
def test_so_it_is_for_every_pair_and_command(
    arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_hf.cli.pair.IS_CLONE", False)
    monkeypatch.chdir(tmp_path)
    Path("x.png").touch()
    done = CliRunner().invoke(app, arguments)
    assert_refused(
        done.exit_code,
        done.stderr,
        f"expected a clone for the pair {name}, got an installed package",
    )


def test_a_pair_that_is_missing_is_a_sentence(
    site: Path, ended: dict[tuple[str, ...], Ended]
) -> None:
    done = ended[WITHOUT_PAIR]
    assert_refused(
        done.returncode,
        done.stderr,
        f"expected held-out prompts in {site}/dflash_hf/bundled_pair/held_out.jsonl",
    )


@pytest.mark.parametrize("arguments", [["generate", "x"], ["chat"], ["serve"]])
def test_so_it_is_for_commands_that_take_it_by_default(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_hf.cli.pair.CLONE", tmp_path)
    monkeypatch.setattr("dflash_hf.cli.pair.BUNDLED", tmp_path / "bundled_pair")
    done = CliRunner().invoke(app, arguments)
    assert_refused(done.exit_code, done.stderr, "expected the pair text in ")


def assert_refused(status: int, stderr: str, message: str) -> None:
    said = " ".join(stderr.split())
    assert status == 2, said
    assert message in said
    assert said.startswith("Error: expected ")
    assert "Traceback" not in said
