"""Writes tests/parity/goldens/zlab: z-lab's own checkpoints and the activations of z-lab's own code, in float64.

Needs z-lab's package, whose pins we do not want in the development environment:

    python -m venv /tmp/zlab --system-site-packages        # anything with torch and transformers >= 5.15
    /tmp/zlab/bin/pip install --no-deps dflash==0.1.0      # MIT, https://github.com/z-lab/dflash
    /tmp/zlab/bin/python tests/parity/make_goldens.py

`scales.safetensors` holds what z-lab's code does around its model with the keys of `SCALES`.
One set of weights serves all variants. Per variant: a `config.json` as z-lab's class saves it, and for each of three
calls with a growing cache the inputs, the context features, every layer's output and the result.
"""

import json
from pathlib import Path
from typing import Any

import torch
from dflash import DFlashDraftModel
from dflash.model import _draft_value, _raw_input_embeddings
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3Config

from dflash_hf.block.cache_name import CACHE_NAME

GOLDENS = Path(__file__).parent / "goldens" / "zlab"
# (new context tokens, block) per call: a prompt, then what the last block committed.
CALLS = ((9, 4), (3, 4), (1, 4))
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED: dict[str, Any] = {
    "layer_types": [SLIDING, FULL, SLIDING],
    "use_sliding_window": True,
    "sliding_window": 5,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-causal": {"is_causal": True},
    "mixed": MIXED,
    "mixed-causal": {**MIXED, "is_causal": True},
    "mixed-bidirectional": {**MIXED, "is_causal": False},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


SCALES = {"input_embedding_scale": 2.5, "output_multiplier": 0.3, "final_logit_softcapping": 1.5}


def make_config(**overrides: Any) -> Qwen3Config:
    """A tiny draft in z-lab's form: width 16, 3 layers, 3 taps, block 4."""
    settings: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "layer_types": [FULL] * 3,
        "max_position_embeddings": 64,
        "block_size": CALLS[0][1],
        "num_target_layers": 8,
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 4, 6]},
    }
    return Qwen3Config(**{**settings, **overrides})


def make_model(config: Qwen3Config) -> DFlashDraftModel:
    """z-lab's model with weights that hide nothing: norms far from one, attention far from uniform."""
    torch.manual_seed(0)
    model = DFlashDraftModel(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def record(model: DFlashDraftModel) -> dict[str, torch.Tensor]:
    """Runs the calls with one cache, cropped after each as z-lab's loop does, and keeps every activation."""
    model = model.double()
    kept: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)

    def normal(length: int, width: int) -> torch.Tensor:
        return torch.randn(1, length, width, generator=generator, dtype=torch.float64)

    prefix = ""
    hooks = [
        model.hidden_norm.register_forward_hook(
            lambda m, i, o: kept.update({f"{prefix}.context": o})
        )
    ]
    for index, layer in enumerate(model.layers):
        hooks.append(
            layer.register_forward_hook(
                lambda m, i, o, index=index: kept.update({f"{prefix}.layer_{index}": o})
            )
        )
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    length = 0
    for call, (num_context, block) in enumerate(CALLS):
        prefix = f"call_{call}"
        taps = normal(num_context, model.fc.in_features)
        noise = normal(block, model.config.hidden_size)
        positions = torch.arange(length, length + num_context + block)[None]
        out = model(
            position_ids=positions,
            noise_embedding=noise,
            target_hidden=taps,
            **{CACHE_NAME: cache},
            use_cache=True,
        )
        kept.update({f"{prefix}.taps": taps, f"{prefix}.noise": noise, f"{prefix}.out": out})
        length += num_context
        cache.crop(length - cache.get_seq_length())
    for hook in hooks:
        hook.remove()
    return {name: tensor.clone() for name, tensor in kept.items()}


@torch.no_grad()
def write_scales() -> None:
    """Writes a config with scales, and a block's embeddings and logits by z-lab's functions."""
    config = make_config()
    config.dflash_config = {**config.dflash_config, **SCALES, "mask_token": "<|MASK|>"}
    model = make_model(config).double()
    generator = torch.Generator().manual_seed(2)
    weights = {
        n: torch.randn(40, 16, generator=generator, dtype=torch.float64)
        for n in ("embedding", "head")
    }
    target = torch.nn.Module()
    target.get_input_embeddings = lambda: torch.nn.Embedding.from_pretrained(weights["embedding"])
    head = torch.nn.Linear(16, 40, bias=False, dtype=torch.float64)
    head.weight.data = weights["head"]
    ids = torch.randint(0, 40, (1, 4), generator=generator)
    hidden = torch.randn(1, 4, 16, generator=generator, dtype=torch.float64)
    scale = float(_draft_value(config, "input_embedding_scale", 1.0))
    kept = {"ids": ids, "hidden": hidden, "embedded": _raw_input_embeddings(target, ids, scale)}
    save_file(
        {**weights, **kept, "logits": model.compute_logits(hidden, head)},
        GOLDENS / "scales.safetensors",
    )
    written = json.dumps(config.to_dict(), indent=1, sort_keys=True) + "\n"
    (GOLDENS / "scales.json").write_text(written)


def main() -> None:
    """Writes all variants, and checks that they share their weights and differ in their results."""
    GOLDENS.mkdir(parents=True, exist_ok=True)
    outs: list[torch.Tensor] = []
    for name, overrides in VARIANTS.items():
        model = make_model(make_config(**overrides))
        folder = GOLDENS / name
        model.save_pretrained(folder)
        (folder / "model.safetensors").replace(GOLDENS / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        activations = record(model)
        save_file(activations, folder / "activations.safetensors")
        outs.append(activations[f"call_{len(CALLS) - 1}.out"])
    write_scales()
    for index, out in enumerate(outs):
        assert all((out - other).abs().max() > 1e-3 for other in outs[:index]), (
            "two variants compute the same"
        )


if __name__ == "__main__":
    main()
