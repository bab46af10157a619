"""From measured runs to the rows of a record; the definitions are in benchmarks/README.md."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_hf.bench.counting import ratio
from dflash_hf.bench.intervals import interval, resample

from .floors import BareForwards
from .methods import Outcome
from .pair import MIXED, Pair

Row = dict[str, Any]
MIN_SHARE_OF_IDEAL = 0.85
PICTURES = "all pictures"
TEXTS = "all texts"
# What is asked of the bundled pair for pictures, at batch 1: what, over which prompts, at least.
VISION_FLOORS = (
    ("tokens_per_second_against_plain", PICTURES, 1.8),
    ("acceptance_length", PICTURES, 5.0),
    ("acceptance_length", TEXTS, 4.0),
)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Returns the 20th, 50th and 80th percentile (nearest rank); `None` of nothing."""
    ranked = sorted(values)
    found: dict[str, float | None] = {}
    for share in (20, 50, 80):
        place = min(len(ranked) - 1, int(share / 100 * len(ranked)))
        found[f"p{share}"] = round(ranked[place], 4) if ranked else None
    return found


@dataclass(slots=True)
class Group:
    """Runs of one method over the same prompts: prompt -> one outcome per repeat, and whether the text was plain's."""

    runs: dict[tuple[str, int], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    same: dict[tuple[str, int], bool] = field(default_factory=dict)

    def add(self, prompt: tuple[str, int], outcome: Outcome, reference: Outcome | None) -> None:
        """Adds a run; `reference` is plain's over the same prompt."""
        self.runs[prompt].append(outcome)
        if reference is not None:
            self.same[prompt] = self.same.get(prompt, True) and outcome.answers == reference.answers

    def of_kinds(self, kinds: Collection[str] | None) -> Group:
        """Returns the runs over prompts of some kinds; all of them for `None`."""
        chosen = Group()
        for prompt, runs in self.runs.items():
            if kinds is not None and prompt[0] not in kinds:
                continue
            chosen.runs[prompt] = runs
            if prompt in self.same:
                chosen.same[prompt] = self.same[prompt]
        return chosen

    def outcomes(self) -> list[Outcome]:
        """Returns all runs."""
        return [outcome for runs in self.runs.values() for outcome in runs]

    def tokens_per_second(
        self, tokens: Callable[[Outcome], int], seconds: Callable[[Outcome], float]
    ) -> float:
        """Returns tokens over seconds, where a prompt counts with the median time of its repeats."""
        total = 0.0
        num_tokens = 0
        for runs in self.runs.values():
            total += statistics.median(seconds(run) for run in runs)
            num_tokens += tokens(runs[0])
        return ratio(num_tokens, total) or 0.0

    def acceptance_length(self) -> float:
        """Returns tokens committed per verify, pooled."""
        return pooled_length(self.outcomes())


def pooled_length(outcomes: Sequence[Outcome]) -> float:
    """Returns tokens committed per verify over all runs; 0 where nothing was verified."""
    committed = sum(outcome.committed for outcome in outcomes)
    verifies = sum(outcome.verifies for outcome in outcomes)
    return ratio(committed, verifies) or 0.0


def kinds_of_rows(pair: Pair) -> dict[str, Collection[str] | None]:
    """Returns what gets a row of its own: its name, and the kinds of prompt that it pools (`None`: all)."""
    if len(pair.kinds) == 1:
        return {"all": None}
    rows: dict[str, Collection[str] | None] = {kind: (kind,) for kind in pair.kinds}
    if pair.takes_pictures:
        rows[PICTURES] = pair.picture_kinds
        rows[TEXTS] = tuple(kind for kind in pair.kinds if kind not in pair.picture_kinds)
        rows[MIXED] = (MIXED,)
    return {**rows, "all": None}


def vision_rows(rows: list[Row]) -> list[Row]:
    """Compares what was measured with what is asked of the pair for pictures; other batch sizes only reported.

    `tokens_per_second_against_plain` is of the whole call, the prefill with its pictures included.
    """
    at = {(row["method"], row["batch"], row["kind"]): row for row in rows}
    found: list[Row] = []
    for batch in sorted({row["batch"] for row in rows}):
        for what, kind, floor in VISION_FLOORS:
            ours = at.get(("ours", batch, kind))
            plain = at.get(("plain", batch, kind))
            if ours is None or plain is None:
                continue
            if what == "tokens_per_second_against_plain":
                value = round(ours["tokens_per_second"] / plain["tokens_per_second"], 4)
            else:
                value = ours[what]
            required = floor if batch == 1 else None
            found.append(_requirement(what, kind, batch, value, required, ours["busy"]))
        every = at.get(("ours", batch, "all"))
        if every is not None and every["num_texts"]:
            share = every["num_identical"] / every["num_texts"]
            found.append(_requirement("share_identical", "all", batch, share, 1.0, every["busy"]))
    return found


def _requirement(
    what: str, kind: str, batch: int, value: float, floor: float | None, busy: bool
) -> Row:
    """A value beside what is asked of it; `reached` is `None` where nothing is."""
    return {
        "what": what,
        "kind": kind,
        "batch": batch,
        "value": value,
        "required": floor,
        "reached": None if floor is None else value >= floor,
        "busy": busy,
    }


def decode_row(pair: Pair, method: str, batch: int, kind: str, group: Group, busy: bool) -> Row:
    """Returns the row of a method, batch and kind of prompt (`"all"` for all of them)."""
    outcomes = group.outcomes()
    firsts = [runs[0] for runs in group.runs.values()]
    contexts = [length for outcome in firsts for length in outcome.prompt_tokens]
    peaks = [outcome.peak_bytes for outcome in outcomes if outcome.peak_bytes is not None]
    return {
        "method": method,
        "batch": batch,
        "kind": kind,
        "block": pair.block_size if method in ("ours", "stock", "stock/static", "zlab") else None,
        "dtype": pair.dtype,
        "context_tokens": round(statistics.mean(contexts), 1),
        "new_tokens": sum(outcome.new_tokens for outcome in firsts),
        "runs": len(outcomes),
        "step_ms": percentiles([ms for outcome in outcomes for ms in outcome.step_ms]),
        "prefill_ms": percentiles([outcome.prefill_seconds * 1e3 for outcome in outcomes])["p50"],
        "tokens_per_second": round(
            group.tokens_per_second(lambda o: o.new_tokens, lambda o: o.seconds), 3
        ),
        "decode_tokens_per_second": round(
            group.tokens_per_second(lambda o: o.decode_tokens, lambda o: o.decode_seconds), 3
        ),
        "acceptance_length": round(group.acceptance_length(), 4),
        "identical": all(group.same.values()) if group.same else None,
        "num_identical": sum(group.same.values()),
        "num_texts": len(group.same),
        "peak_bytes": max(peaks, default=None),
        "busy": busy,
    }


def floor_row(rows: list[Row], bare: BareForwards, busy: bool) -> Row | None:
    """Compares ours with what its bare forwards allow and with the other implementations, at one batch size.

    `ideal_speedup = acceptance * plain ms per token / (draft ms + verify ms)`, medians of the same run;
    `share_of_ideal` is the measured speed-up over plain (of decoding, the prefill left out) divided by it.
    """
    by_method = {
        row["method"]: row for row in rows if row["batch"] == bare.batch and row["kind"] == "all"
    }
    if not {"plain", "ours"} <= by_method.keys() or not bare.draft_ms:
        return None
    plain = by_method["plain"]
    ours = by_method["ours"]
    draft = percentiles(bare.draft_ms)
    verify = percentiles(bare.verify_ms)
    assert draft["p50"] is not None
    assert verify["p50"] is not None
    speedup = ours["decode_tokens_per_second"] / plain["decode_tokens_per_second"]
    ideal = ours["acceptance_length"] * plain["step_ms"]["p50"] / (draft["p50"] + verify["p50"])
    return {
        "batch": bare.batch,
        "context_tokens": bare.context,
        "bare_draft_ms": draft,
        "bare_verify_ms": verify,
        "speedup": round(speedup, 4),
        "ideal_speedup": round(ideal, 4),
        "share_of_ideal": round(speedup / ideal, 4),
        "required_share": MIN_SHARE_OF_IDEAL,
        "reached": speedup / ideal >= MIN_SHARE_OF_IDEAL,
        "step_time_against": {
            name: round(ours["step_ms"]["p50"] / by_method[name]["step_ms"]["p50"], 4)
            for name in ("stock", "stock/static", "zlab")
            if name in by_method
        },
        "busy": busy,
    }


def sampling_row(
    pair: Pair, method: str, temperature: float, kind: str, runs: list[Outcome], busy: bool
) -> Row:
    """Returns the acceptance of a proposal rule, with a bootstrap interval over runs (a prompt under a seed)."""
    verifies = sum(run.verifies for run in runs)
    counts = np.array([(run.committed, run.verifies) for run in runs], dtype=np.float64)
    drawn = resample(counts, [""] * len(runs))
    low, high = interval(drawn[:, 0] / drawn[:, 1])
    ci95 = None
    if low is not None and high is not None:
        ci95 = [round(low, 4), round(high, 4)]
    return {
        "method": method,
        "temperature": temperature,
        "kind": kind,
        "block": pair.block_size,
        "dtype": pair.dtype,
        "runs": len(runs),
        "verifies": verifies,
        "new_tokens": sum(run.new_tokens for run in runs),
        "acceptance_length": round(pooled_length(runs), 4),
        "ci95": ci95,
        "busy": busy,
    }
