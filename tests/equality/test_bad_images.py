"""Odd pictures and wrong calls: what the processor makes of a file, the same text with a draft, or a sentence."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ProcessorMixin

from dflash_hf.processing_qwen3_vl import Qwen3VLProcessor
from helpers.vision import IMAGE, shallow_vision_target, vision_prompts
from tiny import oracle_draft, tiny_draft

pytest.importorskip("PIL")
from PIL import Image

from helpers.processors import picture, published_folder, qwen_target

NEW = 16
SIGN = "<|vision_start|><|image_pad|><|vision_end|>"


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    picture(24, 16).save(path, exif=exif)


def animated(path: Path, **settings: Any) -> None:
    frames = [picture(16, 24, seed) for seed in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:], **settings)


def palette(path: Path) -> None:
    picture(24, 16).quantize(16).save(path, transparency=3)


# File name -> what writes it, and its size in patches (rows, columns) behind the processor.
FILES: dict[str, tuple[Callable[[Path], Any], tuple[int, int]]] = {
    "plain.png": (lambda path: picture(16, 24).save(path), (6, 4)),
    "animated.gif": (animated, (6, 4)),
    "animated.png": (lambda path: animated(path, default_image=True), (6, 4)),
    "animated.webp": (lambda path: animated(path, lossless=True), (6, 4)),
    "dot.png": (lambda path: picture(1, 1).save(path), (2, 2)),
    "line.png": (lambda path: picture(150, 1).save(path), (2, 26)),
    "cmyk.jpg": (lambda path: picture(24, 16).convert("CMYK").save(path), (4, 6)),
    "16-bit.png": (lambda path: picture(24, 16).convert("L").convert("I;16").save(path), (4, 6)),
    "1-bit.png": (lambda path: picture(24, 16).convert("1").save(path), (4, 6)),
    "alpha.png": (lambda path: picture(24, 16).convert("RGBA").save(path), (4, 6)),
    "grey-alpha.png": (lambda path: picture(24, 16).convert("LA").save(path), (4, 6)),
    "palette.png": (palette, (4, 6)),
    "rotated.jpg": (rotated, (6, 4)),
    "large.png": (lambda path: Image.new("RGB", (3000, 2000), "red").save(path), (12, 18)),
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Qwen3VLProcessor.from_pretrained(published_folder(tmp_path_factory.mktemp("qwen3-vl")))


def ask(processor: Any, image: Any) -> Any:
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}],
        }
    ]
    settings = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(messages, add_generation_prompt=True, **settings)


def test_odd_files_give_the_plain_text(processor: Any, tmp_path: Path) -> None:
    target = qwen_target(processor)
    texts: list[str] = []
    paths: list[str] = []
    for name, (write, grid) in FILES.items():
        write(tmp_path / name)
        inputs = ask(processor, str(tmp_path / name))
        assert inputs["image_grid_thw"].tolist() == [[1, *grid]], name
        assert (inputs["input_ids"] == processor.image_token_id).sum() == grid[0] * grid[1] // 4
        texts.append(f"{SIGN} what is {name}?")
        paths.append(str(tmp_path / name))
    inputs = processor(
        text=texts, images=[[path] for path in paths], padding=True, return_tensors="pt"
    )
    inputs["pixel_values"] = inputs["pixel_values"].double()
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    rows = zip(ref, inputs["attention_mask"], strict=True)
    draft = oracle_draft(target, [row[int(mask.argmax()) :].tolist() for row, mask in rows], 0, 5)
    out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, ref)
    assert draft.last_stats.acceptance_length > 1.1


def test_images_are_turned_and_animations_stand_still(processor: Any, tmp_path: Path) -> None:
    for name in ("rotated.jpg", "animated.webp", "plain.png"):
        FILES[name][0](tmp_path / name)
    with Image.open(tmp_path / "rotated.jpg") as image:
        turned = image.transpose(Image.Transpose.ROTATE_270)
    pixels = [
        ask(processor, image)["pixel_values"] for image in (str(tmp_path / "rotated.jpg"), turned)
    ]
    assert torch.equal(*pixels)
    pixels = [
        ask(processor, str(tmp_path / name))["pixel_values"]
        for name in ("animated.webp", "plain.png")
    ]
    assert torch.equal(*pixels)


def test_files_that_cannot_be_read_are_refused_in_a_sentence(
    processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = io.BytesIO()
    picture(64, 64).save(whole, "png")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    picture(210, 1).save(tmp_path / "line.png")
    picture(100, 100).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64)
    wrong: list[tuple[str, type[Exception], str]] = [
        ("text.png", OSError, "cannot identify image file"),
        ("empty.png", OSError, "cannot identify image file"),
        ("cut.png", OSError, "truncated"),
        ("missing.png", ValueError, "Incorrect image source"),
        ("line.png", ValueError, "aspect ratio must be smaller than 200"),
        ("bomb.png", Image.DecompressionBombError, "exceeds limit"),
    ]
    for name, kind, message in wrong:
        with pytest.raises(kind, match=message) as raised:
            ask(processor, str(tmp_path / name))
        assert "\n" not in str(raised.value).strip()


@pytest.mark.skipif(
    not hasattr(ProcessorMixin, "_adjust_assistant_masks_indices"),
    reason="older Transformers do not count the signs",
)
def test_the_processor_refuses_images_that_do_not_fit_the_text(processor: Any) -> None:
    one = picture(16, 24)
    for text, images in ((f"{SIGN}{SIGN}", [one]), ("what?", [one]), (f"{SIGN}", [one, one])):
        with pytest.raises(ValueError, match="should be the same as the number of images"):
            processor(text=text, images=images)
    with pytest.raises(ValueError, match="no images were passed"):
        processor(text=SIGN)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_tensors_that_do_not_fit_are_refused_before_any_forward(name: str) -> None:
    target = shallow_vision_target(name)
    good = vision_prompts(target, name, [[(4, 4)], [(2, 6)]], 0)
    text = vision_prompts(target, name, [[], []], 0)
    two = vision_prompts(target, name, [[(4, 4)], [(2, 6), (2, 2)]], 0)
    pictures = {key: good[key] for key in ("pixel_values", "image_grid_thw")}
    calls: list[int] = []
    for module in (target, target.model.visual):
        module.register_forward_pre_hook(lambda module, args: calls.append(1))
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {**text, **pictures},
            r"expected 7 image tokens \(58\) for the 2 images of image_grid_thw, got 0",
        ),
        (
            {**two, **pictures},
            r"expected 7 image tokens \(58\) for the 2 images of image_grid_thw, got 8",
        ),
        (
            {**good, "pixel_values": good["pixel_values"][:-4]},
            "expected pixel_values of 28 patches, .* got 24",
        ),
        ({**good, "pixel_values": None}, "expected pixel_values of 28 patches, .* got None"),
    ]
    for inputs, message in wrong:
        with pytest.raises(ValueError, match=message):
            target.generate(**inputs, max_new_tokens=4, assistant_model=tiny_draft(target))
        assert not calls


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl", "gemma3", "smolvlm"])
def test_signs_without_images_are_text_as_in_plain_generate(name: str) -> None:
    target = shallow_vision_target(name)
    inputs = vision_prompts(target, name, [[(4, 4)], []], 0)
    bare = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    assert (bare["input_ids"] == IMAGE).any()
    ref = target.generate(**bare, max_new_tokens=NEW, do_sample=False)
    rows = zip(ref, bare["attention_mask"], strict=True)
    draft = oracle_draft(target, [row[int(mask.argmax()) :].tolist() for row, mask in rows], 0, 5)
    assert torch.equal(
        target.generate(**bare, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )
