"""This module runs a benchmark: it asks every question of every cell, in turns, so that a slow drift hits all cells.

If the device does not keep what all cells have captured, one cell is asked after the other. Then only few of the calls
that count capture anything.

Questions of one set with the same number of turns are asked in rounds. In a round, every cell is asked the same
questions, in batches of its own size, and cells take turns in being first. Sampled tokens depend on the seed of the
run, the questions of the batch, the turn and the repeat. So it does not matter which process asks a round, or when.
Rounds are distributed over the processes of `accelerate launch`, and a run that was killed continues with the missing
batches ([`run_files`]).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from dflash_hf.bench.answers import Answer, Turn, Which
from dflash_hf.bench.cells import NEEDS_DRAFT, Cell, Options, RunSettings, make_cells
from dflash_hf.bench.methods import WAYS, Method, Models, local_method
from dflash_hf.bench.progress import Bars
from dflash_hf.bench.provenance import check_models, other_conditions, provenance
from dflash_hf.bench.questions import Question
from dflash_hf.bench.run_files import Batch, RunFolder, whole_batches
from dflash_hf.bench.server import server_method
from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.data.prompt_files import image_names
from dflash_hf.devices import execution_device
from dflash_hf.errors import listed, one_line, require
from dflash_hf.generation.buffers import kept_buffers
from dflash_hf.generation.checks import check_static_stock, check_stock
from dflash_hf.generation_config import over_stored
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import changed, tokenizer_of
from dflash_hf.pair.loading import load_target, load_weights
from dflash_hf.target_model.support import check_no_stop_strings

# Errors with which a method may fail while the run continues without it. Torch's out of memory and
# `NotImplementedError` are kinds of `RuntimeError`. Transformers and z-lab's package raise the other errors for
# settings they do not expect.
FAILURES = (
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
    httpx.HTTPError,
)
MAX_FAILURES = 3  # failures in a row after which a cell is given up
WARM_UP_TOKENS = 16  # on a CPU; on an accelerator, graphs are captured for the whole length
# About the tokens of an image with a megapixel (1024 for Qwen3-VL), in letters of English, at four letters per token.
LETTERS_OF_IMAGE = 4096

logger = logging.getLogger(__name__)


def run(settings: RunSettings) -> Path | None:
    """Runs a benchmark and writes all results into `settings.out`.

    Under `accelerate launch`, every process loads the models and asks its share.

    Returns:
        `Path`, *optional*: The report, in the first process.

    Raises:
        ValueError: If something cannot be run, or the folder belongs to another run. Nothing is written before that.
    """
    settings.check()
    cells = make_cells(settings)
    processes = Processes(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = RunFolder(settings.out, processes.rank)
    questions = list[Question]()
    is_resumed = False
    if processes.rank == 0:
        is_resumed = folder.check(settings.resume, settings.what_matters())
        if is_resumed:
            questions = folder.read_questions()
        else:
            questions = _load_questions(settings)
    models = _load_models(settings, processes.device_map)
    _check_questions(questions, models, settings)
    methods = _make_methods(settings, cells, models)
    if processes.rank == 0:
        _begin(folder, settings, cells, questions, provenance(models, processes.size), is_resumed)
    processes.wait()
    drafts = [found.draft for found in models.values() if found.draft is not None]
    asker = Asker(settings, cells, methods, folder, processes, folder.read_questions(), drafts)
    session = asker.ask_all()
    processes.wait()
    report = None
    if processes.rank == 0:
        _end(asker, session)
        from dflash_hf.bench.margins import write_margins
        from dflash_hf.bench.report import write_report
        from dflash_hf.bench.summary import summarize

        try:
            write_margins(settings.out, models)
        except FAILURES as error:
            logger.warning(
                "margins.jsonl is left out (%s): the report does not say which differences are ties",
                error,
            )
        summarize(settings.out)
        report = write_report(settings.out)
    processes.end()
    return report


class Processes:
    """The processes of `accelerate launch` (or `torchrun`). Each process has whole models.

    The processes wait for each other before the first question and after the last one, but never for a forward. This
    is not tensor parallelism, which a model's own mesh of devices describes.

    Args:
        device (`str`): Device map that the user asked for. `"auto"` is each process's own accelerator.
    """

    def __init__(self, device: str) -> None:
        from accelerate import PartialState
        from accelerate.utils import disable_fsdp_ram_efficient_loading

        # Each process has whole models, even if the launcher's file configures FSDP.
        disable_fsdp_ram_efficient_loading()
        is_cpu = device == "cpu" or not torch.accelerator.is_available()
        # The slowest process may ask for much longer than the others.
        waits: dict[str, Any] = {}
        if "LOCAL_RANK" in os.environ:
            waits["timeout"] = timedelta(days=2)
        self._state = PartialState(cpu=is_cpu, **waits)
        self.rank = int(self._state.process_index)
        self.size = int(self._state.num_processes)
        self.device_map = device
        if self.size > 1 and device == "auto":
            self.device_map = str(self._state.device)

    def wait(self) -> None:
        """Waits until every process of the run is here. Returns at once if there is only one."""
        self._state.wait_for_everyone()

    def end(self) -> None:
        """Leaves the group of processes, if there is one."""
        if self.size > 1:
            self._state.destroy_process_group()


def _load_questions(settings: RunSettings) -> list[Question]:
    from dflash_hf.bench.sets import load_questions

    asked = {
        name: getattr(settings, name) for name in ("data_dir", "num_prompts", "seed", "template")
    }
    questions = [question for name in settings.data for question in load_questions(name, **asked)]
    require(
        bool(questions),
        f"questions in {', '.join(settings.data)}",
        questions,
        "name other sets as --data",
    )
    twice = [
        key for key, count in Counter(question.key for question in questions).items() if count > 1
    ]
    if twice:
        raise ValueError(
            f"expected every question once, got {twice[0]} twice; name each set once, and fix its ids"
        )
    return questions


def _load_models(settings: RunSettings, device_map: str) -> dict[str, Models]:
    """Loads the pair once per dtype. Loads nothing if only a server is asked."""
    if settings.target is None or not set(settings.methods) - {"server"}:
        return {}
    found: dict[str, Models] = {}
    needs_draft = any(method in NEEDS_DRAFT for method in settings.methods)
    for dtype in settings.dtype:
        target, processor = load_target(settings.target, dtype, device_map)
        check_no_stop_strings(target)
        tokenizer = tokenizer_of(processor)
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        has_template = processor.chat_template is not None
        is_fine = has_template or not (settings.template_options or settings.system)
        hint = "leave out --chat-template-kwargs, --no-thinking and --system"
        require(is_fine, "a target with a chat template", settings.target, hint)
        loaded: dict[str, Any] = {}
        if needs_draft:
            # The target's dtype is what other commands use too, even if the draft was saved in another one.
            loaded["draft"] = DFlashDraftModel.from_pretrained(
                settings.draft, dtype=target.dtype, device_map={"": execution_device(target)}
            )
        if settings.assistant:
            loaded["assistant"] = load_weights(
                AutoModelForCausalLM, settings.assistant, dtype=dtype, device_map=device_map
            )
        found[dtype] = Models(
            target=target,
            processor=processor,
            template_options=settings.template_options,
            **loaded,
        )
    return found


def _check_questions(
    questions: Sequence[Question], models: Mapping[str, Models], settings: RunSettings
) -> None:
    """Refuses images that do not exist, or that the target cannot see."""
    for question in questions:
        for image in question.image_files:
            require(
                Path(image).is_file(),
                f"the image of question {question.question_id}",
                image,
                "fix its path",
            )
    with_images = next((one for one in questions if one.images or image_names(one.history)), None)
    for found in models.values():
        if with_images is not None and tokenizer_of(found.processor) is found.processor:
            raise ValueError(
                f"expected a target that sees images for {with_images.dataset}, got {settings.target}; name another "
                "target, or other sets as --data"
            )


def _make_methods(
    settings: RunSettings, cells: Sequence[Cell], models: Mapping[str, Models]
) -> dict[str, Method]:
    """Returns the method of every cell that can be asked. The other cells get the reason in `failed`."""
    methods: dict[str, Method] = {}

    @functools.cache
    def make(name: str, dtype: str) -> Method:
        if name == "server":
            assert settings.server is not None
            client = OpenAIClient(settings.server, settings.server_model)
            return server_method(client, settings.template_options)
        if name != "zlab":
            return local_method(WAYS[name], models[dtype])
        from dflash_hf.bench.zlab import zlab_way

        return local_method(zlab_way(models[dtype]), models[dtype])

    for cell in cells:
        if cell.failed is None:
            try:
                check_draft(cell, models)
                methods[cell.model_id] = make(cell.method, cell.options.dtype)
            except ValueError as error:
                cell.failed = one_line(error)
    return methods


def check_draft(cell: Cell, models: Mapping[str, Models]) -> None:
    """Raises `ValueError` if the draft cannot run with the cell's options."""
    if cell.method not in NEEDS_DRAFT:
        return
    draft = models[cell.options.dtype].loaded_draft
    options = draft.generation_config
    with changed(options, **over_stored(options, cell.options.for_draft())):
        options.validate_options(draft.config.block_size, draft.config.sample_from_anchor)
    if cell.method in ("stock", "stock-static"):
        check_stock(draft)
    if cell.method == "stock-static":
        check_static_stock()


