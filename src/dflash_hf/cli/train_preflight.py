"""This module checks the options of `dflash-hf train` before the first stage, so that errors come in the first minute.

The target is loaded here, because the stages need it anyway. The memory of a training step is not estimated. If the
first step needs too much memory, [`dflash_hf.cli.train_errors`] says which options take less.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, SchedulerType, get_scheduler
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from dflash_hf.bench.sets import load_questions
from dflash_hf.checkpoints.files import read_config, stored_tensors
from dflash_hf.checkpoints.formats import detect_format
from dflash_hf.checkpoints.fresh import fresh_config
from dflash_hf.checkpoints.mapping import make_config
from dflash_hf.cli.train_arguments import arguments_for, asked_evaluations
from dflash_hf.cli.train_errors import is_out_of_memory
from dflash_hf.cli.train_processes import by_the_first
from dflash_hf.cli.train_settings import Stage, TrainSettings
from dflash_hf.cli.train_state import HELD_OUT, TRAIN, RunState
from dflash_hf.cli.train_target import TargetOnce
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.data.row_files import RowFile
from dflash_hf.errors import listed, one_line, require, shown
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import Processor, tokenizer_of
from dflash_hf.pair.loading import load_processor
from dflash_hf.target_model.parts import end_tokens, find_target
from dflash_hf.target_model.support import check_no_stop_strings, check_pair
from dflash_hf.training.answer_rows import RegenerateSettings
from dflash_hf.training.arguments import (
    MUON,
    DFlashTrainingArguments,
    check_metric,
    check_one_gpu,
    loader_options,
)
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.chat_template import ChatTemplate
from dflash_hf.training.checkpoints import whole_checkpoints
from dflash_hf.training.features import FeatureCache, free_bytes
from dflash_hf.training.forward import check_packing
from dflash_hf.training.identity import processor_identity, target_identity
from dflash_hf.training.optimizer import MuonAndAdamW
from dflash_hf.training.served_answers import has_images
from dflash_hf.training.served_features import ServedFeatures
from dflash_hf.training.server import ServerCheck, check_servers
from dflash_hf.training.trainer import DFlashTrainer, num_likely

logger = logging.getLogger(__name__)

GB = 10**9
# The maximum bytes per weight in a checkpoint: the draft and AdamW's two averages in float32. Muon has one average.
CHECKPOINT_BYTES = 12
# The maximum bytes per weight in `draft/` and in each export: float32.
DRAFT_BYTES = 4
TOKEN_BYTES = 8  # the approximate bytes of an answer's token in a JSON file


def preflight(
    settings: TrainSettings,
    arguments: DFlashTrainingArguments,
    state: RunState,
    target: TargetOnce,
) -> None:
    """Checks everything that the pending stages need, before the first of them. Nothing is written.

    With `--tensor-parallel-size`, all processes check the target, because a forward and a hash of it need the share of
    each process.
    """
    needs_target = by_the_first(lambda: _check_without_target(settings, arguments, state))
    if not needs_target:
        return
    if settings.tensor_parallel_size == 1:
        by_the_first(lambda: _check_alone(settings, state, target))
        return
    identity = _identity(settings, target)
    has_draft = by_the_first(lambda: _check_identity(state, identity))
    if not has_draft:
        _check_models(settings, target)


def _check_without_target(
    settings: TrainSettings, arguments: DFlashTrainingArguments, state: RunState
) -> bool:
    """Makes the checks that do not need the target's weights, and returns whether a stage needs the weights."""
    state.check()
    pending = state.pending()
    if not pending:
        return False
    _check_before_loading(settings, arguments, pending)
    if "run" in pending and state.is_done("prepare"):
        check_prepared(settings, state.folder("prepare"))
    is_answered = settings.answers == "target" and state.is_done("regenerate")
    if "run" in pending and "regenerate" not in pending and is_answered:
        check_held_out(settings, state.folder("regenerate"))
    is_answering = settings.answers == "target" and not settings.server
    needs_target = (
        ("prepare" in pending and settings.self_prompts > 0)
        or ("regenerate" in pending and is_answering)
        or "run" in pending
        or "bench" in pending
    )
    if not needs_target:
        state.check_target(processor_identity(load_processor(settings.target)))
    return needs_target


def _check_alone(settings: TrainSettings, state: RunState, target: TargetOnce) -> None:
    """Makes the checks of a process that holds the whole target."""
    has_draft = _check_identity(state, _identity(settings, target))
    if not has_draft:
        _check_models(settings, target)


