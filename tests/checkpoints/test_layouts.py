"""Layouts as tables: round trips are the identity; what a layout, or we, cannot express is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, Qwen3Model

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints import FORMATS, detect_format, explain_foreign_draft, make_config
from dflash_hf.drafts import load_draft, save_draft
from tiny import DEPTH, VOCAB, tiny_draft, tiny_target

FULL, SLIDING = "full_attention", "sliding_attention"
TINY: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "block_size": 4,
    "mask_token_id": 47,
    "num_target_layers": 8,
    "target_layer_ids": [0, 5],
}
CONV: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 4}
SELECTOR: dict[str, Any] = {"selector_rank": 3, "selector_top_k": 5}
DFLASH2: dict[str, Any] = {**CONV, **SELECTOR}
MUSE_LIKE: dict[str, Any] = {"raw_input_embeddings": True, "is_causal": False}
ANCHORED: dict[str, Any] = {"layer_types": [SLIDING, FULL], "sliding_window": 7, "window_from_anchor": True}
OWN: dict[str, Any] = {"own_embed_tokens": True, "own_lm_head": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
}

# Configs, and the layouts (besides our own) that can express them.
CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, ["zlab", "speculators"]),
    "sliding means causal": ({"layer_types": [SLIDING, FULL], "sliding_window": 7}, ["zlab"]),
    "all causal": ({"layer_types": [SLIDING, FULL], "sliding_window": 7, "is_causal": True}, ["zlab"]),
    "window, no causality": ({"layer_types": [SLIDING, FULL], "sliding_window": 7, **MUSE_LIKE}, ["zlab", "muse"]),
    "muse-like, full": (MUSE_LIKE, ["zlab", "speculators", "muse", "zlab"]),
    "nothing stated": ({**MUSE_LIKE, "vocab_size": None, "num_target_layers": None}, ["muse"]),
    "yarn": (
        {**MUSE_LIKE, "rope_parameters": YARN, "max_position_embeddings": 256},
        ["zlab", "speculators", "muse", "zlab"],
    ),
    "scales": (
        {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
        ["zlab"],
    ),
    "biases": ({"attention_bias": True}, ["zlab", "speculators"]),
    "other details": (
        {**MUSE_LIKE, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_dropout": 0.1, "initializer_range": 0.1},
        ["zlab", "speculators", "muse", "zlab"],
    ),
    "mixed causality": ({"layer_types": [FULL, FULL], "is_causal": [True, False]}, []),
    "wider target": ({**MUSE_LIKE, "target_hidden_size": 20}, []),
    "dflash 2": ({**MUSE_LIKE, **DFLASH2}, ["zlab"]),
    "convolution alone": (CONV, []),
    "selector alone": (SELECTOR, []),
    "window from the anchor": (ANCHORED, ["speculators"]),
    "window from the anchor, no causality": ({**ANCHORED, "is_causal": False}, ["speculators"]),
    "window from the anchor, all causal": ({**ANCHORED, "is_causal": True}, []),
    "own embedding and head": (OWN, ["speculators"]),
    "own head": ({"own_lm_head": True}, ["speculators"]),
    "reduced vocabulary": ({**ANCHORED, "own_lm_head": True, "draft_vocab_size": 13}, ["speculators"]),
    "from the anchor": ({"sample_from_anchor": True}, ["speculators"]),
    "deepspec": (
        {**OWN, "is_causal": False, "sample_from_anchor": True, "target_layer_ids": [-1, 2, 7]},
        ["deepspec", "speculators", "deepspec"],
    ),
    "embedding tapped": ({"target_layer_ids": [-1, 2]}, ["zlab", "speculators"]),
}


def make_draft(**overrides: Any) -> DFlashDraftModel:
    """A tiny random draft, random also where a fresh one has zeros or the identity.

    Its reduced vocabulary, if it has one, is every third token from 5 on.
    """
    torch.manual_seed(0)
    draft = DFlashDraftModel(DFlashConfig(**{**TINY, **overrides})).eval()
    for name, parameter in draft.named_parameters():
        if "_conv." in name or "selector." in name:
            torch.nn.init.normal_(parameter)
    if draft.d2t is not None:
        draft.d2t.copy_(5 + 2 * torch.arange(draft.d2t.shape[0]))
    return draft


def content(config: DFlashConfig) -> dict[str, Any]:
    """The config without what Transformers notes about files."""
    volatile = {"architectures", "_name_or_path", "transformers_version", "dtype"}
    return {key: value for key, value in config.to_dict().items() if key not in volatile}


def zlab_config(path: Path, **overrides: Any) -> dict[str, Any]:
    """A z-lab folder's `config.json` as a dictionary; given keys replaced, those given as None removed."""
    save_draft(make_draft(), path, "zlab")
    config = json.loads((path / "config.json").read_text()) | overrides
    return {key: value for key, value in config.items() if value is not None or key not in overrides}


