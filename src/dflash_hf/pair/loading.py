"""This module loads a target, its draft and its tokenizer or processor, for the command line and the benchmark.

torch and Transformers are imported only when something is loaded, so that `--help` and wrong options need neither.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_hf.data.image_files import check_pillow
from dflash_hf.data.row_files import read_object
from dflash_hf.errors import is_ours, listed, one_line, require, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from dflash_hf.modeling_dflash import DFlashDraftModel
    from dflash_hf.pair.answers import Processor

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
# The names of the CPU features on x86 and on ARM.
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# The JSON files of a folder that Transformers reads.
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "processor_config.json",
    "preprocessor_config.json",
    "model.safetensors.index.json",
)
CONFIG_FILES = ("config.json",)
# A tokenizer needs one of these files, and perhaps code of its own.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_place(option: str, place: str) -> None:
    """Raises `ValueError` for a path that does not exist. A Hub id has at most one slash and is looked up later."""
    looks_local = place.startswith((".", "~", "/")) or place.count("/") > 1
    if looks_local and not Path(place).exists():
        raise ValueError(
            f"expected a folder or a Hub id as {option}, got {place!r}, which is not there; fix the path"
        )


def _check_device(device: str) -> None:
    """Raises `ValueError` unless `device` is one of Transformers' device maps or a device of this machine."""
    if device in DEVICE_MAPS:
        return
    import torch

    from dflash_hf.devices import accelerator

    what = f"cpu, an accelerator such as cuda or cuda:1, or one of {', '.join(DEVICE_MAPS)} as --device"
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(f"expected {what}, got {device!r}; choose one of them") from None
    here = accelerator()
    count = 0
    found = "none"
    if here is not None:
        found = f"{torch.accelerator.device_count()} of type {here.type}"
    if here is not None and here.type == wanted.type:
        count = torch.accelerator.device_count()
    if wanted.type != "cpu" and (wanted.index or 0) >= count:
        raise ValueError(
            f"expected an accelerator of this machine as --device, got {device!r}, and it has {found}; pass cpu or "
            "auto"
        )


def takes_images(config: PreTrainedConfig) -> bool:
    """Returns True if Transformers has an image-text-to-text model for a config."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping


def config_of_target(target: str) -> PreTrainedConfig:
    """Reads a target's config.

    Raises `ValueError` if the config belongs to a draft (in any format), if Transformers does not know the model, or
    if the model is neither a causal language model nor an image-text-to-text model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

    from dflash_hf.checkpoints.formats import is_draft

    def read() -> PreTrainedConfig:
        # The file is read as it stands, because Transformers refuses a config without a model_type, as in speculators.
        written, _ = PreTrainedConfig.get_config_dict(target)
        if is_draft(written):
            raise ValueError(
                f"expected a target as --target, got the DFlash draft {target!r}; swap --target and --draft"
            )
        _check_model_type(target, written)
        return AutoConfig.from_pretrained(target)

    config = loaded("a config", target, read)
    # If a model has its own code, Transformers says what it needs.
    has_code = hasattr(config, "auto_map")
    is_loadable = type(config) in AutoModelForCausalLM._model_mapping or takes_images(config)
    if not is_loadable and not has_code:
        raise ValueError(
            f"expected a causal language model, or one of images and text, in {target}, got the model_type "
            f"{shown(config.model_type)}; give the folder of such a model"
        )
    return config


def _check_model_type(target: str, written: Mapping[str, Any]) -> None:
    """Raises `ValueError` if Transformers does not know the model of a config and the config names no code."""
    import transformers

    if "model_type" not in written or "auto_map" in written:
        return
    kind = written["model_type"]
    is_known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if not is_known:
        raise ValueError(
            f"expected a model that Transformers {transformers.__version__} knows in {target}, got the model_type "
            f"{shown(kind)}; update Transformers, or correct config.json"
        )


def load_processor(target: str) -> Processor:
    """Loads the processor or the tokenizer of a target, without any weights."""
    from transformers import AutoProcessor, AutoTokenizer

    if takes_images(config_of_target(target)):
        return loaded("a processor", target, lambda: AutoProcessor.from_pretrained(target))
    return loaded("a tokenizer", target, lambda: AutoTokenizer.from_pretrained(target))


def checked_files(target: str, dtype: str, device: str) -> tuple[Any, Processor]:
    """Checks the small files of a target before gigabytes are read: its config, and its processor or tokenizer.

    Returns:
        `tuple`: The auto class that loads the target, and the target's processor or tokenizer.

    Raises:
        ValueError: For the reasons of [`load_target`].
    """
    check_place("--target", target)
    require(dtype in DTYPES, f"one of {', '.join(DTYPES)} as --dtype", dtype, "choose one of them")
    _check_device(device)
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        PreTrainedTokenizerBase,
    )
    from transformers.utils import GENERATION_CONFIG_NAME, logging

    from dflash_hf.checkpoints.files import find_file, read_json

    logging.disable_progress_bar()
    model_class: Any = AutoModelForCausalLM
    if takes_images(config_of_target(target)):
        check_pillow()
        model_class = AutoModelForImageTextToText
    # Transformers would continue without a file of these settings if it cannot read the file.
    settings = find_file(target, GENERATION_CONFIG_NAME, {})
    if settings is not None:
        read_json(settings)
    processor: Any = load_processor(target)
    tokenizer = processor
    if not isinstance(processor, PreTrainedTokenizerBase):
        tokenizer = processor.tokenizer
    # Without tokenizer files, Transformers makes a tokenizer with an empty vocabulary.
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"expected a tokenizer in {target}, got none with a vocabulary; copy the tokenizer's files there"
        )
    return model_class, processor


