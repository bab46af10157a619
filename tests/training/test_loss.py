"""The loss equals a loop written from its formula, in any number of chunks, and labels end where the answer ends."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor, nn

from dflash_hf.draft_model.dflash2 import CandidateSelector
from dflash_hf.draft_model.dspark import MarkovHead
from dflash_hf.training.anchors import Anchors, sample_anchors
from dflash_hf.training.arguments import DFlashTrainingArguments, default_gamma
from dflash_hf.training.collators import Batch
from dflash_hf.training.loss import BlockLoss, block_labels, block_loss, decay_weights

BLOCK, WIDTH, VOCAB, GAMMA = 5, 8, 48, 2.5


def naive_loss(
    hidden: Tensor, batch: Batch, anchors: Anchors, head: nn.Linear
) -> tuple[float, float, list[int], int]:
    """Returns (sum of w * CE, sum of w, right per slot, accepted) by loops over rows, anchors and slots."""
    loss, weight, correct, accepted = 0.0, 0.0, [0] * BLOCK, 0
    for row, (indices, keep) in enumerate(
        zip(anchors.indices.tolist(), anchors.keep.tolist(), strict=True)
    ):
        for number, (anchor, kept) in enumerate(zip(indices, keep, strict=True)):
            prefix = True
            for slot in range(1, BLOCK if kept else 1):
                at = anchor + slot
                if at >= batch.input_ids.shape[1] or not batch.loss_mask[row, at]:
                    break
                log_p = torch.log_softmax(head(hidden[row, number * BLOCK + slot]), dim=-1)
                token = int(batch.input_ids[row, at])
                factor = math.exp(-(slot - 1) / GAMMA)
                loss -= factor * log_p[token].item()
                weight += factor
                right = int(log_p.argmax()) == token
                correct[slot] += right
                prefix = prefix and right
                accepted += prefix
    return loss, weight, correct, accepted


@pytest.fixture
def case(batch: Batch) -> tuple[Tensor, Anchors, nn.Linear]:
    """Hidden states that predict the right token about every other time, anchors, and a head."""
    torch.manual_seed(3)
    anchors = sample_anchors(batch.loss_mask, 4, BLOCK, torch.Generator().manual_seed(0))
    head = nn.Linear(WIDTH, VOCAB, bias=False).double()
    labels = block_labels(batch, anchors)
    hidden = torch.randn(3, 4 * BLOCK, WIDTH, dtype=torch.float64)
    right = torch.rand(3, 4 * BLOCK) < 0.6
    hidden[right] = (
        20 * nn.functional.normalize(head.weight.detach(), dim=-1)[labels.ids.flatten(1)[right]]
    )
    return hidden.requires_grad_(), anchors, head


def losses_of(
    case: tuple[Tensor, Anchors, nn.Linear], batch: Batch, chunk_blocks: int
) -> BlockLoss:
    hidden, anchors, head = case
    labels = block_labels(batch, anchors)
    return block_loss(hidden, labels, decay_weights(BLOCK, GAMMA), head, chunk_blocks)


@pytest.mark.parametrize("chunk_blocks", [1, 3, 128])
def test_loss_equals_the_loop(
    chunk_blocks: int, case: tuple[Tensor, Anchors, nn.Linear], batch: Batch
) -> None:
    loss, weight, correct, accepted = naive_loss(case[0].detach(), batch, case[1], case[2])
    result = losses_of(case, batch, chunk_blocks)
    torch.testing.assert_close(result.loss.item(), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.weight.item(), weight, rtol=1e-12, atol=0)
    assert result.correct.tolist() == correct
    assert 0 < int(result.accepted) == accepted < sum(correct)
    assert int(result.blocks) == int(case[1].keep.sum())
    assert result.count[0] == 0


@pytest.fixture
def selector() -> CandidateSelector:
    """A random selector over the head's vocabulary."""
    torch.manual_seed(4)
    selector = CandidateSelector(VOCAB, WIDTH, 4, 3, 1.0).double()
    nn.init.normal_(selector.successor_codebook)
    return selector


@pytest.mark.parametrize("chunk_blocks", [1, 128])
def test_selector_loss_equals_the_loop(
    chunk_blocks: int,
    case: tuple[Tensor, Anchors, nn.Linear],
    batch: Batch,
    selector: CandidateSelector,
) -> None:
    hidden, anchors, head = case
    labels = block_labels(batch, anchors)
    weights = decay_weights(BLOCK, GAMMA)
    result = block_loss(hidden, labels, weights, head, chunk_blocks, selector)
    loss, right, missing = 0.0, torch.zeros(BLOCK, dtype=torch.long), 0
    for row, number, slot in labels.mask.nonzero().tolist():
        at = int(anchors.indices[row, number]) + slot
        state = hidden.detach()[row, number * BLOCK + slot]
        logits = head(state)
        candidates = logits.topk(3).indices
        gate = selector.predecessor_codebook[
            batch.input_ids[row, at - 1]
        ] * selector.hidden_projection(state)
        scores = logits[candidates] + selector.successor_codebook[candidates] @ gate
        token = int(batch.input_ids[row, at])
        right[slot] += int(candidates[scores.argmax()]) == token
        if token in candidates.tolist():
            loss -= (
                weights[slot] * torch.log_softmax(scores, dim=0)[candidates.tolist().index(token)]
            ).item()
        else:
            missing += 1
    assert missing > 0, "a token that is no candidate has to occur"
    torch.testing.assert_close(result.selector_loss.item(), loss, rtol=1e-12, atol=0)
    assert result.correct.tolist() == right.tolist()
    plain = losses_of(case, batch, chunk_blocks)
    assert torch.equal(result.loss, plain.loss)
    assert plain.selector_loss == 0
    assert result.correct.tolist() != plain.correct.tolist()


