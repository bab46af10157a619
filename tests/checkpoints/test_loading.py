"""Loading a draft: whole or not at all, from safetensors only, with its dtype and its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import call, create_autospec

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, GenerationConfig

from dflash_hf import DFlashConfig, DFlashDraftModel, DFlashGenerationConfig
from dflash_hf.checkpoints.drafts import load_draft, save_draft

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
    "is_causal": False,
    "raw_input_embeddings": True,
}
LAYOUTS = ("dflash", "zlab", "muse")


def make_draft(**overrides: Any) -> DFlashDraftModel:
    """A tiny random draft that every layout can express."""
    torch.manual_seed(0)
    return DFlashDraftModel(DFlashConfig(**{**TINY, **overrides})).eval()


@pytest.fixture(params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved draft, in each layout."""
    save_draft(make_draft(), tmp_path, request.param)
    return tmp_path


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors of a folder; the first that ends in the given name, if any does."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = next((key for key in sorted(tensors) if key.endswith(name.replace("__", "."))), name)
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weight(folder: Path) -> None:
    name = (
        "encoder.fc.weight"
        if "encoder.fc.weight" in load_file(folder / "model.safetensors")
        else "fc.weight"
    )
    change_weights(folder, fc__weight=None)
    with pytest.raises(ValueError, match=f"expected exactly the weights .* got missing {name};"):
        DFlashDraftModel.from_pretrained(folder)


def test_unknown_weight(folder: Path) -> None:
    change_weights(folder, lm_head=torch.ones(3), t2d=torch.ones(3))
    with pytest.raises(ValueError, match="got unknown lm_head; unknown t2d;"):
        DFlashDraftModel.from_pretrained(folder)


def test_wrong_shape(folder: Path) -> None:
    change_weights(folder, q_proj__weight=torch.ones(7, 16))
    with pytest.raises(
        ValueError,
        match=r"layers.0.self_attn.q_proj.weight of shape \(7, 16\) instead of \(24, 16\)",
    ):
        DFlashDraftModel.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_more_layers_than_the_config_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config |= {"is_causal": [False]} if config["model_type"] == "dflash" else {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unknown layers\.1\.input_layernorm\.weight"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("size", [0, 5, 200, -40])
def test_truncated_file(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="expected whole safetensors files"):
        DFlashDraftModel.from_pretrained(folder)


def test_pickle_is_not_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"expected safetensors weights .*'pytorch_model.bin'.*pickle"
    ):
        DFlashDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="use_safetensors"):
        DFlashDraftModel.from_pretrained(folder, use_safetensors=False)


def test_no_code_of_the_checkpoint_runs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "evil.DFlashDraftModel", "AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('the code of the checkpoint was run')\n")
    for trust in ({}, {"trust_remote_code": True}):
        assert type(DFlashDraftModel.from_pretrained(folder, **trust)) is DFlashDraftModel


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stated", ["float32", "bfloat16", None])
def test_auto_dtype_is_the_configs_and_then_the_weights(
    folder: Path, stored: torch.dtype, stated: str | None
) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: t.to(stored) for name, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = stated
    (folder / "config.json").write_text(json.dumps(config))
    expected = stored if stated is None else getattr(torch, stated)
    for settings in ({}, {"dtype": "auto"}, {"dtype": None}):
        draft = load_draft(folder, **settings)
        assert {parameter.dtype for parameter in draft.parameters()} == {expected}
        assert draft.config.dtype == expected
    if config["model_type"] == "dflash":
        assert AutoModel.from_pretrained(folder).dtype == expected
    assert load_draft(folder, dtype=torch.float64).dtype == torch.float64
    # The frequencies are a buffer that no checkpoint holds, and stay in full precision.
    assert draft.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(draft.rotary_emb.inv_freq, draft.rotary_emb.frequencies(draft.config)[0])


def test_a_dtype_with_torchs_name_before_it(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "torch.bfloat16"}))
    assert load_draft(folder).dtype == torch.bfloat16


