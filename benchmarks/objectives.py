"""Drafts trained by each recipe of demos/smollm2/recipes, at equal steps, on the same answers, from several seeds.

    make real
    .venv/bin/dflash-hf bench prepare gsm8k-train,gsm8k,humaneval,mt-bench --out build/smollm2/data
    .venv/bin/python benchmarks/objectives.py

Call it from the project's root, because the recipes' paths begin there. Each step is the command that a user would
type, so an interrupted comparison goes on where it was:

1. `dflash-hf train --stages prepare,regenerate` lets the target answer the recipes' prompts, once.
2. The same command lets the target answer the questions of each test set.
3. For each recipe and seed a copy of the first folder is trained in: `--stages run`.

The acceptance length of a draft on a set is walked over the target's answers, which gives what greedy `generate`
commits per verify: of chains as wide as the block, and of trees of as many tokens. Writes `objectives.json` and
`objectives.png`, the acceptance of the held-out prompts by step.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from harness.machine import RESULTS, ROOT, provenance
from harness.plots import objectives_figure
from harness.report import show, write

from dflash_hf.checkpoints.drafts import load_draft
from dflash_hf.cli.main import app
from dflash_hf.pair.loading import load_target
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.training import Example, read_examples, walked_acceptance

RECIPES = ROOT / "demos" / "smollm2" / "recipes"
SETS = ("gsm8k", "humaneval", "mt-bench")
ANSWERS = "answers"


def train(recipe: Path, folder: Path, stages: str, *others: str) -> None:
    """Runs `dflash-hf train` of a recipe in a folder; a command that fails says why and ends the comparison."""
    options = ["--config", str(recipe), "--output-dir", str(folder), "--stages", stages, *others]
    status = app(["train", *options], standalone_mode=False)
    if status:
        raise typer.Exit(status)


def trained(recipe: Path, seed: int, folder: Path, answers: Path, others: Sequence[str]) -> Path:
    """Trains a recipe from a seed behind answers that are there already, and returns the run's folder."""
    place = folder / f"{recipe.stem}-{seed}"
    if not place.exists():
        begun = place.with_suffix(".part")
        shutil.rmtree(begun, ignore_errors=True)
        shutil.copytree(answers, begun)
        begun.rename(place)
    train(recipe, place, "run", "--seed", str(seed), *others)
    return place


def acceptance(
    run: Path, target: Target, examples: dict[str, Sequence[Example]], is_tree: bool
) -> dict[str, float]:
    """Returns the acceptance length of a run's draft on each set."""
    draft = load_draft(run / "draft", dtype="auto")
    return {
        name: walked_acceptance(draft, target, some, is_tree=is_tree).acceptance_length
        for name, some in examples.items()
    }


def curve(run: Path) -> list[tuple[int, float]]:
    """Returns the steps at which a run was measured, and the acceptance length of its held-out prompts there."""
    lines = (run / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    name = "eval_acceptance_length"
    return [(record["step"], record[name]) for record in records if name in record]


def mean_and_spread(values: Sequence[float]) -> str:
    """Returns the mean of some seeds, and the least and the greatest of them."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def summary(rows: Sequence[dict[str, Any]], sets: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a row of the printed table for each recipe: over its seeds."""
    found: list[dict[str, Any]] = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        of_recipe = [row for row in rows if row["recipe"] == recipe]
        line: dict[str, Any] = {"recipe": recipe, "seeds": len(of_recipe)}
        for kind in ("chain", "tree"):
            for name in sets:
                line[f"{name}, {kind}"] = mean_and_spread([row[kind][name] for row in of_recipe])
        found.append(line)
    return found


def main(
    folder: Annotated[Path, typer.Option(help="Where the runs are.")] = ROOT / "build/objectives",
    data: Annotated[
        Path, typer.Option(help="Folder with the test sets that `dflash-hf bench prepare` wrote.")
    ] = ROOT / "build/smollm2/data",
    recipes: Annotated[Path, typer.Option(help="Folder of the recipes, as YAML.")] = RECIPES,
    seeds: Annotated[int, typer.Option(min=1, help="Drafts of each recipe.")] = 3,
    sets: Annotated[str, typer.Option(help="Test sets, with commas between.")] = ",".join(SETS),
    questions: Annotated[int, typer.Option(min=1, help="Questions of each test set.")] = 24,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 400,
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "objectives.json",
) -> None:
    """Compare the objectives of a draft's training."""
    files = sorted(recipes.glob("*.yaml"))
    if not files:
        raise typer.BadParameter(f"expected recipes in {recipes}, got none; name their folder")
    names = sets.split(",")
    for name in names:
        if not (data / f"{name}.jsonl").is_file():
            raise typer.BadParameter(
                f"expected {name}.jsonl in {data}, got no such file; run `dflash-hf bench prepare {name} --out {data}`"
            )
    first = files[0]
    answers = folder / ANSWERS
    train(first, answers, "prepare,regenerate")
    for name in names:
        options = ["--dataset", str(data / f"{name}.jsonl"), "--num-prompts", str(questions)]
        options += ["--self-prompts", "0", "--num-eval", "0"]
        train(first, folder / name, "prepare,regenerate", *options)
    others = ["--max-steps", str(steps), "--eval-steps", str(max(1, steps // 4))]
    runs = [
        (file.stem, seed, trained(file, seed, folder, answers, others))
        for seed in range(seeds)
        for file in files
    ]
    settings = yaml.safe_load(first.read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    model, processor = load_target(settings["target"], "auto", "cpu")
    target = find_target(model)
    examples = {
        name: read_examples(folder / name / "answered" / "train.jsonl", processor) for name in names
    }
    rows: list[dict[str, Any]] = []
    for recipe, seed, run in runs:
        row: dict[str, Any] = {"recipe": recipe, "seed": seed, "curve": curve(run)}
        row["chain"] = acceptance(run, target, examples, is_tree=False)
        row["tree"] = acceptance(run, target, examples, is_tree=True)
        rows.append(row)
        print(json.dumps(row), flush=True)
    table = summary(rows, names)
    show(
        "Acceptance length: mean of the seeds (least to greatest)",
        table,
        [(k, k) for k in table[0]],
    )
    facts = {"benchmark": "objectives", "steps": steps, **provenance(torch.device("cpu"))}
    record = {"provenance": facts, "rows": rows}
    write(record, out)
    image = out.with_suffix(".png")
    objectives_figure(record).savefig(image, dpi=120)
    print(f"written to {out} and {image}")


if __name__ == "__main__":
    typer.run(main)
