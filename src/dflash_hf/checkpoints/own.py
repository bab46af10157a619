"""Our own layout: what `DFlashConfig.save_pretrained` writes and the module's own weight names; nothing is renamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from dflash_hf.checkpoints.mapping import (
    BODY_BIASES,
    BODY_WEIGHTS,
    COMMON_IGNORED,
    DFLASH2_WEIGHTS,
    OWN_VOCABULARY_WEIGHTS,
    CheckpointFormat,
    ConfigReader,
)
from dflash_hf.configuration_dflash import DFlashConfig

# What the class adds to Transformers' base config, so to say the schema.
FIELDS = frozenset(field.name for field in fields(DFlashConfig)) - {field.name for field in fields(PreTrainedConfig)}


def _matches(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == DFlashConfig.model_type


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    return reader.take_present(FIELDS)


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    return config.to_diff_dict()


def _refuse(config: DFlashConfig) -> Iterator[str]:
    return iter(())


OWN = CheckpointFormat(
    name="dflash",
    matches=_matches,
    weights=BODY_WEIGHTS
    | BODY_BIASES
    | DFLASH2_WEIGHTS
    | OWN_VOCABULARY_WEIGHTS
    | {"fc.weight": "fc.weight", "hidden_norm.weight": "hidden_norm.weight"},
    keys=(),
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    ignored=COMMON_IGNORED - FIELDS,
)
