"""Requests for short Python functions, judged by running the function against test inputs."""

import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tasks_base import Draw, user
from tasks_words import NAME_PARTS

_BLOCK: Final = re.compile(r"```python\n(.*?)```", re.DOTALL)
_TIMEOUT_SECONDS: Final = 10.0
# The child reads the cases from its standard input and has no builtins beyond these.
_RUNNER: Final = """
import builtins, json, sys
source, name, cases = json.load(sys.stdin)
allowed = ("abs all any bool dict enumerate float int isinstance len list map max min range reversed round set "
           "sorted str sum tuple zip ValueError").split()
space = {"__builtins__": {key: getattr(builtins, key) for key in allowed}}
exec(source, space)
for arguments, expected in cases:
    if json.loads(json.dumps(space[name](*arguments))) != expected:
        sys.exit(1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function body with what it promises and the function that tells the right results."""

    parameters: str
    returns: str
    request: str
    summary: str
    body: list[str]
    note: str
    reference: Callable[..., Any]
    inputs: list[list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A phrase of the request, its Python text and its meaning."""

    phrase: str
    code: str
    apply: Callable[[int], int]


def _conditions(rng: random.Random) -> Piece:
    """Draw a condition on a number `x`."""
    k = rng.randint(2, 9)
    return rng.choice(
        (
            Piece(phrase="even", code="{x} % 2 == 0", apply=lambda x: x % 2 == 0),
            Piece(phrase="odd", code="{x} % 2 == 1", apply=lambda x: x % 2 == 1),
            Piece(phrase="positive", code="{x} > 0", apply=lambda x: x > 0),
            Piece(phrase="negative", code="{x} < 0", apply=lambda x: x < 0),
            Piece(phrase="non-zero", code="{x} != 0", apply=lambda x: x != 0),
            Piece(phrase=f"larger than {k}", code=f"{{x}} > {k}", apply=lambda x: x > k),
            Piece(phrase=f"smaller than {k}", code=f"{{x}} < {k}", apply=lambda x: x < k),
            Piece(phrase=f"divisible by {k}", code=f"{{x}} % {k} == 0", apply=lambda x: x % k == 0),
        )
    )


def _maps(rng: random.Random) -> Piece:
    """Draw a transformation of a number `x`."""
    k = rng.randint(2, 9)
    return rng.choice(
        (
            Piece(phrase="squares", code="{x} * {x}", apply=lambda x: x * x),
            Piece(phrase="cubes", code="{x} ** 3", apply=lambda x: x**3),
            Piece(phrase="doubles", code="2 * {x}", apply=lambda x: 2 * x),
            Piece(phrase="absolute values", code="abs({x})", apply=abs),
            Piece(phrase="opposites", code="-{x}", apply=lambda x: -x),
            Piece(phrase=f"multiples by {k}", code=f"{k} * {{x}}", apply=lambda x: k * x),
            Piece(phrase=f"values plus {k}", code=f"{{x}} + {k}", apply=lambda x: x + k),
            Piece(phrase=f"remainders modulo {k}", code=f"{{x}} % {k}", apply=lambda x: x % k),
        )
    )


_NUMBER_INPUTS: Final[list[list[Any]]] = [
    [[]], [[0]], [[3, -4, 8, 12, 7]], [[-9, 9, 10, 2, 2, 5]], [list(range(-12, 40))], [[100, 81, -30, 6]],
]  # fmt: skip
_TEXT_INPUTS: Final[list[list[Any]]] = [
    [""], ["banana"], ["the quick brown fox jumps over a lazy dog"], ["Anna and Otto eat noodles"], ["xyz xyz zz"],
]  # fmt: skip


def _total(values: list[int]) -> int:
    """Return the product of the values."""
    result = 1
    for value in values:
        result *= value
    return result


def _reduce(rng: random.Random) -> Program:
    """Draw a loop that filters, maps and folds a list of numbers."""
    condition, mapped = _conditions(rng), _maps(rng)
    items, item = rng.choice(
        (("values", "value"), ("numbers", "number"), ("items", "item"), ("data", "entry"))
    )
    phrase, first, update, returns, fold, how = rng.choice(
        (
            ("sum", "0", "result += {m}", "int", sum, "adds them up"),
            ("product", "1", "result *= {m}", "int", _total, "multiplies them together"),
            ("list", "[]", "result.append({m})", "list[int]", list, "collects them in a new list"),
            (
                "maximum",
                "0",
                "result = max(result, {m})",
                "int",
                lambda v: max([0, *v]),
                "keeps the largest one",
            ),
            (
                "minimum",
                "0",
                "result = min(result, {m})",
                "int",
                lambda v: min([0, *v]),
                "keeps the smallest one",
            ),
        )
    )
    start = " (start from 0)" if phrase in {"maximum", "minimum"} else ""
    body = [
        f"result = {first}",
        f"for {item} in {items}:",
        f"    if {condition.code.format(x=item)}:",
        "        " + update.format(m=mapped.code.format(x=item)),
        "return result",
    ]
    return Program(
        parameters=f"{items}: list[int]",
        returns=returns,
        request=f"returns the {phrase} of the {mapped.phrase} of all {condition.phrase} entries in `{items}`{start}",
        summary=f"Take the {mapped.phrase} of the {condition.phrase} entries and build their {phrase}.",
        body=body,
        note=f"The loop checks each {item}, takes the {mapped.phrase} where the test holds, and {how}.",
        reference=lambda values: fold([mapped.apply(v) for v in values if condition.apply(v)]),
        inputs=_NUMBER_INPUTS,
    )


def _counting(rng: random.Random) -> Program:
    """Draw a count or a first match in a list of numbers."""
    condition = _conditions(rng)
    items, item = rng.choice(
        (("values", "value"), ("numbers", "number"), ("items", "item"), ("data", "entry"))
    )
    test = condition.code.format(x=item)
    if rng.random() < 0.5:
        request, summary = (
            f"counts the {condition.phrase} entries of `{items}`",
            f"Count the {condition.phrase} ones.",
        )
        body = [
            "count = 0",
            f"for {item} in {items}:",
            f"    if {test}:",
            "        count += 1",
            "return count",
        ]
        note = f"The counter grows by one for each {item} that passes the test."
        return Program(
            parameters=f"{items}: list[int]", returns="int", request=request, summary=summary, body=body, note=note,
            reference=lambda values: sum(bool(condition.apply(v)) for v in values), inputs=_NUMBER_INPUTS,
        )  # fmt: skip
    missing = rng.choice((-1, 0))
    return Program(
        parameters=f"{items}: list[int]",
        returns="int",
        request=f"finds the first {condition.phrase} entry of `{items}`, or {missing} if there is none",
        summary=f"Find the first {condition.phrase} entry and fall back to {missing}.",
        body=[
            f"for {item} in {items}:",
            f"    if {test}:",
            f"        return {item}",
            f"return {missing}",
        ],
        note=f"The loop stops at the first {item} that passes the test; otherwise it ends with {missing}.",
        reference=lambda values: next((v for v in values if condition.apply(v)), missing),
        inputs=_NUMBER_INPUTS,
    )


def _series(rng: random.Random) -> Program:
    """Draw a sum over a range up to `n`."""
    condition, mapped, step = _conditions(rng), _maps(rng), rng.choice((1, 2, 3))
    ranged = "range(1, n + 1)" if step == 1 else f"range(1, n + 1, {step})"
    every = "" if step == 1 else f" in steps of {step}"
    return Program(
        parameters="n: int",
        returns="int",
        request=f"adds the {mapped.phrase} of the {condition.phrase} integers from 1 to `n`{every}",
        summary=f"Add the {mapped.phrase} of {condition.phrase} integers up to n.",
        body=[
            "total = 0",
            f"for i in {ranged}:",
            f"    if {condition.code.format(x='i')}:",
            f"        total += {mapped.code.format(x='i')}",
            "return total",
        ],
        note=f"The range runs from 1 to n{every}, and the total gathers what passes the test.",
        reference=lambda n: sum(
            mapped.apply(i) for i in range(1, n + 1, step) if condition.apply(i)
        ),
        inputs=[[0], [1], [2], [9], [20], [31]],
    )


def _strings(rng: random.Random) -> Program:
    """Draw a function on the characters of a text."""
    a, b = rng.sample("aeionrstxyz", 2)
    text = rng.choice(("text", "word", "line"))
    name, request, update, how, fold = rng.choice(
        (
            ("count", f"counts how often '{a}' or '{b}' occurs", "+= 1", "one more is counted",
             lambda s: sum(c in (a, b) for c in s)),
            ("drop", f"removes every '{a}' and '{b}'", "+= char", "only other characters are kept",
             lambda s: "".join(c for c in s if c not in (a, b))),
            ("keep", f"keeps only the characters '{a}' and '{b}'", "+= char", "all other characters are left out",
             lambda s: "".join(c for c in s if c in (a, b))),
            ("spots", f"lists the positions of '{a}' and '{b}'", ".append(index)", "the position is stored",
             lambda s: [i for i, c in enumerate(s) if c in (a, b)]),
        )
    )  # fmt: skip
    test = f"char {'not in' if name == 'drop' else 'in'} '{a}{b}'"
    first, returns = {"count": ("0", "int"), "spots": ("[]", "list[int]")}.get(name, ("''", "str"))
    head = f"for index, char in enumerate({text}):" if name == "spots" else f"for char in {text}:"
    return Program(
        parameters=f"{text}: str",
        returns=returns,
        request=f"{request} in `{text}`",
        summary=f"Look for '{a}' and '{b}' in the {text}.",
        body=[f"result = {first}", head, f"    if {test}:", f"        result {update}".replace(" .", "."),
              "return result"],
        note=f"Each character is compared with the two letters, and then {how}.",
        reference=fold,
        inputs=_TEXT_INPUTS,
    )  # fmt: skip


def _grouping(rng: random.Random) -> Program:
    """Draw a dictionary built from the words of a text."""
    phrase, code, key = rng.choice(
        (
            ("length", "len(word)", len),
            ("first letter", "word[0]", lambda w: w[0]),
            ("last letter", "word[-1]", lambda w: w[-1]),
        )
    )
    least, text = rng.randint(1, 4), rng.choice(("text", "line", "sentence"))
    counted = rng.random() < 0.5

    def reference(source: str) -> dict[Any, Any]:
        """Group or count the long enough words by key."""
        groups: dict[Any, Any] = {}
        for word in source.split():
            if len(word) >= least:
                groups.setdefault(key(word), []).append(word)
        return {k: len(v) for k, v in groups.items()} if counted else groups

    update = (
        "groups[key] = groups.get(key, 0) + 1"
        if counted
        else "groups.setdefault(key, []).append(word)"
    )
    return Program(
        parameters=f"{text}: str",
        returns="dict",
        request=f"{'counts' if counted else 'groups'} the words of `{text}` with at least {least} letters by {phrase}",
        summary=f"Map each {phrase} to {'the number of its words' if counted else 'its words'}.",
        body=["groups = {}", f"for word in {text}.split():", f"    if len(word) >= {least}:",
              f"        key = {code}", f"        {update}", "return groups"],
        note=f"Words shorter than {least} are skipped, and the {phrase} of each word serves as its key.",
        reference=reference,
        inputs=_TEXT_INPUTS,
    )  # fmt: skip


def _bands(rng: random.Random) -> Program:
    """Draw a chain of thresholds."""
    low, high = sorted(rng.sample(range(10, 100, 5), 2))
    names = rng.choice((("low", "middle", "high"), ("cold", "mild", "hot"), ("poor", "fair", "great"),
                        ("small", "medium", "large")))  # fmt: skip
    x = rng.choice(("score", "level", "amount", "degree"))
    return Program(
        parameters=f"{x}: int",
        returns="str",
        request=f"returns '{names[0]}' for a `{x}` below {low}, '{names[1]}' below {high} and '{names[2]}' otherwise",
        summary=f"Name the band that the {x} falls into.",
        body=[f"if {x} < {low}:", f"    return '{names[0]}'", f"if {x} < {high}:", f"    return '{names[1]}'",
              f"return '{names[2]}'"],
        note=f"The limits {low} and {high} are tested in rising order, so the first match decides.",
        reference=lambda v: names[0] if v < low else names[1] if v < high else names[2],
        inputs=[[v] for v in (-5, low - 1, low, high - 1, high, 120)],
    )  # fmt: skip


_FAMILIES: Final = (_reduce, _reduce, _counting, _series, _strings, _grouping, _bands)
_REQUESTS: Final = (
    "Write a Python function `{name}({parameters})` that {request}.",
    "I need a function `{name}({parameters})` in Python. It {request}.",
    "Please implement `{name}({parameters})`, a Python function which {request}.",
)


def extract_code(text: str) -> str | None:
    """Return the first fenced Python block of an answer, or `None`."""
    found = _BLOCK.search(text)
    return found.group(1) if found else None


def _is_plain(source: str) -> bool:
    """Tell whether the source parses and uses neither imports nor dunder names."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            return False
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        if name.startswith("__"):
            return False
    return True


def _run_checker(name: str, program: Program) -> Callable[[str], bool]:
    """Return a checker that runs the answered function in a child process with few builtins and a time limit."""

    def check(text: str) -> bool:
        """Accept an answer whose function gives the reference result on every input."""
        source = extract_code(text)
        if source is None or not _is_plain(source):
            return False
        cases = [(inputs, program.reference(*inputs)) for inputs in program.inputs]
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUNNER],
                input=json.dumps([source, name, cases]),
                text=True,
                capture_output=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    return check


def make_code(rng: random.Random) -> Draw:
    """Draw a request for a function with its reference answer."""
    program = rng.choice(_FAMILIES)(rng)
    name = "_".join(rng.sample(NAME_PARTS, 2))
    prompt = rng.choice(_REQUESTS).format(
        name=name, parameters=program.parameters.split(":")[0], request=program.request
    )
    lines = [
        f"def {name}({program.parameters}) -> {program.returns}:",
        f'    """{program.summary}"""',
        *(f"    {line}" for line in program.body),
    ]
    code = "\n".join(lines)
    answer = f"Here is the function.\n```python\n{code}\n```\n{program.note}"
    return Draw(messages=(user(prompt),), answer=answer, checker=_run_checker(name, program))
