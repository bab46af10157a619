"""`SpeculativeStats` from its definitions, by hand and on runs; its clock against a clock that the test moves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel, DFlashGenerationConfig, SpeculativeStats, iterate
from dflash_hf.generation.stats import Stopwatch
from dflash_hf.pair.answers import without_draft
from fuzz.targets import Oracle, arm
from helpers.widths import use_random_widths
from tiny import (
    draft_config,
    oracle_draft,
    prompts,
    shallow_target,
    tiny_draft,
    tiny_target,
    truth_of,
)

# Two rows, blocks of 4 (three proposals). Row 0 ended at an end-of-sequence token: its last verify accepted 3 and
# committed 2. Row 1 accepted 1 of 3 each time.
HAND = SpeculativeStats(
    num_committed=[[4, 1, 2], [2, 2]], num_accepted=[[3, 0, 3], [1, 1]], num_proposed=3
)


def test_definitions_by_hand() -> None:
    assert HAND.num_verifies == 5
    assert HAND.num_new_tokens == 2 + 7 + 4
    assert HAND.acceptance_length == pytest.approx(11 / 5)
    assert HAND.acceptance_length_per_row == pytest.approx([7 / 3, 2.0])
    # z-lab: mean of the rows' means. vLLM: 1 + accepted / drafts, before the cut. SGLang: the prefill's tokens count.
    assert HAND.acceptance_length_as("zlab") == pytest.approx((7 / 3 + 2) / 2)
    assert HAND.acceptance_length_as("vllm") == pytest.approx(1 + 8 / 5)
    assert HAND.acceptance_length_as("sglang") == pytest.approx(13 / 5)
    assert HAND.acceptance_per_position() == pytest.approx([4 / 5, 2 / 5, 2 / 5])
    assert HAND.acceptance_per_position(conditional=True) == pytest.approx([4 / 5, 2 / 4, 2 / 2])
    assert HAND.acceptance_per_position(row=0) == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert HAND.acceptance_per_position(conditional=True, row=1) == pytest.approx([1.0, 0.0, 0.0])
    assert HAND.acceptance_histogram() == [0, 1, 3, 0, 1]
    assert HAND.acceptance_histogram(row=1) == [0, 0, 2, 0, 0]
    # vLLM's mean is one more than the sum of its joint shares per position.
    assert HAND.acceptance_length_as("vllm") == pytest.approx(
        1 + sum(HAND.acceptance_per_position())
    )
    # A token decoded without a draft is a verify of ours, and no draft of vLLM's.
    plain = dataclasses.replace(
        HAND, num_committed=[[4, 1]], num_accepted=[[3, 0]], verify_widths=[4, 1]
    )
    assert plain.acceptance_length == 2.5
    assert plain.acceptance_length_as("vllm") == 4.0
    with pytest.raises(ValueError, match=r"expected a definition in .* got 'eagle'"):
        HAND.acceptance_length_as("eagle")  # type: ignore[arg-type]


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_assistant_tokens": 4}, {"num_tree_nodes": 6}], ids=str
)
def test_without_a_draft_every_step_is_one_token(
    options: dict[str, int], sample_from_anchor: bool
) -> None:
    target: Any = shallow_target("qwen3")
    draft = tiny_draft(target, sample_from_anchor=sample_from_anchor)
    draft.generation_config = DFlashGenerationConfig(**options)
    with without_draft(draft):
        target.generate(
            **prompts([5], seed=0), max_new_tokens=6, do_sample=False, assistant_model=draft
        )
    stats: Any = draft.last_stats
    assert (stats.num_proposed, stats.num_committed) == (0, [[1] * 5])
    assert (
        draft.generation_config.to_diff_dict() == DFlashGenerationConfig(**options).to_diff_dict()
    )


def test_positions_not_tried_are_no_rejections() -> None:
    # Row 0: widths 4, 2, 4. Row 1 ended after two verifies. The second, of width 2, tried one proposal only.
    stats = SpeculativeStats(
        num_committed=[[4, 2, 2], [1, 2]],
        num_accepted=[[3, 1, 1], [0, 1]],
        num_proposed=3,
        verify_widths=[4, 2, 4],
    )
    conditional = [4 / 5, 1 / 2, 1 / 1]
    assert stats.acceptance_per_position(conditional=True) == pytest.approx(conditional)
    # The product of those: 4/5 of all accepted the first; of the two that went on to the second, one.
    assert stats.acceptance_per_position() == pytest.approx([4 / 5, 4 / 10, 4 / 10])
    assert stats.acceptance_per_position(conditional=True, row=1) == pytest.approx(
        [1 / 2, 0.0, 0.0]
    )
    assert stats.acceptance_histogram() == [0, 1, 3, 0, 1]
    assert stats.to_dict()["verify_widths"] == [4, 2, 4]
    # Told or not, one width for all is what it was.
    told = SpeculativeStats(
        num_committed=HAND.num_committed,
        num_accepted=HAND.num_accepted,
        num_proposed=3,
        verify_widths=[4, 4, 4],
    )
    for conditional in (False, True):
        assert told.acceptance_per_position(conditional) == HAND.acceptance_per_position(
            conditional
        )


@pytest.mark.parametrize("width", [3, "auto"])
def test_conditional_acceptance_counts_what_each_verify_tried(
    width: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted proposal by proposal."""
    use_random_widths(monkeypatch)
    target, inputs = tiny_target("qwen3"), prompts([5] * 24, 1)
    ref = target.generate(**inputs, max_new_tokens=70, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 4, 6)
    draft.generation_config.verify_width = width
    target.generate(**inputs, max_new_tokens=70, do_sample=False, assistant_model=draft)
    stats = draft.last_stats
    tried = [0] * stats.num_proposed
    hits = [0] * stats.num_proposed
    for row in stats.num_accepted:
        for right, wide in zip(row, stats.verify_widths, strict=False):
            for position in range(min(right + 1, wide - 1)):
                tried[position] += 1
                hits[position] += right > position
    assert stats.acceptance_per_position(conditional=True) == [
        hit / n for hit, n in zip(hits, tried, strict=True)
    ]
    assert stats.num_proposed == (2 if width == 3 else 5)


