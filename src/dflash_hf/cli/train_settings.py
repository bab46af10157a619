"""This module defines the options of `dflash-hf train`, their checks, and the options on which each stage depends.

[`TrainSettings`] lists all options: each field is an option, with its type, its default and its help. The order of the
fields is the order of `--help`. Nothing here imports torch or Transformers, so that `--help` and the error for a
missing target come without delay.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dflash_hf.bench.sets import set_name
from dflash_hf.checkpoints.names import FormatName
from dflash_hf.data.sampling import ALLOWED, check_sampling
from dflash_hf.data.sources import FILES, full_name
from dflash_hf.errors import listed, require, shown
from dflash_hf.pair.loading import check_place

Stage = Literal["prepare", "regenerate", "run", "bench", "export"]
STAGES: tuple[Stage, ...] = get_args(Stage)
FORMATS: tuple[FormatName, ...] = ("zlab", "speculators", "muse")

# The headings of `--help`, in their order.
TRAINING = "Draft and training"
DATA = "Data"
ANSWERS = "Answers"
OUTPUT = "Output"
MACHINE = "Machine"

MAX_NEW_TOKENS = 1024
TARGET_BATCH = 32  # prompts that the target answers at once
SERVER_BATCH = 128  # requests in flight at each server


def option(panel: str, help: str, default: Any = MISSING) -> Any:
    """Returns a dataclass field that is an option of the command. Its help appears under the heading `panel`."""
    metadata = {"help": help, "panel": panel}
    if isinstance(default, dict):
        return field(default_factory=dict[str, Any], metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings of a run. Each field with a help is an option of the command.

    Fields that `DFlashTrainingArguments` also has have the same defaults there (tests/training/test_command.py).

    Args:
        output_dir (`Path`): The folder of the whole run.
        arguments (mapping): The other given fields of `DFlashTrainingArguments`.
    """

    target: str = option(TRAINING, "Folder or Hub id of the target.")
    draft: str | None = option(
        TRAINING, "Draft to train further. Without this option a new draft is trained.", None
    )
    loss: str = option(
        TRAINING,
        "Training loss: dpace, cross_entropy, kl, tv, or lk. docs/training.md explains them.",
        "dpace",
    )
    algorithm: str = option(
        TRAINING,
        "Recipe for a new draft. Each recipe sets some options (docs/training.md). dflash sets --loss dpace. dflash2 "
        "sets conv_kernel_size 2, conv_group_size 16, selector_rank 256 and selector_top_k 16 in --draft-options. "
        "dspark sets markov_rank 256 and sample_from_anchor true in --draft-options. jetspec is for trees: several "
        "guesses for one position. It sets --loss kl, and is_causal true in --draft-options.",
        "dflash",
    )
    answers: Literal["target", "data"] = option(
        TRAINING,
        "target: the target answers the prompts. data: the answers in the data are used. The target must have written "
        "these answers.",
        "target",
    )
    labels: str = option(
        TRAINING,
        "tokens: learn the answers. target: learn the target's argmax at each position.",
        "tokens",
    )
    num_anchors: int = option(
        TRAINING,
        "Maximum number of blocks per sequence. A block begins at a random token, its anchor. Each step draws "
        "new anchors.",
        512,
    )
    block_size: int = option(
        TRAINING,
        "Number of tokens per block of a new draft. The first token, the anchor, is already known.",
        16,
    )
    num_hidden_layers: int = option(TRAINING, "Number of layers of a new draft.", 5)
    draft_options: Mapping[str, Any] = option(
        TRAINING, "Other fields of a new draft's config, as JSON: '{\"num_taps\": 4}'.", {}
    )
    draft_vocab_size: int | None = option(
        TRAINING,
        "Vocabulary size of a new draft, which then proposes only the most frequent tokens. Default: all tokens.",
        None,
    )
    attention: str = option(
        TRAINING,
        "Attention in training: flex, sdpa or auto. auto is flex on CUDA and sdpa elsewhere.",
        "auto",
    )
    packing_length: int | None = option(
        TRAINING, "Pack examples into rows of this many tokens, instead of padding them.", None
    )
    learning_rate: float = option(TRAINING, "Peak learning rate.", 6e-4)
    lr_scheduler_type: str = option(TRAINING, "Schedule of the learning rate.", "cosine")
    warmup_steps: float = option(
        TRAINING, "Number of warm-up steps. A number below 1 is a share of all steps.", 0.04
    )
    num_train_epochs: float = option(TRAINING, "Number of passes over the examples.", 6.0)
    per_device_train_batch_size: int = option(
        TRAINING, "Number of sequences per device and forward pass.", 4
    )
    gamma: float | None = option(
        TRAINING,
        "Later tokens of a block count less in the loss. A larger gamma makes this difference smaller. --loss dpace "
        "does not use gamma. The default depends on the block size.",
        None,
    )

    dataset: tuple[str, ...] = option(
        DATA,
        "Conversations: files, or Hub datasets as ORG/NAME:CONFIG:SPLIT, separated by commas.",
        (),
    )
    num_prompts: int | None = option(
        DATA, "Number of conversations taken from each set; default: all.", None
    )
    self_prompts: int = option(
        DATA, "Number of prompts that the target writes itself, in addition to the data.", 0
    )
    num_eval: int = option(DATA, "Number of conversations that are held out.", 64)
    max_length: int = option(DATA, "Longest example in tokens, prompt and answer together.", 3072)
    turns: Literal["last", "all"] = option(
        DATA, "Answers of a conversation to train on: last or all.", "last"
    )
    chat_template_kwargs: Mapping[str, Any] = option(
        DATA, "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'.", {}
    )
    template: str | None = option(
        DATA,
        "Text of the user message, for rows that have none of these columns: messages, prompt, turns, conversations. "
        "Write column names in braces: '{question}'.",
        None,
    )
    skip_bad_rows: bool = option(
        DATA,
        "Skip malformed rows. Without this option a malformed row ends the command with an error.",
        False,
    )
    max_image_pixels: int | None = option(
        DATA,
        "Largest image in pixels, width times height. Larger images are shrunk. Default: images stay as they are.",
        None,
    )
    streaming: bool = option(DATA, "Read Hub datasets row by row, without a copy on disk.", False)

    max_new_tokens: int = option(
        ANSWERS, "Longest answer in tokens, also in the bench stage.", MAX_NEW_TOKENS
    )
    temperature: float = option(ANSWERS, "Temperature of the answers; 0 is greedy.", 0.0)
    top_p: float = option(ANSWERS, "Nucleus sampling.", 1.0)
    top_k: int = option(ANSWERS, "Top-k sampling; 0 is off.", 0)
    min_p: float = option(
        ANSWERS,
        "Lowest probability of a sampled token, as a share of the probability of the most likely token.",
        0.0,
    )
    answer_seed: int = option(
        ANSWERS, "Seed of sampled answers. A server gets this seed plus the number of the row.", 0
    )
    server: tuple[str, ...] = option(
        ANSWERS,
        "URLs of OpenAI-style servers that run the target, separated by commas.",
        (),
    )
    server_model: str | None = option(
        ANSWERS,
        "Name of the target on the server; default: the first model that the server lists.",
        None,
    )

    output_dir: Path = option(  # noqa: RUF009  (it makes a field)
        OUTPUT, "Folder of the run. An earlier run in this folder is continued."
    )
    bench_data: tuple[str, ...] = option(
        OUTPUT,
        "Sets of questions for the bench stage, separated by commas; default: the held-out conversations.",
        (),
    )
    bench_data_dir: str | None = option(
        OUTPUT,
        "Folder with the files of the --bench-data sets. With this option nothing is read from the Hub.",
        None,
    )
    bench_prompts: int = option(OUTPUT, "Number of questions of each set.", 32)
    formats: tuple[FormatName, ...] = option(
        OUTPUT, "Formats that the export stage writes, separated by commas.", FORMATS
    )
    license: str | None = option(OUTPUT, "License of the draft, for the model card.", None)

    answer_batch: int | None = option(
        MACHINE, "Number of prompts answered at once; default: 32, or 128 per server.", None
    )
    chunk_blocks: int = option(MACHINE, "Number of blocks whose logits are in memory at once.", 128)
    feature_cache: str | None = option(
        MACHINE,
        "Folder to store the target's hidden states, so that they are computed only once. Default: each epoch "
        "computes them again.",
        None,
    )
    feature_dtype: str = option(
        MACHINE,
        "How --feature-cache stores the hidden states. auto: in the target's dtype. float8: rounded to 8 bits, in "
        "half the space of bfloat16.",
        "auto",
    )
    feature_server: tuple[str, ...] = option(
        MACHINE,
        "URLs of vLLM servers that compute the target's hidden states, separated by commas. The training then loads "
        "only the embedding and the head of the target.",
        (),
    )
    tensor_parallel_size: int = option(
        MACHINE,
        "Number of processes that hold one target together, each with a share of every layer; for a target that is "
        "larger than a GPU. Start this many processes or a multiple of it.",
        1,
    )
    dtype: str = option(MACHINE, "torch dtype of the target, or auto.", "auto")
    device: str = option(MACHINE, "Device map of the target, or auto.", "auto")
    threads: int | None = option(MACHINE, "Number of CPU threads.", None)

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self) -> None:
        """Refuses settings that cannot be run, before anything is read or loaded.

        Raises:
            ValueError: If a setting is refused. The message names the first such setting.
        """
        self._check_places()
        for name, least in LEAST.items():
            value = getattr(self, name)
            is_enough = value is None or value >= least
            require(is_enough, f"at least {least} as {flag(name)}", value, "give a larger one")
        check_sampling({name: getattr(self, name) for name in ALLOWED}, flag)
        for name, allowed in (("turns", ("last", "all")), ("answers", ("target", "data"))):
            value = getattr(self, name)
            what = f"{flag(name)} {' or '.join(allowed)}"
            require(value in allowed, what, value, "choose one of them")
        for name in self.formats:
            known = f"--formats among {', '.join(FORMATS)}"
            require(name in FORMATS, known, name, "leave it out, or use dflash-hf convert")
        names = ("draft_token_ids", "draft_vocab_size")
        twice = [name for name in names if name in self.draft_options]
        is_said_once = self.draft_vocab_size is None or not twice
        what = f"no {listed(twice)} in --draft-options beside --draft-vocab-size"
        require(is_said_once, what, self.draft_vocab_size, "leave one of them out")
        _check_urls("server", self.server)
        _check_urls("feature_server", self.feature_server)
        if self.feature_server:
            self._check_without_layers()
        if self.tensor_parallel_size > 1:
            self._check_shared_target()
        packed = self.packing_length
        has_room = packed is None or packed >= self.max_length
        what = f"--packing-length of {self.max_length} (--max-length) or more"
        require(has_room, what, packed, "give a smaller --max-length, or pack longer rows")
        are_answered = self.answers == "target" or self.self_prompts == 0
        what = "no --self-prompts with --answers data"
        require(are_answered, what, self.self_prompts, "let the target answer (--answers target)")

    def _check_without_layers(self) -> None:
        """Refuses options that need the target's layers, because only a server has them."""
        have_place = self.feature_cache is not None
        action = "name a folder for the hidden states"
        require(have_place, "--feature-cache with --feature-server", None, action)
        is_answered = bool(self.server) or self.answers == "data"
        action = "let a server answer too, or give the target's own answers"
        what = "--server or --answers data with --feature-server"
        require(is_answered, what, None, action)
        what = "no --self-prompts with --feature-server"
        require(self.self_prompts == 0, what, self.self_prompts, "give a --dataset")
        is_of_tokens = self.loss in ("dpace", "cross_entropy") and self.labels == "tokens"
        got = f"--loss {self.loss} --labels {self.labels}"
        action = "leave them out: the server gives hidden states, and no next tokens"
        what = "--loss dpace or cross_entropy with --labels tokens beside --feature-server"
        require(is_of_tokens, what, got, action)
        what = "no --packing-length with --feature-server"
        action = "leave it out: the target cannot be tried here"
        require(self.packing_length is None, what, self.packing_length, action)

    def _check_shared_target(self) -> None:
        """Refuses options that do not work with a target that several processes hold together."""
        beside = "with --tensor-parallel-size"
        action = "leave one of them out: the server runs the target's layers"
        urls = ",".join(self.feature_server)
        require(not self.feature_server, f"no --feature-server {beside}", urls, action)
        action = "give a --dataset"
        require(self.self_prompts == 0, f"no --self-prompts {beside}", self.self_prompts, action)
        action = "leave it out: each process takes its own accelerator"
        require(self.device == "auto", f"no --device {beside}", self.device, action)

    def _check_places(self) -> None:
        """Refuses a target, data or folders that do not exist."""
        check_place("--target", self.target)
        for source in self.dataset:
            check_place("--dataset", source)
            is_missing = source.endswith(FILES) and not Path(source).exists()
            require(not is_missing, "a file as --dataset", source, "fix the path")
        if self.draft is not None:
            check_place("--draft", self.draft)
        require(
            bool(self.dataset) or self.self_prompts > 0,
            "conversations as --dataset",
            None,
            "give files or a Hub id, or let the target write its own prompts with --self-prompts 10000",
        )
        is_file = self.output_dir.exists() and not self.output_dir.is_dir()
        require(not is_file, "a folder as --output-dir", str(self.output_dir), "name another")
        if self.bench_data_dir is not None:
            is_folder = Path(self.bench_data_dir).is_dir()
            what = "a folder of sets as --bench-data-dir"
            require(is_folder, what, self.bench_data_dir, "fix the path")

    def check_idle(self, given: Collection[str]) -> None:
        """Refuses a given option that has no effect because of another option.

        Args:
            given (collection of `str`): The names of the options that were given.

        Raises:
            ValueError: If an option has no effect. The message names the first such option.
        """
        is_fresh = self.draft is None
        is_answered = self.answers == "target"
        is_sampled = self.temperature > 0
        for names, has_effect, where in (
            (
                OF_A_FRESH_DRAFT,
                is_fresh,
                "without --draft, because the draft's config has this value",
            ),
            (
                OF_THE_ANSWERS,
                is_answered,
                "with --answers target, because the answers in the data are not changed",
            ),
            (OF_SAMPLES, is_sampled, "with a --temperature above 0"),
            (("server_model",), bool(self.server), "with --server"),
            (("num_prompts",), bool(self.dataset), "with --dataset"),
            (("gamma",), self.loss != "dpace", "with another --loss than dpace"),
            (("feature_dtype",), self.feature_cache is not None, "with --feature-cache"),
            (("num_train_epochs",), self.arguments.get("max_steps", 0) <= 0, "without --max-steps"),
            (("bench_data_dir",), bool(self.bench_data), "with --bench-data"),
            (
                ("template",),
                self.self_prompts == 0,
                "without --self-prompts, for rows with other columns",
            ),
        ):
            idle = [name for name in names if name in given and not has_effect]
            if idle:
                value = getattr(self, idle[0])
                raise ValueError(
                    f"expected {flag(idle[0])} {where}, got {shown(value)}; {LEAVE_OUT}"
                )
        steps = self.arguments.get("eval_steps")
        # `--eval-strategy no` is allowed: a run without held-out rows continues with it
        has_steps = steps is None or self.arguments.get("eval_strategy") != "epoch"
        require(has_steps, "--eval-steps without --eval-strategy epoch", steps, LEAVE_OUT)

    def plain(self) -> dict[str, Any]:
        """Returns all settings as values for YAML and JSON. They can be a `--config` in any working folder."""
        found = asdict(self)
        arguments = found.pop("arguments")
        arguments = {name: _resolved_in(name, value) for name, value in arguments.items()}
        for name in ("target", "draft"):
            found[name] = found[name] and _resolved(found[name])
        for name in ("output_dir", "feature_cache", "bench_data_dir"):
            found[name] = found[name] and str(Path(found[name]).resolve())
        found["dataset"] = map(full_name, self.dataset)
        found["bench_data"] = map(set_name, self.bench_data)
        for name in ("dataset", "server", "feature_server", "bench_data", "formats"):
            found[name] = list(found[name])
        return {**found, **arguments}

    @property
    def answers_at_once(self) -> int:
        """The number of prompts that are answered at once, or by each server at once if servers answer."""
        if self.answer_batch is not None:
            return self.answer_batch
        if self.server:
            return SERVER_BATCH
        return TARGET_BATCH

    def asked(self) -> dict[str, Any]:
        """Returns [`plain`] without the settings that have their default value."""
        unasked = TrainSettings(target="", output_dir=Path()).plain()
        del unasked["output_dir"]
        return {
            name: value
            for name, value in self.plain().items()
            if name not in unasked or value != unasked[name]
        }

    def made_from(self, stage: Stage) -> dict[str, Any]:
        """Returns the options on which a stage's output depends, as plain values, without those of its inputs."""
        plain = self.plain()
        found = {name: plain[name] for name in MADE_FROM[stage]}
        # Answers in the data are not cut, so this length is then only for the answers of the bench.
        is_of_the_bench = self.answers == "data"
        if is_of_the_bench and stage == "regenerate":
            found["max_new_tokens"] = MAX_NEW_TOKENS
        if is_of_the_bench and stage == "bench":
            found["max_new_tokens"] = self.max_new_tokens
        if stage == "run":
            keeps_best = bool(self.arguments.get("load_best_model_at_end"))
            how = HOW_IT_IS_RUN if keeps_best else (*HOW_IT_IS_RUN, *WHEN_IT_IS_MEASURED)
            found |= {name: plain[name] for name in self.arguments if not name.startswith(how)}
            # Eight processes equal one that accumulates eight batches. Processes that share a target count as one.
            accumulated = int(found.pop("gradient_accumulation_steps", 1))
            num_groups = num_processes() // self.tensor_parallel_size
            found[BATCHES_PER_STEP] = num_groups * accumulated
        return found