def read_zlab(config: dict[str, Any]) -> DFlashConfig:
    """What a z-lab `config.json` means."""
    return make_config(detect_format(config).read_config(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    overrides, expressible = CONFIGS[name]
    first = make_draft(**overrides).to(torch.bfloat16)
    draft = first
    for step, layout in enumerate(["dflash", *(between for other in expressible for between in (other, "dflash"))]):
        folder = tmp_path / f"{step}-{layout}"
        save_draft(draft, folder, layout)  # type: ignore[arg-type]
        assert detect_format(json.loads((folder / "config.json").read_text())).name == layout
        draft = load_draft(folder)
        assert content(draft.config) == content(first.config), layout
        assert draft.state_dict().keys() == first.state_dict().keys()
        assert all(torch.equal(tensor, first.state_dict()[key]) for key, tensor in draft.state_dict().items())
        assert draft.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "layout", "field"),
    [
        ("mixed causality", "zlab", r"is_causal = \[True, False\]"),
        ("wider target", "zlab", "target_hidden_size = 20"),
        ("nothing stated", "zlab", "vocab_size = None .*; num_target_layers = None"),
        ("plain", "muse", "raw_input_embeddings = False"),
        ("all causal", "muse", "is_causal"),
        ("biases", "muse", "attention_bias = True"),
        ("scales", "muse", "input_embedding_scale = 4.0 .*; output_multiplier = 0.5 .*; final_logit_softcapping = 30"),
        ("wider target", "muse", "target_hidden_size = 20"),
        ("dflash 2", "muse", "conv_kernel_size = 2 .*conv_group_size = 4 .*selector_rank = 3 .*selector_top_k = 5"),
        ("convolution alone", "zlab", "selector_rank = selector_top_k = None"),
        ("selector alone", "zlab", "conv_kernel_size = conv_group_size = None"),
        ("dflash 2", "speculators", "conv_kernel_size = 2 .*selector_top_k = 5"),
        ("dflash 2", "deepspec", "conv_kernel_size = 2 .*selector_top_k = 5"),
        *(
            (name, layout, "window_from_anchor = True")
            for name in ["reduced vocabulary"]
            for layout in ("zlab", "muse")
        ),
        ("own embedding and head", "zlab", "own_embed_tokens = True .*; own_lm_head = True"),
        ("own embedding and head", "muse", "own_embed_tokens = True .*; own_lm_head = True"),
        ("reduced vocabulary", "zlab", "own_lm_head = True .*; draft_vocab_size = 13"),
        ("reduced vocabulary", "deepspec", "draft_vocab_size = 13"),
        ("from the anchor", "zlab", "sample_from_anchor = True"),
        ("sliding means causal", "speculators", "sliding_window = 7 from each query"),
        ("window from the anchor, all causal", "speculators", "is_causal"),
        (
            "scales",
            "speculators",
            "input_embedding_scale = 4.0 .*; output_multiplier = 0.5 .*; final_logit_softcapping",
        ),
        ("nothing stated", "speculators", "vocab_size = None"),
        ("wider target", "speculators", "target_hidden_size = 20"),
        ("mixed causality", "speculators", r"is_causal = \[True, False\]"),
        ("plain", "deepspec", "own_embed_tokens = False .*; own_lm_head = False .*; sample_from_anchor = False"),
        ("window from the anchor", "deepspec", "layer_types = .*; is_causal"),
    ],
)
def test_what_a_layout_cannot_express_is_refused(name: str, layout: Any, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=field):
        save_draft(make_draft(**CONFIGS[name][0]), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def test_unknown_layout_is_refused(tmp_path: Path) -> None:
    unknown: Any = "gguf"
    with pytest.raises(ValueError, match=r"expected layout in .*'zlab'.*got 'gguf'"):
        save_draft(make_draft(), tmp_path, unknown)


@pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: layout.name)
def test_weight_table_is_complete(layout: Any) -> None:
    own = {} if layout.has_vocabulary is False else OWN
    reduced = {"draft_vocab_size": 13} if layout.has_vocabulary is None else {}
    second = DFLASH2 if layout.name in ("dflash", "zlab") else {}
    draft = make_draft(attention_bias=layout.name != "muse", **own, **reduced, **second)
    ours = {name.replace(".0.", ".{}.").replace(".1.", ".{}.") for name in draft.state_dict()}
    assert set(layout.weights.values()) == ours
    assert len(set(layout.weights.values())) == len(layout.weights)
    for name in draft.state_dict():
        assert layout.their_name(name).count(".0.") == name.count(".0.")
        assert layout.our_name(layout.their_name(name)) == name


