"""Options of a training run; names are those of `transformers.TrainingArguments` where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dflash_hf.errors import require


def default_gamma(block_size: int) -> float:
    """Returns the decay constant for a block size: the paper's 4, 5 and 7 at 8, 10 and 16, linear between and beyond.

    `gamma` grows by 3 over 8 slots (3/8 per slot from 4 at 8); 10 gives 4.75, which the paper rounds to 5.
    """
    return max(1.0, float(round(4 + (block_size - 8) * 3 / 8)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashTrainingConfig:
    """How a draft is trained. The defaults are the paper's (arXiv 2602.06036, section 4)."""

    output_dir: str = field(metadata={"help": "Folder of checkpoints and of metrics.jsonl."})
    optim: Literal["adamw", "muon"] = field(
        default="adamw", metadata={"help": "AdamW, or Muon for matrices with AdamW for the rest (torch >= 2.9)."}
    )
    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of matrices; norms have none."})
    adam_beta1: float = field(default=0.9, metadata={"help": "First beta of AdamW."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Second beta of AdamW."})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "Epsilon of AdamW."})
    warmup_ratio: float = field(default=0.04, metadata={"help": "Share of the steps with linear warm-up."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Largest gradient norm; 0 turns clipping off."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the data, unless max_steps is set."})
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps; -1 derives them from num_train_epochs."})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "Sequences per forward and process."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Forwards per optimizer step."})
    num_anchors: int = field(default=512, metadata={"help": "Most blocks per sequence, drawn anew at each step."})
    block_size: int | None = field(default=None, metadata={"help": "Slots per block; None takes the draft's."})
    gamma: float | None = field(
        default=None, metadata={"help": "Decay of the loss over slots, exp(-(k-1)/gamma); None follows the block."}
    )
    labels: Literal["tokens", "target"] = field(
        default="tokens", metadata={"help": "Learn the data's tokens, or the target's argmax at each position."}
    )
    chunk_blocks: int = field(default=128, metadata={"help": "Blocks per application of the head (bounds memory)."})
    mixed_precision: Literal["no", "bf16"] = field(default="no", metadata={"help": "Autocast of the draft."})
    seed: int = field(default=42, metadata={"help": "Seed of the data's order, the anchors and dropout."})
    logging_steps: int = field(default=10, metadata={"help": "Steps between records in metrics.jsonl."})
    eval_steps: int = field(default=0, metadata={"help": "Steps between evaluations; 0 for none."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Sequences per forward in evaluation."})
    save_steps: int = field(default=0, metadata={"help": "Steps between checkpoints; 0 for none."})
    save_total_limit: int | None = field(default=None, metadata={"help": "Checkpoints kept; None keeps all."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Checkpoint folder to continue from; the run goes on as if never stopped."}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})

    def __post_init__(self) -> None:
        choices = {"optim": ("adamw", "muon"), "labels": ("tokens", "target"), "mixed_precision": ("no", "bf16")}
        for name, allowed in choices.items():
            what = f"{name} {' or '.join(map(repr, allowed))}"
            require(getattr(self, name) in allowed, what, getattr(self, name), "use one of them")
        require(self.learning_rate > 0, "learning_rate > 0", self.learning_rate, "6e-4 is the paper's")
        require(0 <= self.warmup_ratio < 1, "warmup_ratio in [0, 1)", self.warmup_ratio, "0.04 is the paper's")
        require(self.num_anchors > 0, "num_anchors > 0", self.num_anchors, "512 is the paper's")
        require(self.gamma is None or self.gamma > 0, "gamma > 0", self.gamma, "None follows the block size")
        size = self.block_size
        require(size is None or size >= 2, "block_size >= 2", size, "None is the draft's")
        counts = (self.per_device_train_batch_size, self.gradient_accumulation_steps, self.chunk_blocks)
        what = "positive batch size, gradient_accumulation_steps and chunk_blocks"
        require(min(counts) > 0, what, counts, "fix the one that is not")
        steps = (self.max_steps, self.num_train_epochs)
        require(max(steps) > 0, "max_steps or num_train_epochs above 0", steps, "set one of them")


__all__ = ["DFlashTrainingConfig", "default_gamma"]
