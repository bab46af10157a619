"""This module reads options of `dflash-hf train`. YAML becomes words of a command line, so both have one reader."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dflash_hf.cli.train_settings import OPTIONS, flag
from dflash_hf.errors import listed, one_line, require

UPLOAD = ("hub_model_id", "hub_private_repo")
# Training arguments that have no use in the command -> advice.
OF_PYTHON = {
    "resume_from_checkpoint": "leave it out: the run in the folder continues from its last complete checkpoint",
    "save_dtype": "leave it out: the draft is saved in the target's dtype",
}


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the settings in a YAML file. Names may be written with `-` or `_`.

    Raises:
        ValueError: If the file does not exist, is no YAML, or is no mapping of names to values.
    """
    import yaml

    require(path.is_file(), "a YAML file as --config", str(path), "fix the path")
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"expected YAML in {path}, got something else ({one_line(error)}); correct it"
        ) from error
    if found is None:
        return {}
    is_mapping = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    what = f"names and their values in {path}"
    require(is_mapping, what, found, "write lines such as target: Qwen/Qwen3-8B")
    return {name.replace("-", "_"): value for name, value in found.items() if value is not None}


def as_text(value: Any) -> Any:
    """Returns the value of an option in the form of the command line: lists with commas, objects as JSON."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    return value


def as_words(given: Mapping[str, Any]) -> list[str]:
    """Returns training arguments of a YAML file as the words of a command line."""
    words: list[str] = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if not values:
            continue
        words.append(f"--{name}")
        for one in values:
            is_json = isinstance(one, dict | bool)
            words.append(json.dumps(one) if is_json else str(one))
    return words


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Reads the given fields of `DFlashTrainingArguments` (`--optim muon ...`). The last of repeated fields counts.

    Raises:
        ValueError: If there is no field of a name (the message has the nearest name), or a value has a wrong type.
    """
    if not words:
        return {}
    import argparse

    from transformers import HfArgumentParser

    from dflash_hf.training.arguments import DFlashTrainingArguments

    class Parser(HfArgumentParser):
        """A parser that raises `ValueError`, where `argparse` would print its usage and exit."""

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
        # The value may be a list, but Transformers' parser does not know this.
        if action.dest == "report_to":
            action.nargs = "+"
        # `muon` is not in Transformers' list of optimizers. `DFlashTrainingArguments` checks the name.
        if action.dest == "optim":
            action.type = str
            action.choices = None
    found, rest = parser.parse_known_args(list(words))
    for word in rest:
        if word.startswith("--"):
            name = word.partition("=")[0][2:].replace("-", "_")
            _refuse_name(name, [action.dest for action in parser._actions])
    action = "write -- before the name of an option"
    require(not rest, "options and their values", " ".join(rest), action)
    return vars(found)


def check_upload(arguments: Mapping[str, Any]) -> None:
    """Refuses options of an upload that would have no effect, before anything runs.

    Raises:
        ValueError: If `--push-to-hub` has no repository, or if an option is for uploads by the trainer, which uploads
            nothing.
    """
    ignored = [name for name in arguments if name.startswith("hub_") and name not in UPLOAD]
    what = f"only {listed(UPLOAD)} of the options hub_..."
    require(not ignored, what, listed(ignored), "leave it out; hf auth login stores a token")
    if not arguments.get("push_to_hub"):
        return
    from dflash_hf.training.export import is_hub_id

    repo = arguments.get("hub_model_id")
    what = "--hub-model-id with --push-to-hub, an id such as my-org/my-draft"
    is_named = repo is not None and is_hub_id(repo)
    require(is_named, what, repo, "name the draft's repository")


def check_of_python(arguments: Mapping[str, Any]) -> None:
    """Refuses training arguments that have an effect only in Python, and not in the command.

    Raises:
        ValueError: If such an argument was given.
    """
    for name, action in OF_PYTHON.items():
        require(name not in arguments, f"no {flag(name)}", arguments.get(name), action)


def _refuse_name(name: str, arguments: Sequence[str]) -> NoReturn:
    """Refuses a name that no option has. The message has the nearest name."""
    own = [item.name for item in OPTIONS]
    every = sorted({*own, *arguments, "config", "stages", "redo"})
    nearest = difflib.get_close_matches(name, every, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "see dflash-hf train --help"
    raise ValueError(
        f"expected an option of dflash-hf train or a field of its training arguments, got {name!r}; {hint}"
    )
