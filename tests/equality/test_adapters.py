"""Targets with PEFT adapters and quantised weights, where the packages are installed: plain `generate`'s text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel, generate_batch, iterate
from dflash_hf.target_model.parts import find_target
from tiny import oracle_draft, prompts, shallow_target, tiny_draft, truth_of

# PEFT's own use of a property that Transformers renamed.
pytestmark = pytest.mark.filterwarnings("default:`is_gradient_checkpointing`:FutureWarning")

GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
LENGTHS = pytest.mark.parametrize("lengths", [[9], [4, 11, 7]], ids=["one", "three"])
MODULES = ["q_proj", "v_proj", "down_proj"]


def adapted(model: Any) -> Any:
    """Fills adapters with weights that change the text; fresh ones do nothing."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "ia3_", "prompt", "tokens_delta")):
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@cache
def bare_text(lengths: tuple[int, ...]) -> Tensor:
    """What the target says without any adapter."""
    return shallow_target("qwen3").generate(**prompts(list(lengths), 1), **GREEDY)


def check_same(
    target: PreTrainedModel, caller: Any, lengths: list[int], changes: bool = True, **kwargs: Any
) -> None:
    """Compares `caller.generate` with and without a draft; the text must not be that of the bare target."""
    inputs = prompts(lengths, 1)
    ref = caller.generate(**inputs, **GREEDY, **kwargs)
    assert torch.equal(ref, bare_text(tuple(lengths))) is not changes
    draft = oracle_draft(target, truth_of(inputs, ref), 1)
    assert torch.equal(caller.generate(**inputs, **GREEDY, **kwargs, assistant_model=draft), ref)
    assert 1.0 < draft.last_stats.acceptance_length < 8.0


