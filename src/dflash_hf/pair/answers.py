"""This module answers prompts with and without a draft, and compares tokens, forwards, acceptance and seconds."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.generation.streamers import BaseStreamer

from dflash_hf.data.image_files import is_of_image
from dflash_hf.data.prompt_files import (
    Prompt,
    as_messages,
    image_names,
    text_of,
    with_joined_texts,
    with_text_parts,
)
from dflash_hf.errors import one_line
from dflash_hf.generation.stats import SpeculativeStats
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.agreement import Agreement, agreement

Processor = PreTrainedTokenizerBase | ProcessorMixin
TEXT_INPUTS = ("input_ids", "attention_mask")  # the inputs of a target that takes only text
# Outputs of processors that say which tokens are those of images. They are 0 in a text.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
PROBE = "one text of a turn"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one prompt, decoded with the draft."""

    text: str  # the answer, special tokens removed
    num_tokens: int
    seconds: float  # wall time of the `generate` call, prefill included
    stats: SpeculativeStats
    images: tuple[str, ...] = ()  # names of the prompt's images
    ids: list[int] = field(repr=False)
    inputs: dict[str, Tensor] = field(repr=False)  # the prompt, as `generate` took it
    seed: int  # torch's seed before the call
    # `generate` needs the tokenizer if the target's `generation_config` has stop strings.
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics and the fields with plain values, for JSON."""
        told = {name: getattr(self, name) for name in ("text", "num_tokens", "seconds")}
        return {**self.stats.to_dict(), **told, "images": list(self.images)}


@dataclass(frozen=True, kw_only=True)
class Comparison(Answer):
    """Two answers to one prompt, with and without the draft."""

    kind: str  # kind of the prompt; reports group rows by it
    agreement: Agreement
    # Wall time of the `generate` call without the draft, prefill included. For a sampled answer this is
    # `undrafted_seconds`, because plain `generate` draws another text.
    plain_seconds: float
    # Wall time of this package's own loop, which verifies one token per step and runs no draft.
    undrafted_seconds: float
    is_sampled: bool

    @property
    def identical(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.agreement.identical

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values, for JSON.

        `difference` is null if the answers are identical. `plain_seconds` and `ratio` are null if the answers are
        sampled.
        """
        plain: dict[str, float | None] = {
            "plain_seconds": self.plain_seconds,
            "ratio": self.plain_seconds / self.seconds,
        }
        if self.is_sampled:
            plain = dict.fromkeys(plain)
        return {
            **super().to_dict(),
            "kind": self.kind,
            "identical": self.identical,
            "difference": self.agreement.to_dict(),
            **plain,
            "undrafted_seconds": self.undrafted_seconds,
            "draft_ratio": self.undrafted_seconds / self.seconds,
        }


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a processor. A tokenizer is returned as it is."""
    if isinstance(processor, PreTrainedTokenizerBase):
        return processor
    either: Any = processor
    return either.tokenizer


def rendered(processor: Processor, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of messages in the chat template; empty if there is no template or it refuses them."""
    either = cast(Any, processor)
    try:
        return str(either.apply_chat_template(messages, tokenize=False))
    # Expressions of a template raise the errors of Python's operators too.
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        TemplateError,
    ):
        return ""


def renders_texts(processor: Processor) -> bool:
    """Returns whether the chat template writes a turn whose content is a text, and not only lists of parts."""
    return PROBE in rendered(processor, [{"role": "user", "content": PROBE}])


