"""The parts of a step over fixed buffers, each timed alone: draft, verify, accept, and the whole.

A run of `generate` is stopped where it would take its first step. Its rows are marked as finished, which freezes them:
every step then does all its work at the same place and changes nothing but scratch. On CUDA the body of the step is
captured three times, up to the end of the draft, of the verify, and as a whole; a part's time is a difference of two
medians. Elsewhere the same bodies run uncaptured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dflash_hf.bench.cells import Options
from dflash_hf.bench.timing import Marks
from dflash_hf.generation import decode
from dflash_hf.generation import static_step as step_module
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.capture import NotCapturableError
from dflash_hf.generation.cuda_graph import GraphStep
from dflash_hf.generation.host_reads import HostReadError, NoHostReads
from dflash_hf.generation.run import Run
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.pair.answers import changed, synchronize
from dflash_hf.undo import held

from .gaps import gaps_between, spans_of
from .pair import Inputs, Pair
from .uncaptured import uncaptured

# The function that ends each part; the acceptance ends with the step.
ENDS: dict[str, tuple[Any, str]] = {
    "draft": (DFlashCandidateGenerator, "propose"),
    "verify": (step_module, "verify"),
}
NUM_KERNELS = 40


class _CutError(Exception):
    """A part has ended; what follows it is not run."""


@contextmanager
def cut_after(part: str | None) -> Generator[None]:
    """Ends a step's body after a part of it, or nowhere for `None`."""
    if part is None:
        yield
        return
    owner, name = ENDS[part]
    whole: Callable[..., Any] = getattr(owner, name)

    def cut(*args: Any, **kwargs: Any) -> None:
        whole(*args, **kwargs)
        raise _CutError

    setattr(owner, name, cut)
    try:
        yield
    except _CutError:
        pass
    finally:
        setattr(owner, name, whole)


class _PlainPart(StaticStep):
    """A step up to the end of a part, launched from the host."""

    part: str | None = None

    def body(self, bound: int) -> Any:
        """Runs it as far as that."""
        with cut_after(self.part):
            return super().body(bound)


