"""This module runs the target over the prompts with taps on, all columns at once or one chunk at a time.

The forwards are those of Transformers' own prefill, which handles the user's attention implementation and images.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf import ops
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.devices import Inventory
from dflash_hf.errors import require
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.prompt_images import PromptImages
from dflash_hf.generation.request import Request
from dflash_hf.generation.row_groups import OF_COLUMNS, RowGroup, groups_of, merged, takes_groups
from dflash_hf.generation.user_cache import NoUserCache, UserCache
from dflash_hf.packed_weights import PackedWeights
from dflash_hf.target_model.fast_layers import in_whole_run
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.reentry import outermost
from dflash_hf.target_model.user_code import is_library

logger: Any = logging.get_logger(__name__)
# The inputs of a forward that have one value for each token.
PER_TOKEN = {
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
}

# The input in which newer Transformers pass encoded images to the prefill.
ENCODED = "mm_encoder_outputs"

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Filling:
    """Runs the prompts of a run through the target, and passes the tapped states to the draft.

    The tapped states of each forward become context of the draft immediately, so that those of a whole prompt are
    never kept.

    Args:
        inputs (`dict[str, Any]`): The keywords for the target's prefill, as `generate` prepared them. They are changed
            in place.
        generator (`DFlashCandidateGenerator`): It holds the request and gets the tapped states.
        positions (`torch.Tensor` of shape `[B, T]`, int64): The index of each token of the conversation in its row, on
            the host. It is negative for padding.
        user_cache (`UserCache` or `NoUserCache`): The cache that the run will advance.
    """

    def __init__(
        self,
        inputs: dict[str, Any],
        generator: DFlashCandidateGenerator,
        positions: Tensor,
        user_cache: UserCache | NoUserCache,
    ) -> None:
        self.inputs = inputs
        self.generator = generator
        self.positions = positions
        self.user_cache = user_cache
        # The number of columns that the draft has context for, or that the cache had before.
        self.seen = user_cache.past
        # The rows of the target's next forward.
        self.rows = list(range(len(positions)))
        if user_cache.is_given:
            inputs[CACHE_NAME] = user_cache.cache
        else:
            inputs[CACHE_NAME] = empty_cache(self.request, inputs)
        self._outputs: CausalLMOutputWithPast | None = None
        # There are no copies of weights if user code runs within a forward or between two. Such code may change
        # weights, and checks for it would cost as much time as the copies save.
        target = self.request.target
        weight: Any = target.embedding.weight
        # The device is checked first, so that the modules of a target on a GPU are not searched.
        is_on = (
            ops.use_short_forwards(weight)
            and not self.request.calls_user_code
            and (in_whole_run(target) or target.is_unmodified)
        )
        models = [target.parts]
        if not _may_change(self.request.draft_parts):
            models.append(self.request.draft_parts)
        self.packed = PackedWeights(*models, is_on=is_on)

    @property
    def request(self) -> Request:
        """The request. A running batch may replace it between two chunks, when it looks at the models again."""
        return self.generator.request

    @property
    def num_columns(self) -> int:
        """The number of columns of the conversation."""
        return self.positions.shape[1]

    @property
    def cache(self) -> Cache:
        """The cache that the target fills."""
        cache: Cache = self.inputs[CACHE_NAME]
        return cache

    @property
    def is_done(self) -> bool:
        """Whether the target has seen every column."""
        return self.seen == self.num_columns

    @property
    def last_logits(self) -> Tensor:
        """The target's logits `[1, V]` after the last column of a single prompt. The prompt must be done."""
        assert self._outputs is not None
        assert self._outputs.logits is not None
        return self._outputs.logits[0, -1:]

    def run(self) -> None:
        """Runs the target over all columns that its cache does not have.

        A continued conversation is cut into chunks here, because older Transformers cut it as if nothing was cached.
        """
        request = self.request
        past = self.seen
        is_cut_by_prefill = self.inputs.get("inputs_embeds") is not None
        if past == 0 or is_cut_by_prefill:
            groups = self._groups()
            with self._tapped():
                if len(groups) > 1:
                    self._run_groups(groups)
                    return
                model: Any = request.target.model
                # Transformers cuts the prompt into chunks if the call asks for it.
                self._outputs = model._prefill(request.input_ids, request.config, self.inputs)
            return
        num_left = self.num_columns - past
        chunk_size = request.config.prefill_chunk_size or num_left
        # The images and all their tokens must be in one forward.
        if _has_images(self.inputs):
            chunk_size = num_left
        with self._tapped():
            for end in range(past + chunk_size, self.num_columns + chunk_size, chunk_size):
                self._forward(min(end, self.num_columns))

    def _groups(self) -> list[RowGroup]:
        """Returns the groups of rows that go through the target together. It may be one group of all rows."""
        # A cache that the user will see must be filled as one forward fills it, so there is one group.
        is_kept = not isinstance(self.user_cache, NoUserCache)
        if is_kept or not takes_groups(self.request, self.inputs):
            return [RowGroup(self.rows, self.num_columns)]
        is_padding = self.positions < 0
        num_padding = is_padding.long().cumprod(dim=1).sum(dim=1)
        return groups_of((self.num_columns - num_padding).tolist())

    def _run_groups(self, groups: list[RowGroup]) -> None:
        """Runs the target over one group of rows after the other, and merges the caches and logits of the groups."""
        request = self.request
        target = request.target
        model: Any = target.model
        caches: list[Cache] = []
        rows: list[int] = []
        last_logits: list[Tensor] = []
        for group in groups:
            self.rows = group.rows
            self.seen = self.num_columns - group.num_columns
            inputs = dict(self.inputs)
            for name in OF_COLUMNS.intersection(inputs):
                if inputs[name] is not None:
                    inputs[name] = group.cut(inputs[name])
            inputs[CACHE_NAME] = DynamicCache(config=target.config)
            outputs = model._prefill(group.cut(request.input_ids), request.config, inputs)
            # If the taps did not fire, `filled` raises an error.
            if not self.is_done:
                return
            caches.append(self._cache_of(outputs))
            rows.extend(group.rows)
            last_logits.append(outputs.logits[:, -1:])
        # The logits are put back into the order of the request's rows.
        places = torch.tensor(rows, device="cpu").argsort()
        logits = torch.cat(last_logits)[places]
        cache = merged(caches, groups, self.num_columns, target.config)
        self.inputs[CACHE_NAME] = cache
        named: dict[str, Any] = {CACHE_NAME: cache}
        self._outputs = CausalLMOutputWithPast(logits=cast(torch.FloatTensor, logits), **named)

    def go_on_from(
        self,
        num: int,
        kept: Mapping[int, tuple[Tensor, Tensor]],
        windows: Mapping[int, Tensor],
        states: Mapping[int, Tensor],
    ) -> None:
        """Begins after the first `num` tokens of a single prompt, whose cache content was kept.

        Args:
            num (`int`): The number of these tokens. It is less than the length of the prompt.
            kept (mapping): The keys and values `[1, G, num, E]` of each attention layer by its index. Tokens that a
                sliding window has passed have zeros.
            windows (mapping): The windows `[1, C, k]` of recurrent layers by their index.
            states (mapping): The states `[1, ...]` of the recurrent layers that have one, by their index.
        """
        cache = self.cache
        # The cache's own methods are used, because a layer with a window keeps only its newest tokens.
        for index, (keys, values) in kept.items():
            cache.update(keys, values, index)
        for index, window in windows.items():
            cache.update_conv_state(window, index)
        for index, state in states.items():
            cache.update_recurrent_state(state, index)
        self.seen = num

    def run_chunk(self, num_tokens: int, images: PromptImages) -> None:
        """Runs the target over the next columns of prompts of token ids.

        A chunk has at most `num_tokens` columns. It is longer only if its first image is, because no chunk ends within
        an image.
        """
        end = min(self.seen + num_tokens, self.num_columns)
        end = images.end_of_chunk(self.seen, end)
        if not torch.is_inference_mode_enabled():
            _make_states_plain(self.cache)
        with self._tapped():
            self._forward(end, images.of_chunk(self.inputs, self.seen, end))

    def filled(self) -> tuple[CausalLMOutputWithPast, Cache]:
        """Returns the target's output of the last columns, and the cache that it has filled.

        Raises:
            RuntimeError: If the taps did not fire, or there is no cache.
            ValueError: If the target did not go on with a cache that was passed in.
        """
        past = self.user_cache.past
        if not self.is_done:
            raise RuntimeError(
                f"expected taps on {self.num_columns - past} prompt tokens, got {self.seen - past}; a compiled target "
                "runs no hooks that are added later, use the model as it was before torch.compile"
            )
        # These are the outputs of the last chunk. Its logits give the first token of the answer.
        outputs = self._outputs
        assert outputs is not None, "there is a column at least"
        return outputs, self._cache_of(outputs)

    def _cache_of(self, outputs: CausalLMOutputWithPast) -> Cache:
        """Returns the cache that a forward has filled. Raises as [`filled`] does if there is none or a new one."""
        target = self.request.target
        # This may be another cache than the forward got: Phi-3 starts a new one for prompts beyond its first RoPE
        # range.
        filled = outputs.get(CACHE_NAME)
        if filled is None:
            raise RuntimeError(
                f"expected a cache from the prefill of {type(target.model).__name__}, got none; call target.eval(), "
                "gradient checkpointing in training mode turns caches off"
            )
        goes_on = not self.user_cache.is_given or filled is self.user_cache.cache
        # This cannot be checked earlier, because the target's own forward decides it.
        what = f"{type(target.model).__name__} to go on with the cache passed in (its RoPE depends on the length)"
        require(goes_on, what, "a new one", f"pass the whole conversation without {CACHE_NAME}")
        return filled

    @contextmanager
    def _tapped(self) -> Generator[None]:
        """Taps the target's forwards, so that their states become context of the draft."""
        target = self.request.target
        config = self.request.draft.config
        # In a whole run no user code runs in the target, so that no other forwards of it have to be recognised.
        watching: AbstractContextManager[Any] = nullcontext(lambda: True)
        if not in_whole_run(target):
            watching = outermost(target.model, target.decoder)
        with watching as is_ours:
            # The draft takes the states of each forward immediately, because the states of a long prompt are larger
            # than its keys and values.
            taps = Taps(
                target.layers,
                config.target_layer_ids,
                sink=self._observe,
                after_deepstack=config.tap_after_deepstack,
                counts=lambda kwargs: is_ours(),
            )
            with taps.open():
                yield

    def _observe(self, states: Tensor) -> None:
        """Takes the tapped states `[B, S, L * D]` of a forward."""
        # A forward does not say which columns it has. They follow those of the forward before.
        end = self.seen + states.shape[1]
        positions = self.positions[:, self.seen : end]
        is_group = len(self.rows) < len(positions)
        if is_group:
            positions = positions[self.rows]
        self.generator.observe_prompt(states, positions, self.rows)
        self.seen = end

    def _forward(self, end: int, images: Mapping[str, Any] = NOTHING) -> None:
        """Runs Transformers' prefill over the columns that were not seen, up to `end`.

        `images` are keywords for this forward, which replace those for the whole prompt.
        """
        model: Any = self.request.target.model
        num_left = self.num_columns - end
        ids = self.request.input_ids
        # The ids may be those of the whole conversation or only of its new columns, so columns count from the end.
        first = ids.shape[1] - (self.num_columns - self.seen)
        chunk = ids[:, first : ids.shape[1] - num_left]
        # The chunk is already cut here, so that Transformers must not cut it again.
        config = copy.copy(self.request.config)
        config.prefill_chunk_size = None
        # Inputs with a value for each token cover the whole conversation. The columns after this chunk are cut off.
        cut = {**self.inputs, **images}
        for name in PER_TOKEN:
            value = self.inputs.get(name)
            if value is not None:
                cut[name] = value[..., : value.shape[-1] - num_left]
        self._outputs = model._prefill(chunk, config, cut)


