"""Videos through Qwen3-VL's real processor: the same text with a draft. Only where torchvision is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torchvision", reason="Transformers' video processors need torchvision")
pytest.importorskip("PIL")
import numpy as np
from transformers import AutoProcessor

from helpers.processors import picture, published_folder, qwen_target
from tiny import oracle_draft, truth_of

NEW = 24
CLIP = "<|vision_start|><|video_pad|><|vision_end|>"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def frames(number: int, width: int, height: int) -> np.ndarray:
    """A video `[T, H, W, 3]`, uint8, whose frames differ."""
    return np.stack([np.asarray(picture(width, height, seed)) for seed in range(number)])


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As `AutoProcessor` finds it, which with torchvision is Transformers' own."""
    found: Any = AutoProcessor.from_pretrained(
        published_folder(tmp_path_factory.mktemp("qwen3-vl"))
    )
    assert type(found).__module__.startswith("transformers.")
    return found


CASES: dict[str, dict[str, Any]] = {
    "one video": {"text": [f"{CLIP} what?"], "videos": [frames(4, 24, 16)]},
    "several": {
        "text": [f"{CLIP} and {CLIP} differ?"],
        "videos": [frames(4, 24, 16), frames(6, 16, 16)],
    },
    "beside a picture": {
        "text": [f"{PICTURE} in {CLIP}?"],
        "videos": [frames(4, 16, 24)],
        "images": [[picture(24, 16)]],
    },
    "batch": {
        "text": [f"{CLIP} what?", "hello", f"see {CLIP}"],
        "videos": [frames(4, 24, 16), frames(2, 16, 16)],
    },
}


@pytest.mark.parametrize("case", CASES)
def test_real_videos_give_the_plain_text(case: str, processor: Any) -> None:
    inputs = processor(**CASES[case], padding=True, do_sample_frames=False, return_tensors="pt")
    grids = inputs["video_grid_thw"]
    assert grids[:, 0].tolist() == [len(video) // 2 for video in CASES[case]["videos"]]
    assert (inputs["input_ids"] == processor.video_token_id).sum() == grids.prod(dim=1).sum() // 4
    inputs = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    target = qwen_target(processor)
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for seed, block_size in enumerate((4, 16)):
        draft = oracle_draft(target, truth_of(inputs, plain), seed, block_size)
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(out, plain)
        assert 1.2 < draft.last_stats.acceptance_length < block_size
