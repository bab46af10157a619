"""From a request to the run that decodes it: the target's prefill with taps on, and the first token."""

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

# New tokens that there is room for at the beginning, at most; fixed buffers do not grow, see `run.make_room`.
FIRST_ROOM = 512
FIXED_ROOM = 32768
# Columns of the longest text: of a caller whose limit is infinite.
LONGEST_TEXT = 1 << 40
_PREPARE = cast(Any, GenerationMixin).prepare_inputs_for_generation


# Sizes of the images: Transformers hands them to every forward, where they do nothing beside explicit positions.
IMAGE_SIZES = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
# What a verify does not get of what a prefill got: it has ids, positions and a cache of its own, and sees no image.
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

    Reads lengths on the host. Arguments and errors as of [`begin_prefill`].

    Returns:
        `Run`: The run, behind its first token.

    Raises:
        RuntimeError: If the taps did not fire.
    """
    begun = begin_prefill(request, inputs, user_cache, keeps_buffers, is_looked_at)
    # Transformers' own prefill, whose tapped states become the draft's context chunk by chunk.
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
    """Prepares all that a prefill needs, up to the target's first forward.

    Args:
        request (`Request`): The request.
        inputs (`dict[str, Any]`): Keywords for the target's prefill, as `generate` prepared them.
        user_cache (`UserCache` or `NoUserCache`): The cache that the run will advance at its end.
        keeps_buffers (`bool`): Take the buffers of an earlier call, and give them back for the next one.
        is_looked_at (`bool`): Verify chains unless something else is asked for.
        seed (`torch.Tensor` of shape `[]`, int64, *optional*): Of the sampling noise. By default it is drawn from
            torch's global generator.
        num_places (`int`): Of a prompt whose row then goes to one of so many places of fixed buffers (`places.py`):
            it is verified there, and the run's own buffers are neither taken nor kept.
        max_rows (`int`): Of a prompt whose row then joins others: rows that run together, at most.

    Raises:
        ValueError: If the run would cross a boundary of the target's RoPE.
        OutOfRoomError: If its keys and values have no room in memory.
    """
    inputs = dict(inputs)  # the cache to be filled is put into it
    watch = Stopwatch(SpeculativeStats(), request.started, _devices_to_wait_for(request))
    # What Transformers has done since the user's call.
    watch.lap("prepare")
    # 1. How much is drafted and verified, and where every token of the prompts stands.
    num_rows = num_places or len(request.input_ids)
    most_rows = max(num_rows, max_rows)
    is_captured = keeps_buffers or num_places > 0
    options = resolve(request, range(num_rows, most_rows + 1), is_captured, is_looked_at)
    prompts = prompts_of(request, inputs, user_cache.past)
    # The FP8 copy is made before anybody asks how much memory is free.
    drafter = request.draft
    if drafter.generation_config.draft_dtype is not None:
        drafter = drafting_copy(request.draft, request.target)
    # 2. The buffers, and the drafting side over them, with the context of a cache that was passed in.
    room = _room_for(request, prompts, keeps_buffers)
    generator = _start_draft(request, drafter, options, prompts, room, keeps_buffers, user_cache)
    # All that can be refused is refused by now: the ranks compare the call and begin their forwards together.
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
    """A prefill that has begun: the target goes over the prompts in `filling`, then [`finish`] makes a run of it."""

    user_cache: UserCache | NoUserCache
    watch: Stopwatch
    prompts: Prompts
    generator: DFlashCandidateGenerator
    filling: Filling
    seed: Tensor | None  # of the sampling noise; greedy runs have none
    room: int  # new tokens that the buffers are made for
    keeps_buffers: bool

    def finish(self) -> Run:
        """Returns the run, behind its first token; errors as of [`prefill`]."""
        prompts = self.prompts
        generator = self.generator
        request = generator.request
        outputs, filled = self.filling.filled()
        # 1. The filled cache, row by row without padding, into the ragged one.
        length = max(prompts.row_lengths) + self.room
        keeps_filled = self.user_cache.is_given
        cache = _into_ragged(
            generator, filled, prompts.positions, length, keeps_filled, self.keeps_buffers
        )
        # 2. The state, as if the prompts' last tokens were to be verified now.
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
            # Until a caller says that widths are chosen: what was kept of them is not taken while this may fail.
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
        # 3. The first token, by the commit of every step: the prefill's logits are those of a verify of one token.
        _commit_first(run, outputs)
        return run


def _compare_ranks(
    request: Request, inputs: dict[str, Any], options: Options, user_cache: UserCache | NoUserCache
) -> None:
    """Has the processes of a group compare what they were given; raises `ValueError` where that differs."""
    past = None
    if user_cache.is_kept:
        past = user_cache.past
    # Options are part of it: another block size on one rank would be another shape in a collective operation.
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
    """Tells the statistics what the run is: its rows, its longest path, how it proposes, and its memory."""
    proposal = "greedy"
    if request.config.do_sample:
        proposal = generator.proposal
    # The anchor of a path is no proposal.
    stats.start_run(len(request.input_ids), generator.buffers.shape.path - 1, proposal)
    stats.cache_bytes = sum(cache.num_bytes() for cache in generator.buffers.caches())
    if generator.drafter is not request.draft:
        stats.float8_bytes = float8_bytes(generator.drafter)


def _devices_to_wait_for(request: Request) -> tuple[torch.device, ...]:
    """Returns the devices to wait for at each reading of the clock."""
    if not request.draft.generation_config.synchronize:
        return ()
    return request.input_ids.device, request.draft.device


def _room_for(request: Request, prompts: Prompts, keeps_buffers: bool) -> int:
    """Returns how many new tokens to begin with room for."""
    if not keeps_buffers:
        return min(prompts.limit, FIRST_ROOM)
    affordable = affordable_length(request.target, request.draft, len(request.input_ids))
    return fixed_room(prompts.limit, affordable - max(prompts.row_lengths))


def fixed_room(limit: int, affordable: int) -> int:
    """Returns for how many of `limit` new tokens fixed buffers are made.

    `affordable` is for how many they can be kept between calls: for more than that they have a quarter of the room
    that they could have.
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
    """Returns the drafting side, over buffers with room for new tokens, with the context of a cache passed in.

    Raises as [`prefill`].
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
    # A verify also looks at proposals, up to a path behind the last token of the answer.
    next_positions = prompts.lengths + prompts.position_delta
    furthest = prompts.limit + shape.path - 1
    if target.facts.ropes:
        check_length(target, next_positions, furthest, prompts.num_columns, user_cache.past)
    if isinstance(user_cache, UserCache):
        # The last new token is in no cache.
        num_columns = prompts.num_columns + prompts.limit - 1
        check_room(target, user_cache.cache, num_columns)
        check_windows(target, user_cache.cache, num_columns)
    length = max(prompts.row_lengths) + room
    buffers = take_buffers(
        target, draft, shape, length, request.input_ids.shape[1] + room, keeps_buffers
    )
    generator = DFlashCandidateGenerator(request, buffers, options.proposal, drafter)
    # The cache first: its context says from which token on the draft counts.
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

    The prefill's own cache is emptied, one passed in is not. Where there is no room beside what calls of other shapes
    have left, that is freed, and fixed buffers are made no longer than they have to be.
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
    if cache is not buffers.cache:  # nothing was captured over this one
        buffers.cache = cache
        buffers.graphs = Graphs()
    return cache


def _commit_first(run: Run, outputs: CausalLMOutputWithPast) -> None:
    """Commits the token that the prefill decides: a step that has verified the prompts' last tokens."""
    run.recorder.first_hidden_states = outputs.hidden_states
    state = run.state
    logits = outputs.logits
    assert logits is not None
    logits = logits[:, -1:].to(state.ids.device)
    # Other rules look at every token that they draw; this one reads nothing on the host in a step.
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


