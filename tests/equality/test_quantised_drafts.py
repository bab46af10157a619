"""A draft that torchao or bitsandbytes has quantised: the target's text, and nearly as much accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel, load_draft, save_draft
from helpers.whole_blocks import use_whole_blocks

TOY = Path(__file__).parents[2] / "demos" / "toy"
NEW = 80


@cache
def questions() -> tuple[Any, Any]:
    """The bundled target, and prompts of which its draft knows much."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TOY / "target", padding_side="left")
    rows = [json.loads(line) for line in (TOY / "held_out.jsonl").read_text().splitlines()[:8]]
    texts = [
        tokenizer.apply_chat_template(
            row["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return AutoModelForCausalLM.from_pretrained(TOY / "target").eval(), inputs


def accepted(draft: DFlashDraftModel) -> float:
    """Checks the text, and returns the tokens per verify."""
    target, inputs = questions()
    settings = {"max_new_tokens": NEW, "do_sample": False}
    use_whole_blocks(draft)
    out = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(out, target.generate(**inputs, **settings))
    return draft.last_stats.acceptance_length


def by_torchao() -> DFlashDraftModel:
    """8-bit weights, written over the draft's."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    draft = load_draft(TOY / "draft")
    quantization.quantize_(draft, quantization.Int8WeightOnlyConfig())
    return draft


def by_transformers_torchao() -> DFlashDraftModel:
    """8-bit weights of torchao, as Transformers' argument has them."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    transformers = pytest.importorskip("transformers")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return load_draft(TOY / "draft", quantization_config=config)


def by_bitsandbytes() -> DFlashDraftModel:
    """8 bits of bitsandbytes, as Transformers' argument has them."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    transformers = pytest.importorskip("transformers")
    return load_draft(
        TOY / "draft", quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)
    )


WAYS = [by_torchao, by_transformers_torchao, by_bitsandbytes]


@pytest.mark.parametrize("quantised", WAYS)
def test_a_draft_of_8_bits_guesses_as_well(quantised: Callable[[], DFlashDraftModel]) -> None:
    draft = quantised()
    as_stored = accepted(load_draft(TOY / "draft"))
    assert as_stored > 4
    assert accepted(draft) > 0.98 * as_stored


@pytest.mark.parametrize("layout", ["dflash", "zlab"])
@pytest.mark.parametrize("quantised", WAYS)
def test_a_quantised_draft_is_not_saved(
    quantised: Callable[[], DFlashDraftModel], layout: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"a draft with ordinary weights to save, got .*quantise it"
    ):
        save_draft(quantised(), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def test_weights_of_another_library_are_not_saved(tmp_path: Path) -> None:
    class Foreign(torch.nn.Parameter):
        """Stands for what torchao and bitsandbytes put in a weight's place."""

    draft = load_draft(TOY / "draft")
    draft.fc.weight = Foreign(draft.fc.weight.data)
    with pytest.raises(ValueError, match=r"got '\w+.Foreign'; save the draft as it was before"):
        draft.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
