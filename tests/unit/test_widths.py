"""The choice of a verify width: from its definition by enumeration, and on simulated runs."""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dflash_hf import DFlashGenerationConfig
from dflash_hf.generation.acceptance_counts import along_chain, expected_tokens
from dflash_hf.generation.choice_costs import (
    CHAIN,
    MIN_SAVING,
    StepTimes,
    candidate_widths,
    fitted_costs,
    useful_widths,
)
from dflash_hf.generation.options import (
    CAPTURED_WIDTHS,
    WHOLE_BLOCK_ROWS,
    first_width,
    width_of_rows,
)
from dflash_hf.generation.widths import (
    FIRST_HOLD,
    WidthChooser,
    _kept_choosers,
    choose_width,
    give_chooser,
    take_chooser,
)


def enumerated_tokens(shares: list[float], width: int) -> float:
    """The mean over all ways in which the proposals of a block of independent positions can be right or wrong."""
    total = 0.0
    for outcome in itertools.product((False, True), repeat=width - 1):
        probability = math.prod(
            p if right else 1 - p for p, right in zip(shares, outcome, strict=False)
        )
        accepted = next((index for index, right in enumerate(outcome) if not right), width - 1)
        total += probability * (accepted + 1)
    return total


def test_the_expected_tokens_are_those_of_all_outcomes() -> None:
    draw = random.Random(0)
    for _ in range(10):
        shares = [draw.random() for _ in range(9)]
        for width in range(1, 11):
            assert expected_tokens(shares)[width] == pytest.approx(
                enumerated_tokens(shares, width), rel=1e-12
            )


def test_the_choice_is_the_best_of_all_by_enumeration() -> None:
    draw = random.Random(1)
    chosen: set[int] = set()
    for _ in range(150):
        shares = [draw.random() ** 0.3 for _ in range(7)]
        costs = {
            width: draw.uniform(1, 2) + draw.random() * width
            for width in draw.sample(range(1, 9), 4)
        }
        rates = {width: enumerated_tokens(shares, width) / cost for width, cost in costs.items()}
        found = choose_width(expected_tokens(shares), costs)
        assert rates[found] == pytest.approx(max(rates.values()), rel=1e-12)
        chosen.add(found)
    assert len(chosen) == 8
    assert choose_width(expected_tokens([0.0] * 9), {4: 2.0, 8: 2.0, 6: 2.0}) == 8, (
        "of equal ones the widest"
    )
    assert choose_width(expected_tokens([0.9] * 9), {4: 2.0, 8: 2.0, 6: 2.0}) == 8


def test_candidates_are_few_and_close() -> None:
    assert candidate_widths(16) == [16, 12, 8, 6, 4, 3, 2, 1]
    assert candidate_widths(17) == [17, 16, 12, 8, 6, 4, 3, 2, 1]
    assert candidate_widths(8) == [8, 6, 4, 3, 2, 1]
    assert [candidate_widths(width) for width in (1, 2, 3, 5)] == [
        [1],
        [2, 1],
        [3, 2, 1],
        [5, 4, 3, 2, 1],
    ]


def captured_width(rows: int) -> int:
    """What captured steps of a block of 16 verify."""
    return 16 if rows <= WHOLE_BLOCK_ROWS else width_of_rows(CAPTURED_WIDTHS, rows)


def test_a_table_goes_by_the_rows_of_a_call() -> None:
    table = {32: 2, 1: 9, 8: 6}
    assert [width_of_rows(table, rows) for rows in (1, 2, 8, 9, 32, 33, 500)] == [
        9,
        6,
        6,
        2,
        2,
        2,
        2,
    ]
    widths = [captured_width(rows) for rows in range(1, 200)]
    assert widths == sorted(widths, reverse=True)
    assert (widths[0], widths[7], widths[8], widths[31]) == (16, 16, 10, 8)


