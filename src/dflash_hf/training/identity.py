"""Which target wrote answers or features, or a draft is for: hashes of its settings, weights, template and vocabulary.

Those of a target are the same in any dtype, wherever its files are, and however many processes hold it together.

Every weight counts: what is hashed of a tensor are the sums of its rows and of its columns, of the bits of its values
in bfloat16 as integers. They are exact in any order, and take as long as reading it.
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

# Of a config: where it is from and how it is run, which is not what it computes.
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
    """Returns `{"config", "weights"}`, two hashes that tell a target from a changed one.

    All processes that hold the target together call it.
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
    """Returns `{"chat_template", "vocabulary"}`, two hashes that tell how a target's prompts are encoded."""
    template = ChatTemplate(processing_class)
    vocabulary = json.dumps(sorted(template.tokenizer.get_vocab().items()))
    return {
        "chat_template": text_identity(template.text),
        "vocabulary": text_identity(vocabulary),
    }


def text_identity(text: str) -> str:
    """Returns a hash of a text, a chat template's for example."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprint(value: Tensor) -> str:
    """A hash of a tensor; nothing of one that is not here as a plain one (offloaded, sharded, quantised)."""
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
