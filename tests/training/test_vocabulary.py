"""A reduced vocabulary holds what the target writes most, and not what stands in prompts."""

import logging

import pytest
import transformers

from dflash_hf.training import Example, frequent_tokens

EXAMPLES = [
    Example.from_pair([9, 9, 9, 9, 9], [5, 7, 5, 2]),
    Example.from_pair([9, 9], [7, 4, 5, 2]),
    Example(input_ids=[8, 6, 8, 6], loss_mask=[0, 1, 0, 1]),
]


def test_the_most_frequent_tokens_of_the_answers(caplog: pytest.LogCaptureFixture) -> None:
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        # Three times 5; of 2, 6 and 7, twice each, the lowest id
        assert frequent_tokens(EXAMPLES, 2) == [2, 5]
    assert (
        "The 2 tokens of the reduced vocabulary are 50.00% of what the answers hold." in caplog.text
    )
    assert frequent_tokens(EXAMPLES, 3, always=[30]) == [2, 5, 30]
    assert frequent_tokens(EXAMPLES, 100) == [2, 4, 5, 6, 7]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="expected examples with answer tokens, got 0; "):
        frequent_tokens([Example.from_pair([1, 2], [])], 4)
    with pytest.raises(ValueError, match="expected a size of at least 2, got 1; "):
        frequent_tokens(EXAMPLES, 1, always=[2, 30])
    with pytest.raises(ValueError, match="expected a size of at least 1, got 0; "):
        frequent_tokens(EXAMPLES, 0)
