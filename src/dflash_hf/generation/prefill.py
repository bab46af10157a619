"""From a call to the run that decodes it: settings, the target's prefill with taps on, the first token."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf import ops
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache_name import CACHE_NAME
from dflash_hf.errors import require
from dflash_hf.generation.accept import SynchronizedRows
from dflash_hf.generation.buffers import affordable_length, else_freed, num_choices, take_buffers
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator, Rule
from dflash_hf.generation.float8 import drafting_copy, float8_bytes
from dflash_hf.generation.run import Call, Run, first_room
from dflash_hf.generation.sampling import new_key
from dflash_hf.generation.state import NUM_REPORTED, BufferShape, DecodeState
from dflash_hf.generation.stats import Recorder, SpeculativeStats, Stopwatch
from dflash_hf.generation.step import settle, take_note
from dflash_hf.generation.user_cache import UserCache
from dflash_hf.generation.widths import (
    CAPTURED_WIDTHS,
    WHOLE_BLOCK_ROWS,
    WidthChooser,
    take_chooser,
    width_of_rows,
)
from dflash_hf.target.fused import runs_whole
from dflash_hf.target.hidden_states import Taps
from dflash_hf.target.parts import Target
from dflash_hf.target.reentry import outermost
from dflash_hf.target.support import check_length

_PREPARE = cast(Any, GenerationMixin).prepare_inputs_for_generation
# Times as many nodes as a chain has tokens, at most, where the run chooses how many.
MOST_NODES = 4


def prefill(call: Call, kept: UserCache | None = None, keeps_buffers: bool = False, is_looked_at: bool = False) -> Run:
    """Runs the target over the prompts with taps on, moves its cache into the ragged one, commits the first token.

    Reads lengths on the host. `kept` is what `keep` will advance. With `keeps_buffers` those of an earlier call are
    taken, which go back for the next one; one that `is_looked_at` verifies the chain of the draft's proposals unless
    something else is asked for. Raises `ValueError` if the run would cross a boundary of the target's RoPE,
    `OutOfRoomError` if its K/V have no room in memory, and `RuntimeError` if the taps did not fire.
    """
    target = call.target
    draft = call.draft
    input_ids = call.input_ids
    config = call.config
    ranks = call.ranks
    devices = (input_ids.device, draft.device) if draft.generation_config.synchronize else ()
    watch = Stopwatch(stats := SpeculativeStats(), call.started, devices)
    watch.lap("prepare")
    block_size, width, is_tree, rule = _resolved(call, keeps_buffers, is_looked_at)
    past = 0 if kept is None else kept.past
    positions = prompt_positions(call, past)
    limits = [one.max_length for one in call.criteria if isinstance(one, MaxLengthCriteria)]
    # Plain `generate` looks at the limit after a token, so there is always one.
    limit = max(1, min(limits, default=int(config.max_length)) - input_ids.shape[1])
    lengths = (positions[:, -1] + 1).to(input_ids.device)
    longest = int(positions[:, -1].max()) + 1
    delta = position_delta(call, lengths)
    ends = [one.eos_token_id.reshape(-1) for one in call.criteria if isinstance(one, EosTokenCriteria)]
    eos_ids = torch.cat(ends).to(input_ids.device) if ends else None
    drafter = drafting_copy(draft, target)
    room = first_room(limit, affordable_length(target, draft, len(input_ids)) - longest if keeps_buffers else None)
    shape = BufferShape.of(draft, block_size, width, is_tree, delta, eos_ids)
    check_length(target, lengths + delta, limit + shape.path - 1, positions.shape[1], past)
    buffers = take_buffers(target, draft, shape, longest + room, input_ids.shape[1] + room, keeps_buffers)
    generator = DFlashCandidateGenerator(draft, target, call.processors, buffers, rule, drafter)
    if kept is not None:
        kept.begin(generator, positions.to(input_ids.device), limit)
    generator.begin(lengths)
    given = {**call.inputs, **vars(config), CACHE_NAME: None if kept is None else past}
    ranks.begin({**given, "input_ids": input_ids, "block_size": block_size, "verify_width": width})
    seed = new_key(input_ids.device) if config.do_sample else None
    ranks.share(seed)
    with ranks.forward():
        outputs, filled = _fill(call, generator, positions, kept)
    cache = _into_ragged(generator, filled, positions, longest + room, kept, keeps_buffers)
    state = buffers.state
    state.begin(input_ids, lengths=lengths, limit=limit, position_delta=delta, eos_ids=eos_ids, seed=seed)
    stats.num_committed, stats.num_accepted = ([[] for _ in range(len(input_ids))] for _ in range(2))
    stats.num_proposed = shape.path - 1
    stats.num_target_forwards = 1
    stats.proposal = "greedy" if state.key is None else rule
    stats.cache_bytes = cache.num_bytes() + generator.cache.num_bytes()
    stats.float8_bytes = 0 if drafter is draft else float8_bytes(drafter)
    recorder = Recorder(config, input_ids.shape[0])
    num_positions = target.facts.num_positions
    run = Run(
        call=call,
        generator=generator,
        buffers=buffers,
        cache=cache,
        synchronized=SynchronizedRows.if_needed(
            call.processors, call.own_criteria, call.streamer, state, recorder.has_scores
        ),
        recorder=recorder,
        stats=stats,
        watch=watch,
        chooser=_chooser(generator, state, keeps_buffers),
        kept=kept,
        extra={name: value for name, value in call.inputs.items() if name not in OF_PREFILL and value is not None},
        reach=None if num_positions is None else (num_positions - delta).tolist(),
        prompt=longest,
        longest=longest,
        room=room,
        keeps_buffers=keeps_buffers,
        rows=list(range(len(input_ids))),
    )
    call.inputs = {}  # images may be large, and a run that is looked at long
    _commit_first(run, outputs)
    return run


def _fill(
    call: Call, generator: DFlashCandidateGenerator, positions: Tensor, kept: UserCache | None
) -> tuple[CausalLMOutputWithPast, Cache]:
    """Runs Transformers' own prefill (the user's attention implementation, chunks, images) with taps on.

    The taps are projected to draft context chunk by chunk, so no feature tensor of the whole prompt is kept. Returns
    the target's output (of the last chunk) and the cache that it filled.
    """
    target = call.target
    draft = call.draft
    given = kept.cache if kept is not None and kept.given else None
    call.inputs[CACHE_NAME] = _empty_cache(call) if given is None else given
    past = 0 if kept is None else kept.past
    seen = past

    def sink(states: Tensor) -> None:
        nonlocal seen
        generator.observe_prompt(states, positions[:, seen : seen + states.shape[1]])
        seen += states.shape[1]

    ids = draft.config.target_layer_ids
    deepstack = draft.config.tap_after_deepstack
    with (
        # Nobody else calls it where nothing of the user's runs in it.
        nullcontext(lambda: True) if runs_whole(target) else outermost(target.model, target.decoder) as is_ours,
        Taps(target.layers, ids, sink, deepstack, counts=lambda kwargs: is_ours()).open(),
    ):
        outputs = _run_prefill(call, past, positions.shape[1])
    if seen != positions.shape[1]:
        raise RuntimeError(
            f"expected taps on {positions.shape[1] - past} prompt tokens, got {seen - past}; a compiled target runs "
            "no hooks that are added later, use the model as it was before torch.compile"
        )
    # Not always the one that was handed in: Phi-3 starts a new one for prompts beyond its first RoPE range.
    filled = outputs.get(CACHE_NAME)
    if filled is None:
        raise RuntimeError(
            f"expected a cache from the prefill of {type(target.model).__name__}, got none; call target.eval(), "
            "gradient checkpointing in training mode turns caches off"
        )
    what = f"{type(target.model).__name__} to go on with the cache passed in (its RoPE depends on the length)"
    require(given in (None, filled), what, "a new one", f"pass the whole conversation without {CACHE_NAME}")
    del call.inputs[CACHE_NAME]
    return outputs, filled


def _empty_cache(call: Call) -> DynamicCache:
    """The cache that `generate` prepared if it is what a prefill needs, else a new one.

    A static, quantised or offloaded one would save nothing: decoding has a cache of its own.
    """
    prepared: Any = call.inputs.get(CACHE_NAME)
    if type(prepared) is DynamicCache and not prepared.offloading and not int(prepared.get_seq_length()):
        return prepared
    return DynamicCache(config=call.target.config)


def _into_ragged(
    generator: DFlashCandidateGenerator,
    filled: Cache,
    positions: Tensor,
    max_length: int,
    kept: UserCache | None,
    keeps_buffers: bool,
) -> RaggedCache:
    """Moves the prefill's cache into a ragged one with room for `max_length` tokens and a block.

    The prefill's own cache is emptied, one passed in is not. Where there is no room beside what calls of other shapes
    have left, that is freed, and fixed buffers are made no longer than they have to be.
    """
    buffers = generator.buffers
    width = generator.verify_width
    keep = kept is not None and kept.given
    exact = max_length + (buffers.shape.block if keeps_buffers else width)

    def take(length: int) -> RaggedCache:
        buffers.capacity = min(buffers.capacity, length)
        recurrences = generator.target.recurrences
        return RaggedCache.take_prefill(filled, positions, length, width, keep, buffers.cache, recurrences)

    cache = else_freed(generator.draft, take, buffers.capacity if keeps_buffers else exact, exact)
    if cache is not buffers.cache:  # nothing was captured over this one
        buffers.cache = cache
        buffers.graphs = None
    return cache


def _commit_first(run: Run, outputs: CausalLMOutputWithPast) -> None:
    """Commits the token that the prefill decides: a step that has verified the prompts' last tokens."""
    run.recorder.first_hidden_states = outputs.hidden_states
    state = run.state
    logits = outputs.logits
    assert logits is not None
    logits = logits[:, -1:].to(state.ids.device)
    scores = settle(run, logits)
    reported = state.outcome[:NUM_REPORTED].tolist()
    run.watch.lap("prefill")
    take_note(run, reported, state.tokens)
    run.recorder.add(scores, logits, None, reported[0])
    state.width = run.generator.verify_width
    run.watch.lap("rest")


