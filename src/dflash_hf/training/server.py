"""A server that answers in the target's place.

It has to run the target. Token ids are those that it tells (vLLM does); of others the text is tokenized again. Its
prompts have to be as long as ours are: else its chat template is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from dflash_hf.data.openai_client import (
    Body,
    NoTextError,
    OpenAIClient,
    ServerAnswer,
    at_once,
    sent_messages,
)
from dflash_hf.errors import one_line, require
from dflash_hf.training.messages import ChatTemplate

logger = logging.getLogger(__name__)

Answer = tuple[list[int], bool]  # token ids, and whether it came to its end


def served_model(server: OpenAIClient) -> str:
    """Returns what a server calls its model.

    Raises:
        ValueError: If it cannot be reached, or names none.
    """
    try:
        return server.model
    except httpx.HTTPError as error:
        raise _unreachable(server, error) from error


def served_answers(
    server: OpenAIClient,
    template: ChatTemplate,
    rows: Sequence[Mapping[str, Any]],
    lengths: Sequence[int | None],
    sampling: Mapping[str, Any],
) -> list[Answer]:
    """Returns an answer to each conversation; all are asked at the same time.

    An answer that is no text (calls of tools, a refusal) has no tokens, and the log says why.

    Args:
        rows (sequence of mappings): `messages`, `images` where there are any, `chat_template_kwargs`.
        lengths (sequence of `int`): Tokens of each prompt; `None` where that is not known exactly.
        sampling (mapping): `max_tokens`, `temperature`, `top_p`, `seed` ...

    Raises:
        ValueError: If the server cannot be reached, refuses, or makes other prompts of the messages.
    """
    bodies: list[dict[str, Any]] = []
    for row in rows:
        messages = template.messages(row["messages"], row.get("images") or ())
        body = {"messages": sent_messages(messages), **sampling}
        if row.get("chat_template_kwargs"):
            body["chat_template_kwargs"] = row["chat_template_kwargs"]
        bodies.append(body)

    def ask(body: Body) -> ServerAnswer | NoTextError:
        try:
            return server.ask(body)
        except NoTextError as error:
            return error

    try:
        replies = at_once(ask, bodies)
    except httpx.HTTPError as error:
        raise _unreachable(server, error) from error
    answers: list[Answer] = []
    for reply, length in zip(replies, lengths, strict=True):
        if isinstance(reply, NoTextError):
            logger.warning("an answer is left out: %s", reply)
            answers.append(([], False))
        else:
            answers.append(_checked(server, template, reply, length))
    return answers


def _checked(
    server: OpenAIClient, template: ChatTemplate, reply: ServerAnswer, length: int | None
) -> Answer:
    """The tokens of an answer, if they follow the same prompt as ours."""
    require(
        length is None or reply.prompt_tokens == length,
        f"prompts of {server.url} as ours are, of {length} tokens",
        reply.prompt_tokens,
        "start it with the target, its chat template and no other default of it",
    )
    is_finished = not reply.is_cut
    if reply.token_ids:
        return reply.token_ids, is_finished
    require(
        not reply.thoughts,
        f"answers of {server.url} in one text, or with token_ids",
        "thoughts apart from them",
        "start it without a reasoning parser",
    )
    ids = template.tokens(reply.text)
    if is_finished:
        ids = [*ids, *template.end_of_turn("assistant")[:1]]
    return ids, is_finished


def _unreachable(server: OpenAIClient, error: httpx.HTTPError) -> ValueError:
    return ValueError(
        f"expected answers of {server.url}, got {one_line(error)}; "
        "start it, and run this again: it goes on"
    )
