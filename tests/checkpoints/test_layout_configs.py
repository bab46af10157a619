"""What a published `config.json` means in each layout; what contradicts itself, or we cannot express, is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_hf import DFlashConfig
from dflash_hf.checkpoints.drafts import save_draft
from dflash_hf.checkpoints.formats import detect_format
from dflash_hf.checkpoints.mapping import make_config
from helpers.layouts import (
    CONFIGS,
    CONV,
    DFLASH2,
    DSPARK,
    FULL,
    OWN,
    SELECTOR,
    SLIDING,
    TINY,
    YARN,
    content,
    make_draft,
)


def zlab_config(path: Path, **overrides: Any) -> dict[str, Any]:
    """A z-lab folder's `config.json` as a dictionary; given keys replaced, those given as None removed."""
    save_draft(make_draft(), path, "zlab")
    config = json.loads((path / "config.json").read_text()) | overrides
    return {
        key: value for key, value in config.items() if value is not None or key not in overrides
    }


def read_zlab(config: dict[str, Any]) -> DFlashConfig:
    """What a z-lab `config.json` means."""
    return make_config(detect_format(config).read_config(config))


def test_block_size_in_either_place(tmp_path: Path) -> None:
    config = zlab_config(tmp_path)
    assert config["block_size"] == 4
    assert read_zlab(config).block_size == 4
    inside = {**config, "dflash_config": {**config["dflash_config"], "block_size": 4}}
    assert read_zlab(inside).block_size == 4
    del inside["block_size"]
    assert read_zlab(inside).block_size == 4
    assert read_zlab({**inside, "dflash_config": config["dflash_config"]}).block_size == 16
    with pytest.raises(
        ValueError,
        match=r"expected one value, got dflash_config.block_size = 8 beside block_size = 4",
    ):
        read_zlab({**config, "dflash_config": {**config["dflash_config"], "block_size": 8}})


