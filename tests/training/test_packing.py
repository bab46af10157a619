"""Several examples in one row give the loss and the gradients that each gives in a row of its own."""

from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.anchors import BlockMaskRule, all_anchors, sample_anchors, valid_anchors
from dflash_hf.training.collators import Batch, best_fit, collate, collate_packed, epoch_batches
from dflash_hf.training.example import Example
from dflash_hf.training.forward import batch_loss, check_packing
from dflash_hf.training.loss import OBJECTIVES, BlockLoss, decay_weights
from tiny import DFLASH2, tiny_draft, tiny_target

FAMILIES = ["qwen3", "qwen3-sliding", "qwen3-moe", "llama", "mistral", "gemma3", "phi3"]
DRAFTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "is_causal": [True, False],
    },
    "from_anchor": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 3,
        "window_from_anchor": True,
        "is_causal": [True, False],
    },
    "dflash2": DFLASH2,
    "proposes at the anchor": {"sample_from_anchor": True},
}


@pytest.fixture
def texts() -> list[Example]:
    """Answers in a row without a prompt between them, several answers in one example, a prompt alone."""
    generator = torch.Generator().manual_seed(5)
    masks = [
        [0] * 3 + [1] * 6,
        [1] * 7,
        [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],
        [0] * 4,
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ]
    return [
        Example(
            input_ids=torch.randint(3, 60, (len(mask),), generator=generator).tolist(),
            loss_mask=mask,
        )
        for mask in masks
    ]


def loss_of(
    target: Any, draft: DFlashDraftModel, batch: Batch, **options: Any
) -> tuple[BlockLoss, dict[str, Any]]:
    draft.zero_grad()
    anchors = all_anchors(batch.loss_mask, 6, batch.starts)
    weights = decay_weights(6, 3.0, draft.config.sample_from_anchor)
    result = batch_loss(
        draft, find_target(target), batch, anchors, weights, chunk_blocks=4, **options
    )
    (result.loss + result.selector_loss).backward()
    return result, {
        name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None
    }


