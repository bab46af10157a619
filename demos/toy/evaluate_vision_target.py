"""Measure how often the vision target answers held-out questions exactly, with greedy decoding."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from scene_tasks import PICTURE_KINDS, VISION_KINDS, VisionKind, VisionSample, make_vision_sample
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel
from vision_processor import MAX_NEW_TOKENS, VISION_DIR, processor_inputs

import dflash_hf  # noqa: F401  (AutoProcessor without torchvision)


@torch.inference_mode()
def answer_prompts(
    model: PreTrainedModel, processor: Any, samples: list[VisionSample], batch_size: int
) -> list[tuple[str, int]]:
    """Return the greedy answer of each sample with its length in tokens, the end token included."""
    generator: Any = model
    answers: list[tuple[str, int]] = []
    for start in range(0, len(samples), batch_size):
        inputs = processor_inputs(processor, samples[start : start + batch_size])
        output = generator.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        for row in output[:, inputs["input_ids"].shape[1] :]:
            written = row[row != processor.tokenizer.pad_token_id]
            answers.append((processor.decode(written, skip_special_tokens=True), len(written)))
    return answers


def evaluate(
    model: PreTrainedModel,
    processor: Any,
    kind: VisionKind,
    count: int,
    split: Any,
    batch_size: int,
    first_index: int,
) -> tuple[float, float, list[tuple[VisionSample, str]]]:
    """Return (accuracy, mean answer length in tokens, failures) of a kind."""
    samples = [make_vision_sample(kind, split, first_index + index) for index in range(count)]
    answers = answer_prompts(model, processor, samples, batch_size)
    failures = [
        (s, text) for s, (text, _) in zip(samples, answers, strict=True) if not s.check(text)
    ]
    return 1 - len(failures) / count, sum(length for _, length in answers) / count, failures


def main(
    model_dir: Annotated[Path, typer.Option("--model", help="Checkpoint folder.")] = VISION_DIR
    / "target",
    count: Annotated[int, typer.Option(help="Prompts of each kind.")] = 100,
    kinds: Annotated[str, typer.Option(help="Kinds to measure, separated by commas.")] = ",".join(
        VISION_KINDS
    ),
    split: Annotated[str, typer.Option(help="heldout or train.")] = "heldout",
    first_index: Annotated[int, typer.Option(help="Number of the first sample.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts per batch.")] = 25,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    show_failures: Annotated[int, typer.Option(help="Failures of each kind to print.")] = 0,
) -> None:
    """Print the accuracy of each kind, and a JSON summary on the last line."""
    torch.set_num_threads(threads)
    processor = AutoProcessor.from_pretrained(model_dir)
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype="float32").eval()
    summary: dict[str, Any] = {"split": split, "count": count, "first_index": first_index}
    chosen: list[Any] = kinds.split(",")
    right: list[float] = []
    for kind in chosen:
        began = time.perf_counter()
        accuracy, length, failures = evaluate(
            model, processor, kind, count, split, batch_size, first_index
        )
        seconds = time.perf_counter() - began
        typer.echo(
            f"{kind:12s} accuracy {accuracy:6.1%}   {length:6.1f} answer tokens   {seconds:5.1f} s"
        )
        for sample, text in failures[:show_failures]:
            typer.echo(
                f"--- prompt\n{sample.turns[-1].text}\n--- expected\n{sample.answer}\n--- got\n{text}\n"
            )
        summary[kind] = {"accuracy": round(accuracy, 4), "answer_tokens": round(length, 1)}
        if kind in PICTURE_KINDS:
            right.append(accuracy)
    if right:
        summary["pictures"] = round(sum(right) / len(right), 4)
    typer.echo(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
