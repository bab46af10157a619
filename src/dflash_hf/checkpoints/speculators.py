"""This module defines the format of speculators (`speculators_model_type` "dflash" or "dspark"), which vLLM serves.

The config of the draft's decoder is in the section `transformer_layer_config`, and is a Qwen3 or Llama config. Taps
are stored as indices into `hidden_states`, which are one more than ours. Sliding layers see the last `sliding_window`
tokens before the anchor, and are causal inside the block unless `sliding_window_non_causal` is true. `d2t` holds
offsets: row `i` of a reduced head is token `i + d2t[i]`. `t2d` marks these tokens. The config does not say whether the
checkpoint contains the embedding and the head. Releases up to 0.8 save copies of the target's, and 0.9 saves only a
reduced head. Rows of the embedding are used as they are. Since July 2026, DSpark's configs say whether the anchor's
slot proposes. Earlier drafts were trained without this.
Sources: speculators 0.9 `models/dflash/config.py`, `core.py`, `attention.py`, `model.py::DraftVocabMixin`,
`models/dspark/config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_hf.checkpoints.mapping import (
    COMMON_IGNORED,
    CONFIDENCE_KEYS,
    CONFIDENCE_WEIGHTS,
    MARKOV_WEIGHTS,
    QWEN3_KEYS,
    QWEN3_THETA,
    REQUIRED,
    CheckpointFormat,
    ConfigReader,
    plain_keys,
    qwen3_layers,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import is_a, require

MODEL_TYPE = "dflash"
DSPARK = "dspark"
# The default of speculators' config class, for a config that does not state the rank.
DSPARK_RANK = 256
SECTION = "transformer_layer_config"
DECODERS = ("qwen3", "llama")
KEYS = (
    *plain_keys({"vocab_size": REQUIRED, **QWEN3_KEYS}, f"{SECTION}."),
    *plain_keys(
        {
            "block_size": 8,
            "mask_token_id": REQUIRED,
            "sample_from_anchor": False,
            "target_hidden_size": None,
        }
    ),
    # These keys are our own additions. speculators keeps them but does not read them.
    *plain_keys({"num_target_layers": None, "raw_input_embeddings": True}, optional=True),
)


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    layers = reader.take_layers(f"{SECTION}.sliding_window", section=f"{SECTION}.")
    decoder = reader.take(f"{SECTION}.model_type", default="qwen3")
    require(
        decoder in DECODERS,
        f"{SECTION}.model_type in {DECODERS}",
        decoder,
        "vLLM reads drafts of speculators with layers of other models; here they are not supported",
    )
    model_type = reader.take("speculators_model_type")
    algorithm = reader.take("speculators_config", default={}, kind=dict).get(
        "algorithm", model_type
    )
    what = f"speculators_config.algorithm {model_type!r}"
    require(algorithm == model_type, what, algorithm, "fix the config.json")
    rank = None
    if model_type == DSPARK:
        rank = reader.take_markov_rank(
            "markov_rank", kinds=("markov_head_type",), default=DSPARK_RANK
        )
    non_causal = reader.take("sliding_window_non_causal", default=False, kind=bool)
    head_dim = QWEN3_KEYS["head_dim"]
    if decoder == "llama":
        heads = reader.take(f"{SECTION}.num_attention_heads", kind=int)
        head_dim = reader.take(f"{SECTION}.hidden_size", kind=int) // max(heads, 1)
    taps: list[Any] = reader.take("aux_hidden_state_layer_ids", kind=list)
    whole = all(is_a(index, int) and index >= 0 for index in taps)
    require(whole, "aux_hidden_state_layer_ids, integers from 0", taps, "fix the config.json")
    size: int | None = reader.take("draft_vocab_size", default=32000)
    is_reduced = size != reader.take(f"{SECTION}.vocab_size")
    if not is_reduced:
        size = None
    return {
        **layers,
        "head_dim": reader.take(f"{SECTION}.head_dim", default=head_dim),
        "window_from_anchor": True,  # for layers that slide
        "is_causal": [
            kind == "sliding_attention" and not non_causal for kind in layers["layer_types"]
        ],
        "target_layer_ids": [index - 1 for index in taps],
        "rope_parameters": reader.take_rope(QWEN3_THETA, f"{SECTION}."),
        "draft_vocab_size": size,
        # The file decides whether the draft uses its own embedding and head or the target's.
        "own_embed_tokens": "embed_tokens.weight" in reader.weights,
        "own_lm_head": is_reduced or "lm_head.weight" in reader.weights,
        "markov_rank": rank,
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    greedy = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    model_type = MODEL_TYPE
    dspark: dict[str, Any] = {"architectures": ["DFlashDraftModel"]}
    if config.is_dspark:
        model_type = DSPARK
        dspark = {
            "architectures": ["DSparkDraftModel"],
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }
    return {
        **dspark,
        "speculators_model_type": model_type,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {**greedy, "speculative_tokens": config.num_proposals(config.block_size)}
            ],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        # The format means sliding layers only. vLLM 0.33 applies the key to all layers.
        "sliding_window_non_causal": not any(config.is_causal),
        "tie_word_embeddings": False,
        SECTION: {
            "model_type": "qwen3",
            "rope_parameters": config.rope_parameters,
            **qwen3_layers(config),
        },
    }


def _refuse(config: DFlashConfig) -> Iterator[str]:
    if config.target_hidden_size != config.hidden_size:
        yield f"target_hidden_size = {config.target_hidden_size} (its class takes hidden_size)"


def _derive(config: DFlashConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `t2d`: which tokens of the target's vocabulary the reduced head knows, bool `[V]`."""
    if not config.draft_vocab_size or not config.vocab_size:
        return {}
    offsets = weights["d2t"]
    marks = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
    marks[(offsets + torch.arange(offsets.shape[0], device=offsets.device)).cpu()] = True
    return {"t2d": marks}


def _name_target(written: dict[str, Any], name: str, architectures: list[str]) -> None:
    written["speculators_config"]["verifier"] = {
        "name_or_path": name,
        "architectures": architectures,
    }


SPECULATORS = CheckpointFormat(
    name="speculators",
    matches=lambda config: (
        config.get("speculators_model_type") in (MODEL_TYPE, DSPARK)
        and isinstance(config.get(SECTION), Mapping)
    ),
    keys=KEYS,
    needs=("vocab_size",),
    section=SECTION,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    ignored=COMMON_IGNORED
    | {f"{SECTION}.{key}" for key in COMMON_IGNORED - {"model_type"}}
    # The draft's MLP is Qwen3's, without a bias.
    | {f"{SECTION}.{key}" for key in ("mlp_bias", "pretraining_tp")}
    | {"speculators_version"}
    | CONFIDENCE_KEYS,
    renamed=MARKOV_WEIGHTS,
    dropped=frozenset({"t2d", "verifier_lm_head.weight", "verifier_norm.weight"})
    | CONFIDENCE_WEIGHTS,
    derive=_derive,
    name_target=_name_target,
)
