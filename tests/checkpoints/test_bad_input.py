"""Damaged checkpoints: one sentence that names the file and the field, or the very weights that were saved.

Nothing of a refused checkpoint is loaded: the checks run before Transformers opens the weights. Only values that are
NaN or infinite are found afterwards.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.training.example_files import read_meta
from dflash_hf.training.features import FeatureCache

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
OWN: dict[str, Any] = {"own_embed_tokens": True, "own_lm_head": True}
# Layout -> a draft that uses what the layout has.
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {**OWN, "draft_vocab_size": 13},
    "zlab": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "is_causal": None,
    },
    "speculators": {
        **OWN,
        "draft_vocab_size": 13,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "window_from_anchor": True,
        "is_causal": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    },
    "muse": {},
    "laguna": {"layer_family": "laguna", "raw_input_embeddings": True},
    "deepspec": {**OWN, "sample_from_anchor": True},
    "deepspec-gemma4": {
        **OWN,
        "sample_from_anchor": True,
        "layer_family": "gemma4",
        "input_embedding_scale": 4.0,
    },
}


def make_draft(layout: str) -> DFlashDraftModel:
    """A tiny random draft for a layout; a reduced vocabulary is every third token from 5 on."""
    torch.manual_seed(0)
    draft = DFlashDraftModel(DFlashConfig(**{**TINY, **DRAFTS[layout]})).eval()
    if draft.d2t is not None:
        draft.d2t.copy_(5 + 2 * torch.arange(draft.d2t.shape[0]))
    return draft


@pytest.fixture(params=DRAFTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Name of a layout."""
    return request.param