def _identity(settings: TrainSettings, target: TargetOnce) -> dict[str, str]:
    """Loads the target, refuses a target with stop strings, and returns the hashes that identify the target."""
    try:
        model, processor = target.look()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        advice = "add --dtype bfloat16 or --tensor-parallel-size, or use a larger device"
        raise ValueError(
            f"expected a target that fits the memory, got {one_line(error)}; {advice}"
        ) from error
    check_no_stop_strings(model)
    identity = {**target_identity(model), **processor_identity(processor)}
    if settings.feature_server:
        del identity["weights"]  # only the server has all weights
    return identity


def _check_identity(state: RunState, identity: dict[str, str]) -> bool:
    """Refuses a changed target, and returns whether the draft is trained already."""
    state.check_target(identity)
    return state.is_done("run")


def _check_models(settings: TrainSettings, target: TargetOnce) -> None:
    """Makes the checks of the training that need the target."""
    model, processor = target.look()
    has_held_out = settings.num_eval > 0
    with_models = arguments_for(settings, model, processor, has_held_out)
    _check_with_target(settings, with_models, model, processor)


def _check_before_loading(
    settings: TrainSettings, arguments: DFlashTrainingArguments, pending: Sequence[Stage]
) -> None:
    """Checks what the stages need besides the models: one GPU, held-out rows, an optimizer, servers, sets and others.

    Raises:
        ValueError: If something is missing or wrong. The message names the option that needs it.
    """
    if "prepare" in pending and settings.chat_template_kwargs:
        # The target may write prompts for hours before `prepare` would check these options.
        ChatTemplate(load_processor(settings.target), settings.chat_template_kwargs).check_options()
    if "run" in pending:
        check_one_gpu(arguments)
        _check_evaluation(settings)
        check_metric(arguments, ["eval"])
        _check_reporters(arguments)
        _check_optimizer(arguments)
        _check_schedule(arguments)
        _check_attention(arguments)
        _check_compilation(arguments)
    if "regenerate" in pending and settings.server:
        sampling = answer_settings(settings, Path(), Path()).of_server(0)
        processor = load_processor(settings.target)
        check = ServerCheck(processor, settings.chat_template_kwargs, sampling)
        check_servers(clients_of(settings), check)
    if "bench" in pending:
        folder = None if settings.bench_data_dir is None else Path(settings.bench_data_dir)
        for name in settings.bench_data:
            load_questions(name, data_dir=folder, num_prompts=settings.bench_prompts, seed=0)


def _check_with_target(
    settings: TrainSettings,
    arguments: DFlashTrainingArguments,
    target: PreTrainedModel,
    processor: Processor,
) -> None:
    """Checks whether the draft fits the target, and checks packing, the feature cache, workers, and room on the disk.

    Raises:
        ValueError: If the draft's options are no fields of a config or have values of other types, the draft does not
            fit the target, examples cannot be packed for the target, the feature cache is from another target, no
            workers can be made, or the disk has not enough room.
    """
    _check_loader(arguments)
    found = find_target(target)
    if settings.draft is None:
        config = _fresh_config(settings, target, processor)
    else:
        config = _stored_config(settings.draft)
    check_pair(found, config)
    if settings.packing_length is not None:
        _check_packed_text(processor)
        check_packing(found)
    if settings.feature_server:
        ServedFeatures(feature_servers(settings), config, target.dtype).check()
    elif arguments.feature_cache is not None:
        cache = FeatureCache(arguments.feature_cache, arguments.feature_dtype)
        if cache.is_begun:
            cache.check(found, config, num_likely=num_likely(arguments))
    with torch.device("meta"):
        draft = DFlashDraftModel(config)
    _check_disk(settings, arguments, sum(weight.numel() for weight in draft.parameters()))


def check_prepared(settings: TrainSettings, prepared: Path) -> None:
    """Refuses prepared rows that cannot be trained on with these options, before the target answers them.

    Args:
        prepared (`Path`): The folder of the stage `prepare`.

    Raises:
        ValueError: If rows with images would be packed, or an evaluation has no rows.
    """
    if settings.packing_length is not None:
        _check_packed_rows(prepared / TRAIN)
    check_held_out(settings, prepared)


def check_held_out(settings: TrainSettings, folder: Path) -> None:
    """Refuses a requested evaluation if no conversation is held out, or none of them has an answer.

    Args:
        folder (`Path`): The folder of the stage `prepare` or `regenerate`.
    """
    asked = asked_evaluations(settings)
    file = folder / HELD_OUT
    has_held_out = file.is_file() and file.stat().st_size > 0
    what = f"conversations that are held out in {folder} for {listed(asked, ' and ')}"
    # The options must be switched off explicitly: leaving them out would take them from the folder again.
    without = f"add {' '.join(asked.values())}"
    action = f"take 5 other conversations or more, or {without}"
    errors = file.with_suffix(".errors.jsonl")
    if errors.is_file():
        action = f"see in {errors.name} why the prompts got no answer, or {without}"
    require(has_held_out or not asked, what, 0, action)


