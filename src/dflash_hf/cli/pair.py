"""Loading a target with its draft and tokenizer, for the subcommands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.modeling_dflash import DFlashDraftModel

# A clone has the bundled pair beside the package; an installed wheel has not.
BUNDLED = Path(__file__).resolve().parents[3] / "demos" / "toy"


def check_place(option: str, place: str) -> None:
    """Says of a path that there is nothing; a Hub id has at most one slash and is looked up later.

    Raises:
        ValueError: Naming the option.
    """
    looks_local = place.startswith((".", "~", "/")) or place.count("/") > 1
    if looks_local and not Path(place).exists():
        raise ValueError(
            f"expected a folder or a Hub id as {option}, got {place!r}, which is not there; mend the path"
        )


def load_pair(
    target: str, draft: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    """Loads a target, its draft and its tokenizer from folders or Hub ids.

    Args:
        target, draft (`str`): Where they are.
        dtype (`str`): A torch dtype's name, or `"auto"` for what the checkpoints say.
        device (`str`): A device map for Transformers; `"auto"` takes an accelerator where there is one.

    Raises:
        ValueError: If one of them is not there, if the target is a draft, or if the draft is none or does not load.
    """
    logging.disable_progress_bar()
    for option, place in (("--target", target), ("--draft", draft)):
        check_place(option, place)
    if AutoConfig.from_pretrained(target).model_type == DFlashConfig.model_type:
        raise ValueError(f"expected a target as --target, got the DFlash draft {target!r}; swap --target and --draft")
    settings: dict[str, Any] = {"dtype": dtype, "device_map": device}
    model = AutoModelForCausalLM.from_pretrained(target, **settings)
    return model, DFlashDraftModel.from_pretrained(draft, **settings), AutoTokenizer.from_pretrained(target)


__all__ = ["BUNDLED", "check_place", "load_pair"]
