"""The layout of vLLM's speculators (`speculators_model_type: "dflash"`), which vLLM serves.

The draft's decoder is a section `transformer_layer_config`, a Qwen3 or Llama config. Conventions: taps are stored as
indices into `hidden_states`, one more than ours; sliding layers see the last `sliding_window` tokens before the anchor
and are causal inside the block unless `sliding_window_non_causal`; `d2t` holds offsets, so that row `i` of a reduced
head is token `i + d2t[i]`, and `t2d` marks those tokens. Nothing in the config says whether the embedding and the head
are there: releases up to 0.8 save copies of the target's, 0.9 only a reduced head. Rows of the embedding are raw.
Sources: speculators 0.9 `models/dflash/config.py`, `core.py`, `attention.py`, `model.py::DraftVocabMixin`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_hf.checkpoints.mapping import (
    BODY_BIASES,
    BODY_WEIGHTS,
    COMMON_IGNORED,
    DFLASH2_FIELDS,
    OWN_FIELDS,
    OWN_VOCABULARY_WEIGHTS,
    CheckpointFormat,
    ConfigReader,
    Key,
    read_rope,
    refuse_fields,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import shown

MODEL_TYPE = "dflash"
SECTION = "transformer_layer_config"
DEFAULT_THETA = 10000.0  # Qwen3Config's and LlamaConfig's
DECODERS = ("qwen3", "llama")


def _inner(name: str, *default: Any) -> Key:
    return Key(name, (f"{SECTION}.{name}",), *default)


KEYS = (
    _inner("vocab_size"),
    _inner("hidden_size"),
    _inner("intermediate_size"),
    _inner("num_attention_heads"),
    _inner("num_key_value_heads"),
    _inner("hidden_act", "silu"),
    _inner("rms_norm_eps", 1e-6),
    _inner("max_position_embeddings", 32768),
    _inner("attention_bias", False),
    _inner("attention_dropout", 0.0),
    _inner("initializer_range", 0.02),
    Key("block_size", ("block_size",), 8),
    Key("mask_token_id", ("mask_token_id",)),
    Key("sample_from_anchor", ("sample_from_anchor",), False),
    Key("target_hidden_size", ("target_hidden_size",), None),
    # Our own additions, which speculators keeps and does not read.
    Key("num_target_layers", ("num_target_layers",), None, optional=True),
    Key("raw_input_embeddings", ("raw_input_embeddings",), True, optional=True),
)


def _matches(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == MODEL_TYPE and isinstance(config.get(SECTION), Mapping)


def _read_taps(reader: ConfigReader) -> list[int]:
    ids: list[Any] = reader.take("aux_hidden_state_layer_ids", kind=list)
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in ids):
        raise ValueError(
            f"expected aux_hidden_state_layer_ids, integers from 0, got {shown(ids)}; mend the config.json"
        )
    return [index - 1 for index in ids]


def _read_head(reader: ConfigReader) -> dict[str, Any]:
    """The vocabulary: what is in the file decides whether the target's embedding and head are used."""
    vocab_size = reader.take(f"{SECTION}.vocab_size")
    draft_vocab_size = reader.take("draft_vocab_size", default=32000)
    reduced = draft_vocab_size != vocab_size
    return {
        "draft_vocab_size": draft_vocab_size if reduced else None,
        "own_embed_tokens": "embed_tokens.weight" in reader.weights,
        "own_lm_head": reduced or "lm_head.weight" in reader.weights,
    }


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    num_layers = reader.take_num_layers(f"{SECTION}.num_hidden_layers")
    decoder = reader.take(f"{SECTION}.model_type", default="qwen3")
    if decoder not in DECODERS:
        raise ValueError(
            f"expected {SECTION}.model_type in {DECODERS}, got {shown(decoder)}; this variant is not supported"
        )
    algorithm = reader.take("speculators_config", default={}, kind=dict).get("algorithm", MODEL_TYPE)
    if algorithm != MODEL_TYPE:
        raise ValueError(
            f"expected speculators_config.algorithm {MODEL_TYPE!r}, got {shown(algorithm)}; mend the config.json"
        )
    layer_types = reader.take(f"{SECTION}.layer_types", default=None, kind=list)
    window = reader.take(f"{SECTION}.sliding_window", default=None)
    use_window = reader.take(f"{SECTION}.use_sliding_window", default=None)
    first_sliding = reader.take(f"{SECTION}.max_window_layers", default=28, kind=int)
    if layer_types is None:
        sliding = [bool(use_window) and window is not None and index >= first_sliding for index in range(num_layers)]
        layer_types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    elif use_window is False and "sliding_attention" in layer_types:
        raise ValueError(
            f"expected {SECTION}.use_sliding_window true or absent beside layer_types {shown(layer_types)}, got "
            "false; make the checkpoint's config.json agree with itself"
        )
    non_causal = reader.take("sliding_window_non_causal", default=False, kind=bool)
    head_dim = reader.take(f"{SECTION}.head_dim", default=128 if decoder == "qwen3" else None)
    if head_dim is None:  # LlamaConfig's rule
        heads = reader.take(f"{SECTION}.num_attention_heads", kind=int)
        head_dim = reader.take(f"{SECTION}.hidden_size", kind=int) // max(heads, 1)
    return {
        "num_hidden_layers": num_layers,
        "head_dim": head_dim,
        "layer_types": layer_types,
        "sliding_window": window,
        "window_from_anchor": True,  # where a layer slides
        "is_causal": [kind == "sliding_attention" and not non_causal for kind in layer_types],
        "target_layer_ids": _read_taps(reader),
        "rope_parameters": read_rope(reader, DEFAULT_THETA, f"{SECTION}."),
        **_read_head(reader),
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    assert config.layer_types is not None
    assert config.target_layer_ids is not None
    assert isinstance(config.is_causal, list)
    slides = "sliding_attention" in config.layer_types
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_proposals(config.block_size),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        "sliding_window_non_causal": slides and not any(config.is_causal),
        "tie_word_embeddings": False,
        SECTION: {
            "model_type": "qwen3",
            "num_hidden_layers": config.num_hidden_layers,
            "head_dim": config.head_dim,
            "layer_types": config.layer_types,
            "use_sliding_window": slides,
            "sliding_window": config.sliding_window,
            "max_window_layers": config.num_hidden_layers,
            "rope_parameters": config.rope_parameters,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    }


def _refuse(config: DFlashConfig) -> Iterator[str]:
    assert config.layer_types is not None
    assert isinstance(config.is_causal, list)
    by_rule = [kind == "sliding_attention" for kind in config.layer_types]
    if config.vocab_size is None:
        yield "vocab_size = None (its readers need it)"
    if any(by_rule) and not config.window_from_anchor:
        yield f"sliding_window = {config.sliding_window} from each query (only from the anchor)"
    if any(config.is_causal) and config.is_causal != by_rule:
        yield f"is_causal = {config.is_causal} (only none, or exactly the sliding layers)"
    if config.target_hidden_size != config.hidden_size:
        yield f"target_hidden_size = {config.target_hidden_size} (its class takes hidden_size)"
    if config.input_embedding_scale != 1.0:
        yield f"input_embedding_scale = {config.input_embedding_scale} (only 1.0)"
    if config.output_multiplier != 1.0:
        yield f"output_multiplier = {config.output_multiplier} (only 1.0)"
    yield from refuse_fields(config, "final_logit_softcapping", *DFLASH2_FIELDS, *OWN_FIELDS)


def _derive(config: DFlashConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`t2d`: which tokens of the target's vocabulary the reduced head knows, bool `[V]`."""
    if config.draft_vocab_size is None or config.vocab_size is None:
        return {}
    offsets = weights["d2t"]
    marks = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
    marks[(offsets + torch.arange(offsets.shape[0], device=offsets.device)).cpu()] = True
    return {"t2d": marks}


def _name_target(written: dict[str, Any], name: str, architectures: list[str]) -> None:
    written["speculators_config"]["verifier"] = {"name_or_path": name, "architectures": architectures}


SPECULATORS = CheckpointFormat(
    name="speculators",
    matches=_matches,
    weights=BODY_WEIGHTS
    | BODY_BIASES
    | OWN_VOCABULARY_WEIGHTS
    | {"fc.weight": "fc.weight", "hidden_norm.weight": "hidden_norm.weight"},
    keys=KEYS,
    section=SECTION,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    ignored=COMMON_IGNORED
    | {f"{SECTION}.{key}" for key in COMMON_IGNORED - {"model_type"}}
    | {f"{SECTION}.{key}" for key in ("mlp_bias", "pretraining_tp")}  # its MLP is Qwen3's, without a bias
    | {"speculators_model_type", "speculators_version"},
    dropped=frozenset({"t2d", "verifier_lm_head.weight", "verifier_norm.weight"}),
    derive=_derive,
    name_target=_name_target,
)
