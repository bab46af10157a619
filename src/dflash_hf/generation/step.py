"""One step of decoding: draft a block, verify it, accept what stands, report it to the host.

[`draft`], [`verify`] and [`accept`] read nothing on the host where the run's rule does not; [`report`] is the host's
part, once it has read the outcome. [`step`] runs them one after the other, over exactly as many keys as there are;
[`finish`] is its second half.
[`StaticStep`] (`static_step.py`) runs the same functions with lengths rounded up, which is what a CUDA graph replays.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf.block.attention import RaggedBlock, TreeBlock
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.block.tree import DraftTree, is_in_place
from dflash_hf.generation.accept import commit
from dflash_hf.generation.run import Run, make_room, tapped
from dflash_hf.generation.state import NUM_REPORTED, Reported, ReportedTree
from dflash_hf.packed_weights import packing
from dflash_hf.target_model.reentry import KEYWORD

logger: Any = logging.get_logger(__name__)


def step(run: Run) -> tuple[Tensor, list[int]]:
    """Runs one step eagerly; returns the target's logits `[B, W, V]`, and how many tokens each row has committed.

    Logits of a tree are in the order of its nodes; see [`DecodeState.along_path`].
    """
    # 1. Begin: room in the buffers, and how many tokens are verified.
    make_room(run)
    begin(run)
    with run.request.ranks.forward(), packing(run.packed):
        # 2. Draft: `[anchor, MASK, ...]` becomes proposals behind the anchor.
        block = draft(run)
        run.watch.lap("draft")
        # 3. Verify: the only forward of the target.
        outputs = verify(run, block)
    # 4. Finish: [`accept`] commits the matching prefix and one token of the target's more, then [`report`] tells the
    # host, after the one wait of the step.
    return finish(run, outputs)


def begin(run: Run) -> None:
    """Sets what the step verifies and counts its forwards; a block of one token is not drafted."""
    state = run.state
    # All ranks take the first one's choice, which follows its clock.
    width, is_chain = run.request.ranks.meet(run.chooser.next_choice())
    state.width = width
    state.is_chain = bool(is_chain)
    stats = run.stats
    stats.num_target_forwards += 1
    stats.num_draft_forwards += width > 1


def draft(run: Run, bound: int | None = None) -> RaggedBlock:
    """Drafts a block into `state.block`, where more than the anchor is to be verified.

    Args:
        run (`Run`): Changed in place.
        bound (`int`, *optional*): How many slots of every row to read; by default as many as the longest row needs.

    Returns:
        `RaggedBlock`: Where the tokens to be verified stand.
    """
    state = run.state
    generator = run.generator
    is_static = bound is not None
    tree = state.tree
    # The block to verify: a chain, or the nodes of a tree.
    verified = next_block(run, state.width, bound, tree)
    if state.width == 1:
        # Nothing is drafted; the newest context waits, or is written when its columns are full.
        generator.keep_context(is_static)
        return verified
    # The draft's block is as long as in its training, however many of its proposals are verified.
    drafted = verified
    if tree is not None or state.width != generator.block_size:
        drafted = next_block(run, generator.block_size, bound)
    generator.propose(state, drafted, is_static)
    # Ranks may round differently: all of them verify the first one's proposals.
    run.request.ranks.share(state.proposals, state.nodes)
    return verified


def next_block(
    run: Run, num_tokens: int, bound: int | None, tree: DraftTree | None = None
) -> RaggedBlock:
    """Returns the next tokens of every row, a chain or the nodes of a `tree`; `bound` as of [`draft`]."""
    positions = run.state.next_positions[:, :num_tokens]
    last = bound or run.longest + num_tokens
    # With one row the longest row is the row.
    is_exact = bound is None and positions.shape[0] == 1
    if tree is not None:
        return TreeBlock(positions, last, is_exact, tree=tree)
    return RaggedBlock(positions, last, is_exact)


def verify(run: Run, block: RaggedBlock) -> CausalLMOutputWithPast:
    """Runs the target once over `state.block`, which stands at `block`, and hands its tapped states to the draft.

    Through the top-level model, so that soft caps, adapters and device hooks apply. Keys and values of all `W` tokens
    go into the cache; the rejected ones are overwritten by the next block. Returns the target's output, with logits
    `[B, W, V]`; raises `RuntimeError` if a layer did not go over the ragged cache as it must.
    """
    state = run.state
    target = run.request.target
    cache = run.cache
    with tapped(run) as taps:
        # The cache is told where the block stands: its layers and masks follow from it.
        cache.begin(block)
        outputs = target.model(
            input_ids=state.block,
            # Positions count on from the prompt's, which for images are no plain indices.
            position_ids=target.position_ids(block.indices, state.position_delta),
            use_cache=True,
            return_dict=True,
            **{CACHE_NAME: cache, KEYWORD: cache},
            **run.extra,
        )
        # A target that attends elsewhere would give another text without any error.
        cache.check_passed()
        # What the tapped layers said of these tokens is the draft's next context.
        run.generator.newest.add(taps.take(), block)
    return outputs


def finish(run: Run, outputs: CausalLMOutputWithPast) -> tuple[Tensor, list[int]]:
    """Accepts and reports what a step has verified, on the host's side; returns what [`step`] returns."""
    run.watch.lap("verify")
    # 1. Accept: the target's own tokens; the matching prefix and one token more are committed.
    logits = logits_of(run, outputs)
    scores = accept(run, logits)
    # The one wait of such a step: all that the host has to know is in one tensor.
    outcome = run.state.outcome.to("cpu")
    run.watch.lap("accept")
    # 2. Report: the streamer, the statistics, and what chooses the next width.
    committed = report(run, outcome, run.state.width)
    if run.recorder.is_on:
        record(run, scores, logits, outputs, committed)
    return logits, committed


