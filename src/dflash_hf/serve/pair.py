"""This module holds the pair that is served, and the facts about it that a request needs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel
from transformers.cli.serving.utils import get_response_template

from dflash_hf.data.prompt_files import with_text_parts
from dflash_hf.errors import is_a
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import PROBE, Processor, rendered, renders_texts, tokenizer_of
from dflash_hf.serve.engine import Engine
from dflash_hf.serve.markup import CALLS
from dflash_hf.serve.metrics import Metrics
from dflash_hf.serve.rows import BatchEngine, rows_for

DEFAULT_TOKENS = 1024  # of an answer, unless the request sets a limit or the target a higher one


class Pair:
    """A target with its draft and its tokenizer or processor, as clients see it.

    Args:
        target, draft, processor: The pair.
        name (`str`): The name of the model for clients.
        encoding (`dict`): Options of the chat template. A request may replace them.
        note (callable): Gets a line of text about each request.
        max_rows (`int`, *optional*): Maximum number of answers that are decoded together; by default [`rows_for`].
        max_kept_bytes (`int`): Maximum size of the keys and values that are kept from the last texts.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        processor: Processor,
        *,
        name: str,
        encoding: dict[str, Any],
        note: Callable[[str], None],
        max_rows: int | None = None,
        max_kept_bytes: int = 2**30,
    ) -> None:
        self.target: Any = target
        self.processor: Any = processor
        self.tokenizer = tokenizer_of(processor)
        self.name = name
        self.encoding = encoding
        self.note = note
        config = target.config.get_text_config(decoder=True)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 2**31)
        self.vocab_size = int(config.vocab_size)
        # A text with more letters has too many tokens for the target. So it is refused before it is tokenized.
        self.max_letters = self.max_length * max(map(len, self.tokenizer.get_vocab()))
        self.template = str(
            getattr(processor, "chat_template", None) or self.tokenizer.chat_template or ""
        )
        self.takes_images = processor is not self.tokenizer
        self.takes_parts = self.takes_images or self._renders_parts()
        self.takes_texts = not self.takes_images or renders_texts(processor)
        self.takes_developer = self._renders_developer()
        # Says how thoughts and calls of tools are marked in an answer. It is empty if the marks are not known.
        self.markup: dict[str, Any] = self._response_template()
        self.vocabulary: Any = None  # llguidance's; made when a form is asked for
        own_limit: Any = self.target.generation_config.max_new_tokens
        self.default_tokens = DEFAULT_TOKENS
        if is_a(own_limit, int) and own_limit > DEFAULT_TOKENS:
            self.default_tokens = own_limit
        self.metrics = Metrics(name)
        self.max_rows = max_rows or rows_for(target)
        self.engine: Engine = BatchEngine(
            target, draft, self.tokenizer, note, self.max_rows, max_kept_bytes
        )

    @property
    def finds_calls(self) -> bool:
        """Whether the server can find calls of tools in an answer."""
        return CALLS in self.markup.get("fields", {})

    def _response_template(self) -> dict[str, Any]:
        markup = get_response_template(self.processor, self.target) or {}
        calls = markup.get("fields", {}).get("tool_calls", {})
        # Qwen3-Coder has the model types of Qwen3. But its chat template asks for calls in the form of Qwen3.5.
        asks_for_xml = calls.get("content") == "json" and "<function=" in self.template
        if asks_for_xml:
            other: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_5"))
            markup = get_response_template(None, other) or {}
        return markup

    def _renders_parts(self) -> bool:
        """Returns whether the chat template renders a list of text parts as text, and not as Python prints a list."""
        parts = [{"type": "text", "text": PROBE}]
        text = rendered(self.processor, [{"role": "user", "content": parts}])
        return PROBE in text and "'type'" not in text and '"type"' not in text

    def _renders_developer(self) -> bool:
        """Returns whether the chat template writes the turns of a developer. Some templates drop or refuse them."""
        turns = [{"role": "developer", "content": PROBE}, {"role": "user", "content": "Hello."}]
        if not self.takes_texts:
            turns = with_text_parts(turns)
        return PROBE in rendered(self.processor, turns)
