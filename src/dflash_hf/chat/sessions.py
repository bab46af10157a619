"""Which browser page has which conversation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from dflash_hf.chat.conversation import Conversation

MAX_SESSIONS = 64
MAX_CACHES = 8


class Sessions:
    """Conversations by page, the least recently used first; those too many are dropped."""

    def __init__(self) -> None:
        self._by_page: OrderedDict[str, Conversation] = OrderedDict()
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def use(self, page: str | None) -> Generator[Conversation]:
        """Gives out a page's conversation, a new one for a new page, for one run at a time.

        Raises:
            ValueError: If the page has a run already, or says no name.
        """
        if not page:
            raise ValueError("expected a page with a session, got none; open the chat in a browser")
        with self._lock:
            if page in self._busy:
                raise ValueError("expected one run at a time, got another while one is going on; stop that one first")
            self._busy.add(page)
            conversation = self._by_page.setdefault(page, Conversation())
            self._by_page.move_to_end(page)
            self._drop_surplus()
        try:
            yield conversation
        finally:
            with self._lock:
                self._busy.discard(page)

    def stop(self, page: str | None) -> None:
        """Ends a page's run, if there is one."""
        with self._lock:
            if page in self._by_page:
                self._by_page[page].stop.set()

    def forget(self, page: str | None) -> None:
        """Ends a page's run and drops its conversation with all pictures: the page was closed or starts anew."""
        with self._lock:
            conversation = self._by_page.pop(page, None) if page else None
            if conversation is not None:
                conversation.stop.set()

    def _drop_surplus(self) -> None:
        idle = [page for page in self._by_page if page not in self._busy]
        for page in idle[: max(0, len(self._by_page) - MAX_SESSIONS)]:
            del self._by_page[page]
        with_cache = [page for page in idle if page in self._by_page and self._by_page[page].cache is not None]
        for page in with_cache[: max(0, len(with_cache) - MAX_CACHES)]:
            self._by_page[page].forget()

    def __len__(self) -> int:
        return len(self._by_page)


__all__ = ["Sessions"]
