"""This module registers the package with Transformers when `dflash_hf` is imported, so that no
other call is needed.

Afterwards `generate`, `pipeline`, `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know drafts, and
`AutoProcessor` knows Qwen's processors without torchvision. This imports no module of Transformers. A module of
Transformers is patched when it is imported, or at once if it has been imported. The modules of this package are not
imported either. They are registered by name and imported when they are needed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "dflash_hf"
MODEL_TYPE = "dflash"
# This is the type of Transformers' own draft, which its `AutoModelForCausalLM` does not know.
STOCK_TYPE = "muse_glimmer_assistant"
_MARK = "_dflash_original"


def enable() -> None:
    """Makes `generate` recognise DFlash drafts. Importing `dflash_hf` calls it. A second call changes nothing."""
    from transformers.generation import utils

    _wrap_generate(utils)


def disable() -> None:
    """Restores Transformers' own `generate`. A second call changes nothing.

    Raises:
        RuntimeError: If other code has wrapped `generate` since then. Undo that wrapping first.
    """
    from transformers.generation import utils

    mixin: Any = utils.GenerationMixin
    original = mixin.generate.__dict__.get(_MARK)
    if original is None:
        return
    if inspect.unwrap(mixin.generate, stop=lambda f: f is original) is not original:
        raise RuntimeError(
            "expected dflash_hf's generate, got one wrapped around it; undo that wrapping first"
        )
    mixin.generate = original


def register() -> None:
    """Registers this package with modules of Transformers, now or when they are imported.

    Importing `dflash_hf` calls it.
    """
    for name, tell in _TOLD.items():
        if name in sys.modules:
            tell(sys.modules[name])
    if not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _wrap_generate(utils: Any) -> None:
    """Wraps `generate` in a thin function. `generation.generate` handles the calls with a draft."""
    original = utils.GenerationMixin.generate
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from dflash_hf.undo import undo_stale

        undo_stale()
        # An assistant may also be a positional argument.
        if args or "assistant_model" in kwargs:
            from dflash_hf.generation.generate import generate_with

            return generate_with(original, self, *args, **kwargs)
        from dflash_hf.checkpoints.formats import check_is_no_draft

        check_is_no_draft(self)
        return original(self, **kwargs)

    setattr(generate, _MARK, original)
    utils.GenerationMixin.generate = generate


def _name_config(auto: Any) -> None:
    """Registers the config with `AutoConfig`.

    When a name is needed, its table looks it up in this package's module.
    """
    auto.CONFIG_MAPPING_NAMES[MODEL_TYPE] = "DFlashConfig"
    auto.CONFIG_MAPPING._modules[MODEL_TYPE] = sys.modules[PACKAGE]


def _name_model(auto: Any) -> None:
    """Registers the model with `AutoModel` and `AutoModelForCausalLM`, which load assistants, in the same way as
    `_name_config`.

    The keys of their tables are the names of config classes.
    """
    auto.MODEL_MAPPING_NAMES[MODEL_TYPE] = "DFlashDraftModel"
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = "DFlashDraftModel"
    for table in (auto.MODEL_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        table._modules[MODEL_TYPE] = sys.modules[PACKAGE]
        table._reverse_config_mapping["DFlashConfig"] = MODEL_TYPE
    # The draft model's error then explains how such a draft is loaded. Otherwise the error would only say that its
    # type is unknown.
    if STOCK_TYPE not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[STOCK_TYPE] = "DFlashDraftModel"
        auto.MODEL_FOR_CAUSAL_LM_MAPPING._modules[STOCK_TYPE] = sys.modules[PACKAGE]


def _load_by_name(base: Any) -> None:
    """Makes `pipeline(..., assistant_model=NAME)` load drafts.

    Transformers itself looks only for its own classes there.
    """
    original = base.load_assistant_model
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load_assistant_model(model: Any, assistant_model: Any, assistant_tokenizer: Any) -> Any:
        if isinstance(assistant_model, str):
            from dflash_hf.checkpoints.drafts import load_if_draft

            assistant_model = load_if_draft(assistant_model, model)
        return original(model, assistant_model, assistant_tokenizer)

    setattr(load_assistant_model, _MARK, original)
    base.load_assistant_model = load_assistant_model


def _replace_processors(auto: ModuleType) -> None:
    """Registers processors with `AutoProcessor`, whose table holds classes and not names."""
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        from dflash_hf.processing_qwen3_vl import register_processors

        register_processors(auto)


# Maps a module of Transformers to the function that patches it after it has been executed. A second call of such a
# function changes nothing.
_TOLD: dict[str, Callable[[ModuleType], None]] = {
    "transformers.generation.utils": _wrap_generate,
    "transformers.models.auto.configuration_auto": _name_config,
    "transformers.models.auto.modeling_auto": _name_model,
    "transformers.models.auto.processing_auto": _replace_processors,
    "transformers.pipelines.base": _load_by_name,
}


class _Finder(MetaPathFinder):
    """This finder finds the modules of `_TOLD` in their usual places, and patches them after they
    have been executed.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of `_TOLD`, or `None` for other modules, so that the next finder is asked."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _TOLD else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            _TOLD[fullname](module)

        loader.exec_module = execute_and_tell
        return spec
