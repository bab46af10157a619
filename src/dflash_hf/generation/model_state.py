"""This module notes the state of a pair, so that results computed by it are used only while it is unchanged.

A running batch keeps the keys and values of earlier texts. They are valid as long as both models compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from dflash_hf.devices import Inventory, num_writes
from dflash_hf.generation.cuda_graph import fingerprint_of
from dflash_hf.generation.request import Request
from dflash_hf.target_model.user_code import is_harmless


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """Everything that determines the keys and values of a pair, as far as it is visible without running the models."""

    facts: list[object]  # modules, addresses, versions, switches, hooks, numbers
    # Sums of the rows of each weight and buffer `[n]`, int64. Some libraries change weights through `weight.data`,
    # which does not increase a tensor's version.
    sums: list[Tensor]

    @classmethod
    def of(cls, request: Request) -> ModelState:
        """Returns the present state of a request's target and draft; reads all weights once."""
        return cls(_facts_of(request), _sums_of(request))

    def is_of(self, request: Request, reads_weights: bool) -> bool:
        """Returns True if both models are still in this state; with `reads_weights`, the sums are compared too."""
        if self.facts != _facts_of(request):
            return False
        # The facts are equal, so both lists have tensors of the same number, shapes and devices.
        return not reads_weights or all(map(torch.equal, self.sums, _sums_of(request)))


def _parts_of(request: Request) -> list[Inventory]:
    """Returns the parts of a request's target and draft."""
    return [request.target.parts, request.draft_parts]


def _facts_of(request: Request) -> list[object]:
    inventories = _parts_of(request)
    target = request.target
    # Options of the draft determine its windows.
    found: list[object] = [target.facts, request.draft.cache_shapes()]
    found.append(fingerprint_of(target, inventories))
    found.extend(num_writes(tensor) for tensor in _tensors_of(request))
    found.append([*everywhere._global_forward_hooks, *everywhere._global_forward_pre_hooks])
    for parts in inventories:
        # A class may have got another forward.
        kinds = dict.fromkeys(map(type, parts.modules))
        found.extend(getattr(kind, "forward", None) for kind in kinds)
        for module in parts.altered:
            found.extend(_hooks_on(module))
    return found


def _hooks_on(module: nn.Module) -> list[int]:
    """Returns the ids of the user's hooks on a module. Torch never uses an id twice."""
    hooks: list[Any] = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
    return [number for number, hook in hooks if not is_harmless(hook)]


def _sums_of(request: Request) -> list[Tensor]:
    found: list[Tensor] = []
    for tensor in _tensors_of(request):
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


def _tensors_of(request: Request) -> list[Tensor]:
    """Returns the weights and buffers of both models; tied tensors are returned once."""
    found: dict[int, Tensor] = {}
    for parts in _parts_of(request):
        for tensor in (*parts.weights, *parts.buffers):
            if tensor is not None:
                found[id(tensor)] = tensor
    return list(found.values())
