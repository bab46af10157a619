"""A run is a function of its options: resumed, accumulated and repeated runs agree; and the draft learns."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training import DFlashTrainer, DFlashTrainingConfig, Example, regenerate_answers, walked_acceptance
from dflash_hf.training.optimizer import make_optimizers
from tiny import DFLASH2


def draws(count: int) -> list[Example]:
    """Random examples of different lengths."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(2, 12, (count, 2), generator=generator).tolist()
    rows = [torch.randint(1, 47, (sum(size),), generator=generator).tolist() for size in sizes]
    return [Example.from_pair(row[: size[0]], row[size[0] :]) for row, size in zip(rows, sizes, strict=True)]


def options(folder: Path, **changes: object) -> DFlashTrainingConfig:
    fields: dict[str, object] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 3,
        "num_anchors": 3,
        "learning_rate": 1e-3,
        "logging_steps": 4,
        "disable_tqdm": True,
    }
    return DFlashTrainingConfig(**{**fields, **changes})


def run(
    target: Qwen3ForCausalLM, draft: DFlashDraftModel, args: DFlashTrainingConfig, count: int = 10
) -> DFlashTrainer:
    trainer = DFlashTrainer(target, draft, draws(count), args)
    trainer.train()
    return trainer


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_resumed_run_is_the_same_run_bit_for_bit(optim, target, make_draft, tmp_path: Path) -> None:
    if optim == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon")
    # Dropout makes the global random state matter.
    whole, first = make_draft(attention_dropout=0.1), make_draft(attention_dropout=0.1)
    run(target, whole, options(tmp_path / "a", optim=optim))
    stopped = DFlashTrainer(target, first, draws(10), options(tmp_path / "b", optim=optim, save_steps=4))
    saved = stopped.save_checkpoint

    def save_and_stop() -> None:
        saved()
        raise KeyboardInterrupt

    stopped.save_checkpoint = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_draft(attention_dropout=0.1, initializer_range=0.5)
    checkpoint = tmp_path / "b" / "checkpoint-4"
    torch.rand(5)
    run(target, resumed, options(tmp_path / "c", optim=optim, resume_from_checkpoint=str(checkpoint)))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert not torch.equal(first.fc.weight, whole.fc.weight)
    assert torch.equal(DFlashDraftModel.from_pretrained(checkpoint).fc.weight, first.fc.weight)


def test_accumulation_equals_a_larger_batch(target, make_draft, tmp_path: Path) -> None:
    """Two rows of equal length: in one batch or in two, the loss and the step are the same."""
    data = draws(2)
    data = [Example.from_pair(e.input_ids[:4], e.input_ids[4:8]) for e in data]
    data[1] = Example(input_ids=data[1].input_ids, loss_mask=[0] * 6 + [1] * 2)
    drafts = []
    for batch_size, accumulation in ((2, 1), (1, 2)):
        draft = make_draft()
        args = options(
            tmp_path,
            max_steps=1,
            num_anchors=9,
            warmup_ratio=0.0,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        )
        trainer = DFlashTrainer(target, draft, data, args)
        trainer.train()
        drafts.append((draft, trainer.reports[-1]))
    (one, report), (two, other) = drafts
    assert other.loss == pytest.approx(report.loss, rel=1e-5)
    assert other.grad_norm == pytest.approx(report.grad_norm, rel=1e-4)
    torch.testing.assert_close(one.fc.weight, two.fc.weight, rtol=1e-3, atol=1e-4)


def test_a_run_leaves_records_checkpoints_and_the_target_as_it_was(target, make_draft, tmp_path: Path) -> None:
    before = {name: p.clone() for name, p in target.named_parameters()}
    draft = make_draft()
    args = options(tmp_path, save_steps=2, save_total_limit=2, eval_steps=4)
    trainer = DFlashTrainer(target, draft, draws(10), args, eval_dataset=draws(3))
    reports = trainer.train()
    assert [report.step for report in reports] == [4, 8]
    assert list(trainer.evaluations) == [4, 8]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [4, 8]
    assert len(records[0]["accuracy"]) == draft.config.block_size - 1
    assert not draft.training
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in target.named_parameters())


def test_epochs_give_the_number_of_steps(target, make_draft, tmp_path: Path) -> None:
    args = options(tmp_path, max_steps=-1, num_train_epochs=1.5, gradient_accumulation_steps=2)
    assert DFlashTrainer(target, make_draft(), draws(10), args).num_steps == 3


