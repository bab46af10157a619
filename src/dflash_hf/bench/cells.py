"""This module holds the settings of a run, and its cells: every method with every combination of compared values."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dflash_hf.bench.questions import fields_in
from dflash_hf.bench.sets import set_name
from dflash_hf.data.sampling import ALLOWED, NO_FILTERS
from dflash_hf.errors import require
from dflash_hf.pair.loading import check_place

METHODS = (
    "plain",
    "plain-static",
    "dflash",
    "undrafted",
    "stock",
    "stock-static",
    "assistant",
    "lookup",
    "zlab",
    "server",
)
NEEDS_DRAFT = ("dflash", "undrafted", "stock", "stock-static", "zlab")
TAKES_ONE_ROW = ("stock", "stock-static", "zlab", "assistant", "lookup")
# The word before each value in a cell's name. A value without a word is clear by itself.
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
# Options of a draft of which a run may compare several values.
DRAFT_OPTIONS = (
    "block_size",
    "verify_width",
    "num_tree_nodes",
    "max_matching_ngram_size",
    "proposal",
)
_SHARED = ("batch", "max_new_tokens", "temperature", "top_p")
# The options that each method uses.
_LOOKS_AT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(METHODS, (*_SHARED, "dtype")),
    "dflash": (*_SHARED, "dtype", *DRAFT_OPTIONS),
    "stock": (*_SHARED, "dtype", "block_size"),
    "stock-static": (*_SHARED, "dtype", "block_size"),
    "zlab": (*_SHARED, "dtype", "block_size"),
    "server": _SHARED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one cell, of which a run may compare several values.

    Args:
        batch (`int`): Questions answered together.
        max_new_tokens (`int`): Number of tokens at which an answer is cut.
        temperature (`float`): 0 is greedy.
        top_p (`float`): Nucleus sampling; 1 is the whole vocabulary.
        top_k (`int`): Number of tokens to sample from; 0 is the whole vocabulary.
        dtype (`str`): The pair's dtype, or `"auto"` for the dtype that the checkpoints state.
        block_size (`int`, *optional*): Block size of the draft, at most the one it was trained with.
        verify_width, num_tree_nodes, max_matching_ngram_size, proposal: See [`~dflash_hf.DFlashGenerationConfig`].
    """

    batch: int = 1
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    dtype: str = "auto"
    block_size: int | None = None
    verify_width: int | Literal["auto"] | None = None
    num_tree_nodes: int | Literal["auto"] | None = None
    max_matching_ngram_size: int | None = None
    proposal: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `generate`. They override a checkpoint's settings of sampling."""
        shared: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if self.temperature == 0:
            # These values are neutral. Transformers warns about any other value that greedy decoding does not use.
            return shared | {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
        return shared | {
            **NO_FILTERS,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }

    def for_draft(self) -> dict[str, Any]:
        """Returns the options of `draft.generation_config` that are set."""
        given = {name: getattr(self, name) for name in DRAFT_OPTIONS}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run. They are the options of `dflash-hf bench`, whose help explains them.

    Args:
        data (`tuple[str, ...]`): Names of sets, as [`dflash_hf.bench.sets.load_questions`] takes them.
        methods (`tuple[str, ...]`): Some of `METHODS`, in the order of the tables.
        assistant (`str`, *optional*): The value of the option `--assistant-model`.
        batch, ..., proposal (`tuple`): Values of [`Options`], in the same units. Several values are compared.
        template_options (mapping): Options of the chat template.
        device (`str`): A device map for Transformers.
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
        """Refuses settings that cannot be run, before anything is read or loaded.

        Raises:
            ValueError: On the first such setting.
        """
        from dflash_hf.generation_config import Proposal

        for name in self.methods:
            hint = "name some of them"
            nearest = difflib.get_close_matches(name, METHODS, n=1)
            if nearest:
                hint = f"did you mean {nearest[0]!r}?"
            require(name in METHODS, f"methods among {', '.join(METHODS)}", name, hint)
        for name in ("data", "methods", *_WORDS):
            values = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            require(
                bool(values),
                f"at least one value of {option}",
                values,
                "give one, or several with commas",
            )
            require(
                len(set(values)) == len(values),
                f"every value of {option} once",
                values,
                "leave the repeated ones out",
            )
        for name, (fits, what, action) in _allowed().items():
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                require(
                    value is None or fits(value),
                    f"{what} as --{name.replace('_', '-')}",
                    value,
                    action,
                )
        # Without this check, all questions would be answered before `scores.failure` refuses.
        can_run = not self.run_code or os.name == "posix"
        require(can_run, "Linux or macOS for --run-code", os.name, "leave out --run-code")
        for value in self.proposal:
            allowed = get_args(Proposal)
            require(
                value is None or value in allowed,
                f"--proposal in {allowed}",
                value,
                "choose some of them",
            )
        places = (
            ("--target", self.target),
            ("--draft", self.draft),
            ("--assistant-model", self.assistant),
        )
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
            given = getattr(self, name)
            what = f"{option} and the method {name!r} together"
            if name in self.methods:
                asked = f"--methods {','.join(self.methods)}"
                require(bool(given), what, asked, "give both, or leave out the method")
            else:
                asked = f"{option} {given}"
                require(not given, what, asked, "give both, or leave out the option")

    def what_matters(self) -> dict[str, Any]:
        """Returns the settings that make two runs the same, as plain values.

        These are all settings but the folders, `resume` and `run_code`. They are the same in every working folder,
        because paths are absolute.
        """
        left_out = ("out", "data_dir", "resume", "run_code")
        plain = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in left_out
        }
        for name in ("target", "draft", "assistant"):
            if plain[name] is not None and Path(plain[name]).exists():
                plain[name] = str(Path(plain[name]).resolve())
        plain["data"] = tuple(set_name(name) for name in self.data)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in plain.items()
        }


