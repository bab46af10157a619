"""What a run promises: accumulation, records, precision, refusals; and the draft learns. Resumes: test_resume.py."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM, TrainerCallback

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training import (
    DFlashTrainer,
    DFlashTrainingArguments,
    Example,
    regenerate_answers,
    walked_acceptance,
)
from dflash_hf.training.optimizer import MuonAndAdamW
from helpers.training import AtStep, draws, options, records
from tiny import DFLASH2, DSPARK

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon"
)


def run(
    target: Qwen3ForCausalLM,
    draft: DFlashDraftModel,
    args: DFlashTrainingArguments,
    count: int = 10,
) -> DFlashTrainer:
    trainer = DFlashTrainer(model=draft, target=target, args=args, train_dataset=draws(count))
    trainer.train()
    return trainer


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
            warmup_steps=0,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        )
        trainer = DFlashTrainer(model=draft, target=target, args=args, train_dataset=data)
        trainer.train()
        drafts.append((draft, records(trainer)[-1]))
    (one, report), (two, other) = drafts
    assert other["loss"] == pytest.approx(report["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(report["grad_norm"], rel=1e-4)
    torch.testing.assert_close(one.fc.weight, two.fc.weight, rtol=1e-3, atol=1e-4)


def test_a_run_leaves_records_and_the_target_as_it_was(target, make_draft, tmp_path: Path) -> None:
    before = {name: p.clone() for name, p in target.named_parameters()}
    draft = make_draft()
    args = options(tmp_path, save_steps=2, save_total_limit=2, eval_strategy="steps", eval_steps=4)
    trainer = DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=draws(10), eval_dataset=draws(3)
    )
    output = trainer.train()
    assert output.global_step == 8
    assert [record["step"] for record in records(trainer)] == [4, 8]
    walked = walked_acceptance(draft, trainer.target, draws(3)).acceptance_length
    assert [record["step"] for record in records(trainer, "eval_acceptance_length")] == [4, 8]
    assert records(trainer, "eval_acceptance_length")[-1]["eval_acceptance_length"] == walked
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-6",
        "checkpoint-8",
    ]
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record for record in told if "loss" in record] == records(trainer)
    assert sum(name.startswith("accuracy_") for name in told[0]) == draft.config.block_size - 1
    assert not draft.training
    assert all(
        torch.equal(p, before[name]) and p.grad is None for name, p in target.named_parameters()
    )
    trainer.save_model()
    stored = DFlashDraftModel.from_pretrained(tmp_path)
    assert all(
        torch.equal(value, stored.state_dict()[name]) for name, value in draft.state_dict().items()
    )


def test_records_are_what_the_batches_between_them_counted(
    target, make_draft, tmp_path: Path
) -> None:
    """One record over four steps joins those of four records over one step each."""
    each, joined = (
        records(
            run(
                target,
                make_draft(),
                options(tmp_path, max_steps=4, logging_steps=steps, learning_rate=1e-9),
            )
        )
        for steps in (1, 4)
    )
    assert len(each), len(joined) == (4, 1)
    assert min(r["loss"] for r in each) < joined[0]["loss"] < max(r["loss"] for r in each)
    assert 1 <= min(r["block_acceptance"] for r in each) <= joined[0]["block_acceptance"]


def test_the_best_draft_is_the_one_that_accepts_most(target, make_draft, tmp_path: Path) -> None:
    """Not the last one, which has forgotten everything."""
    prompts = [example.input_ids for example in draws(4)]
    answers = regenerate_answers(
        target, prompts, max_new_tokens=20, eos_token_id=46, pad_token_id=0
    )
    data = [
        Example.from_pair(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    draft = make_draft(fresh=True, initializer_range=0.05)
    args = options(
        tmp_path,
        max_steps=60,
        num_anchors=16,
        learning_rate=5e-3,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_acceptance_length", True)
    with pytest.raises(ValueError, match="expected eval_held_acceptance_length as metric_for_best"):
        DFlashTrainer(model=draft, target=target, args=args, eval_dataset={"held": data})
    args.metric_for_best_model = "eval_held_acceptance_length"
    with pytest.raises(
        ValueError, match="expected eval_acceptance_length as metric_for_best_model"
    ):
        DFlashTrainer(model=draft, target=target, args=args, eval_dataset=data)
    trainer = DFlashTrainer(
        model=draft,
        target=target,
        args=args,
        train_dataset=data,
        eval_dataset={"held": data},
        callbacks=[AtStep(45, lambda model: torch.nn.init.zeros_(model.fc.weight))],
    )
    trainer.train()
    lengths = [
        r["eval_held_acceptance_length"] for r in records(trainer, "eval_held_acceptance_length")
    ]
    assert lengths[-1] < max(lengths)
    assert trainer.state.best_metric == max(lengths)
    assert walked_acceptance(draft, trainer.target, data).acceptance_length == max(lengths)


class Averaging(torch.optim.SGD):
    """As optimizers of `schedulefree` do, it has other weights while it trains: all of them are greater by 1."""

    has_averages = True

    def train(self) -> None:
        if self.has_averages:
            self._add(1.0)
        self.has_averages = False

    def eval(self) -> None:
        if not self.has_averages:
            self._add(-1.0)
        self.has_averages = True

    @torch.no_grad()
    def _add(self, number: float) -> None:
        for weight in self.param_groups[0]["params"]:
            weight += number


class EndsAtStep3(TrainerCallback):
    """Ends a run early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.parametrize("keeps_best", [False, True])
