"""This module loads a target's embedding and head without its layers, for training with a server that runs the target.

The other weights stay on the meta device, where they have shapes but take no memory. Only the files with the weights
that are needed are read, and only these are downloaded from the Hub.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from dflash_hf.checkpoints.files import find_file
from dflash_hf.checkpoints.fresh import vocabulary_of
from dflash_hf.data.row_files import read_object
from dflash_hf.devices import accelerator
from dflash_hf.errors import listed, one_line, require
from dflash_hf.pair.answers import Processor
from dflash_hf.pair.loading import DEVICE_MAPS, checked_files, config_of_target


def load_vocabulary(
    target: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, Processor]:
    """Loads a target of which only the embedding and the head can be used, with its processor or tokenizer.

    Args:
        target (`str`): Folder or Hub id.
        dtype (`str`): Name of a torch dtype, or `"auto"` for the dtype in which the target was saved.
        device (`str`): Device of the embedding and the head. `"auto"` takes an accelerator if there is one.

    Raises:
        ValueError: For the reasons of [`load_target`], or if the target's files do not contain the weights under the
            names that the target's class uses.
    """
    model_class, processor = checked_files(target, dtype, device)
    options: dict[str, Any] = {}
    if dtype != "auto":
        options["dtype"] = getattr(torch, dtype)
    # Buffers are computed and not stored, so they must not be on the meta device.
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(config_of_target(target), **options)
    with suppress(OSError):  # without such a file, the default of the class stays
        model.generation_config = GenerationConfig.from_pretrained(target)
    place = torch.device(device) if device not in DEVICE_MAPS else accelerator()
    _fill_vocabulary(model, target, place or torch.device("cpu"))
    return model.eval(), processor


def _fill_vocabulary(model: PreTrainedModel, target: str, place: torch.device) -> None:
    """Reads the weights of the embedding and the head into the model."""
    embedding, head = vocabulary_of(model)
    names = {module: name for name, module in model.named_modules()}
    files = _stored_names(target)
    # Transformers ties by the config of the whole model. The config of the text part may say something else.
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    parts = [embedding] if is_tied else [embedding, head]
    for part in parts:
        for kind, weight in part.named_parameters(recurse=False):
            stored = _stored_name(f"{names[part]}.{kind}", files, target)
            with _opened(target, files[stored]) as file:
                value: Tensor = file.get_tensor(stored)
            is_alike = value.shape == weight.shape
            what = f"{stored} of shape {tuple(weight.shape)} in {target}"
            require(is_alike, what, tuple(value.shape), "give the target's own folder")
            setattr(part, kind, nn.Parameter(value.to(place, weight.dtype), requires_grad=False))
    if is_tied:
        head.weight = embedding.weight


def _stored_names(target: str) -> dict[str, str]:
    """Returns a map from the names of a target's stored weights to their files."""
    whole = find_file(target, SAFE_WEIGHTS_NAME, {})
    if whole is not None:
        with _opened(target, SAFE_WEIGHTS_NAME) as file:
            return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    index = find_file(target, SAFE_WEIGHTS_INDEX_NAME, {})
    if index is None:
        raise ValueError(
            f"expected safetensors weights in {target}, got none; convert the checkpoint"
        )
    # This index may be larger than that of a draft, so `read_json` could refuse it.
    content = read_object(index, "download it again")
    files: Any = content.get("weight_map")
    has_names = isinstance(files, dict) and all(isinstance(file, str) for file in files.values())
    require(has_names, f"weight_map from names to files in {index}", files, "download it again")
    return dict(files)


def _stored_name(name: str, files: dict[str, str], target: str) -> str:
    """Returns the name under which a weight is stored: its own name, or the only name with the same last two parts."""
    if name in files:
        return name
    end = ".".join(name.split(".")[-2:])
    found = [stored for stored in files if f".{stored}".endswith(f".{end}")]
    what = f"one weight {name} in {target}"
    require(len(found) == 1, what, listed(found) or "none", "load the whole target")
    return found[0]


@contextmanager
def _opened(target: str, file: str) -> Generator[Any]:
    """Opens one of a target's weight files. Its tensors are read to the CPU."""
    path = find_file(target, file, {})
    try:
        with safe_open(path or Path(file), framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"expected whole safetensors files in {target}, got {file} ({one_line(error)}); download it again"
        ) from error
