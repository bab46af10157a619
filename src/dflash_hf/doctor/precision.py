"""How a target is quantised, and what the draft's files say of the target that it was trained for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.checkpoints.drafts import named_target
from dflash_hf.checkpoints.loading import foreign_weights
from dflash_hf.modeling_dflash import DFlashDraftModel

# How names of published models say what their weights are.
MARKS = re.compile(
    r"(?<![a-z0-9])(nvfp4|mxfp4|mxfp8|fp8|int4|int8|w\d+a\d+|awq|gptq|[48]-?bit)(?![a-z0-9])",
    re.IGNORECASE,
)


def marks_of(name: str) -> set[str]:
    """Returns the precisions that a model's name states, in small letters."""
    return {mark.lower().replace("-", "") for mark in MARKS.findall(name)}


def quantisation_of(model: PreTrainedModel) -> str:
    """Returns how a model's weights are quantised, in a few words; nothing where they are not."""
    settings: Any = getattr(model.config, "quantization_config", None)
    if settings is not None and not isinstance(settings, Mapping):
        settings = settings.to_dict()
    if not settings:
        return ", ".join(foreign_weights(model))
    method = str(settings.get("quant_method", "a quantisation"))
    for bits, name in ((4, "load_in_4bit"), (8, "load_in_8bit")):
        if settings.get(name):
            return f"{method}, {bits} bits"
    if settings.get("bits"):
        return f"{method}, {settings['bits']} bits"
    return method


def compare_precision(model: PreTrainedModel, draft: DFlashDraftModel) -> tuple[bool | None, str]:
    """Compares how a target is quantised with what the draft names.

    Returns:
        `tuple[bool | None, str]`: Whether the two fit (`None`: nothing says), and a sentence.
    """
    trained_for = named_target(draft.config.name_or_path or "")
    if trained_for is None:
        return None, "the draft's files do not name the target that it was trained for"
    now = quantisation_of(model)
    stated = marks_of(trained_for)
    has = "the target is not quantised"
    if now:
        has = f"the target is quantised ({now})"
    if not stated:
        sentence = f"{has}, and the draft names {trained_for}, whose name states no quantisation"
        if now:
            sentence += ": without a quantisation of the target, more may be accepted"
        return True, sentence
    words = f"{model.config.name_or_path} {now}".replace(" bits", "bit")
    fits = bool(stated & marks_of(words))
    return fits, f"{has}, and the draft was trained for {trained_for}"
