"""Every activation of the draft against z-lab's own code, from recorded goldens (see make_goldens.py), in float64.

What losslessness tests cannot see shows here: a forgotten norm, a mask or a position off by one, a misread config key.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache

from dflash_hf import DFlashDraftModel
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.context import NewContext
from dflash_hf.cache.ragged import RaggedCache
from helpers.activations import recorded, relative_error

GOLDENS = Path(__file__).parent / "goldens" / "zlab"
VARIANTS = sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir())
TOLERANCE = 1e-9
# z-lab's rule, per variant: which layers are causal inside the block.
CAUSAL = {
    "full": [False] * 3,
    "full-causal": [True] * 3,
    "mixed": [True, False, True],
    "mixed-bidirectional": [False] * 3,
    "mixed-causal": [True] * 3,
    "yarn": [False] * 3,
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Name of a folder of goldens."""
    return request.param


@pytest.fixture
def draft(variant: str, tmp_path: Path) -> DFlashDraftModel:
    """Our draft from z-lab's folder, in float64."""
    shutil.copy(GOLDENS / "model.safetensors", tmp_path)
    shutil.copy(GOLDENS / variant / "config.json", tmp_path)
    return DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float64)


@pytest.fixture
def calls(variant: str) -> list[dict[str, Tensor]]:
    """Inputs and activations, call by call."""
    tensors = load_file(GOLDENS / variant / "activations.safetensors")
    out: list[dict[str, Tensor]] = []
    while names := [name for name in tensors if name.startswith(f"call_{len(out)}.")]:
        out.append({name.partition(".")[2]: tensors[name] for name in names})
    assert len(out) == 3
    return out


def check(got: dict[str, Tensor], golden: dict[str, Tensor], where: str) -> None:
    """Compares everything that was recorded except the inputs."""
    names = golden.keys() - {"taps", "noise"}
    assert names == got.keys()
    errors = {name: relative_error(got[name], golden[name]) for name in sorted(names)}
    assert max(errors.values()) < TOLERANCE, f"{where}: {errors}"


def test_config_is_read_as_zlab_reads_it(variant: str, draft: DFlashDraftModel) -> None:
    config = draft.config
    assert sorted(CAUSAL) == VARIANTS
    assert config.is_causal == CAUSAL[variant]
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, 39, [1, 4, 6])
    assert (config.num_target_layers, config.vocab_size, config.head_dim) == (8, 40, 6)
    assert config.sliding_window == (5 if "mixed" in variant else None)


@torch.no_grad()
def test_combined_forward(draft: DFlashDraftModel, calls: list[dict[str, Tensor]]) -> None:
    cache = DynamicCache(config=draft.config)
    cache.activate_past_recording()
    length = 0
    for index, golden in enumerate(calls):
        with recorded(draft.hidden_norm, draft.layers) as got:
            out = draft(golden["noise"], golden["taps"], **{CACHE_NAME: cache}).last_hidden_state
        check({**got, "out": out}, golden, f"call {index}")
        length += golden["taps"].shape[1]
        cache.crop(length - cache.get_seq_length())


@torch.no_grad()
def test_combined_forward_without_a_cache(
    draft: DFlashDraftModel, calls: list[dict[str, Tensor]]
) -> None:
    for index, golden in enumerate(calls):
        taps = torch.cat([call["taps"] for call in calls[: index + 1]], dim=1)
        out = draft(golden["noise"], taps).last_hidden_state
        assert relative_error(out, golden["out"]) < TOLERANCE, f"call {index}"


@torch.no_grad()
def test_scales_of_embeddings_and_logits(tmp_path: Path) -> None:
    """The keys that z-lab's code reads around its model: input_embedding_scale, output_multiplier, soft cap."""
    shutil.copy(GOLDENS / "model.safetensors", tmp_path)
    shutil.copy(GOLDENS / "scales.json", tmp_path / "config.json")
    draft = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float64)
    golden = load_file(GOLDENS / "scales.safetensors")
    head = nn.Linear(16, 40, bias=False, dtype=torch.float64)
    head.weight.data = golden["head"]
    embedded = draft.embed(golden["ids"], nn.Embedding.from_pretrained(golden["embedding"]))
    assert relative_error(embedded, golden["embedded"]) < TOLERANCE
    logits = draft.compute_logits(golden["hidden"], head)
    assert float(logits.abs().max()) > 1.2  # the cap bends them
    assert relative_error(logits, golden["logits"]) < TOLERANCE


@torch.no_grad()
def test_ragged_cache(draft: DFlashDraftModel, calls: list[dict[str, Tensor]]) -> None:
    """The decode loop's entry points: the prompt, then whole blocks of which only the first rows were accepted."""
    width = draft.config.block_size
    cache = RaggedCache(draft.cache_shapes(), batch=1, max_length=24, block=width)
    lengths = torch.zeros(1, dtype=torch.long)
    for index, golden in enumerate(calls):
        taps = golden["taps"]
        with recorded(draft.hidden_norm, draft.layers) as got:
            if index == 0:
                draft.write_prompt(taps, torch.arange(taps.shape[1])[None], cache)
            else:
                rejected = torch.full(
                    (1, width - taps.shape[1], taps.shape[2]), 7.0, dtype=taps.dtype
                )
                block = RaggedBlock.at(lengths, width)
                draft.write_context(NewContext(torch.cat([taps, rejected], dim=1), block), cache)
            lengths = lengths + taps.shape[1]
            cache.begin(RaggedBlock.at(lengths, width))
            out = draft.forward_block(golden["noise"], cache)
        got["context"] = got["context"][:, : taps.shape[1]]
        check({**got, "out": out}, golden, f"call {index}")
