"""This module compares the quantisation of a target with the target that the draft's files name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.checkpoints.drafts import named_target
from dflash_hf.checkpoints.loading import foreign_weights
from dflash_hf.modeling_dflash import DFlashDraftModel

# Parts of the names of published models that state the precision of their weights.
MARKS = re.compile(
    r"(?<![a-z0-9])(nvfp4|mxfp4|mxfp8|fp8|int4|int8|w\d+a\d+|awq|gptq|[48]-?bit)(?![a-z0-9])",
    re.IGNORECASE,
)
# (bits, weights that share a scale) -> the letters before `fp4` and `fp8` in the names of floating-point formats.
FLOAT_PREFIXES: dict[tuple[Any, Any], str] = {(4, 16): "nv", (4, 32): "mx", (8, 32): "mx"}
# Ways of rounding to integers. The files of compressed-tensors do not name them.
ROUNDINGS = {"awq", "gptq"}


def marks_of(name: str) -> set[str]:
    """Returns the precisions that a model's name states, in lower case."""
    return {mark.lower().replace("-", "") for mark in MARKS.findall(name)}


def quantisation_of(model: PreTrainedModel) -> str:
    """Returns how a model's weights are quantised, in a few words; an empty text if they are not."""
    settings: Any = getattr(model.config, "quantization_config", None)
    if settings is not None and not isinstance(settings, Mapping):
        settings = settings.to_dict()
    if not settings:
        return ", ".join(foreign_weights(model))
    method = settings.get("quant_method", "a quantisation")
    # Transformers makes the method a member of an enumeration.
    method = str(getattr(method, "value", method))
    for bits, name in ((4, "load_in_4bit"), (8, "load_in_8bit")):
        if settings.get(name):
            return f"{method}, {bits} bits"
    if settings.get("bits"):
        bits = settings["bits"]
        # AutoRound names the type of the numbers: int, fp, nv_fp, mx_fp or variants of these.
        kind = str(settings.get("data_type") or "int")
        if kind.startswith("int"):
            return f"{method}, {bits} bits, int{bits}, w{bits}a16"
        is_float = re.match("(nv|mx)?_?fp", kind)
        if is_float is None:
            return method
        return f"{method}, {is_float[1] or ''}fp{bits}"
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        return method
    kinds = [_stored_as(group) for group in groups.values() if isinstance(group, Mapping)]
    return ", ".join(dict.fromkeys([method, *filter(None, kinds)]))


def _stored_as(group: Mapping[str, Any]) -> str:
    """Returns the format of a group of compressed-tensors, in the words of models' names; empty if it is not known."""
    weights: Mapping[str, Any] = group.get("weights") or {}
    activations: Mapping[str, Any] = group.get("input_activations") or {}
    bits = weights.get("num_bits")
    # If the package compressed-tensors has read the settings, the type is QuantizationType.FLOAT instead of "float".
    kind = str(weights.get("type")).rpartition(".")[2].lower()
    if kind == "float":
        prefix = FLOAT_PREFIXES.get((bits, weights.get("group_size")), "")
        return f"{prefix}fp{bits}"
    if kind == "int":
        return f"int{bits}, w{bits}a{activations.get('num_bits', 16)}, {bits} bits"
    return ""


def compare_precision(model: PreTrainedModel, draft: DFlashDraftModel) -> tuple[bool | None, str]:
    """Compares the quantisation of a target with the target that the draft names.

    Returns:
        `tuple[bool | None, str]`: Whether the two fit (`None` if this cannot be said), and a sentence.
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
    sentence = f"{has}, and the draft was trained for {trained_for}"
    words = f"{model.config.name_or_path} {now}".replace(" bits", "bit")
    if stated & marks_of(words):
        return True, sentence
    # A quantisation that does not state its precision may have any. Integers of compressed-tensors may be rounded in
    # any way.
    says_none = not marks_of(now.replace(" bits", "bit"))
    is_rounding_open = now.startswith("compressed-tensors, int") and stated <= ROUNDINGS
    if now and (says_none or is_rounding_open):
        return None, sentence
    return False, sentence
