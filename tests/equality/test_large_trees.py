"""Trees of more nodes than a word has bits: plain `generate` is the oracle, and block size 1 when sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf.generation.widths import FixedWidth, WidthChooser
from helpers.half import half
from helpers.static import set_engine, use_tapes
from helpers.trees import branching
from helpers.vision import shallow_vision_target, vision_prompts
from tiny import (
    DFLASH2,
    DSPARK,
    prompts,
    shallow_target,
    tiny_draft,
    truth_of,
)

pytestmark = pytest.mark.same_on_every_release

NEW = 18
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
LENGTHS = [4, 11, 7]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize(
    ("nodes", "family"), half([65, 100, 128, 256], ["qwen3", "qwen3-sliding", "gemma3"])
)
def test_greedy_equals_plain_generate(nodes: int, family: str) -> None:
    target = shallow_target(family)
    inputs = prompts(LENGTHS, nodes)
    ref = target.generate(**inputs, **GREEDY)
    draft = branching(target, truth_of(inputs, ref), nodes, nodes)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    stats = draft.last_stats
    assert set(stats.verify_widths) == {nodes}
    assert 1.0 < stats.acceptance_length < 16
    assert sum(stats.num_accepted_by_node[15:]) > 0, "a chain would have done"


@pytest.mark.usefixtures("whole_trees")
def test_a_node_of_every_word_is_accepted() -> None:
    target = shallow_target("qwen3")
    accepted = torch.zeros(255, dtype=torch.long)
    for seed in range(6):
        inputs = prompts(LENGTHS, seed)
        ref = target.generate(**inputs, **GREEDY)
        draft = branching(target, truth_of(inputs, ref), 256, 256)
        # The less sure it is, the further back stands what is right.
        draft.strength = 1.0
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        accepted += torch.tensor(draft.last_stats.num_accepted_by_node)
    by_word = [int(part.sum()) for part in accepted.split([63, 64, 64, 64])]
    assert min(by_word) > 0, by_word


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
def test_steps_over_fixed_buffers(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch, smallest_bucket=16)
    target = shallow_target("qwen3-sliding")
    inputs = prompts(LENGTHS, 1)
    ref = target.generate(**inputs, **GREEDY)
    draft = branching(target, truth_of(inputs, ref), 128, 128)
    by_node: list[list[int]] = []
    for name in ("eager", engine, engine):  # the last takes the buffers of the one before
        set_engine(draft, name)
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == name
        by_node.append(draft.last_stats.num_accepted_by_node)
    assert by_node == [by_node[0]] * 3


@pytest.mark.parametrize(
    ("kind", "rule"),
    half(["dflash", "dflash2", "dspark", "anchor"], ["argmax", "shared_noise"]),
)
def test_a_sampled_text_is_that_of_block_size_one(kind: str, rule: str) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([4, 9, 6], 3)
    kinds = {"dflash2": DFLASH2, "dspark": DSPARK, "anchor": {"sample_from_anchor": True}}
    options = kinds.get(kind, {})
    settings = {"max_new_tokens": 10, "do_sample": True, "eos_token_id": 9, "top_k": 10}
    draft = tiny_draft(target, 16, **options)
    draft.generation_config.block_size = 1
    torch.manual_seed(11)
    ref = target.generate(**inputs, **settings, assistant_model=draft)
    for nodes in (100, 256):
        draft = branching(target, truth_of(inputs, ref), nodes, nodes, **options)
        draft.generation_config.proposal = rule
        torch.manual_seed(11)
        assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
        assert draft.last_stats.acceptance_length > 1


def test_processors_that_read_the_prefix() -> None:
    target = shallow_target("qwen3")
    inputs = prompts(LENGTHS, 5)
    settings = {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    ref = target.generate(**inputs, **settings)
    draft = branching(target, truth_of(inputs, ref), 128, 128)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_images(family: str) -> None:
    target = shallow_vision_target(family)
    inputs = vision_prompts(target, family, [[(4, 6)], [(4, 4), (6, 2)]], 1)
    ref = target.generate(**inputs, **GREEDY)
    draft = branching(target, truth_of(inputs, ref), 128, 128)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
def test_fewer_nodes_need_fewer_words(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first nodes of the widest tree are a tree, whatever the last one has left in the words behind."""
    use_tapes(monkeypatch, smallest_bucket=16)
    target = shallow_target("llama")
    inputs = prompts([5, 8], 6)
    settings = {**GREEDY, "max_new_tokens": 36}
    ref = target.generate(**inputs, **settings)
    draft = branching(target, truth_of(inputs, ref), 256, 256)
    draft.generation_config.verify_width = "auto"
    set_engine(draft, engine)
    widths = iter([256, 64, 192, 1, 2, 128, 96, 4, 256] * 10)

    def next_choice(self: WidthChooser) -> tuple[int, bool]:
        self.current = next(widths)
        return self.current, False

    monkeypatch.setattr(WidthChooser, "next_choice", next_choice)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert {256, 64, 192, 1} <= set(draft.last_stats.verify_widths)


@pytest.mark.usefixtures("whole_trees")
def test_trees_of_64_nodes_take_one_word() -> None:
    """What most calls verify reads no more memory than before there were larger ones."""
    target = shallow_target("qwen3")
    inputs = prompts([5], 6)
    shapes: list[tuple[int, ...]] = []
    for nodes in (64, 65, 256):
        draft = branching(target, [[0]], nodes, nodes)

        def note(generator: Any, state: Any, is_captured: bool) -> FixedWidth:
            shapes.append(tuple(state.nodes.shape))
            return FixedWidth(generator.verify_width)

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr("dflash_hf.generation.decode.choose_widths", note)
            target.generate(**inputs, max_new_tokens=2, do_sample=False, assistant_model=draft)
    assert shapes == [(4, 1, 64), (5, 1, 65), (7, 1, 256)]
