"""The lines that a Transformers user types first: each answers as plain `generate` does, or ends in a sentence.

docs/transformers.md has one row for each test.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline
from typer.testing import CliRunner

import dflash_hf
from dflash_hf import DFlashDraftModel
from dflash_hf.cli.main import app
from helpers.source_tree import ROOT

TARGET = "demos/toy/target"
DRAFT = "demos/toy/draft"
SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="module")
def loaded_target() -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def loaded_draft() -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(DRAFT)


@pytest.fixture
def target(loaded_target: Any) -> Any:
    """A target that a test may change."""
    return copy.deepcopy(loaded_target)


@pytest.fixture
def draft(loaded_draft: DFlashDraftModel) -> DFlashDraftModel:
    """A draft that a test may change."""
    return copy.deepcopy(loaded_draft)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> Any:
    chat = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(chat, **options)


@pytest.fixture(scope="module")
def plain(loaded_target: Any, inputs: Any) -> Tensor:
    """What plain `generate` makes of the inputs, by a target that is as it was loaded."""
    return loaded_target.generate(**inputs, **SETTINGS)


def answer(target: Any, draft: Any, inputs: Any) -> Tensor:
    """Returns the ids of a call with a draft."""
    return target.generate(**inputs, **SETTINGS, assistant_model=draft)


def answers_the_same(target: Any, draft: Any, inputs: Any) -> bool:
    """Whether a call with a draft gives plain `generate`'s ids, by a target that a test has changed."""
    plain = target.generate(**inputs, **SETTINGS)
    return torch.equal(answer(target, draft, inputs), plain)


def test_pipeline_loads_a_draft_by_its_folder(tokenizer: Any) -> None:
    plain = pipeline("text-generation", model=TARGET, tokenizer=tokenizer)
    ours = pipeline("text-generation", model=TARGET, tokenizer=tokenizer, assistant_model=DRAFT)
    assert isinstance(ours.assistant_model, DFlashDraftModel)
    assert ours.assistant_model.dtype == ours.model.dtype
    chat = [{"role": "user", "content": "Compute 7 + 8."}]
    # First: what pipelines do that is deprecated is said once, of these
    wanted = plain(chat, **SETTINGS)
    assert ours(chat, **SETTINGS) == wanted
    assert ours.assistant_model.last_stats is not None


def test_pipeline_still_loads_other_assistants(tokenizer: Any) -> None:
    pipe = pipeline("text-generation", model=TARGET, tokenizer=tokenizer, assistant_model=TARGET)
    assert type(pipe.assistant_model) is type(pipe.model)
    with pytest.raises(OSError, match=r"no-such-folder|cached files"):
        pipeline("text-generation", model=TARGET, assistant_model="build/no-such-folder")


def test_a_name_as_assistant_is_refused(target: Any, inputs: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a loaded model.*load_draft"):
        target.generate(**inputs, **SETTINGS, assistant_model=DRAFT)


def test_auto_model_for_causal_lm_loads_a_draft(target: Any, inputs: Any, plain: Tensor) -> None:
    draft = AutoModelForCausalLM.from_pretrained(DRAFT)
    assert type(draft) is DFlashDraftModel
    assert torch.equal(answer(target, draft, inputs), plain)


def test_a_streamer_in_a_thread(
    target: Any, draft: DFlashDraftModel, tokenizer: Any, inputs: Any, plain: Tensor
) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    call = {**inputs, **SETTINGS, "assistant_model": draft, "streamer": streamer}
    generate: Any = target.generate
    thread = Thread(target=generate, kwargs=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])


