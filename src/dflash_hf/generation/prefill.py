"""This module turns a request into a run: the target's prefill with its layers tapped, and the first token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.generation.accept import BlockRule, rule_for
from dflash_hf.generation.buffers import affordable_length, else_freed, take_buffers
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.checks import check_padding, check_room
from dflash_hf.generation.choose import check_first_draw
from dflash_hf.generation.filling import PER_TOKEN, Filling, empty_cache
from dflash_hf.generation.float8 import drafting_copy, float8_bytes
from dflash_hf.generation.graphs import Graphs
from dflash_hf.generation.options import Options, resolve
from dflash_hf.generation.request import Request
from dflash_hf.generation.run import Rows, Run, taps_of_verifies
from dflash_hf.generation.sampling import new_seed
from dflash_hf.generation.state import NUM_REPORTED, BufferShape, Reported
from dflash_hf.generation.stats import Recorder, SpeculativeStats, Stopwatch
from dflash_hf.generation.step import accept, take_report
from dflash_hf.generation.user_cache import NoUserCache, UserCache
from dflash_hf.generation.widths import FixedWidth
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.support import check_length, check_takes_positions, check_windows

# At the beginning, a run has room for at most this many new tokens. Fixed buffers do not grow; see `run.make_room`.
FIRST_ROOM = 512
FIXED_ROOM = 32768
# Limit of columns for a caller whose own limit is infinite.
LONGEST_TEXT = 1 << 40
_PREPARE = cast(Any, GenerationMixin).prepare_inputs_for_generation


# Sizes of images. Transformers passes them to every forward, but with explicit positions they have no effect.
IMAGE_SIZES = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
# Inputs of a prefill that a verify does not get. A verify has its own ids, positions and cache, and sees no image.
OF_CALL = {CACHE_NAME, "use_cache", "logits_to_keep", "inputs_embeds", "return_dict"}
OF_PREFILL = PER_TOKEN | IMAGE_SIZES | OF_CALL | set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)


def prefill(
    request: Request,
    inputs: dict[str, Any],
    user_cache: UserCache | NoUserCache,
    keeps_buffers: bool = False,
    is_looked_at: bool = False,
) -> Run:
    """Runs the target over the prompts with taps on, moves its cache into the ragged one, commits the first token.

    Reads lengths on the host. The arguments and further errors are those of [`begin_prefill`].

    Returns:
        `Run`: The run after its first token.

    Raises:
        RuntimeError: If the taps did not fire.
    """
    begun = begin_prefill(request, inputs, user_cache, keeps_buffers, is_looked_at)
    # Transformers runs its own prefill. The tapped states of each chunk become a part of the draft's context.
    with request.ranks.forward():
        begun.filling.run()
    return begun.finish()


def begin_prefill(
    request: Request,
    inputs: dict[str, Any],
    user_cache: UserCache | NoUserCache,
    keeps_buffers: bool = False,
    is_looked_at: bool = False,
    seed: Tensor | None = None,
    num_places: int = 0,
    max_rows: int = 0,
) -> Prefill:
    """Prepares everything that a prefill needs before the target's first forward.

    Args:
        request (`Request`): The request.
        inputs (`dict[str, Any]`): Keywords for the target's prefill, as `generate` prepared them.
        user_cache (`UserCache` or `NoUserCache`): The cache that the run will advance at its end.
        keeps_buffers (`bool`): Whether to take the buffers of an earlier call, and to keep them for the next call.
        is_looked_at (`bool`): Whether the caller looks at each step. Such a run verifies chains unless the options ask
            for something else.
        seed (`torch.Tensor` of shape `[]`, int64, *optional*): Seed of the sampling noise. By default, it is drawn
            from torch's global generator.
        num_places (`int`): Number of places for rows in the fixed buffers (`places.py`) that the prompt's row moves to
            after its prefill. The row is verified there, so the run's own buffers are neither taken from an earlier
            call nor kept. 0 for other runs.
        max_rows (`int`): Maximum number of rows that run together, if the prompt's row joins other rows after its
            prefill. 0 for other runs.

    Raises:
        ValueError: If the padding of the prompts, the target's RoPE or the user cache does not allow the run, or if
            the ranks of a group have different inputs.
        OutOfRoomError: If there is no memory for the keys and values.
    """
    inputs = dict(inputs)  # a copy, because the cache to be filled is put into it
    watch = Stopwatch(SpeculativeStats(), request.started, _devices_to_wait_for(request))
    # The time since the user's call, in which Transformers has prepared the inputs.
    watch.lap("prepare")
    # 1. Resolve how many tokens are drafted and verified, and compute the index of every token of the prompts.
    num_rows = num_places or len(request.input_ids)
    most_rows = max(num_rows, max_rows)
    is_captured = keeps_buffers or num_places > 0
    options = resolve(request, range(num_rows, most_rows + 1), is_captured, is_looked_at)
    prompts = prompts_of(request, inputs, user_cache.past)
    # The FP8 copy is made before the free memory is measured.
    drafter = request.draft
    if drafter.generation_config.draft_dtype is not None:
        drafter = drafting_copy(request.draft, request.target)
    # 2. Prepare the buffers and the candidate generator, with the draft's context of a cache that was passed in.
    room = _room_for(request, prompts, keeps_buffers)
    generator = _start_draft(request, drafter, options, prompts, room, keeps_buffers, user_cache)
    # By now, all refusals have been made. The ranks compare the call, and start their forwards together.
    if not request.ranks.is_alone:
        _compare_ranks(request, inputs, options, user_cache)
    if seed is None and request.config.do_sample:
        seed = new_seed(request.input_ids.device)
    request.ranks.share(seed)
    return Prefill(
        user_cache=user_cache,
        watch=watch,
        prompts=prompts,
        generator=generator,
        filling=Filling(inputs, generator, prompts.positions, user_cache),
        seed=seed,
        room=room,
        keeps_buffers=keeps_buffers,
    )


@dataclass(slots=True, kw_only=True)
class Prefill:
    """A prefill that has begun. `filling` runs the target over the prompts, and then [`finish`] returns the run."""

    user_cache: UserCache | NoUserCache
    watch: Stopwatch
    prompts: Prompts
    generator: DFlashCandidateGenerator
    filling: Filling
    seed: Tensor | None  # seed of the sampling noise; None in greedy runs
    room: int  # new tokens that the buffers have room for
    keeps_buffers: bool

    def finish(self) -> Run:
        """Returns the run after its first token; errors as of [`prefill`]."""
        prompts = self.prompts
        generator = self.generator
        request = generator.request
        outputs, filled = self.filling.filled()
        # 1. Move the filled cache into the ragged cache, row by row and without padding.
        length = max(prompts.row_lengths) + self.room
        keeps_filled = self.user_cache.is_given
        cache = _into_ragged(
            generator, filled, prompts.positions, length, keeps_filled, self.keeps_buffers
        )
        # 2. Begin the state as if the last token of each prompt were the token to verify.
        state = generator.buffers.state
        state.begin(
            request.input_ids,
            lengths=prompts.lengths,
            limit=prompts.limit,
            position_delta=prompts.position_delta,
            eos_ids=prompts.eos_ids,
            seed=self.seed,
        )
        _start_stats(self.watch.stats, request, generator)
        num_rows = len(request.input_ids)
        recorder = Recorder(request.config, num_rows)
        rule = rule_for(request.processors, request.own_criteria, request.streamer, state, recorder)
        extra = {
            name: value
            for name, value in self.filling.inputs.items()
            if name not in OF_PREFILL and value is not None
        }
        # Few targets have a table of positions.
        reach: list[int] = []
        num_positions = request.target.facts.num_positions
        if num_positions is not None:
            # Such targets have one position per token: `position_delta` is [B].
            reach = (num_positions - prompts.position_delta).tolist()
        run = Run(
            generator=generator,
            rule=rule,
            recorder=recorder,
            watch=self.watch,
            # The caller may replace it by a `WidthChooser`, but only after this prefill: taking a kept chooser out of
            # its pool would lose it if the prefill failed.
            chooser=FixedWidth(generator.verify_width),
            packed=self.filling.packed,
            user_cache=self.user_cache,
            taps=taps_of_verifies(request, cache),
            extra=extra,
            room=self.room,
            keeps_buffers=self.keeps_buffers,
            rows=Rows(
                numbers=list(range(num_rows)),
                reach=reach,
                reported=Reported.before(prompts.row_lengths, state.host.columns),
            ),
        )
        # 3. Commit the first token as every step does. The prefill's logits are those of a verify of one token.
        _commit_first(run, outputs)
        return run


def _compare_ranks(
    request: Request, inputs: dict[str, Any], options: Options, user_cache: UserCache | NoUserCache
) -> None:
    """Compares the inputs of all processes of a group; raises `ValueError` if they differ."""
    past = None
    if user_cache.is_kept:
        past = user_cache.past
    # The options are compared too, because another block size on one rank would give collectives of another shape.
    request.ranks.compare(
        {
            **inputs,
            **vars(request.config),
            CACHE_NAME: past,
            "block_size": options.block_size,
            "is_tree": options.is_tree,
            "verify_width": options.width,
            "input_ids": request.input_ids,
        }
    )


def _start_stats(
    stats: SpeculativeStats, request: Request, generator: DFlashCandidateGenerator
) -> None:
    """Begins the statistics with the number of rows, the longest path, the proposal rule and the bytes of memory."""
    proposal = "greedy"
    if request.config.do_sample:
        proposal = generator.proposal
    # The anchor is on the path, but it is no proposal.
    stats.start_run(len(request.input_ids), generator.buffers.shape.path - 1, proposal)
    stats.cache_bytes = sum(cache.num_bytes() for cache in generator.buffers.caches())
    if generator.drafter is not request.draft:
        stats.float8_bytes = float8_bytes(generator.drafter)


def _devices_to_wait_for(request: Request) -> tuple[torch.device, ...]:
    """Returns the devices that are synchronized before each reading of the clock."""
    if not request.draft.generation_config.synchronize:
        return ()
    return request.input_ids.device, request.draft.device


def _room_for(request: Request, prompts: Prompts, keeps_buffers: bool) -> int:
    """Returns the number of new tokens that a run has room for at its beginning."""
    if not keeps_buffers:
        return min(prompts.limit, FIRST_ROOM)
    affordable = affordable_length(request.target, request.draft, len(request.input_ids))
    return fixed_room(prompts.limit, affordable - max(prompts.row_lengths))


def fixed_room(limit: int, affordable: int) -> int:
    """Returns the number of new tokens, of at most `limit`, that fixed buffers have room for.

    `affordable` is the largest number for which buffers can be kept between calls. If the room would be larger than
    that, the result is at most a quarter of `FIXED_ROOM`.
    """
    room = min(limit, FIXED_ROOM)
    if room > affordable:
        return min(limit, FIXED_ROOM // 4)
    return room


def _start_draft(
    request: Request,
    drafter: DFlashDraftModel,
    options: Options,
    prompts: Prompts,
    room: int,
    keeps_buffers: bool,
    user_cache: UserCache | NoUserCache,
) -> DFlashCandidateGenerator:
    """Returns the candidate generator, over buffers with `room` for new tokens, and loads the user cache's context.

    Raises the errors of [`begin_prefill`].
    """
    target = request.target
    draft = request.draft
    shape = BufferShape.of(
        draft,
        options.block_size,
        options.width,
        options.is_tree,
        prompts.position_delta,
        prompts.eos_ids,
    )
    # A verify also runs over proposals that follow the last token of the answer: up to a path without its anchor.
    next_positions = prompts.lengths + prompts.position_delta
    furthest = prompts.limit + shape.path - 1
    if target.facts.ropes:
        check_length(target, next_positions, furthest, prompts.num_columns, user_cache.past)
    if isinstance(user_cache, UserCache):
        # The last new token is not in the cache.
        num_columns = prompts.num_columns + prompts.limit - 1
        check_room(target, user_cache.cache, num_columns)
        check_windows(target, user_cache.cache, num_columns)
    length = max(prompts.row_lengths) + room
    buffers = take_buffers(
        target, draft, shape, length, request.input_ids.shape[1] + room, keeps_buffers
    )
    generator = DFlashCandidateGenerator(request, buffers, options.proposal, drafter)
    # The cache's context is loaded first, because it determines the index from which the draft counts.
    user_cache.load_context(generator, prompts.positions.to(request.input_ids.device))
    generator.begin(prompts.lengths)
    return generator


def _into_ragged(
    generator: DFlashCandidateGenerator,
    filled: Cache,
    positions: Tensor,
    max_length: int,
    keeps_filled: bool,
    keeps_buffers: bool,
) -> RaggedCache:
    """Moves the prefill's cache into a ragged one with room for `max_length` tokens and a block.

    The prefill's own cache is emptied, but a cache that the caller passed in is not. If memory runs out, the buffers
    that earlier calls of the draft have left are freed, and fixed buffers are made only as long as necessary.
    """
    buffers = generator.buffers
    width = generator.verify_width
    least = max_length + width
    length = least
    if keeps_buffers:
        least = max_length + buffers.shape.block
        length = buffers.capacity

    def take(length: int) -> RaggedCache:
        recurrences = generator.request.target.recurrences
        return RaggedCache.take_prefill(
            filled, positions, length, width, keeps_filled, buffers.cache, recurrences
        )

    cache = else_freed(generator.draft, take, length, least)
    if cache is not buffers.cache:  # no graph was captured over the new cache
        buffers.cache = cache
        buffers.graphs = Graphs()
    return cache


def _commit_first(run: Run, outputs: CausalLMOutputWithPast) -> None:
    """Commits the first new token: the prefill counts as a step that has verified the last token of each prompt."""
    run.recorder.first_hidden_states = outputs.hidden_states
    state = run.state
    logits = outputs.logits
    assert logits is not None
    logits = logits[:, -1:].to(state.ids.device)
    # The other rules check every token that they draw. `BlockRule` does not, because it reads nothing on the host.
    if state.host.is_sampled and isinstance(run.rule, BlockRule):
        check_first_draw(state, logits, run.rule.processors)
    scores = accept(run, logits)
    reported = Reported(*state.outcome[:NUM_REPORTED].tolist())
    run.watch.lap("prefill")
    take_report(run, reported, state.tokens)
    if run.recorder.is_on:
        run.recorder.add(scores, logits, None, reported.committed)
    state.width = run.generator.verify_width
    run.watch.lap("rest")


# ---- the indices of the prompts' tokens


class Prompts(NamedTuple):
    """The prompts of a call. `B` is the number of rows, and `T` the columns of the conversation, cached and new."""

    # [B, T], int64, on the host: index of each token in its row, negative for padding.
    positions: Tensor
    lengths: Tensor  # [B], int64: number of tokens of each row, on the target's device
    row_lengths: list[int]  # the same numbers on the host
    # [B], or [rows, B] under M-RoPE, int64: target position minus index at the last token.
    position_delta: Tensor
    limit: int  # tokens that a row may generate, at least one
    eos_ids: Tensor  # [N], int64: end-of-sequence ids; there may be none

    @property
    def num_columns(self) -> int:
        """Number of columns of the conversation, cached and new."""
        return self.positions.shape[1]


def prompts_of(request: Request, inputs: dict[str, Any], past: int) -> Prompts:
    """Returns the prompts of a request whose cache holds `past` columns; errors as of [`prompt_positions`].

    `inputs` are the keywords for the target's prefill, as `generate` prepared them.
    """
    device = request.input_ids.device
    positions = prompt_positions(request, inputs, past)
    lengths_on_host = positions[:, -1] + 1
    lengths = lengths_on_host.to(device)
    criteria = request.criteria
    # Transformers turns both settings into criteria, and a caller may have passed further criteria of these classes.
    # All of them count. Only these exact classes count: a subclass may stop elsewhere, so it is called like any other
    # criterion.
    ends = [torch.empty(0, dtype=torch.long, device=device)]
    end_criteria = [one for one in criteria if type(one) is EosTokenCriteria]
    ends.extend(one.eos_token_id.reshape(-1).to(device) for one in end_criteria)
    length_criteria = [one for one in criteria if type(one) is MaxLengthCriteria]
    limits = [one.max_length for one in length_criteria] or [request.config.max_length]
    # A caller's limit may be a fraction or infinite. A text ends at the first column that is not below the limit.
    longest_text = math.ceil(min(*limits, LONGEST_TEXT))
    return Prompts(
        positions=positions,
        lengths=lengths,
        row_lengths=lengths_on_host.tolist(),
        position_delta=position_delta(request, inputs, lengths),
        # Plain `generate` checks the limit after each token, so an answer has at least one token.
        limit=max(1, longest_text - request.input_ids.shape[1]),
        eos_ids=torch.cat(ends),
    )


def prompt_positions(request: Request, inputs: dict[str, Any], past: int) -> Tensor:
    """Returns the index in its row of every token of the conversation, cached or new: `[B, T]`, negative for padding.

    The tensor is on the host, where everything that depends on it is decided. The mask is read only once.

    If no token is cached, a mask may be longer than the prompt. Plain `generate` then shifts all positions by the
    number of additional columns, and `position_delta` contains this shift. A row must not end in padding. If the
    target counts its windows in columns, a row must not have padding between tokens either. Raises `ValueError`
    otherwise, even if `generate` inferred the mask from pad ids.
    """
    mask = _host_mask(request, inputs, past)
    if bool(mask.all()):
        # The number of rows is not read from the mask, because a mask with a single row may apply to all rows.
        return torch.arange(mask.shape[1], device="cpu").expand(len(request.input_ids), -1)
    check_padding(request.target, mask)
    # The index of a token is the number of tokens before it.
    index = mask.long().cumsum(dim=1) - 1
    return index.masked_fill(~mask, -1)


def _host_mask(request: Request, inputs: dict[str, Any], past: int) -> Tensor:
    """Returns a mask of the conversation's columns that hold tokens, bool `[B, T]` on the host."""
    embeds = inputs.get("inputs_embeds")
    # Embeddings stand for the prompt. The ids beside them are the answer so far, which is usually empty.
    new = request.input_ids
    if embeds is not None:
        new = embeds[..., 0]
    batch, columns = new.shape
    mask = inputs.get("attention_mask")
    if mask is not None:
        mask = mask.cpu() != 0
        # A mask may be longer than the prompt, but not longer than the conversation.
        return mask if past else mask[:, :columns]
    if embeds is None and past:
        # Transformers drops a mask of ones. The width of that mask says how many columns the conversation has.
        columns = getattr(request.config, "_mask_length", columns)
    return torch.ones(batch, columns, dtype=torch.bool, device="cpu")


