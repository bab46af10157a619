"""The stages of `dflash-hf train`: each reads what those before it wrote, and goes on where it was killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.trainer import TRAINING_ARGS_NAME

from dflash_hf.bench.cells import RunSettings
from dflash_hf.bench.provenance import PACKAGES, version
from dflash_hf.bench.run import Processes, run
from dflash_hf.checkpoints.drafts import load_draft
from dflash_hf.cli.convert import load_target_for
from dflash_hf.cli.push import upload, write_repository
from dflash_hf.cli.train_settings import STAGES, Stage, TrainSettings
from dflash_hf.cli.train_state import RunState
from dflash_hf.data.row_files import write_whole
from dflash_hf.errors import one_line, require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import tokenizer_of
from dflash_hf.pair.loading import load_target, takes_images
from dflash_hf.training.answering import RegenerateSettings, regenerate
from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.conversations import resolved
from dflash_hf.training.export import CARD, CardFacts, card, export
from dflash_hf.training.messages import prepare_multimodal_messages
from dflash_hf.training.prepare import PrepareSettings, prepare, read_examples
from dflash_hf.training.prompts import PromptSettings, write_prompts
from dflash_hf.training.server import AnswerServer
from dflash_hf.training.trainer import DFlashTrainer

TRAIN = "train.jsonl"
HELD_OUT = "held_out.jsonl"
QUESTIONS = "held_out_questions.jsonl"
EVERY = "conversations.jsonl"
SELF_PROMPTS = "self_prompts.jsonl"


def run_stages(
    settings: TrainSettings, stages: Sequence[Stage], tell: Callable[[str], None]
) -> None:
    """Runs stages in their order; those that are done are not run again.

    Under `accelerate launch` every process trains and measures its share; the first one does the rest.

    Raises:
        ValueError: If something cannot be run, or the folder is another run's, before anything is written; or if the
            disk or the device's memory is full.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    rank, size = _place()
    tell = tell if rank == 0 else lambda line: None
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
            state.write(stage)
        facts: dict[str, Any] = {}
        try:
            if rank == 0 or stage in ("run", "bench"):
                facts = RUNNERS[stage](settings, state)
        except (OSError, RuntimeError) as error:
            raise _explained(error, settings, stage) from error
        # A bench waits itself, and leaves the group
        if size > 1 and stage not in ("bench", "export"):
            Processes("auto").wait()
        if rank == 0:
            state.write(stage, {**facts, "seconds": round(time.perf_counter() - began, 1)})
        told = ", ".join(
            f"{name.replace('_', ' ')} {_shown(value)}" for name, value in facts.items()
        )
        tell(f"{stage}: {told or 'done'}, {state.folder(stage)}")
    if rank == 0 and settings.arguments.get("push_to_hub") and state.is_done("run"):
        tell(f"https://huggingface.co/{_upload(settings, state.folder('run'))}")


def _upload(settings: TrainSettings, draft: Path) -> str:
    """Does what `dflash-hf push` does, and returns the draft's id."""
    repo: str = settings.arguments["hub_model_id"]
    with TemporaryDirectory(prefix="dflash-push-") as made:
        write_repository(str(draft), Path(made), repo, settings.target, settings.license)
        upload(Path(made), repo, settings.arguments.get("hub_private_repo"))
    return repo


