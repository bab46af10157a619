"""This module resolves the draft's options for one call: the engine, the block size, the width and the rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from dflash_hf import ops
from dflash_hf.block.tree import max_nodes
from dflash_hf.generation import cost_table
from dflash_hf.generation.buffers import num_choices
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator, ProposalRule
from dflash_hf.generation.choice_costs import KnownCosts, StepTimes
from dflash_hf.generation.cost_table import CostTable, about_pair, read_table
from dflash_hf.generation.cuda_graph import EAGER, why_not
from dflash_hf.generation.request import Request
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.step_costs import StepCosts
from dflash_hf.generation.widths import FixedWidth, WidthChooser, take_chooser
from dflash_hf.generation_config import Engine
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target

logger: Any = logging.get_logger(__name__)
# If the run chooses the number of nodes, a tree has at most this many times the number of a chain's tokens.
MOST_NODES = 4
# Maximum number of tokens of all rows in the first verify, if the costs of steps are unknown. A narrow verify of many
# rows shows as much as a wide verify of one row.
FIRST_TOKENS = 64
# Verify widths of captured steps, if no option determines the width. Up to `WHOLE_BLOCK_ROWS` rows, the whole block is
# verified. For more rows, the table `{most rows: tokens of each row}` applies. In the time in which a GPU reads the
# weights, it computes some hundred tokens; tokens of a verify beyond these take additional time. Modelled for Qwen3-8B
# on an H100 at an acceptance length of 6.3 (docs/widths.md), not measured yet.
WHOLE_BLOCK_ROWS = 8
CAPTURED_WIDTHS = {16: 10, 32: 8, 64: 6}


class Options(NamedTuple):
    """The draft's options, resolved for one call."""

    block_size: int  # tokens of the draft's block
    width: int  # maximum number of tokens of a verify, the anchor included
    is_tree: bool  # whether a verify may run over a tree
    proposal: ProposalRule


def resolve(request: Request, num_rows: range, is_captured: bool, is_looked_at: bool) -> Options:
    """Resolves the draft's options for a request. `checks.py` has already refused options that contradict each other.

    Args:
        request (`Request`): The request.
        num_rows (`range`): Numbers of rows that may be verified together: the rows of a call, or the possible numbers
            of rows of a running batch.
        is_captured (`bool`): Whether the steps are to be captured.
        is_looked_at (`bool`): Whether the caller looks at each step. Such a run verifies chains unless the options ask
            for something else.
    """
    draft = request.draft
    given = draft.generation_config
    block_size = given.block_size or draft.config.block_size
    longest = draft.config.num_proposals(block_size) + 1
    # If the caller looks at each step, a step verifies its whole block.
    may_be_narrower = is_captured and not is_looked_at
    width = _widest_verify(given.asked_width, longest, num_rows, may_be_narrower)
    proposal: ProposalRule = "argmax" if given.proposal == "auto" else given.proposal
    # Rejection sampling needs a chain, because it draws again from the distribution at the first rejected proposal.
    is_drawn = request.config.do_sample and proposal == "sample"
    may_be_tree = not is_drawn and not is_looked_at
    num_nodes = _num_nodes(request, width, is_captured, may_be_tree)
    return Options(block_size, num_nodes or width, num_nodes > 0, proposal)


def _num_nodes(request: Request, width: int, is_captured: bool, may_be_tree: bool) -> int:
    """Returns the maximum number of nodes of a verify's tree, the anchor included; 0 for chains."""
    given = request.draft.generation_config
    asked = given.num_tree_nodes
    if asked == "auto":
        most = max_nodes(width - 1, num_choices(request.target, request.draft))
        return min(MOST_NODES * width, most)
    # A number was checked with the other options. The number 0 means chains.
    if asked is not None:
        return asked
    # Without kernels, trees for a GPU are built on the host, and a captured step cannot wait for the host.
    input_ids = request.input_ids
    is_on_host = is_captured and input_ids.is_cuda and not ops.use_tree_kernels(input_ids)
    # A number of tokens asks for a chain of the block's first proposals.
    has_number = isinstance(given.asked_width, int)
    # A recurrent state can follow only one path.
    needs_chain = is_on_host or has_number or bool(request.target.recurrences)
    if not may_be_tree or needs_chain or width == 1:
        return 0
    # A tree with as many nodes as a chain has tokens costs the same to verify.
    return min(width, ops.MAX_NODES)


def _widest_verify(
    asked: int | str | Mapping[int, int] | None,
    longest: int,
    num_rows: range,
    may_be_narrower: bool,
) -> int:
    """Returns the maximum width of a verify. `longest` is the width with all proposals of a block."""
    if isinstance(asked, int):
        return asked
    if isinstance(asked, Mapping):
        return max(width_of_rows(asked, rows) for rows in num_rows)
    if asked is None and may_be_narrower and num_rows.start > WHOLE_BLOCK_ROWS:
        return min(width_of_rows(CAPTURED_WIDTHS, num_rows.start), longest)
    return longest


