"""What `dflash-hf train` is asked for: flags and YAML as one thing, and which of it each stage is made from.

torch and Transformers are imported where they are needed: `--help` and a missing target are answered without.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from dflash_hf.errors import listed, one_line, require, shown
from dflash_hf.evaluation.loading import check_place
from dflash_hf.formats import FormatName

Stage = Literal["prepare", "regenerate", "run", "bench", "export"]
STAGES: tuple[Stage, ...] = get_args(Stage)
FORMATS: tuple[FormatName, ...] = ("zlab", "speculators", "muse")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What a run is asked for.

    Args:
        target (`str`): Folder or Hub id of the target.
        output_dir (`Path`): Folder of the whole run.
        dataset (`tuple[str, ...]`): Files, or Hub sets as `ORG/NAME:CONFIG:SPLIT`, of conversations; empty
            where `self_prompts` are enough.
        num_prompts (`int`, *optional*): Conversations that are used at most.
        self_prompts (`int`): Prompts that the target writes itself, added to those of `dataset`.
        num_eval (`int`): Conversations that are held out: for evaluation while training, and for `bench`.
        max_length (`int`): Longest example in tokens, prompt and answer.
        turns (`str`): `"last"` or `"all"`: which turns of the assistant are trained on.
        chat_template_kwargs (mapping): What else the chat template reads, wherever it is applied.
        template (`str`, *optional*): What the user says, of rows of other columns: `"{question}"`.
        skip_bad_rows (`bool`): Leave malformed rows out, and say how many, instead of refusing the first.
        streaming (`bool`): Fetch sets of the Hub row by row, and keep none.
        answers (`str`): `"target"`, which writes them anew, or `"data"`, where they are the target's own already.
        max_new_tokens, temperature, top_p: How the target answers.
        answer_batch (`int`): Prompts that it answers at once.
        server, server_model (`str`, *optional*): An OpenAI-style server that answers instead, and its model.
        draft (`str`, *optional*): Draft to train further; without it a fresh one is made.
        num_hidden_layers, block_size (`int`): Of a fresh draft.
        draft_options (mapping): Other arguments of `DFlashDraftModel.from_target`.
        bench_data (`tuple[str, ...]`): Sets for `bench`; default the conversations that are held out.
        bench_data_dir (`str`, *optional*): Folder of the sets' files; default the Hub.
        bench_prompts (`int`): Questions of each set.
        formats (`tuple[str, ...]`): What `export` writes, beside our own format.
        license (`str`, *optional*): Of the draft, for its card.
        dtype (`str`): Of the target; `"auto"` is what its checkpoint says.
        device (`str`): Device map of the target.
        threads (`int`, *optional*): CPU threads.
        arguments (mapping): Fields of `DFlashTrainingArguments` that were given.
    """

    target: str
    output_dir: Path
    dataset: tuple[str, ...] = ()
    num_prompts: int | None = None
    self_prompts: int = 0
    num_eval: int = 64
    max_length: int = 3072
    turns: Literal["last", "all"] = "last"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    template: str | None = None
    skip_bad_rows: bool = False
    streaming: bool = False
    answers: Literal["target", "data"] = "target"
    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    answer_batch: int = 32
    server: str | None = None
    server_model: str | None = None
    draft: str | None = None
    num_hidden_layers: int = 5
    block_size: int = 16
    draft_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    bench_data: tuple[str, ...] = ()
    bench_data_dir: str | None = None
    bench_prompts: int = 32
    formats: tuple[FormatName, ...] = FORMATS
    license: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self) -> None:
        """Refuses what cannot be run, before anything is read or loaded.

        Raises:
            ValueError: On the first such setting.
        """
        check_place("--target", self.target)
        for source in self.dataset:
            check_place("--dataset", source)
        if self.draft is not None:
            check_place("--draft", self.draft)
        require(
            bool(self.dataset) or self.self_prompts > 0,
            "conversations as --dataset",
            None,
            "give files or a Hub id, or let the target write its own prompts with --self-prompts 10000",
        )
        alone = self.template is None or not self.self_prompts
        what = "--template without --self-prompts, whose rows have no other columns"
        require(alone, what, self.template, "prepare rows as messages, or leave one out")
        is_file = self.output_dir.exists() and not self.output_dir.is_dir()
        require(not is_file, "a folder as --output-dir", str(self.output_dir), "name another")
        for name, smallest in (("num_prompts", 1), ("self_prompts", 0), ("num_eval", 0), ("max_length", 2)):
            _check_at_least(self, name, smallest)
        for name in ("max_new_tokens", "answer_batch", "num_hidden_layers", "bench_prompts", "threads"):
            _check_at_least(self, name, 1)
        _check_at_least(self, "block_size", 2)
        require(0 <= self.temperature < float("inf"), "0 or more as --temperature", self.temperature, "0 is greedy")
        require(0 < self.top_p <= 1, "above 0 and at most 1 as --top-p", self.top_p, "1 is the whole vocabulary")
        for name, allowed in (("turns", ("last", "all")), ("answers", ("target", "data"))):
            value = getattr(self, name)
            require(value in allowed, f"--{name} {' or '.join(allowed)}", value, "choose one of them")
        for name in self.formats:
            known = f"--formats among {', '.join(FORMATS)}"
            require(name in FORMATS, known, name, "leave it out, or use dflash-hf convert")
        is_folder = self.bench_data_dir is None or Path(self.bench_data_dir).is_dir()
        require(is_folder, "a folder of sets as --bench-data-dir", self.bench_data_dir, "fix the path")
        is_url = self.server is None or self.server.startswith(("http://", "https://"))
        require(is_url, "a URL as --server", self.server, "give one such as http://127.0.0.1:8000")

    def plain(self) -> dict[str, Any]:
        """Returns all settings as YAML and JSON have them: what another `--config` could be."""
        found = asdict(self)
        arguments = found.pop("arguments")
        for name, value in found.items():
            if isinstance(value, tuple):
                found[name] = list(value)
        return {**found, "output_dir": str(self.output_dir), **arguments}

    def made_from(self, stage: Stage) -> dict[str, Any]:
        """Returns what a stage's output follows from, its inputs' included, as plain values."""
        plain = self.plain()
        for name in ("target", "draft"):
            if plain[name] is not None and Path(plain[name]).exists():
                plain[name] = str(Path(plain[name]).resolve())
        plain["dataset"] = [str(Path(name).resolve()) if Path(name).exists() else name for name in self.dataset]
        names: list[str] = []
        for known in STAGES:
            # Nothing is made of a bench: its answers say how good a draft is, and the card tells them.
            if known in ("prepare", "regenerate", "run") or known == stage:
                names += _MADE_FROM[known]
            if known == stage:
                break
        found = {name: plain[name] for name in names}
        if stage in ("run", "bench", "export"):
            keeps_best = bool(self.arguments.get("load_best_model_at_end"))
            how = HOW_IT_IS_RUN if keeps_best else (*HOW_IT_IS_RUN, *WHEN_IT_IS_MEASURED)
            found |= {name: value for name, value in self.arguments.items() if not name.startswith(how)}
        return found


