"""This package trains drafts: it prepares data, trains on random blocks, and measures the walked acceptance."""

from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.chat_template import prepare_multimodal_messages
from dflash_hf.training.example import Example
from dflash_hf.training.example_files import read_examples
from dflash_hf.training.prepare import load_rows
from dflash_hf.training.prompts import PromptSettings, write_prompts
from dflash_hf.training.regenerate import check_answers
from dflash_hf.training.target_answers import regenerate_answers
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.vocabulary import frequent_tokens
from dflash_hf.training.walking import WalkedAcceptance, walk, walked_acceptance

__all__ = [
    "ChatDataset",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "Example",
    "OpenAIClient",
    "PromptSettings",
    "WalkedAcceptance",
    "check_answers",
    "frequent_tokens",
    "load_rows",
    "prepare_multimodal_messages",
    "read_examples",
    "regenerate_answers",
    "walk",
    "walked_acceptance",
    "write_prompts",
]
