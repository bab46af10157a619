"""This module runs the stages of `dflash-hf train`. Each stage reads files of earlier ones, and can be continued."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME

from dflash_hf.bench.cells import RunSettings
from dflash_hf.bench.run import Processes, run
from dflash_hf.checkpoints.drafts import load_draft
from dflash_hf.cli.convert import load_target_for
from dflash_hf.cli.push import upload, write_repository
from dflash_hf.cli.train_arguments import arguments_for, evaluation, make_arguments
from dflash_hf.cli.train_card import card_facts
from dflash_hf.cli.train_errors import explained, less_memory
from dflash_hf.cli.train_preflight import (
    answer_settings,
    check_held_out,
    check_prepared,
    clients_of,
    feature_servers,
    fresh_options,
    preflight,
)
from dflash_hf.cli.train_processes import by_the_first
from dflash_hf.cli.train_settings import (
    Stage,
    TrainSettings,
    num_processes,
    process_index,
)
from dflash_hf.cli.train_state import (
    HELD_OUT,
    HELD_OUT_ERRORS,
    TRAIN,
    TRAIN_ERRORS,
    RunState,
    locked,
)
from dflash_hf.cli.train_target import TargetOnce
from dflash_hf.data.row_files import RowFile, write_rows, write_whole
from dflash_hf.devices import execution_device
from dflash_hf.errors import require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import Processor
from dflash_hf.pair.loading import load_processor
from dflash_hf.target_model.parts import end_tokens
from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.chat_template import prepare_multimodal_messages
from dflash_hf.training.checkpoints import whole_checkpoints
from dflash_hf.training.conversations import resolved
from dflash_hf.training.example import Example
from dflash_hf.training.example_files import read_examples
from dflash_hf.training.export import CARD, card, export
from dflash_hf.training.features import FeatureCache
from dflash_hf.training.local_answers import ALONE, Ranks
from dflash_hf.training.own_answers import own_share
from dflash_hf.training.prepare import PrepareSettings, prepare, split_rows
from dflash_hf.training.prompts import PromptSettings, write_prompts
from dflash_hf.training.regenerate import NoAnswersError, regenerate
from dflash_hf.training.steps import share_of
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.vocabulary import frequent_tokens

logger = logging.getLogger(__name__)

QUESTIONS = "held_out_questions.jsonl"
EVERY = "conversations.jsonl"
SELF_PROMPTS = "self_prompts.jsonl"
ADDRESSES = ("http://", "https://", "data:")  # prefixes of images that are no files
# After these stages, memory is freed by garbage collection: a trainer, with its target and optimizer, is in cycles of
# references, and the next stage may load the target again.
TAKE_THE_TARGET = ("regenerate", "run")


def run_stages(
    settings: TrainSettings, stages: Sequence[Stage], redo: bool, tell: Callable[[str], None]
) -> None:
    """Runs stages in their order, except those that are done already.

    Under `accelerate launch`, every process answers, trains and measures its share. The first process does the rest.

    Args:
        settings ([`TrainSettings`]): The settings of the run.
        stages (sequence of `str`): The requested stages, in their order.
        redo (`bool`): Whether stages with changed options may run again even if answers or checkpoints are lost.
        tell (callable): It is called with each line for the user.

    Raises:
        ValueError: If an option cannot be run, the folder does not belong to a run, or another process runs in it. In
            these cases nothing has been written. Also if the disk or the device's memory is full.
    """
    has_layers = not settings.feature_server
    action = "add --stages prepare,regenerate,run,export, and measure where the target runs"
    what = "no bench among --stages with --feature-server"
    require(has_layers or "bench" not in stages, what, ",".join(stages), action)
    num_ranks = settings.tensor_parallel_size
    action = f"start them with torchrun --nproc-per-node {num_ranks}, or accelerate launch"
    what = f"a number of processes that --tensor-parallel-size {num_ranks} divides"
    require(num_processes() % num_ranks == 0, what, num_processes(), action)
    action = (
        "add --stages prepare,regenerate,run,export: each process of a bench loads the whole target"
    )
    what = "no bench among --stages with --tensor-parallel-size"
    require(num_ranks == 1 or "bench" not in stages, what, ",".join(stages), action)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    # The arguments are made now, because they refuse options that are out of range.
    arguments = make_arguments(settings, **evaluation(settings, settings.num_eval > 0))
    state = RunState(settings, stages, redo)
    state.check_folder()
    with ExitStack() as kept:
        # The state of the stages is read after locking, because another process may have ended just now.
        by_the_first(lambda: kept.enter_context(locked(settings.output_dir)))
        _run_pending(settings, arguments, state, tell)


def _run_pending(
    settings: TrainSettings,
    arguments: DFlashTrainingArguments,
    state: RunState,
    tell: Callable[[str], None],
) -> None:
    """Runs the stages that are not done. The folder is locked, so no other command writes to it."""
    is_first = process_index() == 0
    target = TargetOnce(settings)
    preflight(settings, arguments, state, target)
    pending = by_the_first(lambda: _begin(state, tell))
    for stage in state.stages:
        if stage not in pending:
            if is_first:
                tell(f"{stage}: done before, {state.folder(stage)}")
            continue
        # A bench waits for all processes itself and then leaves their group, so no process can wait for the export.
        has_group = stage != "export"
        if not has_group and not is_first:
            continue
        began = time.perf_counter()
        begin = partial(state.write, stage)
        work = partial(_run_stage, stage, settings, arguments, state, target)
        if not has_group:
            begin()
            facts = work()
        elif _is_shared(stage, settings):
            by_the_first(begin)
            facts = work()
        else:
            by_the_first(begin)
            facts = by_the_first(work)
        end = partial(_end_stage, stage, facts, began, state, tell)
        if stage not in ("bench", "export"):
            by_the_first(end)
        elif is_first:
            end()
    if is_first and settings.arguments.get("push_to_hub") and state.is_done("run"):
        tell(f"https://huggingface.co/{_upload(settings, state.folder('run'))}")


def _begin(state: RunState, tell: Callable[[str], None]) -> list[Stage]:
    """Removes outdated files from the folder, and returns the stages to run."""
    if state.outdated:
        tell(f"made again: {', '.join(state.outdated)}; {state.reason}")
    state.discard_outdated()
    pending = state.pending()
    # A command that runs nothing does not store its options: the next command would take or refuse them.
    if pending:
        state.write_settings()
    return pending


def _run_stage(
    stage: Stage,
    settings: TrainSettings,
    arguments: DFlashTrainingArguments,
    state: RunState,
    target: TargetOnce,
) -> dict[str, Any]:
    """Runs a stage, or this process's share of it, and returns facts about it for the user."""
    try:
        facts = RUNNERS[stage](settings, state, target)
    except (OSError, RuntimeError, MemoryError, FloatingPointError) as error:
        less = less_memory(settings, arguments, stage)
        raise explained(error, settings, stage, less) from error
    if stage in TAKE_THE_TARGET:
        clear_device_cache(garbage_collection=True)
    return facts


