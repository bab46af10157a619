"""Servers that answer in the target's place.

They have to run the target. Token ids are those that a server tells (vLLM does); the text of others is tokenized
again. Their prompts have to be ours: else the chat template or the tokenizer is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from dflash_hf.data.openai_client import (
    OpenAIClient,
    ServerAnswer,
    run_async,
    sent_messages,
)
from dflash_hf.errors import require, shown
from dflash_hf.training.answer_rows import Answer
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.chat_template import ChatTemplate, Processing
from dflash_hf.training.server_pool import OtherPromptError, ended

HELLO = [{"role": "user", "content": "Hello."}]
HELLO_TOKENS = 8


class ServerCheck:
    """A short question that tells whether a server runs the target as it is trained for.

    Args:
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): The target's.
        chat_template_kwargs (mapping): Of the prompts.
        sampling (mapping): Of all requests: `temperature`, `top_p`, `seed` ...
    """

    def __init__(
        self,
        processing_class: Processing,
        chat_template_kwargs: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> None:
        row: dict[str, Any] = {"messages": HELLO}
        if chat_template_kwargs:
            row["chat_template_kwargs"] = dict(chat_template_kwargs)
        self.template = ChatTemplate(processing_class)
        self.body = request_of(self.template, row, {**sampling, "max_tokens": HELLO_TOKENS})
        self.prompt = ChatDataset([row], processing_class, answers=[[]])[0].input_ids

    async def ask(self, server: OpenAIClient) -> None:
        """Asks a server.

        Raises:
            OtherPromptError: If it has another tokenizer or chat template.
            httpx.HTTPError: If it cannot be reached, or refuses.
            ValueError: If its answer is no text, or has another form.
        """
        reply = await server.ask(self.body)
        checked_answer(server, self.template, reply, len(self.prompt))
        if reply.prompt_ids and reply.prompt_ids != list(self.prompt):
            raise OtherPromptError(
                f"expected prompts of {server.url} with the tokens that ours have, {shown(list(self.prompt))}, got "
                f"{shown(reply.prompt_ids)}; start it with the target and its tokenizer"
            )


def check_servers(servers: Sequence[OpenAIClient], check: ServerCheck) -> str:
    """Asks each server for a short answer, and refuses one that does not run the target as it is trained for.

    Returns:
        `str`: What all of them call the target.

    Raises:
        ValueError: If one cannot be reached, refuses, serves another model than the first, or has another tokenizer or
            chat template.
    """

    async def names_of_all() -> list[str]:
        return [await _checked_name(server, check) for server in servers]

    names = run_async(names_of_all)
    for server, name in zip(servers, names, strict=True):
        require(
            name == names[0],
            f"servers of one target, {shown(names[0])} as at {servers[0].url}",
            f"{name} at {server.url}",
            "start them alike (--served-model-name), or leave one out",
        )
    return names[0]


async def _checked_name(server: OpenAIClient, check: ServerCheck) -> str:
    """Returns what a server calls the target, if it runs the target."""
    try:
        async with server:
            name = await server.model()
            await check.ask(server)
    except httpx.HTTPError as error:
        raise ended([server], error) from error
    return name


def request_of(
    template: ChatTemplate, row: Mapping[str, Any], sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what a server is asked: a conversation and how to answer it.

    Args:
        row (mapping): `messages`, `images` where there are any, `chat_template_kwargs`.
        sampling (mapping): `max_tokens`, `temperature`, `top_p`, `seed` ...
    """
    messages = template.messages(row["messages"], row.get("images") or ())
    body = {"messages": sent_messages(messages), **sampling}
    if row.get("chat_template_kwargs"):
        body["chat_template_kwargs"] = row["chat_template_kwargs"]
    return body


def checked_answer(
    server: OpenAIClient, template: ChatTemplate, reply: ServerAnswer, length: int | None
) -> Answer:
    """Returns an answer as tokens.

    Args:
        length (`int`, *optional*): Tokens of the prompt; `None` where that is not known exactly.

    Raises:
        OtherPromptError: If it follows another prompt than ours, or a part of it is in no token and no text.
    """
    if length is not None and reply.prompt_tokens != length:
        raise OtherPromptError(
            f"expected prompts of {server.url} as ours are, of {length} tokens, got {reply.prompt_tokens}; "
            "start it with the target, its chat template and no other default of it"
        )
    is_finished = not reply.is_cut
    if reply.token_ids:
        return Answer(ids=reply.token_ids, is_finished=is_finished)
    if reply.thoughts:
        raise OtherPromptError(
            f"expected answers of {server.url} in one text, or with token_ids, got thoughts apart from them; "
            "start it without a reasoning parser"
        )
    ids = template.tokens(reply.text)
    is_exact = template.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == reply.text
    if is_finished:
        ids = [*ids, *template.end_of_turn("assistant")[:1]]
    return Answer(ids=ids, is_finished=is_finished, is_exact=is_exact)
