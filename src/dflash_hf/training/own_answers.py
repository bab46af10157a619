"""This module measures whether answers are the target's own. A draft trained on other answers is seldom accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils import logging

from dflash_hf.errors import require
from dflash_hf.target_model.parts import Target
from dflash_hf.training.collators import collate
from dflash_hf.training.example import Example
from dflash_hf.training.forward import target_features

logger: Any = logging.get_logger(__name__)

ROWS = 64  # the number of rows that are checked
FEW = 0.8  # below this share, the answers are probably not the target's


def own_share(target: Target, examples: Sequence[Example], num_rows: int = ROWS) -> float:
    """Returns and logs the share of answer tokens that are the target's most likely tokens, with advice if it is low.

    The share is 1 for greedy answers (except for rounding), and lower for sampled answers.

    Args:
        target (`Target`): The target, in eval mode.
        examples (sequence of [`Example`]): The examples that a draft should learn.
        num_rows (`int`): The maximum number of examples to check. They are spread evenly over all examples.

    Raises:
        ValueError: If the checked examples have no answer token after their first token.
    """
    num_examples = len(examples)
    num_chosen = min(num_rows, num_examples)
    chosen = [at * num_examples // num_chosen for at in range(num_chosen)]
    num_own = 0
    num_tokens = 0
    for at in chosen:
        batch = collate([examples[at]])
        places = batch.loss_mask[0, 1:].nonzero()[:, 0]
        if len(places) == 0:
            continue
        features = target_features(target, [0], batch, num_likely=1, columns=places)
        assert features.next_ids is not None
        likeliest = features.next_ids[0, places.to(features.next_ids.device), 0]
        num_own += int((likeliest.cpu() == batch.input_ids[0, places + 1]).sum())
        num_tokens += len(places)
    require(num_tokens > 0, "examples with answers", 0, "give prompts with the target's answers")
    share = num_own / num_tokens
    advice = ""
    if share < FEW:
        advice = (
            "; a draft would learn the words of another model, template or temperature: let this target answer "
            "anew (--answers target), or lower --temperature"
        )
    logger.warning(
        f"{share:.1%} of {num_tokens:,} answer tokens in {len(chosen)} rows are the target's own first choice{advice}"
    )
    return share