def test_fields_of_the_section_may_stand_at_the_top(tmp_path: Path) -> None:
    config = zlab_config(tmp_path)
    section = config.pop("dflash_config")
    assert content(read_zlab({**config, **section, "dflash_config": {}})) == content(
        make_draft().config
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Model-Optimizer: all layers "full", yet windowed, and bidirectional unless it says otherwise.
        (
            {
                "dflash_config": {"use_swa": True, "swa_window_size": 9, "causal": False},
                "sliding_window": 9,
            },
            {"layer_types": [SLIDING] * 2, "sliding_window": 9, "is_causal": [False] * 2},
        ),
        (
            {"dflash_config": {"use_swa": True}, "sliding_window": 9, "is_causal": None},
            {"layer_types": [SLIDING] * 2, "sliding_window": 9, "is_causal": [False] * 2},
        ),
        ({"dflash_config": {"causal": True}, "is_causal": None}, {"is_causal": [True] * 2}),
        # Qwen3Config's rule where layer_types is absent.
        (
            {
                "layer_types": None,
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
            }
            | {"is_causal": None},
            {"layer_types": [FULL, SLIDING], "sliding_window": 9, "is_causal": [False, True]},
        ),
        (
            {"layer_types": None, "use_sliding_window": False, "sliding_window": 9},
            {"layer_types": [FULL] * 2},
        ),
        # Transformers 4 and 5 spell RoPE differently; an image RoPE of the target does nothing in a draft.
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
        ),
        (
            {"rope_theta": None, "rope_scaling": None}
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "mrope_section": [1, 1, 1],
                }
            },
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        ),
        # SpecForge's config for Kimi K2.7 says the mask twice and the RoPE's type twice.
        (
            {
                "mask_token_id": 47,
                "rope_scaling": YARN | {"type": "yarn", "mscale": 1.0},
                "rope_theta": 5e5,
            },
            {"rope_parameters": YARN | {"mscale": 1.0}},
        ),
        # Taps by z-lab's rule where none are given.
        ({"dflash_config": {"target_layer_ids": None}}, {"target_layer_ids": [1, 5]}),
        ({"head_dim": None}, {"head_dim": 128}),
        (
            {
                "dtype": "bfloat16",
                "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
                "eos_token_id": 3,
            },
            {},
        ),
        (
            {
                "dflash_config": {"attention_sink_bias": False, "projector_type": "dflash"},
                "logit_scale": 1.0,
            },
            {},
        ),
        # DFlash 2 is recognised by its fields, in either place, whatever the architecture is called.
        ({"dflash_config": {**CONV, **SELECTOR}, "architectures": ["DFlash2DraftModel"]}, DFLASH2),
        ({**CONV, "dflash_config": SELECTOR}, DFLASH2),
        # SpecForge's DSpark: the anchor's slot proposes, unless a key says otherwise.
        (
            {
                "architectures": ["DSparkDraftModel"],
                "markov_rank": 3,
                "markov_head_type": "vanilla",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
                "dflash_config": {"markov_rank": 3, "projector_type": "dspark"},
            },
            {**DSPARK, "sample_from_anchor": True},
        ),
        # Model-Optimizer's.
        (
            {
                "dflash_config": {
                    "markov_rank": 3,
                    "markov_head_type": "vanilla",
                    "projector_type": "dspark",
                    "shift_label": True,
                    "use_confidence_head": True,
                }
            },
            {**DSPARK, "sample_from_anchor": True},
        ),
        ({"markov_rank": 3, "dspark_bonus_anchor": True}, DSPARK),
        ({"dspark_markov_rank": 3, "dflash_config": {"sample_from_anchor": False}}, DSPARK),
        # No head at all.
        ({"markov_rank": 0, "dflash_config": {"shift_label": False}}, {}),
    ],
)
def test_zlab_config(change: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    section = change.pop("dflash_config", {})
    config = zlab_config(tmp_path, **change)
    config["dflash_config"].update(section)
    assert content(read_zlab(config)) == content(DFlashConfig(**{**TINY, **expected}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dflash_config": {"conv_kernel_size": 2}},
            r"conv_kernel_size and conv_group_size, got \(2, None\)",
        ),
        ({"selector_rank": 256}, r"selector_rank and selector_top_k, got \(256, None\)"),
        (
            {**SELECTOR, "dflash_config": {"selector_rank": 4}},
            "expected one value, got .*selector_rank = 4 beside selector_rank = 3",
        ),
        ({**CONV, "conv_group_size": 3}, "conv_group_size that divides hidden_size = 16, got 3"),
        ({**CONV, "conv_kernel_size": 0}, "conv_kernel_size from 1 to .*, got 0"),
        ({**SELECTOR, "selector_rank": 0}, "selector_rank from 1 to .*, got 0"),
        ({**SELECTOR, "selector_top_k": 49}, "selector_top_k up to 48, got 49"),
        ({**SELECTOR, "vocab_size": None}, "vocab_size beside selector_top_k, got None"),
        (
            {"dflash_config": {"attention_sink_bias": True}, "attention_sink_bias": False},
            "attention_sink_bias = True beside attention_sink_bias = False",
        ),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type .* got 'domino'"),
        (
            {"dflash_config": {"markov_rank": 64}, "markov_rank": 32},
            "got dflash_config.markov_rank = 64 beside markov_rank = 32",
        ),
        (
            {"dflash_config": {"markov_rank": 64}, "markov_head_type": "rnn"},
            "markov_head_type .*'vanilla' in .*, got 'rnn'",
        ),
        ({"markov_rank": 64, "vocab_size": None}, "vocab_size beside markov_rank, got None"),
        ({**SELECTOR, "markov_rank": 64}, "no selector_rank beside markov_rank, got 3"),
        ({"projector_type": "dspark"}, "projector_type in .'dflash',.*, got 'dspark'"),
        (
            {"sample_from_anchor": True},
            "a markov_rank where the anchor.s slot proposes, got sample_from",
        ),
        (
            {"markov_rank": 64, "sample_from_anchor": True, "dspark_bonus_anchor": True},
            "got sample_from_anchor = True beside not dspark_bonus_anchor = False",
        ),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"dflash_config": {"aaa": 1}, "bbb": 2}, r"got also \['bbb', 'dflash_config.aaa'\]"),
        ({"quantization_config": {"quant_method": "gptq"}}, "or 'fp8' in .*, got 'gptq'"),
        ({"draft_vocab_size": 32}, "draft_vocab_size 32"),
        ({"hidden_size": None}, "expected hidden_size in the checkpoint's config.json"),
        (
            {"dflash_config": {"mask_token_id": None}},
            "expected dflash_config.mask_token_id or mask_token_id",
        ),
        (
            {"dflash_config": {"causal": True}},
            "got is_causal = False beside dflash_config.causal = True",
        ),
        (
            {"layer_types": [SLIDING, FULL], "sliding_window": 9},
            "expected use_sliding_window true or absent",
        ),
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": True}, "a positive sliding_window"),
        ({"layer_types": [FULL]}, "layer_types with 2 entries"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type in .*got 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "rope_theta": 3.0, "factor": 2.0}},
            "rope_theta = 1000000.0 beside rope_scaling.rope_theta = 3.0",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "linear"}},
            "rope_scaling.rope_type = 'yarn' beside rope_scaling.type = 'linear'",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}, "wobble"),
        ({"partial_rotary_factor": 0.25}, "an even number of channels out of 6, got 1"),
        ({"dflash_config": {"mask_token_id": "x"}}, "mask_token_id"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"dflash_config": {"mask_token_id": 48}}, "mask_token_id in"),
        (
            {"dflash_config": {"target_layer_ids": [0, 8]}},
            "target_layer_ids below num_target_layers = 8",
        ),
    ],
)
def test_zlab_config_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    section = change.pop("dflash_config", {})
    config = zlab_config(tmp_path, **change)
    config["dflash_config"].update(section)
    with pytest.raises(ValueError, match=message):
        read_zlab(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "hidden_size": 16},
        {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]},
        {"speculators_model_type": "eagle3", "transformer_layer_config": {}},
        {"markov_rank": 0, "architectures": ["Qwen3DSparkModel"]},
        {"architectures": ["DFlashDraftModel"], "_name_or_path": "z-lab/Qwen3-8B-DFlash-b16"},
    ],
)
def test_other_configs_are_not_taken_for_drafts(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a DFlash draft"):
        detect_format(config)


def read(config: dict[str, Any], *weights: str) -> DFlashConfig:
    """What a `config.json` means beside weights of these names."""
    return make_config(detect_format(config).read_config(config, frozenset(weights)))


def saved_config(path: Path, layout: Any, **overrides: Any) -> dict[str, Any]:
    """A folder's `config.json` in a layout as a dictionary."""
    save_draft(make_draft(**overrides), path, layout)
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "inner", "weights", "expected"),
    [
        ({"aux_hidden_state_layer_ids": [0, 3]}, {}, [], {"target_layer_ids": [-1, 2]}),
        ({}, {}, ["embed_tokens.weight"], {"own_embed_tokens": True}),
        ({}, {}, ["embed_tokens.weight", "lm_head.weight"], OWN),
        ({"draft_vocab_size": 9}, {}, [], {"own_lm_head": True, "draft_vocab_size": 9}),
        (
            {"sample_from_anchor": True, "block_size": 1},
            {},
            [],
            {"sample_from_anchor": True, "block_size": 1},
        ),
        (
            {"sliding_window_non_causal": False},
            {"layer_types": [SLIDING, FULL], "sliding_window": 3, "use_sliding_window": True},
            [],
            {"layer_types": [SLIDING, FULL], "sliding_window": 3, "window_from_anchor": True},
        ),
        (
            {"sliding_window_non_causal": True},
            {
                "layer_types": None,
                "sliding_window": 3,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            [],
            {
                "layer_types": [FULL, SLIDING],
                "sliding_window": 3,
                "window_from_anchor": True,
                "is_causal": False,
            },
        ),
        (
            {},
            {"model_type": "llama", "mlp_bias": False, "pretraining_tp": 1, "head_dim": None},
            [],
            {"head_dim": 4},
        ),
        (
            {
                "speculators_model_type": "dspark",
                "speculators_config": {"algorithm": "dspark"},
                "sample_from_anchor": True,
                "markov_rank": 3,
                "markov_head_type": "vanilla",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
            {},
            [],
            {**DSPARK, "sample_from_anchor": True},
        ),
        # Written before speculators' configs said which slot proposes first: the anchor's did not.
        (
            {
                "speculators_model_type": "dspark",
                "speculators_config": {"algorithm": "dspark"},
                "sample_from_anchor": None,
            },
            {},
            [],
            {"markov_rank": 256},
        ),
        (
            {},
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None},
            [],
            {"rope_theta": 5e5},
        ),
        (
            {
                "architectures": ["DFlashDraftModel"],
                "speculators_version": "0.4.0",
                "auto_map": {"": "x.Y"},
            },
            {},
            [],
            {},
        ),
    ],
)
def test_speculators_config(
    change: dict[str, Any],
    inner: dict[str, Any],
    weights: list[str],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = saved_config(tmp_path, "speculators", raw_input_embeddings=True)
    config = {
        **config,
        **change,
        "transformer_layer_config": {**config["transformer_layer_config"], **inner},
    }
    wanted: dict[str, Any] = {**TINY, "is_causal": None, "raw_input_embeddings": True, **expected}
    if theta := wanted.pop("rope_theta", None):
        wanted["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    assert content(read(config, *weights)) == content(DFlashConfig(**wanted))


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            "speculators",
            {"markov_rank": 64, "aaa": 1},
            r"format 'speculators', got also \['aaa', 'markov_rank'\]",
        ),
        (
            "speculators",
            {"transformer_layer_config.bbb": 1},
            r"got also \['transformer_layer_config.bbb'\]",
        ),
        (
            "speculators",
            {"transformer_layer_config.model_type": "qwen3_next"},
            "model_type in .*got 'qwen3_next'",
        ),
        (
            "speculators",
            {"speculators_config": {"algorithm": "dflash2"}},
            "algorithm 'dflash', got 'dflash2'",
        ),
        (
            "speculators",
            {"aux_hidden_state_layer_ids": None},
            "expected aux_hidden_state_layer_ids in the",
        ),
        (
            "speculators",
            {"aux_hidden_state_layer_ids": [1, -1]},
            "aux_hidden_state_layer_ids, integers from 0",
        ),
        ("speculators", {"draft_vocab_size": 49}, "draft_vocab_size below vocab_size = 48"),
        (
            "speculators",
            {"draft_vocab_size": None},
            "draft_vocab_size below vocab_size = 48, .*got 32000",
        ),
        (
            "speculators",
            {"sliding_window_non_causal": "no"},
            "sliding_window_non_causal of type bool",
        ),
        (
            "speculators",
            {"transformer_layer_config.num_hidden_layers": 10**12},
            "num_hidden_layers from 1 to 1024",
        ),
        ("speculators", {"mask_token_id": 48}, "mask_token_id in"),
        (
            "deepspec",
            {"markov_rank": 256, "markov_head_type": "gated"},
            "markov_head_type 'vanilla' in .*, got 'gated'; .*here they are not supported",
        ),
        ("deepspec", {"markov_rank": -1}, "markov_rank from 1 to .*, got -1"),
        (
            "speculators",
            {"speculators_model_type": "dspark"},
            "speculators_config.algorithm 'dspark', got 'dflash'",
        ),
        (
            "speculators",
            {
                "speculators_model_type": "dspark",
                "speculators_config": {"algorithm": "dspark"},
                "markov_head_type": "rnn",
            },
            "markov_head_type 'vanilla' in .*, got 'rnn'; .*here they are not supported",
        ),
        (
            "deepspec",
            {"model_type": "llama"},
            "model_type 'qwen3' beside markov_rank, got 'llama'",
        ),
        (
            "deepspec",
            {"layer_types": [SLIDING, FULL], "sliding_window": 4},
            "layer_types all full_attention",
        ),
        ("deepspec", {"target_layer_ids": [-2, 1]}, "all >= -1"),
        ("deepspec", {"bbb": 1}, r"format 'deepspec', got also \['bbb'\]"),
    ],
)
def test_speculators_and_deepspec_configs_are_refused(
    layout: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = saved_config(tmp_path, layout, **CONFIGS["deepspec"][0])
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = value
    with pytest.raises(ValueError, match=message):
        read(config, "embed_tokens.weight", "lm_head.weight")
