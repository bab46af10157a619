"""Rows that have ended are no part of later forwards; texts and statistics are what they are with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel
from dflash_hf.generation import decode, step
from dflash_hf.generation.buffers import kept_buffers
from dflash_hf.generation.run import Run
from fuzz.targets import Oracle
from helpers.half import half
from helpers.static import set_engine, tensor_oracle
from helpers.vision import vision_prompts, vision_target
from helpers.whole_blocks import use_whole_blocks
from tiny import (
    DFLASH2,
    DSPARK,
    draft_config,
    oracle_draft,
    prompts,
    shallow_target,
    tiny_draft,
    truth_of,
)

pytestmark = pytest.mark.same_on_every_release

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 20,
    "eos_token_id": [9, 33, 40, 41, 42],
    "pad_token_id": 0,
}
LENGTHS = [4, 11, 7, 2, 9]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes how many rows each verify has."""
    found, verify = list[int](), step.verify

    def noted(run: Run, *given: Any) -> Any:
        found.append(run.state.ids.shape[0])
        return verify(run, *given)

    monkeypatch.setattr(step, "verify", noted)
    return found


def counts_of(draft: DFlashDraftModel) -> list[Any]:
    stats = draft.last_stats
    return [
        stats.num_committed,
        stats.num_accepted,
        stats.num_accepted_by_node,
        stats.num_target_forwards,
    ]


def check(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    inputs: dict[str, Tensor],
    sizes: list[int],
    **settings: Any,
) -> None:
    """The text is plain `generate`'s, with and without rows that are dropped, and so is what was accepted."""
    ref: Any = target.generate(**inputs, **settings)
    assert len({int((row == 0).sum()) for row in ref}) > 1, "rows have to end one after the other"
    found = list[list[Any]]()
    for drops in (True, False):
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            if not drops:
                patch.setattr(decode, "drop_finished", lambda run: None)
            draft.arm(truth_of(inputs, ref), 0)  # pyright: ignore[reportCallIssue]
            out: Any = target.generate(**inputs, **settings, assistant_model=draft)
        assert torch.equal(out, ref)
        found.append(counts_of(draft))
        assert sizes == sorted(sizes, reverse=True)
        assert (sizes[-1] < len(ref)) if drops else (set(sizes) == {len(ref)})
    assert found[0] == found[1]
    assert draft.last_stats.acceptance_length > 1.2


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3-sliding", "gemma3", "gpt-oss", "qwen3.5", "lfm2"]
)
def test_chains(family: str, sizes: list[int]) -> None:
    target = shallow_target(family)
    for seed in range(2):
        inputs = prompts(LENGTHS[: 5 - seed], seed)
        draft = oracle_draft(target, [], seed, 6)
        use_whole_blocks(draft)
        check(target, draft, inputs, sizes, do_sample=False, **SETTINGS)


@pytest.mark.usefixtures("whole_trees")
def test_trees(sizes: list[int]) -> None:
    target, inputs = shallow_target("qwen3-sliding"), prompts(LENGTHS, 1)
    draft: Any = Oracle(draft_config(target, 8)).to(target.dtype).eval()
    draft.strength = 4.0  # so that a second choice counts
    draft.generation_config.num_tree_nodes = 12
    check(target, draft, inputs, sizes, do_sample=False, **SETTINGS)