def _resolved(call: Call, keeps_buffers: bool, is_looked_at: bool) -> tuple[int, int, bool, Rule]:
    """Resolves the draft's options: block size, how many tokens are verified at most, whether as a tree, and the rule.

    Raises `ValueError` for processors and trees that `proposal="sample"`, and targets that a tree, cannot go with.
    """
    target = call.target
    draft = call.draft
    options = call.draft.generation_config
    processors = call.processors
    block_size = options.block_size or draft.config.block_size
    widest = draft.config.num_proposals(block_size) + 1
    width = _widest_verify(options.verify_width, widest, len(call.input_ids), keeps_buffers and not is_looked_at)
    rule: Rule = "argmax" if options.proposal == "auto" else options.proposal
    what = "only temperature, top-k, top-p and other warpers of single scores under proposal='sample'"
    is_drawn = call.config.do_sample and rule == "sample"
    nodes = options.num_tree_nodes
    is_fit = not is_drawn or processors.is_stateless
    require(is_fit, what, [type(p).__name__ for p in processors.processors], "use proposal='shared_noise'")
    what = "proposal 'argmax' or 'shared_noise' with num_tree_nodes"
    do = "rejection goes along a chain, leave one out"
    require(not (is_drawn and nodes), what, rule, do)
    if nodes is None:
        # Without kernels the host of a GPU builds trees.
        is_unfit = call.input_ids.is_cuda and not ops.builds_trees(call.input_ids)
        is_chain = is_looked_at or (keeps_buffers and is_unfit) or isinstance(options.verify_width, int)
        is_chain = is_chain or is_drawn or bool(target.recurrences) or width == 1
        nodes = 0 if is_chain else min(width, ops.MAX_NODES)
    elif nodes == "auto":
        nodes = min(MOST_NODES * width, ops.num_paths(width - 1, num_choices(target, draft)) + 1, ops.MAX_NODES)
    what = "a target of attention layers alone with num_tree_nodes"
    got = type(target.model).__name__
    is_fit = not (nodes and target.recurrences)
    require(is_fit, what, got, "recurrent states follow one path, leave num_tree_nodes out")
    return block_size, nodes or width, nodes > 0, rule


