"""Makes anything that waits for the device an error, on any device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from dflash_hf.generation.host_reads import NoHostReads


@contextmanager
def no_host_reads(device: str) -> Generator[None]:
    """Raises `RuntimeError` at the first wait: on CUDA by its own debug mode, elsewhere by a dispatch mode."""
    if torch.device(device).type != "cuda":
        with NoHostReads():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
