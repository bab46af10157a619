"""Optimizers and their schedule: AdamW as in the paper, or Muon for the matrices of the layers beside it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from dflash_hf.training.config import DFlashTrainingConfig


def make_optimizers(draft: nn.Module, args: DFlashTrainingConfig) -> list[Optimizer]:
    """Returns AdamW for all trainable parameters, or Muon for the matrices and AdamW for the rest.

    Norms, biases and a selector's codebooks (rows per token, not a map between states) go to AdamW, without decay.

    Raises:
        ValueError: If Muon is asked for and this torch has none.
    """
    named = [(p, p.ndim == 2 and not name.endswith("_codebook")) for name, p in draft.named_parameters()]
    matrices = [p for p, is_matrix in named if is_matrix and p.requires_grad]
    others = [p for p, is_matrix in named if not is_matrix and p.requires_grad]
    groups = [{"params": others, "weight_decay": 0.0}]
    optimizers: list[Optimizer] = []
    if args.optim == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"expected torch >= 2.9 for optim='muon', got {torch.__version__}; use optim='adamw'")
        muon = torch.optim.Muon(
            matrices, lr=args.learning_rate, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    else:
        groups.append({"params": matrices, "weight_decay": args.weight_decay})
    betas = (args.adam_beta1, args.adam_beta2)
    optimizers.append(torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon))
    return optimizers


def make_schedulers(optimizers: list[Optimizer], warmup_ratio: float, num_steps: int) -> list[LRScheduler]:
    """Returns a linear warm-up and a cosine to zero for each optimizer."""
    num_warmup = math.ceil(warmup_ratio * num_steps)
    return [get_cosine_schedule_with_warmup(optimizer, num_warmup, num_steps) for optimizer in optimizers]


__all__ = ["make_optimizers", "make_schedulers"]
