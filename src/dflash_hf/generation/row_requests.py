"""This module checks a request for a running batch, and lets Transformers prepare it before its prefill."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.errors import is_a, require, shown
from dflash_hf.generation.accept import may_keep_state
from dflash_hf.generation.arguments import Settings, is_given
from dflash_hf.generation.filling import PER_TOKEN
from dflash_hf.generation.generate import answer_with
from dflash_hf.generation.joining import RowSettings
from dflash_hf.generation.logprobs import logprobs_of
from dflash_hf.generation.model_state import ModelState
from dflash_hf.generation.places import why_not_baked
from dflash_hf.generation.prefill import IMAGE_SIZES
from dflash_hf.generation.prompt_images import PromptImages
from dflash_hf.generation.request import Request
from dflash_hf.generation.request_stats import NewTokens, RequestStats
from dflash_hf.generation.sampling import new_seed
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target

# Arguments that a running batch sets itself, or that cannot be set for one row.
NOT_SETTINGS = (
    "inputs",
    "input_ids",
    "attention_mask",
    "assistant_model",
    "streamer",
    "stopping_criteria",
    "inputs_embeds",
    "position_ids",
    "return_dict_in_generate",
    CACHE_NAME,
)
# Additional outputs of `generate`. A running batch returns only tokens.
OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
# Families (`config.model_type`) whose texts about images were compared, row by row, with the texts of single prompts.
IMAGE_ROWS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
OF_IMAGES = {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
OF_PROMPTS = PER_TOKEN | IMAGE_SIZES | set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)


@dataclass(slots=True, kw_only=True)
class Row:
    """A request that waits, is in its prefill, or runs."""

    request: Request
    inputs: dict[
        str, Any
    ]  # keywords for the target's prefill, as `generate` prepared them; empty behind it
    images: PromptImages
    seed: Tensor | None  # [], int64: seed of the sampling noise; None in greedy requests
    length: int  # maximum number of tokens of prompt and answer
    calls_user_code: bool  # the request's property, kept because every step needs it
    num_logprobs: int  # number of most likely tokens to report; -1 for no log-probabilities
    on_tokens: Callable[[NewTokens], None] | None
    id: int = 0  # set by the batch
    end_ids: list[int] = field(default_factory=list[int])  # known once its prefill has begun
    # Number of first tokens of the prompt to keep for other requests. The prefill stops after them. Usually 0.
    num_to_share: int = 0
    # The state of the models when the prefill began, if texts are kept.
    state: ModelState | None = None
    added: float = field(default_factory=time.perf_counter)
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def settings(self) -> RowSettings:
        """The settings that apply only to this row."""
        return RowSettings(self.request.processors, self.end_ids, self.seed, self.length)

    @property
    def needs_host(self) -> str:
        """The reason why no captured step can have this row, or an empty string if one can."""
        if self.num_logprobs >= 0:
            return "log-probabilities"
        return why_not_baked(self.request.processors)

    def note_logprobs(self, logits: Tensor, token_ids: list[int]) -> None:
        """Notes log-probabilities of new tokens if the request asks for them; `logits` `[T, V]` are the target's."""
        if self.num_logprobs >= 0:
            self.stats.logprobs += logprobs_of(logits, token_ids, self.num_logprobs)


