"""Writes tests/parity/goldens/deepspec_gemma4: checkpoints and draft logits of DeepSpec's own code for Gemma 4.

DeepSpec (MIT, github.com/deepseek-ai/DeepSpec) runs from its source and asks for Transformers 5.10.2:

    git clone https://github.com/deepseek-ai/DeepSpec /tmp/DeepSpec
    pip install --target /tmp/transformers transformers==5.10.2
    PYTHONPATH=/tmp/DeepSpec:/tmp/transformers python tests/parity/make_deepspec_gemma4_goldens.py

Per variant: the folder as `save_pretrained` writes it, and the states and logits of one block behind its context, in
float64 but for its norms, which are computed in float32 there.
"""

import shutil
from pathlib import Path

import torch
from deepspec.modeling.dspark.gemma4.modeling import Gemma4DSparkModel
from safetensors.torch import save_file
from transformers import Gemma4TextConfig

GOLDENS = Path(__file__).parent / "goldens" / "deepspec_gemma4"
VOCAB, CONTEXT, BLOCK = 40, 11, 4
VARIANTS = {"keys-are-values": True, "own-values": False}


def make_model(keys_are_values: bool) -> Gemma4DSparkModel:
    """A tiny draft with weights that hide nothing: norms far from one, layers that are scaled, a soft cap."""
    config = Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=6,
        global_head_dim=16,
        attention_k_eq_v=keys_are_values,
        final_logit_softcapping=5.0,
        hidden_size_per_layer_input=0,
        max_position_embeddings=64,
        layer_types=["full_attention"] * 3,
        tie_word_embeddings=False,
    )
    ours = {
        "architectures": ["Gemma4DSparkModel"],
        "block_size": BLOCK,
        "enable_confidence_head": False,
        "markov_rank": 0,
        "mask_token_id": VOCAB - 1,
        "num_anchors": 512,
        "num_target_layers": 8,
        "target_layer_ids": [-1, 2, 5],
        "target_model_type": "gemma4_unified",
        "target_text_model_type": "gemma4_unified_text",
    }
    for name, value in ours.items():
        setattr(config, name, value)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = Gemma4DSparkModel(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.4)
    for index, layer in enumerate(model.layers):
        layer.layer_scalar.fill_(0.75 + 0.25 * index)
    return model


@torch.no_grad()
def record(model: Gemma4DSparkModel) -> dict[str, torch.Tensor]:
    """Runs one block, and keeps its inputs, states and logits; and its embeddings in bfloat16."""
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    ids = torch.full((1, BLOCK), VOCAB - 1)
    ids[0, 0] = 7
    taps = torch.randn(1, CONTEXT, model.fc.in_features, generator=generator, dtype=torch.float64)
    hidden = model._forward_backbone(
        position_ids=torch.arange(CONTEXT + BLOCK)[None],
        noise_embedding=model.embed_tokens(ids),
        target_hidden_states=taps,
        is_causal=False,
    )
    logits = model.compute_logits(hidden)
    halved = model.embed_tokens.to(torch.bfloat16)(ids)
    return {"ids": ids, "taps": taps, "hidden": hidden, "logits": logits, "halved": halved}


def main() -> None:
    """Writes all variants."""
    for name, keys_are_values in VARIANTS.items():
        folder = GOLDENS / name
        shutil.rmtree(folder, ignore_errors=True)
        model = make_model(keys_are_values)
        model.save_pretrained(folder)
        kept = {name: tensor.clone() for name, tensor in record(model).items()}
        save_file(kept, folder / "activations.safetensors")


if __name__ == "__main__":
    main()
