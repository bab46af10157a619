"""Processes with the environment that torchrun gives them, forked from one that has loaded torch and Transformers.

A start by torchrun loads both three times over; it is tested on a command in tests/bench/test_processes.py. To be used
by a script of its own: nothing may have been trained before a fork.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Never

import torch

NUM_RANKS = 2


def run_ranks(work: Callable[[], object], num_ranks: int = NUM_RANKS) -> None:
    """Runs `work` in each of some processes at once; ends this one, and all, as soon as one of them fails."""
    ranks = set(_start(work, num_ranks))
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def exit_statuses(work: Callable[[], object], num_ranks: int = NUM_RANKS) -> list[int]:
    """Runs `work` in each of some processes at once, to the end of all, and returns their exit statuses in order."""
    statuses: list[int] = []
    for child in _start(work, num_ranks):
        _, status = os.waitpid(child, 0)
        statuses.append(os.waitstatus_to_exitcode(status))
    return statuses


def _start(work: Callable[[], object], num_ranks: int) -> list[int]:
    """Starts the processes, and returns the id of each in their order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    ranks: list[int] = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            _be(rank, num_ranks, port, work)
        ranks.append(child)
    return ranks


def _be(rank: int, num_ranks: int, port: int, work: Callable[[], object]) -> Never:
    """Is one of the processes, to its end."""
    found = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {name: str(value) for name, value in found.items()}
    # Torch makes its threads anew, which must not begin in several threads that load weights.
    torch.set_num_threads(1)
    status = 1
    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