def test_custom_generate_of_a_pushed_folder(
    target: Any, inputs: Any, plain: Tensor, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    pushed = CliRunner().invoke(
        app, ["push", DRAFT, "--to", str(folder), "--target", "my-org/my-model"]
    )
    assert pushed.exit_code == 0, pushed.output
    ours = target.generate(
        **inputs, **SETTINGS, custom_generate=str(folder), trust_remote_code=True
    )
    assert torch.equal(ours, plain)


def test_custom_generate_beside_a_draft_is_refused(
    target: Any, draft: DFlashDraftModel, inputs: Any
) -> None:
    with pytest.raises(ValueError, match="expected no custom_generate with a DFlash draft"):
        target.generate(**inputs, assistant_model=draft, custom_generate=print)


def test_device_map_auto(draft: DFlashDraftModel, inputs: Any) -> None:
    pytest.importorskip("accelerate")
    target: Any = AutoModelForCausalLM.from_pretrained(TARGET, device_map="auto")
    ours: Any = draft
    ours = ours.to(device=target.device)
    assert answers_the_same(target, ours, inputs.to(target.device))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks
def test_a_lora_on_the_target(target: Any, draft: DFlashDraftModel, inputs: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    assert answers_the_same(peft.get_peft_model(target, config).eval(), draft, inputs)


def test_compiled_after_a_call(
    target: Any, draft: DFlashDraftModel, inputs: Any, plain: Tensor
) -> None:
    assert torch.equal(answer(target, draft, inputs), plain)
    assert torch.equal(answer(torch.compile(target), draft, inputs), plain)


@pytest.mark.parametrize("proposed", [0, 3, 15])
def test_num_assistant_tokens_is_a_verify_width(
    target: Any, draft: DFlashDraftModel, inputs: Any, plain: Tensor, proposed: int
) -> None:
    draft.generation_config.num_assistant_tokens = proposed
    assert torch.equal(answer(target, draft, inputs), plain)
    assert set(draft.last_stats.verify_widths) <= {*range(1, proposed + 2)}
    by_name = draft.last_stats.num_committed
    draft.generation_config.num_assistant_tokens = None
    draft.generation_config.verify_width = proposed + 1
    assert torch.equal(answer(target, draft, inputs), plain)
    assert draft.last_stats.num_committed == by_name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_assistant_tokens": 16}, "verify_width between 1 and 16"),
        ({"num_assistant_tokens": -1}, "num_assistant_tokens of at least 0"),
        ({"num_assistant_tokens": 4, "verify_width": 5}, "verify_width or num_assistant_tokens"),
        ({"num_assistant_tokens": 4, "num_tree_nodes": 8}, "no num_assistant_tokens"),
    ],
)
def test_wrong_numbers_of_proposals_are_refused(
    target: Any, draft: DFlashDraftModel, inputs: Any, options: dict[str, Any], said: str
) -> None:
    for name, value in options.items():
        setattr(draft.generation_config, name, value)
    with pytest.raises(ValueError, match=said):
        target.generate(**inputs, **SETTINGS, assistant_model=draft)


def test_num_assistant_tokens_in_the_call_is_refused(
    target: Any, draft: DFlashDraftModel, inputs: Any
) -> None:
    with pytest.raises(ValueError, match=r"set draft\.generation_config\.num_assistant_tokens"):
        target.generate(**inputs, **SETTINGS, assistant_model=draft, num_assistant_tokens=4)


def test_generate_kept_from_before_the_import(
    target: Any, draft: DFlashDraftModel, inputs: Any, plain: Tensor
) -> None:
    # The state from before the import; an import behind Transformers' is in unit/test_patching.py.
    dflash_hf.disable()
    kept = target.generate
    dflash_hf.enable()
    with pytest.raises(ValueError, match="import dflash_hf first"):
        kept(**inputs, **SETTINGS, assistant_model=draft)
    assert torch.equal(answer(target, draft, inputs), plain)


def test_save_pretrained_writes_no_card(draft: DFlashDraftModel, tmp_path: Path) -> None:
    draft.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    again = dflash_hf.load_draft(tmp_path)
    for name, weight in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_resizing_a_draft_is_resizing_the_target(
    target: Any, draft: DFlashDraftModel, inputs: Any
) -> None:
    size = target.config.vocab_size + 8
    with pytest.raises(ValueError, match=r"got one that uses the target's; resize the target's"):
        draft.resize_token_embeddings(size)
    target.resize_token_embeddings(size)
    draft.config.vocab_size = size
    assert answers_the_same(target, draft, inputs)


def test_each_row_of_the_page_has_its_test() -> None:
    page = (ROOT / "docs/transformers.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    here = {name for name in globals() if name.startswith("test_")}
    assert named == here - {"test_each_row_of_the_page_has_its_test"}
