"""The doctor finds nothing on the healthy pair, and on a damaged one exactly the damage; it changes nobody's model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.quantization_config import QuantizationMethod
from typer.testing import CliRunner, Result

from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.cli.main import app
from dflash_hf.data.prompt_files import image_names, read_prompts
from dflash_hf.doctor import diagnosis as doctor_module
from dflash_hf.doctor import probe as probe_module
from dflash_hf.doctor.diagnosis import Diagnosis, diagnose, write_answers
from dflash_hf.doctor.precision import quantisation_of
from dflash_hf.doctor.probe import Measurement, Probe, variant
from dflash_hf.pair.answers import encode_prompt
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.training.collators import Batch
from dflash_hf.training.example import Example
from dflash_hf.training.walking import accepted_at_anchors
from helpers.whole_blocks import use_whole_blocks

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
# Answers to examine on: which of eight prompts, and how many tokens. Few, where a difference is plain to see.
FEW: tuple[slice, int] = (slice(3), 32)
LONGER: tuple[slice, int] = (slice(3), 48)
MANY: tuple[slice, int] = (slice(None, None, 2), 80)
ALL: tuple[slice, int] = (slice(None), 80)


@cache
def pair() -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    target = AutoModelForCausalLM.from_pretrained(TOY / "target")
    return (
        target,
        DFlashDraftModel.from_pretrained(TOY / "draft"),
        AutoTokenizer.from_pretrained(TOY / "target"),
    )


@cache
def held_out() -> list[Any]:
    return read_prompts(TOY / "held_out.jsonl")[::6]


ANSWERS: dict[str, list[Example]] = {}


@pytest.fixture(autouse=True)
def answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's answers do not depend on the draft: they are written once for all tests."""

    def remembered(
        model: PreTrainedModel, inputs: list[dict[str, torch.Tensor]], limit: int
    ) -> list[Example]:
        if model is not pair()[0]:
            return write_answers(model, inputs, limit)
        key = str(([row["input_ids"].tolist() for row in inputs], limit))
        if key not in ANSWERS:
            ANSWERS[key] = write_answers(model, inputs, limit)
        return ANSWERS[key]

    monkeypatch.setattr(doctor_module, "write_answers", remembered)


COUNTED: dict[str, Tensor] = {}