# ---- where the prompts' tokens stand


class Prompts(NamedTuple):
    """The prompts of a call. `B` rows, `T` columns of the whole conversation, cached or new."""

    # [B, T], int64, on the host: index of each token in its row, negative for padding.
    positions: Tensor
    lengths: Tensor  # [B], int64: tokens of each row, on the target's device
    row_lengths: list[int]  # the same, known on the host
    # [B], or [rows, B] under M-RoPE, int64: target position minus index at the last token.
    position_delta: Tensor
    limit: int  # tokens that a row may generate, at least one
    eos_ids: Tensor  # [N], int64: end-of-sequence ids; there may be none

    @property
    def num_columns(self) -> int:
        """Columns of the conversation."""
        return self.positions.shape[1]


def prompts_of(request: Request, inputs: dict[str, Any], past: int) -> Prompts:
    """Returns the prompts of a request, of which a cache has `past` columns; errors as [`prompt_positions`].

    `inputs` are the keywords for the target's prefill, as `generate` prepared them.
    """
    device = request.input_ids.device
    positions = prompt_positions(request, inputs, past)
    lengths_on_host = positions[:, -1] + 1
    lengths = lengths_on_host.to(device)
    criteria = request.criteria
    # Transformers has made criteria of both, and a caller may have passed more of them: all count. Exact types: a
    # subclass may stop elsewhere, and is called.
    ends = [torch.empty(0, dtype=torch.long, device=device)]
    end_criteria = [one for one in criteria if type(one) is EosTokenCriteria]
    ends.extend(one.eos_token_id.reshape(-1).to(device) for one in end_criteria)
    length_criteria = [one for one in criteria if type(one) is MaxLengthCriteria]
    limits = [one.max_length for one in length_criteria] or [request.config.max_length]
    # A caller's limit may be a fraction, or infinite: a text ends with the first column that is not below it.
    longest_text = math.ceil(min(*limits, LONGEST_TEXT))
    return Prompts(
        positions=positions,
        lengths=lengths,
        row_lengths=lengths_on_host.tolist(),
        position_delta=position_delta(request, inputs, lengths),
        # Plain `generate` looks at the limit after a token, so there is always one.
        limit=max(1, longest_text - request.input_ids.shape[1]),
        eos_ids=torch.cat(ends),
    )