def position_delta(request: Request, inputs: dict[str, Any], lengths: Tensor) -> Tensor:
    """Returns the target's position minus the index at each prompt's last token. Later positions continue from there.

    The target's own `prepare_inputs_for_generation` gives the positions, because it may shift the positions that
    `generate` prepared (PaliGemma counts from 1).

    Args:
        request (`Request`): The request.
        inputs (`dict[str, Any]`): Keywords for the target's prefill, as `generate` prepared them.
        lengths (`torch.Tensor` of shape `[B]`, int64): Number of tokens of each prompt.

    Returns:
        `torch.Tensor`: Int64, of shape `[B]`, or `[rows, B]` under M-RoPE, where a token has several positions. These
            positions differ if a prompt ends with an image. Plain decoding continues each of them separately.

    Raises:
        ValueError: If the target ignores the positions that `generate` prepared, and counts positions itself.
    """
    if inputs.get("position_ids") is None:
        return torch.zeros_like(lengths)
    model: Any = request.target.model
    position_ids = inputs["position_ids"]
    # Transformers' own method takes the last position without a change.
    is_usual = getattr(model.prepare_inputs_for_generation, "__func__", None) is _PREPARE
    if not is_usual:
        # With an empty cache, the target prepares the step after the prompt, and not the prompt itself.
        kwargs = {**inputs, CACHE_NAME: empty_cache(request, inputs), "use_cache": True}
        last = torch.zeros_like(lengths[:, None])
        step = model.prepare_inputs_for_generation(
            last, next_sequence_length=1, is_first_iteration=False, **kwargs
        )
        position_ids = step.get("position_ids")
    check_takes_positions(request.target, position_ids)
    return position_ids[..., -1].to(lengths.device) - (lengths - 1)
