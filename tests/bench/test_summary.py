"""`summary.json` and `acceptance.csv` against a recount from the lines of the answers files; who else reads those."""

import csv
import importlib.util
import json
import math
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dflash_hf.bench import intervals
from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.counting import measure
from dflash_hf.bench.questions import Question
from dflash_hf.bench.summary import read_scores, summarize
from dflash_hf.generation.stats import SpeculativeStats
from helpers.bench_run import answers_of, questions, simple_score, write_margins, write_run
from helpers.source_tree import ROOT

SPEC_BENCH = next(
    (p for parent in ROOT.parents if (p := parent / "shared" / "data" / "spec_bench").is_dir()),
    None,
)
ASKED = [
    Question(
        dataset="sums",
        question_id=0,
        category="a",
        subcategory="x",
        turns=("1 + 1?",),
        score="math",
    ),
    Question(
        dataset="sums",
        question_id=1,
        category="b",
        subcategory="y",
        turns=("1 + 2?",),
        score="math",
    ),
    Question(dataset="talk", question_id=0, category="talk", turns=("Hello", "Again")),
    Question(dataset="talk", question_id="one", category="talk", turns=("Bye",)),
]
DRAFT_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
seconds = st.floats(0.01, 9.0)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Any turn: drafted or not, told or not, with verifies that had no proposal."""
    verifies = draw(
        st.none()
        | st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 5)), max_size=6)
    )
    told = draw(st.booleans())
    # Of a tree: a path that ended in a leaf, or with a proposal behind it.
    is_tree = draw(st.booleans())
    checked = [min(a + draw(st.integers(0, 1)), p) for _, a, p in verifies or ()]
    tokens = draw(st.integers(0, 40)) if verifies is None else 1 + sum(c for c, _, _ in verifies)
    latency = draw(seconds)
    return Turn(
        text=draw(st.sampled_from(["right", "wrong", "<b>", "<think>a", "a</think>b"])),
        begins_in_thought=draw(st.booleans()),
        token_ids=draw(st.sampled_from([[], [1, 2], [1, 3], [1]])),
        new_tokens=tokens,
        prompt_tokens=draw(st.integers(1, 9)),
        wall_time=latency / draw(st.integers(1, 4)),
        latency=latency,
        ttft=draw(st.none() | st.floats(0.0, 1.0).map(lambda share: share * latency)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        committed=None if verifies is None else [c for c, _, _ in verifies],
        accepted=None if verifies is None or not told else [min(a, p) for _, a, p in verifies],
        proposed=None if verifies is None or not told else [p for _, _, p in verifies],
        checked=None if verifies is None or not told or not is_tree else checked,
    )


@st.composite
def runs(draw: st.DrawFn) -> dict[str, list[Answer]]:
    """Answers of a baseline and two methods; some failed, some not there."""
    found: dict[str, list[Answer]] = {}
    for name in ("plain", "undrafted", "dflash"):
        found[name] = []
        for question in ASKED:
            for repeat in range(2):
                state = draw(st.sampled_from(["answered", "answered", "failed", "missing"]))
                fields: dict[str, Any] = {
                    "dataset": question.dataset,
                    "question_id": question.question_id,
                }
                fields |= {
                    "category": question.category,
                    "subcategory": question.subcategory,
                    "model_id": name,
                }
                fields |= {"repeat": repeat, "tstamp": 0.0}
                if state == "failed":
                    found[name].append(
                        Answer(**fields, error=draw(st.sampled_from(["no room", "too long"])))
                    )
                elif state == "answered":
                    said = tuple(draw(turns()) for _ in question.turns)
                    found[name].append(Answer(**fields, turns=said))
    return found


def score(question: Question, answer: Answer) -> float | None:
    return {"right": 1.0, "wrong": 0.0}.get(answer.turns[-1].text) if answer.turns else 0.0


# ---- the recount: from the lines as they stand in the files


def column(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for line in lines for choice in line["choices"] for value in choice[name]]


def three(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    p95 = (
        statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    )
    return {"mean": statistics.fmean(values), "median": statistics.median(values), "p95": p95}


def over(a: float, b: float) -> float | None:
    return a / b if b else None


def behind_first(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Tokens and seconds of decoding alone, where the first token's time is known."""
    rows = zip(
        *(column(lines, name) for name in ("new_tokens", "wall_time", "latency", "ttft")),
        strict=True,
    )
    known = [
        (n - 1, wall * (latency - ttft) / latency)
        for n, wall, latency, ttft in rows
        if ttft is not None and n
    ]
    return sum(n for n, _ in known), sum(s for _, s in known)