@pytest.mark.usefixtures("whole_trees")
def test_a_leaf_is_no_position_that_was_tried() -> None:
    """Counted by the texts of the trees that `iterate` shows."""
    target, inputs = tiny_target("llama"), prompts([9], 8)
    settings: dict[str, Any] = {**inputs, "max_new_tokens": 60, "do_sample": False}
    text = target.generate(**settings)
    draft = Oracle(draft_config(target, 8)).to(target.dtype).eval()
    arm(draft, truth_of(inputs, text), 9, None, 6)
    draft.generation_config.num_tree_nodes = 6
    target.generate(**settings, assistant_model=draft)
    stats = draft.last_stats
    tried = [0] * stats.num_proposed
    hits = [0] * stats.num_proposed
    num_leaves = 0
    for step in itertools.islice(iterate(target, draft, **settings), 1, None):
        ids, parents = step.node_ids[0].tolist(), step.parents[0].tolist()
        paths: list[list[int]] = [[]]
        for node in range(1, len(ids)):
            paths.append([*paths[parents[node]], ids[node]])
        num = int(step.num_accepted)
        accepted = step.proposals[0, :num].tolist()
        has_more = any(len(path) > num and path[:num] == accepted for path in paths)
        num_leaves += not has_more
        for position in range(num + has_more):
            tried[position] += 1
            hits[position] += num > position
    assert 0 < num_leaves < stats.num_verifies
    assert stats.acceptance_per_position(conditional=True) == [
        hit / n if n else 0.0 for hit, n in zip(hits, tried, strict=True)
    ]
    joint = [hit / stats.num_verifies for hit in hits]
    assert stats.acceptance_per_position() == pytest.approx(joint)