_MADE_FROM: dict[Stage, tuple[str, ...]] = {
    "prepare": (
        *("target", "dataset", "num_prompts", "self_prompts", "num_eval", "max_length", "turns"),
        *("chat_template_kwargs", "template", "skip_bad_rows"),
    ),
    "regenerate": ("answers", "max_new_tokens", "temperature", "top_p", "server", "server_model"),
    "run": ("draft", "num_hidden_layers", "block_size", "draft_options", "dtype"),
    "bench": ("bench_data", "bench_prompts"),
    "export": ("formats", "license"),
}
# How names of training arguments begin that change nothing of the draft: they may be others when a run goes on.
HOW_IT_IS_RUN = (
    *("report_to", "run_name", "project", "trackio_", "logging_", "log_level", "disable_tqdm", "include_num_"),
    *("save_", "push_to_hub", "hub_", "resume_from_", "ddp_timeout", "torch_compile", "torch_empty_"),
    *(
        "dataloader_num_",
        "dataloader_pin_",
        "dataloader_pre",
        "dataloader_pers",
        "gradient_checkpointing",
        "activation_checkpointing",
    ),
    "chunk_blocks",
)
# What is measured in between is looked at, unless the best draft so far is the one that is kept.
WHEN_IT_IS_MEASURED = ("eval_", "per_device_eval_")
OURS = frozenset(item.name for item in fields(TrainSettings)) - {"arguments"}
UPLOAD = ("hub_model_id", "hub_private_repo")
SWITCHES = ("skip_bad_rows", "streaming")  # of ours, those that are on or off


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the settings in a YAML file; names may be written with `-` or `_`.

    Raises:
        ValueError: If it is not there, no YAML, or no mapping of names to values.
    """
    import yaml

    require(path.is_file(), "a YAML file as --config", str(path), "fix the path")
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"expected YAML in {path}, got something else ({one_line(error)}); correct it") from error
    found = {} if found is None else found
    is_mapping = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    require(is_mapping, f"names and their values in {path}", found, "write lines such as target: Qwen/Qwen3-8B")
    return {name.replace("-", "_"): value for name, value in found.items() if value is not None}


def as_words(given: Mapping[str, Any]) -> list[str]:
    """Returns values of a YAML file as the words of a command line, so that both are read by one reader."""
    words: list[str] = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if values:
            words += [f"--{name}", *(json.dumps(one) if isinstance(one, dict | bool) else str(one) for one in values)]
    return words


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Reads fields of `DFlashTrainingArguments`; later ones win.

    Args:
        words (sequence of `str`): `--learning-rate 6e-4 ...`, `-` and `_` alike.

    Returns:
        `dict`: What was given, by its field's name.

    Raises:
        ValueError: If a name is none of theirs, with the nearest one, or a value is not of its kind.
    """
    if not words:
        return {}
    import argparse

    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        """Raises sentences, where `argparse` would print its usage and leave."""

        def error(self, message: str) -> NoReturn:
            raise ValueError(f"expected arguments of the training, got {one_line(message)}; correct it")

    parser = Parser(arguments_class(), allow_abbrev=False, add_help=False)
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
        if action.type is Any:
            action.type = str
        if action.dest == "optim":  # ours are more than the library's, and the arguments' own check knows them
            action.type, action.choices = str, None
    known = {action.dest for action in parser._actions}
    dashed: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            if name not in known and not (name.startswith("no_") and name[3:] in known):
                _refuse_name(name, known)
            word = f"--{name}{equals}{value}"
        dashed.append(word)
    found, rest = parser.parse_known_args(dashed)
    require(not rest, "options and their values", " ".join(rest), "write -- before the name of an option")
    return vars(found)


