"""Chats with pictures through real processors: masks, places of pictures, lazy rows, bad rows, the whole way."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from dflash_hf.target_model.parts import find_target
from dflash_hf.training import (
    ChatDataset,
    DFlashTrainer,
    DFlashTrainingArguments,
    Example,
    prepare_multimodal_messages,
    regenerate_answers,
    walked_acceptance,
)
from dflash_hf.training.collators import collate
from dflash_hf.training.forward import forward_inputs
from helpers.processors import TEMPLATE, gemma_processor, picture, published_folder, with_tokens
from helpers.vision import vision_target
from helpers.whole_blocks import use_whole_blocks
from tiny import tiny_draft

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    """A block of text."""
    return {"type": "text", "text": words}


def qwen(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(published_folder(folder))


def gemma(folder: Path) -> Any:
    return gemma_processor()


def idefics(folder: Path) -> Any:
    tokenizer = with_tokens({"image_token": "<image>"})
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


@pytest.fixture(params=[qwen, gemma, idefics])
def processor(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path / "processor")


# Pictures in the first and in a later turn; the first answer occurs again in what the user says.
CHAT = [
    {"role": "user", "content": [text("a"), IMAGE, text("see b"), IMAGE]},
    {"role": "assistant", "content": [text("it is b")]},
    {"role": "user", "content": [IMAGE, text("it is b"), text("?")]},
    {"role": "assistant", "content": "no, c"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "it is b"},
]
PICTURES = [(24, 16), (16, 40), (32, 32)]


def pictures() -> list[Image.Image]:
    return [picture(*size, seed=at) for at, size in enumerate(PICTURES)]


def answers_of(processor: Any, example: Example) -> list[str]:
    """The texts that the loss is on."""
    runs: list[list[int]] = []
    for at, token in enumerate(example.input_ids):
        if example.loss_mask[at] and not example.loss_mask[at - 1]:
            runs.append([])
        if example.loss_mask[at]:
            runs[-1].append(token)
    return [processor.tokenizer.decode(run) for run in runs]


ANSWERS = ["it is b<|im_end|>", "no, c<|im_end|>", "it is b<|im_end|>"]


def test_the_loss_is_on_answers_wherever_images_stand(processor: Any) -> None:
    example = Example.from_messages(processor, CHAT, pictures())
    assert answers_of(processor, example) == ANSWERS
    short = processor.tokenizer.apply_chat_template(
        prepare_multimodal_messages(CHAT, pictures()),
        chat_template=processor.chat_template,
        return_dict=True,
    )
    assert len(example.input_ids) > len(short["input_ids"]) + 3, (
        "no picture was expanded: the case shows nothing"
    )


def test_answers_that_the_processor_changes_are_refused(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [
        {"role": "user", "content": [IMAGE, text("q")]},
        {"role": "assistant", "content": "yes"},
    ] * 2
    twice = Example.from_messages(processor, same, pictures()[:2])
    assert answers_of(processor, twice) == ["yes<|im_end|>"] * 2
    template = type(processor).apply_chat_template

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoded = template(self, *args, **kwargs)
        encoded["input_ids"] = encoded["input_ids"] + 1
        return encoded

    monkeypatch.setattr(type(processor), "apply_chat_template", other)
    with pytest.raises(ValueError, match="to keep the answers' tokens where it expands images"):
        Example.from_messages(processor, CHAT, pictures())


def test_every_image_belongs_to_its_turn(processor: Any) -> None:
    """In order, whatever it is given as; the inputs are those of the processor's own call."""
    images = pictures()
    whole = Example.from_messages(processor, CHAT, images)
    own = [
        {"role": message["role"], "content": [dict(b) for b in message["content"]]}
        if isinstance(message["content"], list)
        else {"role": message["role"], "content": [text(message["content"])]}
        for message in CHAT
    ]
    left = iter(images)
    for message in own:
        for block in message["content"]:
            if block["type"] == "image":
                block["image"] = next(left)
    encoded = processor.apply_chat_template(
        own, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert encoded["input_ids"][0].tolist() == whole.input_ids
    assert set(whole.model_inputs) == set(encoded) - {"input_ids", "attention_mask"}
    for key, value in whole.model_inputs.items():
        assert torch.equal(value, encoded[key].view_as(value))
    again = Example.from_messages(processor, own)
    assert again.input_ids == whole.input_ids
    assert torch.equal(again.model_inputs["pixel_values"], whole.model_inputs["pixel_values"])
    turned = Example.from_messages(processor, CHAT, images[::-1])
    assert not torch.equal(
        turned.model_inputs["pixel_values"].flatten()[:50],
        whole.model_inputs["pixel_values"].flatten()[:50],
    )


def test_where_images_go_and_which_ones_are_taken(tmp_path: Path) -> None:
    images = pictures()
    images[0].save(tmp_path / "a.png")
    raw = io.BytesIO()
    images[1].save(raw, format="PNG")
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    given = [
        tmp_path / "a.png",
        {"bytes": raw.getvalue(), "path": None},
        {"bytes": None, "path": "b.png"},
    ]
    prepared = prepare_multimodal_messages(plain, given)
    coded = base64.b64encode(raw.getvalue()).decode()
    assert prepared == [
        {"role": "system", "content": [text("s")]},
        {
            "role": "user",
            "content": [
                *(
                    {"type": "image", "image": at}
                    for at in (str(tmp_path / "a.png"), coded, "b.png")
                ),
                text("q"),
            ],
        },
    ]
    table = [
        {
            "role": "user",
            "content": [
                {"type": "image", "text": None},
                {"type": "text", "text": "q", "image": None},
            ],
        }
    ]
    assert prepare_multimodal_messages(table, [1]) == [
        {"role": "user", "content": [{"type": "image", "image": 1}, text("q")]}
    ]
    assert table[0]["content"][0] == {"type": "image", "text": None}, (
        "the caller's messages are changed"
    )
    for messages, images_given in (
        (table, []),
        (table, [1, 2]),
        ([{"role": "system", "content": "s"}], [1]),
    ):
        with pytest.raises(
            ValueError, match=f"expected as many images as image blocks .* got {len(images_given)}"
        ):
            prepare_multimodal_messages(messages, images_given)


def test_rows_without_an_image_are_plain_text(processor: Any) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "image": None,
    }
    example = ChatDataset([row], processor)[0]
    assert "pixel_values" not in example.model_inputs
    tokenizer = processor.tokenizer
    tokenizer.chat_template = processor.chat_template
    only = Example.from_messages(tokenizer, row["messages"])
    assert (example.input_ids, example.loss_mask) == (only.input_ids, only.loss_mask)
    with pytest.raises(
        ValueError, match=r"expected a processor for messages with images, got [A-Z]"
    ):
        Example.from_messages(tokenizer, row["messages"], [picture(16, 16)])