def prompt_positions(request: Request, inputs: dict[str, Any], past: int) -> Tensor:
    """Returns the index in its row of every token of the conversation, cached or new: `[B, T]`, negative for padding.

    On the host, where all that follows from them is decided: a mask is read once.

    With nothing cached a mask may go on behind the prompt: plain `generate` then shifts all positions by as much,
    which is in `position_delta`. Raises `ValueError` if a row ends in padding, or has padding between tokens where
    windows are counted in columns; also in a mask that `generate` inferred from pad ids.
    """
    mask = _host_mask(request, inputs, past)
    if bool(mask.all()):
        # Not the rows of the mask: one row of ones may stand for all.
        return torch.arange(mask.shape[1], device="cpu").expand(len(request.input_ids), -1)
    check_padding(request.target, mask)
    # The index of a token is the number of tokens before it.
    index = mask.long().cumsum(dim=1) - 1
    return index.masked_fill(~mask, -1)


def _host_mask(request: Request, inputs: dict[str, Any], past: int) -> Tensor:
    """Returns which columns of the conversation hold tokens, bool `[B, T]` on the host."""
    embeds = inputs.get("inputs_embeds")
    # Embeddings stand for the prompt: the ids beside them are the answer so far, mostly none.
    new = request.input_ids
    if embeds is not None:
        new = embeds[..., 0]
    batch, columns = new.shape
    mask = inputs.get("attention_mask")
    if mask is not None:
        mask = mask.cpu() != 0
        # A mask may be longer than a prompt, but not than a conversation.
        return mask if past else mask[:, :columns]
    if embeds is None and past:
        # A mask of ones is dropped on the way; its width says what is cached already.
        columns = getattr(request.config, "_mask_length", columns)
    return torch.ones(batch, columns, dtype=torch.bool, device="cpu")


def position_delta(request: Request, inputs: dict[str, Any], lengths: Tensor) -> Tensor:
    """Returns the target's position minus the index at each prompt's last token: plain decoding counts on from there.

    The target's own preparation of a step is asked, which may shift the positions that `generate` prepared (PaliGemma
    counts from 1).

    Args:
        request (`Request`): The request.
        inputs (`dict[str, Any]`): Keywords for the target's prefill, as `generate` prepared them.
        lengths (`torch.Tensor` of shape `[B]`, int64): Tokens of each prompt.

    Returns:
        `torch.Tensor`: Int64, `[B]`; or `[rows, B]` under M-RoPE, where a token has several positions. They differ
        where an image is the last thing in a prompt, and plain decoding counts each of them on.

    Raises:
        ValueError: If the target leaves out the positions that `generate` prepared, and counts by itself.
    """
    if inputs.get("position_ids") is None:
        return torch.zeros_like(lengths)
    model: Any = request.target.model
    position_ids = inputs["position_ids"]
    # Transformers' own takes the last position as it is.
    is_usual = getattr(model.prepare_inputs_for_generation, "__func__", None) is _PREPARE
    if not is_usual:
        # An empty cache, so that what is prepared is a step behind the prompt and not the prompt itself.
        kwargs = {**inputs, CACHE_NAME: empty_cache(request, inputs), "use_cache": True}
        last = torch.zeros_like(lengths[:, None])
        step = model.prepare_inputs_for_generation(
            last, next_sequence_length=1, is_first_iteration=False, **kwargs
        )
        position_ids = step.get("position_ids")
    check_takes_positions(request.target, position_ids)
    return position_ids[..., -1].to(lengths.device) - (lengths - 1)
