"""This module extends `transformers.TrainingArguments` by the options of a draft, and checks all options of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
from accelerate import PartialState
from accelerate.utils import disable_fsdp_ram_efficient_loading, parse_flag_from_env
from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from dflash_hf.errors import require
from dflash_hf.training.features import FeatureDtype
from dflash_hf.training.forward import Attention
from dflash_hf.training.loss import OBJECTIVES, Objective

MUON = "muon"
CHOICES = {
    "loss": OBJECTIVES,
    "labels": ("tokens", "target"),
    "attention": get_args(Attention),
    "feature_dtype": get_args(FeatureDtype),
    "save_dtype": ("float32", "auto"),
}
NO_DEEPSPEED = (
    "leave DeepSpeed out: it makes a step before its gradients are checked; FSDP2 divides a draft"
)
# These optimizers step within the backward pass. So do the optimizers whose names end in `_layerwise`.
STEPS_IN_BACKWARD = ("lomo", "adalomo")
MEASURES_ALONE = "leave it out: an evaluation measures the acceptance length, and keeps no logits"
# Arguments of Transformers that have no use in the training of a draft: name -> (the value without effect, advice).
WITHOUT_USE = {
    "neftune_noise_alpha": (None, "leave it out: a draft is not trained on embeddings with noise"),
    "deepspeed": (None, NO_DEEPSPEED),
    "use_liger_kernel": (False, "leave it out: Liger has no kernels for drafts"),
    "label_smoothing_factor": (0.0, "leave it out: no loss of a draft smooths its labels"),
    "dataloader_drop_last": (False, "leave it out: the last batch of an epoch is trained on too"),
    "save_only_model": (
        False,
        "leave it out: without the optimizer's state, a run that goes on would be another run",
    ),
    "ignore_data_skip": (
        False,
        "leave it out: a run that goes on would train on rows of its last epoch again",
    ),
    "train_sampling_strategy": (
        "random",
        "leave it out: batches have rows of similar length already",
    ),
    "bf16_full_eval": (False, "leave it out: the draft that is trained is measured as it is"),
    "fp16_full_eval": (False, "leave it out: the draft that is trained is measured as it is"),
    "prediction_loss_only": (False, MEASURES_ALONE),
    "eval_accumulation_steps": (None, MEASURES_ALONE),
    "eval_do_concat_batches": (True, MEASURES_ALONE),
    "eval_use_gather_object": (False, MEASURES_ALONE),
    "batch_eval_metrics": (False, MEASURES_ALONE),
    "include_for_metrics": ([], MEASURES_ALONE),
}
# Infinity means no decay over the slots, no clipping of gradients, or no evaluation. NaN has no meaning.
MAY_BE_INFINITE = ("gamma", "max_grad_norm", "eval_delay")
# These schedules follow a metric that should become smaller, but the acceptance length should grow.
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


def default_gamma(block_size: int) -> float:
    """Returns the decay constant for a block size: the paper's 4, 5 and 7 for 8, 10 and 16 slots, else linear.

    `gamma` is 4 for 8 slots and grows by 3/8 per slot. The result is rounded (10 slots give 4.75, rounded to 5) and is
    at least 1.
    """
    return max(1.0, float(round(4 + (block_size - 8) * 3 / 8)))


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """The arguments of `transformers.TrainingArguments`, and the settings that only the training of a draft has.

    The defaults are those of the paper (arXiv 2602.06036, section 4): AdamW with a learning rate of 6e-4, 4 % of the
    steps as warm-up, a cosine to zero, 6 epochs, gradients of norm 1 at most, and 512 anchors. The loss is D-PACE's,
    because with this loss more tokens of a draft are accepted after the same number of training steps
    (docs/log-archive.md). `optim="muon"` is Muon for the matrices of the layers and AdamW for the rest (torch >= 2.9).
    Transformers' optimizers work too, except those that step within the backward pass. With `load_best_model_at_end`,
    the best draft is the one with the largest `eval_acceptance_length`.

    Args:
        num_anchors, block_size, gamma, loss, labels, chunk_blocks, attention: See their `help`.
        packing_length, feature_cache, feature_dtype, save_dtype, tensor_parallel_size: See their `help`. The other
            arguments are those of [`~transformers.TrainingArguments`].

    Raises:
        ValueError: If an option is out of range.
    """

    num_train_epochs: float = 6.0
    per_device_train_batch_size: int = 4
    learning_rate: float = 6e-4
    lr_scheduler_type: SchedulerType | str = "cosine"
    warmup_steps: float = 0.04
    logging_steps: float = 10
    # There is nothing to filter, because a step that is not finite ends the run.
    logging_nan_inf_filter: bool = False
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Without effect: examples have no columns."}
    )
    # Every weight of the draft has a gradient in every batch: see `batch_loss`.
    ddp_find_unused_parameters: bool | None = False
    # A checkpoint takes 12 bytes per weight of the draft. Two are kept, because the last one may be damaged.
    save_total_limit: int | None = 2
    # One process may generate answers, write features or compile for hours while the others wait.
    ddp_timeout: int = field(
        default=172_800,
        metadata={
            "help": "Seconds after which a process that waits for others ends; default: two days."
        },
    )
    dataloader_pin_memory: bool = field(
        default=False, metadata={"help": "Without effect: batches are not pinned."}
    )

    num_anchors: int = field(
        default=512,
        metadata={
            "help": "Maximum number of blocks per sequence; the blocks are drawn again at each step."
        },
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Slots per block; None takes the draft's."}
    )
    gamma: float | None = field(
        default=None,
        metadata={
            "help": "Decay over slots, exp(-(k-1)/gamma), for losses other than D-PACE; "
            "None takes it from the block size."
        },
    )
    loss: Objective = field(
        default="dpace",
        metadata={
            "help": "dpace: cross entropy with D-PACE's weights. cross_entropy: cross entropy with a decay "
            "over slots. kl, tv, lk: distillation from the target's likely tokens, by KL, by total variation, or by "
            "the negative log of the share that sampling accepts."
        },
    )
    labels: Literal["tokens", "target"] = field(
        default="tokens",
        metadata={"help": "Learn the data's tokens, or the target's argmax at each position."},
    )
    chunk_blocks: int = field(
        default=128,
        metadata={"help": "Blocks to which the head is applied at once; fewer need less memory."},
    )
    attention: Attention = field(
        default="auto",
        metadata={"help": "FlexAttention, or SDPA with a dense mask; auto takes Flex on CUDA."},
    )
    packing_length: int | None = field(
        default=None,
        metadata={"help": "Pack examples into rows of this many tokens; None pads each example."},
    )
    feature_cache: str | None = field(
        default=None,
        metadata={"help": "Folder of the target's features; missing ones are written first."},
    )
    feature_dtype: FeatureDtype = field(
        default="auto",
        metadata={
            "help": "How feature_cache stores the target's states; auto: in the target's dtype. float8: rounded to "
            "8 bits, with a scale for each token and tap."
        },
    )
    save_dtype: Literal["float32", "auto"] = field(
        default="float32",
        metadata={
            "help": "dtype of the weights that save_model writes; auto: the dtype in which the draft was loaded. "
            "Checkpoints hold float32, so that a resumed run is the same run."
        },
    )

    tensor_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Processes that hold one target together, each with a share of every layer. They get the same "
            "batches; 1: each process holds the whole target."
        },
    )

    @property
    def num_groups(self) -> int:
        """The number of groups. The `tensor_parallel_size` processes that hold one target together form a group."""
        return self.world_size // self.tensor_parallel_size

    @property
    def group_index(self) -> int:
        """The index of this process's group. A group consists of consecutive processes."""
        return self.process_index // self.tensor_parallel_size

    def __post_init__(self) -> None:
        self._check()
        self._check_finite()
        self._check_launch()
        is_muon = self.optim == MUON
        if is_muon:  # the library's list has no Muon
            self.optim = OptimizerNames.ADAMW_TORCH
        keeps_best = self.load_best_model_at_end or self.save_strategy == "best"
        if keeps_best and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_acceptance_length"
        self._begin_group_of_cpus()
        super().__post_init__()
        self._check_fsdp()
        self._load_whole()
        if is_muon:
            self.optim = MUON

    @property
    def order_seed(self) -> int:
        """The seed of the examples' order: `data_seed`, or `seed` if there is no `data_seed`."""
        if self.data_seed is None:
            return self.seed
        return self.data_seed

    def _begin_group_of_cpus(self) -> None:
        """Starts the process group with `ddp_timeout`. Transformers passes this timeout only for accelerators."""
        is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self.use_cpu and is_launched and not torch.distributed.is_initialized():
            timeout = timedelta(seconds=self.ddp_timeout)
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timeout)

    def _check(self) -> None:
        """Refuses options with which a draft cannot be trained."""
        for name, allowed in CHOICES.items():
            what = f"{name} {' or '.join(map(repr, allowed))}"
            require(getattr(self, name) in allowed, what, getattr(self, name), "use one of them")
        self._check_optimizer()
        require(
            self.learning_rate > 0, "learning_rate > 0", self.learning_rate, "6e-4 is the paper's"
        )
        require(
            self.warmup_steps >= 0,
            "warmup_steps >= 0",
            self.warmup_steps,
            "0.04 (of all steps) is the paper's",
        )
        for name, (nothing, action) in WITHOUT_USE.items():
            value = getattr(self, name)
            require(value == nothing, f"{nothing} as {name}", value, action)
        is_of_steps = self.lr_scheduler_type not in METRIC_SCHEDULES
        what = "a schedule of steps as lr_scheduler_type"
        require(is_of_steps, what, str(self.lr_scheduler_type), "use cosine, or another one")
        metric = self.metric_for_best_model
        is_measured = metric is None or metric.endswith("acceptance_length")
        what = "an acceptance length as metric_for_best_model"
        require(is_measured, what, metric, "leave it out: an evaluation measures nothing else")
        is_saved = not self.load_best_model_at_end or self.save_strategy != "no"
        what = "a save_strategy with load_best_model_at_end"
        require(is_saved, what, str(self.save_strategy), "use epoch, and the same eval_strategy")
        is_measured = self.save_strategy != "best" or self.eval_strategy != "no"
        what = "an eval_strategy with save_strategy 'best'"
        action = "use epoch, and hold examples out: nothing is saved without an evaluation"
        require(is_measured, what, str(self.eval_strategy), action)
        what = "a seed of 0 or more and below 2**32"
        require(0 <= self.seed < 2**32, what, self.seed, "use another one")
        require(self.num_anchors > 0, "num_anchors > 0", self.num_anchors, "512 is the paper's")
        require(
            self.gamma is None or self.gamma > 0,
            "gamma > 0",
            self.gamma,
            "None follows the block size",
        )
        has_decay = self.gamma is None or self.loss != "dpace"
        action = "leave one of them out: D-PACE's weights follow from the draft's own losses"
        require(has_decay, "no gamma beside loss='dpace'", self.gamma, action)
        has_cache = self.feature_cache is not None or self.feature_dtype == "auto"
        action = "leave it out, or name a folder"
        require(has_cache, "feature_dtype with a feature_cache", self.feature_dtype, action)
        size = self.block_size
        length = self.packing_length
        require(
            length is None or length >= 2, "packing_length >= 2", length, "None pads each example"
        )
        require(size is None or size >= 2, "block_size >= 2", size, "None is the draft's")
        counts = (
            self.per_device_train_batch_size,
            self.per_device_eval_batch_size,
            self.gradient_accumulation_steps,
            self.chunk_blocks,
        )
        what = "positive batch sizes, gradient_accumulation_steps and chunk_blocks"
        require(min(counts) > 0, what, counts, "fix the one that is not")
        num_ranks = self.tensor_parallel_size
        require(
            num_ranks >= 1,
            "tensor_parallel_size >= 1",
            num_ranks,
            "1 is a whole target per process",
        )
        steps = (self.max_steps, self.num_train_epochs)
        require(max(steps) > 0, "max_steps or num_train_epochs above 0", steps, "set one of them")

    def _check_optimizer(self) -> None:
        """Refuses unknown or missing optimizers, and those whose steps cannot be checked before they are made."""
        known = [MUON, *(name.value for name in OptimizerNames)]
        named = self.optim.value if isinstance(self.optim, OptimizerNames) else self.optim
        require(
            named in known,
            f"optim {', '.join(known[:3])} or another of Transformers'",
            named,
            "use one of them",
        )
        makes_steps_early = named in STEPS_IN_BACKWARD or named.endswith("_layerwise")
        what = "an optim whose steps come behind the backward pass"
        action = "use another one: gradients are checked before a step is made"
        require(not makes_steps_early, what, named, action)
        # Only Transformers reads `optim_args`, and it does not make this optimizer.
        has_options = self.optim == MUON and bool(self.optim_args)
        what = f"no optim_args with optim {MUON!r}"
        require(not has_options, what, self.optim_args, "leave them out: it has none of its own")
        if self.optim == MUON and not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"expected torch >= 2.9 for optim='muon', got {torch.__version__}; use another optim"
            )

    def _check_launch(self) -> None:
        """Refuses DeepSpeed if `accelerate launch` requests it."""
        name = "ACCELERATE_USE_DEEPSPEED"
        asks = parse_flag_from_env(name)
        require(not asks, f"no {name}", os.environ.get(name), NO_DEEPSPEED)

    def _check_fsdp(self) -> None:
        """Refuses version 1 of FSDP, which is accelerate's default if its YAML file names no version."""
        version = 2
        if self.fsdp_plugin_args is not None:
            version = self.fsdp_plugin_args["fsdp_version"]
        elif parse_flag_from_env("ACCELERATE_USE_FSDP"):
            version = int(os.environ.get("FSDP_VERSION", "1"))
        action = "set fsdp_version: 2 in accelerate's YAML file, or version in fsdp_config"
        require(version == 2, "FSDP of version 2 for the draft", version, action)

    def _load_whole(self) -> None:
        """Turns off FSDP's RAM-efficient loading, so that every process loads the whole draft and the whole target.

        accelerate would send the weights of the first process to the others, but it cannot send buffers, such as a
        draft's `d2t`. Transformers would not read the buffers of a target in the other processes.
        """
        if self.fsdp_plugin_args is not None:
            self.fsdp_plugin_args["cpu_ram_efficient_loading"] = False
        disable_fsdp_ram_efficient_loading()

    def _check_finite(self) -> None:
        """Refuses NaN, and infinity for options for which it has no meaning."""
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, float) or math.isfinite(value):
                continue
            is_meant = item.name in MAY_BE_INFINITE and value > 0
            what = f"a finite number as {item.name}"
            require(is_meant, what, value, "give another one")