@pytest.fixture(autouse=True)
def anchors_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft whose one wrong setting is put right is the healthy one: what is tried on top of it is the same."""

    def remembered(
        draft: DFlashDraftModel, target: Target, batch: Batch, features: Tensor, *, is_tree: bool
    ) -> Tensor:
        has_own_weights = {id(tensor) for tensor in draft.parameters()} == own_weights()
        if target.model is not pair()[0] or not has_own_weights:
            return accepted_at_anchors(draft, target, batch, features, is_tree=is_tree)
        text = batch.input_ids.tolist(), batch.loss_mask.tolist()
        states = hash(features.numpy().tobytes())
        key = repr((draft.config.to_dict(), text, states, is_tree))
        if key not in COUNTED:
            COUNTED[key] = accepted_at_anchors(draft, target, batch, features, is_tree=is_tree)
        return COUNTED[key]

    monkeypatch.setattr(probe_module, "accepted_at_anchors", remembered)


def own_weights() -> set[int]:
    """The parameters of the bundled draft, which `variant` shares, by their ids."""
    return {id(tensor) for tensor in pair()[1].parameters()}


def examine(
    draft: DFlashDraftModel, answers: tuple[slice, int], target: PreTrainedModel | None = None
) -> Diagnosis:
    """Examines on answers to some of the held-out prompts, of so many tokens at most."""
    prompts, limit = held_out()[answers[0]], answers[1]
    return diagnose(target or pair()[0], draft, pair()[2], prompts, max_new_tokens=limit)


def names(diagnosis: Diagnosis) -> list[str]:
    return [check.name for check in diagnosis.findings]


def test_the_healthy_pair_has_no_findings_and_stays_as_it_is() -> None:
    target, draft, _ = pair()
    weights = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    config, attention, stats = (
        draft.config.to_dict(),
        target.config._attn_implementation,
        draft.last_stats,
    )
    diagnosis = examine(draft, MANY)
    assert names(diagnosis) == []
    assert diagnosis.acceptance_length > 6
    assert draft.config.to_dict() == config
    assert target.config._attn_implementation == attention
    assert draft.last_stats is stats
    assert all(torch.equal(tensor, weights[name]) for name, tensor in draft.state_dict().items())
    assert not any(layer._forward_hooks for layer in target.model.layers)
    status = {check.name: check.status for check in diagnosis.checks}
    assert status == {
        "vocabulary": "ok",
        "weights": "ok",
        "precision": "skipped",
        "tap_offset": "ok",
        "deepstack": "skipped",
        "mask_token": "ok",
        "causality": "ok",
        "sliding_window": "skipped",
        "rope": "ok",
        "dtype": "ok",
        "chat_template": "ok",
        "thinking": "skipped",
        "other_target": "ok",
    }
    assert json.loads(json.dumps(diagnosis.to_dict()))["healthy"] is True


def test_what_is_measured_is_what_generate_does() -> None:
    """The walked acceptance of a variant is `generate`'s own with that variant as the draft."""
    target, draft, tokenizer = pair()
    inputs = [encode_prompt(tokenizer, prompt, target.device) for prompt in held_out()[:2]]
    probe = Probe(find_target(target), draft, write_answers(target, inputs, 24))
    changes: list[dict[str, Any]] = [
        {},
        {"mask_token_id": 1},
        {"is_causal": True},
        {"target_layer_ids": [0, 3, 5, 8]},
        {"sample_from_anchor": True},
    ]
    for fields in changes:
        changed = variant(draft, fields)
        use_whole_blocks(changed)
        committed: list[int] = []
        for row in inputs:
            target.generate(**row, max_new_tokens=24, do_sample=False, assistant_model=changed)
            committed += changed.last_stats.num_committed[0]
        assert probe.walked(fields) == pytest.approx(sum(committed) / len(committed)), fields


def test_taps_on_both_sides_of_deepstack_are_tried() -> None:
    """Measured as `generate` decodes; the bundled draft does nearly as well with either."""
    folder = TOY / "vision"
    target = AutoModelForImageTextToText.from_pretrained(folder / "target")
    draft = DFlashDraftModel.from_pretrained(folder / "draft")
    processor = AutoProcessor.from_pretrained(folder / "target")
    shown = [
        p
        for p in read_prompts(folder / "held_out.jsonl")
        if not isinstance(p, str) and image_names(p)
    ][:2]
    inputs = [encode_prompt(processor, prompt, target.device) for prompt in shown]
    probe = Probe(find_target(target), draft, write_answers(target, inputs, 16))
    assert probe.deepstack_differs
    for after in (False, True):
        setup = {"tap_after_deepstack": after}
        changed = variant(draft, setup)
        committed: list[int] = []
        for row in inputs:
            target.generate(**row, max_new_tokens=16, do_sample=False, assistant_model=changed)
            committed += changed.last_stats.num_committed[0]
        assert probe.walked(setup) == pytest.approx(sum(committed) / len(committed)), after
        checks = {
            check.name: check
            for check in diagnose(target, changed, processor, shown, max_new_tokens=16).checks
        }
        label = f"taps {'before' if after else 'after'} DeepStack's additions"
        assert checks["deepstack"].measured[label] == round(
            probe.measure({"tap_after_deepstack": not after}).mean, 3
        )
        assert checks["deepstack"].status == "ok"


def fields(**changes: Any) -> Callable[[DFlashDraftModel], DFlashDraftModel]:
    return lambda draft: variant(draft, changes)


def reset(*modules: str) -> Callable[[DFlashDraftModel], DFlashDraftModel]:
    def damage(draft: DFlashDraftModel) -> DFlashDraftModel:
        draft = copy.deepcopy(draft)
        for name in modules:
            draft.get_submodule(name).weight.data.fill_(1.0)
        return draft

    return damage


def fill(name: str, value: float) -> Callable[[DFlashDraftModel], DFlashDraftModel]:
    def damage(draft: DFlashDraftModel) -> DFlashDraftModel:
        draft = copy.deepcopy(draft)
        draft.get_parameter(name).data[:].fill_(value)
        return draft

    return damage


SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}
DAMAGE: dict[str, tuple[Callable[[DFlashDraftModel], DFlashDraftModel], str, str]] = {
    "taps one too low": (
        fields(target_layer_ids=[0, 3, 5, 8]),
        "tap_offset",
        "target_layer_ids to [1, 4, 6, 9]",
    ),
    "taps one too high": (
        fields(target_layer_ids=[2, 5, 7, 10]),
        "tap_offset",
        "target_layer_ids to [1, 4, 6, 9]",
    ),
    "another mask": (fields(mask_token_id=1), "mask_token", "mask_token_id to 3"),
    "causal blocks": (fields(is_causal=True), "causality", "set is_causal to False"),
    "a window": (fields(**SLIDING), "sliding_window", "full_attention"),
    "another theta": (
        fields(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "rope",
        "rope_parameters['rope_theta'] to 10000",
    ),
    "a RoPE over half of each head": (
        fields(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        ),
        "rope",
        "RoPE over whole heads accepts",
    ),
    "hidden_norm reset": (reset("hidden_norm"), "weights", "hidden_norm are ones everywhere"),
    "layer norms reset": (
        reset("layers.0.input_layernorm", "layers.1.self_attn.k_norm"),
        "weights",
        "layers.0.input_layernorm, layers.1.self_attn.k_norm are ones everywhere",
    ),
    "NaN": (
        fill("layers.1.mlp.up_proj.weight", float("nan")),
        "weights",
        "layers.1.mlp.up_proj.weight has NaN",
    ),
    "an empty projection": (
        fill("layers.2.self_attn.o_proj.weight", 0.0),
        "weights",
        "o_proj.weight is all zeros",
    ),
}


# What costs a tenth of the tokens shows on these answers: by more than four standard errors.
SUBTLE = {
    "taps one too low": (slice(1, None, 2), 48),
    "taps one too high": ALL,
    "causal blocks": LONGER,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damage_is_the_one_finding(damage: str) -> None:
    break_it, name, words = DAMAGE[damage]
    diagnosis = examine(break_it(pair()[1]), SUBTLE.get(damage, FEW))
    assert names(diagnosis) == [name], [check.sentence for check in diagnosis.findings]
    assert words in f"{diagnosis.findings[0].sentence}; {diagnosis.findings[0].advice}"


METHOD = QuantizationMethod.COMPRESSED_TENSORS


def compressed(
    weights: tuple[str, int], activations: tuple[str, int] | None = None
) -> dict[str, Any]:
    """What compressed-tensors writes of weights, and of activations that are quantised too: kind and bits."""
    kind, bits = weights
    group = {"weights": {"type": kind, "num_bits": bits, "group_size": 16 if bits == 4 else None}}
    given: Any = None
    if activations is not None:
        given = {"type": activations[0], "num_bits": activations[1]}
    groups = {"group_0": {**group, "input_activations": given, "targets": ["Linear"]}}
    return {"quant_method": METHOD, "config_groups": groups}


def auto_round(kind: str) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "data_type": kind}


@pytest.mark.parametrize(
    ("named", "quantised", "fits", "words"),
    [
        ("Qwen/Qwen3-8B", None, True, "is not quantised, and the draft names Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", {"load_in_4bit": True}, True, "more may be accepted"),
        ("some/Qwen3-8B-INT4", None, False, "not quantised, and the draft was trained for some/"),
        ("some/Qwen3-8B-FP8", {"load_in_4bit": True}, False, "(bitsandbytes, 4 bits), and the dr"),
        ("some/Qwen3-8B-4bit", {"load_in_4bit": True}, True, "(bitsandbytes, 4 bits), and the dr"),
        ("some/Qwen3-8B-FP8", {"quant_method": "fp8"}, True, "(fp8), and the draft was trained"),
        (
            "some/Qwen3-8B-INT4",
            {"quant_method": "auto-round", "bits": 4},
            True,
            "(auto-round, 4 bi",
        ),
        ("some/Qwen3-8B-NVFP4", auto_round("nv_fp4_with_static_gs"), True, "(auto-round, nvfp4)"),
        ("some/Qwen3-8B-MXFP4", auto_round("mx_fp"), True, "(auto-round, mxfp4)"),
        ("some/Qwen3-8B-INT4", auto_round("nv_fp"), False, "(auto-round, nvfp4)"),
        ("some/Qwen3-8B-INT4", auto_round("another"), None, "(auto-round), and"),
        ("some/Qwen3-8B-W4A16", auto_round("int"), True, "(auto-round, 4 bits"),
        ("some/Qwen3-8B-FP8", {"quant_method": "torchao"}, None, "(torchao), and the draft was tr"),
        (
            "RedHatAI/Qwen3-8B-FP8-dynamic",
            compressed(("float", 8), ("float", 8)),
            True,
            "(compress",
        ),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", compressed(("int", 4)), True, "int4, w4a16"),
        (
            "RedHatAI/Qwen3-8B-quantized.w8a8",
            compressed(("int", 8), ("int", 8)),
            True,
            "int8, w8a8",
        ),
        ("RedHatAI/Qwen3-8B-NVFP4", compressed(("float", 4)), True, "nvfp4"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", compressed(("int", 4)), False, "int4, w4a16"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", {"quant_method": METHOD}, None, "(compressed-tens"),
        ("some/Qwen3-8B-AWQ", compressed(("int", 4)), None, "(compressed-tensors, int4, w4a16"),
        ("some/Qwen3-8B-AWQ", {"load_in_4bit": True}, False, "(bitsandbytes, 4 bits)"),
        (None, None, None, "do not name the target"),
    ],
)
def test_a_targets_precision_is_compared(
    named: str | None, quantised: Any, fits: bool | None, words: str, tmp_path: Path
) -> None:
    draft = copy.deepcopy(pair()[1])
    draft.save_pretrained(tmp_path)
    draft.config.name_or_path = str(tmp_path)
    if named is not None:
        (tmp_path / "README.md").write_text(f"---\nbase_model: {named}\n---\n")
    target = copy.copy(pair()[0])
    target.config = copy.deepcopy(target.config)
    if quantised is not None:
        target.config.quantization_config = {"quant_method": "bitsandbytes", **quantised}
    check = doctor_module._check_precision(target, draft)
    assert words in check.sentence
    assert check.status == {True: "ok", False: "finding", None: "skipped"}[fits]
    assert bool(check.advice) == (fits is False)


def test_a_target_that_torchao_has_quantised_is_seen() -> None:
    class Foreign(torch.nn.Parameter):
        """Stands for what torchao and bitsandbytes put in a weight's place."""

    target = copy.deepcopy(pair()[0])
    assert quantisation_of(target) == ""
    target.lm_head.weight = Foreign(target.lm_head.weight.data)
    assert quantisation_of(target).endswith(".Foreign")


@pytest.mark.parametrize(("longest", "windows"), [(512, []), (513, [512]), (3000, [2048, 512])])
def test_draft_windows_are_tried_on_longer_texts(longest: int, windows: list[int]) -> None:
    examples = [SimpleNamespace(input_ids=torch.zeros(length)) for length in (9, longest)]
    probe: Any = SimpleNamespace(
        draft=pair()[1], target=SimpleNamespace(config=pair()[0].config), examples=examples
    )
    trials = list(doctor_module._window_trials(probe))
    assert [trial.label for trial in trials] == [f"draft_window {window}" for window in windows]
    for trial, window in zip(trials, windows, strict=True):
        assert f"draft.generation_config.draft_window = {window}" in trial.advice
        kinds = {variant(pair()[1], trial.change).config.attention_kind(i) for i in range(3)}
        # The kind that full layers have under `draft_window`.
        assert kinds == {(window, False, True)}


MIXED = f"load_draft(..., layer_types={['full_attention'] * 3}, is_causal=[True, True, False])"


@pytest.mark.parametrize(
    ("is_causal", "advice"),
    [
        ([True, True, False], MIXED),
        ([True] * 3, "'full_attention', and is_causal to True"),
        ([False] * 3, "attention'"),
    ],
)
def test_a_draft_without_its_window_stays_as_causal(is_causal: list[bool], advice: str) -> None:
    """A config without `is_causal` has layers that are causal because they slide."""
    draft = variant(pair()[1], {**SLIDING, "is_causal": is_causal})
    probe: Any = SimpleNamespace(
        draft=draft, examples=[SimpleNamespace(input_ids=torch.zeros(9))], target=None
    )
    (trial,) = doctor_module._window_trials(probe)
    assert trial.change["is_causal"] == is_causal
    assert trial.advice.endswith(advice)


def test_layers_of_two_causalities_are_named_to_load_draft(tmp_path: Path) -> None:
    """No config of others says it for each layer; what is advised can be done."""
    mixed = {**SLIDING, "layer_types": [*["sliding_attention"] * 2, "full_attention"]}
    draft = variant(pair()[1], {**mixed, "is_causal": [True, True, False]})
    probe: Any = SimpleNamespace(
        draft=draft,
        target=find_target(pair()[0]),
        examples=[SimpleNamespace(input_ids=torch.zeros(9))],
        shifted=lambda shift: [shift],
        deepstack_differs=False,
    )
    every = doctor_module._trials(probe, pair()[2])
    trials = [trial for trial in every if trial.check == "causality"]
    assert [trial.advice for trial in trials] == [
        "load the draft with load_draft(..., is_causal=[False, False, True])",
        "set is_causal to False",
        "set is_causal to True",
    ]
    save_draft(draft, tmp_path, "zlab", pair()[0])
    change: dict[str, Any] = {
        "layer_types": ["full_attention"] * 3,
        "is_causal": [True, True, False],
    }
    config = load_draft(tmp_path, **change).config
    assert {"layer_types": config.layer_types, "is_causal": config.is_causal} == change


def test_a_draft_can_have_the_rope_of_a_vision_target() -> None:
    draft = pair()[1]
    axes = {"mrope_section": [8, 4, 4], "mrope_interleaved": True}
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    text = SimpleNamespace(rope_parameters={**rope, **axes})
    probe: Any = SimpleNamespace(draft=draft, target=SimpleNamespace(config=text))
    trials = list(doctor_module._rope_trials(probe))
    assert [trial.label for trial in trials] == ["the target's yarn RoPE"]
    assert variant(draft, trials[0].change).config.rope_parameters == rope


HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
WHOLE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("own", "theirs", "labels"),
    [
        (WHOLE, WHOLE, []),
        (HALF, WHOLE, ["RoPE over whole heads"]),
        (WHOLE, HALF, ["RoPE over 0.5 of each head"]),
        (HALF, {**HALF, "partial_rotary_factor": 0.25}, ["whole heads", "0.25 of each head"]),
        (HALF, YARN, ["RoPE over whole heads"]),
        (YARN, HALF, ["the target's default RoPE"]),
        (WHOLE, {**HALF, "partial_rotary_factor": 0.01}, []),
        (YARN, YARN, []),
        (YARN, {**YARN, "factor": 2.0}, ["the target's yarn RoPE"]),
        (YARN, {**YARN, "factor": 2.0, "rope_theta": 1e6}, ["theta 1e+06", "the target's yarn"]),
        (LLAMA3, {**LLAMA3, "factor": 32.0}, ["the target's llama3 RoPE"]),
    ],
)
def test_what_differs_from_the_targets_rope_is_tried(
    own: dict[str, Any], theirs: dict[str, Any], labels: list[str]
) -> None:
    draft = variant(pair()[1], {"rope_parameters": own})
    text = SimpleNamespace(rope_parameters=theirs)
    probe: Any = SimpleNamespace(draft=draft, target=SimpleNamespace(config=text))
    trials = list(doctor_module._rope_trials(probe))
    assert len(trials) == len(labels)
    for trial, label in zip(trials, labels, strict=True):
        assert label in trial.label
        variant(draft, trial.change)


