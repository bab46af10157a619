"""Fast layers on a CPU: which modules have a fast form, and that it computes bit for bit what they do."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3RMSNorm,
)
from transformers.utils.deprecation import deprecate_kwarg

from dflash_hf import iterate, ops
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.target_model import fast_on_cpu, known_layers
from dflash_hf.target_model.fast_layers import fast_layers
from dflash_hf.target_model.fast_on_cpu import (
    AnglesOfForward,
    FastForward,
    LayerForm,
    fast_forward_of,
    layer_form_of,
    prepare,
)
from dflash_hf.target_model.parts import find_target
from helpers.families import build
from helpers.fast_layers import declare
from helpers.half import pairs
from helpers.static import tensor_oracle
from tiny import prompts, tiny_target, truth_of

NEW = 16
FAMILIES = [
    ("qwen3", {"Qwen3RMSNorm", "Qwen3Attention", "Qwen3DecoderLayer"}),
    ("qwen3-sliding", {"Qwen3RMSNorm", "Qwen3Attention", "Qwen3DecoderLayer"}),
    ("llama3-rope", {"LlamaRMSNorm", "LlamaAttention", "LlamaDecoderLayer"}),
    ("mistral", {"MistralRMSNorm", "MistralAttention", "MistralDecoderLayer"}),
    ("qwen2", {"Qwen2RMSNorm", "Qwen2Attention", "Qwen2DecoderLayer"}),
    ("phi3", {"Phi3RMSNorm"}),
    ("gemma3", set[str]()),  # its norms add one to their weights
    ("gpt-oss", set[str]()),  # its norms multiply in float32, its scores have sinks
]
KNOWN = [family for family, wanted in FAMILIES if wanted]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Lengths, and of how many tokens each forward
PROMPTS = [([9], None), ([40], 16), ([4, 11, 7], None)]


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No class has had its trial yet."""
    monkeypatch.setattr(known_layers, "_outcomes", {})


def fast_form_of(module: Any, dtype: torch.dtype) -> LayerForm | FastForward | None:
    """The fast form of a module, if it has one."""
    return layer_form_of(module, dtype) or fast_forward_of(module, dtype)


@pytest.mark.parametrize(("family", "wanted"), FAMILIES)
def test_which_modules_have_a_fast_form(family: str, wanted: set[str]) -> None:
    modules = list(tiny_target(family).modules())
    for dtype in (torch.float32, torch.float64):
        found = {type(m).__name__ for m in modules if fast_form_of(m, dtype) is not None}
        # A linear layer of torch's own has one in every family.
        assert found == wanted | {"Linear"}


def test_a_window_of_0_is_no_window() -> None:
    # So Qwen2-MoE says that it has none.
    target = build("qwen2_moe").float()
    assert target.config.sliding_window == 0
    layer = target.model.layers[0]
    assert fast_form_of(layer, torch.float32) is not None
    assert fast_form_of(layer.self_attn, torch.float32) is not None


class AnotherNorm(Qwen3RMSNorm):
    """Rounds after the weight instead of before: the same in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide).to(hidden_states.dtype)


class AnotherAttention(Qwen3Attention):
    """Rotates by twice the sine."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any
    ) -> Any:
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, 2 * sin), *args, **kwargs)


class ScaledAttention(LlamaAttention):
    """Caps its scores."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs, softcap=50.0)


class ScaledLayer(Qwen3DecoderLayer):
    """Adds half of what its MLP says."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + states
        return hidden_states + 0.5 * self.mlp(self.post_attention_layernorm(hidden_states))


