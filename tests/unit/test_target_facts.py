"""What is found out about a target is found once, kept with it, and found again when the target has changed."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from dflash_hf.generation.arguments import Settings
from dflash_hf.target_model import parts, support
from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.support import unsupported_code
from tiny import (
    DEPTH,
    FAMILIES,
    HYBRIDS,
    oracle_draft,
    prompts,
    shallow_target,
    tiny_draft,
    tiny_target,
    truth_of,
)

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


class Wrapped(nn.Module):
    """Another module in the place of one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self.inner(*args, **kwargs)


class OtherLinear(nn.Linear):
    """As a library that changes classes in place makes them."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry each time the modules of a target are looked through."""
    times: list[str] = []
    find = parts._find_facts

    def counted(model: Any, *args: Any) -> Any:
        times.append(type(model).__name__)
        return find(model, *args)

    monkeypatch.setattr(parts, "_find_facts", counted)
    return times


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry each time the code of a target is read."""
    times: list[str] = []

    def counted(target: Any) -> str | None:
        times.append(type(target.model).__name__)
        return unsupported_code(target)

    monkeypatch.setattr(support, "unsupported_code", counted)
    return times


def check(target: Any) -> None:
    """A call's text is plain `generate`'s."""
    inputs = prompts([5, 9], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)


def wrap_mlp(target: Any) -> None:
    target.model.layers[1].mlp = Wrapped(target.model.layers[1].mlp)


def replace_layer(target: Any) -> None:
    target.model.layers[1] = copy.deepcopy(target.model.layers[0])
    target.model.layers[1].self_attn.layer_idx, target.model.layers[1].self_attn.config = (
        1,
        target.config,
    )


def add_adapter(target: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    target.add_adapter(
        peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    )


def change_class(target: Any) -> None:
    target.model.layers[0].mlp.up_proj.__class__ = OtherLinear


def replace_embedding(target: Any) -> None:
    target.set_input_embeddings(copy.deepcopy(target.get_input_embeddings()))


CHANGES: list[Callable[[Any], None]] = [
    wrap_mlp,
    replace_layer,
    add_adapter,
    change_class,
    replace_embedding,
]


def test_several_calls_look_once(found: list[str], read: list[str]) -> None:
    target = tiny_target("qwen3")
    for _ in range(3):
        check(target)
    assert len(found) == len(read) == 1


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_target_that_has_changed_is_looked_at_again(
    change: Callable[[Any], None],
    found: list[str],
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Transformers may ask for a release of PEFT that is not out yet.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0")
    target = tiny_target("qwen3")
    check(target)
    before = find_target(target)
    change(target)
    check(target)
    assert len(found) == len(read) == 2
    now = find_target(target)
    assert list(now.layers) == list(target.model.layers)
    assert now.embedding is target.get_input_embeddings()
    assert now.parts.modules != before.parts.modules or change is change_class


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_a_call_leaves_the_facts_as_they_are(family: str) -> None:
    target: Any = shallow_target(family)
    facts = find_target(target).facts
    draft = tiny_draft(target)
    target.generate(**prompts([5, 9], 0), **GREEDY, assistant_model=draft)
    assert find_target(target).facts is facts


def cut_into_chunks(config: Any) -> None:
    config.layer_types[1] = "chunked_attention"


def cut_each_layer_into_chunks(config: Any) -> None:
    config.per_layer_config = {index: {"attention_chunk_size": 4} for index in range(DEPTH)}


def change_the_rope(config: Any) -> None:
    config.rope_parameters["rope_type"] = "dynamic"


def change_the_rope_of_some_layers(config: Any) -> None:
    config.rope_parameters["full_attention"]["rope_type"] = "dynamic"


IN_PLACE: list[tuple[str, Callable[[Any], None], str]] = [
    ("qwen3", cut_into_chunks, "chunked attention"),
    ("qwen3", cut_each_layer_into_chunks, "chunked attention"),
    ("qwen3", change_the_rope, "stays within 16 positions"),
    ("gemma3", change_the_rope_of_some_layers, "stays within 16 positions"),
]


@pytest.mark.parametrize(("family", "change", "refusal"), IN_PLACE)
def test_a_config_that_was_changed_in_place_is_refused(
    family: str, change: Callable[[Any], None], refusal: str
) -> None:
    target: Any = tiny_target(family, max_position_embeddings=16)
    draft = tiny_draft(target)
    inputs = prompts([5, 9], 0)
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    change(target.config)
    # Also at the second try: what is refused is not kept.
    for _ in range(2):
        with pytest.raises(ValueError, match=refusal):
            target.generate(**inputs, **GREEDY, assistant_model=draft)


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), object(), float("nan"), threading.Lock(), {"of": [torch.ones(2)]}],
    ids=["tensor", "object", "nan", "lock", "nested"],
)
def test_anything_may_stand_in_a_config(value: Any) -> None:
    target: Any = tiny_target("qwen3")
    find_target(target)
    target.config.note = value
    facts = find_target(target).facts
    assert find_target(target).facts is facts
    # Another tensor of the same name: whether they are equal is not asked.
    target.config.note = torch.ones(2)
    facts_of_tensor = find_target(target).facts
    assert facts_of_tensor is not facts
    target.config.note = 5
    assert find_target(target).facts is not facts_of_tensor


def test_changes_inside_of_a_configs_values_are_seen() -> None:
    target: Any = tiny_target("qwen3")
    inner: list[Any] = [1]
    target.config.note = {"of": (inner, {2})}
    found = [find_target(target).facts]
    inner[0] = 2
    found.append(find_target(target).facts)
    inner.append(3)
    found.append(find_target(target).facts)
    target.config.note["of"][1].add(3)
    found.append(find_target(target).facts)
    target.config.note["more"] = target.config.note.pop("of")
    found.append(find_target(target).facts)
    assert len(set(map(id, found))) == 5
    target.config.note = {"more": ([2, 3], {2, 3})}
    assert find_target(target).facts is found[-1], "equal values are the same"


class WithAMethod(Wrapped):
    """As torch's quantised embeddings are: what has the name of the tensor is a method."""

    def weight(self) -> Any:
        """Returns the tensor."""
        return self.inner.weight


