"""The folder of a training run: which stages are done, what each was made from, and what of it has changed since.

`stages.json` says it, written whole or not at all. A stage is done if it says so, its folder is there, and the options
that it was made from are those that are asked for now. A changed option, or a data file that was edited behind the
first stage, makes that stage and those behind it again; where answers, checkpoints or a draft would be lost that way,
it is refused until `--redo` asks for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from dflash_hf.cli.train_algorithms import without_algorithm
from dflash_hf.cli.train_settings import STAGES, Stage, TrainSettings, num_processes
from dflash_hf.data.row_files import read_object, write_whole
from dflash_hf.data.sources import FILES, full_name
from dflash_hf.errors import listed, require, shown

logger = logging.getLogger(__name__)

STAGES_FILE = "stages.json"
SETTINGS_FILE = "settings.yaml"
LOCK_FILE = ".lock"
# Of each of the first two stages: the rows that are trained on, and those that are held out.
TRAIN = "train.jsonl"
HELD_OUT = "held_out.jsonl"
# What `stages.json` calls the number of prompts that got no answer, of each of these two.
TRAIN_ERRORS = "in_the_errors_file"
HELD_OUT_ERRORS = "held_out_in_the_errors_file"
# The file beside the answers that has these prompts.
ERRORS = {TRAIN_ERRORS: "train.errors.jsonl", HELD_OUT_ERRORS: "held_out.errors.jsonl"}
# Folders that each stage leaves; the first one is there when it is done.
FOLDERS: dict[Stage, tuple[str, ...]] = {
    "prepare": ("prepared",),
    "regenerate": ("answered",),
    "run": ("draft", "run"),
    "bench": ("bench",),
    "export": ("export",),
}
# What took long to make: prompts and answers of the target, checkpoints, the draft.
COSTLY: dict[Stage, tuple[str, ...]] = {
    "prepare": ("prepared/self_prompts.jsonl",),
    "regenerate": ("answered/*.jsonl",),
    "run": ("draft", "run/checkpoint-*"),
    "bench": (),
    "export": (),
}
# Options of the first stage that change neither what is made of a row nor the prompts that the target writes.
WHICH_ROWS = ("dataset", "num_prompts", "num_eval", "skip_bad_rows")


def continuing(folder: Path) -> str:
    """Returns the command that goes on with a run, or what to start it with: several processes go on as so many."""
    count = num_processes()
    if count == 1:
        return f"dflash-hf train --output-dir {folder}"
    # The user alone knows the launcher: torchrun or accelerate, with a file that may ask for FSDP, on so many nodes.
    return f"the same launcher of {count} processes and -m dflash_hf train --output-dir {folder}"


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keeps a run's folder for this process: two would write each answer twice.

    The kernel releases it where the process is killed. Folders that are made here are removed again if nothing was
    written there. Where Python has no locks of files (Windows), or the disk has none, nothing is kept.

    Raises:
        ValueError: If another process keeps it.
    """
    if find_spec("fcntl") is None:
        yield
        return
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        _lock(file, folder)
        try:
            yield
        finally:
            _remove_unused(folder, made)
            # Not left to the closing: a forked worker may have the file open still
            _unlock(file)


