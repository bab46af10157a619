"""What `dflash-hf train` asks of held-out conversations, and what the draft's card tells of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_hf.bench.provenance import versions
from dflash_hf.cli.train_settings import STAGES, TrainSettings
from dflash_hf.cli.train_state import RunState
from dflash_hf.training.conversations import resolved
from dflash_hf.training.export import CardFacts
from dflash_hf.training.messages import prepare_multimodal_messages

ADDRESSES = ("http://", "https://", "data:")


def question_of(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a held-out conversation as a question of a bench: all up to the user's last turn, with its images.

    It is empty where a bench cannot ask it: it has a video, an image is no file, or one comes behind the first of
    several turns that are asked one by one, as those of a conversation of the user's turns alone.
    """
    found = resolved(row, folder)
    messages = found["messages"]
    images = found.pop("images", ())
    of_the_user = [at for at, turn in enumerate(messages) if turn["role"] == "user"]
    last = of_the_user[-1] if of_the_user else len(messages) - 1
    messages = messages[: last + 1]
    has_blocks = any(isinstance(turn["content"], list) for turn in messages)
    if images or has_blocks:
        messages = prepare_multimodal_messages(messages, images)
        all_asked = all(turn["role"] == "user" for turn in messages)
        later = [block["type"] for turn in messages[1:] for block in turn["content"]]
        if all_asked and "image" in later:
            return {}
        blocks = [block for turn in messages for block in turn["content"]]
        if any(block["type"] == "video" for block in blocks):
            return {}
        for block in blocks:
            if block["type"] != "image":
                continue
            block["path"] = block.pop("image")
            if block["path"].startswith(ADDRESSES):
                return {}
    category = row.get("category") or "held out"
    return {**found, "question_id": row["id"], "category": category, "messages": messages}


def card_facts(settings: TrainSettings, state: RunState) -> CardFacts:
    """Returns what the model card tells of the run."""
    summary = state.folder("bench") / "summary.json"
    measured: dict[str, Any] = {}
    conditions = ""
    if summary.is_file():
        measured, conditions = _measured(json.loads(summary.read_text(encoding="utf-8")))
    return CardFacts(
        target=settings.target,
        license=settings.license,
        datasets=settings.dataset,
        measured=measured,
        conditions=conditions,
        training=_training(settings, state),
        versions=versions(),
    )


def _measured(summary: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What a bench measured of each set, and a sentence on how."""
    methods = {method["method"]: method for method in reversed(summary["methods"])}
    provenance = summary["provenance"]
    machine = provenance["machine"]
    on_cpu = f"{machine['cpu']}, {provenance['threads']} threads"
    where = ", ".join(machine["gpus"]) or on_cpu
    dtype = next(iter(provenance["models"].values()))["dtype"]
    most = methods["plain"]["options"]["max_new_tokens"]
    conditions = f"Greedy, batch 1, at most {most} new tokens, {dtype}, {where}."
    return methods["dflash"]["sets"], conditions


def _training(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    """How the draft was trained, name by name."""
    training: dict[str, Any] = {"answers": _answers(settings)}
    if settings.draft:
        training["begun from"] = settings.draft
    for stage in STAGES[:3]:
        for name, value in state.facts(stage).items():
            if name not in ("answers", "seconds"):
                training[name.replace("_", " ")] = value
    if settings.chat_template_kwargs:
        training["chat template reads"] = json.dumps(settings.chat_template_kwargs)
    of_the_run = settings.made_from("run").keys()
    asked = settings.asked()
    training |= {name: asked[name] for name in asked if name in of_the_run and name != "draft"}
    return training


def _answers(settings: TrainSettings) -> str:
    """Where the answers are from."""
    if settings.answers == "data":
        return "in the data"
    if settings.temperature == 0:
        return "the target's own, greedy"
    return f"the target's own, at temperature {settings.temperature:g}"