def test_block_size_in_either_place(tmp_path: Path) -> None:
    config = zlab_config(tmp_path)
    assert config["block_size"] == 4
    assert read_zlab(config).block_size == 4
    inside = {**config, "dflash_config": {**config["dflash_config"], "block_size": 4}}
    assert read_zlab(inside).block_size == 4
    del inside["block_size"]
    assert read_zlab(inside).block_size == 4
    assert read_zlab({**inside, "dflash_config": config["dflash_config"]}).block_size == 16
    with pytest.raises(ValueError, match=r"expected one value, got .*dflash_config.block_size': 8, 'block_size': 4"):
        read_zlab({**config, "dflash_config": {**config["dflash_config"], "block_size": 8}})


def test_fields_of_the_section_may_stand_at_the_top(tmp_path: Path) -> None:
    config = zlab_config(tmp_path)
    section = config.pop("dflash_config")
    assert content(read_zlab({**config, **section, "dflash_config": {}})) == content(make_draft().config)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Model-Optimizer: all layers "full", yet windowed, and bidirectional unless it says otherwise.
        (
            {"dflash_config": {"use_swa": True, "swa_window_size": 9, "causal": False}, "sliding_window": 9},
            {"layer_types": [SLIDING] * 2, "sliding_window": 9, "is_causal": [False] * 2},
        ),
        (
            {"dflash_config": {"use_swa": True}, "sliding_window": 9, "is_causal": None},
            {"layer_types": [SLIDING] * 2, "sliding_window": 9, "is_causal": [False] * 2},
        ),
        ({"dflash_config": {"causal": True}, "is_causal": None}, {"is_causal": [True] * 2}),
        # Qwen3Config's rule where layer_types is absent.
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
            | {"is_causal": None},
            {"layer_types": [FULL, SLIDING], "sliding_window": 9, "is_causal": [False, True]},
        ),
        ({"layer_types": None, "use_sliding_window": False, "sliding_window": 9}, {"layer_types": [FULL] * 2}),
        # Transformers 4 and 5 spell RoPE differently; an image RoPE of the target does nothing in a draft.
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
        ),
        (
            {"rope_theta": None, "rope_scaling": None}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [1, 1, 1]}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        ),
        # SpecForge's config for Kimi K2.7 says the mask twice and the RoPE's type twice.
        (
            {"mask_token_id": 47, "rope_scaling": YARN | {"type": "yarn", "mscale": 1.0}, "rope_theta": 5e5},
            {"rope_parameters": YARN | {"mscale": 1.0}},
        ),
        # Taps by z-lab's rule where none are given.
        ({"dflash_config": {"target_layer_ids": None}}, {"target_layer_ids": [1, 5]}),
        ({"head_dim": None}, {"head_dim": 128}),
        ({"dtype": "bfloat16", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "eos_token_id": 3}, {}),
        ({"dflash_config": {"attention_sink_bias": False, "projector_type": "dflash"}, "logit_scale": 1.0}, {}),
        # DFlash 2 is recognised by its fields, in either place, whatever the architecture is called.
        ({"dflash_config": {**CONV, **SELECTOR}, "architectures": ["DFlash2DraftModel"]}, DFLASH2),
        ({**CONV, "dflash_config": SELECTOR}, DFLASH2),
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
        ({"dflash_config": {"conv_kernel_size": 2}}, r"conv_kernel_size and conv_group_size, got \(2, None\)"),
        ({"selector_rank": 256}, r"selector_rank and selector_top_k, got \(256, None\)"),
        ({**SELECTOR, "dflash_config": {"selector_rank": 4}}, "expected one value, got .*selector_rank': 4"),
        ({**CONV, "conv_group_size": 3}, "conv_group_size that divides hidden_size = 16, got 3"),
        ({**CONV, "conv_kernel_size": 0}, "conv_kernel_size from 1 to .*, got 0"),
        ({**SELECTOR, "selector_rank": 0}, "selector_rank from 1 to .*, got 0"),
        ({**SELECTOR, "selector_top_k": 49}, "selector_top_k up to 48, got 49"),
        ({**SELECTOR, "vocab_size": None}, "vocab_size beside selector_top_k, got None"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias absent or in .False,"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type .* got 'domino'"),
        ({"dflash_config": {"markov_rank": 64}}, "markov_rank"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"dflash_config": {"aaa": 1}, "bbb": 2}, r"got also \['bbb', 'dflash_config.aaa'\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"got also \['quantization_config'\]"),
        ({"draft_vocab_size": 32}, "draft_vocab_size 32"),
        ({"hidden_size": None}, "expected hidden_size in the checkpoint's config.json"),
        ({"dflash_config": {"mask_token_id": None}}, "expected dflash_config.mask_token_id or mask_token_id"),
        ({"dflash_config": {"causal": True}}, "expected one value, got .*is_causal': False"),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 9}, "expected use_sliding_window true or absent"),
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": True}, "a positive sliding_window"),
        ({"layer_types": [FULL]}, "layer_types with 2 entries"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type in .*got 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 3.0, "factor": 2.0}}, "expected one rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear"}}, "expected one rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}, "wobble"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor .0.25"),
        ({"dflash_config": {"mask_token_id": "x"}}, "mask_token_id"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"dflash_config": {"mask_token_id": 48}}, "mask_token_id in"),
        ({"dflash_config": {"target_layer_ids": [0, 8]}}, "target_layer_ids below num_target_layers = 8"),
    ],
)
def test_zlab_config_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    section = change.pop("dflash_config", {})
    config = zlab_config(tmp_path, **change)
    config["dflash_config"].update(section)
    with pytest.raises(ValueError, match=message):
        read_zlab(config)