class AnotherMLP(Qwen3MLP):
    """Gates what is gated already."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.act_fn(self.gate_proj(x))) * self.up_proj(x))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3", AnotherNorm),
        ("qwen3", AnotherAttention),
        ("llama", ScaledAttention),
        ("qwen3", ScaledLayer),
    ],
)
def test_modules_that_compute_something_else_are_not(
    family: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = next(m for m in tiny_target(family).modules() if type(m) is kind.__mro__[1])
    assert fast_form_of(module, torch.float32) is not None
    module.__class__ = kind
    assert fast_form_of(module, torch.float32) is None, "it is in no table"
    declare(monkeypatch, kind)
    assert fast_form_of(module, torch.float32) is None, "its trial shows it"


class SameLayer(Qwen3DecoderLayer):
    """Computes what its base does."""


def test_a_class_of_the_users_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = cast(Any, tiny_target("qwen3")).model.layers[0]
    layer.__class__ = SameLayer
    assert fast_form_of(layer, torch.float32) is None
    declare(monkeypatch, SameLayer)
    assert fast_form_of(layer, torch.float32) is not None


def test_a_replaced_function_fails_the_trial_until_put_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer: Any = cast(Any, tiny_target("qwen3")).model.layers[0]
    with (
        caplog.at_level(logging.DEBUG, logger=known_layers.__name__),
        monkeypatch.context() as patch,
    ):
        assert layer_form_of(layer, torch.float32) is not None
        assert not caplog.records
        patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", half_turned)
        for _ in range(2):
            assert layer_form_of(layer, torch.float32) is None
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("Qwen3DecoderLayer runs as it is")
    assert layer_form_of(layer, torch.float32) is not None


def test_a_trial_calls_no_hooks_and_changes_nothing() -> None:
    layer: Any = cast(Any, tiny_target("qwen3")).model.layers[0]
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    settings = dict(vars(layer.self_attn.config)), [set(vars(module)) for module in layer.modules()]
    fired = list[bool]()
    for module in layer.modules():
        module.register_forward_hook(lambda *args: fired.append(True))
        module.register_forward_pre_hook(lambda *args: fired.append(True))
    random = torch.random.get_rng_state()
    for module in layer.modules():
        fast_form_of(module, torch.float32)
    assert not fired
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert (
        dict(vars(layer.self_attn.config)),
        [set(vars(module)) for module in layer.modules()],
    ) == settings


def test_an_mlp_of_another_kind_is_called_by_a_fast_layer() -> None:
    target = tiny_target("qwen3")
    layers: Any = cast(Any, target).model.layers
    layers[1].mlp.__class__ = layers[2].mlp.__class__ = AnotherMLP
    found = [layer_form_of(layer, torch.float32) for layer in layers]
    assert [form is not None and form.is_gated for form in found] == [True, False, False, True]
    assert all(form is not None for form in found)
    decoded(target)


@pytest.mark.parametrize(("family", "dtype", "lengths"), pairs(KNOWN, DTYPES, [[9], [4, 11, 7]]))
def test_logits_are_the_same_bit_for_bit(
    family: str, dtype: torch.dtype, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family).to(dtype)
    inputs = prompts(lengths, 2)
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 2, 6)
    used = list[bool]()
    for name in ("rms_norm", "attend"):
        plain = getattr(fast_on_cpu, name)
        monkeypatch.setattr(
            fast_on_cpu, name, lambda *args, plain=plain: used.append(True) or plain(*args)
        )
    found = list[list[Tensor]]()
    for enabled in (False, None):
        assert not used
        with ops.kernels(enabled):
            steps = list(
                iterate(
                    target, draft, **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True
                )
            )
        found.append([step.logits for step in steps if step.logits is not None])
    assert used
    assert len(found[0]) == len(found[1]) > 2
    assert all(map(torch.equal, *found))


def prefilled(
    monkeypatch: pytest.MonkeyPatch, target: Any, lengths: list[int], **options: Any
) -> int:
    """Logits and keys and values of prompts are plain `generate`'s; says how many layers took them as one function."""
    inputs, plain, used = (
        prompts(lengths, 2),
        fast_on_cpu.FastAttention._over_prompt,
        list[nn.Module](),
    )
    options |= {
        "max_new_tokens": 1,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    wanted = target.generate(**inputs, **options)
    draft = tensor_oracle(target, truth_of(inputs, wanted.sequences), 2, 6)
    with monkeypatch.context() as patch:

        def noted(*args: Any) -> Any:
            return used.append(args[1]) or plain(*args)

        patch.setattr(fast_on_cpu.FastAttention, "_over_prompt", noted)
        out = target.generate(**inputs, **options, assistant_model=draft)
    assert torch.equal(out.logits[0], wanted.logits[0])
    for ours, theirs in zip(out[CACHE_NAME].layers, wanted[CACHE_NAME].layers, strict=True):
        for name in ("keys", "values"):  # of padding there are none
            padding = inputs["attention_mask"][:, None, -theirs.keys.shape[2] :, None] == 0
            first, second = (
                getattr(layer, name).masked_fill(padding, 0) for layer in (ours, theirs)
            )
            assert torch.equal(first, second)
    return sum(module in set(target.modules()) for module in used)


@pytest.mark.parametrize(
    ("family", "dtype", "prompt"),
    pairs(["qwen3", "llama3-rope", "mistral", "qwen2"], DTYPES, PROMPTS),
)
def test_prompts_are_the_same_bit_for_bit(
    family: str, dtype: Any, prompt: Any, monkeypatch: Any
) -> None:
    target, (lengths, chunk) = tiny_target(family).to(dtype), prompt
    num = prefilled(monkeypatch, target, lengths, prefill_chunk_size=chunk)
    assert num == len(target.model.layers) * (3 if chunk else 1)


def test_prompts_go_by_the_attention_that_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = tiny_target("qwen3")
    target.set_attn_implementation("eager")
    assert not prefilled(monkeypatch, target, [9])
    target.set_attn_implementation("sdpa")
    assert prefilled(monkeypatch, target, [9])
    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        lambda *args, **kwargs: (-theirs(*args, **kwargs)[0], None),
    )
    # A verify has an attention of its own, so the text would be another one.
    with pytest.raises(ValueError, match="one of Transformers' own attentions, got 'sdpa'"):
        prefilled(monkeypatch, target, [9])


