"""The ways of decoding that are compared, each as one call with the same arguments, and one measured run of any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from dflash_hf.generation.cuda_graph import uncaptured

from .clock import StepClock, synchronize
from .pair import Inputs, Pair

LOOKUP_TOKENS = 15
# What Qwen3 publishes with its weights, for answers that think: fields of `Settings`.
QWEN3_SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run decodes.

    Args:
        max_new_tokens (`int`): Length limit of an answer.
        temperature (`float`, *optional*): Samples at this temperature; `None` is greedy.
        top_k (`int`), top_p (`float`): What is sampled from; as they are, the whole vocabulary.
        seed (`int`): Set before the run.
        on_token (callable, *optional*): Called behind every forward and its tokens, by the methods that say so.
    """

    max_new_tokens: int
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    on_token: Callable[[], None] | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `generate`."""
        if self.temperature is None:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True, slots=True)
class Raw:
    """What a method returns.

    Args:
        sequences (`torch.Tensor` of shape `[B, S + new]`): Prompts and answers.
        verified (`tuple[int, int]`, *optional*): Tokens committed by verifies (the bonus included, the prefill's token
            not), and verifies, both summed over rows; `None` to count one verify per forward after the prefill.
        first (`int`): Tokens that the first forward of the target committed.
    """

    sequences: Tensor
    verified: tuple[int, int] | None = None
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way of decoding.

    Args:
        name (`str`): What rows call it.
        run (callable): Decodes prompts of a pair.
        batches (`bool`): Whether it takes more than one prompt at a time.
        tells (`bool`): Whether its statistics say how long it took: ours, which runs otherwise where a hook hangs.
        marks_tokens (`bool`): Whether it calls `on_token` instead, because its forwards may be compiled.
    """

    name: str
    run: Callable[[Pair, Inputs, Settings], Raw]
    batches: bool
    tells: bool = False
    marks_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One measured run.

    Args:
        answers (`list[list[int]]`): New tokens of each row, the end token included.
        prompt_tokens (`list[int]`): Real prompt tokens of each row.
        committed, verifies (`int`): See [`Raw`].
        seconds, prefill_seconds (`float`), step_ms (`list[float]`): See [`clock.StepClock`].
        peak_bytes (`int`, *optional*): Memory on the accelerator beyond what was there before; `None` on a CPU.
    """

    answers: list[list[int]]
    prompt_tokens: list[int]
    committed: int
    verifies: int
    seconds: float
    prefill_seconds: float
    step_ms: list[float]
    peak_bytes: int | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens generated, summed over rows."""
        return sum(len(answer) for answer in self.answers)

    @property
    def decode_tokens(self) -> int:
        """Tokens generated after the prefill's one of each row."""
        return self.new_tokens - len(self.answers)

    @property
    def decode_seconds(self) -> float:
        """Time after the prefill."""
        return self.seconds - self.prefill_seconds


class CommitCounter(BaseStreamer):
    """Counts the tokens that each step of assisted `generate` commits."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Receives the prompt, then what each step commits."""
        if not self._is_prompt:
            self.counts.append(value.numel())
        self._is_prompt = False

    def end(self) -> None:
        """Has nothing left to write."""


