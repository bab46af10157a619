"""Our own format: what `DFlashConfig.save_pretrained` writes and the module's own weight names; nothing is renamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_hf.checkpoints.mapping import (
    BODY_BIASES,
    BODY_WEIGHTS,
    COMMON_IGNORED,
    DFLASH2_WEIGHTS,
    FEATURE_WEIGHTS,
    FIELDS,
    OWN_VOCABULARY_WEIGHTS,
    REDUCED_WEIGHTS,
    CheckpointFormat,
)
from dflash_hf.configuration_dflash import DFlashConfig


def _matches(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == DFlashConfig.model_type


OWN = CheckpointFormat(
    name="dflash",
    matches=_matches,
    weights=BODY_WEIGHTS | BODY_BIASES | DFLASH2_WEIGHTS | OWN_VOCABULARY_WEIGHTS | REDUCED_WEIGHTS | FEATURE_WEIGHTS,
    keys=(),
    read_rest=lambda reader: reader.take_present(FIELDS),
    write_rest=DFlashConfig.to_diff_dict,
    ignored=COMMON_IGNORED - set(FIELDS),
)
