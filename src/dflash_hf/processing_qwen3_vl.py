"""This module defines processors of Qwen's vision models for use without torchvision: text and
images, without videos.

Transformers' own processors need a video processor, which needs torchvision. Images need neither. They are processed
by `Qwen2VLImageProcessorPil`, which `AutoImageProcessor` chooses by itself.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import ProcessorMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2_5_vl import processing_qwen2_5_vl
from transformers.models.qwen3_vl import processing_qwen3_vl
from transformers.video_processing_utils import BaseVideoProcessor

# These settings are the same for images and videos. So a folder without video settings gets settings that fit its own
# vision tower.
_SHARED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


class WithoutVideos(ProcessorMixin):
    """This base class makes a processor of Transformers work without its video processor.

    It comes before that processor among the bases. Its subclasses have the names of the original classes. The name is
    saved, and each of the two can read the files of the other. From the same messages, both make the same tensors:
    `input_ids`, `attention_mask` and `mm_token_type_ids` `[B, S]`, `pixel_values`
    `[patches, channels * temporal_patch_size * patch_size**2]` and `image_grid_thw` `[images, 3]`.

    Args:
        image_processor (`Qwen2VLImageProcessorPil`): The processor of the images.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the text. It must pad on the left for `generate`.
        chat_template (`str`, *optional*): Jinja template of a conversation.
        video_settings (`dict`, *optional*): Settings of a video processor. They are only kept and saved with the other
            settings.
    """

    video_processor_type: str

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | dict[str, str] | None = None,
        video_settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        shared = {name: getattr(image_processor, name) for name in _SHARED}
        defaults = {"video_processor_type": self.video_processor_type, **shared}
        self.video_settings: dict[str, Any] = video_settings or defaults

    def __call__(
        self,
        images: Any = None,
        text: Any = None,
        videos: Any = None,
        audio: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Makes a model's inputs as the original does.

        Raises `ValueError` for a video, or for an image without pixels.
        """
        if videos is not None:
            raise ValueError(
                "expected images and text, got a video; install torchvision for videos"
            )
        check_pixels(images)
        return super().__call__(images=images, text=text, audio=audio, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `processor_config.json`, with the settings of the video processor under the original
        key.
        """
        config = super().to_dict()
        config["video_processor"] = config.pop("video_settings")
        return config

    @classmethod
    def get_processor_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `processor_config.json`, or the files that older folders have in its place."""
        config, unused = super().get_processor_dict(pretrained_model_name_or_path, **kwargs)
        videos = config.pop("video_processor", None)
        if videos is None:
            videos, _ = BaseVideoProcessor.get_video_processor_dict(
                pretrained_model_name_or_path, **kwargs
            )
        if "video_processor_type" in videos:  # without this key, the file has the images' settings
            config["video_settings"] = videos
        return config, unused


class Qwen3VLProcessor(WithoutVideos, processing_qwen3_vl.Qwen3VLProcessor):
    """Transformers' `Qwen3VLProcessor` without its video processor; see `WithoutVideos`."""

    video_processor_type = "Qwen3VLVideoProcessor"


class Qwen2_5_VLProcessor(WithoutVideos, processing_qwen2_5_vl.Qwen2_5_VLProcessor):
    """Transformers' `Qwen2_5_VLProcessor` without its video processor; see `WithoutVideos`."""

    video_processor_type = "Qwen2VLVideoProcessor"


def check_pixels(images: Any) -> None:
    """Raises `ValueError` for images without pixels, for which Transformers' resizing divides by zero.

    `images` may be a PIL image, an array, an object without a size, or a list of these.
    """
    if isinstance(images, (list, tuple)):
        for image in images:  # type: ignore[reportUnknownVariableType]
            check_pixels(image)
        return
    size: Any = getattr(images, "shape", None) or getattr(images, "size", None)
    if isinstance(size, tuple) and 0 in size:
        sides = " × ".join(map(str, size))  # type: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"expected an image of at least one pixel, got one of {sides}; leave it out"
        )


def register_processors(auto: Any) -> None:
    """Makes the `AutoProcessor` of `transformers.models.auto.processing_auto` choose these processors.

    Without torchvision, the original processors could only fail.
    """
    names: dict[str, str] = auto.PROCESSOR_MAPPING_NAMES
    for ours in (Qwen3VLProcessor, Qwen2_5_VLProcessor):
        for model_type in [model for model, name in names.items() if name == ours.__name__]:
            # `AutoProcessor` looks up the name from a folder in this table first, before it looks among registered
            # classes.
            del names[model_type]
            config = CONFIG_MAPPING[model_type]
            auto.AutoProcessor.register(config, ours, exist_ok=True)
            # Older releases do not accept a registration for one of Transformers' own configs.
            auto.PROCESSOR_MAPPING._extra_content.setdefault(config, ours)
