"""Measure the accuracy of the toy target on held-out prompts, with greedy decoding."""

import json
import time
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from build_tokenizer import TARGET_DIR
from tasks import KINDS, SPLITS, Kind, Sample, Split, make_sample
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

MAX_NEW_TOKENS: Final = 320


@torch.inference_mode()
def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: list[Sample],
    batch_size: int,
) -> list[tuple[str, int]]:
    """Return the greedy answer of each sample with its length in tokens, the end token included."""
    answers: list[tuple[str, int]] = [("", 0)] * len(samples)
    lengths = [len(tokenizer.apply_chat_template(list(s.messages))["input_ids"]) for s in samples]
    order = sorted(range(len(samples)), key=lambda at: lengths[at])
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        inputs = tokenizer.apply_chat_template(
            [list(samples[at].messages) for at in chosen],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
        ).to(model.device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        for at, row in zip(chosen, output[:, inputs["input_ids"].shape[1] :], strict=True):
            written = row[row != tokenizer.pad_token_id]
            answers[at] = (tokenizer.decode(written, skip_special_tokens=True), len(written))
    return answers


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind,
    count: int,
    split: Split = "heldout",
    batch_size: int = 25,
    first_index: int = 0,
) -> tuple[float, float, list[tuple[Sample, str]]]:
    """Return (accuracy, mean answer length in tokens, failures) of a kind."""
    samples = [make_sample(kind, split, first_index + index) for index in range(count)]
    answers = answer_prompts(model, tokenizer, samples, batch_size)
    failures = [
        (s, text) for s, (text, _) in zip(samples, answers, strict=True) if not s.check(text)
    ]
    return 1 - len(failures) / count, sum(length for _, length in answers) / count, failures


def main(
    model_dir: Annotated[Path, typer.Option("--model", help="Checkpoint folder.")] = TARGET_DIR,
    count: Annotated[int, typer.Option(help="Prompts of each kind.")] = 100,
    kinds: Annotated[str, typer.Option(help="Kinds to measure, separated by commas.")] = ",".join(
        KINDS
    ),
    split: Annotated[str, typer.Option(help="heldout or train.")] = "heldout",
    first_index: Annotated[int, typer.Option(help="Number of the first sample.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts per batch.")] = 25,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    show_failures: Annotated[int, typer.Option(help="Failures of each kind to print.")] = 0,
) -> None:
    """Print the accuracy of each kind, and a JSON summary on the last line."""
    if split not in SPLITS:
        raise ValueError(f"expected a split among {SPLITS}, got {split!r}; use one of them.")
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    summary: dict[str, object] = {"dtype": str(model.dtype), "split": split, "count": count}
    for kind in kinds.split(","):
        began = time.perf_counter()
        accuracy, length, failures = evaluate(
            model, tokenizer, kind, count, split, batch_size, first_index
        )
        seconds = time.perf_counter() - began
        typer.echo(
            f"{kind:12s} accuracy {accuracy:6.1%}   {length:6.1f} answer tokens   {seconds:5.1f} s"
        )
        for sample, text in failures[:show_failures]:
            typer.echo(
                f"--- prompt\n{sample.messages[-1]['content']}\n--- expected\n{sample.answer}\n--- got\n{text}\n"
            )
        summary[kind] = {"accuracy": round(accuracy, 4), "answer_tokens": round(length, 1)}
    typer.echo(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
