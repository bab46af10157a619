"""What a case of the fuzzer is, and how cases are drawn: by hypothesis, which also finds the smallest that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from fuzz.targets import DRAFTS, IMAGES, TEXT
from helpers.vision import Grid

EOS = (3, 9, 17, 30, 44, 58)
# What `generate` is given for each; those that need an end-of-sequence id have no effect without one.
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "ngram": {"no_repeat_ngram_size": 2},
    "min new": {"min_new_tokens": 4},
    "bad words": {"bad_words_ids": [[5], [7, 8], [11]]},
    "bias": {"sequence_bias": {(9,): -3.0, (12, 13): 4.0}},
    "suppress": {"suppress_tokens": [4, 6, 10]},
    "begin": {"begin_suppress_tokens": [14, 15]},
    "decay": {"exponential_decay_length_penalty": (3, 1.3)},
    "forced end": {"forced_eos_token_id": EOS[0]},
    "prefix": {},
    "own": {},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "top-k": {"top_k": 7},
    "top-p": {"top_k": 0, "top_p": 0.7},
    "warm": {"top_k": 20, "top_p": 0.9, "temperature": 0.6},
    "min-p": {"top_k": 0, "min_p": 0.1, "temperature": 1.5},
    "others": {"top_k": 0, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
}
OUTPUTS = ("output_scores", "output_logits", "output_hidden_states")


@dataclass(frozen=True)
class Turn:
    """One call of `generate`, and how the draft is set for it; see [`turns`] for the values."""

    typed: int = 0
    new: int = 8
    engine: str = "eager"
    draft: str = "mixed"
    block: int = 4
    width: int | str | None = None
    costs: int | None = None
    nodes: int | None = None
    window: int | None = None
    rule: str | None = None
    sampler: str = "plain"
    eos: int = 0
    processors: tuple[str, ...] = ()
    criterion: str | None = None
    streamer: bool = False
    outputs: tuple[str, ...] = ()
    whole: bool = True


@dataclass(frozen=True)
class Case:
    """A conversation: rows, a cache or none, and turns.

    Args:
        target (`str`): Name of a target.
        seed (`int`): Of the prompts, the draws and the places where the draft is wrong.
        lengths (`tuple[int, ...]`): Tokens of each row's prompt; with images words around each of them.
        pictures (`tuple`): Sizes of every row's images.
        holes (`bool`): Whether there is padding inside the first prompt.
        ahead (`int`): Columns that the attention mask goes on behind the prompt.
        cache (`str`, *optional*): Kind of cache that is passed in, or `"returned"`.
        context (`str`, *optional*): What is around every call; see `pieces.within`.
        copies (`int`): Sampled answers per row.
        turns (`tuple[Turn, ...]`): The calls.
    """

    target: str
    seed: int = 0
    lengths: tuple[int, ...] = (4,)
    pictures: tuple[tuple[Grid, ...], ...] = ()
    holes: bool = False
    ahead: int = 0
    cache: str | None = None
    context: str | None = None
    copies: int = 1
    turns: tuple[Turn, ...] = (Turn(),)


def turns(first: bool, more: bool) -> st.SearchStrategy[Turn]:
    """Turns of a conversation.

    Args:
        first (`bool`): Whether nothing came before it.
        more (`bool`): Whether the conversation goes on: rows must all end alike then.
    """

    @st.composite
    def draw(draw: Any) -> Turn:
        rule = draw(st.sampled_from([None, None, None, "argmax", "shared_noise", "sample"]))
        width = draw(st.sampled_from([None, None, 1, 2, 3, 5, "auto"]))
        if rule == "sample" and width == "auto":
            width = None  # what is drawn follows from the widths, and those from the clock
        block = draw(st.sampled_from([4, 8, 2, 3, 12, 1]))
        nodes = draw(st.sampled_from([None, None, None, 2, 5, 8, 13, 32, 70, 100, 128]))
        draft = draw(st.sampled_from(list(DRAFTS)))
        widest = block + DRAFTS[draft].get("sample_from_anchor", False)
        processors = draw(st.lists(st.sampled_from(list(PROCESSORS)), max_size=2, unique=True))
        if not draw(st.booleans()) or rule == "sample":
            processors = []
        width = min(width, widest) if isinstance(width, int) else width
        if rule == "sample":
            nodes = None  # rejection goes along a chain
        if nodes is not None:
            width = width if width == "auto" else None
        return Turn(
            typed=0 if first else draw(st.integers(1, 5)),
            new=draw(st.integers(1, 24)),
            engine=draw(st.sampled_from(["eager", "eager", "static", "tape"])),
            draft=draft,
            block=block,
            width=width,
            nodes=nodes,
            window=draw(st.sampled_from([None, None, None, 1, 3, 7, 20])),
            rule=rule,
            sampler=draw(st.sampled_from(list(SAMPLERS))) if rule else "plain",
            eos=draw(st.sampled_from([0, 0, 1, len(EOS)])),
            processors=tuple(processors),
            criterion=draw(st.sampled_from([None, None, None, "token", "rows", "time"])),
            streamer=draw(st.sampled_from([False, False, True])),
            outputs=tuple(name for name in OUTPUTS if draw(st.integers(0, 5)) == 5),
            whole=draw(st.booleans()),
            costs=draw(st.sampled_from([None, None, 0, 1, 2, 3])),
        )

    return draw()


@st.composite
def _conversation(draw: Any, is_image: bool) -> tuple[Turn, ...]:
    num = draw(st.sampled_from([1, 1, 2] if is_image else [1, 1, 2, 3]))
    return tuple(draw(turns(index == 0, index + 1 < num)) for index in range(num))


def texts(targets: Sequence[str] = TEXT) -> st.SearchStrategy[Case]:
    """Cases without images."""
    lengths = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple)

    @st.composite
    def draw(draw: Any) -> Case:
        conversation = draw(_conversation(False))
        cache = draw(st.sampled_from([None, None, "dynamic", "bare", "static", "returned"]))
        alone = len(conversation) == 1 and cache in (None, "returned")
        return Case(
            target=draw(st.sampled_from(list(targets))),
            seed=draw(st.integers(0, 10**6)),
            lengths=draw(lengths),
            holes=draw(st.integers(0, 9)) == 9,
            ahead=draw(st.sampled_from([0, 0, 0, 0, 1, 4])) if alone and cache is None else 0,
            cache=cache,
            context=draw(
                st.sampled_from(
                    [
                        None,
                        None,
                        None,
                        "room",
                        "groups",
                        "groups",
                        "hooks",
                        "inference",
                        "autocast",
                        "dtype",
                        "meta",
                        "thread",
                    ]
                )
            ),
            copies=draw(st.sampled_from([1, 1, 1, 2])) if alone else 1,
            turns=conversation,
        )

    return draw()


def images(targets: Sequence[str] = IMAGES) -> st.SearchStrategy[Case]:
    """Cases with images: none, one or several in each row."""
    sides = st.sampled_from([2, 4, 6, 8])
    row = st.lists(st.tuples(sides, sides), max_size=3).map(tuple)

    @st.composite
    def draw(draw: Any) -> Case:
        pictures = draw(st.lists(row, min_size=1, max_size=3).map(tuple))
        conversation = draw(_conversation(True))
        cache = draw(st.sampled_from([None, None, "dynamic", "returned"]))
        alone = len(conversation) == 1 and cache in (None, "returned")
        return Case(
            target=draw(st.sampled_from(list(targets))),
            seed=draw(st.integers(0, 10**6)),
            lengths=draw(st.tuples(*[st.integers(2, 8)] * len(pictures))),
            pictures=pictures,
            cache=cache,
            context=draw(
                st.sampled_from([None, None, None, "room", "hooks", "inference", "thread"])
            ),
            copies=draw(st.sampled_from([1, 1, 1, 2])) if alone else 1,
            turns=conversation,
        )

    return draw()