def _refuse_name(name: str, known: set[str]) -> NoReturn:
    every = sorted(OURS | known | {"config", "stages", "plan"})
    nearest = difflib.get_close_matches(name, every, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "see dflash-hf train --help and docs/training.md"
    raise ValueError(
        f"expected an option of dflash-hf train or a field of its training arguments, got {name!r}; {hint}"
    )


def arguments_class() -> Any:
    """Returns the class of the training arguments."""
    from dflash_hf.training.arguments import DFlashTrainingArguments

    return DFlashTrainingArguments


def check_upload(arguments: Mapping[str, Any]) -> None:
    """Refuses `--push-to-hub` that would not do what it says, before anything is run.

    Raises:
        ValueError: If no repository is named, or an option says how the trainer would upload, which uploads nothing.
    """
    ignored = [name for name in arguments if name.startswith("hub_") and name not in UPLOAD]
    what = f"of options hub_... {listed(UPLOAD)} alone"
    require(not ignored, what, listed(ignored), "leave it out; hf auth login keeps a token")
    if not arguments.get("push_to_hub"):
        return
    from dflash_hf.training.export import is_hub_id

    repo = arguments.get("hub_model_id")
    what = "--hub-model-id with --push-to-hub, an id such as my-org/my-draft"
    require(repo is not None and is_hub_id(repo), what, repo, "name the draft's repository")


def read_options(text: str, option: str) -> dict[str, Any]:
    """Reads a JSON object of an option.

    Raises:
        ValueError: If it is none.
    """
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object as {option}, got {shown(text)}; write it in one pair of '...'")
    return found


def _check_at_least(settings: TrainSettings, name: str, smallest: int) -> None:
    value = getattr(settings, name)
    fits = value is None or value >= smallest
    require(fits, f"at least {smallest} as --{name.replace('_', '-')}", value, "give a larger one")


__all__ = [
    "FORMATS",
    "HOW_IT_IS_RUN",
    "OURS",
    "STAGES",
    "SWITCHES",
    "Stage",
    "TrainSettings",
    "arguments_class",
    "as_words",
    "check_upload",
    "read_arguments",
    "read_options",
    "read_yaml",
]