def _widest_verify(asked: int | str | Mapping[int, int] | None, widest: int, num_rows: int, is_captured: bool) -> int:
    """Returns how many tokens of a block of `widest` are verified at most."""
    if isinstance(asked, int):
        return asked
    if isinstance(asked, Mapping):
        return width_of_rows(asked, num_rows)
    if asked is None and is_captured and num_rows > WHOLE_BLOCK_ROWS:
        return min(width_of_rows(CAPTURED_WIDTHS, num_rows), widest)
    return widest


def _chooser(generator: DFlashCandidateGenerator, state: DecodeState, keeps_buffers: bool) -> WidthChooser | None:
    """What chooses the width of each verify, if that follows the run; costs of captured steps are measured anew.

    Where nothing is said about it, only where steps are not to be captured, a graph per width, and where the text does
    not follow the width too: rejection draws another one, and in half precision near ties turn.
    """
    target = generator.target
    draft = generator.draft
    width = generator.verify_width
    options = draft.generation_config
    asked = "auto" if options.num_tree_nodes == "auto" else options.verify_width
    if asked is None and not keeps_buffers:
        weight: Any = target.embedding.weight
        is_half = weight.dtype.itemsize < 4 or torch.is_autocast_enabled(target.device.type)
        asked = None if is_half or (state.key is not None and generator.rule == "sample") else "auto"
    if asked != "auto" or width < 2:
        return None
    is_tree = generator.trees is not None
    longest = generator.num_proposals + 1
    # A number asks for trees; captured, each choice would be a graph more.
    may_be_chain = is_tree and options.num_tree_nodes in (None, "auto") and longest <= width and not keeps_buffers
    chain = longest if may_be_chain else None
    rows = state.ids.shape[0]
    kept = None if keeps_buffers else take_chooser(draft, target.model, rows, width, is_tree, chain)
    chooser = WidthChooser(width, is_tree, longest, chain) if kept is None else kept
    chooser.use_rows(rows)
    return chooser


