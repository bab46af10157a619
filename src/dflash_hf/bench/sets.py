"""This module loads sets of questions: those that the benchmark knows by name, and files or Hub sets of users.

A known set is one entry of `SETS`: its place on the Hub, its files there and upstream, and a function that makes a
question of a row. Prompts are those of z-lab's benchmark if it has the set, so that acceptance lengths can be
compared. MBPP's prompt ends with its tests, because nobody could know the function's name without them.

Questions are drawn from a set by their texts alone. So a seed draws the same questions from any source of the rows,
and a smaller draw is a part of a larger one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, get_args

from dflash_hf.bench.questions import Question, Score
from dflash_hf.bench.scores import check_reference
from dflash_hf.data.image_files import ImageError, content_name, read_image, store_image
from dflash_hf.data.prompt_files import text_of
from dflash_hf.data.rows import CONVERSATION, FIX, ImageSource, Row, filled
from dflash_hf.data.sources import file_rows, full_name, hub_rows, set_parts
from dflash_hf.errors import listed, require, shown

FILES: Final = (".jsonl", ".json", ".parquet")
STEP_BY_STEP: Final = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LIVECODEBENCH: Final = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question}\n\n### Format: {how}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
Pair = tuple[Question, list[ImageSource]]
Fields = dict[str, Any]  # fields of a `Question`


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """A set that is known by name.

    Args:
        name (`str`): Its name. Users may write it with upper case, `-`, `_` and spaces.
        hub (`tuple`): Its id on the Hub, configuration and split.
        question (callable): Returns the fields of a question from an upstream row; `None` for a row that is not in the
            set. By default, a question's id is the number of its row, and its category is the set's name.
        columns (`tuple[str, ...]`): The columns that are read, if other columns are large; by default all.
        files (`tuple[str, ...]`): Patterns of its upstream files below `--data-dir`.
        hub_files (`tuple[str, ...]`): Addresses of its files, if `datasets` does not find them by the id.
    """

    name: str
    hub: tuple[str, str | None, str]
    question: Callable[[Row], Fields | None]
    columns: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    hub_files: tuple[str, ...] = ()

    def patterns(self) -> list[str]:
        """Returns patterns of its files below `--data-dir`: of `prepare`, of upstream, and of the Hub."""
        _, config, split = self.hub
        below = [f"{folder}/" for folder in (config, "data") if folder] + [""]
        folders = dict.fromkeys((self.name, self.name.replace("-", "_")))
        hub = [f"{folder}/{part}{split}*.parquet" for folder in folders for part in below]
        return [f"{self.name}.jsonl", *self.files, *hub]


def normalised(row: Row) -> Fields:
    """Reads a row of the JSONL form, of Spec-Bench, MT-Bench or SPEED-Bench, or a row with `prompt`."""
    score = row.values.get("score")
    require(
        score is None or score in get_args(Score),
        f"one of {get_args(Score)} as score in {row.where}",
        score,
        FIX,
    )
    history, said = row.messages()
    if score is None:
        reference = row.values.get("reference")
    else:
        reference = row.value("reference", "answer")
    return {
        "question_id": row.name("question_id", "prompt_id", "id"),
        **_category(row, "category", "kind"),
        "subcategory": row.text("subcategory", "sub_category", default=""),
        "turns": tuple(text_of([message]) for message in said) or row.turns(*CONVERSATION),
        "history": tuple(history),
        "reference": reference,
        "score": score,
    }


def _category(row: Row, *names: str) -> Fields:
    """Returns the category, if the row has one."""
    category = row.text(*names, default="")
    return {"category": category} if category else {}


def gsm8k(row: Row) -> Fields:
    """Reads a row of openai/gsm8k. The right answer is the number after `####`."""
    _, mark, right = row.text("answer").rpartition("####")
    require(
        bool(mark and right.strip()),
        f"an answer that ends with '#### NUMBER' in {row.where}",
        right,
        FIX,
    )
    turn = row.text("question") + STEP_BY_STEP
    return {"turns": (turn,), "reference": right.strip().replace(",", ""), "score": "math"}


def mathematics(row: Row) -> Fields:
    """Reads a row of MATH-500 or AIME: `problem` and `answer`."""
    level = row.values.get("level")
    return {
        "question_id": row.name("unique_id", "id", "problem_idx"),
        **_category(row, "subject"),
        "subcategory": "" if level is None else f"level {level}",
        "turns": (row.text("problem") + STEP_BY_STEP,),
        "reference": str(row.value("answer")),
        "score": "math",
    }


def humaneval(row: Row) -> Fields:
    """Reads a row of openai_humaneval."""
    code = {
        name: row.text(name) for name in ("prompt", "test", "entry_point", "canonical_solution")
    }
    turn = (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{code['prompt']}\n```"
    )
    return {
        "question_id": row.name("task_id"),
        "turns": (turn,),
        "reference": code,
        "score": "code",
    }


def mbpp(row: Row) -> Fields | None:
    """Reads a row of MBPP's test split. Upstream's file has all splits, which differ by their ids."""
    number = row.name("task_id")
    if isinstance(number, int) and not 11 <= number <= 510:
        return None
    tests = row.texts("test_list")
    imports = row.values.get("test_imports")
    # The full set has this field instead of the sanitised set's `test_imports`.
    setup = row.values.get("test_setup_code")
    if imports:
        imports = list(row.texts("test_imports"))
    elif setup:
        imports = [setup]
    else:
        imports = []
    return {
        "question_id": number,
        "turns": (
            row.text("prompt", "text")
            + "\nYour code should pass these tests:\n\n"
            + "\n".join(tests),
        ),
        "reference": {
            "tests": list(tests),
            "imports": imports,
            "canonical_solution": row.text("code"),
        },
        "score": "code",
    }


def livecodebench(row: Row) -> Fields:
    """Reads a row of LiveCodeBench, without its tests, because nothing here runs them."""
    starter = row.values.get("starter_code")
    how = "Use the following code structure:"
    if not starter:
        starter = "# YOUR CODE HERE"
        how = "Write your code in the following format:"
    text = row.text("question_content")
    turn = LIVECODEBENCH.format(question=text, how=how, code=starter)
    return {
        "question_id": row.name("question_id"),
        **_category(row, "difficulty"),
        "turns": (turn,),
    }


def alpaca(row: Row) -> Fields:
    """Reads a row of Alpaca."""
    turn = row.text("instruction")
    more = row.text("input", default="")
    if more:
        turn = f"{turn}\n\nInput:\n{more}"
    return {"turns": (turn,)}


def mmstar(row: Row) -> Fields:
    """Reads a row of MMStar: the whole text with its options, after the image."""
    text = row.text("question")
    right = row.text("answer").strip()
    options = re.findall(r"(?<![A-Za-z])\(?([A-H])\s?[:.)]", text)
    what = f"options 'A: ..., B: ...' in the question of {row.where}, the right one ({shown(right)}) among them"
    require(
        {"A", "B", right} <= set(options),
        what,
        text,
        "take the upstream rows: their questions end with them",
    )
    require(bool(row.images()), f"an image in {row.where}", listed(row.values), FIX)
    return {
        "question_id": row.name("index"),
        "category": row.text("category"),
        "subcategory": row.text("l2_category"),
        "turns": (text,),
        "reference": right,
        "score": "letter",
    }


_LCB: Final = "hf://datasets/livecodebench/code_generation_lite/"
_SPEC_BENCH: Final = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)


def _speed_bench(size: str) -> QuestionSet:
    name = "speed-bench"
    config = "qualitative"
    if size:
        name = f"speed-bench-{size}"
        config = f"throughput_{size}"
    folders = ("speed_bench", "speed-bench", "speed")
    files = [f"{folder}/{config}{end}" for folder in folders for end in FILES]
    files += [f"{folder}/{config}/*.parquet" for folder in folders]
    return QuestionSet(
        name=name,
        hub=("nvidia/SPEED-Bench", config, "test"),
        question=normalised,
        files=tuple(files),
    )


SETS: Final = (
    QuestionSet(
        name="gsm8k",
        hub=("openai/gsm8k", "main", "test"),
        question=gsm8k,
        files=("gsm8k/test.jsonl",),
    ),
    QuestionSet(
        name="gsm8k-train",
        hub=("openai/gsm8k", "main", "train"),
        question=gsm8k,
        files=("gsm8k/train.jsonl", "gsm8k/main/train*.parquet"),
    ),
    QuestionSet(
        name="math500",
        hub=("HuggingFaceH4/MATH-500", None, "test"),
        question=mathematics,
        files=("math500/test.jsonl", "MATH-500/test.jsonl"),
    ),
    QuestionSet(
        name="aime24",
        hub=("HuggingFaceH4/aime_2024", None, "train"),
        question=mathematics,
        files=("aime24/*.jsonl", "aime_2024/data/train*.parquet"),
    ),
    QuestionSet(
        name="aime25",
        hub=("MathArena/aime_2025", None, "train"),
        question=mathematics,
        files=("aime25/*.jsonl", "aime_2025/data/train*.parquet"),
    ),
    QuestionSet(
        name="humaneval",
        hub=("openai/openai_humaneval", "openai_humaneval", "test"),
        question=humaneval,
        files=("humaneval/HumanEval.jsonl",),
    ),
    QuestionSet(
        name="mbpp",
        hub=("google-research-datasets/mbpp", "sanitized", "test"),
        question=mbpp,
        files=("mbpp/sanitized-mbpp.json", "mbpp/mbpp.jsonl"),
    ),
    QuestionSet(
        name="livecodebench",
        hub=("livecodebench/code_generation_lite", None, "test"),
        question=livecodebench,
        columns=("question_id", "question_content", "starter_code", "difficulty"),
        files=("livecodebench/test*.jsonl",),
        hub_files=tuple(f"{_LCB}test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)),
    ),
    QuestionSet(
        name="mt-bench",
        hub=("HuggingFaceH4/mt_bench_prompts", None, "train"),
        question=normalised,
        files=("mt_bench/question.jsonl", "mt-bench/question.jsonl"),
    ),
    QuestionSet(
        name="spec-bench",
        hub=("hemingkx/Spec-Bench", None, "test"),
        question=normalised,
        files=("spec_bench/question.jsonl", "spec-bench/question.jsonl"),
        hub_files=(_SPEC_BENCH,),
    ),
    QuestionSet(
        name="alpaca",
        hub=("tatsu-lab/alpaca", None, "train"),
        question=alpaca,
        files=("alpaca/alpaca_data.json", "alpaca/*.jsonl"),
    ),
    QuestionSet(
        name="mmstar",
        hub=("Lin-Chen/MMStar", "val", "val"),
        question=mmstar,
        files=("mmstar/*.jsonl", "mmstar/mmstar.parquet", "MMStar/mmstar.parquet"),
    ),
    *map(_speed_bench, ("", "1k", "2k", "8k", "16k", "32k")),
)


def load_questions(
    name: str,
    *,
    data_dir: Path | None,
    num_prompts: int | None,
    seed: int,
    template: str | None = None,
    image_dir: Path | None = None,
) -> list[Question]:
    """Returns `num_prompts` questions of a set, in the set's own order.

    Args:
        name (`str`): A name in `SETS`; or a `.jsonl`, `.json` or `.parquet` file; or a folder or Hub set that
            `datasets` loads, as `ORG/NAME`, `ORG/NAME:CONFIG` or `ORG/NAME:CONFIG:SPLIT`.
        data_dir (`Path`, *optional*): Folder with the files of sets in `SETS`. With it, nothing is read from the Hub.
        num_prompts (`int`, *optional*): How many questions to draw. All are taken by default, or if there are fewer.
        seed (`int`): Chooses the questions. The same texts give the same questions, from any file or place.
        template (`str`, *optional*): The question for a row, for files and Hub sets of a user: a text with names of
            columns in braces. Without it, a row must be in the JSONL form of [`dflash_hf.bench.questions`], or have
            `prompt` or `messages`.
        image_dir (`Path`, *optional*): Folder for images that are not files yet, which are named by their contents; by
            default a folder in the Hub's cache. Nothing is written before every question has been checked.

    Raises:
        ValueError: If there is no such set, file or column; if a row is malformed; if two rows have the same id; or if
            an image cannot be read.
    """
    require(
        num_prompts is None or num_prompts > 0,
        "at least 1 prompt of each set",
        num_prompts,
        "ask for more",
    )
    dataset, pairs = _read(name, data_dir, template)
    kept: dict[int | str, Pair] = {}
    for question, sources in pairs:
        number = question.question_id
        require(
            number not in kept,
            f"ids of {dataset} without repetition",
            number,
            "give each question one of its own",
        )
        kept[number] = question, sources
    require(bool(kept), f"questions in {dataset}", f"none of {name}", "fix the file")
    return store_images(draw(kept.values(), num_prompts, seed), image_dir)


def draw(pairs: Iterable[Pair], num_prompts: int | None, seed: int) -> list[Pair]:
    """Returns some of the questions in their order, chosen by a hash of the seed and the text."""
    every = list(pairs)
    texts = [json.dumps([seed, *question.turns]).encode() for question, _ in every]
    ranked = sorted(range(len(every)), key=lambda index: hashlib.sha256(texts[index]).digest())
    return [every[index] for index in sorted(ranked[:num_prompts])]


def _read(name: str, data_dir: Path | None, template: str | None) -> tuple[str, Iterator[Pair]]:
    """Returns the set's name in results, and its questions with their images, which are read one by one."""
    if name.endswith(FILES):
        path = Path(name)
        return path.stem, _own(file_rows([path]), path.stem, template)
    entry = _known_set(name)
    if entry is not None:
        what = f"a template only for files and Hub sets of your own, not for {entry.name}"
        require(template is None, what, template, "leave it out, or name the set's file or Hub id")
        return entry.name, _theirs(entry, data_dir)
    if "/" in name or os.path.isdir(name.partition(":")[0]):
        return name, _own(hub_rows(*set_parts(name, FILES)), name, template)
    hint = f"known are {', '.join(entry.name for entry in SETS)}"
    known = {_plain(entry.name): entry for entry in SETS}
    near = difflib.get_close_matches(_plain(name), known, n=2, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(known[key].name for key in near)}?"
    raise ValueError(
        f"expected a name of a set, a .jsonl file or a Hub set ORG/NAME, got {shown(name)}; {hint}"
    )