def modelled_gain(rows: int, width: int) -> float:
    """Tokens per second of captured steps, whole blocks of 16 being 1, by the model in docs/widths.md."""
    whole = 16
    shares = [
        next(p / 1000 for p in range(1000) if expected_tokens([p / 1000] * 15)[whole] >= 6.3)
    ] * 15

    def rate(verified: int) -> float:
        weights_ms, token_ms, row_ms, rest_ms = 4.2, 0.029, 0.1, 1.5
        step_ms = max(weights_ms, token_ms * rows * verified) + row_ms * rows + rest_ms
        return rows * expected_tokens(shares)[verified] / step_ms

    return rate(width) / rate(whole)


@pytest.mark.parametrize(("rows", "gain"), [(1, 1.0), (8, 1.0), (16, 1.17), (32, 1.26), (64, 1.31)])
def test_the_table_of_captured_steps_is_near_the_models_best(rows: int, gain: float) -> None:
    found = modelled_gain(rows, captured_width(rows))
    assert found == pytest.approx(gain, abs=0.01)
    assert found >= 0.98 * max(modelled_gain(rows, width) for width in range(1, 17))


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    config = DFlashGenerationConfig(verify_width={8: 6, 32: 2})
    config.save_pretrained(tmp_path)
    assert DFlashGenerationConfig.from_pretrained(tmp_path).verify_width == {8: 6, 32: 2}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, "a table"),
        ({0: 4}, "a table"),
        ({"few": 4}, "a table"),
        ({8: 0}, "a number of tokens, at least 1,"),
        ({8: "auto"}, "a number of tokens, at least 1,"),
        ({8: 16, 32: 17}, "verify_width between 1 and 16"),
    ],
)
def test_a_table_that_does_not_fit_the_block_is_refused(
    table: dict[Any, Any], expected: str
) -> None:
    config = DFlashGenerationConfig()
    config.verify_width = table
    with pytest.raises(ValueError, match=f"expected .*{expected}.*, got .*; leave it out"):
        config.validate_options(max_block_size=16)


def test_widths_that_save_nothing_are_dropped() -> None:
    assert useful_widths({16: 1.0, 12: 0.99, 8: 0.98, 4: 0.97}) == [16], "bound by memory"
    assert useful_widths({16: 2.0, 12: 1.5, 8: 1.0, 6: 0.99, 4: 0.98}) == [16, 12, 8], "a knee at 8"
    assert useful_widths({16: 1.0, 12: 1.2, 8: 0.99, 4: 1 - MIN_SAVING}) == [16, 4]


def test_unknown_costs_are_fitted() -> None:
    widths = candidate_widths(16)
    line = {width: 2.0 + 0.5 * width for width in widths}
    exact = {width: line[width] for width in (16, 8, 4)}
    found = fitted_costs(exact, widths)
    assert found == pytest.approx(line | {1: line[1] / 2}), (
        "without a draft: half of it, until it is known"
    )
    assert fitted_costs(exact | {1: 2.4}, widths) == pytest.approx(line | {1: 2.4})
    assert fitted_costs({16: 4.0}, widths) == pytest.approx(
        {w: 2 + w / 8 if w > 1 else 1.0625 for w in widths}
    )
    assert fitted_costs({}, widths)[1] < fitted_costs({}, widths)[16]
    assert fitted_costs({1: 1.0}, widths)[2] > 1.0


def test_no_cost_is_above_that_of_a_wider_verify() -> None:
    """Whatever the clock saw: a hiccup, or steps that get quicker as they get wider."""
    draw = random.Random(3)
    for _ in range(200):
        known = {
            width: draw.uniform(0.1, 9)
            for width in draw.sample(candidate_widths(16), draw.randint(0, 8))
        }
        costs = list(fitted_costs(known, candidate_widths(16)).values())
        assert min(costs) > 0
        assert costs == sorted(costs, reverse=True)
    assert fitted_costs({16: 4.0, 8: 3.0, 1: 50.0}, candidate_widths(16))[1] < 2.3


# ---- simulated runs

Costs = Callable[[int], float]


