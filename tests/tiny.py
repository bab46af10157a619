"""Tiny targets of every supported family, built from their configs, and drafts that know the answer in part."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.generation import decode
from dflash_hf.generation.run import Run

VOCAB = 64
DEPTH = 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,
}

# What makes a draft a DFlash 2 one.
DFLASH2: dict[str, Any] = {
    "conv_kernel_size": 2,
    "conv_group_size": 4,
    "selector_rank": 4,
    "selector_top_k": 6,
}
# What makes a draft a DSpark one.
DSPARK: dict[str, Any] = {"markov_rank": 4}
MIXED = ["sliding_attention", "full_attention"] * (DEPTH // 2)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-sliding": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "layer_types": MIXED},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "llama": ("Llama", {"head_dim": 8}),
    "llama3-rope": (
        "Llama",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 9}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 6, "layer_types": MIXED, "tie_word_embeddings": False},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": MIXED,
        },
    ),
    "phi3": ("Phi3", {}),
}

_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "tie_word_embeddings": False,
}

# Targets with recurrent layers; what reads FAMILIES need not know them.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", _DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeText", _DELTA | _EXPERTS),
    "qwen3-next": ("Qwen3Next", _DELTA | _EXPERTS),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * (DEPTH // 2)}),
    "bamba": ("Bamba", _MAMBA2 | {"attn_layer_indices": [1]}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        _MAMBA2
        | {
            "layer_types": ["linear_attention", "full_attention"] * (DEPTH // 2),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 4.0,
        },
    ),
}


def tiny_target(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Builds a family's causal model: random weights, eval mode, float64, the attention it has by default."""
    name, extra = (FAMILIES | HYBRIDS)[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **extra, **overrides})
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    # Gemma 2's eager attention casts float64's lowest number to a float32 minus infinity, and plain `generate` gives
    # NaN on every padded row: it is tested in float32.
    model = model_class(config).to(torch.float32 if family == "gemma2" else torch.float64).eval()
    if family == "gemma2":
        model.set_attn_implementation("eager")  # 5.16 chooses sdpa, which leaves the soft cap out
    if hasattr(model, "set_experts_implementation") and getattr(
        config, "num_experts_per_tok", None
    ):
        model.set_experts_implementation("eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(parameter, std=0.5 if parameter_name.endswith("sinks") else 0.1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def shallow_target(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Builds a `tiny_target` of two layers, one of each kind where the family has two.

    For tests of what is done with scores, rows and texts: more layers of the same kinds would repeat it.
    """
    _, extra = (FAMILIES | HYBRIDS)[family]
    layers: dict[str, Any] = {"num_hidden_layers": 2}
    if "layer_types" in extra:
        layers["layer_types"] = extra["layer_types"][1:3]
    return tiny_target(family, seed, **layers, **overrides)


def draft_config(target: PreTrainedModel, block_size: int = 8, **overrides: Any) -> DFlashConfig:
    """Returns the config of a small draft for a tiny target, with a sliding and a full layer."""
    text = target.config.get_text_config()
    settings: dict[str, Any] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 11,
        "block_size": block_size,
        "mask_token_id": text.vocab_size - 1,
        "num_target_layers": text.num_hidden_layers,
        "target_layer_ids": [0, min(2, text.num_hidden_layers - 1)],
        "initializer_range": 0.2,
    }
    return DFlashConfig(**{**settings, **overrides})


def tiny_draft(
    target: PreTrainedModel, block_size: int = 8, seed: int = 1, **overrides: Any
) -> DFlashDraftModel:
    """Builds a random draft in the target's dtype: almost never right, but everything runs."""
    torch.manual_seed(seed)
    draft = DFlashDraftModel(draft_config(target, block_size, **overrides)).to(target.dtype).eval()
    randomise_heads(draft)
    return draft


def randomise_heads(draft: DFlashDraftModel) -> None:
    """Gives a draft's convolutions, selector and Markov head random weights: fresh ones do nothing."""
    for name, parameter in draft.named_parameters():
        if any(
            part in name for part in ("_conv.", "candidate_selector.", "markov_head.", "sink_bias")
        ):
            nn.init.normal_(parameter, std=0.5)


class OracleDraft(DFlashDraftModel):
    """A draft that proposes the true continuation for a random part of each block, and wrong tokens after it.

    A random draft is never right and so never shows a rollback bug; a perfect one never rolls back.
    """

    # The logit of the token it wants, all others being 0.
    strength = 100.0
    # Which of the call's rows go on, once some have ended.
    rows: list[int]

    def arm(self, truth: list[list[int]], seed: int) -> OracleDraft:
        """Sets what it knows: row -> all of the row's true tokens, prompt included and padding not."""
        self.truth = truth
        self.random = torch.Generator().manual_seed(seed)
        return self

    def write_prompt(self, *args: Any, **kwargs: Any) -> None:
        """Begins a run, with all rows."""
        self.rows = []
        super().write_prompt(*args, **kwargs)

    def rows_of(self, batch: int) -> list[int]:
        """Returns the call's rows that a batch consists of."""
        return self.rows or list(range(batch))

    def forward_block(
        self, noise_embeds: Tensor, cache: RaggedCache, context: Any = None
    ) -> Tensor:
        """Runs the real forward, and remembers where the block stands."""
        assert cache.block is not None
        self.positions = cache.block.positions.clone()  # the commit moves them on
        return super().forward_block(noise_embeds, cache, context)

    def compute_logits(self, hidden_states: Tensor, head: nn.Module) -> Tensor:
        """Replaces the head's logits: right up to a random slot, then wrong."""
        logits = super().compute_logits(hidden_states, head)
        batch, width, vocab = logits.shape
        # For all rows, so that it does not matter which of them go on.
        good = [int(torch.randint(0, width + 1, (), generator=self.random)) for _ in self.truth]
        anchors = self.positions[:, 0].tolist()
        wanted: list[list[int]] = []
        for row, anchor in zip(self.rows_of(batch), anchors, strict=True):
            true = self.truth[row][anchor + 1 : anchor + 1 + width]
            true += [0] * (width - len(true))
            wrong = [(token + 1 + slot) % vocab for slot, token in enumerate(true)]
            wanted.append(true[: good[row]] + wrong[good[row] :])
        return nn.functional.one_hot(torch.tensor(wanted), vocab).to(logits.dtype) * self.strength


def _tell_which_rows_go_on() -> None:
    """Has every oracle know which of the call's rows its batch consists of."""
    drop = decode.drop_finished

    def told(run: Run) -> None:
        drop(run)
        if isinstance(run.generator.draft, OracleDraft):
            run.generator.draft.rows = run.rows.numbers.copy()

    decode.drop_finished = told


_tell_which_rows_go_on()


def oracle_draft(
    target: PreTrainedModel,
    truth: list[list[int]],
    seed: int,
    block_size: int = 8,
    **overrides: Any,
) -> OracleDraft:
    """Builds an [`OracleDraft`] for a tiny target; with a selector or Markov head, one that sometimes outvotes it."""
    torch.manual_seed(seed)
    draft = OracleDraft(draft_config(target, block_size, **overrides)).to(target.dtype).eval()
    if draft.config.num_candidates is not None:
        draft.strength = 4.0
    randomise_heads(draft)
    return draft.arm(truth, seed)


def prompts(lengths: list[int], seed: int, pad: int = 0) -> dict[str, Tensor]:
    """Random prompts of the given lengths, left-padded, with their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), pad)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, VOCAB - 1, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def truth_of(inputs: dict[str, Tensor], sequences: Tensor) -> list[list[int]]:
    """Each row's tokens without its padding: what an oracle is armed with."""
    starts = inputs["attention_mask"].argmax(dim=1)
    return [row[int(start) :].tolist() for row, start in zip(sequences, starts, strict=True)]
