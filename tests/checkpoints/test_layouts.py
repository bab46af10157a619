"""Layouts as tables: round trips are the identity; what a layout cannot express is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, Qwen3Model

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.checkpoints.formats import FORMATS, detect_format, explain_foreign_draft
from helpers.layouts import CONFIGS, DFLASH2, DSPARK, OWN, content, make_draft
from tiny import DEPTH, VOCAB, tiny_draft, tiny_target


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    overrides, expressible = CONFIGS[name]
    first = make_draft(**overrides).to(torch.bfloat16)
    draft = first
    for step, layout in enumerate(
        ["dflash", *(between for other in expressible for between in (other, "dflash"))]
    ):
        folder = tmp_path / f"{step}-{layout}"
        save_draft(draft, folder, layout)  # type: ignore[arg-type]
        assert detect_format(json.loads((folder / "config.json").read_text())).name == layout
        draft = load_draft(folder)
        assert content(draft.config) == content(first.config), layout
        assert draft.state_dict().keys() == first.state_dict().keys()
        assert all(
            torch.equal(tensor, first.state_dict()[key])
            for key, tensor in draft.state_dict().items()
        )
        assert draft.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "layout", "field"),
    [
        ("mixed causality", "zlab", r"is_causal = \[True, False\]"),
        ("wider target", "zlab", "target_hidden_size = 20"),
        ("nothing stated", "zlab", "vocab_size = None .*; num_target_layers = None"),
        *(
            ("tapped after DeepStack", layout, "tap_after_deepstack = True")
            for layout in ("zlab", "muse", "speculators", "deepspec")
        ),
        ("plain", "muse", "raw_input_embeddings = False"),
        ("all causal", "muse", "is_causal"),
        ("biases", "muse", "attention_bias = True"),
        (
            "scales",
            "muse",
            "input_embedding_scale = 4.0 .*; output_multiplier = 0.5 .*; final_logit_softcapping = 30",
        ),
        ("wider target", "muse", "target_hidden_size = 20"),
        (
            "dflash 2",
            "muse",
            "conv_kernel_size = 2 .*conv_group_size = 4 .*selector_rank = 3 .*selector_top_k = 5",
        ),
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
        ("reduced vocabulary", "zlab", "draft_vocab_size = 13 .*; own_lm_head = True"),
        ("reduced vocabulary", "deepspec", "draft_vocab_size = 13"),
        ("from the anchor", "zlab", "sample_from_anchor = True"),
        ("dspark, muse-like", "muse", "markov_rank = 3 .read back as None"),
        ("dspark, reduced vocabulary", "zlab", "draft_vocab_size = 13 .*; own_lm_head = True"),
        ("sliding means causal", "speculators", "window_from_anchor = False .read back as True"),
        ("window from the anchor, all causal", "speculators", "is_causal"),
        (
            "scales",
            "speculators",
            "input_embedding_scale = 4.0 .*; output_multiplier = 0.5 .*; final_logit_softcapping",
        ),
        ("nothing stated", "speculators", "vocab_size = None"),
        ("wider target", "speculators", "target_hidden_size = 20"),
        ("mixed causality", "speculators", r"is_causal = \[True, False\]"),
        (
            "plain",
            "deepspec",
            "own_embed_tokens = False .*; own_lm_head = False .*; sample_from_anchor = False",
        ),
        ("window from the anchor", "deepspec", "layer_types = .*; is_causal"),
    ],
)
def test_what_a_layout_cannot_express_is_refused(
    name: str, layout: Any, field: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=field):
        save_draft(make_draft(**CONFIGS[name][0]), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["zlab", "speculators", "muse", "deepspec"])
def test_weights_that_the_config_does_not_know_are_refused(layout: Any, tmp_path: Path) -> None:
    own = OWN if layout == "deepspec" else {}
    draft = make_draft(
        is_causal=False, raw_input_embeddings=True, sample_from_anchor=layout == "deepspec", **own
    )
    draft.layers[0].self_attn.q_proj.register_parameter("extra", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(
        ValueError,
        match=rf"weights of a draft in the format '{layout}', got '.*q_proj.extra'; save it",
    ):
        save_draft(draft, tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def test_unknown_layout_is_refused(tmp_path: Path) -> None:
    unknown: Any = "gguf"
    with pytest.raises(ValueError, match=r"expected format in .*'zlab'.*got 'gguf'"):
        save_draft(make_draft(), tmp_path, unknown)


def test_what_is_read_back_as_something_else_is_refused(tmp_path: Path) -> None:
    """Whatever the field: here a parameter of the RoPE that only our own format takes."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "wobble": 1.0}
    with pytest.raises(ValueError, match="wobble"):
        save_draft(make_draft(rope_parameters=rope), tmp_path / "out", "zlab")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
