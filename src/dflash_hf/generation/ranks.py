"""The processes that hold one target together (tensor parallelism): all go the same way, and it is the first one's.

Each rank runs the whole program over its share of the weights, and they meet in collective operations inside every
forward of the target: one that takes another way than the others leaves them waiting there. So what a step's shapes
and tokens follow from is the first rank's: the seed, the width, the proposals, what is decided. The ranks may compute
other numbers, have other random states, or see another time.

Before every forward, every decision and every return they also meet to say that they are well. Where one has failed or
was interrupted, all end there, each with its caches as they were. A rank that fails within a forward cannot tell:
its process has to end, and whoever started the processes ends the others, as `torchrun` does.

One process has no group, and does nothing of all this.
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

from dflash_hf.generation.accept import AcceptanceRule, accepted
from dflash_hf.generation.state import DecodeState

# What a rank says of itself when they meet.
WELL = 0
FAILED = 1
INTERRUPTED = 2


class Ranks:
    """The ranks of a target during one call, seen from one of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Where Transformers puts the mesh of devices that a model is sharded over.
        mesh: Any = getattr(model, "_device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            mesh = mesh["tp"]
        self.group: Any = None if mesh is None or mesh.size() == 1 else mesh.get_group()
        self.rank, self.size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        self.model = model
        # Whether the others' next collective operation is a meeting, where a failure can be told.
        self._meets_next = True
        self._interrupted = False

    def meet(self, number: int = 0) -> int:
        """Waits for the other ranks and returns the first one's number; reads on the host.

        Raises `RuntimeError` if another rank has failed, `KeyboardInterrupt` if any of them was interrupted.
        """
        if self.group is None:
            return number
        *reports, first = self._report(INTERRUPTED if self._interrupted else WELL, number)
        if not any(reports):
            return first
        self._meets_next = False
        if INTERRUPTED in reports:
            raise KeyboardInterrupt
        raise RuntimeError(
            f"expected all {self.size} ranks of the target to go on, got an error on rank {reports.index(FAILED)}; "
            "see what that rank says. The call has ended on all of them"
        )

    def begin(self, call: Mapping[str, object]) -> None:
        """Begins a run: compares the tensors and plain values that the ranks were given, by name.

        Raises `ValueError`, on all of them and before any forward, if they were given different things.
        """
        if self.group is None:
            return
        mine = _digests(call)
        given = [dict[str, str]()] * self.size
        self.meet()
        self._meets_next = False
        dist.all_gather_object(given, mine, group=self.group)
        for rank, theirs in enumerate(given):
            names = sorted(name for name in theirs.keys() | given[0].keys() if theirs.get(name) != given[0].get(name))
            if names:
                raise ValueError(
                    f"expected every rank to make the same call, got another {', '.join(names)} on rank {rank} than "
                    "on rank 0; give all processes the same prompts and settings"
                )
        self._meets_next = True

    def share(self, *given: Tensor | None) -> None:
        """Overwrites integer or boolean tensors, in any shape, with the first rank's. Reads nothing on the host."""
        if self.group is None:
            return
        tensors = [tensor for tensor in given if tensor is not None and tensor.numel()]
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).to(torch.long) for tensor in tensors])
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        for tensor, first in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(first.view_as(tensor))

    def decided(self, state: DecodeState, num_accepted: Tensor | None, rule: AcceptanceRule) -> Tensor | None:
        """Replaces what this rank has decided by what the first one has.

        `num_accepted` `[B]` is as [`commit`] takes it; `rule` is what has decided.
        """
        if self.group is None:
            return num_accepted
        self.meet()
        num_accepted = accepted(state, num_accepted)
        self.share(state.tokens, num_accepted, state.remaining, rule.unfinished(state), state.path)
        return num_accepted

    @contextmanager
    def forward(self) -> Generator[None]:
        """Marks a forward of the target, where no failure can be told: others wait for this rank's part of it."""
        self._meets_next = False
        yield
        self._meets_next = True

    @contextmanager
    def together(self) -> Generator[None]:
        """Ends (a part of) a call on all ranks or on none: tells the others what fails here, and returns with them.

        In the main thread Ctrl-C waits for the next meeting, because it would mostly come within a forward; a second
        one does not wait.
        """
        if self.group is None:
            yield
            return
        is_main = threading.current_thread() is threading.main_thread()
        may_wait = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            if may_wait:
                signal.signal(signal.SIGINT, self._note_interrupt)
            yield
            self.meet()  # nobody returns before all have got here
        except BaseException as error:
            if self._meets_next:
                self._report(FAILED if isinstance(error, Exception) else INTERRUPTED)
            raise
        finally:
            if may_wait:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._interrupted:  # since then
            raise KeyboardInterrupt

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Keeps an interrupt for the next meeting, where Python's own handler would raise it."""
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True

    def _report(self, report: int, number: int = 0) -> list[int]:
        """Tells the others how this rank is; returns the reports of all, then the first rank's number."""
        self._meets_next = False  # where this fails, there is nobody to tell
        numbers = torch.zeros(self.size + 1, dtype=torch.long, device="cpu")
        numbers[self.rank] = report
        numbers[-1] = number if self.rank == 0 else 0
        numbers = numbers.to(self.model.device)
        dist.all_reduce(numbers, group=self.group)
        found: list[int] = numbers.tolist()
        self._meets_next = True
        return found


def _digests(call: Mapping[str, object]) -> dict[str, str]:
    """What can be compared between processes: plain values as text, tensors by a hash of what is in them."""
    found: dict[str, str] = {}
    for name, value in call.items():
        if name.startswith("_"):  # Transformers' own notes
            continue
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()}"
        elif value is None or isinstance(value, bool | int | float | str | list | tuple | dict):
            found[name] = repr(value)
    return found