# The options of a run are taken from its folder again, unless a `--config` is given.
LEAVE_OUT = "leave one of them out; of a run that began with it, name a --config without it, or a new --output-dir"
BATCHES_PER_STEP = "processes x gradient_accumulation_steps"
LEAST = {
    "num_prompts": 1,
    "max_image_pixels": 1,
    "self_prompts": 0,
    "num_eval": 0,
    "max_length": 2,
    "block_size": 2,
    "draft_vocab_size": 1,
    "max_new_tokens": 1,
    "answer_seed": 0,
    "answer_batch": 1,
    "num_hidden_layers": 1,
    "bench_prompts": 1,
    "threads": 1,
    "tensor_parallel_size": 1,
}
OF_A_FRESH_DRAFT = (
    "algorithm",
    "draft_vocab_size",
    "block_size",
    "num_hidden_layers",
    "draft_options",
)
OF_SAMPLES = ("top_p", "top_k", "min_p", "answer_seed")
OF_THE_ANSWERS = ("server", "server_model", "temperature", *OF_SAMPLES)
# Fields that `DFlashTrainingArguments` also has, with the same meaning.
OF_THE_TRAINER = (
    "loss",
    "labels",
    "num_anchors",
    "gamma",
    "attention",
    "packing_length",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "chunk_blocks",
    "feature_cache",
    "feature_dtype",
    "tensor_parallel_size",
)
MADE_FROM: dict[Stage, tuple[str, ...]] = {
    "prepare": (
        "target",
        "dataset",
        "num_prompts",
        "self_prompts",
        "num_eval",
        "max_length",
        "turns",
        "answers",
        "chat_template_kwargs",
        "template",
        "skip_bad_rows",
        "max_image_pixels",
    ),
    # The servers may change during the stage, because each server is checked to run the target.
    "regenerate": ("answers", "max_new_tokens", "temperature", *OF_SAMPLES),
    "run": (
        "draft",
        "algorithm",
        "draft_vocab_size",
        "num_hidden_layers",
        "block_size",
        "draft_options",
        "dtype",
        "loss",
        "labels",
        "num_anchors",
        "gamma",
        "attention",
        "packing_length",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "feature_dtype",
    ),
    "bench": ("bench_data", "bench_prompts"),
    "export": ("formats", "license"),
}
# Prefixes of training arguments that do not change the draft. They may differ when a run continues.
HOW_IT_IS_RUN = (
    "bf16_full_eval",
    "fp16_full_eval",
    "prediction_loss_only",
    "batch_eval_metrics",
    "include_for_metrics",
    "report_to",
    "run_name",
    "project",
    "trackio_",
    "logging_",
    "log_level",
    "disable_tqdm",
    "include_num_",
    "save_",
    "push_to_hub",
    "hub_",
    "ddp_",
    "torch_compile",
    "torch_empty_",
    "dataloader_num_",
    "dataloader_pin_",
    "dataloader_pre",
    "dataloader_pers",
    "gradient_checkpointing",
    "activation_checkpointing",
    "per_device_eval_batch_size",
)
# Evaluations during training do not change the draft, unless the best draft so far is kept.
WHEN_IT_IS_MEASURED = ("eval_",)
# Training arguments whose value is JSON or the path of a JSON file.
MAY_BE_FILES = ("accelerator_config", "fsdp_config")
OPTIONS = tuple(item for item in fields(TrainSettings) if item.name != "arguments")