def test_names_of_weights_go_both_ways(layout: Any) -> None:
    own = {} if layout.has_vocabulary is False else OWN
    reduced = {"draft_vocab_size": 13} if layout.has_vocabulary is None else {}
    # Of the two second stages the one whose weights are called otherwise.
    second = DSPARK
    if layout.name == "muse":
        second = {}
    draft = make_draft(attention_bias=layout.name != "muse", **own, **reduced, **second)
    assert set(layout.renamed.values()) <= draft.state_dict().keys()
    assert len({layout.their_name(name) for name in draft.state_dict()}) == len(draft.state_dict())
    for name in draft.state_dict():
        assert layout.our_name(layout.their_name(name)) == name


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
        *(
            f"{conv}.{name}"
            for conv in convs
            for name in ("base_kernel", "kernel_projection.weight")
        ),
    }
    configs = [
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("one", "two")
    ]
    assert [config["architectures"] for config in configs] == [
        ["DFlashDraftModel"],
        ["DFlash2DraftModel"],
    ]
    assert DFLASH2.items() <= configs[1]["dflash_config"].items()
    assert not DFLASH2.keys() & configs[0]["dflash_config"].keys()


def test_dspark_is_stored_as_its_readers_look_for_it(tmp_path: Path) -> None:
    """DeepSpec's names of the two tables, the rank in both places of z-lab's layout, and the architecture."""
    for layout in ("zlab", "speculators"):
        save_draft(make_draft(**DSPARK, sample_from_anchor=True), tmp_path / layout, layout)
        names = set(load_file(tmp_path / layout / "model.safetensors"))
        heads = {name for name in names if "markov" in name}
        assert heads == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    config = json.loads((tmp_path / "zlab" / "config.json").read_text())
    section = config["dflash_config"]
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["markov_rank"] == section["markov_rank"] == 3
    assert (section["projector_type"], section["shift_label"]) == ("dspark", True)
    assert not config["dspark_bonus_anchor"]
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dspark"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


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
    with pytest.raises(
        ValueError, match=r"(unknown|missing) candidate_selector\.successor_codebook"
    ):
        load_draft(tmp_path)


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
    bare = tiny_draft(
        target, vocab_size=None, num_target_layers=None, sliding_window=None, layer_types=None
    )
    with pytest.raises(ValueError, match=r"vocab_size = None .*; num_target_layers = None"):
        save_draft(bare, tmp_path / "zlab", "zlab")
    save_draft(bare, tmp_path / "zlab", "zlab", target)
    completed = load_draft(tmp_path / "zlab").config
    assert (completed.vocab_size, completed.num_target_layers) == (VOCAB, DEPTH)
    assert (bare.config.vocab_size, bare.config.num_target_layers) == (None, None)

    target.config._name_or_path = "some/target"
    save_draft(bare, tmp_path / "speculators", "speculators", target)
    verifier = json.loads((tmp_path / "speculators" / "config.json").read_text())[
        "speculators_config"
    ]["verifier"]
    assert verifier == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}

    anchored = tiny_draft(target, sliding_window=None, layer_types=None, sample_from_anchor=True)
    save_draft(anchored, tmp_path / "deepspec", "deepspec", target)
    draft = load_draft(tmp_path / "deepspec")
    assert torch.equal(
        draft.get_submodule("embed_tokens").weight, target.get_input_embeddings().weight
    )
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
    assert "got a Qwen3Model whose config is a DFlash draft's in the format 'zlab'" in sentence
    assert f"dflash_hf.load_draft('{tmp_path}')" in sentence
    assert explain_foreign_draft(object()) is None


def test_an_offloaded_targets_rows_are_written(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    head = target.get_output_embeddings().weight.clone()
    bare = tiny_draft(target, sliding_window=None, layer_types=None, sample_from_anchor=True)
    cpu_offload(target, execution_device=torch.device("cpu"))
    save_draft(bare, tmp_path / "deepspec", "deepspec", target)
    draft = load_draft(tmp_path / "deepspec")
    assert torch.equal(draft.get_submodule("lm_head").weight, head)
    # And they are compared with the draft's own, which are left out then.
    draft.config.sample_from_anchor = False
    save_draft(draft, tmp_path / "zlab", "zlab", target)
    assert load_draft(tmp_path / "zlab").lm_head is None


def test_rows_that_are_not_loaded_are_refused(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    bare = tiny_draft(target, sliding_window=None, layer_types=None, sample_from_anchor=True)
    with pytest.raises(ValueError, match="a target with weights to copy"):
        save_draft(bare, tmp_path / "deepspec", "deepspec", target.to("meta"))
    assert not (tmp_path / "deepspec").exists()


def test_an_offloaded_draft_is_not_written_in_part(tmp_path: Path) -> None:
    draft = cpu_offload(make_draft(), execution_device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"a draft whose weights are loaded, got .*without offload"
    ):
        save_draft(draft, tmp_path / "zlab", "zlab")
    assert not (tmp_path / "zlab").exists()
