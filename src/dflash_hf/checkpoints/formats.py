"""The checkpoint formats, and how to tell them apart: always by what a config says, never by a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_hf.checkpoints.deepspec import DEEPSPEC
from dflash_hf.checkpoints.mapping import COMMON_IGNORED, FIELDS, CheckpointFormat, make_config
from dflash_hf.checkpoints.muse import MUSE
from dflash_hf.checkpoints.speculators import SPECULATORS
from dflash_hf.checkpoints.zlab import ZLAB
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import shown

# Our own: what `DFlashConfig.save_pretrained` writes and the module's own weight names; nothing is renamed.
OWN = CheckpointFormat(
    name="dflash",
    matches=lambda config: config.get("model_type") == DFlashConfig.model_type,
    read_rest=lambda reader: {
        name: reader.take(name, default=None) for name in FIELDS if name in reader.values
    },
    write_rest=DFlashConfig.to_diff_dict,
    ignored=COMMON_IGNORED - set(FIELDS),
)
FORMATS = {known.name: known for known in (OWN, ZLAB, SPECULATORS, MUSE, DEEPSPEC)}


def detect_format(config: Mapping[str, Any]) -> CheckpointFormat:
    """Returns the format of a parsed `config.json`; raises `ValueError` if it is none that is supported."""
    for candidate in FORMATS.values():
        if candidate.matches(config):
            return candidate
    raise ValueError(
        "expected a DFlash draft (model_type 'dflash' or 'muse_glimmer_assistant', a section dflash_config, "
        "speculators_model_type 'dflash' with a transformer_layer_config, or markov_rank beside target_layer_ids), "
        f"got model_type {shown(config.get('model_type'))} with the keys {shown(sorted(config))}; give the folder of "
        "the draft"
    )


def explain_foreign_draft(model: object) -> str | None:
    """Says what to do with a model that was made from a DFlash checkpoint but is not a `DFlashDraftModel`.

    z-lab's checkpoints carry `model_type: "qwen3"`, so `AutoModel` loads them as a `Qwen3Model` without a word.
    Returns `None` if the model is something else.
    """
    config = getattr(model, "config", None)
    if not isinstance(getattr(config, "dflash_config", None), Mapping):
        return None
    return (
        f"expected a draft of class dflash_hf.DFlashDraftModel, got a {type(model).__name__} whose config has a "
        "section dflash_config: a DFlash checkpoint loaded by another class; load it with "
        f"DFlashDraftModel.from_pretrained({getattr(config, 'name_or_path', '') or '...'!r})"
    )


__all__ = [
    "FIELDS",
    "FORMATS",
    "CheckpointFormat",
    "detect_format",
    "explain_foreign_draft",
    "make_config",
]
