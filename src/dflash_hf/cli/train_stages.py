"""The stages of `dflash-hf train`: each reads what those before it wrote, and goes on where it was killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_hf.cli.train_settings import STAGES, Stage, TrainSettings, arguments_class
from dflash_hf.cli.train_state import RunState, write_whole
from dflash_hf.errors import one_line, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dflash_hf.modeling_dflash import DFlashDraftModel
    from dflash_hf.training.data import Example

TRAIN, HELD_OUT, QUESTIONS = "train.jsonl", "held_out.jsonl", "held_out_questions.jsonl"
Tell = Callable[[str], None]


def run_stages(settings: TrainSettings, stages: Sequence[Stage], tell: Tell) -> None:
    """Runs stages in their order; those that are done are not run again.

    Under `accelerate launch` every process trains and measures its share; the first one does the rest.

    Args:
        settings (`TrainSettings`): What to do.
        stages (sequence of `str`): Which of `STAGES`.
        tell (callable): Told a line at the end of each stage.

    Raises:
        ValueError: If something cannot be run, or the folder is another run's, before anything is written; or if the
            disk or the device's memory is full.
    """
    if settings.threads is not None:
        import torch

        torch.set_num_threads(settings.threads)
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    tell = tell if rank == 0 else _quiet
    make_arguments(settings)  # it refuses what is out of range
    state = RunState(settings)
    state.check(stages)
    if rank == 0:
        state.write_settings()
    for stage in stages:
        if state.is_done(stage):
            tell(f"{stage}: done before, {state.folder(stage)}")
            continue
        began = time.perf_counter()
        if rank == 0:
            state.begin(stage)
        facts: dict[str, Any] = {}
        try:
            if rank == 0 or stage in ("run", "bench"):
                facts = RUNNERS[stage](settings, state)
        except (OSError, RuntimeError) as error:
            raise _explained(error, settings, stage) from error
        if size > 1 and stage != "export":
            _wait()
        if rank == 0:
            state.end(stage, {**facts, "seconds": round(time.perf_counter() - began, 1)})
        told = ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in facts.items())
        tell(f"{stage}: {told or 'done'}, {state.folder(stage)}")


def _prepare(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    folder = state.folder("prepare")
    rows = [row for source in settings.dataset for row in _read_rows(Path(source))][: settings.num_prompts]
    require(bool(rows), "conversations in --dataset", "none", "give a file with some")
    most = max(0, min(settings.num_eval, len(rows) // 5))
    # Every so many: the rows of a file are often sorted by what they are about.
    chosen = set(range(0, len(rows), max(1, len(rows) // most)) if most else ())
    held_out = [row for at, row in enumerate(rows) if at in chosen][:most]
    kept = {id(row) for row in held_out}
    train = [row for row in rows if id(row) not in kept]
    for name, part in ((TRAIN, train), (HELD_OUT, held_out)):
        write_whole(folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))
    return {"conversations": len(train), "held_out": len(held_out)}


def _regenerate(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    from dflash_hf.evaluation.harness import tokenizer_of
    from dflash_hf.evaluation.loading import load_target
    from dflash_hf.training import ChatDataset, regenerate_answers

    if settings.answers == "data":
        return {"answers": "those in the data"}
    target, processor = load_target(settings.target, settings.dtype, settings.device)
    tokenizer: Any = tokenizer_of(processor)
    ends: Any = target.generation_config.eos_token_id
    counts: dict[str, Any] = {}
    for name in (HELD_OUT, TRAIN):
        rows = _read_rows(state.folder("prepare") / name)
        path = state.folder("regenerate") / name
        path.touch()
        known = {row["id"] for row in _read_rows(path)}
        missing = [row for row in rows if row["id"] not in known]
        size = settings.answer_batch * 8
        for start in range(0, len(missing), size):
            part = missing[start : start + size]
            answers = regenerate_answers(
                target,
                ChatDataset(part, processor, answers=[[]] * len(part)),
                max_new_tokens=settings.max_new_tokens,
                eos_token_id=ends if ends is not None else tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id or 0,
                batch_size=settings.answer_batch,
            )
            with path.open("a", encoding="utf-8") as file:
                for row, answer in zip(part, answers, strict=True):
                    finished = len(answer) < settings.max_new_tokens
                    line = {**row, "answer_ids": answer, "finished": finished}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        counts["answers" if name == TRAIN else "held_out"] = len(rows)
    return counts


def _train(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    from dflash_hf.evaluation.loading import load_target
    from dflash_hf.training import DFlashTrainer

    target, processor = load_target(settings.target, settings.dtype, settings.device)
    train = _examples(settings, state, TRAIN, processor)
    held_out = _examples(settings, state, HELD_OUT, processor)
    draft = _begin_draft(settings, target, processor)
    checkpoint = _last_checkpoint(state.path / "run")
    arguments = make_arguments(settings, **({} if checkpoint is None else {"resume_from_checkpoint": str(checkpoint)}))
    trainer = DFlashTrainer(target, draft, train, arguments, held_out or None)
    trainer.train()
    # What is served is of the target's dtype; the float32 weights are in run/.
    served: Any = draft
    fresh = state.path / ".draft"
    served.to(target.dtype).save_pretrained(fresh)
    _put(fresh, state.folder("run"))
    facts: dict[str, Any] = {"steps": int(trainer.step), "examples": len(train)}
    return facts


def _bench(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    from dflash_hf.bench.cells import RunSettings
    from dflash_hf.bench.run import run

    folder, questions = state.folder("bench"), state.folder("prepare") / QUESTIONS
    data = settings.bench_data
    if not data:
        rows = _read_rows(state.folder("prepare") / HELD_OUT)
        if not rows:
            return {"questions": 0}
        write_whole(questions, "".join(json.dumps(_question(row), ensure_ascii=False) + "\n" for row in rows))
        data = (str(questions),)
    run(
        RunSettings(
            out=folder,
            data=data,
            num_prompts=settings.bench_prompts,
            target=settings.target,
            draft=str(state.folder("run")),
            max_new_tokens=(settings.max_new_tokens,),
            dtype=(settings.dtype,),
            device=settings.device,
            threads=settings.threads,
            resume=any(folder.iterdir()),
        )
    )
    (drafted,) = (m for m in _summary(folder)["methods"] if m["method"] == "dflash")
    require(drafted["failed"] is None, "answers with the draft", drafted["failed"], "see the bench's folder")
    whole = drafted["all"]
    speedup = whole["speedup"]["ratio"] if whole["speedup"] else None
    return {"acceptance_length": round(whole["acceptance"]["acceptance_length"], 3), "speedup": speedup}


def _export(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    from dflash_hf.cli.convert import load_target_for
    from dflash_hf.drafts import load_draft
    from dflash_hf.training.export import CARD, card, export

    draft = load_draft(state.folder("run"), dtype="auto")
    facts = _card_facts(settings, state)
    here = state.folder("run")
    write_whole(here / CARD, card(draft, facts, "dflash", str(here)))
    refused: dict[str, Any] = {}
    for name in settings.formats:
        refused |= export(draft, state.folder("export"), facts, (name,), load_target_for(settings.target, draft, name))
    return {name: "written" if why is None else f"left out: {why}" for name, why in refused.items()}


RUNNERS: dict[Stage, Callable[[TrainSettings, RunState], dict[str, Any]]] = {
    "prepare": _prepare,
    "regenerate": _regenerate,
    "run": _train,
    "bench": _bench,
    "export": _export,
}


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line that was not written to its end is cut off."""
    require(path.is_file(), "a JSONL file of conversations", str(path), "fix the path")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise ValueError(f"expected JSON in line {number} of {path}, got something else; correct it") from error
        is_row = isinstance(row, dict) and isinstance(row.get("messages"), list) and bool(row["messages"])
        require(is_row, f"messages in line {number} of {path}", row, "give a conversation")
        rows.append({"id": str(row.get("id", f"{path.stem}-{number}")), **row})
    return rows