def logits_of(run: Run, outputs: CausalLMOutputWithPast) -> Tensor:
    """Returns the target's logits `[B, W, V]` where ids go in, which need not be where the head is."""
    assert outputs.logits is not None
    return outputs.logits.to(run.state.ids.device)


def accept(run: Run, logits_BWV: Tensor) -> Tensor:
    """Chooses the target's tokens and commits what stands; returns scores `[B, W, V]` for the recorder."""
    state = run.state
    # 1. The target's own token behind each verified one, in the order of the path that they take. `num_accepted` may
    # be None: as many as equal the target's tokens, which the commit counts.
    scores, num_accepted = run.rule.choose(state, logits_BWV)
    num_accepted = run.request.ranks.decided(state, num_accepted, run.rule)
    # 2. What the path's nodes left behind moves where a chain's would stand, before `lengths` moves on.
    if state.is_tree:
        longest_path = run.buffers.shape.path
        keep_path(run, state.report.path[:, :longest_path])
    # 3. The matching proposals and one token more are the row's, and that one is the next anchor.
    commit(state, num_accepted)
    return scores


def keep_path(run: Run, path_BN: Tensor) -> None:
    """Has the caches and the newest context keep a tree's accepted path, as if it had been a chain."""
    state = run.state
    state.report_nodes()
    # On a CPU a look is free: often the path already stands where a chain would.
    may_look = path_BN.device.type == "cpu" and not run.keeps_buffers
    stays = may_look and is_in_place(path_BN)
    # Nodes stand in the caches in their own order; the path's are copied to the slots behind the anchor.
    if not stays:
        run.cache.keep_path(path_BN, state.lengths)
    run.generator.newest.add_path(path_BN, stays)


