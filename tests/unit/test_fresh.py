"""A fresh draft for a target: the published recipes, a mask token that stands in no text, logits that begin small."""

from __future__ import annotations

import logging as python_logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.fresh import choose_mask_token, fresh_config
from dflash_hf.checkpoints.mapping import FIELDS
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.anchors import all_anchors
from dflash_hf.training.collators import collate
from dflash_hf.training.example import Example
from dflash_hf.training.forward import run_blocks, target_features
from dflash_hf.training.loss import block_labels, block_loss, decay_weights
from tiny import DFLASH2, VOCAB, prompts, tiny_target


def recipe(name: str, fields: dict[str, Any], **changes: Any) -> Any:
    """The config of a draft with default options for a target of that shape, whose weights are nowhere."""
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(**fields)
        target = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    return fresh_config(
        target, {"num_hidden_layers": 5, "block_size": 16, "mask_token_id": 7, **changes}
    )


QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_recipe_for_qwen3_8b_is_the_published_one() -> None:
    """Every field of z-lab's Qwen3-8B-DFlash-b16, which is what `DFlashConfig()` says."""
    ours, theirs = recipe("Qwen3", QWEN3_8B, mask_token_id=151669), DFlashConfig(dtype="float32")
    assert ours.to_dict() == theirs.to_dict()
    assert ours.target_layer_ids == [1, 9, 17, 25, 33]


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (
            "Llama",
            {"num_key_value_heads": 8, "rope_parameters": LLAMA3_ROPE},
            {"rope_parameters": LLAMA3_ROPE},
        ),
        (
            # Heads of 256, of which a quarter is rotated, and no MLP of its own width
            "Qwen3_5MoeText",
            {
                "num_hidden_layers": 40,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
            }
            | {
                "head_dim": 256,
                "rope_parameters": {
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "rope_type": "default",
                },
            },
            {
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
            }
            | {
                "target_layer_ids": [1, 10, 19, 28, 37],
                "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
            },
        ),
        ("Phi3", {}, {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 96}),
        (
            "Llama",
            {"num_attention_heads": 12, "hidden_size": 768},
            {"num_attention_heads": 12, "num_key_value_heads": 6},
        ),
        (
            "Gemma3Text",
            {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6},
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_window": None,
            },
        ),
        ("OPT", {"ffn_dim": 3072}, {"intermediate_size": 2304, "head_dim": 64}),
    ],
)
def test_shapes_come_from_the_targets_text_config(
    name: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = recipe(name, {"num_hidden_layers": 8, **fields})
    assert {field: getattr(config, field) for field in expected} == expected
    assert set(config.layer_types) == {"full_attention"}


def test_a_shallow_target_has_fewer_taps() -> None:
    assert recipe("Qwen3", {**QWEN3_8B, "num_hidden_layers": 5}).target_layer_ids == [1, 2]
    assert recipe("Qwen3", QWEN3_8B, target_layer_ids=[3, 8]).target_layer_ids == [3, 8]


# ---- the mask token


def tokenizer_of(
    words: list[str], special: tuple[str, ...] = (), **roles: str
) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, the special ones behind them."""
    inner = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0])
    )
    inner.add_special_tokens([AddedToken(word, special=True) for word in special])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0], **roles)


WORDS = [f"w{index}" for index in range(VOCAB - 4)]


@pytest.mark.parametrize(
    ("tokenizer", "mask", "words"),
    [
        (
            tokenizer_of(WORDS, ("<m>",), mask_token="<m>"),
            VOCAB - 4,
            "the tokenizer's own mask token",
        ),
        (tokenizer_of(WORDS), VOCAB - 4, "the first one behind"),
        (
            tokenizer_of(
                WORDS,
                (
                    "<a>",
                    "<b>",
                ),
            ),
            VOCAB - 2,
            "the first one behind",
        ),
        (
            tokenizer_of(
                WORDS,
                (
                    "<a>",
                    "<reserved_0>",
                    "<reserved_1>",
                    "<b>",
                ),
            ),
            VOCAB - 3,
            "'<reserved_0>'",
        ),
        (
            tokenizer_of(
                WORDS,
                (
                    "<a>",
                    "<b>",
                    "<c>",
                    "<d>",
                ),
                eos_token="<d>",
            ),
            VOCAB - 2,
            "'<c>'",
        ),
    ],
)
def test_the_mask_token_stands_in_no_text_and_is_said(
    tokenizer: PreTrainedTokenizerFast, mask: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target("llama")
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(python_logging.WARNING):
        for given in (tokenizer, SimpleNamespace(tokenizer=tokenizer)):  # a processor holds one
            assert choose_mask_token(target, given, VOCAB) == mask
    assert len(caplog.messages) == 2
    assert f"mask token is {mask}, " in caplog.text
    assert words in caplog.text


def test_a_named_special_token_is_no_mask_token() -> None:
    target = tiny_target("llama")
    assert choose_mask_token(target, tokenizer_of(WORDS[:-8]), VOCAB) == VOCAB - 12
    target.config.image_token_id = VOCAB - 12
    target.generation_config.eos_token_id = [VOCAB - 11, 2]
    assert choose_mask_token(target, tokenizer_of(WORDS[:-8]), VOCAB) == VOCAB - 10
    full = tokenizer_of(
        WORDS,
        (
            "<a>",
            "<b>",
            "<c>",
            "<d>",
        ),
        eos_token="<d>",
    )
    full.chat_template = "<c>{{ messages }}"
    assert choose_mask_token(target, full, VOCAB) == VOCAB - 3


# ---- what it begins with


def trained_shape() -> Any:
    """A target whose head is as that of a trained one: long rows, tied, and tokens that it never saw of one kind."""
    target: Any = tiny_target("qwen3", vocab_size=2048, hidden_size=128, tie_word_embeddings=True)
    rows = torch.randn(2048, 128, generator=torch.Generator().manual_seed(0)).double() * 0.15
    rows[1024:] = (
        rows[1024:] * 0.3
        + torch.randn(128, generator=torch.Generator().manual_seed(1)).double() * 0.2
    )
    target.get_input_embeddings().weight.data.copy_(rows)
    target.model.norm.weight.data.fill_(1.8)
    return target


def first_loss(target: Any, draft: DFlashDraftModel) -> float:
    """Cross entropy of a draft's first proposals for random text of the tokens that the target saw."""
    ids = torch.randint(3, 1024, (2, 40), generator=torch.Generator().manual_seed(2)).tolist()
    batch, found = (
        collate([Example.from_pair(row[:8], row[8:]) for row in ids]),
        find_target(target),
    )
    anchors = all_anchors(batch.loss_mask, draft.config.block_size)
    with torch.no_grad():
        taps = target_features(found, draft.config.target_layer_ids, batch).taps
        hidden = run_blocks(draft, found, batch, taps, anchors)
        labels = block_labels(batch, anchors)
        weights = decay_weights(draft.config.block_size, 7.0)
        result = block_loss(
            hidden, labels, weights, lambda states: draft.compute_logits(states, found.head)
        )
    return float(result.loss / result.weight)


@pytest.mark.parametrize("fields", [{}, {"own_lm_head": True, "own_embed_tokens": True}, DFLASH2])
def test_the_first_loss_is_near_that_of_knowing_nothing(fields: dict[str, Any]) -> None:
    target = trained_shape()
    nothing = math.log(2048)
    losses: list[tuple[float, ...]] = []
    for seed in range(5):
        torch.manual_seed(seed)
        draft = DFlashDraftModel.from_target(
            target, mask_token_id=2047, num_hidden_layers=2, **fields
        ).double()
        signed = first_loss(target, draft)
        draft.norm.weight.data.abs_()
        unsigned = first_loss(target, draft)
        draft.norm.weight.data.fill_(1.0)
        losses.append((signed, unsigned, first_loss(target, draft)))
    signed, unsigned, of_ones = (sum(column) / len(column) for column in zip(*losses, strict=True))
    assert signed == pytest.approx(nothing, abs=1.5)
    assert max(row[0] for row in losses) < nothing + 4
    assert unsigned > nothing + 8
    assert of_ones > nothing + 20, "the case shows nothing"


# ---- kinds of drafts

SOME = [3, 4, 5, 8, 11, 12, 17, 20, 21, 22, 30, 31, 33, 40, 47, 52, 53, 60, 62]
OWN: dict[str, Any] = {"own_embed_tokens": True, "own_lm_head": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "from the anchor": {"sample_from_anchor": True, "block_size": 7},
    "own": OWN,
    "reduced": {"draft_token_ids": SOME[::-1]},
    "speculators": {
        **OWN,
        "draft_token_ids": SOME,
        "sample_from_anchor": True,
        "window_from_anchor": True,
    }
    | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
    "dflash 2": DFLASH2,
}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_drafts_saves_and_loads(kind: str, family: str, tmp_path: Path) -> None:
    target = tiny_target(family)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    torch.manual_seed(1)
    draft = DFlashDraftModel.from_target(
        target, num_hidden_layers=2, mask_token_id=VOCAB - 1, **KINDS[kind]
    )
    assert all(
        parameter.dtype == torch.float32 and parameter.requires_grad
        for parameter in draft.parameters()
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert all(getattr(loaded.config, name) == getattr(draft.config, name) for name in FIELDS)
    assert all(
        torch.equal(tensor, loaded.state_dict()[name])
        for name, tensor in draft.state_dict().items()
    )
    inputs = prompts([5, 9], 1)
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    out = target.generate(
        **inputs, max_new_tokens=12, do_sample=False, assistant_model=loaded.double()
    )
    assert torch.equal(out, plain)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])  # Gemma scales its embedding