@pytest.fixture
def folder(layout: str, tmp_path: Path) -> Path:
    """A saved draft, in each layout."""
    save_draft(make_draft(layout), tmp_path, layout)  # type: ignore[arg-type]
    return tmp_path


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails tests in which Transformers gets to open the weights."""

    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Transformers began to load the weights")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", opened)


def change(folder: Path, changes: dict[str, Tensor | None]) -> Path:
    """Replaces, adds or (None) removes tensors; returns the file."""
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(file), **changes}
    save_file(
        {name: t for name, t in tensors.items() if t is not None}, file, metadata={"format": "pt"}
    )
    return file


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("layout", ["dflash", "speculators"], indirect=True)
@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (40, r"expected d2t in .*model\.safetensors to point inside the vocabulary of 48 .*to 52"),
        (-13, "point inside the vocabulary of 48 .*got tokens from -1 to"),
        (2**62, "point inside the vocabulary of 48"),
        (26, "to name (a|every) token once, got repetitions"),
    ],
)
def test_vocabulary_maps(offset: int, message: str, folder: Path) -> None:
    offsets = load_file(folder / "model.safetensors")["d2t"]
    offsets[12] = offset
    change(folder, {"d2t": offsets})
    with pytest.raises(ValueError, match=message):
        load_draft(folder)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_maps_that_contradict_each_other_or_the_config(tmp_path: Path) -> None:
    save_draft(make_draft("speculators"), tmp_path, "speculators")
    weights = load_file(tmp_path / "model.safetensors")
    change(tmp_path, {"t2d": torch.roll(weights["t2d"], 1)})
    with pytest.raises(
        ValueError, match=r"expected t2d in .*model\.safetensors to mark the tokens that d2t names"
    ):
        load_draft(tmp_path)
    change(tmp_path, {"t2d": weights["t2d"], "d2t": weights["d2t"].to(torch.int32)})
    with pytest.raises(ValueError, match="d2t of type I32"):
        load_draft(tmp_path)
    change(tmp_path, {"d2t": None})
    with pytest.raises(ValueError, match="missing d2t"):
        load_draft(tmp_path)
    change(tmp_path, {"d2t": weights["d2t"]})
    config = json.loads((tmp_path / "config.json").read_text())
    for size, message in (
        (12, "lm_head.weight of shape .13, 16. instead of .12, 16."),
        (48, "d2t in .* got offsets"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "draft_vocab_size": size}))
        if size == 48:
            change(tmp_path, {"lm_head.weight": torch.zeros(48, 16)})
        with pytest.raises(ValueError, match=message):
            load_draft(tmp_path)


def test_maps_of_the_whole_vocabulary_are_dropped(tmp_path: Path) -> None:
    """Older releases kept identity maps, and copies of the target's head and norm, beside a full vocabulary."""
    draft = DFlashDraftModel(DFlashConfig(**{**TINY, **OWN})).eval()
    save_draft(draft, tmp_path, "speculators")
    extra = {"d2t": torch.zeros(48, dtype=torch.long), "t2d": torch.ones(48, dtype=torch.bool)}
    change(
        tmp_path,
        {
            **extra,
            "verifier_norm.weight": torch.ones(16),
            "verifier_lm_head.weight": torch.ones(48, 16),
        },
    )
    loaded = load_draft(tmp_path)
    assert loaded.state_dict().keys() == draft.state_dict().keys()


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1, -40])
def test_truncated_file_is_named(cut: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(
        ValueError, match=rf"expected whole safetensors files, got .*{file.name} \("
    ):
        load_draft(folder)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("layout", ["zlab", "speculators"], indirect=True)
def test_weights_of_other_types(folder: Path) -> None:
    change(folder, {"norm.weight": torch.ones(16, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"norm\.weight of type I32"):
        load_draft(folder)
    change(
        folder,
        {"norm.weight": torch.ones(16).half(), "hidden_norm.weight": torch.ones(16).bfloat16()},
    )
    with pytest.raises(ValueError, match="weights of both types F16 and BF16"):
        load_draft(folder)


def shards(folder: Path) -> dict[str, Any]:
    """Saves a draft in shards; returns their index."""
    make_draft("zlab").save_pretrained(folder, max_shard_size="4KB")
    return json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.mark.usefixtures("nothing_is_loaded")
def test_shards(tmp_path: Path) -> None:
    index, file = shards(tmp_path), tmp_path / "model.safetensors.index.json"
    first, second, *_ = sorted(set(index["weight_map"].values()))
    content = (tmp_path / second).read_bytes()
    (tmp_path / second).unlink()
    with pytest.raises(
        ValueError, match=f"expected the shard {second} beside .*index.json, got no such file"
    ):
        load_draft(tmp_path)
    (tmp_path / second).write_bytes(content[:-3])
    with pytest.raises(ValueError, match=f"got .*{second}"):
        load_draft(tmp_path)
    (tmp_path / second).unlink()
    (tmp_path / second).mkdir()
    with pytest.raises(ValueError, match=f"expected a file .*{second}, got a folder"):
        load_draft(tmp_path)
    (tmp_path / second).rmdir()
    weight_map = {name: where for name, where in index["weight_map"].items() if where != second}
    file.write_text(json.dumps({**index, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"expected exactly the weights of a draft .* missing "):
        load_draft(tmp_path)
    file.write_text(json.dumps(index))
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes())
    with pytest.raises(ValueError, match=f"expected .*{second} to hold what weight_map of .* says"):
        load_draft(tmp_path)
    for text, message in (
        ("{", "expected JSON in .*index.json"),
        ("[]", "expected a JSON object in .*index.json"),
        ("{}", "expected weight_map"),
        ('{"weight_map": {"a": 3}}', "expected weight_map"),
        (
            '{"weight_map": {"a": "../elsewhere.safetensors"}}',
            "expected the shard ../elsewhere.safetensors",
        ),
        # Longer than a file's name may be.
        (json.dumps({"weight_map": {"a": "a" * 250 + ".safetensors"}}), "expected the shard aaa"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_draft(tmp_path)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON in .*config.json"),
        ('{"model_type": "dfl', "expected JSON in .*config.json"),
        ("[1]", r"expected a JSON object in .*config.json, got \[1\]"),
        ("\x00\x01", "expected JSON in .*config.json"),
        ("{}", r"expected a DFlash draft .* \(in config\.json of"),
        ('{"dflash_config": 3, "model_type": "qwen3"}', "expected a DFlash draft"),
        ("[" * 100_000, "expected JSON in .*config.json"),
    ],
)
def test_broken_config_is_named(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_draft(folder)


def deny(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has reading files of a name fail, as it does without the right to; root may read all."""
    read = Path.read_text

    def denied(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", denied)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_config_that_may_not_be_read_is_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny("config.json", monkeypatch)
    with pytest.raises(PermissionError, match=r"config\.json"):
        load_draft(folder)


def test_what_was_made_and_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks what a file was made of cannot go on with it."""
    for name in ("out.meta.json", "features.json"):
        (tmp_path / name).write_text("{}")
        deny(name, monkeypatch)
    with pytest.raises(ValueError, match=r"expected .*out\.meta\.json beside .*, got .*denied"):
        read_meta(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"expected settings of features in .*, got .*denied"):
        FeatureCache(tmp_path)._settings()


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_pickle_beside_a_draft_in_its_own_right(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"expected safetensors weights .*'pytorch_model.bin'.*pickle"
    ):
        load_draft(folder)


def test_broken_generation_config(tmp_path: Path) -> None:
    make_draft("zlab").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected JSON in .*generation_config.json"):
        load_draft(tmp_path)


# ---- fuzz: any change of a config or a header ends in that sentence, or in the weights that were saved


# Folder, config, file of weights, and the weights.
Saved = tuple[Path, dict[str, Any], bytes, dict[str, Tensor]]


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Saved]:
    """A saved draft per layout."""
    out: dict[str, Saved] = {}
    for layout in DRAFTS:
        folder, draft = tmp_path_factory.mktemp(layout), make_draft(layout)
        save_draft(draft, folder, layout)  # type: ignore[arg-type]
        config = json.loads((folder / "config.json").read_text())
        out[layout] = (
            folder,
            config,
            (folder / "model.safetensors").read_bytes(),
            dict(draft.state_dict()),
        )
    return out


def load_or_refuse(folder: Path, weights: dict[str, Tensor]) -> None:
    """Loads; a refusal is one sentence with the folder in it, a success the very weights."""
    try:
        draft = load_draft(folder, dtype=torch.float32)
    except ValueError as error:
        message = str(error)
        assert message.startswith("expected "), message
        assert str(folder) in message
        assert "\n" not in message
        assert "; " in message
        return
    assert draft.state_dict().keys() == weights.keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [
            -1,
            0,
            1,
            2,
            3,
            16,
            48,
            2**31,
            2**63,
            10**30,
            -(10**30),
            0.5,
            1e300,
            float("nan"),
            float("inf"),
        ]
    ),
    st.text(max_size=4),
    st.sampled_from(
        [
            "full_attention",
            "sliding_attention",
            "yarn",
            "llama3",
            "dflash",
            "gelu",
            "float16",
            "qwen3",
        ]
    ),
    st.lists(
        st.one_of(
            st.integers(-2, 9), st.sampled_from(["full_attention", "sliding_attention", None])
        ),
        max_size=3,
    ),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "rope_theta", "x"]), st.integers(-1, 3), max_size=2
    ),
)
MORE_KEYS = [
    "draft_vocab_size",
    "sliding_window",
    "is_causal",
    "rope_scaling",
    "rope_theta",
    "x",
    "quantization_config",
]


