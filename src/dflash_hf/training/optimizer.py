"""Muon for the matrices of a draft's layers and AdamW for the rest, as one optimizer. Transformers has no Muon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dflash_hf.training.arguments import DFlashTrainingArguments

# Rows per token, not maps between states.
TABLES = ("_codebook", "embed_tokens.weight", "lm_head.weight")


def matrix_names(model: nn.Module) -> list[str]:
    """Returns the names of the trainable weights that are maps between states: Muon's, and those with weight decay."""
    return [
        name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and not name.endswith(TABLES)
    ]


class MuonAndAdamW(Optimizer):
    """Steps two optimizers of torch as one: its groups are theirs, and so is its state.

    Args:
        matrices (sequence of `nn.Parameter`): Weights for Muon, of two dimensions.
        others (sequence of `nn.Parameter`): Weights for AdamW, without weight decay.
        lr (`float`): Learning rate of both; Muon's updates are scaled to the size of AdamW's.
        weight_decay (`float`): Of the matrices.
        betas (`tuple[float, float]`): Of AdamW.
        eps (`float`): Of AdamW.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon([*matrices], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self._parts.append(torch.optim.AdamW([*others], lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @classmethod
    def for_model(cls, model: nn.Module, args: DFlashTrainingArguments) -> MuonAndAdamW:
        """Returns the optimizer of a model's trainable weights.

        Args:
            model (`nn.Module`): The draft, or what wraps it.
            args ([`DFlashTrainingArguments`]): Options.
        """
        names = set(matrix_names(model))
        trainable = [(name in names, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(
            [p for is_matrix, p in trainable if is_matrix],
            [p for is_matrix, p in trainable if not is_matrix],
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with both.

        Args:
            closure (callable, *optional*): Computes the loss anew; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Loading a checkpoint and sharding put other groups and states here.
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


__all__ = ["MuonAndAdamW", "matrix_names"]