def encode_prompt(
    processor: Processor,
    prompt: Prompt,
    device: torch.device,
    /,
    *,
    template: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Turns a text or a conversation into model inputs of one row. See [`encode_prompts`]."""
    return encode_prompts(processor, [prompt], device, template=template, **options)


def encode_prompts(
    processor: Processor,
    prompts: Sequence[Prompt],
    device: torch.device,
    /,
    *,
    template: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Turns texts or conversations into model inputs, with left padding if there are several.

    A conversation goes through `apply_chat_template`, with `options`. So does a text if there is a chat template. With
    `template=False`, nothing goes through the template. A conversation is then the texts of its messages, one per
    line.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, both `[B, S]`, on `device`. With a processor, also
        all its other outputs, for example those of the images.

    Raises:
        ValueError: If there are images, but no processor or no template; if an image cannot be read; or if the
            template refuses the conversation.
    """
    tokenizer = tokenizer_of(processor)
    either = cast(Any, processor)
    names = [name for prompt in prompts for name in image_names(prompt)]
    if names and (processor is tokenizer or not template):
        found = type(processor).__name__
        if not template:
            found += " without the template"
        raise ValueError(
            f"expected a processor and its chat template for a prompt with images, got {found}; leave the images "
            "out, or take a target for images"
        )
    padding: dict[str, Any] = {}
    if len(prompts) > 1:
        padding = {"padding": True, "padding_side": "left"}
    if not template or (
        processor.chat_template is None and all(isinstance(prompt, str) for prompt in prompts)
    ):
        encoded: Any = tokenizer(
            [text_of(prompt) for prompt in prompts], return_tensors="pt", **padding
        )
    else:
        if processor is tokenizer and padding:
            options |= {"padding": True, "tokenizer_kwargs": {"padding_side": "left"}}
        elif padding:
            options |= {"processor_kwargs": padding}
        conversations = [as_messages(prompt) for prompt in prompts]
        if processor is tokenizer:
            conversations = [with_joined_texts(messages) for messages in conversations]
        elif not renders_texts(processor):
            conversations = [with_text_parts(messages) for messages in conversations]
        try:
            encoded = either.apply_chat_template(
                conversations,
                add_generation_prompt=True,
                tokenize=True,
                return_tensors="pt",
                return_dict=True,
                **options,
            )
        except (ValueError, ImportError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            may_be_image = bool(names) and is_of_image(error)
            # A template that is at fault itself also fails without reading images.
            if may_be_image and all(rendered(processor, messages) for messages in conversations):
                raise ValueError(
                    f"expected images that can be read, got {', '.join(names)}, of which one cannot ({reason}); "
                    "leave it out or save it anew"
                ) from error
            # The template is broken, or refuses a role or an option.
            raise ValueError(
                f"expected a conversation that the chat template takes, got {reason}; change what it "
                "names (a system prompt, an option of the template), or leave the template out"
            ) from error
    kept = tuple(encoded)
    if processor is tokenizer:
        kept = TEXT_INPUTS
    return {name: encoded[name].to(device) for name in kept}


def answer(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    processor: Processor,
    prompt: Prompt,
    *,
    streamer: BaseStreamer | None = None,
    encoding: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Answer:
    """Answers one prompt with the draft.

    `encoding` are options of [`encode_prompts`], and `settings` are arguments of `generate`.
    """
    inputs = encode_prompt(processor, prompt, target.device, **(encoding or {}))
    tokenizer = tokenizer_of(processor)
    settings = {"tokenizer": tokenizer, **settings}
    seed = torch.initial_seed()
    torch.manual_seed(seed)
    ids, seconds = _timed(target, inputs, **settings, assistant_model=draft, streamer=streamer)
    assert isinstance(draft.last_stats, SpeculativeStats)
    return Answer(
        text=str(tokenizer.decode(ids, skip_special_tokens=True)),
        num_tokens=len(ids),
        seconds=seconds,
        stats=draft.last_stats,
        images=tuple(image_names(prompt)),
        ids=ids,
        inputs=inputs,
        seed=seed,
        tokenizer=tokenizer,
    )


def check_comparable(draft: DFlashDraftModel, settings: Mapping[str, Any]) -> None:
    """Raises `ValueError` for sampling with `proposal="sample"`, which keeps the distribution but not the tokens."""
    if settings.get("do_sample") and draft.generation_config.proposal == "sample":
        raise ValueError(
            "expected proposal 'shared_noise' or 'argmax' to compare sampled texts, got 'sample', which keeps the "
            "distribution and not the text; change draft.generation_config.proposal"
        )


def compare_with_plain(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    answered: Answer,
    *,
    kind: str = "prompt",
    **settings: Any,
) -> Comparison:
    """Answers a prompt again without the draft, with the same settings of `generate`, and compares the answers.

    The prompt is answered by plain `generate`, and by this package's own loop without a draft. The loop's time is
    needed because a difference between these two is not a gain of the draft. Sampled answers are compared with the
    loop's answer, which is plain sampling with the same keyed noise. They cannot be compared with plain `generate`,
    because Transformers' own sampler draws its noise in another order. See [`check_comparable`].
    """
    check_comparable(draft, settings)
    inputs = answered.inputs
    settings = {"tokenizer": answered.tokenizer, **settings}
    torch.manual_seed(answered.seed)
    with without_draft(draft):
        ids, undrafted_seconds = _timed(target, inputs, **settings, assistant_model=draft)
    seconds = undrafted_seconds
    is_sampled = bool(settings.get("do_sample"))
    if not is_sampled:
        ids, seconds = _timed(target, inputs, **settings)
    return Comparison(
        **{column.name: getattr(answered, column.name) for column in fields(Answer)},
        kind=kind,
        agreement=agreement(target, inputs, ids, answered.ids, seed=answered.seed, **settings),
        plain_seconds=seconds,
        undrafted_seconds=undrafted_seconds,
        is_sampled=is_sampled,
    )


def without_draft(draft: DFlashDraftModel) -> AbstractContextManager[None]:
    """Makes calls with a draft decode without it, one token per step, until the block is left."""
    # A block of one token still proposes a token if the anchor's slot proposes.
    return changed(
        draft.generation_config,
        block_size=1,
        verify_width=1,
        num_assistant_tokens=None,
        num_tree_nodes=None,
    )


def _timed(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> tuple[list[int], float]:
    """Returns the tokens that a call of `generate` adds to its only row, and the seconds that the call took."""
    start = time.perf_counter()
    out = model.generate(**inputs, **options)
    synchronize(out.device)
    seconds = time.perf_counter() - start
    return out[0, inputs["input_ids"].shape[1] :].tolist(), seconds


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def changed(config: Any, **values: Any) -> Generator[None]:
    """Sets fields of a config, and restores them at the end of the block."""
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def warm_up(
    target: PreTrainedModel, draft: DFlashDraftModel, processor: Processor, prompt: Prompt
) -> None:
    """Answers a prompt with a few tokens, with and without the draft, because the first calls also load code."""
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    compare_with_plain(
        target, draft, answer(target, draft, processor, prompt, **settings), **settings
    )


def pool(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Sums up comparisons: identical or not, ties, tokens, forwards, acceptance and seconds.

    Raises `ValueError` if there are no comparisons.
    """
    if not rows:
        raise ValueError("expected at least one comparison, got none; answer a prompt first")
    verifies = sum(row.stats.num_verifies for row in rows)
    committed = sum(sum(sum(r) for r in row.stats.num_committed) for row in rows)
    plain = sum(row.plain_seconds for row in rows)
    undrafted = sum(row.undrafted_seconds for row in rows)
    drafted = sum(row.seconds for row in rows)
    return {
        "prompts": len(rows),
        "identical": all(row.identical for row in rows),
        "ties": sum(row.agreement.holds and not row.identical for row in rows),
        "num_tokens": sum(row.num_tokens for row in rows),
        "num_target_forwards": sum(row.stats.num_target_forwards for row in rows),
        "acceptance_length": committed / verifies if verifies else 0.0,
        "plain_seconds": plain,
        "undrafted_seconds": undrafted,
        "seconds": drafted,
        "ratio": plain / drafted,
        "draft_ratio": undrafted / drafted,
    }
