"""The command line is an interface: its commands and options are frozen here, and change only on purpose."""

import importlib
import re
from pathlib import Path
from typing import Annotated

import click
import pytest
import typer
from typer.testing import CliRunner

# Command -> its options and arguments, sorted. A failing test prints the dictionary as it would be now.
CLI_OPTIONS: dict[str, list[str]] = {
    "": ["--traceback", "--version"],
    "bench": [
        "--assistant-model",
        "--batch",
        "--block-size",
        "--chat-template-kwargs",
        "--data",
        "--data-dir",
        "--device",
        "--draft",
        "--dtype",
        "--max-matching-ngram-size",
        "--max-new-tokens",
        "--methods",
        "--no-thinking",
        "--num-prompts",
        "--num-tree-nodes",
        "--out",
        "--proposal",
        "--repeats",
        "--resume",
        "--run-code",
        "--seed",
        "--server",
        "--server-model",
        "--system",
        "--target",
        "--temperature",
        "--template",
        "--threads",
        "--top-p",
        "--verify-width",
    ],
    "bench compare": ["after", "before"],
    "bench prepare": ["--data-dir", "--num-prompts", "--out", "--seed", "--template", "names"],
    "chat": [
        "--device",
        "--draft",
        "--dtype",
        "--host",
        "--max-new-tokens",
        "--pair",
        "--port",
        "--share",
        "--system",
        "--target",
        "--temperature",
        "--threads",
        "--web",
    ],
    "convert": ["--force", "--target", "--to", "destination", "source"],
    "demo": ["--dtype", "--json", "--max-new-tokens", "--pair", "--per-kind", "--threads"],
    "doctor": [
        "--device",
        "--draft",
        "--dtype",
        "--json",
        "--max-new-tokens",
        "--num-prompts",
        "--prompts",
        "--target",
    ],
    "drafts": ["--json", "--target"],
    "generate": [
        "--block-size",
        "--chat-template-kwargs",
        "--compare",
        "--device",
        "--draft",
        "--dtype",
        "--engine",
        "--file",
        "--image",
        "--json",
        "--max-new-tokens",
        "--no-thinking",
        "--num-tree-nodes",
        "--pair",
        "--proposal",
        "--raw",
        "--seed",
        "--system",
        "--target",
        "--temperature",
        "--top-k",
        "--top-p",
        "--verify-width",
        "prompt",
    ],
    "inspect": ["--json", "draft"],
    "push": ["--license", "--private", "--target", "--to", "draft", "repo"],
    "serve": [
        "--chat-template-kwargs",
        "--cors-origin",
        "--device",
        "--draft",
        "--dtype",
        "--host",
        "--kept-gib",
        "--max-rows",
        "--no-thinking",
        "--pair",
        "--port",
        "--target",
        "--threads",
    ],
    "train": [
        "--algorithm",
        "--answer-batch",
        "--answer-seed",
        "--answers",
        "--attention",
        "--bench-data",
        "--bench-data-dir",
        "--bench-prompts",
        "--block-size",
        "--chat-template-kwargs",
        "--chunk-blocks",
        "--config",
        "--dataset",
        "--device",
        "--draft",
        "--draft-options",
        "--draft-vocab-size",
        "--dtype",
        "--feature-cache",
        "--feature-dtype",
        "--feature-server",
        "--formats",
        "--gamma",
        "--labels",
        "--learning-rate",
        "--license",
        "--loss",
        "--lr-scheduler-type",
        "--max-image-pixels",
        "--max-length",
        "--max-new-tokens",
        "--min-p",
        "--no-skip-bad-rows",
        "--no-streaming",
        "--num-anchors",
        "--num-eval",
        "--num-hidden-layers",
        "--num-prompts",
        "--num-train-epochs",
        "--output-dir",
        "--packing-length",
        "--per-device-train-batch-size",
        "--redo",
        "--self-prompts",
        "--server",
        "--server-model",
        "--skip-bad-rows",
        "--stages",
        "--streaming",
        "--target",
        "--temperature",
        "--template",
        "--tensor-parallel-size",
        "--threads",
        "--top-k",
        "--top-p",
        "--turns",
        "--warmup-steps",
    ],
    "tune": [
        "--device",
        "--draft",
        "--dtype",
        "--json",
        "--pair",
        "--rows",
        "--target",
    ],
}


def cli_options(app: typer.Typer) -> dict[str, list[str]]:
    """Command path -> the options (by their flags) and arguments (by name) that it takes, sorted."""
    found: dict[str, list[str]] = {}

    def visit(path: str, command: click.Command) -> None:
        takes = [
            flag
            for parameter in command.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        ]
        found[path] = sorted(set(takes) - {"--help", "--install-completion", "--show-completion"})
        for name, child in getattr(command, "commands", {}).items():
            visit(f"{path} {name}".strip(), child)

    visit("", typer.main.get_command(app))
    return {path: takes for path, takes in sorted(found.items()) if path or takes}


def cli_exists() -> bool:
    """Whether the package has its command line yet."""
    return (Path(__file__).resolve().parents[1] / "src" / "dflash_hf" / "cli" / "main.py").exists()


@pytest.mark.skipif(not cli_exists(), reason="dflash_hf.cli.main does not exist yet")
def test_cli_options_are_frozen() -> None:
    actual = cli_options(importlib.import_module("dflash_hf.cli.main").app)
    assert actual == CLI_OPTIONS, (
        f"the command line changed; if that is meant, CLI_OPTIONS becomes\n{actual}"
    )


def test_cli_options_sees_commands_groups_flags_and_arguments() -> None:
    app, group = typer.Typer(), typer.Typer()

    @app.command()
    def run(
        path: str, fast: bool = False, steps: Annotated[int, typer.Option("--steps", "-s")] = 1
    ) -> None: ...

    @group.command()
    def show(name: str = "") -> None: ...

    app.add_typer(group, name="draft")
    assert cli_options(app) == {
        "draft": [],
        "draft show": ["--name"],
        "run": ["--fast", "--no-fast", "--steps", "-s", "path"],
    }


def test_help_keeps_square_brackets() -> None:
    # Rich reads [word] as markup and drops it: an extra of the package, for example.
    app = importlib.import_module("dflash_hf.cli.main").app
    wide = {"TERMINAL_WIDTH": "200"}

    def assert_kept(command: click.Command, words: list[str]) -> None:
        shown = CliRunner().invoke(app, [*words, "--help"], env=wide).output
        told = [getattr(parameter, "help", None) or "" for parameter in command.params]
        for text in [command.help or "", *told]:
            for word in re.findall(r"\[[^\]]*\]", text):
                assert word in shown, f"dflash-hf {' '.join(words)} --help does not show {word}"
        for name, child in getattr(command, "commands", {}).items():
            assert_kept(child, [*words, name])

    assert_kept(typer.main.get_command(app), [])
    assert "'dflash-hf[demo]'" in CliRunner().invoke(app, ["chat", "--help"], env=wide).output