@pytest.mark.parametrize(("theirs", "status"), [(WHOLE, "ok"), (None, "skipped")])
def test_a_target_without_a_rope_has_none_to_compare(theirs: Any, status: str) -> None:
    text = SimpleNamespace(rope_parameters=theirs)
    probe: Any = SimpleNamespace(draft=pair()[1], target=SimpleNamespace(config=text))
    assert not list(doctor_module._rope_trials(probe))
    check = doctor_module._unchanged(probe, "rope", Measurement((), ()), None)
    assert check.status == status


def test_two_mistakes_are_two_findings() -> None:
    damaged = variant(pair()[1], {"mask_token_id": 1, "is_causal": True})
    assert sorted(names(examine(damaged, LONGER))) == ["causality", "mask_token"]


def test_a_draft_of_another_target_is_named() -> None:
    """The same target in another basis: it writes the same texts, and its states mean something else."""
    target, draft, _ = pair()
    other = copy.deepcopy(target)
    order = torch.randperm(192, generator=torch.Generator().manual_seed(0))
    for name, tensor in other.named_parameters():
        if tensor.dim() == 2 and "o_proj" not in name and "down_proj" not in name:
            tensor.data = tensor.data[:, order]
        elif "head_norm" not in name and tensor.shape[0] == 192 and "q_proj" not in name:
            tensor.data = tensor.data[order]
    ids = torch.arange(40)[None]
    assert torch.allclose(other(ids).logits, target(ids).logits, atol=1e-3)
    assert names(examine(draft, FEW, other)) == ["other_target"]