def _lock(file: IO[str], folder: Path) -> None:
    """Locks a file, or says that its disk has no locks."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"expected one dflash-hf train at a time in --output-dir, got another one in {shown(str(folder))}; "
            "wait until it ends, or name another folder"
        ) from error
    except OSError as error:
        logger.warning(
            "%s is not locked (%s): do not begin a second run in it", folder, error.strerror
        )


def _unlock(file: IO[str]) -> None:
    """Releases a lock before its file is closed."""
    import fcntl

    with suppress(OSError):  # of a disk without locks
        fcntl.flock(file, fcntl.LOCK_UN)


def _remove_unused(folder: Path, made: Sequence[Path]) -> None:
    """Removes the lock and the folders made for it, unless there is something else."""
    if not folder.is_dir():
        return
    names = [path.name for path in folder.iterdir()]
    if names != [LOCK_FILE]:
        return
    (folder / LOCK_FILE).unlink()
    for place in made:
        with suppress(OSError):  # another run may have begun in it
            place.rmdir()


class RunState:
    """What a run's folder says of its stages.

    Args:
        settings ([`TrainSettings`]): What is asked for now.
        stages (sequence of `str`): The stages that are asked for, in their order.
        redo (`bool`): Whether costly stages may be made again.

    Attributes:
        target (`dict[str, str]`): Hashes that tell the target from a changed one, as far as they are known.
        outdated (`list[Stage]`): Stages whose output is of other options than those asked for now.
    """

    def __init__(self, settings: TrainSettings, stages: Sequence[Stage], redo: bool) -> None:
        self.settings = settings
        self.stages = stages
        self.redo = redo
        self.path = settings.output_dir
        self.target: dict[str, str] = {}
        self.outdated: list[Stage] = []
        self.reason = ""

    def folder(self, stage: Stage) -> Path:
        """Returns where a stage's output is."""
        return self.path / FOLDERS[stage][0]

    def check_folder(self) -> None:
        """Refuses a folder that is no run's.

        Raises:
            ValueError: If it has other files.
        """
        found: list[str] = []
        if self.path.is_dir():
            # Parts of files are those of a process that was killed, or of another one's that is writing now.
            files = [file for file in self.path.iterdir() if file.suffix != ".part"]
            found = [file.name for file in files if file.name != LOCK_FILE]
        is_ours = not found or STAGES_FILE in found or found == [SETTINGS_FILE]
        what = "a new folder or that of a run as --output-dir"
        require(is_ours, what, str(self.path), "name another")

    def check(self) -> None:
        """Finds the stages whose options have changed; nothing in the folder is changed.

        Raises:
            ValueError: If a costly stage has changed options, or what a stage needs is neither there nor asked for.
        """
        for stage in self._looked_at():
            changes = self._changes(stage)
            if changes:
                self._outdate(stage, changes)
                break
        self._check_inputs()

    def check_target(self, target: Mapping[str, str]) -> None:
        """Takes what tells the target from others, and compares it with the target that stages were made with.

        Raises:
            ValueError: If it has changed, and a costly stage was made with what it was before.
        """
        self.target = dict(target)
        for stage in self._looked_at():
            known = self._made_with(stage)
            changed = [name for name in known if target.get(name, known[name]) != known[name]]
            if changed:
                told = f"target {self.settings.target} now has another {listed(changed, ' and another ')}"
                self._outdate(stage, told)
                break
        self._check_inputs()

    def is_done(self, stage: Stage) -> bool:
        """Returns True if a stage has been run to its end with these options, and what it made is there."""
        if stage in self.outdated:
            return False
        # Checkpoints alone are a record of the training, and no draft
        has_output = self.folder(stage).exists()
        return has_output and bool(self._record(stage).get("finished"))

    def pending(self) -> list[Stage]:
        """Returns the stages that are asked for and not done."""
        pending = {stage for stage in self.stages if not self.is_done(stage)}
        if self._has_prompts_to_send_again():
            pending.add("regenerate")
        return [stage for stage in self.stages if stage in pending]

    def discard_outdated(self) -> None:
        """Removes what outdated stages have left, the last one's first: killed in between it can be done again."""
        for stage in reversed(self.outdated):
            for name in FOLDERS[stage]:
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            self._known.pop(stage, None)
        if self.outdated:
            self._write()
        self.outdated = []

    def write(self, stage: Stage, facts: dict[str, Any] | None = None) -> None:
        """Records what a stage is made from before it writes anything; with facts, that it is done."""
        # Of the files as they were read, which may have been edited meanwhile.
        data = self._known.get(stage, {}).get("data", {})
        is_begun = facts is None
        if is_begun and stage == "prepare":
            data = digests_of(self.settings.dataset)
        self._known[stage] = {
            "finished": facts is not None,
            "made_from": self.settings.made_from(stage),
            "target": self._target_of(stage),
            "data": data,
            "facts": facts or {},
        }
        self.path.mkdir(parents=True, exist_ok=True)
        self._write()
        (self.path / FOLDERS[stage][-1]).mkdir(exist_ok=True)

    def facts(self, stage: Stage) -> dict[str, Any]:
        """Returns what a stage told when it ended."""
        return self._record(stage).get("facts", {})

    def write_settings(self) -> None:
        """Writes `settings.yaml`: another run's `--config`, and what this one goes on with."""
        import yaml

        asked = without_algorithm(self.settings).asked()
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(asked, sort_keys=False, allow_unicode=True)
        write_whole(self.path / SETTINGS_FILE, text)

    def _has_prompts_to_send_again(self) -> bool:
        """Whether a file of prompts that got no answer was removed, and no draft learns from the others' answers."""
        facts = self.facts("regenerate")
        folder = self.folder("regenerate")
        are_removed = [
            not (folder / file).exists() for fact, file in ERRORS.items() if fact in facts
        ]
        is_learned = bool(self._record("run")) and "run" not in self.outdated
        return any(are_removed) and not is_learned

    def _looked_at(self) -> list[Stage]:
        """The stages whose options matter: those that are asked for, and the costly ones before them."""
        last = STAGES.index(self.stages[-1])
        return [stage for stage in STAGES[: last + 1] if COSTLY[stage] or stage in self.stages]

    def _changes(self, stage: Stage) -> str:
        """Names what of a stage's options has changed since it was begun, with both values; empty if nothing has."""
        before = self._record(stage).get("made_from")
        if before is None:
            return ""
        now = _as_json(self.settings.made_from(stage))
        # What an option is by default is what it was before there was one.
        defaults = TrainSettings(target="", output_dir=self.path, answers=self.settings.answers)
        default = _as_json(defaults.made_from(stage))
        told: list[str] = []
        compared = {*now, *before}
        if stage == "prepare" and self._is_preparing():
            compared = compared.difference(WHICH_ROWS)
        for name in sorted(compared):
            was = before.get(name, default.get(name))
            if was != now.get(name):
                told.append(f"{name} was {shown(was)} and is {shown(now.get(name))}")
        told += self._changed_data(stage)
        return listed(told, "; ")

    def _is_preparing(self) -> bool:
        """Whether the first stage did not end, and nothing stands behind it: it goes on with other rows, too."""
        is_done = bool(self._record("prepare").get("finished"))
        return not is_done and not any(self._record(later) for later in STAGES[1:])

    def _changed_data(self, stage: Stage) -> list[str]:
        """Names the files that a finished stage has read and that say something else now."""
        record = self._record(stage)
        # A stage that was killed reads an edited file again, part by part.
        if not record.get("finished"):
            return []
        known: dict[str, str] = record.get("data", {})
        if not known:
            return []
        now = digests_of(self.settings.dataset)
        changed = [name for name in known if now.get(name, known[name]) != known[name]]
        return [f"{name} has other contents" for name in changed]

    def _target_of(self, stage: Stage) -> dict[str, str]:
        """What of the target a stage's output follows from."""
        if stage == "prepare" and not self.settings.self_prompts:
            names = self.target.keys() & {"chat_template", "vocabulary"}
            return {name: self.target[name] for name in sorted(names)}
        return self.target

    def _made_with(self, stage: Stage) -> dict[str, str]:
        """What is known of the target that a stage was made with."""
        known: Any = self._record(stage).get("target")
        if stage in self.outdated or not isinstance(known, dict):
            return {}
        return known

    def _outdate(self, stage: Stage, reason: str) -> None:
        """Marks a stage and those behind it to be made again, if nothing is lost by that or `--redo` asks for it."""
        later: list[Stage] = [*STAGES[STAGES.index(stage) :]]
        if not COSTLY[stage]:  # what is not asked for stays as it is
            later = [name for name in later if name in self.stages]
        later = [name for name in later if self._record(name)]
        lost = [name for name in later if self._has_costly(name)]
        if lost and not self.redo:
            raise ValueError(
                f"expected the settings with which stage {stage} of {self.path} began, got a change: {reason}; add "
                f"--redo to make {listed(later)} again and lose the earlier results, give the first settings again, "
                "or name another --output-dir"
            )
        self.outdated = later
        self.reason = reason

    def _has_costly(self, stage: Stage) -> bool:
        """Whether a stage has left something that took long to make."""
        return any(any(self.path.glob(pattern)) for pattern in COSTLY[stage])

    def _check_inputs(self) -> None:
        """Refuses stages whose inputs are neither there nor asked for."""
        for stage in self.stages:
            needed = STAGES[: min(STAGES.index(stage), STAGES.index("bench"))]
            missing = [
                name for name in needed if name not in self.stages and not self.is_done(name)
            ]
            what = f"the results of {', '.join(missing)} for {stage}"
            require(not missing, what, None, "ask for these --stages too")

    def _record(self, stage: Stage) -> dict[str, Any]:
        """What is known of a stage that has left something; empty if it has not."""
        is_there = any((self.path / name).exists() for name in FOLDERS[stage])
        return self._known.get(stage, {}) if is_there else {}

    def _write(self) -> None:
        write_whole(self.path / STAGES_FILE, json.dumps(self._known, indent=2) + "\n")

    @cached_property
    def _known(self) -> dict[str, Any]:
        """What the folder says of every stage."""
        file = self.path / STAGES_FILE
        if not file.is_file():
            return {}
        found = read_object(file, "name another --output-dir")
        return {stage: found[stage] for stage in STAGES if stage in found}


def digests_of(datasets: Sequence[str]) -> dict[str, str]:
    """Returns a digest of the contents of each set of rows that is a file, by its whole path."""
    found: dict[str, str] = {}
    for name in datasets:
        if name.endswith(FILES):
            with Path(name).open("rb") as file:
                found[full_name(name)] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return found


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are when they were written to a file and read again."""
    return json.loads(json.dumps(values))
