"""Every pair of options through every format and back: the same draft, or a refusal that names what is lost."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.checkpoints.formats import FORMATS
from dflash_hf.checkpoints.mapping import FIELDS
from helpers.layouts import DFLASH2, DSPARK, FULL, OWN, SLIDING, YARN, content, make_draft

GEMMA4: dict[str, Any] = {"layer_family": "gemma4", "hidden_act": "gelu_pytorch_tanh"}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
FIRST_CHANNELS = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.7}
# Option -> the ways in which a draft may have it, the first one as most drafts.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "causality": {
        "none": {"is_causal": False},
        "all": {"is_causal": True},
        "one layer": {"is_causal": [True, False]},
        "z-lab's rule": {"is_causal": None},
    },
    "window": {
        "none": {},
        "one layer": {"layer_types": [SLIDING, FULL], "sliding_window": 5},
        "all layers": {"layer_types": [SLIDING] * 2, "sliding_window": 3},
        "from the anchor": {
            "layer_types": [SLIDING, FULL],
            "sliding_window": 5,
            "window_from_anchor": True,
        },
    },
    "rope": {
        "default": {},
        "of a part of each head": {"rope_parameters": PROPORTIONAL},
        "of the first channels": {"rope_parameters": FIRST_CHANNELS},
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "yarn": {"rope_parameters": YARN, "max_position_embeddings": 256},
        "llama3": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    },
    "vocabulary": {
        "the target's": {},
        "own head": {"own_lm_head": True},
        "own both": OWN,
        "reduced": {"own_lm_head": True, "draft_vocab_size": 13},
    },
    "anchor": {"kept": {}, "proposes": {"sample_from_anchor": True}},
    "path": {"none": {}, "DFlash 2": DFLASH2, "DSpark": DSPARK},
    "layers": {
        "Qwen3's": {},
        "Gemma 4's": GEMMA4,
        "Gemma 4's full ones": {**GEMMA4, "keys_are_values": True},
        "Laguna's": {"layer_family": "laguna"},
    },
    "attention": {
        "plain": {},
        "sinks": {"attention_sink_bias": True},
        "scaled values": {"attention_value_scale": 0.612},
    },
    # Of Gemma's embedding: the root of the hidden size.
    "scale": {"none": {}, "the root": {"input_embedding_scale": 4.0}},
}


def pairs() -> list[dict[str, str]]:
    """Every two options in all their ways, the others as most drafts have them; and each one beside other projects'.

    Pairs that no draft can have are left out.
    """
    usual = {name: next(iter(ways)) for name, ways in OPTIONS.items()}
    found: dict[str, dict[str, str]] = {}
    for one, other in itertools.combinations(OPTIONS, 2):
        for first, second in itertools.product(OPTIONS[one], OPTIONS[other]):
            choice = {**usual, one: first, other: second}
            found[str(choice)] = choice
    # DeepSpec's drafts have both of these.
    deepspec = {**usual, "vocabulary": "own both", "anchor": "proposes"}
    for_gemma4 = {**deepspec, "layers": "Gemma 4's full ones", "scale": "the root"}
    for_laguna = {**usual, "layers": "Laguna's", "causality": "all", "window": "all layers"}
    partial = {**for_gemma4, "rope": "of a part of each head"}
    for base in (deepspec, for_gemma4, partial, for_laguna):
        for one, ways in OPTIONS.items():
            for way in ways:
                choice = {**base, one: way}
                found[str(choice)] = choice
    return [choice for choice in found.values() if is_possible(choice)]


def is_possible(choice: dict[str, str]) -> bool:
    """Whether a draft can have these options: convolutions, sinks, scaled values and first channels that turn belong
    to Qwen3's layers, parts of heads with an angle for each channel to Gemma's.
    """
    is_qwen = choice["layers"] == "Qwen3's"
    is_gemma = choice["layers"].startswith("Gemma")
    turns_parts = choice["rope"] == "of a part of each head"
    has_convolutions = choice["path"] == "DFlash 2"
    turns_first = choice["rope"] == "of the first channels"
    has_plain_attention = choice["attention"] == "plain"
    needs_qwen = has_convolutions or turns_first or not has_plain_attention
    return (is_gemma or not turns_parts) and (is_qwen or not needs_qwen)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rope_parameters": PROPORTIONAL}, "rope_type in .*got 'proportional'"),
        ({**GEMMA4, **DFLASH2}, "no convolution .conv_kernel_size. beside layer_family 'gemma4'"),
        ({"keys_are_values": True}, "keys_are_values beside layer_family 'gemma4'"),
        ({"layer_family": "llama"}, "layer_family in .'qwen3', 'gemma4', 'laguna'., got 'llama'"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "a partial_rotary_factor of an even number of channels out of 6, got 3",
        ),
        (
            {"rope_parameters": {**YARN, "partial_rotary_factor": 0.7}},
            "a RoPE over whole heads, got .*partial_rotary_factor 0.7",
        ),
        ({**GEMMA4, "rope_parameters": FIRST_CHANNELS}, "a RoPE over whole heads"),
        (
            {**GEMMA4, "attention_sink_bias": True},
            "no attention_sink_bias or attention_value_scale",
        ),
        (
            {"layer_family": "laguna", "attention_value_scale": 0.5},
            "no attention_sink_bias or attention_value_scale beside layer_family 'laguna'",
        ),
        ({"attention_value_scale": float("inf")}, "a finite attention_value_scale"),
        (
            {**GEMMA4, "rope_parameters": {**PROPORTIONAL, "partial_rotary_factor": 1.5}},
            "partial_rotary_factor up to 1",
        ),
    ],
)
def test_options_that_no_draft_has_together(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_draft(**fields)


def name_of(choice: dict[str, str]) -> str:
    """The options that are not the usual ones, for a test's name."""
    unusual = [f"{n}: {way}" for n, way in choice.items() if way != next(iter(OPTIONS[n]))]
    return ", ".join(unusual) or "the usual ones"


