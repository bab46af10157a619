"""A LoRA on a draft lets it follow a target that was fine-tuned: only adapters move, and merging changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.training import Example, regenerate_answers, walked_acceptance
from dflash_hf.training.anchors import all_anchors
from dflash_hf.training.collators import collate
from dflash_hf.training.forward import run_blocks, target_features
from dflash_hf.training.loss import block_labels, block_loss, decay_weights
from helpers.whole_blocks import use_whole_blocks

# PEFT's own use of a property that Transformers renamed.
pytestmark = pytest.mark.filterwarnings("default:`is_gradient_checkpointing`:FutureWarning")
MODULES = ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": 3, "pad_token_id": 0}
PROMPTS = [[5, 9, 2], [11, 4, 8, 7, 30, 1], [17], [20, 21, 6]]


def train(
    draft: DFlashDraftModel, target: Qwen3ForCausalLM, examples: list[Example], steps: int
) -> list[float]:
    """Trains whatever wants a gradient on all anchors; returns the losses."""
    found, batch = find_target(target), collate(examples)
    anchors = all_anchors(batch.loss_mask, draft.config.block_size)
    labels = block_labels(batch, anchors)
    weights = decay_weights(draft.config.block_size, 4.0)
    taps = target_features(found, draft.config.target_layer_ids, batch).taps
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        hidden = run_blocks(draft, found, batch, taps, anchors)
        result = block_loss(
            hidden, labels, weights, lambda states: draft.compute_logits(states, found.head)
        )
        (result.loss / result.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result.loss.detach() / result.weight))
    return losses


def test_a_lora_follows_a_fine_tuned_target(target: Qwen3ForCausalLM, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(3)
    target = target.double().requires_grad_(False)
    draft = DFlashDraftModel.from_target(
        target, num_hidden_layers=2, block_size=6, target_layer_ids=[0, 2], mask_token_id=47
    ).double()
    published = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    for parameter in target.model.layers.parameters():  # somebody fine-tunes the target
        parameter.add_(torch.randn_like(parameter) * 0.05)
    answers = regenerate_answers(target, PROMPTS, **OPTIONS)
    examples = [Example.from_pair(*row) for row in zip(PROMPTS, answers, strict=True)]

    wrapped = peft.get_peft_model(draft, peft.LoraConfig(r=4, lora_alpha=8, target_modules=MODULES))
    fresh = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    losses = train(draft, target, examples, 20)
    assert losses[-1] < losses[0] - 0.5
    moved = {
        name
        for name, tensor in wrapped.state_dict().items()
        if not torch.equal(tensor, fresh[name])
    }
    assert moved == {name for name in fresh if "lora_" in name}
    assert len(moved) == 2 * (1 + 7 * 2)

    # Decoding with the adapted draft, however it is handed over, and what training says of it.
    draft.eval()
    ids = torch.tensor([[0] * (6 - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (6 - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "do_sample": False,
        **OPTIONS,
    }
    plain = target.generate(**inputs)
    walked = walked_acceptance(draft, find_target(target), examples)
    assert walked.acceptance_length > 1.1, "the draft is never right: the case shows nothing"
    use_whole_blocks(draft)
    for given in (draft, wrapped):
        assert torch.equal(target.generate(**inputs, assistant_model=given), plain)
        assert given.last_stats.num_committed == walked.committed

    # The adapter alone is saved, and goes onto the published draft again.
    wrapped.save_pretrained(tmp_path / "adapter")
    size = sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors"))
    assert size < sum(tensor.nbytes for tensor in published.values()) / 2
    again = DFlashDraftModel(draft.config).double().eval()
    again.load_state_dict(published)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").double()
    assert walked_acceptance(again, find_target(target), examples).committed == walked.committed
    merged = loaded.merge_and_unload()
    assert type(merged) is DFlashDraftModel
    assert merged.state_dict().keys() == published.keys()
    states = [run(part, target, examples) for part in (draft, merged)]
    torch.testing.assert_close(states[0], states[1], rtol=1e-10, atol=1e-10)
    use_whole_blocks(merged)
    assert torch.equal(target.generate(**inputs, assistant_model=merged), plain)
    assert merged.last_stats.num_committed == walked.committed
    merged.save_pretrained(tmp_path / "merged")
    stored = DFlashDraftModel.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in merged.state_dict().items())


@torch.no_grad()
def run(draft: DFlashDraftModel, target: Qwen3ForCausalLM, examples: list[Example]) -> torch.Tensor:
    """States of all blocks."""
    found, batch = find_target(target), collate(examples)
    anchors = all_anchors(batch.loss_mask, draft.config.block_size)
    taps = target_features(found, draft.config.target_layer_ids, batch).taps
    return run_blocks(draft, found, batch, taps, anchors)
