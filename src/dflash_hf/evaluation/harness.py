"""Answering prompts with and without a draft, and comparing the two: tokens, forwards, acceptance, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.generation.streamers import BaseStreamer

from dflash_hf.evaluation.agreement import Agreement, agreement
from dflash_hf.evaluation.prompt_files import Prompt, as_messages, image_names, text_of
from dflash_hf.generation.stats import SpeculativeStats
from dflash_hf.modeling_dflash import DFlashDraftModel

Processor = PreTrainedTokenizerBase | ProcessorMixin


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt answered twice.

    Args:
        kind (`str`): What sort of prompt it was; groups rows of a report.
        text (`str`): The answer with the draft, special tokens removed.
        agreement (`Agreement`): Whether both answers have the same tokens, and if not, whether they part at a tie.
        num_tokens (`int`): Tokens of the answer.
        plain_seconds, draft_seconds (`float`): Wall time of each `generate` call, prefill included.
        stats (`SpeculativeStats`): Of the run with the draft.
        images (`tuple[str, ...]`): Names of the prompt's images.
    """

    kind: str
    text: str
    agreement: Agreement
    num_tokens: int
    plain_seconds: float
    draft_seconds: float
    stats: SpeculativeStats
    images: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.agreement.identical

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values, for JSON; `difference` is null where the answers are identical."""
        names = [column.name for column in fields(self) if column.name not in ("stats", "agreement")]
        own = {name: getattr(self, name) for name in names}
        # The statistics first: their draft_seconds is a part of the one here.
        return {
            **self.stats.to_dict(),
            **own,
            "identical": self.identical,
            "difference": self.agreement.to_dict(),
            "images": list(self.images),
            "pictures": list(self.images),  # the name that images had, for one release
            "ratio": self.plain_seconds / self.draft_seconds,
        }


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    """Returns a processor's tokenizer; a tokenizer is its own."""
    if isinstance(processor, PreTrainedTokenizerBase):
        return processor
    either: Any = processor
    return either.tokenizer