def _examples(settings: TrainSettings, state: RunState, name: str, processor: Any) -> Sequence[Example]:
    """The examples of a stage's file, those that are too long left out."""
    from dflash_hf.training import ChatDataset

    answered = settings.answers == "target"
    rows = _read_rows(state.folder("regenerate" if answered else "prepare") / name)
    answers = [row["answer_ids"] for row in rows] if answered else None
    every = ChatDataset(rows, processor, answers=answers)
    return [example for example in every if len(example.input_ids) <= settings.max_length]


def make_arguments(settings: TrainSettings, **others: Any) -> Any:
    """Returns the training arguments; the trainer writes to `run`.

    Args:
        settings (`TrainSettings`): What was given of them.
        others: More of them.

    Raises:
        ValueError: If one is out of range.
    """
    return arguments_class()(output_dir=str(settings.output_dir / "run"), **{**settings.arguments, **others})


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    from dflash_hf.training.resume import STATE_FILE, checkpoints

    return next((path for path in reversed(checkpoints(folder)) if (path / STATE_FILE).is_file()), None)


def _begin_draft(settings: TrainSettings, target: PreTrainedModel, processor: Any) -> DFlashDraftModel:
    """The draft to train, in float32."""
    import torch

    from dflash_hf.drafts import load_draft
    from dflash_hf.evaluation.harness import tokenizer_of

    if settings.draft is not None:
        return load_draft(settings.draft, dtype=torch.float32)
    torch.manual_seed(make_arguments(settings).seed)
    return fresh_draft(settings, target, tokenizer_of(processor))


