"""Verifying a tree of proposals changes no text: plain `generate` is the oracle, and block size 1 when sampling."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel, iterate
from dflash_hf.block.tree import TreeBuilder
from dflash_hf.generation.choice_costs import CHAIN
from dflash_hf.generation.widths import WidthChooser, _kept_choosers
from dflash_hf.target_model.parts import find_target
from fuzz.targets import Oracle
from helpers.half import pairs
from helpers.static import set_engine, use_tapes
from helpers.trees import branching
from helpers.vision import shallow_vision_target, vision_prompts
from helpers.widths import RandomWidths, use_random_widths
from tiny import (
    DFLASH2,
    DSPARK,
    FAMILIES,
    prompts,
    shallow_target,
    tiny_draft,
    tiny_target,
    truth_of,
)

pytestmark = pytest.mark.same_on_every_release

NEW = 12
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": DFLASH2,
    "dspark": DSPARK,
    "anchor": {"sample_from_anchor": True},
}
# Block size, nodes, and lengths of the rows' prompts.
SHAPES = [(5, 8, [9]), (8, 16, [4, 11, 7]), (16, 32, [12, 3]), (8, 3, [6])]


@cache
def target_of(family: str) -> PreTrainedModel:
    return shallow_target(family)


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain_generate(family: str) -> None:
    target, is_branched = target_of(family), False
    for seed, (block_size, nodes, lengths) in enumerate(SHAPES):
        inputs = prompts(lengths, seed)
        ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        draft = branching(target, truth_of(inputs, ref), seed, nodes)
        draft.generation_config.block_size = block_size
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref)
        stats = draft.last_stats
        assert 1.0 < stats.acceptance_length < min(nodes, block_size)
        assert stats.num_tried_by_node == [stats.num_verifies] * (nodes - 1)
        assert sum(stats.num_accepted_by_node) == sum(map(sum, stats.num_accepted))
        is_branched |= stats.num_accepted_by_node != sorted(
            stats.num_accepted_by_node, reverse=True
        )
    assert is_branched, "a chain would have done"


class Wider(LogitsProcessor):
    """Returns float64, and may look at anything: it is called token by token."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.double()


def test_scores_that_a_processor_widens_are_those_of_the_path() -> None:
    target = target_of("qwen3")
    for seed, (_, nodes, lengths) in enumerate(SHAPES):
        inputs, settings = prompts(lengths, seed), {"max_new_tokens": NEW, "do_sample": False}
        ref = target.generate(**inputs, **settings)
        draft = branching(target, truth_of(inputs, ref), seed, nodes)
        out = target.generate(
            **inputs, **settings, logits_processor=[Wider()], assistant_model=draft
        )
        assert torch.equal(out, ref)
        assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize("nodes", [4, 16])