def test_rows_without_a_verify_weigh_nothing() -> None:
    stats = SpeculativeStats(num_committed=[[], [3]], num_accepted=[[], [2]], num_proposed=3)
    assert stats.acceptance_length == stats.acceptance_length_as("zlab") == 3.0
    assert stats.acceptance_length_per_row == [0.0, 3.0]
    empty = SpeculativeStats(num_committed=[[]], num_accepted=[[]], num_proposed=2)
    assert [empty.acceptance_length_as(name) for name in ("zlab", "vllm", "sglang")] == [0.0] * 3
    assert empty.acceptance_per_position(conditional=True) == [0.0, 0.0]
    assert empty.acceptance_histogram() == [0, 0, 0, 0]
    assert json.loads(json.dumps(empty.to_dict()))["num_new_tokens"] == 1


def test_a_run_agrees_with_its_own_counts() -> None:
    target, inputs = tiny_target("qwen3"), prompts([6, 9, 4], 1)
    ref = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 4, 6)
    target.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=draft)
    stats = draft.last_stats
    assert sum(stats.acceptance_histogram()) == stats.num_verifies
    assert (
        sum(n * count for n, count in enumerate(stats.acceptance_histogram()))
        == stats.num_new_tokens - 3
    )
    joint = stats.acceptance_per_position()
    assert joint == sorted(joint, reverse=True)
    conditional = torch.tensor(stats.acceptance_per_position(conditional=True)).cumprod(0)
    assert conditional.tolist() == pytest.approx(joint)
    for row in range(3):
        assert sum(stats.acceptance_histogram(row=row)) == len(stats.num_committed[row])
    assert (
        json.loads(json.dumps(stats.to_dict()))["acceptance_histogram"]
        == stats.acceptance_histogram()
    )


class MovedDraft(DFlashDraftModel):
    """A draft whose forward takes two seconds of the test's clock."""

    clock: SimpleNamespace

    def forward_block(self, *args: Any, **kwargs: Any) -> Tensor:
        self.clock.now += 2.0
        return super().forward_block(*args, **kwargs)


def test_every_part_gets_its_own_time_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only moves where the test says, each part is exact."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    target, inputs = tiny_target("qwen3"), prompts([6, 9], 1)
    draft = MovedDraft(tiny_draft(target, 5).config).to(target.dtype).eval()
    draft.clock = clock
    forward, seen = target.forward, []

    def slow(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].shape[1])
        clock.now += 10.0 if len(seen) == 1 else 5.0
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", slow)
    prepare = target._prepare_cache_for_generation

    def slowly(*args: Any, **kwargs: Any) -> Any:
        clock.now += 0.5
        return prepare(*args, **kwargs)

    monkeypatch.setattr(target, "_prepare_cache_for_generation", slowly)

    class Slow(BaseStreamer):
        """Takes an eighth of a second for each run of tokens, which is the rest's time, and for the prompt."""

        def put(self, value: Tensor) -> None:
            clock.now += 0.125

        def end(self) -> None:
            clock.now += 0.25

    one = {name: value[:1] for name, value in inputs.items()}
    before = clock.now
    target.generate(
        **one,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=draft,
        streamer=Slow(),
        eos_token_id=None,
    )
    stats = draft.last_stats
    verifies = len(seen) - 1
    assert verifies == stats.num_verifies > 3
    assert stats.prepare_seconds == 0.5 + 0.125
    assert stats.prefill_seconds == 10.0
    assert stats.time_to_first_token == 10.625
    assert stats.draft_seconds == 2.0 * stats.num_draft_forwards
    assert stats.verify_seconds == 5.0 * verifies
    assert stats.accept_seconds == 0.0
    assert stats.rest_seconds == 0.125 * (1 + verifies) + 0.25
    assert stats.total_seconds == clock.now - before

    seen.clear()
    for _ in iterate(target, draft, **one, max_new_tokens=12, do_sample=False, eos_token_id=None):
        clock.now += 1000.0  # a pause is the user's time
    stats = draft.last_stats
    assert (
        stats.total_seconds
        == 0.5 + 10.0 + 2.0 * stats.num_draft_forwards + 5.0 * stats.num_verifies
    )