def simulate(
    chooser: WidthChooser,
    shares: list[float],
    costs: Costs,
    *,
    steps: int,
    rows: int = 8,
    seed: int = 0,
    lag: int = 0,
    hiccups: dict[int, float] | None = None,
) -> list[int]:
    """Widths of so many steps of a draft that is right with these chances; the host is `lag` steps behind."""
    draw, clock, widths, waiting = (
        random.Random(seed),
        0.0,
        list[int](),
        list[tuple[int, list[int]]](),
    )
    for step in range(steps):
        width, _ = chooser.next_choice()
        widths.append(width)
        accepted = []
        for _ in range(rows):
            wrong = (index for index in range(width - 1) if draw.random() >= shares[index])
            accepted.append(next(wrong, width - 1))
        clock += costs(width) + (hiccups or {}).get(step, 0.0)
        waiting.append((width, accepted))
        if len(waiting) > lag:
            chooser.learn(*waiting.pop(0), clock)
    return widths


def rate_of(widths: list[int], shares: list[float], costs: Costs) -> float:
    return sum(expected_tokens(shares)[w] for w in widths) / sum(costs(w) for w in widths)


def best_rate(shares: list[float], costs: Costs) -> float:
    return max(rate_of([width], shares, costs) for width in candidate_widths(len(shares) + 1))


def knee_at(knee: float) -> Costs:
    return lambda width: max(1.0, width / knee) if width > 1 else 0.8


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("knee", [5.0, 8.0, 10.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.67, 0.79, 0.9, 0.99])
def test_a_run_with_known_costs_is_close_to_the_best_width(
    share: float, knee: float, lag: int
) -> None:
    shares, costs = [share] * 15, knee_at(knee)
    chooser = WidthChooser(StepTimes(16))
    chooser.set_costs({width: costs(width) for width in chooser.widths})
    widths = simulate(chooser, shares, costs, steps=300, lag=lag)
    assert rate_of(widths[20:], shares, costs) > 0.98 * best_rate(shares, costs)


def test_the_whole_block_is_verified_where_it_is_cheapest() -> None:
    chooser = WidthChooser(StepTimes(16))
    chooser.set_costs({16: 1.0})
    assert set(simulate(chooser, [0.3] * 15, knee_at(40.0), steps=300)) == {16}


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.6, 0.79, 0.97])
def test_a_run_that_times_itself_is_close_to_the_best_width(share: float, slope: float) -> None:
    shares = [share] * 15

    def costs(width: int) -> float:
        return 1.0 if width == 1 else 1.4 + slope * width

    # Neither a hiccup in one of the first steps of a width nor an unlucky start (seed 0 at 0.4) must rule it out.
    for seed, hiccups in itertools.product(
        range(2), ({0: 50.0}, {1: 9.0}, {2: 9.0}, {3: 9.0}, {4: 9.0}, {5: 9.0})
    ):
        widths = simulate(
            WidthChooser(StepTimes(16)), shares, costs, steps=400, hiccups=hiccups, seed=seed
        )
        assert widths[0] == 16
        assert rate_of(widths[20:], shares, costs) > max(0.97 * best_rate(shares, costs), 0.98)


@pytest.mark.parametrize("slow_first", [0.0, 445.0])
def test_a_first_batch_soon_finds_that_plain_decoding_is_cheap(slow_first: float) -> None:
    """Eight rows of SmolLM2 in float32: a step of eight tokens takes 4.5 times as long as a plain one."""
    draw = random.Random(0)
    chooser = WidthChooser(StepTimes(8, chain=8), is_tree=True)
    chooser.use_rows(8)
    clock = slow_first
    widths: list[int] = []
    for step in range(24):
        width, is_chain = chooser.next_choice()
        widths.append(width)
        # Answers begin alike, and then they part.
        share = 0.9 if step < 4 else 0.55
        if width == 1:
            clock += 66.0
            chooser.learn(1, [0] * 8, clock)
            continue
        clock += 300.0
        accepted = [next(n for n in range(8) if n == 7 or draw.random() > share) for _ in range(8)]
        if is_chain:
            chooser.learn(8, accepted, clock)
        else:
            nodes = [list(range(1, num + 1)) for num in accepted]
            chains = [(num, min(num + 1, 7)) for num in accepted]
            chooser.learn(8, accepted, clock, nodes, chains)
    # A first answer of so few tokens may lose what some verifies take.
    assert 1 in widths[:4]
    assert sum(width > 1 for width in widths) <= 6