@torch.no_grad()
def block_states(draft: DFlashDraftModel) -> torch.Tensor:
    """What a draft computes of a block behind 9 context rows, of random inputs."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 4, 16, generator=generator)
    taps = torch.randn(1, 9, 32, generator=generator)
    positions = torch.arange(13)[None]
    out = draft(noise_embeds=noise, context_hidden_states=taps, position_ids=positions)
    return out.last_hidden_state


def refusal_of(draft: DFlashDraftModel, folder: Path, layout: Any) -> str:
    """Saves a draft; returns the sentence of a refusal, else nothing."""
    try:
        save_draft(draft, folder, layout)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("choice", pairs(), ids=name_of)
def test_there_and_back_or_refused_by_name(choice: dict[str, str], tmp_path: Path) -> None:
    draft = draft_of(choice)
    state = draft.state_dict()
    expected = block_states(draft)
    for layout in FORMATS:
        there = tmp_path / layout
        refusal = refusal_of(draft, there, layout)
        if refusal:
            named = set(re.findall(r"(\w+) = ", refusal))
            assert named & set(FIELDS), refusal
            assert "expected a draft that the format" in refusal
            assert not there.exists()
            continue
        again = load_draft(there)
        assert content(again.config) == content(draft.config), layout
        assert again.state_dict().keys() == state.keys(), layout
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, state[name]), (layout, name)
        assert torch.equal(block_states(again), expected), layout


def draft_of(choice: dict[str, str]) -> DFlashDraftModel:
    """A tiny random draft with these options."""
    fields: dict[str, Any] = {"raw_input_embeddings": True}
    for name, way in choice.items():
        fields |= OPTIONS[name][way]
    return make_draft(**fields)


# How many of the pairs each format expresses.
EXPRESSED = {
    "dflash": 289,
    "laguna": 12,
    "zlab": 84,
    "speculators": 57,
    "muse": 16,
    "deepspec-gemma4": 11,
    "deepspec": 6,
}


@pytest.fixture(scope="module")
def drafts() -> list[tuple[DFlashConfig, frozenset[str]]]:
    """Config and names of weights of a draft of each pair."""
    found: list[tuple[DFlashConfig, frozenset[str]]] = []
    for choice in pairs():
        draft = draft_of(choice)
        found.append((draft.config, frozenset(draft.state_dict())))
    return found


@pytest.mark.parametrize("layout", FORMATS)
def test_what_a_format_expresses(
    layout: str, drafts: list[tuple[DFlashConfig, frozenset[str]]]
) -> None:
    form = FORMATS[layout]
    count = 0
    for config, names in drafts:
        try:
            form.write_config(config, "float32", names)
        except ValueError:
            continue
        count += 1
    assert count == EXPRESSED[layout]
