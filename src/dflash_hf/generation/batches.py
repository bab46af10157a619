"""Many prompts through one running batch: `for answer in generate_batch(model, draft, inputs, ...)`."""

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
        index (`int`): Number of the prompt among the inputs.
        token_ids (`list[int]`): New tokens, an end token included.
        finished (`str`): `"stop"` at an end token, `"length"` at the limit, `"error"` if there was no room or a
            processor of this prompt has failed: `stats.error` has the reason.
        stats ([`RequestStats`]): Statistics of this prompt.
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
    # Refused before anything runs, where all prompts are there.
    if isinstance(inputs, Sequence | Tensor):
        requests.add_all()
    return _answers(batch, requests)


class _Requests:
    """The prompts on their way into a batch."""

    def __init__(
        self, batch: RunningBatch, prompts: Iterator[Prompt], common: dict[str, Any]
    ) -> None:
        self.batch = batch
        self.prompts = prompts
        self.common = common
        self.num_added = 0
        # Index of the prompt and new tokens of each request that has not ended, by its id.
        self.open: dict[int, tuple[int, list[int]]] = {}

    def add_next(self) -> bool:
        """Adds the next prompt; returns False if there is none. Raises `ValueError` if it is refused."""
        # The loop is left behind the first prompt: an iterator is asked for one at a time.
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
    """Returns the arguments of `RunningBatch.add` for a prompt; its own come before those of all."""
    found = dict(common)
    # Each prompt has noise of its own, whatever order the rows run in. The batch refuses what is no number.
    if is_a(found["seed"], int):
        found["seed"] += index
    if not isinstance(prompt, Mapping):
        found["input_ids"] = prompt
        return found
    found |= prompt
    require("input_ids" in found, "input_ids in a mapping", list(found), "name them so")
    # Tokenizers return one.
    mask = found.pop("attention_mask", None)
    is_whole = mask is None or bool(torch.as_tensor(mask, device="cpu").all())
    require(is_whole, "a prompt without padding", "an attention_mask with zeros", "cut it off")
    return found


def _answers(batch: RunningBatch, requests: _Requests) -> Generator[BatchAnswer]:
    """Runs steps until all prompts are answered."""
    has_more = True
    while True:
        # One waits, so that a row that becomes free is taken at the next step.
        while has_more and not batch.num_waiting:
            has_more = requests.add_next()
        if not batch.ids:
            return
        for new in batch.step():
            index, token_ids = requests.open[new.id]
            # A step brings a few tokens of each answer, and the caller gets whole ones.
            token_ids.extend(new.token_ids)
            if new.finished is not None:
                del requests.open[new.id]
                # The batch keeps these until its next step.
                stats = batch.ended[new.id]
                yield BatchAnswer(index, token_ids, new.finished, stats)
