"""The training loop: features from the frozen target, many random blocks per sequence, one optimizer step.

A run is a function of its data, its options and the initial draft: batches and anchors follow from the seed and the
number of the step, so a resumed run continues bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.parts import find_target
from dflash_hf.target.support import check_pair
from dflash_hf.training.anchors import Anchors, sample_anchors
from dflash_hf.training.collators import Batch, bucketed_batches, collate
from dflash_hf.training.config import DFlashTrainingConfig, default_gamma
from dflash_hf.training.data import Example, example_lengths
from dflash_hf.training.forward import batch_loss
from dflash_hf.training.loss import BlockLoss, block_labels, decay_weights
from dflash_hf.training.optimizer import make_optimizers, make_schedulers
from dflash_hf.training.resume import append_record, load_checkpoint, save_checkpoint
from dflash_hf.training.walking import walked_acceptance

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What happened in some steps.

    Args:
        step (`int`): Steps done.
        loss (`float`): Weighted mean cross entropy, of the logits alone.
        accuracy (`list[float]`): Share of right argmaxes in slots 1, 2, ...; with a selector, of its own.
        block_acceptance (`float`): Mean of 1 + right argmaxes before the first wrong one, over the sampled anchors.
        learning_rate (`float`): Of the last step.
        grad_norm (`float`): Before clipping, of the last step.
        selector_loss (`float`, *optional*): Weighted cross entropy of a DFlash 2 draft's selector; 0 for slots whose
            token is no candidate.
    """

    step: int
    loss: float
    accuracy: list[float]
    block_acceptance: float
    learning_rate: float
    grad_norm: float
    selector_loss: float | None = None


