"""Our own format: what `DFlashConfig.save_pretrained` writes and the module's own weight names; nothing is renamed."""

from __future__ import annotations

from dflash_hf.checkpoints.mapping import COMMON_IGNORED, FIELDS, CheckpointFormat
from dflash_hf.configuration_dflash import DFlashConfig

OWN = CheckpointFormat(
    name="dflash",
    matches=lambda config: config.get("model_type") == DFlashConfig.model_type,
    keys=(),
    read_rest=lambda reader: {name: reader.take(name, default=None) for name in FIELDS if name in reader.values},
    write_rest=DFlashConfig.to_diff_dict,
    ignored=COMMON_IGNORED - set(FIELDS),
)
