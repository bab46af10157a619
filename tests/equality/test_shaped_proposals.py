"""Processors that shape the draft's proposals change no text, and let more proposals stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from dflash_hf import RunningBatch
from helpers.half import half
from tiny import DSPARK, VOCAB, oracle_draft, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 16


class Stairs(LogitsProcessor):
    """Behind a token only three tokens may stand."""

    is_row_wise = True

    def __init__(self, shapes_proposals: bool) -> None:
        self.shapes_proposals = shapes_proposals

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        last = input_ids[:, -1:]
        allowed = (last * 7 + torch.arange(3)) % (VOCAB - 4) + 3
        return torch.full_like(scores, -torch.inf).scatter(1, allowed, scores.gather(1, allowed))


@pytest.mark.parametrize(
    ("do_sample", "num_tree_nodes", "kind"),
    half(
        {"greedy": False, "sampled": True},
        {"chain": 0, "tree": 12},
        {"dflash": {}, "dspark": DSPARK},
    ),
)
def test_the_text_is_the_same_in_fewer_verifies(
    num_tree_nodes: int, do_sample: bool, kind: dict[str, Any]
) -> None:
    target = shallow_target("qwen3")
    num_verifies = {True: 0, False: 0}
    for seed in range(4):
        inputs = prompts([7, 4, 6], seed)
        texts: list[Tensor] = []
        for shapes in (True, False):
            draft = tiny_draft(target, **kind)
            draft.generation_config.num_tree_nodes = num_tree_nodes
            torch.manual_seed(seed)
            texts.append(
                target.generate(
                    **inputs,
                    max_new_tokens=NEW,
                    do_sample=do_sample,
                    pad_token_id=0,
                    logits_processor=[Stairs(shapes)],
                    assistant_model=draft,
                )
            )
            num_verifies[shapes] += sum(map(len, draft.last_stats.num_committed))
        if not do_sample:
            plain = target.generate(
                **inputs,
                max_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[Stairs(False)],
            )
            texts.append(plain)
        assert all(torch.equal(text, texts[0]) for text in texts)
    # The draft knows nothing, and three tokens are sooner met than all of them.
    assert num_verifies[True] < 0.9 * num_verifies[False]


class Keeping(Stairs):
    """Keeps the texts that it gets."""

    def __init__(self) -> None:
        super().__init__(shapes_proposals=True)
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.kept.append(input_ids)
        return super().__call__(input_ids, scores)


def test_texts_may_be_kept() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    draft.generation_config.verify_width = 4
    keeping = Keeping()
    target.generate(
        **prompts([7, 4], 0),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        logits_processor=[keeping],
        assistant_model=draft,
    )
    # For the draft's logits a processor gets one row.
    of_drafts = [text.data_ptr() for text in keeping.kept if len(text) == 1]
    assert of_drafts
    assert len(set(of_drafts)) == len(of_drafts)


@pytest.mark.parametrize("num_tree_nodes", [0, 12], ids=["chain", "tree"])
def test_a_form_may_leave_a_draft_no_token(num_tree_nodes: int) -> None:
    target = shallow_target("qwen3")
    # Behind a token, Stairs allows three of all tokens, of which the draft mostly has none.
    draft = tiny_draft(target, own_lm_head=True, draft_vocab_size=13)
    draft.generation_config.num_tree_nodes = num_tree_nodes
    inputs = prompts([7, 4, 6], 2)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    settings |= {"logits_processor": [Stairs(True)]}
    expected = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), expected)


def test_an_oracle_under_a_form_is_right() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([7, 4], 1)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    settings |= {"logits_processor": [Stairs(True)]}
    expected = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, expected), 1, 8)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), expected)


def test_rows_of_a_batch_have_each_their_own_form() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    batch = RunningBatch(target, draft)
    expected: dict[int, list[int]] = {}
    for number in range(5):
        ids = prompts([5 + number], number)["input_ids"]
        settings: dict[str, Any] = {"do_sample": False}
        if number != 2:
            settings["logits_processor"] = [Stairs(number % 2 == 0)]
        if number == 4:
            settings["do_sample"] = True
        torch.manual_seed(number)
        text = target.generate(ids, max_new_tokens=NEW, assistant_model=draft, **settings)
        id = batch.add(ids, max_new_tokens=NEW, seed=number, **settings)
        expected[id] = text[0, ids.shape[1] :].tolist()
    found: dict[int, list[int]] = {id: [] for id in expected}
    while batch.ids:
        for new in batch.step():
            found[new.id] += new.token_ids
    assert found == expected
