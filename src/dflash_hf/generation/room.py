"""How many new tokens the buffers of a run have room for, and how they grow.

A limit says little about how long an answer gets, and plain `generate` allocates nothing for it. So a run begins with
room for some tokens of its limit, and doubles that when a step could need more. The host knows from the last step how
much there is, so that nothing is read for it.
"""

from __future__ import annotations

import torch

from dflash_hf.cache_size import OutOfRoomError
from dflash_hf.generation.buffers import free_buffers
from dflash_hf.generation.run import Run

# New tokens that there is room for at the beginning, at most; fixed buffers do not grow, see `make_room`.
FIRST_ROOM = 512
FIXED_ROOM = 8192


def first_room(limit: int, keeps_buffers: bool) -> int:
    """Returns how many of `limit` new tokens to begin with room for."""
    return min(limit, FIXED_ROOM if keeps_buffers else FIRST_ROOM)


def has_room(run: Run, num_unread: int = 0) -> bool:
    """Returns True if another step surely fits in, with `num_unread` steps begun that the host has not read."""
    return run.room >= run.state.limit or run.num_new + num_unread * run.generator.verify_width <= run.room


def make_room(run: Run) -> None:
    """Lets both caches and the ids grow where the next step could need it; what is in them stays.

    Fixed buffers that grow are no longer: the run goes on without them, and they are not kept for the next call.

    Raises:
        OutOfRoomError: If there is no memory even for the next few tokens.
    """
    if has_room(run):
        return
    least = min(run.state.limit, run.num_new + run.generator.verify_width)
    try:
        _grow(run, min(run.state.limit, max(2 * run.room, least)))
    except OutOfRoomError:
        free_buffers(run.generator.draft)
        _grow(run, least)


def _grow(run: Run, room: int) -> None:
    generator, state = run.generator, run.state
    length = run.prompt + room + max(generator.block_size, generator.verify_width)
    for cache in (generator.cache, run.cache):
        cache.grow(length)
    # Outside inference mode, like all that a call leaves behind.
    with torch.inference_mode(False):
        ids = state.ids.new_zeros(state.ids.shape[0], state.columns + room + state.whole_block.shape[1])
        num = min(ids.shape[1], state.ids.shape[1])
        ids[:, :num] = state.ids[:, :num]
    state.ids, run.room, run.keeps_buffers = ids, room, False
    run.stats.cache_bytes = run.cache.num_bytes() + generator.cache.num_bytes()


__all__ = ["first_room", "has_room", "make_room"]
