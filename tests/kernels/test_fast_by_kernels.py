"""Fast layers by kernels: which modules have a fast form, and when one runs as it is; texts stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3Model,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

import dflash_kernels
from dflash_hf import ops
from dflash_hf.target_model import known_layers
from dflash_hf.target_model.fast_by_kernels import fast_forward_of
from dflash_hf.target_model.fast_layers import fast_layers
from dflash_hf.target_model.parts import find_target
from helpers.fast_layers import declare
from helpers.kernel_checks import OPERATIONS, POINTWISE, Calls
from helpers.static import tensor_oracle
from tiny import prompts, shallow_target, tiny_target, truth_of

NEW = 16
LAYERS = 4  # of a tiny target


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, (*OPERATIONS, *POINTWISE))


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No class has had its trial yet; all by references, in the interpreter too (kernels: `test_decode`)."""
    monkeypatch.setattr(known_layers, "_outcomes", {})
    for name in (*OPERATIONS, *POINTWISE):
        monkeypatch.setattr(getattr(dflash_kernels, name), "_covers", lambda *args: False)


def kinds_of(target: Any) -> set[str]:
    """The classes of modules that have a fast form."""
    return {
        type(m).__name__ for m in target.modules() if fast_forward_of(m, torch.float32) is not None
    }


def names_of(family: str, *kinds: str) -> set[str]:
    """The names of a family's classes."""
    return {f"{family}{kind}" for kind in kinds}


ALL = ("RMSNorm", "MLP", "Attention", "DecoderLayer", "RotaryEmbedding")


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("qwen3", names_of("Qwen3", *ALL)),
        ("qwen3-sliding", names_of("Qwen3", *ALL)),
        ("llama3-rope", names_of("Llama", *ALL)),
        ("mistral", names_of("Mistral", *ALL)),
        ("qwen2", names_of("Qwen2", *ALL)),
        # Its norms multiply in float32, its scores have sinks, its angles are made once for a head's two halves.
        ("gpt-oss", set()),
        ("phi3", names_of("Phi3", "RMSNorm", "RotaryEmbedding")),
        # Its norms add one to their weights, its activation is another, its layers have angles of two kinds.
        ("gemma3", set()),
    ],
)
def test_which_modules_have_a_fast_form(family: str, wanted: set[str]) -> None:
    assert kinds_of(tiny_target(family)) == wanted


class AnotherNorm(Qwen3RMSNorm):
    """Rounds after the weight instead of before: the same in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide).to(hidden_states.dtype)


class AnotherMLP(Qwen3MLP):
    """Gates the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class AnotherAttention(Qwen3Attention):
    """Rotates by twice the sine."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any
    ) -> Any:
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, 2 * sin), *args, **kwargs)


class ScaledAttention(Qwen3Attention):
    """Caps its scores."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs, softcap=50.0)


class SwappedAttention(Qwen3Attention):
    """Norms queries as keys, and keys as queries."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.q_norm, self.k_norm = self.k_norm, self.q_norm
        out = super().forward(*args, **kwargs)
        self.q_norm, self.k_norm = self.k_norm, self.q_norm
        return out


class ClippedAttention(LlamaAttention):
    """Clips its values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        project = self._modules["v_proj"]
        self._modules["v_proj"] = lambda states: project(states).clamp(-30, 30)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._modules["v_proj"] = project


class UnrotatedAttention(LlamaAttention):
    """Rotates nothing."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any
    ) -> Any:
        cos, sin = position_embeddings
        return super().forward(
            hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), *args, **kwargs
        )


class BlindAttention(MistralAttention):
    """Has a window in its config and looks beyond it."""

    forward = LlamaAttention.forward


class AnotherLayer(Qwen3DecoderLayer):
    """Scales what attention adds."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + 0.5 * attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class AnotherRotary(Qwen3RotaryEmbedding):
    """Turns by half the angles."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids / 2)


class RoundedRotary(Qwen3RotaryEmbedding):
    """Computes angles in the dtype of the states: the same in float32."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        freqs = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        angles = torch.cat((freqs, freqs), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


