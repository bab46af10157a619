"""How much of the answers is what the target would say itself, and what is told of it."""

from __future__ import annotations

import logging

import pytest
from transformers import Qwen3ForCausalLM

from dflash_hf.target_model.parts import find_target
from dflash_hf.training import Example, regenerate_answers
from dflash_hf.training.own_answers import own_share

OPTIONS = {"max_new_tokens": 10, "eos_token_id": 47, "pad_token_id": 0}


def test_the_targets_own_answers_are_its_first_choices(target: Qwen3ForCausalLM) -> None:
    prompts = [[5, 9, 4], [7], [1, 2, 3, 4, 5, 6]]
    answers = regenerate_answers(target, prompts, **OPTIONS)
    examples = [Example.from_pair(*row) for row in zip(prompts, answers, strict=True)]
    assert own_share(find_target(target), examples) == 1


def test_each_token_of_another_model_counts(
    target: Qwen3ForCausalLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other answer ends with a token that the target would not have said there."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (answer,) = regenerate_answers(target, [[5, 9, 4]], **OPTIONS)
    wrong = [*answer[:-1], (answer[-1] + 1) % 46]
    rows = [answer, wrong] * 2
    examples = [Example.from_pair([5, 9, 4], row) for row in rows]
    share = own_share(find_target(target), examples)
    assert share == 1 - 2 / (4 * len(answer))
    assert "another model" not in caplog.text
    (strange,) = [Example.from_pair([5, 9, 4], [(token + 1) % 46 for token in answer])]
    assert own_share(find_target(target), [strange], num_rows=8) < 0.8
    assert "a draft would learn the words of another model" in caplog.text


@pytest.mark.parametrize(
    ("num_examples", "expected"),
    [(130, [0, 32, 65, 97]), (7, [0, 1, 3, 5]), (4, [0, 1, 2, 3]), (3, [0, 1, 2])],
)
def test_only_so_many_rows_are_asked(
    num_examples: int, expected: list[int], target: Qwen3ForCausalLM
) -> None:
    """They are spread evenly over all, so that no part of the data is left out."""
    asked: list[int] = []

    class Rows(list[Example]):
        def __getitem__(self, at):
            asked.append(at)
            return super().__getitem__(at)

    examples = Rows([Example.from_pair([5, 9, 4], [7, 8])] * num_examples)
    own_share(find_target(target), examples, num_rows=4)
    assert asked == expected