def flag(name: str) -> str:
    """Returns the name of an option on the command line: `--num-anchors` for `num_anchors`."""
    return f"--{name.replace('_', '-')}"


def process_index() -> int:
    """Returns the index of this process among those of `accelerate launch` or `torchrun`."""
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    """Returns the number of processes that were launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_urls(name: str, urls: Collection[str]) -> None:
    """Refuses names of servers that are no URLs, and URLs that are given twice."""
    for url in urls:
        is_url = url.startswith(("http://", "https://"))
        action = "give one such as http://127.0.0.1:8000"
        require(is_url, f"a URL as {flag(name)}", url, action)
    is_once = len(set(urls)) == len(urls)
    require(is_once, f"each {flag(name)} once", listed(urls), "leave the others out")


def _resolved_in(name: str, value: Any) -> Any:
    """Returns a training argument, with an absolute path if it names a file."""
    may_be_file = name in MAY_BE_FILES and isinstance(value, str)
    # JSON may be longer than any path, and the file system refuses to look up such a text.
    if may_be_file and not value.lstrip().startswith("{"):
        return _resolved(value)
    return value


def _resolved(place: str) -> str:
    """Returns a path as an absolute path, and a Hub id unchanged."""
    if Path(place).exists():
        return str(Path(place).resolve())
    return place
