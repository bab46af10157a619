"""Random calls of targets whose RoPE follows the largest position, by every way in which positions can be shifted.

Each is run beside plain `generate`: its text comes out, or the refusal and nothing else.
"""

from __future__ import annotations

import copy
import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from dflash_hf.block.cache_name import CACHE_NAME
from helpers.static import tensor_oracle
from helpers.vision import vision_prompts, vision_target
from tiny import COMMON, prompts, shallow_target, tiny_target, truth_of

BOUNDARY = 32
REFUSAL = re.compile(
    r"expected a run that stays within \d+ (positions|columns), a block included.* changes there"
)
THETA = 10000.0
DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": THETA}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": THETA, "factor": 4.0}


def longrope(num: int, original: int = BOUNDARY) -> dict[str, Any]:
    """The parameters of a "longrope" of `num` frequencies."""
    factors = [8.0, 4.0, 3.0, 2.0] * (num // 4)
    return {
        "rope_type": "longrope",
        "rope_theta": THETA,
        "factor": 4.0,
        "short_factor": [1.0] * num,
        "long_factor": factors,
        "original_max_position_embeddings": original,
    }


def phimoe() -> PreTrainedModel:
    """A target that scales its RoPE too, by one of two numbers."""
    rope = {**longrope(4), "short_mscale": 1.0, "long_mscale": 1.5}
    settings: dict[str, Any] = {
        **COMMON,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": BOUNDARY,
        "rope_parameters": rope,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = transformers.PhimoeConfig(**settings)
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(config).to(torch.float64).eval()
    model.set_experts_implementation("eager")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def per_layer(sliding: dict[str, Any], full: dict[str, Any], longest: int) -> PreTrainedModel:
    """A Gemma 3 whose kinds of layers have a RoPE each."""
    rope = {"sliding_attention": sliding, "full_attention": full}
    return shallow_target("gemma3", max_position_embeddings=longest, rope_parameters=rope)


def with_pictures(rope: dict[str, Any], longest: int) -> PreTrainedModel:
    """A Qwen3-VL, whose tokens have three positions each."""
    mrope = {**rope, "mrope_section": [2, 1, 1]}
    return vision_target(
        "qwen3-vl",
        text={
            "num_hidden_layers": 2,
            "max_position_embeddings": longest,
            "rope_parameters": mrope,
        },
    )


def flat(family: str, rope: dict[str, Any], longest: int, **others: Any) -> PreTrainedModel:
    """A target with one RoPE for all layers."""
    return shallow_target(family, max_position_embeddings=longest, rope_parameters=rope, **others)


# "dynamic" changes behind `max_position_embeddings`, "longrope" behind its original length.
TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-dynamic": lambda: flat("llama", DYNAMIC, BOUNDARY),
    "llama-longrope": lambda: flat("llama", longrope(4), 128),
    "qwen3-dynamic": lambda: flat(
        "qwen3", DYNAMIC | {"original_max_position_embeddings": 16}, BOUNDARY
    ),
    "qwen3-longrope": lambda: flat("qwen3", longrope(8), 128),
    "mistral-dynamic": lambda: flat("mistral", DYNAMIC, BOUNDARY),
    "phi3-longrope": lambda: flat(
        "phi3", longrope(4), 128, original_max_position_embeddings=BOUNDARY
    ),
    "phimoe-longrope": phimoe,
    "gemma3-longrope-default": lambda: per_layer(longrope(4), DEFAULT, 256),
    "gemma3-default-dynamic": lambda: per_layer(DEFAULT, DYNAMIC, BOUNDARY),
    "gemma3-longrope-longrope": lambda: per_layer(longrope(4, 48), longrope(4), 128),
    "qwen3-vl-dynamic": lambda: with_pictures(DYNAMIC, BOUNDARY),
    "qwen3-vl-longrope": lambda: with_pictures(longrope(4), 128),
}
SHIFTS = ("none", "all", "int32", "rows", "gap", "backwards", "repeated", "mask", "padding")
WAYS = ("ids", "embeds", "embeds alone", "chunks", "cache", "cache chunks", "returned")


@dataclass(frozen=True)
class Case:
    """One call; `amount` is how far its positions are shifted, `cached` how many of its columns a cache has."""

    target: str
    lengths: tuple[int, ...]
    shift: str
    amount: int
    way: str
    cached: int
    new: int
    block: int
    width: int | None
    nodes: int | None
    ends: bool
    seed: int


def draw(seed: int) -> Case:
    """Draws a case: most of them end near a boundary, on either side."""
    chance = random.Random(seed)
    target = chance.choice(list(TARGETS))
    shift, way = chance.choice(SHIFTS), chance.choice(WAYS)
    if "vl" in target:
        # Their positions follow from the pictures.
        shift = chance.choice(("none", "all", "padding"))
        way = chance.choice(("ids", "returned"))
    if shift == "mask" and way.startswith("cache"):
        shift = "all"
    lengths = tuple(chance.randint(2, 14) for _ in range(chance.choice((1, 1, 2, 3))))
    block = chance.randint(2, 16)
    far = chance.choice(
        (0, chance.randint(1, 8), chance.randint(8, 24), chance.randint(24, 34), 40)
    )
    width, nodes = chance.choice(
        ((None, None), (None, chance.randint(2, 24)), (chance.randint(1, block), None))
    )
    return Case(
        target=target,
        lengths=lengths,
        shift=shift,
        amount=far if shift != "all" else chance.choice((far, -far)),
        way=way,
        cached=chance.randint(1, max(lengths) - 1) if way.startswith("cache") else 0,
        new=chance.randint(2, 16),
        block=block,
        width=width,
        nodes=nodes,
        ends=chance.choice((False, False, True)),
        seed=seed,
    )


def shifted(case: Case, positions: Tensor) -> Tensor | None:
    """The positions that a case passes in, made of those that plain `generate` counts; `None` for none at all."""
    columns = torch.arange(positions.shape[-1])
    rows = torch.arange(positions.shape[-2])[:, None]
    shifts = {
        "all": positions + case.amount,
        "int32": (positions + case.amount).int(),
        "rows": positions + case.amount * (1 - rows % 2),
        "gap": positions + case.amount * (columns >= len(columns) // 2),
        "backwards": positions.flip(-1) + case.amount,
        "repeated": torch.full_like(positions, case.amount),
    }
    return shifts.get(case.shift)


def inputs_of(case: Case, target: PreTrainedModel) -> dict[str, Tensor]:
    """The prompts of a case, with a longer mask, more padding or positions where it says so."""
    has_pictures = "vl" in case.target
    if has_pictures:
        sides = random.Random(case.seed)
        pictures = [[(sides.choice((2, 4)), sides.choice((2, 4, 8)))] for _ in case.lengths]
        inputs = vision_prompts(target, "qwen3-vl", pictures, case.seed, words=case.lengths)
    else:
        inputs = prompts(list(case.lengths), case.seed)
    if case.shift == "padding":
        for name in {"input_ids", "attention_mask", "mm_token_type_ids"}.intersection(inputs):
            inputs[name] = nn.functional.pad(inputs[name], (case.amount, 0))
    mask = inputs["attention_mask"]
    if case.shift == "mask":
        inputs["attention_mask"] = nn.functional.pad(mask, (0, case.amount), value=1)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    if has_pictures:
        counting: Any = target
        kwargs = {
            name: value
            for name, value in inputs.items()
            if name not in ("input_ids", "pixel_values")
        }
        positions = counting._prepare_position_ids_for_generation(inputs["input_ids"], kwargs)
    passed = shifted(case, positions)
    if passed is not None:
        inputs["position_ids"] = passed
    return inputs


def settings_of(case: Case, target: PreTrainedModel) -> dict[str, Any]:
    """What `generate` is given for a case, with a cache of its own."""
    settings: dict[str, Any] = {
        **inputs_of(case, target),
        "max_new_tokens": case.new,
        "do_sample": False,
    }
    if case.way.startswith("embeds"):
        settings["inputs_embeds"] = target.get_input_embeddings()(settings["input_ids"])
    if case.way == "embeds alone":
        del settings["input_ids"]
    if "chunks" in case.way:
        settings["prefill_chunk_size"] = 3
    if case.way == "returned":
        settings["return_dict_in_generate"] = True
    if case.cached:
        cache = DynamicCache(config=target.config)
        told = {
            name: settings[name][..., : case.cached] for name in ("input_ids", "attention_mask")
        }
        positions = settings.get("position_ids")
        if positions is None:
            positions = (settings["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
        with torch.no_grad():
            target(**told, position_ids=positions[..., : case.cached], **{CACHE_NAME: cache})
        settings[CACHE_NAME] = cache
    return settings


def sequences_of(out: Any) -> Tensor:
    """What `generate` returned, without what may be beside it."""
    return out if isinstance(out, Tensor) else out.sequences


@functools.cache
def cuts_behind_a_cache() -> bool:
    """Returns False where plain `generate` cuts a continued conversation as if nothing was cached, as 5.16 does."""
    target, inputs = tiny_target("llama"), prompts([8], 0)
    texts: list[Tensor] = []
    given: list[dict[str, Any]] = [{}, {"prefill_chunk_size": 3}]
    for settings in given:
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(inputs["input_ids"][:, :4], **{CACHE_NAME: cache})
        settings |= {CACHE_NAME: cache, "max_new_tokens": 12, "do_sample": False}
        texts.append(target.generate(**inputs, **settings))
    return torch.equal(*texts)


def plain_text(case: Case, target: PreTrainedModel, **ending: Any) -> Tensor:
    """What plain `generate` answers to a case, of ids `[1, S]`.

    Behind a cache the prompt is not cut by a release that cuts it wrongly.
    """
    settings = settings_of(case, target)
    if case.way == "cache chunks" and not cuts_behind_a_cache():
        del settings["prefill_chunk_size"]
    return sequences_of(target.generate(**settings, **ending))


def check(case: Case, built: PreTrainedModel) -> bool | None:
    """Runs a case; returns whether it gave plain `generate`'s text, or else was refused as it may be.

    It returns `None` where plain `generate` itself fails: Transformers 5.16 does at the second call beyond the
    boundary of a longrope that is one kind of layers' own.

    Args:
        case (`Case`): The case.
        built (`PreTrainedModel`): Its target, which stays as it is: what a "dynamic" RoPE does depends on the calls
            before, so that each run gets a copy.

    Raises:
        AssertionError: If another text came, or a forward had run before the refusal.
    """
    target = copy.deepcopy(built)
    ending: dict[str, Any] = {}
    try:
        if case.ends:
            text = plain_text(case, target)
            ending = {"eos_token_id": int(text[0, 1 - case.new]), "pad_token_id": 0}
            target = copy.deepcopy(built)
        theirs = plain_text(case, target, **ending)
    except UnboundLocalError:
        return None
    inputs = inputs_of(case, target)
    ids, columns = inputs["input_ids"], inputs["input_ids"].shape[1]
    answer = theirs if case.way == "embeds alone" else theirs[:, columns:]
    mask = torch.cat([inputs["attention_mask"][:, :columns], torch.ones_like(answer)], dim=1)
    truth = truth_of({"attention_mask": mask}, torch.cat([ids, answer], dim=1))
    target = copy.deepcopy(built)
    draft = tensor_oracle(target, truth, case.seed, case.block)
    draft.generation_config.verify_width = case.width
    draft.generation_config.num_tree_nodes = case.nodes
    settings = settings_of(case, target)
    forwards: list[None] = []
    target.get_input_embeddings().register_forward_hook(lambda *args: forwards.append(None))
    sentence = None
    try:
        ours = sequences_of(target.generate(**settings, **ending, assistant_model=draft))
    except ValueError as error:
        sentence = str(error)
    if sentence is not None:
        assert REFUSAL.match(sentence), f"{case}: {sentence}"
        assert not forwards, f"{case}: refused after {len(forwards)} forwards"
        return False
    assert torch.equal(ours, theirs), f"{case}: {ours.tolist()}, not {theirs.tolist()}"
    return True
