"""What tests of the static step need: its name, an oracle that reads nothing on the host, a stand-in for CUDA graphs.

A tape records the operations of a step once and runs them again on the very tensors that they were recorded with, as a
replayed graph does: no Python of the step runs, nothing can have another address, shape or order than it had.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel
from dflash_hf.generation import buffers, checks, cuda_graph, decode, places
from dflash_hf.generation.cuda_graph import GraphStep
from dflash_hf.generation.graphs import Captured
from dflash_hf.undo import held
from tiny import OracleDraft, draft_config, randomise_heads

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from harness.uncaptured import uncaptured

DECIMALS = 43758.5453
_static: dict[DFlashDraftModel, ExitStack] = {}


def set_engine(draft: DFlashDraftModel, name: Any) -> None:
    """Chooses a draft's engine, for the rest of a test: a user's, or `"static"`, `"cuda_graph"` uncaptured."""
    if draft in _static:
        _static.pop(draft).close()
    draft.generation_config.engine = "cuda_graph" if name == "static" else name
    if name == "static":
        _static[draft] = ExitStack()
        _static[draft].enter_context(uncaptured(draft))


def engine_of(draft: DFlashDraftModel) -> str:
    """Returns the name that `set_engine` was given."""
    return "static" if draft in _static else draft.generation_config.engine


def capture_again() -> None:
    """Ends what `"static"` has begun, for all drafts."""
    while _static:
        _static.popitem()[1].close()


class TensorOracle(OracleDraft):
    """The oracle without a read on the host: how much of a block is right follows from its row and position."""

    known: Tensor  # [rows, tokens], int64: all of each row's true tokens

    def arm(self, truth: list[list[int]], seed: int) -> TensorOracle:
        """Sets what it knows: row -> all of the row's true tokens."""
        longest = max(map(len, truth)) + 2 * self.config.block_size
        known = torch.zeros(len(truth), longest, dtype=torch.long)
        for row, tokens in enumerate(truth):
            known[row, : len(tokens)] = torch.tensor(tokens)
        # A buffer goes where the draft goes, before any step: a step must not copy from the host.
        self.register_buffer("known", known, persistent=False)
        self.seed = seed
        return self

    def known_rows(self, batch: int) -> Tensor:
        """Returns the rows of `known` that a batch consists of."""
        return torch.tensor(self.rows_of(batch), device="cpu")

    def compute_logits(self, hidden_states: Tensor, head: nn.Module) -> Tensor:
        """Replaces the head's logits: right up to a slot that looks random, then wrong."""
        logits = super(OracleDraft, self).compute_logits(hidden_states, head)
        batch, width, vocab = logits.shape
        first = self.positions[:batch, :1] + 1
        slots = torch.arange(width, device=logits.device)
        rows = self.known_rows(batch).to(logits.device)
        drawn = torch.frac(
            torch.sin(first.double() * 12.9898 + rows[:, None] * 78.233 + self.seed) * DECIMALS
        ).abs()
        true = self.known[rows].gather(1, (first + slots).clamp_max(self.known.shape[1] - 1))
        wanted = torch.where(
            slots < torch.floor(drawn * (width + 1)), true, (true + 1 + slots) % vocab
        )
        # Not `one_hot`: older torch looks at its values on the host.
        is_wanted = wanted[..., None] == torch.arange(vocab, device=logits.device)
        return is_wanted.to(logits.dtype) * self.strength


def tensor_oracle(
    target: PreTrainedModel,
    truth: list[list[int]],
    seed: int,
    block_size: int = 8,
    **overrides: Any,
) -> TensorOracle:
    """Builds a [`TensorOracle`] for a tiny target; as `tiny.oracle_draft` otherwise."""
    torch.manual_seed(seed)
    draft = TensorOracle(draft_config(target, block_size, **overrides)).to(target.dtype).eval()
    if draft.config.num_candidates is not None:
        draft.strength = 4.0
    randomise_heads(draft)
    return draft.arm(truth, seed)


def tensors_of(out: Any) -> list[Any]:
    """What an operation returns, most often one tensor, as a list."""
    return [out] if isinstance(out, Tensor) else tree_leaves(out)


def is_view(out: Any, source: Any) -> bool:
    """Whether `out` is a tensor in the memory of another one: `reshape` and its like also copy."""
    if not isinstance(out, Tensor) or not isinstance(source, Tensor):
        return False
    return out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """Records operations while it is entered, and runs them again."""

    num_replays = 0
    width = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A view of a tensor that stays where it is needs no operation, on tape as in a graph.
        if not (func.is_view and is_view(out, args[0])):
            self.calls.append((func, args, kwargs or {}, tensors_of(out)))
        return out

    def replay(self) -> None:
        """Runs them again; what they return goes where it was."""
        Tape.num_replays += 1
        # A graph replays in any mode. In this one all tensors may be written, whatever mode they are of.
        with torch.inference_mode():
            for func, args, kwargs, out in self.calls:
                again = tensors_of(func(*args, **kwargs))
                for then, now in zip(out, again, strict=True):
                    is_moved = isinstance(then, Tensor) and then.data_ptr() != now.data_ptr()
                    if is_moved and then.numel():
                        then.copy_(now)


class TapeStep(GraphStep):
    """Captures on tape instead of on a GPU; all else is the engine's own."""

    captured: ClassVar[list[int]] = []
    widths: ClassVar[list[int]] = []

    def capture_one(self, bound: int) -> Captured:
        """Captures the step over `bound` slots, after running it once under guard."""
        self.warm_up(bound)
        TapeStep.captured.append(bound)
        TapeStep.widths.append(self.run.state.width)
        tape = Tape()
        with held(tape):
            forwards = self.body(bound)
        tape.width = self.run.state.width
        return Captured(tape, forwards, self.run.state.draft_probs, self.run.request.processors)

    def measure(self, captured: Captured) -> float:
        """Seconds as on a device that is bound by computing."""
        return 0.001 * (1 + captured.graph.width)


def use_tapes(monkeypatch: pytest.MonkeyPatch, smallest_bucket: int = 8) -> None:
    """Makes `"cuda_graph"` run from tapes, on any device, with short buckets; counters begin at 0."""

    def choose(target: Any, draft: Any) -> Any:
        wanted = draft.generation_config.engine
        return {"auto": "cuda_graph"}.get(wanted, wanted)

    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", smallest_bucket)
    monkeypatch.setattr(decode, "choose_engine", choose)
    monkeypatch.setattr(places, "choose_engine", choose)
    monkeypatch.setattr(cuda_graph, "GraphStep", TapeStep)
    monkeypatch.setattr(checks, "check_capturable", lambda target, draft: None)
    TapeStep.captured, TapeStep.widths = [], []
    Tape.num_replays = 0
