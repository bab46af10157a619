"""This module lets the target answer prompts with or without images, in left-padded batches."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_hf.target_model.parts import up_to_end
from dflash_hf.training.collators import Batch, collate, sorted_batches
from dflash_hf.training.example import Example, example_lengths
from dflash_hf.training.forward import forward_inputs

Prompt = Sequence[int] | Mapping[str, Any] | Example


@torch.no_grad()
def regenerate_answers(
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    eos_token_id: int | list[int],
    pad_token_id: int,
    batch_size: int = 64,
    guesses: Sequence[Sequence[int]] | None = None,
    draft: PreTrainedModel | None = None,
) -> list[list[int]]:
    """Writes the target's greedy answer to each prompt with `generate`, in batches of similar length.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (sequence): Prompts with their generation prompt. Each is a list of ids, the output of a processor for
            one prompt (including images), or an [`Example`] without an answer. If the sequence has `lengths` (like
            [`ChatDataset`]), its prompts are built when they are read, and only those of one batch are in memory.
        max_new_tokens (`int`): The maximum number of tokens of an answer.
        eos_token_id (`int` or `list[int]`): The tokens that end an answer, or `[]` if only the limit does.
        pad_token_id (`int`): The tokenizer's pad token.
        batch_size (`int`): Prompts per call.
        guesses (sequence of sequences of `int`, *optional*): A likely answer to each prompt, including its end token.
            One forward finds out whether the target would write this answer. Only the other answers are generated. An
            empty guess counts as no guess.
        draft (`PreTrainedModel`, *optional*): A draft for the target, which makes the call faster. The answers are the
            same.

    Returns:
        `list[list[int]]`: The tokens of each answer, including the end token unless the limit came first.

    Raises:
        ValueError: If there are not as many guesses as prompts, or a prompt holds an answer.
    """
    if guesses is None:
        guesses = [()] * len(prompts)
    if len(guesses) != len(prompts):
        raise ValueError(
            f"expected {len(prompts)} guesses (one per prompt), got {len(guesses)}; an empty guess is none"
        )
    examples: Any = prompts
    if not hasattr(prompts, "lengths"):
        examples = [as_prompt(prompt) for prompt in prompts]
    lengths = example_lengths(examples)
    confirmed = _confirmed_guesses(target, prompts, lengths, guesses, pad_token_id, batch_size)
    answers: dict[int, list[int]] = {}
    for index, guess in enumerate(guesses):
        if confirmed[index] and len(guess) <= max_new_tokens:
            answers[index] = list(guess)
    # A batch runs until its longest answer ends, so prompts are sorted by their guesses, which estimate this length.
    expected = [(len(guess), length) for guess, length in zip(guesses, lengths, strict=True)]
    missing = [index for index in range(len(prompts)) if index not in answers]
    for chosen in sorted_batches(missing, expected, batch_size):
        asked = [as_prompt(prompts[index]) for index in chosen]
        batch = collate(asked, pad_token_id, padding_side="left").to(target.device)
        options = {
            "do_sample": False,
            "max_new_tokens": max_new_tokens,
            "pad_token_id": pad_token_id,
        }
        written = generated(target, batch, eos_token_id, draft, **options)
        answers.update(zip(chosen, written, strict=True))
    return [answers[index] for index in range(len(prompts))]


@torch.no_grad()
def generated(
    target: PreTrainedModel,
    batch: Batch,
    eos_token_id: int | list[int],
    draft: PreTrainedModel | None = None,
    **options: Any,
) -> list[list[int]]:
    """Returns the tokens that `generate` writes after each row of a left-padded batch, up to the end token.

    Args:
        eos_token_id (`int` or `list[int]`): The tokens that end an answer, or `[]` if only the limit does.
        draft (`PreTrainedModel`, *optional*): A draft for the target.
        options: Further options of `generate`.
    """
    if draft is not None:
        options["assistant_model"] = draft
    output = target.generate(  # type: ignore[operator]
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask.to(torch.long),
        **batch.model_inputs,
        eos_token_id=eos_token_id or None,
        **options,
    )
    if isinstance(eos_token_id, int):
        eos_token_id = [eos_token_id]
    rows: list[list[int]] = output[:, batch.input_ids.shape[1] :].tolist()
    return [up_to_end(row, eos_token_id) for row in rows]


@contextmanager
def random_numbers_of(seed: int, device: torch.device) -> Generator[None]:
    """Seeds the random numbers within the block. After the block, the earlier random state is restored.

    Args:
        seed (`int`): The seed.
        device (`torch.device`): The device of the target. The state of other GPUs is not read, because each process
            would then use memory on all GPUs.
    """
    devices: list[torch.device] = []
    if device.type == "cuda":
        devices.append(device)
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def padding_of(tokenizer: Any, default: int) -> int:
    """Returns a tokenizer's padding token, or `default` if it has none."""
    if tokenizer.pad_token_id is None:
        return default
    return tokenizer.pad_token_id


def as_prompt(prompt: Prompt) -> Example:
    """Returns a prompt as an example without an answer. Raises `ValueError` if it has an answer."""
    if isinstance(prompt, Example):
        example = prompt
    else:
        example = Example.from_pair(prompt, [])
    if any(example.loss_mask):
        raise ValueError(
            f"expected a prompt without an answer, got one with {sum(example.loss_mask)} answer tokens; "
            "leave the assistant's last turn out"
        )
    return example


def _confirmed_guesses(
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    guesses: Sequence[Sequence[int]],
    pad_token_id: int,
    batch_size: int,
) -> list[bool]:
    """Returns for each guess True if it is the target's argmax at every position."""
    confirmed = [False] * len(prompts)
    whole = [length + len(guess) for length, guess in zip(lengths, guesses, strict=True)]
    for chosen in sorted_batches(
        (i for i, guess in enumerate(guesses) if guess), whole, batch_size
    ):
        batch = collate(
            [as_prompt(prompts[i]).with_answer(guesses[i]) for i in chosen], pad_token_id
        )
        batch = batch.to(target.device)
        output = target(**forward_inputs(target, batch), use_cache=False)
        best = output.logits.argmax(dim=-1)[:, :-1]
        right = ((best == batch.input_ids[:, 1:]) | ~batch.loss_mask[:, 1:]).all(dim=1)
        for index, good in zip(chosen, right.tolist(), strict=True):
            confirmed[index] = good
    return confirmed
