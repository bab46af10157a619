"""This module identifies a target by hashes of its config, weights, chat template and vocabulary.

The hashes say which target wrote answers or features, or which target a draft is for. They do not depend on the dtype
of the target, the place of its files, or the number of processes that hold it together.

Every weight counts. For each tensor, the bits of its values in bfloat16 are taken as integers, and the sums of its
rows and of its columns are hashed. These sums are exact in any order, and take as long as reading the tensor.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from dflash_hf.devices import in_one_piece
from dflash_hf.training.chat_template import ChatTemplate

# Entries of a config that say where a model is from and how it runs, but not what it computes.
NOT_THE_MODEL = {
    "_name_or_path",
    "_attn_implementation",
    "_commit_hash",
    "architectures",
    "distributed_config",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def target_identity(target: PreTrainedModel) -> dict[str, str]:
    """Returns `{"config", "weights"}`, two hashes that differ if a target has been changed.

    All processes that hold the target together must call this function.
    """
    config = json.dumps(_plain(target.config.to_dict()), sort_keys=True, default=str)
    weights = hashlib.sha256()
    with torch.no_grad():
        for name, value in sorted(target.named_parameters()):
            whole = in_one_piece(value)
            weights.update(f"{name} {tuple(whole.shape)} {_fingerprint(whole)}\n".encode())
    return {
        "config": hashlib.sha256(config.encode()).hexdigest()[:16],
        "weights": weights.hexdigest()[:16],
    }


def processor_identity(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
) -> dict[str, str]:
    """Returns `{"chat_template", "vocabulary"}`, two hashes that differ if prompts are encoded differently."""
    template = ChatTemplate(processing_class)
    vocabulary = json.dumps(sorted(template.tokenizer.get_vocab().items()))
    return {
        "chat_template": text_identity(template.text),
        "vocabulary": text_identity(vocabulary),
    }


def text_identity(text: str) -> str:
    """Returns a hash of a text, for example of a chat template."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprint(value: Tensor) -> str:
    """Returns a hash of a tensor, or `""` for a tensor that is not plain (offloaded, sharded, quantised)."""
    if value.is_meta or type(value) not in (Tensor, nn.Parameter):
        return ""
    value = value.detach()
    if value.is_floating_point() and value.element_size() > 1:
        bits = value.to(torch.bfloat16).contiguous().view(torch.int16)
    elif value.element_size() == 1:
        bits = value.contiguous().view(torch.uint8)
    else:
        bits = value
    columns = bits.shape[-1] if bits.ndim else 1
    table = bits.reshape(-1, columns)
    sums = [table.sum(dim, dtype=torch.int64).cpu().numpy().tobytes() for dim in (0, 1)]
    return hashlib.sha256(b"".join(sums)).hexdigest()


def _plain(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: _plain(value) for name, value in config.items() if name not in NOT_THE_MODEL}
