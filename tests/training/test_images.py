"""Examples with images: a vision-language target gives the features, mixed with text, and the draft learns."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target import find_target
from dflash_hf.training import DFlashTrainer, DFlashTrainingConfig, Example
from dflash_hf.training.collators import collate
from dflash_hf.training.data import truncate
from dflash_hf.training.forward import target_features

VOCAB, IMAGE, PATCH = 60, 50, 4


@pytest.fixture
def target() -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=51)
    return Qwen3VLForConditionalGeneration(config).eval()


def image_example(rows: int, columns: int, answer: int, seed: int) -> Example:
    """An example with one image of `rows x columns` patches, which makes a quarter as many tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = rows * columns // 4
    words = torch.randint(1, 40, (4 + answer,), generator=generator).tolist()
    ids = [words[0], 51, *[IMAGE] * num_tokens, *words[1:]]
    example = Example.from_pair(ids[:-answer], ids[-answer:])
    example.model_inputs.update(
        pixel_values=torch.randn(rows * columns, 3 * 2 * PATCH * PATCH, generator=generator),
        image_grid_thw=torch.tensor([[1, rows, columns]]),
        mm_token_type_ids=torch.tensor([int(token == IMAGE) for token in ids]),
    )
    return example


@pytest.fixture
def examples() -> list[Example]:
    return [image_example(4, 4, 6, 1), Example.from_pair([5, 6, 7], [8, 9, 10, 11]), image_example(2, 6, 9, 2)]


@torch.no_grad()
def test_a_mixed_batch_gives_the_features_of_each_example(
    target: Qwen3VLForConditionalGeneration, examples: list[Example]
) -> None:
    found = find_target(target.double())
    for example in examples:
        if "pixel_values" in example.model_inputs:
            example.model_inputs["pixel_values"] = example.model_inputs["pixel_values"].double()
    batch = collate(examples)
    together = target_features(found, [0, 2], batch).taps
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        extra = {n: v[None] if n == "mm_token_type_ids" else v for n, v in example.model_inputs.items()}
        states = target(input_ids=torch.tensor([example.input_ids]), output_hidden_states=True, **extra).hidden_states
        alone = torch.cat([states[1], states[3]], dim=-1)[0]
        torch.testing.assert_close(together[row, :length], alone, rtol=0, atol=1e-9)
    blind = collate([Example(input_ids=e.input_ids, loss_mask=e.loss_mask) for e in examples])
    assert not torch.allclose(target_features(found, [0, 2], blind).taps[0, 10], together[0, 10])


def test_a_draft_trains_on_text_and_images(
    target: Qwen3VLForConditionalGeneration, examples: list[Example], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    config = DFlashConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        block_size=5,
        mask_token_id=55,
        num_target_layers=4,
        target_layer_ids=[0, 2],
    )
    args = DFlashTrainingConfig(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=3, learning_rate=5e-3, disable_tqdm=True
    )
    trainer = DFlashTrainer(target, DFlashDraftModel(config), examples, args, eval_dataset=examples)
    reports = trainer.train()
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert trainer.evaluations[20] > 1


def test_an_example_with_an_image_is_not_cut(examples: list[Example]) -> None:
    assert truncate(examples[0], 100) is examples[0]
    with pytest.raises(ValueError, match="expected at most 8 tokens in an example with pixel_values"):
        truncate(examples[0], 8)
