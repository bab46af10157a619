"""Options of a run: those of `transformers.TrainingArguments`, with the paper's defaults, and a draft's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from dflash_hf.errors import require

MUON = "muon"


def default_gamma(block_size: int) -> float:
    """Returns the decay constant for a block size: the paper's 4, 5 and 7 at 8, 10 and 16, linear between and beyond.

    `gamma` grows by 3 over 8 slots (3/8 per slot from 4 at 8); 10 gives 4.75, which the paper rounds to 5.
    """
    return max(1.0, float(round(4 + (block_size - 8) * 3 / 8)))


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """How a draft is trained: `transformers.TrainingArguments` and what only a draft has.

    The defaults are the paper's (arXiv 2602.06036, section 4): AdamW at 6e-4, 4 % of the steps warm-up, a cosine to
    zero, 6 epochs, gradients of norm 1 at most, 512 anchors. `optim="muon"` is Muon for the matrices of the layers and
    AdamW for the rest (torch >= 2.9); every optimizer of Transformers works too.

    Args:
        num_anchors, block_size, gamma, labels, chunk_blocks: See their `help`.

    Raises:
        ValueError: If an option is out of range, before anything else happens.
    """

    num_train_epochs: float = 6.0
    per_device_train_batch_size: int = 4
    learning_rate: float = 6e-4
    lr_scheduler_type: SchedulerType | str = "cosine"
    warmup_steps: float = 0.04
    logging_steps: float = 10
    remove_unused_columns: bool = field(default=False, metadata={"help": "Without effect: examples have no columns."})
    # A batch without labels uses no head.
    ddp_find_unused_parameters: bool | None = True
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Without effect: batches are not pinned."})

    num_anchors: int = field(default=512, metadata={"help": "Most blocks per sequence, drawn anew at each step."})
    block_size: int | None = field(default=None, metadata={"help": "Slots per block; None takes the draft's."})
    gamma: float | None = field(
        default=None,
        metadata={"help": "Decay over slots, exp(-(k-1)/gamma); None follows the block."},
    )
    labels: Literal["tokens", "target"] = field(
        default="tokens", metadata={"help": "Learn the data's tokens, or the target's argmax at each position."}
    )
    chunk_blocks: int = field(default=128, metadata={"help": "Blocks per application of the head (bounds memory)."})

    def __post_init__(self) -> None:
        self._check()
        is_muon = self.optim == MUON
        if is_muon:  # the library's list has no Muon
            self.optim = OptimizerNames.ADAMW_TORCH
        super().__post_init__()
        if is_muon:
            self.optim = MUON

    def _check(self) -> None:
        """Refuses what cannot be trained with."""
        require(self.labels in ("tokens", "target"), "labels 'tokens' or 'target'", self.labels, "use one of them")
        known = [MUON, *(name.value for name in OptimizerNames)]
        named = self.optim.value if isinstance(self.optim, OptimizerNames) else self.optim
        require(named in known, f"optim {', '.join(known[:3])} or another of Transformers'", named, "use one of them")
        if self.optim == MUON and not hasattr(torch.optim, "Muon"):
            raise ValueError(f"expected torch >= 2.9 for optim='muon', got {torch.__version__}; use another optim")
        require(self.learning_rate > 0, "learning_rate > 0", self.learning_rate, "6e-4 is the paper's")
        require(self.warmup_steps >= 0, "warmup_steps >= 0", self.warmup_steps, "0.04 (of all steps) is the paper's")
        require(self.num_anchors > 0, "num_anchors > 0", self.num_anchors, "512 is the paper's")
        require(self.gamma is None or self.gamma > 0, "gamma > 0", self.gamma, "None follows the block size")
        size = self.block_size
        require(size is None or size >= 2, "block_size >= 2", size, "None is the draft's")
        counts = (self.per_device_train_batch_size, self.gradient_accumulation_steps, self.chunk_blocks)
        what = "positive batch size, gradient_accumulation_steps and chunk_blocks"
        require(min(counts) > 0, what, counts, "fix the one that is not")
        steps = (self.max_steps, self.num_train_epochs)
        require(max(steps) > 0, "max_steps or num_train_epochs above 0", steps, "set one of them")
