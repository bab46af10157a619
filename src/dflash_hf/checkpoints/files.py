"""What a checkpoint's files hold, read from their headers before anything is built: whole, complete, of known types.

Only safetensors are opened, and JSON. Every complaint names the file and the key or tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from dflash_hf.errors import listed, one_line, shown

# The index of a draft of 1024 layers takes 2 MB; parsed, the worst of 4 (`[],[],...`) takes 90.
MAX_JSON_BYTES = 4 * 2**20
PathOrRepo = str | PathLike[str]
# As safetensors spells them.
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file, not read yet.

    Args:
        file (`Path`): Where it is.
        name (`str`): Its name there.
        dtype (`str`): Its type as safetensors spells it, such as `"BF16"`.
        shape (`tuple[int, ...]`): Its shape.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Reads the tensor, onto the CPU."""
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_tensor(self.name)


def read_config(path: PathOrRepo, hub: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the `config.json` of a folder or a Hub repository; `path` may also be the file itself.

    Raises:
        ValueError: If it is no JSON dictionary.
        OSError: If there is none, as Transformers raises it.
    """
    if Path(path).is_file():
        return read_json(Path(path))
    if (Path(path) / CONFIG_NAME).is_dir():
        raise ValueError(f"expected a file {Path(path) / CONFIG_NAME}, got a folder; put the config there")
    file = cached_file(path, CONFIG_NAME, **hub)
    if file is None:  # Transformers takes it for a file that may be missing
        raise ValueError(f"expected {CONFIG_NAME} in {path}, got no such file; give the folder of a draft")
    return read_json(Path(file))


def check_no_adapter(path: PathOrRepo, hub: Mapping[str, Any]) -> None:
    """Raises if PEFT's files lie beside the draft's: Transformers would load that adapter onto it, unchecked.

    Raises:
        ValueError: If there is an `adapter_config.json`.
    """
    if _find(path, ADAPTER_CONFIG_NAME, None, hub) is not None:
        raise ValueError(
            f"expected a draft without an adapter in {path}, got {ADAPTER_CONFIG_NAME}; merge the adapter into the "
            "draft's weights, or take its files away"
        )


def stored_tensors(path: PathOrRepo, variant: str | None, hub: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Opens the safetensors files of a folder or Hub repository, shards included, and lists what is in them.

    Args:
        path (`str` or `os.PathLike`): Folder or Hub id.
        variant (`str`, *optional*): Transformers' `variant`.
        hub (`Mapping`): Transformers' arguments for finding files.

    Returns:
        `dict`: Name -> tensor; empty if a Hub repository has no such file (Transformers then says so).

    Raises:
        ValueError: If a file is damaged, a shard is missing, an index and its shards disagree, or a folder has no
            safetensors files of the expected names.
    """
    whole = _find(path, SAFE_WEIGHTS_NAME, variant, hub)
    if whole is not None:
        return _headers(whole)
    index = _find(path, SAFE_WEIGHTS_INDEX_NAME, variant, hub)
    if index is None:
        folder = Path(path) / (hub.get("subfolder") or "")
        if folder.is_dir():
            files = sorted(file.name for file in folder.iterdir())
            raise ValueError(
                f"expected safetensors weights in {folder} ({SAFE_WEIGHTS_NAME}, or shards with their index), got "
                f"{shown(files)}; convert the checkpoint: reading a pickle file can run code, so none is loaded"
            )
        return {}
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(
            f"expected weight_map, names of weights to names of files, in {index}, got {shown(weight_map)}; mend it"
        )
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        # Looked for only under a plain name: nothing outside of the folder is a part of a checkpoint.
        file = _find(path, shard, None, hub) if _is_plain_name(shard) else None
        if file is None:
            raise ValueError(
                f"expected the shard {one_line(shard)} beside {index}, got no such file; download it again"
            )
        tensors = _headers(file)
        named = {name for name, where in weight_map.items() if where == shard}
        if differing := sorted(named ^ tensors.keys()):
            raise ValueError(
                f"expected {file} to hold what weight_map of {index} says, got a difference in "
                f"{listed(differing)}; download it again"
            )
        found |= tensors
    if not isinstance(content.get("metadata"), dict):  # Transformers needs one, if only an empty one
        raise ValueError(
            f"expected a dictionary metadata in {index}, got {shown(content.get('metadata'))}; add an empty one"
        )
    return found


def widest_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """Returns the floating-point type that holds all of the weights without loss, or `None` where there are none."""
    kinds = {tensor.dtype for tensor in stored.values()} & FLOAT_DTYPES.keys()
    dtype: torch.dtype | None = None
    for kind in sorted(kinds):
        dtype = FLOAT_DTYPES[kind] if dtype is None else torch.promote_types(dtype, FLOAT_DTYPES[kind])
    return dtype


def _is_plain_name(shard: str) -> bool:
    """Whether it is the name of a safetensors file, and of nothing else."""
    return shard.isprintable() and Path(shard).name == shard and shard.endswith(".safetensors")


def _find(path: PathOrRepo, name: str, variant: str | None, hub: Mapping[str, Any]) -> Path | None:
    """The file of that name, if there is one."""
    if variant is not None:
        stem, _, ending = name.partition(".")
        name = f"{stem}.{variant}.{ending}" if ending == "safetensors" else f"{stem}.safetensors.index.{variant}.json"
    file = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False, **hub
    )
    return None if file is None else Path(file)


def _headers(file: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds; the header is checked against the file's size."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dictionary)
            return {
                name: StoredTensor(file, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"expected whole safetensors files, got {file} ({one_line(error)}); download it again"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON dictionary.

    Raises:
        ValueError: If the file holds something else.
    """
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(
            f"expected at most {MAX_JSON_BYTES / 2**20:.0f} MB of JSON in {file}, got {size / 2**20:.0f}; download it "
            "again"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"expected JSON in {file}, got something else ({one_line(error)}); download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON dictionary in {file}, got a {type(content).__name__}; download it again")
    return content


__all__ = [
    "FLOAT_DTYPES",
    "StoredTensor",
    "check_no_adapter",
    "read_config",
    "read_json",
    "stored_tensors",
    "widest_dtype",
]
