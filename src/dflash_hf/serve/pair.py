"""The pair that is served, and what a request needs to know of it."""

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

DEFAULT_TOKENS = 1024  # of an answer, where neither the request nor the target says more


class Pair:
    """A target with its draft and its tokenizer or processor, as clients ask for it.

    Args:
        target, draft, processor: The pair.
        name (`str`): What clients call it.
        encoding (`dict`): Options of the chat template, where a request has none.
        note (callable): Gets a line about each request.
        max_rows (`int`, *optional*): Answers that are decoded together, at most; by default [`rows_for`].
        max_kept_bytes (`int`): Size of the keys and values that are kept of the last texts, at most.
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
        # More letters are more tokens than the target takes; that need not be found out by reading them.
        self.max_letters = self.max_length * max(map(len, self.tokenizer.get_vocab()))
        self.template = str(
            getattr(processor, "chat_template", None) or self.tokenizer.chat_template or ""
        )
        self.takes_images = processor is not self.tokenizer
        self.takes_parts = self.takes_images or self._renders_parts()
        self.takes_texts = not self.takes_images or renders_texts(processor)
        self.takes_developer = self._renders_developer()
        # How thoughts and calls of tools are marked in an answer; empty where nothing is known of it.
        self.markup: dict[str, Any] = self._response_template()
        self.vocabulary: Any = None  # llguidance's, made where a form is asked for
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
        """Whether calls of tools are found in an answer."""
        return CALLS in self.markup.get("fields", {})

    def _response_template(self) -> dict[str, Any]:
        markup = get_response_template(self.processor, self.target) or {}
        calls = markup.get("fields", {}).get("tool_calls", {})
        # Qwen3-Coder has the model types of Qwen3, but its chat template asks for calls as Qwen3.5 writes them.
        asks_for_xml = calls.get("content") == "json" and "<function=" in self.template
        if asks_for_xml:
            other: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_5"))
            markup = get_response_template(None, other) or {}
        return markup

    def _renders_parts(self) -> bool:
        """Whether the chat template renders a list of text parts itself, and not as Python would print it."""
        parts = [{"type": "text", "text": PROBE}]
        text = rendered(self.processor, [{"role": "user", "content": parts}])
        return PROBE in text and "'type'" not in text and '"type"' not in text

    def _renders_developer(self) -> bool:
        """Whether the chat template writes turns of a developer, and neither leaves them out nor refuses them."""
        turns = [{"role": "developer", "content": PROBE}, {"role": "user", "content": "Hello."}]
        if not self.takes_texts:
            turns = with_text_parts(turns)
        return PROBE in rendered(self.processor, turns)
