"""Sets of questions that are refused: one sentence, and nothing written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.bench.prepare import prepare
from dflash_hf.bench.questions import Question
from dflash_hf.bench.sets import store_images
from helpers.bench_sets import PLACEHOLDER, ROWS, load, upstream_rows, write


def mmstar_row(**changes: object) -> dict[str, object]:
    return {
        **upstream_rows("mmstar/val.jsonl")[0],
        "image": str(ROWS / "mmstar" / "images" / "0.png"),
        **changes,
    }


BAD: list[tuple[str, str, Sequence[object], str]] = [
    (
        "gsm8k",
        "gsm8k.jsonl",
        [{"a": 1}],
        r"a column answer in line 1 of .*gsm8k\.jsonl, got a; fix the row",
    ),
    (
        "gsm8k",
        "gsm8k.jsonl",
        [{"question": "q", "answer": "so it is 5"}],
        "'#### NUMBER' in line 1",
    ),
    (
        "gsm8k",
        "gsm8k.jsonl",
        [{"question": 5, "answer": "#### 5"}],
        "a text as question in line 1 of .*, got 5",
    ),
    (
        "gsm8k",
        "gsm8k.jsonl",
        [{"question": "\ud800", "answer": "#### 5"}],
        "a text of whole characters",
    ),
    ("gsm8k", "gsm8k.jsonl", [], "questions in gsm8k, got 'none of gsm8k'; fix the file"),
    ("gsm8k", "gsm8k.jsonl", [[1]], "a JSON object in line 1"),
    ("mt-bench", "mt-bench.jsonl", [{"turns": []}], "turns in line 1"),
    ("mt-bench", "mt-bench.jsonl", [{"turns": ["a", " "]}], "a text as turn in line 1"),
    (
        "mt-bench",
        "mt-bench.jsonl",
        [{"turns": ["a"], "score": "bleu"}],
        "as score in line 1 of .*, got 'bleu'",
    ),
    (
        "mt-bench",
        "mt-bench.jsonl",
        [{"turns": ["a"], "question_id": [1]}],
        "a number or a text as question_id",
    ),
    (
        "mt-bench",
        "mt-bench.jsonl",
        [{"turns": ["a"], "question_id": 1}] * 2,
        "ids of mt-bench without repetition, got 1",
    ),
    (
        "mt-bench",
        "mt-bench.jsonl",
        [{"messages": [{"role": "assistant", "content": "a"}]}],
        "a last message of the user's",
    ),
    (
        "mt-bench",
        "mt-bench.jsonl",
        [{"turns": ["a"], "images": ["gone.png"]}],
        "an image file in line 1 .*'gone.png'",
    ),
    *[
        (
            "mt-bench",
            "mt-bench.jsonl",
            [
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image", name: "https://x/a.png"}]}
                    ]
                }
            ],
            rf"images of the asked turn under path in line 1 .*'{name}'.*write the image to a file, and name",
        )
        for name in ("url", "image")
    ],
    (
        "speed-bench",
        "speed-bench.jsonl",
        [{"turns": [PLACEHOLDER]}],
        "text of a question .*run SPEED-Bench's own prepare",
    ),
    (
        "mmstar",
        "mmstar.jsonl",
        [mmstar_row(question="Which colour?")],
        r"options 'A: \.\.\., B: .*line 1 .*'Which colour",
    ),
    ("mmstar", "mmstar.jsonl", [mmstar_row(answer="E")], r"the right one \('E'\) among them"),
    ("mmstar", "mmstar.jsonl", [mmstar_row(image=None)], "an image in line 1"),
    (
        "mmstar",
        "mmstar.jsonl",
        [mmstar_row(image=str(ROWS / "README.md"))],
        "an image that can be read in question 0",
    ),
    (
        "mmstar",
        "mmstar.jsonl",
        [mmstar_row(image=3)],
        "the bytes or the path of an image in line 1 of .*, got 3",
    ),
    (
        "mbpp",
        "mbpp.jsonl",
        [{"task_id": 12, "prompt": "p", "code": "c", "test_list": "assert 1"}],
        "a list of texts",
    ),
    *[
        (
            "mt-bench",
            "mt-bench.jsonl",
            [{"turns": ["p"], "score": score, "reference": reference}],
            f"reference .*for {score} in line 1 of .*fix the question's reference",
        )
        for score, reference in [
            ("letter", True),
            ("math", {"answer": 1}),
            ("exact", ["a", {"b": 1}]),
            ("code", "assert f()"),
            ("code", {"tests": "assert f()"}),
            ("code", {"tests": ["assert f()"], "imports": "re"}),
            ("code", {"prompt": 1, "test": "", "entry_point": "f"}),
        ]
    ],
]


@pytest.mark.parametrize(("name", "file", "rows", "sentence"), BAD)
def test_rows_that_are_refused(
    name: str, file: str, rows: Sequence[object], sentence: str, tmp_path: Path
) -> None:
    write(tmp_path / file, *rows)
    with pytest.raises(ValueError, match=sentence) as caught:
        load(name, tmp_path, image_dir=tmp_path / "images")
    check_sentence(caught.value)
    with pytest.raises(ValueError, match=sentence):
        prepare(
            ["gsm8k-train", name] if name != "gsm8k-train" else [name],
            tmp_path / "out",
            data_dir=beside(tmp_path),
        )
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "images").exists()


def beside(folder: Path) -> Path:
    """The folder, with a good set in it as well."""
    write(folder / "gsm8k" / "train.jsonl", *upstream_rows("gsm8k/train.jsonl"))
    return folder


def check_sentence(error: ValueError) -> None:
    text = str(error)
    assert text.startswith("expected ")
    assert ", got " in text
    assert "\n" not in text


def test_bytes_that_are_no_image_leave_nothing(tmp_path: Path) -> None:
    good = (ROWS / "mmstar" / "images" / "0.png").read_bytes()
    questions = [
        Question(dataset="own", question_id=i, category="own", turns=("a",)) for i in range(2)
    ]
    with pytest.raises(ValueError, match="an image that can be read in question 1 of own"):
        store_images([(questions[0], [good]), (questions[1], [good[:40]])], tmp_path / "images")
    assert not (tmp_path / "images").exists()
    (stored, _) = store_images(
        [(questions[0], [good, good]), (questions[1], [])], tmp_path / "images"
    )
    assert len(set(stored.images)) == len(list((tmp_path / "images").iterdir())) == 1


def refused(make: Callable[[Path], Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        make(tmp_path)
    check_sentence(caught.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: load("gsmk"), r"did you mean gsm8k or gsm8k-train\?"),
        (lambda _: load("aime"), r"did you mean aime2\d or aime2\d\?"),
        (lambda _: load("human-evl"), r"did you mean humaneval\?"),
        (lambda _: load("x" * 300), "known are gsm8k, gsm8k-train, math500"),
        (lambda _: load(f"{'x' * 300}.jsonl"), "a file of questions"),
        (lambda tmp: load("gsm8k", tmp / ("x" * 300)), "a folder as --data-dir"),
        (lambda _: load("xyzzy"), "known are gsm8k, gsm8k-train, math500"),
        (lambda _: load("gsm8k", num_prompts=0), "at least 1 prompt"),
        (
            lambda _: load("gsm8k", template="{question}"),
            "a template only for files and Hub sets of your own",
        ),
        (lambda tmp: load("gsm8k", tmp / "gone"), "a folder as --data-dir"),
        (
            lambda tmp: load("gsm8k", tmp),
            r"the rows of gsm8k in .*, got none of gsm8k\.jsonl, gsm8k/test\.jsonl",
        ),
        (lambda tmp: load(str(tmp / "gone.jsonl")), "a file of questions"),
        (lambda _: load("a/b:c:d:e"), "a set as ORG/NAME:CONFIG:SPLIT"),
        (
            lambda tmp: load(str(write(tmp / "rows.csv", {}))),
            r"a file \(\.jsonl, \.json, \.parquet\) or a set .*rows.csv",
        ),
        (
            lambda _: load(str(ROWS / "gsm8k" / "test.jsonl")),
            r"turns, messages or prompt in line 1.*--template",
        ),
        (
            lambda _: load(str(ROWS / "gsm8k" / "test.jsonl"), template="{q}"),
            "got no 'q' .there are question, answer",
        ),
        (
            lambda _: load(str(ROWS / "gsm8k" / "test.jsonl"), template="{question!r}"),
            "names of columns in braces",
        ),
        (
            lambda _: load(str(ROWS / "gsm8k" / "test.jsonl"), template="{}"),
            "names of columns in braces",
        ),
        (
            lambda _: load(str(ROWS / "gsm8k" / "test.jsonl"), template="hello"),
            "names of columns in braces",
        ),
        (
            lambda _: load(str(ROWS / "gsm8k" / "test.jsonl"), template="{question"),
            "a template such as",
        ),
        (
            lambda _: load(str(ROWS / "mt_bench" / "question.jsonl"), template="{turns}"),
            "a text or a number as turns",
        ),
    ],
)
def test_names_and_options_that_are_refused(
    make: Callable[[Path], Any], sentence: str, tmp_path: Path
) -> None:
    refused(make, sentence, tmp_path)


def test_files_that_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": \xff}\n')
    refused(lambda tmp: load(str(tmp / "a.jsonl")), "JSON in line 2 of", tmp_path)
    (tmp_path / "b.json").write_text('{"prompt": "a"}', encoding="utf-8")
    refused(lambda tmp: load(str(tmp / "b.json")), "a list of rows in", tmp_path)
    (tmp_path / "c.jsonl").write_bytes(b"[" * 100_000)
    refused(lambda tmp: load(str(tmp / "c.jsonl")), "JSON in line 1 of", tmp_path)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 or not")
    refused(
        lambda tmp: load(str(tmp / "d.parquet")),
        "expected to read .*d.parquet with datasets",
        tmp_path,
    )
