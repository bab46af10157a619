"""Questions about drawn pictures for the vision pair, each with the one answer that follows from the picture.

Every sample is a deterministic function of (kind, split, index); a hash of its questions and pictures decides the
split, so that no held-out prompt was trained on. Answers spell out what they look at before they conclude.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from scenes import BACKGROUNDS, COLOURS, GRIDS, SHAPES, Chart, Picture, Scene, Sign, draw_scene
from tasks_base import normalize
from tasks_dialogue import make_dialogue

VisionKind = Literal[
    "describe", "count", "find", "relate", "read", "chart", "compare", "chat", "talk"
]
Split = Literal["train", "heldout"]

VISION_KINDS: Final[tuple[VisionKind, ...]] = (
    "describe",
    "count",
    "find",
    "relate",
    "read",
    "chart",
    "compare",
    "chat",
    "talk",
)
# The kinds with a picture; `talk` has none.
PICTURE_KINDS: Final = VISION_KINDS[:-1]
_HELDOUT_MODULUS: Final = 16
_MAX_DRAWS: Final = 10_000
_NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_VOCABULARY: Final = (
    "apple bank bridge cafe castle city coffee door east exit farm fish forest garden gate hotel house island "
    "lake lemon market metro moon museum music north ocean office open orange park river road school shop south "
    "stop storm sugar sun taxi tea theatre tower train water west winter zoo"
)
_WORDS: Final = tuple(_VOCABULARY.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: pictures stand before the text."""

    role: Literal["user", "assistant"]
    text: str
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSample:
    """A conversation that ends with a user turn, and the answer to it."""

    kind: VisionKind
    split: Split
    index: int
    turns: tuple[Turn, ...]
    answer: str

    def check(self, answer_text: str) -> bool:
        """Tell whether an answer text is the reference up to white space."""
        return normalize(answer_text) == normalize(self.answer)

    def pictures(self) -> list[Picture]:
        """Return the pictures of all turns, in order."""
        return [picture for turn in self.turns for picture in turn.pictures]

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as a chat template takes it; image parts hold no image (see `pictures`)."""
        return [message(turn) for turn in self.turns]

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages followed by the reference answer, as training text."""
        return [*self.messages(), message(Turn(role="assistant", text=self.answer))]


def message(turn: Turn) -> dict[str, Any]:
    """Return a turn as a message: plain text, or a list of image parts and the text."""
    if not turn.pictures:
        return {"role": turn.role, "content": turn.text}
    return {
        "role": turn.role,
        "content": [{"type": "image"}] * len(turn.pictures) + [{"type": "text", "text": turn.text}],
    }


def make_vision_sample(kind: VisionKind, split: Split, index: int) -> VisionSample:
    """Generate the sample of a kind and split at an index; there is no end to the stream."""
    if kind not in _MAKERS:
        raise ValueError(f"expected a kind among {VISION_KINDS}, got {kind!r}; use one of them.")
    rng = random.Random(f"vision/{kind}/{split}/{index}")
    for _ in range(_MAX_DRAWS):
        turns, answer = _MAKERS[kind](rng)
        digest = hashlib.blake2b(repr(turns).encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest, "big") % _HELDOUT_MODULUS == 0
        if held_out == (split == "heldout"):
            return VisionSample(
                kind=kind, split=split, index=index, turns=tuple(turns), answer=answer
            )
    raise RuntimeError(
        f"no {split} prompt of kind {kind} in {_MAX_DRAWS} draws; widen the generator."
    )


Made = tuple[list[Turn], str]


def _ask(text: str, *pictures: Picture) -> Turn:
    return Turn(role="user", text=text, pictures=pictures)


def _scene(rng: random.Random, least: int = 1, most: int = 5) -> Scene:
    return draw_scene(rng, rng.choice(GRIDS), rng.randint(least, most))


def _plural(shape: str, count: int) -> str:
    return shape if count == 1 else {"cross": "crosses"}.get(shape, f"{shape}s")


def _description(scene: Scene) -> str:
    count = len(scene.things)
    begin = f"The picture shows {_NUMBERS[count]} {_plural('object', count)} on a {scene.background} background."
    places = [
        f"At the {scene.place(thing.row, thing.column)} there is a {thing.name}."
        for thing in scene.things
    ]
    return " ".join([begin, *places])