@pytest.mark.parametrize(
    "where", ["", "model", "model.embed_tokens", "model.layers.0", "model.layers.2.mlp", "lm_head"]
)
@pytest.mark.parametrize("what", ["forward", "hook", "weight"])
def test_what_a_hook_changes_in_the_prefill_is_seen(where: str, what: str) -> None:
    """A run is not looked up as a whole where code of the user's runs within it."""
    found = list[Tensor]()
    for is_drafted in (False, True):
        target: Any = tiny_target("qwen3")
        inputs, layer = prompts([9], 1), target.model.layers[2].mlp
        calls = list[bool]()

        def change(
            module: Any, args: Any, output: Any, mlp: Any = layer, calls: list[bool] = calls
        ) -> None:
            calls.append(True)
            if len(calls) > 1:
                return
            if what == "forward":
                mlp.forward = lambda states: -states
            elif what == "hook":
                mlp.up_proj.register_forward_hook(lambda module, args, output: -output)
            else:
                mlp.up_proj.weight = nn.Parameter(-mlp.up_proj.weight)

        target.get_submodule(where).register_forward_hook(change)
        draft = tensor_oracle(target, truth_of(inputs, found[0]), 2, 6) if is_drafted else None
        calls.clear()
        found.append(
            target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        )
    assert torch.equal(*found)


@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_a_nested_call_sees_the_changes_of_its_caller(is_nested: bool) -> None:
    target: Any = tiny_target("qwen3")
    inputs, ids, busy, seen = prompts([9], 1), prompts([6], 4), list[bool](), list[Tensor]()
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 2, 6)
    other = tensor_oracle(
        target, truth_of(ids, target.generate(**ids, max_new_tokens=4, do_sample=False)), 2, 6
    )

    def ablated(module: Any, args: Any, output: Any) -> None:
        if busy:
            return
        busy.append(True)
        hook = target.model.layers[2].mlp.register_forward_hook(
            lambda module, args, output: -output
        )
        seen.append(
            target.generate(
                **ids,
                max_new_tokens=4,
                do_sample=False,
                assistant_model=other if is_nested else None,
            )
        )
        hook.remove()
        busy.clear()

    hook = target.model.layers[2].mlp.register_forward_hook(lambda module, args, output: -output)
    truth = target.generate(**ids, max_new_tokens=4, do_sample=False)
    hook.remove()
    target.lm_head.register_forward_hook(ablated)
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft),
        wanted,
    )
    assert len(seen) > 2
    assert all(torch.equal(one, truth) for one in seen)


