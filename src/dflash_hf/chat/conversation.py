"""What a chat remembers: turns, the runs that each answer came in, and the cache that the next turn goes on from."""

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
MAX_DROPPED = 1024  # pages that are told, when they return, that their conversation was dropped

# Waiting for another page's run
State = Literal["waiting", "running", "done", "stopped", "failed", "example"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to answer; `ValueError` for numbers that make no sense."""

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
        """Returns the keywords for `generate`; what the target's own config says about sampling does not count."""
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

    text: str  # without the bonus token's
    bonus: str  # text of the target's own token, which comes last
    num_tokens: int  # the bonus included
    num_accepted: int  # proposals of the draft among them
    seconds: float  # when they arrived, from the start of the call
    tried: Tried | None = None  # what a verify of a tree looked at beside them


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer, as far as it has come."""

    drafted: bool
    block_size: int  # most tokens that one forward of the target can commit
    ids: list[int] = field(default_factory=list[int])  # an end-of-sequence token included
    runs: list[Run] = field(default_factory=list[Run])  # in order; the first is the prefill's token
    state: State = "waiting"
    seconds: float = 0.0  # since the call of `generate`, at the end the call's
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, that were in the cache already
    stats: SpeculativeStats | None = None  # the run's own, once it has ended with a draft
    agreement: Agreement | None = None  # with plain `generate`'s, at the end of a race
    # What this package's own loop takes without the draft, at the end of a race; before it 0
    undrafted_seconds: float = 0.0
    error: str = ""  # why it failed

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(run.text + run.bonus for run in self.runs)

    @property
    def counted(self) -> SpeculativeStats:
        """The figures of the verifies so far; at the end they are those of `stats`."""
        return SpeculativeStats(
            num_committed=[[run.num_tokens for run in self.runs[1:]]],
            num_accepted=[[run.num_accepted for run in self.runs[1:]]],
            num_proposed=self.block_size - 1,
        )

    @property
    def accepted_from(self) -> tuple[int, int, int] | None:
        """Accepted proposals, before any cut, by where they came from, once a run that verified trees has ended.

        The draft's first choices, what its branches led to, and what the text before had led to.
        """
        if self.stats is None or not self.stats.num_tried_by_node:
            return None
        total = sum(map(sum, self.stats.num_accepted))
        from_text = self.stats.num_accepted_from_text
        off_branch = sum(run.tried.num_off_branch for run in self.runs if run.tried)
        return total - off_branch - from_text, off_branch, from_text

    @property
    def num_drafted_steps(self) -> int:
        """Steps for which the draft guessed: `generate` leaves it out of a step where it would not pay."""
        if self.stats is None or not self.stats.verify_widths:
            return len(self.runs[1:])
        return sum(width > 1 for width in self.stats.verify_widths)

    @property
    def tokens_per_second(self) -> float:
        """Prefill included; 0 before the first token."""
        if not self.seconds:
            return 0.0
        return len(self.ids) / self.seconds


@dataclass(slots=True, kw_only=True)
class Turn:
    """A message and its answer."""

    text: str
    images: list[ChatImage]
    answer: Answer


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """One person's conversation."""

    # Finished ones; the newest may be running
    turns: list[Turn] = field(default_factory=list[Turn])
    system: str = ""  # what the target reads before all turns
    # After the last drafted answer, with the draft's context attached, and the tokens of its columns, `[1, C]`.
    cache: tuple[DynamicCache, Tensor] | None = None
    busy: bool = False  # a run is in progress
    # Ends the run in progress; every run has its own
    stop: threading.Event = field(default_factory=threading.Event)
    left: bool = False  # the person began a new one, or went, while a run was in progress

    def begin(self) -> None:
        """Gives the run that begins its own `stop`, unless [`Sessions.use`] has done so."""
        if not self.busy:
            self.stop = threading.Event()

    @property
    def read_turns(self) -> list[Turn]:
        """Those that the target reads at the next answer: the newest, and before it those with an answer."""
        return [turn for turn in self.turns[:-1] if turn.answer.text] + self.turns[-1:]

    def messages(self, in_parts: bool) -> list[dict[str, Any]]:
        """The conversation up to the newest question, for a processor's template (`in_parts`) or a tokenizer's."""
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
        """Memory that its images take."""
        images = [image for turn in self.turns for image in turn.images]
        return sum(3 * one.image.width * one.image.height + len(one.thumbnail) for one in images)


class Sessions:
    """Which browser page has which conversation, the least recently used first.

    Those too many, or with too many images together, are dropped, and their pages are told when they return; what is
    being answered stays. (Gradio's `gr.State` tells nobody, drops that too, and counts no bytes.)
    """

    def __init__(self) -> None:
        self._by_page: OrderedDict[str, Conversation] = OrderedDict()
        self._dropped: deque[str] = deque(maxlen=MAX_DROPPED)  # pages
        self._lock = threading.Lock()

    @contextmanager
    def use(self, page: str) -> Generator[Conversation]:
        """Gives out a page's conversation, a new one for a new page, for one run at a time.

        Raises `ValueError` if the page has a run already, or says no name, or once if its conversation was dropped.
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
            # From here on, so that who stops while a message is read is heard
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
        """Drops a page's conversation, which was closed or starts anew: at once, or where its run ends by that.

        Returns True if a run is in progress; its conversation is then marked as `left`.
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
        """Keeps within the limits, among those that are not being answered."""
        for page, held in [(page, held) for page, held in self._by_page.items() if not held.busy]:
            num_bytes = sum(other.num_bytes for other in self._by_page.values())
            if len(self) > MAX_SESSIONS or (num_bytes > MAX_IMAGE_BYTES and held.num_bytes):
                del self._by_page[page]
                if held.turns:  # nobody misses an empty one
                    self._dropped.append(page)
        for held in [held for held in self._by_page.values() if held.cache and not held.busy][
            :-MAX_CACHES
        ]:
            held.cache = None

    def __len__(self) -> int:
        return len(self._by_page)
