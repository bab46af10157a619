"""This module builds the web page of the chat and handles its events. No other module uses Gradio's components."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import processing_utils, themes
from starlette.middleware import Middleware
from transformers.utils import logging

from dflash_hf.chat.conversation import Answer, Conversation, Sessions, Settings, Turn
from dflash_hf.chat.images import ChatImage, chat_image
from dflash_hf.chat.model import ChatModel, Race
from dflash_hf.chat.render import find_examples, render
from dflash_hf.data.image_files import EXTENSIONS, MAX_FILE_BYTES, ImageError

HERE = Path(__file__).parent
MINUTES = 15  # how long an upload is kept; images of questions stay in their conversations
SWEPT_EVERY = 30  # seconds
OPENING_TOKENS = 128  # length of the first example's answer
LATEX: list[Any] = [
    {"left": left, "right": right, "display": left != r"\("}
    for left, right in (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"))
]
EMPTY: dict[str, Any] = {"text": "", "files": []}  # the content of the empty box

Change = dict[Any, Any]  # new values of components; other components stay as they are
logger: Any = logging.get_logger(__name__)
# HTML of our own, which is not styled as prose and runs no script.
_html: Any = partial(gr.HTML, apply_default_css=False, js_on_load=None)


def _run(run: Callable[..., Generator[Change]]) -> Callable[..., Generator[Change]]:
    """Makes an event handler of a method that continues a conversation. The page shows an exception as a sentence."""

    def changes(self: Page, data: Change, request: gr.Request) -> Generator[Change]:
        conversation = Conversation()
        try:
            with self.sessions.use(_name_of(request)) as conversation:
                yield from run(self, conversation, data)
            yield self._controls(busy=False)
        except ValueError as error:
            yield {self.sentence: render("notice", str(error))}
        except Exception as error:
            logger.error("The chat could not answer.", exc_info=error)
            sentence = (
                f"This could not be answered ({type(error).__name__}); the server's log says more."
            )
            yield {**self._controls(busy=False), self.sentence: render("notice", sentence)}
        if conversation.left:
            yield self._fresh()

    return changes


async def fetch_nothing(url: str, cache_dir: str) -> str:
    """Replaces Gradio's function that would fetch an address given instead of an upload. It refuses the address."""
    raise gr.Error(f"Expected an uploaded image, got an address: {url}", print_exception=False)


