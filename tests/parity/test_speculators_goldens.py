"""Draft logits against speculators 0.9, from goldens (see make_speculators_goldens.py), in float64.

What its training forward computes for one anchor: taps stored one higher, the embedding and head of the checkpoint or
of the target, offsets into a reduced vocabulary, windows that count from the anchor, causality inside them, and what
DSpark's Markov head adds. Its confidence head is in the files, and left out.
"""

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

GOLDENS = Path(__file__).parent / "goldens" / "speculators"
VARIANTS = sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir())
ANCHORS = (3, 9, 15)
TOLERANCE = 1e-9


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Name of a folder of goldens."""
    return request.param


@pytest.fixture
def draft(variant: str) -> DFlashDraftModel:
    """Our draft from speculators' folder, in float64."""
    return DFlashDraftModel.from_pretrained(GOLDENS / variant, dtype=torch.float64)


@pytest.fixture
def golden(variant: str) -> dict[str, Tensor]:
    """Inputs, hidden states and logits."""
    return load_file(GOLDENS / variant / "activations.safetensors")


def target_parts(variant: str) -> tuple[nn.Module, nn.Module]:
    """Embedding and head of the target, for what the checkpoint leaves to it; empty where nothing is left."""
    file = GOLDENS / variant / "frozen.safetensors"
    frozen = (
        {name: tensor.double() for name, tensor in load_file(file).items()} if file.exists() else {}
    )
    embedding, head = nn.Module(), nn.Module()
    if "embed_tokens.weight" in frozen:
        embedding = nn.Embedding.from_pretrained(frozen["embed_tokens.weight"])
    if "lm_head.weight" in frozen:
        head = nn.Linear(16, 40, bias=False, dtype=torch.float64)
        head.weight.data = frozen["lm_head.weight"]
    return embedding, head


def block_of(
    golden: dict[str, Tensor], anchor: int, draft: DFlashDraftModel, variant: str
) -> Tensor:
    """Embeddings of the anchor and the masks after it."""
    ids = torch.full((1, draft.config.block_size), draft.config.mask_token_id)
    ids[:, 0] = golden["input_ids"][:, anchor]
    return draft.embed(ids, target_parts(variant)[0])


def test_config_is_read_as_speculators_reads_it(variant: str, draft: DFlashDraftModel) -> None:
    config = draft.config
    is_reduced = variant in ("reduced", "from-anchor", "dspark-reduced")
    proposes = variant in ("from-anchor", "dspark", "dspark-reduced")
    assert config.target_layer_ids == [-1, 2, 5]
    assert (config.block_size, config.mask_token_id, config.vocab_size) == (4, 39, 40)
    assert config.own_embed_tokens == (variant == "copies")
    assert config.own_lm_head == (is_reduced or variant == "copies")
    assert config.draft_vocab_size == (17 if is_reduced else None)
    assert config.sample_from_anchor == proposes
    assert config.num_proposals(4) == (4 if proposes else 3)
    assert config.markov_rank == (5 if variant.startswith("dspark") else None)
    slides = variant not in ("full", "copies", "llama", "dspark", "dspark-kept-anchor")
    assert (config.sliding_window, config.window_from_anchor) == (
        (5, True) if slides else (None, False)
    )
    assert config.is_causal == (
        [True, False, True] if slides and variant != "mixed-non-causal" else [False] * 3
    )


def check(
    draft: DFlashDraftModel, variant: str, hidden: Tensor, golden: dict[str, Tensor], anchor: int
) -> None:
    """Compares hidden states and logits, the latter where the reduced vocabulary puts them."""
    assert relative_error(hidden, golden[f"anchor_{anchor}.hidden"]) < TOLERANCE, f"anchor {anchor}"
    logits = draft.compute_logits(hidden, target_parts(variant)[1])
    # Behind the right tokens, as its training shows them to a Markov head; without one nothing changes.
    before = golden["input_ids"][:, anchor : anchor + draft.config.block_size]
    if not draft.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
    logits = draft.logits_behind(logits, before)
    assert logits.shape[-1] == 40
    if draft.d2t is not None:
        marks = load_file(GOLDENS / variant / "model.safetensors")["t2d"]
        assert bool((logits[..., ~marks] == -torch.inf).all())
        logits = logits[..., marks]  # speculators keeps the tokens in ascending order
    assert relative_error(logits, golden[f"anchor_{anchor}.logits"]) < TOLERANCE, f"anchor {anchor}"


@torch.no_grad()
def test_combined_forward(variant: str, draft: DFlashDraftModel, golden: dict[str, Tensor]) -> None:
    for anchor in ANCHORS:
        noise = block_of(golden, anchor, draft, variant)
        check(
            draft,
            variant,
            draft(noise, golden["taps"][:, :anchor]).last_hidden_state,
            golden,
            anchor,
        )


@torch.no_grad()
@pytest.mark.parametrize("max_length", [24, 20])
def test_ragged_cache(
    variant: str, draft: DFlashDraftModel, golden: dict[str, Tensor], max_length: int
) -> None:
    """The decode loop's entry points: the prompt, then what blocks committed, in rings that wrap."""
    width = draft.config.block_size
    cache = RaggedCache(draft.cache_shapes(), batch=1, max_length=max_length, block=width)
    taps, seen = golden["taps"], ANCHORS[0]
    draft.write_prompt(taps[:, :seen], torch.arange(seen)[None], cache)
    for anchor in ANCHORS:
        while seen < anchor:  # blocks of two accepted tokens and rejected ones
            rejected = torch.full((1, width - 2, taps.shape[2]), 7.0, dtype=taps.dtype)
            block = RaggedBlock.at(torch.tensor([seen]), width)
            draft.write_context(
                NewContext(torch.cat([taps[:, seen : seen + 2], rejected], dim=1), block), cache
            )
            seen += 2
        block = RaggedBlock.at(torch.tensor([anchor]), width, anchor + width, is_exact=True)
        cache.begin(block)
        check(
            draft,
            variant,
            draft.forward_block(block_of(golden, anchor, draft, variant), cache),
            golden,
            anchor,
        )