def test_own_weights_begin_as_the_targets(family: str) -> None:
    target: Any = tiny_target(family)
    shared = DFlashDraftModel.from_target(target, num_hidden_layers=1, mask_token_id=7)
    own = DFlashDraftModel.from_target(
        target, num_hidden_layers=1, mask_token_id=7, draft_token_ids=SOME[::-1], **OWN
    )
    ids = torch.arange(VOCAB)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    assert torch.equal(own.embed(ids, torch.nn.Identity()), shared.embed(ids, embedding).float())
    states: Tensor = torch.randn(3, 32)
    reduced, full = own.compute_logits(states, torch.nn.Identity()), head.float()(states)
    torch.testing.assert_close(reduced[:, SOME], full[:, SOME])
    assert int((reduced > -torch.inf).sum()) == 3 * len(SOME)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask_token_id": None}, "expected the target's tokenizer or mask_token_id, got neither"),
        ({"mask_token_id": VOCAB}, rf"mask_token_id in \[0, {VOCAB}\)"),
        (
            {"vocab_size": 9, "hidden_size": 8},
            r"fields of the draft alone, got \['hidden_size', 'vocab_size'\]",
        ),
        ({"num_layers": 3}, "fields of DFlashConfig, got 'num_layers'; fix the name"),
        ({"num_taps": 0}, "num_taps >= 1, got 0"),
        ({"target_layer_ids": [9]}, "target_layer_ids below num_target_layers = 4"),
        ({"block_size": 1}, "block_size >= 2"),
        (
            {"draft_vocab_size": 9},
            "draft_token_ids beside draft_vocab_size, got 9; say which tokens",
        ),
        ({"draft_token_ids": [3, 3]}, f"different draft_token_ids from 0 to {VOCAB - 1}"),
        ({"draft_token_ids": [VOCAB]}, "different draft_token_ids"),
        ({"draft_token_ids": []}, "different draft_token_ids"),
        ({"conv_kernel_size": 2}, "conv_kernel_size and conv_group_size"),
    ],
)
def test_bad_options_are_refused_before_anything_is_built(
    options: dict[str, Any], words: str
) -> None:
    target = tiny_target("qwen3")
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        DFlashDraftModel.from_target(target, **{"mask_token_id": 7, **options})
    assert torch.equal(torch.get_rng_state(), state)


def test_no_token_is_left() -> None:
    with pytest.raises(
        ValueError, match=f"uses all {VOCAB} rows of the embedding; pass a rare token"
    ):
        DFlashDraftModel.from_target(
            tiny_target("qwen3"), tokenizer=tokenizer_of([f"w{index}" for index in range(VOCAB)])
        )


def test_models_that_cannot_be_targets_are_refused() -> None:
    seq2seq = T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
    )
    for model in (seq2seq, tiny_target("qwen3").model):
        with pytest.raises(
            ValueError, match="decoder-only target with an input embedding and an output head"
        ):
            DFlashDraftModel.from_target(model, mask_token_id=1)