class DFlashTrainer:
    """Trains a draft for a target: `DFlashTrainer(target, draft, train_dataset, args).train()`.

    Args:
        target (`PreTrainedModel`): Frozen here (`requires_grad_(False)`, `eval()`) and never changed otherwise.
        draft (`DFlashDraftModel`): Trained in place, in float32 unless it is of another dtype.
        train_dataset (sequence of [`Example`]): Prompts with the target's own answers, with and without images. It
            may build them when asked; with `lengths` (tokens of each example) none is built before it is needed.
        args ([`DFlashTrainingConfig`]): Options.
        eval_dataset (sequence of [`Example`], *optional*): Held-out examples whose acceptance is walked.

    Raises:
        ValueError: If draft and target do not fit, the draft brings its own embedding or head or samples from the
            anchor, or there is nothing to train on.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        train_dataset: Sequence[Example],
        args: DFlashTrainingConfig,
        eval_dataset: Sequence[Example] | None = None,
    ) -> None:
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        if not any(1 in example.loss_mask for example in train_dataset):
            raise ValueError("expected examples with answer tokens, got none; give prompts with the target's answers")
        self.lengths = example_lengths(train_dataset)
        self.accelerator = Accelerator()
        self.device = self.accelerator.device
        target.requires_grad_(False)
        self.target = find_target(target.to(self.device).eval())
        check_pair(self.target, draft.config)
        _check_trainable(draft)
        self.draft = draft
        self.block_size = args.block_size or draft.config.block_size
        self.gamma = args.gamma or default_gamma(self.block_size)
        self.weights = decay_weights(self.block_size, self.gamma).float()
        world = self.accelerator.num_processes
        self.batches_per_step = args.gradient_accumulation_steps * world
        num_batches = math.ceil(len(train_dataset) / args.per_device_train_batch_size)
        self.steps_per_epoch = max(1, math.ceil(num_batches / self.batches_per_step))
        self.num_steps = (
            args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self.steps_per_epoch)
        )
        # The schedules drive the bare optimizers: accelerate's own scheduler would step once per process.
        optimizers = make_optimizers(draft, args)
        self.schedulers = make_schedulers(optimizers, args.warmup_ratio, self.num_steps)
        self.module, *self.optimizers = self.accelerator.prepare(draft, *optimizers)
        self.step = 0
        self.reports: list[StepReport] = []
        self.evaluations: dict[int, float] = {}
        self._epoch_batches: tuple[int, list[list[int]]] | None = None

    def train(self) -> list[StepReport]:
        """Runs to the last step and returns what was logged; the draft is trained in place and left in eval mode."""
        args, output = self.args, Path(self.args.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        if args.resume_from_checkpoint is not None:
            self.step = load_checkpoint(
                Path(args.resume_from_checkpoint), self.draft, self.optimizers, self.schedulers
            )
        window: list[BlockLoss] = []
        began = time.perf_counter()
        with self._progress() as progress:
            task = progress.add_task("train", total=self.num_steps, completed=self.step, metrics="")
            while self.step < self.num_steps:
                sums, grad_norm = self.training_step(self.step)
                self.step += 1
                window += sums
                last = self.step == self.num_steps
                if last or self.step % args.logging_steps == 0:
                    report = self._report(window, grad_norm)
                    window = []
                    progress.update(task, metrics=_describe(report))
                    self._record(report, seconds=time.perf_counter() - began)
                if self.eval_dataset and (last or (args.eval_steps and self.step % args.eval_steps == 0)):
                    progress.update(task, metrics=f"walked acceptance {self.evaluate():.2f}")
                if args.save_steps and (last or self.step % args.save_steps == 0):
                    self.save_checkpoint()
                progress.update(task, completed=self.step)
        self.draft.eval()
        return self.reports

    def training_step(self, step: int) -> tuple[list[BlockLoss], float]:
        """Does one optimizer step; returns the sums of its batches and the gradient norm before clipping.

        The loss is normalised over all the batches of the step, so accumulation changes nothing but memory.
        """
        self.draft.train()
        work = [(batch, self._anchors(step, batch, at)) for at, batch in enumerate(self._step_batches(step))]
        labels = [block_labels(batch.input_ids, batch.loss_mask, anchors) for batch, anchors in work]
        weights = sum(((label.mask * self.weights).sum() for label in labels), torch.zeros((), device="cpu"))
        # Gradients are averaged over processes, hence the mean of the weights and not their sum.
        total: Any = self.accelerator.reduce(weights.to(self.device), reduction="mean")
        sums: list[BlockLoss] = []
        for batch, anchors in work:
            # One batch at a time: its images may be large.
            result = self._batch_loss(batch.to(self.device), anchors.to(self.device))
            self.accelerator.backward((result.loss + result.selector_loss) / total.clamp_min(1e-9))
            sums.append(replace(result, loss=result.loss.detach(), selector_loss=result.selector_loss.detach()))
        limit = self.args.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.draft.parameters(), limit)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        return sums, float(norm) if norm is not None else 0.0

    def evaluate(self) -> float:
        """Walks the evaluation set and returns the acceptance length, bonus included; the draft's mode is kept."""
        assert self.eval_dataset is not None
        with self._autocast():
            walked = walked_acceptance(
                self.draft,
                self.target,
                self.eval_dataset,
                block_size=self.block_size,
                batch_size=self.args.per_device_eval_batch_size,
            )
        self.evaluations[self.step] = walked.acceptance_length
        if self.accelerator.is_main_process:
            record: dict[str, object] = {"step": self.step, "walked_acceptance": round(walked.acceptance_length, 4)}
            append_record(Path(self.args.output_dir) / METRICS_FILE, record)
        return walked.acceptance_length

    def save_checkpoint(self) -> None:
        """Writes `checkpoint-<step>` (main process only)."""
        if self.accelerator.is_main_process:
            save_checkpoint(
                Path(self.args.output_dir),
                self.step,
                self.draft,
                self.optimizers,
                self.schedulers,
                self.args.save_total_limit,
            )
        self.accelerator.wait_for_everyone()

    def _step_batches(self, step: int) -> list[Batch]:
        """This process's batches of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch_batches is None or self._epoch_batches[0] != epoch:
            batches = bucketed_batches(self.lengths, self.args.per_device_train_batch_size, self.args.seed, epoch)
            self._epoch_batches = (epoch, batches)
        batches = self._epoch_batches[1]
        first = position * self.batches_per_step + self.accelerator.process_index
        stop = (position + 1) * self.batches_per_step
        # Every process needs as many batches as the others: a short last step starts over.
        wanted = [at % len(batches) for at in range(first, stop, self.accelerator.num_processes)]
        if self.accelerator.num_processes == 1:
            wanted = list(range(first, min(stop, len(batches))))
        return [collate([self.train_dataset[i] for i in batches[at]]) for at in wanted]

    def _anchors(self, step: int, batch: Batch, at: int) -> Anchors:
        """Draws the anchors of a batch, on the CPU."""
        seed = 0
        for part in (self.args.seed, step, self.accelerator.process_index, at):
            seed = (seed * 1_000_003 + part) % 2**63
        generator = torch.Generator().manual_seed(seed)
        return sample_anchors(batch.loss_mask, self.args.num_anchors, self.block_size, generator)

    def _batch_loss(self, batch: Batch, anchors: Anchors) -> BlockLoss:
        """The forward of one batch, up to its loss."""
        with self._autocast():
            return batch_loss(
                self.draft,
                self.target,
                batch,
                anchors,
                self.weights,
                target_labels=self.args.labels == "target",
                chunk_blocks=self.args.chunk_blocks,
                module=self.module,
            )

    def _autocast(self) -> torch.autocast:
        """Our own, not accelerate's: that one is fixed for the whole process by whoever comes first."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.mixed_precision == "bf16")

    def _report(self, window: list[BlockLoss], grad_norm: float) -> StepReport:
        """Joins the sums since the last report."""
        count = torch.stack([part.count for part in window]).sum(dim=0)
        correct = torch.stack([part.correct for part in window]).sum(dim=0)
        blocks = int(sum(int(part.blocks) for part in window))
        weight = max(sum(float(part.weight) for part in window), 1e-9)
        selector_loss = sum(float(part.selector_loss) for part in window) / weight
        report = StepReport(
            step=self.step,
            loss=sum(float(part.loss) for part in window) / weight,
            accuracy=[round(float(share), 4) for share in (correct / count.clamp_min(1))[1:]],
            block_acceptance=1 + sum(int(part.accepted) for part in window) / max(blocks, 1),
            learning_rate=float(self.schedulers[0].get_last_lr()[0]),
            grad_norm=grad_norm,
            selector_loss=None if self.draft.candidate_selector is None else selector_loss,
        )
        self.reports.append(report)
        return report

    def _record(self, report: StepReport, seconds: float) -> None:
        """Appends a report to metrics.jsonl."""
        if self.accelerator.is_main_process:
            known = {name: value for name, value in asdict(report).items() if value is not None}
            append_record(Path(self.args.output_dir) / METRICS_FILE, {**known, "seconds": round(seconds, 1)})

    def _progress(self) -> Progress:
        """A progress bar with the newest numbers beside it."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            disable=self.args.disable_tqdm or not self.accelerator.is_main_process,
        )


def _check_trainable(draft: DFlashDraftModel) -> None:
    """Refuses drafts of other formats: here slot `k` is trained on token `k`, with the target's embedding and head.

    Raises:
        ValueError: Naming the fields.
    """
    names = ("own_embed_tokens", "own_lm_head", "sample_from_anchor")
    if wrong := [name for name in names if getattr(draft.config, name)]:
        raise ValueError(
            f"expected a draft without {', '.join(names)} to train, got {', '.join(wrong)} in its config; train a "
            "draft that uses the target's embedding and head"
        )


def _describe(report: StepReport) -> str:
    """One line of a report for the progress bar."""
    slots = " ".join(f"{share:.2f}" for share in report.accuracy[:3])
    return f"loss {report.loss:.3f}, accuracy {slots} ..., block {report.block_acceptance:.2f}"


__all__ = ["DFlashTrainer", "StepReport"]