def test_a_pair_that_does_not_fit_is_named_without_measuring() -> None:
    draft = variant(pair()[1], {"num_target_layers": 24})
    diagnosis = examine(draft, FEW)
    assert names(diagnosis) == ["other_target"]
    assert (
        "expected a draft for 12 layers (the target's depth), got 24"
        in diagnosis.findings[0].sentence
    )
    assert diagnosis.num_prompts == 0


THINKING = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor -%}"
    "{{ '<|im_start|>assistant\n' }}{%- if enable_thinking | default(true) -%}{{ ':' * 12 }}{%- endif -%}"
)


@pytest.mark.parametrize(("default", "expected"), [("true", ["thinking"]), ("false", [])])
def test_the_thinking_mode_that_the_draft_prefers_is_named(
    default: str, expected: list[str]
) -> None:
    """A template whose thinking prefix leads the target away from the texts that the draft knows."""
    target, draft, tokenizer = pair()
    other = copy.deepcopy(tokenizer)
    other.chat_template = THINKING.replace("true", default)
    diagnosis = diagnose(target, draft, other, held_out()[:3], max_new_tokens=32)
    assert [name for name in names(diagnosis) if name == "thinking"] == expected
    check = next(check for check in diagnosis.checks if check.name == "thinking")
    assert check.measured["enable_thinking=False"] > check.measured["enable_thinking=True"]


