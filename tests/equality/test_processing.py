"""Qwen's processors without torchvision: the same tensors and files as Transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, ProcessorMixin
from transformers.models.auto import processing_auto
from transformers.models.qwen2_5_vl import processing_qwen2_5_vl
from transformers.models.qwen3_vl import processing_qwen3_vl
from transformers.utils import import_utils
from transformers.utils.import_utils import is_torchvision_available

from dflash_hf import patching
from dflash_hf.processing_qwen3_vl import Qwen2_5_VLProcessor, Qwen3VLProcessor

pytest.importorskip("PIL")
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from helpers.processors import FAMILIES, PICTURES, picture, published_folder

without_torchvision = pytest.mark.skipif(
    is_torchvision_available(), reason="torchvision is installed"
)


class Unchecked:
    """Of Transformers' own processors only the look at the video processor's class, which fails here, is left out."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


class Upstream3(Unchecked, processing_qwen3_vl.Qwen3VLProcessor):
    pass


class Upstream2(Unchecked, processing_qwen2_5_vl.Qwen2_5_VLProcessor):
    pass


OURS: dict[str, Any] = {"qwen3_vl": Qwen3VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}


@pytest.fixture(scope="module", params=OURS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_folder(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def processor(family: str, folder: Path) -> Any:
    return OURS[family].from_pretrained(folder)


def upstream(processor: Any) -> Any:
    """With Qwen3-VL's video processor for both: the other one cannot be imported, and no video comes here."""
    kind = Upstream3 if isinstance(processor, Qwen3VLProcessor) else Upstream2
    video = Qwen3VLVideoProcessor(
        **{name: PICTURES[name] for name in ("patch_size", "merge_size", "size")}
    )
    return kind(
        processor.image_processor, processor.tokenizer, video, chat_template=processor.chat_template
    )


def assert_same(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if name in ("pixel_values", "image_grid_thw"):  # arrays, unless tensors are asked for
            value, right = torch.as_tensor(value), {**right, name: torch.as_tensor(right[name])}
        assert (
            torch.equal(value, right[name])
            if isinstance(value, torch.Tensor)
            else value == right[name]
        )


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts
        ],
    }


def shown(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


TENSORS: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
ONE, WIDE = picture(16, 24), picture(40, 16, 1)
CHATS: dict[str, Any] = {
    "one picture": [user(shown(ONE), "what?")],
    "no picture": [user("hello")],
    "a string": [{"role": "user", "content": "hello"}],
    "pictures of two sizes": [user(shown(ONE), "and", shown(WIDE), "differ?")],
    "several turns": [user(shown(WIDE), "what?"), answer("a dog."), user("and", shown(ONE), "?")],
    "batch": [
        [user(shown(ONE), "what?")],
        [user("hello")],
        [user(shown(WIDE), shown(ONE), "which?")],
    ],
    "batch without pictures": [[user("hello")], [user("what is it?")]],
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
def test_chats_become_the_same_tensors(processor: Any, chat: Any) -> None:
    settings: dict[str, Any] = {
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
    }
    settings["processor_kwargs"] = {"padding": True}
    made = processor.apply_chat_template(chat, **settings)
    assert_same(made, upstream(processor).apply_chat_template(chat, **settings))
    tokens = (made["input_ids"] == processor.image_token_id).sum()
    patches = (
        made["image_grid_thw"].prod(dim=1).sum() if "image_grid_thw" in made else torch.tensor(0)
    )
    assert tokens == patches // 4
    assert torch.equal(
        made["mm_token_type_ids"] == 1, made["input_ids"] == processor.image_token_id
    )
    assert made["attention_mask"][:, -1].all()


def test_paths_urls_and_images_are_the_same(processor: Any, tmp_path: Path) -> None:
    ONE.save(tmp_path / "one.png")
    made = [
        processor.apply_chat_template([user({"type": "image", **where}, "what?")], **TENSORS)
        for where in (
            {"image": ONE},
            {"image": str(tmp_path / "one.png")},
            {"path": str(tmp_path / "one.png")},
        )
    ]
    assert_same(made[0], made[1])
    assert_same(made[0], made[2])


def test_answers_are_marked(processor: Any) -> None:
    settings: dict[str, Any] = {
        "tokenize": True,
        "return_dict": True,
        "return_assistant_tokens_mask": True,
    }
    chat = CHATS["several turns"]
    made = processor.apply_chat_template(chat, **settings)
    assert_same(made, upstream(processor).apply_chat_template(chat, **settings))
    if not hasattr(ProcessorMixin, "_adjust_assistant_masks_indices"):
        # Older Transformers count characters before pictures are written out: the wrong tokens, there too
        return
    row = zip(made["input_ids"][0], made["assistant_masks"][0], strict=True)
    assert processor.decode([token for token, marked in row if marked]) == "a dog.<|im_end|>"


def test_texts_without_a_template_are_the_same(processor: Any) -> None:
    inputs: dict[str, Any] = {
        "text": ["<|image_pad|> what?"],
        "images": [[ONE]],
        "return_tensors": "pt",
    }
    assert_same(processor(**inputs), upstream(processor)(**inputs))


@without_torchvision
def test_autoprocessor_finds_it(family: str, folder: Path, tmp_path: Path) -> None:
    assert type(AutoProcessor.from_pretrained(folder)) is OURS[family]
    # Without a word on the class in any file, the model's type decides.
    bare = published_folder(tmp_path / "bare", family)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        config = json.loads((bare / name).read_text())
        del config["processor_class"]
        (bare / name).write_text(json.dumps(config))
    assert type(AutoProcessor.from_pretrained(bare)) is OURS[family]


def test_saved_files_are_those_of_the_original(
    family: str, folder: Path, processor: Any, tmp_path: Path
) -> None:
    processor.save_pretrained(tmp_path / "ours")
    ours = json.loads((tmp_path / "ours" / "processor_config.json").read_text())
    upstream(processor).save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "processor_config.json").read_text())
    assert ours.keys() == theirs.keys()
    assert ours["processor_class"] == FAMILIES[family][0]
    assert ours["image_processor"] == theirs["image_processor"]
    # The settings of videos go through untouched.
    assert ours["video_processor"] == json.loads(
        (folder / "video_preprocessor_config.json").read_text()
    )
    # Both folders are read, and make the same tensors.
    for name in ("ours", "theirs"):
        again = OURS[family].from_pretrained(tmp_path / name)
        assert again.video_settings == {"ours": ours, "theirs": theirs}[name]["video_processor"]
        chat = CHATS["several turns"]
        assert_same(
            again.apply_chat_template(chat, **TENSORS),
            processor.apply_chat_template(chat, **TENSORS),
        )


def test_a_processor_from_parts_states_its_video_processor(
    family: str, processor: Any, tmp_path: Path
) -> None:
    made = OURS[family](
        processor.image_processor, processor.tokenizer, chat_template=processor.chat_template
    )
    made.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())["video_processor"]
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    assert saved == {
        "video_processor_type": FAMILIES[family][1],
        **{name: PICTURES[name] for name in names},
    }


