"""This module is `dflash-hf chat`, a conversation with a pair in the terminal or on a web page."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dflash_hf.chat.images import ChatImage, chat_image
from dflash_hf.cli.options import MAX_TOKENS, DeviceOption, DtypeOption, HostOption, ThreadsOption
from dflash_hf.cli.pair import (
    BUNDLED,
    IS_CLONE,
    about,
    check_one_pair,
    default_pair,
    given_or_bundled,
)
from dflash_hf.cli.serve import listen
from dflash_hf.data.prompt_files import check_text
from dflash_hf.errors import one_line
from dflash_hf.pair.loading import load_pair

FIRST_LINE = "/help lists the commands; Ctrl-C ends an answer"
HELP = """\
/help            lists the commands
/image PATH      adds an image to the next question
/new             begins a new conversation
/system TEXT     begins a new conversation with this system prompt; without TEXT, with no system prompt
/temperature X   sets the temperature; 0 is greedy
/exit, /quit     ends the chat
Ctrl-C           ends an answer
arrow keys       show earlier questions"""

# Otherwise, images that were refused would make every later question fail too.
LEFT_OUT = "The images of this question are left out; add them again with /image"

if TYPE_CHECKING:
    from dflash_hf.chat.conversation import Answer, Conversation, Settings
    from dflash_hf.chat.model import ChatModel


def chat(
    target: Annotated[str | None, typer.Option(help="Folder or Hub id of the target.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or Hub id of the draft.")] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            help="Name of a bundled pair: text; in an editable install also vision, hybrid or smollm2. Default: "
            "smollm2 if make real has fetched it, else vision with Pillow in an editable install, else text."
        ),
    ] = None,
    web: Annotated[
        bool,
        typer.Option(
            "--web",
            help="Open the chat as a web page. The page needs pip install 'dflash-hf\\[demo]'.",
        ),
    ] = False,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 7860,
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="With --web, make a public link through Gradio's servers. The link has no password.",
        ),
    ] = False,
    system: Annotated[
        str, typer.Option(help="System prompt of a chat in the terminal (without --web).")
    ] = "",
    max_new_tokens: Annotated[
        int,
        typer.Option(
            help="Longest answer in the terminal (without --web), in tokens.", min=1, max=MAX_TOKENS
        ),
    ] = 320,
    temperature: Annotated[
        float,
        typer.Option(
            help="Temperature of the answers in the terminal (without --web); 0 is greedy.",
            min=0.0,
            max=2.0,
        ),
    ] = 0.0,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Chat with a target and its draft. Colours show the guesses of the draft.

    If the target takes images, a chat may have images.
    """
    if web and ":" in host:
        # Gradio would make an invalid address of it, but only after the pair has been loaded.
        raise ValueError(
            f"expected a name or an IPv4 address as --host for --web, got {host!r}; pass localhost or 127.0.0.1"
        )
    check_text(system, "--system", may_be_empty=True, action="type it as UTF-8")
    check_one_pair(pair, target, draft)
    chosen = pair or default_pair()
    target, draft = given_or_bundled(target, draft, chosen, dtype)
    note = about(target, draft)
    if note and IS_CLONE and not pair and chosen != "smollm2":
        note += " To chat with a real model, run make real and start the chat again."
    app: Any = None
    if web:
        app = page_parts(host, port)
    import torch

    from dflash_hf.chat.conversation import Settings
    from dflash_hf.chat.model import ChatModel
    from dflash_hf.pair.answers import warm_up

    console = Console()
    if threads or Path(target).resolve().is_relative_to(BUNDLED):
        torch.set_num_threads(threads or 1)
    with Console(stderr=True).status("loading the pair"):
        model = ChatModel(*load_pair(target, draft, dtype, device))
        warm_up(model.target, model.draft, model.encoder, "Hello.")
    if note:
        console.print(note, style="dim", highlight=False)
    if not web:
        converse(
            model, Settings(max_new_tokens=max_new_tokens, temperature=temperature), console, system
        )
        return
    # SIGTERM then ends the chat as Ctrl-C does, so that the uploads are deleted. Otherwise, Python would exit at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    status = Console(stderr=True).status(
        "measuring the first example, with the draft and without it"
    )
    with status, app.open_page(model, (target, draft), note) as page:
        status.stop()
        console.print(f"The chat is at http://{host}:{port} (Ctrl-C ends it)", highlight=False)
        # Hugging Face sets this name in a Space.
        space = os.environ.get("SPACE_HOST", "")
        guards = app.guards(host, app.Uploads(page.uploads), share, space)
        page.launch(host, port, guards, share)