def prepare_row(
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    input_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    max_tokens: int | None,
    seed: int | None,
    stop_token_ids: Tensor | Sequence[int] | None,
    on_tokens: Callable[[NewTokens], None] | None,
    num_logprobs: int,
    settings: dict[str, Any],
) -> Row:
    """Checks a request and lets Transformers prepare it; no forward runs.

    Arguments and errors are those of `RunningBatch.add`. `max_tokens` is the maximum number of tokens in the caches.
    """
    ids = _checked_ids(model, input_ids)
    require(is_count(max_new_tokens), "max_new_tokens of at least 1", max_new_tokens, "correct it")
    is_seed = seed is None or (is_a(seed, int) and -(2**63) <= seed < 2**64)
    require(is_seed, "a seed that torch.manual_seed takes, or None", seed, "correct it")
    can_be_called = on_tokens is None or callable(on_tokens)
    require(can_be_called, "on_tokens that can be called, or None", on_tokens, "correct it")
    stop_ids = _checked_stops(stop_token_ids)
    num_tokens = find_target(model).vocab_size
    is_number = is_a(num_logprobs, int) and -1 <= num_logprobs <= num_tokens
    what = f"num_logprobs from -1 to {num_tokens}"
    require(is_number, what, num_logprobs, "pass a whole number")
    length = ids.shape[1] + max_new_tokens
    _check_length(model, length, max_tokens)
    refused = [name for name in NOT_SETTINGS if is_given(settings, name)]
    require(not refused, "settings of one row", refused, "leave them out")
    # A keyword takes precedence over the caller's config. The model's own config does not count here.
    config = settings.get("generation_config")
    names = (*OUTPUTS, "return_dict_in_generate")
    outputs = [name for name in names if settings.get(name, getattr(config, name, None))]
    do = "leave them out; num_logprobs asks for log-probabilities"
    require(not outputs, "an answer of tokens alone", outputs, do)
    _check_images(model, ids, settings)
    arguments = dict(settings)
    for name in OF_IMAGES:
        if is_given(arguments, name):
            arguments[name] = arguments[name].to(ids.device)
    if stop_ids:
        # A setting of end tokens replaces the target's own end tokens, but these are to be added to them.
        own: Any = Settings(model, arguments)["eos_token_id"]
        arguments["eos_token_id"] = [*_as_list(own), *stop_ids]
    arguments |= {
        "input_ids": ids,
        # The mask is passed because `generate` would otherwise take a pad token in the prompt for padding.
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": max_new_tokens,
        "return_dict_in_generate": False,
        # The model's own config may ask for these outputs.
        **dict.fromkeys(OUTPUTS, False),
    }
    generate = functools.partial(_generate_without_pixels, cast(Any, model).generate)
    # Transformers prepares processors, limits and positions as for `generate`. No forward runs yet.
    with _kept_rope_deltas(model):
        request, inputs = answer_with(_prepared, generate, model, draft, arguments)
    _check_joins(request)
    device = request.input_ids.device
    # Images are encoded with the chunk that contains their tokens, and not before the request's prefill.
    inputs.pop("mm_encoder_outputs", None)
    for name in ("pixel_values", "image_grid_thw"):
        if is_given(arguments, name):
            inputs[name] = arguments[name]
    noise: Tensor | None = None
    # The seed is drawn now, so that seeds follow the order of requests and not the order of prefills.
    if request.config.do_sample:
        noise = _seed_of(seed, device)
    row = Row(
        request=request,
        inputs=inputs,
        images=PromptImages(inputs),
        seed=noise,
        length=length,
        calls_user_code=request.calls_user_code,
        num_logprobs=num_logprobs,
        on_tokens=on_tokens,
    )
    row.stats.num_prompt_tokens = ids.shape[1]
    return row


def check_sizes(
    max_rows: int, max_tokens: int | None, prefill_chunk_size: int, max_kept_bytes: int
) -> None:
    """Raises `ValueError` unless these sizes of a running batch are whole numbers in their ranges."""
    counts = {"max_rows": max_rows, "prefill_chunk_size": prefill_chunk_size}
    if max_tokens is not None:
        counts["max_tokens"] = max_tokens
    for name, value in counts.items():
        require(is_count(value), f"{name} of at least 1", value, "pass a whole number")
    is_size = is_a(max_kept_bytes, int) and max_kept_bytes >= 0
    require(is_size, "max_kept_bytes of at least 0", max_kept_bytes, "pass a whole number")


def is_count(value: object) -> bool:
    """Returns True for whole numbers above 0."""
    return isinstance(value, int) and is_a(value, int) and value > 0


def _checked_ids(model: PreTrainedModel, input_ids: Tensor | Sequence[int]) -> Tensor:
    """Returns a prompt as `[1, n]` int64 on the target's device; refuses anything else with a `ValueError`."""
    what = "input_ids of one prompt, [n] or [1, n] whole numbers with n of at least 1"
    ids = _as_numbers(input_ids, what, "pass the ids that the tokenizer makes of one prompt")
    if ids.dim() == 1:
        ids = ids[None]
    is_row = ids.dim() == 2 and ids.shape[0] == 1 and ids.numel() > 0
    require(is_row and _are_whole(ids), what, f"{ids.dtype} {list(ids.shape)}", "pass one prompt")
    low, high = map(int, ids.aminmax())
    # An id that is out of range causes a permanent error on a GPU, so the ids are tested here.
    num = find_target(model).vocab_size
    is_known = low >= 0 and high < num
    require(is_known, f"token ids from 0 to {num - 1}", f"{low} to {high}", "correct them")
    return ids.to(find_target(model).device, torch.long)


def _checked_stops(stop_token_ids: Tensor | Sequence[int] | None) -> list[int]:
    """Returns additional end tokens as a list. They may be given as one number, as several or as None."""
    if stop_token_ids is None:
        return []
    what = "stop_token_ids as whole numbers"
    ids = _as_numbers(stop_token_ids, what, "correct them").reshape(-1)
    # Torch makes an empty list a tensor of floating-point numbers.
    is_fine = not len(ids) or _are_whole(ids)
    require(is_fine, what, stop_token_ids, "correct them")
    return ids.tolist()


def _as_numbers(value: Any, what: str, do: str) -> Tensor:
    """Returns numbers as a tensor on the host; raises a `ValueError` for other values, as `require` does."""
    try:
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, KeyError, RuntimeError):
        raise ValueError(f"expected {what}, got {shown(value)}; {do}") from None


def _are_whole(ids: Tensor) -> bool:
    """Returns True for a tensor of integers."""
    return not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool


def _check_length(model: PreTrainedModel, length: int, max_tokens: int | None) -> None:
    """Refuses a request that does not fit even alone, or that has more tokens than the target has positions."""
    # Refused now and not in the prefill, because the request would otherwise wait in vain.
    limits = [max_tokens, find_target(model).facts.num_positions]
    for limit in limits:
        fits = limit is None or length <= limit
        what = f"a prompt and an answer of together at most {limit} tokens"
        require(fits, what, length, "shorten the prompt or lower max_new_tokens")


def _check_images(model: PreTrainedModel, ids: Tensor, settings: dict[str, Any]) -> None:
    """Refuses images that a row cannot have: for a family that was not compared, or with incomplete inputs."""
    given = {name for name in OF_PROMPTS if is_given(settings, name)}
    if not given:
        return
    # Some tokenizers make `token_type_ids` of a text. A text model that takes them adds embeddings to all tokens.
    is_text = given == {"token_type_ids"}
    require(not is_text, "a text without token_type_ids", sorted(given), "leave them out")
    alone = "generate it alone"
    kind = str(model.config.model_type)
    what = f"images for a target of {', '.join(IMAGE_ROWS)}"
    require(kind in IMAGE_ROWS, what, kind, alone)
    names = ", ".join(sorted(OF_IMAGES))
    require(given <= OF_IMAGES, f"images as {names}", sorted(given), alone)
    # A processor makes token types even for a text without images.
    missing = sorted(OF_IMAGES - given)
    are_whole = not missing or given == {"mm_token_type_ids"}
    do = "pass all that the processor made of text and images"
    require(are_whole, f"{names} together", f"no {missing}", do)
    tensors = {name: type(settings[name]).__name__ for name in sorted(given)}
    are_tensors = all(isinstance(settings[name], Tensor) for name in given)
    require(are_tensors, "tensors of images", tensors, do)
    if missing:
        return
    num_images = len(settings["image_grid_thw"])
    require(num_images > 0, "an image_grid_thw of one image at least", num_images, do)
    # This package finds the images by the token types, but the target finds them by the ids.
    config: Any = model.config
    are_tokens = ids == config.image_token_id
    are_marked = settings["mm_token_type_ids"].to(ids.device) == 1
    what = f"mm_token_type_ids that are 1 for the {int(are_tokens.sum())} image tokens alone"
    require(are_marked.equal(are_tokens), what, f"{int(are_marked.sum())} marks", do)


@contextmanager
def _kept_rope_deltas(model: PreTrainedModel) -> Generator[None]:
    """Restores the image positions that Transformers stores in a model, which the next turn of a chat may need."""
    holders: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    deltas = [module.rope_deltas for module in holders]
    try:
        yield
    finally:
        for module, delta in zip(holders, deltas, strict=True):
            module.rope_deltas = delta


def _generate_without_pixels(generate: Callable[..., Any], **arguments: Any) -> Any:
    """Calls `generate` without the pixels of images, because newer versions encode them while they prepare a call."""
    arguments.pop("pixel_values", None)
    return generate(**arguments)


def _prepared(request: Request, inputs: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
    """Takes the place of `decode`, and only returns the prepared request and inputs."""
    return request, inputs


def _check_joins(request: Request) -> None:
    """Refuses a request whose row cannot join others; the `ValueError` names the reason."""
    target = request.target
    name = type(target.model).__name__
    alone = "generate it alone"
    what = "a target whose RoPE does not follow the length of the batch"
    require(not target.facts.ropes, what, name, alone)
    require(request.ranks.is_alone, "a target on one process", request.ranks.size, alone)
    num_rows = len(request.input_ids)
    require(num_rows == 1, "one row", num_rows, "add a request for every answer")
    own = [type(criterion).__name__ for criterion in request.own_criteria]
    what = "no stopping criteria but length and end tokens"
    require(not own, what, own, "cancel the request where it has to stop")
    # These processors are called for one row. Calls for other requests may come in between.
    keeping = [
        type(processor).__name__
        for processor in request.processors.processors
        if may_keep_state(processor)
    ]
    what = "logits processors that look at the row's tokens and scores alone (is_row_wise = True says so)"
    require(not keeping, what, keeping, alone)
    is_drawn = request.config.do_sample and request.draft.generation_config.proposal == "sample"
    what = "proposal 'argmax' or 'shared_noise' for sampled rows that run together"
    do = "change draft.generation_config.proposal"
    require(not is_drawn, what, "sample", do)


def _seed_of(seed: int | None, device: torch.device) -> Tensor:
    """Returns the noise seed that a run has after `torch.manual_seed(seed)`, without changing the random state."""
    if seed is None:
        return new_seed(device)
    generator = torch.Generator("cpu").manual_seed(seed)
    return new_seed(device, generator)


def _as_list(value: Any) -> list[int]:
    """Returns end tokens as a list. They may be given as one number, as several or as None."""
    if value is None:
        return []
    return torch.as_tensor(value, device="cpu").reshape(-1).tolist()
