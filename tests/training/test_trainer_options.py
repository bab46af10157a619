"""What else a run may be asked for: objectives, packed rows, features on disk, adapters, drafts of other formats."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training import DFlashTrainer, Example, regenerate_answers
from dflash_hf.training.forward import target_features
from helpers.training import draws, options, records

TOY = Path(__file__).parents[2] / "demos" / "toy" / "target"


@pytest.fixture
def data(target) -> list[Example]:
    prompts = [example.input_ids for example in draws(4)]
    answers = regenerate_answers(
        target, prompts, max_new_tokens=20, eos_token_id=46, pad_token_id=0
    )
    return [
        Example.from_pair(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)
    ]


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpace": ({"loss": "dpace"}, {}),
    "kl": ({"loss": "kl"}, {}),
    "lk": ({"loss": "lk"}, {}),
    "lk in bfloat16": ({"loss": "lk", "bf16": True, "use_cpu": True}, {}),
    "tv in bfloat16": ({"loss": "tv", "bf16": True, "use_cpu": True}, {}),
    "packed": ({"packing_length": 64, "per_device_train_batch_size": 2}, {}),
    "own head": ({}, {"own_lm_head": True, "own_embed_tokens": True}),
    "from the anchor": ({}, {"sample_from_anchor": True}),
    "muon": ({"optim": "muon"}, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_draft_learns(name: str, target, make_draft, data: list[Example], tmp_path: Path) -> None:
    changes, fields = OPTIONS[name]
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon")
    draft = make_draft(fresh=True, initializer_range=0.05, **fields)
    before = {key: p.detach().clone() for key, p in draft.named_parameters()}
    args = options(
        tmp_path,
        max_steps=30,
        num_anchors=16,
        learning_rate=5e-3,
        logging_steps=6,
        save_strategy="no",
        **changes,
    )
    trainer = DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=data, eval_dataset=data
    )
    first = trainer.evaluate()["eval_acceptance_length"]
    trainer.train()
    assert trainer.evaluate()["eval_acceptance_length"] > first + 0.3
    losses = [record["loss"] for record in records(trainer)]
    assert losses[-1] < 0.8 * losses[0]
    assert not [key for key, p in draft.named_parameters() if torch.equal(p, before[key])]
    slots = sum(key.startswith("accuracy_") for key in records(trainer)[0])
    assert slots == draft.config.block_size - (not draft.config.sample_from_anchor)


def test_features_on_disk_train_the_same_draft(
    target, make_draft, data: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit with batches of one row; workers read them; another epoch or another run makes none."""
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return target_features(*args, **kwargs)

    for name in ("forward", "features"):
        monkeypatch.setattr(f"dflash_hf.training.{name}.target_features", counted)
    drafts = []
    for cache, workers, expected in ((None, 0, 8), ("a", 0, 4), ("a", 1, 0)):
        calls.clear()
        changes = {
            "per_device_train_batch_size": 1,
            "dataloader_num_workers": workers,
            "save_strategy": "no",
        }
        folder = None if cache is None else str(tmp_path / cache)
        draft = make_draft()
        args = options(tmp_path / "run", feature_cache=folder, **changes)
        DFlashTrainer(model=draft, target=target, args=args, train_dataset=data).train()
        assert len(calls) == expected
        drafts.append(draft)
    for draft in drafts[1:]:
        for name, value in drafts[0].state_dict().items():
            assert torch.equal(value, draft.state_dict()[name]), name


def test_features_of_another_target_are_refused_early(
    target, make_draft, data: list[Example], tmp_path: Path
) -> None:
    args = options(
        tmp_path, feature_cache=str(tmp_path / "features"), max_steps=1, save_strategy="no"
    )
    DFlashTrainer(model=make_draft(), target=target, args=args, train_dataset=data).train()
    torch.nn.init.ones_(target.model.layers[0].mlp.up_proj.weight)
    trainer = DFlashTrainer(model=make_draft(), target=target, args=args, train_dataset=data)
    with pytest.raises(
        ValueError,
        match=r"expected features with target '.*; use the target they were written with",
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_tokenizer_saved_beside_a_draft_changes_nothing(
    target, make_draft, data: list[Example], tmp_path: Path
) -> None:
    """Transformers would make its special tokens the draft's, which are the target's."""
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    draft = make_draft()
    args = options(tmp_path, max_steps=2, save_steps=2)
    before = draft.generation_config.to_dict()
    trainer = DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model()
    assert draft.generation_config.to_dict() == before
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & vars(draft.config).keys()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
        assert (
            "eos_token_id"
            not in DFlashDraftModel.from_pretrained(folder).generation_config.to_diff_dict()
        )


def test_rows_that_do_not_fit_are_refused_before_the_first_step(
    target, make_draft, tmp_path: Path
) -> None:
    args = options(tmp_path, packing_length=8)
    trainer = DFlashTrainer(model=make_draft(), target=target, args=args, train_dataset=draws(10))
    with pytest.raises(ValueError, match="expected examples of at most 8 tokens to pack, got"):
        trainer.train()


# PEFT asks for it
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_trained_and_saved_alone(
    target, make_draft, data: list[Example], tmp_path: Path
) -> None:
    """On a draft in bfloat16; and it resumes."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "fc"], r=4)
    args = options(
        tmp_path,
        learning_rate=5e-3,
        save_steps=4,
        save_dtype="auto",
        eval_strategy="steps",
        eval_steps=4,
    )
    found = []
    for resume in (None, True):
        draft = make_draft().bfloat16()
        base = {name: p.detach().clone() for name, p in draft.named_parameters()}
        torch.manual_seed(2)
        model = peft.get_peft_model(draft, config)
        (tmp_path / "checkpoint-8" / "trainer_state.json").unlink(missing_ok=True)
        trainer = DFlashTrainer(
            model=model, target=target, args=args, train_dataset=data, eval_dataset=data
        )
        trainer.train(resume_from_checkpoint=resume)
        for name, p in model.get_base_model().named_parameters():
            key = name.replace(".base_layer", "")
            assert "lora_" in name or torch.equal(p, base[key].float()), name
        found.append({name: p for name, p in model.named_parameters() if p.requires_grad})
        trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
        assert value.abs().sum() > 0


def test_a_decay_that_the_loss_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected no gamma beside loss='dpace', got 7\.0; leave"):
        options(tmp_path, gamma=7.0)
    assert options(tmp_path, gamma=7.0, loss="kl").gamma == 7.0


def test_a_feature_dtype_without_a_cache_is_refused(tmp_path: Path) -> None:
    message = r"expected feature_dtype with a feature_cache, got 'float8'; leave it out"
    with pytest.raises(ValueError, match=message):
        options(tmp_path, feature_dtype="float8")
    message = r"expected feature_dtype 'auto' or 'float8', got 'float16'; use one of them"
    with pytest.raises(ValueError, match=message):
        options(tmp_path, feature_dtype="float16", feature_cache=str(tmp_path))


@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise"])
def test_steps_within_the_backward_pass_are_refused(name: str, tmp_path: Path) -> None:
    """Their gradients would be gone before anybody has checked them."""
    message = f"expected an optim whose steps come behind the backward pass, got '{name}'; use"
    with pytest.raises(ValueError, match=message):
        options(tmp_path, optim=name)


def test_options_that_muon_does_not_read_are_refused(tmp_path: Path) -> None:
    message = "expected no optim_args with optim 'muon', got 'momentum=0.9'; leave them out"
    with pytest.raises(ValueError, match=message):
        options(tmp_path, optim="muon", optim_args="momentum=0.9")
