"""What `import dflash_hf` leaves behind in Transformers, so that nothing else has to be called.

`generate`, `pipeline`, `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know drafts, and `AutoProcessor` Qwen's
processors without torchvision. No module of Transformers is imported for it: what one has to be told, it is told when
it is imported, or at once where it has been. Nor are our own: they are named there, and imported when somebody asks
for them.
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
# Transformers' own draft, which its `AutoModelForCausalLM` does not know.
STOCK_TYPE = "muse_glimmer_assistant"
_MARK = "_dflash_original"


def enable() -> None:
    """Makes `generate` recognise DFlash drafts. Importing `dflash_hf` does it; calling it again changes nothing."""
    from transformers.generation import utils

    _wrap_generate(utils)


def disable() -> None:
    """Puts Transformers' own `generate` back; calling it again changes nothing.

    Raises:
        RuntimeError: If something else has wrapped `generate` since; undo that first.
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
    """Tells Transformers' modules of this package, as it does when it is imported: now, or when they are imported."""
    for name, tell in _TOLD.items():
        if name in sys.modules:
            tell(sys.modules[name])
    if not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _wrap_generate(utils: Any) -> None:
    """Puts a shim around `generate`; what it does with a draft is in `generation.generate`."""
    original = utils.GenerationMixin.generate
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from dflash_hf.undo import undo_stale

        undo_stale()
        # An assistant may also come by position.
        if args or "assistant_model" in kwargs:
            from dflash_hf.generation.generate import generate_with

            return generate_with(original, self, *args, **kwargs)
        from dflash_hf.checkpoints.formats import check_is_no_draft

        check_is_no_draft(self)
        return original(self, **kwargs)

    setattr(generate, _MARK, original)
    utils.GenerationMixin.generate = generate


def _name_config(auto: Any) -> None:
    """`AutoConfig`: its table looks a name up in a module, which is this package, when it is asked for it."""
    auto.CONFIG_MAPPING_NAMES[MODEL_TYPE] = "DFlashConfig"
    auto.CONFIG_MAPPING._modules[MODEL_TYPE] = sys.modules[PACKAGE]


def _name_model(auto: Any) -> None:
    """`AutoModel` and `AutoModelForCausalLM`, by which assistants are loaded: as `_name_config`.

    Their tables are asked by a config's class, which they know by name.
    """
    auto.MODEL_MAPPING_NAMES[MODEL_TYPE] = "DFlashDraftModel"
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = "DFlashDraftModel"
    for table in (auto.MODEL_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        table._modules[MODEL_TYPE] = sys.modules[PACKAGE]
        table._reverse_config_mapping["DFlashConfig"] = MODEL_TYPE
    # Which then says how it is loaded, and not what it does not recognise.
    if STOCK_TYPE not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[STOCK_TYPE] = "DFlashDraftModel"
        auto.MODEL_FOR_CAUSAL_LM_MAPPING._modules[STOCK_TYPE] = sys.modules[PACKAGE]


def _load_by_name(base: Any) -> None:
    """`pipeline(..., assistant_model=NAME)`: Transformers looks there for classes of its own alone."""
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
    """`AutoProcessor`: its table holds classes."""
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        from dflash_hf.processing_qwen3_vl import register_processors

        register_processors(auto)


# Module of Transformers' -> what is to be told to it once it has been executed; telling it twice changes nothing.
_TOLD: dict[str, Callable[[ModuleType], None]] = {
    "transformers.generation.utils": _wrap_generate,
    "transformers.models.auto.configuration_auto": _name_config,
    "transformers.models.auto.modeling_auto": _name_model,
    "transformers.models.auto.processing_auto": _replace_processors,
    "transformers.pipelines.base": _load_by_name,
}


class _Finder(MetaPathFinder):
    """Finds the modules of `_TOLD` where they would be found anyway, and tells them when they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the module's own spec; `None`, for the next finder to be asked, for all other modules."""
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
