"""Training a draft: random anchors, one mask rule, a decaying cross entropy, acceptance walked without decoding."""

from dflash_hf.training.acceptance import WalkedAcceptance, walk, walked_acceptance
from dflash_hf.training.config import DFlashTrainingConfig
from dflash_hf.training.data import Example, regenerate_answers
from dflash_hf.training.trainer import DFlashTrainer, StepReport

__all__ = [
    "DFlashTrainer",
    "DFlashTrainingConfig",
    "Example",
    "StepReport",
    "WalkedAcceptance",
    "regenerate_answers",
    "walk",
    "walked_acceptance",
]
