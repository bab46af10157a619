"""The parts of the chat that need no model: images, text from ids, pages and their conversations, HTML."""

import io
import json
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image
from rich.console import Console
from transformers.cli.serving.utils import InferenceThread

from dflash_hf.chat.conversation import (
    MAX_SESSIONS,
    Answer,
    Conversation,
    Run,
    Sessions,
    Settings,
    State,
    Turn,
)
from dflash_hf.chat.images import chat_image
from dflash_hf.chat.model import RunStreamer, in_turn
from dflash_hf.chat.render import find_examples, render
from dflash_hf.cli import pair
from dflash_hf.cli.chat import converse
from dflash_hf.data.image_files import (
    KEPT_PIXELS,
    MAX_FILE_BYTES,
    ImageError,
    image_size,
    read_image,
    shrunk_image,
)
from dflash_hf.generation.stats import SpeculativeStats
from dflash_hf.pair.agreement import Agreement
from helpers.processors import picture, qwen_tokenizer

STATES: tuple[State, ...] = get_args(State)


def answered(text: str) -> Turn:
    run = Run(text=text, bonus="", num_tokens=1, num_accepted=0, seconds=0.1)
    return Turn(
        text="question",
        images=[],
        answer=Answer(drafted=True, block_size=4, runs=[run], state="done"),
    )


# ---- images


def test_images_become_upright_rgb(tmp_path: Path) -> None:
    image = picture(48, 32)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png")[0].size == (32, 48)

    seen_through = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    seen_through.save(tmp_path / "alpha.png")
    assert read_image(tmp_path / "alpha.png")[0].getpixel((0, 0)) == (255, 255, 255)

    Image.new("I;16", (4, 4), 32768).save(tmp_path / "deep.png")
    assert set(read_image(tmp_path / "deep.png")[0].getpixel((1, 1))) <= {127, 128}

    image.convert("CMYK").save(tmp_path / "cmyk.tiff")
    found = read_image(tmp_path / "cmyk.tiff")[0]
    assert found.mode == "RGB"
    assert max(abs(a - b) for a, b in zip(found.tobytes(), image.tobytes(), strict=True)) <= 2


def test_first_frame_of_an_animation_is_read_and_said(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    found = chat_image(tmp_path / "a.gif")
    assert found.note == "first of 3 frames"
    assert found.image.getpixel((0, 0)) == (255, 0, 0)


def test_large_images_are_kept_small_or_never_decoded(tmp_path: Path) -> None:
    Image.new("L", (4000, 3000)).save(tmp_path / "large.png")
    kept = read_image(tmp_path / "large.png")[0]
    assert 0.99 * KEPT_PIXELS < kept.width * kept.height <= KEPT_PIXELS
    assert kept.width / kept.height == pytest.approx(4 / 3, rel=1e-2)
    Image.new("1", (9000, 9000)).save(tmp_path / "larger.png")
    for limit in (KEPT_PIXELS // 4, 2 * KEPT_PIXELS, 16_000_000):
        data = shrunk_image(tmp_path / "large.png", None, limit)
        shrunk = Image.open(io.BytesIO(data))
        size = min(limit, 4000 * 3000)
        assert 0.99 * size < shrunk.width * shrunk.height <= size
    with pytest.raises(
        ValueError, match=r"at most 64 megapixels, got larger\.png with 9000 × 9000 \(81\)"
    ):
        read_image(tmp_path / "larger.png")
    (tmp_path / "heavy.png").write_bytes(bytes(MAX_FILE_BYTES + 1))
    with pytest.raises(ValueError, match=r"at most 20 MB"):
        read_image(tmp_path / "heavy.png")


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg xmlns='x'/>"]
)
def test_what_is_no_image_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"^expected an image .*, got x\.png"):
        read_image(tmp_path / "x.png")