def _check_packed_rows(rows: Path) -> None:
    """Refuses to pack rows with images."""
    file = RowFile(rows)
    for at, row in enumerate(file):
        what = f"text alone in {file.where(at)} with --packing-length"
        action = "take other data, or a new --output-dir without --packing-length"
        require(not has_images(row), what, "images", action)


def clients_of(settings: TrainSettings) -> list[OpenAIClient]:
    """Returns clients of the servers that answer prompts."""
    return [OpenAIClient(url, settings.server_model) for url in settings.server]


def feature_servers(settings: TrainSettings) -> list[OpenAIClient]:
    """Returns clients of the servers that compute hidden states."""
    return [OpenAIClient(url) for url in settings.feature_server]


def answer_settings(settings: TrainSettings, prompts: Path, output: Path) -> RegenerateSettings:
    """Returns the settings for answering the prompts in a file."""
    return RegenerateSettings(
        prompts=prompts,
        output=output,
        batch_size=settings.answers_at_once,
        max_new_tokens=settings.max_new_tokens,
        max_length=settings.max_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=settings.answer_seed,
        turns=settings.turns,
    )


def fresh_options(settings: TrainSettings, processor: Processor) -> dict[str, Any]:
    """Returns the arguments of [`DFlashDraftModel.from_target`] for a fresh draft."""
    return {
        "num_hidden_layers": settings.num_hidden_layers,
        "block_size": settings.block_size,
        "tokenizer": tokenizer_of(processor),
        **settings.draft_options,
    }


def _fresh_config(
    settings: TrainSettings, target: PreTrainedModel, processor: Processor
) -> DFlashConfig:
    """Returns the config of a fresh draft."""
    fields = fresh_options(settings, processor)
    size = settings.draft_vocab_size
    if size is not None:
        ends = end_tokens(target)
        what = f"room for the {len(ends)} tokens that end an answer in --draft-vocab-size"
        require(size >= len(ends), what, size, "give a larger one")
        every = target.config.get_text_config(decoder=True).vocab_size
        what = f"fewer than the target's {every} tokens as --draft-vocab-size"
        require(size < every, what, size, "leave it out for all tokens")
        # Any tokens serve here. The frequent tokens are known only when there are answers.
        fields["draft_token_ids"] = range(size)
    names = ("num_taps", "tokenizer", "draft_token_ids")
    options = {name: fields.pop(name) for name in names if name in fields}
    try:
        return fresh_config(target, fields, **options)
    except ValueError:
        raise
    except (
        Exception
    ) as error:  # libraries raise errors of various classes for values of other types
        raise ValueError(
            f"expected values of the fields' types as --draft-options, got {shown(dict(settings.draft_options))} "
            f"({one_line(error)}); correct it"
        ) from error


def _stored_config(draft: str) -> DFlashConfig:
    """Returns the config of a draft in any format, without loading its weights."""
    raw = read_config(draft, {})
    form = detect_format(raw)
    names = {form.our_name(name) for name in stored_tensors(draft)}
    return make_config(form.read_config(raw, frozenset(names)))


def _check_evaluation(settings: TrainSettings) -> None:
    """Refuses requested evaluations if no conversation is held out."""
    asked = asked_evaluations(settings)
    what = f"conversations that are held out for {listed(asked, ' and ')}"
    action = f"give --num-eval 64, or {' '.join(asked.values())}"
    require(settings.num_eval > 0 or not asked, what, settings.num_eval, action)


def _check_reporters(arguments: DFlashTrainingArguments) -> None:
    """Creates the reporters of `--report-to`, as the trainer will, to find out whether they are installed."""
    names: Any = arguments.report_to
    for name in names:
        try:
            for reporter in get_reporting_integration_callbacks([name]):
                reporter()
        except (ImportError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"expected reporters that are installed as --report-to, got {name!r} ({one_line(error)}); install its "
                "package, or leave it out"
            ) from error


def _check_packed_text(processor: Processor) -> None:
    """Refuses packing if the target's processor returns more model inputs than tokens even for text without images."""
    row = {"messages": [{"role": "user", "content": "What is 1 plus 1?"}]}
    example = ChatDataset([row], processor, answers=[[0]])[0]
    got = f"{listed(sorted(example.model_inputs))} of {type(processor).__name__}"
    what = "a target that reads only tokens with --packing-length"
    require(not example.model_inputs, what, got, "leave --packing-length out")