def _begin(
    folder: RunFolder,
    settings: RunSettings,
    cells: Sequence[Cell],
    questions: Sequence[Question],
    conditions: Mapping[str, Any],
    is_resumed: bool,
) -> None:
    """Writes the description of a new run, or tidies the answers of a continued run.

    Raises `ValueError` if a run would continue with other models. Nothing is written then.
    """
    if is_resumed:
        check_models(folder.read_run().get("provenance", {}), conditions, folder.path)
        folder.drop_counts()
    else:
        folder.write_questions(questions)
    before = folder.read_run() if is_resumed else {}
    conditions = _all_conditions(before.get("provenance", {}), conditions)
    settings_written = {**settings.what_matters(), "run_code": settings.run_code}
    folder.write_run(settings_written, cells, conditions, before.get("sessions", []))
    for cell in cells:
        batches = batches_of(cell, questions, cells, settings.repeats)
        folder.merge(cell.model_id, whole_batches(folder.read(cell.model_id), batches).values())


def _all_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's provenance: that of its first session, and in `continued` what differed in later sessions."""
    if not before:
        return now
    others = other_conditions(before, now)
    if not others:
        return before
    names = listed([name for name in others if name != "date"])
    logger.warning(
        "The run goes on under other conditions than it was begun under (%s): run.json has both",
        names,
    )
    return {**before, "continued": [*before.get("continued", []), others]}


