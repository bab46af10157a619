"""The target's own answers to prompts with and without images, in left-padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_hf.training.collators import Batch, collate, sorted_batches
from dflash_hf.training.data import Example, example_lengths
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
        prompts (sequence): Prompts, generation prompt included: ids, what a processor gives for one prompt (images
            included), or an [`Example`] without an answer. Only those of a batch are held at a time, so a sequence may
            build them when asked; see [`ChatDataset`].
        max_new_tokens (`int`): Longest answer in tokens.
        eos_token_id (`int` or `list[int]`): What ends an answer; `[]` if only the limit does.
        pad_token_id (`int`): Of the tokenizer.
        batch_size (`int`): Prompts per call.
        guesses (sequence of sequences of `int`, *optional*): A likely answer to each prompt, its end token included.
            One forward tells whether it is what the target would write; only the others are generated. An empty guess
            is none.
        draft (`PreTrainedModel`, *optional*): A draft of the target's, which makes it faster; the answers are the
            same.

    Returns:
        `list[list[int]]`: Answer ids, the end token included unless the limit came first.

    Raises:
        ValueError: If there are not as many guesses as prompts, or a prompt holds an answer.
    """
    guesses = [()] * len(prompts) if guesses is None else guesses
    if len(guesses) != len(prompts):
        raise ValueError(
            f"expected {len(prompts)} guesses (one per prompt), got {len(guesses)}; an empty guess is none"
        )
    examples: Any = (
        prompts if hasattr(prompts, "lengths") else [as_prompt(prompt) for prompt in prompts]
    )
    lengths = example_lengths(examples)
    confirmed = _confirmed_guesses(target, prompts, lengths, guesses, pad_token_id, batch_size)
    answers = [
        list(guess) if right and len(guess) <= max_new_tokens else None
        for guess, right in zip(guesses, confirmed, strict=True)
    ]
    # A batch runs as long as its longest answer, for which a guess is the best sign there is.
    expected = [(len(guess), length) for guess, length in zip(guesses, lengths, strict=True)]
    missing = [i for i, answer in enumerate(answers) if answer is None]
    for chosen in sorted_batches(missing, expected, batch_size):
        batch = collate(
            [as_prompt(prompts[i]) for i in chosen], pad_token_id, padding_side="left"
        ).to(target.device)
        options = {
            "do_sample": False,
            "max_new_tokens": max_new_tokens,
            "pad_token_id": pad_token_id,
        }
        written = generated(target, batch, eos_token_id, draft, **options)
        for index, answer in zip(chosen, written, strict=True):
            answers[index] = answer
    return [answer for answer in answers if answer is not None]


@torch.no_grad()
def generated(
    target: PreTrainedModel,
    batch: Batch,
    eos_token_id: int | list[int],
    draft: PreTrainedModel | None = None,
    **options: Any,
) -> list[list[int]]:
    """Returns what `generate` writes behind each row of a left-padded batch, up to its end token.

    Args:
        eos_token_id (`int` or `list[int]`): What ends an answer; `[]` if only the limit does.
        draft (`PreTrainedModel`, *optional*): A draft of the target's.
        options: Of `generate`.
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
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    rows: list[list[int]] = output[:, batch.input_ids.shape[1] :].tolist()
    lengths = [
        next((at + 1 for at, token in enumerate(row) if token in ends), len(row)) for row in rows
    ]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def as_prompt(prompt: Prompt) -> Example:
    """Returns a prompt as an example without an answer; raises `ValueError` if it has one."""
    example = prompt if isinstance(prompt, Example) else Example.from_pair(prompt, [])
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
