"""Training data of the toy draft: prompts of the training split with the answers that the toy target gives to them.

Answers are cached under build/, in a file whose name depends on the target's weights and on the prompts.
"""

import hashlib
import json
from pathlib import Path
from typing import Final

from tasks import KINDS, Kind, Split, make_sample
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.training import Example, regenerate_answers

CACHE_DIR: Final = Path(__file__).resolve().parents[2] / "build" / "toy_draft"
MAX_NEW_TOKENS: Final = 256


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, kinds: tuple[Kind, ...], split: Split, first: int, count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts of some samples and the reference answers, end token included, as ids; kinds alternate."""
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for index in range(first, first + count):
        for kind in kinds:
            sample = make_sample(kind, split, index)
            prompt = tokenizer.apply_chat_template(list(sample.messages), add_generation_prompt=True)["input_ids"]
            answer = tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
            prompts.append(prompt)
            answers.append([*answer, tokenizer.eos_token_id])
    return prompts, answers


def answered_examples(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_dir: Path,
    count: int,
    split: Split = "train",
    kinds: tuple[Kind, ...] = KINDS,
    first: int = 0,
    batch_size: int = 128,
) -> list[Example]:
    """Return prompts with the target's greedy answers, from the cache where it has them.

    Most answers are the reference answer: one forward confirms those, and only the others are generated.
    """
    weights = hashlib.blake2b((target_dir / "model.safetensors").read_bytes(), digest_size=8).hexdigest()
    cache = CACHE_DIR / f"answers-{weights}-{split}-{'_'.join(kinds)}-{first}-{count}.jsonl"
    if not cache.is_file():
        prompts, references = encode_pairs(tokenizer, kinds, split, first, count)
        answers = regenerate_answers(
            target,
            prompts,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            batch_size=batch_size,
            guesses=references,
        )
        cache.parent.mkdir(parents=True, exist_ok=True)
        scratch = cache.with_suffix(".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            for prompt, answer, reference in zip(prompts, answers, references, strict=True):
                file.write(
                    json.dumps({"prompt": prompt, "answer": answer, "as_reference": answer == reference}) + "\n"
                )
        scratch.replace(cache)
    with cache.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [Example.from_pair(row["prompt"], row["answer"]) for row in rows]