def test_the_parts_sum_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves by one whenever it is read, so that no part of a run goes by unseen."""
    target, inputs = tiny_target("qwen3"), prompts([6, 9], 1)
    draft = tiny_draft(target, 5)
    settings: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "assistant_model": draft}
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    start = time.perf_counter()
    target.generate(**inputs, **settings)
    wall = time.perf_counter() - start
    stats = draft.last_stats
    assert wall > 100, "the clock was hardly read: this test looks elsewhere"
    assert wall - 4 <= stats.total_seconds <= wall
    assert (
        min(stats.prepare_seconds, stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds)
        > 0
    )
    assert min(stats.accept_seconds, stats.rest_seconds) > 0


def test_devices_are_waited_for_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    card = torch.device("cuda", 0)
    Stopwatch(SpeculativeStats(), 0.0, ()).lap("draft")
    Stopwatch(SpeculativeStats(), 0.0, [torch.device("cpu")]).lap("draft")
    assert waited == []
    Stopwatch(SpeculativeStats(), 0.0, [card, torch.device("cpu")]).lap("draft")
    assert waited == [card]
    given: list[Any] = []

    def watch(stats: SpeculativeStats, started: float, devices: Any) -> Stopwatch:
        given.append(list(devices))
        return Stopwatch(stats, started, ())

    monkeypatch.setattr("dflash_hf.generation.prefill.Stopwatch", watch)
    target, inputs = tiny_target("qwen3"), prompts([6], 1)
    draft = tiny_draft(target)
    for synchronize in (False, True):
        draft.generation_config = DFlashGenerationConfig(synchronize=synchronize)
        target.generate(**inputs, max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert given == [[], [torch.device("cpu"), torch.device("cpu")]]


def test_frame_has_one_line_per_row_and_verify() -> None:
    pytest.importorskip("pandas")
    frame = HAND.to_frame()
    assert list(frame.columns) == [
        "row",
        "verify",
        "num_tried",
        "num_accepted",
        "num_committed",
        "num_new",
    ]
    assert frame.values.tolist() == [
        [0, 0, 3, 3, 4, 5],
        [0, 1, 3, 0, 1, 6],
        [0, 2, 3, 3, 2, 8],
        [1, 0, 3, 1, 2, 3],
        [1, 1, 3, 1, 2, 5],
    ]
    assert frame.num_committed.mean() == pytest.approx(HAND.acceptance_length)
    assert list(SpeculativeStats(num_committed=[[]], num_accepted=[[]]).to_frame().columns) == list(
        frame.columns
    )


def test_figure_shows_the_numbers() -> None:
    pytest.importorskip("matplotlib")
    left, right = HAND.plot().axes
    assert [bar.get_height() for bar in left.patches] == pytest.approx(
        HAND.acceptance_per_position()
    )
    assert left.lines[0].get_ydata() == pytest.approx(
        HAND.acceptance_per_position(conditional=True)
    )
    assert [bar.get_height() for bar in right.patches] == HAND.acceptance_histogram()[1:]
    assert [bar.get_x() + bar.get_width() / 2 for bar in right.patches] == pytest.approx(
        [1, 2, 3, 4]
    )
    assert right.lines[0].get_xdata()[0] == pytest.approx(HAND.acceptance_length)


def test_figure_has_no_point_where_nothing_was_checked() -> None:
    """A draft of which nothing was accepted before a position is not wrong at it."""
    pytest.importorskip("matplotlib")
    stats = SpeculativeStats(num_committed=[[1, 2]], num_accepted=[[0, 1]], num_proposed=5)
    left, _ = stats.plot().axes
    assert left.lines[0].get_xydata().tolist() == [[1.0, 0.5], [2.0, 0.0]]
    nothing = SpeculativeStats(num_committed=[[]], num_accepted=[[]], num_proposed=5)
    left, _ = nothing.plot().axes
    assert left.lines[0].get_xydata().tolist() == []


def test_legends_of_the_figure_hide_no_data() -> None:
    pytest.importorskip("matplotlib")
    figure = HAND.plot()
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1


@pytest.mark.parametrize(("name", "call"), [("pandas", "to_frame"), ("matplotlib.figure", "plot")])
def test_without_the_extra_the_sentence_says_what_to_install(
    name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'dflash-hf\[research\]'"):
        getattr(HAND, call)()
