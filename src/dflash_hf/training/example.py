"""This module defines a training example: token ids, the mask of the target's own tokens, and inputs such as images.

Answers must be the target's own. `regenerate_answers` lets the target write them greedily.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from dflash_hf.errors import require
from dflash_hf.training.chat_template import ChatTemplate, encode_messages

# Outputs of a processor that are not further inputs of the model. Some processors make labels for another loss.
NOT_INPUTS = {
    "labels",
    "input_ids",
    "attention_mask",
    "assistant_masks",
    "offset_mapping",
    "text_replacement_offsets",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sequence to train on.

    Args:
        input_ids (`list[int]`): The tokens of prompt and answer.
        loss_mask (`list[int]`): 1 for tokens that the target wrote, else 0. It has one entry per token.
        model_inputs (`dict[str, torch.Tensor]`): Other inputs of the target's forward, as its processor returns them
            for one example, such as `pixel_values` and `image_grid_thw`. Inputs with one value per token, such as
            `mm_token_type_ids`, have shape `[S]`, without a batch dimension, and are padded with the row. All other
            inputs are concatenated along their first dimension.

    Raises:
        ValueError: If the lengths differ.
    """

    input_ids: list[int]
    loss_mask: list[int]
    model_inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = f"a loss_mask of {len(self.input_ids)} entries (one per token)"
        require(
            len(self.input_ids) == len(self.loss_mask),
            what,
            len(self.loss_mask),
            "give every token a 0 or a 1",
        )

    @classmethod
    def from_pair(
        cls, prompt: Sequence[int] | Mapping[str, Any], answer_ids: Sequence[int]
    ) -> Example:
        """Returns the example of a prompt (with its generation prompt) and the target's answer (with its EOS token).

        Args:
            prompt (sequence of `int`, or mapping): Token ids, or a tokenizer's or processor's output for one prompt.
            answer_ids (sequence of `int`): The tokens of the answer.

        Raises:
            ValueError: If the mapping holds several prompts, or a padded one.
        """
        if not isinstance(prompt, Mapping):
            prompt = {"input_ids": list(prompt)}
        ids = torch.as_tensor(prompt["input_ids"], dtype=torch.long, device="cpu")
        mask = torch.as_tensor(prompt.get("attention_mask", 1), device="cpu")
        if ids.numel() != ids.shape[-1] or not mask.all():
            raise ValueError(
                f"expected one prompt without padding, got input_ids of shape {tuple(ids.shape)} with "
                f"{int((mask == 0).sum())} padding tokens; process every prompt by itself"
            )
        inputs = {
            name: torch.as_tensor(value, device="cpu")
            for name, value in prompt.items()
            if name not in NOT_INPUTS
        }
        for name, value in inputs.items():
            if ids.ndim == 2 and value.shape == ids.shape:
                inputs[name] = value[0]
        bare = cls(
            input_ids=ids.flatten().tolist(), loss_mask=[0] * ids.numel(), model_inputs=inputs
        )
        return bare.with_answer(answer_ids)

    @classmethod
    def from_messages(
        cls,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Any] = (),
        *,
        turns: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Example:
        """Returns the example of a conversation. All or some assistant turns count as the target's answers.

        Args:
            processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, or a processor for
                chats with or without images.
            messages (sequence of mappings): The conversation. See [`prepare_multimodal_messages`].
            images (sequence): The images for image blocks that have no image of their own.
            turns (sequence of `int`, *optional*): The indices of the messages that count, in order. By default, these
                are all messages of the assistant except those with `weight` 0.
            chat_template_kwargs (mapping, *optional*): Further options of the template, such as `enable_thinking` and
                `tools`.

        Raises:
            ValueError: If the text of the assistant cannot be found, or images and their places do not match.
        """
        template = ChatTemplate(processing_class, chat_template_kwargs)
        encoded, mask = encode_messages(template, messages, images, turns)
        return replace(cls.from_pair(encoded, []), loss_mask=mask)

    @property
    def has_images(self) -> bool:
        """True if the example has an input that does not have one value per token."""
        return any(value.shape != (len(self.input_ids),) for value in self.model_inputs.values())

    def with_answer(self, answer_ids: Sequence[int]) -> Example:
        """Returns the example followed by another answer. In this answer, inputs per token are 0 (text)."""
        added = [0] * len(answer_ids)
        size = (len(self.input_ids),)
        inputs = dict(self.model_inputs)
        for name, value in inputs.items():
            if value.shape == size:
                inputs[name] = torch.cat([value, value.new_tensor(added)])
        return Example(
            input_ids=[*self.input_ids, *answer_ids],
            loss_mask=[*self.loss_mask, *(1 for _ in answer_ids)],
            model_inputs=inputs,
        )

    def cut(self, max_length: int) -> Example:
        """Returns the example's first `max_length` tokens.

        Raises:
            ValueError: If the example is longer and has images, because an image might be cut.
        """
        if len(self.input_ids) <= max_length:
            return self
        what = f"an example with images of at most {max_length} tokens"
        require(
            not self.has_images, what, len(self.input_ids), "leave it out, or take smaller images"
        )
        return Example(
            input_ids=self.input_ids[:max_length],
            loss_mask=self.loss_mask[:max_length],
            model_inputs={name: value[:max_length] for name, value in self.model_inputs.items()},
        )

    def prompt_length(self) -> int:
        """Returns the number of tokens before the first token that the target wrote."""
        if 1 not in self.loss_mask:
            return len(self.loss_mask)
        return self.loss_mask.index(1)


def example_lengths(examples: Sequence[Example]) -> list[int]:
    """Returns the number of tokens of each example: `examples.lengths`, or else each example is built and counted."""
    lengths = getattr(examples, "lengths", None)
    if lengths is None:
        return [len(example.input_ids) for example in examples]
    what = f"lengths of {len(examples)} entries (one per example)"
    require(
        len(lengths) == len(examples),
        what,
        len(lengths),
        "give the number of tokens of each example",
    )
    return list(lengths)
