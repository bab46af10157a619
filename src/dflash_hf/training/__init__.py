"""Training a draft: random anchors, one mask rule, a decaying cross entropy, acceptance walked without decoding."""

from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.data import Example
from dflash_hf.training.messages import prepare_multimodal_messages
from dflash_hf.training.regenerate import regenerate_answers
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.walking import WalkedAcceptance, walk, walked_acceptance

__all__ = [
    "ChatDataset",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "Example",
    "WalkedAcceptance",
    "prepare_multimodal_messages",
    "regenerate_answers",
    "walk",
    "walked_acceptance",
]
