"""This module runs one step of decoding: it drafts a block, verifies it, commits accepted tokens and reports them.

[`step`] calls [`draft`], [`verify`], [`accept`] and [`report`] one after the other. [`finish`] is the part of a step
that follows the verify. [`draft`] and [`verify`] do not copy values from the device to the host. [`accept`] copies
values only if the acceptance rule of the run needs them. [`report`] runs on the host, after the outcome of the step
was copied.
An eager step reads only as many cache slots as the longest row needs. [`StaticStep`] (`static_step.py`) runs the same
functions with lengths that are rounded up, and a CUDA graph replays that step.
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
    """Runs one step eagerly; returns the target's logits `[B, W, V]` and the number of tokens that each row committed.

    The logits of a tree are in the order of its nodes; see [`DecodeState.along_path`].
    """
    # 1. Begin: make room in the buffers, and choose how many tokens are verified.
    make_room(run)
    begin(run)
    with run.request.ranks.forward(), packing(run.packed):
        # 2. Draft: `[anchor, MASK, ...]` becomes the proposals that follow the anchor.
        block = draft(run)
        run.watch.lap("draft")
        # 3. Verify: run the only forward of the target.
        outputs = verify(run, block)
    # 4. Finish: [`accept`] commits the proposals that match and one bonus token. The host then waits for the device,
    # once in this step, and [`report`] reads the outcome.
    return finish(run, outputs)


def begin(run: Run) -> None:
    """Sets the verify width of the step and counts its forwards; at width 1 the draft does not run."""
    state = run.state
    # All ranks take the choice of the first rank, because the choice depends on that rank's clock.
    width, is_chain = run.request.ranks.meet(run.chooser.next_choice())
    state.width = width
    state.is_chain = bool(is_chain)
    stats = run.stats
    stats.num_target_forwards += 1
    stats.num_draft_forwards += width > 1


def draft(run: Run, bound: int | None = None) -> RaggedBlock:
    """Drafts a block and writes the proposals into `state.block`, if the step verifies more than the anchor.

    Args:
        run (`Run`): The run, which is changed in place.
        bound (`int`, *optional*): Number of slots to read in every row. By default, the longest row determines it.

    Returns:
        `RaggedBlock`: The places of the tokens to be verified.
    """
    state = run.state
    generator = run.generator
    is_static = bound is not None
    tree = state.tree
    # The block to verify: a chain, or the nodes of a tree.
    verified = next_block(run, state.width, bound, tree)
    if state.width == 1:
        # Nothing is drafted. The newest context waits in its buffer, and is written once that buffer is full.
        generator.keep_context(is_static)
        return verified
    # The draft's block is as long as in its training, even if fewer proposals are verified.
    drafted = verified
    if tree is not None or state.width != generator.block_size:
        drafted = next_block(run, generator.block_size, bound)
    generator.propose(state, drafted, is_static)
    # Ranks may round differently, so all of them verify the proposals of the first rank.
    run.request.ranks.share(state.proposals, state.nodes)
    return verified


def next_block(
    run: Run, num_tokens: int, bound: int | None, tree: DraftTree | None = None
) -> RaggedBlock:
    """Returns the places of each row's next tokens: a chain or the nodes of a `tree`. `bound` is as in [`draft`]."""
    positions = run.state.next_positions[:, :num_tokens]
    last = bound or run.longest + num_tokens
    # The host knows the length of the longest row. In a batch of one row, this is the exact length of the row.
    is_exact = bound is None and positions.shape[0] == 1
    if tree is not None:
        return TreeBlock(positions, last, is_exact, tree=tree)
    return RaggedBlock(positions, last, is_exact)


