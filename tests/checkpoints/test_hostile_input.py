"""Files that somebody wrote to break a loader: one short sentence each, before anything is built from them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from dflash_hf import DFlashConfig, DFlashGenerationConfig
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.checkpoints.files import MAX_JSON_BYTES
from dflash_hf.configuration_dflash import MAX_BLOCK_SIZE
from helpers.layouts import TINY, make_draft

LAYOUTS = {
    "dflash": {},
    "zlab": {},
    "speculators": {},
    "muse": {"raw_input_embeddings": True, "is_causal": False},
    "deepspec": {
        "own_embed_tokens": True,
        "own_lm_head": True,
        "is_causal": False,
        "sample_from_anchor": True,
    },
}


@pytest.fixture(params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved draft, in each layout."""
    save_draft(make_draft(**LAYOUTS[request.param]), tmp_path, request.param)
    return tmp_path


def refusal(folder: Path) -> str:
    """What is said when a draft is loaded: a sentence of at most 2000 characters, within two seconds."""
    started = time.process_time()
    with pytest.raises(ValueError, match=r"^expected .*, got .*; ") as caught:
        load_draft(folder)
    assert time.process_time() - started < 2
    sentence = str(caught.value)
    assert sentence.isprintable()
    assert len(sentence) < 2000
    return sentence


def options(folder: Path, **fields: Any) -> Path:
    """Saves a draft in our own layout, with these settings of generation beside it."""
    save_draft(make_draft(), folder)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def set_config(folder: Path, **fields: Any) -> None:
    """Changes keys at the top of a config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_folder_without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder).startswith(f"expected config.json in {folder}, got no such file")


NO_FIELDS = sorted({name for name in dir(GenerationConfig) if not name.startswith("__")})


@pytest.mark.parametrize(
    "name", ["__class__", "__dict__", "__init__", "self", "", "a b", "_x", "\ud800", *NO_FIELDS]
)
def test_names_that_no_setting_can_have(name: str, tmp_path: Path) -> None:
    assert "generation_config.json" in refusal(options(tmp_path, **{name: 1}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"watermarking_config": {"x": 1}}, "expected fields that GenerationConfig takes"),
        (
            {"watermarking_config": {"greenlist_ratio": "a"}},
            "expected fields that GenerationConfig takes",
        ),
        ({"watermarking_config": 5}, "expected fields that GenerationConfig takes"),
        ({"compile_config": {}}, "expected fields that GenerationConfig takes"),
        ({"streamer": 1}, "expected fields that GenerationConfig takes"),
        ({"suppress_tokens": [[1]]}, "expected fields that GenerationConfig takes"),
        ({"temperature": "hot"}, "expected temperature of type int or float, got 'hot'"),
        ({"max_new_tokens": [1]}, "expected max_new_tokens of type int, got .1."),
        ({"max_new_tokens": True}, "expected max_new_tokens of type int, got True"),
        ({"do_sample": 1}, "expected do_sample of type bool, got 1"),
        ({"eos_token_id": {}}, "expected eos_token_id of type int or list or tuple"),
        ({"dtype": 5}, "got some that GenerationConfig cannot write"),
        ({"x": {"dtype": [5]}}, "got some that GenerationConfig cannot write"),
    ],
)
def test_settings_of_other_types(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert re.search(message, refusal(options(tmp_path, **fields)))


def test_fields_of_the_right_type_are_kept(tmp_path: Path) -> None:
    given = {
        "temperature": 0.5,
        "eos_token_id": [1, 2],
        "early_stopping": "never",
        "max_new_tokens": 7,
        "mine": [1],
    }
    loaded = load_draft(options(tmp_path, **given, verify_width=2)).generation_config
    assert {name: getattr(loaded, name) for name in given} == given
    assert loaded.verify_width == 2
    again = DFlashGenerationConfig.from_dict(loaded.to_dict())
    assert again == loaded


@pytest.mark.parametrize("size", [MAX_BLOCK_SIZE + 1, 10**5])
def test_blocks_that_would_never_end(size: int, folder: Path) -> None:
    set_config(folder, block_size=size)
    assert f"expected block_size from 1 to {MAX_BLOCK_SIZE}, got {size}" in refusal(folder)
    assert DFlashConfig(**{**TINY, "block_size": MAX_BLOCK_SIZE}).block_size == MAX_BLOCK_SIZE


def test_selector_that_would_score_every_pair_of_tokens() -> None:
    many = {**TINY, "vocab_size": 10**5, "selector_rank": 3, "selector_top_k": 10**5}
    with pytest.raises(ValueError, match="expected selector_top_k from 1 to 1024, got 100000"):
        DFlashConfig(**many)


LONG: dict[str, Any] = {
    "a list": [1] * 10**5,
    "a text": "x" * 10**5,
    "a dictionary": {f"k{n}": n for n in range(10**4)},
    "layers": ["full_attention"] * 10**5,
    "names": [f"full_attention_{n}" for n in range(10**4)],
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG.keys())
def test_long_values_are_shown_in_part(value: Any, folder: Path) -> None:
    saved = (folder / "config.json").read_text()
    for field in (
        "block_size",
        "layer_types",
        "target_layer_ids",
        "hidden_act",
        "unknown",
        "is_causal",
    ):
        (folder / "config.json").write_text(saved)
        set_config(folder, **{field: value})
        refusal(folder)
    (folder / "config.json").write_text(json.dumps({f"k{n}": n for n in range(10**4)}))
    refusal(folder)


@pytest.mark.parametrize(
    "name", ["block_size", "verify_width", "engine", "proposal", "synchronize", "temperature"]
)
def test_long_options_are_shown_in_part(name: str, tmp_path: Path) -> None:
    refusal(options(tmp_path, **{name: list(range(10**5))}))


def test_many_weights_are_named_in_part(tmp_path: Path) -> None:
    save_draft(make_draft(num_hidden_layers=40), tmp_path)
    set_config(tmp_path, num_hidden_layers=1, layer_types=None, is_causal=None)
    assert " more; " in refusal(tmp_path)


@pytest.mark.parametrize(
    "dtype", ["int8", "complex64", "float8_e4m3fn", "bool", "save", ["float32"]]
)
def test_types_that_no_draft_can_have(dtype: Any, folder: Path) -> None:
    set_config(folder, dtype=dtype, torch_dtype=None)
    assert "expected dtype in ['float64', 'float32', 'float16', 'bfloat16'], got " in refusal(
        folder
    )


def test_an_adapter_beside_a_draft_is_not_loaded_onto_it(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    assert "expected a draft without an adapter" in refusal(folder)


def test_files_of_json_that_are_too_large(tmp_path: Path) -> None:
    """Parsed, 60 MB of `[],` would take 3.7 GB."""
    save_draft(make_draft(), tmp_path)
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).write_text("[" + "[]," * (MAX_JSON_BYTES // 3) + "[]]")
        assert "expected at most 1 MB of JSON in " in refusal(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/passwd",
        "pytorch_model.bin",
        "",
        "..",
        "\ud800.safetensors",
        "a\0.safetensors",
    ],
)
def test_shards_of_other_names_are_not_looked_for(shard: str, tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = {"metadata": {}, "weight_map": {"norm.weight": shard}}
    (tmp_path / "draft" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "expected the shard " in refusal(tmp_path / "draft")


@pytest.mark.parametrize("metadata", [None, 5, []])
def test_index_without_the_metadata_that_transformers_needs(metadata: Any, tmp_path: Path) -> None:
    make_draft().save_pretrained(tmp_path, max_shard_size="4KB")
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "metadata": metadata}))
    assert "expected a dictionary metadata in " in refusal(tmp_path)
