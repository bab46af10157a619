"""z-lab's own class loads what `save_draft(format="zlab")` writes, and computes the same; runs where it is installed.

`make setup` installs it with `--no-deps`, because its pins are not ours: `pip install --no-deps dflash==0.1.0`.
"""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from helpers.activations import recorded, relative_error
from helpers.published_configs import CONFIGS
from helpers.published_drafts import inputs_of, write
from tiny import DFLASH2, prompts, tiny_draft, tiny_target

dflash = pytest.importorskip(
    "dflash", reason="z-lab's package is not installed: pip install --no-deps dflash==0.1.0"
)
importlib.import_module(
    "dflash.model"
)  # which the package itself imports when it is asked for a class

FULL, SLIDING = "full_attention", "sliding_attention"
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 6},
    "causal": {"is_causal": True},
    "bias, scales": {
        "attention_bias": True,
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
        "raw_input_embeddings": True,
    },
    "dflash 2": {
        "layer_types": [SLIDING] * 2,
        "sliding_window": 6,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 3,
        "selector_top_k": 7,
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "max_position_embeddings": 64,
    },
}


@torch.no_grad()
@pytest.mark.parametrize("name", SETTINGS)
def test_zlab_loads_our_export(name: str, tmp_path: Path) -> None:
    config = DFlashConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        block_size=4,
        mask_token_id=47,
        num_target_layers=8,
        target_layer_ids=[0, 5],
        initializer_range=0.4,
        **SETTINGS[name],
    )
    torch.manual_seed(0)
    ours = DFlashDraftModel(config).double().eval()
    for parameter_name, parameter in ours.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "_conv." in parameter_name or "selector." in parameter_name:
            torch.nn.init.normal_(parameter, std=0.5)
    save_draft(ours, tmp_path, "zlab")
    # The class that its loader would choose.
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    assert architecture == ("DFlash2DraftModel" if name == "dflash 2" else "DFlashDraftModel")
    theirs, report = getattr(dflash, architecture).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert (theirs.dtype, theirs.block_size, theirs.mask_token_id) == (torch.float64, 4, 47)
    assert theirs.target_layer_ids == [0, 5]

    caches = [DynamicCache(config=model.config) for model in (ours, theirs)]
    for cache in caches:
        cache.activate_past_recording()
    length = 0
    for num_context in (9, 4, 1):
        taps = torch.randn(1, num_context, 32, dtype=torch.float64)
        noise = torch.randn(1, 4, 16, dtype=torch.float64)
        positions = torch.arange(length, length + num_context + 4)[None]
        with recorded(ours.hidden_norm, ours.layers) as got:
            out = ours(noise, taps, positions, **{CACHE_NAME: caches[0]}).last_hidden_state
        with recorded(theirs.hidden_norm, theirs.layers) as expected:
            expected["out"] = theirs(
                position_ids=positions,
                noise_embedding=noise,
                target_hidden=taps,
                past_key_values=caches[1],
            )
        for key, value in expected.items():
            assert relative_error({**got, "out": out}[key], value) < 1e-9, key
        length += num_context
        for cache in caches:
            cache.crop(length - cache.get_seq_length())

    head = torch.nn.Linear(16, 48, bias=False, dtype=torch.float64)
    hidden = torch.randn(1, 3, 16, dtype=torch.float64)
    logits = ours.compute_logits(hidden, head)
    assert relative_error(logits, theirs.compute_logits(hidden, head)) < 1e-12
    if name == "dflash 2":
        for anchor in range(48):
            path, _, _ = theirs.propose(hidden, torch.tensor([anchor]), head, 0.0)
            assert torch.equal(ours.best_path(hidden, logits, torch.tensor([anchor])), path)

    back = load_draft(tmp_path)
    assert all(
        torch.equal(tensor, back.state_dict()[key]) for key, tensor in ours.state_dict().items()
    )


def of_zlabs_layout() -> list[str]:
    """Published drafts that z-lab's own classes load."""
    names: list[str] = []
    for name, config in CONFIGS.items():
        section = config.get("dflash_config")
        # DSpark's, Laguna's and MiMo's drafts have z-lab's section of the config, and parts that its classes lack.
        parts = {"markov_rank", "attention_sink_bias"} & (section or {}).keys()
        has_other_parts = config.get("model_type") == "laguna" or parts
        if section is not None and not has_other_parts:
            names.append(name)
    return names


@torch.no_grad()
@pytest.mark.parametrize("name", of_zlabs_layout())
def test_a_published_config_computes_the_same(name: str, tmp_path: Path) -> None:
    published = CONFIGS[name]
    write(tmp_path, published)
    ours = load_draft(tmp_path, dtype=torch.float64)
    config = json.loads((tmp_path / "config.json").read_text())
    section = config["dflash_config"]
    # What z-lab's class does not know: JetSpec's and Model-Optimizer's words for causality and windows, and Qwen3's
    # rule that a window counts beside `use_sliding_window` alone, which vLLM and SGLang do not have.
    is_other = "causal_head" in section or "use_swa" in section
    if is_other:
        config |= {"is_causal": ours.config.is_causal[0], "layer_types": ours.config.layer_types}
    if ours.config.sliding_window:
        config["use_sliding_window"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture = config["architectures"][0]
    theirs = getattr(dflash, architecture).from_pretrained(tmp_path, dtype=torch.float64).eval()
    inputs = inputs_of(ours)
    caches = [DynamicCache(config=model.config) for model in (ours, theirs)]
    out = ours(**inputs, **{CACHE_NAME: caches[0]}).last_hidden_state
    expected = theirs(
        position_ids=inputs["position_ids"],
        noise_embedding=inputs["noise_embeds"],
        target_hidden=inputs["context_hidden_states"],
        past_key_values=caches[1],
    )
    assert relative_error(out, expected) < 1e-9


@pytest.mark.parametrize("kind", [{}, DFLASH2], ids=["dflash", "dflash 2"])
def test_zlabs_loop_commits_the_same_at_every_verify(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, one row: z-lab's own `dflash_generate` over the same pair, verify by verify."""
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    target: Any = tiny_target("qwen3")
    with torch.no_grad():  # few tokens to choose from, so that a random draft is right now and then
        target.get_output_embeddings().weight[6:] *= 0.05
    draft = tiny_draft(target, 6, layer_types=None, raw_input_embeddings=True, **kind)
    save_draft(draft, tmp_path, "zlab")
    theirs = (dflash.DFlash2DraftModel if kind else dflash.DFlashDraftModel).from_pretrained(
        tmp_path
    )
    # A chain of all proposals, as z-lab verifies.
    draft.generation_config.num_tree_nodes = 0
    draft.generation_config.verify_width = 6
    counts: set[int] = set()
    for seed in range(4):
        ids = prompts([5 + 4 * seed], seed)["input_ids"]
        out = dflash.model.dflash_generate(theirs, target, ids, 40, None, return_stats=True)
        ours = target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=draft)
        assert torch.equal(ours, out.output_ids)
        # Near the limit z-lab drafts a shorter block, and other tokens with it: only whole blocks compare.
        starts = [0, *itertools.accumulate(out.acceptance_lengths)]
        whole = [
            count
            for count, start in zip(out.acceptance_lengths, starts, strict=False)
            if start + 6 <= 40
        ]
        assert draft.last_stats.num_committed[0][: len(whole)] == whole
        counts |= set(whole)
    assert len(counts) > 2, "the draft is never right: the case shows nothing"
