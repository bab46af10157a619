"""Published drafts, from their configs with random weights: loaded as they are meant, or refused by a key's name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.checkpoints.drafts import inspect_draft, load_draft
from dflash_hf.checkpoints.formats import detect_format
from dflash_hf.checkpoints.mapping import make_config
from dflash_hf.cli.drafts import published_drafts
from helpers.activations import relative_error
from helpers.published_configs import CONFIGS, REFUSED, SLIDING, tiny
from helpers.published_drafts import STORED, inputs_of, write

DOCS = Path(__file__).parents[2] / "docs" / "drafts.md"


@torch.no_grad()
def block_states(draft: DFlashDraftModel) -> torch.Tensor:
    """What a draft computes of a block behind 9 context rows, of random inputs."""
    return draft(**inputs_of(draft)).last_hidden_state


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_loads(name: str, tmp_path: Path) -> None:
    published = CONFIGS[name]
    first = write(tmp_path, published)
    draft = load_draft(tmp_path, dtype=torch.float32)
    assert torch.equal(block_states(draft), block_states(first))
    form = detect_format(published)
    section = published.get("dflash_config", {})
    decoder = published.get("transformer_layer_config", published)
    # Of the config as it was published.
    weights = frozenset(STORED.get(form.name, ()))
    config = make_config(form.read_config(published, weights))
    assert config.block_size == section.get("block_size", published.get("block_size"))
    assert config.mask_token_id == section.get("mask_token_id", published.get("mask_token_id"))
    assert config.hidden_size == decoder["hidden_size"]
    kinds = decoder.get("layer_types", config.layer_types)
    if section.get("use_swa"):
        kinds = [SLIDING] * len(kinds)
    assert config.layer_types == kinds
    assert inspect_draft(tmp_path)["format"] == form.name


@pytest.mark.parametrize("name", REFUSED)
def test_a_variant_is_refused_by_name(name: str, tmp_path: Path) -> None:
    published, sentence = REFUSED[name]
    write(tmp_path, CONFIGS["z-lab/Qwen3-8B-DFlash-b16"])
    (tmp_path / "config.json").write_text(json.dumps(tiny(published)))
    for door in (load_draft, inspect_draft):
        with pytest.raises(ValueError, match=sentence):
            door(tmp_path)


CAUSALITY = {
    "z-lab/Qwen3-8B-DFlash-b16": [False] * 5,
    "z-lab/Qwen3.5-27B-DFlash": [True] * 5 + [False],
    "z-lab/Qwen3.8-27B-DFlash2": [False] * 5,
    "JetSpec/jetspec-qwen3-8b": [True] * 5,
    "JetSpec/jetspec-Qwen3.6-35B-A3B": [True] * 8,
    "nm-testing/dflash-qwen3-8b-speculators": [False] * 5,
    "Model-Optimizer, with a window": [False] * 5,
}


@pytest.mark.parametrize("name", CAUSALITY)
def test_causality_of_published_drafts(name: str, tmp_path: Path) -> None:
    assert write(tmp_path, CONFIGS[name]).config.is_causal == CAUSALITY[name]


@torch.no_grad()
def test_transformers_own_draft_computes_the_same(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["meta-models/Muse-Glimmer-30B-assistant"])
    ours = load_draft(tmp_path, dtype=torch.float64)
    theirs: Any = MuseGlimmerAssistantModel.from_pretrained(tmp_path, dtype=torch.float64)
    inputs = inputs_of(ours)
    cache = DFlashCache(config=theirs.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(9)
    out = theirs(**inputs, attention_mask=None, **{CACHE_NAME: cache}).last_hidden_state
    assert relative_error(block_states(ours), out) < 1e-9


# ---- the table


@pytest.mark.parametrize("one", published_drafts(), ids=lambda one: one.draft)
def test_a_row_says_what_was_checked(one: Any) -> None:
    assert (one.draft in REFUSED) == (one.checked == "refused")
    if one.draft in CONFIGS:
        assert one.checked in ("config", "layout")
    if one.checked == "config":
        config = CONFIGS[one.draft]
        form = detect_format(config)
        assert form.name == one.format
        block = config.get("dflash_config", {}).get("block_size", config.get("block_size"))
        assert one.block_size in (block, None)


def test_every_doc_uses_drafts_whose_config_loads() -> None:
    by_name = {one.draft: one for one in published_drafts()}
    root = DOCS.parents[1]
    named: set[str] = set()
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        # Logs tell what was, of drafts of any kind.
        if not page.name.startswith("log"):
            named |= {name for name in by_name if name in page.read_text()}
    assert "z-lab/Qwen3-8B-DFlash-b16" in named
    assert {by_name[name].checked for name in named} == {"config"}


def test_the_docs_list_what_loads_from_its_config() -> None:
    listed = re.findall(r"\(https://huggingface.co/([\w.-]+/[\w.-]+)\)", DOCS.read_text())
    assert listed == [one.draft for one in published_drafts() if one.checked == "config"]
