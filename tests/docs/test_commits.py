"""The hook that `.pre-commit-config.yaml` names takes the subjects that CONTRIBUTING.md asks for, and no others."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hook(config: dict[str, Any]) -> dict[str, Any]:
    [hook] = [
        hook for repo in config["repos"] for hook in repo["hooks"] if hook["id"] == "commit-subject"
    ]
    return hook


def is_taken(message: str, hook: dict[str, Any]) -> bool:
    """Whether pre-commit's `pygrep` with `--multiline --negate` finds the hook's expression in a message."""
    return re.search(hook["entry"].encode(), message.encode(), re.MULTILINE | re.DOTALL) is not None


def test_hook_reads_messages_and_fails_where_nothing_matches(
    config: dict[str, Any], hook: dict[str, Any]
) -> None:
    assert (hook["language"], hook["args"]) == ("pygrep", ["--multiline", "--negate"])
    assert hook["stages"] == ["commit-msg"]
    assert config["default_install_hook_types"] == ["pre-commit", "commit-msg"]
    assert config["default_stages"] == ["pre-commit"]


LONGEST = "[Docs] " + "X" * 64


@pytest.mark.parametrize(
    "message",
    [
        "[Core] Split the prefill into its parts",
        "[Kernel] Write both caches in one launch\n",
        "[Fix] Count ranks once\n\nWithout it tests/equality/test_ranks.py failed.\n",
        LONGEST,
        LONGEST + "\n\n" + "A body may have longer lines. " * 5,
    ],
)
def test_right_subjects_are_taken(message: str, hook: dict[str, Any]) -> None:
    assert is_taken(message, hook)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Split the prefill into its parts",
        "[Perf] Split the prefill into its parts",
        "[core] Split the prefill into its parts",
        "[Core] split the prefill into its parts",
        "[Core]Split the prefill into its parts",
        "[Core]",
        "[Core]\nSplit the prefill into its parts",
        "Core: Split the prefill into its parts",
        "See below\n\n[Core] Split the prefill into its parts",
        "\n[Core] Split the prefill into its parts",
        LONGEST + "X",
    ],
)
def test_wrong_subjects_are_refused(message: str, hook: dict[str, Any]) -> None:
    assert not is_taken(message, hook)


def test_tags_are_those_of_the_guide(hook: dict[str, Any]) -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commits = guide.partition("## Commits\n")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `\[(\w+)\]`", commits, re.MULTILINE)
    assert all(is_taken(f"[{tag}] Say it", hook) for tag in told)
    assert len(told) == 8
    assert re.findall(r"\((Core[\w|]*)\)", hook["entry"]) == ["|".join(told)]
