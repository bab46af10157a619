"""What other projects write into a `config.json`, key by key: read as they read it, or refused by the key's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.drafts import inspect_draft, load_draft, save_draft
from dflash_hf.checkpoints.formats import detect_format
from dflash_hf.checkpoints.mapping import make_config
from dflash_hf.pair.loading import load_target
from helpers.layouts import CONFIGS, FULL, SLIDING, TINY, YARN, content, make_draft
from helpers.published_drafts import inputs_of
from tiny import draft_config, prompts, tiny_target

# A format, what of `CONFIGS` it can express, and the section of its decoder.
FORMATS = {
    "zlab": ("plain", ""),
    "speculators": ("muse-like, full", "transformer_layer_config"),
    "deepspec": ("deepspec", ""),
    "muse": ("muse-like, full", ""),
}
THETA = {"rope_theta": YARN["rope_theta"]}
WITHOUT_THETA = {name: value for name, value in YARN.items() if name != "rope_theta"}
OLD_NAME = {**WITHOUT_THETA, "type": "yarn"}
del OLD_NAME["rope_type"]


def saved(path: Path, layout: Any = "zlab", **overrides: Any) -> dict[str, Any]:
    """The `config.json` of a tiny draft in a format."""
    save_draft(make_draft(**overrides), path, layout)
    return json.loads((path / "config.json").read_text())


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with other keys; "a.b" is b in the section a."""
    out = json.loads(json.dumps(config))
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        place = out
        if section:
            place = out[section]
        place[name] = value
    return out


def read(config: dict[str, Any], *weights: str) -> DFlashConfig:
    """What a config means beside weights of these names."""
    return make_config(detect_format(config).read_config(config, frozenset(weights)))


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Changes keys of a folder's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), changes)))


@torch.no_grad()
def block_states(draft: DFlashDraftModel) -> torch.Tensor:
    """What a draft computes of a block of random embeddings behind random states."""
    return draft(**inputs_of(draft)).last_hidden_state


# JetSpec: z-lab's class and keys, and one that makes all layers causal inside the block.


@pytest.mark.parametrize("place", ["dflash_config.causal_head", "causal_head"])
def test_jetspec_means_causal_on_every_layer(place: str, tmp_path: Path) -> None:
    save_draft(make_draft(is_causal=True), tmp_path / "ours", "zlab")
    save_draft(make_draft(), tmp_path / "jetspec", "zlab")
    rewrite(tmp_path / "jetspec", {place: True, "is_causal": None})
    ours = load_draft(tmp_path / "ours")
    jetspec = load_draft(tmp_path / "jetspec")
    assert jetspec.config.is_causal == [True, True]
    assert torch.equal(block_states(jetspec), block_states(ours))
    assert not torch.equal(block_states(jetspec), block_states(make_draft()))


def test_a_head_that_is_not_causal_is_bidirectional(tmp_path: Path) -> None:
    config = saved(tmp_path, layer_types=[SLIDING, FULL], sliding_window=5)
    said = changed(config, {"dflash_config.causal_head": False, "is_causal": None})
    assert read(said).is_causal == [False, False]


