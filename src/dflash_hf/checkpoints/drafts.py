"""The two functions for checkpoints: load a draft in whatever format it has, save it in the one that is asked for."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import prod
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from dflash_hf.checkpoints.files import FLOAT_DTYPES, find_file, read_config, unshared
from dflash_hf.checkpoints.formats import FORMATS, is_draft
from dflash_hf.checkpoints.loading import check_plain
from dflash_hf.checkpoints.mapping import CheckpointFormat
from dflash_hf.checkpoints.names import FormatName
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.devices import brought_in
from dflash_hf.errors import listed, require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.support import check_pair

# The files of a draft that another one replaces; a tokenizer's and all others stay.
OF_A_DRAFT = ("*.safetensors*", "config.json", "generation_config.json", "adapter_config.json")


def load_draft(path_or_repo: str | PathLike[str], **kwargs: Any) -> DFlashDraftModel:
    """Loads a draft from a folder or the Hub.

    The format is recognised by the files: ours, z-lab's (also SpecForge's and Model-Optimizer's), speculators',
    Muse's, DeepSpec's for Qwen3 and for Gemma 4, or Laguna's.

    Args:
        path_or_repo (`str` or `os.PathLike`): Folder or Hub id.
        kwargs: Arguments of [`DFlashDraftModel.from_pretrained`], such as `dtype` and `device_map`.

    Raises:
        ValueError: See [`DFlashDraftModel.from_pretrained`].
    """
    return DFlashDraftModel.from_pretrained(path_or_repo, **kwargs)


def load_if_draft(path_or_repo: str, target: PreTrainedModel) -> DFlashDraftModel | str:
    """Loads a draft with a target's dtype onto its device; returns the name of any other checkpoint as it is.

    Raises `OSError`, as Transformers does, if there is no such checkpoint, and `ValueError` as [`load_draft`] does.
    """
    if not is_draft(read_config(path_or_repo, {})):
        return path_or_repo
    draft: Any = load_draft(path_or_repo, dtype=target.dtype)
    return draft.to(device=target.device)


def inspect_draft(path_or_repo: str | PathLike[str]) -> dict[str, Any]:
    """Says what a draft is, from its config and the headers of its weights; no weights are loaded.

    Args:
        path_or_repo (`str` or `os.PathLike`): Folder or Hub id, in any format.

    Returns:
        `dict[str, Any]`: Plain values: `format`, `is_dflash2`, `num_parameters`, `num_bytes`, `dtypes` (as safetensors
        spells them), `quantised_bits` (of a number in the files, `None` where weights are stored as they are),
        `num_proposals`, `target` (what the config, or the model card, names; else `None`), and fields of
        [`DFlashConfig`]. What is refused, and how, is as in [`DFlashDraftModel.from_pretrained`].
    """
    found = DFlashDraftModel._checked(path_or_repo, {}, {})
    config = found.config
    # What is stored and not loaded (a confidence head, the verifier's norm) is no part of the draft.
    weights = [tensor for tensor in found.found.values() if tensor.dtype in FLOAT_DTYPES]
    stored_files = {tensor.file for tensor in found.stored.values()}
    names = (
        "num_target_layers",
        "target_hidden_size",
        "target_layer_ids",
        "block_size",
        "mask_token_id",
        "num_hidden_layers",
        "hidden_size",
        "sliding_window",
        "vocab_size",
        "draft_vocab_size",
        "own_embed_tokens",
        "own_lm_head",
        "sample_from_anchor",
        "markov_rank",
    )
    return {
        "format": found.form.name,
        "is_dflash2": config.is_dflash2,
        "num_parameters": sum(prod(tensor.shape) for tensor in weights),
        "num_bytes": sum(file.stat().st_size for file in stored_files),
        "dtypes": sorted({tensor.dtype for tensor in weights}),
        "quantised_bits": found.quantised_bits,
        "num_proposals": config.num_proposals(config.block_size),
        "target": _named_target(path_or_repo, found.raw),
        **{name: getattr(config, name) for name in names},
    }


def named_target(path_or_repo: str) -> str | None:
    """Returns the target that the config or the model card of a draft names; `None` where its files cannot be read."""
    if not path_or_repo:
        return None
    try:
        return _named_target(path_or_repo, read_config(path_or_repo, {}))
    except (OSError, ValueError):
        return None


def _named_target(path_or_repo: str | PathLike[str], raw: Mapping[str, Any]) -> str | None:
    """The target that a speculators config or a model card names."""
    section = _dictionary(raw.get("speculators_config"))
    name = _dictionary(section.get("verifier")).get("name_or_path")
    if isinstance(name, str):
        return name or None
    card = find_file(path_or_repo, "README.md", {})
    if not card:
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    has_front = text.startswith("---") and text.count("---") > 1
    if not has_front:
        return None
    front = text.split("---")[1]
    found = re.search(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", front, re.MULTILINE)
    if not found:
        return None
    return found[1]


def _dictionary(value: Any) -> Mapping[str, Any]:
    """The value if it is a dictionary, else an empty one."""
    if isinstance(value, Mapping):
        return cast(Mapping[str, Any], value)
    return {}


def save_draft(
    draft: DFlashDraftModel,
    directory: str | PathLike[str],
    format: FormatName = "dflash",
    target: PreTrainedModel | None = None,
) -> None:
    """Saves a draft in one of seven formats.

    Args:
        draft (`DFlashDraftModel`): The draft; it is not changed.
        directory (`str` or `os.PathLike`): The folder; made if it is not there.
        format (`str`, defaults to `"dflash"`): `"dflash"`, our own; `"zlab"`, read by z-lab's package, SGLang and
            vLLM; `"speculators"`, read by vLLM; `"muse"`, read by Transformers' `MuseGlimmerAssistantModel`;
            `"deepspec"`; `"deepspec-gemma4"`; or `"laguna"`, read by vLLM. Only the first keeps
            `draft.generation_config`.
        target (`PreTrainedModel`, *optional*): The draft's target. Some formats need values of it: vocabulary and
            depth, copies of embedding and head (`"deepspec"`), its name (`"speculators"`). If a format has no place
            for the draft's own embedding and head, and they equal the target's, they are left out.

    Raises:
        ValueError: If the format is not known or cannot express the draft, if the draft's weights are quantised or
            offloaded, if it holds adapters, or if weights of the target are needed and not loaded. The message names
            the reason, and nothing is written.
    """
    require(format in tuple(FORMATS), f"format in {list(FORMATS)}", format, "choose one of them")
    check_plain(draft)
    chosen = FORMATS[format]
    if chosen.name == draft.config.model_type:
        draft.save_pretrained(directory)
        return
    config = copy.deepcopy(draft.config)
    state = dict(draft.state_dict())
    if target is not None:
        _complete(config, state, chosen, target)
    elsewhere = [name for name, tensor in state.items() if tensor.is_meta]
    action = "load it without offload, and save it then"
    require(not elsewhere, "a draft whose weights are loaded", listed(elsewhere), action)
    dtype = str(draft.dtype).removeprefix("torch.")
    has_target = target is not None
    written = chosen.write_config(config, dtype, frozenset(state), has_target=has_target)
    # Only now: this builds a model, and most drafts that a format cannot express are refused without one.
    differing = sorted(state.keys() ^ draft._shapes(config).keys())
    what = f"the weights of a draft in the format {chosen.name!r}"
    require(not differing, what, listed(differing), "save it in the format 'dflash'")
    if target is not None:
        architectures = target.config.architectures or [type(target).__name__]
        chosen.name_target(written, target.config.name_or_path or "", architectures)
    weights = {chosen.their_name(name): tensor for name, tensor in state.items()}
    weights |= chosen.derive(config, weights)
    weights = chosen.put_together(weights)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(unshared(weights), folder, metadata={"format": "pt"})
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


@contextmanager
def replaced(folder: Path) -> Generator[Path]:
    """Gives an empty folder to save a draft in; at its end the files in it replace the draft in `folder`.

    An exception within leaves `folder` as it was.
    """
    # A folder that is there may be on another file system than the one above it.
    near = folder if folder.is_dir() else folder.parent
    near.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=near, prefix=".draft-") as made:
        yield Path(made)
        folder.mkdir(exist_ok=True)
        for pattern in OF_A_DRAFT:
            for stale in folder.glob(pattern):
                stale.unlink()
        for file in Path(made).iterdir():
            file.replace(folder / file.name)


def _complete(
    config: DFlashConfig,
    state: dict[str, Tensor],
    chosen: CheckpointFormat,
    target: PreTrainedModel,
) -> None:
    """Adds what the target knows to a config and weights, in place, and takes out copies of its embedding and head."""
    found = find_target(target)
    check_pair(found, config)
    config.vocab_size = found.config.vocab_size
    config.num_target_layers = len(found.layers)
    # Of a plain embedding the module gives the rows of its weight.
    if type(found.embedding) is nn.Embedding and chosen.name != "zlab":
        config.raw_input_embeddings = True
    if chosen.has_vocabulary is None:
        return
    for flag, name, module in (
        ("own_embed_tokens", "embed_tokens.weight", found.embedding),
        ("own_lm_head", "lm_head.weight", found.head),
    ):
        has_own = bool(getattr(config, flag))
        # The format has a place for them and they are there, or neither.
        if chosen.has_vocabulary == has_own:
            continue
        # A copy: a tied pair would share its memory, and be saved once.
        theirs = _copied_weight(module)
        if chosen.has_vocabulary:
            state[name] = theirs.to(state["norm.weight"].dtype)
            setattr(config, flag, True)
        elif torch.equal(state[name], theirs.to(state[name])):
            del state[name]
            setattr(config, flag, False)


def _copied_weight(module: nn.Module) -> Tensor:
    """Returns a copy of a module's weight, also of one that is offloaded."""
    with brought_in(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        action = "load the target with its weights"
        require(not weight.is_meta, "a target with weights to copy", "the device 'meta'", action)
        return weight.detach().clone()
