"""Training data of the hybrid draft: prompts of the easier kinds of text, with the hybrid target's own answers."""

from typing import Final

from draft_data import answered_examples, load_target
from hybrid_target import HYBRID_DIR, HYBRID_KINDS

KINDS: Final = HYBRID_KINDS
TARGET_DIR: Final = HYBRID_DIR / "target"
DRAFT_DIR: Final = HYBRID_DIR / "draft"
NUM_PROMPTS: Final = "1200"
SUBJECT: Final = "three generated kinds of task"
EXAMPLE: Final = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("demos/toy/hybrid/target")
tokenizer = AutoTokenizer.from_pretrained("demos/toy/hybrid/target")
draft = DFlashDraftModel.from_pretrained("demos/toy/hybrid/draft")
messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = target.generate(**inputs, assistant_model=draft, max_new_tokens=256)"""

__all__ = [
    "DRAFT_DIR",
    "EXAMPLE",
    "KINDS",
    "NUM_PROMPTS",
    "SUBJECT",
    "TARGET_DIR",
    "answered_examples",
    "load_target",
]
