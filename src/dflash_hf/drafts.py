"""The two functions for checkpoints: load a draft in whatever layout it has, save it in the one that is asked for."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict

from dflash_hf.checkpoints import Layout, get_format
from dflash_hf.modeling_dflash import DFlashDraftModel


def load_draft(path_or_repo: str | PathLike[str], **kwargs: Any) -> DFlashDraftModel:
    """Loads a draft from a folder or the Hub, in our own, z-lab's (SpecForge's, Model-Optimizer's) or Muse's layout.

    Args:
        path_or_repo (`str` or `os.PathLike`): Folder or Hub id.
        kwargs: Arguments of [`DFlashDraftModel.from_pretrained`], such as `dtype` and `device_map`.

    Raises:
        ValueError: See [`DFlashDraftModel.from_pretrained`].
    """
    return DFlashDraftModel.from_pretrained(path_or_repo, **kwargs)


def save_draft(draft: DFlashDraftModel, directory: str | PathLike[str], layout: Layout = "dflash") -> None:
    """Saves a draft in a layout of choice.

    Args:
        draft (`DFlashDraftModel`): The draft.
        directory (`str` or `os.PathLike`): The folder; made if it is not there.
        layout (`str`, defaults to `"dflash"`): `"dflash"`, our own; `"zlab"`, read by z-lab's package, SGLang and
            vLLM; or `"muse"`, read by Transformers' `MuseGlimmerAssistantModel`. Only the first keeps
            `draft.generation_config`.

    Raises:
        ValueError: If the layout is not known, or cannot express the draft; the message names the fields, and nothing
            is written.
    """
    chosen = get_format(layout)
    if chosen.name == draft.config.model_type:
        draft.save_pretrained(directory)
        return
    config = chosen.write_config(draft.config, str(draft.dtype).removeprefix("torch."))
    weights = {chosen.their_name(name): tensor for name, tensor in draft.state_dict().items()}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


__all__ = ["load_draft", "save_draft"]
