"""Peak memory of a training step, counted without memory: what holds a step's memory down is checked by it.

A step of `batch_loss`, its backward pass and AdamW's step runs under `FakeTensorMode`, and every storage counts from
the operation that makes it to the moment nobody holds it. Tensors say that they are on the CPU (torch without CUDA has
no backward pass for pretended CUDA tensors), and what goes another way on CUDA goes CUDA's. What this cannot see:

* the inside of attention: kernels that keep no scores stand in for SDPA and FlexAttention here, with the outputs, the
  log-sum-exps and what they save for the backward pass; a block mask is made without the dense one;
* what the allocator loses by rounding and fragments, the CUDA context, cuBLAS's workspaces, NCCL's buffers;
* the temporaries of a foreach optimizer: AdamW takes one tensor at a time here, as a fused one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.block import attention
from dflash_hf.configuration_dflash import AttentionKind
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.anchors import Anchors, BlockMaskRule
from dflash_hf.training.collators import Batch
from dflash_hf.training.forward import Attention, batch_loss
from dflash_hf.training.loss import Objective, decay_weights
from dflash_hf.training.optimizer import matrix_names


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of pretended storages that are alive, and their peak.

    Questions that a step asks of the data are answered: nothing is padded, every slot but the anchor's has a label.

    Args:
        block_size (`int`): Slots per block.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor's storage as long as it is alive."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not isinstance(tensor, FakeTensor) or key in self._known:
            return
        size = self._known[key] = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.nonzero.default:
            count = args[0].numel() // self.block_size * (self.block_size - 1)
            out = torch.empty(count, args[0].ndim, dtype=torch.long, device=args[0].device)
        else:
            out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.hold, out)
        return out


class _Attention(torch.autograd.Function):
    """What attention without scores in memory allocates, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    return _Attention.apply(query, key, value, attn_mask)


def _flex(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    return _Attention.apply(query, key, value, None)


def _block_mask(rule: BlockMaskRule, kind: AttentionKind) -> BlockMask:
    batch, num_queries, num_keys = rule.shape
    rows, columns = -(-num_queries // 128), -(-num_keys // 128)
    counts = torch.zeros(batch, 1, rows, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, torch.zeros(batch, 1, rows, columns, dtype=torch.int32))


@contextmanager
def pretended_training() -> Generator[None]:
    """Tensors without numbers, attention's stand-ins, and masks laid out as on CUDA."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(nn.functional, "scaled_dot_product_attention", _sdpa)
        patch.setattr(attention, "flex_attention", _flex)
        patch.setattr(BlockMaskRule, "block_mask", _block_mask)
        patch.setattr(attention, "mask_repeats", lambda heads_per_key, *_: heads_per_key)
        yield


def build_bare_target(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a frozen target without numbers."""
    with no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def build_bare_draft(config: DFlashConfig) -> DFlashDraftModel:
    """Builds a draft without numbers in float32, in training mode."""
    with no_init_weights():
        return DFlashDraftModel._from_config(config, dtype=torch.float32).train()


def enable_checkpointing(draft: DFlashDraftModel) -> None:
    """Turns activation checkpointing on by whichever name this Transformers has for it."""
    model: Any = draft
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


def peak_memory(
    target_config: PreTrainedConfig,
    draft_config: DFlashConfig,
    *,
    batch_size: int,
    length: int,
    num_anchors: int,
    block_size: int | None = None,
    chunk_blocks: int = 128,
    attention: Attention = "flex",
    objective: Objective = "cross_entropy",
    checkpointing: bool = False,
    optimizer: str = "adamw",
    target_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, int]:
    """Runs two steps under bfloat16 autocast with a float32 draft, and counts the second.

    Args:
        target_config, draft_config: Of the two models.
        batch_size, length, num_anchors (`int`): Rows, tokens of each, and blocks of each.
        block_size (`int`, *optional*): Slots per block; default the draft's.
        chunk_blocks, attention, objective: See `batch_loss`.
        checkpointing (`bool`): Of the draft's layers.
        optimizer (`str`): `"adamw"`, or `"muon"` for the matrices and AdamW for the rest.
        target_dtype (`torch.dtype`): Of the target's weights.

    Returns:
        `dict[str, int]`: Bytes of `"target"` (weights), `"draft"` (weights), `"kept"` (both, gradients and optimizer
        between two steps) and `"peak"`.
    """
    with pretended_training():
        target, draft = (
            build_bare_target(target_config, target_dtype),
            build_bare_draft(draft_config),
        )
        if checkpointing:
            enable_checkpointing(draft)
        named = matrix_names(draft) if optimizer == "muon" else []
        matrices = [p for name, p in draft.named_parameters() if name in named]
        others = [p for name, p in draft.named_parameters() if name not in named]
        parts: list[Any] = [torch.optim.AdamW(others, lr=1e-3, foreach=False)]
        parts += [torch.optim.Muon(matrices, lr=1e-3)] if matrices else []
        sizes = (batch_size, length, num_anchors, block_size, chunk_blocks)
        return _steps(target, draft, parts, *sizes, attention, objective)


def _steps(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    optimizers: list[Any],
    batch_size: int,
    length: int,
    num_anchors: int,
    block_size: int | None,
    chunk_blocks: int,
    attention: Attention,
    objective: Objective,
) -> dict[str, int]:
    block_size = block_size or draft.config.block_size
    found = find_target(target)
    counter = LiveBytes(block_size)
    for tensor in [*target.parameters(), *target.buffers()]:
        counter.hold(tensor)
    weights_of_target = counter.live
    for tensor in [*draft.parameters(), *draft.buffers()]:
        counter.hold(tensor)
    weights_of_draft = counter.live - weights_of_target
    weights = decay_weights(block_size, 7.0)
    with counter:
        ids = torch.zeros(batch_size, length, dtype=torch.long, device="cpu")
        batch = Batch(
            input_ids=ids,
            attention_mask=torch.ones_like(ids).bool(),
            loss_mask=torch.ones_like(ids).bool(),
        )
        indices = torch.zeros(batch_size, num_anchors, dtype=torch.long, device="cpu")
        anchors = Anchors(
            indices=indices,
            keep=torch.ones_like(indices).bool(),
            block_size=block_size,
            reach=length,
        )
        kept = 0
        for _ in range(2):
            counter.peak = counter.live
            with torch.autocast("cpu", torch.bfloat16):
                options: Any = {
                    "objective": objective,
                    "chunk_blocks": chunk_blocks,
                    "attention": attention,
                }
                result = batch_loss(draft, found, batch, anchors, weights.float(), **options)
            (result.loss / result.weight).backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0, foreach=False)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            del result
            kept = counter.live
    return {
        "target": weights_of_target,
        "draft": weights_of_draft,
        "kept": kept,
        "peak": counter.peak,
    }