def _end_stage(
    stage: Stage,
    facts: dict[str, Any],
    began: float,
    state: RunState,
    tell: Callable[[str], None],
) -> None:
    """Records that a stage is done, and prints its facts."""
    state.write(stage, {**facts, "seconds": round(time.perf_counter() - began, 1)})
    tell(f"{stage}: {_told(facts)}, {state.folder(stage)}")


def _is_shared(stage: Stage, settings: TrainSettings) -> bool:
    """Says whether every process does a part of a stage."""
    if stage == "regenerate":
        return settings.answers == "target" and not settings.server
    return stage in ("run", "bench")


def _upload(settings: TrainSettings, draft: Path) -> str:
    """Uploads the draft as `dflash-hf push` does, and returns its id on the Hub."""
    repo: str = settings.arguments["hub_model_id"]
    with TemporaryDirectory(prefix="dflash-push-") as made:
        write_repository(str(draft), Path(made), repo, settings.target, settings.license)
        upload(Path(made), repo, settings.arguments.get("hub_private_repo"))
    return repo


def _prepare(settings: TrainSettings, state: RunState, target: TargetOnce) -> dict[str, Any]:
    folder = state.folder("prepare")
    datasets = list(settings.dataset)
    whole: list[str] = []
    if settings.self_prompts:
        model, processor = target.look()
        written = PromptSettings(
            output=folder / SELF_PROMPTS,
            num_prompts=settings.self_prompts,
            chat_template_kwargs=settings.chat_template_kwargs,
        )
        write_prompts(written, model, processor)
        # `num_prompts` limits only the data.
        whole = [str(written.output)]
        datasets += whole
    found = prepare(
        PrepareSettings(
            datasets=datasets,
            output=folder / EVERY,
            turns="none" if settings.answers == "target" else settings.turns,
            needs_answers=settings.answers == "data",
            num_rows=settings.num_prompts,
            whole=whole,
            max_length=settings.max_length,
            template=settings.template,
            streaming=settings.streaming,
            skip_bad_rows=settings.skip_bad_rows,
            max_image_pixels=settings.max_image_pixels,
            chat_template_kwargs=settings.chat_template_kwargs,
        ),
        load_processor(settings.target),
        # A file of an unfinished stage may be replaced. `RunState` protects the files of a finished stage.
        replaces=True,
    )
    num_train, num_held_out = split_rows(
        folder / EVERY, folder / TRAIN, folder / HELD_OUT, settings.num_eval
    )
    # Rows may be prepared only to be answered.
    if "run" in state.stages:
        check_prepared(settings, folder)
    facts: dict[str, Any] = {"conversations": num_train, "held_out": num_held_out}
    left_out = sum(count for count, _ in found.left_out.values())
    if left_out:
        facts["left_out"] = left_out
    return facts


