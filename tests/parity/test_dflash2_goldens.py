"""DFlash 2 against z-lab's own code, from recorded goldens (see make_dflash2_goldens.py), in float64.

Every layer's output by both of our forwards, the logits, the greedy path, and the distribution of a given path.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from dflash_hf import DFlashDraftModel
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.context import NewContext
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.draft_model.dflash2 import follow_path
from helpers.activations import recorded, relative_error

GOLDENS = Path(__file__).parent / "goldens" / "dflash2"
VARIANTS = sorted(folder.name for folder in GOLDENS.iterdir())
TOLERANCE = 1e-9
RANKS = (1, 0, 2)
TEMPERATURE = 0.7

Calls = list[dict[str, Tensor]]


@pytest.fixture(params=VARIANTS)
def draft(request: pytest.FixtureRequest) -> DFlashDraftModel:
    """Our draft from z-lab's folder."""
    return DFlashDraftModel.from_pretrained(GOLDENS / request.param, dtype=torch.float64)


@pytest.fixture
def calls(draft: DFlashDraftModel) -> Calls:
    """Inputs and activations, call by call, each with the head."""
    tensors = load_file(Path(draft.config.name_or_path) / "activations.safetensors")
    return [
        {
            key.partition(".")[2] or key: value
            for key, value in tensors.items()
            if key.startswith((f"call_{i}.", "h"))
        }
        for i in range(3)
    ]


def check(got: dict[str, Tensor], golden: dict[str, Tensor], where: str) -> None:
    """Compares the context, every layer and the result."""
    assert sorted(got) == ["context", "layer_0", "layer_1", "layer_2", "out"]
    errors = {name: relative_error(value, golden[name]) for name, value in got.items()}
    assert max(errors.values()) < TOLERANCE, f"{where}: {errors}"


def test_variants_differ_in_what_dflash2_adds(draft: DFlashDraftModel) -> None:
    config = draft.config
    added = (
        config.conv_kernel_size,
        config.conv_group_size,
        config.selector_rank,
        config.selector_top_k,
    )
    expected = {"sliding": (2, 4, 4, 6), "scaled": (3, 8, 3, 4)}
    assert sorted(expected) == VARIANTS
    assert added == expected[Path(config.name_or_path).name]


@torch.no_grad()
def test_combined_forward(draft: DFlashDraftModel, calls: Calls) -> None:
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
def test_ragged_cache(draft: DFlashDraftModel, calls: Calls) -> None:
    """The decode loop's entry points, twice in one batch; rejected rows of the context lie behind accepted ones."""
    width = draft.config.block_size
    cache = RaggedCache(draft.cache_shapes(), batch=2, max_length=24, block=width)
    lengths = torch.zeros(2, dtype=torch.long)
    context = None
    for index, golden in enumerate(calls):
        taps = golden["taps"].expand(2, -1, -1)
        if index == 0:
            draft.write_prompt(taps, torch.arange(taps.shape[1]).expand(2, -1), cache)
        else:
            rejected = torch.full((2, width - taps.shape[1], taps.shape[2]), 7.0, dtype=taps.dtype)
            context = NewContext(torch.cat([taps, rejected], dim=1), RaggedBlock.at(lengths, width))
        lengths = lengths + taps.shape[1]
        cache.begin(RaggedBlock.at(lengths, width))
        out = draft.forward_block(golden["noise"].expand(2, -1, -1), cache, context)
        for row in out:
            assert relative_error(row[None], golden["out"]) < TOLERANCE, f"call {index}"


@torch.no_grad()
def test_paths_and_their_distribution(draft: DFlashDraftModel, calls: Calls) -> None:
    """All calls as rows of one batch: z-lab's code walks one row at a time."""
    rows = {
        name: torch.cat([call[name] for call in calls])
        for name in ("out", "anchor", "logits", "greedy", "path")
    }
    distribution = torch.cat([call["law"] for call in calls])
    head = torch.nn.Linear(16, 40, bias=False, dtype=torch.float64)
    head.weight.copy_(calls[0]["head"])
    hidden = rows["out"][:, 1:]
    logits = draft.compute_logits(hidden, head)
    assert relative_error(logits, rows["logits"]) < TOLERANCE
    assert torch.equal(draft.best_path(hidden, logits, rows["anchor"]), rows["greedy"])

    assert draft.candidate_selector is not None
    candidates, scores = draft.candidate_selector(hidden, logits, rows["anchor"])
    order = scores.argsort(dim=-1, descending=True)
    best = torch.stack([order[:, slot, :, rank] for slot, rank in enumerate(RANKS)], dim=1)
    path, path_scores = follow_path(candidates, scores, best)
    assert torch.equal(path, rows["path"])
    ours = torch.zeros_like(distribution).scatter(
        -1, candidates, torch.softmax(path_scores / TEMPERATURE, dim=-1)
    )
    assert relative_error(ours, distribution) < TOLERANCE
    # The distribution depends on the path: behind another predecessor it is another one.
    _, greedy_scores = follow_path(candidates, scores, scores.argmax(dim=-1))
    other = torch.zeros_like(distribution).scatter(
        -1, candidates, torch.softmax(greedy_scores / TEMPERATURE, dim=-1)
    )
    assert torch.equal(other[:, 0], ours[:, 0])
    assert relative_error(other[:, 1], ours[:, 1]) > 1e-3