# ---- what is asked when


def rounds_of(questions: Sequence[Question], cells: Sequence[Cell]) -> list[list[Question]]:
    """Returns the questions in rounds of one set and one number of turns. A full round fills every cell's batches."""
    groups: dict[tuple[str, int], list[Question]] = {}
    for question in questions:
        groups.setdefault((question.dataset, len(question.turns)), []).append(question)
    size = _round_size(cells)
    return [
        group[start : start + size]
        for group in groups.values()
        for start in range(0, len(group), size)
    ]


def _round_size(cells: Sequence[Cell]) -> int:
    """Returns the smallest number of questions that fills the batches of every cell."""
    return math.lcm(*(cell.options.batch for cell in cells))


def batches_of(
    cell: Cell, questions: Sequence[Question], cells: Sequence[Cell], repeats: int
) -> Iterator[Batch]:
    """Yields a cell's batches in the order in which they are asked."""
    for repeat in range(repeats):
        for questions_of_round in rounds_of(questions, cells):
            for batch in _split(questions_of_round, cell.options.batch):
                yield repeat, batch


def _split(questions: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    return (questions[start : start + size] for start in range(0, len(questions), size))


def seed_of(seed: int, batch: Sequence[Question], repeat: int, turn: int) -> int:
    """Returns the seed of a call. It is the same in any process and session, and differs between repeats."""
    text = repr((seed, [question.key for question in batch], repeat, turn))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


# A cell, how often the batch was asked before, and the batch.
Asked = tuple[Cell, int, Sequence[Question]]


def _by_cell_and_size(batches: Sequence[Asked]) -> list[list[Asked]]:
    """Splits batches into parts of one cell and batch size. The calls of a part share their buffers and graphs."""
    parts: dict[tuple[str, int], list[Asked]] = {}
    for asked in batches:
        cell, _, batch = asked
        parts.setdefault((cell.model_id, len(batch)), []).append(asked)
    return list(parts.values())


def _room_of(asked: Asked) -> tuple[int, float]:
    """Returns a key to sort batches: estimated tokens of the longest row, and how far a verify may go beyond it."""
    cell, _, batch = asked
    new_tokens = cell.options.max_new_tokens * len(batch[0].turns)
    # English has more letters than tokens, so that long prompts come before many turns. That is the safe side: answers
    # of earlier turns may be short, but a prompt always has its full length.
    prompts = [
        len(f"{question.history}{question.turns}")
        + LETTERS_OF_IMAGE * (len(question.images) + len(image_names(question.history)))
        for question in batch
    ]
    room_behind = 0.0
    if cell.method == "stock-static":
        # Transformers keeps static caches of one length per target, and a verify may reach one block beyond the text.
        # The draft's own block size is the largest one.
        room_behind = cell.options.block_size or math.inf
    return new_tokens + max(prompts), room_behind


@dataclass(slots=True)
class Asker:
    """Asks the remaining questions of one process's share."""

    settings: RunSettings
    cells: Sequence[Cell]
    methods: Mapping[str, Method]  # of each cell that can be asked
    folder: RunFolder
    processes: Processes
    questions: Sequence[Question]  # all questions of the run
    # Calls leave their buffers and graphs in these drafts for later calls.
    drafts: Sequence[DFlashDraftModel] = ()
    failures: dict[str, int] = field(default_factory=dict[str, int])
    method_seconds: float = 0.0

    def ask_all(self) -> dict[str, float]:
        """Asks all remaining batches. Returns the seconds of the session: in total, in methods, and beside them."""
        done: dict[str, set[Which]] = {
            cell.model_id: set(self.folder.read(cell.model_id)) for cell in self.cells
        }
        left = list(self._left(done))
        totals = {cell.model_id: 0 for cell in self.cells if cell.model_id in self.methods}
        for cell, _, batch in left:
            totals[cell.model_id] += len(batch)
        parts = [left]
        if self._warm_up(left):
            logger.warning(
                "The device does not keep what all cells have captured: they are asked one cell after the other"
            )
            parts = _by_cell_and_size(left)
        seconds = 0.0
        with Bars(totals, is_shown=self.processes.rank == 0) as bars:
            for part in parts:
                if len(parts) > 1 and not self._is_given_up(part[0][0]):
                    self._warm_up(part)
                started = time.perf_counter()
                for cell, repeat, batch in part:
                    if self._is_given_up(cell):
                        continue
                    answers = self._ask(cell, batch, repeat)
                    self.folder.append(cell.model_id, answers)
                    bars.add(cell.model_id, answers)
                    if self._is_given_up(cell):
                        bars.give_up(cell.model_id)
                seconds += time.perf_counter() - started
        harness = seconds - self.method_seconds
        return {
            "seconds": seconds,
            "method_seconds": self.method_seconds,
            "harness_seconds": harness,
        }

    def _is_given_up(self, cell: Cell) -> bool:
        """Returns whether `MAX_FAILURES` batches of a cell have failed in a row, so that it is not asked any more."""
        return self.failures.get(cell.model_id, 0) >= MAX_FAILURES

    def _left(self, done: Mapping[str, set[Which]]) -> Iterator[Asked]:
        """Yields the missing batches of this process, with cells in turns."""
        rounds = rounds_of(self.questions, self.cells)
        num_rounds = len(rounds) * self.settings.repeats
        if self.processes.rank == 0 and num_rounds < self.processes.size:
            logger.warning(
                "%d of %d processes have nothing to do: there are only %d groups of up to %d questions (the least "
                "common multiple of the batch sizes)",
                self.processes.size - num_rounds,
                self.processes.size,
                num_rounds,
                _round_size(self.cells),
            )
        asked = [cell for cell in self.cells if cell.model_id in self.methods]
        for repeat in range(self.settings.repeats):
            for index, questions in enumerate(rounds, repeat * len(rounds)):
                if index % self.processes.size != self.processes.rank:
                    continue
                first = index // self.processes.size % max(1, len(asked))
                for cell in (*asked[first:], *asked[:first]):
                    for batch in _split(questions, cell.options.batch):
                        if not all(
                            (question.key, repeat) in done[cell.model_id] for question in batch
                        ):
                            yield cell, repeat, batch

    def _warm_up(self, left: Sequence[Asked]) -> bool:
        """Makes calls that do not count, because the first calls also load, compile and capture.

        For every cell and batch size, the longest batch is asked. The longest of all come first, because buffers that
        are made for them have room for the others.

        Returns whether something that a call has captured is no longer kept at the end.
        """
        longest: dict[tuple[str, int], Asked] = {}
        for asked in sorted(left, key=_room_of, reverse=True):
            cell, _, batch = asked
            longest.setdefault((cell.model_id, len(batch)), asked)
        captured: set[object] = set()
        for cell, repeat, batch in longest.values():
            options = cell.options
            if not torch.accelerator.is_available():
                options = replace(
                    options, max_new_tokens=min(options.max_new_tokens, WARM_UP_TOKENS)
                )
            with suppress(*FAILURES):  # it will fail again in a call that counts
                self._converse(cell, options, batch, repeat, [[] for _ in batch])
            captured |= self._captured()
        return captured != self._captured()

    def _captured(self) -> set[object]:
        """Returns what is kept for later calls: shapes of buffers, and the settings of their graphs."""
        found: set[object] = set()
        for number, draft in enumerate(self.drafts):
            for buffers in kept_buffers(draft):
                found.add((number, buffers.shape))
                found |= {(number, buffers.shape, one) for one in buffers.graphs.captured}
        return found

    def _converse(
        self,
        cell: Cell,
        options: Options,
        batch: Sequence[Question],
        repeat: int,
        turns: Sequence[list[Turn]],
    ) -> None:
        """Asks a batch, turn by turn. Adds the answers to each question's `turns`."""
        for number in range(len(batch[0].turns)):
            conversations = [
                question.messages([turn.text for turn in before], self.settings.system)
                for question, before in zip(batch, turns, strict=True)
            ]
            seed = seed_of(self.settings.seed, batch, repeat, number)
            said = self.methods[cell.model_id](conversations, options, seed)
            for before, turn in zip(turns, said, strict=True):
                before.append(turn)

    def _ask(self, cell: Cell, batch: Sequence[Question], repeat: int) -> list[Answer]:
        """Asks a batch for answers that count. If the method fails, the answers have the error instead."""
        turns: list[list[Turn]] = [[] for _ in batch]
        error = None
        started = time.perf_counter()
        try:
            self._converse(cell, cell.options, batch, repeat, turns)
        except FAILURES as failure:
            error = one_line(f"{type(failure).__name__}: {failure}")
            logger.warning("%s: %s", cell.model_id, error)
            self.method_seconds += time.perf_counter() - started - _seconds_of(turns)
            # After an out-of-memory error, the next method should not find the memory in fragments.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.method_seconds += _seconds_of(turns)
        if error is None:
            self.failures[cell.model_id] = 0
        else:
            self.failures[cell.model_id] = self.failures.get(cell.model_id, 0) + 1
            turns = [[] for _ in batch]
        return [
            Answer(
                dataset=question.dataset,
                question_id=question.question_id,
                category=question.category,
                subcategory=question.subcategory,
                model_id=cell.model_id,
                repeat=repeat,
                turns=tuple(found),
                error=error,
                tstamp=time.time(),
            )
            for question, found in zip(batch, turns, strict=True)
        ]


def _seconds_of(turns: Sequence[Sequence[Turn]]) -> float:
    return sum(turn.wall_time for row in turns for turn in row)


def _end(asker: Asker, session: Mapping[str, float]) -> None:
    """Merges the answers of all processes in the order of the questions, and notes which cells were given up."""
    order = {question.key: number for number, question in enumerate(asker.questions)}
    for cell in asker.cells:
        answers = asker.folder.read(cell.model_id)
        sequence = sorted(answers, key=lambda asked: (asked[1], order[asked[0]]))
        asker.folder.merge(cell.model_id, [answers[asked] for asked in sequence])
        errors = [answer.error for answer in answers.values() if answer.has_failed]
        if cell.failed is None and errors and len(answers) < len(order) * asker.settings.repeats:
            cell.failed = (
                f"given up after {MAX_FAILURES} failures in a row, the last one: {errors[-1]}"
            )
    run = asker.folder.read_run()
    asker.folder.write_run(
        run["settings"], asker.cells, run["provenance"], [*run["sessions"], dict(session)]
    )