def _regenerate(settings: TrainSettings, state: RunState, target: TargetOnce) -> dict[str, Any]:
    if settings.answers == "data":
        return {"answers": "those in the data"}
    model: Any
    draft = None
    ranks = ALONE
    if not settings.server:
        if num_processes() > 1:
            num_ranks = settings.tensor_parallel_size
            ranks = Ranks(
                rank=process_index() // num_ranks,
                size=num_processes() // num_ranks,
                wait=Processes("auto").wait,
                writes=process_index() % num_ranks == 0,
            )
        model, processor = target.take()
        if settings.draft is not None:
            # Each of several processes has its own device.
            place = {"": execution_device(model)}
            draft = load_draft(settings.draft, dtype=model.dtype, device_map=place)
    else:
        model = clients_of(settings)
        processor = load_processor(settings.target)
    facts: dict[str, Any] = {}
    for name in (HELD_OUT, TRAIN):
        prompts = state.folder("prepare") / name
        if not prompts.stat().st_size:
            continue
        asked = answer_settings(settings, prompts, state.folder("regenerate") / name)
        try:
            report = regenerate(asked, model, processor, draft, ranks)
        except NoAnswersError as error:
            if name == TRAIN:
                raise
            if "run" in state.stages:
                check_held_out(settings, state.folder("regenerate"))
            facts[HELD_OUT_ERRORS] = len(RowFile(prompts))
            # An error would be raised again in each run of the command, because these prompts are not asked again.
            logger.warning("The draft is trained without an evaluation: %s", error)
            continue
        if name == HELD_OUT and report.num_errors:
            facts[HELD_OUT_ERRORS] = report.num_errors
        if name == TRAIN:
            facts |= {
                "answers": report.num_answers,
                "cut_at_the_limit": report.num_unfinished,
                "tokens": report.num_tokens,
                "tokens_per_second": round(report.tokens_per_second, 1),
            }
            if report.num_errors:
                facts[TRAIN_ERRORS] = report.num_errors
            if report.num_inexact:
                facts["tokenized_otherwise"] = report.num_inexact
    return facts


