"""This module checks servers that answer instead of a local target, builds their requests and reads their answers.

The servers must run the target. If a server returns token ids (vLLM does), these ids are used. Otherwise the text is
tokenized again. The server must encode a prompt into the same tokens as the local processor. Different tokens mean
that its chat template or its tokenizer is not the target's.
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
    """A short question that checks whether a server has the target's tokenizer and chat template.

    Args:
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): The target's tokenizer or processor.
        chat_template_kwargs (mapping): The options of the chat template in the prompts.
        sampling (mapping): The sampling options of all requests, such as `temperature`, `top_p` and `seed`.
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
        """Asks a server the question.

        Raises:
            OtherPromptError: If the server has another tokenizer or chat template.
            httpx.HTTPError: If the server cannot be reached, or refuses the request.
            ValueError: If the answer has no text, or another form.
        """
        reply = await server.ask(self.body)
        checked_answer(server, self.template, reply, len(self.prompt))
        if reply.prompt_ids and reply.prompt_ids != list(self.prompt):
            raise OtherPromptError(
                f"expected prompts of {server.url} with the tokens that ours have, {shown(list(self.prompt))}, got "
                f"{shown(reply.prompt_ids)}; start it with the target and its tokenizer"
            )


def check_servers(servers: Sequence[OpenAIClient], check: ServerCheck) -> str:
    """Asks each server a short question, and refuses a server with another model, tokenizer or chat template.

    Returns:
        `str`: The name of the target, which is the same on all servers.

    Raises:
        ValueError: If a server cannot be reached, refuses the request, serves another model than the first server, or
            has another tokenizer or chat template.
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
    """Returns the name of the target on a server, after checking the server."""
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
    """Returns the body of a request: a conversation and the options of the answer.

    Args:
        row (mapping): A row with `messages`, and optionally `images` and `chat_template_kwargs`.
        sampling (mapping): Options such as `max_tokens`, `temperature`, `top_p` and `seed`.
    """
    messages = template.messages(row["messages"], row.get("images") or ())
    body = {"messages": sent_messages(messages), **sampling}
    if row.get("chat_template_kwargs"):
        body["chat_template_kwargs"] = row["chat_template_kwargs"]
    return body


def checked_answer(
    server: OpenAIClient, template: ChatTemplate, reply: ServerAnswer, length: int | None
) -> Answer:
    """Returns the tokens of a server's answer.

    Args:
        length (`int`, *optional*): The number of tokens of the prompt, or `None` if it is not known exactly.

    Raises:
        OtherPromptError: If the server's prompt has another length, or if the answer has thoughts apart from its text.
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