def _describe(rng: random.Random) -> Made:
    scene = _scene(rng)
    question = rng.choice(("Describe the picture.", "What do you see?", "What is in this picture?"))
    return [_ask(question, scene)], _description(scene)


def _count_question(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """Ask for the number of all objects, of the big ones or of the small ones."""
    wanted = rng.choice(("", "big ", "small "))
    total, parts = 0, []
    for thing in scene.things:
        place = scene.place(thing.row, thing.column)
        hit = wanted in ("", f"{thing.size} ")
        total += hit
        parts.append(
            f"{place}, {thing.size}" + (f", that makes {_NUMBERS[total]}." if hit else ".")
        )
    counted = f"{wanted}{_plural('object', total)}"
    verb = "is" if total == 1 else "are"
    answer = f"I look for {wanted}objects: {' '.join(parts)} So there {verb} {_NUMBERS[total]} {counted}."
    return f"How many {wanted}objects are there?", answer


def _count(rng: random.Random) -> Made:
    scene = _scene(rng)
    question, answer = _count_question(rng, scene)
    return [_ask(question, scene)], answer


def _different_shapes(rng: random.Random, most: int) -> Scene:
    """Make up a scene in which no shape and no colour comes twice."""
    while True:
        scene = _scene(rng, 1, most)
        count = len(scene.things)
        if (
            len({thing.shape for thing in scene.things})
            == count
            == len({thing.colour for thing in scene.things})
        ):
            return scene


def _find_question(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """Ask for the colour or the place of a shape, or for what is at a place."""
    thing = rng.choice(scene.things)
    place = scene.place(thing.row, thing.column)
    form = rng.randrange(4)
    if form == 0:
        return (
            f"What colour is the {thing.shape}?",
            f"I find the {thing.shape} at the {place}. It is {thing.size} and its colour is {thing.colour}.",
        )
    if form == 1:
        return (
            f"Where is the {thing.colour} {thing.shape}?",
            f"The {thing.colour} {thing.shape} is at the {place}, in row {thing.row + 1} and column "
            f"{thing.column + 1} of the picture.",
        )
    if form == 2:
        row, column = rng.randrange(scene.rows), rng.randrange(scene.columns)
    else:
        row, column = thing.row, thing.column
    place = scene.place(row, column)
    return (
        f"What is at the {place}?",
        f"I look at the {place} of the picture {_found(scene, row, column)}",
    )


def _found(scene: Scene, row: int, column: int) -> str:
    """Say what is in a cell."""
    here = [thing for thing in scene.things if (thing.row, thing.column) == (row, column)]
    return f"and find a {here[0].name} there." if here else "but I find nothing there."


def _find(rng: random.Random) -> Made:
    scene = _different_shapes(rng, 3)
    question, answer = _find_question(rng, scene)
    return [_ask(question, scene)], answer


def _relate(rng: random.Random) -> Made:
    """Ask for what is next to a place, on one of its four sides."""
    while True:
        scene = _scene(rng)
        thing = rng.choice(scene.things)
        word, down, right = rng.choice(
            (("left of", 0, -1), ("right of", 0, 1), ("above", -1, 0), ("below", 1, 0))
        )
        # From a neighbour, or from anywhere, to the object.
        row, column = thing.row - down, thing.column - right
        if rng.random() < 0.4:
            row, column = rng.randrange(scene.rows), rng.randrange(scene.columns)
        there = row + down, column + right
        inside = 0 <= row < scene.rows and 0 <= column < scene.columns
        if inside and 0 <= there[0] < scene.rows and 0 <= there[1] < scene.columns:
            break
    start = scene.place(row, column)
    answer = (
        f"I find the {scene.place(*there)} {word} the {start}. I look there {_found(scene, *there)}"
    )
    return [_ask(f"What is {word} the {start}?", scene)], answer


def _read(rng: random.Random) -> Made:
    """Ask for the word or the number on a sign."""
    number = rng.random() < 0.5
    text = str(rng.randint(10, 999)) if number else rng.choice(_WORDS)
    sign = Sign(
        text=text, colour=rng.choice(tuple(COLOURS)), background=rng.choice(tuple(BACKGROUNDS))
    )
    question = rng.choice(("What does the sign say?", "Read the sign.", "What is written here?"))
    look = f"The letters are {sign.colour} on a {sign.background} board."
    if number:
        digits = ", ".join(text)
        return [
            _ask(question, sign)
        ], f"The sign shows the digits {digits}, so it says {text}. {look}"
    return [_ask(question, sign)], f"The sign says {text}. {look}"


def _chart(rng: random.Random) -> Made:
    """Ask for a bar chart's bars, or for its tallest or shortest bar."""
    count = rng.randint(3, 5)
    values = rng.sample(range(1, 10), count)
    chart = Chart(bars=tuple(zip(rng.sample(tuple(COLOURS), count), values, strict=True)))
    # The value first: the colour of a value is then what follows it.
    listed = ", ".join(f"{value} {colour}" for colour, value in chart.bars)
    begin = f"From left to right the bars are {listed}."
    form = rng.randrange(3)
    if form == 0:
        question = rng.choice(("Describe the chart.", "What does the chart show?"))
        return [_ask(question, chart)], f"The chart has {_NUMBERS[count]} bars. {begin}"
    tall = form == 1
    colour, value = (max if tall else min)(chart.bars, key=lambda bar: bar[1])
    word = "tallest" if tall else "shortest"
    answer = f"{begin} The {word} one has {value} and is {colour}."
    return [_ask(f"Which bar is the {word}?", chart)], answer


def _listing(scene: Scene) -> str:
    return ", ".join(
        f"{scene.place(thing.row, thing.column)} a {thing.name}" for thing in scene.things
    )


def _changed(rng: random.Random, scene: Scene) -> Scene:
    """Return a scene that differs in one object: gone, of another colour, or of another shape."""
    at = rng.randrange(len(scene.things))
    thing = scene.things[at]
    form = rng.randrange(3)
    if form == 0 and len(scene.things) > 1:
        return replace(scene, things=scene.things[:at] + scene.things[at + 1 :])
    if form == 1:
        new = replace(thing, colour=rng.choice([name for name in COLOURS if name != thing.colour]))
    else:
        new = replace(thing, shape=rng.choice([name for name in SHAPES if name != thing.shape]))
    return replace(scene, things=(*scene.things[:at], new, *scene.things[at + 1 :]))


def _compare(rng: random.Random) -> Made:
    """Ask for a comparison of two pictures, or which of them has more objects."""
    first = _scene(rng, 1, 4)
    second = _changed(rng, first) if rng.random() < 0.5 else _scene(rng, 1, 4)
    one, two = len(first.things), len(second.things)
    if rng.random() < 0.5:
        question = "Compare the two pictures."
        end = f"The first one has {_NUMBERS[one]}, the second one has {_NUMBERS[two]}."
    elif one == two:
        question, end = "Which picture has more objects?", f"Both have {_NUMBERS[one]}."
    else:
        which, more, fewer = ("first", one, two) if one > two else ("second", two, one)
        question = "Which picture has more objects?"
        end = f"The {which} one has more, {_NUMBERS[more]} against {_NUMBERS[fewer]}."
    answer = f"The first picture: {_listing(first)}. The second picture: {_listing(second)}. {end}"
    return [_ask(question, first, second)], answer


def _chat(rng: random.Random) -> Made:
    """Make up a second question about the same picture, or about another one."""
    scene = _different_shapes(rng, 4)
    if rng.random() < 0.4:
        turns, said = [_ask("Describe the picture.", scene)], _description(scene)
    else:
        question, said = rng.choice((_count_question, _find_question))(rng, scene)
        turns = [_ask(question, scene)]
    turns.append(Turn(role="assistant", text=said))
    if rng.random() < 0.3:
        other = _scene(rng)
        turns.append(_ask(rng.choice(("And this one?", "What about this picture?")), other))
        return turns, _description(other)
    question, answer = rng.choice((_count_question, _find_question))(rng, scene)
    turns.append(_ask(question))
    return turns, answer


def _talk(rng: random.Random) -> Made:
    """Return small talk without a picture."""
    drawn = make_dialogue(rng)
    turns = [
        Turn(role="assistant" if one["role"] == "assistant" else "user", text=one["content"])
        for one in drawn.messages
    ]
    return turns, drawn.answer


_MAKERS: Final[dict[VisionKind, Callable[[random.Random], Made]]] = {
    "describe": _describe,
    "count": _count,
    "find": _find,
    "relate": _relate,
    "read": _read,
    "chart": _chart,
    "compare": _compare,
    "chat": _chat,
    "talk": _talk,
}
