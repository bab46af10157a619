"""The chat on the bundled text pair: its answers, what it counts, what it goes on from, and the terminal."""

import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dflash_hf.chat.conversation import Answer, Conversation, Sessions, Settings, Turn
from dflash_hf.chat.model import ChatModel, RunStreamer
from dflash_hf.cli.chat import converse
from dflash_hf.cli.main import app
from dflash_hf.pair.loading import load_pair
from helpers.held_chat import held_put
from tiny import DSPARK, oracle_draft

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "demos" / "toy"
PATIENCE = 250  # seconds: a slow machine is no failure
# Tokens of an answer: the first question's is cut off, the second one's ends before.
LONGEST = 112
QUESTIONS = ("Compute 41 + 80 - 99 + 14.", "Compute 19 + 50 - 30.")


@cache
def model() -> ChatModel:
    return ChatModel(*load_pair(str(TOY / "target"), str(TOY / "draft")))


def ask(conversation: Conversation, text: str, **settings: object) -> Answer:
    *_, answer = model().ask(
        conversation, text, [], Settings(**{"max_new_tokens": LONGEST, **settings})
    )
    return answer


def test_answers_are_plain_and_figures_are_those_of_the_run() -> None:
    plain, drafted = Conversation(), Conversation()
    for question in QUESTIONS:
        expected = ask(plain, question, use_draft=False)
        answer = ask(drafted, question)
        assert answer.text == expected.text
        assert answer.ids == expected.ids
        stats = answer.stats
        assert stats is not None
        assert len(answer.ids) == stats.num_new_tokens
        counted = answer.counted
        assert counted.acceptance_length == stats.acceptance_length
        assert counted.acceptance_per_position() == stats.acceptance_per_position()
        assert counted.acceptance_histogram() == stats.acceptance_histogram()
        bonus = sum(
            committed > accepted
            for committed, accepted in zip(
                stats.num_committed[0], stats.num_accepted[0], strict=True
            )
        )
        is_cut = len(expected.ids) == LONGEST
        assert is_cut == (question == QUESTIONS[0])
        assert sum(bool(run.bonus) for run in answer.runs) in (bonus, bonus - 1), (
            "only an end has no text"
        )
    assert answer.num_cached_tokens > 0
    assert plain.turns[1].answer.num_cached_tokens == 0


def test_figures_are_those_of_the_run_where_the_anchors_slot_proposes() -> None:
    """Then a block of 7 slots proposes 7 tokens, and one forward of the target can commit 8."""
    whole = model()
    expected = ask(Conversation(), QUESTIONS[0], use_draft=False)
    alone = Conversation(turns=[Turn(text=QUESTIONS[0], images=[], answer=expected)])
    prompt = whole.encode(alone, LONGEST)["input_ids"][0].tolist()
    draft = oracle_draft(
        whole.target, [prompt + expected.ids], 1, 7, **DSPARK, sample_from_anchor=True
    )
    chat = ChatModel(whole.target, draft, whole.encoder)
    *_, answer = chat.ask(Conversation(), QUESTIONS[0], [], Settings(max_new_tokens=LONGEST))
    assert answer.ids == expected.ids
    stats = answer.stats
    assert stats is not None
    assert stats.num_proposed == 7
    assert max(run.num_tokens for run in answer.runs) == 8
    assert answer.counted.acceptance_histogram() == stats.acceptance_histogram()
    assert len(answer.counted.acceptance_per_position()) == 7
    draft.generation_config.block_size = 3
    assert ChatModel(whole.target, draft, whole.encoder).block_size == 4


def test_stop_strings_of_the_target_end_answers_and_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model().target.generation_config, "stop_strings", ["carry"])
    conversation = Conversation()
    expected = ask(Conversation(), QUESTIONS[0], use_draft=False)
    answer = ask(conversation, QUESTIONS[0])
    assert answer.text == expected.text
    assert answer.text.endswith("carry")
    *_, (plain, drafted) = model().race(conversation, conversation.turns, LONGEST)
    assert plain.text == drafted.text == answer.text