def test_labels_of_the_target_are_its_argmax(target, make_draft, tmp_path: Path) -> None:
    """On the target's own greedy text both kinds of label are the same, on other text they are not."""
    prompts = [example.input_ids for example in draws(6)]
    greedy = [
        Example.from_pair(prompt, answer)
        for prompt, answer in zip(
            prompts,
            regenerate_answers(target, prompts, max_new_tokens=9, eos_token_id=3, pad_token_id=0),
            strict=True,
        )
    ]
    for data, same in ((greedy, True), (draws(6), False)):
        losses = []
        for labels in ("tokens", "target"):
            args = options(tmp_path, max_steps=1, labels=labels, learning_rate=1e-9)
            losses.append(DFlashTrainer(target, make_draft(), data, args).train()[-1].loss)
        assert (losses[0] == pytest.approx(losses[1], rel=1e-5)) is same


def test_mixed_precision_is_close_to_full(target, make_draft, tmp_path: Path) -> None:
    reports = [
        run(target, make_draft(), options(tmp_path, mixed_precision=precision)).reports[-1]
        for precision in ("no", "bf16")
    ]
    assert reports[0].loss != reports[1].loss
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=0.05)


def test_misfits_are_refused(target, make_draft, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected examples with answer tokens, got none"):
        DFlashTrainer(target, make_draft(), [Example.from_pair([1, 2], [])], options(tmp_path))
    with pytest.raises(ValueError, match="expected a draft for hidden size 32"):
        DFlashTrainer(target, make_draft(hidden_size=16), draws(3), options(tmp_path))
    foreign = make_draft(own_lm_head=True, sample_from_anchor=True)
    with pytest.raises(ValueError, match="to train, got own_lm_head, sample_from_anchor in its config"):
        DFlashTrainer(target, foreign, draws(3), options(tmp_path))
    with pytest.raises(ValueError, match=r"expected a checkpoint folder with trainer_state\.pt"):
        run(target, make_draft(), options(tmp_path, resume_from_checkpoint=str(tmp_path / "none")))


def test_muon_leaves_codebooks_to_adamw(make_draft, tmp_path: Path) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon")
    draft = make_draft(**DFLASH2)
    muon, adamw = make_optimizers(draft, options(tmp_path, optim="muon"))
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    by_muon, by_adamw = (
        {names[id(p)] for group in optimizer.param_groups for p in group["params"]} for optimizer in (muon, adamw)
    )
    assert by_muon | by_adamw == set(names.values())
    assert {name for name in by_adamw if draft.get_parameter(name).ndim != 1} == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        *(f"layers.{i}.{place}_conv.base_kernel" for i in range(3) for place in ("attention", "mlp")),
    }


def test_a_dflash2_draft_learns_in_both_losses(target, make_draft, tmp_path: Path) -> None:
    """From a fresh one: every weight that DFlash 2 adds moves, both losses fall, and records tell of both."""
    draft = make_draft(fresh=True, **DFLASH2)
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    args = options(tmp_path, max_steps=40, logging_steps=10, num_anchors=16, learning_rate=5e-3)
    first, *_, last = run(target, draft, args, count=3).reports
    assert last.loss < 0.8 * first.loss
    assert first.selector_loss is not None
    assert 0 < last.selector_loss < 0.8 * first.selector_loss
    assert not [name for name, p in draft.named_parameters() if torch.equal(p, before[name])]
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["selector_loss"] == pytest.approx(last.selector_loss, abs=1e-4)


@pytest.mark.parametrize("kind", [{}, DFLASH2], ids=["dflash", "dflash 2"])
def test_a_draft_memorises_a_sequence(kind, target, make_draft, tmp_path: Path) -> None:
    """Loss falls, and the walked acceptance of the memorised text rises above three tokens per verify."""
    prompts = [example.input_ids for example in draws(4)]
    answers = regenerate_answers(target, prompts, max_new_tokens=30, eos_token_id=46, pad_token_id=0)
    data = [Example.from_pair(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    draft = make_draft(fresh=True, initializer_range=0.05, **kind)
    args = options(
        tmp_path, max_steps=120, per_device_train_batch_size=4, num_anchors=16, learning_rate=5e-3, logging_steps=20
    )
    trainer = DFlashTrainer(target, draft, data, args)
    before = walked_acceptance(draft, trainer.target, data).acceptance_length
    reports = trainer.train()
    after = walked_acceptance(draft, trainer.target, data).acceptance_length
    assert reports[-1].loss < 0.3 * reports[0].loss
    assert before < 2 < 3 < after