def set_name(name: str) -> str:
    """Returns a unique name of a set, however it is written. For a file or folder, this is its absolute path."""
    known = _known_set(name)
    if known is not None:
        return known.name
    return full_name(name)


def _known_set(name: str) -> QuestionSet | None:
    """Returns the set in `SETS` of that name. A name with a slash is a path."""
    if "/" in name:
        return None
    return {_plain(entry.name): entry for entry in SETS}.get(_plain(name))


def _plain(name: str) -> str:
    """Returns a name without the letters that people write in different ways, as in MATH-500 and math_500."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _theirs(known: QuestionSet, data_dir: Path | None) -> Iterator[Pair]:
    """Yields the questions of a set in `SETS`, from the Hub or from a folder."""
    for row in _rows(known, data_dir):
        fields = normalised(row) if "turns" in row.values else known.question(row)
        if fields is not None:
            yield _pair(row, known.name, fields)


def _pair(row: Row, dataset: str, fields: Fields) -> Pair:
    every: Fields = {"dataset": dataset, "question_id": row.number, "category": dataset, **fields}
    # The reference is checked here and not only when answers are scored, because a run's questions cannot change
    # later.
    if every.get("score") is not None:
        check_reference(every["score"], every["reference"], row.where)
    return Question(**every), row.images()


def _rows(known: QuestionSet, data_dir: Path | None) -> Iterator[Row]:
    if data_dir is None:
        action = f"connect, or run `dflash-hf bench prepare {known.name}` where there is a network and pass --data-dir"
        files = known.hub_files
        return hub_rows(*known.hub, columns=known.columns, files=files, action=action)
    # `Path.is_dir` of Python 3.11 raises an error for a text that is too long for a path.
    require(os.path.isdir(data_dir), "a folder as --data-dir", str(data_dir), "fix the path")
    for pattern in known.patterns():
        paths = sorted(path for path in data_dir.glob(pattern) if path.is_file())
        if paths:
            return file_rows(paths, known.columns)
    raise ValueError(
        f"expected the rows of {known.name} in {data_dir}, got none of {listed(known.patterns())}; "
        f"run `dflash-hf bench prepare {known.name}` where there is a network, or leave --data-dir out"
    )


def _own(rows: Iterable[Row], dataset: str, template: str | None) -> Iterator[Pair]:
    for row in rows:
        if template is None and not set(CONVERSATION) & set(row.values):
            raise ValueError(
                f"expected turns, messages or prompt in {row.where}, got {listed(row.values) or 'no column'}; "
                "say what to ask: --template '{COLUMN}'"
            )
        # With a template, other columns of the row have their set's meaning, so they are not read as our fields.
        asked = row if template is None else replace(row, values={"turns": [filled(template, row)]})
        yield _pair(row, dataset, normalised(asked))


def store_images(pairs: Sequence[Pair], folder: Path | None) -> list[Question]:
    """Returns questions with the paths of their images. Images that are bytes are written to files in a folder.

    Args:
        pairs (sequence): Questions with the sources of their images.
        folder (`Path`, *optional*): The folder, which is made only if needed; by default one in the Hub's cache.

    Raises:
        ValueError: If an image cannot be read. Nothing is written then.
    """
    if folder is None:
        from huggingface_hub.constants import HF_HOME

        folder = Path(HF_HOME) / "dflash-hf" / "images"
    for question, sources in pairs:
        for source in sources:
            _check(source, question)
    questions: list[Question] = []
    for question, sources in pairs:
        files = [
            source if isinstance(source, Path) else store_image(source, folder.resolve())
            for source in sources
        ]
        questions.append(replace(question, images=tuple(map(str, files))))
    return questions


def _check(source: ImageSource, question: Question) -> None:
    try:
        if isinstance(source, Path):
            read_image(source)
        else:
            read_image(Path(content_name(source)), source)
    except ImageError as error:
        raise ValueError(
            f"expected an image that can be read in question {question.question_id!r} of {question.dataset}, got one "
            f"that cannot ({error}); fetch the set again, or leave the question out"
        ) from error