class _GraphPart(GraphStep):
    """The same in a CUDA graph."""

    part: str | None = None

    def body(self, bound: int) -> Any:
        """Runs it as far as that."""
        with cut_after(self.part):
            return super().body(bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What was measured.

    Args:
        prefill_ms (`float`): From the call of `generate` to the first token, on the host's clock.
        until_ms (`dict[str, list[float]]`): Samples up to the end of `"draft"`, of `"verify"`, and of `"step"`.
        context (`int`): Tokens of context, summed over rows.
        engine (`str`): `"cuda_graph"`, or `"static"` where nothing was captured.
        not_captured (`str`, *optional*): Why, on CUDA.
        host_reads (`str`, *optional*): What waited for the device in a steady step; `None` if nothing did.
        capture_seconds (`float`, *optional*): What capturing the step took, its kernels compiled already.
        kernels (`list[dict]`): Of one step, what took longest: `name`, `calls` and `microseconds` of each kernel (on a
            CPU: operation).
        gaps (`dict`, *optional*): Of the same step, how long the device was idle between kernels, by
            [`gaps.gaps_between`]; `None` on a CPU.
        width (`int`): Tokens verified per row.
        is_tree (`bool`): Whether they were a tree's.
    """

    prefill_ms: float
    until_ms: dict[str, list[float]]
    context: int
    engine: str
    not_captured: str | None
    host_reads: str | None
    capture_seconds: float | None
    kernels: list[dict[str, Any]]
    gaps: dict[str, Any] | None
    width: int
    is_tree: bool


def measure_stages(
    pair: Pair, inputs: Inputs, options: Options, width: int | None, samples: int
) -> Stages:
    """Times the parts of a step behind a batch of prompts.

    Args:
        pair, inputs, options: What is decoded, and how.
        width (`int`, *optional*): Tokens that are verified per row: a chain's, or a tree's where a block has fewer;
            `None` for what users get, who set neither a width nor a number of nodes.
        samples (`int`): Of each part.
    """
    found: list[Stages] = []
    draft_options: dict[str, Any] = {"engine": "cuda_graph"}
    if width is not None and width > pair.block_size:
        draft_options |= {"num_tree_nodes": width}
    elif width is not None:
        draft_options |= {"verify_width": width, "num_tree_nodes": 0}
    captures = nullcontext() if pair.device.type == "cuda" else uncaptured(pair.draft)
    with (
        changed(pair.draft.generation_config, **draft_options),
        captures,
        _at_first_step(lambda run: found.append(_time(run, samples))),
    ):
        pair.target.generate(**inputs, **options.arguments(), assistant_model=pair.draft)
    return found[0]


@contextmanager
def _at_first_step(probe: Callable[[Run], None]) -> Generator[None]:
    """Has `generate` call a function where it would take its first step, and end there."""
    whole = decode.advance

    def advance(run: Run, *args: Any, **kwargs: Any) -> None:
        with torch.inference_mode():
            probe(run)

    decode.advance = advance  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        decode.advance = whole


def _time(run: Run, samples: int) -> Stages:
    """Freezes a run's rows and times a step's parts; the rows are as they were afterwards."""
    prefill = run.stats.time_to_first_token * 1e3
    is_cuda = run.request.target.device.type == "cuda"
    reason = None
    done = run.state.done.clone()
    run.state.done.fill_(True)
    try:
        if is_cuda:
            try:
                return _timed(run, _GraphPart(run), samples, prefill, None)
            except NotCapturableError as error:
                reason = str(error)
        return _timed(run, _PlainPart(run), samples, prefill, reason)
    finally:
        run.state.done.copy_(done)


def _timed(
    run: Run, step: _GraphPart | _PlainPart, samples: int, prefill: float, reason: str | None
) -> Stages:
    bound = step.bound(0)
    until: dict[str, list[float]] = {}
    with torch.cuda.device_of(run.state.ids):
        launches: dict[str, Callable[[], Any]] = {}
        seconds = 0.0
        for name in (*ENDS, "step"):
            step.part = name if name in ENDS else None
            began = time.perf_counter()
            launches[name] = _launch(step, bound)
            seconds = time.perf_counter() - began  # the last counts
        for name, launch in launches.items():
            until[name] = _samples(launch, run.request.target.device, samples)
        step.part = None
        reads = _host_reads(launches["step"], run)
        kernels, gaps = _profile(launches["step"], run.request.target.device)
    return Stages(
        prefill_ms=prefill,
        until_ms=until,
        context=int(run.state.lengths.sum()),
        engine=step.name,
        not_captured=reason,
        host_reads=reads,
        capture_seconds=seconds if isinstance(step, _GraphPart) else None,
        kernels=kernels,
        gaps=gaps,
        width=run.state.width,
        is_tree=run.generator.trees is not None,
    )


def _launch(step: _GraphPart | _PlainPart, bound: int) -> Callable[[], Any]:
    """A call that runs the step's body up to its current part: a replay, or the body itself."""
    if isinstance(step, _GraphPart):
        captured = step.capture_one(bound)
        return captured.graph.replay
    part = step.part

    def run() -> None:
        step.part = part
        step.body(bound)

    return run


def _samples(launch: Callable[[], Any], device: torch.device, samples: int) -> list[float]:
    for _ in range(2):
        launch()
    synchronize(device)
    marks = Marks(device)
    for _ in range(samples):
        marks.mark()
        launch()
    marks.mark()
    return marks.intervals()


def _profile(
    launch: Callable[[], Any], device: torch.device
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Returns the kernels of one launch that take longest, by torch's profiler, and on CUDA the gaps between them."""
    is_cuda = device.type == "cuda"
    kind = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    synchronize(device)
    if is_cuda:
        # A profiler's first use sets it up, which would stand between kernels.
        with profile(activities=[kind]):
            launch()
            synchronize(device)
    with profile(activities=[kind]) as profiler:
        launch()
        synchronize(device)
    found: list[dict[str, Any]] = []
    for event in profiler.key_averages():
        total = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        found.append(
            {"name": event.key[:120], "calls": event.count, "microseconds": round(total, 1)}
        )
    longest = sorted(found, key=lambda row: row["microseconds"], reverse=True)[:NUM_KERNELS]
    gaps = gaps_between(spans_of(profiler)) if is_cuda else None
    return longest, gaps


def _host_reads(launch: Callable[[], Any], run: Run) -> str | None:
    """Says what waits for the device when a step is started and its outcome is fetched, as the engine does both."""
    outcome = run.state.outcome
    is_cuda = outcome.is_cuda
    host = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=is_cuda)
    try:
        if is_cuda:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(3):
                launch()
                host.copy_(outcome, non_blocking=True)
        else:
            with held(NoHostReads()):
                launch()
    except HostReadError as error:
        return str(error)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).partition("\n")[0]
    finally:
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")
            synchronize(outcome.device)
    return None
