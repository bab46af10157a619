"""This module answers many prompts in one running batch: `for answer in generate_batch(model, draft, inputs, ...)`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.errors import is_a, one_line, require
from dflash_hf.generation.request_stats import Finished, RequestStats
from dflash_hf.generation.running_batch import RunningBatch
from dflash_hf.modeling_dflash import DFlashDraftModel

Prompt = Tensor | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt.

    Args:
        index (`int`): The index of the prompt among the inputs.
        token_ids (`list[int]`): The new tokens, an end token included.
        finished (`str`): `"stop"` if the answer ended at an end token, `"length"` at the limit, `"error"` if there was
            no room or a processor of this prompt failed. `stats.error` then has the reason.
        stats ([`RequestStats`]): The statistics of this prompt.
    """

    index: int
    token_ids: list[int]
    finished: Finished
    stats: RequestStats


def generate_batch(
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    inputs: Iterable[Prompt],
    *,
    max_new_tokens: int,
    max_rows: int = 8,
    max_tokens: int | None = None,
    prefill_chunk_size: int = 256,
    max_kept_bytes: int = 0,
    seed: int | None = None,
    **settings: Any,
) -> Generator[BatchAnswer]:
    """Answers prompts of any lengths, up to `max_rows` at once, and yields each answer when it ends.

    A prompt begins as soon as a row is free. Every answer is the answer of `generate` to this prompt alone.

    Args:
        model (`PreTrainedModel`): The target; [`RunningBatch`] says which targets are taken.
        draft (`DFlashDraftModel`): Its draft.
        inputs (iterable): The prompts: token ids, `[n]` or `[1, n]`, or mappings that have `input_ids` and settings of
            their own. All prompts of a list are checked before anything runs. An iterator is asked for the next prompt
            when there is room for it.
        max_new_tokens (`int`): Maximum number of tokens of each answer.
        max_rows, max_tokens, prefill_chunk_size, max_kept_bytes: See [`RunningBatch`].
        seed (`int`, *optional*): Seed for sampling. Prompt `i` gets the text that `generate` gives after
            `torch.manual_seed(seed + i)`. By default seeds are drawn from torch's global generator.
        settings: See [`RunningBatch.add`]; for all prompts.

    Returns:
        An iterator of [`BatchAnswer`], in the order in which answers end.

    Raises:
        ValueError: If an argument or a prompt is refused.
    """
    batch = RunningBatch(
        model,
        draft,
        max_rows=max_rows,
        max_tokens=max_tokens,
        prefill_chunk_size=prefill_chunk_size,
        max_kept_bytes=max_kept_bytes,
    )
    common = {**settings, "max_new_tokens": max_new_tokens, "seed": seed}
    given: Any = inputs
    are_many = isinstance(given, Iterable) and not isinstance(given, Mapping | str)
    require(are_many, "a list of prompts as inputs", type(inputs).__name__, "pass one")
    requests = _Requests(batch, iter(inputs), common)
    # If all prompts are known, a wrong one is refused before anything runs.
    if isinstance(inputs, Sequence | Tensor):
        requests.add_all()
    return _answers(batch, requests)


class _Requests:
    """Adds the prompts to a batch one by one, and keeps the index and the new tokens of each open request."""

    def __init__(
        self, batch: RunningBatch, prompts: Iterator[Prompt], common: dict[str, Any]
    ) -> None:
        self.batch = batch
        self.prompts = prompts
        self.common = common
        self.num_added = 0
        # By the id of each request that has not ended: the index of its prompt and its new tokens.
        self.open: dict[int, tuple[int, list[int]]] = {}

    def add_next(self) -> bool:
        """Adds the next prompt. Returns False if there is none. Raises `ValueError` if the prompt is refused."""
        # The loop ends after one prompt, because an iterator is asked for one prompt at a time.
        for prompt in self.prompts:
            index = self.num_added
            self.num_added += 1
            try:
                id = self.batch.add(**_arguments(prompt, index, self.common))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {one_line(error)}") from error
            self.open[id] = (index, [])
            return True
        return False

    def add_all(self) -> None:
        """Adds all prompts."""
        while self.add_next():
            pass


def _arguments(prompt: Prompt, index: int, common: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `RunningBatch.add` for a prompt. Its own settings overrule those of all prompts."""
    found = dict(common)
    # Each prompt has its own noise, whatever order the rows run in. The batch refuses a seed that is not a number.
    if is_a(found["seed"], int):
        found["seed"] += index
    if not isinstance(prompt, Mapping):
        found["input_ids"] = prompt
        return found
    found |= prompt
    require("input_ids" in found, "input_ids in a mapping", list(found), "name them so")
    # Tokenizers return a mask, which a single prompt does not need.
    mask = found.pop("attention_mask", None)
    is_whole = mask is None or bool(torch.as_tensor(mask, device="cpu").all())
    require(is_whole, "a prompt without padding", "an attention_mask with zeros", "cut it off")
    return found


def _answers(batch: RunningBatch, requests: _Requests) -> Generator[BatchAnswer]:
    """Runs steps until all prompts are answered."""
    has_more = True
    while True:
        # One prompt always waits, so that a free row is used at the next step.
        while has_more and not batch.num_waiting:
            has_more = requests.add_next()
        if not batch.ids:
            return
        for new in batch.step():
            index, token_ids = requests.open[new.id]
            # A step gives a few tokens of each answer, and the caller gets whole answers.
            token_ids.extend(new.token_ids)
            if new.finished is not None:
                del requests.open[new.id]
                # The batch keeps the statistics of an ended row until its next step.
                stats = batch.ended[new.id]
                yield BatchAnswer(index, token_ids, new.finished, stats)