def _check_optimizer(arguments: DFlashTrainingArguments) -> None:
    """Checks that the package of an optimizer is installed. An optimizer of torch is also created, for two weights."""
    weights = nn.Linear(1, 1, device="cpu")
    options: dict[str, Any] = {}
    if arguments.optim == MUON:
        make = partial(MuonAndAdamW, weights, arguments)
    else:
        try:
            kind, options = DFlashTrainer.get_optimizer_cls_and_kwargs(arguments)
        except (ImportError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"expected an optimizer that is installed as --optim, got {str(arguments.optim)!r} "
                f"({one_line(error)}); install its package, or name another"
            ) from error
        # Other optimizers may need a GPU.
        if not kind.__module__.startswith("torch.optim"):
            return
        make = partial(kind, weights.parameters(), **options)
    try:
        make()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected options that the optimizer takes, got {one_line(error)}; correct --adam-..., --weight-decay or "
            "--optim-args"
        ) from error


def _check_schedule(arguments: DFlashTrainingArguments) -> None:
    """Creates the schedule of the learning rate, as the trainer will, and computes rates during and after warm-up."""
    warmup = arguments.get_warmup_steps(1000)
    steps = warmup + 1000  # any number serves, because the real number is not known yet
    optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=arguments.learning_rate)
    options: Any = arguments.lr_scheduler_kwargs
    try:
        schedule: Any = get_scheduler(
            arguments.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=options,
        )
        for factor in schedule.lr_lambdas:
            for step in (0, warmup, warmup + 1, steps):
                factor(step)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        name = SchedulerType(arguments.lr_scheduler_type).value
        raise ValueError(
            f"expected options of the schedule {name} as --lr-scheduler-kwargs, got {options} "
            f"({one_line(error)}); correct them, or use another --lr-scheduler-type"
        ) from error


def _check_attention(arguments: DFlashTrainingArguments) -> None:
    """Refuses FlexAttention on a CPU, because torch has no backward pass for it there."""
    device = arguments.device.type
    is_possible = arguments.attention != "flex" or device != "cpu"
    require(is_possible, "an accelerator for --attention flex", device, "use auto or sdpa")


def _check_compilation(arguments: DFlashTrainingArguments) -> None:
    """Checks that torch knows the backend and the mode of a compilation. Nothing is compiled."""
    if not arguments.torch_compile:
        return
    options: dict[str, Any] = {"backend": arguments.torch_compile_backend}
    if arguments.torch_compile_mode is not None:
        options["mode"] = arguments.torch_compile_mode
    try:
        torch.compile(nn.Identity(), **options)
    except RuntimeError as error:
        raise ValueError(
            f"expected a backend and a mode of torch.compile as --torch-compile-..., got {options} "
            f"({one_line(error)}); correct them, or leave them out"
        ) from error


def _check_loader(arguments: DFlashTrainingArguments) -> None:
    """Creates a loader with the worker options of the trainer. No worker is started."""
    options = loader_options(arguments)
    rows: Any = [0]
    try:
        DataLoader(rows, **options)
    except ValueError as error:
        raise ValueError(
            f"expected options of workers that fit together as --dataloader-..., got {options} ({one_line(error)}); "
            "correct them, or leave them out"
        ) from error


def _check_disk(
    settings: TrainSettings, arguments: DFlashTrainingArguments, num_weights: int
) -> None:
    """Refuses a disk without room for the checkpoints that are kept, the draft, its exports, and some answers.

    Files that the run has written already need no further room.
    """
    out = settings.output_dir
    num_kept = arguments.save_total_limit or 1
    # A new checkpoint is complete before an older one is deleted.
    checkpoints = CHECKPOINT_BYTES * (num_kept + 1) * num_weights
    checkpoints -= _num_bytes(out / "run") - _num_bytes(*whole_checkpoints(out / "run")[num_kept:])
    drafts = DRAFT_BYTES * (1 + len(settings.formats)) * num_weights
    drafts -= _num_bytes(out / ".draft", out / "draft", out / "export")
    answers = (settings.num_prompts or 0) * settings.max_new_tokens * TOKEN_BYTES
    answers -= _num_bytes(out / "answered")
    needed = max(0, checkpoints) + max(0, drafts) + max(0, answers)
    free = free_bytes(settings.output_dir)
    require(
        free >= needed,
        f"{needed / GB:.1f} GB free on the disk of {settings.output_dir} for answers, checkpoints and the draft",
        f"{free / GB:.1f} GB",
        "free some space, name another --output-dir, or keep fewer checkpoints with --save-total-limit 1",
    )


def _num_bytes(*folders: Path) -> int:
    """Returns the bytes of all files in some folders. A folder that does not exist counts as 0."""
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
