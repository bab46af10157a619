"""Rows are made part by part and in several processes: the same file, nothing made twice, nothing lost on the way."""

import json
import os
import random
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from transformers import AutoProcessor

from dflash_hf.data import sources
from dflash_hf.training import load_rows
from dflash_hf.training import prepare as module
from dflash_hf.training.prepare import PrepareSettings, prepare, split_rows
from helpers.processors import published_folder
from helpers.templates import FAMILIES

NUM_ROWS = 24


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return FAMILIES["smollm2"].tokenizer()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rows that are made, in one process."""
    numbers: list[int] = []
    real = module.prepare_row

    def seen(values: Any, number: int, rank: int | None, **options: Any) -> dict[str, Any]:
        numbers.append(number)
        return real(values, number, rank, **options)

    monkeypatch.setattr(module, "prepare_row", seen)
    return numbers


def lines(num_rows: int = NUM_ROWS) -> list[str]:
    """Rows of two forms, of which one has an empty answer and the last is there twice."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"q{at}", "completion": "a" * (20 * at)} for at in range(num_rows)
    ]
    question = {"role": "user", "content": "only a question"}
    rows[1] = {"messages": [question], "more": {"a": [1, "b"]}}
    rows[-1] = rows[-2]
    return [json.dumps(row) for row in rows]


def write(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, prompt: str) -> Path:
    datasets.Dataset.from_dict({"prompt": [prompt]}).to_parquet(str(path))
    return path