def places(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of a config, also inside dictionaries."""
    found = [(*prefix, key) for key in config]
    return found + [
        p for key, v in config.items() if isinstance(v, dict) for p in places(v, (*prefix, key))
    ]


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_fuzzed_configs(data: st.DataObject, saved: dict[str, Saved]) -> None:
    folder, original, content, weights = saved[data.draw(st.sampled_from(sorted(DRAFTS)))]
    config = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 2))):
        known = sorted(places(config))
        place = data.draw(st.sampled_from([*known, *((key,) for key in MORE_KEYS)]))
        holder: Any = config
        for key in place[:-1]:
            holder = holder[key]
        if data.draw(st.integers(0, 4)) == 0:
            holder.pop(place[-1], None)
        else:
            holder[place[-1]] = data.draw(VALUES)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(content)
    load_or_refuse(folder, weights)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_fuzzed_headers(data: st.DataObject, saved: dict[str, Saved]) -> None:
    folder, config, content, weights = saved[data.draw(st.sampled_from(sorted(DRAFTS)))]
    (size,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + size], content[8 + size :]
    if data.draw(st.booleans()):  # as bytes
        position = data.draw(st.integers(0, 8 + size - 1))
        damaged = bytearray(content[: 8 + size])
        damaged[position] = data.draw(st.integers(0, 255))
        damaged += body[: data.draw(st.sampled_from([None, -1, 0, len(body) // 2]))]
    else:  # as JSON
        tensors: dict[str, Any] = json.loads(header)
        name = data.draw(st.sampled_from(sorted(tensors.keys() - {"__metadata__"})))
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "all"]))
        if field == "name":
            tensors[
                data.draw(
                    st.sampled_from(["lm_head.weight", "x", "layers.9.mlp.up_proj.weight", "d2t"])
                )
            ] = tensors.pop(name)
        elif field == "all":
            tensors[name] = data.draw(VALUES)
        else:
            tensors[name][field] = data.draw(
                st.one_of(
                    VALUES,
                    st.sampled_from(["I32", "U32", "F64", "BF16", "BOOL", "F8_E4M3"]),
                    st.lists(st.integers(0, 1000), min_size=2, max_size=2),
                    st.just(list(reversed(tensors[name]["shape"]))),
                )
            )
        text = json.dumps(tensors).encode()
        damaged = struct.pack("<Q", len(text)) + text + body
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(damaged))
    load_or_refuse(folder, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layout", ["dflash", "speculators"], indirect=True)
def test_weights_that_are_no_numbers_are_refused(
    folder: Path, value: float, dtype: torch.dtype
) -> None:
    file = folder / "model.safetensors"
    name, tensor = next(
        (n, t) for n, t in load_file(file).items() if n.endswith("0.mlp.up_proj.weight")
    )
    tensor[3, 5] = value
    change(folder, {name: tensor})
    with pytest.raises(
        ValueError, match=r"expected finite weights .* in layers\.0\.mlp\.up_proj\.weight; "
    ):
        load_draft(folder, dtype=dtype)


@pytest.mark.parametrize("layout", ["dflash"], indirect=True)
def test_weights_too_large_for_float16_are_refused_in_it_alone(folder: Path) -> None:
    large = torch.full((16, 32), 3e38)
    large[::2] *= -1
    change(folder, {"fc.weight": large})
    with pytest.raises(
        ValueError,
        match=r"in fc\.weight; load it with dtype=torch\.float32 if float16 is too narrow",
    ):
        load_draft(folder, dtype=torch.float16)
    # 512 of the latter are no float16
    for value, dtype in ((1e34, torch.float32), (1e3, torch.float16)):
        large[:] = value
        change(folder, {"fc.weight": large})
        assert torch.equal(load_draft(folder, dtype=dtype).fc.weight, large.to(dtype))


def test_a_null_rope_theta_is_refused() -> None:
    with pytest.raises(
        ValueError, match="expected a positive number as rope_theta of the RoPE, got None"
    ):
        DFlashConfig(**{**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": None}})


def test_a_negative_mask_token_is_refused_without_a_vocabulary_size() -> None:
    with pytest.raises(ValueError, match="expected mask_token_id at least 0, got -1"):
        DFlashConfig(**{**TINY, "vocab_size": None, "mask_token_id": -1})
