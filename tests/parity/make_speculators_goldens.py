"""Writes tests/parity/goldens/speculators: checkpoints and draft logits of speculators 0.9's own code, in float64.

speculators caps Transformers below 5.20 and needs packages that have nothing to do with the draft, so it gets an
environment of its own:

    python -m venv /tmp/speculators
    /tmp/speculators/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    /tmp/speculators/bin/pip install "transformers==5.15.1" pydantic-settings loguru openai aiohttp datasets
    /tmp/speculators/bin/pip install --no-deps hs-connectors
    /tmp/speculators/bin/pip install --no-deps speculators==0.9.0    # Apache-2.0, github.com/vllm-project/speculators
    /tmp/speculators/bin/python tests/parity/make_speculators_goldens.py

Per variant: the folder as `save_pretrained` writes it, and for several anchors of one sequence the logits of its
training forward, with that position as the only anchor. `frozen.safetensors` holds the embedding and the full head
that release 0.9 leaves out of its checkpoints; the variant `copies` has them inside, as releases up to 0.8 did.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig, core
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

GOLDENS = Path(__file__).parent / "goldens" / "speculators"
VOCAB, LENGTH, BLOCK = 40, 20, 4
ANCHORS = (3, 9, 15)
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED: dict[str, Any] = {
    "layer_types": [SLIDING, FULL, SLIDING],
    "use_sliding_window": True,
    "sliding_window": 5,
}
# Per variant: the decoder's config, the draft's.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "copies": ({}, {}),
    "llama": ({"attention_bias": True}, {}),
    "mixed": (MIXED, {}),
    "mixed-non-causal": (MIXED, {"sliding_window_non_causal": True}),
    "reduced": (MIXED, {"draft_vocab_size": 17}),
    "from-anchor": (MIXED, {"sample_from_anchor": True, "draft_vocab_size": 17}),
    "dspark": ({}, {"sample_from_anchor": True}),
    "dspark-kept-anchor": ({}, {}),
    "dspark-reduced": (MIXED, {"sample_from_anchor": True, "draft_vocab_size": 17}),
}


def make_model(name: str) -> core.DFlashDraftModel:
    """A tiny draft with weights that hide nothing: norms far from one, attention far from uniform."""
    decoder, draft = VARIANTS[name]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
    }
    if name != "llama":
        settings["layer_types"] = [FULL] * 3
    config_class = LlamaConfig if name == "llama" else Qwen3Config
    layer = config_class(**{**settings, **decoder})
    layer._attn_implementation = "sdpa"  # the eager one rounds its softmax to float32
    chosen: dict[str, Any] = {"draft_vocab_size": VOCAB, "sample_from_anchor": False, **draft}
    algorithm, model_class, draft_config = "dflash", core.DFlashDraftModel, DFlashSpeculatorConfig
    if name.startswith("dspark"):
        algorithm, model_class, draft_config = "dspark", DSparkDraftModel, DSparkSpeculatorConfig
        chosen["markov_rank"] = 5
    config = draft_config(
        transformer_layer_config=layer,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[0, 3, 6],  # the embeddings, and the outputs of layers 2 and 5
        mask_token_id=VOCAB - 1,
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[
                GreedyTokenProposalConfig(
                    speculative_tokens=BLOCK - 1 + chosen["sample_from_anchor"]
                )
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **chosen,
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.4)
    if model.d2t is not None:
        kept = torch.sort(torch.randperm(VOCAB)[: model.d2t.shape[0]]).values
        model.d2t.copy_(kept - torch.arange(kept.shape[0]))
        model.t2d.zero_()[kept] = True
    return model


def markov_bias(
    model: DSparkDraftModel, input_ids: torch.Tensor, anchor: int, hidden: torch.Tensor
) -> torch.Tensor:
    """What its Markov head adds to a block's logits, of the tokens that its training forward takes as those before."""
    before = input_ids[:, anchor : anchor + BLOCK]
    if not model.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
    assert model.markov_head is not None
    return model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)


@torch.no_grad()
def record(model: core.DFlashDraftModel) -> dict[str, torch.Tensor]:
    """Runs the training forward once per anchor, and keeps its inputs and logits."""
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCAB - 1, (1, LENGTH), generator=generator)
    taps = torch.randn(1, LENGTH, model.fc.in_features, generator=generator, dtype=torch.float64)
    kept = {"input_ids": input_ids, "taps": taps}
    for anchor in ANCHORS:
        loss_mask = torch.zeros(1, LENGTH, dtype=torch.long)
        loss_mask[:, anchor] = 1  # leaves one anchor to choose
        hidden, logits, *_ = model._backbone_forward(
            taps,
            input_ids,
            loss_mask,
            torch.randn(1, LENGTH, 16, generator=generator, dtype=torch.float64),
            torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=1,
        )
        if isinstance(model, DSparkDraftModel):
            logits = logits + markov_bias(model, input_ids, anchor, hidden)
        kept |= {f"anchor_{anchor}.hidden": hidden, f"anchor_{anchor}.logits": logits}
    return {name: tensor.clone() for name, tensor in kept.items()}


def main() -> None:
    """Writes all variants, and checks that they differ in their results."""
    shutil.rmtree(GOLDENS, ignore_errors=True)
    outs: dict[str, torch.Tensor] = {}
    for name in VARIANTS:
        model, folder = make_model(name), GOLDENS / name
        model.save_pretrained(folder)
        for file in folder.glob("*.py"):
            file.unlink()
        weights = load_file(folder / "model.safetensors")
        assert "embed_tokens.weight" not in weights
        frozen = {
            key: getattr(model, key.partition(".")[0]).weight.detach().clone()
            for key in ("embed_tokens.weight",)
        }
        if "lm_head.weight" not in weights:
            frozen["lm_head.weight"] = model.lm_head.weight.detach().clone()
        if name == "copies":
            save_file(weights | frozen, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            save_file(frozen, folder / "frozen.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        activations = record(model)
        save_file(activations, folder / "activations.safetensors")
        outs[name] = activations[f"anchor_{ANCHORS[-1]}.hidden"]
    same = {frozenset({"full", "copies"})}
    for first in outs:
        for second in outs:
            if (
                first < second
                and frozenset({first, second}) not in same
                and outs[first].shape == outs[second].shape
            ):
                differ = (outs[first] - outs[second]).abs().max() > 1e-3
                alike = ({"mixed", "reduced", "from-anchor"}, {"dspark", "dspark-kept-anchor"})
                assert differ or any({first, second} <= names for names in alike), (first, second)


if __name__ == "__main__":
    main()
