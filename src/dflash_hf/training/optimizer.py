"""This module combines Muon (matrices of a draft's layers) and AdamW (other weights). Transformers has no Muon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dflash_hf.training.arguments import DFlashTrainingArguments

# These weights have one row per token or code. They are not maps between states.
TABLES = ("_codebook", "markov_w1", "markov_w2", "embed_tokens.weight", "lm_head.weight")


def matrix_names(model: nn.Module) -> list[str]:
    """Returns the names of the trainable matrices between states. Muon updates them. Only they have weight decay."""
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim == 2 and not name.endswith(TABLES)
    ]


class MuonAndAdamW(Optimizer):
    """Steps torch's Muon and AdamW as one optimizer over a model's trainable weights. It holds the groups of both.

    Muon's updates are scaled to the size of AdamW's updates, so that both have one learning rate. Only matrices have
    weight decay.
    """

    def __init__(self, model: nn.Module, args: DFlashTrainingArguments) -> None:
        names = set(matrix_names(model))
        trainable = [(name in names, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices, others = (
            [p for is_matrix, p in trainable if is_matrix is wanted] for wanted in (True, False)
        )
        lr = args.learning_rate
        decay = args.weight_decay
        betas = (args.adam_beta1, args.adam_beta2)
        self._parts: list[Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append(muon)
        if others:
            adamw = torch.optim.AdamW(
                others, lr=lr, betas=betas, eps=args.adam_epsilon, weight_decay=0.0
            )
            self._parts.append(adamw)
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Sharding, or loading a checkpoint, may have replaced this object's groups and state.
            part.param_groups = [group]
            part.state = self.state
            part.step()
        return loss