class ForgetfulLayer(Qwen3DecoderLayer):
    """Keeps a keyword to itself."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        return super().forward(hidden_states, **kwargs)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            ("qwen3", kind)
            for kind in (
                AnotherNorm,
                AnotherMLP,
                AnotherAttention,
                ScaledAttention,
                SwappedAttention,
            )
        ),
        *(("qwen3", kind) for kind in (AnotherLayer, ForgetfulLayer)),
        *(("qwen3", kind) for kind in (AnotherRotary, RoundedRotary)),
        *(("llama", kind) for kind in (ClippedAttention, UnrotatedAttention)),
        ("mistral", BlindAttention),
    ],
)
def test_modules_that_compute_something_else_are_not(
    family: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = kind.__mro__[1]
    target = tiny_target(family)
    module: Any = next(m for m in target.modules() if type(m) is base)
    assert fast_forward_of(module, torch.float32) is not None
    module.__class__ = kind
    assert fast_forward_of(module, torch.float32) is None, "it is in no table"
    declare(monkeypatch, kind)
    assert fast_forward_of(module, torch.float32) is None, "its trial shows it"


def decode(
    target: Any, lengths: list[int], width: int = 6, dtype: torch.dtype = torch.float64
) -> None:
    """Text with a draft under kernels is plain `generate`'s."""
    target.to(dtype)
    inputs = prompts(lengths, 2)
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 2, width)
    with ops.kernels(True):
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3-sliding", "llama3-rope", "mistral", "qwen2", "phi3"]
)
def test_texts_stay(family: str, dtype: torch.dtype, calls: Calls) -> None:
    """By references. In float64 the kernel's norm before attention is float64, and that of Qwen3 float32."""
    decode(shallow_target(family), [4, 11, 7], dtype=dtype)
    num, drafts = calls.all(), calls.all()["context_kv"]
    draft_layers = 2
    # In a draft the norm of the context and the first one have no sum before them.
    assert num["rms_norm"] > drafts * 2
    sums_of_drafts = drafts * 2 * draft_layers
    assert (
        (num["add_norm"] > sums_of_drafts)
        == (num["silu_mul"] > drafts * draft_layers)
        == (family != "phi3")
    )
    # Two to find out
    is_attention_fused = num["norm_rope_write"] > drafts * draft_layers + 2 * 2
    has_norms = family.startswith("qwen3")
    assert is_attention_fused == (dtype == torch.float32 if has_norms else family != "phi3")


def attached(target: Any) -> list[str]:
    """Modules with a forward of their own."""
    return [name for name, module in target.named_modules() if "forward" in vars(module)]


def test_nothing_happens_where_no_kernels_run(calls: Calls) -> None:
    target = tiny_target("qwen3").to(torch.bfloat16)
    with fast_layers(find_target(target)):
        assert not attached(target)
    with torch.no_grad(), ops.kernels(True), fast_layers(find_target(target)):
        assert len(attached(target)) == 7 * LAYERS + 2
    assert not attached(target)


def test_it_acts_in_one_thread_and_ends_with_the_last() -> None:
    target = tiny_target("qwen3").to(torch.bfloat16)
    found, ids = find_target(target), torch.arange(5)[None]
    norm: Any = target.model.norm
    states = torch.randn(2, 3, norm.weight.shape[0]).to(torch.bfloat16)
    seen = list[bool]()

    def elsewhere() -> None:
        before = ops.rms_norm
        ops.rms_norm = None  # pyright: ignore
        try:
            norm(states)
            seen.append(True)
        finally:
            ops.rms_norm = before

    with torch.no_grad(), ops.kernels(True):
        first = fast_layers(found)
        first.__enter__()
        with fast_layers(found):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert attached(target)  # the first is still open
        first.__exit__(None, None, None)
    assert seen == [True]
    assert not attached(target)
    target(ids)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", {"full_attention": "default"}])
def test_angles_that_follow_a_text_have_no_fast_form(rope_type: Any) -> None:
    rotary: Any = tiny_target("qwen3").model.rotary_emb
    assert fast_forward_of(rotary, torch.bfloat16) is not None
    rotary.rope_type = rope_type
    assert fast_forward_of(rotary, torch.bfloat16) is None


def num_angles(target: Any, calls: Calls, dtype: torch.dtype = torch.bfloat16) -> int:
    """How often a kernel makes a verify's angles, which are the class's."""
    rotary = target.model.rotary_emb
    states = torch.zeros(2, 3, 8, dtype=dtype)
    positions = torch.tensor([[4, 5, 6], [900, 901, 902]])
    with torch.no_grad():
        wanted = rotary(states, positions)
        with ops.kernels(True), fast_layers(find_target(target)):
            before = calls.all()["rope_angles"]
            first = rotary(states, positions)
            second = rotary(states, position_ids=positions)
            num = calls.all()["rope_angles"] - before
    for angles in (first, second):
        assert all(map(torch.equal, angles, wanted))
        assert all(one.dtype == dtype for one in angles)
    return num