def choose_engine(target: Target, draft: DFlashDraftModel) -> Engine:
    """Returns the engine that a call asks for. If it cannot run, logs the reason once and returns the eager engine."""
    wanted = draft.generation_config.engine
    if wanted == "eager" or target.device.type != "cuda":
        return "eager"
    reason = why_not(target, draft)
    if not reason:
        return "cuda_graph"
    logger.warning_once(EAGER.format(reason=reason))
    return "eager"


def chain_beside(generator: DFlashCandidateGenerator, is_captured: bool) -> int:
    """Returns the number of tokens of the chain that a run may verify instead of a tree; 0 if it may not."""
    longest = generator.num_proposals + 1
    # A number of nodes asks for trees. In captured steps, each further choice would need another graph.
    is_asked_for = generator.draft.generation_config.num_tree_nodes not in (None, "auto")
    is_left_open = generator.trees is not None and not is_asked_for and not is_captured
    if is_left_open and longest <= generator.verify_width:
        return longest
    return 0


def choose_widths(
    generator: DFlashCandidateGenerator, state: DecodeState, is_captured: bool
) -> WidthChooser | FixedWidth:
    """Returns the object that chooses the width of each verify.

    If the options do not set a width, the chooser follows the run, unless the steps are captured, with one graph per
    width. On a CPU, the width depends on measured costs ([`CostTable`]) if there are any, and otherwise on modelled
    costs ([`StepCosts`]). On a GPU in float32 and float64, it depends on the times of the run's own steps. On a GPU in
    half precision, near ties may turn with the width. There, it depends on measured costs, and without such costs
    every verify has the maximum width. Rejection sampling also has the maximum width, because another width would draw
    another text, and a row's text must not depend on the other rows. If `"auto"` is asked for and there are no
    measured costs, the width depends on the times of steps.
    """
    draft = generator.draft
    options = draft.generation_config
    asked = "auto" if options.num_tree_nodes == "auto" else options.asked_width
    is_by_rejection = state.host.is_sampled and generator.proposal == "sample"
    is_left_open = asked is None and not is_captured and not is_by_rejection
    is_half = computes_in_half(generator.request.target)
    is_on_cpu = state.ids.device.type == "cpu"
    widest = generator.verify_width
    if widest < 2 or not (asked == "auto" or is_left_open):
        return FixedWidth(widest)
    may_be_modelled = is_left_open and is_on_cpu
    costs = None
    if (is_half or is_on_cpu) and not is_captured:
        costs = _known_costs(generator, may_be_modelled)
    if costs is not None:
        known = KnownCosts(costs, widest, chain_beside(generator, is_captured))
        chooser = WidthChooser(known, generator.trees is not None)
    elif is_half and is_left_open:
        return FixedWidth(widest)
    else:
        chooser = _clocked_widths(generator, len(state.ids), is_captured)
    chooser.use_rows(len(state.ids))
    return chooser


def width_of_rows(table: Mapping[int, int], num_rows: int) -> int:
    """Returns the number of tokens per row that a table `{most rows: tokens}` has for `num_rows` rows.

    If there are more rows than in the table, returns the entry for the largest number of rows.
    """
    entries = sorted(table.items())
    for most_rows, width in entries:
        if num_rows <= most_rows:
            return width
    return entries[-1][1]


def _clocked_widths(
    generator: DFlashCandidateGenerator, rows: int, is_captured: bool
) -> WidthChooser:
    """Returns a chooser that uses the times of steps. In eager runs, this may be the chooser of an earlier run."""
    draft = generator.draft
    target = generator.request.target.model
    widest = generator.verify_width
    is_tree = generator.trees is not None
    chain = chain_beside(generator, is_captured)
    kept = None
    if not is_captured:
        kept = take_chooser(draft, target, rows, widest, is_tree, chain)
    if kept is not None:
        return kept
    longest = generator.num_proposals + 1
    first = first_width(longest, rows)
    return WidthChooser(StepTimes(widest, chain), is_tree, first)


def first_width(longest: int, rows: int) -> int:
    """Returns the tokens per row, at most `longest`, of a run's first verify if no step was ever timed."""
    return min(longest, max(FIRST_TOKENS // rows, 2))


def _known_costs(
    generator: DFlashCandidateGenerator, may_be_modelled: bool
) -> CostTable | StepCosts | None:
    """Returns the measured costs of a pair's steps if they cover all choices, else modelled ones, else `None`."""
    # Unlike `Path.is_dir`, this raises no error if the parent folder cannot be entered.
    was_tuned = os.path.isdir(cost_table.TABLES)
    if not may_be_modelled and not was_tuned:
        return None
    target = generator.request.target
    draft = generator.draft
    modelled = StepCosts.of(target, draft, generator.block_size)
    if was_tuned:
        is_tree = generator.trees is not None
        table = read_table(about_pair(target, draft, modelled, is_tree))
        if table is not None and table.covers(generator.verify_width):
            return table
    if may_be_modelled:
        return modelled
    return None


def computes_in_half(target: Target) -> bool:
    """Returns True if a target computes in half precision, in which another width may give another text."""
    weights = [*target.embedding.parameters(), *target.layers[0].parameters()]
    has_half = any(each.is_floating_point() and each.dtype.itemsize < 4 for each in weights)
    return has_half or torch.is_autocast_enabled(target.device.type)
