"""The folder of a training run: which stages are done, what each was made from, and what of it has changed since.

`stages.json` says it, written whole or not at all. A stage counts as done if it says so and its folder is there; so
removing a stage's folder is how it is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_hf.cli.train_settings import STAGES, Stage, TrainSettings
from dflash_hf.data.row_files import write_whole
from dflash_hf.errors import listed, require, shown

STAGES_FILE = "stages.json"
SETTINGS_FILE = "settings.yaml"
# Folders that each stage leaves; the first one is there when it is done.
FOLDERS: dict[Stage, tuple[str, ...]] = {
    "prepare": ("prepared",),
    "regenerate": ("answered",),
    "run": ("draft", "run"),
    "bench": ("bench",),
    "export": ("export",),
}
ENDS = 2**20  # bytes at each end of a file of weights that are compared


class RunState:
    """What a run's folder says of its stages."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.path = settings.output_dir
        self.target = ""

    def folder(self, stage: Stage) -> Path:
        """Returns where a stage's output is."""
        return self.path / FOLDERS[stage][0]

    def check(self, stages: Sequence[Stage]) -> None:
        """Refuses a folder that is not this run's, and leaves it as it was.

        Raises:
            ValueError: If it has other files, a stage was begun with other settings or with a target whose files have
                changed since, or what a stage needs is neither there nor asked for.
        """
        # Parts of files are those of a process that was killed, or of another one's that is writing now.
        names = (
            (file.name for file in self.path.iterdir() if file.suffix != ".part")
            if self.path.is_dir()
            else ()
        )
        found = sorted(names)
        is_ours = not found or STAGES_FILE in found or set(found) <= {SETTINGS_FILE}
        require(
            is_ours, "a new folder or that of a run as --output-dir", str(self.path), "name another"
        )
        self.target = fingerprint(self.settings.target)
        last = STAGES.index(stages[-1])
        for stage in STAGES[: last + 1]:
            record = self._record(stage)
            if record is None:
                continue
            now: dict[str, Any] = json.loads(json.dumps(self.settings.made_from(stage)))
            # What an option is by default is what it was before there was one.
            unsaid = json.loads(
                json.dumps(TrainSettings(target="", output_dir=self.path).made_from(stage))
            )
            before: dict[str, Any] = {**unsaid, **record["made_from"]}
            differing = sorted(name for name in now | before if before.get(name) != now.get(name))
            if differing:
                told = [
                    f"{name} was {shown(before.get(name))} and is {shown(now.get(name))}"
                    for name in differing
                ]
                raise ValueError(
                    f"expected the run of {self.path} as its stage {stage} was begun, got another, whose "
                    f"{listed(told, '; ')}; give what it was begun with, name another --output-dir, or remove "
                    f"{self._later(stage)} to make it again"
                )
            require(
                record["target"] == self.target,
                f"the target that {stage} of {self.path} was begun with",
                f"another in {self.settings.target}: its files have changed",
                f"put that one back, name another --output-dir, or remove {self._later('regenerate')} to let this one "
                "answer",
            )
        for stage in stages:
            needed = STAGES[: min(STAGES.index(stage), STAGES.index("bench"))]
            missing = [name for name in needed if name not in stages and not self.is_done(name)]
            require(
                not missing,
                f"what {', '.join(missing)} makes for {stage}",
                None,
                "ask for these --stages too",
            )

    def is_done(self, stage: Stage) -> bool:
        """Returns True if a stage has been run to its end and what it made is there."""
        record = self._record(stage)
        return record is not None and record["finished"]

    def write(self, stage: Stage, facts: dict[str, Any] | None = None) -> None:
        """Records what a stage is made from before it writes anything; with facts, that it is done."""
        made_from = self.settings.made_from(stage)
        record = {
            "finished": facts is not None,
            "made_from": made_from,
            "target": self.target,
            "facts": facts or {},
        }
        self._known[stage] = record
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / STAGES_FILE, json.dumps(self._known, indent=2) + "\n")
        (self.path / FOLDERS[stage][-1]).mkdir(exist_ok=True)

    def facts(self, stage: Stage) -> dict[str, Any]:
        """Returns what a stage told when it ended."""
        record = self._record(stage)
        return {} if record is None else record["facts"]

    def write_settings(self) -> None:
        """Writes `settings.yaml`: another run's `--config`, and what this one goes on with."""
        import yaml

        plain = {
            name: value
            for name, value in self.settings.plain().items()
            if value not in (None, [], {})
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(
            self.path / SETTINGS_FILE, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        )

    def _record(self, stage: Stage) -> dict[str, Any] | None:
        """What is known of a stage that has left something."""
        record: dict[str, Any] | None = self._known.get(stage)
        return (
            record
            if record is not None and any((self.path / n).exists() for n in FOLDERS[stage])
            else None
        )

    @cached_property
    def _known(self) -> dict[str, Any]:
        """What the folder says of every stage."""
        file = self.path / STAGES_FILE
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            return {stage: found[stage] for stage in STAGES if stage in found}
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"expected the state of a run in {file}, got something else; name another --output-dir"
            ) from error

    def _later(self, stage: Stage) -> str:
        """The folders of a stage and of what follows from it, as a user would remove them."""
        names = [name for later in STAGES[STAGES.index(stage) :] for name in FOLDERS[later]]
        return listed([str(self.path / name) for name in names if (self.path / name).exists()])


def fingerprint(target: str) -> str:
    """Returns what tells a target from one with other weights, another tokenizer or another template.

    Of a Hub id that is the commit in the cache; of a folder a hash of its small files, and of the sizes and both ends
    of its weights, so that a large target costs no more than a small one.
    """
    if not Path(target).is_dir():
        from transformers.utils import CONFIG_NAME
        from transformers.utils.hub import cached_file

        found = cached_file(target, CONFIG_NAME)
        return "" if found is None else Path(found).parent.name
    digest = hashlib.sha256()
    for file in sorted(Path(target).iterdir()):
        is_weights = file.suffix in (".safetensors", ".bin")
        if not is_weights and file.suffix not in (".json", ".jinja", ".model", ".txt"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(ENDS if is_weights else -1))
            if is_weights and size > 2 * ENDS:
                opened.seek(-ENDS, os.SEEK_END)
                digest.update(opened.read())
    return digest.hexdigest()