@LENGTHS
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": MODULES},
        {"target_modules": MODULES, "use_dora": True},
        {"target_modules": [*MODULES, "embed_tokens", "lm_head"]},
        {"target_modules": MODULES, "modules_to_save": ["embed_tokens", "lm_head"]},
        {
            "target_modules": MODULES,
            "trainable_token_indices": {"embed_tokens": list(range(3, 30))},
        },
    ],
    ids=["lora", "dora", "embedding and head", "saved modules", "tokens"],
)
def test_lora(settings: dict[str, Any], lengths: list[int]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    target = shallow_target("qwen3")
    wrapped = adapted(peft.get_peft_model(target, peft.LoraConfig(r=2, **settings)))
    check_same(target, wrapped, lengths)
    with wrapped.disable_adapter():
        check_same(target, wrapped, lengths, changes=False)


@LENGTHS
def test_adapters_added_to_the_model_itself(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    # Transformers may ask for a release of PEFT that is not out yet.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0")
    target = shallow_target("qwen3")
    target.add_adapter(peft.LoraConfig(target_modules=MODULES, r=2))
    check_same(adapted(target), target, lengths)
    target.disable_adapters()
    check_same(target, target, lengths, changes=False)


@LENGTHS
def test_ia3(lengths: list[int]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    target = shallow_target("qwen3")
    check_same(target, adapted(peft.get_peft_model(target, config)), lengths)


def test_an_adapter_per_row() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    target = shallow_target("qwen3")
    wrapped = peft.get_peft_model(
        target, peft.LoraConfig(target_modules=MODULES, r=2), adapter_name="a"
    )
    wrapped.add_adapter("b", peft.LoraConfig(target_modules=MODULES, r=3))
    check_same(target, adapted(wrapped), [4, 11, 7], adapter_names=["a", "b", "__base__"])


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "alora"])
def test_adapters_that_add_or_count_tokens_are_refused_early(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    inputs = prompts([9], 1)
    if kind == "alora":
        start = [int(inputs["input_ids"][0, -2])]
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=start
        )
    else:
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    target = shallow_target("qwen3")
    wrapped = adapted(peft.get_peft_model(target, config))
    target.register_forward_pre_hook(lambda *args: pytest.fail("a forward ran"))
    with pytest.raises(ValueError, match=r"PEFT adapter|activated LoRA"):
        wrapped.generate(**inputs, **GREEDY, assistant_model=tiny_draft(target))


def quantise_quanto(target: PreTrainedModel, weights: str) -> PreTrainedModel:
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    quanto.quantize(target, weights=getattr(quanto, weights))
    quanto.freeze(target)
    return target


def quantise_torchao(target: PreTrainedModel, config: str) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(target, getattr(quantization, config)())
    return target


def quantise_bitsandbytes(target: PreTrainedModel, kind: str) -> PreTrainedModel:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    settings = (
        {"has_fp16_weights": False} if kind == "Linear8bitLt" else {"compute_dtype": torch.float32}
    )
    for layer in find_target(target).layers:
        for name, linear in list(layer.mlp.named_children()):
            if isinstance(linear, nn.Linear):
                made = getattr(bnb.nn, kind)(
                    linear.in_features, linear.out_features, bias=False, **settings
                )
                made.load_state_dict(linear.state_dict())
                setattr(layer.mlp, name, made.to("cpu"))
    return target


@LENGTHS
@pytest.mark.parametrize(
    ("quantise", "kind"),
    [
        (quantise_quanto, "qint8"),
        (quantise_quanto, "qint4"),
        (quantise_torchao, "Int8WeightOnlyConfig"),
        (quantise_bitsandbytes, "Linear8bitLt"),
        (quantise_bitsandbytes, "Linear4bit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_quantised_target(quantise: Any, kind: str, lengths: list[int]) -> None:
    target = quantise(shallow_target("qwen3", hidden_size=64, intermediate_size=64).float(), kind)
    inputs = prompts(lengths, 1)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 1)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert 1.0 < draft.last_stats.acceptance_length < 8.0
    assert torch.equal(target.generate(**inputs, **GREEDY), ref)


def text_of_steps(target: Any, draft: DFlashDraftModel, inputs: dict[str, Tensor]) -> list[int]:
    """The whole text of one prompt, as `iterate` commits it step by step."""
    new = [step.committed[0] for step in iterate(target, draft, **inputs, **GREEDY)]
    return [*inputs["input_ids"][0].tolist(), *torch.cat(new).tolist()]


def check_entrances(wrapped: Any, target: PreTrainedModel) -> None:
    """Compares `iterate` and `generate_batch` over a wrapped target with its own plain `generate`."""
    inputs = prompts([9], 1)
    ref = wrapped.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 1)
    assert text_of_steps(wrapped, draft, inputs) == ref[0].tolist()
    assert 1.0 < draft.last_stats.acceptance_length < 8.0
    (answer,) = generate_batch(wrapped, tiny_draft(target), inputs["input_ids"], **GREEDY)
    assert answer.token_ids == ref[0, 9:].tolist()


def test_adapters_take_part_wherever_a_wrapped_target_is_passed() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    target = shallow_target("qwen3")
    wrapped = adapted(peft.get_peft_model(target, peft.LoraConfig(r=2, target_modules=MODULES)))
    text = wrapped.generate(**prompts([9], 1), **GREEDY)
    assert not torch.equal(text, bare_text((9,)))
    check_entrances(wrapped, target)
    with wrapped.disable_adapter():
        check_entrances(wrapped, target)


def test_a_compiled_target_may_be_passed_anywhere() -> None:
    target = shallow_target("qwen3")
    check_entrances(torch.compile(target), target)


def test_tokens_of_adapters_are_refused_at_every_entrance() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    target = shallow_target("qwen3")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    draft = tiny_draft(target)
    wrapped = adapted(peft.get_peft_model(target, config))
    for given in (wrapped, torch.compile(wrapped)):
        with pytest.raises(ValueError, match="PEFT adapter"):
            iterate(given, draft, **prompts([9], 1), **GREEDY)
        with pytest.raises(ValueError, match="PEFT adapter"):
            generate_batch(given, draft, [[5, 6]], max_new_tokens=4)