class Page:
    """The page over one model, with the names of target and draft, the folder of uploads, and a note on the model."""

    def __init__(
        self, model: ChatModel, names: tuple[str, str], uploads: Path, note: str = ""
    ) -> None:
        self.model = model
        self.uploads = uploads.resolve()
        self.sessions = Sessions()
        self.examples = find_examples(names[1], model.takes_images)
        # The form into which the chatbot turns HTML. In an event handler, a component would be an update and not a
        # value.
        hello: Any = {"role": "user", "content": _html("")}
        self.part: Any = gr.Chatbot(render=False).postprocess([hello]).root[0].content[0]
        self.opening, race = self._open()
        question = ""
        answer = None
        if self.opening:
            question = self.opening[0].text
            answer = self.opening[0].answer
        longest = max(16, min(1024, model.max_length // 2))
        with gr.Blocks(
            title="DFlash chat", fill_width=True, delete_cache=(SWEPT_EVERY, 60 * MINUTES)
        ) as self.blocks:
            _html(render("header", *names, model.facts, note), elem_id="df-header")
            self.headline = _html(render("headline", answer, race), elem_id="df-headline")
            with gr.Row(elem_id="df-main"):
                with gr.Column(elem_id="df-chat"):
                    self.talk: Any = gr.Chatbot(
                        self._messages(self.opening),
                        elem_id="df-talk",
                        show_label=False,
                        layout="panel",
                        buttons=["copy"],
                        group_consecutive_messages=False,
                        latex_delimiters=LATEX,
                    )
                    script = (HERE / "page.js").read_text(encoding="utf-8")
                    welcome = render("welcome", model.takes_images, self.examples)
                    self.begin = _html(welcome, elem_id="df-begin", js_on_load=script)
                    self.sentence = _html("", elem_id="df-notice")
                    sees = model.takes_images
                    self.box: Any = gr.MultimodalTextbox(
                        show_label=False,
                        elem_id="df-box",
                        placeholder="Ask about an image, or anything" if sees else "Ask something",
                        sources=["upload"] if sees else [],
                        file_types=list(EXTENSIONS),
                        file_count="multiple",
                        # A long text stays a text and never becomes a file.
                        max_plain_text_length=10**6,
                    )
                    with gr.Row(elem_id="df-settings"):
                        draft = gr.Checkbox(True, label="Draft", elem_id="df-draft")
                        # page.css switches the colours.
                        gr.Checkbox(True, label="Colours", interactive=True, elem_id="df-colours")
                        new = gr.Button("New chat", elem_id="df-new", size="sm")
                    with gr.Accordion("Settings", open=False, elem_id="df-more"):
                        heat = gr.Slider(
                            0, 1.5, 0, step=0.1, label="Temperature", elem_id="df-heat"
                        )
                        top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", elem_id="df-top-p")
                        usual = min(320, longest)
                        length = gr.Slider(
                            16,
                            longest,
                            usual,
                            step=16,
                            precision=0,
                            label="Max tokens",
                            elem_id="df-length",
                        )
                        self.system = gr.Textbox(
                            "", label="System prompt", elem_id="df-system", max_length=20_000
                        )
                with gr.Column(elem_id="df-side"):
                    with gr.Row(elem_id="df-race-head"):
                        _html("<h2>Race</h2>", elem_id="df-race-title")
                        self.start = gr.Button("Start", elem_id="df-race-start", size="sm")
                        self.halt = gr.Button(
                            "Stop", elem_id="df-race-stop", size="sm", visible=False
                        )
                    self.lanes = _html(render("race", question, *race), elem_id="df-race")
                    _html(render("legend"), elem_id="df-legend-card")
                    self.stats = _html(
                        render("statistics", answer, model.block_size), elem_id="df-statistics"
                    )
            self.settings = {
                "use_draft": draft,
                "temperature": heat,
                "top_p": top_p,
                "max_new_tokens": length,
            }
            self._connect(new)

    def _connect(self, new: Any) -> None:
        """Connects events with their handlers. All of them are private to the page."""
        parts = [
            self.talk,
            self.begin,
            self.box,
            self.sentence,
            self.headline,
            self.stats,
            self.lanes,
        ]
        parts += [self.start, self.halt]
        changing: dict[str, Any] = {
            "outputs": parts,
            "api_visibility": "private",
            "show_progress": "hidden",
        }
        settings: set[Any] = {*self.settings.values(), self.system}
        # With "once", the browser would drop a question that is asked while it still closes the run before.
        self.box.submit(self._ask, {self.box, *settings}, trigger_mode="multiple", **changing)
        self.begin.click(self._ask_example, settings, **changing)
        self.talk.retry(self._ask_again, settings, **changing)
        self.start.click(self._race, settings, trigger_mode="multiple", **changing)
        gr.on([self.box.stop, self.halt.click], self._stop, queue=False, api_visibility="private")
        gr.on([new.click, self.talk.clear], self._new, queue=False, **changing)
        self.blocks.unload(self._leave)

    def _open(self) -> tuple[list[Turn], Race | tuple[()]]:
        """Races on the first example, once at the start. Every page shows this race until a question is asked."""
        for text, files in [*self.examples.items()][:1]:
            answer = Answer(drafted=True, block_size=self.model.block_size)
            turn = Turn(text=text, images=[chat_image(file) for file in files], answer=answer)
            try:
                for length in (4, OPENING_TOKENS):  # only the first race also loads code
                    *_, race = self.model.race(Conversation(), [turn], length)
            except ValueError as error:  # the example is too long for this target
                logger.warning("The chat opens without an example: %s", error)
                break
            if race[1].agreement is not None:  # otherwise the race failed, and the log says so
                turn.answer = replace(race[1], state="example")
                return [turn], race
        return [], ()

    @_run
    def _ask(self, conversation: Conversation, data: Change) -> Generator[Change]:
        text = data[self.box]["text"]
        files = [Path(file) for file in data[self.box]["files"]]
        uploads = [
            file for file in files if file.resolve().is_relative_to(self.uploads) and file.is_file()
        ]
        try:
            self.model.check_message(conversation, text, files)  # before any image is decoded
            for file in files:
                if file not in [*uploads, *chain(*self.examples.values())]:
                    missing = f"expected {file.name} to be an upload, got none of that name: uploads are deleted"
                    raise ImageError(f"{missing} after {MINUTES} minutes; add it again", file)
            yield from self._answer(conversation, text, [chat_image(file) for file in files], data)
        except ImageError as error:
            # The text and the images that were not refused stay, so that the message can be corrected.
            kept = [str(file) for file in uploads if error.path not in (None, file)]
            yield {self.box: gr.update(value={"text": text, "files": kept})}
            raise

    def _ask_example(
        self, data: Change, event: gr.EventData, request: gr.Request
    ) -> Generator[Change]:
        message = {"text": event.text, "files": self.examples[event.text]}
        yield from self._ask({**data, self.box: message}, request)

    @_run
    def _ask_again(self, conversation: Conversation, data: Change) -> Generator[Change]:
        turns = conversation.turns or self.opening
        if not turns:
            raise ValueError(
                "expected a question to answer again, got an empty conversation; ask something first"
            )
        yield from self._answer(conversation, turns[-1].text, turns[-1].images, data, again=True)

    def _answer(
        self,
        conversation: Conversation,
        text: str,
        images: list[ChatImage],
        data: Change,
        again: bool = False,
    ) -> Generator[Change]:
        """Yields the changes of the page while a question is answered. Raises `ValueError` first if it is refused."""
        settings = Settings(**{name: data[part] for name, part in self.settings.items()})
        conversation.system = str(data[self.system] or "").strip()
        with closing(self.model.ask(conversation, text, images, settings, again)) as running:
            past = self._messages(conversation.turns[:-1])
            box: Change = {}
            if not again:
                box["value"] = EMPTY
            yield {**self._controls(busy=True, **box), self.begin: "", self.lanes: render("race")}
            for answer in running:
                yield {
                    self.talk: [*past, *self._messages(conversation.turns[-1:])],
                    self.headline: render("headline", answer, None),
                    self.stats: render("statistics", answer, self.model.block_size),
                }

    @_run
    def _race(self, conversation: Conversation, data: Change) -> Generator[Change]:
        turns = conversation.turns or self.opening
        with closing(
            self.model.race(conversation, turns, data[self.settings["max_new_tokens"]])
        ) as running:
            yield self._controls(busy=True)
            for race in running:
                views = {self.headline: render("headline", turns[-1].answer, race)}
                yield {**views, self.lanes: render("race", turns[-1].text, *race)}

    def _stop(self, request: gr.Request) -> None:
        self.sessions.stop(_name_of(request))

    def _new(self, request: gr.Request) -> Any:
        """Begins a new chat. A run in progress does this itself at its end, so that none of its changes follow."""
        if self.sessions.forget(_name_of(request)):
            return gr.skip()
        return self._fresh()

    def _leave(self, request: gr.Request) -> None:
        self.sessions.forget(_name_of(request))

    def _fresh(self) -> Change:
        """Returns the page before the first question."""
        views = {part: part.value for part in (self.begin, self.headline, self.lanes, self.stats)}
        return {
            **self._controls(busy=False, value=EMPTY),
            **views,
            self.talk: self._messages(self.opening),
        }

    def _messages(self, turns: list[Turn]) -> list[Any]:
        """Returns turns for the chatbot: question, answer in runs and, at its end, the answer as Markdown."""
        messages: list[Any] = []
        for turn in turns:
            answer = turn.answer
            for role, html in (
                ("user", render("question", turn)),
                ("assistant", render("answer", answer)),
            ):
                content = self.part.model_copy(
                    update={"value": html, "props": {**self.part.props, "value": html}}
                )
                messages.append({"role": role, "content": content})
            if answer.state not in ("waiting", "running") and answer.text.strip():
                # The text is a part and not a `str`, because Gradio would indent the lines of a `str` anew.
                text = {"type": "text", "text": answer.text}
                messages.append({"role": "assistant", "content": text})
        return messages

    def _controls(self, busy: bool, **box: Any) -> Change:
        """Returns the controls for a run in progress, or for none. The sentence of an earlier run is removed."""
        return {
            self.box: gr.update(submit_btn=not busy, stop_btn=busy, **box),
            self.start: gr.update(visible=not busy),
            self.halt: gr.update(visible=busy),
            self.sentence: "",
        }

    def launch(self, host: str, port: int, guards: list[Middleware], share: bool = False) -> None:
        """Serves the page behind its guards until it is interrupted. Raises `OSError` if it cannot listen there."""
        # This replacement refuses addresses instead of files, for every component.
        processing_utils.async_ssrf_protected_download = fetch_nothing
        self.blocks.queue(max_size=32, default_concurrency_limit=16, api_open=False)
        self.blocks.launch(
            server_name=host,
            server_port=port,
            share=share,
            quiet=True,
            show_error=True,  # shows the errors that Gradio itself raises, in its words
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            max_file_size=MAX_FILE_BYTES,
            ssr_mode=False,
            app_kwargs={"middleware": guards, "openapi_url": None},
            # The fonts are the system's. The rest of the style is in the style sheet.
            theme=themes.Base(
                primary_hue="blue",
                neutral_hue="slate",
                font=["system-ui", "sans-serif"],
                font_mono="monospace",
            ),
            css_paths=HERE / "page.css",
        )


def _name_of(request: gr.Request) -> str:
    """Returns the key of a page's conversation: the page's and the browser's name, so that neither alone is enough."""
    if not request.session_hash:
        return ""
    return f"{request.state.browser}:{request.session_hash}"
