"""This module lists the checkpoint formats. It recognises a format by the content of a config, and not by a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from dflash_hf.checkpoints.deepspec import DEEPSPEC
from dflash_hf.checkpoints.deepspec_gemma4 import DEEPSPEC_GEMMA4
from dflash_hf.checkpoints.laguna import LAGUNA
from dflash_hf.checkpoints.mapping import (
    COMMON_IGNORED,
    FIELDS,
    CheckpointFormat,
    ConfigReader,
)
from dflash_hf.checkpoints.muse import MUSE
from dflash_hf.checkpoints.speculators import SPECULATORS
from dflash_hf.checkpoints.zlab import ZLAB
from dflash_hf.configuration_dflash import LAYER_FAMILIES, DFlashConfig, check_own
from dflash_hf.errors import shown


def _read_own(reader: ConfigReader) -> dict[str, Any]:
    check_own(reader.values)
    # None is a value here: it means that `vocab_size` is not stated.
    return {name: reader.take(name, default=None) for name in FIELDS if name in reader.values}


# Our own format: the config that `DFlashConfig.save_pretrained` writes, and the module's own names of weights.
OWN = CheckpointFormat(
    name="dflash",
    matches=lambda config: config.get("model_type") == DFlashConfig.model_type,
    layer_families=LAYER_FAMILIES,
    takes_partial_ropes=True,
    read_rest=_read_own,
    write_rest=DFlashConfig.to_diff_dict,
    ignored=COMMON_IGNORED - set(FIELDS),
)
# The order matters: Laguna's and Gemma 4's drafts also match the formats of z-lab and DeepSpec, so they come first.
ALL = (OWN, LAGUNA, ZLAB, SPECULATORS, MUSE, DEEPSPEC_GEMMA4, DEEPSPEC)
FORMATS = {known.name: known for known in ALL}


def detect_format(config: Mapping[str, Any]) -> CheckpointFormat:
    """Returns the format of a parsed `config.json`. Raises `ValueError` if the format is not supported."""
    for candidate in FORMATS.values():
        if candidate.matches(config):
            return candidate
    raise ValueError(
        "expected a DFlash draft (model_type 'dflash' or 'muse_glimmer_assistant', a section dflash_config, "
        "speculators_model_type 'dflash' or 'dspark' with a transformer_layer_config, or markov_rank beside "
        f"target_layer_ids), got model_type {shown(config.get('model_type'))} with the keys {shown(sorted(config))}; "
        "give the folder of the draft"
    )


def is_draft(config: Mapping[str, Any]) -> bool:
    """Returns True if a parsed `config.json` belongs to a draft in a known format."""
    return any(known.matches(config) for known in FORMATS.values())


def explain_foreign_draft(model: object, is_stock: bool = False) -> str | None:
    """Returns what to do with an assistant that was made from a DFlash checkpoint but is not a `DFlashDraftModel`.

    Most formats carry the `model_type` of a model that Transformers knows. So `AutoModel` and `AutoModelForCausalLM`
    load such a draft as that model, which cannot draft. The result is `None` for a model that is something else. It is
    also `None` for Transformers' own draft if Transformers' own decoding (`speculation_type="dflash"`) is asked for
    (`is_stock`).
    """
    form = _format_of_foreign(model)
    if form is None or (is_stock and form is MUSE):
        return None
    return (
        f"expected a draft of class dflash_hf.DFlashDraftModel, got {_named(model, form)}: a DFlash checkpoint loaded "
        f"by another class; load it with {_right_call(model)}"
    )


def check_is_no_draft(model: object) -> None:
    """Raises `ValueError` for a target that was made from a DFlash checkpoint, because it cannot write a text.

    Its embedding and head are new and have random values, or its layers lack the context that they were trained with.
    """
    form = _format_of_foreign(model)
    if form is None:
        return
    raise ValueError(
        f"expected a target, got {_named(model, form)}, which proposes tokens for a target and writes no text by "
        f"itself; load the target, and this draft with {_right_call(model)} as assistant_model"
    )


def _format_of_foreign(model: object) -> CheckpointFormat | None:
    """Returns the format of the DFlash checkpoint that a model of another class was made from, or `None`."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig) or isinstance(config, DFlashConfig):
        return None
    # `to_dict` would copy the whole config, and every `generate` calls this function.
    values = {**vars(config), "model_type": config.model_type}
    if not is_draft(values):
        return None
    return detect_format(values)


def _named(model: object, form: CheckpointFormat) -> str:
    return f"a {type(model).__name__} whose config is a DFlash draft's in the format {form.name!r}"


def _right_call(model: Any) -> str:
    return f"dflash_hf.load_draft({model.config.name_or_path or '...'!r})"
