"""Drafts with Gemma 4's layers against DeepSpec's own code, from goldens (see make_deepspec_gemma4_goldens.py)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dflash_hf import DFlashDraftModel
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.context import NewContext
from dflash_hf.cache.ragged import RaggedCache
from helpers.activations import relative_error

GOLDENS = Path(__file__).parent / "goldens" / "deepspec_gemma4"
VARIANTS = ("keys-are-values", "own-values")
# Their norms are computed in float32.
TOLERANCE = 1e-6


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Name of a folder of goldens."""
    return request.param


@pytest.fixture
def draft(variant: str) -> DFlashDraftModel:
    """Our draft from DeepSpec's folder, in float64."""
    return DFlashDraftModel.from_pretrained(GOLDENS / variant, dtype=torch.float64)


@pytest.fixture
def golden(variant: str) -> dict[str, Tensor]:
    """Inputs, hidden states and logits."""
    return load_file(GOLDENS / variant / "activations.safetensors")


def check(draft: DFlashDraftModel, hidden: Tensor, golden: dict[str, Tensor]) -> None:
    """Compares hidden states and logits."""
    assert relative_error(hidden, golden["hidden"]) < TOLERANCE
    logits = draft.compute_logits(hidden, nn.Module())
    assert relative_error(logits, golden["logits"]) < TOLERANCE


def test_config_is_read_as_deepspec_reads_it(variant: str, draft: DFlashDraftModel) -> None:
    config = draft.config
    is_shared = variant == "keys-are-values"
    assert (config.layer_family, config.keys_are_values) == ("gemma4", is_shared)
    assert config.num_key_value_heads == (1 if is_shared else 2)
    assert (config.head_dim, config.hidden_act) == (16, "gelu_pytorch_tanh")
    assert config.target_layer_ids == [-1, 2, 5]
    assert config.rope_parameters == {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    assert config.sample_from_anchor
    assert [float(layer.layer_scalar) for layer in draft.layers] == [0.75, 1.0, 1.25]


@torch.no_grad()
def test_combined_forward(draft: DFlashDraftModel, golden: dict[str, Tensor]) -> None:
    noise = draft.embed(golden["ids"], nn.Module())
    check(draft, draft(noise, golden["taps"]).last_hidden_state, golden)


@torch.no_grad()
@pytest.mark.parametrize("num_newest", [0, 2])
def test_ragged_cache(draft: DFlashDraftModel, golden: dict[str, Tensor], num_newest: int) -> None:
    """The decode loop's entry points: the prompt, the newest context before or within the block's forward."""
    noise = draft.embed(golden["ids"], nn.Module())
    taps = golden["taps"]
    width = draft.config.block_size
    length = taps.shape[1]
    cache = RaggedCache(draft.cache_shapes(), batch=1, max_length=24, block=width)
    known = length - 2
    draft.write_prompt(taps[:, :known], torch.arange(known)[None], cache)
    rejected = torch.full((1, width - 2, taps.shape[2]), 7.0, dtype=taps.dtype)
    newest = NewContext(
        torch.cat([taps[:, known:], rejected], dim=1), RaggedBlock.at(torch.tensor([known]), width)
    )
    within = newest
    if num_newest == 0:
        draft.write_context(newest, cache)
        within = None
    cache.begin(RaggedBlock.at(torch.tensor([length]), width, length + width, is_exact=True))
    check(draft, draft.forward_block(noise, cache, within), golden)


@torch.no_grad()
def test_embeddings_round_as_gemmas_do(draft: DFlashDraftModel, golden: dict[str, Tensor]) -> None:
    half = draft.to(torch.bfloat16)
    assert torch.equal(half.embed(golden["ids"], nn.Module()), golden["halved"])
