"""This module records the conditions of a run: versions, machine, commit, command, and the loaded models."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflash_hf import __version__
from dflash_hf.bench.methods import Models
from dflash_hf.devices import device_name
from dflash_hf.errors import shown
from dflash_hf.training.identity import target_identity, text_identity

# The properties of models that change a cell's answers or speeds.
SAME_PARTS = (
    "target",
    "draft",
    "assistant",
    "chat_template",
    "dtype",
    "attention",
    "target_options",
    "draft_options",
    "assistant_options",
)
PACKAGES = ("torch", "transformers", "accelerate", "triton", "dflash", "tokenizers")


def provenance(models: Mapping[str, Models], num_processes: int) -> dict[str, Any]:
    """Returns what a reader must know to repeat a run or to judge it: [`conditions`], and what was loaded.

    Args:
        models (mapping): The loaded models, by the dtype that was asked for.
        num_processes (`int`): Number of processes that ask at the same time.
    """
    described = {name: _describe(found) for name, found in models.items()}
    return {**conditions(), "processes": num_processes, "models": described}


def conditions() -> dict[str, Any]:
    """Returns date, command, commit, versions, machine and threads of a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": _commit(),
        "versions": versions(),
        "machine": {
            "cpu": device_name(torch.device("cpu")),
            "cores": os.cpu_count(),
            "gpus": [
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ],
            "platform": platform.platform(),
        },
        "threads": torch.get_num_threads(),
    }


def _describe(models: Models) -> dict[str, Any]:
    config: Any = models.target.config
    template: Any = models.processor.chat_template
    text = template if isinstance(template, str) else repr(template)
    described: dict[str, Any] = {
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "device": str(models.target.device),
        "attention": config._attn_implementation,
        "target_class": type(models.target).__name__,
        "target_commit": getattr(config, "_commit_hash", None),
        "target": target_identity(models.target),
        "target_options": _options_of(models.target),
        "chat_template": None if template is None else text_identity(text),
    }
    if models.assistant is not None:
        described["assistant"] = target_identity(models.assistant)
        described["assistant_options"] = _options_of(models.assistant)
    if models.draft is not None:
        described["draft"] = target_identity(models.draft)
        described["draft_dtype"] = str(models.draft.dtype).removeprefix("torch.")
        described["draft_block_size"] = models.draft.config.block_size
        described["draft_options"] = _options_of(models.draft)
    return described


def _options_of(model: Any) -> dict[str, Any]:
    """Returns the values of a model's `generation_config` as JSON gives them back, without metadata."""
    return json.loads(model.generation_config.to_json_string(ignore_metadata=True))


def check_models(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raises `ValueError` if a continued run has loaded other models, or the same models in another way.

    Args:
        before, now (mapping): The results of [`provenance`] at the start of the run and now. Values that an older
            version of this package did not write are taken to be the same now.
        folder (`Path`): The folder of the run.
    """
    for dtype, found in now["models"].items():
        described = before.get("models", {}).get(dtype, {})
        for part in SAME_PARTS:
            was = described.get(part, found.get(part))
            if was != found.get(part):
                raise ValueError(
                    f"expected the {part} with which the run of {folder} was begun ({shown(was)}), got another "
                    f"({shown(found.get(part))}); load that one, in the same versions, or name another --out"
                )


def other_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the conditions of [`provenance`] that have changed since a run was begun, with the current date."""
    names = ("commit", "versions", "machine", "threads", "processes")
    found = {name: now[name] for name in names if before.get(name) != now[name]}
    if found:
        found["date"] = now["date"]
    return found


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, this package and the packages that it uses; `None` for a missing package."""
    found = {name: _version(name) for name in PACKAGES}
    # This package's version is not the installed one, because the sources may run without being installed.
    return {"python": platform.python_version(), **found, "dflash-hf": __version__}


def _version(name: str) -> str | None:
    """Returns the version of an installed package, or `None`."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of the clone that the package runs from, with "+dirty" if its files differ from it.

    `GIT_COMMIT` has priority, because a copy of a working tree on another machine may be in another repository.
    """
    told = os.environ.get("GIT_COMMIT")
    folder = Path(__file__).resolve().parents[3]
    if told is not None or not (folder / ".git").exists():
        return told
    try:
        head, changes = (
            subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+dirty" if changes else "")