def _train(settings: TrainSettings, state: RunState, target: TargetOnce) -> dict[str, Any]:
    model, processor = target.take()
    source = state.folder("regenerate" if settings.answers == "target" else "prepare")
    train = _examples(source / TRAIN, processor, settings)
    held_out = _examples(source / HELD_OUT, processor, settings)
    arguments = arguments_for(settings, model, processor, bool(held_out))
    torch.manual_seed(arguments.seed)
    trainer = DFlashTrainer(
        model=_draft_to_train(settings, model, processor, train),
        target=model,
        args=arguments,
        train_dataset=train or None,
        eval_dataset=held_out or None,
    )
    if settings.feature_server:
        for examples in (train, held_out):
            _write_served_features(settings, trainer, examples)
    begun = bool(whole_checkpoints(state.path / "run"))
    facts: dict[str, Any] = {}
    # Only a target with its layers can check whether the answers are its own.
    if arguments.group_index == 0 and not begun and trainer.target.has_layers:
        facts["share_of_own_answers"] = round(own_share(trainer.target, train), 4)
    trainer.train(resume_from_checkpoint=begun)
    fresh = state.path / ".draft"
    trainer.save_model(str(fresh))
    facts |= {"steps": trainer.state.global_step, "examples": len(train)}
    if not trainer.is_world_process_zero():
        return facts
    # The draft is served in the target's dtype. The checkpoints in run/ keep the float32 weights.
    load_draft(fresh, dtype=model.dtype).save_pretrained(fresh)
    (fresh / TRAINING_ARGS_NAME).unlink()  # a pickle, which only the checkpoints in run/ need
    place = state.folder("run")
    if place.exists():
        shutil.rmtree(place)
    fresh.rename(place)  # a killed process leaves one of these folders
    name = "eval_acceptance_length"
    lengths = [record[name] for record in trainer.state.log_history if name in record]
    best = trainer.state.best_metric
    if arguments.load_best_model_at_end and best is not None:
        lengths.append(best)  # the best draft was kept, which may not be the last one
    if lengths:
        facts["acceptance_length"] = round(lengths[-1], 3)
    return facts


def _draft_to_train(
    settings: TrainSettings,
    model: PreTrainedModel,
    processor: Processor,
    train: Sequence[Example],
) -> Any:
    """Returns the draft of `--draft` in float32, or a fresh draft."""
    if settings.draft is not None:
        return load_draft(settings.draft, dtype=torch.float32)
    fields = fresh_options(settings, processor)
    size = settings.draft_vocab_size
    if size is not None:
        fields["draft_token_ids"] = frequent_tokens(train, size, end_tokens(model))
    return DFlashDraftModel.from_target(model, **fields)


def _write_served_features(
    settings: TrainSettings, trainer: DFlashTrainer, examples: Sequence[Example]
) -> None:
    """Lets the servers compute the hidden states of all examples. Each process requests its share."""
    mine = share_of(examples, process_index(), num_processes())
    cache = FeatureCache(str(settings.feature_cache), trainer.args.feature_dtype)
    servers = feature_servers(settings)
    config = trainer.draft.config
    cache.write_served(trainer.target, config, mine, servers, num_writers=num_processes())
    if num_processes() > 1:
        Processes("auto").wait()


def _examples(path: Path, processor: Processor, settings: TrainSettings) -> Sequence[Example]:
    """Returns the examples of a file, or none if the file does not exist or is empty."""
    if not path.is_file() or not path.stat().st_size:
        return []
    return read_examples(path, processor, settings.max_length)


