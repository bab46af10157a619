"""The target's own answers: its own whatever is in between, the same after a kill, refused once the target changed."""

import copy
import itertools
import json
import random
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, PreTrainedModel

from dflash_hf.data.row_files import RowFile, append_rows
from dflash_hf.training import (
    OpenAIClient,
    PromptSettings,
    check_answers,
    local_answers,
    read_examples,
    server_pool,
)
from dflash_hf.training import regenerate as module
from dflash_hf.training.answer_rows import RegenerateSettings
from dflash_hf.training.identity import target_identity
from dflash_hf.training.local_answers import Ranks
from dflash_hf.training.prepare import PrepareSettings, prepare
from dflash_hf.training.prompts import write_prompts
from dflash_hf.training.regenerate import regenerate
from dflash_hf.training.target_answers import random_numbers_of
from helpers.http_threads import running
from helpers.processors import picture, published_folder, qwen_target, write_cut_image
from helpers.templates import FAMILIES
from tiny import shallow_target, tiny_draft

QUESTIONS = ["a", "what is it?", "b", "how?", "why so?", "a", "and c?", "d", "e?"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return FAMILIES["smollm2"].tokenizer()


def text_target(tokenizer: Any, seed: int = 0) -> PreTrainedModel:
    """A random target whose texts come to an end now and then."""
    target: Any = shallow_target("qwen3", seed, vocab_size=len(tokenizer))
    end = tokenizer.eos_token_id
    with torch.no_grad():
        target.lm_head.weight[end] *= 1.5
    target.generation_config.eos_token_id = target.config.eos_token_id = end
    target.generation_config.pad_token_id = tokenizer.pad_token_id
    return target


@pytest.fixture(scope="module")
def target(tokenizer: Any) -> PreTrainedModel:
    return text_target(tokenizer)


def write_rows(path: Path, *conversations: list[str]) -> Path:
    """Prepared rows whose turns are the user's and the assistant's in turn."""
    lines: list[str] = []
    for at, said in enumerate(conversations):
        messages = [
            {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)
        ]
        lines.append(json.dumps({"id": str(at), "messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


def asked(folder: Path, name: str = "out.jsonl", **options: Any) -> RegenerateSettings:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        write_rows(prompts, *([text] for text in QUESTIONS))
    given = {"max_new_tokens": 12, "batch_size": 2, **options}
    return RegenerateSettings(prompts=prompts, output=folder / name, **given)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_answer(target: Any, tokenizer: Any, messages: list[Any], length: int = 12) -> list[int]:
    """What plain `generate` writes to one prompt alone."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = target.generate(**prompt, do_sample=False, max_new_tokens=length)
    return out[0, prompt["input_ids"].shape[1] :].tolist()


def test_answers_are_those_of_plain_generate(tmp_path: Path, target: Any, tokenizer: Any) -> None:
    settings = asked(tmp_path)
    report = regenerate(settings, target, tokenizer)
    rows = rows_of(settings.output)
    for row in rows:
        expected = plain_answer(target, tokenizer, row["messages"])
        assert row["answer_ids"] == expected
        assert row["finished"] == (expected[-1] == tokenizer.eos_token_id)
    assert sorted(row["messages"][0]["content"] for row in rows) == sorted(set(QUESTIONS))
    assert (report.num_prompts, report.num_answers, report.num_new) == (8, 8, 8)
    assert report.left_out == {"duplicates": 1}
    assert report.num_unfinished == sum(not row["finished"] for row in rows)
    assert 0 < report.num_unfinished < 8, "the case shows nothing"
    examples: Any = read_examples(settings.output, tokenizer)
    assert [e.input_ids[e.prompt_length() :] for e in examples] == [
        row["answer_ids"] for row in rows
    ]
    assert list(examples.lengths) == [len(e.input_ids) for e in examples]
    draft = tiny_draft(target, 6)
    drafted = asked(tmp_path, "drafted.jsonl")
    regenerate(drafted, target, tokenizer, draft)
    assert draft.last_stats is not None
    assert drafted.output.read_bytes() == settings.output.read_bytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_killed_anywhere_it_ends_the_same(
    tmp_path: Path,
    target: Any,
    tokenizer: Any,
    temperature: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = asked(tmp_path, temperature=temperature, seed=3)
    regenerate(whole, target, tokenizer)
    expected = whole.output.read_bytes()
    rng = random.Random(0)
    for at in [0, 1, len(expected) - 1, *(rng.randrange(len(expected)) for _ in range(3))]:
        whole.output.write_bytes(expected[:at])
        torch.manual_seed(at)
        report = regenerate(whole, target, tokenizer)
        assert whole.output.read_bytes() == expected
        assert report.num_new == 8 - expected[:at].count(b"\n")
    assert "was not written to its end: it is written again" in caplog.text
    assert regenerate(whole, target, tokenizer).num_new == 0
    if temperature:
        other = asked(tmp_path, "other.jsonl", temperature=temperature, seed=4)
        regenerate(other, target, tokenizer)
        assert other.output.read_bytes() != expected


def test_a_kill_in_mid_run_keeps_whole_batches(
    tmp_path: Path, target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = asked(tmp_path)
    regenerate(settings, target, tokenizer)
    expected = settings.output.read_bytes()
    settings.output.unlink()
    calls: list[int] = []
    write = local_answers.append_rows

    def killed(path: Path, rows: Any) -> None:
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr(local_answers, "append_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            regenerate(settings, target, tokenizer)
    assert expected.startswith(settings.output.read_bytes())
    assert settings.output.read_bytes().count(b"\n") == 4
    regenerate(settings, target, tokenizer)
    assert settings.output.read_bytes() == expected

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    settings.output.unlink()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ValueError, match=r"expected to write .*, got No space left on device"):
        regenerate(settings, target, tokenizer)


@pytest.mark.parametrize("turns", ["last", "all"])
def test_processes_that_share_write_what_one_writes(
    tmp_path: Path, target: Any, tokenizer: Any, turns: Any
) -> None:
    # Three pools, of which the first process has two: one of its own stands between them
    write_rows(tmp_path / "prompts.jsonl", *([f"what is {n}?", "x", "and?"] for n in range(34)))
    alone = asked(tmp_path, turns=turns, max_new_tokens=8)
    regenerate(alone, target, tokenizer)
    expected = alone.output.read_bytes()
    shared = asked(tmp_path, "shared.jsonl", turns=turns, max_new_tokens=8)
    meeting = threading.Barrier(2)
    counts: dict[int, int] = {}

    def share(rank: int) -> None:
        ranks = Ranks(rank=rank, size=2, wait=lambda: meeting.wait(timeout=60))
        counts[rank] = regenerate(shared, target, tokenizer, ranks=ranks).num_new

    def run() -> None:
        counts.clear()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(share, (0, 1)))

    run()
    assert shared.output.read_bytes() == expected
    assert shared.parts() == []
    assert min(counts.values()) > 0, "one did all: the case shows nothing"
    # Killed before all was merged, and begun again with one process
    lines = expected.splitlines(keepends=True)
    assert (len(lines) > 34) is (turns == "all"), "no second turn was asked: the case shows nothing"
    shared.output.write_bytes(b"".join(lines[:9]))
    part = shared.output.with_suffix(".rank1.jsonl")
    part.write_bytes(b"".join(lines[20:25]) + lines[25][:7])
    report = regenerate(shared, target, tokenizer)
    assert report.num_new == len(lines) - 14
    assert sorted(shared.output.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert shared.parts() == []


def test_nobody_appends_before_all_have_read(
    tmp_path: Path, target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = asked(tmp_path)
    meeting = threading.Barrier(2)
    appended = threading.Event()
    is_late = itertools.count()
    events: list[str] = []
    read = module._done
    write = local_answers.append_rows

    def done(settings: RegenerateSettings) -> set[str]:
        found = read(settings)
        if next(is_late):
            appended.wait(timeout=1)
        events.append("read")
        return found

    def append(path: Path, rows: Any) -> None:
        events.append("written")
        write(path, rows)
        appended.set()

    def share(rank: int) -> None:
        ranks = Ranks(rank=rank, size=2, wait=lambda: meeting.wait(timeout=60))
        regenerate(shared, target, tokenizer, ranks=ranks)

    monkeypatch.setattr(module, "_done", done)
    monkeypatch.setattr(local_answers, "append_rows", append)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(share, (0, 1)))
    assert events[:3] == ["read", "read", "written"]


def test_rows_are_those_that_were_there_when_the_file_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"at": 0}, {"at": 1}])
    rows = RowFile(path)
    append_rows(path, [{"at": 2}])
    with path.open("a") as file:
        file.write('{"at": ')
    assert list(rows) == [{"at": 0}, {"at": 1}]


def test_rows_are_appended_one_by_one(tmp_path: Path) -> None:
    """So that all answers of several processes are never in memory when they are merged."""
    path = tmp_path / "rows.jsonl"
    row = {"text": "x" * 10_000}
    tracemalloc.start()
    append_rows(path, (row for _ in range(1_000)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows_of(path) == [row] * 1_000
    assert peak < 1_000_000, "a tenth of the file"


def test_every_turn_is_answered_behind_the_targets_own_answers(
    tmp_path: Path, target: Any, tokenizer: Any
) -> None:
    conversations = [
        ["a", "theirs", "b?", "theirs too", "c"],
        ["d"],
        ["e", "f", "g"],
        ["why so?", "x", "y"],
    ]
    write_rows(tmp_path / "prompts.jsonl", *conversations)
    settings = asked(tmp_path, turns="all", max_new_tokens=30)
    regenerate(settings, target, tokenizer)
    rows = rows_of(settings.output)
    by_prompt = {json.dumps(row["messages"]): row for row in rows}
    count = 0
    for said in conversations:
        messages: list[dict[str, str]] = []
        for text in said[::2]:
            messages.append({"role": "user", "content": text})
            row = by_prompt[json.dumps(messages)]
            assert row["answer_ids"] == plain_answer(target, tokenizer, messages, 30)
            count += 1
            if not row["finished"]:
                break
            answer = tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
    assert count == len(rows)
    assert count > len(conversations), "no second turn was asked: the case shows nothing"
    expected = settings.output.read_bytes()
    for at in (len(expected) // 3, len(expected) * 2 // 3):
        settings.output.write_bytes(expected[:at])
        regenerate(settings, target, tokenizer)
        assert settings.output.read_bytes() == expected
    last = asked(tmp_path, "last.jsonl")
    regenerate(last, target, tokenizer)
    found = {json.dumps([m["content"] for m in row["messages"]]) for row in rows_of(last.output)}
    assert found == {json.dumps(said) for said in conversations}


@pytest.mark.parametrize(("device", "forked"), [("cuda:3", ["cuda:3"]), ("cpu", [])])
def test_random_numbers_are_of_the_targets_device_alone(
    device: str, forked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of several processes would take memory of every GPU."""
    seen: list[list[str]] = []

    def fork(devices: Sequence[Any]) -> nullcontext[None]:
        seen.append([str(found) for found in devices])
        return nullcontext()

    with monkeypatch.context() as patch:
        patch.setattr(torch.random, "fork_rng", fork)
        with random_numbers_of(3, torch.device(device)):
            pass
    assert seen == [forked]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with random_numbers_of(3, torch.device("cpu")):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_long_prompts_are_left_out(tmp_path: Path, target: Any, tokenizer: Any) -> None:
    write_rows(tmp_path / "prompts.jsonl", ["a"], ["b" * 300])
    report = regenerate(asked(tmp_path, max_length=150), target, tokenizer)
    assert (report.num_answers, report.left_out) == (
        1,
        {"prompts longer than the greatest length": 1},
    )


def test_another_target_is_refused(tmp_path: Path, target: Any, tokenizer: Any) -> None:
    settings = asked(tmp_path)
    regenerate(settings, target, tokenizer)
    before = settings.output.read_bytes()
    changed = text_target(tokenizer)
    assert target_identity(changed) == target_identity(target) == target_identity(changed.float())
    assert target_identity(text_target(tokenizer).to(torch.bfloat16)) == target_identity(target)
    check_answers(settings.output, changed, tokenizer)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 0.1
    where = str(settings.output)
    with pytest.raises(
        ValueError, match=rf"expected the target that wrote the answers of {where}, got one"
    ):
        check_answers(settings.output, changed, tokenizer)
    other = FAMILIES["qwen3"].tokenizer()
    with pytest.raises(ValueError, match="got one whose chat template differ: it changed since"):
        check_answers(settings.output, target, other)
    for arguments, what in (
        ((settings, changed, tokenizer), "target"),
        ((asked(tmp_path, max_new_tokens=13), target, tokenizer), "max_new_tokens"),
        ((asked(tmp_path, temperature=0.5, seed=1), target, tokenizer), "temperature and seed"),
    ):
        with pytest.raises(
            ValueError, match=rf"began it, got 'one with another {what}'; remove it and what stands"
        ):
            regenerate(*arguments)
    swapped = text_target(tokenizer)
    with torch.no_grad():
        swapped.model.embed_tokens.weight[[5, 6]] = swapped.model.embed_tokens.weight[[6, 5]]
    assert target_identity(swapped) != target_identity(target)
    assert settings.output.read_bytes() == before
    (tmp_path / "out.meta.json").unlink()
    check_answers(settings.output, changed, tokenizer)
    with pytest.raises(ValueError, match=r"expected .*out\.meta\.json beside"):
        regenerate(settings, target, tokenizer)


def test_bad_settings_and_files_are_refused(tmp_path: Path, target: Any, tokenizer: Any) -> None:
    for options, reason in (
        ({"max_new_tokens": 0}, "expected at least 1 as max_new_tokens, got 0"),
        ({"temperature": -1.0}, r"expected 0 or more as temperature, got -1\.0"),
        ({"top_p": 0.0}, r"expected above 0 and at most 1 as top_p, got 0\.0"),
        ({"turns": "none"}, "expected last or all as turns, got 'none'"),
        ({"name": "prompts.jsonl"}, "expected another file for the answers than the prompts'"),
    ):
        with pytest.raises(ValueError, match=f"^{reason}"):
            regenerate(asked(tmp_path, **options), target, tokenizer)
    prompts = tmp_path / "prompts.jsonl"
    for text, reason in (
        ('{"messages": [{"role": "us', "expected JSON in line 2 of"),
        ('{"prompt": "q"}', "expected messages in line 2 of"),
        (
            '{"messages": [{"role": "assistant", "content": "q"}]}',
            "expected a turn of the user's in line 2 of",
        ),
    ):
        write_rows(prompts, ["a"])
        prompts.write_text(prompts.read_text() + text)
        with pytest.raises(ValueError, match=f"^{reason} {prompts}"):
            regenerate(asked(tmp_path), target, tokenizer)


def test_rows_with_images_from_prepare_to_examples(tmp_path: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    target = qwen_target(processor)
    for at in range(3):
        picture(24 + 16 * at, 16, seed=at).save(tmp_path / f"{at}.png")
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "what?", "images": [f"{at}.png"] * at} for at in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = PrepareSettings(
        datasets=[str(source)], output=tmp_path / "out" / "prompts.jsonl", turns="none"
    )
    prepare(made, processor)
    settings = RegenerateSettings(
        prompts=made.output, output=tmp_path / "out.jsonl", max_new_tokens=6, batch_size=2
    )
    regenerate(settings, target, processor)
    examples: Any = read_examples(settings.output, processor)
    for row, example in zip(rows_of(settings.output), examples, strict=True):
        prompt = {
            name: value
            for name, value in example.model_inputs.items()
            if name != "mm_token_type_ids"
        }
        size = example.prompt_length()
        ids = torch.tensor([example.input_ids[:size]])
        types = {"mm_token_type_ids": example.model_inputs["mm_token_type_ids"][None, :size]}
        out: Any = target.generate(
            input_ids=ids, **prompt, **types, do_sample=False, max_new_tokens=6
        )
        assert out[0].tolist() == example.input_ids == [*ids[0].tolist(), *row["answer_ids"]]
    assert sorted(len(e.model_inputs.get("image_grid_thw", ())) for e in examples) == [0, 1, 2]
    assert list(examples.lengths) == [len(e.input_ids) for e in examples]


@pytest.mark.parametrize("has_answers", [False, True])
def test_every_turn_is_answered_with_its_own_images(has_answers: bool, tmp_path: Path) -> None:
    """A column of images fills the places of the user's turns in order; each answer sees those before it."""
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    target = qwen_target(processor)
    target.generation_config.eos_token_id = list(range(2, 60000))  # each answer ends at once
    for at in range(3):
        picture(24 + 16 * at, 16, seed=at).save(tmp_path / f"{at}.png")
    place = {"type": "image"}
    turns = [[place, "one"], ["none"], [place, "two", place]]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        blocks = [{"type": "text", "text": b} if isinstance(b, str) else b for b in turn]
        messages.append({"role": "user", "content": blocks})
        if has_answers:
            messages.append({"role": "assistant", "content": "theirs"})
    source = tmp_path / "in.jsonl"
    row = {"messages": messages, "images": [f"{at}.png" for at in range(3)]}
    source.write_text(json.dumps(row) + "\n")
    made = PrepareSettings(
        datasets=[str(source)], output=tmp_path / "out" / "prompts.jsonl", turns="none"
    )
    prepare(made, processor)
    settings = RegenerateSettings(
        prompts=made.output, output=tmp_path / "out.jsonl", max_new_tokens=2, turns="all"
    )
    regenerate(settings, target, processor)
    seen = [len(row.get("images", ())) for row in rows_of(settings.output)]
    assert seen == [1, 1, 3]
    examples: Any = read_examples(settings.output, processor)
    shapes = [example.model_inputs["image_grid_thw"].tolist() for example in examples]
    assert [len(shape) for shape in shapes] == [1, 1, 3]
    assert shapes[0] == shapes[1] == shapes[2][:1]
    assert shapes[2][0] != shapes[2][1] != shapes[2][2]
    before = settings.output.read_bytes()
    regenerate(settings, target, processor)
    assert settings.output.read_bytes() == before


# ---- a server


class Handler(BaseHTTPRequestHandler):
    """Answers as a server of vLLM's kind does, with the target's greedy answers."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the screen."""

    def reply(self, told: Any, status: int = 200) -> None:
        content = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        own = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with own.lock:
            own.bodies.append(body)
            if own.kind == "broken" and len(own.bodies) > 4:
                self.reply({"message": "too large"}, 500)
                return
            ids = plain_answer(own.target, own.tokenizer, body["messages"], body["max_tokens"])
        finished = ids[-1] == own.tokenizer.eos_token_id
        prompt = own.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)[
            "input_ids"
        ]
        choice: dict[str, Any] = {"finish_reason": "stop" if finished else "length"}
        choice["message"] = {"content": own.tokenizer.decode(ids, skip_special_tokens=True)}
        if own.kind == "tools":
            function = {"name": "add", "arguments": "{}"}
            choice["message"] = {"content": None, "tool_calls": [{"function": function}]}
        if own.kind == "thinking":
            choice["message"]["reasoning_content"] = "so"
        if own.kind in ("vllm", "broken"):
            choice["token_ids"] = ids
        more = 1 if own.kind == "other" else 0
        self.reply(
            {
                "choices": [choice],
                "usage": {"prompt_tokens": len(prompt) + more, "completion_tokens": len(ids)},
            }
        )


@pytest.fixture
def server(target: Any, tokenizer: Any) -> Iterator[Any]:
    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.target, found.tokenizer, found.kind, found.bodies, found.lock = (
        target,
        tokenizer,
        "vllm",
        [],
        threading.Lock(),
    )
    with running(found):
        yield found


def test_a_server_answers_in_the_targets_place(
    tmp_path: Path, target: Any, tokenizer: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "PATIENCE", 0.5)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1/"
    own = asked(tmp_path)
    regenerate(own, target, tokenizer)
    expected = {row["id"]: row for row in rows_of(own.output)}
    served = asked(tmp_path, "served.jsonl")
    server.kind = "broken"
    with pytest.raises(
        ValueError, match=r"expected answers of http.*, got 500 .*too large.*; start it, and run"
    ):
        regenerate(served, [OpenAIClient(url)], tokenizer)
    kept = served.output.read_bytes()
    server.kind = "vllm"
    report = regenerate(served, [OpenAIClient(url)], tokenizer)
    assert served.output.read_bytes().startswith(kept)
    assert (report.num_answers, report.num_new) == (8, 8 - kept.count(b"\n"))
    assert {row["id"]: row for row in rows_of(served.output)} == expected
    assert server.bodies[-1]["max_tokens"] == 12
    check_answers(served.output, target, tokenizer)
    for kind, reason in (
        (
            "other",
            r"expected prompts of http.* as ours are, of \d+ tokens, got \d+; start it with the target",
        ),
        (
            "thinking",
            "expected answers of http.* in one text, or with token_ids, got thoughts apart from them",
        ),
    ):
        server.kind = kind
        with pytest.raises(ValueError, match=reason):
            regenerate(asked(tmp_path, f"{kind}.jsonl"), [OpenAIClient(url)], tokenizer)


def test_texts_of_a_server_are_tokenized_again(
    tmp_path: Path, tokenizer: Any, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no text of one's own (single bytes that are no letter) comes back as it reads."""
    url = f"http://127.0.0.1:{server.server_address[1]}"
    server.kind = "sglang"
    settings = asked(tmp_path)
    regenerate(settings, [OpenAIClient(url, "small")], tokenizer)
    rows = rows_of(settings.output)
    for row in rows:
        wrote = plain_answer(server.target, tokenizer, row["messages"])
        text = tokenizer.decode(wrote, skip_special_tokens=True)
        assert tokenizer.decode(row["answer_ids"], skip_special_tokens=True) == text
        assert row["finished"] == (wrote[-1] == tokenizer.eos_token_id)
        assert (row["answer_ids"][-1:] == [tokenizer.eos_token_id]) == row["finished"]
    server.kind = "tools"
    with pytest.raises(
        ValueError, match=r"expected a text as the answer of .*, got calls of tools"
    ):
        regenerate(asked(tmp_path, "tools.jsonl"), [OpenAIClient(url)], tokenizer)
    server.shutdown()
    server.server_close()
    with pytest.raises(
        ValueError, match=rf"expected answers of {url}, got .*; start it, and run this again"
    ):
        regenerate(asked(tmp_path, "gone.jsonl"), [OpenAIClient(url)], tokenizer)
    assert not (tmp_path / "gone.jsonl").exists()


# ---- prompts that the target writes


def test_the_target_writes_prompts_and_answers_them(
    tmp_path: Path, target: Any, tokenizer: Any
) -> None:
    settings = PromptSettings(
        output=tmp_path / "own.jsonl", num_prompts=9, max_new_tokens=24, batch_size=6, seed=2
    )
    assert write_prompts(settings, target, tokenizer) == 9
    expected = settings.output.read_bytes()
    rows = rows_of(settings.output)
    texts = [row["messages"][0]["content"] for row in rows]
    assert (len(set(texts)), all(texts)) == (9, True)
    assert len({row["batch"] for row in rows}) > 1
    for at in (0, 1, len(expected) // 2, len(expected) - 1):
        settings.output.write_bytes(expected[:at])
        torch.manual_seed(at)
        assert write_prompts(settings, target, tokenizer) == 9
        assert settings.output.read_bytes() == expected
    more = PromptSettings(
        output=settings.output, num_prompts=11, max_new_tokens=24, batch_size=6, seed=2
    )
    assert write_prompts(more, target, tokenizer) == 11
    assert settings.output.read_bytes().startswith(expected)
    made = PrepareSettings(
        datasets=[str(settings.output)], output=tmp_path / "prompts.jsonl", turns="none"
    )
    assert prepare(made, tokenizer).num_kept == 11
    answered = asked(tmp_path)
    assert regenerate(answered, target, tokenizer).num_answers == 11
    assert [row["messages"] for row in rows_of(made.output)] == [
        row["messages"] for row in rows_of(settings.output)
    ]


def test_the_template_of_written_prompts_is_told_what_it_reads(
    tmp_path: Path, target: Any, tokenizer: Any
) -> None:
    told, knows = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    told.chat_template = (
        "{%- if mood is defined %}{{ 'Be ' + mood }}{% endif %}" + tokenizer.chat_template
    )
    knows.chat_template = "{{ 'Be brief' }}" + tokenizer.chat_template
    options: dict[str, Any] = {"num_prompts": 3, "max_new_tokens": 24, "batch_size": 6}
    for name, given in (("told", {"mood": "brief"}), ("untold", {})):
        write_prompts(
            PromptSettings(output=tmp_path / name, chat_template_kwargs=given, **options),
            target,
            told,
        )
    write_prompts(PromptSettings(output=tmp_path / "knows", **options), target, knows)
    expected = (tmp_path / "knows").read_bytes()
    assert (tmp_path / "told").read_bytes() == expected
    assert (tmp_path / "untold").read_bytes() != expected
    misspelt = PromptSettings(
        output=tmp_path / "none", chat_template_kwargs={"moo": "brief"}, **options
    )
    what = "expected chat_template_kwargs that the chat template reads, got 'moo'"
    with pytest.raises(ValueError, match=what):
        write_prompts(misspelt, target, told)


def test_prompts_that_come_to_no_end_are_given_up(
    tmp_path: Path, target: Any, tokenizer: Any
) -> None:
    settings = PromptSettings(
        output=tmp_path / "own.jsonl", num_prompts=3, max_new_tokens=1, batch_size=1
    )
    endless = text_target(tokenizer)
    with torch.no_grad():
        endless.lm_head.weight[tokenizer.eos_token_id] = 0
    with pytest.raises(
        ValueError, match="expected a target that writes what a user says within 1 tokens, got"
    ):
        write_prompts(settings, endless, tokenizer)
    with pytest.raises(
        ValueError,
        match="expected above 0 as temperature: greedy ones would all be the same, got 0",
    ):
        write_prompts(
            PromptSettings(output=tmp_path / "x", num_prompts=1, temperature=0), target, tokenizer
        )


def test_an_image_that_cannot_be_read_is_named_by_its_line(tmp_path: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    prompts = write_rows(tmp_path / "prompts.jsonl", ["a"], ["a"])
    write_cut_image(tmp_path / "cut.png")
    row = {"id": "2", "messages": [{"role": "user", "content": "b"}], "images": ["cut.png"]}
    prompts.write_text(prompts.read_text() + json.dumps(row) + "\n")
    sentence = rf"image file is truncated.* \(line 3 of {prompts}\)"
    with pytest.raises(ValueError, match=sentence):
        regenerate(asked(tmp_path), qwen_target(processor), processor)