# Inputs of a forward that go along with the tokens, column by column.
PER_TOKEN = {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
# Sizes of the images: Transformers hands them to every forward, where they do nothing beside explicit positions.
IMAGE_SIZES = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
# What a verify does not get of what a prefill got: it has ids, positions and a cache of its own, and sees no image.
OF_CALL = {CACHE_NAME, "use_cache", "logits_to_keep", "inputs_embeds", "return_dict"}
OF_PREFILL = PER_TOKEN | IMAGE_SIZES | OF_CALL | set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)


def _run_prefill(call: Call, past: int, num_columns: int) -> Any:
    """Runs `GenerationMixin._prefill` over those of a conversation's columns that the cache does not have yet.

    Older Transformers cut a continued conversation into chunks as if nothing was cached, so that is done here.
    """
    model: Any = call.target.model
    if not past or call.inputs.get("inputs_embeds") is not None:  # embeddings are cut by `_prefill` itself
        return model._prefill(call.input_ids, call.config, call.inputs)
    config = copy.copy(call.config)
    config.prefill_chunk_size = None
    new = call.input_ids[:, past - num_columns :]
    outputs = None
    end = past
    for chunk in torch.split(new, call.config.prefill_chunk_size or new.shape[1], dim=1):
        end += chunk.shape[1]
        left = num_columns - end
        given = {name: call.inputs.get(name) for name in PER_TOKEN}
        cut = {name: value[..., : value.shape[-1] - left] for name, value in given.items() if value is not None}
        outputs = model._prefill(chunk, config, {**call.inputs, **cut})
    return outputs


def prompt_positions(call: Call, past: int) -> Tensor:
    """Returns the index in its row of every token of the conversation, cached or new: `[B, T]`, negative for padding.

    On the host, where all that follows from them is decided: a mask is read once.

    With nothing cached a mask may go on behind the prompt: plain `generate` then shifts all positions by as much,
    which is in `position_delta`. Raises `ValueError` if a row ends in padding, or has padding between tokens where
    windows are counted in columns; also in a mask that `generate` inferred from pad ids.
    """
    mask = call.inputs.get("attention_mask")
    embeds = call.inputs.get("inputs_embeds")
    batch, columns = call.input_ids.shape if embeds is None else embeds.shape[:2]
    if mask is not None:
        mask = mask.cpu() != 0
        mask = mask if past else mask[:, :columns]
        columns = mask.shape[1]
    elif embeds is None and past:
        # A mask of ones is dropped on the way; its width says what is cached already.
        columns = getattr(call.config, "_mask_length", columns)
    if mask is None or bool(mask.all()):
        return torch.arange(columns, device="cpu").expand(batch, -1)
    is_left = bool(mask[:, -1].all())
    got = "padding after the last token (as which every pad token counts)"
    require(is_left, "left-padded prompts", got, "tokenize with padding_side='left' and pass attention_mask")
    slides = bool((mask[:, 1:] < mask[:, :-1]).any()) and any(DynamicCache(config=call.target.config).is_sliding)
    what = "no padding between tokens with a target that has sliding windows, which plain generate counts in columns"
    require(not slides, what, "some", f"pass the whole conversation left-padded, without {CACHE_NAME}")
    return (mask.long().cumsum(dim=1) - 1).masked_fill(~mask, -1)


