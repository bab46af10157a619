"""A server with an OpenAI-style `/v1/chat/completions` (vLLM, SGLang, others) that answers in the target's place.

It has to run the target. Token ids are those that it tells (vLLM does, asked with `return_token_ids`); of others the
text is tokenized again. Its prompts have to be as long as ours are: else its chat template is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from dflash_hf.data.openai_client import TIMEOUT, first_model, sent_content
from dflash_hf.errors import one_line, require
from dflash_hf.training.messages import ChatTemplate

Answer = tuple[list[int], bool]  # token ids, and whether it came to its end


class AnswerServer:
    """A server that runs the target.

    Args:
        url (`str`): Where it is; `/v1` may be left out.
        model (`str`, *optional*): What it calls the model; default the first one that it names.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT)

    @property
    def model(self) -> str:
        """What the server calls the model.

        Raises:
            ValueError: If the server cannot be reached, or names none.
        """
        if self._model is None:
            try:
                self._model = first_model(self.client)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
        return self._model

    def answer(
        self,
        template: ChatTemplate,
        rows: Sequence[Mapping[str, Any]],
        lengths: Sequence[int | None],
        sampling: Mapping[str, Any],
    ) -> list[Answer]:
        """Returns an answer to each conversation; all are asked at the same time.

        Args:
            rows (sequence of mappings): `messages`, `images` where there are any, `chat_template_kwargs`.
            lengths (sequence of `int`): Tokens of each prompt; `None` where that is not known exactly.
            sampling (mapping): `max_tokens`, `temperature`, `top_p`, `seed` ...

        Raises:
            ValueError: If the server cannot be reached, refuses, or makes other prompts of the messages.
        """
        bodies: list[dict[str, Any]] = []
        for row in rows:
            prepared = template.messages(row["messages"], row.get("images") or ())
            messages = [
                {**message, "content": sent_content(message["content"])} for message in prepared
            ]
            told = (
                {"chat_template_kwargs": row["chat_template_kwargs"]}
                if row.get("chat_template_kwargs")
                else {}
            )
            bodies.append({"model": self.model, "messages": messages, **sampling, **told})
        try:
            with ThreadPoolExecutor(max_workers=len(rows)) as pool:
                answers = list(pool.map(self._ask, bodies))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return [
            self._answer(template, each, length)
            for each, length in zip(answers, lengths, strict=True)
        ]

    def _unreachable(self, error: httpx.HTTPError) -> ValueError:
        return ValueError(
            f"expected answers of {self.url}, got {one_line(error)}; start it, and run this again: it goes on"
        )

    def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        response = self.client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
        if response.is_error:
            told = f"{response.status_code} {one_line(response.text)}"
            raise httpx.HTTPStatusError(told, request=response.request, response=response)
        return response.json()

    def _answer(
        self, template: ChatTemplate, told: Mapping[str, Any], length: int | None
    ) -> Answer:
        choice: Any = (told.get("choices") or [None])[0]
        is_answer = isinstance(choice, dict) and isinstance(told.get("usage"), dict)
        require(is_answer, f"a choice and usage in what {self.url} answers", told, "see its log")
        prompt = told["usage"].get("prompt_tokens")
        require(
            length is None or prompt == length,
            f"prompts of {self.url} as ours are, of {length} tokens",
            prompt,
            "start it with the target, its chat template and no other default of it",
        )
        finished = choice.get("finish_reason") == "stop"
        if isinstance(choice.get("token_ids"), list):
            return list(choice["token_ids"]), finished
        message = choice.get("message") or {}
        require(
            not message.get("reasoning_content"),
            f"answers of {self.url} in one text, or with token_ids",
            "thoughts apart from them",
            "start it without a reasoning parser",
        )
        ids = template.tokens(message.get("content") or "")
        return [*ids, *(template.end_of_turn("assistant")[:1] if finished else ())], finished
