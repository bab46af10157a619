"""What a person does: ask, with images and without, see why it is fast, stop, go on, race.

Nothing here rests on a clock: where a test needs an answer that is half written, it holds the chat there.
"""

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from playwright.sync_api import Page
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from helpers.browser import Chat, Server
from helpers.processors import picture

# Every text of the newest answer, as the page goes through them: few or many, that is the machine's business.
WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const text = document.querySelector('.df-answer:not([data-state="example"]) .df-text')?.textContent ?? "";
    if (window.seen.at(-1) !== text) window.seen.push(text);
  }).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""


DELAYS = """all => all.map(
  e => [parseFloat(e.style.getPropertyValue("--t")), e.getAnimations()[0].effect.getTiming().delay])"""


def assert_seconds(shown: list[str], seconds: list[float]) -> None:
    """The page rounds the whole number to 2 digits, and tells the tests 4 of it: a last digit may differ by one."""
    assert all(re.fullmatch(r"\d+\.\d\d s", text) for text in shown)
    numbers = [float(text.removesuffix(" s")) for text in shown]
    assert numbers == pytest.approx(seconds, abs=0.0051, rel=0)


def assert_headline(page: Page, plain: float, drafted: float) -> None:
    """The headline says how many times as fast it was, of two durations to 4 digits, to one."""
    text, number = str(page.text_content("h1")), str(page.text_content("h1 strong"))
    if number == "no":  # a loaded machine may say so, of a pair that is fast
        assert text == "Same answer, no faster here"
        assert drafted > 0.95 * plain
        return
    half = 5e-5
    low, high = (plain - half) / (drafted + half), (plain + half) / max(drafted - half, half)
    assert text == f"Same answer, {number} faster"
    assert (
        low - (0.51 if low >= 9.9 else 0.051)
        <= float(number.rstrip("×"))
        <= high + (0.51 if high >= 9.9 else 0.051)
    )


@functools.cache
def plain_pair(pair: Path) -> tuple[Any, Any]:
    """A pair's target and its tokenizer or processor, without anything of the chat's own."""
    sees = hasattr(AutoConfig.from_pretrained(pair / "target"), "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return kind.from_pretrained(pair / "target"), (
        AutoProcessor if sees else AutoTokenizer
    ).from_pretrained(pair / "target")


def plain_answers(
    pair: Path, length: int, *questions: tuple[str, list[Path]], system: str = ""
) -> list[str]:
    """What plain `generate` says in a conversation, prefilled anew at every turn."""
    target, encoder = plain_pair(pair)
    sees = hasattr(target.config, "vision_config")
    content = [{"type": "text", "text": system}] if sees else system
    messages: list[dict[str, Any]] = [{"role": "system", "content": content}] if system else []
    texts: list[str] = []
    for text, files in questions:
        images = [{"type": "image", "image": Image.open(path).convert("RGB")} for path in files]
        messages.append(
            {"role": "user", "content": [*images, {"type": "text", "text": text}] if sees else text}
        )
        inputs = encoder.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = target.generate(**inputs, max_new_tokens=length, do_sample=False)
        texts.append(
            encoder.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
        messages.append(
            {
                "role": "assistant",
                "content": [{"type": "text", "text": texts[-1]}] if sees else texts[-1],
            }
        )
    return texts


def test_answer_is_shown_run_by_run_while_it_is_written(
    held: Server, open_chat: Callable[..., Chat]
) -> None:
    """The page shows the first token when there is no other, and each further run before the next is there."""
    chat = open_chat(held)
    chat.set_length(32)
    chat.page.evaluate(WATCH)
    held.hold(1)
    chat.send("hello")
    states = [chat.wait_for_letters(1)]
    assert len(states[0]) == 1, "more than the first token, before there was more"
    for runs in (2, 3, 4):
        assert chat.page.locator("#df-talk .df-run").count() == runs - 2
        held.hold(runs)
        states.append(chat.wait_for_letters(len(states[-1]) + 1))
    held.hold(None)
    states.append(chat.wait("done"))

    assert states[-1] == plain_answers(held.pair, 32, ("hello", []))[0]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(states))
    seen = chat.page.evaluate("window.seen")
    assert set(states) <= set(seen)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen)), (
        "a text was taken back"
    )