def test_jetspecs_adapter_is_refused_by_name(tmp_path: Path) -> None:
    config = changed(saved(tmp_path), {"dflash_config.causal_head": True, "is_causal": None})
    config["dflash_config"]["target_hidden_size"] = 20
    with pytest.raises(ValueError, match=r"'hidden_dim_adapter.proj.weight'.*adapter of JetSpec"):
        read(config, "fc.weight", "hidden_dim_adapter.proj.weight")
    save_file(
        {
            **load_file(tmp_path / "model.safetensors"),
            "hidden_dim_adapter.proj.weight": torch.ones(16, 20),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="adapter of JetSpec"):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"is_causal": False, "dflash_config.causal": True},
            r"is_causal = False beside dflash_config.causal = True; .*NeMo's JetSpec recipe",
        ),
        (
            {"is_causal": True, "dflash_config.causal": False},
            r"is_causal = True beside dflash_config.causal = False",
        ),
        (
            {"is_causal": True, "dflash_config.causal_head": False},
            r"is_causal = True beside dflash_config.causal_head = False",
        ),
        (
            {"is_causal": False, "dflash_config.causal_head": True},
            r"is_causal = False beside dflash_config.causal_head = True",
        ),
    ],
)
def test_two_causalities_are_refused_by_their_keys(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        read(changed(saved(tmp_path), changes))


# Both schemas of RoPE: `rope_parameters` of Transformers 5, `rope_theta` and `rope_scaling` of Transformers 4.


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("theta", [THETA, {}], ids=["theta twice", "theta once"])
@pytest.mark.parametrize(
    "scaling",
    [
        WITHOUT_THETA,
        OLD_NAME,
        {**WITHOUT_THETA, "type": "yarn"},
        {**WITHOUT_THETA, **THETA},
        {**WITHOUT_THETA, "wobble": None},
        {},
    ],
    ids=["without theta", "old name", "both names", "with theta", "a null", "empty"],
)
def test_both_schemas_of_rope_mean_what_one_does(
    layout: str, theta: dict[str, Any], scaling: dict[str, Any], tmp_path: Path
) -> None:
    name, section = FORMATS[layout]
    overrides = {**CONFIGS[name][0], "rope_parameters": YARN, "max_position_embeddings": 256}
    save_draft(make_draft(**overrides), tmp_path, layout)  # type: ignore[arg-type]
    alone = load_draft(tmp_path)
    keys = {"rope_parameters": YARN, "rope_scaling": scaling, **theta}
    prefix = f"{section}." * bool(section)
    rewrite(tmp_path, {prefix + key: value for key, value in keys.items()})
    both = load_draft(tmp_path)
    assert both.config.rope_parameters == alone.config.rope_parameters == YARN
    assert torch.equal(block_states(both), block_states(alone))


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"factor": 8.0}, "rope_parameters.factor = 4.0 beside rope_scaling.factor = 8.0"),
        ({"rope_type": "linear"}, "rope_type = 'yarn' beside rope_scaling.rope_type = 'linear'"),
        ({"type": "linear"}, "rope_scaling.rope_type = 'yarn' beside rope_scaling.type = 'linear'"),
        ({"rope_theta": 1e4}, "rope_theta = 500000.0 beside rope_scaling.rope_theta = 10000.0"),
        ({"beta_fast": None}, "rope_parameters.beta_fast = 16.0 beside rope_scaling.beta_fast = N"),
        ({"beta_slow": 2.0}, "rope_parameters.beta_slow = None beside rope_scaling.beta_slow = 2"),
    ],
)
def test_two_ropes_are_refused_by_the_key(
    scaling: dict[str, Any], said: str, tmp_path: Path
) -> None:
    ropes = {"rope_parameters": YARN, "rope_scaling": {**WITHOUT_THETA, **scaling}}
    with pytest.raises(ValueError, match=f"expected one value, got .*{said}"):
        read(changed(saved(tmp_path), {**ropes, "rope_theta": None}))


def test_two_thetas_are_refused_by_their_keys(tmp_path: Path) -> None:
    said = "rope_theta = 10000.0 beside rope_parameters.rope_theta = 500000.0"
    with pytest.raises(ValueError, match=said):
        read(changed(saved(tmp_path), {"rope_parameters": YARN, "rope_theta": 1e4}))


# Keys of training, keys that are null, and keys that say what is meant without them.


@pytest.mark.parametrize(
    "changes",
    [
        {"num_anchors": 512, "loss_decay_gamma": 4.0},
        {"dflash_config.num_anchors": 512, "dflash_config.loss_decay_gamma": 4.0},
        {"block_size": 4, "dflash_config.block_size": 4},
        {"pure_draft_prefix_len": 0, "dflash_config.pure_draft_prefix_len": 0},
        {"v_head_dim": 6, "dflash_config.v_head_dim": 6},
        {"mlp_bias": False, "pretraining_tp": 1, "_attn_implementation_autoset": True},
        {"quantization_config": None, "dflash_config.anything": None, "anything": None},
    ],
)
def test_keys_that_change_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    config = saved(tmp_path)
    assert content(read(changed(config, changes))) == content(read(config))


@pytest.mark.parametrize("layout", FORMATS)
def test_an_unknown_null_means_absent(layout: str, tmp_path: Path) -> None:
    name, section = FORMATS[layout]
    config = saved(tmp_path, layout, **CONFIGS[name][0])
    prefix = f"{section}." * bool(section)
    nulls = {"anything": None, f"{prefix}anything": None}
    weights = ("embed_tokens.weight", "lm_head.weight") * (layout == "deepspec")
    assert content(read(changed(config, nulls), *weights)) == content(read(config, *weights))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pure_draft_prefix_len": 1}, "pure_draft_prefix_len absent or in .0,.*got 1"),
        ({"v_head_dim": 8}, "v_head_dim absent or equal to head_dim = 6.*got 8"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"backbone_rotary_base": 1e4}, "backbone_rotary_base"),
        (
            {"dflash_config.block_size": 8},
            "dflash_config.block_size = 8 beside block_size = 4|block_size = 4 beside .*= 8",
        ),
    ],
)
def test_keys_that_change_something_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        read(changed(saved(tmp_path), changes))


