"""Rows with videos: read, prepared, answered and trained on, by a processor of frames and by the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
from transformers import AutoProcessor
from transformers.utils import is_torchvision_available

from dflash_hf.data.openai_client import sent_messages
from dflash_hf.data.rows import Row
from dflash_hf.target_model.parts import find_target
from dflash_hf.training import (
    ChatDataset,
    DFlashTrainer,
    DFlashTrainingArguments,
    Example,
    regenerate_answers,
    walked_acceptance,
)
from dflash_hf.training.collators import collate
from dflash_hf.training.conversations import conversation_of, resolved
from dflash_hf.training.prepare import PrepareSettings, prepare
from dflash_hf.training.served_answers import has_images
from helpers.frames import clip, frames_processor
from helpers.processors import picture, published_folder, qwen_target
from tiny import tiny_draft

NEW = 12


def asked(*blocks: dict[str, Any], answer: str = "bars") -> list[dict[str, Any]]:
    """Returns a question that ends with a text, and its answer."""
    question = [*blocks, {"type": "text", "text": "what?"}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def row(values: dict[str, Any], folder: Path) -> Row:
    return Row(values=values, number=0, where="row 0", folder=folder)


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    return frames_processor(tmp_path / "processor")


@pytest.mark.parametrize(
    "values",
    [
        {"messages": asked({"type": "video", "path": "a.npy"})},
        {"messages": asked({"type": "video", "video": "a.npy", "text": None})},
        {"messages": asked({"type": "video", "video": {"path": "a.npy", "bytes": None}})},
        {"messages": asked({"type": "video"}), "videos": ["a.npy"]},
        {"messages": asked(), "video": "a.npy"},
        {"prompt": "what?", "completion": "bars", "videos": [{"path": "a.npy"}]},
    ],
    ids=["path", "video", "mapping", "a column and a place", "a column", "a column and a text"],
)
def test_a_video_stands_in_its_turn(values: dict[str, Any], tmp_path: Path) -> None:
    file = clip(tmp_path / "a.npy", 4)
    found = conversation_of(row(values, tmp_path))
    assert found["messages"][0]["content"] == [
        {"type": "video", "video": str(file)},
        {"type": "text", "text": "what?"},
    ]
    assert has_images(found)


def test_addresses_of_videos_stay(tmp_path: Path) -> None:
    address = "https://example.org/a.mp4"
    for block in (
        {"type": "video_url", "video_url": {"url": address}},
        {"type": "video_url", "video_url": address},
        {"type": "video", "url": address},
    ):
        found = conversation_of(row({"messages": asked(block)}, tmp_path))
        assert found["messages"][0]["content"][0] == {"type": "video", "video": address}
        assert resolved(found, tmp_path) == found


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"messages": asked({"type": "video"})},
            r"expected as many videos as their blocks .* got 0",
        ),
        ({"messages": asked({"type": "video", "path": "b.npy"})}, "expected a video file in row 0"),
        (
            {"messages": asked(), "video": {"bytes": b"abc"}},
            "expected the path of a video in row 0",
        ),
        ({"messages": asked(), "videos": [3]}, "expected the path of a video in row 0, got 3"),
        (
            {"messages": asked({"type": "video"}), "videos": ["a.npy", "a.npy"]},
            r"expected as many videos as .* \(1\) in row 0, got 2; give every video its place",
        ),
        ({"messages": asked({"type": "audio"})}, "expected blocks of type text, image or video"),
    ],
)
def test_bad_videos_are_named(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    clip(tmp_path / "a.npy", 4)
    with pytest.raises(ValueError, match=sentence):
        conversation_of(row(values, tmp_path))


def test_the_loss_is_on_answers_behind_videos(tmp_path: Path, processor: Any) -> None:
    first = {"type": "video", "video": clip(tmp_path / "a.npy", 4)}
    second = {"type": "video", "video": str(clip(tmp_path / "b.npy", 2, 24, 16))}
    image = {"type": "image", "image": picture(24, 16)}
    messages = [*asked(first), *asked(image, second, answer="dots")]
    marked = processor.chat_template
    unmarked = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for template in (marked, unmarked):
        processor.chat_template = template
        example = Example.from_messages(processor, messages)
        said = [id for id, mark in zip(example.input_ids, example.loss_mask, strict=True) if mark]
        assert processor.tokenizer.decode(said) == "bars<|im_end|>dots<|im_end|>"
        assert example.model_inputs["video_grid_thw"].tolist() == [[2, 4, 4], [1, 4, 6]]
        assert example.has_images
        length = ChatDataset([{"messages": messages}], processor).lengths[0]
        assert length == len(example.input_ids)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Writes videos and returns rows with them, with images and with neither."""
    videos = [
        {"type": "video", "video": str(clip(folder / f"{at}.npy", 2 + 2 * at))} for at in (0, 1)
    ]
    image = {"type": "image", "image": picture(24, 16)}
    return [
        {"messages": asked(videos[1], answer="a bar")},
        {"messages": asked(answer="no")},
        {"messages": asked(videos[0], image, answer="both")},
        {"messages": asked(image, answer="a picture")},
    ]


