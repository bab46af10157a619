"""Which browser page has which conversation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from dflash_hf.chat.conversation import Conversation

MAX_SESSIONS = 64
MAX_CACHES = 8
MAX_PICTURE_BYTES = 2**30  # decoded, of all conversations
MAX_DROPPED = 1024  # pages that are told, when they return, that their conversation was dropped


class Sessions:
    """Conversations by page, the least recently used first.

    Those too many, or with too many pictures together, are dropped, and their pages are told when they return. What is
    being answered stays.
    """

    def __init__(self) -> None:
        self._by_page: OrderedDict[str, Conversation] = OrderedDict()
        self._busy: set[str] = set()
        self._dropped: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def use(self, page: str | None) -> Generator[Conversation]:
        """Gives out a page's conversation, a new one for a new page, for one run at a time.

        Raises:
            ValueError: If the page has a run already, or says no name, or once if its conversation was dropped.
        """
        if not page:
            raise ValueError("expected a page with a session, got none; open the chat in a browser")
        with self._lock:
            if page in self._busy:
                raise ValueError("expected one run at a time, got another while one is going on; stop that one first")
            if reason := self._dropped.pop(page, ""):
                raise ValueError(
                    f"expected a conversation that is still held here, got one that was dropped as the least recently "
                    f"used: {reason}; send the message again to begin a new one"
                )
            self._busy.add(page)
            conversation = self._by_page.setdefault(page, Conversation())
            self._by_page.move_to_end(page)
            self._drop_surplus()
        try:
            yield conversation
        finally:
            with self._lock:
                self._busy.discard(page)
                self._drop_surplus()

    def stop(self, page: str | None) -> None:
        """Ends a page's run, if there is one."""
        with self._lock:
            if page in self._by_page:
                self._by_page[page].stop.set()

    def forget(self, page: str | None) -> bool:
        """Ends a page's run and drops its conversation with all pictures: the page was closed or starts anew.

        Returns:
            `bool`: Whether a run was in progress; its conversation is then marked as `left`.
        """
        with self._lock:
            self._dropped.pop(page or "", None)
            conversation = self._by_page.pop(page, None) if page else None
            if conversation is None:
                return False
            conversation.left = page in self._busy
            conversation.stop.set()
            return conversation.left

    def _drop_surplus(self) -> None:
        idle = [page for page in self._by_page if page not in self._busy]
        for page in idle[: max(0, len(self._by_page) - MAX_SESSIONS)]:
            self._drop(page, f"at most {MAX_SESSIONS} are held at once")
        held = {page: conversation.num_bytes for page, conversation in self._by_page.items()}
        for page in [page for page in idle if held.get(page)]:
            if sum(held.values()) > MAX_PICTURE_BYTES:
                del held[page]
                self._drop(page, f"the pictures of all of them may take {MAX_PICTURE_BYTES / 2**20:.0f} MB")
        with_cache = [page for page in idle if page in self._by_page and self._by_page[page].cache is not None]
        for page in with_cache[: max(0, len(with_cache) - MAX_CACHES)]:
            self._by_page[page].forget()

    def _drop(self, page: str, reason: str) -> None:
        if self._by_page.pop(page).turns:  # nobody misses an empty one
            self._dropped[page] = reason
        while len(self._dropped) > MAX_DROPPED:
            self._dropped.popitem(last=False)

    def __len__(self) -> int:
        return len(self._by_page)


__all__ = ["Sessions"]
