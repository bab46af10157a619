"""What `dflash-hf train` is asked for: flags and YAML as one thing, and which of it each stage is made from.

torch and Transformers are imported where they are needed: `--help` and a missing target are answered without.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import typer

from dflash_hf.checkpoints.names import FormatName
from dflash_hf.errors import listed, one_line, require, shown
from dflash_hf.pair.loading import check_place

Stage = Literal["prepare", "regenerate", "run", "bench", "export"]
STAGES: tuple[Stage, ...] = get_args(Stage)
FORMATS: tuple[FormatName, ...] = ("zlab", "speculators", "muse")


def _panel(name: str) -> Callable[[str], Any]:
    """Options under a heading of their own in the help."""
    return lambda text: typer.Option(help=text, rich_help_panel=name)


_data, _answers, _draft, _after, _machine = map(
    _panel, ("Data", "Answers", "Draft", "Bench and export", "Machine")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What a run is asked for: every field is an option of the command, of which its help says what it is.

    Args:
        output_dir (`Path`): Folder of the whole run.
        arguments (mapping): Fields of `DFlashTrainingArguments` that were given.
    """

    output_dir: Path
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target.")]
    dataset: Annotated[
        tuple[str, ...],
        _data("Conversations: files, or Hub sets as ORG/NAME:CONFIG:SPLIT, with commas."),
    ] = ()
    num_prompts: Annotated[int | None, _data("Most conversations that are used; default all.")] = (
        None
    )
    self_prompts: Annotated[
        int, _data("Prompts that the target writes itself, beside the data.")
    ] = 0
    num_eval: Annotated[int, _data("Conversations that are held out.")] = 64
    max_length: Annotated[int, _data("Longest example, prompt and answer, in tokens.")] = 3072
    turns: Annotated[
        Literal["last", "all"], _data("Train on the last answer of a conversation, or all.")
    ] = "last"
    chat_template_kwargs: Annotated[
        Mapping[str, Any],
        _data(
            "What else the chat template reads, everywhere, as JSON: {'enable_thinking': false}."
        ),
    ] = field(default_factory=dict[str, Any])
    template: Annotated[
        str | None, _data("What the user says, of rows of other columns: '{question}'.")
    ] = None
    skip_bad_rows: Annotated[
        bool, _data("Leave malformed rows out instead of refusing the first.")
    ] = False
    streaming: Annotated[bool, _data("Fetch sets of the Hub row by row, and keep none.")] = False
    answers: Annotated[
        Literal["target", "data"],
        _answers("target: it answers anew. data: those in the data are its own already."),
    ] = "target"
    max_new_tokens: Annotated[int, _answers("Where an answer is cut, in tokens.")] = 1024
    temperature: Annotated[float, _answers("0 is greedy.")] = 0.0
    top_p: Annotated[float, _answers("Nucleus sampling.")] = 1.0
    answer_batch: Annotated[int, _answers("Prompts answered at once.")] = 32
    server: Annotated[
        str | None, _answers("URL of an OpenAI-style server that answers instead.")
    ] = None
    server_model: Annotated[str | None, _answers("Its model; default the first that it names.")] = (
        None
    )
    draft: Annotated[str | None, _draft("Draft to train further; default a fresh one.")] = None
    num_hidden_layers: Annotated[int, _draft("Of a fresh draft.")] = 5
    block_size: Annotated[int, _draft("Slots per block of a fresh draft, the anchor included.")] = (
        16
    )
    draft_options: Annotated[
        Mapping[str, Any],
        _draft("Others of DFlashDraftModel.from_target, as JSON: {'num_taps': 4}."),
    ] = field(default_factory=dict[str, Any])
    bench_data: Annotated[
        tuple[str, ...], _after("Sets for bench, with commas; default what is held out.")
    ] = ()
    bench_data_dir: Annotated[str | None, _after("Folder of the sets' files; default the Hub.")] = (
        None
    )
    bench_prompts: Annotated[int, _after("Questions of each set.")] = 32
    formats: Annotated[tuple[FormatName, ...], _after("What export writes, with commas.")] = FORMATS
    license: Annotated[str | None, _after("Of the draft, for its card.")] = None
    dtype: Annotated[str, _machine("Of the target: torch dtype, or auto.")] = "auto"
    device: Annotated[str, _machine("Device map of the target, or auto.")] = "auto"
    threads: Annotated[int | None, _machine("CPU threads.")] = None
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
        least = {
            "num_prompts": 1,
            "self_prompts": 0,
            "num_eval": 0,
            "max_length": 2,
            "block_size": 2,
        }
        least |= dict.fromkeys(
            ("max_new_tokens", "answer_batch", "num_hidden_layers", "bench_prompts", "threads"), 1
        )
        for name, smallest in least.items():
            value = getattr(self, name)
            fits = value is None or value >= smallest
            require(
                fits,
                f"at least {smallest} as --{name.replace('_', '-')}",
                value,
                "give a larger one",
            )
        require(
            0 <= self.temperature < float("inf"),
            "0 or more as --temperature",
            self.temperature,
            "0 is greedy",
        )
        require(
            0 < self.top_p <= 1,
            "above 0 and at most 1 as --top-p",
            self.top_p,
            "1 is the whole vocabulary",
        )
        for name, allowed in (("turns", ("last", "all")), ("answers", ("target", "data"))):
            value = getattr(self, name)
            require(
                value in allowed, f"--{name} {' or '.join(allowed)}", value, "choose one of them"
            )
        for name in self.formats:
            known = f"--formats among {', '.join(FORMATS)}"
            require(name in FORMATS, known, name, "leave it out, or use dflash-hf convert")
        is_folder = self.bench_data_dir is None or Path(self.bench_data_dir).is_dir()
        require(
            is_folder, "a folder of sets as --bench-data-dir", self.bench_data_dir, "fix the path"
        )
        is_url = self.server is None or self.server.startswith(("http://", "https://"))
        require(is_url, "a URL as --server", self.server, "give one such as http://127.0.0.1:8000")

    def plain(self) -> dict[str, Any]:
        """Returns all settings as YAML and JSON have them: what another `--config` could be, from any folder."""
        found = asdict(self)
        arguments = found.pop("arguments")
        for name in ("target", "draft"):
            found[name] = found[name] and _resolved(found[name])
        found["dataset"] = map(_resolved, self.dataset)
        for name in ("dataset", "bench_data", "formats"):
            found[name] = list(found[name])
        return {**found, "output_dir": str(self.output_dir), **arguments}

    def made_from(self, stage: Stage) -> dict[str, Any]:
        """Returns what a stage's output follows from, its inputs' included, as plain values."""
        plain = self.plain()
        # Nothing is made of a bench: its answers say how good a draft is, and the card tells them.
        found: dict[str, Any] = {}
        for known in STAGES[: STAGES.index(stage) + 1]:
            if known in (stage, *STAGES[:3]):
                found |= {name: plain[name] for name in _MADE_FROM[known]}
        if stage in ("run", "bench", "export"):
            keeps_best = bool(self.arguments.get("load_best_model_at_end"))
            how = HOW_IT_IS_RUN if keeps_best else (*HOW_IT_IS_RUN, *WHEN_IT_IS_MEASURED)
            found |= {
                name: value for name, value in self.arguments.items() if not name.startswith(how)
            }
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
    *(
        "report_to",
        "run_name",
        "project",
        "trackio_",
        "logging_",
        "log_level",
        "disable_tqdm",
        "include_num_",
    ),
    *(
        "save_",
        "push_to_hub",
        "hub_",
        "resume_from_",
        "ddp_timeout",
        "torch_compile",
        "torch_empty_",
    ),
    *("dataloader_num_", "dataloader_pin_", "dataloader_pre", "dataloader_pers"),
    *("gradient_checkpointing", "activation_checkpointing", "chunk_blocks"),
)
# What is measured in between is looked at, unless the best draft so far is the one that is kept.
WHEN_IT_IS_MEASURED = ("eval_", "per_device_eval_")
OURS = frozenset(item.name for item in fields(TrainSettings)) - {"arguments"}
UPLOAD = ("hub_model_id", "hub_private_repo")


