"""This module notes the state of a target, so that results computed by the target are used only while it is unchanged.

A running batch keeps the keys and values of earlier texts. They are valid as long as the target computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from dflash_hf.devices import num_writes
from dflash_hf.generation.cuda_graph import fingerprint_of
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.user_code import is_harmless


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """Everything that determines a target's results, as far as it is visible without running the target."""

    facts: list[object]  # modules, addresses, versions, switches, hooks, numbers
    # Sums of the rows of each weight and buffer `[n]`, int64. Some libraries change weights through `weight.data`,
    # which does not increase a tensor's version.
    sums: list[Tensor]

    @classmethod
    def of(cls, target: Target) -> ModelState:
        """Returns the present state of a target; reads all weights once."""
        return cls(_facts_of(target), _sums_of(target))

    def is_of(self, target: Target, reads_weights: bool) -> bool:
        """Returns True if a target is still in this state; with `reads_weights`, the sums are compared too."""
        if self.facts != _facts_of(target):
            return False
        # The facts are equal, so both lists have tensors of the same number, shapes and devices.
        return not reads_weights or all(map(torch.equal, self.sums, _sums_of(target)))


def _facts_of(target: Target) -> list[object]:
    parts = target.parts
    found: list[object] = [target.facts, fingerprint_of(target, [parts])]
    found.extend(num_writes(tensor) for tensor in _tensors_of(target))
    # A class may have got another forward.
    found.extend(getattr(kind, "forward", None) for kind in dict.fromkeys(target.facts.kinds))
    found.append([*everywhere._global_forward_hooks, *everywhere._global_forward_pre_hooks])
    for module in parts.altered:
        found.extend(_hooks_on(module))
    return found


def _hooks_on(module: nn.Module) -> list[int]:
    """Returns the ids of the user's hooks on a module. Torch never uses an id twice."""
    hooks: list[Any] = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
    return [number for number, hook in hooks if not is_harmless(hook)]


def _sums_of(target: Target) -> list[Tensor]:
    found: list[Tensor] = []
    for tensor in _tensors_of(target):
        # Offloaded weights are in memory only while their layer runs, and quantised weights have their own formats.
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        if not is_plain or tensor.is_meta or not tensor.numel():
            continue
        rows = torch.atleast_1d(tensor.detach()).contiguous()
        rows = rows.reshape(-1, rows.shape[-1])
        has_whole_words = rows.shape[-1] * rows.element_size() % 8 == 0
        numbers = rows.view(torch.int64 if has_whole_words else torch.uint8)
        found.append(numbers.sum(dim=-1))
    return found


def _tensors_of(target: Target) -> list[Tensor]:
    """Returns a target's weights and buffers; tied tensors are returned once."""
    parts = target.parts
    tensors = [*parts.weights, *parts.buffers]
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())
