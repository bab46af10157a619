"""The hybrid target's training: the faster gated delta rule is Transformers' own, and the model is what it says."""

import json
from collections.abc import Callable

import pytest
import torch
from build_tokenizer import MAX_LENGTH, TARGET_DIR, VOCAB_SIZE
from fast_delta_rule import CHUNK, fast_delta_rule, gated_delta_rule
from hybrid_target import HYBRID_DIR, HYBRID_KINDS, hybrid_logits, make_hybrid_config
from make_prompts import text_rows
from safetensors import safe_open
from torch import Tensor
from train_target import fresh_target
from transformers import AutoTokenizer, Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

Rule = Callable[..., Tensor]


def closeness(first: Tensor, second: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((first - second).abs().max() / second.abs().max())


def theirs(*inputs: Tensor) -> Tensor:
    """Transformers' torch code as Qwen3.5 calls it."""
    return modeling_qwen3_5.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]


def values_and_gradients(rule: Rule, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The rule's output and the gradient of each input."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = rule(*leaves)
    (out * upstream).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    return [out.detach(), *[gradient for gradient in gradients if gradient is not None]]


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 5, 150])
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_size", "value_size"), [(2, 4, 16, 16), (3, 3, 8, 24)]
)
def test_the_rule_is_transformers_rule(
    size: int, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> None:
    """Output and gradients: lengths on both sides of a chunk, shared and single key heads, strong and weak decay."""
    torch.manual_seed(size)
    query, key = torch.randn(2, 2, size, key_heads, key_size)
    value = torch.randn(2, size, value_heads, value_size)
    decay = -torch.exp(torch.empty(2, size, value_heads).uniform_(-7, 2))
    beta = torch.rand(2, size, value_heads)
    inputs, upstream = (
        [query, key, value, decay, beta],
        torch.randn(2, size, value_heads, value_size),
    )
    found = values_and_gradients(gated_delta_rule, inputs, upstream)
    expected = values_and_gradients(theirs, inputs, upstream)
    assert len(found) == len(expected) == 6
    for ours, other in zip(found, expected, strict=True):
        if other.abs().max() < 1e-6:  # one token: there is no state to decay
            assert ours.abs().max() < 1e-5
        else:
            assert closeness(ours, other) < 1e-5


def test_training_sees_the_model_and_leaves_transformers_alone() -> None:
    """Logits and gradients of whole rows, padded ones too; afterwards, and after an error, the rule is the old one."""
    torch.manual_seed(0)
    model, _ = fresh_target("hybrid")
    assert isinstance(model, Qwen3_5ForCausalLM)
    before = modeling_qwen3_5.torch_chunk_gated_delta_rule
    ids = torch.randint(4, VOCAB_SIZE, (2, 70))
    results = []
    for logits in (model(input_ids=ids, use_cache=False).logits, hybrid_logits(model, ids)):
        model.zero_grad()
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids.roll(-1, 1).flatten()
        ).backward()
        results.append((logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (exact, exact_gradient), (fast, fast_gradient) = results
    assert closeness(fast, exact) < 1e-5
    assert closeness(fast_gradient, exact_gradient) < 1e-4
    with torch.no_grad():
        padded = hybrid_logits(model, torch.nn.functional.pad(ids, (0, 26)))
    assert closeness(padded[:, :70], exact) < 1e-5
    with pytest.raises(IndexError), fast_delta_rule():
        model(input_ids=torch.tensor([[VOCAB_SIZE]]), use_cache=False)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is before


def test_fresh_heads_remember_for_more_than_a_few_tokens() -> None:
    """The time steps of a fresh model lie between 0.001 and 0.1."""
    torch.manual_seed(0)
    model, _ = fresh_target("hybrid")
    steps = [
        torch.nn.functional.softplus(p.detach())
        for name, p in model.named_parameters()
        if name.endswith("dt_bias")
    ]
    assert len(steps) == 6
    assert 1e-3 <= float(torch.cat(steps).min()) < float(torch.cat(steps).max()) <= 0.1


def test_the_stored_target_has_its_config_and_the_tokenizer() -> None:
    """Weights in 16 bits; the config and the tokenizer files are what the scripts would write."""
    folder = HYBRID_DIR / "target"
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F16"}  # noqa: SIM118
    stored = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    configured = json.loads(make_hybrid_config(tokenizer, MAX_LENGTH).to_json_string())
    volatile = {"architectures", "transformers_version"}
    assert {k: v for k, v in stored.items() if k not in volatile} == {
        k: v for k, v in configured.items() if k not in volatile
    }
    assert stored["architectures"] == ["Qwen3_5ForCausalLM"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (TARGET_DIR / name).read_bytes()


def test_the_held_out_prompts_are_what_the_script_writes() -> None:
    """Twelve of each kind."""
    lines = (HYBRID_DIR / "held_out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(
        json.dumps(text_rows(HYBRID_KINDS, 12))
    )
