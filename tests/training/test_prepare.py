"""Rows of every form become the same conversations, once each, as long as they may be; bad ones are named."""

import base64
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from dflash_hf.data.openai_client import sent_messages
from dflash_hf.data.row_files import RowFile
from dflash_hf.data.sources import full_name
from dflash_hf.training import ChatDataset, Example, load_rows, read_examples
from dflash_hf.training import prepare as module
from dflash_hf.training.conversations import resolved
from dflash_hf.training.example_files import read_meta
from dflash_hf.training.prepare import Prepared, PrepareSettings, prepare
from helpers.processors import picture, published_folder
from helpers.templates import FAMILIES, THOUGHTLESS, byte_tokenizer

CHAT = [
    {"role": "user", "content": "how many?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes, two"},
]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in CHAT
]
QUESTION = CHAT[:1]
SYSTEM = {"role": "system", "content": "s"}


def answers_of(processor: Any, example: Example) -> str:
    """The texts that the loss is on."""
    ids = [
        token for token, marked in zip(example.input_ids, example.loss_mask, strict=True) if marked
    ]
    return processor.tokenizer.decode(ids)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def prepared(
    folder: Path, tokenizer: Any, *rows: object, **options: Any
) -> tuple[list[dict[str, Any]], Prepared]:
    """What becomes of some rows of a file."""
    source = write(folder / "in.jsonl", *rows)
    output = folder / "out.jsonl"
    output.unlink(missing_ok=True)
    report = prepare(PrepareSettings(datasets=[str(source)], output=output, **options), tokenizer)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()], report


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return FAMILIES["smollm2"].tokenizer()


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": CHAT}, CHAT),
        ({"messages": [{**turn, "tool_calls": None, "name": None} for turn in CHAT]}, CHAT),
        ({"conversations": SHAREGPT}, CHAT),
        ({"conversations": [{"from": "gpt", "value": "hello"}, *SHAREGPT]}, CHAT),
        (
            {"conversations": [{"from": "system", "value": "s"}, *SHAREGPT]},
            [{"role": "system", "content": "s"}, *CHAT],
        ),
        ({"conversation": CHAT, "messages": None}, CHAT),
        ({"prompt": "how many?", "completion": "two"}, CHAT[:2]),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, CHAT),
        ({"prompt": CHAT[:3], "completion": "yes, two"}, CHAT),
        ({"prompt": "how many?"}, QUESTION),
        ({"turns": ["how many?"]}, QUESTION),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "how many?"}]}]},
            QUESTION,
        ),
    ],
)
def test_every_form_becomes_one(tmp_path: Path, row: dict[str, Any], messages: list[Any]) -> None:
    (found,) = load_rows(str(write(tmp_path / "a.jsonl", row)))
    assert found["messages"] == messages
    (again,) = load_rows(str(write(tmp_path / "b.jsonl", {"messages": messages})))
    assert found == again, "the id is of the contents"


def test_several_texts_of_a_turn_stay_blocks(tmp_path: Path, smollm2: Any) -> None:
    """A processor's template writes them itself; for a tokenizer they are lines, as in a request to a server."""
    blocks = [{"type": "text", "text": text} for text in ("how", "many?")]
    messages = [{"role": "user", "content": blocks}, CHAT[1]]
    (row,) = load_rows(str(write(tmp_path / "a.jsonl", {"messages": messages})))
    assert row["messages"] == messages
    examples = [
        {"messages": messages},
        {"messages": [{"role": "user", "content": "how\nmany?"}, CHAT[1]]},
    ]
    first, second = ChatDataset(examples, smollm2)
    assert first.input_ids == second.input_ids


def test_a_template_takes_any_columns_and_text_files_are_prompts(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"question": "1 + 1", "answer": "2"})
    (found,) = load_rows(str(rows), template="{question} = ?\nThink.")
    assert found["messages"] == [{"role": "user", "content": "1 + 1 = ?\nThink."}]
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    assert [row["messages"][0]["content"] for row in load_rows(str(tmp_path / "b.txt"))] == [
        "one",
        "two",
    ]
    (tmp_path / "c.json").write_text(json.dumps([{"prompt": "one"}, {"prompt": "two"}]))
    assert list(load_rows(str(tmp_path / "c.json"))) == list(load_rows(str(tmp_path / "b.txt")))
    assert len(list(load_rows(str(tmp_path / "c.json"), num_rows=1))) == 1


def test_parquet_and_sets_of_the_hub_are_streamed(tmp_path: Path) -> None:
    """A folder stands for a set of the Hub: `datasets` loads both."""
    folder = tmp_path / "set"
    folder.mkdir()
    table = datasets.Dataset.from_dict({"messages": [CHAT[:2], CHAT]})
    table.to_parquet(str(folder / "train.parquet"))
    expected = list(
        load_rows(str(write(tmp_path / "a.jsonl", {"messages": CHAT[:2]}, {"messages": CHAT})))
    )
    assert list(load_rows(str(folder / "train.parquet"))) == expected
    for streaming in (False, True):
        assert list(load_rows(str(folder), streaming=streaming)) == expected
        assert list(load_rows(f"{folder}::train", streaming=streaming, num_rows=1)) == expected[:1]
    with pytest.raises(
        ValueError, match=r"expected a file \(.*\) or a set as ORG/NAME:CONFIG:SPLIT, got 'nothing'"
    ):
        list(load_rows("nothing"))


