"""Quantised drafts load as what their dequantised weights are, and what is not known is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.checkpoints.files import stored_tensors
from dflash_hf.checkpoints.formats import FORMATS
from dflash_hf.checkpoints.quantised import Scheme, dequantised
from dflash_hf.cli.main import app

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens" / "compressed_tensors"
GROUP = 8
CONFIG = DFlashConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    block_size=4,
    mask_token_id=47,
    num_target_layers=8,
    target_layer_ids=[0, 5],
    is_causal=False,
)


def golden_schemes() -> dict[str, Scheme]:
    """The scheme of each case of the goldens."""
    return {
        "int4 groups": Scheme(4, True, None),
        "int4 groups, zero points": Scheme(4, True, None),
        "int8 packed": Scheme(8, True, None),
        "int8 rows": Scheme(8, False, None),
        "fp8 rows": Scheme(8, False, None),
        "fp8 tensor": Scheme(8, False, None),
        "fp8 blocks": Scheme(8, False, (16, 32)),
    }


@pytest.mark.parametrize("case", golden_schemes())
def test_a_weight_is_what_compressed_tensors_makes_of_it(case: str, tmp_path: Path) -> None:
    goldens = load_file(GOLDENS / "weights.safetensors")
    parts = {
        f"layer.{name.removeprefix(f'{case}/')}": tensor
        for name, tensor in goldens.items()
        if name.startswith(f"{case}/") and not name.endswith("expected")
    }
    save_file(parts, tmp_path / "model.safetensors")
    scheme = golden_schemes()[case]
    found = dequantised(stored_tensors(tmp_path), scheme, tmp_path)
    assert list(found) == ["layer.weight"]
    weight = found["layer.weight"]
    assert weight.shape == (24, 64)
    assert weight.dtype == "BF16"
    assert torch.equal(weight.read(), goldens[f"{case}/expected"])


# ---- whole drafts: how a weight is quantised, what it is then, and what the config says


def in_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Eight bits, one scale a row."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight.float() / scale.float()).round().clamp(-127, 127)
    wanted = (numbers * scale.float()).bfloat16()
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, wanted


def in_float8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8, one scale a row."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers = (weight.float() / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, (numbers.float() * scale.float()).bfloat16()


def in_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 as Transformers has it: a float32 scale for so many rows and columns."""
    rows, columns = weight.shape
    scale = torch.rand(-(-rows // GROUP), -(-columns // GROUP)) * 0.01 + 0.005
    spread = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:rows, :columns]
    numbers = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scale}, numbers.float() * spread