def test_rows_that_are_named_before_any_step_are_scaled_too() -> None:
    costs = StepTimes(8)
    costs.use_rows(1)
    costs.use_rows(2)
    costs.book(8, 6.0)
    costs.use_rows(1)
    assert costs.of_choices()[8] == 3.0


@pytest.mark.parametrize(("slope", "low", "high"), [(0.001, 48, 64), (0.3, 1, 16)])
def test_a_tree_grows_beyond_the_chain_where_that_costs_little(
    slope: float, low: int, high: int
) -> None:
    """Node `n` is accepted with probability `1 / (n + 1)`: ever more nodes bring ever less, but never nothing."""
    draw, chooser, clock, widths = (
        random.Random(1),
        WidthChooser(StepTimes(64), is_tree=True, first=16),
        0.0,
        list[int](),
    )
    for _ in range(300):
        width, _ = chooser.next_choice()
        widths.append(width)
        clock += 0.5 if width == 1 else 1.0 + slope * width
        nodes = [
            [node for node in range(1, width) if draw.random() < 1 / (node + 1)] for _ in range(4)
        ]
        chooser.learn(width, [len(row) for row in nodes], clock, nodes)
    assert widths[0] == 16
    assert low <= statistics.median(widths[150:]) <= high


def follow(parents: list[int], kept: set[int]) -> list[int]:
    """The path, 0 behind its end, of a target that agrees with these nodes."""
    path = [0]
    while (child := next((n for n in kept if n and parents[n] == path[-1]), None)) is not None:
        path.append(child)
    return path + [0] * (len(parents) - len(path))


def test_the_chain_counts_as_far_as_the_tree_has_it() -> None:
    chain = [0, 0, 1, 2, 3]
    assert along_chain(chain, follow(chain, {1, 2, 3, 4})) == (4, 4)
    assert along_chain(chain, follow(chain, {1, 2})) == (2, 3)
    assert along_chain(chain, follow(chain, set())) == (0, 1)
    #   0 -> 1 -> 3, 0 -> 2 -> 4: behind 3 the tree has no more
    tree = [0, 0, 0, 1, 2]
    assert along_chain(tree, follow(tree, {1, 3})) == (2, 2)
    assert along_chain(tree, follow(tree, {1})) == (1, 2)
    assert along_chain(tree, follow(tree, {2, 4})) == (0, 1), "the target went another way"
    assert along_chain([0, 0], [0, 1]) == (1, 1)


@pytest.mark.parametrize("saving", [0.0, 0.05])
@pytest.mark.parametrize(("share", "second"), [(0.97, 0.01), (0.6, 0.3), (0.3, 0.2)])
def test_a_chain_is_verified_where_branches_do_not_pay(
    share: float, second: float, saving: float
) -> None:
    """A tree of two chains of 8, whose first tokens are right with these chances; a chain of 15 may cost less."""
    parents = [0, 0, *range(1, 8), 0, *range(9, 15)]
    for seed in range(4):
        draw, chooser, clock, seen = (
            random.Random(seed),
            WidthChooser(StepTimes(16, chain=16), is_tree=True),
            0.0,
            list[bool](),
        )
        tokens = {True: 0, False: 0}
        for _ in range(400):
            width, is_chain = chooser.next_choice()
            right = [draw.random() < share for _ in range(15)]
            is_second = not right[0] and draw.random() < second / (1 - share)
            length = next((i for i, is_right in enumerate(right) if not is_right), 15)
            if is_chain:
                assert width == 16
                clock += 1.0 - saving
                chooser.learn(width, [length], clock)
            else:
                first = 9 if is_second else 1
                depth = (
                    1 + next((i for i in range(7) if not right[i + 1]), 7)
                    if is_second
                    else min(length, 8)
                )
                path = [n for n in range(first, first + depth) if n < width]
                clock += 0.6 + 0.4 * width / 16 if width > 1 else 0.4
                chains = [along_chain(parents[:width], follow(parents[:width], set(path)))]
                chooser.learn(width, [len(path)], clock, [path], chains)
                length = len(path)
            seen.append(is_chain)
            tokens[is_chain] += 1 + length
        late = sum(seen[100:]) / 300
        assert late > 0.8 if share > 0.9 else late < 0.2, (late, tokens)


