"""This module chooses the tokens of a reduced vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from transformers.utils import logging

from dflash_hf.errors import require
from dflash_hf.training.example import Example

logger: Any = logging.get_logger(__name__)


def frequent_tokens(
    examples: Sequence[Example], size: int, always: Iterable[int] = ()
) -> list[int]:
    """Chooses the target's most frequent tokens for a reduced vocabulary, and logs the share that they cover.

    A smaller head makes a draft's step shorter. A token that the head lacks is never proposed, so no later proposal of
    the same block is accepted.

    Args:
        examples (sequence of [`Example`]): The training data. Tokens of prompts do not count.
        size (`int`): The maximum number of tokens. There are fewer if the answers have fewer different tokens.
        always (iterable of `int`): Tokens that are always chosen, such as the tokens that end an answer.

    Returns:
        `list[int]`: Ids in ascending order, the `draft_token_ids` of [`DFlashDraftModel.from_target`].

    Raises:
        ValueError: If there is no answer token, or no room for `always`.
    """
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(itertools.compress(example.input_ids, example.loss_mask))
    require(
        bool(counts), "examples with answer tokens", 0, "give prompts with the target's answers"
    )
    chosen = set(always)
    require(
        size >= max(1, len(chosen)),
        f"a size of at least {max(1, len(chosen))}",
        size,
        "choose more tokens",
    )
    # Of equally frequent tokens, the lower ids are chosen, which a byte-pair vocabulary learned first.
    ranked = sorted(counts.keys() - chosen, key=lambda token: (-counts[token], token))
    chosen.update(ranked[: size - len(chosen)])
    covered = sum(counts[token] for token in chosen) / counts.total()
    logger.warning(
        f"The {len(chosen)} tokens of the reduced vocabulary are {covered:.2%} of what the answers hold."
    )
    return sorted(chosen)
