"""This module reads and writes the costs of steps that were measured once on this machine.

[`tune`](tune.py) measures the seconds of a step for some numbers of rows and of verified tokens, and writes them into
a file. After that, the width of a verify depends on this table and on the accepted tokens, and not on a clock. So two
runs of one call give the same text. Without a table, costs are modelled (`step_costs.py`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import threading
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers.utils import logging

from dflash_hf.devices import device_name
from dflash_hf.errors import one_line
from dflash_hf.generation.step_costs import StepCosts
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target

logger: Any = logging.get_logger(__name__)

# The folder of all tables, in the cache folder of Hugging Face (`HF_HOME`).
TABLES = Path(constants.HF_HOME) / "dflash_hf" / "step_costs"
# The version of the file's format. A change of the meaning of its numbers needs a higher version.
VERSION = 2
# A table has a few kB. A file with more bytes than this was not written by this module.
MAX_BYTES = 1_000_000
# The largest number of rows and of tokens of a step.
MAX_COUNT = 2**16
# The properties that can change between the measurement of a pair's costs and a later run of the same pair.
CIRCUMSTANCES = frozenset(
    ("threads", "device", "torch", "transformers", "attention", "autocast", "draft_dtype")
)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Holds the seconds of a step by its number of rows and its number of verified tokens.

    Args:
        steps (`dict[int, dict[int, float]]`): For each number of rows, the seconds of a step by the number of tokens
            that it verifies in each row. A step of 1 token has no draft. The others verify trees if the pair does.
        chains (`dict[int, float]`): For each number of rows, the seconds of a step that verifies the chain of all
            proposals.
    """

    steps: Mapping[int, Mapping[int, float]]
    chains: Mapping[int, float]

    def of_step(self, width: int, rows: int) -> float:
        """Returns the seconds of a step that verifies `width` tokens in each of `rows` rows."""
        by_rows = {num: interpolated(seconds, width) for num, seconds in self.steps.items()}
        return interpolated(by_rows, rows)

    def of_chain(self, num_tokens: int, rows: int) -> float:
        """Returns the seconds of a step that verifies the chain of all `num_tokens - 1` proposals in each row."""
        return interpolated(self.chains, rows)

    def covers(self, width: int) -> bool:
        """Returns True if steps of `width` or more tokens were measured for each number of rows of the table."""
        return all(max(seconds) >= width for seconds in self.steps.values())


def interpolated(points: Mapping[int, float], at: int) -> float:
    """Returns the value at a number, by linear interpolation between the known points.

    Outside the known points, the line through the nearest two points continues. But no value is below the smallest
    known value, so that noise of the clock does not make a step of more tokens free.
    """
    known = sorted(points)
    if at in points or len(known) == 1:
        return points.get(at, points[known[0]])
    # These are the two points around the number, or the two points at the nearest end.
    right = min(max(bisect_left(known, at), 1), len(known) - 1)
    low = known[right - 1]
    high = known[right]
    slope = (points[high] - points[low]) / (high - low)
    return max(points[low] + slope * (at - low), min(points.values()))


