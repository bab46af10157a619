"""HTTP servers in threads of the tests' own process."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from socketserver import BaseServer

# Seconds between two looks at whether a server shall end: Python's own are half a second, which every test waited for.
POLL_SECONDS = 0.01


@contextmanager
def running(server: BaseServer) -> Generator[None]:
    """Has a server answer within the block, and closes it behind it."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
