"""What a run is asked for, and its cells: every method under every combination of the values that it looks at."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dflash_hf.bench.methods import DRAFT_OPTIONS, WAYS, Options
from dflash_hf.errors import require
from dflash_hf.evaluation.loading import check_place
from dflash_hf.generation_config import Proposal
from dflash_hf.tree import MAX_MATCHING, MAX_NODES

METHODS = (*WAYS, "zlab", "server")
NEEDS_DRAFT = ("dflash", "stock", "zlab")
TAKES_ONE_ROW = ("stock", "zlab", "assistant", "lookup")
# What a cell's name says of each value that a run compares: a value without a word in front is clear by itself.
_WORDS = {
    "batch": "batch",
    "max_new_tokens": "new",
    "temperature": "temperature",
    "top_p": "top-p",
    "dtype": "",
    "block_size": "block",
    "verify_width": "width",
    "num_tree_nodes": "tree",
    "max_matching_ngram_size": "ngram",
    "proposal": "",
}
_SHARED = ("batch", "max_new_tokens", "temperature", "top_p")
# What each method looks at.
_LOOKS_AT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(METHODS, (*_SHARED, "dtype")),
    "dflash": (*_SHARED, "dtype", *DRAFT_OPTIONS),
    "stock": (*_SHARED, "dtype", "block_size"),
    "zlab": (*_SHARED, "dtype", "block_size"),
    "server": _SHARED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a run is asked for.

    Args:
        out (`Path`): Folder that it writes.
        data (`tuple[str, ...]`): Names of sets, as [`dflash_hf.bench.sets.load_questions`] takes them.
        methods (`tuple[str, ...]`): Some of `METHODS`, in the order of the tables.
        target, draft (`str`, *optional*): Folders or Hub ids, where a method needs them.
        assistant (`str`, *optional*): Of an ordinary draft model, for the method `"assistant"`.
        server (`str`, *optional*): URL, for the method `"server"`.
        server_model (`str`, *optional*): What the server calls its model; default the first it names.
        data_dir (`Path`, *optional*): Where sets are, without a network.
        template (`str`, *optional*): For sets that the package does not know.
        num_prompts (`int`, *optional*): Questions of each set; default all.
        batch, max_new_tokens, temperature, top_p, dtype, block_size, verify_width, num_tree_nodes,
        max_matching_ngram_size, proposal (`tuple`): Values of [`Options`]; several are compared.
        system (`str`, *optional*): What every conversation begins with.
        template_options (mapping): For the chat template.
        seed (`int`): Of the questions that are drawn, and of sampled answers.
        repeats (`int`): How often everything is asked.
        device (`str`): A device map for Transformers.
        threads (`int`, *optional*): CPU threads.
        run_code (`bool`): Whether code in answers is run for its score.
        resume (`bool`): Whether to go on with what the folder has.
    """

    out: Path
    data: tuple[str, ...]
    methods: tuple[str, ...] = ("plain", "dflash")
    target: str | None = None
    draft: str | None = None
    assistant: str | None = None
    server: str | None = None
    server_model: str | None = None
    data_dir: Path | None = None
    template: str | None = None
    num_prompts: int | None = None
    batch: tuple[int, ...] = (1,)
    max_new_tokens: tuple[int, ...] = (512,)
    temperature: tuple[float, ...] = (0.0,)
    top_p: tuple[float, ...] = (1.0,)
    dtype: tuple[str, ...] = ("auto",)
    block_size: tuple[int | None, ...] = (None,)
    verify_width: tuple[int | Literal["auto"] | None, ...] = (None,)
    num_tree_nodes: tuple[int | Literal["auto"] | None, ...] = (None,)
    max_matching_ngram_size: tuple[int | None, ...] = (None,)
    proposal: tuple[str | None, ...] = (None,)
    system: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    repeats: int = 1
    device: str = "auto"
    threads: int | None = None
    run_code: bool = False
    resume: bool = False

    def check(self) -> None:
        """Refuses what cannot be run, before anything is read or loaded.

        Raises:
            ValueError: On the first such setting.
        """
        for name in self.methods:
            nearest = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "name some of them"
            require(name in METHODS, f"methods among {', '.join(METHODS)}", name, hint)
        for name in ("data", "methods", *_WORDS):
            values = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            require(bool(values), f"at least one value of {option}", values, "give one, or several with commas")
            require(len(set(values)) == len(values), f"every value of {option} once", values, "leave the others out")
        _check_numbers(self)
        places = (("--target", self.target), ("--draft", self.draft), ("--assistant-model", self.assistant))
        for option, place in places:
            if place is not None:
                check_place(option, place)
        is_url = self.server is None or self.server.startswith(("http://", "https://"))
        require(is_url, "a URL as --server", self.server, "give one such as http://127.0.0.1:8000")
        for name, methods in (("target", set(METHODS) - {"server"}), ("draft", set(NEEDS_DRAFT))):
            needing = [method for method in self.methods if method in methods]
            require(
                getattr(self, name) is not None or not needing,
                f"a folder or a Hub id as --{name} for {', '.join(needing)}",
                None,
                f"give --{name}, or other --methods",
            )
        for option, name in (("--assistant-model", "assistant"), ("--server", "server")):
            given = getattr(self, name) is not None
            require(
                given == (name in self.methods),
                f"{option} and the method {name!r} together",
                f"{option} {getattr(self, name)}" if given else f"--methods {','.join(self.methods)}",
                f"give both, or leave out the {'option' if given else 'method'}",
            )

    def what_matters(self) -> dict[str, Any]:
        """Returns what makes two runs the same, as plain values: all but the folders, and what to do at the end."""
        left_out = ("out", "data_dir", "resume", "run_code")
        plain = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in left_out}
        for name in ("target", "draft", "assistant"):
            if plain[name] is not None and Path(plain[name]).exists():
                plain[name] = str(Path(plain[name]).resolve())
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def _check_numbers(settings: RunSettings) -> None:
    counts = ("batch", "max_new_tokens", "block_size")
    for name in counts:
        for value in getattr(settings, name):
            fits = value is None or value >= 1
            require(fits, f"at least 1 as --{name.replace('_', '-')}", value, "give a larger one")
    for name in ("num_prompts", "repeats", "threads"):
        value = getattr(settings, name)
        fits = value is None or value >= 1
        require(fits, f"at least 1 as --{name.replace('_', '-')}", value, "give a larger one")
    for value in settings.verify_width:
        fits = value is None or value == "auto" or value >= 1
        require(fits, "at least 1 or auto as --verify-width", value, "give a larger one")
    for value in settings.num_tree_nodes:
        fits = value in (None, "auto") or value == 0 or 2 <= value <= MAX_NODES
        require(fits, f"0 (a chain), 2 to {MAX_NODES}, or auto as --num-tree-nodes", value, "8 is a beginning")
    for value in settings.max_matching_ngram_size:
        fits = value is None or 0 <= value <= MAX_MATCHING
        require(fits, f"0 to {MAX_MATCHING} as --max-matching-ngram-size", value, "0 is none")
    for value in settings.temperature:
        require(0 <= value < math.inf, "0 or more as --temperature", value, "0 is greedy")
    for value in settings.top_p:
        require(0 < value <= 1, "a share above 0 and at most 1 as --top-p", value, "1 is the whole vocabulary")
    for value in settings.proposal:
        allowed = get_args(Proposal)
        require(value is None or value in allowed, f"--proposal in {allowed}", value, "choose some of them")
    for value in settings.dtype:
        found = getattr(torch, value, None)
        is_dtype = value == "auto" or (isinstance(found, torch.dtype) and bool(found.is_floating_point))
        require(is_dtype, "auto or a floating-point dtype of torch's as --dtype", value, "float32 is one")