# Windows.


@pytest.mark.parametrize(
    ("changes", "kinds", "causal"),
    [
        ({}, [SLIDING, SLIDING], [True, True]),
        ({"dflash_config.causal": False}, [SLIDING, SLIDING], [False, False]),
        ({"dflash_config.use_swa": True}, [SLIDING, SLIDING], [True, True]),
        ({"layer_types": [SLIDING, FULL]}, [SLIDING, FULL], [True, False]),
        (
            {"layer_types": [SLIDING, FULL], "dflash_config.causal": True},
            [SLIDING, FULL],
            [True, True],
        ),
    ],
)
def test_a_window_outlives_qwen3configs_false(
    changes: dict[str, Any], kinds: list[str], causal: list[bool], tmp_path: Path
) -> None:
    cleared = {"layer_types": [SLIDING] * 2, "use_sliding_window": False, "sliding_window": None}
    keys = {**cleared, "dflash_config.swa_window_size": 4, "is_causal": None, **changes}
    config = read(changed(saved(tmp_path), keys))
    assert config.layer_types == kinds
    assert config.sliding_window == 4
    assert config.is_causal == causal


def test_a_window_that_is_lost_is_refused(tmp_path: Path) -> None:
    cleared = Qwen3Config(layer_types=[SLIDING] * 2, num_hidden_layers=2, sliding_window=4)
    pair = {name: cleared.to_dict()[name] for name in ("use_sliding_window", "sliding_window")}
    assert pair == {"use_sliding_window": False, "sliding_window": None}
    with pytest.raises(ValueError, match="expected use_sliding_window true or absent"):
        read(changed(saved(tmp_path), {"layer_types": [SLIDING] * 2, **pair}))


# Another project's `model_type: "dflash"`, and drafts that another class has loaded.

ANGELSPEC = {
    "model_type": "dflash",
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 48,
    "rope_theta": 1e6,
    "mask_token_id": 47,
    "target_layer_ids": [0, 1],
    "num_target_layers": 2,
    "target_num_hidden_layers": 36,
}


@pytest.mark.parametrize("taps", [[0, 1], [0, 20]], ids=["taps that fit", "taps that do not"])
def test_another_project_under_our_model_type(taps: list[int], tmp_path: Path) -> None:
    make_draft().save_pretrained(tmp_path)
    text = json.dumps({**ANGELSPEC, "target_layer_ids": taps})
    (tmp_path / "config.json").write_text(text)
    doors = (load_draft, inspect_draft, AutoConfig.from_pretrained, AutoModel.from_pretrained)
    for door in (*doors, DFlashConfig.from_pretrained):
        with pytest.raises(ValueError, match=r"'target_num_hidden_layers'\].*AngelSpec"):
            door(tmp_path)


@pytest.fixture(scope="module")
def target() -> Any:
    """A tiny target."""
    return tiny_target("qwen3").float()


@pytest.mark.parametrize(
    ("layout", "auto"),
    [
        ("zlab", AutoModel),
        ("zlab", AutoModelForCausalLM),
        ("deepspec", AutoModel),
        ("deepspec", AutoModelForCausalLM),
        ("deepspec-gemma4", AutoModel),
        ("deepspec-gemma4", AutoModelForCausalLM),
        ("muse", AutoModel),
    ],
)
def test_a_draft_that_another_class_loaded(
    layout: Any, auto: Any, target: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"layer_types": None, "sliding_window": None, "is_causal": False}
    options["sample_from_anchor"] = layout.startswith("deepspec")
    if layout == "deepspec-gemma4":
        options |= {"layer_family": "gemma4", "input_embedding_scale": 32**0.5}
    draft = DFlashDraftModel(draft_config(target, **options))
    save_draft(draft, tmp_path, layout, target)
    wrong = auto.from_pretrained(tmp_path)
    for plain in ({}, {"do_sample": True}, {"num_assistant_tokens": 3}):
        with pytest.raises(ValueError, match=rf"dflash_hf.load_draft\('{tmp_path}'\)"):
            target.generate(**prompts([7], 0), max_new_tokens=4, assistant_model=wrong, **plain)