def test_a_path_has_the_context_that_a_chain_has(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the draft sees of a text does not depend on how it was verified: its logits behind each anchor."""
    target = shallow_target("qwen3-sliding")
    inputs, settings = prompts([4, 11, 7], 2), {"max_new_tokens": 24, "do_sample": False}
    seen: dict[str, dict[tuple[int, int], Tensor]] = {}
    compute = DFlashDraftModel.compute_logits
    draft = branching(target, truth_of(inputs, target.generate(**inputs, **settings)), 3, nodes)
    for name in ("tree", "chain"):
        if name == "chain":
            draft.generation_config.num_tree_nodes, draft.generation_config.verify_width = None, 2
        found = seen.setdefault(name, {})

        def note(self: Any, states: Tensor, head: Any, found: Any = found) -> Tensor:
            logits = compute(self, states, head)
            for place, (row, first) in enumerate(
                zip(self.rows_of(len(states)), self.positions[:, 0].tolist(), strict=True)
            ):
                found.setdefault((row, first), logits[place, :1].clone())
            return Oracle.compute_logits(self, states, head)

        monkeypatch.setattr(draft, "compute_logits", note.__get__(draft))
        target.generate(**inputs, **settings, assistant_model=draft)
    shared = seen["chain"].keys() & seen["tree"].keys()
    assert len(shared) > 10
    for key in shared:
        torch.testing.assert_close(seen["tree"][key], seen["chain"][key], rtol=1e-9, atol=1e-9)


WARPERS: dict[str, dict[str, Any]] = {
    "none": {},
    "usual": {"temperature": 0.7, "top_k": 10},
    "prefix": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize(
    ("kind", "rule", "warpers"),
    pairs(list(KINDS), ["argmax", "shared_noise"], WARPERS),
)
def test_a_sampled_text_is_that_of_block_size_one(
    kind: str, rule: str, warpers: dict[str, Any]
) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([4, 9, 6], 3)
    options = KINDS[kind]
    settings = {"max_new_tokens": 11, "do_sample": True, "eos_token_id": 9, **warpers}
    draft = tiny_draft(target, 16, **options)
    draft.generation_config.block_size = 1
    torch.manual_seed(11)
    ref = target.generate(**inputs, **settings, assistant_model=draft)
    for nodes in (3, 16):
        draft = branching(target, truth_of(inputs, ref), 5, nodes, **options)
        draft.generation_config.proposal = rule
        torch.manual_seed(11)
        assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
        assert draft.last_stats.acceptance_length > 1


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize(
    ("family", "engine", "seed"),
    pairs(["qwen3-sliding", "gemma3"], ["static", "cuda_graph"], [0, 1, 2]),
)
def test_steps_over_fixed_buffers(
    family: str, engine: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=16)
    target, (block_size, nodes, lengths) = target_of(family), SHAPES[seed]
    inputs = prompts(lengths, seed)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft, by_node = branching(target, truth_of(inputs, ref), seed, nodes), list[list[int]]()
    draft.generation_config.block_size = block_size
    for name in ("eager", engine, engine):  # the last takes the buffers of the one before
        set_engine(draft, name)
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref)
        assert draft.last_stats.engine == name
        by_node.append(draft.last_stats.num_accepted_by_node)
    assert by_node == [by_node[0]] * 3
    assert sum(by_node[0]) == sum(map(sum, draft.last_stats.num_accepted)) > 0


@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3-next"])
def test_a_tree_is_the_default_where_it_may_be(
    family: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=16)
    target = target_of(family)
    inputs = prompts([4, 11, 7], 5)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = branching(target, truth_of(inputs, ref), 5, 6)
    draft.generation_config.num_tree_nodes, draft.generation_config.block_size = None, 6
    set_engine(draft, engine)
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )
    is_tree = not find_target(target).recurrences
    assert len(draft.last_stats.num_accepted_by_node) == (5 if is_tree else 0)
    # Rejection goes along a chain.
    draft.generation_config.proposal = "sample"
    target.generate(**inputs, max_new_tokens=4, do_sample=True, assistant_model=draft)
    assert not draft.last_stats.num_accepted_by_node


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
def test_how_far_back_is_looked_may_change_between_calls(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=16)
    target = target_of("llama")
    inputs = prompts([9, 30], 8)
    inputs["input_ids"] %= 5  # so that every few tokens come again
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft, accepted = (
        branching(target, truth_of(inputs, ref), 8, 12),
        dict[tuple[str, int | None], Any](),
    )
    for name in ("eager", engine):
        set_engine(draft, name)
        for longest in (None, 0):
            draft.generation_config.max_matching_ngram_size = longest
            out = target.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft
            )
            assert torch.equal(out, ref)
            stats = draft.last_stats
            from_text = stats.num_tried_from_text, stats.num_accepted_from_text
            accepted[name, longest] = stats.num_accepted_by_node, from_text
            if longest is None:
                assert 0 < from_text[1] < from_text[0] < sum(stats.num_tried_by_node)
            else:
                assert from_text == (0, 0)
    assert accepted["eager", None] != accepted["eager", 0]
    assert all(accepted[engine, longest] == accepted["eager", longest] for longest in (None, 0))


@pytest.mark.parametrize("nodes", [8, "auto"])
def test_a_tree_whose_proposals_are_drawn_is_refused(nodes: Any) -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 6)
    draft.generation_config.proposal, draft.generation_config.num_tree_nodes = "sample", nodes
    inputs = prompts([4, 11, 7], 5)
    with pytest.raises(
        ValueError,
        match=r"^expected proposal 'argmax' or 'shared_noise' with num_tree_nodes, got 's",
    ):
        target.generate(**inputs, max_new_tokens=4, do_sample=True, assistant_model=draft)
    target.generate(**inputs, max_new_tokens=4, do_sample=False, assistant_model=draft)
    assert sum(draft.last_stats.num_tried_by_node), (
        "a greedy call proposes what is likeliest under every rule"
    )


@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_images(family: str) -> None:
    target = shallow_vision_target(family)
    inputs = vision_prompts(target, family, [[(4, 6)], [(4, 4), (6, 2)]], 1)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = branching(target, truth_of(inputs, ref), 1, 12)
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )
    assert draft.last_stats.acceptance_length > 1


def test_what_is_returned_belongs_to_the_path() -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 11], 4)
    asked: dict[str, Any] = {
        f"output_{name}": True for name in ("scores", "logits", "hidden_states")
    }
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **asked}
    ref = target.generate(**inputs, **settings)
    draft = branching(target, truth_of(inputs, ref.sequences), 4, 16)
    out = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(out.sequences, ref.sequences)
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(out, name), getattr(ref, name), strict=True):
            torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(out.hidden_states, ref.hidden_states, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
def test_a_width_that_follows_the_run_takes_the_first_nodes(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=16)
    target = target_of("llama")
    inputs = prompts([5, 8], 6)
    ref = target.generate(**inputs, max_new_tokens=36, do_sample=False)
    draft = branching(target, truth_of(inputs, ref), 6, 16)
    draft.generation_config.verify_width = "auto"
    set_engine(draft, engine)
    widths, seen = iter([16, 1, 1, 1, 4, 2, 1, 12, 3] * 10), list[bool]()
    learn = WidthChooser.learn

    def noted(
        self: WidthChooser,
        width: int,
        accepted: Any,
        clock: float,
        nodes: Any = (),
        chains: Any = (),
    ) -> None:
        seen.append((width == 1 and not nodes) or [len(row) for row in nodes] == list(accepted))
        learn(self, width, accepted, clock, nodes, chains)

    monkeypatch.setattr(WidthChooser, "learn", noted)
    monkeypatch.setattr(
        WidthChooser,
        "next_choice",
        lambda self: setattr(self, "current", next(widths)) or (self.current, False),
    )
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=36, do_sample=False, assistant_model=draft), ref
    )
    assert len(set(draft.last_stats.verify_widths)) > 4
    assert all(seen), "a node is no place in a chain"


@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
def test_a_tree_may_be_larger_than_the_chain(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As steps of each size cost and nodes are accepted; the first has the chain's, of which the most is known."""
    use_tapes(monkeypatch, smallest_bucket=16)
    target, tried = target_of("llama"), WidthChooser.next_choice
    inputs = prompts([5, 8], 6)
    ref = target.generate(**inputs, max_new_tokens=36, do_sample=False)
    draft = branching(target, truth_of(inputs, ref), 6, 16)
    draft.generation_config.num_tree_nodes, draft.generation_config.block_size = "auto", 6
    set_engine(draft, engine)
    steps = itertools.count()

    def next_choice(self: WidthChooser) -> tuple[int, bool]:
        choice = tried(self)
        step = next(steps)
        if step <= 2:
            return choice
        self.current = self.widths[step % 3]
        return self.current, False

    monkeypatch.setattr(WidthChooser, "next_choice", next_choice)
    out = target.generate(**inputs, max_new_tokens=36, do_sample=False, assistant_model=draft)
    assert torch.equal(out, ref)
    widths = draft.last_stats.verify_widths
    assert widths[0] == 6
    assert max(widths) == 24
    assert len(draft.last_stats.num_tried_by_node) == 23


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "by-position": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 10},
}