def _allowed() -> dict[str, tuple[Callable[[Any], bool], str, str]]:
    """Returns per option a test of a value, the allowed values in words, and the action for another value."""
    import torch

    from dflash_hf.block.tree import MAX_MATCHING
    from dflash_hf.ops import MAX_NODES

    def is_dtype(value: str) -> bool:
        found = getattr(torch, value, None)
        return value == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point)

    at_least_1 = (lambda value: value >= 1, "at least 1", "give a larger one")
    whole = ("batch", "max_new_tokens", "block_size", "num_prompts", "repeats", "threads")
    nodes = f"0 (a chain), 2 to {MAX_NODES}, or auto"
    matching = f"0 to {MAX_MATCHING}"
    return {
        **dict.fromkeys(whole, at_least_1),
        "verify_width": (
            lambda value: value == "auto" or value >= 1,
            "at least 1 or auto",
            "give a larger one",
        ),
        "num_tree_nodes": (
            lambda value: value in ("auto", 0) or 2 <= value <= MAX_NODES,
            nodes,
            "8 is a beginning",
        ),
        "max_matching_ngram_size": (
            lambda value: 0 <= value <= MAX_MATCHING,
            matching,
            "0 is none",
        ),
        "temperature": ALLOWED["temperature"],
        "top_p": ALLOWED["top_p"],
        "dtype": (is_dtype, "auto or a floating-point dtype of torch's", "float32 is one"),
    }


@dataclass(slots=True, kw_only=True)
class Cell:
    """A method with one combination of values. Each cell has a line in the tables and a file of answers.

    Args:
        model_id (`str`): The method's name, with the values that the run compares.
        values (`dict`): The values that the run compares, by option.
        baseline (`str`, *optional*): The cell of plain `generate` that is the base of its speed-up.
        own_baseline (`str`, *optional*): For `dflash`, the cell of this package's loop without the draft.
        failed (`str`, *optional*): Why it was not asked, or not to the end.
    """

    model_id: str
    method: str
    options: Options
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    baseline: str | None = None
    own_baseline: str | None = None
    failed: str | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether it samples, so that its texts may differ from its baseline's."""
        return self.options.temperature > 0

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Cell:
        """Reads a line of `run.json`, which is `asdict` of a cell."""
        return cls(
            **fields_in(row, cls, options=Options(**fields_in(row.get("options", {}), Options)))
        )


def make_cells(settings: RunSettings) -> list[Cell]:
    """Returns the cells of a run. Methods are in their order, and so are the values of each option.

    Values that a method does not use make no cells of their own. For example, plain `generate` has no block, greedy
    decoding has no top-p and no rule of proposing, and a chain has no continuations from the text.
    """
    cells: dict[str, Cell] = {}
    swept = [name for name in _WORDS if len(getattr(settings, name)) > 1]
    for method in settings.methods:
        for combination in itertools.product(*(getattr(settings, name) for name in _WORDS)):
            given = dict(zip(_WORDS, combination, strict=True))
            idle: list[str] = []
            if given["temperature"] == 0:
                idle += ["top_p", "proposal"]
            if given["num_tree_nodes"] == 0:
                idle.append("max_matching_ngram_size")
            looks_at = [name for name in _LOOKS_AT[method] if name not in idle]
            values = {name: given[name] for name in swept if name in looks_at}
            parts = [f"{_WORDS[name]}{_shown(value)}" for name, value in values.items()]
            model_id = "-".join([method, *parts])
            options = Options(**{name: given[name] for name in looks_at})
            cells.setdefault(
                model_id, Cell(model_id=model_id, method=method, options=options, values=values)
            )
    for cell in cells.values():
        if cell.method != "plain":
            cell.baseline = _with_same_values("plain", cell, cells.values())
        if cell.method == "dflash":
            cell.own_baseline = _with_same_values("undrafted", cell, cells.values())
        if cell.options.batch > 1 and cell.method in TAKES_ONE_ROW:
            cell.failed = (
                f"expected batch 1 for {cell.method}, which takes one question at a time, "
                f"got {cell.options.batch}"
            )
    return list(cells.values())


def _shown(value: Any) -> str:
    if value is None:
        return "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _with_same_values(method: str, cell: Cell, cells: Iterable[Cell]) -> str | None:
    """Returns the cell of a method with the same values of shared options; `None` if there is not exactly one."""
    shared = [name for name in _LOOKS_AT[cell.method] if name in _LOOKS_AT[method]]
    found = [
        other.model_id
        for other in cells
        if other.method == method
        and all(getattr(other.options, name) == getattr(cell.options, name) for name in shared)
    ]
    if len(found) != 1:
        return None
    return found[0]