def test_links_of_the_hubs_cache_are_read(tmp_path: Path) -> None:
    """Files stand there as links to others of other names; images are looked for beside the link."""
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshot"
    for folder in (blobs, snapshot):
        folder.mkdir()
    row = {"messages": QUESTION, "images": ["a.png"]}
    write(blobs / "12ab", row)
    Image.new("RGB", (8, 8)).save(blobs / "34cd", format="png")
    (snapshot / "a.png").symlink_to(blobs / "34cd")
    (snapshot / "rows.jsonl").symlink_to(blobs / "12ab")
    name = full_name(str(snapshot / "rows.jsonl"))
    (found,) = load_rows(name)
    assert found["messages"] == QUESTION
    assert found["images"] == [str(snapshot / "a.png")]


def test_only_what_templates_read_stays_of_a_turn(tmp_path: Path, smollm2: Any) -> None:
    """A set's own notes on a turn would make two of one conversation, and may be no JSON."""
    when = datetime(2026, 7, 31)
    noted = [{**turn, "timestamp": when, "turn_identifier": at} for at, turn in enumerate(CHAT)]
    again = [{**turn, "timestamp": when, "turn_identifier": 9} for turn in CHAT]
    source = tmp_path / "in.parquet"
    datasets.Dataset.from_dict({"conversation": [noted, again]}).to_parquet(str(source))
    settings = PrepareSettings(datasets=[str(source)], output=tmp_path / "out.jsonl")
    report = prepare(settings, smollm2)
    assert report.left_out["a duplicate"] == (1, f"row 2 of {source}")
    assert [row["messages"] for row in load_rows(str(source))] == [CHAT, CHAT]
    read = {"role": "tool", "content": "2", "tool_call_id": "a", "name": "f"}
    thought = {"role": "assistant", "content": "two", "reasoning_content": "t", "reasoning": "t"}
    thought["thinking"] = "t"
    # Of Phi-4-mini, Kimi K3 and DeepSeek V3.1
    instructed = {**SYSTEM, "tools": json.dumps(TOOLS)}
    messages = [instructed, CHAT[0], {**read, "tool": "f"}, {**thought, "prefix": True}]
    (row,) = load_rows(str(write(tmp_path / "a.jsonl", {"messages": messages})))
    assert row["messages"] == messages