@pytest.mark.parametrize(
    ("kind", "settings", "lengths"),
    pairs(list(KINDS), SETTINGS, {"1": [9], "3": [4, 11, 7]}),
)
def test_steps_of_chains_and_of_trees_in_one_run(
    kind: str, settings: dict[str, Any], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever size is verified next, as a tree or as the chain of all proposals."""
    # With fewer layers the texts of three rows end too early.
    target, build = tiny_target("qwen3-sliding"), TreeBuilder.build
    options = KINDS[kind]
    settings = {"max_new_tokens": 40, "eos_token_id": 1, **settings}
    is_chain, built = list[bool](), list[bool]()
    monkeypatch.setattr(TreeBuilder, "build", lambda *args: built.append(True) or build(*args))
    monkeypatch.setattr(
        RandomWidths, "observe", lambda self, *args: is_chain.append(self.current == CHAIN)
    )
    seed = int(len(lengths) > 1)
    inputs = prompts(lengths, seed)
    draft = tiny_draft(target, 16, **options)
    draft.generation_config.block_size = 1
    torch.manual_seed(11)
    ref = target.generate(**inputs, **settings, assistant_model=draft)
    draft = branching(target, truth_of(inputs, ref), seed, 8, **options)
    draft.generation_config.block_size, draft.generation_config.num_tree_nodes = 6, "auto"
    use_random_widths(monkeypatch, seed)
    is_chain.clear()
    built.clear()
    torch.manual_seed(11)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    num_drafted = sum(width > 1 for width in draft.last_stats.verify_widths)
    assert len(built) == num_drafted - sum(is_chain) > 1
    assert any(is_chain)
    assert draft.last_stats.acceptance_length > 1


def test_what_chains_have_shown_says_nothing_of_trees() -> None:
    """Node 2 of a tree is no second proposal: a width chosen by the counts of the other kind would be any."""
    target = target_of("llama")
    inputs = prompts([5], 6)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = branching(target, truth_of(inputs, ref), 6, 16)
    draft.generation_config.verify_width = "auto"
    for nodes in (0, 16, 0, 16):
        draft.generation_config.num_tree_nodes = nodes
        assert torch.equal(
            target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft),
            ref,
        )
    assert sorted(
        chooser.is_tree for kept in _kept_choosers[draft].values() for chooser in kept.values()
    ) == [False, True]


def test_steps_that_are_looked_at_show_the_path() -> None:
    target = target_of("qwen3")
    inputs = prompts([5], 7)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = branching(target, truth_of(inputs, ref), 7, 8)
    steps = list(
        iterate(target, draft, **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True)
    )
    assert torch.equal(torch.cat([step.committed[0] for step in steps])[None], ref[:, 5:])
    for step in steps[1:]:
        num = int(step.num_accepted)
        assert step.proposals[0, :num].tolist() == step.tokens[0, :num].tolist()
        assert step.logits is not None
        assert (
            step.logits[0, : num + 1].argmax(dim=-1).tolist() == step.tokens[0, : num + 1].tolist()
        )
        assert step.node_ids is not None
        assert step.parents is not None
        ids, parents = step.node_ids[0].tolist(), step.parents[0].tolist()
        assert ids[0] == int(step.anchor)
        assert (
            len({(parent, token) for parent, token in zip(parents[1:], ids[1:], strict=True)}) == 7
        )
        node = 0
        for token in step.proposals[0, :num].tolist():
            node = next(i for i in range(1, 8) if parents[i] == node and ids[i] == token)
        assert int(step.tokens[0, num]) not in [ids[i] for i in range(1, 8) if parents[i] == node]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
def test_a_streamer_of_trees_gets_those_of_iterate(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=16)
    target = target_of("qwen3")
    inputs = prompts([5], 7)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = branching(target, truth_of(inputs, ref), 7, 8)
    steps = list(iterate(target, draft, **inputs, max_new_tokens=NEW, do_sample=False))[1:]
    streamer = Listener()
    set_engine(draft, engine)
    out = target.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft, streamer=streamer
    )
    assert torch.equal(out, ref)
    assert [what for what, _ in streamer.heard] == [
        "tokens",
        "tokens",
        *["tree", "tokens"] * len(steps),
    ]
    for step, (_, tree), (_, tokens) in zip(
        steps, streamer.heard[2::2], streamer.heard[3::2], strict=True
    ):
        assert step.node_ids is not None
        assert step.parents is not None
        assert (tree["node_ids"], tree["parents"]) == (
            step.node_ids[0].tolist(),
            step.parents[0].tolist(),
        )
        num = int(step.num_accepted)
        path = tree["path"]
        assert [tree["node_ids"][node] for node in path[1 : num + 1]] == step.proposals[
            0, :num
        ].tolist()
        assert path[num + 1 :] == [0] * (len(path) - num - 1)
        assert tokens == step.committed[0].tolist()
    assert (
        sum(sum(tree["sources"]) for _, tree in streamer.heard[2::2])
        == draft.last_stats.num_tried_from_text
    )


class Never(StoppingCriteria):
    """Stops nothing, and may keep state."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return False


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("is_own", [False, True], ids=["max_time", "own"])
def test_a_streamer_beside_a_criterion(is_own: bool) -> None:
    """A criterion of the caller's is called as in plain `generate`, token by token, and so is the streamer."""
    target = target_of("qwen3")
    inputs = prompts([5], 7)
    settings: dict[str, Any] = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    ref = target.generate(**settings)
    criterion = {"stopping_criteria": [Never()]} if is_own else {"max_time": 1e6}
    heard: list[list[tuple[str, Any]]] = []
    for extra in ({}, criterion):
        streamer = Listener()
        draft = branching(target, truth_of(inputs, ref), 7, 8)
        out = target.generate(**settings, **extra, streamer=streamer, assistant_model=draft)
        assert torch.equal(out, ref)
        heard.append(streamer.heard)
    if is_own:
        tokens = ref[0, inputs["input_ids"].shape[1] :].tolist()
        assert heard[1][1:] == [("tokens", [token]) for token in tokens]
    else:
        assert heard[1] == heard[0]
        assert any(what == "tree" for what, _ in heard[0])


class Listener(BaseStreamer):
    """Notes what it is told, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(("tokens", value.reshape(-1).tolist()))

    def put_tree(self, **tree: list[int]) -> None:
        self.heard.append(("tree", tree))

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "settings", "match"),
    [
        (
            {"num_tree_nodes": 1},
            {},
            "expected num_tree_nodes between 2 and 256, 0 for a chain, or 'auto', got 1",
        ),
        (
            {"num_tree_nodes": 257},
            {},
            "expected num_tree_nodes between 2 and 256, 0 for a chain, or 'auto', got 257",
        ),
        (
            {"num_tree_nodes": True},
            {},
            "expected num_tree_nodes between 2 and 256, 0 for a chain, or 'auto', got True",
        ),
        ({"num_tree_nodes": "many"}, {}, "expected num_tree_nodes .* or 'auto', got 'many'"),
        (
            {"num_tree_nodes": "auto", "verify_width": 4},
            {},
            "expected verify_width left out or 'auto', and no num_assistant_tokens, beside",
        ),
        (
            {"num_tree_nodes": 8, "verify_width": 4},
            {},
            "expected verify_width left out or 'auto', and no num_assistant_tokens, beside",
        ),
        (
            {"max_matching_ngram_size": -1},
            {},
            "expected max_matching_ngram_size between 0 and 4, got -1",
        ),
        (
            {"max_matching_ngram_size": 9},
            {},
            "expected max_matching_ngram_size between 0 and 4, got 9",
        ),
        (
            {"max_matching_ngram_size": "2"},
            {},
            "expected max_matching_ngram_size between 0 and 4, got '2'",
        ),
        ({"num_tree_nodes": 8, "block_size": 1}, {}, "expected num_tree_nodes of at most 1 "),
    ],
)
def test_what_cannot_be_verified_as_a_tree_is_refused(
    options: dict[str, Any], settings: dict[str, Any], match: str
) -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    for name, value in options.items():
        setattr(draft.generation_config, name, value)
    ran: list[object] = []
    with (
        target.register_forward_pre_hook(lambda *_: ran.append(_)),
        pytest.raises(ValueError, match=match),
    ):
        target.generate(**prompts([4], 0), max_new_tokens=4, assistant_model=draft, **settings)
    assert not ran


def test_rules_of_the_users_own_are_for_chains() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    draft.generation_config.num_tree_nodes = 8
    for rule in (
        {"propose": lambda logits, anchor: logits.argmax(-1)},
        {"accept": lambda *given: given[0][:, 0] * 0},
    ):
        with pytest.raises(
            ValueError, match="expected a chain, no num_tree_nodes, beside a rule of your own, got"
        ):
            iterate(target, draft, **prompts([4], 0), max_new_tokens=4, **rule)


def test_recurrent_targets_are_refused() -> None:
    target = shallow_target("qwen3-next")
    draft = tiny_draft(target, 8)
    draft.generation_config.num_tree_nodes = 8
    with pytest.raises(
        ValueError,
        match="expected a target of attention layers alone with num_tree_nodes, got 'Qwen3Next",
    ):
        target.generate(**prompts([4], 0), max_new_tokens=4, assistant_model=draft)