def test_a_template_that_hurts_the_draft_is_named() -> None:
    """A template that writes noise around prompts which are templated already."""
    target, draft, tokenizer = pair()
    other = copy.deepcopy(tokenizer)
    texts = [
        str(tokenizer.apply_chat_template(list(p), add_generation_prompt=True, tokenize=False))
        for p in held_out()[:3]
    ]
    other.chat_template = "{{ messages[0]['content'] + ':' * 12 }}"
    assert "chat_template" in names(diagnose(target, draft, other, texts, max_new_tokens=32))


def test_vocabulary_that_does_not_fit_is_named() -> None:
    target, draft, tokenizer = pair()
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"<extra{index}>" for index in range(1600 - len(tokenizer))])
    found = diagnose(target, draft, larger, held_out()[:2], max_new_tokens=24)
    assert "vocabulary" in names(found)
    assert "1600 ids" in found.findings[0].sentence


def test_a_gain_counts_only_when_it_is_clear() -> None:
    base = Measurement((4.0, 5.0, 6.0, 5.0), (16, 16, 16, 8))
    assert base.mean == pytest.approx((4 * 16 + 5 * 16 + 6 * 16 + 5 * 8) / 56)
    assert not base.beats(base)
    assert Measurement((4.5, 5.5, 6.5, 5.5), base.weights).beats(base)
    assert not Measurement((4.1, 5.1, 6.1, 5.1), base.weights).beats(base), "below the margin"
    assert not Measurement((9.0, 5.0, 6.0, 5.0), base.weights).beats(base), (
        "one run of anchors is chance"
    )
    assert not Measurement((3.0, 4.0, 5.0, 4.0), base.weights).beats(base)
    assert not Measurement((), ()).beats(Measurement((), ()))
    assert not Measurement((9.0, 9.0), (16, 16)).beats(Measurement((2.0, 2.0), (16, 16))), (
        "too few to tell"
    )


