"""Training examples: token ids and which of them the target wrote. Nothing here reads files or downloads.

Answers must be the target's own: `regenerate_answers` writes them with the target, greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sequence.

    Args:
        input_ids (`list[int]`): Prompt and answer.
        loss_mask (`list[int]`): 1 on tokens that the target wrote, else 0; as long as `input_ids`.
        model_inputs (`dict[str, torch.Tensor]`): What else the target's forward takes, as its processor gives it for
            one example but without a batch dimension: `pixel_values`, `image_grid_thw`, `mm_token_type_ids` ... One
            value per token (shape `[S]`) is padded with the row; anything else is joined along its first dimension.

    Raises:
        ValueError: If the lengths differ.
    """

    input_ids: list[int]
    loss_mask: list[int]
    model_inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise ValueError(
                f"expected a loss_mask of {len(self.input_ids)} entries (one per token), got {len(self.loss_mask)}; "
                "give every token a 0 or a 1"
            )

    @classmethod
    def from_pair(cls, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Example:
        """Joins a prompt (generation prompt included) and the answer that the target gave to it (EOS included)."""
        mask = [0] * len(prompt_ids) + [1] * len(answer_ids)
        return cls(input_ids=[*prompt_ids, *answer_ids], loss_mask=mask)

    @classmethod
    def from_messages(cls, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> Example:
        """Applies the chat template; all assistant turns count as the target's.

        Raises:
            ValueError: If the template does not mark what the assistant writes.
        """
        encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        assert not isinstance(encoded, (str, list))
        mask = list(encoded["assistant_masks"])
        if not any(mask):
            raise ValueError(
                "expected a chat template with {% generation %} around assistant turns, got one that marks nothing; "
                "add the markers or build the example with Example.from_pair"
            )
        return cls(input_ids=list(encoded["input_ids"]), loss_mask=mask)

    def prompt_length(self) -> int:
        """Returns the number of tokens before the first one that the target wrote."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.loss_mask)


def truncate(example: Example, max_length: int) -> Example:
    """Cuts a text example at `max_length` tokens.

    Raises:
        ValueError: If the example has inputs beside its tokens, and would lose tokens that belong to them.
    """
    if example.model_inputs and len(example.input_ids) > max_length:
        raise ValueError(
            f"expected at most {max_length} tokens in an example with {', '.join(example.model_inputs)}, got "
            f"{len(example.input_ids)}; drop the example, cutting it could cut an image"
        )
    if len(example.input_ids) <= max_length:
        return example
    return Example(input_ids=example.input_ids[:max_length], loss_mask=example.loss_mask[:max_length])


@torch.no_grad()
def regenerate_answers(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_id: int | list[int],
    pad_token_id: int,
    batch_size: int = 64,
    guesses: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Writes the target's greedy answer to each prompt with plain `generate`, in batches of similar length.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (sequence of sequences of `int`): Prompt ids, generation prompt included.
        max_new_tokens (`int`): Longest answer in tokens.
        eos_token_id, pad_token_id (`int`): Of the tokenizer.
        batch_size (`int`): Prompts per call.
        guesses (sequence of sequences of `int`, *optional*): A likely answer to each prompt, its end token included.
            One forward tells whether it is what the target would write; only the others are generated. An empty guess
            is none.

    Returns:
        `list[list[int]]`: Answer ids, the end token included unless the limit came first.
    """
    answers: list[list[int] | None] = [None] * len(prompts)
    if guesses is not None:
        confirmed = _confirmed_guesses(target, prompts, guesses, pad_token_id, batch_size)
        for index, right in enumerate(confirmed):
            if right and len(guesses[index]) <= max_new_tokens:
                answers[index] = list(guesses[index])
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    # A batch runs as long as its longest answer, for which a guess is the best sign there is.
    expected = [len(guess) for guess in guesses] if guesses is not None else [0] * len(prompts)
    missing = [i for i, answer in enumerate(answers) if answer is None]
    order = sorted(missing, key=lambda i: (expected[i], len(prompts[i])))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids, mask = _pad([prompts[i] for i in chosen], pad_token_id, left=True)
        output = target.generate(  # type: ignore[operator]
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
        for index, row in zip(chosen, output[:, ids.shape[1] :].tolist(), strict=True):
            stop = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
            answers[index] = row[:stop]
    return [answer for answer in answers if answer is not None]


def _confirmed_guesses(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    guesses: Sequence[Sequence[int]],
    pad_token_id: int,
    batch_size: int,
) -> list[bool]:
    """Whether the target's argmax at every position of each guess is the guess itself."""
    confirmed = [False] * len(prompts)
    order = sorted((i for i, guess in enumerate(guesses) if guess), key=lambda i: len(prompts[i]) + len(guesses[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids, mask = _pad([[*prompts[i], *guesses[i]] for i in chosen], pad_token_id, left=False)
        output = target(input_ids=ids.to(target.device), attention_mask=mask.to(target.device), use_cache=False)
        best = output.logits.argmax(dim=-1)[:, :-1].cpu()
        columns = torch.arange(1, ids.shape[1])
        begins = torch.tensor([len(prompts[i]) for i in chosen])[:, None]
        asked = (columns >= begins) & mask[:, 1:].bool()
        right = ((best == ids[:, 1:]) | ~asked).all(dim=1)
        for index, good in zip(chosen, right.tolist(), strict=True):
            confirmed[index] = good
    return confirmed


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int, left: bool) -> tuple[Tensor, Tensor]:
    """Ids and attention mask `[B, S]` of rows padded on one side."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad_token_id, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        columns = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[index, columns] = torch.tensor(row, dtype=torch.long)
        mask[index, columns] = 1
    return ids, mask


__all__ = ["Example", "regenerate_answers", "truncate"]
