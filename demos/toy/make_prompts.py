"""Writes `held_out.jsonl`: held-out prompts for the demo, the benchmarks and the tests, with their pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from hybrid_target import HYBRID_DIR, HYBRID_KINDS
from scene_tasks import VISION_KINDS, VisionSample, make_vision_sample
from tasks import KINDS, Kind, make_sample
from vision_processor import VISION_DIR

HERE = Path(__file__).parent


def text_rows(kinds: Sequence[Kind], per_kind: int) -> list[dict[str, Any]]:
    """Return the prompts of a pair of texts."""
    samples = [make_sample(kind, "heldout", index) for kind in kinds for index in range(per_kind)]
    return [
        {
            "kind": s.kind,
            "messages": list(s.messages),
            "answer": s.answer,
            **scored(s.kind, s.answer),
        }
        for s in samples
    ]


def scored(kind: str, answer: str) -> dict[str, str]:
    """Return how `dflash-hf bench` tells whether an answer of a kind is right; nothing where many would be."""
    if kind == "arithmetic":
        return {"score": "math", "reference": answer.rpartition("\\boxed{")[2].partition("}")[0]}
    return {} if kind in ("code", "dialogue", "chat", "talk") else {"score": "exact"}


def vision_row(sample: VisionSample, folder: Path) -> dict[str, Any]:
    """Save a sample's pictures below a folder and return its prompt, image parts naming the files from there."""
    pictures = sample.pictures()
    names = [
        f"pictures/{sample.kind}-{sample.index}{'ab'[at] if len(pictures) > 1 else ''}.png"
        for at in range(len(pictures))
    ]
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for picture, name in zip(pictures, names, strict=True):
        picture.draw().save(folder / name, optimize=True)
    left = iter(names)
    messages = sample.messages()
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                {**part, "path": next(left)} if part["type"] == "image" else part
                for part in message["content"]
            ]
    return {
        "kind": sample.kind,
        "messages": messages,
        "answer": sample.answer,
        **scored(sample.kind, sample.answer),
    }


def main(
    pair: Annotated[
        Literal["text", "vision", "hybrid"], typer.Option(help="Which of the pairs.")
    ] = "text",
    per_kind: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 12,
    out: Annotated[Path | None, typer.Option(help="File to write; pictures go beside it.")] = None,
) -> None:
    """Write the first samples of every kind's held-out split, one JSON object a line."""
    out = out or {"text": HERE, "vision": VISION_DIR, "hybrid": HYBRID_DIR}[pair] / "held_out.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    if pair != "vision":
        rows = text_rows(HYBRID_KINDS if pair == "hybrid" else KINDS, per_kind)
    else:
        rows = [
            vision_row(make_vision_sample(kind, "heldout", index), out.parent)
            for kind in VISION_KINDS
            for index in range(per_kind)
        ]
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    typer.echo(f"{len(rows)} prompts in {out}")


if __name__ == "__main__":
    typer.run(main)
