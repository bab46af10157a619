"""This module makes a fresh draft for a target: a config as in the published recipes, a mask token and first values.

It uses only the target's config, embedding and head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import logging

from dflash_hf.block.positions import build_target_layer_ids
from dflash_hf.checkpoints.formats import check_is_no_draft
from dflash_hf.checkpoints.mapping import FIELDS
from dflash_hf.configuration_dflash import ROPE_TYPES, DFlashConfig
from dflash_hf.devices import brought_in, execution_device, in_one_piece
from dflash_hf.errors import listed, require, shown
from dflash_hf.layer_configs import attention_sizes, commonest, layer_values

logger: Any = logging.get_logger(__name__)

Tokenizer = PreTrainedTokenizerBase | ProcessorMixin
# Fields that describe the target, and not the draft.
OF_THE_TARGET = ("vocab_size", "hidden_size", "target_hidden_size", "num_target_layers")
MAX_HEAD_DIM = 128  # published drafts for targets with heads of 256 have twice as many of 128,
MAX_KEY_VALUE_HEADS = 8  # and none of them has more key/value heads than this
ROLES = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "cls_token_id",
)


def fresh_config(
    target: PreTrainedModel,
    fields: Mapping[str, Any],
    num_taps: int = 5,
    tokenizer: Tokenizer | None = None,
    draft_token_ids: Sequence[int] | None = None,
) -> DFlashConfig:
    """Returns the config of a draft for a target, or raises `ValueError`; see [`DFlashDraftModel.from_target`]."""
    embedding, head = vocabulary_of(target)
    text: Any = target.config.get_text_config(decoder=True)
    theirs = sorted({*OF_THE_TARGET} & fields.keys())
    require(
        not theirs,
        "fields of the draft alone",
        theirs,
        "the target says what these are; leave them out",
    )
    unknown = sorted(fields.keys() - set(FIELDS))
    require(not unknown, "fields of DFlashConfig", listed(unknown), "fix the name")
    width = int(getattr(embedding, "embedding_dim", text.hidden_size))
    what = f"an embedding as wide as the target's hidden states ({text.hidden_size})"
    require(
        width == text.hidden_size, what, width, "no draft can begin with this target's embedding"
    )
    require(num_taps >= 1, "num_taps >= 1", num_taps, "fix it")
    # A shallow target may have fewer layers than the taps that are asked for.
    taps = fields.get("target_layer_ids") or dict.fromkeys(
        build_target_layer_ids(text.num_hidden_layers, num_taps)
    )
    values: dict[str, Any] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_target_layers": text.num_hidden_layers,
        "rms_norm_eps": getattr(text, "rms_norm_eps", getattr(text, "norm_eps", 1e-6)),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 40960,
        "rope_parameters": rope_of(text),
        "dtype": "float32",
        **_shape(text),
    }
    if draft_token_ids is not None:
        ids = {*draft_token_ids}
        size = text.vocab_size
        known = 0 < len(ids) == len(draft_token_ids) and min(ids) >= 0 and max(ids) < size
        what = f"different draft_token_ids from 0 to {size - 1}"
        require(known, what, list(draft_token_ids[:8]), "take `frequent_tokens`")
        values |= {"own_lm_head": True, "draft_vocab_size": len(ids)}
    if fields.get("own_lm_head") or draft_token_ids is not None:
        dtype = head.weight.dtype
        require(
            dtype.is_floating_point,
            "an output head whose weights have a float dtype",
            dtype,
            "load the target without quantisation",
        )
    stated = fields.get("draft_vocab_size")
    matches = stated in (None, values.get("draft_vocab_size"))
    require(
        matches,
        "draft_token_ids beside draft_vocab_size",
        stated,
        "say which tokens (`frequent_tokens`)",
    )
    mask = fields.get("mask_token_id")
    if mask is None:
        rows = text.vocab_size
        if isinstance(embedding, nn.Embedding):
            rows = embedding.num_embeddings
        mask = choose_mask_token(target, tokenizer, min(text.vocab_size, rows))
    values |= {**fields, "target_layer_ids": list(taps), "mask_token_id": mask}
    return DFlashConfig(**values)


def vocabulary_of(target: PreTrainedModel) -> tuple[Any, Any]:
    """Returns a target's embedding and head.

    Raises `ValueError` if one of them is missing, or if the target is an encoder-decoder or a draft.
    """
    check_is_no_draft(target)
    name = type(target).__name__
    embedding: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    if target.config.is_encoder_decoder or None in (embedding, head):
        raise ValueError(
            f"expected a decoder-only target with an input embedding and an output head, got {name}; load it with "
            "AutoModelForCausalLM or AutoModelForImageTextToText"
        )
    return embedding, head


def choose_mask_token(target: PreTrainedModel, tokenizer: Tokenizer | None, size: int) -> int:
    """Chooses a token below `size` that occurs in no text, and logs the choice.

    The first choice is the tokenizer's own mask token. The second choice is the first id after the tokenizer's tokens
    for which the embedding has a row, as in z-lab's drafts for Qwen3. The third choice is a special token that no
    role, no config and no chat template names; tokens that are called reserved or unused come first.

    Raises:
        ValueError: If there is no tokenizer, or no such token.
    """
    tokens: Any = getattr(tokenizer, "tokenizer", tokenizer)
    if tokens is None:
        raise ValueError(
            "expected the target's tokenizer or mask_token_id, got neither; pass tokenizer, which knows the tokens "
            "that occur in no text, or pass mask_token_id"
        )
    named = _named_ids(target) | {getattr(tokens, role) for role in ROLES}
    used = {*tokens.get_vocab().values()}
    behind = next((i for i in range(max(used) + 1, size) if i not in named), None)
    if tokens.mask_token_id is not None and tokens.mask_token_id < size:
        chosen = tokens.mask_token_id
        why = "the tokenizer's own mask token"
    elif behind is not None:
        chosen = behind
        why = "the first one behind the tokenizer's tokens"
    else:
        template = str(tokens.chat_template or "")
        spare = {
            index: token.content
            for index, token in tokens.added_tokens_decoder.items()
            if token.special
            and index < size
            and index not in named
            and token.content not in template
        }
        if not spare:
            raise ValueError(
                f"expected a token that no text holds, got a tokenizer that uses all {size} rows of the embedding; "
                "pass a rare token as mask_token_id"
            )
        reserved = [
            index for index, text in spare.items() if "reserved" in text or "unused" in text
        ]
        chosen = max(spare)
        if reserved:
            chosen = min(reserved)
        why = f"the special token {shown(spare[chosen])}: no id is unused, and this one has to stay out of all texts"
    logger.warning(f"The draft's mask token is {chosen}, {why}.")
    return int(chosen)


@torch.no_grad()
def set_first_values(
    draft: Any, target: PreTrainedModel, draft_token_ids: Sequence[int] | None
) -> None:
    """Copies the draft's own embedding and head from the target, and sets its last norm: the first loss is `log V`.

    With a last norm of 1, the first loss would be several times as large. The states of a fresh draft keep the
    direction of the mask token's embedding. Tokens that occur in no text resemble each other, so they would get the
    highest logits. Also, the logits spread in proportion to the length of the head's rows. Random signs in the norm
    make that direction one like any other. The signs are divided by the spread of the logits of random states, so that
    these logits then spread by 1. Smaller values without random signs would give the same loss, but training would be
    slower (docs/log-archive.md).

    The draft is changed in place. `draft_token_ids` are the tokens of a reduced vocabulary.
    """
    embedding, head = vocabulary_of(target)
    if draft.embed_tokens is not None:
        # The module's outputs are copied, because some modules scale or normalise the rows of their weight.
        for ids in torch.arange(draft.config.vocab_size, device="cpu").split(8192):
            rows = embedding(ids.to(execution_device(embedding)))
            draft.embed_tokens.weight[ids] = rows.to(draft.embed_tokens.weight)
    if draft.lm_head is not None:
        kept = torch.arange(draft.lm_head.weight.shape[0], device="cpu")
        if draft_token_ids is not None:
            ids = torch.tensor(sorted(draft_token_ids), device="cpu")
            draft.d2t.copy_(ids - kept)
            kept = ids
        with brought_in(head):
            weight = in_one_piece(head.weight)
            draft.lm_head.weight.copy_(weight[kept.to(weight.device)])
    # The spread is measured over the vocabulary, for random states whose mean square is 1.
    states = torch.randn(
        16, draft.config.hidden_size, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    if draft.lm_head is not None:
        states = states.to(draft.norm.weight)
    else:
        states = states.to(execution_device(head), target.dtype)
    logits = draft.compute_logits(states, head).float()
    spread = float(logits[logits > -torch.inf].std())
    signs = torch.randint_like(draft.norm.weight, 2) * 2 - 1
    if spread > 0:
        draft.norm.weight.copy_(signs / spread)
    else:
        draft.norm.weight.copy_(signs)


def _named_ids(target: PreTrainedModel) -> set[Any]:
    """Returns the ids of tokens that a target's configs name, such as ends, padding and places of images."""
    found: set[Any] = set()
    configs: list[Any] = [target.config, target.config.get_text_config(decoder=True)]
    settings: Any = target.generation_config
    if settings is not None:
        configs.append(settings)
    for config in configs:
        for name, value in vars(config).items():
            if not name.endswith(("_token_id", "_token_ids", "_token_index")):
                continue
            if isinstance(value, list | tuple):
                found.update(value)
            else:
                found.add(value)
    return found


