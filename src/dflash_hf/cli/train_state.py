"""This module keeps the state of a training run's folder: which stages are done, and with which options.

The state is in `stages.json`, which is written completely or not at all. A stage is done if this file says so, the
folder of the stage exists, and its options are the same as now. If an option has changed, or a data file was edited
after the first stage, this stage and the later ones run again. If answers, checkpoints or a draft would be lost, the
command refuses this unless `--redo` is given.
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
# Files of each of the first two stages: the rows that are trained on, and the rows that are held out.
TRAIN = "train.jsonl"
HELD_OUT = "held_out.jsonl"
# Keys in `stages.json` for the number of prompts without an answer, one for each of these two files.
TRAIN_ERRORS = "in_the_errors_file"
HELD_OUT_ERRORS = "held_out_in_the_errors_file"
# The files beside the answers that hold these prompts.
ERRORS = {TRAIN_ERRORS: "train.errors.jsonl", HELD_OUT_ERRORS: "held_out.errors.jsonl"}
# The folders that each stage writes. When a stage is done, its first folder exists.
FOLDERS: dict[Stage, tuple[str, ...]] = {
    "prepare": ("prepared",),
    "regenerate": ("answered",),
    "run": ("draft", "run"),
    "bench": ("bench",),
    "export": ("export",),
}
# Files that took long to make: prompts and answers of the target, checkpoints, the draft.
COSTLY: dict[Stage, tuple[str, ...]] = {
    "prepare": ("prepared/self_prompts.jsonl",),
    "regenerate": ("answered/*.jsonl",),
    "run": ("draft", "run/checkpoint-*"),
    "bench": (),
    "export": (),
}
# Options of the first stage that change neither the result for a row nor the prompts that the target writes.
WHICH_ROWS = ("dataset", "num_prompts", "num_eval", "skip_bad_rows")


def continuing(folder: Path) -> str:
    """Returns the command that continues a run. For several processes, it says how to launch the same number again."""
    count = num_processes()
    if count == 1:
        return f"dflash-hf train --output-dir {folder}"
    # Only the user knows the launcher (torchrun, or accelerate with a config file) and the number of nodes.
    return f"the same launcher of {count} processes and -m dflash_hf train --output-dir {folder}"


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Locks a run's folder for this process, because two processes would write each answer twice.

    If the process is killed, the kernel releases the lock. Folders that are created here are removed again if nothing
    was written into them. If Python has no file locks (Windows), or the disk has none, the folder is not locked.

    Raises:
        ValueError: If another process has locked the folder.
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
            # Closing the file might not release the lock, because a forked worker may still have the file open.
            _unlock(file)


def _lock(file: IO[str], folder: Path) -> None:
    """Locks a file, or logs that its disk has no locks."""
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

    with suppress(OSError):  # a disk without locks raises it
        fcntl.flock(file, fcntl.LOCK_UN)


def _remove_unused(folder: Path, made: Sequence[Path]) -> None:
    """Removes the lock file and the folders made for it, if the folder has no other file."""
    if not folder.is_dir():
        return
    names = [path.name for path in folder.iterdir()]
    if names != [LOCK_FILE]:
        return
    (folder / LOCK_FILE).unlink()
    for place in made:
        with suppress(OSError):  # another run may have started in this folder
            place.rmdir()


class RunState:
    """The state of the stages in a run's folder.

    Args:
        settings ([`TrainSettings`]): The current settings.
        stages (sequence of `str`): The requested stages, in their order.
        redo (`bool`): Whether costly stages may run again.

    Attributes:
        target (`dict[str, str]`): The hashes that identify the target, as far as they are known.
        outdated (`list[Stage]`): The stages whose output was made with other options than the current ones.
        reason (`str`): The changes that have outdated these stages.
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
        """Returns the folder of a stage's output."""
        return self.path / FOLDERS[stage][0]

    def check_folder(self) -> None:
        """Refuses a folder that does not belong to a run.

        Raises:
            ValueError: If the folder has files, but none of a run.
        """
        found: list[str] = []
        if self.path.is_dir():
            # Partial files are from a process that was killed, or from one that is writing now.
            files = [file for file in self.path.iterdir() if file.suffix != ".part"]
            found = [file.name for file in files if file.name != LOCK_FILE]
        is_ours = not found or STAGES_FILE in found or found == [SETTINGS_FILE]
        what = "a new folder or that of a run as --output-dir"
        require(is_ours, what, str(self.path), "name another")

    def check(self) -> None:
        """Finds the stages whose options have changed. Nothing in the folder is changed.

        Raises:
            ValueError: If a costly stage has changed options, or if a stage needs another one that is neither done nor
                requested.
        """
        for stage in self._looked_at():
            changes = self._changes(stage)
            if changes:
                self._outdate(stage, changes)
                break
        self._check_inputs()

    def check_target(self, target: Mapping[str, str]) -> None:
        """Takes the hashes that identify the target, and compares them with the target of the earlier stages.

        Raises:
            ValueError: If the target has changed, and a costly stage was made with the earlier target.
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
        """Returns True if a stage has finished with these options, and its output exists."""
        if stage in self.outdated:
            return False
        # The first folder must exist: checkpoints without a draft are no output.
        has_output = self.folder(stage).exists()
        return has_output and bool(self._record(stage).get("finished"))

    def pending(self) -> list[Stage]:
        """Returns the requested stages that are not done."""
        pending = {stage for stage in self.stages if not self.is_done(stage)}
        if self._has_prompts_to_send_again():
            pending.add("regenerate")
        return [stage for stage in self.stages if stage in pending]

    def discard_outdated(self) -> None:
        """Removes the output of outdated stages, the last stage first, so that it can be repeated after a kill."""
        for stage in reversed(self.outdated):
            for name in FOLDERS[stage]:
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            self._known.pop(stage, None)
        if self.outdated:
            self._write()
        self.outdated = []

    def write(self, stage: Stage, facts: dict[str, Any] | None = None) -> None:
        """Records the options of a stage before it writes anything. With `facts`, records that the stage is done."""
        # The digests from the beginning of the stage are kept, because the files may have been edited meanwhile.
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
        """Returns the facts of a finished stage."""
        return self._record(stage).get("facts", {})

    def write_settings(self) -> None:
        """Writes `settings.yaml`, with which this run continues. It can also be the `--config` of another run."""
        import yaml

        asked = without_algorithm(self.settings).asked()
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(asked, sort_keys=False, allow_unicode=True)
        write_whole(self.path / SETTINGS_FILE, text)

    def _has_prompts_to_send_again(self) -> bool:
        """Says whether the user has removed a file of prompts without an answer, and no training has begun yet."""
        facts = self.facts("regenerate")
        folder = self.folder("regenerate")
        are_removed = [
            not (folder / file).exists() for fact, file in ERRORS.items() if fact in facts
        ]
        is_learned = bool(self._record("run")) and "run" not in self.outdated
        return any(are_removed) and not is_learned

    def _looked_at(self) -> list[Stage]:
        """Returns the stages whose options matter: the requested stages, and the costly stages before them."""
        last = STAGES.index(self.stages[-1])
        return [stage for stage in STAGES[: last + 1] if COSTLY[stage] or stage in self.stages]

    def _changes(self, stage: Stage) -> str:
        """Names the options of a stage that have changed since it began, with both values, or returns `""`."""
        before = self._record(stage).get("made_from")
        if before is None:
            return ""
        now = _as_json(self.settings.made_from(stage))
        # An option that did not exist when the stage was made had its default value.
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
        """Says whether the first stage is unfinished and no later one has begun. It can then go on with other rows."""
        is_done = bool(self._record("prepare").get("finished"))
        return not is_done and not any(self._record(later) for later in STAGES[1:])

    def _changed_data(self, stage: Stage) -> list[str]:
        """Names the files that a finished stage has read and that have other contents now."""
        record = self._record(stage)
        # An unfinished stage reads the files again, so edits do not matter.
        if not record.get("finished"):
            return []
        known: dict[str, str] = record.get("data", {})
        if not known:
            return []
        now = digests_of(self.settings.dataset)
        changed = [name for name in known if now.get(name, known[name]) != known[name]]
        return [f"{name} has other contents" for name in changed]

    def _target_of(self, stage: Stage) -> dict[str, str]:
        """Returns the hashes of the target on which a stage's output depends."""
        if stage == "prepare" and not self.settings.self_prompts:
            names = self.target.keys() & {"chat_template", "vocabulary"}
            return {name: self.target[name] for name in sorted(names)}
        return self.target

    def _made_with(self, stage: Stage) -> dict[str, str]:
        """Returns the recorded hashes of the target with which a stage was made."""
        known: Any = self._record(stage).get("target")
        if stage in self.outdated or not isinstance(known, dict):
            return {}
        return known

    def _outdate(self, stage: Stage, reason: str) -> None:
        """Marks a stage and later ones as outdated. Raises `ValueError` if costly files are lost without `--redo`."""
        later: list[Stage] = [*STAGES[STAGES.index(stage) :]]
        if not COSTLY[stage]:  # stages that are not requested stay as they are
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
        """Says whether a stage has written files that took long to make."""
        return any(any(self.path.glob(pattern)) for pattern in COSTLY[stage])

    def _check_inputs(self) -> None:
        """Refuses stages whose inputs neither exist nor come from a requested stage."""
        for stage in self.stages:
            needed = STAGES[: min(STAGES.index(stage), STAGES.index("bench"))]
            missing = [
                name for name in needed if name not in self.stages and not self.is_done(name)
            ]
            what = f"the results of {', '.join(missing)} for {stage}"
            require(not missing, what, None, "ask for these --stages too")

    def _record(self, stage: Stage) -> dict[str, Any]:
        """Returns the record of a stage in `stages.json`. It is empty if no folder of the stage exists."""
        is_there = any((self.path / name).exists() for name in FOLDERS[stage])
        return self._known.get(stage, {}) if is_there else {}

    def _write(self) -> None:
        write_whole(self.path / STAGES_FILE, json.dumps(self._known, indent=2) + "\n")

    @cached_property
    def _known(self) -> dict[str, Any]:
        """The content of `stages.json`: stage -> its record."""
        file = self.path / STAGES_FILE
        if not file.is_file():
            return {}
        found = read_object(file, "name another --output-dir")
        return {stage: found[stage] for stage in STAGES if stage in found}


def digests_of(datasets: Sequence[str]) -> dict[str, str]:
    """Returns a digest of the content of each data set that is a file: absolute path -> digest."""
    found: dict[str, str] = {}
    for name in datasets:
        if name.endswith(FILES):
            with Path(name).open("rb") as file:
                found[full_name(name)] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return found


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values in the form that they have after they were written as JSON and read again."""
    return json.loads(json.dumps(values))