def page_parts(host: str, port: int) -> Any:
    """Returns the module with the page's parts. Raises `ValueError` if the page cannot be served at this address."""
    # Gradio opens the port itself, after everything is loaded. It also needs the port at 127.0.0.1, for any `host`.
    for name in (host, "127.0.0.1"):
        listen(name, port).close()
    try:
        return import_module("dflash_hf.chat.app")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected Gradio for --web, got no {error.name}; pip install 'dflash-hf[demo]'"
        ) from error


def converse(model: ChatModel, settings: Settings, console: Console, system: str = "") -> None:
    """Reads questions and prints answers as they come, each with its statistics, until the input ends.

    Commands begin with `/`. [`HELP`] lists them. Ctrl-C ends an answer.
    """
    from dflash_hf.chat.conversation import Conversation

    with suppress(ImportError):  # Windows has no readline; with it, `input` has a history
        import_module("readline")
    # Bytes that are not UTF-8 (for example in names of files) are then refused with their line.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    console.print(FIRST_LINE, style="dim", markup=False, highlight=False)
    conversation = Conversation(system=system)
    images = list[ChatImage]()
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            command, _, rest = line.partition(" ")
            if line and command != "/image":
                check_text(line, "a line", action="type it as UTF-8")
            if command in ("/quit", "/exit"):
                return
            if command == "/help":
                console.print(HELP, markup=False, highlight=False)
            elif command == "/new":
                conversation = Conversation(system=conversation.system)
                images = []
            elif command == "/system":
                conversation = Conversation(system=rest.strip())
                images = []
            elif command == "/temperature":
                settings = replace(settings, temperature=_number(rest))
            elif command == "/image":
                found = _image(rest.strip())
                if not model.takes_images:
                    raise ValueError(
                        "expected a text, got an image: this target reads text only; ask without the image"
                    )
                images.append(found)
            elif command.startswith("/") and command[1:].isalpha():
                raise ValueError(
                    f"expected a command of the chat, got {command}; /help lists the commands"
                )
            elif line:
                try:
                    answers = _asked(model, conversation, line, images, settings)
                except ValueError:
                    images = []
                    raise
                images = []
                _answer(answers, console)
        except ValueError as error:
            console.print(str(error), style="red", markup=False, highlight=False)
        except KeyboardInterrupt:  # it came while a prompt or an image was read
            console.print()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"expected a number after /temperature, got {text!r}; 0 is greedy"
        ) from None


def _image(name: str) -> ChatImage:
    if not name:
        raise ValueError("expected a file after /image, got none; write /image PATH")
    try:
        path = Path(name).expanduser()
        is_file = path.is_file()
    # `~` of an unknown user, a name that is too long, or a folder that may not be read.
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"expected an image, got {name}, which cannot be looked for ({one_line(error)}); correct the path"
        ) from error
    if not is_file:
        raise ValueError(f"expected an image, got {path}, which is not there; correct the path")
    return chat_image(path)


def _asked(
    model: ChatModel,
    conversation: Conversation,
    text: str,
    images: list[ChatImage],
    settings: Settings,
) -> Generator[Answer]:
    """Asks a question. If it is refused, the error says that its images are left out."""
    try:
        return model.ask(conversation, text, images, settings)
    except ValueError as error:
        if not images:
            raise
        raise ValueError(f"{error}. {LEFT_OUT}") from error


def _answer(answers: Generator[Answer], console: Console) -> None:
    """Prints one answer, with different styles for accepted proposals and the target's own tokens, and its numbers."""
    shown = 0
    answer = None
    # An interrupt at any place closes the generator, and this ends the run.
    with suppress(KeyboardInterrupt), closing(answers):
        for answer in answers:
            for run in answer.runs[shown:]:
                console.out(
                    run.text, end="", highlight=False, style="blue" if run.num_accepted else None
                )
                console.out(run.bonus, end="", highlight=False, style="underline")
            shown = len(answer.runs)
    console.print()
    if answer is not None and answer.error:
        raise ValueError(answer.error)
    if answer is not None and answer.runs:
        console.print(
            f"{len(answer.ids)} tokens, {len(answer.runs)} forwards, acceptance length "
            f"{answer.counted.acceptance_length:.2f}, {answer.tokens_per_second:.0f} tokens/s",
            style="dim",
            highlight=False,
        )