def test_transformers_own_path_keeps_its_own_draft(target: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layer_types": None, "sliding_window": None, "is_causal": False}
    save_draft(DFlashDraftModel(draft_config(target, **options)), tmp_path, "muse", target)
    own = AutoModel.from_pretrained(tmp_path)
    ids = prompts([7], 0)
    plain = target.generate(**ids, max_new_tokens=6, do_sample=False)
    stock = {"assistant_model": own, "speculation_type": "dflash"}
    out = target.generate(**ids, max_new_tokens=6, do_sample=False, **stock)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("layout", ["zlab", "deepspec", "muse", "dflash"])
def test_a_draft_in_the_targets_place_is_named(layout: Any, tmp_path: Path) -> None:
    name, _ = FORMATS.get(layout, ("plain", ""))
    save_draft(make_draft(**CONFIGS[name][0]), tmp_path, layout)
    with pytest.raises(ValueError, match="swap --target and --draft"):
        load_target(str(tmp_path))


# Heads.


@pytest.mark.parametrize("layout", ["dflash", "speculators", "deepspec"])
def test_a_head_beside_a_tied_flag_is_kept(layout: Any, tmp_path: Path) -> None:
    overrides = CONFIGS["deepspec"][0]
    draft = make_draft(**overrides)
    save_draft(draft, tmp_path / "first", layout)
    rewrite(tmp_path / "first", {"tie_word_embeddings": True})
    again = load_draft(tmp_path / "first")
    assert again.config.tie_word_embeddings is False
    for step, other in enumerate(("dflash", "speculators", "deepspec")):
        save_draft(again, tmp_path / f"{step}", other)  # type: ignore[arg-type]
        again = load_draft(tmp_path / f"{step}")
        for name in ("embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(again.state_dict()[name], draft.state_dict()[name])


@pytest.mark.parametrize("layout", ["dflash", "speculators", "deepspec"])
def test_a_head_that_shares_memory_is_written(layout: Any, tmp_path: Path) -> None:
    draft = make_draft(**CONFIGS["deepspec"][0])
    embedding: Any = draft.embed_tokens
    head: Any = draft.lm_head
    head.weight = embedding.weight
    save_draft(draft, tmp_path, layout)
    again = load_draft(tmp_path)
    assert again.config.own_lm_head
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(again.state_dict()[name], embedding.weight)


def packed(weights: dict[str, torch.Tensor]) -> None:
    """Packs one layer, as compressed-tensors does."""
    weight = weights.pop("fc.weight")
    weights["fc.weight_packed"] = torch.zeros(16, 4, dtype=torch.int32)
    weights["fc.weight_scale"] = torch.ones(16, 1)
    weights["fc.weight_shape"] = torch.tensor(weight.shape)


def in_eight_bits(weights: dict[str, torch.Tensor]) -> None:
    """Stores one layer in FP8, with a scale."""
    weights["fc.weight"] = weights["fc.weight"].to(torch.float8_e4m3fn)
    weights["fc.weight_scale"] = torch.ones(())


def in_integers(weights: dict[str, torch.Tensor]) -> None:
    """Stores one layer in INT8, and its scale nowhere."""
    weights["fc.weight"] = weights["fc.weight"].to(torch.int8)


@pytest.mark.parametrize("quantise", [packed, in_eight_bits, in_integers])
def test_quantised_weights_are_called_so(quantise: Any, tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path, "zlab")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    quantise(weights)
    save_file(weights, file)
    for door in (load_draft, inspect_draft):
        with pytest.raises(ValueError, match="weights are quantised: take the draft in bfloat16"):
            door(tmp_path)


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_training_on_keeps_a_reduced_vocabulary(layout: Any, target: Any, tmp_path: Path) -> None:
    own: dict[str, Any] = {"own_lm_head": True, "draft_vocab_size": 9, "own_embed_tokens": True}
    plain: dict[str, Any] = {"layer_types": None, "sliding_window": None, "is_causal": False}
    first = DFlashDraftModel(draft_config(target, **own, **plain))
    ids = torch.arange(3, 57, 6)
    assert first.d2t is not None
    first.d2t.copy_(ids - torch.arange(9))
    save_draft(first, tmp_path / "first", layout, target)
    draft = load_draft(tmp_path / "first", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=0.1)
    head = target.get_output_embeddings()
    for _ in range(3):
        out = draft(**inputs_of(draft)).last_hidden_state
        draft.compute_logits(out, head)[..., ids].logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(draft.fc.weight, first.fc.weight)
    for step, other in enumerate(("dflash", "speculators")):
        save_draft(draft, tmp_path / f"{step}", other, target)  # type: ignore[arg-type]
        again = load_draft(tmp_path / f"{step}")
        assert again.d2t is not None
        assert torch.equal(again.d2t + torch.arange(9), ids)
        logits = again.compute_logits(block_states(again), head)
        known = (logits > -torch.inf).all(dim=(0, 1)).nonzero().flatten()
        assert torch.equal(known, ids)


def test_tiny_has_what_the_tests_say() -> None:
    assert TINY["head_dim"] == 6
    assert TINY["block_size"] == 4
