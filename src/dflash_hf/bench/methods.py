"""This module contains the ways of decoding. A way takes conversations and returns one [`Turn`] per row.

All ways are timed by the same clock. For the ways of Transformers, a recorder notes the times: it is a stopping
criterion that stops nothing, and notes when the loop calls it and how long the text is then. This package's own
decoding has statistics with the same information.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList

from dflash_hf.bench.answers import THOUGHT, Turn
from dflash_hf.bench.cells import Options
from dflash_hf.bench.timing import Recorder
from dflash_hf.data.prompt_files import Message
from dflash_hf.errors import require
from dflash_hf.generation.stats import SpeculativeStats
from dflash_hf.generation_config import over_stored
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import (
    Processor,
    changed,
    encode_prompts,
    synchronize,
    tokenizer_of,
    without_draft,
)
from dflash_hf.target_model.parts import end_tokens, up_to_end

LOOKUP_TOKENS = 15  # as many proposals as a block of 16 has
# Number of tokens at the end of a prompt that are searched for the mark of a thought, which may be several tokens.
END_OF_PROMPT = 16

Conversation = Sequence[Message]
Inputs = dict[str, Tensor]
# A way of decoding that is ready to be asked. It answers conversations, whose last message is the user's, as one
# batch. The last argument is the seed of the call for sampling. It raises one of `dflash_hf.bench.run.FAILURES`.
Method = Callable[[Sequence[Conversation], Options, int], list[Turn]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of a run in one dtype.

    Args:
        target (`PreTrainedModel`): The target.
        processor (tokenizer or processor): Encodes its prompts. Its tokenizer pads on the left.
        draft (`DFlashDraftModel`, *optional*): The draft, if a method needs it.
        assistant (`PreTrainedModel`, *optional*): An ordinary draft model.
        template_options (mapping): Options of the chat template.
    """

    target: PreTrainedModel
    processor: Processor
    draft: DFlashDraftModel | None = None
    assistant: PreTrainedModel | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def loaded_draft(self) -> DFlashDraftModel:
        """The draft, which is loaded if a method of the run needs it."""
        assert self.draft is not None
        return self.draft

    def encode(self, conversations: Sequence[Conversation]) -> Inputs:
        """Turns conversations into inputs of the target. Without a chat template, only the messages' texts are used.

        Raises:
            ValueError: See [`~dflash_hf.pair.answers.encode_prompts`].
        """
        has_template = self.processor.chat_template is not None
        device = self.target.device
        return encode_prompts(
            self.processor, conversations, device, template=has_template, **self.template_options
        )


