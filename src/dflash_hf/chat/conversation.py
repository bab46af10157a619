"""This module holds what a chat remembers: turns, the runs of each answer, and the cache for the next turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from transformers import DynamicCache

from dflash_hf.chat.branches import Tried
from dflash_hf.chat.images import ChatImage
from dflash_hf.data.sampling import NO_FILTERS
from dflash_hf.errors import require
from dflash_hf.generation.stats import SpeculativeStats
from dflash_hf.pair.agreement import Agreement

MAX_SESSIONS = 64
MAX_CACHES = 8
MAX_IMAGE_BYTES = 2**30  # decoded, of all conversations
MAX_DROPPED = 1024  # dropped conversations whose pages are told so when they return

# "waiting" means that another page's run is in progress.
State = Literal["waiting", "running", "done", "stopped", "failed", "example"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of an answer. Raises `ValueError` for numbers that make no sense."""

    use_draft: bool = True
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 leaves out no token
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        require(
            0 <= self.temperature <= 2,
            "a temperature from 0 (greedy) to 2",
            self.temperature,
            "change it",
        )
        require(
            0 < self.top_p <= 1,
            "a top-p above 0, and up to 1 (all tokens)",
            self.top_p,
            "change it",
        )
        require(
            self.max_new_tokens >= 1,
            "answers of at least 1 token",
            self.max_new_tokens,
            "change it",
        )

    def for_generate(self) -> dict[str, Any]:
        """Returns the arguments for `generate`. They override the sampling settings of the target's own config."""
        if not self.temperature:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {
            **NO_FILTERS,
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": float(self.temperature),
            "top_k": 0,
            "top_p": self.top_p,
        }


@dataclass(slots=True, kw_only=True)
class Run:
    """Tokens that were committed together: by the prefill, by one verify, or by one plain forward."""

    text: str  # without the text of the bonus token
    bonus: str  # text of the target's own token, which comes last
    num_tokens: int  # including the bonus token
    num_accepted: int  # how many of them are proposals of the draft
    seconds: float  # from the start of the call until the tokens arrived
    tried: Tried | None = None  # other continuations that the verify of a tree has checked


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer that is complete or still being written."""

    drafted: bool
    block_size: int  # most tokens that one forward of the target can commit
    ids: list[int] = field(default_factory=list[int])  # including an end-of-sequence token
    runs: list[Run] = field(default_factory=list[Run])  # in order; the first is the prefill's token
    state: State = "waiting"
    seconds: float = 0.0  # since the call of `generate`; at the end, those of the whole call
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # tokens of the prompt that were in the cache already
    stats: SpeculativeStats | None = None  # the run's own, once it has ended with a draft
    agreement: Agreement | None = None  # with plain `generate`, at the end of a race
    # Seconds of this package's own loop without the draft. They are 0 until the end of a race.
    undrafted_seconds: float = 0.0
    error: str = ""  # why the answer failed

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(run.text + run.bonus for run in self.runs)

    @property
    def counted(self) -> SpeculativeStats:
        """The statistics of the verifies so far. At the end they are those of `stats`."""
        return SpeculativeStats(
            num_committed=[[run.num_tokens for run in self.runs[1:]]],
            num_accepted=[[run.num_accepted for run in self.runs[1:]]],
            num_proposed=self.block_size - 1,
        )

    @property
    def accepted_from(self) -> tuple[int, int, int] | None:
        """The accepted proposals by their source: the draft's first choices, its branches, and the earlier text.

        They are counted before any cut. The value is `None` until a run that verified trees has ended.
        """
        if self.stats is None or not self.stats.num_tried_by_node:
            return None
        total = sum(map(sum, self.stats.num_accepted))
        from_text = self.stats.num_accepted_from_text
        off_branch = sum(run.tried.num_off_branch for run in self.runs if run.tried)
        return total - off_branch - from_text, off_branch, from_text

    @property
    def num_drafted_steps(self) -> int:
        """Number of steps with a draft. `generate` leaves the draft out of a step in which it would not pay."""
        if self.stats is None or not self.stats.verify_widths:
            return len(self.runs[1:])
        return sum(width > 1 for width in self.stats.verify_widths)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, prefill included; 0 before the first token."""
        if not self.seconds:
            return 0.0
        return len(self.ids) / self.seconds


