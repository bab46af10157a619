"""Word problems and expressions whose steps are worked out digit by digit."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tasks_base import Draw, user
from tasks_words import FIRST_NAMES

Operator = Literal["+", "-", "*"]

_PLACES: Final = ("ones", "tens", "hundreds")
_MAX_VALUE: Final = 999
_BOXED: Final = re.compile(r"\\boxed\{(-?\d+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """The wording of a story: what is counted and what each operation means in it."""

    unit: str
    start: tuple[str, ...]
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    times: tuple[str, ...]
    question: tuple[str, ...]


_THEMES: Final = tuple(
    Theme(unit=unit, start=start, plus=plus, minus=minus, times=times, question=question)
    for units, start, plus, minus, times, question in (
        (
            ("shells", "stamps", "marbles", "cards", "coins"),
            (
                "{name} has {n} {unit}.",
                "{name} owns {n} {unit}.",
                "There are {n} {unit} in the box of {name}.",
            ),
            ("{name} finds {n} more.", "A friend brings {n} others.", "Then {n} are added."),
            ("{name} loses {n} of them.", "{name} gives away {n}.", "Then {n} are sold."),
            ("The collection grows to {n} times its size.", "Next year it is {n} times as large."),
            ("How many {unit} are there now?", "How many {unit} does {name} have in the end?"),
        ),
        (
            ("euros", "dollars", "points"),
            ("{name} starts with {n} {unit}.", "{name} has saved {n} {unit}."),
            ("{name} earns {n} more.", "An aunt adds {n}.", "{name} wins {n}."),
            ("{name} spends {n}.", "{name} pays {n} for lunch.", "A fee of {n} is taken."),
            ("Luck multiplies this by {n}.", "The sum then grows to {n} times as much."),
            ("How many {unit} are left?", "How many {unit} does {name} end up with?"),
        ),
        (
            ("loaves", "muffins", "cakes", "rolls"),
            ("A bakery makes {n} {unit}.", "The shop of {name} bakes {n} {unit}."),
            (
                "Another oven gives {n}.",
                "{name} bakes {n} extra ones.",
                "At noon {n} more are ready.",
            ),
            ("Customers buy {n}.", "{n} of them are burnt.", "A school orders {n}."),
            (
                "For the fair this is made {n} times over.",
                "On Sunday {name} has {n} times as many.",
            ),
            ("How many {unit} remain?", "How many {unit} can {name} still sell?"),
        ),
        (
            ("trees", "roses", "bushes", "tulips"),
            ("A park has {n} {unit}.", "The garden of {name} holds {n} {unit}."),
            ("{name} plants {n} more.", "In spring {n} are planted."),
            ("A storm takes {n}.", "{name} removes {n} of them."),
            ("Later there are {n} times as many.", "A new owner wants {n} times that number."),
            ("How many {unit} stand there at last?", "What is the number of {unit} now?"),
        ),
        (
            ("pages", "lines", "letters"),
            ("{name} writes {n} {unit}.", "A report by {name} has {n} {unit}."),
            ("The next day brings {n} more.", "{name} adds {n}."),
            ("An editor cuts {n}.", "{name} deletes {n}."),
            ("The full series is {n} times as long.", "The final version has {n} times as many."),
            ("How many {unit} is that?", "How many {unit} are in the final text?"),
        ),
    )
    for unit in units
)

_VERBS: Final[dict[str, tuple[str, str]]] = {
    "+": ("Add", "to"),
    "-": ("Take", "from"),
    "*": ("Multiply", "by"),
}


def _digits(number: int, width: int) -> list[int]:
    """Return the decimal digits, lowest first, padded with zeros to a width."""
    return [number // 10**place % 10 for place in range(width)]


def _apply(operator: Operator, left: int, right: int) -> int:
    """Return the result of one operation."""
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def work_out(operator: Operator, left: int, right: int) -> str:
    """Spell one operation digit by digit, lowest place first, with carries and borrows."""
    width = max(len(str(left)), len(str(right)) if operator != "*" else 1)
    left_digits, right_digits = _digits(left, width), _digits(right, width)
    carry, parts = 0, []
    for place in range(width):
        a, b = left_digits[place], right if operator == "*" else right_digits[place]
        if operator == "-":
            value = a - b - carry
            shown = f"{a}-{b}" + (f"-{carry}" if carry else "")
            carry = int(value < 0)
            written = value + 10 * carry
            note = f"={written}" if not carry else f" needs a loan, so {written} and borrow 1"
        else:
            value = _apply(operator, a, b) + carry
            shown = f"{a}{operator}{b}" + (f"+{carry}" if carry else "")
            carry = value // 10
            note = f"={value}" if not carry else f"={value}, so {value % 10} and carry {carry}"
        parts.append(f"{_PLACES[place]} {shown}{note}")
    return "; ".join(parts) + f". So {left}{operator}{right}={_apply(operator, left, right)}."


def _draw_steps(rng: random.Random) -> tuple[int, list[tuple[Operator, int]]]:
    """Draw a start value and two or three operations that stay within 1..999."""
    value = start = rng.randint(12, 99) if rng.random() < 0.7 else rng.randint(100, 400)
    steps: list[tuple[Operator, int]] = []
    count = rng.choice((2, 2, 3))
    while len(steps) < count:
        operator: Operator = rng.choice(("+", "-", "*"))
        if operator == "*":
            operand = rng.randint(2, 9)
        else:
            operand = rng.randint(3, 99) if rng.random() < 0.8 else rng.randint(100, 300)
        if any(operator == other for other, _ in steps) and rng.random() < 0.6:
            continue
        result = _apply(operator, value, operand)
        if 1 <= result <= _MAX_VALUE:
            steps.append((operator, operand))
            value = result
    return start, steps


def _expression(rng: random.Random, start: int, steps: list[tuple[Operator, int]]) -> str:
    """Write the operations as one expression, with the brackets that keep their order."""
    text = str(start)
    for position, (operator, operand) in enumerate(steps):
        inner = f"({text})" if operator == "*" and position else text
        text = f"{inner} {operator} {operand}"
    lead = rng.choice(
        ("Compute {}.", "What is {}?", "Work out {} step by step.", "Evaluate the expression {}.")
    )
    return lead.format(text)


def _story(rng: random.Random, start: int, steps: list[tuple[Operator, int]]) -> str:
    """Write the operations as a word problem."""
    theme, name = rng.choice(_THEMES), rng.choice(FIRST_NAMES)
    choices = {"+": theme.plus, "-": theme.minus, "*": theme.times}
    sentences = [rng.choice(theme.start).format(name=name, n=start, unit=theme.unit)]
    sentences += [
        rng.choice(choices[operator]).format(name=name, n=operand) for operator, operand in steps
    ]
    sentences.append(rng.choice(theme.question).format(name=name, unit=theme.unit))
    return " ".join(sentences)


def _solution(start: int, steps: list[tuple[Operator, int]]) -> tuple[str, int]:
    """Return the worked answer text and the final number."""
    lines, value = [f"We begin with {start}."], start
    for number, (operator, operand) in enumerate(steps, start=1):
        verb, link = _VERBS[operator]
        first, second = (value, operand) if operator == "*" else (operand, value)
        lines.append(
            f"Step {number}: {verb.lower()} {first} {link} {second}. {work_out(operator, value, operand)}"
        )
        value = _apply(operator, value, operand)
    lines.append(f"The final answer is \\boxed{{{value}}}.")
    return "\n".join(lines), value


def _boxed_checker(expected: int) -> Callable[[str], bool]:
    """Return a checker that compares the last boxed number."""

    def check(text: str) -> bool:
        """Accept a text whose last boxed number is the expected one."""
        found = _BOXED.findall(text)
        return bool(found) and int(found[-1]) == expected

    return check


def make_arithmetic(rng: random.Random) -> Draw:
    """Draw a word problem or an expression with its worked solution."""
    start, steps = _draw_steps(rng)
    prompt = _story(rng, start, steps) if rng.random() < 0.7 else _expression(rng, start, steps)
    answer, value = _solution(start, steps)
    return Draw(messages=(user(prompt),), answer=answer, checker=_boxed_checker(value))
