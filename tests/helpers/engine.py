"""What tests of the engine share: a pair whose text is known, and watching what a step does and where it leaves it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel
from dflash_hf.generation.host_reads import NoHostReads
from dflash_hf.generation.run import Run
from dflash_hf.generation.static_step import StaticStep
from helpers.static import set_engine, tensor_oracle
from tiny import prompts, shallow_target, truth_of

NEW = 26
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@functools.cache
def plain_text(family: str) -> Tensor:
    """Plain `generate`'s text of `pair`, whose targets of a family are all alike."""
    return shallow_target(family).generate(**prompts([4, 11, 7], 0), **GREEDY)


def pair(
    engine: Any, family: str = "qwen3", **overrides: Any
) -> tuple[PreTrainedModel, DFlashDraftModel, Any, Tensor]:
    """A tiny target, an oracle for it, ragged prompts and plain `generate`'s text."""
    target = shallow_target(family)
    inputs = prompts([4, 11, 7], 0)
    ref = plain_text(family).clone()
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8, **overrides)
    set_engine(draft, engine)
    return target, draft, inputs, ref


class Operations(TorchDispatchMode):
    """Writes down the operations that run, with the shapes and types of all they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [
            t
            for t in ((out,) if isinstance(out, Tensor) else tree_leaves(out))
            if isinstance(t, Tensor)
        ]
        self.seen.append((func, *((t.shape, t.stride(), t.dtype) for t in tensors)))
        return out


def places(run: Run) -> list[tuple[object, ...]]:
    """Where everything is that a step leaves for the next one, and how it is laid out."""
    state, generator, buffers = run.state, run.generator, run.buffers
    named = {name: getattr(state, name) for name in type(state).__slots__}
    named |= {"offset": generator.newest.offset}
    named |= {f"newest {i}": t for i, t in enumerate(buffers.newest.tensors())}
    named |= {f"target {i}": t for i, t in enumerate(run.cache.buffers())}
    named |= {f"draft {i}": t for i, t in enumerate(generator.draft_cache.buffers())}
    # Written and read in one step.
    named.pop("draft_probs")
    return [
        (n, t.data_ptr(), t.shape, t.stride()) for n, t in named.items() if isinstance(t, Tensor)
    ]


class Watched:
    """Every step that is launched, under guard against reads on the host.

    Args:
        monkeypatch (`pytest.MonkeyPatch`): Puts things back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where: list[tuple[object, ...]] = []
        self.steps: list[tuple[object, ...]] = []
        launch = StaticStep.launch

        def watched(step: StaticStep, bound: int) -> Any:
            self.where.append(tuple(places(step.run)))
            with Operations() as operations, NoHostReads():
                out = launch(step, bound)
            self.where.append(tuple(places(step.run)))
            self.steps.append(tuple(operations.seen))
            return out

        monkeypatch.setattr(StaticStep, "launch", watched)

    def check(self) -> None:
        """Nothing has moved, and every step was the same."""
        assert len(self.steps) > 4
        assert len(set(self.where)) == 1
        # The first one makes views of the buffers that are kept; it would be the one before the capture.
        assert len(set(self.steps[1:])) == 1


def freeze_each_step_first(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs every step over finished rows before it is run, as a capture does; nothing but scratch may change by it.

    Returns:
        `list[int]`: One entry per step.
    """
    launch, frozen = StaticStep.launch, list[int]()

    def twice(step: StaticStep, bound: int) -> Any:
        state = step.run.state
        done = state.done.clone()
        before = [t.clone() for t in (state.lengths, state.cursor, state.remaining, state.anchor)]
        ids = [row[: int(end)].clone() for row, end in zip(state.ids, state.cursor, strict=True)]
        state.done.fill_(True)
        launch(step, bound)
        after = (state.lengths, state.cursor, state.remaining, state.anchor)
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        assert all((old == row[: len(old)]).all() for old, row in zip(ids, state.ids, strict=True))
        state.done.copy_(done)
        frozen.append(bound)
        return launch(step, bound)

    monkeypatch.setattr(StaticStep, "launch", twice)
    return frozen