@dataclass(slots=True, kw_only=True)
class Turn:
    """A message with its answer."""

    text: str
    images: list[ChatImage]
    answer: Answer


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """One person's conversation."""

    # Finished turns, except for the newest one, which may be running.
    turns: list[Turn] = field(default_factory=list[Turn])
    system: str = ""  # what the target reads before all turns
    # The cache after the last drafted answer, with the draft's context attached. The tensor `[1, C]` holds the tokens
    # of its columns.
    cache: tuple[DynamicCache, Tensor] | None = None
    busy: bool = False  # whether a run is in progress
    # Ends the run in progress. Every run has its own event.
    stop: threading.Event = field(default_factory=threading.Event)
    left: bool = False  # whether the person left or began a new conversation during a run

    def begin(self) -> None:
        """Gives a new run its own `stop`, unless [`Sessions.use`] has already done so."""
        if not self.busy:
            self.stop = threading.Event()

    @property
    def read_turns(self) -> list[Turn]:
        """The turns that the target reads for the next answer: the newest, and all earlier ones with an answer."""
        return [turn for turn in self.turns[:-1] if turn.answer.text] + self.turns[-1:]

    def messages(self, in_parts: bool) -> list[dict[str, Any]]:
        """Returns the conversation up to the newest question, for a tokenizer or (`in_parts`) a processor."""
        said: list[tuple[str, str, list[ChatImage]]] = []
        if self.system:
            said.append(("system", self.system, []))
        for turn in self.read_turns:
            said += [("user", turn.text, turn.images), ("assistant", turn.answer.text, [])]
        messages: list[dict[str, Any]] = []
        for role, text, images in said[:-1]:  # the newest answer is not there yet
            if not in_parts:
                messages.append({"role": role, "content": text})
                continue
            parts: list[dict[str, Any]] = [{"type": "image", "image": one.image} for one in images]
            parts.append({"type": "text", "text": text})
            messages.append({"role": role, "content": parts})
        return messages

    @property
    def num_bytes(self) -> int:
        """Bytes that its images take in memory."""
        images = [image for turn in self.turns for image in turn.images]
        return sum(3 * one.image.width * one.image.height + len(one.thumbnail) for one in images)


class Sessions:
    """The conversations by browser page, the least recently used first.

    If there are too many conversations, or their images are too large together, some are dropped. Their pages are told
    so when they return. Conversations that are being answered are never dropped. (Gradio's `gr.State` tells nobody,
    drops conversations that are being answered, and does not count bytes.)
    """

    def __init__(self) -> None:
        self._by_page: OrderedDict[str, Conversation] = OrderedDict()
        self._dropped: deque[str] = deque(maxlen=MAX_DROPPED)  # pages
        self._lock = threading.Lock()

    @contextmanager
    def use(self, page: str) -> Generator[Conversation]:
        """Gives a page's conversation for one run at a time. A new page gets a new conversation.

        Raises `ValueError` if the page already has a run or has no name. Also raises it once if its conversation was
        dropped.
        """
        require(bool(page), "a page with a session", page, "open the chat in a browser")
        with self._lock:
            if page in self._dropped:
                self._dropped.remove(page)
                raise ValueError(
                    "expected a conversation that is still held here, got one that was dropped as the least recently "
                    f"used: at most {MAX_SESSIONS} are held at once, and images of {MAX_IMAGE_BYTES / 2**20:.0f} MB; "
                    "send the message again to begin a new one"
                )
            conversation = self._by_page.setdefault(page, Conversation())
            if conversation.busy:
                raise ValueError(
                    "expected one run at a time, got a second one before the first has ended; stop the first one"
                )
            # The run begins here, so that a stop that comes while the message is read is not lost.
            conversation.begin()
            conversation.busy = True
            self._by_page.move_to_end(page)
            self._drop_surplus()
        try:
            yield conversation
        finally:
            with self._lock:
                conversation.busy = False
                if conversation.left:
                    del self._by_page[page]
                self._drop_surplus()

    def stop(self, page: str) -> None:
        """Ends a page's run, if there is one."""
        with self._lock:
            self._by_page.get(page, Conversation()).stop.set()

    def forget(self, page: str) -> bool:
        """Drops a page's conversation because it was closed or begins anew. A run in progress is ended first.

        Returns True if a run is in progress. Its conversation is then marked as `left`, and dropped when the run ends.
        """
        with self._lock:
            self._dropped = deque((other for other in self._dropped if other != page), MAX_DROPPED)
            conversation = self._by_page.get(page, Conversation())
            conversation.left = conversation.busy
            conversation.stop.set()
            if not conversation.busy:
                self._by_page.pop(page, None)
            return conversation.busy

    def _drop_surplus(self) -> None:
        """Drops conversations and caches until the limits are kept. Conversations that are being answered stay."""
        for page, held in [(page, held) for page, held in self._by_page.items() if not held.busy]:
            num_bytes = sum(other.num_bytes for other in self._by_page.values())
            if len(self) > MAX_SESSIONS or (num_bytes > MAX_IMAGE_BYTES and held.num_bytes):
                del self._by_page[page]
                if held.turns:  # nobody misses an empty conversation
                    self._dropped.append(page)
        for held in [held for held in self._by_page.values() if held.cache and not held.busy][
            :-MAX_CACHES
        ]:
            held.cache = None

    def __len__(self) -> int:
        return len(self._by_page)