def test_videos_are_refused(processor: Any) -> None:
    for video in ("clip.mp4", [ONE, WIDE]):
        chat = [user({"type": "video", "video": video}, "what?")]
        with pytest.raises(ValueError, match="got a video; install torchvision"):
            processor.apply_chat_template(chat, tokenize=True, return_dict=True)
    with pytest.raises(ValueError, match="got a video"):
        processor(text="<|video_pad|>", videos=[[ONE]])


@pytest.mark.parametrize(
    ("empty", "sides"),
    [
        (Image.new("RGB", (0, 5)), "0 × 5"),
        (Image.new("RGB", (5, 0)), "5 × 0"),
        (np.zeros((0, 4, 3), np.uint8), "0 × 4 × 3"),
        (torch.zeros(3, 4, 0), "3 × 4 × 0"),
    ],
)
def test_images_without_pixels_are_refused(processor: Any, empty: Any, sides: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"^expected an image of at least one pixel, got one of {sides}; leave it out$",
    ):
        processor.apply_chat_template([user(shown(ONE), shown(empty), "what?")], **TENSORS)


def test_nothing_changes_where_torchvision_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    auto: Any = processing_auto
    monkeypatch.setattr(import_utils, "is_torchvision_available", lambda: True)
    for model_type, name, theirs in (
        ("qwen3_vl", "Qwen3VLProcessor", processing_qwen3_vl.Qwen3VLProcessor),
        ("qwen2_5_vl", "Qwen2_5_VLProcessor", processing_qwen2_5_vl.Qwen2_5_VLProcessor),
    ):
        monkeypatch.setitem(auto.PROCESSOR_MAPPING_NAMES, model_type, name)
        patching.register()
        assert auto.PROCESSOR_MAPPING_NAMES[model_type] == name
        assert auto.processor_class_from_name(name) is theirs