def in_groups(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Four bits, one scale for so many columns, eight numbers in an int32."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, -1, GROUP)
    scale = (grouped.abs().amax(-1) / 7).bfloat16()
    numbers = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
    wanted = (numbers * scale.float()[..., None]).view(rows, columns).bfloat16()
    words = (numbers.to(torch.int64) + 8).view(rows, -1, 8)
    packed = sum(words[..., place] << (4 * place) for place in range(8))
    assert isinstance(packed, Tensor)
    # The highest bit is a sign to an int32.
    signed = torch.where(packed >= 2**31, packed - 2**32, packed)
    parts = {
        "weight_packed": signed.to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    return parts, wanted


def by_compressed_tensors(layout: str, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": (in_rows, by_compressed_tensors("int-quantized", num_bits=8, type="int")),
    "fp8": (in_float8, by_compressed_tensors("float-quantized", num_bits=8, type="float")),
    "fp8 blocks": (
        in_blocks,
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    ),
    "int4": (
        in_groups,
        by_compressed_tensors("pack-quantized", num_bits=4, type="int", group_size=GROUP),
    ),
}


# Formats that cannot hold the draft here, whatever its weights are, and what they say.
LACKING = {
    "laguna": "layer_family",
    "muse": "raw_input_embeddings",
    "deepspec-gemma4": "layer_family",
    "deepspec": "own_lm_head",
}


def quantised_draft(folder: Path, way: str, layout: str) -> dict[str, Tensor]:
    """Writes a quantised draft; returns its weights by our names, dequantised, in bfloat16."""
    torch.manual_seed(0)
    draft = DFlashDraftModel(CONFIG).to(torch.bfloat16)
    save_draft(draft, folder, layout)
    quantise, config = WAYS[way]
    wanted = dict(draft.state_dict())
    linear = {
        f"{name}.weight"
        for name, part in draft.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        ours = next(one for one in wanted if one == name or name.endswith(f".{one}"))
        if ours not in linear:
            stored[name] = tensor
            continue
        parts, wanted[ours] = quantise(tensor)
        layer = name.rpartition(".")[0]
        stored |= {f"{layer}.{part}": one.contiguous() for part, one in parts.items()}
    save_file(stored, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return wanted


@pytest.mark.parametrize("layout", ["dflash", "zlab"])
@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_draft_is_its_dequantised_weights(
    way: str, layout: str, tmp_path: Path
) -> None:
    wanted = quantised_draft(tmp_path, way, layout)
    for dtype in ("auto", torch.float32):
        draft = load_draft(tmp_path, dtype=dtype)
        assert draft.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
        assert draft.state_dict().keys() == wanted.keys()
        for name, tensor in draft.state_dict().items():
            assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
    assert not hasattr(draft.config, "quantization_config")
    save_draft(draft, tmp_path / "again", layout)
    again = load_draft(tmp_path / "again")
    assert torch.equal(again.fc.weight, draft.fc.weight)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_draft_is_converted_as_any_other(way: str, layout: str, tmp_path: Path) -> None:
    wanted = quantised_draft(tmp_path / "quantised", way, "zlab")
    draft = load_draft(tmp_path / "quantised")
    if layout in LACKING:
        with pytest.raises(ValueError, match=LACKING[layout]):
            save_draft(draft, tmp_path / "other", layout)
        return
    save_draft(draft, tmp_path / "other", layout)
    again = load_draft(tmp_path / "other")
    for name, tensor in wanted.items():
        assert torch.equal(again.state_dict()[name], tensor.to(again.dtype)), name
    assert "quantization_config" not in (tmp_path / "other" / "config.json").read_text()


def test_inspect_says_what_a_quantised_draft_is(tmp_path: Path) -> None:
    quantised_draft(tmp_path, "int4", "zlab")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "quantised" in result.output


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "modelopt"}, "quant_method 'compressed-tensors' or 'fp8'"),
        (by_compressed_tensors("nvfp4-pack-quantized", num_bits=4), "format pack-quantized"),
        (by_compressed_tensors("pack-quantized", num_bits=3), "4 or 8 as num_bits"),
        (by_compressed_tensors("int-quantized", num_bits=4), "8 as num_bits"),
        (
            by_compressed_tensors("pack-quantized", num_bits=4, actorder="group"),
            "no actorder by groups",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two sizes of a block"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "config_groups"),
        ("int4", "a dictionary as quantization_config"),
    ],
)
def test_unknown_schemes_are_refused(config: Any, match: str, tmp_path: Path) -> None:
    quantised_draft(tmp_path, "int4", "dflash")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    with pytest.raises(ValueError, match=match):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("weight_scale", None, "one scale of fc.weight"),
        ("weight_packed", None, "weight_packed and weight_shape and one scale of fc.weight"),
        ("weight_scale", lambda one: one[:3], "scales of fc.weight that fit"),
        ("weight_scale", lambda one: one.to(torch.int8), "a scale of fc.weight in floating point"),
        ("weight_packed", lambda one: one[:, :1].contiguous(), "int32 of fc.weight"),
        ("weight_shape", lambda one: torch.tensor([0, 4]), "two dimensions of fc.weight"),
        ("weight_shape", lambda one: one // 2, "int32 of fc.weight"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    part: str, change: Any, match: str, tmp_path: Path
) -> None:
    quantised_draft(tmp_path, "int4", "dflash")
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(f"fc.{part}")
    if change is not None:
        tensors[f"fc.{part}"] = change(tensor)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=match):
        load_draft(tmp_path)