def test_a_chain_may_be_what_is_tried_where_no_draft_pays() -> None:
    """Of a length that no tree has, and cheaper than any of them."""
    chooser, clock, tried = (
        WidthChooser(StepTimes(40, chain=10), is_tree=True, first=10),
        0.0,
        list[int](),
    )
    for right in [9] * 60 + [0] * 400:
        width, is_chain = chooser.next_choice()
        tried.append(chooser.current)
        clock += 1.0 if width == 1 else 1.2 if is_chain else 3.0
        is_tree = width > 1 and not is_chain
        path = list(range(1, min(right + 1, width)))
        chooser.learn(
            width,
            [len(path)],
            clock,
            [path] if is_tree else [],
            [(right, min(right + 1, 9))] * is_tree,
        )
    assert tried[-300:].count(1) > 250
    assert CHAIN in tried[-300:]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2])
def test_a_draft_that_is_hardly_ever_right_costs_next_to_nothing(share: float, seed: int) -> None:
    """The bundled pair's costs: a drafted step takes 1.7 to 2.3 times a plain one."""

    def costs(width: int) -> float:
        return 1.0 if width == 1 else 1.65 + 0.04 * width

    widths = simulate(
        WidthChooser(StepTimes(16)), [share] * 15, costs, steps=255, rows=1, seed=seed
    )
    drafted = [step for step, width in enumerate(widths) if width > 1]
    gained = sum(expected_tokens([share] * 15)[width] for width in widths)
    assert sum(map(costs, widths)) < 1.035 * gained
    if share == 0.0:
        waits = [after - before for before, after in itertools.pairwise(drafted)]
        assert waits == sorted(waits), "rarer and rarer"
        assert waits[-1] > 60


def test_a_run_holds_the_best_for_longer_and_longer() -> None:
    """With nothing to learn from, what is tried beside it comes half as often each time, at last after 128 steps."""
    chooser = WidthChooser(StepTimes(16))
    chooser.set_costs({16: 2.0, 8: 1.9, 1: 1.0})
    widths = simulate(
        chooser, [0.99] * 15, lambda width: {16: 2.0, 8: 1.9, 1: 1.0}[width], steps=600, rows=8
    )
    others = [step for step, width in enumerate(widths) if width < 16]
    assert [after - before for before, after in itertools.pairwise(others)] == [
        33,
        65,
        129,
        129,
        129,
    ]


def test_what_pays_once_is_tried_again_at_once() -> None:
    chooser = WidthChooser(StepTimes(8))
    chooser.set_costs({8: 2.0, 1: 1.0})
    clock = 0.0
    for right in [0] * 120 + [7] * 40:
        width, _ = chooser.next_choice()
        chooser.learn(width, [min(right, width - 1)], clock)
    assert chooser.current == 8
    assert chooser.next_choice() == (8, False)


def test_the_verdict() -> None:
    said: list[str] = []
    for right in (0, 5):
        chooser = WidthChooser(StepTimes(8))
        chooser.set_costs({8: 2.0, 1: 1.0})
        assert not chooser.verdict(), "nothing is known yet"
        for _ in range(60):
            width, _ = chooser.next_choice()
            chooser.learn(width, [min(right, width - 1)], 0.0)
        said.append(chooser.verdict())
    bad, good = said
    assert bad.startswith("1.0 tokens per verify: the draft does not pay here")
    assert not good


def test_a_chain_that_pays_is_no_draft_that_slows_down() -> None:
    chooser, clock = WidthChooser(StepTimes(8, chain=8), is_tree=True), 0.0
    for _ in range(200):
        width, is_chain = chooser.next_choice()
        clock += 1.0 if width == 1 else 1.3 if is_chain else 2.1
        is_tree = width > 1 and not is_chain
        chooser.learn(
            width, [min(1, width - 1)], clock, [[1]] if is_tree else [], [(1, 2)] * is_tree
        )
    assert chooser.current == CHAIN
    assert not chooser.verdict()


