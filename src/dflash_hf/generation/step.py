"""One step of decoding: draft a block, verify it, accept what stands, report it to the host.

[`draft`], [`verify`] and [`accept`] read nothing on the host where the run's rule does not; [`report`] is the host's
part. [`step`] runs them one after the other, over exactly as many keys as there are. [`StaticStep`] (`static_step.py`)
runs the same functions with lengths rounded up, which is what a CUDA graph replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.block.tree import is_in_place
from dflash_hf.generation.accept import commit
from dflash_hf.generation.run import Reported, Run, make_room, tapped
from dflash_hf.generation.state import NUM_REPORTED, TreeReport
from dflash_hf.generation.widths import along_chain
from dflash_hf.target_model.reentry import KEYWORD

logger: Any = logging.get_logger(__name__)


def step(run: Run) -> tuple[Tensor, list[int]]:
    """Runs one step eagerly; returns the target's logits `[B, W, V]`, and how many tokens each row has committed."""
    make_room(run)
    begin(run)
    with run.request.ranks.forward():
        block = draft(run)
        run.watch.lap("draft")
        outputs = verify(run, block)
    return accept_and_report(run, outputs)


def begin(run: Run) -> None:
    """Sets the step's width and counts its forwards; a block of one token is not drafted."""
    state = run.state
    width = run.chooser.next_width()
    is_chain = run.chooser.is_chain
    # All ranks verify what the first one has chosen.
    width, is_chain = run.request.ranks.meet((width, int(is_chain)))
    state.width = width
    state.is_chain = bool(is_chain)
    run.stats.num_target_forwards += 1
    run.stats.num_draft_forwards += state.width > 1


def draft(run: Run, bound: int | None = None) -> RaggedBlock:
    """Drafts a block into `state.block`, where more than the anchor is to be verified.

    Args:
        run (`Run`): Changed in place.
        bound (`int`, *optional*): How many slots of every row to read; by default as many as the longest row needs.

    Returns:
        `RaggedBlock`: Where the tokens to be verified stand.
    """
    state = run.state
    width = state.width
    positions = state.next_positions
    # With one row the longest row is the row.
    is_exact = bound is None and state.ids.shape[0] == 1
    verified = RaggedBlock(positions[:, :width], bound or run.longest + width, is_exact, state.tree)
    if width == 1:
        run.generator.pass_over(is_static=bound is not None)
        return verified
    size = run.generator.block_size
    drafted = verified
    if width != size or state.tree is not None:
        drafted = RaggedBlock(positions[:, :size], bound or run.longest + size, is_exact)
    run.generator.propose(state, drafted)
    run.request.ranks.share(state.proposals, state.nodes)
    return verified


def verify(run: Run, block: RaggedBlock) -> CausalLMOutputWithPast:
    """Runs the target once over `state.block`, which stands at `block`, and hands its tapped states to the draft.

    Through the top-level model, so that soft caps, adapters and device hooks apply. Keys and values of all `W` tokens
    go into the cache; the rejected ones are overwritten by the next block. Returns the target's output, with logits
    `[B, W, V]`; raises `RuntimeError` if a layer did not go over the ragged cache as it must.
    """
    state = run.state
    target = run.request.target
    with tapped(run) as taps:
        run.cache.begin(block)
        outputs = target.model(
            input_ids=state.block,
            position_ids=target.position_ids(block.indices, state.position_delta),
            use_cache=True,
            return_dict=True,
            **{CACHE_NAME: run.cache, KEYWORD: run.cache},
            **run.extra,
        )
        run.cache.check_passed()
        run.generator.observe_block(taps.take(), block)
    return outputs


def accept(run: Run, logits_BWV: Tensor) -> Tensor:
    """Chooses the target's tokens and commits what stands; returns scores `[B, W, V]` for the recorder."""
    state = run.state
    scores, num_accepted = run.rule.choose(state, logits_BWV)
    num_accepted = run.request.ranks.decided(state, num_accepted, run.rule)
    if state.is_tree:
        keep_path(run, state.path[:, : run.buffers.shape.path])
    commit(state, num_accepted)
    return scores


