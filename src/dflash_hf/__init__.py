"""This package adds DFlash speculative decoding to Transformers: `target.generate(..., assistant_model=draft)`.

Importing this package registers drafts with Transformers. It does not import Transformers or torch. The names below
and the modules of the package are imported at their first use.
"""

from typing import TYPE_CHECKING, Any

from dflash_hf.patching import disable, enable, register

__version__ = "0.1.0"  # the build reads the version from here

if TYPE_CHECKING:
    from dflash_hf.checkpoints.drafts import load_draft, save_draft
    from dflash_hf.configuration_dflash import DFlashConfig
    from dflash_hf.generation.batches import BatchAnswer, generate_batch
    from dflash_hf.generation.buffers import free_buffers
    from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
    from dflash_hf.generation.iterate import DFlashStep, iterate
    from dflash_hf.generation.running_batch import RunningBatch
    from dflash_hf.generation.stats import DFlashGenerateOutput, SpeculativeStats
    from dflash_hf.generation.tune import tune
    from dflash_hf.generation_config import DFlashGenerationConfig
    from dflash_hf.modeling_dflash import DFlashDraftModel
else:
    from importlib import import_module
    from importlib.util import find_spec

    _HOMES = {
        "BatchAnswer": "generation.batches",
        "DFlashCandidateGenerator": "generation.candidate_generator",
        "DFlashConfig": "configuration_dflash",
        "DFlashDraftModel": "modeling_dflash",
        "DFlashGenerateOutput": "generation.stats",
        "DFlashGenerationConfig": "generation_config",
        "DFlashStep": "generation.iterate",
        "RunningBatch": "generation.running_batch",
        "SpeculativeStats": "generation.stats",
        "free_buffers": "generation.buffers",
        "generate_batch": "generation.batches",
        "iterate": "generation.iterate",
        "load_draft": "checkpoints.drafts",
        "save_draft": "checkpoints.drafts",
        "tune": "generation.tune",
    }

    def __getattr__(name: str) -> Any:
        """Imports a public name, or a module of this package."""
        if name in _HOMES:
            value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif not name.startswith("__") and find_spec(f"{__name__}.{name}"):
            value = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Returns all names, including names that have not been imported yet."""
        return sorted({*globals(), *__all__})


register()

__all__ = [
    "BatchAnswer",
    "DFlashCandidateGenerator",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashGenerateOutput",
    "DFlashGenerationConfig",
    "DFlashStep",
    "RunningBatch",
    "SpeculativeStats",
    "disable",
    "enable",
    "free_buffers",
    "generate_batch",
    "iterate",
    "load_draft",
    "save_draft",
    "tune",
]