def tool_of(name: str, **properties: Any) -> dict[str, Any]:
    """A tool as a template takes it."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CALLS = "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
TOOLS = [tool_of("add", a={"type": "integer"}), tool_of("find", word={"type": "string"})]


def called(**arguments: Any) -> list[dict[str, Any]]:
    """A question, a call with these arguments and the answer."""
    function = {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    return [CHAT[0], call, {"role": "tool", "content": "2"}, CHAT[3]]


def test_calls_of_tables_have_no_filling(tmp_path: Path) -> None:
    """All rows of a table have the same names: what another row's call or tool has is none of a row's."""
    calls = [called(a=1), called(word="x")]
    rows = [{"messages": c, "tools": [t]} for c, t in zip(calls, TOOLS, strict=True)]
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))
    for source in (folder, folder / "train.parquet"):
        found = list(load_rows(str(source)))
        assert [row["messages"] for row in found] == calls
        assert [row["chat_template_kwargs"]["tools"] for row in found] == [[t] for t in TOOLS]
    tokenizer = byte_tokenizer(CALLS, ("<e>",), "<e>")
    prompts = ChatDataset(datasets.Dataset.from_list(rows), tokenizer, answers=[[], []])  # type: ignore[arg-type]
    written = [tokenizer.decode(prompt.input_ids) for prompt in prompts]
    assert written == ['{"a": 1}', '{"word": "x"}']
    # In JSON it was written down
    source = write(tmp_path / "a.jsonl", {"messages": called(a=None)})
    (row,) = load_rows(str(source))
    assert row["messages"] == called(a=None)


def test_calls_in_texts_of_json_are_objects(tmp_path: Path) -> None:
    """As OpenAI's interface has them; a template would write them between quotes."""
    messages = called(a=1)
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    row: dict[str, Any] = {"messages": messages, "tools": json.dumps(TOOLS)}
    (found,) = load_rows(str(write(tmp_path / "a.jsonl", row)))
    assert found["messages"] == called(a=1)
    assert found["chat_template_kwargs"]["tools"] == TOOLS
    template = (
        "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template, ("<e>",), "<e>")
    (prompt,) = ChatDataset([row], tokenizer, answers=[[]])
    assert tokenizer.decode(prompt.input_ids) == '{"a": 1}'
    (sent,) = sent_messages(called(a=1)[1:2])
    assert sent["tool_calls"] == messages[1]["tool_calls"]
    flat = {**messages[1], "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    (sent,) = sent_messages([flat])
    assert sent["tool_calls"] == [{"name": "f", "arguments": '{"a": 1}'}]
    messages[1]["tool_calls"][0]["function"]["arguments"] = ""
    (found,) = load_rows(str(write(tmp_path / "a.jsonl", row)))
    assert found["messages"] == called()
    for text in ("a = 1", "[1]"):
        messages[1]["tool_calls"][0]["function"]["arguments"] = text
        with pytest.raises(ValueError, match=r"arguments of a call.*line 1 of .*a\.jsonl"):
            list(load_rows(str(write(tmp_path / "a.jsonl", row))))


def test_what_is_written_is_what_is_read(tmp_path: Path, smollm2: Any) -> None:
    rows, report = prepared(
        tmp_path, smollm2, {"messages": CHAT}, {"prompt": "q", "completion": "a"}, {"prompt": "p"}
    )
    assert [row["sequences"] for row in rows] == [
        [{"turns": [1, 3], "num_tokens": len(Example.from_messages(smollm2, CHAT).input_ids)}],
        [{"turns": [1], "num_tokens": rows[1]["sequences"][0]["num_tokens"]}],
        [],
    ]
    assert (report.num_rows, report.num_kept, report.num_sequences, report.left_out) == (
        3,
        3,
        2,
        {},
    )
    examples: Any = read_examples(tmp_path / "out.jsonl", smollm2)
    assert examples[:] == [Example.from_messages(smollm2, row["messages"]) for row in rows[:2]]
    assert list(examples.lengths) == [len(example.input_ids) for example in examples]
    assert report.num_tokens == sum(examples.lengths)


def test_a_template_that_rewrites_turns_gives_each_its_sequence(tmp_path: Path) -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    (row,), report = prepared(tmp_path, tokenizer, {"messages": CHAT})
    assert [sequence["turns"] for sequence in row["sequences"]] == [[1], [3]]
    examples: Any = read_examples(tmp_path / "out.jsonl", tokenizer)
    assert examples[:] == [Example.from_messages(tokenizer, CHAT, turns=[turn]) for turn in (1, 3)]
    assert list(examples.lengths) == [len(example.input_ids) for example in examples]
    assert report.num_sequences == 2
    (row,), _ = prepared(tmp_path, tokenizer, {"messages": CHAT}, turns="last")
    assert [sequence["turns"] for sequence in row["sequences"]] == [[3]]
    options = {"enable_thinking": False}
    (row,), _ = prepared(tmp_path, tokenizer, {"messages": CHAT[:2]}, chat_template_kwargs=options)
    assert row["chat_template_kwargs"] == options
    (example,) = read_examples(tmp_path / "out.jsonl", tokenizer)
    assert example == Example.from_messages(tokenizer, CHAT[:2], chat_template_kwargs=options)
    assert tokenizer.decode(example.input_ids).endswith("</think>\n\ntwo<|im_end|>\n")


def weighted(*weights: Any) -> list[dict[str, Any]]:
    """The chat with a weight of each answer."""
    return [CHAT[0], {**CHAT[1], "weight": weights[0]}, CHAT[2], {**CHAT[3], "weight": weights[1]}]


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
@pytest.mark.parametrize("from_sharegpt", [False, True])
def test_answers_of_weight_0_are_not_trained_on(
    tmp_path: Path, name: str, from_sharegpt: bool
) -> None:
    tokenizer = FAMILIES[name].tokenizer()

    def turns_of(*weights: Any, **options: Any) -> list[list[int]]:
        row = {"messages": weighted(*weights)}
        if from_sharegpt:
            said = zip(SHAREGPT, row["messages"], strict=True)
            # Such sets give weights to what the user says too.
            row = {"conversations": [old | {"weight": new.get("weight", 0)} for old, new in said]}
        rows, report = prepared(tmp_path, tokenizer, row, {"messages": CHAT[:2]}, **options)
        assert all("weight" not in turn for row in rows for turn in row["messages"])
        examples: Any = read_examples(tmp_path / "out.jsonl", tokenizer)
        assert len(examples) == report.num_sequences
        return [sequence["turns"] for sequence in rows[0]["sequences"]]

    assert turns_of(0, 1.0) == [[3]]
    assert turns_of(0.0, None) == [[3]]
    assert turns_of(1, 0) == [[1]]
    assert turns_of(1, 0.5) in ([[1, 3]], [[1], [3]])
    assert turns_of(0, 1, turns="last") == [[3]]
    for turns in ("all", "last"):
        row = {"messages": weighted(0, 0)}
        _, report = prepared(tmp_path, tokenizer, row, {"messages": CHAT[:2]}, turns=turns)
        assert report.left_out == {
            "no answer to train on and no question at its end": (
                1,
                f"line 1 of {tmp_path / 'in.jsonl'}",
            )
        }


def test_a_prompt_has_no_weights(tmp_path: Path, smollm2: Any) -> None:
    rows = [{"messages": weighted(0, 0)}, {"messages": CHAT}]
    (row,), report = prepared(tmp_path, smollm2, *rows, turns="none")
    assert row["messages"] == CHAT[:3]
    assert list(report.left_out) == ["a duplicate"]


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_a_prepared_file_that_is_prepared_again_trains_on_the_same_answers(
    tmp_path: Path, name: str
) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    asked = {"messages": [*weighted(0, 0), CHAT[0]]}
    chats = [{"messages": weighted(*weights)} for weights in [(0, 1), (1, 0), (1, 1)]]
    once, _ = prepared(tmp_path, tokenizer, *chats, asked)
    again, _ = prepared(tmp_path, tokenizer, *once)
    assert again == once
    # A set of other data may have a column of this name.
    (row,), _ = prepared(tmp_path, tokenizer, {"messages": CHAT, "sequences": ["MKV"]})
    assert [at for sequence in row["sequences"] for at in sequence["turns"]] == [1, 3]


def test_a_weight_that_decides_nothing_hides_no_duplicate(tmp_path: Path, smollm2: Any) -> None:
    of_user = [{**CHAT[0], "weight": 0}, *CHAT[1:]]
    for same in (weighted(1, 0.5), of_user):
        _, report = prepared(tmp_path, smollm2, {"messages": CHAT}, {"messages": same})
        assert list(report.left_out) == ["a duplicate"]
    # Of the last answers alone, those before them decide nothing either.
    rows = [{"messages": weighted(0, 1)}, {"messages": CHAT}]
    _, report = prepared(tmp_path, smollm2, *rows, turns="last")
    assert list(report.left_out) == ["a duplicate"]
    # What is left out is no duplicate of what counts.
    rows = [{"messages": weighted(1, 0)}, {"messages": CHAT}]
    (row,), report = prepared(tmp_path, smollm2, *rows, turns="last")
    assert row["messages"] == CHAT
    assert list(report.left_out) == ["no answer to train on and no question at its end"]


def test_an_answer_without_marks_beside_one_of_weight_0_says_what_is_wrong() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template, ("<|end|>",), "<|end|>")
    rows = [{"messages": [*weighted(0, 1), {"role": "assistant", "content": ""}]}]
    sentence = "as many marks as answers .3. where some of them do not count, got 2; .*weight"
    with pytest.raises(ValueError, match=sentence):
        ChatDataset(rows, tokenizer)[0]


def test_examples_of_rows_leave_answers_of_weight_0_out(smollm2: Any) -> None:
    dataset = ChatDataset([{"messages": weighted(0, 1)}, {"messages": weighted(1, 0)}], smollm2)
    assert dataset[:] == [Example.from_messages(smollm2, CHAT, turns=[at]) for at in (3, 1)]
    assert list(dataset.lengths) == [len(example.input_ids) for example in dataset]
    with pytest.raises(ValueError, match=r"expected turns of the assistant's, got \[\]; .*row 0"):
        ChatDataset([{"messages": weighted(0, 0)}], smollm2)[0]


def test_an_example_is_told_with_its_line(tmp_path: Path, smollm2: Any) -> None:
    prepared(tmp_path, smollm2, {"messages": QUESTION}, {"messages": CHAT}, turns="all")
    examples: Any = read_examples(tmp_path / "out.jsonl", smollm2)
    assert examples.places_of([0]) == f"lines 2 of {tmp_path / 'out.jsonl'}"


def test_rows_that_have_to_have_an_answer_are_left_out_without_one(
    tmp_path: Path, smollm2: Any
) -> None:
    asked = {"messages": CHAT[:3]}
    rows = [{"messages": CHAT}, asked, {"messages": QUESTION}, {"messages": weighted(0, 0)}]
    for turns, kept, left_out in (("last", [CHAT], 3), ("all", [CHAT, CHAT[:3]], 2)):
        found, report = prepared(tmp_path, smollm2, *rows, turns=turns, needs_answers=True)
        assert [row["messages"] for row in found] == kept
        assert all(row["sequences"] for row in found)
        assert report.num_kept == len(kept)
        first = f"line {5 - left_out} of {tmp_path / 'in.jsonl'}"
        assert report.left_out == {"no answer to train on": (left_out, first)}
    with pytest.raises(ValueError, match=r"expected turns all or last with needs_answers, got 'n"):
        prepared(tmp_path, smollm2, *rows, turns="none", needs_answers=True)
    with pytest.raises(ValueError, match=r"expected rows to train on in .* no answer to train on"):
        prepared(tmp_path, smollm2, asked, needs_answers=True, turns="last")


def test_prompts_beside_answers_are_told(
    tmp_path: Path, smollm2: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(tmp_path, smollm2, {"messages": QUESTION}, {"messages": CHAT})
    with caplog.at_level(logging.WARNING):
        assert len(read_examples(tmp_path / "out.jsonl", smollm2)) == 1
    assert "1 of 2 rows of" in caplog.text
    assert "have no answer to train on" in caplog.text


def test_prompts_alone_for_the_targets_own_answers(tmp_path: Path) -> None:
    """No answer has to be found then, so that any template will do."""
    tokenizer = byte_tokenizer(THOUGHTLESS, ("<|User|>", "<|Assistant|>", "<e>"), "<e>")
    with pytest.raises(
        ValueError,
        match=r"its own generation prompt.* \(line 1 of .*in\.jsonl\), or leave .* --skip-bad-rows",
    ):
        prepared(tmp_path, tokenizer, {"messages": CHAT})
    (row,), _ = prepared(tmp_path, tokenizer, {"messages": CHAT}, turns="none")
    assert (row["messages"], row["sequences"]) == (CHAT[:3], [])
    with pytest.raises(
        ValueError, match=r"expected answers to train on in .*, got '1 prompts without one'; let"
    ):
        read_examples(tmp_path / "out.jsonl", tokenizer)


def test_long_rows_are_cut_or_left_out_and_counted(
    tmp_path: Path, smollm2: Any, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "q", "completion": "a" * 100_000}
    far = {"prompt": "q" * 100_000, "completion": "a"}
    short = {"prompt": "q", "completion": "a"}
    only = {"prompt": "p" * 100_000}
    rows, report = prepared(tmp_path, smollm2, long, far, short, only, max_length=256)
    assert [row["messages"][0]["content"] for row in rows] == ["q", "q"]
    source = tmp_path / "in.jsonl"
    assert report.left_out == {
        "a prompt longer than the greatest length": (2, f"line 2 of {source}")
    }
    assert (report.num_cut, report.num_sequences) == (1, 2)
    assert report.sentences()[1:] == [
        "1 sequences are longer than the greatest length and will be cut",
        f"2 left out: a prompt longer than the greatest length (first: line 2 of {source})",
    ]
    examples: Any = read_examples(tmp_path / "out.jsonl", smollm2, max_length=256)
    whole = Example.from_messages(smollm2, rows[0]["messages"])
    assert examples[0] == Example(input_ids=whole.input_ids[:256], loss_mask=whole.loss_mask[:256])
    assert (list(examples.lengths), report.num_tokens) == (
        [256, len(examples[1].input_ids)],
        sum(examples.lengths),
    )
    # A file of somebody else's, read at a length that it was not made for.
    bare = write(
        tmp_path / "bare.jsonl",
        *({"messages": row["messages"]} for row in rows),
        {"messages": CHAT},
    )
    assert len(read_examples(bare, smollm2)) == 3
    with caplog.at_level(logging.WARNING):
        kept: Any = read_examples(bare, smollm2, max_length=100)
    prompt = len(examples[1].input_ids) - 2  # answer, end token, end of line
    assert [example.loss_mask.index(1) for example in kept] == [
        prompt - 1 + 1 - 1,
        prompt - 1,
        kept[2].prompt_length(),
    ]
    assert [len(example.input_ids) for example in kept] == list(kept.lengths)
    with pytest.raises(
        ValueError, match=r"expected answers to train on in .*, got 'none'; take other data"
    ):
        read_examples(bare, smollm2, max_length=20)
    assert f"3 of 3 sequences of {bare} are left out: at 20 tokens" in caplog.text


def test_duplicates_and_empty_answers_are_left_out(tmp_path: Path, smollm2: Any) -> None:
    rows, report = prepared(
        tmp_path,
        smollm2,
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"prompt": "q", "completion": ""},
        {"prompt": "q", "completion": "other"},
        {"prompt": "q", "completion": "other", "more": 1},
    )
    assert [row["messages"][-1]["content"] for row in rows] == ["yes, two", "other"]
    where = f"of {tmp_path / 'in.jsonl'}"
    assert report.left_out == {
        "a duplicate": (2, f"line 2 {where}"),
        "an empty answer": (1, f"line 3 {where}"),
    }


def test_a_prompt_with_several_answers_is_one_prompt(tmp_path: Path, smollm2: Any) -> None:
    """Without it, the target's one answer would be among the held-out ones and be trained on, too."""
    given = [{"prompt": f"q{n % 2}", "completion": f"a{n}"} for n in range(8)]
    rows, report = prepared(tmp_path, smollm2, *given, {"prompt": "q1"}, turns="none")
    assert [row["messages"][0]["content"] for row in rows] == ["q0", "q1"]
    assert report.left_out == {"a duplicate": (7, f"line 3 of {tmp_path / 'in.jsonl'}")}
    alone, _ = prepared(tmp_path, smollm2, {"prompt": "q1"}, turns="none")
    assert alone[0]["id"] == rows[1]["id"]


BAD: list[tuple[Any, str]] = [
    (
        {"text": "q"},
        "expected messages, conversations, conversation, turns or prompt in {where}, got text; say what",
    ),
    ({"messages": []}, "expected messages, a list of turns, in {where}, got []"),
    ({"messages": "q"}, "expected messages, a list of turns, in {where}, got 'q'"),
    ({"messages": ["q"]}, "expected a role and a content in turn 0 of {where}, got 'q'"),
    (
        {"messages": [{"role": "poet", "content": "q"}]},
        "expected a role in turn 0 of {where}, got 'poet' (known are",
    ),
    (
        {"messages": [{"role": ["user"], "content": "q"}]},
        "expected a role in turn 0 of {where}, got ['user'] (known",
    ),
    (
        {"conversations": [{"value": "q"}]},
        "expected a role in turn 0 of {where}, got None (known are",
    ),
    (
        {"messages": [{"role": "user"}]},
        "expected a text or a list of blocks as content in turn 0 of",
    ),
    (
        {"messages": [{"role": "user", "content": 3}]},
        "expected a text or a list of blocks as content in turn 0 of",
    ),
    ({"messages": CHAT[1:2]}, "expected a turn of the user's in {where}, got ['assistant']"),
    (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "expected blocks of type text, image or video in",
    ),
    (
        {"prompt": "\ud800"},
        "expected a text of whole characters as content in turn 0 of {where}, got",
    ),
    (
        {"prompt": "q", "image": "none.png"},
        "expected an image file in {where}, got 'none.png'; fix the path",
    ),
    (
        {"prompt": "q", "images": [3]},
        "expected the bytes or the path of an image in {where}, got 3",
    ),
    ([1], "expected a JSON object in {where}, got [1]"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_bad_rows_are_named_and_nothing_is_written(
    tmp_path: Path, smollm2: Any, row: Any, reason: str
) -> None:
    where = f"line 2 of {tmp_path / 'in.jsonl'}"
    told = refusal(lambda: prepared(tmp_path, smollm2, {"messages": CHAT}, row))
    assert told is not None
    assert told.startswith(reason.format(where=where))
    assert where in told
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl"]
    if isinstance(row, dict):
        rows, report = prepared(
            tmp_path, smollm2, {"messages": CHAT}, row, {"prompt": "p"}, skip_bad_rows=True
        )
        assert [found["messages"] for found in rows] == [CHAT, [{"role": "user", "content": "p"}]]
        ((count, told),) = report.left_out.values()
        assert (count, where in told) == (1, True)


def test_what_a_template_refuses_is_named(tmp_path: Path) -> None:
    gemma = FAMILIES["gemma"].tokenizer()
    row = {"messages": [{"role": "system", "content": "s"}, *CHAT]}
    with pytest.raises(
        ValueError,
        match=r"^expected a conversation that the chat template takes in line 1 of .*, got S",
    ):
        prepared(tmp_path, gemma, row)
    gemma.chat_template = (
        "{% for m in messages[-2:] %}<start_of_turn>{{ m.content }}<end_of_turn>{% endfor %}"
    )
    with pytest.raises(
        ValueError,
        match=r"^expected a chat template that writes every turn, .* turn 0 .* \(line 1 ",
    ):
        prepared(tmp_path, gemma, {"messages": CHAT})


def test_truncated_files_are_refused_by_their_line(tmp_path: Path, smollm2: Any) -> None:
    source = write(tmp_path / "in.jsonl", {"messages": CHAT}, {"messages": CHAT[:2]})
    source.write_bytes(source.read_bytes()[:-9])
    asked = PrepareSettings(
        datasets=[str(source)], output=tmp_path / "out.jsonl", skip_bad_rows=True
    )
    with pytest.raises(
        ValueError, match=rf"^expected JSON in line 2 of {source}, got something else"
    ):
        prepare(asked, smollm2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl"]


def test_what_is_there_is_not_made_again(
    tmp_path: Path, smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", {"messages": CHAT}, {"messages": CHAT})
    asked = PrepareSettings(datasets=[str(source)], output=tmp_path / "out.jsonl")
    report = prepare(asked, smollm2)
    made = asked.output.stat().st_mtime_ns
    assert prepare(asked, smollm2) == report
    assert asked.output.stat().st_mtime_ns == made
    other = PrepareSettings(datasets=[str(source)], output=tmp_path / "out.jsonl", turns="last")
    for changed, tokenizer in ((other, smollm2), (asked, FAMILIES["gemma"].tokenizer())):
        with pytest.raises(
            ValueError,
            match=r"expected .*out\.jsonl as these settings make it, or no such file, got",
        ):
            prepare(changed, tokenizer)
    text = source.read_bytes()
    source.write_bytes(text.replace(b"two", b"six"))
    with pytest.raises(ValueError, match=r"expected .*out\.jsonl as these settings make it"):
        prepare(asked, smollm2)
    source.write_bytes(text)
    assert prepare(asked, smollm2) == report
    write(source, {"messages": CHAT})
    with pytest.raises(ValueError, match=r"expected .*out\.jsonl as these settings make it"):
        prepare(asked, smollm2)
    (tmp_path / "out.meta.json").unlink()
    with pytest.raises(
        ValueError, match=r"expected .*out\.meta\.json beside .*out\.jsonl, which says what"
    ):
        read_meta(asked.output)
    # Killed between two rows, by what no code of ours catches.
    asked.output.unlink()

    def killed(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "conversation_of", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(asked, smollm2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl"]
    assert prepare(asked, smollm2).num_kept == 1


@pytest.mark.parametrize("suffix", ["", "::train"])
def test_another_file_in_a_folder_is_another_set(tmp_path: Path, smollm2: Any, suffix: str) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    table = folder / "data" / "train.parquet"
    datasets.Dataset.from_list([{"messages": CHAT}]).to_parquet(str(table))
    asked = PrepareSettings(datasets=[f"{folder}{suffix}"], output=tmp_path / "out.jsonl")
    report = prepare(asked, smollm2)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").touch()
    assert prepare(asked, smollm2) == report, "hidden files have no rows"
    datasets.Dataset.from_list([{"messages": CHAT[:2]}]).to_parquet(str(table))
    with pytest.raises(ValueError, match=r"expected .*out\.jsonl as these settings make it"):
        prepare(asked, smollm2)


def test_rows_with_images(tmp_path: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    for marked in (True, False):
        if not marked:
            for mark in ("{% generation %}", "{% endgeneration %}"):
                processor.chat_template = processor.chat_template.replace(mark, "")
        folder = tmp_path / str(marked)
        folder.mkdir()
        for at, size in enumerate([(24, 16), (64, 48)]):
            picture(*size).save(folder / f"{at}.png")
        image = {"type": "image"}
        said = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}, image]}]
        answer = {"role": "assistant", "content": "a cat"}
        own = [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "1.png"}}]},
            answer,
        ]
        rows = [{"messages": [*said, answer], "images": ["0.png", "1.png"]}, {"messages": own}]
        rows += [
            {"prompt": "what?", "completion": "a cat", "image": "0.png"},
            {"messages": CHAT, "image": None},
        ]
        source = write(folder / "in.jsonl", *rows)
        asked = PrepareSettings(datasets=[str(source)], output=folder / "out" / "out.jsonl")
        prepare(asked, processor)
        examples: Any = read_examples(asked.output, processor)
        pictures = [str(folder / f"{at}.png") for at in (0, 1)]
        assert (
            examples[0].input_ids
            == Example.from_messages(processor, [*said, answer], pictures).input_ids
        )
        assert [len(example.model_inputs.get("image_grid_thw", ())) for example in examples] == [
            2,
            1,
            1,
            0,
        ]
        assert list(examples.lengths) == [len(example.input_ids) for example in examples]
        texts = [answers_of(processor, example) for example in examples]
        assert texts == [*["a cat<|im_end|>"] * 3, "two<|im_end|>yes, two<|im_end|>"]
        least = sorted(examples.lengths)[-2]
        assert list(read_examples(asked.output, processor, max_length=least).lengths) == sorted(
            (n for n in examples.lengths if n <= least), key=list(examples.lengths).index
        )


