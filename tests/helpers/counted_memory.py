"""Memory of a training step, counted: the step runs under fake tensors, and every storage that lives is added up.

Weights, operations and what autograd keeps are real in shape and type, numbers are not there; so an 8B target takes
seconds and no memory. All slots count as labelled. FlexAttention is stood in for by what it keeps (queries, keys,
values, output, one number a row), and its block masks are left out: they are small.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

import dflash_hf.modeling_dflash as modeling
from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.target.parts import find_target
from dflash_hf.training import forward
from dflash_hf.training.anchors import Anchors
from dflash_hf.training.collators import Batch
from dflash_hf.training.loss import block_labels, block_loss
from dflash_hf.training.plan import Sizes

ROUND = 512  # CUDA's allocator hands out multiples


class Counted(TorchDispatchMode):
    """Adds up the storages that live, and remembers the most per phase."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now, self.phase = 0, "begin"
        self.peaks: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            out = args[0].clone().flatten(0, args[1][0].ndim - 1)  # every slot has a label
        else:
            out = func(*args, **(kwargs or {}))
        for found in tree_leaves(out):
            if isinstance(found, Tensor) and found.device.type == "cpu":
                self._add(found.untyped_storage())
        return out

    def begin(self, phase: str) -> None:
        """Counts what comes under a name."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.live:
            self.live[key] = -(-storage.nbytes() // ROUND) * ROUND
            self.now += self.live[key]
            self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


class _Flex(torch.autograd.Function):
    """What FlexAttention keeps and makes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, _, sums = ctx.saved_tensors
        torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any) -> Tensor:
    return _Flex.apply(query, key, value).transpose(1, 2)


def counted(target_config: PreTrainedConfig, draft_config: DFlashConfig, sizes: Sizes) -> dict[str, int]:
    """Most bytes of each phase of a step: features, draft, loss, backward, update."""
    memory = Counted()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), memory:
        patch.setattr(modeling, "attend", _attend)
        patch.setattr(forward, "forward_inputs", lambda model, batch: {"input_ids": batch.input_ids})
        patch.setattr(forward.BlockMaskRule, "masks", lambda self, kinds, flex: dict.fromkeys(kinds))
        with no_init_weights():
            target = AutoModelForCausalLM.from_config(target_config, dtype=torch.bfloat16).eval().requires_grad_(False)
            draft = DFlashDraftModel._from_config(draft_config, dtype=torch.float32).train()
        if sizes.checkpointing:
            enable: Any = (
                getattr(draft, "activation_checkpointing_enable", None) or draft.gradient_checkpointing_enable
            )
            enable()
        weights = list(draft.parameters())
        moments = [torch.zeros_like(w) for w in weights for _ in range(1 if _is_muon(w, sizes) else 2)]
        _step(target, draft, sizes, memory)
        memory.begin("update")
        del moments, weights
    return dict(memory.peaks)


def _is_muon(weight: Tensor, sizes: Sizes) -> bool:
    return sizes.optimizer == "muon" and weight.ndim == 2


def _step(target: Any, draft: DFlashDraftModel, sizes: Sizes, memory: Counted) -> None:
    """One forward and backward over a full batch."""
    found = find_target(target)
    shape, num = (sizes.batch_size, sizes.max_length), (sizes.batch_size, sizes.num_anchors)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)
    batch = Batch(input_ids=ids, attention_mask=mask, loss_mask=mask)
    keep = torch.ones(num, dtype=torch.bool)
    anchors = Anchors(indices=torch.zeros(num, dtype=torch.long), keep=keep, block_size=sizes.block_size)
    flex: Any = {"attention": "flex"} if "attention" in inspect.signature(forward.run_blocks).parameters else {}
    flex = flex or {"flex": True}
    # The place of a pretended device is the CPU's: `autocast` asks for one that is there.
    with torch.autocast("cpu", torch.bfloat16, enabled=sizes.mixed_precision):
        memory.begin("features")
        features = forward.target_features(found, draft.config.target_layer_ids, batch).taps
        memory.begin("draft")
        hidden = forward.run_blocks(draft, found, batch, features, anchors, **flex)
        memory.begin("loss")
        labels = block_labels(batch.input_ids, batch.loss_mask, anchors)

        def logits_of(states: Tensor) -> Tensor:
            return draft.compute_logits(states.to(target.dtype), found.head)

        loss = block_loss(hidden, labels, torch.ones(sizes.block_size), logits_of, sizes.chunk_blocks).loss
    memory.begin("backward")
    loss.backward()


__all__ = ["Counted", "counted"]
