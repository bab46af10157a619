"""The two functions for checkpoints: load a draft in whatever layout it has, save it in the one that is asked for."""

from __future__ import annotations

import copy
import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_hf.checkpoints import CheckpointFormat, Layout, get_format
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target import check_pair, find_target


def load_draft(path_or_repo: str | PathLike[str], **kwargs: Any) -> DFlashDraftModel:
    """Loads a draft from a folder or the Hub: ours, z-lab's (SpecForge's, Model-Optimizer's), speculators', Muse's, or
    DeepSpec's plain DFlash.

    Args:
        path_or_repo (`str` or `os.PathLike`): Folder or Hub id.
        kwargs: Arguments of [`DFlashDraftModel.from_pretrained`], such as `dtype` and `device_map`.

    Raises:
        ValueError: See [`DFlashDraftModel.from_pretrained`].
    """
    return DFlashDraftModel.from_pretrained(path_or_repo, **kwargs)


def save_draft(
    draft: DFlashDraftModel,
    directory: str | PathLike[str],
    layout: Layout = "dflash",
    target: PreTrainedModel | None = None,
) -> None:
    """Saves a draft in a layout of choice.

    Args:
        draft (`DFlashDraftModel`): The draft; it is not changed.
        directory (`str` or `os.PathLike`): The folder; made if it is not there.
        layout (`str`, defaults to `"dflash"`): `"dflash"`, our own; `"zlab"`, read by z-lab's package, SGLang and
            vLLM; `"speculators"`, read by vLLM; `"muse"`, read by Transformers' `MuseGlimmerAssistantModel`; or
            `"deepspec"`. Only the first keeps `draft.generation_config`.
        target (`PreTrainedModel`, *optional*): The draft's target, for what a layout needs and the draft does not
            hold: vocabulary and depth, copies of embedding and head (`"deepspec"`), its name (`"speculators"`). With
            it, a draft's own embedding and head are left out where the layout has no place for them and they equal the
            target's.

    Raises:
        ValueError: If the layout is not known, or cannot express the draft; the message names the fields, and nothing
            is written.
    """
    chosen = get_format(layout)
    if chosen.name == draft.config.model_type:
        draft.save_pretrained(directory)
        return
    config, state = copy.deepcopy(draft.config), dict(draft.state_dict())
    if target is not None:
        _complete(config, state, chosen, target)
    written = chosen.write_config(config, str(draft.dtype).removeprefix("torch."))
    if target is not None and chosen.name_target is not None:
        chosen.name_target(
            written, target.config.name_or_path or "", target.config.architectures or [type(target).__name__]
        )
    weights = {chosen.their_name(name): tensor for name, tensor in state.items()}
    weights |= chosen.derive(config, weights)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _complete(
    config: DFlashConfig, state: dict[str, Tensor], layout: CheckpointFormat, target: PreTrainedModel
) -> None:
    """Adds what the target knows to a config and weights, in place, and takes out copies of its embedding and head.

    Raises:
        ValueError: If the draft does not fit the target.
    """
    found = find_target(target)
    check_pair(found, config)
    config.vocab_size = found.config.vocab_size
    config.num_target_layers = len(found.layers)
    # Of a plain embedding the module gives the rows of its weight.
    if type(found.embedding) is nn.Embedding and layout.name != "zlab":
        config.raw_input_embeddings = True
    if layout.has_vocabulary is None:
        return
    for flag, name, module in (
        ("own_embed_tokens", "embed_tokens.weight", found.embedding),
        ("own_lm_head", "lm_head.weight", found.head),
    ):
        theirs = module.weight
        assert isinstance(theirs, Tensor)
        has_own = bool(getattr(config, flag))
        if layout.has_vocabulary and not has_own:
            # A copy: a tied pair would share its memory, and be saved once.
            state[name] = theirs.detach().to(state["norm.weight"].dtype, copy=True)
            setattr(config, flag, True)
        elif not layout.has_vocabulary and has_own and torch.equal(state[name], theirs.to(state[name])):
            del state[name]
            setattr(config, flag, False)


__all__ = ["load_draft", "save_draft"]
