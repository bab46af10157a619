"""What a call of the fuzzer is given besides ids: processors, criteria and streamers of a user's own, contexts."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer

from dflash_hf import DFlashDraftModel
from dflash_hf.generation import cost_table, options, prefill, row_groups
from dflash_hf.generation.cost_table import CostTable
from dflash_hf.target_model.parts import find_target
from fuzz.cases import EOS, PROCESSORS, SAMPLERS, Turn
from helpers.static import set_engine, use_tapes


class Apart(LogitsProcessor):
    """Keeps rows from choosing what another one chose last, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Lowers the scores of the other rows' last tokens, and of one token that depends on the number of calls."""
        self.num_calls += 1
        scores = scores.clone()
        for row in range(scores.shape[0]):
            scores[
                row, [input_ids[other, -1] for other in range(scores.shape[0]) if other != row]
            ] -= 2.0
        scores[:, (7 * self.num_calls) % scores.shape[1]] -= 20.0
        return scores


class Rows(StoppingCriteria):
    """Stops every row once all have chosen an odd token, and a row after three even ones; remembers its ids."""

    def __init__(self) -> None:
        self.shown: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Says which rows are done."""
        self.shown.append(input_ids.tolist())
        odd = input_ids[:, -1] % 2 == 1
        return (input_ids[:, -3:] % 2 == 0).all(dim=1) | (odd.all() & (len(self.shown) > 5))


class Token(StoppingCriteria):
    """Stops a row at a token that is divisible by eleven."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Says which rows are done."""
        return input_ids[:, -1] % 11 == 0


class Streamer(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[Tensor] = []
        self.num_ends = 0

    def put(self, value: Tensor) -> None:
        """Takes a prompt, a column or a run of tokens."""
        self.got.append(value)

    def end(self) -> None:
        """Counts how often it was ended."""
        self.num_ends += 1

    def tokens(self, is_one: bool) -> list[list[int]]:
        """What came: for one row all tokens in one list, because it gets several at a time."""
        got = [value.flatten().tolist() for value in self.got]
        return [list(itertools.chain(*got))] if is_one else got


class Allowed:
    """Says which tokens may follow, an odd one an even one in even rows; remembers what it was asked about."""

    def __init__(self) -> None:
        self.shown: set[tuple[int, ...]] = set()

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        """Returns the tokens that may follow a row's ids."""
        self.shown.add((row, *ids.tolist()))
        return [token for token in range(64) if row % 2 or (token + int(ids[-1])) % 2]


@dataclass
class Seen:
    """What in a call's arguments remembers what it saw."""

    rows: Rows = field(default_factory=Rows)
    streamer: Streamer = field(default_factory=Streamer)
    allowed: Allowed = field(default_factory=Allowed)


def settings_of(turn: Turn) -> tuple[dict[str, Any], Seen]:
    """Returns new keyword arguments of `generate` for one call, and what they see."""
    seen = Seen()
    settings: dict[str, Any] = {
        "max_new_tokens": turn.new,
        "do_sample": turn.rule is not None,
        "pad_token_id": 0,
    }
    settings["eos_token_id"] = list(EOS[: turn.eos]) or None
    for name in turn.processors:
        if name in ("min new", "decay", "forced end") and not turn.eos:
            continue
        settings |= PROCESSORS[name]
        if name == "own":
            settings["logits_processor"] = LogitsProcessorList([Apart()])
        if name == "prefix":
            settings["prefix_allowed_tokens_fn"] = seen.allowed
    if turn.rule is not None:
        settings |= SAMPLERS[turn.sampler]
    if turn.criterion == "time":
        settings["max_time"] = 1e6
    elif turn.criterion is not None:
        settings["stopping_criteria"] = StoppingCriteriaList(
            [seen.rows if turn.criterion == "rows" else Token()]
        )
    if turn.streamer:
        settings["streamer"] = seen.streamer
    if turn.outputs:
        settings |= dict.fromkeys(turn.outputs, True) | {"return_dict_in_generate": True}
    return settings, seen


def lying_table(seed: int) -> CostTable:
    """Returns drawn costs of steps, for one row and for five."""
    source = random.Random(seed)
    steps: dict[int, dict[int, float]] = {}
    for num_rows in (1, 5):
        steps[num_rows] = {width: source.uniform(0.01, 1.0) for width in (1, 2, 3, 5, 128)}
    return CostTable(steps, {num_rows: source.uniform(0.01, 1.0) for num_rows in steps})


@contextmanager
def on_engine(turn: Turn, context: str | None, draft: DFlashDraftModel) -> Generator[None]:
    """Gives a draft the engine of a turn."""
    # A replay calls no hooks: where there are some the engine would not be chosen.
    engine = "static" if turn.engine == "tape" and context == "hooks" else turn.engine
    with pytest.MonkeyPatch.context() as patches:
        if engine == "tape":
            use_tapes(patches)
        if context == "room":
            patches.setattr(prefill, "FIRST_ROOM", 2)
            patches.setattr(prefill, "FIXED_ROOM", 5)
        if context == "groups":
            patches.setattr(row_groups, "TOKENS_OF_A_FORWARD", 0)
        if turn.costs is not None:
            table = lying_table(turn.costs)
            # As in half precision, in the dtype in which texts are equal at all widths.
            patches.setattr(options, "computes_in_half", lambda target: True)
            patches.setattr(cost_table, "TABLES", Path.cwd())
            patches.setattr(options, "read_table", lambda about: table)
        set_engine(draft, "cuda_graph" if engine == "tape" else engine)
        try:
            yield
        finally:
            set_engine(draft, "eager")


@contextmanager
def hooks_that_call(target: PreTrainedModel) -> Generator[None]:
    """Puts hooks on a target that call it again, as a user's may; they do nothing inside such a call."""
    inside = False

    def call(*args: Any) -> None:
        nonlocal inside
        if not inside:
            inside = True
            try:
                target(torch.tensor([[5, 6, 7]], device=target.device))
            finally:
                inside = False

    parts = (find_target(target).layers[1], target)
    handles = [parts[0].register_forward_hook(call), parts[1].register_forward_pre_hook(call)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def within(context: str | None, call: Callable[[], Any]) -> Any:
    """Calls in a context of the user's."""
    if context == "thread":
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(call())
            except Exception as error:  # comes up again in the thread that waits
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]
    with ExitStack() as stack:
        if context == "inference":
            stack.enter_context(torch.inference_mode())
        elif context == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif context == "meta":
            stack.enter_context(torch.device("meta"))
        elif context == "dtype":
            before = torch.get_default_dtype()
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(torch.float64)
        return call()