def plain(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
    """Runs plain `generate`."""
    return Raw(pair.target.generate(**inputs, **settings.arguments()))


class OnToken(StoppingCriteria):
    """Calls a function behind every step of `generate`'s loop, which has one forward, and stops nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Returns that no row is done."""
        self.call()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def plain_static(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
    """Runs plain `generate` with a static cache, for which Transformers compiles the forward on an accelerator."""
    return Raw(
        pair.target.generate(
            **inputs,
            **settings.arguments(),
            cache_implementation="static",
            stopping_criteria=_marking(settings),
        )
    )


def _marking(settings: Settings) -> StoppingCriteriaList:
    """Returns what calls `on_token` behind every forward, if it is asked for."""
    return StoppingCriteriaList([] if settings.on_token is None else [OnToken(settings.on_token)])


def ours(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
    """Runs `generate(..., assistant_model=draft)`, this package's way."""
    out = pair.target.generate(**inputs, **settings.arguments(), assistant_model=pair.draft)
    stats = pair.draft.last_stats
    return Raw(out, (sum(map(sum, stats.num_committed)), stats.num_verifies))


def stock(pair: Pair, inputs: Inputs, settings: Settings, **more: Any) -> Raw:
    """Runs Transformers' own DFlash with our draft, whose `forward` keeps upstream's contract; one row."""
    counter = CommitCounter()
    out = pair.target.generate(
        **inputs,
        **settings.arguments(),
        assistant_model=pair.draft,
        speculation_type="dflash",
        streamer=counter,
        **more,
    )
    return Raw(out, first=counter.counts[0])


def stock_static(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
    """Runs the same with a static cache, for which Transformers compiles the verify on an accelerator.

    The cache has room for a block more: the last verify may reach beyond the longest text.
    """
    room = inputs["input_ids"].shape[1] + settings.max_new_tokens + pair.block_size
    return stock(
        pair,
        inputs,
        settings,
        cache_implementation="static",
        max_cache_len=room,
        stopping_criteria=_marking(settings),
    )


def lookup(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
    """Runs Transformers' prompt lookup: drafts copied from the text so far; one row."""
    counter = CommitCounter()
    out = pair.target.generate(
        **inputs, **settings.arguments(), prompt_lookup_num_tokens=LOOKUP_TOKENS, streamer=counter
    )
    return Raw(out, first=counter.counts[0])


def ours_with(name: str, **options: Any) -> Method:
    """Returns our way of decoding under options of the draft's own, which are put back behind each run."""

    def run(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
        config = pair.draft.generation_config
        before = {option: getattr(config, option) for option in options}
        for option, value in options.items():
            setattr(config, option, value)
        try:
            return ours(pair, inputs, settings)
        finally:
            for option, value in before.items():
                setattr(config, option, value)

    return Method(name=name, run=run, batches=True, tells=True)


def ours_on(engine: str) -> Method:
    """Returns our way of decoding on an engine of its own, named after it; `"static"` is `"cuda_graph"` uncaptured."""
    if engine != "static":
        return ours_with(f"ours/{engine}", engine=engine)
    captured = ours_with("ours/static", engine="cuda_graph")

    def run(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
        with uncaptured(pair.draft):
            return captured.run(pair, inputs, settings)

    return replace(captured, run=run)


def ours_as_chain(name: str, width: int, **options: Any) -> Method:
    """Returns our way of decoding over chains, never trees, that verifies no more than `width` tokens of a block."""
    return ours_with(name, verify_width=width, num_tree_nodes=0, **options)


def ours_at(width: int, block: int, **options: Any) -> Method:
    """Returns [`ours_as_chain`] by the name that rows have for a width: `ours` is a whole block."""
    return ours_as_chain("ours" if width == block else f"ours/w{width}", width, **options)


def sampled(name: str, method: Method, **sampling: Any) -> Method:
    """Returns a way of decoding that samples, by these fields of `Settings`, whatever it is asked for."""

    def run(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
        return method.run(pair, inputs, replace(settings, **sampling))

    return replace(method, name=name, run=run)


PLAIN = Method(name="plain", run=plain, batches=True)
PLAIN_STATIC = Method(name="plain/static", run=plain_static, batches=True, marks_tokens=True)
OURS = Method(name="ours", run=ours, batches=True, tells=True)
OURS_EAGER = ours_on("eager")
# As users get it: neither a width nor a number of nodes is set.
OURS_DEFAULT = replace(OURS, name="ours/default")
OURS_QWEN3 = sampled("ours/qwen3-sampling", OURS, **QWEN3_SAMPLING)
PLAIN_QWEN3 = sampled("plain/qwen3-sampling", PLAIN, **QWEN3_SAMPLING)
STOCK = Method(name="stock", run=stock, batches=False)
STOCK_STATIC = Method(name="stock/static", run=stock_static, batches=False, marks_tokens=True)
LOOKUP = Method(name="lookup", run=lookup, batches=False)


def measure(pair: Pair, method: Method, inputs: Inputs, settings: Settings) -> Outcome:
    """Runs a method once under the clock."""
    torch.manual_seed(settings.seed)
    device = pair.device
    is_cuda = device.type == "cuda"
    synchronize(device)
    held = torch.cuda.memory_allocated(device) if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    clock = StepClock(pair.target, device, is_hooked=not method.tells and not method.marks_tokens)
    if method.marks_tokens:
        settings = replace(settings, on_token=clock.marks.mark)
    with clock:
        raw = method.run(pair, inputs, settings)
    if method.tells:
        clock.take(pair.draft.last_stats)
    answers = _answers(raw.sequences, inputs["input_ids"].shape[1], pair.eos_ids())
    new = sum(len(answer) for answer in answers)
    if raw.verified is not None:
        committed, verifies = raw.verified
    elif method.name.startswith(PLAIN.name):
        committed = verifies = new - len(answers)
    else:
        committed, verifies = new - raw.first, clock.num_forwards - 1
    return Outcome(
        answers=answers,
        prompt_tokens=inputs["attention_mask"].sum(dim=1).tolist(),
        committed=committed,
        verifies=verifies,
        seconds=clock.seconds,
        prefill_seconds=clock.prefill_seconds,
        step_ms=clock.step_ms,
        peak_bytes=torch.cuda.max_memory_allocated(device) - held if is_cuda else None,
    )


def _answers(sequences: Tensor, columns: int, eos_ids: list[int]) -> list[list[int]]:
    """Each row's new tokens up to its end token; what stands behind it is padding."""
    answers: list[list[int]] = []
    for row in sequences[:, columns:].tolist():
        end = next((index for index, token in enumerate(row) if token in eos_ids), len(row) - 1)
        answers.append(row[: end + 1])
    return answers
