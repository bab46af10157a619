"""Loading a target with its draft and its tokenizer or processor, for the command line.

torch and Transformers are imported when something is loaded: `--help` and a wrong option are answered without.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from dflash_hf.evaluation.harness import Processor
    from dflash_hf.modeling_dflash import DFlashDraftModel


def check_place(option: str, place: str) -> None:
    """Raises `ValueError` for a path that is not there; a Hub id has at most one slash and is looked up later."""
    looks_local = place.startswith((".", "~", "/")) or place.count("/") > 1
    if looks_local and not Path(place).exists():
        raise ValueError(f"expected a folder or a Hub id as {option}, got {place!r}, which is not there; fix the path")


def takes_images(config: PreTrainedConfig) -> bool:
    """Returns True if Transformers has an image-text-to-text model for a config."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping


def load_pair(
    target: str, draft: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, DFlashDraftModel, Processor]:
    """Loads a target, its draft and what encodes its prompts from folders or Hub ids.

    Where the target's config is of an image-text-to-text model that is loaded with its processor, else the causal
    language model with its tokenizer.

    Args:
        target, draft (`str`): Where they are.
        dtype (`str`): A torch dtype's name, or `"auto"` for what the checkpoints say.
        device (`str`): A device map for Transformers; `"auto"` takes an accelerator where there is one.

    Raises `ValueError` if one of them is not there, if the target is a draft, or the draft is none or does not load.
    """
    for option, place in (("--target", target), ("--draft", draft)):
        check_place(option, place)
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )
    from transformers.utils import logging

    from dflash_hf.configuration_dflash import DFlashConfig
    from dflash_hf.modeling_dflash import DFlashDraftModel

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(target)
    if config.model_type == DFlashConfig.model_type:
        raise ValueError(f"expected a target as --target, got the DFlash draft {target!r}; swap --target and --draft")
    with_images = takes_images(config)
    model_class = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    encoder = AutoProcessor if with_images else AutoTokenizer
    processor: Any = encoder.from_pretrained(target)
    model = model_class.from_pretrained(target, dtype=dtype, device_map=device)
    assistant = DFlashDraftModel.from_pretrained(draft, dtype=dtype, device_map=device)
    return model, assistant, processor
