"""Answering prompts with and without a draft, and comparing the two: tokens, forwards, acceptance, seconds."""

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
TEXT_INPUTS = ("input_ids", "attention_mask")  # of a target of text
PROBE = "one text of a turn"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt answered with the draft."""

    text: str  # the answer, special tokens removed
    num_tokens: int
    seconds: float  # wall time of the `generate` call, prefill included
    stats: SpeculativeStats
    images: tuple[str, ...] = ()  # names of the prompt's images
    ids: list[int] = field(repr=False)
    inputs: dict[str, Tensor] = field(repr=False)  # the prompt, as `generate` took it
    seed: int  # torch's seed before the call
    # What `generate` looks for stop strings with, if the target's `generation_config` has some
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics, and of the fields all that are plain values, for JSON."""
        told = {name: getattr(self, name) for name in ("text", "num_tokens", "seconds")}
        return {**self.stats.to_dict(), **told, "images": list(self.images)}


@dataclass(frozen=True, kw_only=True)
class Comparison(Answer):
    """One prompt answered twice."""

    kind: str  # what sort of prompt it was; groups rows of a report
    agreement: Agreement
    # Wall time of the `generate` call without the draft, prefill included. Of a sampled answer it is
    # `undrafted_seconds`: plain `generate` draws another text.
    plain_seconds: float
    # The same of this package's own loop, which verifies one token at a step and runs no draft
    undrafted_seconds: float
    is_sampled: bool

    @property
    def identical(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.agreement.identical

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values, for JSON.

        `difference` is null where the answers are identical. `plain_seconds` and `ratio` are null where they are
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
    """Returns a processor's tokenizer; a tokenizer is its own."""
    if isinstance(processor, PreTrainedTokenizerBase):
        return processor
    either: Any = processor
    return either.tokenizer


def rendered(processor: Processor, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the chat template writes of messages; nothing where it refuses them, or there is no template."""
    either = cast(Any, processor)
    try:
        return str(either.apply_chat_template(messages, tokenize=False))
    except (TypeError, ValueError, AttributeError, TemplateError):
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
    """Turns a text or a conversation into model inputs of one row; see [`encode_prompts`]."""
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
    """Turns texts or conversations into model inputs, left-padded where there are several.

    A conversation, and a text where there is a chat template, goes through `apply_chat_template`, with `options`;
    under `template=False` neither does, and a conversation is its messages' texts, one per line.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, both `[B, S]`, on `device`, and of a processor all
        that it makes of the images.

    Raises:
        ValueError: If there are images and no processor, or no template that says where they go; if an image cannot be
            read, or the template refuses the conversation.
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
        # Pillow's: not an image, or one that is cut off or broken
        except (OSError, SyntaxError) as error:
            raise ValueError(
                f"expected images that can be read, got {', '.join(names)}, of which one cannot ({one_line(error)}); "
                "leave it out or save it anew"
            ) from error
        except (ValueError, ImportError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a template that is broken, or refuses a role or an option
            raise ValueError(
                f"expected a conversation that the chat template takes, got {type(error).__name__}: "
                f"{one_line(error)}; change what it names (a system prompt, an option of the template), or leave the "
                "template out"
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
    """Answers one prompt with the draft; `encoding` are options of [`encode_prompts`], `settings` of `generate`."""
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
    """Raises `ValueError` when sampling with `proposal="sample"`, which keeps the distribution and not the tokens."""
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
    """Answers a prompt again, without the draft, under the same settings of `generate`, and compares.

    It is answered by plain `generate`, and by this package's own loop without a draft, of which only the time counts:
    what lies between the two is no merit of the draft. Sampled answers are compared with the second, which is plain
    sampling with the same keyed noise: Transformers' own sampler draws its noise in another order. See
    [`check_comparable`].
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
    """Lets calls with a draft decode without it, one token at a step, until the block is left."""
    # A block of one still proposes a token where the anchor's slot does.
    return changed(
        draft.generation_config,
        block_size=1,
        verify_width=1,
        num_assistant_tokens=None,
        num_tree_nodes=None,
    )


def _timed(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> tuple[list[int], float]:
    """Returns what a call of `generate` adds to its one row, and the seconds it took."""
    start = time.perf_counter()
    out = model.generate(**inputs, **options)
    synchronize(out.device)
    seconds = time.perf_counter() - start
    return out[0, inputs["input_ids"].shape[1] :].tolist(), seconds


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has nothing left to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def changed(config: Any, **values: Any) -> Generator[None]:
    """Sets fields of a config, and puts them back."""
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
    """Answers a prompt with a few tokens, both ways: the first calls pay for loading code."""
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    compare_with_plain(
        target, draft, answer(target, draft, processor, prompt, **settings), **settings
    )


def pool(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Sums up comparisons: identical or not, ties, tokens, forwards, acceptance, seconds; `ValueError` if none."""
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