def keep_path(run: Run, path_BN: Tensor) -> None:
    """Has the caches and the newest context keep a tree's accepted path, as if it had been a chain."""
    state = run.state
    state.report_nodes()
    # To look costs nothing where nothing has to be waited for.
    may_look = path_BN.device.type == "cpu" and not run.keeps_buffers
    stays = may_look and is_in_place(path_BN)
    if not stays:
        run.cache.keep_path(path_BN, state.lengths)
    run.generator.newest.add_path(path_BN, stays)


def accept_and_report(run: Run, outputs: CausalLMOutputWithPast) -> tuple[Tensor, list[int]]:
    """Ends a step whose forwards have run, with the host waiting for it; returns as [`step`]."""
    run.watch.lap("verify")
    state = run.state
    assert outputs.logits is not None
    logits = outputs.logits.to(state.ids.device)  # where the head is need not be where ids go in
    scores = accept(run, logits)
    outcome = state.outcome.to("cpu")
    run.watch.lap("accept")
    committed = report(run, outcome, state.width)
    states: Any = outputs.get("hidden_states")
    is_looked_at = run.recorder.is_on or run.generator.keeps_logits
    if state.is_tree and is_looked_at:
        logits = state.along_path(logits)
        if states is not None:
            states = [state.along_path(layer.to(logits.device)) for layer in states]
    run.recorder.add(scores, logits, states, committed)
    return logits, committed


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
    reported = Reported(*outcome[:NUM_REPORTED].tolist())
    tree = run.state.report_in(outcome, width)
    if tree is not None:
        stream_tree(run, tree, reported)
    take_note(run, reported, outcome[NUM_REPORTED : NUM_REPORTED + width].T)
    running = [row for row, num in enumerate(reported.committed) if num]
    stats = run.stats
    for row in running:
        stats.num_committed[run.rows[row]].append(reported.committed[row])
        stats.num_accepted[run.rows[row]].append(reported.accepted[row])
    stats.verify_widths.append(width)
    accepted = [reported.accepted[row] for row in running]
    # Without the rest: how long a streamer takes does not depend on the width.
    seconds = stats.draft_seconds + stats.verify_seconds + stats.accept_seconds
    if tree is None:
        run.chooser.observe(width, accepted, seconds)
    else:
        nodes = count_nodes(run, tree, reported, running)
        run.chooser.observe(width, accepted, seconds, nodes, chains_of(run, tree, running))
    if run.finished:
        verdict = run.chooser.verdict()
        if verdict:
            logger.warning_once(verdict)
    run.watch.lap("rest")
    return reported.committed


def take_note(run: Run, reported: Reported, tokens: Tensor) -> None:
    """Notes where the rows stand, and hands the step's new tokens to the streamer; errors as [`report`].

    Args:
        run (`Run`): Changed in place.
        reported (`Reported`): What the step has done.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The step's tokens, on any device.
    """
    run.check_reach(reported)
    streamer = run.request.streamer
    num_new = reported.committed[0]
    if streamer is not None and num_new and not run.rule.feeds_streamer:
        # A copy: the next step writes into the same memory, and a streamer may keep what it gets.
        streamer.put(tokens[0, :num_new].to("cpu", copy=True))
    run.reported = reported


def stream_tree(run: Run, tree: TreeReport, reported: Reported) -> None:
    """Hands the tree of the first row to a streamer that takes trees."""
    put_tree = getattr(run.request.streamer, "put_tree", None)
    if put_tree is not None and reported.committed[0] and not run.rule.feeds_streamer:
        put_tree(**{name: part[0].tolist() for name, part in tree._asdict().items()})


def count_nodes(
    run: Run, tree: TreeReport, reported: Reported, running: Sequence[int]
) -> list[list[int]]:
    """Counts the nodes that were accepted in the statistics; returns them, for each row that was running."""
    path = tree.path.tolist()
    sources = tree.sources.tolist()
    nodes = [path[row][1 : reported.accepted[row] + 1] for row in running]
    run.stats.count_nodes(tree.path.shape[1], nodes, [sources[row] for row in running])
    return nodes


def chains_of(run: Run, tree: TreeReport, running: Sequence[int]) -> list[tuple[int, int]]:
    """Returns how far the chain of the likeliest proposals would have come, where it may be chosen instead."""
    if not run.chooser.may_choose_chain:
        return []
    parents = tree.parents.tolist()
    path = tree.path.tolist()
    return [along_chain(parents[row], path[row]) for row in running]
