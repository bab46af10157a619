"""Training data of the toy draft: prompts of the training split with the answers that the toy target gives to them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from answers import cached_answers, name_of
from build_tokenizer import TARGET_DIR
from tasks import KINDS, Kind, Split, make_sample
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dflash_hf.training import Example, regenerate_answers

DRAFT_DIR: Final = Path(__file__).resolve().parent / "draft"
MAX_NEW_TOKENS: Final = 256
# Prompts of each kind to train on.
NUM_PROMPTS: Final = "1500"
SUBJECT: Final = "the four generated kinds of task"
EXAMPLE: Final = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("demos/toy/target")
tokenizer = AutoTokenizer.from_pretrained("demos/toy/target")
draft = DFlashDraftModel.from_pretrained("demos/toy/draft")
messages = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = target.generate(**inputs, assistant_model=draft, max_new_tokens=256)"""


def load_target(target_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the target in float32 and its tokenizer."""
    target: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype="float32")
    return target.eval(), AutoTokenizer.from_pretrained(target_dir)


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, counts: Mapping[Kind, int], split: Split, first: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts of some samples and the reference answers, end token included, as ids."""
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for kind, count in counts.items():
        for index in range(first, first + count):
            sample = make_sample(kind, split, index)
            prompt: Any = tokenizer.apply_chat_template(
                list(sample.messages), add_generation_prompt=True
            )
            answer: Any = tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
            prompts.append(prompt["input_ids"])
            answers.append([*answer, tokenizer.eos_token_id])
    return prompts, answers


def answered_examples(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_dir: Path,
    counts: Mapping[Kind, int],
    split: Split = "train",
    first: int = 0,
) -> Sequence[Example]:
    """Return prompts with the target's greedy answers.

    Most answers are the reference answer: one forward confirms those, and only the others are generated.
    """
    prompts, references = encode_pairs(tokenizer, counts, split, first)
    eos_token_id: Any = tokenizer.eos_token_id
    pad_token_id: Any = tokenizer.pad_token_id

    def write() -> list[list[int]]:
        return regenerate_answers(
            target,
            prompts,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            batch_size=128,
            guesses=references,
        )

    rows = cached_answers(target_dir, name_of(split, counts, first), references, write)
    return [
        Example.from_pair(prompt, row["answer"]) for prompt, row in zip(prompts, rows, strict=True)
    ]


__all__ = [
    "DRAFT_DIR",
    "EXAMPLE",
    "KINDS",
    "NUM_PROMPTS",
    "SUBJECT",
    "TARGET_DIR",
    "answered_examples",
    "encode_pairs",
    "load_target",
]
