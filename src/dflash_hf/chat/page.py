"""The web page of the chat: its components, and what happens when. The only module that knows Gradio."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import themes
from starlette.middleware import Middleware
from transformers.utils import logging

from dflash_hf.chat.conversation import Conversation, Sessions, Settings
from dflash_hf.chat.model import ChatModel
from dflash_hf.chat.render import find_examples, render
from dflash_hf.evaluation.image_files import EXTENSIONS, MAX_FILE_BYTES, ImageError, read_image

HERE = Path(__file__).parent
MINUTES = 15  # that an upload is kept; what was asked about it stays in its conversation
SWEPT_EVERY = 30  # seconds
EMPTY: dict[str, Any] = {"text": "", "files": []}  # in the box

Change = dict[Any, Any]  # new values of components; the others stay as they are
logger: Any = logging.get_logger(__name__)


class Page:
    """The page over one model, with the names of target and draft, and the folder of uploads."""

    def __init__(self, model: ChatModel, names: tuple[str, str], uploads: Path) -> None:
        self.model = model
        self.uploads = uploads.resolve()
        self.sessions = Sessions()
        self.examples = find_examples(names[0], model.takes_images)
        self.welcome = render("welcome", model.takes_images, self.examples)
        longest = max(16, min(1024, model.max_length // 2))
        with gr.Blocks(title="DFlash chat", fill_width=True, delete_cache=(SWEPT_EVERY, 60 * MINUTES)) as self.blocks:
            _html(render("header", *names, model.block_size), "df-header")
            with gr.Row(elem_id="df-main"):
                with gr.Column(elem_id="df-chat"):
                    with gr.Column(elem_id="df-scroll"):
                        self.past = _html("", "df-history")
                        script = (HERE / "page.js").read_text(encoding="utf-8")
                        self.newest = _html(self.welcome, "df-current", script)
                    self.sentence = _html("", "df-notice")
                    self.box = self._box()
                    with gr.Row(elem_id="df-settings"):
                        draft = gr.Checkbox(True, label="Draft", elem_id="df-draft")
                        heat = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", elem_id="df-heat")
                        usual = min(320, longest)
                        length = gr.Slider(16, longest, usual, step=16, label="Max tokens", elem_id="df-length")
                        new = gr.Button("New chat", elem_id="df-new", size="sm")
                with gr.Column(elem_id="df-side"):
                    _html(render("legend"), "df-legend-card")
                    self.stats = _html(render("statistics", None), "df-statistics")
                    with gr.Row(elem_id="df-race-head"):
                        _html("<h2>Race</h2>", "df-race-title")
                        self.start = gr.Button("Start", elem_id="df-race-start", size="sm")
                        self.halt = gr.Button("Stop", elem_id="df-race-stop", size="sm", visible=False)
                    self.lanes = _html(render("race", None, None), "df-race")
            parts = [self.box, self.past, self.newest, self.sentence, self.stats, self.lanes, self.start, self.halt]
            changing: dict[str, Any] = {"outputs": parts, "api_visibility": "private", "show_progress": "hidden"}
            # Not "once": the browser would drop a question that is asked while it still closes the run before.
            self.box.submit(self._ask, [self.box, draft, heat, length], trigger_mode="multiple", **changing)
            self.newest.click(self._ask_example, [draft, heat, length], **changing)
            self.start.click(self._race, length, trigger_mode="multiple", **changing)
            gr.on([self.box.stop, self.halt.click], self._stop, queue=False, api_visibility="private")
            new.click(self._new, queue=False, **changing)
            self.blocks.unload(self._leave)

    def _box(self) -> Any:
        """Where messages are written, with images if the target sees them."""
        images = self.model.takes_images
        box: Any = gr.MultimodalTextbox(
            show_label=False,
            elem_id="df-box",
            placeholder="Ask about an image, or anything" if images else "Ask something",
            sources=["upload"] if images else [],
            file_types=list(EXTENSIONS),
            file_count="multiple",
            max_plain_text_length=10**6,  # a long text stays one: it never becomes a file
            autofocus=True,
        )
        keep = box.async_move_resource_to_block_cache

        async def keep_uploads_only(place: str) -> Any:
            """Gradio would fetch an address that stands in the place of an upload."""
            if "://" in place:
                raise gr.Error(f"Expected an uploaded image, got an address: {place}", print_exception=False)
            return await keep(place)

        box.async_move_resource_to_block_cache = keep_uploads_only
        return box

    def _ask(
        self, message: dict[str, Any], use_draft: bool, heat: float, length: float, request: gr.Request
    ) -> Generator[Change]:
        text, files = message["text"], [Path(file) for file in message["files"]]
        examples = [file for shown in self.examples.values() for file in shown]
        uploads = [file for file in files if file.resolve().is_relative_to(self.uploads) and file.is_file()]

        def run(conversation: Conversation) -> Generator[Change]:
            settings = Settings(use_draft=use_draft, temperature=float(heat), max_new_tokens=int(length))
            try:
                self.model.check_message(conversation, text, files)  # before any of them is decoded
                for file in files:
                    if file not in uploads + examples:
                        missing = f"expected {file.name} to be an upload, got none of that name: uploads are deleted"
                        raise ImageError(f"{missing} after {MINUTES} minutes; add it again", file)
                running = self.model.ask(conversation, text, [read_image(file) for file in files], settings)
            except ImageError as error:
                # What was not refused stays, so that the message can be corrected.
                kept = [str(file) for file in uploads if error.path not in (None, file)]
                yield {self.box: gr.update(value={"text": text, "files": kept})}
                raise
            past, newest = render("turns", conversation.turns[:-1]), render("turns", conversation.turns[-1:])
            yield {**self._controls(busy=True, value=EMPTY), self.past: past, self.newest: newest}
            with closing(running):
                for answer in running:
                    newest = render("turns", conversation.turns[-1:])
                    yield {self.newest: newest, self.stats: render("statistics", answer)}

        yield from self._changes(run, request)

    def _ask_example(
        self, use_draft: bool, heat: float, length: float, event: gr.EventData, request: gr.Request
    ) -> Generator[Change]:
        message = {"text": event.text, "files": self.examples[event.text]}
        yield from self._ask(message, use_draft, heat, length, request)

    def _race(self, length: float, request: gr.Request) -> Generator[Change]:
        def run(conversation: Conversation) -> Generator[Change]:
            with closing(self.model.race(conversation, int(length))) as running:
                yield self._controls(busy=True)
                for answers in running:
                    yield {self.lanes: render("race", *answers)}

        yield from self._changes(run, request)

    def _changes(self, run: Callable[[Conversation], Generator[Change]], request: gr.Request) -> Generator[Change]:
        """What a run on the page's conversation changes; what it raises becomes a sentence."""
        conversation = Conversation()
        try:
            with self.sessions.use(_name_of(request)) as conversation, closing(run(conversation)) as changes:
                for change in changes:
                    if conversation.left:
                        break
                    yield change
            yield self._controls(busy=False)
        except ValueError as error:
            yield {self.sentence: render("notice", str(error))}
        except Exception as error:
            logger.error("The chat could not answer.", exc_info=error)
            sentence = f"This could not be answered ({type(error).__name__}); the server's log says more."
            yield {**self._controls(busy=False), self.sentence: render("notice", sentence)}
        if conversation.left:
            yield self._fresh()

    def _stop(self, request: gr.Request) -> None:
        self.sessions.stop(_name_of(request))

    def _new(self, request: gr.Request) -> Any:
        """Begins anew. A run in progress says so itself, last: over its own connection nothing of it comes later."""
        return gr.skip() if self.sessions.forget(_name_of(request)) else self._fresh()

    def _leave(self, request: gr.Request) -> None:
        self.sessions.forget(_name_of(request))

    def _fresh(self) -> Change:
        """The page before the first question."""
        return {
            **self._controls(busy=False, value=EMPTY),
            self.past: "",
            self.newest: self.welcome,
            self.stats: render("statistics", None),
            self.lanes: render("race", None, None),
        }

    def _controls(self, busy: bool, **box: Any) -> Change:
        """What can be pressed while a run is in progress, or while none is; with no sentence left from before."""
        return {
            self.box: gr.update(submit_btn=not busy, stop_btn=busy, **box),
            self.start: gr.update(visible=not busy),
            self.halt: gr.update(visible=busy),
            self.sentence: "",
        }

    def launch(self, host: str, port: int, guards: list[Middleware]) -> None:
        """Serves the page behind its guards until it is interrupted; raises `OSError` if it cannot listen there."""
        self.blocks.queue(max_size=32, default_concurrency_limit=16, api_open=False)
        self.blocks.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            show_error=True,  # what Gradio refuses itself, in its words
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            max_file_size=MAX_FILE_BYTES,
            ssr_mode=False,
            app_kwargs={"middleware": guards, "openapi_url": None},
            # The fonts of the system; the rest is in the style sheet.
            theme=themes.Base(
                primary_hue="blue", neutral_hue="slate", font=["system-ui", "sans-serif"], font_mono="monospace"
            ),
            css_paths=HERE / "page.css",
        )


def _name_of(request: gr.Request) -> str:
    """What a page's conversation is kept under: its own name and its browser's, so that neither alone is enough."""
    return f"{request.state.browser}:{request.session_hash}" if request.session_hash else ""


def _html(value: str, elem_id: str, js_on_load: str | None = None) -> Any:
    """HTML of our own, without Gradio's style for prose."""
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=js_on_load)


__all__ = ["MINUTES", "Page"]
