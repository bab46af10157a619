"""Ways of decoding: conversations in, one [`Turn`] per row out, all under the same clock.

Those of Transformers' own are timed by one recorder, a stopping criterion that stops nothing and notes when the loop
comes by and how long the text is by then. Ours is told by its statistics, which say the same without a criterion.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from dflash_hf.bench.answers import Turn
from dflash_hf.bench.cells import Options
from dflash_hf.data.prompt_files import Message
from dflash_hf.errors import require
from dflash_hf.generation.stats import SpeculativeStats
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import (
    Processor,
    changed,
    encode_prompts,
    end_tokens,
    synchronize,
    tokenizer_of,
)

LOOKUP_TOKENS = 15  # as many as a block of 16 proposes

Conversation = Sequence[Message]
Inputs = dict[str, Tensor]
# A way of decoding, ready to be asked: answers conversations, whose last message is the user's, as one batch, with the
# seed of the call when sampling; it raises one of `dflash_hf.bench.run.FAILURES`.
Method = Callable[[Sequence[Conversation], Options, int], list[Turn]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What is loaded for a run, in one dtype.

    Args:
        target (`PreTrainedModel`): The target.
        processor (tokenizer or processor): Encodes its prompts; its tokenizer pads on the left.
        draft (`DFlashDraftModel`, *optional*): Where a method needs it.
        assistant (`PreTrainedModel`, *optional*): An ordinary draft model.
        template_options (mapping): For the chat template.
    """

    target: PreTrainedModel
    processor: Processor
    draft: DFlashDraftModel | None = None
    assistant: PreTrainedModel | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def encode(self, conversations: Sequence[Conversation]) -> Inputs:
        """Turns conversations into inputs of the target; without a chat template they are their messages' texts.

        Raises:
            ValueError: See [`~dflash_hf.pair.answers.encode_prompts`].
        """
        has_template = self.processor.chat_template is not None
        device = self.target.device
        return encode_prompts(
            self.processor, conversations, device, template=has_template, **self.template_options
        )


