"""Loading a target with its draft and its tokenizer or processor, for the command line and the benchmark.

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
    """Says of a path that there is nothing; a Hub id has at most one slash and is looked up later.

    Raises:
        ValueError: Naming the option.
    """
    looks_local = place.startswith((".", "~", "/")) or place.count("/") > 1
    if looks_local and not Path(place).exists():
        raise ValueError(f"expected a folder or a Hub id as {option}, got {place!r}, which is not there; fix the path")


def takes_images(config: PreTrainedConfig) -> bool:
    """Returns True if Transformers has an image-text-to-text model for a config."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping


def load_target(target: str, dtype: str = "auto", device: str = "auto") -> tuple[PreTrainedModel, Processor]:
    """Loads a target and what encodes its prompts from a folder or a Hub id.

    Where the target's config is of an image-text-to-text model that is loaded with its processor, else the causal
    language model with its tokenizer.

    Args:
        target (`str`): Where it is.
        dtype (`str`): A torch dtype's name, or `"auto"` for what the checkpoint says.
        device (`str`): A device map for Transformers; `"auto"` takes an accelerator where there is one.

    Raises:
        ValueError: If it is not there, or is a draft.
    """
    check_place("--target", target)
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )
    from transformers.utils import logging

    from dflash_hf.configuration_dflash import DFlashConfig

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(target)
    if config.model_type == DFlashConfig.model_type:
        raise ValueError(f"expected a target as --target, got the DFlash draft {target!r}; swap --target and --draft")
    model_class = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
    model = model_class.from_pretrained(target, dtype=dtype, device_map=device)
    processor: Any = (AutoProcessor if takes_images(config) else AutoTokenizer).from_pretrained(target)
    return model, processor


def load_pair(
    target: str, draft: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, DFlashDraftModel, Processor]:
    """Loads a target, its draft and what encodes its prompts from folders or Hub ids.

    Args:
        target, draft (`str`): Where they are.
        dtype, device (`str`): As [`load_target`] takes them.

    Raises:
        ValueError: If one of them is not there, if the target is a draft, or if the draft is none or does not load.
    """
    for option, place in (("--target", target), ("--draft", draft)):
        check_place(option, place)
    model, processor = load_target(target, dtype, device)
    from dflash_hf.modeling_dflash import DFlashDraftModel

    return model, DFlashDraftModel.from_pretrained(draft, dtype=dtype, device_map=device), processor


__all__ = ["check_place", "load_pair", "load_target", "takes_images"]
