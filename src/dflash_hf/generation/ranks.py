"""This module keeps the processes that hold one target together on the same way (tensor parallelism).

Each rank runs the whole program with its share of the weights. The ranks meet in collective operations within every
forward of the target. If one rank took another way, the others would wait in such an operation forever. So all ranks
take from the first rank the numbers that determine the shapes and tokens of a step: the seed, the width, the proposals
and the chosen tokens. Each rank alone might compute other numbers, have another random state, or read another time.

Before every forward, every decision and every return, the ranks also meet to report that they are well. If a rank has
failed or was interrupted, the call ends on all ranks, and their caches are as before. A rank that fails within a
forward cannot report this. Its process has to end, and the program that started the processes ends the others, as
`torchrun` does.

A single process does not communicate.
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

# The reports that a rank can give in a meeting.
WELL = 0
FAILED = 1
INTERRUPTED = 2


class Ranks:
    """The ranks of a target during one call, as one of these ranks sees them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.rank = 0
        self.size = 1
        # The group of the collective operations; not used if this process is alone.
        self.group: Any = None
        mesh = mesh_of(model)
        if mesh is not None:
            self.rank = mesh.get_local_rank()
            self.size = mesh.size()
            self.group = mesh.get_group()
        # Whether this process holds the whole target.
        self.is_alone = mesh is None
        # Whether the others' next collective operation is a meeting. Only then, a failure can be reported.
        self._meets_next = True
        self._interrupted = False

    def meet(self, numbers: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Waits for the other ranks and returns the first rank's numbers; copies them to the host.

        Raises `RuntimeError` if another rank has failed, and `KeyboardInterrupt` if any rank was interrupted.
        """
        if self.is_alone:
            return numbers
        # An interrupt that came within a forward is reported now, when the other ranks expect a report.
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
        """Compares the tensors and plain values that the ranks got for a run, by name.

        Raises `ValueError` on all ranks, before any forward, if they got different inputs.
        """
        # Only hashes and short texts are sent, and not whole prompts.
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
        """Overwrites integer or boolean tensors of any shape with the first rank's values. No host sync."""
        if self.is_alone:
            return
        tensors = [tensor for tensor in given if tensor is not None and tensor.numel()]
        if not tensors:
            return
        # One broadcast sends all of them.
        flat = torch.cat([tensor.reshape(-1).to(torch.long) for tensor in tensors])
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, first in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(first.view_as(tensor))

    def decided(
        self, state: DecodeState, num_accepted: Tensor | None, rule: AcceptanceRule
    ) -> Tensor | None:
        """Replaces this rank's decisions by the first rank's: tokens, stopped rows, and numbers of accepted tokens.

        `num_accepted` `[B]` is as in [`commit`], both as argument and as result. `rule` is the rule that has decided.
        """
        if self.is_alone:
            return num_accepted
        # User code may have run. If it has failed on one rank, the call ends on all ranks here.
        self.meet()
        num_accepted = accepted(state, num_accepted)
        # Ranks may have different rules, for example if only one has a streamer. All share tensors of the same sizes.
        is_running = ~state.done
        if isinstance(rule, SynchronizedRows):
            is_running = rule.is_running
        decided = [state.tokens, num_accepted, state.remaining, is_running]
        if state.is_tree:
            decided.append(state.report.path)
        # The tensors are overwritten in place, because the commit that follows reads them.
        self.share(*decided)
        return num_accepted

    @contextmanager
    def forward(self) -> Generator[None]:
        """Marks a forward of the target. No failure can be reported in it, because the others wait within it."""
        self._meets_next = False
        yield
        # This is not in a `finally`, because after an error the other ranks still wait within the forward.
        self._meets_next = True

    @contextmanager
    def together(self) -> Generator[None]:
        """Ends a call, or a part of it, on all ranks or on none: an error on one rank ends it on all ranks.

        In the main thread, Ctrl-C waits for the next meeting, because it usually comes within a forward. A second
        Ctrl-C does not wait.
        """
        if self.is_alone:
            yield
            return
        is_main = threading.current_thread() is threading.main_thread()
        # A handler that the user has set stays in place.
        may_wait = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            # This is within the `try`, because an interrupt may come as soon as the handler has changed.
            if may_wait:
                signal.signal(signal.SIGINT, self._note_interrupt)
            yield
            # No rank returns before all ranks have arrived here.
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
        """Notes an interrupt for the next meeting, instead of raising it as Python's own handler does."""
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True

    def _report(
        self, report: int, numbers: tuple[int, int] = (0, 0)
    ) -> tuple[list[int], tuple[int, int]]:
        """Reports the state of this rank; returns the reports of all ranks, and the first rank's numbers."""
        # If this operation fails, no rank can be told about it.
        self._meets_next = False
        # One rank sets each place, so the sum over the ranks has each rank's report and the first rank's numbers.
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
    """Returns comparable values by name: plain values as text, and tensors as a hash of their data."""
    found: dict[str, str] = {}
    for name, value in call.items():
        # Transformers stores internal values under such names.
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
