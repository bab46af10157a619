"""This module is `dflash-hf serve`, which serves a pair with OpenAI's interface, by Starlette and Uvicorn."""

from __future__ import annotations

import re
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dflash_hf.cli.options import (
    DeviceOption,
    DtypeOption,
    HostOption,
    NoThinkingOption,
    PairOption,
    ThreadsOption,
    template_options,
)
from dflash_hf.cli.pair import BUNDLED, check_one_pair, given_or_bundled
from dflash_hf.data.prompt_files import NO_OPTIONS_OF_A_SERVER
from dflash_hf.errors import one_line, require
from dflash_hf.pair.loading import load_pair

if TYPE_CHECKING:
    from dflash_hf.serve.pair import Pair

KEPT_GIB = 1.0  # by default


def serve(
    target: Annotated[str | None, typer.Option(help="Folder or Hub id of the target.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or Hub id of the draft.")] = None,
    pair: PairOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 chooses a free port.", min=0, max=65535)
    ] = 8000,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may ask the server from a browser, such as http://localhost:3000; * allows "
            "all origins. Repeat for each origin; default: none.",
        ),
    ] = None,
    no_thinking: NoThinkingOption = False,
    chat_template_kwargs: Annotated[
        str,
        typer.Option(
            help="Options of the chat template, as JSON. A request may have its own options."
        ),
    ] = "{}",
    threads: ThreadsOption = None,
    max_rows: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of answers decoded together; default: 8 on a CPU, 1 on a GPU.",
            min=1,
        ),
    ] = None,
    kept_gib: Annotated[
        float | None,
        typer.Option(
            help="GiB for the keys and values of earlier texts. A request that begins with an earlier text uses "
            "these keys and values again. 0 keeps nothing, and so does --max-rows 1; default: 1.",
            min=0.0,
            max=4096.0,
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Serve a target and its draft to OpenAI clients: chats and plain completions.

    A client gives the value of --pair or --target as the name of the model.
    If the target takes images, a chat may have images. Several requests are decoded together.
    """
    check_one_pair(pair, target, draft)
    if target is None and draft is not None:
        raise ValueError(
            "expected --target beside --draft, got --draft alone; give both, or give --pair"
        )
    origins = checked_origins(cors_origin or [])
    encoding = template_options(chat_template_kwargs, no_thinking, NO_OPTIONS_OF_A_SERVER)
    name = target or pair or "text"
    target, draft = given_or_bundled(target, draft, name, dtype)
    max_kept_gib = KEPT_GIB
    if kept_gib is not None:
        max_kept_gib = kept_gib
    with listen(host, port) as listening:
        parts = server_parts()
        import torch

        from dflash_hf.pair.answers import warm_up

        if threads or Path(target).resolve().is_relative_to(BUNDLED):
            torch.set_num_threads(threads or 1)
        with Console(stderr=True).status("loading the pair"):
            loaded = load_pair(target, draft, dtype, device)
            served = parts.Pair(
                *loaded,
                name=name,
                encoding=encoding,
                note=note,
                max_rows=max_rows,
                max_kept_bytes=int(max_kept_gib * 2**30),
            )
            # The warm-up runs in the thread that will answer requests.
            served.engine.call(warm_up, *loaded, "Hello.")
        for line in remarks(served, no_thinking, kept_gib):
            typer.echo(line, err=True)
        address = f"[{host}]" if ":" in host else host
        place = f"http://{address}:{listening.getsockname()[1]}/v1"
        typer.echo(f"{name} is served at {place} (Ctrl-C ends it)", err=True)
        # Without this handler, Python would exit at once on SIGTERM.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        parts.Server(served, parts.guards(host, origins)).run(sockets=[listening])


def checked_origins(origins: list[str]) -> list[str]:
    """Returns origins as browsers send them. Raises `ValueError` for an origin that no browser would send."""
    for origin in origins:
        # Origins are compared letter by letter, and browsers write host names in lower case.
        is_origin = re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@*A-Z\s]+", origin) is not None
        what = "an origin as --cors-origin, such as http://localhost:3000, or *"
        action = "give scheme, host and port alone, in lower case"
        require(is_origin or origin == "*", what, origin, action)
    return origins


def remarks(served: Pair, no_thinking: bool, kept_gib: float | None) -> list[str]:
    """Returns a line about what cannot be found in this pair's answers, and about each option without an effect."""
    found: list[str] = []
    if served.template and not served.markup:
        kind = served.target.config.model_type
        found.append(
            f"Transformers has no response template for {kind}, so reasoning stays in the text of an answer, and "
            "requests with tools are refused"
        )
    elif served.template and not served.finds_calls:
        kind = served.target.config.model_type
        found.append(
            f"Transformers' response template for {kind} has no calls of tools, so requests with tools are refused"
        )
    if no_thinking and "enable_thinking" not in served.template:
        found.append("the chat template has no enable_thinking, so --no-thinking changes nothing")
    if kept_gib and served.max_rows == 1:
        found.append(
            "answers are decoded one at a time, and nothing is kept of them, so --kept-gib changes nothing; raise "
            "--max-rows"
        )
    return found


def note(line: str) -> None:
    """Writes a line to stderr. If nobody reads stderr any more, answers continue."""
    # For example after `dflash-hf serve 2>&1 | head`. An error here would be raised in the engine's thread.
    with suppress(OSError):
        typer.echo(line, err=True)


def server_parts() -> Any:
    """Returns the module with the server's parts. Raises `ValueError` if a package that it needs is missing."""
    import transformers
    from transformers.utils import import_utils

    try:
        if not getattr(import_utils, "is_serve_available", bool)():
            raise ModuleNotFoundError(name="FastAPI, Uvicorn or openai")
        return import_module("dflash_hf.serve.app")
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or str(error.name).startswith("transformers"):
            what = "a Transformers whose server has a thread for runs (5.16 to 5.24 do)"
            found = f"{transformers.__version__} ({one_line(error)})"
            raise ValueError(f"expected {what}, got {found}; install one of them") from error
        sentence = f"expected the packages of the server, got no {error.name}; pip install 'dflash-hf[serve]'"
        raise ValueError(sentence) from error


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at this address. Raises `ValueError` if that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        found = f"{host}:{port} ({str(error.strerror).partition(' (')[0]})"
        raise ValueError(
            f"expected a place to listen, got {found}; pass another --host or --port"
        ) from error
