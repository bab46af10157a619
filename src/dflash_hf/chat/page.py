"""The web page of the chat: components, what happens when, and how it is served. The only module that knows Gradio."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import themes
from starlette.middleware import Middleware
from transformers.utils import logging

from dflash_hf.chat import render
from dflash_hf.chat.conversation import Settings
from dflash_hf.chat.examples import find_examples
from dflash_hf.chat.guard import BROWSER, Guard, own_hosts
from dflash_hf.chat.model import ChatModel
from dflash_hf.chat.pictures import EXTENSIONS, MAX_FILE_BYTES, Picture, PictureError, read_picture
from dflash_hf.chat.sessions import Sessions
from dflash_hf.chat.uploads import Uploads

HERE = Path(__file__).parent
SYSTEM = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]

# What an event can change, in the order in which handlers give new values.
PARTS = ("box", "past", "newest", "sentence", "stats", "lanes", "start", "halt")

logger: Any = logging.get_logger(__name__)


class Page:
    """The page over one model. Uploads live in a folder of their own, which goes with the process.

    Args:
        model (`ChatModel`): What answers.
        names (`tuple[str, str]`): Where target and draft came from.
    """

    def __init__(self, model: ChatModel, names: tuple[str, str]) -> None:
        self.model = model
        self.sessions = Sessions()
        # Before any component is made: each notes where uploads go.
        self.uploads = Uploads(Path(tempfile.mkdtemp(prefix="dflash-chat-")))
        atexit.register(shutil.rmtree, self.uploads.folder, ignore_errors=True)
        os.environ["GRADIO_TEMP_DIR"] = str(self.uploads.folder)
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        self.welcome = render.welcome(model.takes_pictures, find_examples(names[0], model.takes_pictures))
        self.blocks = self._build(names)

    def _build(self, names: tuple[str, str]) -> Any:
        title = "DFlash chat"
        longest = max(16, min(1024, self.model.max_length // 2))
        with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as page:
            _html(render.header(*names, self.model.block_size), elem_id="df-header")
            with gr.Row(elem_id="df-main"):
                with gr.Column(elem_id="df-chat"):
                    with gr.Column(elem_id="df-scroll"):
                        past = _html(elem_id="df-history")
                        newest = _html(self.welcome, elem_id="df-current")
                    sentence = _html(elem_id="df-notice")
                    box = self._box()
                    with gr.Row(elem_id="df-settings"):
                        use_draft = gr.Checkbox(True, label="Draft", elem_id="df-draft", min_width=90)
                        heat = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", elem_id="df-heat", min_width=140)
                        length = gr.Slider(
                            16,
                            longest,
                            min(320, longest),
                            step=16,
                            label="Max tokens",
                            elem_id="df-length",
                            min_width=140,
                        )
                        anew = gr.Button("New chat", elem_id="df-new", size="sm", min_width=90)
                with gr.Column(elem_id="df-side"):
                    _html("<h2>Why it is fast</h2>" + render.LEGEND, elem_classes="df-card-head")
                    stats = _html(render.statistics(None), elem_id="df-statistics")
                    with gr.Row(elem_id="df-race-head"):
                        _html("<h2>Race</h2>", elem_classes="df-card-head")
                        start = gr.Button("Start", elem_id="df-race-start", size="sm", min_width=70)
                        halt = gr.Button("Stop", elem_id="df-race-stop", size="sm", min_width=70, visible=False)
                    lanes = _html(render.race_lanes(None), elem_id="df-race")
            parts = [box, past, newest, sentence, stats, lanes, start, halt]
            private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
            # Not "once": the browser would drop a question that is asked while it still closes the run before.
            many: dict[str, Any] = {**private, "concurrency_limit": 16, "trigger_mode": "multiple"}
            now: dict[str, Any] = {**private, "queue": False}
            box.submit(self._ask, [box, use_draft, heat, length], parts, **many)
            start.click(self._race, [length], parts, **many)
            for event in (box.stop, halt.click):
                event(self._stop, None, None, **now)
            anew.click(self._new, None, parts, **now)
            page.unload(self._leave)
        return page

    def _box(self) -> Any:
        pictures = self.model.takes_pictures
        box: Any = gr.MultimodalTextbox(
            show_label=False,
            elem_id="df-box",
            placeholder="Ask about a picture, or anything" if pictures else "Ask something",
            sources=["upload"] if pictures else [],
            file_types=list(EXTENSIONS),
            file_count="multiple",
            max_plain_text_length=10**6,  # a long text stays one: it never becomes a file
            autofocus=True,
        )
        keep = box.async_move_resource_to_block_cache

        async def keep_uploads_only(place: str) -> Any:
            """Gradio would fetch an address that stands in the place of an upload."""
            if "://" in place:
                raise gr.Error(f"Expected an uploaded picture, got an address: {place}", print_exception=False)
            return await keep(place)

        box.async_move_resource_to_block_cache = keep_uploads_only
        return box

    def _ask(
        self, message: dict[str, Any], use_draft: bool, heat: float, length: float, request: gr.Request
    ) -> Generator[list[Any]]:
        """Answers a message; yields new values of `PARTS`."""
        conversation = None
        text, files = str(message["text"] or ""), [str(path) for path in message["files"]]
        try:
            settings = Settings(use_draft=bool(use_draft), temperature=float(heat), max_new_tokens=int(length))
            with self.sessions.use(_name_of(request)) as conversation:
                self.model.check_message(conversation, text, files)  # before any of them is decoded
                pictures = self._read(files)
                answers = self.model.ask(conversation, text, pictures, settings)
                yield _changed(
                    box=self._buttons(True),
                    past=render.history(conversation.turns[:-1]),
                    newest=render.current(conversation),
                    sentence="",
                    start=gr.update(interactive=False),
                )
                with closing(answers) as running:
                    for answer in running:
                        if conversation.left:
                            break
                        yield _changed(newest=render.current(conversation), stats=render.statistics(answer))
                yield _changed(box=self._buttons(False), start=gr.update(interactive=True))
        except PictureError as error:
            # What was not refused stays, so that the message can be mended.
            kept = [path for path in map(Path, files) if error.path not in (None, path) and self._is_there(path)]
            box = gr.update(value={"text": text, "files": [str(path) for path in kept]})
            yield _changed(box=box, sentence=render.notice(str(error)))
        except Exception as error:
            yield _changed(sentence=render.notice(_sentence(error)))
        if conversation is not None and conversation.left:
            yield self._fresh()

    def _race(self, length: float, request: gr.Request) -> Generator[list[Any]]:
        """Runs a race; yields new values of `PARTS`."""
        conversation = None
        try:
            with self.sessions.use(_name_of(request)) as conversation:
                races = self.model.race(conversation, int(length))
                yield _changed(sentence="", start=gr.update(visible=False), halt=gr.update(visible=True))
                with closing(races) as running:
                    for race in running:
                        if conversation.left:
                            break
                        yield _changed(lanes=render.race_lanes(race))
                yield _changed(start=gr.update(visible=True), halt=gr.update(visible=False))
        except Exception as error:
            yield _changed(sentence=render.notice(_sentence(error)))
        if conversation is not None and conversation.left:
            yield self._fresh()

    def _buttons(self, busy: bool) -> Any:
        """The message box during an answer, emptied, with a stop button, and after it."""
        if busy:
            return gr.update(value={"text": "", "files": []}, submit_btn=False, stop_btn=True)
        return gr.update(submit_btn=True, stop_btn=False)

    def _read(self, files: list[str]) -> list[Picture]:
        """Reads uploaded files.

        Raises:
            PictureError: If one is no upload, has been deleted, or cannot be read.
        """
        paths = [Path(file) for file in files]
        for path in paths:
            if not self._is_there(path):
                raise PictureError(
                    f"expected {path.name} to be an upload, got none of that name: uploads are deleted after "
                    f"{self.uploads.live / 60:.0f} minutes; add it again",
                    path,
                )
        return [read_picture(path) for path in paths]

    def _is_there(self, path: Path) -> bool:
        """Whether it is an upload that has not been deleted."""
        return path.resolve().is_relative_to(self.uploads.folder.resolve()) and path.is_file()

    def _stop(self, request: gr.Request) -> None:
        self.sessions.stop(_name_of(request))

    def _new(self, request: gr.Request) -> list[Any]:
        """Begins anew. Where a run is in progress, the run says so itself, as the last thing that it says.

        The browser hears of a run and of a click over two connections: what a run said last could come after the
        fresh page, and stay there.
        """
        return _changed() if self.sessions.forget(_name_of(request)) else self._fresh()

    def _fresh(self) -> list[Any]:
        """The page before the first question."""
        return _changed(
            box=gr.update(value={"text": "", "files": []}, submit_btn=True, stop_btn=False),
            past="",
            newest=self.welcome,
            sentence="",
            stats=render.statistics(None),
            lanes=render.race_lanes(None),
            start=gr.update(visible=True, interactive=True),
            halt=gr.update(visible=False),
        )

    def _leave(self, request: gr.Request) -> None:
        self.sessions.forget(_name_of(request))

    def launch(self, host: str, port: int) -> None:
        """Serves the page until it is interrupted.

        Raises:
            OSError: If the port is taken, or there is no such host.
        """
        guard = Middleware(Guard, uploads=self.uploads, hosts=own_hosts(host))
        self.uploads.sweep_for_ever()
        self.blocks.queue(max_size=32, default_concurrency_limit=16, api_open=False)
        self.blocks.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=False,
            quiet=True,
            show_error=True,  # what Gradio refuses itself, in its words
            footer_links=[],
            run_history=False,
            allowed_paths=[],
            enable_monitoring=False,
            max_file_size=MAX_FILE_BYTES,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            strict_cors=True,
            app_kwargs={"middleware": [guard], "docs_url": None, "redoc_url": None, "openapi_url": None},
            theme=_theme(),
            css=(HERE / "page.css").read_text(encoding="utf-8"),
            js=(HERE / "page.js").read_text(encoding="utf-8"),
        )


def _name_of(request: gr.Request) -> str | None:
    """What a page's conversation is kept under: its own name and its browser's, so that neither alone is enough."""
    page = request.session_hash
    return f"{request.headers[BROWSER]}:{page}" if page else None


def _changed(**parts: Any) -> list[Any]:
    """New values of `PARTS`; those that are not named stay as they are."""
    assert parts.keys() <= set(PARTS)
    skip: Any = gr.skip()
    return [parts.get(name, skip) for name in PARTS]


def _sentence(error: Exception) -> str:
    """What a person is told; errors that are not refusals go to the log with all that is known."""
    if isinstance(error, ValueError):
        return str(error)
    logger.error("The chat could not answer.", exc_info=error)
    return f"This could not be answered ({type(error).__name__}); the server's log says more."


def _html(value: str = "", **options: Any) -> Any:
    """HTML of our own, without Gradio's style for prose."""
    return gr.HTML(value, apply_default_css=False, js_on_load=None, **options)


def _theme() -> Any:
    """System fonts and neutral greys; the rest is in `page.css`."""
    return themes.Base(
        primary_hue=themes.colors.blue,
        neutral_hue=themes.colors.slate,
        font=SYSTEM,
        font_mono=MONO,
        radius_size=themes.sizes.radius_md,
    )


__all__ = ["Page"]