def report(run: Run, outcome: Tensor, width: int) -> list[int]:
    """Tells the host what a step has done: the run's counts, the streamer, the statistics, what chooses the width.

    Args:
        run (`Run`): Changed in place.
        outcome (`torch.Tensor` of shape `[5 + W, B]` or `[5 + 5 W, B]`, int64): The step's `state.outcome`, on the
            host.
        width (`int`): Tokens that the step has verified.

    Returns:
        `list[int]`: How many tokens each row has committed.

    Raises:
        ValueError: If a row needs more positions than the target has.
    """
    # 1. The numbers per row, and the tree, which a streamer gets before the tokens that were taken of it.
    reported = Reported(*outcome[:NUM_REPORTED].tolist())
    # The rows that the step was for: one that had ended before has committed nothing.
    running = [row for row, num in enumerate(reported.committed) if num]
    tree: ReportedTree | None = None
    nodes: list[list[int]] = []
    if run.state.is_tree_of(width):
        tree = ReportedTree(*run.state.tree_parts(outcome, width).tolist())
        # Node 0 is the anchor, which was no proposal.
        nodes = [tree.path[row][1 : reported.accepted[row] + 1] for row in running]
        if run.request.streamer is not None:
            stream_tree(run, tree, reported)
    # 2. Where the rows stand now, and the new tokens for the streamer.
    tokens = outcome[NUM_REPORTED : NUM_REPORTED + width].T
    take_report(run, reported, tokens)
    # 3. The statistics, by the request's rows.
    stats = run.stats
    stats.count(run.rows.numbers, reported, running, width, tree, nodes)
    # 4. What chooses the width of the next step.
    # Without the rest: how long a streamer takes does not depend on the width.
    seconds = stats.draft_seconds + stats.verify_seconds + stats.accept_seconds
    run.chooser.observe(width, reported, running, seconds, tree, nodes)
    if run.finished:
        verdict = run.chooser.verdict()
        if verdict:
            logger.warning_once(verdict)
    run.watch.lap("rest")
    return reported.committed


def take_report(run: Run, reported: Reported, tokens: Tensor) -> None:
    """Notes where the rows stand, and hands the step's new tokens to the streamer; errors as [`report`].

    Args:
        run (`Run`): Changed in place.
        reported (`Reported`): What the step has done.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The step's tokens, on any device.
    """
    run.rows.reported = reported
    # Few targets have a table of positions, whose end a row may reach.
    if run.rows.reach:
        run.check_reach()
    streamer = run.request.streamer
    num_new = reported.committed[0]
    # Several rows go to a streamer column by column, by the rule that keeps them together.
    if streamer is not None and num_new and not run.rule.feeds_streamer:
        # A copy: the next step writes into the same memory, and a streamer may keep what it gets.
        new_tokens = tokens[0, :num_new].to("cpu", copy=True)
        streamer.put(new_tokens)


def stream_tree(run: Run, tree: ReportedTree, reported: Reported) -> None:
    """Hands the tree of the first row to a streamer that takes trees."""
    put_tree = getattr(run.request.streamer, "put_tree", None)
    is_fed = reported.committed[0] > 0 and not run.rule.feeds_streamer
    if put_tree is not None and is_fed:
        # Copies: a streamer may change what it gets, and the statistics are still to be counted.
        of_first_row = {name: part[0].copy() for name, part in tree._asdict().items()}
        put_tree(**of_first_row)


def record(
    run: Run, scores: Tensor, logits: Tensor, outputs: CausalLMOutputWithPast, committed: list[int]
) -> None:
    """Has the recorder keep of a step what the call has asked for.

    Args:
        run (`Run`): The run, behind the step.
        scores (`torch.Tensor` of shape `[B, W, V]`): What [`accept`] has returned.
        logits (`torch.Tensor` of shape `[B, W, V]`): The target's.
        outputs (`CausalLMOutputWithPast`): The target's, of which hidden states are kept.
        committed (`list[int]`): Tokens that each row has committed.
    """
    state = run.state
    states: Any = outputs.get("hidden_states")
    if state.is_tree:
        # Whoever looks at a step sees the path as if it had been a chain.
        logits = state.along_path(logits)
        if states is not None:
            states = [state.along_path(layer.to(logits.device)) for layer in states]
    run.recorder.add(scores, logits, states, committed)