def loader_options(args: DFlashTrainingArguments) -> dict[str, Any]:
    """Returns the `DataLoader` options that concern its workers."""
    return {
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }


def check_one_gpu(args: DFlashTrainingArguments) -> None:
    """Refuses several GPUs in one process, because Transformers would spread each batch over them.

    Raises:
        ValueError: If the process has several GPUs.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one GPU per process, got {args.n_gpu} in this one; start it with `accelerate launch`, or set "
            "CUDA_VISIBLE_DEVICES=0"
        )


def check_metric(args: DFlashTrainingArguments, held_out: Collection[str]) -> None:
    """Refuses a `metric_for_best_model` that no evaluation gives, because the run would fail at its first evaluation.

    Args:
        args ([`DFlashTrainingArguments`]): The options of the run.
        held_out (collection of `str`): The prefix of the metrics of each held-out set: `eval` for a single set, or
            `eval_<name>` for each of several sets.

    Raises:
        ValueError: If no evaluation gives the metric. The message names the available metrics.
    """
    measured = [f"{beginning}_acceptance_length" for beginning in held_out]
    metric = args.metric_for_best_model
    is_measured = metric is None or f"eval_{metric.removeprefix('eval_')}" in measured
    what = f"{' or '.join(measured)} as metric_for_best_model"
    require(is_measured or not measured, what, metric, "an evaluation measures nothing else")