class Rows(Sequence[Mapping[str, Any]]):
    """Rows whose pictures are paths, and which remember who asked for them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count, self.asked = folder, count, list[int]()
        for at in range(count):
            picture(16 + 8 * (at % 3), 16, seed=at).save(folder / f"{at}.png")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if index >= self.count:
            raise IndexError(index)
        self.asked.append(index)
        messages = [
            {"role": "user", "content": "what" * (index % 4)},
            {"role": "assistant", "content": f"it is {index}"},
        ]
        images = [str(self.folder / f"{index}.png")] * (index % 3)
        return {"messages": messages, "images": images or None}


def test_no_row_is_built_before_it_is_needed(tmp_path: Path) -> None:
    processor = qwen(tmp_path / "processor")
    rows = Rows(tmp_path, 12)
    dataset = ChatDataset(rows, processor)
    assert (len(dataset), rows.asked) == (12, [])
    lengths = list(dataset.lengths)
    assert (lengths, rows.asked) == ([len(e.input_ids) for e in dataset], [*range(12)] * 2)
    assert dataset.lengths == lengths
    assert rows.asked == [*range(12)] * 2, "lengths are counted once"
    rows.asked.clear()
    known = ChatDataset(rows, processor, lengths=lengths)
    target = vision_target("qwen3-vl", vocab_size=len(processor.tokenizer)).float()
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    give_ids(target, processor)
    trainer = DFlashTrainer(model=tiny_draft(target), target=target, args=args, train_dataset=known)
    assert rows.asked == [0], "the first row says that there are answers"
    trainer.train()
    assert len(rows.asked) == 1 + 4
    wrong = ChatDataset(rows, processor, lengths=[1, 2, 3])
    with pytest.raises(
        ValueError, match=r"expected lengths of 12 entries \(one per example\), got 3"
    ):
        DFlashTrainer(model=tiny_draft(target), target=target, args=args, train_dataset=wrong)


def give_ids(target: Any, processor: Any) -> None:
    """Makes a random target read a processor's picture tokens."""
    ids = processor.tokenizer.convert_tokens_to_ids
    target.config.image_token_id, target.config.video_token_id = (
        processor.image_token_id,
        ids("<|video_pad|>"),
    )
    target.config.vision_start_token_id = ids("<|vision_start|>")


READ = "expected a chat that can be read, got one with this:"
TURNS = r"expected messages as a list of turns like \{.*\}"


