"""`torch.set_default_device` of the caller's: every tensor that is made names its own device.

The default is `meta` here, whose tensors cannot be read, so that nothing can go there unnoticed. Plain `generate`
works under it without sliding windows, and `from_pretrained` refuses it by a sentence of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_hf import iterate, load_draft, save_draft
from dflash_hf.block.cache_name import CACHE_NAME
from helpers.source_tree import read_modules
from helpers.static import set_engine, tensor_oracle
from tiny import DFLASH2, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
ENGINES = ("eager", "static")
# Weights and buffers go where the model is built, as Transformers' own do.
BUILT = {
    "dflash_hf.modeling_dflash",
    "dflash_hf.draft_model.layers",
    "dflash_hf.draft_model.dflash2",
    "dflash_hf.draft_model.dspark",
    "dflash_hf.draft_model.gemma4",
}
MAKERS = "empty|zeros|ones|full|arange|linspace|eye|rand|randn|randint|randperm|tensor|as_tensor"


@contextmanager
def under_meta() -> Iterator[None]:
    """Makes `meta` the default device for as long as it lasts."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_greedy(family: str, engine: Any) -> None:
    target, inputs = shallow_target(family), prompts([4, 9], 0)
    with under_meta():
        ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0)
    set_engine(draft, engine)
    with under_meta():
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.acceptance_length > 1.5
        draft.generation_config.verify_width = "auto"
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)


def one_row(ids: Tensor, scores: Any) -> bool:
    """A criterion that returns no tensor."""
    return ids.shape[1] > 16


def rows(ids: Tensor, scores: Any) -> Tensor:
    """A criterion for several rows."""
    return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


SETTINGS: dict[str, dict[str, Any]] = {
    "no-mask": {"attention_mask": None},
    "eos": {"eos_token_id": [3, 4, 5]},
    "sample": {"do_sample": True, "top_k": 5},
    "prefix": {"do_sample": True, "repetition_penalty": 1.3},
    "criterion": {"stopping_criteria": [rows]},
    "time": {"max_time": 100.0},
    "outputs": {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
    },
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, engine: Any) -> None:
    target, inputs = shallow_target("qwen3"), prompts([9, 9], 0)
    settings = {**inputs, **GREEDY, "max_new_tokens": 6, **SETTINGS[name]}
    draft = tiny_draft(target)
    set_engine(draft, engine)

    def text() -> Tensor:
        torch.manual_seed(0)
        out: Any = target.generate(**settings, assistant_model=draft)
        return out if isinstance(out, Tensor) else out.sequences

    ref = text()
    with under_meta():
        assert torch.equal(text(), ref)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_row_and_two_turns(engine: Any) -> None:
    target, inputs = shallow_target("qwen3"), prompts([9], 0)
    draft = tiny_draft(target, **DFLASH2)
    set_engine(draft, engine)
    ref = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    cache = DynamicCache(config=target.config)
    settings: dict[str, Any] = {**GREEDY, "stopping_criteria": [one_row], "assistant_model": draft}
    with under_meta():
        ids = target.generate(**inputs, **settings, **{CACHE_NAME: cache})
        assert torch.equal(ids, ref)
        more = target.generate(
            ids, max_new_tokens=6, do_sample=False, **{CACHE_NAME: cache}, assistant_model=draft
        )
        steps = list(
            iterate(
                target, draft, **inputs, **GREEDY, output_logits=True, output_hidden_states=True
            )
        )
    assert torch.equal(more, target.generate(ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(torch.cat([step.committed[0] for step in steps]), more[0, 9:])


def test_files(tmp_path: Path) -> None:
    target = shallow_target("qwen3")
    settings: dict[str, Any] = {
        "own_embed_tokens": True,
        "own_lm_head": True,
        "draft_vocab_size": 32,
    }
    draft = tiny_draft(target, sliding_window=None, layer_types=None, is_causal=False, **settings)
    with under_meta():
        save_draft(draft, tmp_path / "ours")
        save_draft(draft, tmp_path / "theirs", "speculators", target=target)
    for folder in ("ours", "theirs"):
        assert load_draft(tmp_path / folder).config.draft_vocab_size == 32
        with under_meta(), pytest.raises(RuntimeError, match="This is an anti-pattern"):
            load_draft(tmp_path / folder)


def unnamed(source: ast.AST) -> Iterator[ast.Call]:
    """Calls that make a tensor and leave its device to the default."""
    for node in ast.walk(source):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        is_maker = is_of_torch and re.fullmatch(MAKERS, node.func.attr)
        if is_maker and not any(key.arg == "device" for key in node.keywords):
            yield node


def test_every_tensor_names_its_device() -> None:
    found = [
        module.at(call, ast.unparse(call))
        for module in read_modules()
        if module.name.startswith("dflash_hf.") and module.name not in BUILT
        for call in unnamed(module.tree)
    ]
    assert not found
    assert (
        len(list(unnamed(ast.parse("torch.zeros(2); torch.zeros(2, device=d); x.new_zeros(2)"))))
        == 1
    )
