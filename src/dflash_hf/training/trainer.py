"""This module trains a draft with `transformers.Trainer`: it replaces what a step computes, and little else.

The result of a run depends only on its data, its options and the initial draft, not on the number of processes.
Batches and anchors follow from the seed and the step, so a resumed run continues bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.utils import logging

from dflash_hf.devices import mesh_of
from dflash_hf.errors import listed, one_line, require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.target_model.support import check_pair
from dflash_hf.training.anchors import Anchors, sample_anchors, valid_anchors
from dflash_hf.training.arguments import (
    MUON,
    DFlashTrainingArguments,
    check_metric,
    check_one_gpu,
    default_gamma,
    loader_options,
)
from dflash_hf.training.checkpoints import (
    STATE_FILE,
    Records,
    check_same_steps,
    kept_of_rows,
    lacks_evaluation,
    whole_checkpoint,
    whole_checkpoints,
)
from dflash_hf.training.collators import Batch, epoch_batches
from dflash_hf.training.example import Example, example_lengths
from dflash_hf.training.failures import CheckpointError, NotFiniteError
from dflash_hf.training.features import FeatureCache
from dflash_hf.training.forward import LIKELY_TOKENS, batch_loss, check_packing
from dflash_hf.training.loss import DISTILLATION, block_labels, decay_weights, loss_weight
from dflash_hf.training.optimizer import MuonAndAdamW, matrix_names
from dflash_hf.training.steps import Collator, EpochBatches, Rows, share_of
from dflash_hf.training.throughput import Throughput
from dflash_hf.training.walking import walked_acceptance

logger: Any = logging.get_logger(__name__)

Dataset = Sequence[Example]
# The fields of `BlockLoss` that are summed over the steps between two log records.
COUNTED = ("loss", "selector_loss", "weight", "correct", "count", "blocks", "accepted")


class DFlashTrainer(Trainer):
    """Trains a draft for a target: `DFlashTrainer(model=draft, target=target, args=args, train_dataset=examples)`.

    `log` also gets `accuracy_1`, `accuracy_2`, ... (the share of correct argmaxes per slot, or of correct choices of
    the selector if the draft has one) and `block_acceptance` (1 + the number of correct argmaxes before the first
    wrong one, averaged over the sampled anchors). For a DFlash 2 draft, `log` also gets `selector_loss`, and `loss` is
    the loss of the logits alone. `tokens_per_second`, `rows_per_second` and `data_wait_share` cover the `seconds`
    since the last record. The same records are written to `metrics.jsonl` in the output folder. An evaluation computes
    the walked acceptance of all answers of the set (`eval_acceptance_length`), divided among the processes.

    Args:
        model (`DFlashDraftModel`, or this model wrapped by PEFT): The draft. It is trained in place and at least in
            float32: weights in bfloat16 or float16 are converted to float32 here.
        target (`PreTrainedModel`): The target, of any dtype. It is frozen here (`requires_grad_(False)`, `eval()`) and
            never saved. It is moved to `args.device` unless it is quantised or has a device map. It may come from
            [`load_vocabulary`] if `args.feature_cache` has all features, including those of the held-out examples.
        args ([`DFlashTrainingArguments`]): The options.
        train_dataset (sequence of [`Example`], *optional*): Prompts with the target's own answers, with or without
            images. The sequence may build an example when it is read. If the sequence has an attribute `lengths` (the
            number of tokens of each example), no example is built only to count its tokens.
        eval_dataset (sequence of [`Example`], or a mapping of names to sequences, *optional*): Held-out examples.
        processing_class (tokenizer or processor, *optional*): It is saved beside the draft.
        callbacks (`list[TrainerCallback]`, *optional*): As in `Trainer`.
        optimizers (`tuple`, *optional*): As in `Trainer`, instead of `args.optim`.

    Raises:
        ValueError: If draft and target do not fit, there is nothing to train on, one process has several GPUs,
            `args.tensor_parallel_size` is not the number of processes that hold the target, or no evaluation gives
            `args.metric_for_best_model` (with several held-out sets, it is `eval_<name>_acceptance_length`).
    """

    # `compute_loss` divides the loss by the weight of a whole step, which `get_batch_samples` returns.
    loss_is_scaled_for_ga = True
    model: Any
    args: DFlashTrainingArguments  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        target: PreTrainedModel,
        args: DFlashTrainingArguments,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        draft = _check_kinds(model, target, args)
        check_pair(find_target(target), draft.config)
        held_out = _held_out_sets(eval_dataset)
        check_metric(args, held_out)
        for examples in (train_dataset, *held_out.values()):
            if examples is not None and not any(_has_anchor(example) for example in examples):
                raise ValueError(
                    "expected examples with answer tokens, got none that another one follows; give prompts with the "
                    "target's answers"
                )
        self.block_size = args.block_size or draft.config.block_size
        what = f"block_size {draft.config.block_size} (the draft's) or less"
        require(self.block_size <= draft.config.block_size, what, self.block_size, "leave it out")
        self.lengths = [] if train_dataset is None else example_lengths(train_dataset)
        gamma = args.gamma or default_gamma(self.block_size)
        self.weights = decay_weights(
            self.block_size, gamma, draft.config.sample_from_anchor
        ).float()
        self.draft_dtype = draft.dtype
        if draft.dtype in (torch.bfloat16, torch.float16):  # rounding would lose small updates
            model.float()
        target.requires_grad_(False)
        self.target: Target = find_target(target.eval())
        has_features = self.target.has_layers or args.feature_cache is not None
        what = "a feature_cache for a target of which only the vocabulary is loaded"
        require(has_features, what, args.feature_cache, "write one, or load the whole target")
        mesh = mesh_of(target)
        num_ranks = 1
        if mesh is not None:
            num_ranks = mesh.size()
        require(
            num_ranks == args.tensor_parallel_size,
            f"tensor_parallel_size {num_ranks}, as many processes as hold the target together",
            args.tensor_parallel_size,
            "set it to that, or load the target with DistributedConfig(tp_size=...)",
        )
        has_place = getattr(target, "hf_device_map", None) is not None or not self.target.has_layers
        if not has_place and not getattr(target, "is_quantized", False):
            target.to(args.device)  # type: ignore[arg-type]
        # `Trainer` gets no processing class, because it would write special tokens into the draft's config.
        self._saved_beside = processing_class
        self._window: dict[str, Tensor] = {}
        self._losses: list[tuple[list[int], Tensor]] = []
        self._throughput = Throughput()
        self._kept = kept_of_rows(args, self.lengths)
        self._lacks_evaluation = False
        super().__init__(
            model=model,
            args=args,
            data_collator=Collator(),  # for evaluations: `get_train_dataloader` makes its own
            train_dataset=train_dataset,  # type: ignore[arg-type]
            eval_dataset=eval_dataset,  # type: ignore[arg-type]
            callbacks=[self._throughput, Records(self._kept), *(callbacks or [])],
            optimizers=optimizers,
        )
        self._save_in_one_piece()
        self.model_accepts_loss_kwargs = True  # older releases do not know `loss_is_scaled_for_ga`

    @property
    def draft(self) -> DFlashDraftModel:
        """The draft itself, without the wrappers of DDP, accelerate and PEFT."""
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "get_base_model"):
            return model.get_base_model()
        return model

    def _save_in_one_piece(self) -> None:
        """Makes FSDP save the draft as one file: accelerate's default writes shards that nothing else can read."""
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or "FULL" in str(plugin.state_dict_type):
            return
        logger.warning(
            f"FSDP saves the draft in one piece, instead of {plugin.state_dict_type}: others could not load it"
        )
        # `set_state_dict_type` makes the configs of the new type only where they are None.
        plugin.state_dict_config = None
        plugin.optim_state_dict_config = None
        plugin.set_state_dict_type("FULL_STATE_DICT")

    # ---- the run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Trains to the last step. The draft is trained in place and left in eval mode.

        Overrides: `args.resume_from_checkpoint` is used too. Incomplete checkpoints are skipped. `args.eval_on_start`
        has no effect in a resumed run. The seed is set again, so earlier calls have no influence.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A `checkpoint-<step>` folder, or `True` for the
                newest complete checkpoint of the run.
            args, kwargs: The arguments of [`~transformers.Trainer.train`].

        Raises:
            ValueError: If there is nothing to train on, no such checkpoint, or one whose steps have other rows.
            NotFiniteError: At a step whose gradients (with `fp16`: losses) are not finite, before the draft changes.
        """
        require(bool(self.lengths), "a train_dataset", None, "give examples to train on")
        asked = resume_from_checkpoint
        if asked is None:
            asked = self.args.resume_from_checkpoint
        checkpoint = whole_checkpoint(asked, Path(str(self.args.output_dir)))
        if checkpoint is not None:
            check_same_steps(Path(checkpoint), self.args, self._kept)
        self._window = {}
        self._throughput.reset()
        set_seed(self.args.seed)
        try:
            return super().train(checkpoint, *args, **kwargs)
        finally:
            self._take_averages()
            self.draft.eval()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Overrides: a run whose steps are all done gets no epoch. The library would do one more step."""
        begun = super()._init_training_state(*args, **kwargs)
        self._lacks_evaluation = lacks_evaluation(self.args, self.state)
        if self.state.global_step >= self.state.max_steps:
            return self.state.num_train_epochs, 0
        return begun

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Overrides: first makes the evaluation that the checkpoint lacks. This evaluation may end the run."""
        self._make_up_evaluation()
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Overrides: first makes the evaluation that the checkpoint lacks, for a run without an epoch left."""
        self._make_up_evaluation()
        # Later, the best draft may be loaded, and the averages would be computed from its weights.
        self._take_averages()
        return super()._finalize_training(*args, **kwargs)

    def _take_averages(self) -> None:
        """Makes a schedule-free optimizer write its averages into the draft. The next step removes them again."""
        optimizer: Any = self.optimizer
        if hasattr(optimizer, "eval"):
            optimizer.eval()

    def _make_up_evaluation(self) -> None:
        """Evaluates a draft that was saved, but not evaluated before the run was interrupted."""
        if self._lacks_evaluation:
            self._lacks_evaluation = False
            metrics = super()._evaluate(None, None)
            self._determine_best_metric(metrics, None)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Overrides: skips the evaluation at the start of a resumed run. Transformers would repeat it."""
        # Only the evaluation at the start of a run skips the scheduler.
        if skip_scheduler and self.state.global_step > 0:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Overrides: returns batches of similar length. accelerate's division among processes would change them."""
        args = self.args
        dataset = self.train_dataset
        assert dataset is not None
        if args.packing_length is not None:
            check_packing(self.target)
        seed = args.order_seed

        def batches_of(epoch: int) -> list[list[int]]:
            return epoch_batches(
                self.lengths, self._train_batch_size, seed, epoch, args.packing_length
            )

        return DataLoader(
            Rows(dataset),  # type: ignore[arg-type]
            batch_sampler=EpochBatches(batches_of, args, next_step=lambda: self.state.global_step),
            collate_fn=Collator(args.packing_length, self._cache()),
            **loader_options(args),
        )

    def _cache(self) -> FeatureCache | None:
        """Returns the complete cache of the target's features. Each group of processes writes its share of them."""
        args = self.args
        config = self.draft.config
        examples = self.train_dataset
        if args.feature_cache is None:
            return None
        mine: Any = share_of(examples, args.group_index, args.num_groups)  # type: ignore[arg-type]
        cache = FeatureCache(args.feature_cache, args.feature_dtype)
        cache.write(
            self.target, config, mine, num_likely=num_likely(args), num_writers=args.num_groups
        )
        self.accelerator.wait_for_everyone()
        return cache

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Overrides: makes the optimizer of `optim="muon"`, which Transformers does not have."""
        given: Any = self.optimizer
        if self.args.optim == MUON and given is None:
            self.optimizer = MuonAndAdamW(self.model if model is None else model, self.args)
        return super().create_optimizer(model)

    def get_tp_size(self) -> int:
        """Overrides: returns the number of processes that hold one target. The library would ask the draft."""
        return self.args.tensor_parallel_size

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Overrides: only matrices have weight decay. A selector's codebooks, embeddings and heads have none."""
        return matrix_names(model)

    # ---- a step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Overrides: draws the anchors of a step's batches, and returns the weight that divides the step's loss."""
        self._throughput.begin_step()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._throughput.add_batches(batches)
        self._losses = []
        weight = torch.zeros((), dtype=torch.float64, device="cpu")
        for micro, inputs in enumerate(batches):
            anchors = self._anchors(inputs["batch"], micro)
            inputs["anchors"] = anchors
            labels = block_labels(
                inputs["batch"], anchors, int(self.draft.config.sample_from_anchor)
            )
            weight += loss_weight(labels, self.weights.double(), self.args.loss)
        # Gradients are averaged over processes, so the loss is divided by the mean of the weights, not by their sum.
        total: Any = weight
        if self.args.world_size > 1:
            total = self.accelerator.reduce(weight.to(device), reduction="mean")
        return batches, max(float(total), 1e-9)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Overrides: returns the loss of many random blocks of each row, given the frozen target's features."""
        args = self.args
        with self.accelerator.autocast():
            sums = batch_loss(
                self.draft,
                self.target,
                inputs["batch"],  # moved to the device only now, because its images may be large
                inputs["anchors"],
                self.weights,
                objective=args.loss,
                target_labels=args.labels == "target",
                chunk_blocks=args.chunk_blocks,
                attention=args.attention,
                features=inputs["features"],
                module=model,
            )
        self._losses.append((inputs["rows"], sums.finite))
        for name in COUNTED:
            value: Tensor = getattr(sums, name).detach()
            if name in self._window:
                value = self._window[name] + value
            self._window[name] = value
        loss = (sums.loss + sums.selector_loss) / num_items_in_batch
        if return_outputs:
            return loss, sums
        return loss

    def _anchors(self, batch: Batch, micro: int) -> Anchors:
        """Draws the anchors of a batch on the CPU. They depend on the seed, the step and the batch's place in it."""
        args = self.args
        seed = 0
        place = micro * args.num_groups + args.group_index
        for part in (args.seed, self.state.global_step, place):
            seed = (seed * 1_000_003 + part) % 2**63
        generator = torch.Generator().manual_seed(seed)
        return sample_anchors(
            batch.loss_mask, args.num_anchors, self.block_size, generator, batch.starts
        )

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Overrides: a norm that is not finite ends the run in every process. The library would take the step."""
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if math.isfinite(norm):
            return norm
        bad = [row for rows, finite in self._losses for row in _not_finite(rows, finite.tolist())]
        if self.args.fp16:
            # The scaler of fp16 skips steps whose gradients overflow. It cannot repair losses that are not finite.
            count = torch.tensor(len(bad), device=self.args.device)
            num_bad: Any = self.accelerator.reduce(count, reduction="sum")
            if not num_bad.item():
                return norm
        what = "finite losses here"
        if bad:
            what = f"losses that are no numbers in {self._places(bad)}"
        raise NotFiniteError(
            f"expected finite gradients at step {self.state.global_step + 1}, got a norm of {float(norm)} and {what}",
            "look at these rows or lower learning_rate, and go on with resume_from_checkpoint=True",
        )

    def _places(self, rows: Sequence[int]) -> str:
        """Names some examples in a message. Examples of a file are named by their lines, which may have gaps."""
        places_of: Any = getattr(self.train_dataset, "places_of", None)
        if places_of is None:
            return f"rows {listed(rows)} of train_dataset"
        return places_of(rows)

    # ---- records, evaluations and checkpoints

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Overrides: counts tokens. The library does not find a batch's tensors, which are one level deeper here."""
        which = self.args.include_num_input_tokens_seen
        if which == "no":
            return
        mine = inputs["num_tokens"]
        if which == "all":
            mine = inputs["batch"].input_ids.numel()
        total: Any = self.accelerator.reduce(
            torch.tensor(mine, device=self.args.device), reduction="sum"
        )
        self.state.num_input_tokens_seen += int(total) // self.args.tensor_parallel_size

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides: adds the sums of all processes since the last record."""
        if "loss" in logs and self._window:
            total: Any = self.accelerator.reduce(self._window, reduction="sum")
            self._window = {}
            weight = max(float(total["weight"]), 1e-9)
            logs["loss"] = float(total["loss"]) / weight
            shares = (total["correct"] / total["count"].clamp_min(1)).tolist()
            # Proposals are counted from 1. The anchor's slot gives proposal 1, or is left out if it proposes nothing.
            slots = enumerate(shares, int(self.draft.config.sample_from_anchor))
            logs |= {f"accuracy_{slot}": round(share, 4) for slot, share in slots if slot}
            logs["block_acceptance"] = 1 + int(total["accepted"]) / max(int(total["blocks"]), 1)
            if self.draft.candidate_selector is not None:
                logs["selector_loss"] = float(total["selector_loss"]) / weight
            logs |= self._throughput.take(num_copies=self.args.tensor_parallel_size)
        super().log(logs, start_time)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Overrides: walks each process's share of the examples and sums the committed tokens. It keeps no logits."""
        examples: Any = dataloader.dataset
        handler: Any = self.callback_handler
        handler.eval_dataloader = dataloader
        self._take_averages()
        cache = None
        if not self.target.has_layers:
            cache = FeatureCache(str(self.args.feature_cache), self.args.feature_dtype)
        with self.accelerator.autocast():
            walked = walked_acceptance(
                self._whole_draft(),
                self.target,
                share_of(examples, self.args.group_index, self.args.num_groups),
                block_size=self.block_size,
                batch_size=self.args.per_device_eval_batch_size,
                cache=cache,
                on_batch=self._on_batch,
            )
        counts = [sum(map(sum, walked.committed)), sum(map(len, walked.committed))]
        total: Any = self.accelerator.reduce(
            torch.tensor(counts, device=self.args.device), reduction="sum"
        )
        tokens, verifies = total.tolist()
        metrics = {f"{metric_key_prefix}_acceptance_length": tokens / verifies if verifies else 0.0}
        nothing: Any = None
        return EvalLoopOutput(
            predictions=nothing, label_ids=None, metrics=metrics, num_samples=len(examples)
        )

    def _on_batch(self, done: int) -> None:
        """Advances the progress bar."""
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _whole_draft(self) -> DFlashDraftModel:
        """Returns the draft, or a whole copy if it is sharded, because the walks of the processes differ in length."""
        draft = self.draft
        state = draft.state_dict()
        if not any(isinstance(value, DTensor) for value in state.values()):
            return draft
        whole: Any = DFlashDraftModel(draft.config)
        wrapped: Any = self.accelerator.unwrap_model(self.model)
        if wrapped is not draft:  # PEFT has put adapters into the draft, so the copy needs them too
            type(wrapped)(whole, copy.deepcopy(wrapped.active_peft_config), wrapped.active_adapter)
        whole = whole.to(self.args.device, draft.dtype)
        whole.load_state_dict(
            {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
        )
        return whole

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Overrides: applies `save_dtype`, and saves the processing class. Checkpoints keep the weights' own dtype."""
        if self._saved_beside is not None and self.args.should_save:
            self._saved_beside.save_pretrained(output_dir or str(self.args.output_dir))
        draft = self.draft
        own = self.draft.dtype
        as_loaded = (
            self.args.save_dtype == "auto" and not _internal_call and own != self.draft_dtype
        )
        kept = (
            [(parameter, parameter.data) for parameter in draft.parameters()] if as_loaded else []
        )
        try:
            for parameter, data in kept:
                parameter.data = data.to(self.draft_dtype)
            super().save_model(output_dir, _internal_call)
        finally:
            for parameter, data in kept:
                parameter.data = data
            draft.config.dtype = own

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Overrides: writes `STATE_FILE` last, which marks a complete checkpoint, and explains a failed write."""
        output_dir = Path(self._get_output_dir(trial))
        folder = output_dir / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / STATE_FILE).unlink(missing_ok=True)  # an earlier run may have left the file
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            action = "begin again: no checkpoint of this run is whole"
            whole = whole_checkpoints(output_dir)
            if whole:
                action = f"go on from {whole[0]} with resume_from_checkpoint=True"
            raise CheckpointError(
                f"expected to write {folder}, got {type(error).__name__}: {one_line(error)}",
                f"make room on the disk or make it writable, then {action}",
            ) from error


def _has_anchor(example: Example) -> bool:
    """Says whether an example has an anchor: an answer token that another answer token follows."""
    loss_mask = torch.tensor([example.loss_mask], dtype=torch.bool, device="cpu")
    return bool(valid_anchors(loss_mask).any())


def _held_out_sets(given: Dataset | Mapping[str, Dataset] | None) -> dict[str, Dataset]:
    """Returns the held-out sets by the prefix of their metrics' names."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {f"eval_{name}": examples for name, examples in given.items()}
    return {"eval": given}


def _not_finite(rows: list[int], finite: list[bool]) -> list[int]:
    """Returns the rows of a batch with losses that are not finite, or all rows if the batch is packed."""
    if len(rows) != len(finite):
        return [] if all(finite) else rows
    return [row for row, good in zip(rows, finite, strict=True) if not good]


def _check_kinds(model: Any, target: Any, args: Any) -> DFlashDraftModel:
    """Returns the draft in `model`. Raises `ValueError` for a wrong type, or if the process has several GPUs."""
    draft = model.get_base_model() if hasattr(model, "get_base_model") else model
    order = "write DFlashTrainer(model=draft, target=target, args=args, train_dataset=examples)"
    for name, value, kind in (
        ("model", draft, DFlashDraftModel),
        ("target", target, PreTrainedModel),
        ("args", args, DFlashTrainingArguments),
    ):
        if not isinstance(value, kind) or (
            name == "target" and isinstance(value, DFlashDraftModel)
        ):
            raise ValueError(
                f"expected a {kind.__name__} as {name}, got a {type(value).__name__}; {order}"
            )
    check_one_gpu(args)
    return draft


def num_likely(args: DFlashTrainingArguments) -> int:
    """Returns how many of the target's most likely next tokens per position the loss and the labels need."""
    if args.loss in DISTILLATION:
        return LIKELY_TOKENS
    return int(args.labels == "target")