@pytest.mark.parametrize(("every", "tree_is_held"), [(8, False), (1, True)])
def test_a_tree_has_to_be_clearly_faster_than_the_chain(every: int, tree_is_held: bool) -> None:
    """The chain commits 7 tokens in the same time, the tree 8 in one of so many steps."""
    chooser, clock, trees = WidthChooser(StepTimes(8, chain=8), is_tree=True), 0.0, list[bool]()
    for step in range(200):
        width, is_chain = chooser.next_choice()
        clock += 1.0
        if is_chain or width == 1:
            trees.append(False)
            chooser.learn(width, [min(6, width - 1)], clock)
            continue
        trees.append(True)
        path = list(range(1, width))
        if step % every:
            path = path[:6]
        chooser.learn(width, [len(path)], clock, [path], [(6, 7)])
    late = trees[100:]
    assert late.count(tree_is_held) > 90


def test_a_run_follows_a_text_that_changes() -> None:
    costs = knee_at(6.0)
    chooser = WidthChooser(StepTimes(16))
    chooser.set_costs({width: costs(width) for width in chooser.widths})
    for seed, share in enumerate((0.97, 0.4, 0.97)):
        shares = [share] * 15
        widths = simulate(chooser, shares, costs, steps=150, seed=seed)
        assert rate_of(widths[60:], shares, costs) > 0.97 * best_rate(shares, costs)


def test_positions_that_were_not_tried_are_not_rejections() -> None:
    chooser = WidthChooser(StepTimes(16))
    for _ in range(200):
        chooser.learn(4, [3, 3, 3], 0.0)
    assert all(share > 0.95 for share in chooser.chains.shares())
    for _ in range(200):
        chooser.learn(16, [5, 5], 0.0)
    found = chooser.chains.shares()
    assert min(found[:5]) > 0.97
    assert found[5] < 0.06, "reached and refused"
    pooled = 5 / 6
    assert found[6:] == pytest.approx([pooled] * 9, abs=0.01), (
        "never reached: as good as the others"
    )


def test_a_step_in_which_no_row_was_running_teaches_nothing() -> None:
    chooser = WidthChooser(StepTimes(8))
    before = chooser.chains.shares()
    chooser.learn(8, [], 1.0)
    assert chooser.chains.shares() == before


def test_what_a_width_does_once_is_not_its_cost() -> None:
    """Compiling for a new width must not lock it out for long."""
    costs = {16: 10.0, 12: 4.0, 8: 3.0, 6: 2.9, 4: 2.8, 3: 2.7, 2: 2.6, 1: 2.5}
    chooser, clock, widths = WidthChooser(StepTimes(16)), 0.0, list[int]()
    for _ in range(200):
        width, _ = chooser.next_choice()
        clock += costs[width] + (20.0 if width not in widths else 0.0)
        widths.append(width)
        chooser.learn(width, [min(width - 1, 7)], clock)
    assert widths[-50:].count(8) > 45


def test_short_answers_recover_from_a_disturbed_width() -> None:
    """Ten steps an answer: how long a width has been held is counted across answers, or no other is ever tried."""
    costs = {width: 10 + width / 8 for width in candidate_widths(16)}
    chooser, draw = WidthChooser(StepTimes(16)), random.Random(0)
    chosen: list[list[int]] = []
    for answer, num_steps in enumerate([60] + [10] * 30):
        clock = 0.0
        if answer:
            chooser.begin()
        chosen.append([])
        for _ in range(num_steps):
            width, _ = chooser.next_choice()
            chosen[-1].append(width)
            # While two answers are given, something else on the machine makes every whole block slow.
            clock += costs[width] * (1.5 if answer in (1, 2) and width == 16 else 1.0)
            accepted = next(
                (index for index in range(width - 1) if draw.random() > 0.97), width - 1
            )
            chooser.learn(width, [accepted], clock)
    assert chosen[0].count(16) > 50
    assert 16 not in chosen[2], "the disturbance has chosen another width"
    assert sum(answer.count(16) for answer in chosen[-10:]) > 85