def fresh_draft(settings: TrainSettings, target: Any, tokenizer: Any, **fields: Any) -> DFlashDraftModel:
    """Returns a draft that knows nothing, as the settings want it.

    Args:
        settings (`TrainSettings`): What is asked for.
        target (`PreTrainedModel`): The target; without weights where only the draft's config is wanted.
        tokenizer: The target's, of which the mask token is chosen.
        fields: Fields of the draft's config, such as `mask_token_id`.
    """
    from dflash_hf.modeling_dflash import DFlashDraftModel

    make: Any = getattr(DFlashDraftModel, "from_target", None) or _fresh
    options = {"num_hidden_layers": settings.num_hidden_layers, "block_size": settings.block_size}
    return make(target, tokenizer=tokenizer, **{**options, **settings.draft_options, **fields})


def _fresh(target: Any, *, tokenizer: Any, num_taps: int = 5, **options: Any) -> DFlashDraftModel:
    """Until `DFlashDraftModel.from_target` is there."""
    from dflash_hf.configuration_dflash import DFlashConfig
    from dflash_hf.modeling_dflash import DFlashDraftModel
    from dflash_hf.positions import build_target_layer_ids

    text: Any = target.config.get_text_config()
    options = {"mask_token_id": getattr(tokenizer, "pad_token_id", None) or 0, **options}
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = DFlashConfig(
        **{name: getattr(text, name) for name in shared},
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        num_target_layers=text.num_hidden_layers,
        target_layer_ids=build_target_layer_ids(text.num_hidden_layers, num_taps),
        **options,
    )
    return DFlashDraftModel(config).float()


def _question(row: dict[str, Any]) -> dict[str, Any]:
    """A held-out conversation as a question of a bench: all up to the user's last turn."""
    messages = row["messages"]
    last = max((at for at, turn in enumerate(messages) if turn["role"] == "user"), default=len(messages) - 1)
    return {
        **row,
        "question_id": row["id"],
        "category": row.get("category") or "held out",
        "messages": messages[: last + 1],
    }


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def _card_facts(settings: TrainSettings, state: RunState) -> Any:
    """What the model card tells of the run."""
    from dflash_hf.bench.provenance import PACKAGES, version
    from dflash_hf.training.export import CardFacts, Measured

    measured: list[Measured] = []
    conditions = ""
    if (state.folder("bench") / "summary.json").is_file():
        summary = _summary(state.folder("bench"))
        plain, drafted = (next(m for m in summary["methods"] if m["method"] == name) for name in ("plain", "dflash"))
        for name, block in drafted["sets"].items():
            if block["acceptance"]:
                length = block["acceptance"]["acceptance_length"]
                speed = block["speedup"]["ratio"] if block["speedup"] else None
                told = Measured(
                    dataset=Path(name).name, questions=block["questions"], acceptance_length=length, speedup=speed
                )
                measured.append(told)
        machine = summary["provenance"]["machine"]
        where = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {summary['provenance']['threads']} threads"
        models = next(iter(summary["provenance"]["models"].values()))
        conditions = (
            f"Greedy, batch 1, at most {plain['options']['max_new_tokens']} new tokens, {models['dtype']}, {where}."
        )
    facts = {**state.facts("prepare"), **state.facts("regenerate"), **state.facts("run")}
    facts.pop("seconds", None)
    answers = "in the data" if settings.answers == "data" else "the target's own, "
    if settings.answers == "target":
        answers += "greedy" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
    training = {"answers": answers, **({"begun from": settings.draft} if settings.draft else {})}
    training |= {name.replace("_", " "): value for name, value in facts.items() if name != "answers"}
    training |= {name: value for name, value in settings.made_from("run").items() if name in settings.arguments}
    return CardFacts(
        target=settings.target,
        license=settings.license,
        datasets=settings.dataset,
        measured=measured,
        conditions=conditions,
        training=training,
        versions={name: version(name) for name in PACKAGES},
    )


def _put(fresh: Path, place: Path) -> None:
    """Puts a folder in place of what may be there; a killed process leaves the one or the other."""
    if place.exists():
        shutil.rmtree(place)
    fresh.rename(place)


def _wait() -> None:
    """Waits for the other processes of `accelerate launch`."""
    from dflash_hf.bench.run import Processes

    Processes("auto").wait()


def _explained(error: Exception, settings: TrainSettings, stage: Stage) -> Exception:
    """A sentence for what ends a run whatever its settings: a full disk, a full device."""
    full_disk = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    goes_on = f"dflash-hf train --output-dir {settings.output_dir} goes on"
    if full_disk:
        free = shutil.disk_usage(settings.output_dir).free / 2**20
        what = f"room on the disk of {settings.output_dir} for {stage}"
        return ValueError(f"expected {what}, got {free:,.0f} MB free; free some: {goes_on}")
    if type(error).__name__ == "OutOfMemoryError":
        return ValueError(f"expected {stage} to fit the device, got {one_line(error)}; lower what --plan names")
    return error


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)


def _quiet(line: str) -> None:
    """What processes other than the first tell."""


__all__ = ["RUNNERS", "fresh_draft", "make_arguments", "run_stages"]
assert tuple(RUNNERS) == STAGES