# What a row's verifies did: three lists of `Turn`, by their names.
Steps = dict[Literal["committed", "accepted", "proposed"], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """What a way of decoding returns.

    Args:
        sequences (`torch.Tensor` of shape `[B, S + new]`): Prompts and answers.
        ttft (`float`, *optional*): Seconds until the first token.
        steps (`list[Steps]`): One per row, of what drafts.
        draft_time, verify_time (`float`, *optional*): See [`Turn`].
    """

    sequences: Tensor
    ttft: float | None = None
    steps: list[Steps] = field(default_factory=list[Steps])
    draft_time: float | None = None
    verify_time: float | None = None


Way = Callable[[Models, Inputs, Options], Raw]


class Recorder(StoppingCriteria):
    """Stops nothing; notes how long the text is whenever the loop of `generate` comes by, and when it first does."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ttft: float | None = None
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Returns that no row is done."""
        self.lengths.append(input_ids.shape[1])
        if self.ttft is None:
            synchronize(input_ids.device)
            self.ttft = time.perf_counter() - self.started
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def plain(models: Models, inputs: Inputs, options: Options, **more: Any) -> Raw:
    """Runs plain `generate`."""
    recorder = Recorder()
    criteria = StoppingCriteriaList([recorder])
    out = _generate(models, inputs, options, stopping_criteria=criteria, **more)
    return Raw(sequences=out, ttft=recorder.ttft)


def dflash(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs `generate(..., assistant_model=draft)`, this package's way; every row has its own steps."""
    draft = models.draft
    assert draft is not None
    with changed(draft.generation_config, **options.for_draft()):
        out = _generate(models, inputs, options, assistant_model=draft)
    stats = draft.last_stats
    assert isinstance(stats, SpeculativeStats)
    steps: list[Steps] = []
    for committed, accepted in zip(stats.num_committed, stats.num_accepted, strict=True):
        proposed = [width - 1 for width in stats.verify_widths[: len(committed)]]
        proposed = proposed or [stats.num_proposed] * len(committed)
        steps.append(
            {"committed": list(committed), "accepted": list(accepted), "proposed": proposed}
        )
    # On an accelerator the parts say when work was queued, unless the draft's options ask to wait for it.
    is_timed = models.target.device.type == "cpu" or draft.generation_config.synchronize
    return Raw(
        sequences=out,
        ttft=stats.time_to_first_token,
        steps=steps,
        draft_time=stats.draft_seconds if is_timed else None,
        verify_time=stats.verify_seconds if is_timed else None,
    )


def stock(models: Models, inputs: Inputs, options: Options, **more: Any) -> Raw:
    """Runs Transformers' own DFlash with our draft, whose `forward` keeps upstream's contract; one row."""
    draft = models.draft
    assert draft is not None
    # Where Transformers looks for it.
    narrower = {} if options.block_size is None else {"block_size": options.block_size}
    with changed(draft.config, **narrower):
        return _assisted(
            models, inputs, options, assistant_model=draft, speculation_type="dflash", **more
        )


def stock_static(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs the same with a static cache, for which Transformers compiles the verify on an accelerator.

    The cache has room for a block more: the last verify may reach beyond the longest text.
    """
    draft = models.draft
    assert draft is not None
    longest = inputs["input_ids"].shape[1] + options.max_new_tokens
    room = longest + (options.block_size or draft.config.block_size)
    return stock(models, inputs, options, cache_implementation="static", max_cache_len=room)


def assistant(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs Transformers' assisted decoding with an ordinary draft model; one row."""
    model = models.assistant
    assert model is not None
    before = copy.deepcopy(model.generation_config)
    try:
        return _assisted(models, inputs, options, assistant_model=model)
    finally:
        # A schedule would carry its number of tokens on to the next question
        model.generation_config = before


def lookup(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs Transformers' prompt lookup: proposals copied from the text so far; one row."""
    return _assisted(models, inputs, options, prompt_lookup_num_tokens=LOOKUP_TOKENS)


# The ways that need no more than the models; z-lab's package and servers have files of their own.
WAYS: dict[str, Way] = {
    "plain": plain,
    # With a static cache, for which Transformers compiles the forward on an accelerator.
    "plain-static": functools.partial(plain, cache_implementation="static"),
    "dflash": dflash,
    "stock": stock,
    "stock-static": stock_static,
    "assistant": assistant,
    "lookup": lookup,
}


def local_method(way: Way, models: Models) -> Method:
    """Returns a way of decoding over loaded models as a method."""

    def ask(conversations: Sequence[Conversation], options: Options, seed: int) -> list[Turn]:
        inputs = models.encode(conversations)
        torch.manual_seed(seed)
        device = models.target.device
        synchronize(device)
        started = time.perf_counter()
        raw = way(models, inputs, options)
        synchronize(device)
        return _turns(models, inputs, raw, time.perf_counter() - started)

    return ask


def _turns(models: Models, inputs: Inputs, raw: Raw, seconds: float) -> list[Turn]:
    ends = end_tokens(models.target)
    num_rows = inputs["input_ids"].shape[0]
    tokenizer = tokenizer_of(models.processor)
    found = list[Turn]()
    prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
    for index, row in enumerate(raw.sequences[:, inputs["input_ids"].shape[1] :].tolist()):
        # What stands behind an end token is padding.
        last = next((position for position, token in enumerate(row) if token in ends), len(row) - 1)
        ids = row[: last + 1]
        found.append(
            Turn(
                text=str(tokenizer.decode(ids, skip_special_tokens=True)),
                token_ids=ids,
                new_tokens=len(ids),
                prompt_tokens=prompt_tokens[index],
                wall_time=seconds / num_rows,
                latency=seconds,
                ttft=raw.ttft,
                finish_reason="stop" if ids and ids[-1] in ends else "length",
                draft_time=raw.draft_time,
                verify_time=raw.verify_time,
                **(raw.steps[index] if raw.steps else {}),
            )
        )
    return found


def _generate(models: Models, inputs: Inputs, options: Options, **more: Any) -> Tensor:
    model: Any = models.target
    out = model.generate(**inputs, **options.arguments(), **more)
    assert isinstance(out, Tensor)
    return out


def _assisted(models: Models, inputs: Inputs, options: Options, **more: Any) -> Raw:
    """Transformers' assisted loop over one row. Its first forward reads the prompt too: it counts as no verify."""
    require(
        inputs["input_ids"].shape[0] == 1,
        "one row",
        inputs["input_ids"].shape[0],
        "Transformers takes no more",
    )
    recorder = Recorder()
    with _noting_candidates(models.target) as candidates:
        out = _generate(
            models, inputs, options, stopping_criteria=StoppingCriteriaList([recorder]), **more
        )
    text = out[0].tolist()
    steps: Steps = {"committed": [], "accepted": [], "proposed": []}
    for (start, end), tried in zip(
        itertools.pairwise(recorder.lengths), candidates[1:], strict=True
    ):
        proposals = tried.tolist()
        matching = [a == b for a, b in zip(proposals, text[start:end], strict=False)]
        steps["committed"].append(end - start)
        steps["proposed"].append(len(proposals))
        steps["accepted"].append((*matching, False).index(False))
    return Raw(sequences=out, ttft=recorder.ttft, steps=[steps])


@contextmanager
def _noting_candidates(model: Any) -> Generator[list[Tensor]]:
    """Notes what Transformers' candidate generators propose, `[K]` ids at each verify."""
    noted: list[Tensor] = []
    original = model._get_candidate_generator

    def noting(*args: Any, **kwargs: Any) -> Any:
        generator = original(*args, **kwargs)
        propose = generator.get_candidates

        def get_candidates(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = propose(input_ids, *args, **kwargs)
            noted.append(found[0][0, input_ids.shape[1] :])
            return found

        generator.get_candidates = get_candidates
        return generator

    model._get_candidate_generator = noting
    try:
        yield noted
    finally:
        del model._get_candidate_generator
