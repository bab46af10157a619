"""What the toy drafts are trained on: the pictures and prompts that a user's call of the processor makes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from answers import cached_answers, counts_of
from scene_tasks import VISION_KINDS, VisionKind, make_vision_sample
from transformers import AutoProcessor
from vision_draft_data import Rows
from vision_processor import (
    build_vision_tokenizer,
    encode_sample,
    image_processor,
    processor_inputs,
)

from dflash_hf.processing_qwen3_vl import Qwen3VLProcessor
from dflash_hf.training import ChatDataset


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the vision pair's processor, saved and loaded."""
    folder = tmp_path_factory.mktemp("processor")
    Qwen3VLProcessor(image_processor(), build_vision_tokenizer(per_kind=600)).save_pretrained(
        folder
    )
    return AutoProcessor.from_pretrained(folder)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_training_and_use_see_the_same_prompt(processor: Any, kind: VisionKind) -> None:
    """The target's training text begins with what the processor makes of the prompt, pixels included."""
    for index in range(3):
        sample = make_vision_sample(kind, "heldout", index)
        inputs = processor_inputs(processor, [sample])
        encoded = encode_sample(processor.tokenizer, sample)
        columns = inputs["input_ids"].shape[1]
        assert inputs["input_ids"][0].tolist() == encoded.input_ids[:columns]
        if sample.pictures():
            assert torch.equal(inputs["pixel_values"], encoded.pixel_values)
            assert torch.equal(inputs["image_grid_thw"], encoded.image_grid_thw)
        answer = [
            *processor.tokenizer(sample.answer)["input_ids"],
            processor.tokenizer.eos_token_id,
        ]
        assert encoded.input_ids[columns:-1] == answer  # and the line break of the template


def test_examples_are_drawn_on_demand(processor: Any) -> None:
    """An example is the prompt with its answer, whenever it is asked for."""
    rows = Rows([("describe", "heldout", 3), ("talk", "heldout", 3), ("describe", "heldout", 4)])
    dataset = ChatDataset(rows, processor, answers=[[7, 8], [9], []])
    first = dataset[0]
    assert first.input_ids[-2:] == [7, 8]
    assert torch.equal(first.model_inputs["pixel_values"], dataset[0].model_inputs["pixel_values"])
    assert "pixel_values" not in dataset[1].model_inputs
    assert dataset.lengths == [len(dataset[at].input_ids) for at in range(3)]


def test_answers_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same target and prompts give the stored answers; another target asks again."""
    monkeypatch.setattr("answers.CACHE_DIR", tmp_path / "cache")
    calls: list[int] = []

    def write() -> list[list[int]]:
        calls.append(1)
        return [[1, 2], [3]]

    for number, weights in enumerate((b"a", b"a", b"b")):
        (tmp_path / "model.safetensors").write_bytes(weights)
        rows = cached_answers(tmp_path, "some", [[1, 2], [4]], write)
        assert [(row["answer"], row["as_reference"]) for row in rows] == [
            ([1, 2], True),
            ([3], False),
        ]
        assert len(calls) == (1, 1, 2)[number]


def test_prompt_counts() -> None:
    """A number for all kinds, and other ones by name; a kind that is not there is refused."""
    assert counts_of("5", ["a", "b"]) == {"a": 5, "b": 5}
    assert counts_of("5,b=7", ["a", "b"]) == {"a": 5, "b": 7}
    with pytest.raises(ValueError, match="expected kinds among a, b, got c"):
        counts_of("5,c=7", ["a", "b"])