def about_pair(
    target: Target, draft: DFlashDraftModel, costs: StepCosts, is_tree: bool
) -> dict[str, Any]:
    """Returns everything on which the costs of a pair's steps depend. A table is used only if all of it is equal."""
    device = target.device
    sizes = asdict(costs)
    # Measured costs do not depend on the speed and overhead that the modelled costs assume.
    del sizes["speed"], sizes["layer_overhead"]
    return {
        "version": VERSION,
        "target_class": type(target.model).__name__,
        "target_parts": _kinds_in(target.model),
        "attention": target.config._attn_implementation,
        "draft_parts": _kinds_in(draft),
        "is_dflash2": draft.config.is_dflash2,
        # Blocks may be computed with a copy of the draft in FP8.
        "draft_dtype": draft.generation_config.draft_dtype,
        "is_tree": is_tree,
        "autocast": _autocast_dtype(device.type),
        **sizes,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _kinds_in(model: nn.Module) -> list[str]:
    """Returns the names of the classes of a model's modules and weights, and the dtypes of its weights.

    Quantised models differ in them.
    """
    modules = {type(part).__name__ for part in model.modules()}
    weights = {f"{type(weight).__name__} {weight.dtype}" for weight in model.parameters()}
    return sorted(modules | weights)


def _autocast_dtype(device_type: str) -> str:
    """Returns the current dtype of autocast, or an empty text if autocast is off."""
    if not torch.is_autocast_enabled(device_type):
        return ""
    return str(torch.get_autocast_dtype(device_type))


def table_path(about: Mapping[str, Any]) -> Path:
    """Returns the file of a pair's table."""
    key = hashlib.sha256(_sorted_json(about).encode()).hexdigest()[:32]
    return TABLES / f"{key}.json"


def _sorted_json(about: Mapping[str, Any]) -> str:
    """Returns the JSON text of everything on which the costs of a pair's steps depend, with sorted keys."""
    return json.dumps(about, sort_keys=True)


def read_table(about: Mapping[str, Any]) -> CostTable | None:
    """Returns the table that was measured for a pair on this machine, or `None` if there is none.

    A file that cannot be read or that belongs to another pair is ignored, and the log says so once. The log also says
    if the pair has a table that cannot be used, for example one for another number of threads.
    """
    path = table_path(about)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        return _checked(text, about)
    except FileNotFoundError:
        _say_what_differs(path.parent, _sorted_json(about))
        return None
    except (OSError, ValueError) as error:
        logger.warning_once(
            f"{path} holds no costs of steps for this pair ({one_line(error)}), so it is not used; "
            "dflash-hf tune writes it anew"
        )
        return None


@functools.cache
def _say_what_differs(folder: Path, sorted_json: str) -> None:
    """Logs why a table that was measured for a pair cannot be used in this run.

    The function reads the files of a folder once per pair, and not at every call.
    """
    about = json.loads(sorted_json)
    for path in sorted(folder.glob("*.json")):
        measured = _about_of(path)
        names = sorted(name for name in about if about[name] != measured.get(name))
        if CIRCUMSTANCES.issuperset(names):
            theirs = ", ".join(f"{name}={measured.get(name)!r}" for name in names)
            ours = ", ".join(f"{name}={about[name]!r}" for name in names)
            logger.warning_once(
                f"the costs of this pair's steps were measured with {theirs}, and this run has {ours}, so they "
                "are not used; dflash_hf.tune(target, draft) in a process like this one measures them again"
            )
            return


def _about_of(path: Path) -> dict[str, Any]:
    """Returns the properties for which a file's table was measured. The dict is empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            read: Any = json.loads(file.read(MAX_BYTES + 1))
        return dict(read["about"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _checked(text: bytes, about: Mapping[str, Any]) -> CostTable:
    """Returns the table in a file's text. Raises `ValueError` if it is damaged or was measured for something else."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        read: Any = json.loads(text)
        about_read = read["about"]
        steps = {int(rows): _seconds(by_width) for rows, by_width in read["steps"].items()}
        chains = _seconds(read["chains"])
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its form is another one: {type(error).__name__}") from error
    if about_read != about:
        raise ValueError("it was measured for another pair or machine")
    has_plain_step = all(1 in by_width for by_width in steps.values())
    if not steps or not has_plain_step or chains.keys() != steps.keys():
        raise ValueError("some of its numbers are missing")
    return CostTable(steps, chains)


def _seconds(read: Mapping[str, Any]) -> dict[int, float]:
    """Converts a JSON object into seconds by count. Raises `ValueError` for a count or time that is out of range."""
    seconds = {int(key): float(value) for key, value in read.items()}
    are_times = all(math.isfinite(value) and value > 0.0 for value in seconds.values())
    are_counts = all(1 <= key <= MAX_COUNT for key in seconds)
    if not are_times or not are_counts:
        raise ValueError("some of its numbers are no times")
    return seconds


def write_table(table: CostTable, about: Mapping[str, Any]) -> Path:
    """Writes a table completely or not at all, and returns its file. Raises `ValueError` if it cannot be written."""
    path = table_path(about)
    written = {"about": about, "steps": table.steps, "chains": table.chains}
    # The scratch file belongs to one thread. If two threads measure at once, each writes a whole file, and the later
    # file stays.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(written, indent=1), encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise ValueError(
            f"expected to write {path}, got {one_line(error.strerror or error)}; make room or set HF_HOME"
        ) from error
    return path