HELD_OUT = ["--prompts", str(TOY / "held_out.jsonl")]


def run_doctor(*arguments: str) -> Result:
    command = ["doctor", "--num-prompts", "3", "--max-new-tokens", "16", *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


def test_the_command_prints_json_alone_and_its_status_is_right(tmp_path: Path) -> None:
    run = run_doctor("--json", *HELD_OUT)
    assert run.exit_code == 0, run.stderr
    assert json.loads(run.stdout)["findings"] == []
    damaged = variant(pair()[1], {"mask_token_id": 1})
    damaged.save_pretrained(tmp_path / "draft")
    run = run_doctor("--draft", str(tmp_path / "draft"), *HELD_OUT)
    assert run.exit_code == 1, run.stderr
    assert "set mask_token_id to 3" in " ".join(run.stdout.split())
    run = run_doctor("--draft", str(tmp_path / "nowhere"), "--json")
    assert (run.exit_code, run.stdout) == (2, "")
    assert "Traceback" not in run.stderr


def test_prompt_files(tmp_path: Path) -> None:
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\ntwo\n")
    assert read_prompts(text) == ["one", "two"]
    rows.write_text(
        '{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}], "answer": "x"}\n'
    )
    assert read_prompts(rows) == ["one", [{"role": "user", "content": "two"}]]
    with pytest.raises(
        ValueError, match=r"expected a file of prompts .* which is none; fix the path"
    ):
        read_prompts(tmp_path / "none.txt")
    for content, message in (
        ("", "got none"),
        ("{", "line 1"),
        ('{"answer": "x"}', "expected messages or prompt"),
    ):
        rows.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_prompts(rows)


def test_without_template_and_prompts_nothing_is_measured() -> None:
    target, draft, tokenizer = pair()
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(
        ValueError, match="expected prompts for a tokenizer without a chat template"
    ):
        diagnose(target, draft, bare)


def test_answers_without_a_second_token_are_refused() -> None:
    """Nothing is guessed of such answers: a draft that nothing is known of was called another target's."""
    target, draft, tokenizer = pair()
    silent = copy.deepcopy(target)
    silent.generation_config.eos_token_id = list(range(target.config.vocab_size))
    with pytest.raises(ValueError, match="expected an answer of at least 2 tokens, got none"):
        diagnose(silent, draft, tokenizer, ["Hello"], max_new_tokens=4)


def test_what_is_no_draft_or_no_list_of_prompts_is_refused() -> None:
    target, draft, tokenizer = pair()
    not_a_draft: Any = target
    with pytest.raises(ValueError, match="expected a DFlashDraftModel as draft"):
        diagnose(target, not_a_draft, tokenizer, ["Hello"])
    message = [{"role": "user", "content": "Hello"}]
    for prompts in ("Hello", message):
        with pytest.raises(ValueError, match="expected a list of prompts"):
            diagnose(target, draft, tokenizer, prompts)


def test_an_empty_prompt_is_measured_or_refused() -> None:
    target, draft, tokenizer = pair()
    diagnosis = diagnose(target, draft, tokenizer, ["", "Hello"], max_new_tokens=8)
    status = {check.name: check.status for check in diagnosis.checks}
    # The template says what there is of it.
    assert status["chat_template"] == "skipped"
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="expected prompts of at least one token"):
        diagnose(target, draft, bare, ["", "Hello"], max_new_tokens=8)


def test_a_compiled_target_is_examined_as_it_was() -> None:
    draft = variant(pair()[1], {"num_target_layers": 24})
    target, _, tokenizer = pair()
    compiled: Any = SimpleNamespace(_orig_mod=target)  # as torch.compile holds it
    assert names(diagnose(compiled, draft, tokenizer, held_out()[:3])) == ["other_target"]