def _with_exif(exif: bytes) -> bytes:
    """A picture whose Exif may be damaged, as PNG."""
    buffer = io.BytesIO()
    picture(48, 32).save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def _without_dimensions() -> bytes:
    """The first frame of a TIFF, and a second one without a tag."""
    buffer = io.BytesIO()
    picture(48, 32).save(buffer, "TIFF")
    data = bytearray(buffer.getvalue())
    data += bytes(len(data) % 2)
    first = int.from_bytes(data[4:8], "little")
    number = int.from_bytes(data[first : first + 2], "little")
    following = first + 2 + 12 * number
    data[following : following + 4] = len(data).to_bytes(4, "little")
    return bytes(data) + bytes(6)


# As Transformers' and Datasets' readers refuse them
@pytest.mark.parametrize(
    "data",
    [_with_exif(b"II*\0"), _with_exif(b"MM\0*\0\0\0"), _with_exif(b"II"), _without_dimensions()],
    ids=["a cut-off beginning", "a cut-off place", "no beginning", "a frame without a size"],
)
def test_an_image_with_damaged_tags_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(data)
    for where, what in ((path, None), (Path("x.png"), data)):
        with pytest.raises(ImageError, match=r"got x\.png, which is none or is damaged; choose an"):
            read_image(where, what)