def assert_same_step(
    target: Any, draft: DFlashDraftModel, texts: list[Example], **options: Any
) -> None:
    packed = collate_packed(texts, 24)
    assert packed.input_ids.shape == (3, 16)
    one, gradients = loss_of(target, draft, packed, **options)
    other, wanted = loss_of(target, draft, collate(texts), **options)
    for name in ("loss", "selector_loss", "weight", "correct", "count", "blocks", "accepted"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-9)
    assert one.loss > 1
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).abs().max() < 1e-9, name
        assert gradient.any(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded_for_every_kind_of_target(family: str, texts: list[Example]) -> None:
    target = tiny_target(family).requires_grad_(False)
    check_packing(find_target(target))
    assert_same_step(target, tiny_draft(target, 6, **DRAFTS["sliding"]).double().train(), texts)


def test_a_target_is_packed_only_where_it_tells_examples_apart(texts: list[Example]) -> None:
    """gpt-oss of Transformers 5.23 makes its masks without looking at positions."""
    target = tiny_target("gpt-oss").requires_grad_(False)
    try:
        check_packing(find_target(target))
    except ValueError as error:
        assert "got a relative difference of" in str(error)  # noqa: PT017  (other releases may do it right)
    else:
        assert_same_step(target, tiny_draft(target, 6, **DRAFTS["sliding"]).train(), texts)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_packed_equals_padded_for_every_kind_of_draft(
    kind: str, objective: str, texts: list[Example]
) -> None:
    target = tiny_target("qwen3-sliding").requires_grad_(False)
    draft = tiny_draft(target, 6, **DRAFTS[kind]).double().train()
    assert_same_step(target, draft, texts, objective=objective, target_labels=kind == "full")


def test_flex_masks_of_packed_rows_are_the_dense_ones(texts: list[Example]) -> None:
    batch = collate_packed(texts, 24)
    assert batch.starts is not None
    anchors = all_anchors(batch.loss_mask, 6, batch.starts)
    starts = batch.starts.gather(1, anchors.indices).repeat_interleave(6, dim=1)
    rule = BlockMaskRule(batch.attention_mask, anchors, starts)
    for kind in ((None, False, False), (3, True, False), (3, True, True)):
        dense = rule.dense(kind)
        rows, queries, keys = (torch.arange(size) for size in rule.shape)
        seen = rule.block_mask(kind).mask_mod(
            rows[:, None, None], torch.tensor(0), queries[:, None], keys
        )
        assert torch.equal(seen, dense[:, 0])
        own = batch.starts[:, None] == starts[:, :, None]
        assert not (dense[:, 0, :, :16] & ~own).any(), "a block sees another example"


def test_rows_are_filled_in_order(texts: list[Example]) -> None:
    batch = collate_packed(texts, 24)
    assert batch.starts is not None
    assert batch.starts.tolist()[0] == [0] * 9 + [9] * 7
    assert batch.position_ids.tolist()[0] == [*range(9), *range(7)]
    assert batch.input_ids[1].tolist() == [*texts[2].input_ids, *texts[3].input_ids, 0]
    assert batch.starts.tolist()[1] == [0] * 11 + [11] * 4 + [15]
    assert batch.attention_mask.sum(dim=1).tolist() == [16, 15, 12]
    assert valid_anchors(batch.loss_mask, batch.starts)[0].int().tolist() == [
        *[0] * 3,
        *[1] * 5,
        0,
        *[1] * 6,
        0,
    ]


def test_anchors_are_drawn_per_example(texts: list[Example]) -> None:
    batch = collate_packed(texts, 24)
    for seed in range(5):
        anchors = sample_anchors(
            batch.loss_mask, 3, 6, torch.Generator().manual_seed(seed), batch.starts
        )
        assert anchors.keep.sum(dim=1).tolist() == [6, 3, 3]
        assert batch.starts is not None
        drawn = batch.starts.gather(1, anchors.indices)[0].bincount(minlength=10)
        assert drawn[[0, 9]].tolist() == [3, 3]
        assert anchors.reach == int(anchors.indices.max())


def test_best_fit_leaves_little_room_and_keeps_rows() -> None:
    assert best_fit(range(5), [5, 9, 4, 1, 3], 10) == [[1, 3], [0, 2], [4]]
    lengths = torch.randint(1, 64, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = best_fit(range(500), lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
    assert len(rows) <= -(-sum(lengths) // 64) + 4
    batches = epoch_batches(lengths, 4, 1, 2, 64)
    assert batches == epoch_batches(lengths, 4, 1, 2, 64) != epoch_batches(lengths, 4, 1, 3, 64)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    examples = [Example(input_ids=[1] * length, loss_mask=[1] * length) for length in lengths]
    filled = [collate_packed([examples[index] for index in batch], 64) for batch in batches]
    assert max(len(batch.input_ids) for batch in filled) == 4
    assert sum(int(batch.attention_mask.sum()) for batch in filled) == sum(lengths)


def test_what_cannot_be_packed_is_refused(texts: list[Example]) -> None:
    with pytest.raises(
        ValueError,
        match=r"expected examples of at most 8 tokens to pack, got 9; cut or drop example 0",
    ):
        collate_packed(texts, 8)
    with pytest.raises(
        ValueError,
        match=r"expected examples of at most 8 tokens to pack, got 9; cut or drop example 7",
    ):
        epoch_batches([2] * 7 + [9, 2], 4, 0, 0, 8)  # whatever the order of the epoch
    image = Example(
        input_ids=[1, 2], loss_mask=[0, 1], model_inputs={"pixel_values": torch.zeros(1, 3)}
    )
    with pytest.raises(
        ValueError, match=r"text alone to pack, got \['pixel_values'\]; leave example 5 unpacked"
    ):
        collate_packed([*texts, image], 24)
    with pytest.raises(
        ValueError,
        match=r"without recurrent layers to pack examples, got Lfm2ForCausalLM; train without",
    ):
        check_packing(find_target(tiny_target("lfm2")))


def test_a_target_that_mixes_examples_up_is_refused(
    target: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch, texts: list[Example]
) -> None:
    forward: Any = target.model.forward

    def blind(**kwargs: Any) -> Any:
        return forward(**{**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])})

    found = find_target(target)
    check_packing(found)
    monkeypatch.setattr(target.model, "forward", blind)
    with pytest.raises(
        ValueError, match=r"takes position_ids to pack examples, got Qwen3ForCausalLM"
    ):
        check_packing(found)

    def mixing(position_ids: Any = None, **kwargs: Any) -> Any:
        return blind(position_ids=position_ids, **kwargs)

    monkeypatch.setattr(target.model, "forward", mixing)
    with pytest.raises(
        ValueError,
        match=r"to be those of the example alone, got a relative difference of \d\.\d+ in Qwen3",
    ):
        check_packing(found)
