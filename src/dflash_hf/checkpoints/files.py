"""This module reads the config and the headers of a checkpoint's files, and checks them before a model is built.

Files must be whole, the set of files complete, and their types known. Only safetensors and JSON files are opened.
Every error message names the file and the key or tensor.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import _add_variant
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from dflash_hf.data.row_files import read_object
from dflash_hf.errors import listed, one_line, require, shown

# The index of a draft of 512 layers takes 1 MB. The worst JSON of 2 MB (`[],[],...`) would take a second to parse.
MAX_JSON_BYTES = 2**20
PathOrRepo = str | PathLike[str]
# The keys are dtypes as safetensors spells them.
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file, which has not been read yet."""

    file: Path
    name: str  # in the file
    dtype: str  # as safetensors spells it, such as "BF16"
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Reads the tensor onto the CPU."""
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_tensor(self.name)


def read_config(path: PathOrRepo, hub: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the `config.json` of a folder or a Hub repository. `path` may also be the file itself.

    Raises `ValueError` if the file is not a JSON object, and `OSError`, as Transformers does, if there is no file.
    """
    if Path(path).is_file():
        return read_json(Path(path))
    _check_is_no_folder(Path(path) / (hub.get("subfolder") or "") / CONFIG_NAME)
    file = cached_file(path, CONFIG_NAME, **hub)
    if file is None:  # Transformers treats it as a file that may be missing
        raise ValueError(
            f"expected {CONFIG_NAME} in {path}, got no such file; give the folder of a draft"
        )
    return read_json(Path(file))


def stored_tensors(
    path: PathOrRepo, hub: Mapping[str, Any] | None = None, variant: str | None = None
) -> dict[str, StoredTensor]:
    """Opens the safetensors files of a folder or Hub repository, shards included, and returns name -> tensor.

    `hub` are Transformers' arguments for finding files, and `variant` is Transformers' argument of this name. Raises
    `ValueError` if a file is damaged, a shard is missing, an index and its shards disagree, or a folder has no
    safetensors files of the expected names. Raises `OSError` if a Hub repository has none, or cannot be reached.
    """
    hub = hub or {}
    whole = find_file(path, _add_variant(SAFE_WEIGHTS_NAME, variant), hub)
    if whole:
        return _headers(whole)
    index = find_file(path, _add_variant(SAFE_WEIGHTS_INDEX_NAME, variant), hub)
    if not index:
        raise _no_weights(Path(path) / (hub.get("subfolder") or ""))
    content = read_json(index)
    shards: Any = content.get("weight_map")
    is_map = isinstance(shards, dict) and all(isinstance(shard, str) for shard in shards.values())
    require(is_map, f"weight_map, names of weights to names of files, in {index}", shards, "fix it")
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(shards.values())):
        # A checkpoint contains only files of its own folder, and only safetensors files are opened.
        is_plain = (
            shard.isprintable() and Path(shard).name == shard and shard.endswith(".safetensors")
        )
        file = None
        if is_plain:
            file = find_file(path, shard, hub)
        if not file:
            raise ValueError(
                f"expected the shard {one_line(shard)} beside {index}, got no such file; download it again"
            )
        tensors = _headers(file)
        listed_there = {name for name, where in shards.items() if where == shard}
        differing = sorted(listed_there ^ tensors.keys())
        if differing:
            raise ValueError(
                f"expected {file} to hold what weight_map of {index} says, got a difference in "
                f"{listed(differing)}; download it again"
            )
        found |= tensors
    # Transformers needs this dictionary, even if it is empty.
    metadata = content.get("metadata")
    require(
        isinstance(metadata, dict),
        f"a dictionary metadata in {index}",
        metadata,
        "add an empty one",
    )
    return found


def widest_dtype(kinds: Iterable[str]) -> torch.dtype:
    """Returns the type that holds weights of all these types without loss. `kinds` are spelled as in safetensors."""
    return functools.reduce(torch.promote_types, [FLOAT_DTYPES[kind] for kind in kinds])


def find_file(path: PathOrRepo, name: str, hub: Mapping[str, Any]) -> Path | None:
    """Returns the file of that name, or `None` if there is none (offline: if none is cached).

    Raises `ValueError` if a folder has this name.
    """
    _check_is_no_folder(Path(path) / (hub.get("subfolder") or "") / name)
    file = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    if not file:
        return None
    return Path(file)


def _check_is_no_folder(place: Path) -> None:
    """Raises `ValueError` if `place` is a folder, because Transformers would treat it as a missing file."""
    # A path that the system refuses (for example, because it is too long) is no folder. `Path.is_dir` would raise.
    if os.path.isdir(place):
        raise ValueError(f"expected a file {place}, got a folder; put the file there")


def unshared(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights that share no memory. Of weights that share memory, a safetensors file would hold only one."""
    apart = dict(weights)
    places: set[int] = set()
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        if place in places:
            apart[name] = tensor.clone()
        places.add(place)
    return apart


def _no_weights(folder: Path) -> Exception:
    """Returns the error for a place without safetensors: `ValueError` for a folder, otherwise `OSError`."""
    what = f"safetensors weights in {folder} ({SAFE_WEIGHTS_NAME}, or shards with their index)"
    action = "convert the checkpoint: reading a pickle file can run code, so none is loaded"
    if folder.is_dir():
        files = sorted(file.name for file in folder.iterdir())
        # MiMo's drafts have one file with a name of its own.
        others = [name for name in files if name.endswith(".safetensors")]
        if len(others) == 1:
            action = f"rename {one_line(others[0])} to {SAFE_WEIGHTS_NAME}"
        return ValueError(f"expected {what}, got {shown(files)}; {action}")
    return OSError(f"expected {what}, got none that can be reached; {action}")


def _headers(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file. `safe_open` checks the header against the size of the file."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118  (not a dictionary)
            return {
                name: StoredTensor(file, name, one.get_dtype(), tuple(one.get_shape()))
                for name, one in slices
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"expected whole safetensors files, got {file} ({one_line(error)}); download it again"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises `ValueError` if the file holds something else or is larger than a draft's."""
    size = file.stat().st_size
    what = f"at most {MAX_JSON_BYTES / 2**20:.0f} MB of JSON in {file}"
    require(size <= MAX_JSON_BYTES, what, round(size / 2**20), "download it again")
    return read_object(file, "download it again")
