"""Writes tests/parity/goldens/dflash2: DFlash 2 checkpoints and what z-lab's own code computes with them, in float64.

Needs z-lab's package beside this project's dependencies, see make_goldens.py. Run it from the root:

    /tmp/zlab/bin/python tests/parity/make_dflash2_goldens.py

Per variant: `config.json` and `model.safetensors` as published checkpoints have them, and for each of three calls with
a growing cache the inputs, every layer's output, the logits, the greedy path, and a path with given steps (the
`RANKS[t]`-th best candidate at slot `t`) with the distribution of its tokens at each slot, spread over the vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import dflash.model as zlab
import torch
from make_goldens import CALLS, FULL, SLIDING, make_config, record
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDENS = Path(__file__).parent / "goldens" / "dflash2"
RANKS = (1, 0, 2)
TEMPERATURE = 0.7
ANCHORS = (5, 17, 30)
VARIANTS: dict[str, dict[str, Any]] = {
    # As published: all layers slide, bidirectional inside the block.
    "sliding": {
        "layer_types": [SLIDING] * 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "is_causal": False,
        "dflash_config": {
            "conv_kernel_size": 2,
            "conv_group_size": 4,
            "selector_rank": 4,
            "selector_top_k": 6,
        },
    },
    "scaled": {
        "layer_types": [SLIDING, FULL, SLIDING],
        "use_sliding_window": True,
        "sliding_window": 5,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
        "dflash_config": {
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 3,
            "selector_top_k": 4,
        },
    },
}


def make_model(overrides: dict[str, Any]) -> zlab.DFlash2DraftModel:
    """z-lab's model with weights that hide nothing: norms far from one, pairs that outweigh the logits."""
    section = {"mask_token_id": 39, "target_layer_ids": [1, 4, 6], **overrides["dflash_config"]}
    config = make_config(**{**overrides, "dflash_config": section})
    torch.manual_seed(0)
    model = zlab.DFlash2DraftModel(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.6 if "selector" in name else 0.3)
    return model


def sampling_probs(
    logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """z-lab's distribution without its cast to float32."""
    assert top_p == 1.0
    assert top_k == 0
    return torch.softmax(logits / temperature, dim=-1)


@torch.no_grad()
def propose(model: zlab.DFlash2DraftModel, activations: dict[str, Tensor]) -> None:
    """Adds logits, paths and distributions to the activations, with a head of the goldens' own."""
    head = torch.nn.Linear(16, 40, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(head.weight, std=0.5, generator=torch.Generator().manual_seed(2))
    activations["head"] = head.weight.detach()
    for call, anchor in enumerate(ANCHORS):
        hidden = activations[f"call_{call}.out"][:, 1:]
        anchors = torch.tensor([anchor])
        greedy, _, _ = model.propose(hidden, anchors, head, 0.0)
        steps = iter(RANKS)
        zlab._sampling_probs = sampling_probs
        zlab._sample_probs = lambda q, steps=steps: q.argsort(dim=-1, descending=True)[
            :, next(steps)
        ]
        path, candidates, q = model.propose(hidden, anchors, head, TEMPERATURE)
        logits = model.compute_logits(hidden, head)
        assert not torch.equal(greedy, logits.argmax(-1)), "the pairs decide nothing"
        assert not torch.equal(greedy, path)
        activations |= {
            f"call_{call}.anchor": anchors,
            f"call_{call}.logits": logits,
            f"call_{call}.greedy": greedy,
            f"call_{call}.path": path,
            f"call_{call}.law": torch.zeros_like(logits).scatter(-1, candidates, q),
        }


def main() -> None:
    """Writes all variants; the codebooks lose the `.weight` that only z-lab's module has."""
    for name, overrides in VARIANTS.items():
        model = make_model(overrides)
        folder = GOLDENS / name
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        weights = {
            key.replace("codebook.weight", "codebook"): tensor for key, tensor in weights.items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        activations = record(model)
        assert len(CALLS) == len(ANCHORS)
        propose(model, activations)
        save_file(activations, folder / "activations.safetensors")


if __name__ == "__main__":
    main()
