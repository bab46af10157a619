"""`transformers.Trainer` for drafts: what a step computes is ours, everything around it the library's.

A run is a function of its data, its options and the initial draft, whatever the number of processes: batches and
anchors follow from the seed and the step, so a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, set_seed
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from dflash_hf.errors import require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.parts import Target, find_target
from dflash_hf.target.support import check_pair
from dflash_hf.training.anchors import Anchors, sample_anchors
from dflash_hf.training.arguments import MUON, DFlashTrainingArguments, default_gamma
from dflash_hf.training.checkpoints import Records, whole_checkpoint
from dflash_hf.training.collators import Batch, epoch_batches
from dflash_hf.training.data import Example, example_lengths
from dflash_hf.training.forward import batch_loss
from dflash_hf.training.loss import block_labels, decay_weights, loss_weight
from dflash_hf.training.optimizer import MuonAndAdamW, matrix_names
from dflash_hf.training.steps import Collator, EpochBatches, Rows
from dflash_hf.training.walking import walked_acceptance

Dataset = Sequence[Example]
# Of a `BlockLoss`, what is added up from record to record.
COUNTED = ("loss", "selector_loss", "weight", "correct", "count", "blocks", "accepted")


class DFlashTrainer(Trainer):
    """Trains a draft for a target: `DFlashTrainer(model=draft, target=target, args=args, train_dataset=examples)`.

    `log` also gets `accuracy_1`, `accuracy_2`, ... (share of right argmaxes per slot; with a selector, of its own),
    `block_acceptance` (mean of 1 + right argmaxes before the first wrong one, over the sampled anchors) and, for a
    DFlash 2 draft, `selector_loss`; its `loss` is that of the logits alone. The same records go to `metrics.jsonl` in
    the output folder. Evaluation walks the acceptance of the whole set: `eval_acceptance_length`.

    Args:
        model (`DFlashDraftModel`): The draft, trained in place.
        target (`PreTrainedModel`): Frozen here (`requires_grad_(False)`, `eval()`), never saved. Moved to the draft's
            device.
        args ([`DFlashTrainingArguments`]): Options.
        train_dataset (sequence of [`Example`]): Prompts with the target's own answers, with and without
            images. It may build them when asked; with `lengths` (tokens of each) none is built before it is needed.
        eval_dataset (sequence of [`Example`], *optional*): Held-out examples.

    Raises:
        ValueError: If draft and target do not fit, there is nothing to train on, or one process has several GPUs.
    """

    # The loss is divided by the labels of a whole step: `get_batch_samples`.
    loss_is_scaled_for_ga = True
    model: Any
    args: DFlashTrainingArguments  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        target: PreTrainedModel,
        args: DFlashTrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
    ) -> None:
        _check_devices(args)
        draft: Any = model
        check_pair(find_target(target), draft.config)
        _check_trainable(draft)
        if not any(1 in example.loss_mask for example in train_dataset):
            raise ValueError("expected examples with answer tokens, got none; give prompts with the target's answers")
        self.block_size = args.block_size or draft.config.block_size
        self.lengths = example_lengths(train_dataset)
        gamma = args.gamma or default_gamma(self.block_size)
        self.weights = decay_weights(self.block_size, gamma).float()
        target.requires_grad_(False)
        target.to(args.device)  # type: ignore[arg-type]
        self.target: Target = find_target(target.eval())
        self._window: dict[str, Tensor] = {}
        super().__init__(
            model=model,
            args=args,
            data_collator=Collator(),  # where training has its own
            train_dataset=train_dataset,  # type: ignore[arg-type]
            eval_dataset=eval_dataset,  # type: ignore[arg-type]
            callbacks=[Records()],
        )
        self.model_accepts_loss_kwargs = True  # older releases know no `loss_is_scaled_for_ga`

    @property
    def draft(self) -> DFlashDraftModel:
        """The draft itself, without what DDP or accelerate put around it."""
        return self.accelerator.unwrap_model(self.model)

    # ---- what is to be done

    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains to the last step; the draft is trained in place and left in eval mode.

        Overrides: `args.resume_from_checkpoint` counts too, and the seed is set again, so that what happened before
        cannot matter.

        Args:
            resume_from_checkpoint (`str`, *optional*): A `checkpoint-<step>` folder.
            args, kwargs: Those of [`~transformers.Trainer.train`].

        Raises:
            ValueError: If there is no such checkpoint.
        """
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = whole_checkpoint(asked)
        self._window = {}
        set_seed(self.args.seed)
        try:
            return super().train(checkpoint, *args, **kwargs)
        finally:
            self.draft.eval()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Overrides: batches of similar length; accelerate's own division among processes would change them."""
        args, dataset = self.args, self.train_dataset
        assert dataset is not None

        def batches_of(epoch: int) -> list[list[int]]:
            return epoch_batches(self.lengths, self._train_batch_size, args.seed, epoch)

        return DataLoader(
            Rows(dataset),  # type: ignore[arg-type]
            batch_sampler=EpochBatches(batches_of, args, next_step=lambda: self.state.global_step),
            collate_fn=Collator(),
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Overrides: Transformers has no Muon."""
        given: Any = self.optimizer
        if self.args.optim == MUON and given is None:
            self.optimizer = MuonAndAdamW(self.model if model is None else model, self.args)
        return super().create_optimizer(model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Overrides: weight decay is for matrices; a selector's codebooks, embeddings and heads have none."""
        return matrix_names(model)

    # ---- a step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Overrides: draws the anchors of a step's batches, and counts its labels over all batches and processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        weight = torch.zeros((), dtype=torch.float64, device="cpu")
        for micro, inputs in enumerate(batches):
            inputs["anchors"] = anchors = self._anchors(inputs["batch"], micro)
            labels = block_labels(inputs["batch"], anchors)
            weight += loss_weight(labels, self.weights.double())
        # Gradients are averaged over processes, hence the mean of the weights and not their sum.
        alone = self.args.world_size == 1
        total: Any = weight if alone else self.accelerator.reduce(weight.to(device), reduction="mean")
        return batches, max(float(total), 1e-9)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Overrides: the loss of many random blocks of each row, under the frozen target's features."""
        args = self.args
        with self.accelerator.autocast():
            sums = batch_loss(
                self.draft,
                self.target,
                inputs["batch"],  # only now onto the device: its images may be large
                inputs["anchors"],
                self.weights,
                target_labels=args.labels == "target",
                chunk_blocks=args.chunk_blocks,
                module=model,
            )
        for name in COUNTED:
            value: Tensor = getattr(sums, name).detach()
            self._window[name] = self._window[name] + value if name in self._window else value
        loss = (sums.loss + sums.selector_loss) / num_items_in_batch
        return (loss, sums) if return_outputs else loss

    def _anchors(self, batch: Batch, micro: int) -> Anchors:
        """Draws the anchors of a batch, on the CPU, from the seed, the step and the batch's place in it."""
        args, seed = self.args, 0
        place = micro * args.world_size + args.process_index
        for part in (args.seed, self.state.global_step, place):
            seed = (seed * 1_000_003 + part) % 2**63
        generator = torch.Generator().manual_seed(seed)
        return sample_anchors(batch.loss_mask, args.num_anchors, self.block_size, generator)

    # ---- what is told and kept

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides: adds what was counted since the last record, over all processes."""
        if "loss" in logs and self._window:
            total: Any = self.accelerator.reduce(self._window, reduction="sum")
            self._window = {}
            weight = max(float(total["weight"]), 1e-9)
            logs["loss"] = float(total["loss"]) / weight
            shares = (total["correct"] / total["count"].clamp_min(1)).tolist()
            logs |= {f"accuracy_{slot}": round(share, 4) for slot, share in enumerate(shares) if slot}
            logs["block_acceptance"] = 1 + int(total["accepted"]) / max(int(total["blocks"]), 1)
            if self.draft.candidate_selector is not None:
                logs["selector_loss"] = float(total["selector_loss"]) / weight
        super().log(logs, start_time)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Overrides: walks the examples; no logits are kept."""
        examples: Any = dataloader.dataset
        with self.accelerator.autocast():
            walked = walked_acceptance(
                self.draft,
                self.target,
                examples,
                block_size=self.block_size,
                batch_size=self.args.per_device_eval_batch_size,
            )
        metrics = {f"{metric_key_prefix}_acceptance_length": walked.acceptance_length}
        nothing: Any = None
        return EvalLoopOutput(predictions=nothing, label_ids=None, metrics=metrics, num_samples=len(examples))


def _check_trainable(draft: DFlashDraftModel) -> None:
    """Refuses drafts of other layouts: here slot `k` is trained on token `k`, with the target's embedding and head.

    Raises:
        ValueError: Naming the fields.
    """
    names = ("own_embed_tokens", "own_lm_head", "sample_from_anchor")
    wrong = ", ".join(name for name in names if getattr(draft.config, name))
    what = f"a draft without {', '.join(names)} to train"
    require(not wrong, what, wrong, "train one that uses the target's embedding and head")


def _check_devices(args: DFlashTrainingArguments) -> None:
    """Raises `ValueError` if one process has several GPUs."""
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one GPU per process, got {args.n_gpu} in this one; start it with `accelerate launch`, or set "
            "CUDA_VISIBLE_DEVICES=0"
        )