# The verifies of a row: lists of `Turn`, by their names.
Steps = dict[Literal["committed", "accepted", "proposed", "checked"], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """The result of a way of decoding.

    Args:
        sequences (`torch.Tensor` of shape `[B, S + new]`): Prompts and answers.
        ttft (`float`, *optional*): Seconds until the first token.
        step_ms (`list[float]`): Milliseconds of each forward of the target after the first one, with everything
            between two forwards, such as drafting. If only their sum is known, each has the mean.
        steps (`list[Steps]`): One per row, for ways that draft.
    """

    sequences: Tensor
    ttft: float | None = None
    step_ms: list[float] = field(default_factory=list[float])
    steps: list[Steps] = field(default_factory=list[Steps])


Way = Callable[[Models, Inputs, Options], Raw]


def plain(models: Models, inputs: Inputs, options: Options, **more: Any) -> Raw:
    """Runs plain `generate`."""
    recorder = Recorder(models.target.device)
    criteria = StoppingCriteriaList([recorder])
    out = _generate(models, inputs, options, stopping_criteria=criteria, **more)
    ttft, step_ms = recorder.times()
    return Raw(sequences=out, ttft=ttft, step_ms=step_ms)


def dflash(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs this package's `generate(..., assistant_model=draft)`. Every row has its own steps."""
    draft = models.loaded_draft
    given = over_stored(draft.generation_config, options.for_draft())
    with changed(draft.generation_config, **given):
        out = _generate(models, inputs, options, assistant_model=draft)
    stats = draft.last_stats
    assert isinstance(stats, SpeculativeStats)
    steps: list[Steps] = []
    rows = zip(stats.num_committed, stats.num_accepted, stats.num_checked, strict=True)
    for row, (committed, accepted, checked) in enumerate(rows):
        steps.append(
            {
                "committed": list(committed),
                "accepted": list(accepted),
                "proposed": stats.proposed_of(row),
                "checked": list(checked),
            }
        )
    decode_seconds = stats.total_seconds - stats.time_to_first_token
    return Raw(
        sequences=out,
        ttft=stats.time_to_first_token,
        step_ms=evenly(decode_seconds, stats.num_target_forwards - 1),
        steps=steps,
    )


def undrafted(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs this package's own loop without the draft, one token per step: the baseline for the draft's own gain."""
    with without_draft(models.loaded_draft):
        raw = dflash(models, inputs, options)
    # The steps had no proposals, so there is nothing to report.
    return replace(raw, steps=[])


def evenly(seconds: float, num_steps: int) -> list[float]:
    """Returns the milliseconds of steps of which only the sum is known, in seconds. Each step gets the mean."""
    return [seconds * 1e3 / num_steps] * num_steps if num_steps else []


def stock(models: Models, inputs: Inputs, options: Options, **more: Any) -> Raw:
    """Runs Transformers' own DFlash with our draft, whose `forward` has the interface that Transformers expects.

    The batch must have one row.
    """
    draft = models.loaded_draft
    # Transformers reads the block size from this config.
    block_size = options.block_size or draft.config.block_size
    with changed(draft.config, block_size=block_size):
        return _assisted(
            models, inputs, options, assistant_model=draft, speculation_type="dflash", **more
        )


def stock_static(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs [`stock`] with a static cache, for which Transformers compiles the verify on an accelerator.

    The cache has room for one more block, because the last verify may reach beyond the longest text.
    """
    longest = inputs["input_ids"].shape[1] + options.max_new_tokens
    room = longest + (options.block_size or models.loaded_draft.config.block_size)
    return stock(models, inputs, options, cache_implementation="static", max_cache_len=room)


def assistant(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs Transformers' assisted decoding with an ordinary draft model. The batch must have one row."""
    model = models.assistant
    assert model is not None
    before = copy.deepcopy(model.generation_config)
    try:
        return _assisted(models, inputs, options, assistant_model=model)
    finally:
        # Otherwise, a schedule would carry its number of tokens on to the next question.
        model.generation_config = before


def lookup(models: Models, inputs: Inputs, options: Options) -> Raw:
    """Runs Transformers' prompt lookup over one row. Its proposals are copied from the text so far."""
    return _assisted(models, inputs, options, prompt_lookup_num_tokens=LOOKUP_TOKENS)


# The ways that need only the models. z-lab's package and servers have files of their own.
WAYS: dict[str, Way] = {
    "plain": plain,
    # Plain `generate` with a static cache, for which Transformers compiles the forward on an accelerator.
    "plain-static": functools.partial(plain, cache_implementation="static"),
    "dflash": dflash,
    "undrafted": undrafted,
    "stock": stock,
    "stock-static": stock_static,
    "assistant": assistant,
    "lookup": lookup,
}


def local_method(way: Way, models: Models) -> Method:
    """Returns a way of decoding with loaded models, as a method."""

    def ask(conversations: Sequence[Conversation], options: Options, seed: int) -> list[Turn]:
        inputs = models.encode(conversations)
        raw, seconds = timed(way, models, inputs, options, seed)
        return _turns(models, inputs, raw, seconds)

    return ask


def timed(
    way: Way, models: Models, inputs: Inputs, options: Options, seed: int
) -> tuple[Raw, float]:
    """Runs a way of decoding. Returns its result and its seconds, after waiting for the device."""
    torch.manual_seed(seed)
    device = models.target.device
    synchronize(device)
    started = time.perf_counter()
    raw = way(models, inputs, options)
    synchronize(device)
    return raw, time.perf_counter() - started


def answers_of(models: Models, inputs: Inputs, raw: Raw) -> list[list[int]]:
    """Returns each row's new tokens, up to and including its end token."""
    ends = end_tokens(models.target)
    rows = raw.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [up_to_end(row, ends) for row in rows]


def _turns(models: Models, inputs: Inputs, raw: Raw, seconds: float) -> list[Turn]:
    ends = end_tokens(models.target)
    tokenizer = tokenizer_of(models.processor)
    # Prompts are padded on the left.
    ends_of_prompts = inputs["input_ids"][:, -END_OF_PROMPT:].tolist()
    prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
    answers = answers_of(models, inputs, raw)
    found: list[Turn] = []
    for index, ids in enumerate(answers):
        steps: Any = raw.steps[index] if raw.steps else {}
        end_of_prompt = str(tokenizer.decode(ends_of_prompts[index]))
        found.append(
            Turn(
                text=str(tokenizer.decode(ids, skip_special_tokens=True)),
                token_ids=ids,
                new_tokens=len(ids),
                prompt_tokens=prompt_tokens[index],
                wall_time=seconds / len(answers),
                latency=seconds,
                ttft=raw.ttft,
                finish_reason="stop" if ids and ids[-1] in ends else "length",
                begins_in_thought=end_of_prompt.rstrip().endswith(THOUGHT),
                **steps,
            )
        )
    return found


def _generate(models: Models, inputs: Inputs, options: Options, **more: Any) -> Tensor:
    model: Any = models.target
    out = model.generate(**inputs, **options.arguments(), **more)
    assert isinstance(out, Tensor)
    return out


def _assisted(models: Models, inputs: Inputs, options: Options, **more: Any) -> Raw:
    """Runs Transformers' assisted loop over one row. Its first forward also reads the prompt, so it is no verify."""
    require(
        inputs["input_ids"].shape[0] == 1,
        "one row",
        inputs["input_ids"].shape[0],
        "pass one row: Transformers' assisted decoding takes no more",
    )
    recorder = Recorder(models.target.device)
    with _noting_candidates(models.target, recorder) as candidates:
        out = _generate(models, inputs, options, **more)
    recorder.note(out)
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
    ttft, step_ms = recorder.times()
    return Raw(sequences=out, ttft=ttft, step_ms=step_ms, steps=[steps])


@contextmanager
def _noting_candidates(model: Any, recorder: Recorder) -> Generator[list[Tensor]]:
    """Notes what Transformers' candidate generators propose before each forward, `[K]` ids, and when they are asked.

    Stopping criteria cannot be the clock here, because releases before 5.24 call them for candidates too.
    """
    noted: list[Tensor] = []
    original = model._get_candidate_generator

    def noting(*args: Any, **kwargs: Any) -> Any:
        generator = original(*args, **kwargs)
        propose = generator.get_candidates

        def get_candidates(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            # At the first call, no forward has run yet.
            if noted:
                recorder.note(input_ids)
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