@dataclass(slots=True, kw_only=True)
class Cell:
    """A method under one combination of values: one line of the tables, one file of answers.

    Args:
        model_id (`str`): The method's name, and the values that the run compares.
        method (`str`): The method.
        options (`Options`): How it decodes.
        values (`dict`): Those of the options that the run compares, by name.
        baseline (`str`, *optional*): The cell of plain `generate` that its speed-up is over.
        failed (`str`, *optional*): Why it was not asked, or not to the end.
    """

    model_id: str
    method: str
    options: Options
    values: dict[str, Any]
    baseline: str | None = None
    failed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns its line of `run.json`."""
        return {
            "model_id": self.model_id,
            "method": self.method,
            "values": self.values,
            "options": asdict(self.options),
            "baseline": self.baseline,
            "failed": self.failed,
        }


def make_cells(settings: RunSettings) -> list[Cell]:
    """Returns the cells of a run: methods in their order, values of each in theirs.

    Values that a method does not look at make no cells of their own: plain `generate` has no block, greedy decoding no
    top-p and no rule of proposing, and a chain no continuations.
    """
    cells: dict[str, Cell] = {}
    swept = [name for name in _WORDS if len(getattr(settings, name)) > 1]
    for method in settings.methods:
        for combination in itertools.product(*(getattr(settings, name) for name in _WORDS)):
            given = dict(zip(_WORDS, combination, strict=True))
            idle = () if given["temperature"] else ("top_p", "proposal")
            idle += ("max_matching_ngram_size",) if given["num_tree_nodes"] == 0 else ()
            looks_at = [name for name in _LOOKS_AT[method] if name not in idle]
            values = {name: given[name] for name in swept if name in looks_at}
            parts = [f"{_WORDS[name]}{_shown(value)}" for name, value in values.items()]
            model_id = "-".join([method, *parts])
            options = Options(**{name: given[name] for name in looks_at})
            cells.setdefault(model_id, Cell(model_id=model_id, method=method, options=options, values=values))
    for cell in cells.values():
        cell.baseline = _baseline(cell, cells.values())
        if cell.options.batch > 1 and cell.method in TAKES_ONE_ROW:
            cell.failed = (
                f"expected batch 1 for {cell.method}, which takes one question at a time, got {cell.options.batch}"
            )
    return list(cells.values())


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)


def _baseline(cell: Cell, cells: Any) -> str | None:
    """The one cell of plain `generate` with the same values, as far as both look at them."""
    shared = [name for name in _LOOKS_AT[cell.method] if name in _LOOKS_AT["plain"]]

    def seen(options: Options) -> dict[str, Any]:
        return {name: getattr(options, name) for name in shared}

    found = [
        other.model_id for other in cells if other.method == "plain" and seen(other.options) == seen(cell.options)
    ]
    return found[0] if len(found) == 1 and cell.method != "plain" else None


__all__ = ["METHODS", "NEEDS_DRAFT", "TAKES_ONE_ROW", "Cell", "RunSettings", "make_cells"]