@pytest.mark.parametrize("chunk_blocks", [1, 128])
def test_markov_loss_equals_the_loop(
    chunk_blocks: int, case: tuple[Tensor, Anchors, nn.Linear], batch: Batch
) -> None:
    """Each slot behind the right token, gradients of both tables included."""
    hidden, anchors, head = case
    torch.manual_seed(4)
    markov = MarkovHead(VOCAB, VOCAB, 4, 1.0).double()
    nn.init.normal_(markov.markov_w2)
    labels = block_labels(batch, anchors)
    weights = decay_weights(BLOCK, GAMMA)

    def behind(logits: Tensor, before: Tensor) -> Tensor:
        return logits + markov(before)

    result = block_loss(hidden, labels, weights, head, chunk_blocks, behind=behind)
    found = torch.autograd.grad(result.loss, list(markov.parameters()))
    loss = torch.zeros((), dtype=torch.float64)
    right = torch.zeros(BLOCK, dtype=torch.long)
    for row, number, slot in labels.mask.nonzero().tolist():
        at = int(anchors.indices[row, number]) + slot
        before = int(batch.input_ids[row, at - 1])
        logits = head(hidden.detach()[row, number * BLOCK + slot])
        logits = logits + markov.markov_w2 @ markov.markov_w1[before]
        token = int(batch.input_ids[row, at])
        loss = loss - weights[slot] * torch.log_softmax(logits, dim=0)[token]
        right[slot] += int(logits.argmax()) == token
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(loss, list(markov.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert result.correct.tolist() == right.tolist()
    assert result.correct.tolist() != losses_of(case, batch, chunk_blocks).correct.tolist()


def test_the_token_before_a_slot_is_what_the_target_was_shown() -> None:
    """And what is likely there is what the target said after that one."""
    shown, said, mask = (
        torch.arange(10, 18)[None],
        torch.arange(30, 38)[None, :, None],
        torch.ones(1, 8).bool(),
    )
    anchors = Anchors(indices=torch.tensor([[2]]), keep=torch.tensor([[True]]), block_size=4)
    batch = Batch(input_ids=shown, attention_mask=mask, loss_mask=mask)
    result = block_labels(batch, anchors, likely_BSP=(said, -said.double()))
    assert result.ids[0, 0, 1:].tolist() == [13, 14, 15]
    assert result.before[0, 0, 1:].tolist() == [12, 13, 14]
    assert result.likely is not None
    assert result.likely[0][0, 0, 1:].flatten().tolist() == [32, 33, 34]
    assert result.likely[1][0, 0, 1:].flatten().tolist() == [-32, -33, -34]


def test_chunks_do_not_change_the_gradient(
    case: tuple[Tensor, Anchors, nn.Linear], batch: Batch
) -> None:
    gradients = []
    for chunk_blocks in (1, 128):
        (gradient,) = torch.autograd.grad(losses_of(case, batch, chunk_blocks).loss, case[0])
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)
    assert not gradients[0].view(3, 4, BLOCK, WIDTH)[:, :, 0].any(), "the anchor's slot has no loss"


def test_labels_stop_where_the_answer_stops() -> None:
    loss_mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]]).bool()
    tokens = torch.arange(10, 18)[None]
    anchors = Anchors(
        indices=torch.tensor([[1, 5, 0]]), keep=torch.tensor([[True, True, False]]), block_size=5
    )
    labels = block_labels(
        Batch(input_ids=tokens, attention_mask=tokens > 0, loss_mask=loss_mask), anchors
    )
    assert labels.mask.int().tolist() == [[[0, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]]
    assert labels.ids[labels.mask].tolist() == [12, 13, 16, 17]


def test_no_labels_give_a_zero_loss_with_a_gradient() -> None:
    anchors = Anchors(
        indices=torch.zeros(1, 1, dtype=torch.long), keep=torch.zeros(1, 1).bool(), block_size=3
    )
    hidden = torch.randn(1, 3, WIDTH, requires_grad=True)
    tokens, mask = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4).bool()
    labels = block_labels(Batch(input_ids=tokens, attention_mask=mask, loss_mask=mask), anchors)
    result = block_loss(hidden, labels, decay_weights(3, 1.0), nn.Linear(WIDTH, VOCAB))
    result.loss.backward()
    assert result.loss == 0
    assert hidden.grad is not None