def test_images(sizes: list[int]) -> None:
    target: Any = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 4)], [], [(4, 8), (4, 4)]], 0)
    ref = target.generate(**inputs, do_sample=False, max_new_tokens=30)
    ends = [
        int(row[inputs["input_ids"].shape[1] + 4 + 6 * index]) for index, row in enumerate(ref[:2])
    ]
    draft = oracle_draft(target, [], 0, 6)
    use_whole_blocks(draft)
    check(target, draft, inputs, sizes, do_sample=False, **SETTINGS | {"eos_token_id": ends})


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize(
    ("proposal", "options"),
    half(
        [("argmax", 0), ("shared_noise", 12), ("argmax", 12), ("sample", 0)],
        {"dflash": {}, "dflash2": DFLASH2, "dspark": DSPARK},
    ),
)
def test_sampled_texts_do_not_follow_from_where_rows_stand(
    proposal: tuple[Any, int], options: dict[str, Any], sizes: list[int]
) -> None:
    """Their noise is keyed by rows: by the call's, wherever they have moved."""
    rule, nodes = proposal
    target = shallow_target("qwen3")
    inputs, texts, counts = prompts(LENGTHS, 0), list[Tensor](), list[Any]()
    for drops in (True, False):
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            if not drops:
                patch.setattr(decode, "drop_finished", lambda run: None)
            torch.manual_seed(0)
            draft = tiny_draft(target, 6, **options)
            draft.generation_config.proposal = rule
            draft.generation_config.num_tree_nodes = nodes
            texts.append(
                target.generate(
                    **inputs, **SETTINGS, do_sample=True, top_k=5, assistant_model=draft
                )
            )
        counts.append(counts_of(draft))
        assert (sizes[-1] < len(LENGTHS)) is drops
    assert torch.equal(*texts)
    assert counts[0] == counts[1]


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0, 4.0, 3.0, 2.0],
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("lengths", [[30, 4, 6], [4, 30, 6], [30, 4]])
def test_a_rope_that_follows_the_longest_row_keeps_it(lengths: list[int], sizes: list[int]) -> None:
    target = shallow_target("llama", max_position_embeddings=256, rope_parameters=LONGROPE)
    inputs = prompts(lengths, 0)
    text = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    end = int(text[lengths.index(30), 31])  # the long row's second token
    settings = {
        **inputs,
        "do_sample": False,
        "max_new_tokens": 12,
        "eos_token_id": end,
        "pad_token_id": 0,
    }
    ref = target.generate(**settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 4)
    assert torch.equal(target.generate(**settings, assistant_model=draft), ref)
    assert set(sizes) == {len(lengths)}


def test_buffers_that_are_kept_keep_their_rows(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a run that was to be captured and cannot be: they are for the next call."""
    target, inputs = shallow_target("qwen3"), prompts(LENGTHS, 0)
    ref = target.generate(**inputs, **SETTINGS, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 6)
    set_engine(draft, "static")
    monkeypatch.setattr(decode, "start_engine", lambda run: None)
    for _ in range(2):
        assert torch.equal(
            target.generate(**inputs, **SETTINGS, do_sample=False, assistant_model=draft), ref
        )
        assert [kept.shape.batch for kept in kept_buffers(draft)] == [len(LENGTHS)]
    assert set(sizes) == {len(LENGTHS)}


class Watching(nn.Module):
    """A module of the user's that sees the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states)


def hooked(target: Any) -> dict[str, Any]:
    target.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    return {}


def replaced(target: Any) -> dict[str, Any]:
    target.model.layers[1].mlp = Watching(target.model.layers[1].mlp)
    return {}


ONLOOKERS: dict[str, Any] = {
    "a hook": hooked,
    "a module": replaced,
    "scores": lambda target: {"output_scores": True, "return_dict_in_generate": True},
    "a cache": lambda target: {"return_dict_in_generate": True},
    "a processor": lambda target: {"repetition_penalty": 1.2},
    "a criterion": lambda target: {"max_time": 1000.0},
}


@pytest.mark.parametrize("onlooker", ONLOOKERS)
def test_whoever_sees_the_batch_sees_all_of_it(onlooker: str, sizes: list[int]) -> None:
    target, inputs = shallow_target("qwen3"), prompts(LENGTHS, 0)
    settings = {**inputs, **SETTINGS, "do_sample": False, **ONLOOKERS[onlooker](target)}
    ref: Any = target.generate(**settings)
    draft = oracle_draft(target, truth_of(inputs, getattr(ref, "sequences", ref)), 0, 6)
    out: Any = target.generate(**settings, assistant_model=draft)
    assert torch.equal(getattr(out, "sequences", out), getattr(ref, "sequences", ref))
    assert set(sizes) == {len(LENGTHS)}


def test_rows_are_dropped_after_a_call_with_hidden_states(sizes: list[int]) -> None:
    """Transformers' hooks for them stay on the layers, and then the run's own hooks stand beside them."""
    target: Any = shallow_target("qwen3")
    inputs = prompts(LENGTHS, 0)
    target(**inputs, output_hidden_states=True)
    assert any(layer._forward_hooks for layer in target.model.layers)
    draft = oracle_draft(target, [], 0, 6)
    use_whole_blocks(draft)
    check(target, draft, inputs, sizes, do_sample=False, **SETTINGS)
