"""This module collects the facts about a run of `dflash-hf train` for the card of its draft."""

from __future__ import annotations

import json
from typing import Any

from dflash_hf.bench.provenance import versions
from dflash_hf.cli.train_settings import BATCHES_PER_STEP, STAGES, TrainSettings
from dflash_hf.cli.train_state import RunState
from dflash_hf.training.export import CardFacts


def card_facts(settings: TrainSettings, state: RunState) -> CardFacts:
    """Returns the facts about the run for the model card."""
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
    """Returns what a bench measured for each set, and a sentence about the conditions."""
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
    """Returns facts about the training: name -> value."""
    training: dict[str, Any] = {"answers": _answers(settings)}
    if settings.draft:
        training["begun from"] = settings.draft
    for stage in STAGES[:3]:
        for name, value in state.facts(stage).items():
            if name not in ("answers", "seconds"):
                training[name.replace("_", " ")] = value
    if settings.chat_template_kwargs:
        training["chat template reads"] = json.dumps(settings.chat_template_kwargs)
    of_the_run = settings.made_from("run")
    asked = settings.asked()
    training |= {name: asked[name] for name in asked if name in of_the_run and name != "draft"}
    batches = of_the_run[BATCHES_PER_STEP]
    if batches > 1:
        training[BATCHES_PER_STEP] = batches
    return training


def _answers(settings: TrainSettings) -> str:
    """Returns the source of the answers."""
    if settings.answers == "data":
        return "in the data"
    if settings.temperature == 0:
        return "the target's own, greedy"
    return f"the target's own, at temperature {settings.temperature:g}"