@pytest.mark.parametrize("exif", [b"II*\0", b"MM\0*\0\0\0", b"II"])
def test_damaged_tags_do_not_say_a_size(exif: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(_with_exif(exif))
    assert image_size(str(path)) is None
    assert image_size(Image.open(path)) is None


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tif"])
@pytest.mark.parametrize("turn", [1, 3, 6])
def test_the_size_by_the_header_is_the_upright_images(kind: str, turn: int, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    exif = Image.Exif()
    exif[0x0112] = turn
    picture(48, 32).save(path, exif=exif)
    image = read_image(path)[0]
    assert image_size(str(path)) == (image.height, image.width)
    assert image_size(Image.open(path)) == (image.height, image.width)


# ---- text from ids


def texts_of(runs: list[list[int]]) -> list[str]:
    """The texts of ids that come together."""
    reader = streamer(threading.Event())
    for ids in ([], *runs):  # the prompt first
        reader.put(torch.tensor(ids))
    reader.update()
    return [run.text for run in reader.answer.runs]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_text_of_runs_joins_to_the_whole_text(size: int) -> None:
    tokenizer: Any = qwen_tokenizer()  # a token is a byte: characters span up to four of them
    text = "naïve – 日本語, 🙂🙃 and é"
    ids = tokenizer(text)["input_ids"]
    parts = texts_of([ids[start : start + size] for start in range(0, len(ids), size)])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_bytes_that_are_no_character_come_out_in_the_end() -> None:
    tokenizer: Any = qwen_tokenizer()
    broken = tokenizer("é")["input_ids"][:1]
    text = "".join(texts_of([*([one] for one in broken * 12), tokenizer("ok")["input_ids"]]))
    assert text.endswith("ok")
    assert "\ufffd" in text


# ---- runs and pages


def streamer(stop: threading.Event) -> RunStreamer:
    tokenizer: Any = qwen_tokenizer()
    return RunStreamer(Answer(drafted=False, block_size=4), stop, tokenizer)


def last_of(thread: InferenceThread, runs: RunStreamer, call: Callable[[], None]) -> Answer:
    *_, answer = in_turn(thread, runs, call, 0.01)
    return answer


def test_stop_ends_a_run_and_the_wait_for_one() -> None:
    thread, stop, free = InferenceThread(), threading.Event(), threading.Event()
    runs = streamer(stop)

    def run() -> None:
        for _ in range(2):
            runs.put(torch.tensor([1]))
        stop.set()
        runs.put(torch.tensor([1]))

    answer = last_of(thread, runs, run)
    assert (answer.state, len(answer.runs)) == ("stopped", 1)
    thread.submit(free.wait)
    assert (
        last_of(thread, streamer(stop), lambda: pytest.fail("it did not wait")).state == "stopped"
    )
    free.set()
    thread.submit(int).result()


def test_stop_before_the_first_token_waits_for_nothing() -> None:
    thread, stop, prefilled = InferenceThread(), threading.Event(), threading.Event()

    def prefill() -> None:
        stop.set()
        prefilled.wait()

    assert last_of(thread, streamer(stop), prefill).state == "stopped"
    assert not prefilled.is_set()
    prefilled.set()


def test_leaving_ends_the_run_and_errors_become_sentences() -> None:
    thread, stop, over = InferenceThread(), threading.Event(), threading.Event()

    def forever() -> None:
        if stop.wait(60):
            over.set()
            raise CancelledError

    running = in_turn(thread, streamer(stop), forever, 0.01)
    assert next(running).state in ("waiting", "running")
    assert not over.is_set()
    running.close()
    assert over.wait(30)

    def fail() -> None:
        raise KeyError("secret")

    answer = last_of(thread, streamer(threading.Event()), fail)
    assert (answer.state, "KeyError" in answer.error, "secret" in answer.error) == (
        "failed",
        True,
        False,
    )
    assert last_of(thread, streamer(threading.Event()), lambda: None).state == "done", (
        "nobody gets a turn any more"
    )


def test_pages_have_conversations_of_their_own() -> None:
    sessions = Sessions()
    with sessions.use("a") as first, sessions.use("b") as second:
        assert first is not second
        with pytest.raises(ValueError, match="one run at a time"), sessions.use("a"):
            pass
    with sessions.use("a") as again:
        assert again is first
        sessions.stop("a")
        assert first.stop.is_set()
        assert not second.stop.is_set()
        sessions.forget("a")
    with sessions.use("a") as new:
        assert new is not first
    with pytest.raises(ValueError, match="session"), sessions.use(""):
        pass
    for index in range(2 * MAX_SESSIONS):
        with sessions.use(str(index)):
            pass
    assert len(sessions) <= MAX_SESSIONS


def test_unanswered_turns_are_not_part_of_the_conversation() -> None:
    failed = Turn(
        text="failed", images=[], answer=Answer(drafted=True, block_size=4, state="failed")
    )
    asked = Turn(text="now", images=[], answer=Answer(drafted=True, block_size=4))
    conversation = Conversation(turns=[answered("yes"), failed, asked])
    assert [m["content"] for m in conversation.messages(in_parts=False)] == [
        "question",
        "yes",
        "now",
    ]
    assert conversation.messages(in_parts=True)[2]["content"] == [{"type": "text", "text": "now"}]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": 9.0},
        {"max_new_tokens": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^expected"):
        Settings(**settings)


# ---- HTML and examples


def test_nothing_that_was_written_is_markup() -> None:
    text = "<script>x</script> & \"quoted\" 'too' ${1} {{value}} `y`"
    turn = Turn(text=text, images=[], answer=answered(text).answer)
    turn.answer.runs.append(Run(text=text, bonus=text, num_tokens=2, num_accepted=1, seconds=0.2))
    for page in (
        render("question", turn),
        render("answer", turn.answer),
        render("notice", text),
        render("header", text, text, text, text),
        render("race", text, None, None),
    ):
        assert not any(raw in page for raw in ("<script", "${", "{{", "`", 'd="q'))


def test_race_that_differs_says_where() -> None:
    plain = Answer(drafted=False, block_size=4, ids=[1, 2, 3], seconds=2.0, state="done")
    drafted = Answer(drafted=True, block_size=4, ids=[1, 2, 4], seconds=1.0, state="done")
    drafted.agreement = Agreement(
        sentence="differs from token 3 on, where it is wrong", token=2, is_tie=False
    )
    page = " ".join(render("race", "?", plain, drafted).split())
    assert "not identical</em> the answer differs from token 3 on, where it is wrong" in page
    drafted.agreement = Agreement(
        sentence="differs from token 3 on, where logits tie", token=2, is_tie=True
    )
    page = " ".join(render("race", "?", plain, drafted).split())
    assert "rounding tie</em> the answer differs from token 3 on, where logits tie" in page
    assert "not identical" not in page
    drafted.ids, drafted.agreement = [1, 2, 3], Agreement(sentence="identical")
    assert "all 3 tokens are the same" in render("race", "?", plain, drafted)


def lane(state: Any, drafted: bool, seconds: float, *sizes: int) -> Answer:
    """An answer that came in runs of these sizes."""
    runs = [
        Run(text="a" * n, bonus="b", num_tokens=n, num_accepted=n - 1, seconds=seconds)
        for n in sizes
    ]
    return Answer(
        drafted=drafted,
        block_size=4,
        ids=[1] * sum(sizes),
        runs=runs,
        state=state,
        seconds=seconds if runs else 0.0,
    )


SAME = Agreement(sentence="identical")


def headline(plain_seconds: float, drafted_seconds: float, agreement: Agreement = SAME) -> str:
    """What is said of a race in which every step but the first wrote two of nine tokens."""
    plain, drafted = (
        lane("done", False, plain_seconds, *[1] * 9),
        lane("done", True, drafted_seconds, 1, 2, 2, 2, 2),
    )
    drafted.agreement = agreement
    drafted.undrafted_seconds = 0.9 * plain_seconds
    return re.sub(r"<[^>]*>", "", " ".join(render("headline", None, (plain, drafted)).split()))


def test_headline_says_how_much_faster_or_why_not() -> None:
    fast = headline(4.0, 1.0)
    assert "Same answer, 4.0× faster" in fast
    assert "5 steps of the big model instead of 9; the draft guessed in 4 of them." in fast
    compared = "4.0× the speed of Transformers’ generate, and 3.6× that of this package without"
    assert compared in fast
    assert "does not pay" not in fast
    assert "Same answer, 12× faster" in headline(12.0, 1.0)
    for slow in (headline(1.0, 1.0), headline(1.0, 1.5)):
        assert "Same answer, no faster here" in slow
        assert "slower" not in slow
        assert slow.count("does not pay for this question on this machine") == 1
    tie = Agreement(sentence="differs from token 3 on", token=2, is_tie=True)
    assert "4.0× faster, with a rounding tie" in headline(4.0, 1.0, tie)
    assert "Same answer" not in headline(4.0, 1.0, tie)
    # Where the package's own loop is quick and the draft is not, the draft is not praised.
    assert "does not pay" in headline(1.1, 1.0)


def test_steps_without_a_draft_are_not_counted_as_its_own() -> None:
    answer = lane("done", True, 1.0, 1, 2, 1, 1)
    assert answer.num_drafted_steps == 3
    answer.stats = SpeculativeStats(
        num_committed=[[2, 1, 1]], num_accepted=[[1, 0, 0]], num_proposed=3
    )
    answer.stats.verify_widths = [4, 1, 1]
    assert answer.num_drafted_steps == 1


def test_every_part_can_be_shown_in_every_state() -> None:
    lanes = [
        lane(state, drafted, 1.0, *sizes)
        for state in STATES
        for drafted in (False, True)
        for sizes in ((), (1,), (1, 3))
    ]
    for answer in [None, *lanes]:
        assert "df-figures" in render("statistics", answer, 4)
        assert "<h1>" in render("headline", answer, None)
        assert answer is None or "df-meta" in render("answer", answer)
    for plain in lanes:
        for drafted in [lane("waiting", True, 0.0)] if plain.state != "done" else lanes:
            assert "df-lane-draft" in render("race", "what", plain, drafted)
            assert "<h1>" in render("headline", drafted, (plain, drafted))


def test_examples_are_the_pair_s_own_prompts(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "pictures").mkdir()
    picture(16, 16).save(tmp_path / "pictures" / "a.png")
    outside = tmp_path.parent / "outside.png"
    picture(16, 16).save(outside)

    def row(kind: str, text: str, *paths: str, turns: int = 1) -> dict[str, Any]:
        content = [{"type": "image", "path": path} for path in paths] + [
            {"type": "text", "text": text}
        ]
        return {
            "kind": kind,
            "messages": [{"role": "user", "content": content if paths else text}] * turns,
        }

    rows = [
        row("talk", "hi"),
        row("see", "what", "pictures/a.png"),
        row("see", "second", "pictures/a.png"),
    ]
    rows += [
        row("out", "x", "../outside.png"),
        row("gone", "x", "pictures/b.png"),
        row("long", "x", turns=3),
    ]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = find_examples(str(tmp_path / "draft"), takes_images=True)
    assert list(found.items()) == [("what", [tmp_path / "pictures" / "a.png"]), ("hi", [])]
    assert list(find_examples(str(tmp_path / "draft"), takes_images=False)) == ["hi"]
    assert find_examples("z-lab/Qwen3-8B-DFlash-b16", takes_images=True) == {}


# ---- the pair to chat with


def test_the_real_pair_is_taken_where_it_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = tmp_path / "demos" / "toy"
    monkeypatch.setattr(pair, "CLONE", tmp_path)
    assert pair.default_pair() == "text", "an installed package has none of them"
    for place in (toy, toy / "vision", tmp_path / "demos" / "smollm2"):
        (place / "target").mkdir(parents=True)
        (place / "draft").mkdir()
    assert pair.default_pair() == "vision", "the target of smollm2 was not fetched"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "PIL", None)
        assert pair.default_pair() == "text", "images need Pillow"
    (tmp_path / "build" / "smollm2" / "target").mkdir(parents=True)
    assert pair.default_pair() == "smollm2"
    (tmp_path / "build" / "smollm2" / "target-bf16").mkdir(parents=True)
    draft = f"{tmp_path}/demos/smollm2/draft"
    for is_quick, target in ((True, "target-bf16"), (False, "target")):
        monkeypatch.setattr(pair, "has_bfloat16_instructions", lambda quick=is_quick: quick)
        monkeypatch.setattr("dflash_hf.devices.accelerator", lambda: None)
        folders = pair.named_pair("smollm2")
        assert folders == (f"{tmp_path}/build/smollm2/{target}", draft)
        assert pair.about(*folders) == pair.ABOUT["smollm2"]
    assert pair.named_pair("smollm2", "bfloat16")[0].endswith("target-bf16")
    assert pair.named_pair("smollm2", "float32")[0].endswith("target")
    assert "the shape at a place" in pair.about(
        f"{toy}/vision/../vision/target", f"{toy}/vision/draft"
    )
    assert pair.about(f"{toy}/vision/target", f"{toy}/draft") == "", "a draft for another target"


# ---- the terminal


class Refusing:
    """In place of a model: refuses the first message, and notes what it is asked."""

    def __init__(self, takes_images: bool, refusal: type[ValueError] = ValueError) -> None:
        self.takes_images = takes_images
        self.refusal = refusal
        self.asked: list[tuple[str, int]] = []

    def ask(
        self, conversation: Conversation, text: str, images: list[Any], settings: Settings
    ) -> Any:
        self.asked.append((text, len(images)))
        if len(self.asked) == 1:
            raise self.refusal("expected less, got [/more]; [bold]shorten it")
        return (answer for answer in [Answer(drafted=False, block_size=4, state="done")])


def typed(model: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the terminal shows for these lines, up to the end of input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    shown = io.StringIO()
    converse(model, Settings(), Console(file=shown, width=1000))
    return shown.getvalue()


# Too many images, or too many tokens of them, are a `ValueError`: kept, they would refuse every later question too
@pytest.mark.parametrize("refusal", [ValueError, ImageError])
def test_terminal_shows_sentences_and_drops_refused_images(
    refusal: type[ValueError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(8, 8).save(tmp_path / "a.png")
    model = Refusing(takes_images=True, refusal=refusal)
    image = f"/image {tmp_path}/a.png"
    shown = typed(
        model, [image, "/image [/nowhere].png", "one", "two", image, "three"], monkeypatch
    )
    assert "got [/nowhere].png, which is not there" in shown
    assert "got [/more]; [bold]shorten it" in shown
    assert shown.count("The images of this question are left out; add them again with /image") == 1
    assert model.asked == [("one", 1), ("two", 0), ("three", 1)]


def test_terminal_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Refusing(takes_images=True)
    model.asked.append(("", 0))  # refuses no more
    seen: list[tuple[str, float, int]] = []
    ask = model.ask

    def noting(conversation: Conversation, text: str, images: list[Any], settings: Settings) -> Any:
        seen.append((conversation.system, settings.temperature, len(images)))
        return ask(conversation, text, images, settings)

    model.ask = noting  # type: ignore[method-assign]
    lines = [
        "/help",
        "/image",
        "/nonsense",
        "one",
        "/temperature 0.5",
        "/system Be short.",
        "two",
        "/new",
        "three",
    ]
    shown = typed(
        model,
        [*lines, "/temperature x", "/temperature 9", "/system", "four", "/exit", "five"],
        monkeypatch,
    )
    assert shown.count("adds an image to the next question") == 1
    assert "expected a file after /image, got none" in shown
    assert "expected a command of the chat, got /nonsense; /help lists the commands" in shown
    assert "expected a number after /temperature, got 'x'" in shown
    assert "expected a temperature from 0 (greedy) to 2, got 9.0" in shown
    assert seen == [("", 0.0, 0), ("Be short.", 0.5, 0), ("Be short.", 0.5, 0), ("", 0.5, 0)]


def test_a_system_prompt_comes_before_all_turns() -> None:
    conversation = Conversation(system="Be short.")
    answer = Answer(drafted=False, block_size=4)
    conversation.turns = [Turn(text="hi", images=[], answer=answer)]
    assert conversation.messages(False) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]
    assert conversation.messages(True)[0]["content"] == [{"type": "text", "text": "Be short."}]


def test_terminal_refuses_an_image_for_a_target_that_reads_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(8, 8).save(tmp_path / "a.png")
    model = Refusing(takes_images=False)
    assert "reads text only" in typed(model, [f"/image {tmp_path}/a.png", "one"], monkeypatch)
    assert model.asked == [("one", 0)]


NO_IMAGES = ["~nobody-of-this-name/a.png", "a" * 300]


@pytest.mark.parametrize("name", NO_IMAGES, ids=["home of nobody", "too long"])
def test_terminal_goes_on_behind_a_path_that_cannot_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Refusing(takes_images=True)
    shown = typed(model, [f"/image {name}", "one"], monkeypatch)
    assert f"expected an image, got {name}, which cannot be looked for" in shown
    assert model.asked == [("one", 0)]


def test_terminal_goes_on_behind_bytes_that_are_no_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Refusing(takes_images=True)
    model.asked.append(("", 0))  # refuses no more
    lines = io.TextIOWrapper(io.BytesIO(b"one\n\xff\n/system \xff\ntwo\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    shown = io.StringIO()
    converse(model, Settings(), Console(file=shown, width=1000))  # type: ignore[arg-type]
    assert shown.getvalue().count("expected a text of whole characters as a line") == 2
    assert [text for text, _ in model.asked[1:]] == ["one", "two"]


def test_an_interrupt_while_text_is_written_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    lines: list[tuple[str, int]] = []  # of the terminal, and how many runs had ended before

    class Interrupted(Console):
        def out(self, *objects: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        def print(self, *objects: Any, **options: Any) -> None:
            lines.append((" ".join(map(str, objects)), len(ended)))

    class Writing(Refusing):
        def ask(
            self, conversation: Conversation, text: str, images: list[Any], settings: Settings
        ) -> Any:
            answer = Answer(drafted=False, block_size=4, state="running")
            answer.runs = [Run(text="a", bonus="", num_tokens=1, num_accepted=0, seconds=0.1)]
            try:
                yield answer
            finally:
                ended.append(text)

    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/help\n"))
    converse(Writing(takes_images=False), Settings(), Interrupted())  # type: ignore[arg-type]
    first, end_of_answer, *_, answer_to_help = lines
    assert (first[1], end_of_answer) == (0, ("", 1))
    assert "adds an image" in answer_to_help[0], "the chat goes on"


def test_an_interrupt_while_a_prompt_is_read_ends_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Refusing(takes_images=False)
    model.asked.append(("", 0))  # refuses no more
    ask = model.ask

    def interrupted(
        conversation: Conversation, text: str, images: list[Any], settings: Settings
    ) -> Any:
        if text == "one":
            raise KeyboardInterrupt
        return ask(conversation, text, images, settings)

    model.ask = interrupted  # type: ignore[method-assign]
    typed(model, ["one", "two"], monkeypatch)
    assert model.asked[1:] == [("two", 0)]
