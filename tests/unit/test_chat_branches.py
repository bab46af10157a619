"""What the chat shows of the trees that were verified: `iterate` and a tree's definition are the oracles."""

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_hf import iterate
from dflash_hf.chat import branches as branches_module
from dflash_hf.chat.branches import MAX_BRANCHES, Branch, Tried, VerifiedTree
from dflash_hf.chat.conversation import Answer, Run
from dflash_hf.chat.model import RunStreamer
from dflash_hf.chat.render import render
from dflash_hf.generation.stats import SpeculativeStats
from fuzz.targets import Oracle, arm
from helpers.processors import qwen_tokenizer
from tiny import draft_config, prompts, tiny_target, truth_of

NODES = 16
SEED = 9


class Numbers:
    """A tokenizer whose text is the ids."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"<{number}>" for number in ids)


def answered(longest_match: int, max_new_tokens: int = 40) -> tuple[Answer, list[Any], Tensor]:
    """The same text by a streamer of the chat's and by `iterate`, of a draft that is right in places."""
    target = tiny_target("llama")
    inputs = prompts([9], 8)
    inputs["input_ids"] %= 5  # so that every few tokens come again
    settings: dict[str, Any] = {**inputs, "max_new_tokens": max_new_tokens, "do_sample": False}
    text = target.generate(**settings)
    draft = Oracle(draft_config(target, 8)).to(target.dtype).eval()
    arm(draft, truth_of(inputs, text), SEED, None, NODES)
    draft.generation_config.num_tree_nodes, draft.generation_config.max_matching_ngram_size = (
        NODES,
        longest_match,
    )
    tokenizer: Any = Numbers()
    answer = Answer(drafted=True, block_size=8)
    streamer = RunStreamer(answer, threading.Event(), tokenizer)
    assert torch.equal(target.generate(**settings, assistant_model=draft, streamer=streamer), text)
    assert not answer.runs, "texts are made where the answer is read"
    answer.stats = draft.last_stats
    streamer.update()
    return answer, list(iterate(target, draft, **settings))[1:], text


def continuations(step: Any) -> list[tuple[int, list[int]]]:
    """Every whole continuation of a step's tree that is not on its path: how far it goes along it, and the rest."""
    ids, parents, num = step.node_ids[0].tolist(), step.parents[0].tolist(), int(step.num_accepted)
    taken = step.proposals[0, :num].tolist()
    texts: list[list[int]] = [[]]
    for node in range(1, len(ids)):
        texts.append([*texts[parents[node]], ids[node]])
    found: list[tuple[int, int, int, list[int]]] = []
    for leaf, text in enumerate(texts):
        is_whole = not any(len(other) > len(text) and other[: len(text)] == text for other in texts)
        shared = sum(itertools.takewhile(bool, (a == b for a, b in zip(text, taken, strict=False))))
        if is_whole and text != taken[: len(text)]:
            found.append((texts.index(text[: shared + 1]), leaf, shared, text[shared:]))
    return [
        (shared, rest) for _, _, shared, rest in sorted(found) if shared < len(step.committed[0])
    ]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("longest_match", [0, 4])
def test_branches_are_those_of_the_trees_that_iterate_shows(
    longest_match: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches_module, "CONTEXT", 3)
    answer, steps, _ = answered(longest_match)
    first, *runs = answer.runs
    assert first.tried is None
    assert len(runs) == len(steps)
    for run, step in zip(runs, steps, strict=True):
        expected = [(after, Numbers().decode(rest)) for after, rest in continuations(step)]
        assert run.tried is not None
        assert [(one.after, one.text) for one in run.tried.branches] == expected[:MAX_BRANCHES]
        assert run.tried.num_more == len(expected[MAX_BRANCHES:])
    tried = [run.tried for run in runs if run.tried]
    assert any(one.num_more for one in tried)
    assert any(one.after for run in tried for one in run.branches)
    assert any(one.from_text for run in tried for one in run.branches) == bool(longest_match)


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("longest_match", [0, 4])
def test_accepted_tokens_are_counted_by_where_they_came_from(longest_match: int) -> None:
    answer, steps, _ = answered(longest_match)
    assert answer.stats is not None
    assert answer.accepted_from is not None
    assert sum(answer.accepted_from) == sum(answer.stats.num_accepted[0])
    assert answer.accepted_from[2] == answer.stats.num_accepted_from_text
    if longest_match:
        assert answer.accepted_from[2] > 0
        return
    first = 0
    for step in steps:  # as far as a path goes by the first of all children
        ids, parents, node = step.node_ids[0].tolist(), step.parents[0].tolist(), 0
        for token in step.proposals[0, : int(step.num_accepted)].tolist():
            children = [child for child in range(1, NODES) if parents[child] == node]
            if ids[children[0]] != token:
                break
            first, node = first + 1, children[0]
    assert answer.accepted_from == (first, sum(answer.stats.num_accepted[0]) - first, 0)
    assert 0 < answer.accepted_from[1] < first


@pytest.mark.usefixtures("whole_trees")
def test_nothing_is_beside_what_was_cut_off() -> None:
    for length in range(2, 12):
        answer, [*_, last], _ = answered(0, length)
        if len(last.committed[0]) <= int(last.num_accepted):
            tried = answer.runs[-1].tried
            assert tried is not None
            assert all(one.after < answer.runs[-1].num_tokens for one in tried.branches)
            return
    pytest.fail("no length cuts a verify off")


