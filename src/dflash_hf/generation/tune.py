"""This module measures the costs of a pair's steps on this machine: `dflash_hf.tune(target, draft)`.

On a CPU and in half precision, the width of a verify does not depend on the clock of the run (`step_costs.py`). The
measured costs are written to a table, and later calls of the same pair read this table (`cost_table.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from dflash_hf.devices import eagerly
from dflash_hf.errors import require
from dflash_hf.generation.choice_costs import CHAIN, candidate_widths
from dflash_hf.generation.cost_table import CostTable, about_pair, write_table
from dflash_hf.generation.decode import fast_from_prefill, no_gradients, tapped_between_steps
from dflash_hf.generation.generate import answer_with, unwrapped, unwrapped_target
from dflash_hf.generation.options import choose_engine, computes_in_half
from dflash_hf.generation.prefill import prefill
from dflash_hf.generation.request import Request
from dflash_hf.generation.run import Run
from dflash_hf.generation.step import step
from dflash_hf.generation.step_costs import StepCosts
from dflash_hf.generation.user_cache import NoUserCache
from dflash_hf.generation.widths import FixedWidth
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target

logger: Any = logging.get_logger(__name__)

# Numbers of rows that are measured. The costs of other numbers of rows are interpolated.
ROWS = (1, 2, 4, 8, 16, 32)
MAX_ROWS = 4096
# Number of tokens of the prompts. A step also reads the keys of the prompt, but these are few beside the weights.
PROMPT_LENGTH = 128
# The fastest of this many steps counts, because other work of the machine makes steps slower.
NUM_TIMES = 4


class Tuned(NamedTuple):
    """The measured costs, and the file that they were written to."""

    table: CostTable
    path: Path


class _Measured(NamedTuple):
    """The result of a run with one number of rows."""

    about: dict[str, Any]  # everything that the costs depend on
    seconds: dict[int, float]  # of a step of each choice; `CHAIN` is the chain of all proposals


def tune(
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    *,
    rows: Sequence[int] = ROWS,
    on_progress: Callable[[str], None] = logger.info,
) -> Tuned:
    """Measures the seconds of a step for each number of rows and tokens, and writes them to a file for later calls.

    The steps are those of `generate` with the draft's own settings, over prompts of 128 random tokens. Nothing else
    should run on the machine during the measurement. SmolLM2-135M takes about a minute on one core.

    Args:
        model (`PreTrainedModel`): The target, on a CPU or in half precision.
        draft (`DFlashDraftModel`): Its draft.
        rows (sequence of `int`): Numbers of rows to measure.
        on_progress (callable, *optional*): Called with a sentence before each number of rows.

    Returns:
        [`Tuned`]: The measured costs, and their file in the cache folder of Hugging Face (`HF_HOME`).

    Raises:
        ValueError: If `generate` refuses the pair, if the target is in float32 or float64 on a GPU (where runs time
            their own steps), if steps are captured, if the draft's settings fix the width, or if the file cannot be
            written.
    """
    model = unwrapped_target(model)
    draft = unwrapped(draft)
    rows = sorted(set(rows))
    are_rows = len(rows) > 0 and rows[0] > 0 and rows[-1] <= MAX_ROWS
    require(are_rows, f"numbers of rows from 1 to {MAX_ROWS}", rows, "pass for example rows=(1, 8)")
    about: dict[str, Any] = {}
    steps: dict[int, dict[int, float]] = {}
    chains: dict[int, float] = {}
    for num_rows in rows:
        on_progress(f"measuring steps of {num_rows} rows")
        about, seconds = _measure_rows(model, draft, num_rows)
        chains[num_rows] = seconds.pop(CHAIN)
        steps[num_rows] = seconds
    table = CostTable(steps, chains)
    return Tuned(table, write_table(table, about))


def _measure_rows(model: PreTrainedModel, draft: DFlashDraftModel, num_rows: int) -> _Measured:
    """Returns the seconds of steps over `num_rows` rows."""
    target = find_target(model)
    source = torch.Generator().manual_seed(0)
    # The tokens are random, because a model chooses its experts by tokens.
    shape = (num_rows, PROMPT_LENGTH)
    input_ids = torch.randint(0, target.vocab_size, shape, generator=source, device="cpu").to(
        target.device
    )
    num_choices = len(candidate_widths(draft.config.block_size)) + 1
    arguments: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        # If every proposal is accepted, the first rounds reach this limit. Rows that have ended cost the same.
        "max_new_tokens": draft.config.block_size * num_choices * NUM_TIMES,
        "do_sample": False,
        # Strings of the target's own generation config would need a tokenizer. They do not change what a step costs.
        "stop_strings": None,
    }
    return answer_with(_measure, cast(Any, model).generate, model, draft, arguments)


def _measure(request: Request, inputs: dict[str, Any]) -> _Measured:
    """Takes the place of `decode`. Times steps of all choices instead of decoding an answer."""
    target = request.target
    draft = request.draft
    engine = choose_engine(target, draft)
    _check(request, engine)
    with (
        eagerly(target.parts, request.draft_parts),
        fast_from_prefill(request, engine),
        no_gradients(target, request.runs_user_code),
    ):
        run = prefill(request, inputs, NoUserCache())
        costs = StepCosts.of(target, draft, run.generator.block_size)
        is_tree = run.generator.trees is not None
        about = about_pair(target, draft, costs, is_tree)
        with tapped_between_steps(run):
            seconds = _time_steps(run)
    return _Measured(about, seconds)


def _check(request: Request, engine: str) -> None:
    """Raises `ValueError` for a pair whose widths would not follow from a table."""
    target = request.target
    require(
        target.device.type == "cpu" or computes_in_half(target),
        "a target on a CPU or in half precision",
        f"{target.model.dtype} on {target.device}",
        "load it in bfloat16; in float32 a run times its own steps there, and nothing has to be measured before",
    )
    require(
        engine == "eager",
        'engine="eager" for a table of costs',
        engine,
        'set verify_width="auto": captured steps are then timed before the first one',
    )
    options = request.draft.generation_config
    is_left_open = options.asked_width in (None, "auto")
    require(
        is_left_open and options.num_tree_nodes in (None, "auto", 0),
        "a draft whose generation_config leaves verify_width and the size of a tree open",
        f"verify_width={options.asked_width}, num_tree_nodes={options.num_tree_nodes}",
        "set them to None",
    )


def _time_steps(run: Run) -> dict[int, float]:
    """Returns the fastest step of each choice in seconds; `CHAIN` is the chain of all proposals."""
    widest = run.generator.verify_width
    is_tree = run.generator.trees is not None
    longest = run.generator.num_proposals + 1
    # In this order, a narrow step follows a narrow step, as in a run.
    plan = {width: FixedWidth(width) for width in candidate_widths(widest)}
    plan[CHAIN] = FixedWidth(min(longest, widest), is_chain=is_tree)
    seconds = dict.fromkeys(plan, float("inf"))
    for _ in range(NUM_TIMES):
        for choice, chooser in plan.items():
            run.chooser = chooser
            started = time.perf_counter()
            step(run)
            seconds[choice] = min(seconds[choice], time.perf_counter() - started)
    # A step cannot cost more than a step with more tokens; else something disturbed the clock. The widest come first.
    for wide, narrow in itertools.pairwise(candidate_widths(widest)):
        seconds[narrow] = min(seconds[narrow], seconds[wide])
    return seconds
