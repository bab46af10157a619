"""Training data of the vision draft: questions about drawn pictures and small talk, answered by the target."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, overload

from answers import cached_answers, name_of
from scene_tasks import VISION_KINDS, Split, VisionKind, make_vision_sample
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel
from vision_processor import MAX_NEW_TOKENS, VISION_DIR, with_images

from dflash_hf.training import ChatDataset, Example, regenerate_answers

KINDS: Final = VISION_KINDS
TARGET_DIR: Final = VISION_DIR / "target"
DRAFT_DIR: Final = VISION_DIR / "draft"
# Prompts of each kind to train on.
NUM_PROMPTS: Final = "500,talk=2000"
SUBJECT: Final = "drawn scenes, charts and signs, and small talk"
EXAMPLE: Final = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

target = AutoModelForImageTextToText.from_pretrained("demos/toy/vision/target")
processor = AutoProcessor.from_pretrained("demos/toy/vision/target")
draft = DFlashDraftModel.from_pretrained("demos/toy/vision/draft")
image = {"type": "image", "path": "demos/toy/vision/pictures/describe-0.png"}
messages = [{"role": "user", "content": [image, {"type": "text", "text": "Describe the picture."}]}]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_tensors="pt", return_dict=True
)
out = target.generate(**inputs, assistant_model=draft, max_new_tokens=192)"""


class Rows(Sequence[Mapping[str, Any]]):
    """Generated conversations of some numbers, whose pictures are drawn when they are asked for."""

    def __init__(self, numbers: Sequence[tuple[VisionKind, Split, int]]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        return {"messages": with_images(make_vision_sample(*self.numbers[index]))}


def load_target(target_dir: Path) -> tuple[PreTrainedModel, Any]:
    """Return the target in float32 and its processor."""
    target: Any = AutoModelForImageTextToText.from_pretrained(target_dir, dtype="float32")
    return target.eval(), AutoProcessor.from_pretrained(target_dir)


def answered_examples(
    target: PreTrainedModel,
    processor: Any,
    target_dir: Path,
    counts: Mapping[VisionKind, int],
    split: Split = "train",
    first: int = 0,
) -> Sequence[Example]:
    """Return prompts with the target's greedy answers; pictures are drawn again whenever an example is used."""
    rows = Rows(
        [(kind, split, first + index) for kind, count in counts.items() for index in range(count)]
    )
    tokenizer = processor.tokenizer
    references = [
        [*tokenizer(make_vision_sample(*number).answer)["input_ids"], tokenizer.eos_token_id]
        for number in rows.numbers
    ]
    prompts = ChatDataset(rows, processor, answers=[[]] * len(rows))

    def write() -> list[list[int]]:
        return regenerate_answers(
            target,
            prompts,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            batch_size=64,
            guesses=references,
        )

    answered = cached_answers(target_dir, name_of(split, counts, first), references, write)
    answers = [row["answer"] for row in answered]
    lengths = [size + len(answer) for size, answer in zip(prompts.lengths, answers, strict=True)]
    return ChatDataset(rows, processor, answers=answers, lengths=lengths)