def test_bad_rows_are_named(tmp_path: Path) -> None:
    processor = qwen(tmp_path / "processor")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no picture")
    raw = io.BytesIO()
    picture(64, 64).save(raw, format="PNG")
    (tmp_path / "cut.png").write_bytes(raw.getvalue()[: raw.tell() // 2])
    chat = [{"role": "user", "content": [IMAGE, text("q")]}, {"role": "assistant", "content": "a"}]
    good = {"messages": chat, "image": picture(16, 16)}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"messages": chat, "image": None}, "expected as many images as image blocks"),
        (
            {"messages": chat, "images": [picture(16, 16)] * 2},
            "expected as many images as image blocks",
        ),
        (
            {"messages": chat, "image": str(tmp_path / "broken.png")},
            f"{READ} cannot identify image file",
        ),
        ({"messages": chat, "image": str(tmp_path / "cut.png")}, f"{READ} image file is truncated"),
        ({"messages": chat, "image": str(tmp_path / "none.png")}, f"{READ} Incorrect image source"),
        (
            {"messages": chat, "image": Image.new("RGB", (0, 8))},
            "expected an image of at least one pixel, got one",
        ),
        ({"messages": []}, f"{TURNS}, got none; leave the row out"),
        ({"messages": "hello"}, f"{TURNS}, got str 'hello'; put it into a turn"),
        (
            {"messages": {"role": "user", "content": "q"}},
            f"{TURNS}, got dict {{'content'.*; put it into a turn",
        ),
        ({"messages": None}, f"{TURNS}, got NoneType None; put it into a turn"),
        ({"messages": ["hello"]}, f"{TURNS}, got str 'hello' as turn 0; give its role and content"),
        ({"messages": [chat[0], {"content": "a"}]}, f"{TURNS}, got turn 1 without a role; add it"),
        ({"text": "q"}, "expected a row with messages, got one with text; name its chat messages"),
    ]
    dataset = ChatDataset([good, *(row for row, _ in bad)], processor)
    assert sum(dataset[0].loss_mask) == 2
    for at, (_, reason) in enumerate(bad, start=1):
        with pytest.raises(
            ValueError, match=rf"^{reason}.*; .* \(row {at}\)$|^{reason} \(row {at}\)$"
        ) as refused:
            dataset[at]
        assert "Error" not in str(refused.value)
        with pytest.raises(ValueError, match=rf"\(row {at}\)$"):
            ChatDataset(
                [good, *(row for row, _ in bad)], processor, answers=[[1]] * (len(bad) + 1)
            )[at]
    with pytest.raises(ValueError, match=rf"\(row {len(bad)}\)$"):
        dataset[-1]
    with pytest.raises(IndexError):
        dataset[len(bad) + 1]
    with pytest.raises(ValueError, match=r"expected 1 answers \(one per row\), got 2"):
        ChatDataset([good], processor, answers=[[1], [2]])
    padded = processor(text=["one", "three"], padding=True, return_tensors="pt")
    with pytest.raises(
        ValueError, match=r"expected one prompt without padding, got input_ids of shape \(2, 5\)"
    ):
        Example.from_pair(padded, [1])


@torch.no_grad()
def test_from_rows_to_the_walk_of_the_targets_own_answers(tmp_path: Path) -> None:
    processor = qwen(tmp_path / "processor")
    target = vision_target("qwen3-vl", vocab_size=len(processor.tokenizer))
    give_ids(target, processor)
    rows = Rows(tmp_path, 7)
    prompts = ChatDataset(rows, processor, answers=[[]] * 7)
    draft = tiny_draft(target, 6)
    find_target(target).head.weight[6:] *= 0.05
    draft.norm.weight *= 4
    options = {
        "max_new_tokens": 16,
        "eos_token_id": 3,
        "pad_token_id": processor.tokenizer.pad_token_id,
    }
    answers = regenerate_answers(target, prompts, **options, batch_size=3)
    examples = ChatDataset(rows, processor, answers=answers)
    walked = walked_acceptance(draft, find_target(target), examples, batch_size=3)
    use_whole_blocks(draft)
    for at, answer in enumerate(answers):
        messages = prepare_multimodal_messages(rows[at]["messages"][:1], rows[at]["images"] or [])
        inputs = processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        out = target.generate(**inputs, do_sample=False, assistant_model=draft, **options)
        assert out[0, inputs["input_ids"].shape[1] :].tolist() == answer
        assert draft.last_stats.num_committed == [walked.committed[at]]
        assert examples[at].input_ids == out[0].tolist()
    together = collate(prompts[:], padding_side="left")
    target.generate(
        **forward_inputs(target, together), do_sample=False, assistant_model=draft, **options
    )
    assert draft.last_stats.num_committed == walked.committed
    assert regenerate_answers(target, prompts, **options, guesses=answers) == answers
    with pytest.raises(ValueError, match="expected a prompt without an answer, got one with"):
        regenerate_answers(target, [examples[0]], **options)
    with pytest.raises(ValueError, match="expected 7 guesses"):
        regenerate_answers(target, prompts, **options, guesses=answers[:2])


def test_an_image_may_begin_or_end_a_turn(processor: Any) -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": [IMAGE, text("q")]},
        {"role": "assistant", "content": "it is b"},
        {"role": "user", "content": [IMAGE, text("\n\nit is b"), IMAGE]},
        {"role": "assistant", "content": "it is b"},
    ]
    example = Example.from_messages(processor, chat, pictures())
    assert answers_of(processor, example) == ["it is b<|im_end|>"] * 2
    # The newline between two images is found nowhere else.
    chat[2]["content"] = [IMAGE, text("\n"), IMAGE, text("q")]
    example = Example.from_messages(processor, chat, pictures())
    assert answers_of(processor, example) == ["it is b<|im_end|>"] * 2