def attached(target: nn.Module) -> list[str]:
    """Modules with a forward of their own."""
    return [name for name, module in target.named_modules() if "forward" in vars(module)]


def test_it_ends_with_the_verify_and_yields_to_gradients() -> None:
    target = tiny_target("qwen3")
    found = find_target(target)
    with fast_layers(found):
        assert not attached(target)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16), fast_layers(found):
            assert not attached(target)
        with fast_layers(found):
            assert attached(target)
    assert not attached(target)


def decoded(target: Any) -> None:
    """Text with a draft is plain `generate`'s."""
    inputs = prompts([5, 9], 1)
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 2, 6)
    out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)


def test_what_a_class_computes_may_change_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As liger's patches and ablations do."""
    target = tiny_target("qwen3")
    decoded(target)
    kinds = (
        (Qwen3RMSNorm, -1.0),
        (Qwen3Attention, 0.5),
        (Qwen3MLP, -2.0),
        (nn.Linear, 0.75),
        (Qwen3DecoderLayer, 1.5),
    )
    for kind, scale in kinds:
        plain = kind.forward

        def forward(
            self: Any, *args: Any, plain: Any = plain, scale: float = scale, **kwargs: Any
        ) -> Any:
            out = plain(self, *args, **kwargs)
            return (out[0] * scale, *out[1:]) if isinstance(out, tuple) else out * scale

        monkeypatch.setattr(kind, "forward", forward)
        decoded(target)


def test_weights_and_modules_may_be_others_at_the_next_call() -> None:
    target = tiny_target("qwen3")
    decoded(target)
    layer: Any = cast(Any, target).model.layers[1]
    for linear in (layer.self_attn.v_proj, layer.mlp.up_proj):
        linear.weight = nn.Parameter(linear.weight.flip(0) * 2, requires_grad=False)
        decoded(target)
    down = layer.mlp.down_proj
    down.bias = nn.Parameter(down.weight.new_full((down.out_features,), 0.1), requires_grad=False)
    decoded(target)
    # As an adapter goes around it
    layer.mlp.gate_proj = nn.Sequential(layer.mlp.gate_proj, nn.Hardtanh())
    decoded(target)


class FlaggedMLP(Qwen3MLP):
    """Does what a flag says that no trial knows of."""

    sign = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FlaggedMLP.sign


class SteeredLayer(Qwen3DecoderLayer):
    """Reads its index."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) / (cast(Any, self.self_attn).layer_idx + 1)


def half_turned(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """As liger replaces a function of the model's file."""
    query, key = plain_rotary(query, key, *args, **kwargs)
    return query, key * 0.5


def turn_once(model: Any, args: Any) -> None:
    """Hangs a hook on a projection, in the middle of a run."""
    gate = model.layers[2].mlp.gate_proj
    if not gate._forward_hooks:
        gate.register_forward_hook(lambda module, args, out: -out)


plain_rotary = modeling_qwen3.apply_rotary_pos_emb
LATER: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "an epsilon": lambda model, patch: setattr(
        model.layers[1].input_layernorm, "variance_epsilon", 1.0
    ),
    "the last epsilon": lambda model, patch: setattr(model.norm, "variance_epsilon", 1.0),
    "a class": lambda model, patch: setattr(model.layers[1].mlp, "__class__", AnotherMLP),
    "a layer's class": lambda model, patch: setattr(model.layers[1], "__class__", SteeredLayer),
    "an activation": lambda model, patch: patch.setattr(
        type(model.layers[1].mlp.act_fn), "forward", lambda self, states: states.tanh()
    ),
    "RoPE": lambda model, patch: patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", half_turned),
    "a class attribute": lambda model, patch: patch.setattr(FlaggedMLP, "sign", -1.0),
    "a hook before the model": lambda model, patch: model.register_forward_pre_hook(turn_once),
}


