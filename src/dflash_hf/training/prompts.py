"""This module lets the target write prompts, for cases without data. The target continues an empty user turn.

The method is Magpie (arXiv 2406.08464). The file has the form of prepared rows, and each row has the number of its
batch. Each batch has its own random numbers, so a run that was killed and continued writes the same file as a run
without interruption.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.data.row_files import RowFile, append_rows, repair
from dflash_hf.data.sampling import check_sampling
from dflash_hf.errors import require
from dflash_hf.target_model.parts import end_tokens
from dflash_hf.training.chat_template import ChatTemplate, Processing
from dflash_hf.training.collators import collate
from dflash_hf.training.conversations import content_id
from dflash_hf.training.example import Example
from dflash_hf.training.target_answers import (
    generated,
    padding_of,
    random_numbers_of,
)

logger = logging.getLogger(__name__)

# The run ends after this number of consecutive batches without a new prompt.
MAX_EMPTY_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """The number of prompts to write, and their settings.

    Args:
        output (`Path`): The file to write, or to continue.
        num_prompts (`int`): Number of prompts.
        max_new_tokens (`int`): The maximum number of tokens of a prompt. Unfinished prompts are left out.
        batch_size (`int`): Number of prompts that are written at once.
        temperature, top_p (`float`): Settings of sampling.
        seed (`int`): Seed for sampling.
        chat_template_kwargs (mapping): Further options of the chat template.
    """

    output: Path
    num_prompts: int
    max_new_tokens: int = 128
    batch_size: int = 32
    temperature: float = 1.0
    top_p: float = 0.95
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self) -> None:
        """Refuses settings that are out of range.

        Raises:
            ValueError: If a setting is refused. The message names the first such setting.
        """
        for name in ("num_prompts", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            require(value > 0, f"at least 1 as {name}", value, "give a larger one")
        what = "above 0 as temperature: greedy ones would all be the same"
        require(0 < self.temperature < float("inf"), what, self.temperature, "give a larger one")
        check_sampling({"top_p": self.top_p})


def write_prompts(
    settings: PromptSettings, target: PreTrainedModel, processing_class: Processing
) -> int:
    """Lets the target write prompts, up to the number of the settings. A file that exists is continued.

    Prompts that are empty, unfinished or already written are left out.

    Returns:
        `int`: The number of prompts in the file.

    Raises:
        ValueError: If the chat template does not read a given option or writes no turns of the user, if the target
            writes no prompt, or if the disk is full.
    """
    settings.check()
    template = ChatTemplate(processing_class, settings.chat_template_kwargs)
    template.check_options()
    tokenizer: Any = template.tokenizer
    before, _ = template.around("user")
    ends = template.end_of_turn("user")[:1]
    ends += end_tokens(target)
    what = "a chat template that ends turns with a special token"
    require(bool(ends), what, "one that does not", "give prompts")
    prefix = Example.from_pair(template.tokens(before), [])
    padding = padding_of(tokenizer, ends[0])
    batch = collate([prefix] * settings.batch_size, padding).to(target.device)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "pad_token_id": padding,
        "top_k": 0,
    }
    options |= {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p}
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    repair(settings.output)
    seen, number = _written_before(settings.output)
    empty = 0
    while len(seen) < settings.num_prompts:
        seed = (settings.seed * 1_000_003 + number) % 2**63
        with random_numbers_of(seed, target.device):
            written = generated(target, batch, ends, **options)
        rows: list[dict[str, Any]] = []
        for ids in written:
            if ids[-1] not in ends:
                continue
            text = tokenizer.decode(ids[:-1], skip_special_tokens=True).strip()
            row: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
            name = content_id(row)
            if text and name not in seen and len(seen) < settings.num_prompts:
                seen.add(name)
                rows.append({"id": name, **row, "batch": number})
        append_rows(settings.output, rows)
        number += 1
        empty += 1
        if rows:
            empty = 0
        what = f"a target that writes what a user says within {settings.max_new_tokens} tokens"
        got = f"nothing new in {MAX_EMPTY_BATCHES} batches"
        action = "raise max_new_tokens or the temperature, or give prompts"
        require(empty < MAX_EMPTY_BATCHES, what, got, action)
        logger.info("%d prompts of %d", len(seen), settings.num_prompts)
    return len(seen)


def _written_before(path: Path) -> tuple[set[str], int]:
    """Returns the ids of the prompts in a file, and the number of the batch to continue with."""
    seen: set[str] = set()
    number = 0
    if path.is_file():
        for row in RowFile(path):
            seen.add(row["id"])
            # The last batch runs again, because the file may not have all of its prompts.
            number = max(number, row.get("batch", 0))
    return seen, number
