"""DFlash speculative decoding inside Transformers: `target.generate(..., assistant_model=draft)`."""

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.drafts import load_draft, save_draft
from dflash_hf.generation.buffers import free_buffers
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.integration import disable, enable
from dflash_hf.generation.iterate import DFlashStep, iterate
from dflash_hf.generation.outputs import DFlashGenerateOutput
from dflash_hf.generation.stats import SpeculativeStats
from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.processing_qwen3_vl import register as register_processor

enable()
register_processor()

__all__ = [
    "DFlashCandidateGenerator",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashGenerateOutput",
    "DFlashGenerationConfig",
    "DFlashStep",
    "SpeculativeStats",
    "disable",
    "enable",
    "free_buffers",
    "iterate",
    "load_draft",
    "save_draft",
]