@pytest.mark.parametrize("kind", [Wrapped, WithAMethod])
def test_an_embedding_without_weight_is_refused_first(kind: type[Wrapped]) -> None:
    target: Any = tiny_target("qwen3")
    inputs = prompts([5, 9], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    target.set_input_embeddings(kind(target.get_input_embeddings()))
    assert torch.equal(target.generate(**inputs, **GREEDY), ref)
    forwards: list[None] = []
    target.get_input_embeddings().register_forward_hook(lambda *args: forwards.append(None))
    refusal = f"input embedding that has a tensor named weight, got '{kind.__name__}'; put an nn.E"
    with pytest.raises(ValueError, match=refusal):
        target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert not forwards


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_dtype_is_seen(dtype: torch.dtype, found: list[str]) -> None:
    """No fact depends on it: nothing is found again, and nothing of the old one is used."""
    target = tiny_target("qwen3")
    check(target)
    target.to(dtype)
    check(target)
    assert next(target.parameters()).dtype == dtype
    assert len(found) == 1


def test_another_device_is_seen() -> None:
    target = tiny_target("qwen3")
    assert find_target(target).device == torch.device("cpu")
    moved = copy.deepcopy(target).to("meta")
    with pytest.raises(
        ValueError, match="expected weights in Embedding, got none, or only on the device 'meta'"
    ):
        _ = find_target(moved).device
    target.to("meta")
    with pytest.raises(
        ValueError, match="expected weights in Embedding, got none, or only on the device 'meta'"
    ):
        _ = find_target(target).device


def test_other_weights_in_the_same_modules_are_seen() -> None:
    """Whether inference mode is safe follows from the weights, which may be replaced in place (torchao does)."""

    class Quantised(torch.Tensor):
        pass

    target = tiny_target("qwen3")
    assert find_target(target).takes_inference_mode
    layer: Any = target.model.layers[0]
    layer.mlp.up_proj.weight = nn.Parameter(
        layer.mlp.up_proj.weight.detach().as_subclass(Quantised)
    )
    assert not find_target(target).takes_inference_mode


def test_a_forward_without_source_hands_keywords_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target("qwen3")
    kind: Any = type(target.model.layers[0])  # type: ignore[attr-defined]
    plain = kind.forward
    scope: dict[str, Any] = {"plain": plain}
    exec("def forward(self, *args, **kwargs):\n    return plain(self, *args, **kwargs)", scope)
    forwards = {
        "without a file": scope["forward"],
        "a part of a line": lambda self, *args, **kwargs: plain(self, *args, **kwargs),
    }
    for forward in forwards.values():
        monkeypatch.setattr(kind, "forward", forward)
        check(tiny_target("qwen3"))


def test_targets_are_looked_at_in_several_threads_at_once() -> None:
    # Python 3.11 parses in one thread at a time only: `ast.parse` raised where the garbage collector changed threads.
    target = find_target(tiny_target("qwen3"))
    raised = list[BaseException]()

    def look() -> None:
        try:
            for _ in range(4):
                assert unsupported_code(target) is None
        except BaseException as error:
            raised.append(error)

    def change_threads(*_: Any) -> None:
        time.sleep(0)

    threads = [threading.Thread(target=look) for _ in range(4)]
    usual = gc.get_threshold()
    gc.callbacks.append(change_threads)
    gc.set_threshold(50)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(change_threads)
    assert not raised


def test_a_target_is_freed_as_before() -> None:
    target = tiny_target("qwen3")
    find_target(target)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


GIVEN: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "guidance_scale": 1.5},
    {"use_cache": False, "top_k": 0, "penalty_alpha": 0.6},
    {"stop_strings": "x", "token_healing": True, "encoder_repetition_penalty": 1.5},
    {
        "num_beams": None,
        "do_sample": True,
        "num_return_sequences": 2,
        "cache_implementation": "static",
    },
]
NAMES = (
    *(
        "num_beams",
        "penalty_alpha",
        "top_k",
        "do_sample",
        "dola_layers",
        "use_cache",
        "guidance_scale",
    ),
    *("use_mtp", "assistant_early_exit", "assistant_ensemble_weight"),
    *("force_words_ids", "constraints"),
    *("prompt_lookup_num_tokens", "cache_implementation", "output_attentions", "bos_token_id"),
    *("num_return_sequences", "token_healing", "stop_strings", "pad_token_id", "eos_token_id"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
)


@pytest.mark.parametrize("own", GIVEN)
@pytest.mark.parametrize("config", [None, *GIVEN])
def test_settings_are_those_that_generate_prepares(
    own: dict[str, Any], config: dict[str, Any] | None
) -> None:
    target = tiny_target("qwen3")
    for name, value in own.items():
        setattr(target.generation_config, name, value)
    given = None if config is None else GenerationConfig(**config)
    for arguments in GIVEN:
        prepared, _ = target._prepare_generation_config(copy.deepcopy(given), **arguments)
        settings = Settings(
            target, {**arguments, **({} if given is None else {"generation_config": given})}
        )
        assert {name: settings[name] for name in NAMES} == {
            name: getattr(prepared, name) for name in NAMES
        }