def recount(lines: list[dict[str, Any]], bin_tokens: int) -> dict[str, Any]:
    good = [line for line in lines if line["choices"]]
    tokens, wall, latency, ttft = (
        column(lines, name) for name in ("new_tokens", "wall_time", "latency", "ttft")
    )
    known = [
        (n, whole, first)
        for n, whole, first in zip(tokens, latency, ttft, strict=True)
        if first is not None
    ]
    return {
        "questions": len({(line["dataset"], line["question_id"]) for line in lines}),
        "answers": len(good),
        "failures": len(lines) - len(good),
        "failure_reasons": Counter(line["error"] for line in lines if not line["choices"]),
        "texts": len(tokens),
        "cut_at_limit": column(lines, "finish_reason").count("length"),
        "ended_in_thought": sum(
            "</think>" not in text and (begun or text.startswith("<think>"))
            for text, begun in zip(
                column(lines, "turns"), column(lines, "begins_in_thought"), strict=True
            )
        ),
        "prompt_tokens": sum(column(lines, "prompt_tokens")),
        "new_tokens": sum(tokens),
        "wall_seconds": math.fsum(wall),
        "tokens_per_second": over(sum(tokens), math.fsum(wall)),
        "decode_tokens_per_second": over(*behind_first(lines)),
        "latency": three(latency),
        "ttft": three([first for _, _, first in known]),
        "tpot": three([(whole - first) / (n - 1) for n, whole, first in known if n > 1]),
        "tpot_whole": three([whole / n for n, whole in zip(tokens, latency, strict=True) if n]),
        "acceptance": recount_acceptance(lines, bin_tokens),
    }


def recount_acceptance(lines: list[dict[str, Any]], bin_tokens: int) -> dict[str, Any] | None:
    names = ("committed", "accepted", "proposed", "new_tokens", "checked")
    rows = [
        row
        for row in zip(*(column(lines, name) for name in names), strict=True)
        if row[0] is not None
    ]
    every = [count for row in rows for count in row[0]]
    if not every:
        return None
    drafts = [
        (a, p, c)
        for row in rows
        if row[1] is not None
        for a, p, c in zip(row[1], row[2], row[4] or row[2], strict=True)
        if p
    ]
    depth = max((c for _, _, c in drafts), default=0)
    at = [[a > i for a, _, _ in drafts] for i in range(depth)]
    reached = [
        [a > i for a, _, c in drafts if c > i and (i == 0 or a > i - 1)] for i in range(depth)
    ]
    along: dict[int, list[int]] = {}
    for row in rows:
        for number, count in enumerate(row[0]):
            along.setdefault((1 + sum(row[0][:number])) // bin_tokens, []).append(count)
    return {
        "acceptance_length": statistics.fmean(every),
        "acceptance_length_zlab": statistics.fmean(
            statistics.fmean(row[0]) for row in rows if row[0]
        ),
        "acceptance_length_vllm": 1 + Fraction(sum(a for a, _, _ in drafts), len(drafts))
        if drafts
        else None,
        "acceptance_length_sglang": sum(row[3] for row in rows) / len(every),
        "num_verifies": len(every),
        "num_drafts": len(drafts),
        "num_draft_tokens": sum(p for _, p, _ in drafts),
        "num_accepted_tokens": sum(a for a, _, _ in drafts),
        "acceptance_at_pos": [statistics.fmean(hits) for hits in at],
        "conditional_acceptance_at_pos": [
            statistics.fmean(hits) if hits else None for hits in reached
        ],
        "along_text": [
            {
                "from_token": n * bin_tokens,
                "verifies": len(counts),
                "tokens_per_verify": statistics.fmean(counts),
            }
            for n, counts in sorted(along.items())
        ],
    }


def recount_pairs(lines: list[dict[str, Any]], base: list[dict[str, Any]]) -> tuple[Any, Any]:
    """The speed-up without its interval, and the agreement."""
    name = lambda line: (line["dataset"], line["question_id"], line["repeat"])  # noqa: E731
    theirs = {name(line): line for line in base if line["choices"]}
    mine = {name(line): line for line in lines if line["choices"] and name(line) in theirs}
    if not mine:
        return None, None
    other = [theirs[which] for which in mine]
    speed = [
        over(sum(column(group, "new_tokens")), sum(column(group, "wall_time")))
        for group in (mine.values(), other)
    ]
    decode = [over(*behind_first(list(group))) for group in (mine.values(), other)]
    same = 0
    for one, two in zip(mine.values(), other, strict=True):
        a, b = one["choices"][0], two["choices"][0]
        both = zip(a["token_ids"], b["token_ids"], a["turns"], b["turns"], strict=True)
        same += all(i == j if i and j else s == t for i, j, s, t in both)
    quotient = [
        over(pair[0], pair[1]) if None not in pair and pair[1] else None for pair in (speed, decode)
    ]
    count = len({which[:2] for which in mine})
    speedup = {"questions": count, "ratio": quotient[0], "decode": {"ratio": quotient[1]}}
    agreement = {"compared": len(mine), "identical": same, "share": same / len(mine)}
    agreement |= {"max_margin": None, "beyond_ties": 0}
    return speedup, agreement


def recount_accuracy(lines: list[dict[str, Any]]) -> Any:
    scores: dict[Any, list[int]] = {}
    for line in lines:
        said = "wrong" if "error" in line else column([line], "turns")[-1]
        if line["dataset"] == "sums" and said in ("right", "wrong"):
            scores.setdefault(line["question_id"], []).append(said == "right")
    if not scores:
        return None
    p, n, z = (
        statistics.fmean(map(statistics.fmean, scores.values())),
        len(scores),
        statistics.NormalDist().inv_cdf(0.975),
    )
    # The two shares whose own standard error would put p just inside: roots of (p - q)^2 = z^2 q (1 - q) / n.
    roots = sorted(np.roots([1 + z * z / n, -(2 * p + z * z / n), p * p]).real)
    return {"questions": n, "mean": p, "low": max(0, roots[0]), "high": min(1, roots[1])}


def without_intervals(block: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in block.items() if key not in ("low", "high")}
    return {**kept, "decode": without_intervals(kept["decode"])} if "decode" in kept else kept


def same(found: Any, expected: Any, where: str) -> None:
    """Equal, numbers up to rounding."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            same(found[number], value, f"{where}[{number}]")
    elif isinstance(expected, float | Fraction):
        assert found == pytest.approx(float(expected), rel=1e-9, abs=1e-9), where
    else:
        assert found == expected, where


# Not shrunk: the first difference says where it is, and smaller runs take minutes to find.
@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(answers=runs())
def test_an_independent_recount_equals_both_files(
    answers: dict[str, list[Answer]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    write_run(folder, ASKED, answers)
    summarize(folder, score)
    summary = json.loads((folder / "summary.json").read_text())
    lines = {
        name: list(map(json.loads, (folder / f"answers-{name}.jsonl").open())) for name in answers
    }
    assert [method["model_id"] for method in summary["methods"]] == list(lines)
    expected_csv: list[dict[str, Any]] = []
    for method in summary["methods"]:
        name = method["model_id"]
        sets = list(dict.fromkeys(line["dataset"] for line in lines[name]))
        assert sorted(method["sets"]) == sorted(sets)
        groups = [("all", method["all"], lambda line: True)]
        groups += [(s, method["sets"][s], lambda line, s=s: line["dataset"] == s) for s in sets]
        categories = method["sets"].get("sums", {}).get("categories", {})
        groups += [
            (c, block, lambda line, c=c: line["category"] == c) for c, block in categories.items()
        ]
        for where, block, chosen in groups:
            own = [line for line in lines[name] if chosen(line)]
            block = {k: v for k, v in block.items() if k not in ("categories", "subcategories")}
            for kind in ("speedup", "own_speedup"):
                if block[kind] is not None:
                    block[kind] = without_intervals(block[kind])
            pairs = (None, None) if name == "plain" else recount_pairs(own, lines["plain"])
            own_speedup = None
            if name == "dflash":
                own_speedup = recount_pairs(own, lines.get("undrafted", []))[0]
            expected = {
                **recount(own, summary["text_bin_tokens"]),
                "speedup": pairs[0],
                "own_speedup": own_speedup,
                "agreement": pairs[1],
            }
            same(block, {**expected, "accuracy": recount_accuracy(own)}, f"{name} {where}")
            counts = expected["acceptance"]
            if where in ("sums", "talk") and counts and counts["num_drafts"]:
                numbers = {k: counts[k] for k in DRAFT_COUNTS}
                at = {
                    f"acceptance_at_pos_{i}": share
                    for i, share in enumerate(counts["acceptance_at_pos"])
                }
                length = {"acceptance_length": counts["acceptance_length_vllm"]}
                expected_csv.append({"model_id": name, "dataset": where, **numbers, **length, **at})
        compared = (method["all"]["agreement"] or {}).get("compared", 0)
        assert len(method["differing"]) == compared - (method["all"]["agreement"] or {}).get(
            "identical", 0
        )
    with (folder / "acceptance.csv").open() as file:
        rows = list(csv.DictReader(file))
    width = max((len(row) for row in expected_csv), default=6) - 6
    assert len(rows) == len(expected_csv)
    for row, wanted in zip(
        rows,
        sorted(expected_csv, key=lambda r: (list(lines).index(r["model_id"]), r["dataset"])),
        strict=True,
    ):
        names = [f"acceptance_at_pos_{i}" for i in range(width)]
        assert list(row)[:6] == ["model_id", "dataset", *DRAFT_COUNTS, "acceptance_length"]
        assert list(row)[6:] == names
        for key, text in row.items():
            found = text if key in ("model_id", "dataset") else float(text)
            same(found, wanted.get(key, 0.0), f"acceptance.csv {key}")


def test_the_definitions_are_those_of_the_statistics(tmp_path: Path) -> None:
    """Verifies of full width: what `SpeculativeStats` says of the same counts."""
    asked = questions(3)
    summary = summarize(write_run(tmp_path, asked, answers_of(asked)), simple_score)
    turns = [turn for answer in answers_of(asked)["dflash"] for turn in answer.turns]
    stats = SpeculativeStats(
        num_committed=[turn.committed or [] for turn in turns],
        num_accepted=[turn.accepted or [] for turn in turns],
        num_proposed=7,
    )
    counts = next(m for m in summary["methods"] if m["model_id"] == "dflash")["all"]["acceptance"]
    assert counts["acceptance_length"] == pytest.approx(stats.acceptance_length)
    for name in ("zlab", "vllm", "sglang"):
        assert counts[f"acceptance_length_{name}"] == pytest.approx(
            stats.acceptance_length_as(name)
        )
    assert counts["acceptance_at_pos"] == pytest.approx(stats.acceptance_per_position())
    assert counts["conditional_acceptance_at_pos"] == pytest.approx(
        stats.acceptance_per_position(conditional=True)
    )


def test_a_leaf_of_a_tree_is_no_rejected_proposal() -> None:
    # Trees of five proposals: one path ended in a leaf, one before its first node, one below its second.
    turn = Turn(
        text="",
        token_ids=[],
        new_tokens=8,
        prompt_tokens=1,
        wall_time=1.0,
        latency=1.0,
        committed=[3, 1, 3],
        accepted=[2, 0, 2],
        proposed=[5, 5, 5],
        checked=[2, 1, 3],
    )
    answer = Answer(
        dataset="sums", question_id=1, category="a", model_id="dflash", tstamp=0.0, turns=(turn,)
    )
    found = measure([answer], 64)["acceptance"]
    assert found["acceptance_at_pos"] == pytest.approx([2 / 3, 2 / 3, 0.0])
    assert found["conditional_acceptance_at_pos"] == pytest.approx([2 / 3, 1.0, 0.0])
    assert found["num_draft_tokens"] == 15
    assert Answer.from_dict(answer.to_dict()) == answer


def test_margins_scores_and_failures_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    summary = summarize(folder, simple_score)
    write_margins(folder, summary)
    summary = summarize(folder, simple_score)
    methods = {method["model_id"]: method for method in summary["methods"]}
    margins = [row["margin"] for row in methods["dflash"]["differing"]]
    assert margins
    assert methods["dflash"]["all"]["agreement"]["max_margin"] == max(margins)
    assert methods["zlab"]["failed"]
    assert (
        methods["zlab"]["all"]["failures"]
        == sum(methods["zlab"]["all"]["failure_reasons"].values())
        > 0
    )
    assert methods["zlab"]["all"]["tokens_per_second"] is None
    assert summary["notes"] == ["Not every answer to humaneval is scored."]
    for name in ("plain", "dflash"):
        path = folder / f"answers-{name}.jsonl"
        path.write_text("".join(path.open().readlines()[:-3]))
    summary = summarize(folder, simple_score)
    assert summary["notes"][0] == "The run is not finished: plain has 93 of 96 answers."
    scores = read_scores(folder)
    assert {name for name, _ in scores} == {
        "plain",
        "plain-static",
        "dflash",
        "undrafted",
        "stock",
        "lookup",
        "zlab",
    }
    assert methods["zlab"]["all"]["accuracy"]["mean"] == 0, "what failed is not right"
    assert set(methods["plain"]["sets"]["mmstar"]["subcategories"]) == {"a", "b", "c"}


def test_the_same_text_is_scored_once_and_a_missing_library_costs_no_counts(tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []

    def counted(question: Question, answer: Answer) -> float | None:
        asked.append((question.key, *(turn.text for turn in answer.turns)))
        return 1.0

    folder = write_run(tmp_path / "run")
    summarize(folder, counted)
    assert asked
    assert len(asked) == len(set(asked))

    def missing(question: Question, answer: Answer) -> float | None:
        raise ImportError(
            "expected math_verify, got no module of that name; pip install 'dflash-hf[bench]'"
        )

    summary = summarize(folder, missing)
    assert "math_verify" in summary["notes"][0]
    assert all(method["all"]["accuracy"] is None for method in summary["methods"])
    assert summary["methods"][0]["all"]["tokens_per_second"] > 0


def test_a_servers_counters_are_told_by_its_definitions(tmp_path: Path) -> None:
    asked = questions(3)
    answers = answers_of(asked, repeats=1)
    moved = [
        {"num_drafts": 5.0, "num_draft_tokens": 15.0, "num_accepted_tokens": 7.0},
        {},
        {"acceptance_length": 3.5},
    ]
    at = {
        f"num_accepted_tokens_at_pos_{position}": count
        for position, count in enumerate((4.0, 2.0, 1.0))
    }
    for number, answer in enumerate(answers["plain-static"]):
        told = {**moved[number % 3], **(at if number % 3 == 0 else {})}
        said = [
            replace(turn, token_ids=[], counters=told if i == 0 else None)
            for i, turn in enumerate(answer.turns)
        ]
        answers["plain-static"][number] = replace(answer, turns=tuple(said))
    summary = summarize(write_run(tmp_path, asked, answers), simple_score)
    counts = summary["methods"][1]["all"]["acceptance"]
    assert (counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"]) == (
        20,
        60,
        28,
    )
    assert counts["acceptance_length"] is None
    assert counts["acceptance_length_vllm"] == pytest.approx(1 + 7 / 5)
    assert counts["acceptance_length_sglang"] == 3.5
    assert counts["acceptance_at_pos"] == pytest.approx([0.8, 0.4, 0.2])
    assert counts["conditional_acceptance_at_pos"] == pytest.approx([0.8, 0.5, 0.5])
    assert (tmp_path / "acceptance.csv").read_text().count("plain-static,") == 4
    # No tokens are told: texts are compared, and are the baseline's.
    assert summary["methods"][1]["all"]["agreement"]["share"] == 1.0


def test_sampled_texts_are_not_compared(tmp_path: Path) -> None:
    def heat(record: dict[str, Any]) -> None:
        for method in record["methods"]:
            method["options"] = {"temperature": 1.0}

    summary = summarize(write_run(tmp_path, change=heat), simple_score)
    assert all(method["all"]["agreement"] is None for method in summary["methods"])
    assert any(method["all"]["speedup"] for method in summary["methods"])


def test_intervals() -> None:
    """The bootstrap against draws of its own, pairs kept together; McNemar's and Wilson's against known values."""
    rng = np.random.default_rng(1)
    base = rng.uniform(1, 9, size=50)
    values = np.stack([base * 2 + rng.normal(0, 0.1, 50), base], axis=1)
    drawn = intervals.resample(values, ["one"] * 50)
    low, high = intervals.interval(drawn[:, 0] / drawn[:, 1])
    index = rng.integers(50, size=(4000, 50))
    own = np.percentile(values[index, 0].sum(1) / values[index, 1].sum(1), (2.5, 97.5))
    assert (low, high) == pytest.approx(tuple(own), abs=0.003)
    assert low is not None
    assert high is not None
    assert high - low < 0.03, "pairs were torn apart"
    assert intervals.interval(intervals.resample(values[:1], ["one"])[:, 0]) == (None, None)
    np.testing.assert_array_equal(intervals.resample(values, ["one"] * 50), drawn)
    # Two sets, one twice as fast: their shares of a draw are fixed, so that their difference widens nothing.
    values = np.concatenate([np.full((20, 2), (2.0, 1.0)), np.full((20, 2), (1.0, 1.0))])
    drawn = intervals.resample(values, ["fast"] * 20 + ["slow"] * 20)
    assert intervals.interval(drawn[:, 0] / drawn[:, 1]) == (1.5, 1.5)
    # Newcombe 1998, table I: 81 of 263, 0 of 20, 1 of 29.
    for right, count, expected in (
        (81, 263, (0.2553, 0.3662)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ):
        assert intervals.wilson(right / count, count) == pytest.approx(expected, abs=5e-5)
    for count in range(1, 40):  # the share itself is never outside, not even by a rounding
        for right in (0, count):
            low, high = intervals.wilson(right / count, count)
            assert low <= right / count <= high
    assert intervals.mcnemar(0, 0) == 1.0
    assert intervals.mcnemar(1, 9) == pytest.approx(22 / 1024)
    assert intervals.mcnemar(5, 5) == 1.0


def upstream(name: str) -> ModuleType:
    if SPEC_BENCH is None:
        pytest.skip("no ../shared/data/spec_bench, where Spec-Bench's own scorers are")
    spec = importlib.util.spec_from_file_location(f"spec_bench_{name}", SPEC_BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_spec_bench_reads_the_answers_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`speed.py` finds our mean of accepted tokens and our speeds, `equal.py` what is equal and what is not."""
    speed, equal = upstream("speed"), upstream("equal")
    tokenizer = str(ROOT / "demos" / "toy" / "target")
    asked = [question for question in questions(4) if question.dataset == "mt-bench"]
    folder = write_run(tmp_path / "run", asked, answers_of(asked, repeats=1))
    summary = summarize(folder, simple_score)
    files = [str(folder / f"answers-{name}.jsonl") for name in ("dflash", "plain")]
    found = speed.speed(*files, tokenizer, task="mt_bench", report=False)
    block = next(m for m in summary["methods"] if m["model_id"] == "dflash")["all"]
    assert np.mean(found[3]) == pytest.approx(block["acceptance"]["acceptance_length"])
    answers = answers_of(asked, repeats=1)["dflash"]
    rates = [
        sum(t.new_tokens for t in a.turns) / sum(t.wall_time for t in a.turns) for a in answers
    ]
    assert found[0] == pytest.approx(statistics.fmean(rates))
    assert found[1] > 0
    for other, verdict in (
        ("answers-plain.jsonl", "Result totally Equal!"),
        ("answers-other.jsonl", "Not Equal!"),
    ):
        (folder / "answers-other.jsonl").write_text(
            (folder / "answers-plain.jsonl")
            .read_text()
            .replace("know", "see", 1)
            .replace("boxed", "box")
        )
        equal.run_compare(f"{folder}/", "answers-dflash.jsonl", other)
        assert verdict in capsys.readouterr().out