def test_large_images_are_shrunk(tmp_path: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    for name, size in (("small.png", (24, 16)), ("large.png", (64, 48))):
        picture(*size).save(tmp_path / name)
    embedded = base64.b64encode((tmp_path / "large.png").read_bytes()).decode()
    sources = ("small.png", "large.png", f"data:image/png;base64,{embedded}")
    rows = [{"prompt": "q", "completion": "a", "image": source} for source in sources]
    source = write(tmp_path / "in.jsonl", *rows)
    asked = PrepareSettings(datasets=[str(source)], output=tmp_path / "out" / "out.jsonl")
    limited = replace(asked, max_image_pixels=24 * 16)
    prepare(limited, processor)
    kept = [json.loads(line) for line in limited.output.read_text().splitlines()]
    # The last row is the second one again.
    assert [len(row["images"]) for row in kept] == [1, 1]
    assert kept[0]["images"] == [str((tmp_path / "small.png").resolve())]
    shrunk = Image.open(limited.output.parent / kept[1]["images"][0])
    assert shrunk.size == (22, 16)
    lengths = read_examples(limited.output, processor).lengths
    assert lengths == [row["sequences"][0]["num_tokens"] for row in kept]
    large = {**rows[0], "image": "https://example.org/large.png"}
    source = write(tmp_path / "in.jsonl", large)
    again = replace(limited, output=tmp_path / "again" / "out.jsonl")
    with pytest.raises(ValueError, match="expected images in files or rows, which can be shrunk"):
        prepare(again, processor)


def test_images_in_base64_become_files(tmp_path: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    picture(64, 48).save(tmp_path / "a.png")
    image = (tmp_path / "a.png").read_bytes()

    def row(code: object, text: str) -> dict[str, Any]:
        content = [{"type": "image", "base64": code}, {"type": "text", "text": text}]
        return {"messages": [{"role": "user", "content": content}, CHAT[1]]}

    whole = base64.b64encode(image).decode()
    codes = [whole, base64.encodebytes(image).decode(), f"data:image/png;base64,{whole}"]
    rows = [row(code, str(at)) for at, code in enumerate(codes)]
    kept, _ = prepared(tmp_path, processor, *rows)
    names = {kept_row["messages"][0]["content"][0]["image"] for kept_row in kept}
    assert (len(kept), len(names)) == (3, 1)
    assert (tmp_path / names.pop()).read_bytes() == image
    assert len(read_examples(tmp_path / "out.jsonl", processor)) == 3
    kept, _ = prepared(tmp_path, processor, rows[0], max_image_pixels=24 * 16)
    stored = kept[0]["messages"][0]["content"][0]["image"]
    assert Image.open(tmp_path / stored).size == (22, 16)
    for code in ("a.png", "é", 3):
        with pytest.raises(ValueError, match=r"expected base64 of an image in line 1 of .*; fix"):
            prepared(tmp_path, processor, row(code, "q"))
    with pytest.raises(ValueError, match=r"cannot identify image file.* \(line 1 of "):
        prepared(tmp_path, processor, row("AAAA", "q"))


def test_images_as_bytes_become_files(tmp_path: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    folder = tmp_path / "set"
    folder.mkdir()
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "completion": datasets.Value("string"),
            "images": [datasets.Image()],
        }
    )
    rows = {
        "prompt": ["q", "q", "p"],
        "completion": ["a"] * 3,
        "images": [[picture(24, 16)], [picture(24, 16)], []],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(folder / "train.parquet"))
    output = tmp_path / "out" / "out.jsonl"
    report = prepare(
        PrepareSettings(datasets=[str(folder)], output=output, streaming=True), processor
    )
    assert (report.num_kept, list(report.left_out)) == (2, ["a duplicate"])
    assert len(list((tmp_path / "out" / "images").iterdir())) == 1
    moved = tmp_path / "moved"
    (tmp_path / "out").rename(moved)
    assert "pixel_values" in read_examples(moved / "out.jsonl", processor)[0].model_inputs


def test_images_of_a_folder_of_rows_are_looked_for_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    picture(24, 16).save(folder / "a.png")
    source = write(folder / "train.jsonl", {"prompt": "q", "image": "a.png"})
    expected = list(load_rows(str(source)))
    assert expected[0]["images"] == [str(folder / "a.png")]
    for streaming in (False, True):
        assert list(load_rows(str(folder), streaming=streaming)) == expected


@pytest.mark.parametrize("size", [300, 4092])
def test_a_text_that_is_too_long_for_a_path_is_no_file(tmp_path: Path, size: int) -> None:
    """Python 3.11 raises for it where it looks for a file."""
    address = "data:image/png;base64,".ljust(size, "A")
    content = [{"type": "image", "image": address}]
    row = {"messages": [{"role": "user", "content": content}], "images": [address]}
    assert resolved(row, tmp_path) == row
    source = str(write(tmp_path / "a.jsonl", {"prompt": "q", "image": "a" * size}))
    with pytest.raises(ValueError, match=r"^expected an image file in line 1 of .*; fix the path"):
        list(load_rows(source))
    source = str(write(tmp_path / "a.jsonl", {"prompt": "q", "video": "a" * size}))
    with pytest.raises(ValueError, match=r"^expected a video file in line 1 of .*; fix the path"):
        list(load_rows(source))
    for name in (f"{'a' * size}.jsonl", "a" * size):
        asked = PrepareSettings(datasets=[name], output=tmp_path / "out.jsonl")
        with pytest.raises(ValueError, match=r"^expected a file .*; fix the (path|name)$"):
            prepare(asked, byte_tokenizer(CALLS, ("<e>",), "<e>"))
    with pytest.raises(ValueError, match=r"^expected a JSONL file, got .*; fix the path$"):
        RowFile(tmp_path / ("a" * size))


@pytest.mark.parametrize("score", ["NaN", '"\\ud800"'])
def test_a_column_that_nobody_reads_may_hold_anything(tmp_path: Path, score: str) -> None:
    """Python reads and writes `NaN` and half characters, which Arrow has none of."""
    source = tmp_path / "a.json"
    source.write_text(f'[{{"prompt": "é", "score": {score}}}, {{"prompt": "p", "score": 1}}]')
    assert [row["messages"][0]["content"] for row in load_rows(str(source))] == ["é", "p"]


def test_what_datasets_cannot_open_is_said_as_it_is(tmp_path: Path) -> None:
    for name in ("rows.csv", "rows.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(
            ValueError, match=r"^expected a file \(.jsonl, .*or a set .*fix the name"
        ):
            load_rows(str(tmp_path / name)).__next__()
    datasets.Dataset.from_dict({"prompt": ["q"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"save_to_disk.*; fix the folder, or name another one$"):
        load_rows(str(tmp_path / "saved")).__next__()
    with pytest.raises(ValueError, match=r"expected to read nobody/nothing .*name, or connect$"):
        load_rows("nobody/nothing").__next__()


def test_images_inside_of_messages_stay_bytes(tmp_path: Path) -> None:
    block = {"type": datasets.Value("string"), "image": datasets.Image()}
    turn = {"role": datasets.Value("string"), "content": datasets.List(block)}
    features = datasets.Features({"messages": datasets.List(turn)})
    content = [{"type": "image", "image": picture(24, 16)}]
    rows = {"messages": [[{"role": "user", "content": content}]]}
    source = tmp_path / "a.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(source))
    for streaming in (False, True):
        (row,) = load_rows(str(source), streaming=streaming, images=tmp_path / "images")
        (stored,) = row["messages"][0]["content"]
        assert Image.open(stored["image"]).size == (24, 16)


ROWS = b"".join(
    json.dumps(row).encode() + b"\n"
    for row in (
        {"messages": CHAT, "images": None},
        {"conversations": SHAREGPT},
        {"prompt": "q", "completion": "a"},
        {"id": "x", "messages": CHAT[:2], "sequences": [{"turns": [1], "num_tokens": 9}]},
        {"id": "y", "messages": CHAT[:1], "answer_ids": [1, 2], "finished": True, "num_tokens": 9},
    )
)
PIECES = st.sampled_from(
    [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b"\n",
        b"null",
        b"1e999",
        b"-1",
        b"\xff",
        b"\\ud800",
        b'"role"',
        b"<|im_end|>",
        b"",
    ]
)


def mutated() -> Iterator[Any]:
    """Cuts, and replacements of a few bytes."""
    yield st.integers(0, len(ROWS)).map(lambda at: ROWS[:at])
    edits = st.lists(
        st.tuples(st.integers(0, len(ROWS)), st.integers(0, 12), PIECES), min_size=1, max_size=4
    )

    def edited(changes: list[tuple[int, int, bytes]]) -> bytes:
        text = ROWS
        for at, length, piece in changes:
            text = text[:at] + piece + text[at + length :]
        return text

    yield edits.map(edited)


def refusal(call: Callable[[], object]) -> str | None:
    """What a call that may refuse says then."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.one_of(*mutated()))
def test_mutated_files_are_read_or_refused_in_a_sentence(
    tmp_path: Path, smollm2: Any, text: bytes
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(text)
    for path in (output, tmp_path / "out.meta.json"):
        path.unlink(missing_ok=True)
    asked = PrepareSettings(datasets=[str(source)], output=output, max_length=200)
    told = [refusal(lambda: prepare(asked, smollm2))]
    assert output.exists() == (told[0] is None)
    for path, max_length in ((output, None), (source, None), (source, 40)):
        if path.exists():
            told.append(
                refusal(lambda p=path, n=max_length: check_sizes(read_examples(p, smollm2, n), n))
            )
    assert all(each is None or each.startswith("expected ") for each in told)
    assert all(each is None or str(tmp_path) in each for each in told)


def check_sizes(examples: Any, max_length: int | None) -> None:
    """Builds examples and compares them with what was said about them."""
    sizes = [len(example.input_ids) for example in examples]
    assert len(sizes) == len(examples.lengths)
    assert max_length is None or max(sizes) <= max_length