@torch.no_grad()
def test_rows_with_videos_are_answered_and_walked(tmp_path: Path, processor: Any) -> None:
    rows = rows_of(tmp_path)
    target = qwen_target(processor)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": 3}
    options["pad_token_id"] = processor.tokenizer.pad_token_id
    prompts = ChatDataset(rows, processor, answers=[[]] * len(rows))
    answers = regenerate_answers(target, prompts, **options, batch_size=3)
    draft = tiny_draft(target, 6)
    examples = ChatDataset(rows, processor, answers=answers)
    walked = walked_acceptance(draft, find_target(target), examples, batch_size=3)
    for at, answer in enumerate(answers):
        inputs = processor.apply_chat_template(
            rows[at]["messages"][:1],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        out = target.generate(**inputs, do_sample=False, assistant_model=draft, **options)
        assert out[0, inputs["input_ids"].shape[1] :].tolist() == answer
        alone = walked_acceptance(draft, find_target(target), [examples[at]], batch_size=1)
        assert alone.committed == [walked.committed[at]]


def test_a_draft_trains_on_videos(tmp_path: Path, processor: Any) -> None:
    examples = ChatDataset(rows_of(tmp_path), processor)
    together = collate(examples[:])
    assert together.model_inputs["video_grid_thw"].tolist() == [[2, 4, 4], [1, 4, 4]]
    target = qwen_target(processor)
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    draft = tiny_draft(target)
    before = draft.fc.weight.clone()
    trainer = DFlashTrainer(model=draft, target=target, args=args, train_dataset=examples)
    result = trainer.train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    assert not torch.equal(before, draft.fc.weight)


def test_a_server_is_sent_videos_as_addresses(tmp_path: Path) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(b"abc")
    address = "https://example.org/a.mp4"
    blocks = [{"type": "video", "video": str(file)}, {"type": "video", "video": address}]
    sent = sent_messages([{"role": "user", "content": blocks}])[0]["content"]
    assert sent == [
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,YWJj"}},
        {"type": "video_url", "video_url": {"url": address}},
    ]


def test_prepare_says_what_a_video_needs(tmp_path: Path) -> None:
    if is_torchvision_available():
        pytest.skip("torchvision is there")
    processor = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    settings = video_settings(tmp_path, clip(tmp_path / "a.npy", 4))
    with pytest.raises(ValueError, match=r"install torchvision for videos.*line 1"):
        prepare(settings, processor)


def test_real_videos_are_prepared_and_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="Transformers' video processors need torchvision")
    pytest.importorskip("torchcodec", reason="torchcodec reads files of videos")
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))
    frames = [picture(64, 48, seed) for seed in range(16)]
    file = tmp_path / "a.gif"
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=250)
    settings = video_settings(tmp_path, file)
    prepare(settings, processor)
    (line,) = settings.output.read_text().splitlines()
    examples = ChatDataset([resolved(json.loads(line), tmp_path)], processor)
    example = examples[0]
    said = [id for id, mark in zip(example.input_ids, example.loss_mask, strict=True) if mark]
    assert processor.tokenizer.decode(said) == "bars<|im_end|>"
    assert json.loads(line)["sequences"][0]["num_tokens"] == len(example.input_ids)
    target = qwen_target(processor)
    walked = walked_acceptance(tiny_draft(target), find_target(target), examples, batch_size=1)
    assert sum(walked.committed[0]) > 0


def video_settings(folder: Path, file: Path) -> PrepareSettings:
    """Writes a row with a video, and returns how to prepare it."""
    data = folder / "rows.jsonl"
    data.write_text(json.dumps({"messages": asked({"type": "video", "path": file.name})}) + "\n")
    return PrepareSettings(datasets=(str(data),), output=folder / "prepared.jsonl")
