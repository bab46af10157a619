"""What a tree would accept, counted at every anchor of an answer: as far as decoding goes, verify by verify."""

from __future__ import annotations

import pytest

from dflash_hf.doctor.probe import Probe
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.example import Example
from tiny import DFLASH2, DSPARK, prompts, shallow_target, tiny_draft, truth_of


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize(
    "options",
    [{}, DFLASH2, DSPARK, {"sample_from_anchor": True}],
    ids=["dflash", "dflash 2", "dspark", "anchor"],
)
def test_a_walk_along_trees_commits_what_generate_does(options: dict[str, object]) -> None:
    target = shallow_target("qwen3")
    # A small vocabulary and a wide tree: a random draft is right now and then.
    draft = tiny_draft(target, 8, **options)
    draft.generation_config.max_matching_ngram_size = 0
    examples, committed = list[Example](), list[int]()
    for seed in range(3):
        inputs = prompts([6 + seed], seed)
        settings = {"max_new_tokens": 30, "do_sample": False}
        ref = target.generate(**inputs, **settings)
        draft.generation_config.num_tree_nodes = draft.config.num_proposals(8) + 1
        target.generate(**inputs, **settings, assistant_model=draft)
        assert draft.last_stats is not None
        committed += draft.last_stats.num_committed[0]
        (tokens,) = truth_of(inputs, ref)
        examples.append(Example.from_pair(tokens[: 6 + seed], tokens[6 + seed :]))
    assert sum(committed) > len(committed), "nothing was accepted"
    walked = Probe(find_target(target), draft, examples).walked({}, is_tree=True)
    assert walked == sum(committed) / len(committed)
