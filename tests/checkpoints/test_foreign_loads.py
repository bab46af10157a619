"""A draft's folder that is given to Transformers' own classes: what comes out, and the sentence that catches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_hf import DFlashDraftModel, iterate
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.checkpoints.formats import FORMATS
from dflash_hf.pair.loading import load_processor, load_target
from helpers.layouts import CONFIGS, make_draft
from helpers.published_configs import CONFIGS as PUBLISHED
from helpers.published_drafts import write

# Format -> a draft that it can express, of helpers.layouts or a published config.
DRAFTS = {
    "dflash": "plain",
    "zlab": "plain",
    "speculators": "plain",
    "muse": "muse-like, full",
    "deepspec": "dspark of deepspec",
    "laguna": "poolside/Laguna-S-2.1-DFlash",
    "deepspec-gemma4": "deepseek-ai/dspark_gemma4_12b_block7",
}
NO_TYPE = "Should have a `model_type` key"
RIGHT_CALL = "dflash_hf.load_draft"
# What AutoConfig, AutoModel and AutoModelForCausalLM make of it: a class, or a ValueError that says this.
OUTCOMES = {
    "dflash": ("DFlashConfig", "DFlashDraftModel", "DFlashDraftModel"),
    "zlab": ("Qwen3Config", "Qwen3Model", "Qwen3ForCausalLM"),
    "speculators": (NO_TYPE, NO_TYPE, NO_TYPE),
    "muse": ("MuseGlimmerAssistantConfig", "MuseGlimmerAssistantModel", RIGHT_CALL),
    "deepspec": ("Qwen3Config", "Qwen3Model", "Qwen3ForCausalLM"),
    "laguna": ("LagunaConfig", "LagunaModel", "LagunaForCausalLM"),
    "deepspec-gemma4": ("Gemma4TextConfig", "Gemma4TextModel", "Gemma4ForCausalLM"),
}
AUTO_CLASSES = (AutoConfig, AutoModel, AutoModelForCausalLM)
LOADED_AS_A_MODEL = ("zlab", "deepspec", "laguna", "deepspec-gemma4")
LOADED_AS_SOMETHING = (*LOADED_AS_A_MODEL, "muse")
PROMPT = torch.tensor([[1, 2, 3]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each format."""
    made: dict[str, Path] = {}
    for form, name in DRAFTS.items():
        folder = tmp_path_factory.mktemp(form)
        if name in CONFIGS:
            draft = make_draft(**CONFIGS[name][0])
        else:
            draft = write(tmp_path_factory.mktemp("published"), PUBLISHED[name])
        save_draft(draft, folder, form)  # pyright: ignore[reportArgumentType]
        made[form] = folder
    return made


def make_target() -> Any:
    """A tiny target whose layers must never run."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 6}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=48, num_hidden_layers=8, eos_token_id=None, **sizes, **heads)
    return Qwen3ForCausalLM(config).eval()


def forbid_forwards(model: torch.nn.Module) -> None:
    """Makes each forward of a model fail the test."""
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))


def test_the_table_has_every_format() -> None:
    assert set(DRAFTS) == set(OUTCOMES) == set(FORMATS)


@pytest.mark.parametrize("form", FORMATS)
def test_what_auto_classes_make_of_a_format(form: str, folders: dict[str, Path]) -> None:
    for auto, outcome in zip(AUTO_CLASSES, OUTCOMES[form], strict=True):
        if outcome in (NO_TYPE, RIGHT_CALL):
            with pytest.raises(ValueError, match=outcome):
                auto.from_pretrained(folders[form])
        else:
            assert type(auto.from_pretrained(folders[form])).__name__ == outcome
    assert isinstance(load_draft(folders[form]), DFlashDraftModel)


@pytest.mark.parametrize("form", LOADED_AS_SOMETHING)
def test_such_a_model_is_refused_as_assistant(form: str, folders: dict[str, Path]) -> None:
    target = make_target()
    forbid_forwards(target)
    call = f"{RIGHT_CALL}\\('{folders[form]}"
    sentence = f"expected a draft of class .* in the format '{form}'.*{call}"
    assistants = [AutoModel.from_pretrained(folders[form])]
    if form in LOADED_AS_A_MODEL:
        assistants.append(AutoModelForCausalLM.from_pretrained(folders[form]))
    for assistant in assistants:
        with pytest.raises(ValueError, match=sentence):
            target.generate(PROMPT, assistant_model=assistant)


@pytest.mark.parametrize("form", LOADED_AS_A_MODEL)
def test_such_a_model_is_refused_as_target(form: str, folders: dict[str, Path]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folders[form])
    forbid_forwards(model)
    draft = make_draft()
    call = f"{RIGHT_CALL}\\('{folders[form]}"
    sentence = f"expected a target, got a .* in the format '{form}'.*{call}"
    with pytest.raises(ValueError, match=sentence):
        model.generate(PROMPT)
    with pytest.raises(ValueError, match=sentence):
        model.generate(input_ids=PROMPT, max_new_tokens=4)
    with pytest.raises(ValueError, match=sentence):
        model.generate(PROMPT, assistant_model=draft)
    with pytest.raises(ValueError, match=sentence):
        next(iterate(model, draft, input_ids=PROMPT))
    with pytest.raises(ValueError, match=sentence):
        DFlashDraftModel.from_target(model, mask_token_id=3)


@pytest.mark.parametrize("form", FORMATS)
def test_commands_refuse_a_draft_as_target(form: str, folders: dict[str, Path]) -> None:
    folder = str(folders[form])
    for load in (load_target, load_processor):
        with pytest.raises(ValueError, match=f"got the DFlash draft '{folder}'; swap --target and"):
            load(folder)


def test_a_model_of_the_same_class_is_left_alone() -> None:
    ids = make_target().generate(PROMPT, max_new_tokens=3, do_sample=False)
    assert ids.shape == (1, 6)