def test_device_map(folder: Path) -> None:
    draft = DFlashDraftModel.from_pretrained(folder, device_map="cpu")
    assert draft.device == torch.device("cpu")
    assert not draft.training
    assert not any(tensor.is_meta for tensor in (*draft.parameters(), *draft.buffers()))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    draft = make_draft()
    draft.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = load_draft(tmp_path)
    assert all(
        torch.equal(tensor, loaded.state_dict()[name])
        for name, tensor in draft.state_dict().items()
    )


def test_overrides_of_the_config(folder: Path) -> None:
    assert load_draft(folder, block_size=3).config.block_size == 3
    with pytest.raises(ValueError, match="block_size >= 2"):
        load_draft(folder, block_size=1)
    given = DFlashConfig(**{**TINY, "block_size": 2})
    draft = load_draft(folder, config=given)
    assert draft.config.block_size == 2
    assert draft.config is not given


def test_loading_report_is_handed_out(folder: Path) -> None:
    result: Any = DFlashDraftModel.from_pretrained(folder, output_loading_info=True)
    draft, report = result
    assert isinstance(draft, DFlashDraftModel)
    assert not any(report.values())


def test_weights_of_other_names(folder: Path) -> None:
    """Transformers' `key_mapping` is from their names to the format's, and what it gives is checked as ever."""
    file, draft = folder / "model.safetensors", load_draft(folder)
    save_file(
        {f"inner.{name}": tensor for name, tensor in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match="missing "):
        load_draft(folder)
    loaded = load_draft(folder, key_mapping={r"^inner\.": ""})
    assert all(
        torch.equal(tensor, loaded.state_dict()[name])
        for name, tensor in draft.state_dict().items()
    )
    change_weights(folder, q_proj__weight=torch.ones(7, 16))
    with pytest.raises(
        ValueError, match=r"inner\.layers.0.self_attn.q_proj.weight of shape \(7, 16\)"
    ):
        load_draft(folder, key_mapping={r"^inner\.": ""})


def test_unknown_key_in_our_own_config(tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "transformers_weights": "adapter_model.bin"})
    )
    with pytest.raises(ValueError, match=r"format 'dflash', got also \['transformers_weights'\]"):
        load_draft(tmp_path)


def test_a_draft_from_another_layout_is_saved_in_ours(folder: Path) -> None:
    draft = load_draft(folder)
    draft.save_pretrained(folder / "again")
    assert set(load_file(folder / "again" / "model.safetensors")) == set(draft.state_dict())