def test_observations_are_kept_for_the_next_run_of_a_pair() -> None:
    draft, target = nn.Linear(1, 1), nn.Linear(1, 1)
    chooser, clock = WidthChooser(StepTimes(16)), 0.0
    for _ in range(40):  # never right, and dear
        width, _ = chooser.next_choice()
        clock += 1.0 if width == 1 else 2.0
        chooser.learn(width, [0], clock)
    give_chooser(chooser, draft, target, 3)
    assert take_chooser(draft, target, 1, 16) is None, "other rows cost something else"
    assert take_chooser(draft, target, 3, 8) is None
    assert take_chooser(draft, target, 3, 16, is_tree=True) is None, (
        "nodes are no proposals one behind the other"
    )
    assert take_chooser(target, draft, 3, 16) is None
    assert take_chooser(draft, target, 3, 16) is chooser
    assert take_chooser(draft, target, 3, 16) is None, "a run has it"
    # The next run begins without a draft, and asks again soon.
    widths: list[int] = []
    clock = 0.0
    for _ in range(FIRST_HOLD + 1):
        width, _ = chooser.next_choice()
        widths.append(width)
        clock += 1.0 if widths[-1] == 1 else 2.0
        chooser.learn(widths[-1], [0], clock)
    assert widths[0] == 1
    assert sum(width > 1 for width in widths) == 1
    give_chooser(chooser, draft, target, 3)
    del target
    gc.collect()
    give_chooser(WidthChooser(StepTimes(4)), draft, other := nn.Linear(1, 1), 1)
    assert list(_kept_choosers[draft]) == [other], (
        "what belongs to a target that is no more is dropped"
    )
    assert list(_kept_choosers[draft][other]) == [(1, 4, False, 0)]


@pytest.mark.parametrize(("rows", "expected"), [(1, 2), (4, 1)])
def test_a_draft_must_pay_for_the_slowest_row(rows: int, expected: int) -> None:
    """A verify of two tokens commits 1.5 in the mean, and costs 1.45 of a step without a draft."""
    chooser = WidthChooser(StepTimes(2))
    chooser.use_rows(rows)
    chooser.set_costs({1: 1.0, 2: 1.45})
    chosen: list[int] = []
    for step in range(400):
        width, _ = chooser.next_choice()
        chosen.append(width)
        # One half of the guesses is right, in every row alike.
        chooser.learn(width, [int(width == 2 and step % 2 == 0)] * rows, float(step))
    assert chosen[-200:].count(expected) > 180


def test_many_rows_begin_with_a_narrow_verify() -> None:
    widths = {rows: first_width(16, rows) for rows in (1, 4, 8, 16, 32, 200)}
    assert widths == {1: 16, 4: 16, 8: 8, 16: 4, 32: 2, 200: 2}
    assert first_width(3, 1) == 3


def test_what_steps_take_is_known_for_every_number_of_rows_apart() -> None:
    chooser, clock = WidthChooser(StepTimes(8)), 0.0

    def run(rows: int, seconds: float, steps: int) -> None:
        nonlocal clock
        chooser.use_rows(rows)
        for _ in range(steps):
            clock += seconds
            width, _ = chooser.next_choice()
            chooser.learn(width, [7] * rows, clock)

    run(4, 0.4, 8)
    assert chooser.costs.of_choices()[8] == pytest.approx(0.4)
    chooser.use_rows(2)
    assert chooser.costs.of_choices()[8] == pytest.approx(0.2), "at first in proportion"
    run(2, 0.3, 8)
    assert chooser.costs.of_choices()[8] == pytest.approx(0.3)
    run(1, 0.25, 2)
    chooser.begin()
    clock = 0.0
    chooser.use_rows(4)
    assert chooser.costs.of_choices()[8] == pytest.approx(0.4), "as before the rows ended"
    chooser.use_rows(2)
    assert chooser.costs.of_choices()[8] == pytest.approx(0.3)