def verify(run: Run, block: RaggedBlock) -> CausalLMOutputWithPast:
    """Runs the target once over `state.block`, at the places that `block` gives, and stores the tapped states.

    The top-level model is called, so that soft caps, adapters and device hooks apply. The keys and values of all `W`
    tokens go into the cache. The next block overwrites the keys and values of rejected tokens. Returns the target's
    output, with logits `[B, W, V]`. Raises `RuntimeError` if a layer did not use the ragged cache.
    """
    state = run.state
    target = run.request.target
    cache = run.cache
    with tapped(run) as taps:
        # The layers and masks of the cache depend on the place of the block.
        cache.begin(block)
        outputs = target.model(
            input_ids=state.block,
            # Positions continue from the last position of the prompt. In a prompt with images, this is not the index.
            position_ids=target.position_ids(block.indices, state.position_delta),
            use_cache=True,
            return_dict=True,
            **{CACHE_NAME: cache, KEYWORD: cache},
            **run.extra,
        )
        # A target that does not attend to the ragged cache would give another text without any error.
        cache.check_passed()
        # The draft's next forward computes its context from the tapped states of these tokens.
        run.generator.newest.add(taps.take(), block)
    return outputs


def finish(run: Run, outputs: CausalLMOutputWithPast) -> tuple[Tensor, list[int]]:
    """Accepts and reports the verified tokens of a step; returns the same as [`step`]."""
    run.watch.lap("verify")
    # 1. Accept: choose the target's own tokens, and commit the proposals that match and one bonus token.
    logits = logits_of(run, outputs)
    scores = accept(run, logits)
    # The only wait of such a step: one tensor holds everything that the host has to know.
    outcome = run.state.outcome.to("cpu")
    run.watch.lap("accept")
    # 2. Report: inform the streamer, the statistics and the object that chooses the next width.
    committed = report(run, outcome, run.state.width)
    if run.recorder.is_on:
        record(run, scores, logits, outputs, committed)
    return logits, committed


def logits_of(run: Run, outputs: CausalLMOutputWithPast) -> Tensor:
    """Returns the target's logits `[B, W, V]` on the device of the ids; the target's head may be on another device."""
    assert outputs.logits is not None
    return outputs.logits.to(run.state.ids.device)


def accept(run: Run, logits_BWV: Tensor) -> Tensor:
    """Chooses the target's tokens and commits the accepted ones; returns scores `[B, W, V]` for the recorder."""
    state = run.state
    # 1. Choose the target's own token after each verified token, in the order of the accepted path. If `num_accepted`
    # is None, the commit counts the proposals that equal the target's tokens.
    scores, num_accepted = run.rule.choose(state, logits_BWV)
    num_accepted = run.request.ranks.decided(state, num_accepted, run.rule)
    # 2. Before `lengths` advances, move the states of the accepted nodes to the places that a chain would have.
    if state.is_tree:
        longest_path = run.buffers.shape.path
        keep_path(run, state.report.path[:, :longest_path])
    # 3. Commit the accepted proposals and one bonus token. The bonus token is the next anchor.
    commit(state, num_accepted)
    return scores


def keep_path(run: Run, path_BN: Tensor) -> None:
    """Keeps a tree's accepted path `[B, n]` in the caches and the newest context, as if it had been a chain."""
    state = run.state
    state.report_nodes()
    # On a CPU, this test needs no wait. Often, the nodes of the path are already at the places of a chain.
    may_look = path_BN.device.type == "cpu" and not run.keeps_buffers
    stays = may_look and is_in_place(path_BN)
    # The caches hold the nodes in the tree's order. The nodes of the path are copied to the slots after the anchor.
    if not stays:
        run.cache.keep_path(path_BN, state.lengths)
    run.generator.newest.add_path(path_BN, stays)


