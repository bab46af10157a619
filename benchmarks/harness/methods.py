"""The ways of decoding that are compared, by the names of the records, and one measured run of any.

They are those of `dflash-hf bench` ([`dflash_hf.bench.methods`]) over prompts that are ids already; what is added is
the draft's engine, and memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dflash_hf.bench.cells import Options
from dflash_hf.bench.methods import WAYS, Inputs, Models, Raw, Way, answers_of, dflash, timed
from dflash_hf.bench.zlab import zlab_way
from dflash_hf.pair.answers import changed

from .pair import Pair
from .uncaptured import uncaptured

logger = logging.getLogger(__name__)

# What Qwen3 publishes with its weights, for answers that think: fields of `Options`.
QWEN3_SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way of decoding.

    Args:
        name (`str`): What rows call it.
        way (callable): Decodes prompts of a pair.
        takes_batches (`bool`): Whether it takes more than one prompt at a time.
        options (mapping): Fields of [`Options`] that it decodes with, whatever it is asked for.
    """

    name: str
    way: Way
    takes_batches: bool = True
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One measured run.

    Args:
        answers (`list[list[int]]`): New tokens of each row, the end token included.
        prompt_tokens (`list[int]`): Real prompt tokens of each row.
        committed, verifies (`int`): Tokens committed by verifies (the bonus included, the prefill's token not), and
            verifies, both summed over rows.
        seconds, prefill_seconds (`float`): Of the call, and until its first token.
        step_ms (`list[float]`): See [`dflash_hf.bench.methods.Raw`].
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


def _on_engine(engine: str) -> Way:
    """Our way of decoding on an engine; `"static"` is `"cuda_graph"` uncaptured."""

    def way(models: Models, inputs: Inputs, options: Options) -> Raw:
        draft: Any = models.draft
        if engine == "static":
            with changed(draft.generation_config, engine="cuda_graph"), uncaptured(draft):
                return dflash(models, inputs, options)
        with changed(draft.generation_config, engine=engine):
            return dflash(models, inputs, options)

    return way


def ours_on(engine: str) -> Method:
    """Returns our way of decoding on an engine, named after it."""
    return Method(name=f"ours/{engine}", way=_on_engine(engine))


def ours_as_chain(name: str, width: int, engine: str = "auto") -> Method:
    """Returns our way of decoding over chains, never trees, that verifies no more than `width` tokens of a block."""
    chain = {"verify_width": width, "num_tree_nodes": 0}
    return Method(name=name, way=_on_engine(engine), options=chain)


def ours_at(width: int, block: int, engine: str = "auto") -> Method:
    """Returns [`ours_as_chain`] by the name that rows have for a width: `ours` is a whole block."""
    return ours_as_chain("ours" if width == block else f"ours/w{width}", width, engine)


def with_options(name: str, method: Method, **options: Any) -> Method:
    """Returns a way of decoding under fields of [`Options`] of its own."""
    return replace(method, name=name, options={**method.options, **options})


PLAIN = Method(name="plain", way=WAYS["plain"])
PLAIN_STATIC = Method(name="plain/static", way=WAYS["plain-static"])
OURS = Method(name="ours", way=WAYS["dflash"])
# As users get it: neither a width nor a number of nodes is set.
OURS_DEFAULT = replace(OURS, name="ours/default")
OURS_QWEN3 = with_options("ours/qwen3-sampling", OURS, **QWEN3_SAMPLING)
PLAIN_QWEN3 = with_options("plain/qwen3-sampling", PLAIN, **QWEN3_SAMPLING)
STOCK = Method(name="stock", way=WAYS["stock"], takes_batches=False)
STOCK_STATIC = Method(name="stock/static", way=WAYS["stock-static"], takes_batches=False)
LOOKUP = Method(name="lookup", way=WAYS["lookup"], takes_batches=False)


def zlab_method(pair: Pair) -> Method | None:
    """Returns z-lab's `dflash_generate` over the same weights, or `None`, with the reason logged."""
    try:
        way = zlab_way(pair.models)
    except ValueError as error:
        logger.warning("leaving out z-lab's package: %s", error)
        return None
    return Method(name="zlab", way=way, takes_batches=False)


def measure(pair: Pair, method: Method, inputs: Inputs, options: Options, seed: int = 0) -> Outcome:
    """Runs a method once."""
    is_cuda = pair.device.type == "cuda"
    held = 0
    if is_cuda:
        torch.cuda.synchronize(pair.device)
        held = torch.cuda.memory_allocated(pair.device)
        torch.cuda.reset_peak_memory_stats(pair.device)
    options = replace(options, **method.options)
    raw, seconds = timed(method.way, pair.models, inputs, options, seed)
    answers = answers_of(pair.models, inputs, raw)
    if raw.steps:
        counts = [count for row in raw.steps for count in row["committed"]]
    else:
        # Without a draft every forward behind the prefill makes a token of each row.
        counts = [1] * sum(len(answer) - 1 for answer in answers)
    return Outcome(
        answers=answers,
        prompt_tokens=inputs["attention_mask"].sum(dim=1).tolist(),
        committed=sum(counts),
        verifies=len(counts),
        seconds=seconds,
        prefill_seconds=raw.ttft or 0.0,
        step_ms=raw.step_ms,
        peak_bytes=torch.cuda.max_memory_allocated(pair.device) - held if is_cuda else None,
    )