@pytest.mark.parametrize("what", LATER)
def test_what_is_changed_after_a_call_counts_in_the_next(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("qwen3")
    model: Any = cast(Any, target).model
    model.layers[0].mlp.__class__ = FlaggedMLP
    decoded(target)
    LATER[what](model, monkeypatch)
    decoded(target)


def test_what_a_decorated_forward_names_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers decorates forwards whose arguments it renames."""
    decorated = deprecate_kwarg("former_name", "9.0.0", new_name=CACHE_NAME)(Qwen3Attention.forward)
    monkeypatch.setattr(Qwen3Attention, "forward", decorated)
    target = tiny_target("qwen3")
    decoded(target)
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", half_turned)
    decoded(target)


def test_weights_that_a_hook_on_the_layer_puts_in_are_used() -> None:
    """As offloading by hand does."""
    target = tiny_target("qwen3")
    layer: Any = cast(Any, target).model.layers[1]
    right = layer.mlp.up_proj.weight
    wrong = nn.Parameter(torch.zeros_like(right), requires_grad=False)
    layer.mlp.up_proj.weight = wrong
    layer.register_forward_pre_hook(lambda *args: setattr(layer.mlp.up_proj, "weight", right))
    layer.register_forward_hook(lambda *args: setattr(layer.mlp.up_proj, "weight", wrong))
    decoded(target)


def test_an_activation_with_a_setting_of_its_own_is_another_one() -> None:
    target = tiny_target("qwen3")
    layers: Any = cast(Any, target).model.layers
    for index, layer in enumerate(layers):
        layer.mlp.act_fn = nn.SiLU() if index else nn.CELU(0.5)
    found = [layer_form_of(layer, torch.float32) for layer in layers]
    assert [form is not None and form.is_gated for form in found] == [False, True, True, True]
    decoded(target)


def test_a_layer_that_is_trained_runs_as_it_is() -> None:
    layer: Any = cast(Any, tiny_target("qwen3")).model.layers[1]
    form = layer_form_of(layer, torch.float64)
    assert form is not None
    for is_training in (True, False):
        for is_unmodified in (True, False):
            prepared = prepare(
                layer.train(is_training), form, None, is_unmodified, AnglesOfForward()
            )
            assert (prepared is None) == is_training


def test_angles_are_made_once_for_all_layers_with_the_same_pair() -> None:
    """Some decoders have two pairs, one for each kind of layer: none may get the other's."""
    target: Any = tiny_target("qwen3")
    angles = AnglesOfForward()
    near, far = (
        target.model.rotary_emb(target.lm_head.weight, torch.arange(first, first + 5)[None])
        for first in (0, 40)
    )
    of_near = angles.of(near)
    assert angles.of(near) is of_near
    for pair in (far, near):
        cos, sin = pair
        found = angles.of(pair)
        assert torch.equal(found.cos.squeeze(2), cos)
        first, second = sin.chunk(2, dim=-1)
        assert torch.equal(found.signed_sin.squeeze(2), torch.cat((-first, second), dim=-1))


def test_angles_follow_a_pair_that_a_hook_changes_between_two_layers() -> None:
    target: Any = tiny_target("qwen3")
    angles = AnglesOfForward()
    with torch.no_grad():
        pair = target.model.rotary_emb(target.lm_head.weight, torch.arange(5)[None])
        angles.of(pair)
        for changed in pair:
            changed.mul_(0.5)
            found = angles.of(pair)
            wanted = AnglesOfForward().of(pair)
            assert all(map(torch.equal, found, wanted))


def test_hooks_that_transformers_leaves_behind_are_no_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target("qwen3")
    target(torch.arange(1, 9)[None], output_hidden_states=True)
    assert cast(Any, target).model.layers[1].self_attn._forward_hooks
    plain, used = fast_on_cpu.FastLayer.run, list[bool]()
    monkeypatch.setattr(
        fast_on_cpu.FastLayer, "run", lambda *args: used.append(True) or plain(*args)
    )
    decoded(target)
    assert used


def test_nothing_holds_a_layer_when_the_verify_is_over() -> None:
    target = tiny_target("qwen3")
    decoded(target)
    kept = [weakref.ref(module) for module in target.modules()]
    del target
    gc.collect()
    assert not any(module() is not None for module in kept)


def replaced_projection(layer: Any) -> None:
    other = nn.Linear(layer.mlp.up_proj.in_features, layer.mlp.up_proj.out_features, bias=True)
    layer.mlp.up_proj = other.to(layer.mlp.up_proj.weight.dtype)


def replaced_parameters_and_scaling(layer: Any) -> None:
    layer.self_attn.scaling *= 3
    for module in (layer.self_attn.v_proj, layer.self_attn.q_norm):
        module.weight = nn.Parameter(module.weight.detach().flip(0))


def parameter_beside(layer: Any) -> None:
    layer.mlp.gate_proj.register_parameter("scale", nn.Parameter(torch.ones(1)))
    layer.mlp.gate_proj.weight.data.mul_(-1)


@pytest.mark.parametrize(
    "change", [replaced_parameters_and_scaling, replaced_projection, parameter_beside]
)
def test_what_is_changed_between_two_calls_counts_in_the_second(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = tiny_target("qwen3")
    for step in (lambda layer: None, change):
        step(target.model.layers[1])
        assert prefilled(monkeypatch, target, [9]) == len(target.model.layers)
    decoded(target)


def test_a_projection_that_was_replaced_leaves_no_weights_behind() -> None:
    target: Any = tiny_target("qwen3")
    decoded(target)
    attention = target.model.layers[1].self_attn
    weight = weakref.ref(attention.q_proj.weight)
    attention.q_proj = copy.deepcopy(attention.q_proj)
    gc.collect()
    assert weight() is None
    decoded(target)


def test_hooks_on_all_modules_are_not_passed_by() -> None:
    target = tiny_target("qwen3")
    norms = [layer.self_attn.q_norm for layer in cast(Any, target).model.layers]
    hook = everywhere.register_module_forward_hook(
        lambda module, args, out: -out if any(module is norm for norm in norms) else None
    )
    try:
        decoded(target)
    finally:
        hook.remove()


def test_a_copy_that_is_made_meanwhile_is_a_model_of_its_own() -> None:
    target, ids = tiny_target("qwen3"), torch.arange(1, 9)[None]
    with torch.no_grad(), fast_layers(find_target(target)):
        made = copy.deepcopy(target)
    wanted = target(ids).logits
    with torch.no_grad():
        for norm in (module for module in target.modules() if isinstance(module, Qwen3RMSNorm)):
            norm.weight.zero_()
    del target
    assert torch.equal(made(ids).logits, wanted)


def test_a_replaced_forward_and_hooks_stay_in_force() -> None:
    target = tiny_target("qwen3")
    layer: Any = target.model.layers[1]
    plain = layer.input_layernorm.forward
    # As accelerate does
    layer.input_layernorm.forward = own = lambda *args, **kwargs: plain(*args, **kwargs)
    fired = list[str]()
    names = (
        "self_attn.k_norm",
        "self_attn.q_proj",
        "post_attention_layernorm",
        "self_attn",
        "input_layernorm",
    )
    names += ("mlp", "mlp.act_fn", "mlp.down_proj")
    for name in names:
        layer.get_submodule(name).register_forward_hook(lambda *args, name=name: fired.append(name))
    inputs = prompts([5, 9], 1)
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 2, 6)
    fired.clear()
    out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert layer.input_layernorm.forward is own
    assert {name: fired.count(name) for name in fired} == dict.fromkeys(
        names, draft.last_stats.num_target_forwards
    )


@pytest.mark.parametrize(
    "name",
    ["self_attn", "self_attn.q_norm", "self_attn.o_proj", "mlp", "mlp.act_fn", "mlp.up_proj"],
)
def test_one_hook_within_a_layer_is_called_in_every_verify(name: str) -> None:
    target = tiny_target("qwen3")
    cast(Any, target).model.layers[2].get_submodule(name).register_forward_hook(
        lambda module, args, out: (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5
    )
    decoded(target)
