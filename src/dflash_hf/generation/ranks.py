"""The processes that hold one target together (tensor parallelism): all go the same way, and it is the first one's.

Each rank runs the whole program over its share of the weights, and they meet in collective operations inside every
forward of the target: a rank that takes another way than the others leaves them waiting there. So all ranks take from
the first one the numbers that a step's shapes and tokens follow from: the seed, the width, the proposals, the chosen
tokens. By themselves they may compute other numbers, have other random states, or see another time.

Before every forward, every decision and every return they also meet to say that they are well. Where one has failed or
was interrupted, all end there, each with its caches as they were. A rank that fails within a forward cannot report it:
its process has to end, and whoever started the processes ends the others, as `torchrun` does.

One process is alone, and does nothing of all this.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from dflash_hf.devices import mesh_of
from dflash_hf.generation.accept import AcceptanceRule, accepted
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.synchronized_rows import SynchronizedRows

# What a rank reports when they meet.
WELL = 0
FAILED = 1
INTERRUPTED = 2


class Ranks:
    """The ranks of a target during one call, seen from one of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.rank = 0
        self.size = 1
        # The group of the collective operations; never used where this process is alone.
        self.group: Any = None
        mesh = mesh_of(model)
        if mesh is not None:
            self.rank = mesh.get_local_rank()
            self.size = mesh.size()
            self.group = mesh.get_group()
        # Whether this process holds the whole target.
        self.is_alone = mesh is None
        # Whether the others' next collective operation is a meeting, where a failure can be reported.
        self._meets_next = True
        self._interrupted = False

    def meet(self, numbers: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Waits for the other ranks and returns the first one's numbers; reads on the host.

        Raises `RuntimeError` if another rank has failed, `KeyboardInterrupt` if any of them was interrupted.
        """
        if self.is_alone:
            return numbers
        # An interrupt that came within a forward is told now, where the others listen.
        report = WELL
        if self._interrupted:
            report = INTERRUPTED
        reports, first = self._report(report, numbers)
        if not any(reports):
            return first
        self._meets_next = False
        if INTERRUPTED in reports:
            raise KeyboardInterrupt
        raise RuntimeError(
            f"expected all {self.size} ranks of the target to go on, got an error on rank {reports.index(FAILED)}; "
            "see what that rank says. The call has ended on all of them"
        )

    def compare(self, call: Mapping[str, object]) -> None:
        """Compares the tensors and plain values that the ranks were given for a run, by name.

        Raises `ValueError`, on all of them and before any forward, if they were given different things.
        """
        # Hashes and short texts: whole prompts would travel to every process.
        mine = _digests(call)
        given = [dict[str, str]()] * self.size
        self.meet()
        self._meets_next = False
        dist.all_gather_object(given, mine, group=self.group)
        first = given[0]
        for rank, theirs in enumerate(given):
            names = sorted(
                name for name in theirs.keys() | first.keys() if theirs.get(name) != first.get(name)
            )
            if names:
                raise ValueError(
                    f"expected every rank to make the same call, got another {', '.join(names)} on rank {rank} than "
                    "on rank 0; give all processes the same prompts and settings"
                )
        self._meets_next = True

    def share(self, *given: Tensor | None) -> None:
        """Overwrites integer or boolean tensors, in any shape, with the first rank's. Reads nothing on the host."""
        if self.is_alone:
            return
        tensors = [tensor for tensor in given if tensor is not None and tensor.numel()]
        if not tensors:
            return
        # One broadcast for all of them.
        flat = torch.cat([tensor.reshape(-1).to(torch.long) for tensor in tensors])
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, first in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(first.view_as(tensor))

    def decided(
        self, state: DecodeState, num_accepted: Tensor | None, rule: AcceptanceRule
    ) -> Tensor | None:
        """Replaces this rank's decisions by the first one's: tokens, stopped rows, and the number accepted.

        `num_accepted` `[B]`, taken and returned, is as [`commit`] takes it; `rule` is the rule that has decided.
        """
        if self.is_alone:
            return num_accepted
        # User code has run: where it has failed on one rank, all end here.
        self.meet()
        num_accepted = accepted(state, num_accepted)
        # Ranks may have different rules, as where one alone has a streamer: all share tensors of the same sizes.
        is_running = ~state.done
        if isinstance(rule, SynchronizedRows):
            is_running = rule.is_running
        decided = [state.tokens, num_accepted, state.remaining, is_running]
        if state.is_tree:
            decided.append(state.report.path)
        # In place: the commit that follows reads these tensors.
        self.share(*decided)
        return num_accepted

    @contextmanager
    def forward(self) -> Generator[None]:
        """Marks a forward of the target, where no failure can be reported: others wait for this rank's part of it."""
        self._meets_next = False
        yield
        # Not in a `finally`: behind an error the others wait in the middle of the forward for good.
        self._meets_next = True

    @contextmanager
    def together(self) -> Generator[None]:
        """Ends (a part of) a call on all ranks or on none: reports to the others what fails here, returns with them.

        In the main thread Ctrl-C waits for the next meeting, because it would mostly come within a forward; a second
        one does not wait.
        """
        if self.is_alone:
            yield
            return
        is_main = threading.current_thread() is threading.main_thread()
        # A handler of the user is left as it is.
        may_wait = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            # Within the `try`: an interrupt may come as soon as the handler has changed.
            if may_wait:
                signal.signal(signal.SIGINT, self._note_interrupt)
            yield
            # Nobody returns before all have got here.
            self.meet()
        except BaseException as error:
            if self._meets_next:
                report = INTERRUPTED
                if isinstance(error, Exception):
                    report = FAILED
                self._report(report)
            raise
        finally:
            if may_wait:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        # An interrupt may have come since the last meeting.
        if self._interrupted:
            raise KeyboardInterrupt

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Keeps an interrupt for the next meeting, where Python's own handler would raise it."""
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True

    def _report(
        self, report: int, numbers: tuple[int, int] = (0, 0)
    ) -> tuple[list[int], tuple[int, int]]:
        """Reports to the others how this rank is; returns the reports of all, and the first rank's numbers."""
        # Where this fails, nobody can be reported to.
        self._meets_next = False
        # A sum over the ranks leaves each report, and the first one's numbers: each place is set by one rank only.
        places = [0] * self.size + [0, 0]
        places[self.rank] = report
        if self.rank == 0:
            places[self.size :] = numbers
        shared = torch.tensor(places, dtype=torch.long, device="cpu").to(self.model.device)
        dist.all_reduce(shared, group=self.group)
        *reports, first, second = shared.tolist()
        self._meets_next = True
        return reports, (first, second)


def _digests(call: Mapping[str, object]) -> dict[str, str]:
    """Returns the values that processes can compare, by name: plain ones as text, tensors as a hash of all numbers."""
    found: dict[str, str] = {}
    for name, value in call.items():
        # Transformers notes things of its own under such names.
        if name.startswith("_"):
            continue
        if isinstance(value, Tensor):
            content = (
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
            found[name] = (
                f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()}"
            )
        elif value is None or isinstance(value, bool | int | float | str | list | tuple | dict):
            found[name] = repr(value)
    return found
