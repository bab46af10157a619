"""Small processors: the files of a published Qwen3-VL, one of Gemma 3's kind, and pictures to put through them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Processor, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from helpers.vision import PATCH, vision_target

_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_VISION]
TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- set content = message.content if message.content is not string else [{'type': 'text', 'text': message.content}] %}
{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif message.role == 'assistant' %}{% generation %}{{- part.text + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- if message.role != 'assistant' %}{{- '<|im_end|>' }}{% endif %}{{- '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# As SmolVLM's and LLaVA-OneVision's: a content that is a text is left out.
PARTS_ONLY = (
    """{% for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
{%- elif line['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    """{% for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- for part in m['content'] | selectattr('type', 'equalto', 'image') %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}
{%- for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
)
SIZE = {"shortest_edge": 64, "longest_edge": 4096}
PICTURES: dict[str, Any] = {
    "size": SIZE,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
# Model type -> its processor, its video processor.
FAMILIES = {
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
}


def qwen_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and of their merges, with Qwen's special tokens, padding on the left."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        extra_special_tokens=SPECIAL[1:],
        padding_side="left",
    )


def with_tokens(
    special: Mapping[str, str], merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """The byte tokenizer with named special tokens and merges."""
    return PreTrainedTokenizerFast(
        tokenizer_object=qwen_tokenizer(merges).backend_tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(special),
    )


def gemma_processor() -> Gemma3Processor:
    """A processor of Gemma 3's kind, for pictures of four tokens."""
    special = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    # As Gemma's own tokenizer, which makes one token of the newlines before an image and those of the text.
    tokenizer = with_tokens(special, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")])
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def published_folder(path: Path, model_type: str = "qwen3_vl") -> Path:
    """Writes the files that Qwen publishes beside Qwen3-VL's or Qwen2.5-VL's weights, and returns their folder."""
    path.mkdir(parents=True, exist_ok=True)
    qwen_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    processor, video_processor = FAMILIES[model_type]
    both = {**PICTURES, "processor_class": processor}
    pictures = {**both, "image_processor_type": "Qwen2VLImageProcessorFast"}
    (path / "preprocessor_config.json").write_text(json.dumps(pictures))
    videos = {**both, "video_processor_type": video_processor, "fps": 3}
    (path / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return path


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture in which every pixel differs from its neighbours."""
    image = Image.new("RGB", (width, height))
    image.putdata(
        [
            ((7 * i + seed) % 256, (13 * i) % 256, (29 * i + 5 * seed) % 256)
            for i in range(width * height)
        ]
    )
    return image


def write_cut_image(path: Path) -> None:
    """Writes the first half of a picture's file: its header is whole, and its pixels are not."""
    picture(64, 64).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def qwen_target(processor: Any) -> PreTrainedModel:
    """Builds a tiny Qwen3-VL for the tokens of a processor, as `vision_target` does. It writes text only."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokenizer = processor.tokenizer
    target = vision_target(
        "qwen3-vl", vocab_size=len(tokenizer), **{name: getattr(processor, name) for name in names}
    )
    config: Any = target.generation_config
    config.pad_token_id = tokenizer.pad_token_id
    config.suppress_tokens = tokenizer.convert_tokens_to_ids(SPECIAL)
    return target