def test_answer_has_coloured_runs_and_statistics(
    bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(bundled)
    chat.page.evaluate(WATCH)
    text = chat.ask(bundled.question())

    assert text == plain_answers(bundled.pair, 320, (bundled.question(), []))[0]
    seen = chat.page.evaluate("window.seen")
    assert seen[-1] == text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen)), (
        "a text was taken back"
    )

    tokens = chat.numbers("#df-talk .df-run", "--n")
    forwards = len(chat.numbers(".df-strip li", "--a"))
    assert len(tokens) in (forwards, forwards - 1), (
        "the last forward may have written nothing but the end"
    )
    columns = zip(
        chat.numbers(".df-strip li", "--a"), chat.numbers(".df-strip li", "--b"), strict=True
    )
    committed = [accepted + bonus for accepted, bonus in columns]
    assert committed[: len(tokens)] == tokens
    assert max(tokens) > 1, "no run has more than one token: nothing was accepted"
    figures = chat.page.locator(".df-figure strong").all_text_contents()
    assert figures[1] == f"{sum(committed) / forwards:.1f}"
    assert figures[2] == str(forwards + 1)
    assert float(figures[0]) > 0
    shares = chat.numbers(".df-positions li", "--share")
    assert len(shares) == 15
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0
    total = int(str(chat.page.locator(".df-figure small").nth(2).text_content()).split()[1])
    assert total == sum(committed) + 1
    assert chat.page.locator(".df-bonus").count() > 0
    assert f"{total} tokens" in chat.meta()


def test_speed_is_shown_while_the_answer_is_written(
    held: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(held)
    chat.set_length(256)
    held.hold(64)
    chat.send("hello")
    chat.wait_for_letters(64)
    # Nothing comes, and time goes by: tokens by seconds falls.
    speed = chat.page.locator(
        "#df-statistics .df-stats[data-live] .df-figure strong"
    ).first.text_content()
    assert float(str(speed)) > 0
    script = "then => { const now = document.querySelector('#df-statistics .df-stats[data-live] .df-figure strong');"
    chat.page.wait_for_function(
        script + "return now && Number(now.textContent) < then }", arg=float(str(speed))
    )
    held.hold(None)
    assert len(chat.wait("done")) == 256
    assert chat.page.locator("#df-statistics .df-stats[data-live]").count() == 0


def test_image_and_follow_up_are_answered_as_plain_generate_does(
    endless: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    files = [tmp_path / "one.png", tmp_path / "two.png"]
    for seed, file in enumerate(files):
        picture(40, 24 + 16 * seed, seed).save(file)
    chat = open_chat(endless)
    chat.set_length(32)
    turns = [("what is this", [files[0]]), ("and its colour", []), ("and these", files)]
    answers = [chat.ask(text, *images) for text, images in turns]

    assert answers == plain_answers(endless.pair, 32, *turns)
    assert answers != plain_answers(endless.pair, 32, *[(text, []) for text, _ in turns]), (
        "images change nothing"
    )
    assert "prompt tokens from the cache" in chat.meta()
    shown = chat.page.locator(".df-user").nth(2).locator(".df-images img")
    assert shown.count() == 2
    assert all(
        shown.nth(i).evaluate("image => image.complete && image.naturalWidth > 0") for i in range(2)
    )


def test_draft_off_and_a_tiny_top_p_are_plain_generate(
    bundled: Server, open_chat: Callable[..., Chat]
) -> None:
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
    chat.page.click("#df-new")
    chat.page.wait_for_selector(".df-welcome")
    chat.answers = 0
    chat.page.check("#df-draft input")
    chat.set("heat", 1.5)
    chat.set("top-p", 0.05)
    assert chat.ask(bundled.question()) == text


def test_stop_ends_the_run_and_the_chat_goes_on(
    held: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(held)
    chat.set_length(1024)
    held.hold(24)
    for use_draft in (True, False):
        chat.page.set_checked("#df-draft input", use_draft)
        chat.send("tell me everything")
        shown = chat.wait_for_steps(24)
        chat.page.click("#df-box .stop-button")
        assert chat.wait("stopped") == shown
        assert "stopped" in chat.meta()
        if use_draft:
            assert plain_answers(held.pair, len(shown), ("tell me everything", [])) == [shown]
    chat.set_length(16)
    chat.page.set_checked("#df-draft input", True)
    assert len(chat.ask("go on")) == 16


def test_new_chat_ends_the_run_and_nothing_of_it_comes_back(
    held: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(held)
    chat.set_length(1024)
    held.hold(32)  # the old run would wait there for ever, and the new one behind it
    chat.send("tell me everything")
    chat.wait_for_letters(32)
    chat.page.click("#df-new")
    chat.page.wait_for_selector(".df-welcome")
    chat.set_length(16)
    assert chat.ask("hello") == plain_answers(held.pair, 16, ("hello", []))[0]
    held.hold(None)
    assert chat.ask("again") == plain_answers(held.pair, 16, ("hello", []), ("again", []))[1]
    assert chat.page.locator(".df-user p").all_text_contents() == ["hello", "again"]


def test_temperature_changes_the_text_and_length_ends_it(
    endless: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(endless)
    chat.set_length(32)
    greedy = chat.ask("hello")
    assert "32 tokens" in chat.meta()
    chat.page.click("#df-new")
    chat.page.wait_for_selector(".df-welcome")
    chat.answers = 0
    chat.set("heat", 1.5)
    assert chat.ask("hello") != greedy
    assert "32 tokens" in chat.meta()


def test_race_compares_both_ways_token_by_token(
    bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(bundled)
    text = chat.ask(bundled.question())
    assert chat.page.locator(".df-race").get_attribute("data-state") == "none", (
        "the race of another question"
    )
    assert "instead of" in str(chat.page.text_content("h1"))
    chat.page.click("#df-race-start")
    chat.page.wait_for_selector('.df-race[data-state="done"] em')
    verdict = str(chat.page.text_content(".df-verdict"))
    lanes = chat.page.locator(".df-lane-text").all_text_contents()
    assert lanes == [text, text]
    counted = [
        int(str(foot).split()[0])
        for foot in chat.page.locator(".df-lane footer span:first-child").all_text_contents()
    ]
    assert counted[0] == counted[1]
    assert f"identical all {counted[0]} tokens are the same" in verdict
    plain, drafted = chat.numbers(".df-lane", "--seconds")
    assert_headline(chat.page, plain, drafted)
    assert f"{bundled.question()[:30]}" in str(chat.page.text_content(".df-pace"))
    shown = chat.page.locator(".df-lane header span").all_text_contents()
    assert_seconds(shown, [plain, drafted])


def test_page_opens_with_a_true_replay_of_a_raced_example(
    bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(bundled)
    page = chat.page
    [question] = page.locator(".df-user p").all_text_contents()
    assert question in str(page.text_content(".df-pace"))
    [shown] = page.locator("#df-talk .df-text").all_text_contents()
    assert page.locator(".df-lane-text").all_text_contents() == [shown, shown]
    seconds = chat.numbers(".df-lane", "--seconds")
    assert_headline(page, *seconds)
    # Every run appears when it came, at one pace for both, and the longer of the two takes six to twelve seconds.
    [pace] = set(chat.numbers(".df-lane", "--pace"))
    assert 5.9 <= max(seconds) / pace <= 12.1
    lanes = [
        lane.locator("div > span").evaluate_all(DELAYS)
        for lane in page.locator(".df-lane-text").all()
    ]
    assert len(lanes) == 2
    for delays in lanes:
        assert delays[0][1] < delays[-1][1]
        assert all(abs(delay / 1000 - after / pace) < 0.01 for after, delay in delays)
    num_runs = len(chat.numbers(".df-lane-text div > span", "--t"))
    assert len(lanes[0]) + len(lanes[1]) == num_runs
    still = open_chat(bundled, reduced_motion="reduce").page
    assert not still.evaluate("document.getAnimations().length"), (
        "it moves for somebody who wants that nothing moves"
    )


def test_example_can_be_raced_outside_the_conversation(
    bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(bundled)
    before = chat.page.text_content(".df-race")
    chat.page.click("#df-race-start")
    chat.page.wait_for_function(
        "before => { const e = document.querySelector('.df-race[data-state=done]:has(em)');"
        "return e && e.textContent !== before }",
        arg=before,
    )
    assert (
        chat.ask(bundled.question())
        == plain_answers(bundled.pair, 320, (bundled.question(), []))[0]
    )
    assert chat.page.locator(".df-user p").all_text_contents() == [bundled.question()]


def test_answer_can_be_retried_copied_and_read_without_colours(
    endless: Server, open_chat: Callable[..., Chat]
) -> None:
    """By the chatbot's own buttons."""
    chat = open_chat(endless, permissions=["clipboard-read", "clipboard-write"])
    chat.set_length(16)
    first, second = chat.ask("hello"), chat.ask("again")
    chat.set_length(32)
    chat.answers -= 1
    chat.page.get_by_role("button", name="Retry").click()
    chat.page.wait_for_function(
        "document.querySelectorAll('.df-meta')[1]?.textContent.includes('32 tokens')"
    )
    longer = chat.wait("done")
    assert longer == plain_answers(endless.pair, 32, ("hello", []), ("again", []))[
        1
    ] or longer.startswith(second)
    assert chat.page.locator(".df-answer .df-text").first.text_content() == first
    assert chat.page.locator(".df-user p").all_text_contents() == ["hello", "again"]
    text = chat.page.locator("#df-talk .message-content").last
    assert not text.is_visible()
    assert chat.page.locator("#df-talk .df-run").last.is_visible()
    chat.page.uncheck("#df-colours input")
    assert text.is_visible()
    assert str(text.text_content()).strip() == longer.strip()
    assert not chat.page.locator("#df-talk .df-run").last.is_visible()
    chat.page.get_by_role("button", name="Copy message").last.click()
    chat.page.wait_for_function(
        "text => navigator.clipboard.readText().then(copied => copied === text)", arg=longer
    )


def test_system_prompt_comes_before_the_question(
    endless: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(endless)
    chat.set_length(16)
    without = chat.ask("hello")
    chat.page.click("#df-new")
    chat.page.wait_for_function("document.querySelectorAll('.df-user').length === 0")
    chat.answers = 0
    chat.page.fill("#df-system textarea", "Be short.")
    answer = chat.ask("hello")
    assert answer == plain_answers(endless.pair, 16, ("hello", []), system="Be short.")[0]
    assert answer != without


def test_two_sessions_at_once_each_get_their_own_answer(
    held: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    file = tmp_path / "same.png"
    picture(40, 24).save(file)
    first, second = open_chat(held), open_chat(held)
    for chat in (first, second):
        chat.set_length(48)
    turns = [[("one", [file]), ("three", [])], [("two", [file]), ("four", [])]]
    for turn in range(2):
        held.hold(8)
        first.send(turns[0][turn][0], *turns[0][turn][1])
        first.wait_for_letters(8)
        second.send(turns[1][turn][0], *turns[1][turn][1])
        second.page.wait_for_selector('.df-answer[data-state="waiting"]')
        assert "waiting for another" in second.meta()
        held.hold(None)
        texts = [first.wait("done"), second.wait("done")]
        assert texts == [plain_answers(held.pair, 48, *asked[: turn + 1])[turn] for asked in turns]
    assert first.page.locator(".df-user p").all_text_contents() == ["one", "three"]
    assert second.page.locator(".df-user p").all_text_contents() == ["two", "four"]


def test_closing_the_page_ends_its_run(held: Server, open_chat: Callable[..., Chat]) -> None:
    leaving, staying = open_chat(held), open_chat(held)
    leaving.set_length(1024)
    leaving.page.uncheck("#df-draft input")
    held.hold(24)  # a run that nobody ends waits there for ever, and everybody else behind it
    leaving.send("tell me everything")
    leaving.wait_for_letters(24)
    leaving.page.context.close()
    staying.set_length(16)
    assert len(staying.ask("hello")) == 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The page's answers are compared with this process's."""
    torch.set_num_threads(1)