def test_the_averages_of_an_optimizer_are_measured_and_left(
    keeps_best: bool, target, make_draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that is ended behind a step without an evaluation."""
    draft = make_draft()
    optimizer = Averaging(draft.parameters(), lr=1e-6)
    measured: list[bool] = []

    def walk(*args: Any, **kwargs: Any) -> Any:
        measured.append(optimizer.has_averages)
        return walked_acceptance(*args, **kwargs)

    monkeypatch.setattr("dflash_hf.training.trainer.walked_acceptance", walk)
    args = options(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=keeps_best,
    )
    trainer = DFlashTrainer(
        model=draft,
        target=target,
        args=args,
        train_dataset=draws(10),
        eval_dataset=draws(3),
        callbacks=[EndsAtStep3()],
        optimizers=(optimizer, None),
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert measured == [True]
    assert optimizer.has_averages
    checkpoint = DFlashDraftModel.from_pretrained(tmp_path / "checkpoint-2")
    near = 1e-9 if keeps_best else 1e-2
    torch.testing.assert_close(draft.fc.weight, checkpoint.fc.weight, rtol=0, atol=near)


def test_epochs_give_the_number_of_steps(target, make_draft, tmp_path: Path) -> None:
    args = options(tmp_path, max_steps=-1, num_train_epochs=1.5, gradient_accumulation_steps=2)
    assert run(target, make_draft(), args).state.max_steps == 3


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
            trainer = DFlashTrainer(
                model=make_draft(), target=target, args=args, train_dataset=data
            )
            trainer.train()
            losses.append(records(trainer)[-1]["loss"])
        assert (losses[0] == pytest.approx(losses[1], rel=1e-5)) is same


def test_mixed_precision_is_close_to_full(target, make_draft, tmp_path: Path) -> None:
    full, mixed = (
        records(run(target, make_draft(), options(tmp_path, bf16=bf16, use_cpu=True)))[-1]["loss"]
        for bf16 in (False, True)
    )
    assert full != mixed
    assert full == pytest.approx(mixed, rel=0.05)


def test_a_target_in_bfloat16_trains_a_draft_in_float32(target, make_draft, tmp_path: Path) -> None:
    """Without mixed precision: the head gets what it computes in, and the draft stays in float32."""
    whole = records(run(target, make_draft(), options(tmp_path)))[-1]
    draft = make_draft()
    trainer = run(target.bfloat16(), draft, options(tmp_path))
    assert records(trainer)[-1]["loss"] == pytest.approx(whole["loss"], rel=0.05)
    assert draft.dtype == torch.float32
    assert target.dtype == torch.bfloat16
    assert DFlashTrainer(
        model=draft, target=target, args=options(tmp_path), eval_dataset=draws(3)
    ).evaluate()


@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("muon", marks=needs_muon)])
def test_a_draft_in_bfloat16_has_masters_in_float32(
    optim: str, target, make_draft, tmp_path: Path
) -> None:
    """Steps that bfloat16 would round away move its weights; it is saved in its own dtype on request."""
    draft = make_draft().bfloat16()
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    args = options(tmp_path, optim=optim, learning_rate=1e-6, save_dtype="auto", save_steps=8)
    trainer = run(target.bfloat16(), draft, args)
    assert draft.dtype == torch.float32
    for name, parameter in draft.named_parameters():
        assert (parameter == before[name]).float().mean() < (
            0.05 if parameter.ndim == 2 else 0.3
        ), name
    trainer.save_model(str(tmp_path / "stored"))
    assert draft.dtype == draft.config.dtype == torch.float32
    stored = DFlashDraftModel.from_pretrained(tmp_path / "stored")
    assert stored.dtype == torch.bfloat16
    for name, parameter in stored.named_parameters():
        assert torch.equal(parameter, draft.get_parameter(name).bfloat16()), name
    checkpoint = DFlashDraftModel.from_pretrained(tmp_path / "checkpoint-8")
    assert torch.equal(checkpoint.fc.weight, draft.fc.weight)


def test_checkpointed_layers_give_the_same_draft(target, make_draft, tmp_path: Path) -> None:
    names = {field.name for field in fields(DFlashTrainingArguments)}
    name = (
        "activation_checkpointing"
        if "activation_checkpointing" in names
        else "gradient_checkpointing"
    )
    plain, saving = make_draft(), make_draft()
    run(target, plain, options(tmp_path))
    calls: list[Any] = []
    saving.layers[1].input_layernorm.register_forward_pre_hook(lambda *args: calls.append(1))
    run(target, saving, options(tmp_path, **{name: True}))
    assert len(calls) == 2 * 8, "each layer runs again in the backward pass"
    for key, value in plain.state_dict().items():
        assert torch.equal(value, saving.state_dict()[key]), key


def test_workers_change_nothing(target, make_draft, tmp_path: Path) -> None:
    alone, helped = make_draft(), make_draft()
    run(target, alone, options(tmp_path))
    trainer = run(
        target,
        helped,
        options(tmp_path, dataloader_num_workers=2, dataloader_persistent_workers=True),
    )
    assert torch.equal(alone.fc.weight, helped.fc.weight)
    loader: Any = trainer.callback_handler.train_dataloader
    # Which are waited for, ten seconds long, when garbage is collected
    loader._iterator._shutdown_workers()


def test_a_loss_that_is_no_number_ends_the_run_before_the_step(
    target, make_draft, tmp_path: Path
) -> None:
    draft = make_draft()
    args = options(tmp_path, save_steps=2)
    poison = AtStep(3, lambda model: model.fc.weight.data[0].fill_(torch.nan))
    trainer = DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=draws(10), callbacks=[poison]
    )
    with pytest.raises(
        FloatingPointError, match=r"at step 4, got .* no numbers in rows \d of train_dataset; look"
    ):
        trainer.train()
    assert not [
        name for name, p in draft.named_parameters() if p.isnan().any() and name != "fc.weight"
    ]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_loss_that_is_no_number_is_told_with_its_line(target, make_draft, tmp_path: Path) -> None:
    """Lines of a file without an example make the number of an example another one."""

    class Rows(list[Example]):
        def places_of(self, indices: list[int]) -> str:
            return f"lines {[2 * index + 1 for index in indices]} of rows.jsonl"

    poison = AtStep(1, lambda model: model.fc.weight.data[0].fill_(torch.nan))
    trainer = DFlashTrainer(
        model=make_draft(),
        target=target,
        args=options(tmp_path, per_device_train_batch_size=2),
        train_dataset=Rows(draws(2)),
        callbacks=[poison],
    )
    with pytest.raises(FloatingPointError, match=r"in lines \[[13, ]+\] of rows\.jsonl; look"):
        trainer.train()


def test_float16_leaves_out_steps_but_no_bad_rows(target, make_draft, tmp_path: Path) -> None:
    """No scale of the loss makes a number of a loss that is none; gradients alone may overflow."""
    trainer = DFlashTrainer(
        model=make_draft(), target=target, args=options(tmp_path), train_dataset=draws(3)
    )
    trainer.args.fp16 = True
    overflown = torch.tensor(torch.inf)
    trainer._losses = [([0], torch.tensor([True]))]
    assert trainer._get_grad_norm(trainer.model, overflown) == torch.inf
    trainer._losses = [([0], torch.tensor([True])), ([2], torch.tensor([False]))]
    with pytest.raises(FloatingPointError, match="no numbers in rows 2 of train_dataset; look"):
        trainer._get_grad_norm(trainer.model, overflown)


def test_misfits_are_refused(target, make_draft, tmp_path: Path) -> None:
    def make(draft: Any, data: Any, **changes: object) -> DFlashTrainer:
        return DFlashTrainer(
            model=draft, target=target, args=options(tmp_path, **changes), train_dataset=data
        )

    with pytest.raises(ValueError, match="expected examples with answer tokens, got none"):
        make(make_draft(), [Example.from_pair([1, 2], [])])
    with pytest.raises(ValueError, match="got none that another one follows; give prompts"):
        make(make_draft(), [Example.from_pair([1, 2], [3])] * 4)
    make(make_draft(), [Example.from_pair([1, 2], [3]), Example.from_pair([1, 2], [3, 4])])
    with pytest.raises(ValueError, match="expected a draft for hidden size 32"):
        make(make_draft(hidden_size=16), draws(3))
    with pytest.raises(ValueError, match=r"expected block_size 6 \(the draft's\) or less, got 8"):
        make(make_draft(), draws(3), block_size=8)
    with pytest.raises(ValueError, match="expected a train_dataset, got None"):
        make(make_draft(), None).train()
    with pytest.raises(ValueError, match=r"expected a checkpoint folder with trainer_state\.json"):
        make(make_draft(), draws(3), resume_from_checkpoint=str(tmp_path / "none")).train()
    with pytest.raises(ValueError, match=r"expected a whole checkpoint in .*, got none"):
        make(make_draft(), draws(3)).train(resume_from_checkpoint=True)


def test_the_old_order_and_other_kinds_are_told_apart(target, make_draft, tmp_path: Path) -> None:
    draft, args, old = make_draft(), options(tmp_path), Qwen3ForCausalLM
    order = r"write DFlashTrainer\(model=draft, target=target, args=args, train_dataset=examples\)"
    with pytest.raises(
        ValueError, match=f"expected a DFlashDraftModel as model, got a {old.__name__}; {order}"
    ):
        DFlashTrainer(target, draft, draws(3), args)
    with pytest.raises(
        ValueError, match=f"expected a PreTrainedModel as target, got a DFlashDraftModel; {order}"
    ):
        DFlashTrainer(draft, draft, args, draws(3))
    with pytest.raises(ValueError, match="expected a DFlashTrainingArguments as args, got a list"):
        DFlashTrainer(draft, target, draws(3), args)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="expected one GPU per process, got 2"):
        DFlashTrainer(draft, target, args, draws(3))


@needs_muon
def test_muon_leaves_codebooks_to_adamw(make_draft, tmp_path: Path) -> None:
    draft = make_draft(**DFLASH2)
    optimizer = MuonAndAdamW(draft, options(tmp_path, optim="muon"))
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    by_muon, by_adamw = (
        {names[id(p)] for p in group["params"]} for group in optimizer.param_groups
    )
    assert by_muon | by_adamw == set(names.values())
    assert {name for name in by_adamw if draft.get_parameter(name).ndim != 1} == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        *(
            f"layers.{i}.{place}_conv.base_kernel"
            for i in range(3)
            for place in ("attention", "mlp")
        ),
    }


@needs_muon
def test_muon_leaves_a_markov_heads_tables_to_adamw(make_draft, tmp_path: Path) -> None:
    draft = make_draft(**DSPARK)
    optimizer = MuonAndAdamW(draft, options(tmp_path, optim="muon"))
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    _, by_adamw = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert {name for name in by_adamw if draft.get_parameter(name).ndim != 1} == {
        "markov_head.markov_w1",
        "markov_head.markov_w2",
    }


@needs_muon
def test_one_optimizer_steps_as_the_two_of_torch(make_draft, tmp_path: Path) -> None:
    """Also after its state has gone through a file, in the middle."""
    args = options(tmp_path, optim="muon", weight_decay=0.1, adam_beta2=0.9)
    one, two = make_draft(**DFLASH2), make_draft(**DFLASH2)
    optimizer = MuonAndAdamW(one, args)
    muon_group, adamw_group = MuonAndAdamW(two, args).param_groups
    muon = torch.optim.Muon(
        muon_group["params"], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(adamw_group["params"], lr=1e-3, weight_decay=0.0, betas=(0.9, 0.9))
    for step in range(4):
        for first, second in zip(one.parameters(), two.parameters(), strict=True):
            first.grad = torch.randn_like(first, generator=None)
            second.grad = first.grad.clone()
        if step == 2:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            optimizer = MuonAndAdamW(one, args)
            optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for each in (optimizer, muon, adamw):
            each.step()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def test_weight_decay_is_for_matrices(target, make_draft, tmp_path: Path) -> None:
    draft = make_draft(**DFLASH2)
    args = options(tmp_path, weight_decay=0.1)
    trainer = DFlashTrainer(model=draft, target=target, args=args, train_dataset=draws(3))
    decayed, others = trainer.create_optimizer().param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    assert all(p.ndim == 2 and not names[id(p)].endswith("_codebook") for p in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_a_dflash2_draft_learns_in_both_losses(target, make_draft, tmp_path: Path) -> None:
    """From a fresh one: every weight that DFlash 2 adds moves, both losses fall, and records tell of both."""
    draft = make_draft(fresh=True, **DFLASH2)
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    args = options(tmp_path, max_steps=40, logging_steps=10, num_anchors=16, learning_rate=5e-3)
    first, *_, last = records(run(target, draft, args, count=3))
    assert last["loss"] < 0.8 * first["loss"]
    assert 0 < last["selector_loss"] < 0.8 * first["selector_loss"]
    assert not [name for name, p in draft.named_parameters() if torch.equal(p, before[name])]
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record for record in told if "selector_loss" in record][-1] == last


@pytest.mark.parametrize("kind", [{}, DFLASH2, DSPARK], ids=["dflash", "dflash 2", "dspark"])
def test_a_draft_memorises_a_sequence(
    kind, target, make_draft: Callable[..., Any], tmp_path: Path
) -> None:
    """Loss falls, and the walked acceptance of the memorised text rises above three tokens per verify."""
    prompts = [example.input_ids for example in draws(2)]
    answers = regenerate_answers(
        target, prompts, max_new_tokens=20, eos_token_id=46, pad_token_id=0
    )
    data = [
        Example.from_pair(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    draft = make_draft(fresh=True, initializer_range=0.05, **kind)
    args = options(
        tmp_path,
        max_steps=50,
        per_device_train_batch_size=2,
        num_anchors=16,
        learning_rate=5e-3,
        logging_steps=10,
        save_strategy="no",
    )
    trainer = DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=data, eval_dataset=data
    )
    before = trainer.evaluate()["eval_acceptance_length"]
    trainer.train()
    after = trainer.evaluate()["eval_acceptance_length"]
    assert records(trainer)[-1]["loss"] < 0.3 * records(trainer)[0]["loss"]
    assert before < 2 < 3 < after