def _bench(settings: TrainSettings, state: RunState, target: TargetOnce) -> dict[str, Any]:
    target.drop()  # the bench loads its own
    folder = state.folder("bench")
    # This is read before the first process can write to the folder.
    resume = folder.is_dir() and any(folder.iterdir())
    data = settings.bench_data
    facts: dict[str, Any] = {}
    if not data:
        held_out = state.folder("prepare") / HELD_OUT
        rows = list(RowFile(held_out))
        questions = [question_of(row, held_out.parent) for row in rows]
        asked = [question for question in questions if question]
        if len(asked) < len(rows):
            facts["left_out"] = len(rows) - len(asked)
        if not asked:
            return {"questions": 0, **facts}
        file = state.folder("prepare") / QUESTIONS
        if process_index() == 0:
            write_rows(file, asked)
        data = (str(file),)
    if num_processes() > 1:
        Processes("auto").wait()
    run(
        RunSettings(
            out=folder,
            data=data,
            # `undrafted` is this package's decoding without the draft. It shows the speed-up of the draft itself.
            methods=("plain", "undrafted", "dflash"),
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
    if process_index() != 0:  # only the first process writes the measurements
        return {}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    (drafted,) = (method for method in summary["methods"] if method["method"] == "dflash")
    failed = drafted["failed"]
    require(failed is None, "answers with the draft", failed, "see the bench's folder")
    whole = drafted["all"]
    speedup = whole["speedup"] or {"ratio": None}
    own_speedup = whole["own_speedup"] or {"ratio": None}
    measured = {
        "acceptance_length": round(whole["acceptance"]["acceptance_length"], 3),
        "speedup": speedup["ratio"],
        "own_speedup": own_speedup["ratio"],
    }
    return {**measured, **facts}


def question_of(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a held-out conversation as a question of a bench: all turns up to the user's last turn, with images.

    The result is empty if a bench cannot ask the question. This is so if the conversation has a video or an image that
    is no file, or if it has only user turns (a bench asks them one by one) and an image after the first turn.
    """
    found = resolved(row, folder)
    messages = found["messages"]
    images = found.pop("images", ())
    of_the_user = [at for at, turn in enumerate(messages) if turn["role"] == "user"]
    last = of_the_user[-1] if of_the_user else len(messages) - 1
    messages = messages[: last + 1]
    has_blocks = any(isinstance(turn["content"], list) for turn in messages)
    if images or has_blocks:
        messages = prepare_multimodal_messages(messages, images)
        all_asked = all(turn["role"] == "user" for turn in messages)
        later = [block["type"] for turn in messages[1:] for block in turn["content"]]
        if all_asked and "image" in later:
            return {}
        blocks = [block for turn in messages for block in turn["content"]]
        if any(block["type"] == "video" for block in blocks):
            return {}
        for block in blocks:
            if block["type"] != "image":
                continue
            block["path"] = block.pop("image")
            if block["path"].startswith(ADDRESSES):
                return {}
    category = row.get("category") or "held out"
    return {**found, "question_id": row["id"], "category": category, "messages": messages}


def _export(settings: TrainSettings, state: RunState, target: TargetOnce) -> dict[str, Any]:
    here = state.folder("run")
    draft = load_draft(here, dtype="auto")
    facts = card_facts(settings, state)
    write_whole(here / CARD, card(draft, facts, "dflash", str(here)))
    folder = state.folder("export")
    told: dict[str, Any] = {}
    refusals: list[str] = []
    for name in settings.formats:
        model = load_target_for(settings.target, draft, name)
        refused = export(draft, folder, facts, name, model)
        told[name] = "written" if refused is None else f"left out: {refused}"
        if refused is not None:
            refusals.append(str(refused))
    if refusals and len(refusals) == len(settings.formats):
        raise ValueError("; ".join(refusals))
    return told


RUNNERS: dict[Stage, Callable[[TrainSettings, RunState, TargetOnce], dict[str, Any]]] = {
    "prepare": _prepare,
    "regenerate": _regenerate,
    "run": _train,
    "bench": _bench,
    "export": _export,
}


def _told(facts: dict[str, Any]) -> str:
    """Returns the facts of a stage as a line for the user."""
    parts = [f"{name.replace('_', ' ')} {_shown(value)}" for name, value in facts.items()]
    return ", ".join(parts) or "done"


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value)