def asked(folder: Path, source: Path, **options: Any) -> PrepareSettings:
    return PrepareSettings(datasets=[str(source)], output=folder / "out.jsonl", **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def largest_file(size: int) -> Generator[None]:
    """Has a write behind that many bytes of a file fail, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_several_processes_write_what_one_does(
    tmp_path: Path, smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", lines())
    written: list[bytes] = []
    reports: list[Any] = []
    environment = os.environ
    before = dict(environment)
    for num_processes, part_rows in ((1, NUM_ROWS), (1, 7), (3, 16)):
        monkeypatch.setattr(sources, "PART_ROWS", part_rows)
        monkeypatch.setattr(sources, "ROWS_PER_PROCESS", 1)
        monkeypatch.setattr(sources, "num_cores", lambda n=num_processes: n)
        folder = tmp_path / f"{num_processes}-{part_rows}"
        reports.append(prepare(asked(folder, source, max_length=256), smollm2))
        written.append((folder / "out.jsonl").read_bytes())
        assert names(folder) == ["out.jsonl", "out.meta.json"]
    streamed = asked(tmp_path / "streamed", source, max_length=256, streaming=True)
    reports.append(prepare(streamed, smollm2))
    written.append(streamed.output.read_bytes())
    assert len(set(written)) == 1
    assert all(report == reports[0] for report in reports)
    assert reports[0].left_out == {
        "an empty answer": (1, f"line 1 of {source}"),
        "a duplicate": (1, f"line 24 of {source}"),
    }
    assert reports[0].num_kept == NUM_ROWS - 2 == len(written[0].splitlines())
    assert reports[0].num_cut > 0
    # Whoever holds the environment sees what is changed in it later.
    assert os.environ is environment
    assert dict(environment) == before


@pytest.mark.usefixtures("small_parts")
def test_a_broken_line_keeps_the_parts_before_it(
    tmp_path: Path, smollm2: Any, made: list[int]
) -> None:
    rows = lines()
    source = write(tmp_path / "in.jsonl", [*rows[:18], '{"prompt": "q', *rows[19:]])
    settings = asked(tmp_path / "out", source)
    with pytest.raises(ValueError, match=rf"^expected JSON in line 19 of {source}, got something"):
        prepare(settings, smollm2)
    assert names(tmp_path / "out") == ["out.parts"]
    assert len(names(tmp_path / "out" / "out.parts")) == 2
    write(source, rows)
    made.clear()
    report = prepare(settings, smollm2)
    assert made == list(range(16, NUM_ROWS)), "the parts before it were made again"
    assert report.num_rows == NUM_ROWS
    assert names(tmp_path / "out") == ["out.jsonl", "out.meta.json"]
    whole = asked(tmp_path / "whole", source)
    assert prepare(whole, smollm2) == report
    assert whole.output.read_bytes() == settings.output.read_bytes()


@pytest.mark.usefixtures("small_parts")
def test_a_bad_row_may_be_skipped_then_and_parts_stay(
    tmp_path: Path, smollm2: Any, made: list[int]
) -> None:
    rows = lines()
    source = write(tmp_path / "in.jsonl", [*rows[:10], '{"text": "q"}', *rows[11:]])
    with pytest.raises(
        ValueError, match=rf"in line 11 of {source}, got text; .* with --skip-bad-rows"
    ):
        prepare(asked(tmp_path, source), smollm2)
    made.clear()
    report = prepare(asked(tmp_path, source, skip_bad_rows=True), smollm2)
    assert made == list(range(8, NUM_ROWS))
    assert report.left_out["malformed"][0] == 1
    # Other settings make other rows.
    (tmp_path / "out.jsonl").unlink()
    made.clear()
    prepare(asked(tmp_path, source, skip_bad_rows=True, turns="none"), smollm2)
    assert made == list(range(NUM_ROWS))


def test_a_killed_run_goes_on_with_the_next_part(
    tmp_path: Path, smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 8)
    source = write(tmp_path / "in.jsonl", lines())
    real = module.prepare_row
    numbers: list[int] = []

    def killed(values: Any, number: int, rank: int | None, **options: Any) -> dict[str, Any]:
        numbers.append(number)
        if len(numbers) == 13:
            raise KeyboardInterrupt
        return real(values, number, rank, **options)

    monkeypatch.setattr(module, "prepare_row", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(asked(tmp_path / "out", source), smollm2)
    report = prepare(asked(tmp_path / "out", source), smollm2)
    assert numbers[13:] == list(range(8, NUM_ROWS))
    assert report == prepare(asked(tmp_path / "other", source), smollm2)


@pytest.mark.usefixtures("small_parts")
def test_a_full_disk_is_a_sentence_and_the_run_goes_on(
    tmp_path: Path, smollm2: Any, made: list[int]
) -> None:
    source = write(tmp_path / "in.jsonl", lines())
    list(load_rows(str(source)))  # what `datasets` keeps of it is there
    settings = asked(tmp_path / "out", source)
    parts = settings.output.with_suffix(".parts")
    sentence = rf"^expected to write to {parts}, got File too large; make room and run it again"
    with largest_file(256), pytest.raises(ValueError, match=sentence):
        prepare(settings, smollm2)
    whole = asked(tmp_path / "whole", source)
    prepare(whole, smollm2)
    with (
        largest_file(whole.output.stat().st_size - 1),
        pytest.raises(ValueError, match=r"^expected to write .*out\.jsonl"),
    ):
        prepare(settings, smollm2)
    assert names(tmp_path / "out") == ["out.meta.json", "out.parts"]
    made.clear()
    assert prepare(settings, smollm2) == prepare(whole, smollm2)
    assert made == []
    assert settings.output.read_bytes() == whole.output.read_bytes()


def test_a_full_disk_of_the_cache_is_a_sentence(tmp_path: Path, smollm2: Any) -> None:
    source = write(tmp_path / "in.jsonl", lines())
    sentence = r"^expected to write to .*datasets.*, got File too large; make room"
    with largest_file(64), pytest.raises(ValueError, match=sentence):
        prepare(asked(tmp_path / "out", source), smollm2)
    assert names(tmp_path / "out") == []


def test_a_full_disk_of_the_cache_is_a_sentence_for_images_in_messages(tmp_path: Path) -> None:
    """`datasets` copies a set whose blocks have images that are not to be decoded."""
    block = {"image": datasets.Image()}
    features = datasets.Features({"messages": [{"content": [block]}]})
    image = Image.effect_noise((240, 160), 99)
    rows = {"messages": [[{"content": [{"image": image}]}]]}
    path = tmp_path / "in.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path))
    options: dict[str, Any] = {"data_files": [str(path)], "split": "train"}
    datasets.load_dataset("parquet", **options)  # the first copy is there
    sentence = r"^expected to write to .*datasets.*, got File too large; make room"
    with largest_file(20_000), pytest.raises(ValueError, match=sentence):
        sources.open_source(str(path))
    (row,) = sources.open_source(str(path)).rows()
    assert row.values["messages"][0]["content"][0]["image"]["bytes"]


DAMAGED = {
    "snappy": r"^expected to read {path} with datasets, got OSError \(Corrupt snappy",
    "zstd": r"^expected to read {path} with datasets, got \w+ \(",
    "none": r"^expected UTF-8 in row 171 of {path}, got other bytes .*; fix the file",
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("codec", DAMAGED)
def test_a_table_that_is_damaged_in_its_middle_is_named(
    tmp_path: Path, smollm2: Any, codec: str, streaming: bool
) -> None:
    path = tmp_path / "in.parquet"
    rng = random.Random(0)
    texts = [f"{number} {rng.random()} {rng.random()}" for number in range(300)]
    table = pyarrow.table({"prompt": texts})
    options = {"row_group_size": 50, "compression": codec, "use_dictionary": False}
    parquet.write_table(table, path, **options)
    content = bytearray(path.read_bytes())
    at = len(content) // 2
    size = 400
    if codec == "none":
        at = content.index(texts[170].encode())
        size = 3
    content[at : at + size] = b"\xff" * size
    path.write_bytes(content)
    settings = asked(tmp_path / "out", path, turns="none", streaming=streaming)
    sentence = DAMAGED[codec]
    if streaming:
        sentence = r"^expected to read {path} with datasets, got \w+ \("
    with pytest.raises(ValueError, match=sentence.format(path=path)):
        prepare(settings, smollm2)
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_full_disk_of_images_makes_no_bad_row(tmp_path: Path, streaming: bool) -> None:
    """A row that has no room for its image is not one to be skipped."""
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    features = {
        "prompt": datasets.Value("string"),
        "completion": datasets.Value("string"),
        "images": [datasets.Image()],
    }
    rows = {
        "prompt": ["q", "p"],
        "completion": ["a", "b"],
        "images": [[], [Image.effect_noise((240, 160), 99)]],
    }
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    table.to_parquet(str(tmp_path / "in.parquet"))
    settings = asked(
        tmp_path / "out", tmp_path / "in.parquet", streaming=streaming, skip_bad_rows=True
    )
    sources.open_source(str(tmp_path / "in.parquet"))  # what `datasets` keeps of it is there
    sentence = r"^expected to write to .*, got File too large; make room and run it again"
    with largest_file(20_000), pytest.raises(ValueError, match=sentence):
        prepare(settings, processor)
    assert not settings.output.exists()
    assert list((tmp_path / "out" / "images").iterdir()) == []
    report = prepare(settings, processor)
    assert (report.num_kept, report.left_out) == (2, {})


def test_a_row_beyond_the_memory_is_no_bad_row(
    tmp_path: Path, smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "conversation_of", full)
    source = write(tmp_path / "in.jsonl", lines())
    with pytest.raises(MemoryError):
        prepare(asked(tmp_path / "out", source, skip_bad_rows=True), smollm2)


def test_a_line_of_other_bytes_is_named(tmp_path: Path, smollm2: Any) -> None:
    source = tmp_path / "in.jsonl"
    rows = [line.encode() for line in lines()]
    rows[20] = b'{"prompt": "\xff"}'
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join(rows))
    for streaming in (False, True):
        settings = asked(tmp_path / "out", source, streaming=streaming)
        with pytest.raises(ValueError, match=rf"^expected UTF-8 in line 21 of {source}, got other"):
            prepare(settings, smollm2)
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join(rows[:20]))
    assert prepare(asked(tmp_path / "out", source), smollm2).num_rows == 20


def test_empty_lines_are_no_rows_and_keep_numbers_right(tmp_path: Path, smollm2: Any) -> None:
    rows = lines()
    source = write(tmp_path / "in.jsonl", ["", *rows[:2], "", *rows[2:4], '{"text": 1}', ""])
    for streaming in (False, True):
        few = asked(tmp_path / f"few-{streaming}", source, num_rows=4, streaming=streaming)
        assert prepare(few, smollm2).num_rows == 4
        with pytest.raises(ValueError, match=rf"in line 7 of {source}, got text"):
            prepare(asked(tmp_path / "all", source, streaming=streaming), smollm2)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl", b""),
        ("in.jsonl", b"\xef\xbb\xbf"),
        ("in.jsonl", b"\n \n"),
        ("in.txt", b""),
        ("in.json", b"[]"),
    ],
)
def test_a_file_without_rows_is_named(
    tmp_path: Path, smollm2: Any, name: str, content: bytes, streaming: bool
) -> None:
    source = tmp_path / name
    source.write_bytes(content)
    settings = asked(tmp_path / "out", source, streaming=streaming)
    with pytest.raises(
        ValueError, match=rf"^expected rows in {source}, got 'no rows'; fix the file"
    ):
        prepare(settings, smollm2)
    assert names(tmp_path / "out") == []


def test_a_local_file_that_is_broken_asks_for_no_network(tmp_path: Path) -> None:
    table = tmp_path / "in.parquet"
    table.write_bytes(b"no table")
    unreadable = tmp_path / "in.jsonl"
    unreadable.symlink_to("/proc/self/mem")  # to read its first bytes fails
    for source in (table, unreadable):
        sentence = rf"^expected to read {source} with .*; fix the file, or"
        with pytest.raises(ValueError, match=sentence):
            list(load_rows(str(source)))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["d[1]", "d?", "d*", "d[!1]", "[d]/d1"])
def test_a_file_is_taken_by_its_very_name(tmp_path: Path, name: str, streaming: bool) -> None:
    """Beside it are files that its name matches where it is read as a pattern."""
    for other in ("d1", "d2", "d/d1"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{other}.jsonl", ['{"prompt": "another file"}'])
        write_parquet(tmp_path / f"{other}.parquet", "another file")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    text = write(tmp_path / f"{name}.jsonl", ['{"prompt": "this file"}'])
    table = write_parquet(tmp_path / f"{name}.parquet", "this file")
    for source in (text, table):
        (row,) = load_rows(str(source), streaming=streaming)
        assert row["messages"][0]["content"] == "this file"
    (question,) = sources.file_rows([table])
    assert question.values["prompt"] == "this file"


def test_rows_are_split_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path / "all.jsonl", [f'"\u2028{at}"' for at in range(23)])
    train = tmp_path / "train.jsonl"
    held_out = tmp_path / "held_out.jsonl"
    assert split_rows(source, train, held_out, 3) == (20, 3)
    assert held_out.read_text(encoding="utf-8").split("\n") == [
        *[f'"\u2028{at}"' for at in (0, 7, 15)],
        "",
    ]
    every = sorted(train.read_bytes().splitlines() + held_out.read_bytes().splitlines())
    assert every == sorted(source.read_bytes().splitlines())
    assert not caplog.messages
    assert split_rows(source, train, held_out, 99) == (19, 4)
    said = "4 of 23 conversations are held out, and not 99 as asked: at most a fifth of them are"
    assert caplog.messages == [said]
    assert split_rows(source, train, held_out, 0) == (23, 0)
    assert held_out.read_bytes() == b""