def _has_images(inputs: Mapping[str, Any]) -> bool:
    """Returns True if the keywords of a prefill hold images or other inputs that are not text, raw or encoded."""
    names = set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) - {ENCODED}
    # The encoded inputs are a mapping by kind. Its values are `None` for kinds that the call does not have.
    encoded: Mapping[str, Any] = inputs.get(ENCODED) or {}
    found = [*(inputs.get(name) for name in names), *encoded.values()]
    return any(value is not None for value in found)


def _make_states_plain(cache: Cache) -> None:
    """Replaces recurrent states made in inference mode, because code outside inference mode cannot write into them."""
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states: dict[int, Tensor | None] = getattr(layer, name, {})
            for index, state in states.items():
                if state is not None and state.is_inference():
                    states[index] = state.clone()


def empty_cache(request: Request, inputs: dict[str, Any]) -> DynamicCache:
    """Returns the cache that `generate` prepared, if it is an empty `DynamicCache` on the device, else a new one.

    A static or offloaded cache would save nothing, because decoding has its own cache on the target's device.
    """
    prepared: Any = inputs.get(CACHE_NAME)
    is_offloaded = getattr(prepared, "offloading", False)
    if is_offloaded:
        logger.warning_once(
            "the cache stays on the target's device: a ragged cache is not offloaded, as cache_implementation="
            f"{request.config.cache_implementation!r} asks for; use plain generate where it has no room"
        )
    is_usual = type(prepared) is DynamicCache and not is_offloaded
    if is_usual and not int(prepared.get_seq_length()):
        return prepared
    return DynamicCache(config=request.target.config)


def _may_change(draft_parts: Inventory) -> bool:
    """Returns True if user code runs within a draft's forward, because it may change the draft's weights."""
    if draft_parts.altered:
        return True
    names = {type(part).__module__ for part in draft_parts.modules}
    others = [name for name in names if not is_library(name)]
    return not all(name.startswith("dflash_hf.") for name in others)
