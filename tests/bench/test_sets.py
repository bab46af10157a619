"""Sets of questions: every schema, the draw, files for machines without a network. Refusals: test_sets_refused.py."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dflash_hf.bench.prepare import prepare
from dflash_hf.bench.questions import Question
from dflash_hf.bench.sets import SETS, draw, load_questions
from dflash_hf.data.rows import Row, filled
from helpers.bench_sets import ROWS, load, upstream_rows, write

UPSTREAM = Path(__file__).resolve().parents[3] / "shared" / "data"
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


# ---- what a row becomes

FIRST = {
    "gsm8k": Question(
        dataset="gsm8k",
        question_id=0,
        category="gsm8k",
        turns=(
            "A shelf has 6 boards with 15 books each. 8 books are lent out. How many are there now?"
            + STEP_BY_STEP,
        ),
        reference="82",
        score="math",
    ),
    "math500": Question(
        dataset="math500",
        question_id="test/algebra/1.json",
        category="Algebra",
        subcategory="level 2",
        turns=("What is the sum of the roots of $x^2 - 7x + 10 = 0$?" + STEP_BY_STEP,),
        reference="7",
        score="math",
    ),
    "aime25": Question(
        dataset="aime25",
        question_id=1,
        category="aime25",
        turns=("Find the largest three-digit multiple of $37$." + STEP_BY_STEP,),
        reference="999",
        score="math",
    ),
    "mbpp": Question(
        dataset="mbpp",
        question_id=11,
        category="mbpp",
        turns=(
            "Write a function to return the larger of two numbers.\nYour code should pass these tests:\n\n"
            "assert larger(1, 2) == 2\nassert larger(-1, -math.inf) == -1",
        ),
        reference={
            "tests": ["assert larger(1, 2) == 2", "assert larger(-1, -math.inf) == -1"],
            "imports": ["import math"],
            "canonical_solution": "def larger(a, b):\n    return max(a, b)",
        },
        score="code",
    ),
    "mt-bench": Question(
        dataset="mt-bench",
        question_id=81,
        category="writing",
        turns=("Write two lines about a harbour at night.", "Now without the letter e."),
    ),
    "mmstar": Question(
        dataset="mmstar",
        question_id=0,
        category="coarse perception",
        subcategory="image scene and topic",
        turns=("Which colour is the square?\nOptions: A: red, B: blue, C: green, D: white",),
        images=(str(ROWS / "mmstar" / "images" / "0.png"),),
        reference="A",
        score="letter",
    ),
    "speed-bench": Question(
        dataset="speed-bench",
        question_id="9f2c",
        category="coding",
        subcategory="python",
        turns=("Write a function that reverses a list.", "Now in place."),
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_row_becomes_this_question(name: str) -> None:
    assert load(name)[0] == FIRST[name]


@pytest.mark.parametrize("name", [entry.name for entry in SETS])
def test_every_set_reads_its_rows(name: str) -> None:
    questions = load(name)
    assert {question.dataset for question in questions} == {name}
    assert len({question.question_id for question in questions}) == len(questions) >= 1
    assert all(question.category for question in questions)
    # As people write it.
    assert load(name.upper().replace("-", "_")) == questions
    assert [
        Question.from_dict(json.loads(json.dumps(question.to_dict()))) for question in questions
    ] == questions


def test_prompts_are_z_lab_s() -> None:
    row = upstream_rows("humaneval/HumanEval.jsonl")[0]
    assert load("humaneval")[0].turns == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\n{prompt}\n```".format(**row),
    )
    plain, inside = load("livecodebench")
    assert plain.turns[0].endswith(
        "passes all tests. You will NOT return anything except for the program\n\n"
        "### Question:\nTwo lamps blink every A and B seconds. Print when they next blink together.\n\n"
        "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )
    assert "structure:\n```python\nclass Solution:\n    def rows(" in inside.turns[0]
    assert [question.turns[0] for question in load("alpaca")] == [
        "Name two uses of a paper clip.",
        "Put the sentence into the past tense.\n\nInput:\nThe bell rings.",
    ]


def test_what_scores_compare_with() -> None:
    assert [question.reference for question in load("gsm8k")] == ["82", "5000"]
    assert [question.reference for question in load("aime24")] == ["009", "001"]
    assert [question.reference for question in load("mmstar")] == ["A", "B"]
    assert all(question.reference is None for question in load("livecodebench"))
    row = upstream_rows("humaneval/HumanEval.jsonl")[1]
    assert load("humaneval")[1].reference == {
        name: row[name] for name in ("prompt", "test", "entry_point", "canonical_solution")
    }
    assert [question.question_id for question in load("mbpp")] == [11, 510]  # the test split's


@pytest.mark.skipif(not UPSTREAM.is_dir(), reason=f"there are no upstream rows in {UPSTREAM}")
def test_upstream_s_own_rows() -> None:
    names = ("gsm8k-train", "gsm8k", "math500", "humaneval", "mt-bench", "spec-bench")
    assert [len(load(name, UPSTREAM)) for name in names] == [7473, 1319, 500, 164, 80, 480]


# ---- which ones are drawn


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99), st.randoms())
def test_the_draw_follows_the_texts_alone(fewer: int, more: int, seed: int, random: Any) -> None:
    fewer, more = sorted((fewer, more))
    every = [
        (Question(dataset="a", question_id=i, category="a", turns=(f"{i * i}?",)), [])
        for i in range(30)
    ]
    some = [question.turns for question, _ in draw(every, more, seed)]
    assert len(some) == min(more, 30)
    assert some == [question.turns for question, _ in every if question.turns in some], (
        "in the set's own order"
    )
    assert {question.turns for question, _ in draw(every, fewer, seed)} <= set(some)
    moved = [
        (replace(question, question_id=f"other {i}"), []) for i, (question, _) in enumerate(every)
    ]
    random.shuffle(moved)
    assert {question.turns for question, _ in draw(moved, more, seed)} == set(some)


def test_seeds_draw_different_ones() -> None:
    every = [
        load("speed-bench"),
        *(load("speed-bench", num_prompts=1, seed=seed) for seed in range(12)),
    ]
    assert {question.question_id for drawn in every[1:] for question in drawn} == {
        q.question_id for q in every[0]
    }


# ---- files for machines that have no network


def test_what_is_prepared_is_read_as_the_same(tmp_path: Path) -> None:
    names = [entry.name for entry in SETS]
    written = prepare(names, tmp_path / "out", data_dir=ROWS)
    assert written == [tmp_path / "out" / f"{name}.jsonl" for name in names]
    for name in names:
        then, now = load(name), load(name, tmp_path / "out")
        assert [replace(question, images=()) for question in now] == [
            replace(q, images=()) for q in then
        ]
        for old, new in zip(then, now, strict=True):
            assert [Path(path).read_bytes() for path in old.images] == [
                Path(path).read_bytes() for path in new.images
            ]
            assert all(Path(path).parent == tmp_path / "out" / "images" for path in new.images)
    assert load("mmstar", tmp_path / "out")[0].images
    # Wherever the folder is taken.
    (tmp_path / "out").rename(tmp_path / "moved")
    assert load("mmstar", tmp_path / "moved")[1].images[0].startswith(str(tmp_path / "moved"))
    assert sorted(path.name for path in (tmp_path / "moved").iterdir()) == sorted(
        [*(f"{name}.jsonl" for name in names), "images"]
    )


def test_prepared_again_or_refused(tmp_path: Path) -> None:
    (path,) = prepare(["gsm8k"], tmp_path, data_dir=ROWS)
    assert prepare(["gsm8k"], tmp_path, data_dir=ROWS) == [path]
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"expected no gsm8k\.jsonl with other questions"):
        prepare(["math500", "gsm8k"], tmp_path, data_dir=ROWS, num_prompts=1)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])
    with pytest.raises(ValueError, match="expected sets of different names"):
        prepare(["gsm8k", "GSM8K"], tmp_path / "new", data_dir=ROWS)
    assert not (tmp_path / "new").exists()


# ---- a user's own


def test_rows_in_our_form_and_others(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl",
        {"turns": ["One?", "Two?"]},
        {
            "prompt": "Three?",
            "question_id": "c",
            "category": "x",
            "subcategory": "y",
            "reference": "4",
            "score": "math",
        },
        {"messages": [{"role": "user", "content": "Four?"}], "question_id": 9},
        {"prompt": "Five?", "images": [str(ROWS / "mmstar" / "images" / "1.png")]},
    )
    assert load(str(path), None) == [
        Question(dataset="own", question_id=0, category="own", turns=("One?", "Two?")),
        Question(
            dataset="own",
            question_id="c",
            category="x",
            subcategory="y",
            turns=("Three?",),
            reference="4",
            score="math",
        ),
        Question(dataset="own", question_id=9, category="own", turns=("Four?",)),
        Question(
            dataset="own",
            question_id=3,
            category="own",
            turns=("Five?",),
            images=(str(ROWS / "mmstar" / "images" / "1.png"),),
        ),
    ]


def test_of_a_conversation_the_last_message_is_asked_behind_the_others(tmp_path: Path) -> None:
    image = tmp_path / "images" / "red.png"
    image.parent.mkdir()
    Image.new("RGB", (4, 4), "red").save(image)
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello!"},
    ]
    seen = {
        "role": "user",
        "content": [{"type": "image", "path": "images/red.png"}, {"type": "text", "text": "What?"}],
    }
    path = tmp_path / "own.jsonl"
    path.write_text(
        json.dumps({"kind": "talk", "messages": [*said, seen]}) + "\n", encoding="utf-8"
    )
    (question,) = load_questions(str(path), data_dir=None, num_prompts=None, seed=0)
    asked = {
        "role": "user",
        "content": [{"type": "image", "path": str(image)}, {"type": "text", "text": "What?"}],
    }
    assert (question.category, question.turns, question.images) == (
        "talk",
        ("What?",),
        (str(image),),
    )
    assert question.messages() == [*said, asked]
    prepared = tmp_path / "prepared.jsonl"
    prepared.write_text(json.dumps(question.to_dict()) + "\n", encoding="utf-8")
    assert (
        load_questions(str(prepared), data_dir=None, num_prompts=None, seed=0)[0].messages()
        == question.messages()
    )
    path.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hi."}, seen]}) + "\n",
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match="images in the first turn alone in line 1"):
        load_questions(str(path), data_dir=None, num_prompts=None, seed=0)


def test_images_of_a_folder_of_rows_are_looked_for_in_it(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    Image.new("RGB", (4, 4), "red").save(folder / "a.png")
    write(folder / "test.jsonl", {"prompt": "q", "images": ["a.png"]})
    for name in (f"{folder}/test.jsonl", f"{folder}::test"):
        (question,) = load(name, None)
        assert question.images == (str(folder / "a.png"),)


def test_images_of_earlier_messages_are_checked_and_carried_along(tmp_path: Path) -> None:
    image = tmp_path / "from" / "a.png"
    image.parent.mkdir()
    Image.new("RGB", (4, 4), "red").save(image)
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Colour?"},
    ]
    path = image.parent / "own.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    (written,) = prepare([str(path)], tmp_path / "out")
    assert str(tmp_path) not in written.read_text(encoding="utf-8")
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "own.jsonl"
    (question,) = load_questions(str(moved), data_dir=None, num_prompts=None, seed=0)
    (file,) = question.image_files
    assert Path(file).parent == tmp_path / "moved" / "images"
    assert Path(file).read_bytes() == image.read_bytes()
    image.unlink()
    with pytest.raises(ValueError, match=r"expected an image file in line 1 .*fix the path"):
        load_questions(str(path), data_dir=None, num_prompts=None, seed=0)


def test_a_template_asks_of_any_columns(tmp_path: Path) -> None:
    rows = [
        {"town": "Bonn", "n": 2, "score": 4.5, "category": 1},
        {"town": "Ulm {x}", "n": 3, "id": "a", "turns": 0},
    ]
    path = write(tmp_path / "towns.jsonl", *rows)
    asked = load(str(path), None, template="{{{n}}} facts about {town}?")
    texts = ["{2} facts about Bonn?", "{3} facts about Ulm {x}?"]
    assert asked == [
        Question(dataset="towns", question_id=number, category="towns", turns=(text,))
        for number, text in enumerate(texts)
    ]


COLUMNS = st.dictionaries(
    st.text(string.ascii_lowercase, min_size=1, max_size=4), st.text() | st.integers(), min_size=1
)
PIECES = st.lists(st.text("ab {}\n") | st.sampled_from(["{q}", "{r}", "{{", "}}"]), max_size=6)


@given(PIECES, COLUMNS)
def test_templates_are_str_format_s_with_names_only(
    pieces: list[str], values: dict[str, Any]
) -> None:
    values |= {"q": "what", "r": 5}
    template = "".join(pieces)
    row = Row(values=values, number=0, where="a row")
    try:
        expected = template.format(**values)
    except (ValueError, KeyError, IndexError, AttributeError):
        expected = None
    if expected is None or not any(name for _, name, _, _ in string.Formatter().parse(template)):
        with pytest.raises(ValueError, match=r"expected (a template|the columns)"):
            filled(template, row)
    else:
        assert filled(template, row) == expected


# ---- through `datasets`


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Parquet files as the Hub has them, read with a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_list(upstream_rows("gsm8k/test.jsonl"))
    (tmp_path / "hub" / "gsm8k" / "main").mkdir(parents=True)
    table.to_parquet(tmp_path / "hub" / "gsm8k" / "main" / "test-00000-of-00001.parquet")
    rows = [
        row | {"image": {"bytes": (ROWS / "mmstar" / row["image"]).read_bytes(), "path": None}}
        for row in upstream_rows("mmstar/val.jsonl")
    ]
    table = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    (tmp_path / "hub" / "MMStar").mkdir()
    table.to_parquet(tmp_path / "hub" / "MMStar" / "mmstar.parquet")
    return tmp_path / "hub"


def test_parquet_rows_are_the_same_questions(hub: Path, tmp_path: Path) -> None:
    assert load("gsm8k", hub) == load("gsm8k")
    images = tmp_path / "images"
    found = load("mmstar", hub, num_prompts=1, image_dir=images)
    (expected,) = load("mmstar", num_prompts=1)
    assert [replace(question, images=expected.images) for question in found] == [expected]
    assert [str(path) for path in images.iterdir()] == list(found[0].images)
    assert Path(found[0].images[0]).read_bytes() == Path(expected.images[0]).read_bytes()
    assert found[0].images[0].endswith(".png")
    for name in (
        f"{hub}/gsm8k",
        f"{hub}/gsm8k:default:test",
        f"{hub}/gsm8k/main/test-00000-of-00001.parquet",
    ):
        asked = load(name, None, template="{question}")
        assert [question.turns[0] + STEP_BY_STEP for question in asked] == [
            q.turns[0] for q in load("gsm8k")
        ]


def test_a_table_file_and_its_folder_ask_the_same(hub: Path) -> None:
    """Names that a struct of a table has for other rows are none of a row's."""
    datasets = pytest.importorskip("datasets")
    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in ("a", "b")]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "One?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "user", "content": "Two?"},
            ]
        }
        for call in calls
    ]
    folder = hub / "calls"
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(folder / "test.parquet")
    of_the_file = load(str(folder / "test.parquet"), None)
    of_the_folder = load(f"{folder}::test", None)
    assert [question.messages() for question in of_the_file] == [row["messages"] for row in rows]
    assert [question.messages() for question in of_the_folder] == [row["messages"] for row in rows]