#        0 anchor
#        |- 1 -- 2 -- 4     (taken: 1, 2)
#        |    `- 3 -- 5
#        `- 6
TREE = VerifiedTree(
    path=[0, 1, 2, 0],
    node_ids=[9, 11, 12, 13, 14, 15, 16],
    parents=[0, 0, 1, 1, 2, 3, 0],
    sources=[0] * 7,
)


def test_the_branch_with_the_more_likely_first_token_comes_first() -> None:
    assert TREE.not_taken() == [[3, 5], [4], [6]]
    assert TREE.num_off_branch() == 0
    off = TREE._replace(path=[0, 1, 3, 5])
    assert off.not_taken() == [[2, 4], [6]]
    assert off.num_off_branch() == 2, "3, which is not the first choice behind 1, and 5"
    assert off._replace(sources=[0, 0, 0, 0, 0, 1, 0]).num_off_branch() == 1, "5 came from the text"
    assert off._replace(sources=[0, 0, 1, 0, 0, 0, 0]).num_off_branch() == 0, (
        "the draft's first choice, behind a guess of the text's"
    )
    assert TREE._replace(path=[0, 6, 0, 0]).num_off_branch() == 1


def texts(before: str, after: str | list[int]) -> str:
    """What a continuation is shown as behind a text."""
    tokenizer: Any = qwen_tokenizer()
    ids = tokenizer(after)["input_ids"] if isinstance(after, str) else after
    chain = VerifiedTree([0, 0], [0, *ids], [0, *range(len(ids))], [0] * (len(ids) + 1))
    [branch] = chain.read(tokenizer(before)["input_ids"], 1, tokenizer).branches
    return branch.text


def test_odd_tokens_are_shown() -> None:
    tokenizer: Any = qwen_tokenizer()
    assert texts("naïve", " – 日本") == " – 日本"
    assert texts("it ends", "<|im_end|>") == "<|im_end|>"
    assert texts("half ", tokenizer("é")["input_ids"][:1]) == "\ufffd"
    assert texts("it is", [len(tokenizer) + 7]) == f"#{len(tokenizer) + 7}", (
        "an id that the tokenizer does not know"
    )
    # The first byte of a character is text already; the branch has the others.
    start, rest = tokenizer("é")["input_ids"]
    tree = VerifiedTree([0, 0], [start, rest], [0, 0], [0, 0])
    [branch] = tree.read([*tokenizer("caf")["input_ids"], start], 1, tokenizer).branches
    assert branch.text == "é"


# ---- HTML


def shown(tried: Tried | None, *, stats: SpeculativeStats | None = None) -> str:
    """An answer of three runs, of which the later two have tried that."""
    runs = [
        Run(
            text=text,
            bonus="b",
            num_tokens=2,
            num_accepted=int(index > 0),
            seconds=0.1,
            tried=tried if index else None,
        )
        for index, text in enumerate("xyz")
    ]
    return render(
        "answer",
        Answer(drafted=True, block_size=4, ids=[1] * 6, runs=runs, state="done", stats=stats),
    )


def test_a_tree_has_one_stop_for_the_keyboard_a_chain_none() -> None:
    chain = shown(None)
    assert chain.count("title=") == 3
    assert "data-df" not in chain
    assert "tabindex" not in chain
    branches = [
        Branch(after=0, text="one\n", from_text=False),
        Branch(after=2, text="\ttwo", from_text=True),
    ]
    tree = shown(Tried(branches=branches, num_more=3, num_off_branch=0))
    assert tree.count('data-df-tried="3\n0\t0\tone↵\n2\t1\t⇥two"') == 2
    assert tree.count('tabindex="0"') == 1
    assert tree.count("title=") == 1, "two explanations of one step"


def test_nothing_that_was_tried_is_markup() -> None:
    hostile = "\"><script>x</script><img src=x onerror='y'> & ${1} {{value}} `y`\x00\r\n\t0\t1"
    page = shown(
        Tried(
            branches=[Branch(after=0, text=hostile, from_text=False)], num_more=0, num_off_branch=0
        )
    )
    assert not any(
        raw in page for raw in ("<script", "<img", "${", "{{", "`", "\x00", "\r", 'd="q')
    )
    start = page.index('data-df-tried="') + len('data-df-tried="')
    assert page[start : page.index('"', start)].count("\n") == 1, (
        "a branch takes more than its line"
    )
    assert page[start : page.index('"', start)].count("\t") == 2


def test_sources_of_guesses_are_shown_at_the_end_of_trees() -> None:
    tried = Tried(branches=[], num_more=0, num_off_branch=2)
    stats = SpeculativeStats(
        num_accepted=[[5, 4]], num_tried_by_node=[9, 9], num_accepted_from_text=1
    )
    assert "guesses taken: 4 first choice, 4 off a branch, 1 from the text before" in shown(
        tried, stats=stats
    )
    assert "guesses taken" not in shown(tried)
    assert "guesses taken" not in shown(None, stats=SpeculativeStats())