def _prepare(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    folder = state.folder("prepare")
    datasets = list(settings.dataset)
    if settings.self_prompts:
        target, processor = load_target(settings.target, settings.dtype, settings.device)
        written = PromptSettings(
            output=folder / SELF_PROMPTS,
            num_prompts=settings.self_prompts,
            chat_template_kwargs=settings.chat_template_kwargs,
        )
        write_prompts(written, target, processor)
        datasets.append(str(written.output))
    found = prepare(
        PrepareSettings(
            datasets=datasets,
            output=folder / EVERY,
            turns="none" if settings.answers == "target" else settings.turns,
            num_rows=settings.num_prompts,
            **_same(
                settings,
                "max_length",
                "template",
                "streaming",
                "skip_bad_rows",
                "chat_template_kwargs",
            ),
        ),
        load_processor(settings.target),
    )
    lines = [line for line in (folder / EVERY).read_text(encoding="utf-8").split("\n") if line]
    most = max(0, min(settings.num_eval, len(lines) // 5))
    # Every so many: the rows of a file are often sorted by what they are about.
    chosen = {at * len(lines) // most for at in range(most)}
    for name, is_chosen in ((TRAIN, False), (HELD_OUT, True)):
        part = [line for at, line in enumerate(lines) if (at in chosen) == is_chosen]
        write_whole(folder / name, "".join(f"{line}\n" for line in part))
    left_out = sum(count for count, _ in found.left_out.values())
    facts: dict[str, Any] = {"conversations": len(lines) - most, "held_out": most}
    return facts | ({"left_out": left_out} if left_out else {})


def _same(settings: TrainSettings, *names: str) -> dict[str, Any]:
    """Settings that a stage has under the same names."""
    return {name: getattr(settings, name) for name in names}


def load_processor(target: str) -> Any:
    """Loads what encodes a target's prompts, and no weights."""
    sees = takes_images(AutoConfig.from_pretrained(target))
    return (AutoProcessor if sees else AutoTokenizer).from_pretrained(target)


def _regenerate(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    if settings.answers == "data":
        return {"answers": "those in the data"}
    target: Any
    draft = None
    if settings.server is None:
        target, processor = load_target(settings.target, settings.dtype, settings.device)
        if settings.draft is not None:
            draft = load_draft(settings.draft, dtype=target.dtype, device_map=settings.device)
    else:
        target = AnswerServer(settings.server, settings.server_model)
        processor = load_processor(settings.target)
    facts: dict[str, Any] = {}
    for name in (HELD_OUT, TRAIN):
        prompts = state.folder("prepare") / name
        if not prompts.stat().st_size:
            continue
        report = regenerate(
            RegenerateSettings(
                prompts=prompts,
                output=state.folder("regenerate") / name,
                batch_size=settings.answer_batch,
                **_same(settings, "max_new_tokens", "max_length", "temperature", "top_p", "turns"),
            ),
            target,
            processor,
            draft,
        )
        if name == TRAIN:
            facts = {"answers": report.num_answers, "cut_at_the_limit": report.num_unfinished}
            facts["tokens"] = report.num_tokens
    return facts


def _train(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    target, processor = load_target(settings.target, settings.dtype, settings.device)
    source = state.folder("regenerate" if settings.answers == "target" else "prepare")
    train, held_out = (
        read_examples(path, processor, settings.max_length)
        if path.is_file() and path.stat().st_size
        else None
        for path in (source / TRAIN, source / HELD_OUT)
    )
    others: dict[str, Any] = {}
    if held_out is not None and "eval_strategy" not in settings.arguments:
        others["eval_strategy"] = "epoch"
    if not {"bf16", "fp16"} & settings.arguments.keys() and target.dtype == torch.bfloat16:
        others["bf16"] = True  # as the target computes, over weights in float32
    arguments = make_arguments(settings, **others)
    draft: Any
    if settings.draft is not None:
        draft = load_draft(settings.draft, dtype=torch.float32)
    else:
        torch.manual_seed(arguments.seed)
        options: dict[str, Any] = {
            "num_hidden_layers": settings.num_hidden_layers,
            "block_size": settings.block_size,
        }
        options |= {"tokenizer": tokenizer_of(processor), **settings.draft_options}
        draft = DFlashDraftModel.from_target(target, **options)
    trainer = DFlashTrainer(
        model=draft, target=target, args=arguments, train_dataset=train, eval_dataset=held_out
    )
    begun = any((state.path / "run").glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=begun)
    best = [
        row["eval_acceptance_length"]
        for row in trainer.state.log_history
        if "eval_acceptance_length" in row
    ]
    fresh = state.path / ".draft"
    trainer.save_model(str(fresh))
    facts: dict[str, Any] = {"steps": trainer.state.global_step, "examples": len(train or ())}
    if not trainer.is_world_process_zero():
        return facts
    # What is served is of the target's dtype; the float32 weights are in run/.
    load_draft(fresh, dtype=target.dtype).save_pretrained(fresh)
    (fresh / TRAINING_ARGS_NAME).unlink()  # a pickle, which only the checkpoints in run/ need
    if (place := state.folder("run")).exists():
        shutil.rmtree(place)
    fresh.rename(place)  # a killed process leaves the one or the other
    return facts | ({"acceptance_length": round(best[-1], 3)} if best else {})


def _bench(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    folder = state.folder("bench")
    questions = state.folder("prepare") / QUESTIONS
    data = settings.bench_data
    left_out = dict[str, int]()
    rank, size = _place()
    # Asked before the first process can write there
    resume = folder.is_dir() and any(folder.iterdir())
    if not data:
        path = state.folder("prepare") / HELD_OUT
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        if not rows:
            return {"questions": 0}
        asked = [question for row in rows if (question := _question(row, path.parent)) is not None]
        left_out = {"left_out": len(rows) - len(asked)} if len(asked) < len(rows) else {}
        if not asked:
            return {"questions": 0, **left_out}
        text = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in asked)
        if rank == 0:
            write_whole(questions, text)
        data = (str(questions),)
    if size > 1:
        Processes("auto").wait()
    run(
        RunSettings(
            out=folder,
            data=data,
            data_dir=None if settings.bench_data_dir is None else Path(settings.bench_data_dir),
            num_prompts=settings.bench_prompts,
            target=settings.target,
            draft=str(state.folder("run")),
            max_new_tokens=(settings.max_new_tokens,),
            template_options=settings.chat_template_kwargs,
            dtype=(settings.dtype,),
            device=settings.device,
            threads=settings.threads,
            resume=resume,
        )
    )
    if rank != 0:  # the first one writes what was measured
        return {}
    (drafted,) = (m for m in _summary(folder)["methods"] if m["method"] == "dflash")
    require(
        drafted["failed"] is None,
        "answers with the draft",
        drafted["failed"],
        "see the bench's folder",
    )
    whole = drafted["all"]
    speedup = whole["speedup"]["ratio"] if whole["speedup"] else None
    return {
        "acceptance_length": round(whole["acceptance"]["acceptance_length"], 3),
        "speedup": speedup,
        **left_out,
    }


def _export(settings: TrainSettings, state: RunState) -> dict[str, Any]:
    draft = load_draft(state.folder("run"), dtype="auto")
    facts = _card_facts(settings, state)
    here = state.folder("run")
    write_whole(here / CARD, card(draft, facts, "dflash", str(here)))
    folder = state.folder("export")
    refused = {
        name: export(draft, folder, facts, name, load_target_for(settings.target, draft, name))
        for name in settings.formats
    }
    if refused and all(refused.values()):
        raise ValueError("; ".join(map(str, refused.values())))
    return {name: "written" if why is None else f"left out: {why}" for name, why in refused.items()}


RUNNERS: dict[Stage, Callable[[TrainSettings, RunState], dict[str, Any]]] = {
    "prepare": _prepare,
    "regenerate": _regenerate,
    "run": _train,
    "bench": _bench,
    "export": _export,
}


def make_arguments(settings: TrainSettings, **others: Any) -> Any:
    """Returns the training arguments; the trainer writes to `run`.

    Raises:
        ValueError: If one is out of range.
    """
    # Without it Transformers takes bfloat16 for a request for a GPU.
    given: dict[str, Any] = {
        "use_cpu": not torch.accelerator.is_available(),
        **settings.arguments,
        **others,
    }
    # The trainer would upload `run`; the draft is, behind the last stage
    given["push_to_hub"] = False
    return DFlashTrainingArguments(output_dir=str(settings.output_dir / "run"), **given)


def _question(row: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """A held-out conversation as a question of a bench: all up to the user's last turn, each image in its turn.

    `None` where an image is no file: a bench reads nothing else.
    """
    found = resolved(row, folder)
    messages = found["messages"]
    images = found.pop("images", ())
    last = max(
        (at for at, turn in enumerate(messages) if turn["role"] == "user"),
        default=len(messages) - 1,
    )
    messages = messages[: last + 1]
    if images or any(isinstance(turn["content"], list) for turn in messages):
        messages = prepare_multimodal_messages(messages, images)
        for block in (
            block for turn in messages for block in turn["content"] if block["type"] == "image"
        ):
            block["path"] = block.pop("image")
            if block["path"].startswith(("http://", "https://", "data:")):
                return None
    category = row.get("category") or "held out"
    return {**found, "question_id": row["id"], "category": category, "messages": messages}


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def _card_facts(settings: TrainSettings, state: RunState) -> Any:
    """What the model card tells of the run."""
    measured = dict[str, Any]()
    conditions = ""
    if (state.folder("bench") / "summary.json").is_file():
        summary = _summary(state.folder("bench"))
        plain, drafted = (
            next(m for m in summary["methods"] if m["method"] == name)
            for name in ("plain", "dflash")
        )
        measured = drafted["sets"]
        machine = summary["provenance"]["machine"]
        where = (
            ", ".join(machine["gpus"])
            or f"{machine['cpu']}, {summary['provenance']['threads']} threads"
        )
        models = next(iter(summary["provenance"]["models"].values()))
        most = plain["options"]["max_new_tokens"]
        conditions = f"Greedy, batch 1, at most {most} new tokens, {models['dtype']}, {where}."
    facts = {**state.facts("prepare"), **state.facts("regenerate"), **state.facts("run")}
    facts.pop("seconds", None)
    answers = "in the data" if settings.answers == "data" else "the target's own, "
    if settings.answers == "target":
        answers += (
            "greedy" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
        )
    training = {"answers": answers, **({"begun from": settings.draft} if settings.draft else {})}
    training |= {
        name.replace("_", " "): value for name, value in facts.items() if name != "answers"
    }
    if settings.chat_template_kwargs:
        training["chat template reads"] = json.dumps(settings.chat_template_kwargs)
    training |= {
        name: value
        for name, value in settings.made_from("run").items()
        if name in settings.arguments
    }
    return CardFacts(
        target=settings.target,
        license=settings.license,
        datasets=settings.dataset,
        measured=measured,
        conditions=conditions,
        training=training,
        versions={name: version(name) for name in PACKAGES},
    )


def _place() -> tuple[int, int]:
    """Which of how many processes of `accelerate launch` this is."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _explained(error: Exception, settings: TrainSettings, stage: Stage) -> Exception:
    """A sentence for what ends a run whatever its settings: a full disk, a full device."""
    full_disk = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    goes_on = f"dflash-hf train --output-dir {settings.output_dir} goes on"
    if full_disk:
        free = shutil.disk_usage(settings.output_dir).free / 2**20
        what = f"room on the disk of {settings.output_dir} for {stage}"
        return ValueError(f"expected {what}, got {free:,.0f} MB free; free some: {goes_on}")
    if type(error).__name__ == "OutOfMemoryError":
        return ValueError(
            f"expected {stage} to fit the device, got {one_line(error)}; lower what --plan names"
        )
    return error


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


assert tuple(RUNNERS) == STAGES