# PEFT's own use of a property that Transformers renamed.
@pytest.mark.filterwarnings("default:`is_gradient_checkpointing`:FutureWarning")
def test_a_draft_with_adapters_is_not_saved_as_a_draft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    draft = make_draft()
    adapted = peft.get_peft_model(draft, peft.LoraConfig(target_modules=["fc"]))
    # No reader knows the names that its weights have within adapters.
    with pytest.raises(ValueError, match=r"a draft without adapters to save.*merge_and_unload"):
        draft.save_pretrained(tmp_path / "draft")
    # The wrapper itself would save the adapters alone.
    with pytest.raises(ValueError, match="a DFlashDraftModel to save, got 'PeftModel'"):
        save_draft(adapted, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
    save_draft(adapted.merge_and_unload(), tmp_path / "draft")
    assert torch.equal(load_draft(tmp_path / "draft").fc.weight, make_draft().fc.weight)


def test_generation_config_survives(tmp_path: Path) -> None:
    draft = make_draft()
    draft.generation_config = DFlashGenerationConfig(
        block_size=3,
        verify_width=2,
        engine="eager",
        proposal="argmax",
        temperature=0.5,
        do_sample=True,
    )
    draft.save_pretrained(tmp_path)
    loaded = load_draft(tmp_path).generation_config
    assert isinstance(loaded, DFlashGenerationConfig)
    options = (loaded.block_size, loaded.verify_width, loaded.engine, loaded.proposal)
    assert options == (3, 2, "eager", "argmax")
    assert (loaded.temperature, loaded.do_sample) == (0.5, True)
    draft.generation_config.verify_width = "auto"
    draft.save_pretrained(tmp_path)
    assert load_draft(tmp_path).generation_config.verify_width == "auto"
    given = load_draft(
        tmp_path, generation_config=DFlashGenerationConfig(block_size=2)
    ).generation_config
    assert given.block_size == 2


def test_absent_generation_config_means_defaults(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    loaded = load_draft(folder).generation_config
    assert isinstance(loaded, DFlashGenerationConfig)
    assert loaded.to_dict() == DFlashGenerationConfig().to_dict()


@pytest.mark.parametrize("given", [GenerationConfig(), {"verify_width": 2}, "somewhere"])
def test_settings_of_another_class_are_refused(given: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="a DFlashGenerationConfig as generation_config"):
        load_draft(folder, generation_config=given)


def test_generation_config_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    draft = make_draft()
    draft.generation_config.block_size = 5
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected block_size at most 4"):
        load_draft(tmp_path)


def test_push_to_hub_happens_once_everything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = create_autospec(DFlashDraftModel.push_to_hub)
    monkeypatch.setattr(DFlashDraftModel, "push_to_hub", pushed)
    given = {
        "commit_message": "Say so",
        "commit_description": "and why",
        "max_shard_size": "1GB",
        "tags": ["a draft"],
    }
    draft = make_draft()
    draft.save_pretrained(tmp_path / "name", push_to_hub=True, is_main_process=True, **given)
    draft.save_pretrained(tmp_path / "name", push_to_hub=True, repo_id="org/draft")
    # By position, and with what older versions of Transformers had
    draft.save_pretrained(tmp_path / "name", True, None, True, "1GB", safe_serialization=True)
    assert pushed.call_args_list == [
        call(draft, repo_id="name", **given),
        call(draft, repo_id="org/draft"),
        call(draft, repo_id="name", max_shard_size="1GB"),
    ]
    draft.save_pretrained(tmp_path / "name", push_to_hub=True, is_main_process=False)
    draft.save_pretrained(tmp_path / "other", False, push_to_hub=True)
    assert pushed.call_count == 3
    assert not (tmp_path / "other" / "generation_config.json").exists()


def test_what_a_repository_would_be_made_without_is_refused(tmp_path: Path) -> None:
    """Left out without a word, `visibility` would make a public repository of one that was to be private."""
    with pytest.raises(ValueError, match="got 'visibility'; make the repository"):
        make_draft().save_pretrained(tmp_path / "name", push_to_hub=True, visibility="private")
    assert not (tmp_path / "name").exists()


def cached_repository(cache: Path, draft: DFlashDraftModel, layout: Any) -> str:
    """Puts a draft where huggingface_hub keeps a downloaded repository; returns its id."""
    commit = "0" * 40
    save_draft(draft, cache / "models--someone--draft" / "snapshots" / commit, layout)
    refs = cache / "models--someone--draft" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    return "someone/draft"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hub_id_out_of_the_cache(layout: str, tmp_path: Path) -> None:
    draft = make_draft()
    draft.generation_config.block_size = 3
    repo = cached_repository(tmp_path, draft, layout)
    loaded = load_draft(repo, cache_dir=tmp_path)
    assert all(
        torch.equal(tensor, loaded.state_dict()[name])
        for name, tensor in draft.state_dict().items()
    )
    assert loaded.generation_config.block_size == (3 if layout == "dflash" else None)
    for file in tmp_path.rglob("generation_config.json"):
        file.unlink()
    assert load_draft(repo, cache_dir=tmp_path).generation_config.block_size is None


def test_pickle_on_the_hub_is_not_read(tmp_path: Path) -> None:
    repo = cached_repository(tmp_path, make_draft(), "zlab")
    file = next(tmp_path.rglob("model.safetensors"))
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(OSError, match="safetensors"):
        load_draft(repo, cache_dir=tmp_path)


def test_a_folder_that_is_no_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected a DFlash draft .* got model_type 'llama'"):
        load_draft(tmp_path)


def test_from_config_and_state_dict(tmp_path: Path) -> None:
    draft = make_draft()
    again = DFlashDraftModel.from_pretrained(
        None, config=draft.config, state_dict=draft.state_dict()
    )
    assert torch.equal(again.fc.weight, draft.fc.weight)