def test_one_kernel_makes_the_angles_of_a_verify(calls: Calls) -> None:
    target = tiny_target("qwen3").to(torch.bfloat16)
    rotary: Any = target.model.rotary_emb
    assert num_angles(target, calls) == 2
    assert num_angles(target, calls, torch.float16) == 2
    # It is read in each call.
    rotary.attention_scaling = 1.25
    assert num_angles(target, calls) == 2
    rotary.attention_scaling = torch.tensor(1.25)
    assert num_angles(target, calls) == 0


def test_hooks_on_the_angles_stay_in_force(calls: Calls) -> None:
    target = tiny_target("qwen3").to(torch.bfloat16)
    rotary: Any = target.model.rotary_emb
    fired = list[int]()
    rotary.register_forward_hook(lambda *args: fired.append(1))
    assert num_angles(target, calls) == 2
    assert len(fired) == 3
    own_forward(rotary)
    assert num_angles(target, calls) == 0


@pytest.mark.parametrize("setting", ["cuda.matmul.allow_tf32", "float32_matmul_precision"])
def test_angles_in_tf32_are_the_class_own(setting: str, calls: Calls) -> None:
    """Older classes multiply matrices, which TF32 rounds: the prompt's keys were turned by those angles."""
    target = tiny_target("qwen3").to(torch.bfloat16)
    before = torch.get_float32_matmul_precision()
    if setting == "float32_matmul_precision":
        torch.set_float32_matmul_precision("high")
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert num_angles(target, calls) == 0
    finally:
        torch.set_float32_matmul_precision(before)
    assert num_angles(target, calls) == 2


class ForeignModel(Qwen3Model):
    """A decoder whose code is not Transformers': it might change what a layer gives before the next one gets it."""


def num_norms(target: Any, calls: Calls) -> tuple[int, int]:
    """How many norms a verify of three tokens computes alone, and how many with the sum before them."""
    with torch.no_grad(), ops.kernels(True), fast_layers(find_target(target)):
        before = calls.all().copy()
        target(torch.arange(3, 6)[None])
    after = calls.all()
    return after["rms_norm"] - before["rms_norm"], after["add_norm"] - before["add_norm"]


def test_the_last_sum_of_a_layer_goes_with_the_norm_behind_it(calls: Calls) -> None:
    target = tiny_target("qwen3").float()
    heads = 2 * LAYERS  # norms of queries and keys, which are no verify's here
    ids = torch.arange(3, 6)[None]
    with torch.no_grad():
        wanted = target(ids).logits
        with ops.kernels(True), fast_layers(find_target(target)):
            assert torch.allclose(target(ids).logits, wanted, atol=1e-5)
    assert num_norms(target, calls) == (1 + heads, 2 * LAYERS)
    handle = target.model.layers[1].register_forward_hook(lambda module, args, out: out.mul_(1.5))
    assert num_norms(target, calls) == (2 + heads, 2 * LAYERS - 1), "the hook comes between"
    handle.remove()
    handle = target.model.layers[1].register_forward_pre_hook(lambda module, args: None)
    assert num_norms(target, calls) == (2 + heads, 2 * LAYERS - 1)
    handle.remove()
    target.model.__class__ = ForeignModel
    assert num_norms(target, calls) == (1 + LAYERS + heads, LAYERS)


def test_a_hook_that_changes_what_a_layer_gives_is_not_passed_by() -> None:
    def raise_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].add_(0.25)

    target = tiny_target("qwen3")
    for layer in target.model.layers[1:3]:
        layer.register_forward_hook(lambda module, args, out: out.mul_(1.5))
    target.model.layers[3].register_forward_pre_hook(raise_input)
    decode(target, [4, 11, 7], dtype=torch.float32)


def own_forward(module: Any) -> Callable[..., Any]:
    """What accelerate does to a module."""
    plain = module.forward
    module.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    return module.forward


def test_a_replaced_forward_and_hooks_stay_in_force(calls: Calls) -> None:
    target = tiny_target("qwen3")
    layer: Any = target.model.layers[1]
    own = own_forward(layer.input_layernorm)
    fired = list[str]()
    for name in (
        "self_attn.k_norm",
        "post_attention_layernorm",
        "mlp.act_fn",
        "self_attn",
        "input_layernorm",
    ):
        layer.get_submodule(name).register_forward_hook(lambda *args, name=name: fired.append(name))
    inputs = prompts([5, 9], 1)
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 2, 6)
    fired.clear()
    with ops.kernels(True):
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert layer.input_layernorm.forward is own
    assert sorted(set(fired)) == sorted(
        {n for n in fired if fired.count(n) == draft.last_stats.num_target_forwards}
    )
    assert len(set(fired)) == 5
