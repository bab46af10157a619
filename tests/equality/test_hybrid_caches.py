"""Caches of recurrent targets, passed in or asked for: advanced as plain `generate` does, left alone on errors, or
refused; and recurrent targets that are refused, before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation import BaseStreamer
from transformers.generation.stopping_criteria import StopStringCriteria

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.recurrence import RULES
from dflash_hf.target_model.parts import find_target
from helpers.hybrid import use_float64_rules
from helpers.static import set_engine
from helpers.turns import (
    CACHES,
    GREEDY,
    answer_mask,
    arm,
    check_caches,
    next_turn,
    real_tokens,
    recording_draft,
    turn,
)
from tiny import COMMON, HYBRIDS, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

SHORT = {"max_new_tokens": 8}
KINDS = {name: make for name, make in CACHES.items() if name != "no-config"}


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A target whose recurrences run in float64, so that caches can be compared to many digits."""
    target = tiny_target("qwen3.5")
    use_float64_rules(monkeypatch, target)
    return target


@pytest.mark.parametrize(
    ("family", "kind", "whole"),
    [
        ("qwen3.5", "dynamic", True),
        ("qwen3.5", "static", False),
        ("lfm2", "dynamic", False),
        ("bamba", "dynamic", True),
    ],
)
def test_three_turns(family: str, kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(family)
    use_float64_rules(monkeypatch, target)
    inputs = prompts([4, 9], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (KINDS[kind](target), KINDS[kind](target))
    draft = recording_draft(target)
    for seed in range(3):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, whole=whole, **SHORT)
        ids, mask = next_turn(ids, mask, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_end_early(kind: str, target: PreTrainedModel) -> None:
    """Plain `generate` feeds such a row padding, which its state takes in: the kept states have to have it too."""
    inputs = prompts([4, 11, 7], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (KINDS[kind](target), KINDS[kind](target))
    draft = recording_draft(target, 3)
    for seed in range(2):
        free = target.generate(input_ids=ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
        eos = [int(free[0, 2]), int(free[1, 6])]
        prompt = ids.shape[1]
        # The draft's context leaves the padding out, and the target's states do not.
        settings = {"eos_token_id": eos, "pad_token_id": 0, "check_draft": seed == 0}
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, **settings)
        assert len(set(mask[:, prompt:].sum(dim=1).tolist())) > 1
        assert draft.last_stats.num_target_forwards > 1 + max(
            len(row) for row in draft.last_stats.num_committed
        )
        ids, mask = next_turn(ids, mask, seed)


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_the_cache_that_is_returned_is_plain_generates(
    engine: Any, target: PreTrainedModel
) -> None:
    inputs = prompts([4, 11], 5)
    mask = inputs["attention_mask"]
    settings = {**GREEDY, **SHORT, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **settings)
    draft = recording_draft(target)
    set_engine(draft, engine)
    columns = torch.ones(2, plain.sequences.shape[1] - 1)
    columns[:, : mask.shape[1]] = mask
    # The second time over kept buffers, which the first one's cache must not share
    for seed in range(2):
        arm(draft, real_tokens(plain.sequences, answer_mask(plain.sequences, mask, None)), seed)
        ours = target.generate(**inputs, **settings, assistant_model=draft)
        assert torch.equal(ours.sequences, plain.sequences)
        check_caches(ours[CACHE_NAME], plain[CACHE_NAME], columns)
        target.generate(**prompts([3, 5], 9), **GREEDY, assistant_model=draft)
        check_caches(ours[CACHE_NAME], plain[CACHE_NAME], columns)


def test_a_state_stops_where_a_criterion_shortened_its_row(
    target: PreTrainedModel, monkeypatch: Any
) -> None:
    """What a step accepted is taken back in part on the host, after the step: the replay counts what is left."""
    inputs = prompts([4, 11, 7], 3)
    free = target.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    wanted = [int(free[0, 2]), int(free[1, 5])]
    monkeypatch.setattr(StopStringCriteria, "__init__", lambda self: None)
    monkeypatch.setattr(
        StopStringCriteria,
        "__call__",
        lambda self, ids, scores, **kwargs: torch.isin(ids[:, -1], torch.tensor(wanted)),
    )
    settings = {**GREEDY, "eos_token_id": 1, "pad_token_id": 0}
    caches = (DynamicCache(config=target.config), DynamicCache(config=target.config))
    ref = target.generate(
        **inputs, **settings, **{CACHE_NAME: caches[0]}, stopping_criteria=[StopStringCriteria()]
    )
    assert ref.shape[1] > inputs["input_ids"].shape[1] + 5
    draft = oracle_draft(
        target, truth_of(inputs, torch.cat([inputs["input_ids"], free], dim=1)), 0, 8
    )
    out = target.generate(
        **inputs,
        **settings,
        **{CACHE_NAME: caches[1]},
        stopping_criteria=[StopStringCriteria()],
        assistant_model=draft,
    )
    assert torch.equal(out, ref)
    check_caches(caches[1], caches[0])


class Failing(BaseStreamer):
    """Raises at the n-th run of tokens."""

    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.after, self.error = after, error

    def put(self, value: Tensor) -> None:
        self.after -= 1
        if self.after < 0:
            raise self.error("on purpose")

    def end(self) -> None:
        """Is not reached."""


def contents(cache: Cache) -> list[Any]:
    """What the layers hold, states included."""
    held: list[Any] = []
    for layer in cache.layers:
        values = vars(layer)
        states = [
            *values.get("conv_states", {}).values(),
            *values.get("recurrent_states", {}).values(),
        ]
        tensors = [values.get("keys"), values.get("values"), *states]
        held.append(
            (
                dict(values.get("has_previous_state", {})),
                *[None if t is None else t.clone() for t in tensors],
            )
        )
    return held


def same(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize(("after", "error"), [(1, RuntimeError), (4, KeyboardInterrupt)])
def test_an_error_leaves_the_cache_as_it_was(
    after: int, error: type[BaseException], turns: int, target: PreTrainedModel
) -> None:
    caches = (DynamicCache(config=target.config), DynamicCache(config=target.config))
    draft = recording_draft(target)
    inputs = prompts([9], 2)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for seed in range(turns):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, **SHORT)
        ids, mask = next_turn(ids, mask, seed)
    before = contents(caches[1])
    arm(draft, [[]], 0)
    with pytest.raises(error, match="on purpose"):
        target.generate(
            ids,
            **GREEDY,
            **{CACHE_NAME: caches[1]},
            assistant_model=draft,
            streamer=Failing(after, error),
        )
    now = contents(caches[1])
    assert all(
        same(x, y) for a, b in zip(now, before, strict=True) for x, y in zip(a, b, strict=True)
    )
    turn(target, draft, caches, ids, mask, **SHORT)


# ---- refused


def filled(target: PreTrainedModel, rows: int = 1) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target(torch.ones(rows, 6, dtype=torch.long), **{CACHE_NAME: cache})
    return cache


def without_states(target: PreTrainedModel) -> Cache:
    cache = filled(target)
    cache.layers[1] = DynamicCache(config=target.config).layers[1]
    return cache


def recording(target: PreTrainedModel) -> Cache:
    cache = filled(target)
    cache.activate_past_recording()
    return cache


CACHES_REFUSED: dict[str, tuple[Callable[[PreTrainedModel], Cache], str]] = {
    "no config": (lambda target: DynamicCache(), "DynamicCache\\(config=model.config\\)"),
    "of attention": (
        lambda target: DynamicCache(config=tiny_target("qwen3").config),
        "a LinearAttentionLayer in",
    ),
    "static of attention": (
        lambda target: StaticCache(config=tiny_target("qwen3").config, max_cache_len=60),
        "a LinearAttentionLayer in layer 0",
    ),
    "in other places": (
        lambda target: DynamicCache(config=tiny_target("lfm2").config),
        f"in layer 1 of {CACHE_NAME}",
    ),
    "other rows": (lambda target: filled(target, 2), "1 rows"),
    "interrupted": (without_states, "a state wherever there are keys"),
    "recording": (recording, "recording its past"),
}


def refused(target: PreTrainedModel, match: str, **settings: Any) -> None:
    """Checks that a call is refused before any forward."""
    calls: list[int] = []
    handle = target.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=match):
        target.generate(
            torch.ones(1, 8, dtype=torch.long),
            **GREEDY,
            assistant_model=tiny_draft(tiny_target("qwen3.5")),
            **settings,
        )
    handle.remove()
    assert not calls


@pytest.mark.parametrize("case", CACHES_REFUSED)
def test_caches_that_cannot_be_continued_are_refused(case: str) -> None:
    target = tiny_target("qwen3.5")
    make, match = CACHES_REFUSED[case]
    refused(target, match, **{CACHE_NAME: make(target)})


def renamed(module: Any) -> None:
    module.in_proj_gates = module.in_proj_a
    del module.in_proj_a


def narrowed(module: Any) -> None:
    module.in_proj_b = nn.Linear(32, 1)


def hidden(module: Any) -> None:
    del module.in_proj_b
    module.in_proj_b = torch.zeros(4, 32)


def stripped(module: Any) -> None:
    del module.A_log


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "renamed": (renamed, "without the projection in_proj_a \\(renamed, fused or hidden"),
    "narrowed": (narrowed, "in_proj_b gives 1 numbers instead of 4"),
    "hidden": (hidden, "without the projection in_proj_b"),
    "stripped": (stripped, "without A_log; Transformers 5.16 to 5.24 have it"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_without_what_a_replay_needs_are_refused(change: str) -> None:
    target = tiny_target("qwen3.5")
    function, match = CHANGES[change]
    function(target.model.layers[1].linear_attn)
    refused(target, f"gated delta nets .* got Qwen3_5ForCausalLM with .*{match}")


def test_another_releases_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule")
    refused(
        tiny_target("qwen3.5"),
        "does not use torch_chunk_gated_delta_rule; Transformers 5.16 to 5.24 have it",
    )


def test_other_recurrences_are_refused_by_name() -> None:
    sizes = {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 2,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    }
    config = FalconH1Config(**COMMON, **sizes)
    refused(
        FalconH1ForCausalLM(config).eval(),
        "gated delta nets.*short convolutions.*Mamba-2.*got FalconH1ForCausalLM",
    )


def test_time_steps_that_only_a_block_clamps_are_refused() -> None:
    target = tiny_target("bamba", time_step_limit=(0.001, 0.1))
    refused(target, "time steps clamped to \\(0.001, 0.1\\)")


def test_a_module_without_hooks_is_an_error_not_a_wrong_text() -> None:
    target = tiny_target("qwen3.5")
    layer: Any = target.model.layers[1].linear_attn
    # As a replaced layer would: it computes the same without calling its projection as a module.
    layer.in_proj_a.__class__ = type("Silent", (nn.Linear,), {"__call__": nn.Linear.forward})
    with pytest.raises(RuntimeError, match="inputs of the recurrences in layers \\[1\\], got none"):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=tiny_draft(target))


# ---- elsewhere


@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
def test_an_offloaded_target_gives_the_plain_text(family: str) -> None:
    inputs = prompts([4, 11, 7], 1)
    ref = tiny_target(family).generate(**inputs, **GREEDY)
    target = cpu_offload(tiny_target(family), torch.device("cpu"))
    assert any(parameter.is_meta for parameter in target.parameters())
    draft = oracle_draft(target, truth_of(inputs, ref), 1)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1.0


def test_every_kind_has_a_family_here() -> None:
    found = {
        kind.rule
        for family in HYBRIDS
        for kind in find_target(tiny_target(family)).recurrences.values()
    }
    assert found == set(RULES.values())