def test_weights_decay_from_the_first_slot() -> None:
    weights = decay_weights(4, 2.0).tolist()
    assert weights == pytest.approx([0, 1, math.exp(-0.5), math.exp(-1)])


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4), (10, 5), (16, 7), (2, 2)])
def test_gamma_follows_the_block_as_in_the_paper(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == gamma


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": 0.0}, "learning_rate > 0, got 0.0"),
        ({"learning_rate": math.inf}, "a finite number as learning_rate, got inf"),
        ({"num_train_epochs": math.inf}, "a finite number as num_train_epochs, got inf"),
        ({"weight_decay": math.nan}, "a finite number as weight_decay, got nan"),
        ({"max_grad_norm": math.nan}, "a finite number as max_grad_norm, got nan"),
        ({"neftune_noise_alpha": 5.0}, "None as neftune_noise_alpha, got 5.0; leave it out"),
        ({"use_liger_kernel": True}, "False as use_liger_kernel, got True; leave it out"),
        ({"deepspeed": {"train_batch_size": 4}}, "None as deepspeed, got {'train_batch_size': 4};"),
        ({"label_smoothing_factor": 0.3}, "0.0 as label_smoothing_factor, got 0.3; leave it out"),
        ({"dataloader_drop_last": True}, "False as dataloader_drop_last, got True; leave it out"),
        ({"save_only_model": True}, "False as save_only_model, got True; leave it out"),
        ({"ignore_data_skip": True}, "False as ignore_data_skip, got True; leave it out"),
        ({"bf16_full_eval": True}, "False as bf16_full_eval, got True; leave it out"),
        ({"fp16_full_eval": True}, "False as fp16_full_eval, got True; leave it out"),
        ({"prediction_loss_only": True}, "False as prediction_loss_only, got True; leave it out"),
        ({"eval_accumulation_steps": 2}, "None as eval_accumulation_steps, got 2; leave it out"),
        ({"eval_do_concat_batches": False}, "True as eval_do_concat_batches, got False; leave it"),
        ({"eval_use_gather_object": True}, "False as eval_use_gather_object, got True; leave it"),
        ({"batch_eval_metrics": True}, "False as batch_eval_metrics, got True; leave it out"),
        ({"include_for_metrics": ["loss"]}, "[] as include_for_metrics, got ['loss']; leave it"),
        ({"train_sampling_strategy": "group_by_length"}, "random as train_sampling_strategy"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "schedule of steps as lr_scheduler_type"),
        ({"lr_scheduler_type": "greedy"}, "schedule of steps as lr_scheduler_type, got 'greedy'"),
        ({"metric_for_best_model": "eval_loss"}, "acceptance length as metric_for_best_model"),
        ({"seed": -1}, "a seed of 0 or more and below 2**32, got -1"),
        ({"labels": "kd"}, "labels 'tokens' or 'target', got 'kd'"),
        ({"optim": "adamw"}, "optim muon, adamw_torch"),
        ({"gamma": -1.0}, "gamma > 0"),
        ({"chunk_blocks": 0}, "positive batch size"),
        ({"num_train_epochs": 0.0}, "max_steps or num_train_epochs"),
    ],
)
def test_bad_options_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*; ") as error:
        DFlashTrainingArguments(output_dir="x", **change)
    assert words in str(error.value)


def test_fsdp1_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "transformers.training_args")  # it says that FSDP1 is deprecated
    how = {"version": 1}
    with pytest.raises(ValueError, match="expected FSDP of version 2 for the draft, got 1; set"):
        DFlashTrainingArguments(output_dir=str(tmp_path), fsdp=True, fsdp_config=how)


@pytest.mark.parametrize("is_launched", [True, False])
def test_fsdp_has_every_process_load_whole_models(
    is_launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is asked otherwise, as by the files that `accelerate config` writes."""
    variable = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    monkeypatch.setenv(variable, "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    asked: dict[str, Any] = {}
    if not is_launched:
        how = {"version": 2, "cpu_ram_efficient_loading": True}
        asked = {"fsdp": True, "fsdp_config": how}
    args = DFlashTrainingArguments(output_dir=str(tmp_path), **asked)
    options: Any = args.fsdp_plugin_args or {}
    plugin = FullyShardedDataParallelPlugin(**options)
    assert not plugin.cpu_ram_efficient_loading
    assert os.environ[variable] == "False"


def test_infinity_is_no_clipping_and_no_decay(tmp_path: Path) -> None:
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), loss="kl", gamma=math.inf, max_grad_norm=math.inf, use_cpu=True
    )
    assert args.gamma == args.max_grad_norm == math.inf
    assert decay_weights(3, math.inf).tolist() == [0, 1, 1]