def test_dflash2_is_stored_under_zlabs_names(tmp_path: Path) -> None:
    """The codebooks without `.weight`, and the architecture that tells vLLM which class to take."""
    save_draft(make_draft(**DFLASH2), tmp_path / "two", "zlab")
    save_draft(make_draft(), tmp_path / "one", "zlab")
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("one", "two")]
    convs = {f"layers.{i}.{place}_conv" for i in range(2) for place in ("attention", "mlp")}
    assert names[1] - names[0] == {
        "candidate_selector.hidden_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        *(f"{conv}.{name}" for conv in convs for name in ("base_kernel", "kernel_projection.weight")),
    }
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("one", "two")]
    assert [config["architectures"] for config in configs] == [["DFlashDraftModel"], ["DFlash2DraftModel"]]
    assert DFLASH2.items() <= configs[1]["dflash_config"].items()
    assert not DFLASH2.keys() & configs[0]["dflash_config"].keys()


@pytest.mark.parametrize(("stored", "said"), [(DFLASH2, {}), ({}, DFLASH2)])
def test_weights_of_the_other_generation_are_refused(
    stored: dict[str, Any], said: dict[str, Any], tmp_path: Path
) -> None:
    save_draft(make_draft(**stored), tmp_path, "zlab")
    config = json.loads((tmp_path / "config.json").read_text())
    for name in DFLASH2:
        config["dflash_config"].pop(name, None)
    config["dflash_config"].update(said)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"(unknown|missing) candidate_selector\.successor_codebook"):
        load_draft(tmp_path)


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
        ({"sample_from_anchor": True, "block_size": 1}, {}, [], {"sample_from_anchor": True, "block_size": 1}),
        (
            {"sliding_window_non_causal": False},
            {"layer_types": [SLIDING, FULL], "sliding_window": 3, "use_sliding_window": True},
            [],
            {"layer_types": [SLIDING, FULL], "sliding_window": 3, "window_from_anchor": True},
        ),
        (
            {"sliding_window_non_causal": True},
            {"layer_types": None, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
            [],
            {
                "layer_types": [FULL, SLIDING],
                "sliding_window": 3,
                "window_from_anchor": True,
                "is_causal": False,
            },
        ),
        ({}, {"model_type": "llama", "mlp_bias": False, "pretraining_tp": 1, "head_dim": None}, [], {"head_dim": 4}),
        ({}, {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None}, [], {"rope_theta": 5e5}),
        ({"architectures": ["DFlashDraftModel"], "speculators_version": "0.4.0", "auto_map": {"": "x.Y"}}, {}, [], {}),
    ],
)
def test_speculators_config(
    change: dict[str, Any], inner: dict[str, Any], weights: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = saved_config(tmp_path, "speculators", raw_input_embeddings=True)
    config = {**config, **change, "transformer_layer_config": {**config["transformer_layer_config"], **inner}}
    wanted: dict[str, Any] = {**TINY, "is_causal": None, "raw_input_embeddings": True, **expected}
    if theta := wanted.pop("rope_theta", None):
        wanted["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    assert content(read(config, *weights)) == content(DFlashConfig(**wanted))


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("speculators", {"markov_rank": 64, "aaa": 1}, r"layout 'speculators', got also \['aaa', 'markov_rank'\]"),
        ("speculators", {"transformer_layer_config.bbb": 1}, r"got also \['transformer_layer_config.bbb'\]"),
        ("speculators", {"transformer_layer_config.model_type": "qwen3_next"}, "model_type in .*got 'qwen3_next'"),
        ("speculators", {"speculators_config": {"algorithm": "dflash2"}}, "algorithm 'dflash', got 'dflash2'"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, "expected aux_hidden_state_layer_ids in the"),
        ("speculators", {"aux_hidden_state_layer_ids": [1, -1]}, "aux_hidden_state_layer_ids, integers from 0"),
        ("speculators", {"draft_vocab_size": 49}, "draft_vocab_size below vocab_size = 48"),
        ("speculators", {"draft_vocab_size": None}, "draft_vocab_size below vocab_size = 48, .*got 32000"),
        ("speculators", {"sliding_window_non_causal": "no"}, "sliding_window_non_causal of type bool"),
        ("speculators", {"transformer_layer_config.num_hidden_layers": 10**12}, "num_hidden_layers from 1 to 1024"),
        ("speculators", {"mask_token_id": 48}, "mask_token_id in"),
        ("deepspec", {"markov_rank": 256}, "markov_rank absent or in .0,. .* got 256"),
        ("deepspec", {"enable_confidence_head": True}, "enable_confidence_head absent or in .False,"),
        ("deepspec", {"model_type": "gemma4_text"}, "model_type 'qwen3' beside markov_rank, got 'gemma4_text'"),
        ("deepspec", {"layer_types": [SLIDING, FULL], "sliding_window": 4}, "layer_types all full_attention"),
        ("deepspec", {"target_layer_ids": [-2, 1]}, "all >= -1"),
        ("deepspec", {"bbb": 1}, r"layout 'deepspec', got also \['bbb'\]"),
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


def test_speculators_maps_are_derived(tmp_path: Path) -> None:
    save_draft(make_draft(own_lm_head=True, draft_vocab_size=13), tmp_path, "speculators")
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["lm_head.weight"].shape == (13, 16)
    assert weights["d2t"].dtype == torch.int64
    assert (weights["d2t"] + torch.arange(13)).tolist() == list(range(5, 44, 3))
    assert weights["t2d"].dtype == torch.bool
    assert weights["t2d"].nonzero()[:, 0].tolist() == list(range(5, 44, 3))
    assert "embed_tokens.weight" not in weights


def test_what_a_target_completes(tmp_path: Path) -> None:
    """Vocabulary and depth, copies of embedding and head, the name; and copies that a layout has no place for go."""
    target = tiny_target("qwen3")
    bare = tiny_draft(target, vocab_size=None, num_target_layers=None, sliding_window=None, layer_types=None)
    with pytest.raises(ValueError, match=r"vocab_size = None .*; num_target_layers = None"):
        save_draft(bare, tmp_path / "zlab", "zlab")
    save_draft(bare, tmp_path / "zlab", "zlab", target)
    completed = load_draft(tmp_path / "zlab").config
    assert (completed.vocab_size, completed.num_target_layers) == (VOCAB, DEPTH)
    assert (bare.config.vocab_size, bare.config.num_target_layers) == (None, None)

    target.config._name_or_path = "some/target"
    save_draft(bare, tmp_path / "speculators", "speculators", target)
    verifier = json.loads((tmp_path / "speculators" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}

    anchored = tiny_draft(target, sliding_window=None, layer_types=None, sample_from_anchor=True)
    save_draft(anchored, tmp_path / "deepspec", "deepspec", target)
    draft = load_draft(tmp_path / "deepspec")
    assert torch.equal(draft.get_submodule("embed_tokens").weight, target.get_input_embeddings().weight)
    assert torch.equal(draft.get_submodule("lm_head").weight, target.get_output_embeddings().weight)
    assert torch.equal(draft.fc.weight, anchored.fc.weight)

    draft.config.sample_from_anchor = False
    save_draft(draft, tmp_path / "again", "zlab", target)
    back = load_draft(tmp_path / "again")
    assert set(back.state_dict()) == set(anchored.state_dict())
    draft.get_submodule("lm_head").weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="got own_lm_head = True"):
        save_draft(draft, tmp_path / "changed", "zlab", target)
    assert not (tmp_path / "changed").exists()


def test_dflash_config_reads_only_its_own_files(tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path, "zlab")
    with pytest.raises(ValueError, match="expected model_type 'dflash', got 'qwen3'"):
        DFlashConfig.from_pretrained(tmp_path)


def test_auto_classes_load_our_layout(tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DFlashConfig)
    draft = AutoModel.from_pretrained(tmp_path)
    assert isinstance(draft, DFlashDraftModel)
    assert explain_foreign_draft(draft) is None


def test_a_zlab_checkpoint_loaded_by_auto_model_is_explained(tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path, "zlab")
    wrong = AutoModel.from_pretrained(tmp_path)
    assert isinstance(wrong, Qwen3Model)
    sentence = explain_foreign_draft(wrong)
    assert sentence is not None
    assert "got a Qwen3Model whose config has a section dflash_config" in sentence
    assert f"DFlashDraftModel.from_pretrained('{tmp_path}')" in sentence
    assert explain_foreign_draft(object()) is None
