"""Jobs that are decoded together have the text that each has alone, whoever joins, leaves or has to wait."""

from __future__ import annotations

import json
import queue
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.pair import named_pair
from dflash_hf.generation import running_batch
from dflash_hf.pair.answers import encode_prompt, tokenizer_of
from dflash_hf.pair.loading import load_pair
from dflash_hf.serve.engine import Done, Ended, Event, Job, Sampling, Tokens
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.penalties import SaidPenalty
from dflash_hf.serve.requests import read_request
from dflash_hf.serve.rows import BatchEngine
from helpers.processors import gemma_processor
from helpers.source_tree import ROOT
from helpers.static import set_engine
from helpers.vision import vision_target
from tiny import VOCAB, tiny_draft, tiny_target

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_p": 0.95}
TOY = ROOT / "demos" / "toy"
ENDLESS: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


class Unknown(LogitsProcessor):
    """A processor that does not say that it looks at a row alone, so that its job is answered alone."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return scores


ALONE: dict[str, Any] = {"processors": (Unknown(),)}


class Client:
    """Who submits a job, and what it is sent."""

    def __init__(self, name: str, length: int, limit: int, seed: int | None = None, **more: Any):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, VOCAB - 1, (1, length), generator=generator)
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self.ids: list[int] = []
        self.expected: list[int] = []
        self.events: queue.Queue[Event] = queue.Queue()
        options = more.pop("options", {"do_sample": False})
        self.sampling = Sampling(max_new_tokens=limit, seed=seed, options=options, **more)
        self.job = Job(name, self.inputs, self.sampling, self.events.put)

    def next(self) -> Event:
        event = self.events.get(timeout=60)
        if isinstance(event, Tokens):
            self.ids += event.ids
        return event

    def end(self) -> Done | Exception:
        while True:
            event = self.next()
            if not isinstance(event, Tokens):
                return event

    def alone(self, target: Any, draft: Any) -> list[int]:
        """What `generate` answers."""
        if self.sampling.seed is not None:
            torch.manual_seed(self.sampling.seed)
        options = dict(self.sampling.options)
        if self.sampling.processors:
            options["logits_processor"] = list(self.sampling.processors)
        limit = self.sampling.max_new_tokens
        found = target.generate(
            **self.inputs, **options, max_new_tokens=limit, assistant_model=draft
        )
        return found[0, self.inputs["input_ids"].shape[1] :].tolist()


class Tiny:
    """The engine of a tiny pair in float32."""

    def __init__(self, family: str = "qwen3", **more: Any) -> None:
        self.target: Any = tiny_target(family, max_position_embeddings=2048)
        self.target.float()
        self.draft = tiny_draft(self.target)
        self.notes: list[str] = []
        self.tokenizer: Any = None
        self.engine = BatchEngine(
            self.target,
            self.draft,
            self.tokenizer,
            self.notes.append,
            **{"max_rows": 8, "max_kept_bytes": 0, **more},
        )

    def submit(self, *clients: Client) -> None:
        """Submits all before any of them begins."""
        may_begin = threading.Event()
        self.engine.thread.submit(may_begin.wait, 60)
        for client in clients:
            self.engine.submit(client.job)
        may_begin.set()

    def most_rows(self) -> list[int]:
        """Notes how many rows each step has."""
        found: list[int] = []
        real = self.engine.batch.step

        def counted() -> Any:
            new = real()
            found.append(self.engine.batch.num_running)
            return new

        self.engine.batch.step = counted
        return found


def clients_of_all_kinds() -> list[Client]:
    """Greedy, sampled and penalised jobs of many lengths, the same ones at each call."""
    chance = random.Random(0)
    clients: list[Client] = []
    for number in range(24):
        more: dict[str, Any] = {}
        if number % 3 == 1:
            more = {"options": SAMPLED, "seed": number}
        length = chance.randint(1, 300)
        if number % 12 == 5:
            more = {"processors": (SaidPenalty(0.5, 0.5, length),)}
        clients.append(Client(f"c{number}", length, chance.randint(1, 24), **more))
    return clients


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What `generate` answers to each of these clients with the eager engine; not to be changed."""
    pair = Tiny()
    set_engine(pair.draft, "eager")
    return [client.alone(pair.target, pair.draft) for client in clients_of_all_kinds()]


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_eight_at_once_have_the_texts_of_each_alone(engine: str, alone: list[list[int]]) -> None:
    pair = Tiny()
    set_engine(pair.draft, engine)
    clients = clients_of_all_kinds()
    rows = pair.most_rows()

    def ask(group: list[Client]) -> None:
        for client in group:
            pair.engine.submit(client.job)
            client.end()

    threads = [threading.Thread(target=ask, args=(clients[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [client.ids for client in clients] == alone
    assert max(rows) > 2


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_jobs_of_a_hybrid_are_rows(family: str) -> None:
    pair = Tiny(family, max_kept_bytes=2**30)
    clients = [Client(f"c{length}", length, 15, options=ENDLESS) for length in (3, 300, 7, 40)]
    expected = [client.alone(pair.target, pair.draft) for client in clients]
    rows = pair.most_rows()
    pair.submit(*clients)
    assert all(isinstance(client.end(), Done) for client in clients)
    assert [client.ids for client in clients] == expected
    assert max(rows) == 4


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_a_client_that_leaves_changes_no_other(family: str) -> None:
    pair = Tiny(family)
    leaving = Client("leaving", 20, 1500, options=ENDLESS)
    others = [Client(f"c{length}", length, 30, options=ENDLESS) for length in (3, 40)]
    expected = [client.alone(pair.target, pair.draft) for client in others]
    pair.submit(others[0], leaving, others[1])
    leaving.next()
    leaving.job.gone.set()
    ended = leaving.end()
    assert isinstance(ended, Ended)
    assert 0 < len(leaving.ids) < 1500
    for client in others:
        assert isinstance(client.end(), Done)
    assert [client.ids for client in others] == expected
    assert pair.engine.call(lambda: pair.engine.batch.ids) == []


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_log_probabilities_are_those_of_each_alone(family: str) -> None:
    pair = Tiny(family)
    clients = [
        Client("none", 5, 15, options=ENDLESS),
        Client("top", 300, 15, options=ENDLESS, num_logprobs=3),
        Client("sampled", 7, 10, options=SAMPLED, seed=4, num_logprobs=0),
        Client("biased", 9, 10, options={**ENDLESS, "repetition_penalty": 1.4}, num_logprobs=5),
    ]
    alone: list[Any] = []
    for client in clients:
        other = Client("alone", client.job.num_prompt_tokens, 1)
        other.job.sampling = client.sampling
        pair.engine.call(pair.engine.one_by_one.run, other.job)
        alone.append(other.end())
        client.expected = other.ids
    rows = pair.most_rows()
    pair.submit(*clients)
    for client, told in zip(clients, alone, strict=True):
        end: Any = client.end()
        assert client.ids == client.expected
        assert len(end.logprobs) == len(client.ids) * (client.sampling.num_logprobs >= 0)
        for mine, theirs in zip(end.logprobs, told.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            values = [value for _, value in theirs.top]
            assert [value for _, value in mine.top] == pytest.approx(values, abs=1e-4)
    assert max(rows) == 4


def test_a_long_prompt_stops_the_others_for_a_chunk_only() -> None:
    pair = Tiny()
    short = Client("short", 5, 60, options=ENDLESS)
    long = Client("long", 1500, 2)
    order: list[str] = []
    for client in (short, long):
        receive = client.job.receive

        def noted(event: Event, client: Client = client, receive: Any = receive) -> None:
            order.append(client.job.name)
            receive(event)

        client.job.receive = noted
    pair.submit(short, long)
    long.end()
    short.end()
    # 1500 tokens are 6 chunks; in each of the steps between them the other row has tokens.
    assert order.index("long") >= 6
    assert set(order[: order.index("long")]) == {"short"}


def test_who_cannot_be_a_row_has_its_turn_alone() -> None:
    pair = Tiny()
    first = Client("first", 5, 30, options=ENDLESS)
    alone = Client("alone", 7, 5, num_logprobs=2, **ALONE)
    last = Client("last", 11, 5)
    clients = [first, alone, last]
    expected = [client.alone(pair.target, pair.draft) for client in clients]
    pair.submit(*clients)
    ends = [client.end() for client in clients]
    assert [client.ids for client in clients] == expected
    assert isinstance(ends[1], Done)
    assert len(ends[1].logprobs) == len(alone.ids)
    pair.engine.call(int)
    names = [note.partition(":")[0] for note in pair.notes]
    assert names == ["alone", "first", "alone", "last"]
    assert pair.notes[0].startswith("alone: alone, expected logits processors that look at")


def test_what_cannot_be_prefilled_is_answered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Tiny()
    clients = [Client("runs", 5, 40, options=ENDLESS), Client("has no room", 9, 10)]
    expected = [client.alone(pair.target, pair.draft) for client in clients]

    def full(*_: Any) -> None:
        raise ValueError("expected room, got none")

    monkeypatch.setattr(running_batch, "join", full)
    pair.submit(*clients)
    assert all(isinstance(client.end(), Done) for client in clients)
    assert [client.ids for client in clients] == expected


def test_those_without_room_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Tiny()
    clients = [Client(f"{place}", 5 + place, 10) for place in range(4)]
    expected = [client.alone(pair.target, pair.draft) for client in clients]

    def full(*_: Any, **__: Any) -> None:
        raise OutOfRoomError("expected room, got none")

    monkeypatch.setattr(running_batch, "begin_prefill", full)
    pair.submit(*clients)
    assert all(isinstance(client.end(), Done) for client in clients)
    assert [client.ids for client in clients] == expected
    pair.engine.call(int)
    ended = [note.partition(":")[0] for note in pair.notes if "expected room" not in note]
    assert ended == ["0", "1", "2", "3"]


def test_a_row_whose_tokens_cannot_be_told_ends_alone() -> None:
    pair = Tiny()
    bad = Client("bad", 9, 60, options=ENDLESS)
    clients = [Client("runs", 5, 40, options=ENDLESS), Client("too", 12, 40, options=ENDLESS)]
    expected = [client.alone(pair.target, pair.draft) for client in clients]
    receive = bad.job.receive

    def broken(event: Event) -> None:
        if isinstance(event, Tokens) and len(bad.ids) > 5:
            raise RuntimeError("nobody listens")
        receive(event)
        if isinstance(event, Tokens):
            bad.ids += event.ids

    bad.job.receive = broken
    pair.submit(clients[0], bad, clients[1])
    ends = [client.end() for client in clients]
    assert all(isinstance(end, Done) for end in ends)
    assert [client.ids for client in clients] == expected
    while not isinstance(event := bad.events.get(timeout=60), RuntimeError):
        assert isinstance(event, Tokens)
    assert str(event) == "nobody listens"


def test_a_step_that_fails_is_told_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Tiny(max_rows=2)
    clients = [Client(f"c{number}", 5 + number, 30, options=ENDLESS) for number in range(3)]
    expected = clients[2].alone(pair.target, pair.draft)
    real = running_batch.step
    failed: list[int] = []

    def broken(run: Any) -> Any:
        if not failed and len(run.rows.numbers) == 2:
            failed.append(1)
            raise RuntimeError("the target fails")
        return real(run)

    monkeypatch.setattr(running_batch, "step", broken)
    pair.submit(*clients)
    for client in clients[:2]:
        assert str(client.end()) == "the target fails"
    assert isinstance(clients[2].end(), Done)
    assert clients[2].ids == expected
    pair.engine.call(int)
    assert "Traceback" in "".join(pair.notes)


def test_an_error_of_nobody_ends_all_and_the_next_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Tiny()
    clients = [Client("runs", 5, 500, options=ENDLESS), Client("waits", 9, 5, **ALONE)]
    after = Client("after", 7, 20, options=ENDLESS)
    expected = after.alone(pair.target, pair.draft)

    def broken(_: int) -> None:
        raise RuntimeError("no memory to leave")

    monkeypatch.setattr(pair.engine.batch, "cancel", broken)
    pair.submit(*clients)
    clients[0].next()
    # A first token comes before the engine has taken in what was submitted behind it.
    pair.engine.call(int)
    clients[0].job.gone.set()
    for client in clients:
        assert str(client.end()) == "no memory to leave"
    pair.submit(after)
    assert isinstance(after.end(), Done)
    assert after.ids == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_the_next_turn_goes_on_from_the_last_one(family: str) -> None:
    pair = Tiny(family, max_kept_bytes=2**30)
    first = Client("first", 200, 15, options=ENDLESS)
    pair.submit(first)
    end = first.end()
    assert isinstance(end, Done)
    assert end.counts.num_kept_tokens == 0
    second = Client("second", 5, 15, options=ENDLESS)
    said = torch.tensor([first.ids])
    ids = torch.cat([first.inputs["input_ids"], said, second.inputs["input_ids"]], dim=1)
    second.inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = second.alone(pair.target, pair.draft)
    pair.submit(second)
    end = second.end()
    assert isinstance(end, Done)
    assert end.counts.num_kept_tokens == 200 + len(first.ids) - 1
    assert second.ids == expected


def test_a_server_that_stops_ends_rows_and_who_waits() -> None:
    pair = Tiny()
    running = Client("running", 5, 1500, options=ENDLESS)
    alone = Client("alone", 6, 5, **ALONE)
    waiting = Client("waiting", 7, 5)
    pair.submit(running, alone, waiting)
    running.next()
    pair.engine.stop()
    for client in (running, alone, waiting):
        assert isinstance(client.end(), Ended)
    assert alone.ids == waiting.ids == []


def test_chats_about_images_are_rows_beside_texts() -> None:
    target, draft, processor = load_pair(*named_pair("vision"))
    notes: list[str] = []
    engine = BatchEngine(target, draft, tokenizer_of(processor), notes.append, 8, 2**30)
    asked = [row["messages"] for row in read_prompts(TOY / "vision" / "held_out.jsonl", 1)]
    asked.insert(1, [{"role": "user", "content": "What is in this picture?"}])
    found: list[Any] = []
    expected: list[list[int]] = []
    for number, messages in enumerate(asked * 2):
        inputs = dict(encode_prompt(processor, messages, torch.device("cpu")))
        options: dict[str, Any] = {"do_sample": False}
        if number % 3 == 2:
            options = {"do_sample": True, "temperature": 0.7}
        sampling = Sampling(max_new_tokens=16, seed=number, options=options)
        client = Client(f"c{number}", 5, 1)
        client.job = Job(f"c{number}", inputs, sampling, client.events.put)
        torch.manual_seed(number)
        model: Any = target
        ids = model.generate(**inputs, **options, max_new_tokens=16, assistant_model=draft)
        expected.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
        found.append(client)
    for client in found:
        engine.submit(client.job)
    ends = [client.end() for client in found]
    assert all(isinstance(end, Done) for end in ends)
    assert [client.ids for client in found] == expected
    engine.call(int)
    assert not [note for note in notes if "alone" in note]


def test_a_stop_text_ends_a_row_within_a_verify() -> None:
    target, draft, processor = load_pair(*named_pair("text"))
    tokenizer = tokenizer_of(processor)
    notes: list[str] = []
    engine = BatchEngine(target, draft, tokenizer, notes.append, 8, 0)
    prompt = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
    found: Any = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = target
    stop = "carry"
    ids = model.generate(
        **found, max_new_tokens=200, stop_strings=[stop], tokenizer=tokenizer, do_sample=False
    )
    events: list[queue.Queue[Event]] = [queue.Queue(), queue.Queue()]
    for got in events:
        options = {"do_sample": False}
        sampling = Sampling(max_new_tokens=200, stops=(stop,), options=options)
        engine.submit(Job("x", dict(found), sampling, got.put))
    for got in events:
        new: list[int] = []
        while True:
            event = got.get(timeout=60)
            if not isinstance(event, Tokens):
                break
            new += event.ids
        assert new == ids[0, found["input_ids"].shape[1] :].tolist()
        assert isinstance(event, Done)
        assert not event.is_cut
        assert sum(event.counts.committed) + 1 == len(new)
        assert len(event.counts.accepted) == len(event.counts.proposed)
        assert len(event.counts.accepted) == len(event.counts.committed)


def test_texts_of_a_processor_with_token_types_are_rows() -> None:
    processor = gemma_processor()
    target: Any = vision_target("gemma3", vocab_size=len(processor.tokenizer))
    target.generation_config.suppress_tokens = processor.tokenizer.all_special_ids
    draft = tiny_draft(target)
    notes: list[str] = []
    pair = Pair(target, draft, processor, name="gemma", encoding={}, note=notes.append)
    for words in ("a", "some words"):
        messages = [{"role": "user", "content": words}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        asked = read_request(json.dumps(body).encode(), True, pair)
        client = Client(words, 5, 1)
        client.job = Job(words, asked.inputs, asked.sampling[0], client.events.put)
        pair.engine.submit(client.job)
        assert isinstance(client.end(), Done)
        inputs = encode_prompt(processor, messages, torch.device("cpu"))
        assert "token_type_ids" in inputs
        plain = target.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert client.ids == plain[0, inputs["input_ids"].shape[1] :].tolist()
    assert not [note for note in notes if "alone" in note]
