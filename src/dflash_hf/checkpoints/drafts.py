"""This module loads a draft from any known format and saves a draft in the format that is asked for."""

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

# The files of a draft that a newly saved draft replaces. Tokenizer files and all other files stay.
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
    """Loads a draft with a target's dtype onto the target's device. For any other checkpoint, returns its name.

    Raises `OSError`, as Transformers does, if there is no such checkpoint. Raises `ValueError` as [`load_draft`] does.
    """
    if not is_draft(read_config(path_or_repo, {})):
        return path_or_repo
    draft: Any = load_draft(path_or_repo, dtype=target.dtype)
    return draft.to(device=target.device)


def inspect_draft(path_or_repo: str | PathLike[str]) -> dict[str, Any]:
    """Describes a draft from its config and the headers of its weight files. No weights are loaded.

    Args:
        path_or_repo (`str` or `os.PathLike`): Folder or Hub id, in any format.

    Returns:
        `dict[str, Any]`: Plain values: `format`, `is_dflash2`, `num_parameters`, `num_bytes`, `dtypes` (in the
        spelling of safetensors), `quantised_bits` (bits per number in the files; `None` if weights are not quantised),
        `num_proposals`, `target` (the name in the config or the model card, or `None`), and fields of
        [`DFlashConfig`].

    Raises:
        ValueError: As [`DFlashDraftModel.from_pretrained`] does before it loads weights.
    """
    found = DFlashDraftModel._checked(path_or_repo, {}, {})
    config = found.config
    # Stored weights that are not loaded (a confidence head, the verifier's norm) are not part of the draft.
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
    """Returns the target that a draft's config or model card names; `None` if they name none or cannot be read."""
    if not path_or_repo:
        return None
    try:
        return _named_target(path_or_repo, read_config(path_or_repo, {}))
    except (OSError, ValueError):
        return None


def _named_target(path_or_repo: str | PathLike[str], raw: Mapping[str, Any]) -> str | None:
    """Returns the target that a speculators config or a model card names; `None` if there is no such name."""
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
    """Returns the value if it is a dictionary, and an empty dictionary otherwise."""
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
        draft (`DFlashDraftModel`): The draft. It is not changed.
        directory (`str` or `os.PathLike`): The folder. It is created if it does not exist.
        format (`str`, defaults to `"dflash"`): `"dflash"`, our own; `"zlab"`, read by z-lab's package, SGLang and
            vLLM; `"speculators"`, read by vLLM; `"muse"`, read by Transformers' `MuseGlimmerAssistantModel`;
            `"deepspec"`; `"deepspec-gemma4"`; or `"laguna"`, read by vLLM. Only `"dflash"` keeps
            `draft.generation_config`.
        target (`PreTrainedModel`, *optional*): The draft's target. Some formats need values of the target: vocabulary
            and depth, copies of embedding and head (`"deepspec"`), or its name (`"speculators"`). If a format has no
            place for the draft's own embedding and head, and they equal the target's, they are left out.

    Raises:
        ValueError: If the format is unknown or cannot express the draft, if the draft's weights are quantised or
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
    # This check comes last, because it builds a model. Most unsuitable drafts are refused before.
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
    """Gives an empty folder to save a draft in. At the end, the new files replace the draft in `folder`.

    If the block raises an exception, `folder` stays as it was.
    """
    # An existing folder may be on another file system than its parent, so the new files are written inside it.
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
    """Adds the target's values to a config and weights, in place, and removes copies of its embedding and head."""
    found = find_target(target)
    check_pair(found, config)
    config.vocab_size = found.config.vocab_size
    config.num_target_layers = len(found.layers)
    # The module of a plain embedding returns the rows of its weight as they are.
    if type(found.embedding) is nn.Embedding and chosen.name != "zlab":
        config.raw_input_embeddings = True
    if chosen.has_vocabulary is None:
        return
    for flag, name, module in (
        ("own_embed_tokens", "embed_tokens.weight", found.embedding),
        ("own_lm_head", "lm_head.weight", found.head),
    ):
        has_own = bool(getattr(config, flag))
        # Nothing to do if both the format and the draft have this weight, or if neither has it.
        if chosen.has_vocabulary == has_own:
            continue
        # A copy is needed: a tied embedding and head would share memory, and be saved only once.
        theirs = _copied_weight(module)
        if chosen.has_vocabulary:
            state[name] = theirs.to(state["norm.weight"].dtype)
            setattr(config, flag, True)
        elif torch.equal(state[name], theirs.to(state[name])):
            del state[name]
            setattr(config, flag, False)


def _copied_weight(module: nn.Module) -> Tensor:
    """Returns a copy of a module's weight, also if the weight is offloaded."""
    with brought_in(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        action = "load the target with its weights"
        require(not weight.is_meta, "a target with weights to copy", "the device 'meta'", action)
        return weight.detach().clone()