def encode_prompt(
    processor: Processor, prompt: Prompt, device: torch.device, *, template: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Turns a text or a conversation into model inputs of one row.

    A conversation, and a text where there is a chat template, goes through `apply_chat_template`, with `options`;
    under `template=False` neither does, and a conversation is its messages' texts, one per line.

    Args:
        processor (tokenizer or processor): Anything with `apply_chat_template`; images need a processor.
        prompt (`str` or list of messages): What to answer.
        device (`torch.device`): Where the tensors go.
        template (`bool`): Whether to apply the chat template.
        options: For the chat template.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, both `[1, S]`, and of a processor all that it
        makes of the images.

    Raises:
        ValueError: If there are images and no processor, or no template that says where they go, or an image
            cannot be read.
    """
    tokenizer = tokenizer_of(processor)
    if image_names(prompt) and (processor is tokenizer or not template):
        raise ValueError(
            f"expected a processor and its chat template for a prompt with images, got {type(processor).__name__}"
            f"{'' if template else ' without the template'}; leave the images out, or take a target for images"
        )
    if not template or (isinstance(prompt, str) and processor.chat_template is None):
        encoded: Any = tokenizer(text_of(prompt), return_tensors="pt")
    else:
        either: Any = processor
        try:
            encoded = either.apply_chat_template(
                as_messages(prompt),
                add_generation_prompt=True,
                tokenize=True,
                return_tensors="pt",
                return_dict=True,
                **options,
            )
        except (OSError, SyntaxError) as error:  # Pillow's: not an image, or one that is cut off or broken
            raise ValueError(
                f"expected images that can be read, got {', '.join(image_names(prompt))}, of which one cannot "
                f"({error}); leave it out or save it anew"
            ) from error
    names = ("input_ids", "attention_mask") if processor is tokenizer else tuple(encoded)
    return {name: encoded[name].to(device) for name in names}


def compare(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    processor: Processor,
    prompt: Prompt,
    *,
    kind: str = "prompt",
    streamer: BaseStreamer | None = None,
    **settings: Any,
) -> Comparison:
    """Answers one prompt without and with the draft.

    Sampled answers are compared with the draft at block size 1, which is plain sampling with the same keyed noise:
    Transformers' own sampler draws its noise in another order.

    Args:
        target, draft, processor: The pair, and its processor or tokenizer.
        prompt (`str` or list of messages): What to answer.
        kind (`str`): Label of the prompt.
        streamer (`BaseStreamer`, *optional*): Gets the answer with the draft.
        settings: For `generate`.

    Raises:
        ValueError: When sampling with `proposal="sample"`, which keeps the distribution and not the tokens.
    """
    if settings.get("do_sample") and draft.generation_config.proposal == "sample":
        raise ValueError(
            "expected proposal 'shared_noise' or 'argmax' to compare sampled texts, got 'sample', which keeps the "
            "distribution and not the text; change draft.generation_config.proposal"
        )
    inputs = encode_prompt(processor, prompt, target.device)
    columns = inputs["input_ids"].shape[1]
    model: Any = target

    def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
        start = time.perf_counter()
        out = call()
        if out.device.type != "cpu":
            torch.accelerator.synchronize()
        return out, time.perf_counter() - start

    seed = torch.initial_seed()
    if settings.get("do_sample"):
        plain, plain_seconds = timed(lambda: _one_by_one(model, draft, inputs, settings, seed))
    else:
        plain, plain_seconds = timed(lambda: model.generate(**inputs, **settings))
    torch.manual_seed(seed)
    out, draft_seconds = timed(lambda: model.generate(**inputs, **settings, assistant_model=draft, streamer=streamer))
    assert isinstance(draft.last_stats, SpeculativeStats)
    answers = plain[0, columns:].tolist(), out[0, columns:].tolist()
    found = agreement(target, inputs, *answers, seed=seed, **settings)
    return Comparison(
        kind=kind,
        text=str(tokenizer_of(processor).decode(out[0, columns:], skip_special_tokens=True)),
        agreement=found,
        num_tokens=out.shape[1] - columns,
        plain_seconds=plain_seconds,
        draft_seconds=draft_seconds,
        stats=draft.last_stats,
        images=tuple(image_names(prompt)),
    )


def warm_up(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    processor: Processor,
    prompt: Prompt,
) -> None:
    """Answers a prompt with a few tokens, both ways: the first calls pay for loading code."""
    compare(target, draft, processor, prompt, max_new_tokens=4, do_sample=False)


def _one_by_one(
    model: Any, draft: DFlashDraftModel, inputs: dict[str, Tensor], settings: dict[str, Any], seed: int
) -> Tensor:
    """Samples with the draft at block size 1: no proposals, the same noise."""
    options = draft.generation_config
    before = options.block_size, options.verify_width
    options.block_size, options.verify_width = 1, None
    torch.manual_seed(seed)
    try:
        return model.generate(**inputs, **settings, assistant_model=draft)
    finally:
        options.block_size, options.verify_width = before


def pool(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Sums up comparisons: all identical or not, differences at ties, tokens, forwards, acceptance, seconds, ratio.

    Raises:
        ValueError: If there is nothing to sum up.
    """
    if not rows:
        raise ValueError("expected at least one comparison, got none; answer a prompt first")
    verifies = sum(row.stats.num_verifies for row in rows)
    committed = sum(sum(sum(r) for r in row.stats.num_committed) for row in rows)
    plain, drafted = (sum(getattr(row, name) for row in rows) for name in ("plain_seconds", "draft_seconds"))
    return {
        "prompts": len(rows),
        "identical": all(row.identical for row in rows),
        "ties": sum(row.agreement.holds and not row.identical for row in rows),
        "num_tokens": sum(row.num_tokens for row in rows),
        "num_target_forwards": sum(row.stats.num_target_forwards for row in rows),
        "acceptance_length": committed / verifies if verifies else 0.0,
        "plain_seconds": plain,
        "draft_seconds": drafted,
        "ratio": plain / drafted,
    }


__all__ = ["Comparison", "Processor", "compare", "encode_prompt", "pool", "tokenizer_of", "warm_up"]