def report(run: Run, outcome: Tensor, width: int) -> list[int]:
    """Informs the run's rows, the streamer, the statistics and the chooser of widths about a step.

    Args:
        run (`Run`): The run, which is changed in place.
        outcome (`torch.Tensor` of shape `[5 + W, B]` or `[5 + 5 W, B]`, int64): The step's `state.outcome`, on the
            host.
        width (`int`): Number of tokens that the step has verified.

    Returns:
        `list[int]`: Number of tokens that each row has committed.

    Raises:
        ValueError: If a row needs more positions than the target has.
    """
    # 1. Read the numbers per row, and the tree. A streamer gets the tree before the tokens that were accepted from it.
    reported = Reported(*outcome[:NUM_REPORTED].tolist())
    # Only rows that were running in this step have committed tokens.
    running = [row for row, num in enumerate(reported.committed) if num]
    tree: ReportedTree | None = None
    nodes: list[list[int]] = []
    if run.state.is_tree_of(width):
        tree = ReportedTree(*run.state.tree_parts(outcome, width).tolist())
        # Node 0 is the anchor, which is no proposal.
        nodes = [tree.path[row][1 : reported.accepted[row] + 1] for row in running]
        if run.request.streamer is not None:
            stream_tree(run, tree, reported)
    # 2. Note the new lengths of the rows, and give the new tokens to the streamer.
    tokens = outcome[NUM_REPORTED : NUM_REPORTED + width].T
    take_report(run, reported, tokens)
    # 3. Update the statistics, by the numbers of the rows in the request.
    stats = run.stats
    stats.count(run.rows.numbers, reported, running, width, tree, nodes)
    # 4. Inform the object that chooses the width of the next step.
    # The time of the streamer is left out, because it does not depend on the width.
    seconds = stats.draft_seconds + stats.verify_seconds + stats.accept_seconds
    run.chooser.observe(width, reported, running, seconds, tree, nodes)
    if run.finished:
        verdict = run.chooser.verdict()
        if verdict:
            logger.warning_once(verdict)
    run.watch.lap("rest")
    return reported.committed


def take_report(run: Run, reported: Reported, tokens: Tensor) -> None:
    """Notes the new lengths of the rows, and gives the new tokens to the streamer; raises as [`report`].

    Args:
        run (`Run`): The run, which is changed in place.
        reported (`Reported`): The numbers of the step.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The step's tokens, on any device.
    """
    run.rows.reported = reported
    # Few targets have a table of positions. In these targets, a row may reach the end of the table.
    if run.rows.reach:
        run.check_reach()
    streamer = run.request.streamer
    num_new = reported.committed[0]
    # A streamer gets several rows column by column, from the acceptance rule that synchronizes these rows.
    if streamer is not None and num_new and not run.rule.feeds_streamer:
        # The streamer gets a copy: it may keep the tensor, and the next step writes into the same memory.
        new_tokens = tokens[0, :num_new].to("cpu", copy=True)
        streamer.put(new_tokens)


def stream_tree(run: Run, tree: ReportedTree, reported: Reported) -> None:
    """Gives the tree of the first row to the streamer, if the streamer takes trees."""
    put_tree = getattr(run.request.streamer, "put_tree", None)
    is_fed = reported.committed[0] > 0 and not run.rule.feeds_streamer
    if put_tree is not None and is_fed:
        # The streamer gets copies: it may change them, and the statistics still have to read the tree.
        of_first_row = {name: part[0].copy() for name, part in tree._asdict().items()}
        put_tree(**of_first_row)


def record(
    run: Run, scores: Tensor, logits: Tensor, outputs: CausalLMOutputWithPast, committed: list[int]
) -> None:
    """Gives the recorder the scores, logits and hidden states of a step.

    Args:
        run (`Run`): The run after the step.
        scores (`torch.Tensor` of shape `[B, W, V]`): The scores that [`accept`] has returned.
        logits (`torch.Tensor` of shape `[B, W, V]`): The target's logits.
        outputs (`CausalLMOutputWithPast`): The target's output, whose hidden states are recorded.
        committed (`list[int]`): Number of tokens that each row has committed.
    """
    state = run.state
    states: Any = outputs.get("hidden_states")
    if state.is_tree:
        # The recorder gets the accepted path, as if it had been a chain.
        logits = state.along_path(logits)
        if states is not None:
            states = [state.along_path(layer.to(logits.device)) for layer in states]
    run.recorder.add(scores, logits, states, committed)
