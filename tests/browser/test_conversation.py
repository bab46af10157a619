"""What a person does: ask, with pictures and without, see why it is fast, stop, go on, race."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from helpers.browser import Chat, Server
from helpers.processors import picture

# Every state of the newest answer, as the page goes through them.
WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const text = document.querySelector("#df-current .df-answer .df-text")?.textContent ?? "";
    const speed = document.querySelector("#df-statistics .df-figure strong")?.textContent ?? "";
    if (window.seen.at(-1)?.text !== text) window.seen.push({ text, speed, at: performance.now() });
  }).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""


def plain_answers(pair: Path, length: int, *questions: tuple[str, list[Path]]) -> list[str]:
    """What plain `generate` says in a conversation, prefilled anew at every turn; with nothing of the chat's own."""
    sees = hasattr(AutoConfig.from_pretrained(pair / "target"), "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    target: Any = kind.from_pretrained(pair / "target")
    encoder: Any = (AutoProcessor if sees else AutoTokenizer).from_pretrained(pair / "target")
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for text, pictures in questions:
        images = [{"type": "image", "image": Image.open(path).convert("RGB")} for path in pictures]
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": text}] if sees else text})
        inputs = encoder.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        ids = target.generate(**inputs, max_new_tokens=length, do_sample=False)
        texts.append(encoder.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": texts[-1]}] if sees else texts[-1]})
    return texts


def test_answer_streams_in_coloured_runs_with_statistics(bundled: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(bundled)
    chat.page.evaluate(WATCH)
    text = chat.ask(bundled.question())

    assert text == plain_answers(bundled.pair, 320, (bundled.question(), []))[0]
    seen = [state["text"] for state in chat.page.evaluate("window.seen") if state["text"]]
    assert len(seen) > 3, "the answer came all at once"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))

    tokens = chat.numbers(".df-run", "--n")
    forwards = len(chat.numbers(".df-strip li", "--a"))
    assert len(tokens) in (forwards, forwards - 1), "the last forward may have written nothing but the end"
    columns = zip(chat.numbers(".df-strip li", "--a"), chat.numbers(".df-strip li", "--b"), strict=True)
    committed = [accepted + bonus for accepted, bonus in columns]
    assert committed[: len(tokens)] == tokens
    assert max(tokens) > 1, "no run has more than one token: nothing was accepted"
    figures = chat.page.locator(".df-figure strong").all_text_contents()
    assert figures[1] == f"{sum(committed) / forwards:.1f}"
    assert figures[2] == str(forwards + 1)
    assert float(figures[0]) > 0
    counts = [int(label) for label in chat.page.locator(".df-histogram i").all_text_contents()]
    assert sum(counts) == forwards
    shares = [int(label) for label in chat.page.locator(".df-positions i").all_text_contents()]
    assert len(shares) == 15
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0
    total = int(chat.page.locator(".df-figure small").nth(2).text_content().split()[1])
    assert total == sum(committed) + 1
    assert chat.page.locator(".df-bonus").count() > 0
    assert f"{total} tokens" in chat.meta()


def test_speed_is_shown_while_the_answer_is_written(endless: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(endless)
    chat.set_length(96)
    chat.page.evaluate(WATCH)
    chat.ask("hello")
    speeds = {state["speed"] for state in chat.page.evaluate("window.seen")[:-1]}
    assert len(speeds) > 1, f"the speed never changed: {speeds}"


def test_first_token_comes_soon(bundled: Server, open_chat: Callable[..., Chat]) -> None:
    """The floor is 2 s on two free cores; tests also run on machines that are busy with something else."""
    chat = open_chat(bundled)
    chat.page.evaluate(WATCH)
    chat.page.fill("#df-box textarea", bundled.question())
    chat.page.evaluate(
        "document.querySelector('#df-box .submit-button').addEventListener('click', "
        "() => { window.asked = performance.now() }, true)"
    )
    chat.page.click("#df-box .submit-button")
    chat.wait("done")
    first = next(state["at"] for state in chat.page.evaluate("window.seen") if state["text"])
    seconds = (first - chat.page.evaluate("window.asked")) / 1000
    print(json.dumps({"first_token_shown_after_seconds": round(seconds, 3)}))
    assert seconds < 10


def test_picture_and_follow_up_are_answered_as_plain_generate_does(
    endless: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    files = [tmp_path / "one.png", tmp_path / "two.png"]
    for seed, file in enumerate(files):
        picture(40, 24 + 16 * seed, seed).save(file)
    chat = open_chat(endless)
    chat.set_length(32)
    turns = [("what is this", [files[0]]), ("and its colour", []), ("and these", files)]
    answers = [chat.ask(text, *pictures) for text, pictures in turns]

    assert answers == plain_answers(endless.pair, 32, *turns)
    assert answers != plain_answers(endless.pair, 32, *[(text, []) for text, _ in turns]), "pictures change nothing"
    assert "prompt tokens from the cache" in chat.meta()
    shown = chat.page.locator(".df-turn").nth(2).locator(".df-pictures img")
    assert shown.count() == 2
    assert all(shown.nth(i).evaluate("image => image.complete && image.naturalWidth > 0") for i in range(2))


def test_draft_off_is_plain_generate(bundled: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(bundled)
    text = chat.ask(bundled.question())
    chat.page.click("#df-new")
    chat.page.wait_for_selector(".df-welcome")
    chat.answers = 0
    chat.page.uncheck("#df-draft input")
    assert chat.ask(bundled.question()) == text
    assert chat.page.locator(".df-run").count() == 0
    assert "without the draft" in chat.meta()
    assert chat.page.locator(".df-figure strong").nth(1).text_content() == "1"


def test_stop_ends_the_run_and_the_chat_goes_on(endless: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(endless)
    chat.set_length(1024)
    for use_draft in (True, False):
        chat.page.set_checked("#df-draft input", use_draft)
        chat.send("tell me everything")
        chat.page.wait_for_function("document.querySelector('#df-current .df-text')?.textContent.length > 4")
        chat.page.click("#df-box .stop-button")
        text = chat.wait("stopped")
        assert 0 < len(text) < 1000
        assert "stopped" in chat.meta()
    chat.set_length(16)
    chat.page.set_checked("#df-draft input", True)
    assert len(chat.ask("go on")) == 16


def test_new_chat_ends_the_run_and_nothing_of_it_comes_back(endless: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(endless)
    chat.set_length(1024)
    chat.send("tell me everything")
    chat.wait_for_runs(8)
    chat.page.click("#df-new")
    chat.page.wait_for_selector(".df-welcome")
    chat.set_length(16)
    assert chat.ask("hello") == plain_answers(endless.pair, 16, ("hello", []))[0]
    assert chat.page.locator(".df-user p").all_text_contents() == ["hello"]


def test_temperature_changes_the_text_and_length_ends_it(endless: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(endless)
    chat.set_length(32)
    greedy = chat.ask("hello")
    assert "32 tokens" in chat.meta()
    chat.page.click("#df-new")
    chat.page.wait_for_selector(".df-welcome")
    chat.answers = 0
    heat = chat.page.locator("#df-heat input[type=number]")
    heat.fill("1.5")
    heat.press("Tab")
    assert chat.ask("hello") != greedy
    assert "32 tokens" in chat.meta()


def test_race_compares_both_ways_token_by_token(bundled: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(bundled)
    chat.page.click("#df-race-start")
    assert "Expected a question to race on" in chat.notice()
    text = chat.ask(bundled.question())
    chat.page.click("#df-race-start")
    chat.page.wait_for_selector('.df-race[data-state="done"]')
    verdict = str(chat.page.text_content(".df-verdict"))
    lanes = chat.page.locator(".df-lane-text").all_text_contents()
    assert lanes == [text, text]
    counted = [
        int(str(foot).split()[0]) for foot in chat.page.locator(".df-lane footer span:first-child").all_text_contents()
    ]
    assert counted[0] == counted[1]
    assert f"identical all {counted[0]} tokens are the same" in verdict
    seconds = [float(str(s).split()[0]) for s in chat.page.locator(".df-lane header span").all_text_contents()]
    ratio = float(str(chat.page.text_content(".df-verdict strong")).rstrip("×"))
    assert ratio == pytest.approx(seconds[0] / seconds[1], rel=0.1)


def test_two_sessions_at_once_each_get_their_own_answer(
    endless: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    file = tmp_path / "same.png"
    picture(40, 24).save(file)
    first, second = open_chat(endless), open_chat(endless)
    for chat in (first, second):
        chat.set_length(48)
    turns = [[("one", [file]), ("three", [])], [("two", [file]), ("four", [])]]
    for turn in range(2):
        for chat, (text, pictures) in zip((first, second), (turns[0][turn], turns[1][turn]), strict=True):
            chat.send(text, *pictures)
        texts = [first.wait("done"), second.wait("done")]
        assert texts == [plain_answers(endless.pair, 48, *asked[: turn + 1])[turn] for asked in turns]
    assert first.page.locator(".df-user p").all_text_contents() == ["one", "three"]
    assert second.page.locator(".df-user p").all_text_contents() == ["two", "four"]


def test_closing_the_page_ends_its_run(endless: Server, open_chat: Callable[..., Chat]) -> None:
    leaving, staying = open_chat(endless), open_chat(endless)
    leaving.set_length(1024)
    leaving.page.uncheck("#df-draft input")
    leaving.send("tell me everything")
    leaving.page.wait_for_function("document.querySelector('#df-current .df-text')?.textContent.length > 20")
    tokens, rate = (
        len(str(leaving.page.locator(".df-text").last.text_content())),
        leaving.page.locator(".df-figure strong"),
    )
    remaining = (1024 - tokens) / float(str(rate.first.text_content()))
    leaving.page.context.close()
    started = time.monotonic()
    staying.set_length(16)
    staying.ask("hello")
    assert time.monotonic() - started < remaining / 2, "the run of the closed page went on"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The page's answers are compared with this process's."""
    torch.set_num_threads(1)