def _shape(text: Any) -> dict[str, int]:
    """Returns the sizes of attention heads and MLP. If the target's layers differ, the most common sizes count.

    The heads are the target's. Wide heads are split into several heads of `MAX_HEAD_DIM`. The width of the MLP is the
    target's too, unless this is the width of an expert.
    """
    heads, groups, size = commonest(attention_sizes(text))
    split = 1
    if size % MAX_HEAD_DIM == 0:
        split = max(1, size // MAX_HEAD_DIM)
    heads = heads * split
    size = size // split
    wanted = min(MAX_KEY_VALUE_HEADS, groups * split)
    groups = next(number for number in range(wanted, 0, -1) if heads % number == 0)
    width: Any = commonest(layer_values(text, "intermediate_size"))
    is_whole = isinstance(width, int) and width > text.hidden_size
    if not is_whole:
        width = 3 * text.hidden_size  # Qwen3's rule
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "intermediate_size": width,
    }


def rope_of(text: PreTrainedConfig) -> dict[str, Any] | None:
    """Returns the part of a target's RoPE that a draft has, over plain indices and whole heads; `None` without one."""
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # if each kind of layer has its own RoPE
    if rope.get("rope_theta") is None:
        return None
    needed = ROPE_TYPES.get(rope.get("rope_type", "default"))
    if needed is None or any(rope.get(name) is None for name in needed):
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    names = {
        *needed,
        "rope_theta",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    }
    return {"rope_type": "default"} | {
        n: v for n, v in rope.items() if v is not None and n in (*names, "rope_type")
    }
