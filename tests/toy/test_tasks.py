"""The generated tasks, their checkers, the tokenizer and the stored target of the toy pair."""

import json
from pathlib import Path

import pytest
import torch
from build_tokenizer import CHAT_TEMPLATE, IM_END, IM_START, MASK, PAD, TARGET_DIR, VOCAB_SIZE
from fast_forward import fast_logits
from safetensors import safe_open
from tasks import KINDS, SPLITS, Kind, make_sample, prompt_text, split_of
from tasks_arithmetic import work_out
from tasks_code import extract_code
from train_target import IGNORE, encode, make_config, pad_batch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
)

pytestmark = pytest.mark.skipif(
    not (Path(TARGET_DIR) / "tokenizer.json").exists(), reason="the toy target has not been built"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Return the stored tokenizer."""
    return AutoTokenizer.from_pretrained(TARGET_DIR)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_deterministic(kind: Kind) -> None:
    """The same arguments give the same sample, and neighbours differ."""
    first, again, other = (make_sample(kind, "train", index) for index in (7, 7, 8))
    assert (first.messages, first.answer) == (again.messages, again.answer)
    assert first.messages != other.messages


@pytest.mark.parametrize("kind", KINDS)
def test_splits_share_no_prompt(kind: Kind) -> None:
    """A prompt belongs to one split, decided by its text alone."""
    prompts = {
        split: {prompt_text(make_sample(kind, split, i).messages) for i in range(300)}
        for split in SPLITS
    }
    assert not prompts["train"] & prompts["heldout"]
    for split in SPLITS:
        assert len(prompts[split]) > 290
        assert all(split_of(make_sample(kind, split, i).messages) == split for i in range(50))


@pytest.mark.parametrize("kind", KINDS)
def test_checkers_accept_the_reference_and_reject_changes(kind: Kind) -> None:
    """The reference answer passes; a changed or empty answer does not."""
    for index in range(12):
        sample = make_sample(kind, "heldout", index)
        assert sample.check(sample.answer)
        assert not sample.check("")
        if kind == "arithmetic":
            mutated = sample.answer.replace("\\boxed{", "\\boxed{1")
        elif kind == "code":
            mutated = sample.answer.replace("return ", "return not ", 1)
        else:
            mutated = sample.answer[:-1] + "?"
        assert not sample.check(mutated)


def test_code_checker_refuses_what_it_should_not_run() -> None:
    """Imports, dunder names and broken syntax are refused before anything runs."""
    sample = make_sample("code", "heldout", 0)
    source = extract_code(sample.answer)
    assert source is not None
    for extra in ("import os", "x = ().__class__", "x = (", "open('x')"):
        assert not sample.check(f"```python\n{extra}\n{source}```")
    assert sample.check(f"```python\nx = 1\n{source}```")


@pytest.mark.parametrize(
    ("operator", "left", "right", "expected"),
    [("+", 82, 54, "82+54=136"), ("-", 315, 224, "315-224=91"), ("*", 269, 3, "269*3=807")],
)
def test_worked_steps_end_in_the_right_number(
    operator: str, left: int, right: int, expected: str
) -> None:
    """The spelled out operation states the true result."""
    assert work_out(operator, left, right).endswith(f"So {expected}.")


def test_unknown_kind_and_split_are_refused() -> None:
    """The errors name what is allowed."""
    with pytest.raises(ValueError, match="expected a kind"):
        make_sample("poetry", "train", 0)
    with pytest.raises(ValueError, match="expected a split"):
        make_sample("code", "test", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase, kind: Kind) -> None:
    """Decoding gives back the text, and whole conversations fit the context."""
    for index in range(20):
        sample = make_sample(kind, "heldout", index)
        assert tokenizer.decode(tokenizer(sample.answer)["input_ids"]) == sample.answer
        assert len(encode(tokenizer, kind, index).input_ids) < 512


def test_tokenizer_layout(tokenizer: PreTrainedTokenizerBase) -> None:
    """Digits are single tokens, other scripts survive, and the special tokens have their roles."""
    assert len(tokenizer) == VOCAB_SIZE
    assert len(tokenizer("2026")["input_ids"]) == 4
    text = "Привет, 世界 🙂 \t\n x  y"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == (IM_END, PAD, MASK)
    assert len(tokenizer(f"{IM_START}{IM_END}{PAD}{MASK}")["input_ids"]) == 4
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_chat_template_marks_what_the_assistant_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    """The generation mask covers each answer and its end token, in every turn."""
    messages = [
        {"role": "user", "content": "Hi, I am Ada."},
        {"role": "assistant", "content": "Hi, Ada!"},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "Enjoy your meal!"},
    ]
    encoded = tokenizer.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    marked = [t for t, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == f"Hi, Ada!{IM_END}Enjoy your meal!{IM_END}"
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(prompt).endswith(f"{IM_START}assistant\n")
    assert encoded["input_ids"][: len(prompt)] == prompt


def test_padding_and_labels(tokenizer: PreTrainedTokenizerBase) -> None:
    """Labels are the next tokens, answers weigh one, prompts weigh little and padding weighs nothing."""
    rows = [encode(tokenizer, "arithmetic", 0), encode(tokenizer, "structured", 0)]
    batch = pad_batch(rows, tokenizer.pad_token_id, 0.25)
    for at, row in enumerate(rows):
        size = len(row.input_ids)
        assert batch.labels_BS[at, : size - 1].tolist() == row.input_ids[1:]
        assert (batch.labels_BS[at, size - 1 :] == IGNORE).all()
        assert int((batch.weights_BS[at] == 1).sum()) == sum(row.is_answer)
        assert float(batch.weights_BS[at, 0]) == 0.25
        assert not batch.weights_BS[at, size - 1 :].any()


def test_fast_forward_matches_the_model(tokenizer: PreTrainedTokenizerBase) -> None:
    """The training forward pass agrees with the general one, in values and in gradients."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(make_config(tokenizer))
    ids = torch.randint(4, VOCAB_SIZE, (2, 24))
    gradients = []
    for logits in (model(input_ids=ids, use_cache=False).logits, fast_logits(model, ids).float()):
        model.zero_grad()
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids.roll(-1, 1).flatten()
        ).backward()
        gradients.append(
            (logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]))
        )
    (exact, exact_grad), (fast, fast_grad) = gradients
    assert torch.nn.functional.cosine_similarity(exact.flatten(), fast.flatten(), dim=0) > 0.999
    assert torch.nn.functional.cosine_similarity(exact_grad, fast_grad, dim=0) > 0.995


def test_stored_target(tokenizer: PreTrainedTokenizerBase) -> None:
    """Weights are stored in 16 bits, small enough, and load in float32 with greedy defaults."""
    path = Path(TARGET_DIR) / "model.safetensors"
    if not path.exists():
        pytest.skip("the toy target has not been trained")
    assert path.stat().st_size <= 10_500_000
    with safe_open(path, "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F16"}  # noqa: SIM118
    config = json.loads((Path(TARGET_DIR) / "config.json").read_text())
    assert config["dtype"] == "float32"
    for options in ({}, {"dtype": "auto"}):
        model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, **options)
        assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert not model.generation_config.do_sample