def position_delta(call: Call, lengths: Tensor) -> Tensor:
    """Returns target position minus index at the last token of prompts of these `lengths` `[B]`: what plain decoding
    goes on counting from.

    The target's own preparation of a step is asked, which may shift what `generate` prepared (PaliGemma counts from
    1). Shape `[B]`, or `[rows, B]` under M-RoPE, where a token has several positions: after an image as the last thing
    in a prompt they differ, and plain decoding counts each of them on. Raises `ValueError` if the target leaves out
    the positions that `generate` prepared, and counts by itself.
    """
    if call.inputs.get("position_ids") is None:
        return torch.zeros_like(lengths)
    model: Any = call.target.model
    position_ids = call.inputs["position_ids"]
    if getattr(model.prepare_inputs_for_generation, "__func__", None) is not _PREPARE:  # that one takes the last
        kwargs = {**call.inputs, CACHE_NAME: _empty_cache(call), "use_cache": True}
        last = torch.zeros_like(lengths[:, None])
        step = model.prepare_inputs_for_generation(last, next_sequence_length=1, is_first_iteration=False, **kwargs)
        position_ids = step.get("position_ids")
    counts = f"{type(model).__name__}, which counts them itself"
    require(position_ids is not None, "a target that takes its positions from generate", counts, "drop the draft")
    return position_ids[..., -1].to(lengths.device) - (lengths - 1)


def keep_new_images(target: Target, input_ids: Tensor, past: int, arguments: dict[str, Any]) -> None:
    """Computes the positions of a conversation `[B, T]` and drops the images that its cache of `past` columns has.

    Under M-RoPE a token's positions follow from the sizes of all images before it, and the prefill takes only those
    whose tokens are new. Transformers takes both from one `image_grid_thw`, which can be right for one of the two.

    The arguments of `generate` are changed in place: `position_ids` is added; `image_grid_thw` `[N, 3]`, patches in
    time, height and width of all images, and `pixel_values` `[patches, ...]`, of all or the new ones, lose those that
    are in the cache. Raises `ValueError` if the numbers of images, sizes and patches do not fit, there are videos, or
    a mask of the whole conversation is missing.
    """
    types = arguments.get("mm_token_type_ids")
    grids = arguments.get("image_grid_thw")
    if types is None or grids is None:
        return
    mask = arguments.get("attention_mask")
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (input_ids, types, mask)]
    if len(set(shapes)) > 1 or input_ids.shape[1] <= past:
        raise ValueError(
            f"expected input_ids, mm_token_type_ids and attention_mask of the whole conversation, its {past} cached "
            f"columns too, beside image_grid_thw, got shapes {shapes}; pass what the processor made of all messages"
        )
    highest = int(types.max())
    require(highest < 2, "no videos in a conversation with a cache", highest, f"leave out {CACHE_NAME}")
    is_image = types.to(grids.device) == 1
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    is_new = (torch.arange(types.shape[1], device=grids.device) >= past).expand_as(starts)[starts]
    what = f"image_grid_thw of all {len(is_new)} images of the conversation (positions follow from them)"
    require(len(grids) == len(is_new), what, len(grids), "pixel_values may be those of the new images")
    model: Any = target.model
    kwargs = {"attention_mask": mask, "mm_token_type_ids": types, "image_grid_thw": grids}
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = model._prepare_position_ids_for_generation(input_ids, kwargs)
    pixels = arguments.get("pixel_values")
    sizes = grids.prod(dim=-1)
    num_all = int(sizes.sum())
    num_new = int(sizes[is_new].sum())
    if pixels is not None:
        num = pixels.shape[0]
        what = f"pixel_values of {num_all} patches (all images) or {num_new} (the new ones)"
        require(num in (num_all, num_new), what, num, "pass what the processor made of the conversation")
        pixels = pixels[is_new.repeat_interleave(sizes).to(pixels.device)] if num == num_all else pixels
    if num_new:
        arguments |= {"image_grid_thw": grids[is_new], "pixel_values": pixels}
    else:
        del arguments["image_grid_thw"]
        arguments.pop("pixel_values", None)