def _resolved(place: str) -> str:
    """A path as it is from any folder; a Hub id as it is."""
    return str(Path(place).resolve()) if Path(place).exists() else place


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
        raise ValueError(
            f"expected YAML in {path}, got something else ({one_line(error)}); correct it"
        ) from error
    found = {} if found is None else found
    is_mapping = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    require(
        is_mapping,
        f"names and their values in {path}",
        found,
        "write lines such as target: Qwen/Qwen3-8B",
    )
    return {name.replace("-", "_"): value for name, value in found.items() if value is not None}


def as_text(value: Any) -> Any:
    """Returns a value of an option of ours as it is on the command line: lists with commas, objects as JSON."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value


def as_words(given: Mapping[str, Any]) -> list[str]:
    """Returns training arguments of a YAML file as the words of a command line, so that both have one reader."""
    words: list[str] = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if values:
            words += [
                f"--{name}",
                *(json.dumps(one) if isinstance(one, dict | bool) else str(one) for one in values),
            ]
    return words


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Reads those fields of `DFlashTrainingArguments` that are given (`--learning-rate 6e-4 ...`); later ones win.

    Raises:
        ValueError: If a name is none of theirs, with the nearest one, or a value is not of its kind.
    """
    if not words:
        return {}
    import argparse

    from transformers import HfArgumentParser

    from dflash_hf.training.arguments import DFlashTrainingArguments

    class Parser(HfArgumentParser):
        """Raises sentences, where `argparse` would print its usage and leave."""

        def error(self, message: str) -> NoReturn:
            raise ValueError(
                f"expected arguments of the training, got {one_line(message)}; correct it"
            )

    fields_of: Any = DFlashTrainingArguments
    parser = Parser(fields_of, allow_abbrev=False, add_help=False)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
        if action.type is Any:
            action.type = str
        # Ours are more than the library's, and the arguments' own check knows them
        if action.dest == "optim":
            action.type = str
            action.choices = None
    found, rest = parser.parse_known_args(list(words))
    for word in rest:
        if word.startswith("--"):
            _refuse_name(
                word.partition("=")[0][2:].replace("-", "_"),
                {action.dest for action in parser._actions},
            )
    require(
        not rest,
        "options and their values",
        " ".join(rest),
        "write -- before the name of an option",
    )
    return vars(found)


def _refuse_name(name: str, known: set[str]) -> NoReturn:
    every = sorted(OURS | known | {"config", "stages", "plan"})
    nearest = difflib.get_close_matches(name, every, n=1)
    hint = (
        f"did you mean {nearest[0]!r}?"
        if nearest
        else "see dflash-hf train --help and docs/training.md"
    )
    raise ValueError(
        f"expected an option of dflash-hf train or a field of its training arguments, got {name!r}; {hint}"
    )


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
        raise ValueError(
            f"expected a JSON object as {option}, got {shown(text)}; write it in one pair of '...'"
        )
    return found