def load_target(
    target: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, Processor]:
    """Loads a target, and its processor or tokenizer, from a folder or a Hub id.

    If the config belongs to an image-text-to-text model, this model is loaded with its processor. Otherwise, the
    causal language model is loaded with its tokenizer.

    Args:
        target (`str`): Folder or Hub id.
        dtype (`str`): Name of a torch dtype, or `"auto"` for the dtype in which the target was saved.
        device (`str`): A device map for Transformers. `"auto"` takes an accelerator if there is one.

    Raises:
        ValueError: If the target does not exist, is a draft, does not load, has no tokenizer or lacks weights; if
            there is no such dtype or device; or if Pillow is missing for a target that takes images.
    """
    import torch

    model_class, processor = checked_files(target, dtype, device)
    model = load_weights(model_class, target, dtype=dtype, device_map=device)
    is_half = model.dtype in (torch.bfloat16, torch.float16)
    is_slow = is_half and model.device.type == "cpu" and not has_bfloat16_instructions()
    if is_slow and dtype == "auto":
        saved = str(model.dtype).removeprefix("torch.")
        logger.warning(
            f"The target is loaded in {saved}, in which it was saved, and this CPU has no instructions for bfloat16; "
            "--dtype float32 takes twice the memory, and a verify is quicker."
        )
    return model, processor


def load_weights(model_class: Any, place: str, **options: Any) -> PreTrainedModel:
    """Loads a model by an auto class, with options of its `from_pretrained`. See [`loaded`] for damaged files.

    Raises `ValueError` if weights or stored buffers are in no file, because Transformers would continue with new
    values for them. For a quantised model, only names that end in `.weight` are checked. Biases and experts that share
    one tensor are not.
    """

    def read() -> PreTrainedModel:
        model, report = model_class.from_pretrained(place, output_loading_info=True, **options)
        # The report leaves out tied weights, and weights that the model's class can do without.
        missing = sorted(report["missing_keys"])
        if getattr(model, "hf_quantizer", None) is not None:
            # Some libraries make zero points and scales themselves, so the files need not contain them.
            missing = [name for name in missing if name.endswith(".weight")]
        if missing:
            raise ValueError(
                f"expected all weights of a {type(model).__name__} in {place}, got none for {listed(missing)}; "
                "download it again, or correct its index of weights or its config.json"
            )
        return model

    return loaded("weights", place, read)


def has_bfloat16_instructions() -> bool:
    """Returns True if the CPU has instructions for bfloat16. The features have the names that Linux uses.

    Returns False if the system does not list the features, as on macOS and Windows.
    """
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return False
    features = info.read_text(encoding="utf-8", errors="replace").split()
    return not BFLOAT16_FEATURES.isdisjoint(features)


def loaded(what: str, place: str, load: Callable[[], Loaded]) -> Loaded:
    """Loads something. If files are damaged, turns the errors of libraries into a `ValueError` that names the file.

    Errors of Transformers stay as they are if no file of a folder is at fault.
    """
    import torch

    try:
        return load()
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        folder = Path(place)
        damaged = _damaged_file(folder)
        # For a file that is not JSON or not UTF-8, Python raises a `ValueError` that names no file.
        is_pythons = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        is_sentence = isinstance(error, ValueError) and not is_pythons
        is_of_hub = isinstance(error, OSError) and not folder.is_dir()
        # Errors of Transformers have no number. Errors of the system have one, and say what is missing.
        numbers = (None, errno.ENOENT)
        is_of_system = isinstance(error, OSError) and error.errno not in numbers
        # The next two are not the fault of a file. Old torch and builds without `distributed` do not have them.
        is_of_device = isinstance(error, getattr(torch, "AcceleratorError", ()))
        is_of_ranks = isinstance(error, getattr(torch.distributed, "DistError", ()))
        if is_ours(error) or is_of_hub or is_of_system or is_of_device or is_of_ranks:
            raise
        fault = damaged or _missing_file(folder, what)
        if is_sentence and not fault:
            raise
        raise ValueError(
            f"expected {what} of a model in {place}, got files that do not load ({type(error).__name__}: "
            f"{one_line(error)}); download it again, or correct {fault or 'what it names'}"
        ) from error


def _damaged_file(folder: Path) -> str:
    """Returns which file of a model's folder is damaged, and how; an empty text if none is."""
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        return ""
    for name in JSON_FILES:
        file = folder / name
        try:
            if file.exists():
                read_object(file, "")
        except (OSError, ValueError):
            return f"{name}, which is no JSON object"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return f"{file.name}, which is not whole"
    return ""


def _missing_file(folder: Path, what: str) -> str:
    """Returns which file of a model's folder is missing; an empty text if none is missing or there is no folder."""
    found = {"a config": CONFIG_FILES, "a tokenizer": TOKENIZER_FILES}.get(what, ())
    if not folder.is_dir() or not found or any((folder / name).is_file() for name in found):
        return ""
    return f"{found[0]}, which is missing"


def load_pair(
    target: str, draft: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, DFlashDraftModel, Processor]:
    """Loads a target, its draft and its processor or tokenizer.

    The draft gets the target's dtype, and is loaded onto the target's first device. [`load_target`] describes the
    arguments and the errors.
    """
    check_place("--draft", draft)
    model, processor = load_target(target, dtype, device)
    from dflash_hf.devices import execution_device
    from dflash_hf.modeling_dflash import DFlashDraftModel

    # A device map of "auto" would spread the draft over all GPUs, but its buffers are on one.
    place = {"": execution_device(model)}
    assistant = loaded(
        "a draft",
        draft,
        lambda: DFlashDraftModel.from_pretrained(draft, dtype=model.dtype, device_map=place),
    )
    return model, assistant, processor
