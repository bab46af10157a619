"""Loading a target with its draft and tokenizer, for the subcommands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from dflash_hf.modeling_dflash import DFlashDraftModel

# A clone has the bundled pair beside the package; an installed wheel has not.
BUNDLED = Path(__file__).resolve().parents[3] / "demos" / "toy"


def load_pair(
    target: str, draft: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    """Loads a target, its draft and its tokenizer from folders or Hub ids.

    Args:
        target, draft (`str`): Where they are.
        dtype (`str`): A torch dtype's name, or `"auto"` for what the checkpoints say.
        device (`str`): A device map for Transformers; `"auto"` takes an accelerator where there is one.

    Raises:
        ValueError: If the draft is none, or does not load.
    """
    logging.disable_progress_bar()
    settings: dict[str, Any] = {"dtype": dtype, "device_map": device}
    model = AutoModelForCausalLM.from_pretrained(target, **settings)
    return model, DFlashDraftModel.from_pretrained(draft, **settings), AutoTokenizer.from_pretrained(target)


__all__ = ["BUNDLED", "load_pair"]
