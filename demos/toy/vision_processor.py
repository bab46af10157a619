"""The vision pair's tokenizer and image processor, and how a generated sample becomes model inputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from build_tokenizer import IM_END, IM_START, MASK, PAD, train_tokenizer
from scene_tasks import VISION_KINDS, VisionSample, make_vision_sample
from scenes import Picture
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VISION_DIR: Final = Path(__file__).resolve().parent / "vision"
VOCAB_SIZE: Final = 1024
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE: Final = "<|image_pad|>"
VIDEO: Final = "<|video_pad|>"
PATCH: Final = 8
MERGE: Final = 2
# At most 36 image tokens a picture, at least 16; larger pictures are scaled down, as everywhere.
MAX_PIXELS: Final = 96 * 96
MIN_PIXELS: Final = 64 * 64
# No reference answer is longer.
MAX_NEW_TOKENS: Final = 192

CHAT_TEMPLATE: Final = (
    "{%- macro parts(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- else -%}{%- for part in content -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- generation -%}{{- parts(message['content']) + '<|im_end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + parts(message['content']) + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One conversation as ids with image tokens expanded, the mask of what the assistant writes, and its pictures."""

    kind: str
    input_ids: list[int]
    is_answer: list[int]
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor


def _texts(per_kind: int) -> Iterator[str]:
    """Yield the turns of training conversations."""
    for index in range(per_kind):
        for kind in VISION_KINDS:
            sample = make_vision_sample(kind, "train", index)
            for turn in sample.turns:
                yield f"{turn.role}\n{turn.text}"
            yield f"assistant\n{sample.answer}"


def build_vision_tokenizer(per_kind: int = 3000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `per_kind` conversations of each kind; the result is deterministic."""
    special = [PAD, IM_START, IM_END, MASK, VISION_START, VISION_END, IMAGE, VIDEO]
    return train_tokenizer(_texts(per_kind), VOCAB_SIZE, special, CHAT_TEMPLATE)


@cache
def image_processor() -> Qwen2VLImageProcessorPil:
    """Return the image processor: patches of 8 pixels, four of them to a token."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def patches(pictures: list[Picture]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches of pictures one after another, and the grid of each, shape (N, 3)."""
    if not pictures:
        return torch.zeros(0, 3 * 2 * PATCH * PATCH), torch.zeros(0, 3, dtype=torch.long)
    encoded: Any = image_processor()([picture.draw() for picture in pictures], return_tensors="pt")
    return encoded["pixel_values"], encoded["image_grid_thw"]


def expand(
    ids: list[int], mask: list[int], image_id: int, counts: list[int]
) -> tuple[list[int], list[int]]:
    """Repeat each image token as often as its picture has tokens."""
    left = iter(counts)
    new_ids: list[int] = []
    new_mask: list[int] = []
    for token, flag in zip(ids, mask, strict=True):
        times = next(left) if token == image_id else 1
        new_ids += [token] * times
        new_mask += [flag] * times
    return new_ids, new_mask


def encode_sample(tokenizer: PreTrainedTokenizerBase, sample: VisionSample) -> Encoded:
    """Encode a conversation with its reference answer."""
    encoded: Any = tokenizer.apply_chat_template(
        sample.conversation(), return_assistant_tokens_mask=True, return_dict=True
    )
    pixel_values, grids = patches(sample.pictures())
    counts = (grids.prod(dim=1) // MERGE**2).tolist()
    image_id: Any = tokenizer.convert_tokens_to_ids(IMAGE)
    ids, mask = expand(encoded["input_ids"], encoded["assistant_masks"], image_id, counts)
    return Encoded(
        kind=sample.kind,
        input_ids=ids,
        is_answer=mask,
        pixel_values=pixel_values,
        image_grid_thw=grids,
    )


def processor_inputs(processor: Any, samples: list[VisionSample]) -> dict[str, torch.Tensor]:
    """Return the model inputs of some prompts, left-padded, as a user's call of the processor makes them."""
    return processor.apply_chat_template(
        [with_images(sample) for sample in samples],
        add_generation_prompt=True,
        tokenize=True,
        processor_kwargs={"padding": True},
        return_dict=True,
        return_tensors="pt",
    )


def with_images(sample: VisionSample) -> list[dict[str, Any]]:
    """Return a sample's messages with the drawn images in their parts."""
    images = iter([picture.draw() for picture in sample.pictures()])
    messages = sample.messages()
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                {**part, "image": next(images)} if part["type"] == "image" else part
                for part in message["content"]
            ]
    return messages