def test_what_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[Any, ...]] = []

    def load_dataset(
        path: str, name: str | None = None, split: str | None = None, data_files: Any = None
    ) -> Any:
        asked.append((path, name, split, data_files))
        rows: dict[str, str] = {
            "openai/gsm8k": "gsm8k/test.jsonl",
            "google-research-datasets/mbpp": "mbpp/sanitized-mbpp.json",
            "HuggingFaceH4/mt_bench_prompts": "mt_bench/question.jsonl",
            "json": "livecodebench/test.jsonl",
        }
        table = datasets.Dataset.from_list(upstream_rows(rows[path]))
        return (
            table.rename_columns({"question_id": "prompt_id", "turns": "prompt"})
            if "mt_bench" in path
            else table
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("gsm8k", "mbpp", "mt-bench"):
        assert [(q.question_id, q.turns) for q in load(name, None)] == [
            (q.question_id, q.turns) for q in load(name)
        ]
    load("livecodebench", None)
    assert asked[:3] == [
        ("openai/gsm8k", "main", "test", None),
        ("google-research-datasets/mbpp", "sanitized", "test", None),
        ("HuggingFaceH4/mt_bench_prompts", None, "train", None),
    ]
    assert (asked[3][0], len(asked[3][3])) == ("json", 6)


def test_a_hub_that_is_not_reached() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(
        ValueError, match=r"expected to read openai/gsm8k \(main, test\).*prepare.*--data-dir"
    ):
        load("gsm8k", None)  # tests/conftest.py sets HF_HUB_OFFLINE
    with pytest.raises(ValueError, match=r"expected to read nobody/nothing .*OfflineModeIsEnabled"):
        load("nobody/nothing:a:b", None)
    for name in ("livecodebench", "spec-bench"):
        with pytest.raises(
            ValueError,
            match=r"expected to read (livecodebench/code_generation_lite|hemingkx/Spec-Bench)",
        ):
            load(name, None)