def hold(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    """Lets so many runs of each answer through until the end of the test's part, however fast the machine is."""
    monkeypatch.setattr(RunStreamer, "put", held_put(lambda: runs))


def test_stopped_answer_leaves_a_conversation_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation()
    ask(conversation, QUESTIONS[0])
    with monkeypatch.context() as patch:
        hold(patch, 2)
        for answer in model().ask(conversation, QUESTIONS[1], [], Settings()):
            if len(answer.runs) == 2:
                conversation.stop.set()
    stopped = conversation.turns[-1].answer
    assert (stopped.state, len(stopped.runs)) == ("stopped", 2)
    again = ask(conversation, QUESTIONS[0])
    assert again.num_cached_tokens > 0, "the stopped run cost the cache"
    inputs = model().encode(conversation, LONGEST)
    ids = model().target.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    assert again.text == model().tokenizer.decode(
        ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )


@pytest.mark.parametrize("press", ["stop", "forget"])
@pytest.mark.parametrize("is_race", [False, True])
@pytest.mark.parametrize("is_encoding", [False, True])
def test_who_stops_while_a_message_is_read_is_heard(
    monkeypatch: pytest.MonkeyPatch, press: str, is_race: bool, is_encoding: bool
) -> None:
    sessions = Sessions()
    encode = ChatModel.encode

    def pressed(*given: Any) -> Any:
        inputs = encode(*given)
        if is_encoding:
            getattr(sessions, press)("page")
        return inputs

    def run(conversation: Conversation) -> list[Answer]:
        if is_race:
            *_, race = model().race(conversation, conversation.turns, 8)
            return list(race)
        *_, answer = model().ask(conversation, QUESTIONS[1], [], Settings(max_new_tokens=8))
        return [answer]

    with sessions.use("page") as conversation:
        ask(conversation, QUESTIONS[0], max_new_tokens=8)
    with monkeypatch.context() as patch, sessions.use("page") as conversation:
        patch.setattr(ChatModel, "encode", pressed)
        if not is_encoding:  # but an image
            getattr(sessions, press)("page")
        first, *_ = run(conversation)
    assert (first.state, first.ids) == ("stopped", [])
    # The next run hears nothing of it.
    with sessions.use("page") as conversation:
        ask(conversation, QUESTIONS[0], max_new_tokens=8)
    sessions.stop("page")
    with sessions.use("page") as conversation:
        assert {answer.state for answer in run(conversation)} == {"done"}


def test_leaving_an_answer_ends_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation()
    with monkeypatch.context() as patch:
        hold(patch, 3)
        answers = model().ask(conversation, QUESTIONS[0], [], Settings(use_draft=False))
        next(answers)
        answers.close()
        model().thread.submit(int).result(PATIENCE)  # it would wait for a reader that has gone
    # Another question to the same conversation must not call the old run back.
    assert ask(conversation, QUESTIONS[0]).state == "done"
    assert len(conversation.turns[0].answer.ids) <= 3 < len(conversation.turns[1].answer.ids)


def test_refused_messages_leave_the_conversation_as_it_was() -> None:
    conversation = Conversation()
    ask(conversation, QUESTIONS[0])
    for text, part in (
        (" ", "empty message"),
        ("x " * 2000, "at most 704 tokens"),
        ("y" * 200_001, "200,001"),
    ):
        with pytest.raises(ValueError, match=part):
            model().ask(conversation, text, [], Settings(max_new_tokens=320))
    with pytest.raises(ValueError, match="reads text only"):
        model().ask(conversation, "see", [object()], Settings())
    assert len(conversation.turns) == 1


def test_race_is_identical_and_counts_both() -> None:
    conversation = Conversation()
    with pytest.raises(ValueError, match="empty conversation"):
        model().race(conversation, conversation.turns, LONGEST)
    answer = ask(conversation, QUESTIONS[0], temperature=1.0)
    *_, (plain, drafted) = model().race(conversation, conversation.turns, LONGEST)
    assert (plain.state, drafted.state) == ("done", "done")
    assert drafted.agreement is not None
    assert drafted.agreement.identical
    assert plain.ids == drafted.ids
    texts = ["".join(run.text + run.bonus for run in lane.runs) for lane in (plain, drafted)]
    assert texts[0] == texts[1] == ask(Conversation(), QUESTIONS[0]).text
    assert len(drafted.runs) < len(plain.runs)
    assert conversation.turns[0].answer is answer


def test_terminal_chat_goes_on_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Interrupted(Console):
        def out(self, *objects: Any, **options: Any) -> None:
            written.append(str(objects[0]))
            if len(written) == 1:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(f"{QUESTIONS[0]}\n{QUESTIONS[1]}\n"))
        # The first answer is not over where it is interrupted.
        patch.setattr(RunStreamer, "put", held_put(lambda: None if written else 1))
        converse(model(), Settings(max_new_tokens=32), Interrupted(file=io.StringIO()))
    assert len("".join(written[1:])) > 32, "the second answer ended with the first one"


def test_terminal_chat_answers_and_counts() -> None:
    answer = ask(Conversation(), QUESTIONS[0], max_new_tokens=320)
    command = ["chat", "--target", str(TOY / "target"), "--draft", str(TOY / "draft")]
    typed = f"{QUESTIONS[0]}\n/image nowhere.png\n/new\n/quit\n"
    run = CliRunner().invoke(app, command, input=typed)
    assert run.exit_code == 0, run.output
    assert answer.text in run.stdout
    # How many forwards it takes follows the clock; what is said must fit together, without the token of the prefill.
    said = re.search(
        r"(\d+) tokens, (\d+) forwards, acceptance length ([\d.]+)", run.stdout.replace("\n", " ")
    )
    assert said is not None, run.stdout
    tokens, forwards = int(said[1]), int(said[2])
    assert tokens == len(answer.ids)
    assert len(answer.runs) <= forwards < tokens / 4
    assert float(said[3]) == pytest.approx((tokens - 1) / (forwards - 1), abs=0.006)
    assert "nowhere.png, which is not there" in run.stdout.replace("\n", " ")
