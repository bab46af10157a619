"""`make fuzz`: random cases of every kind against plain `generate` and the other promises, until the time is over.

make fuzz                                  two minutes of every kind, with a seed of its own
make fuzz SECONDS=3600 KIND=text           an hour of one kind
make fuzz KIND=text SEED=123 CASES=50      the round that a failure has named
"""

from __future__ import annotations

import collections
import concurrent.futures as futures
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

KINDS = ("text", "images", "interrupts", "hostile")
app = typer.Typer(add_completion=False)


@app.command()
def main(
    kind: Annotated[
        str, typer.Option(help=f"Kinds of cases, comma separated: {', '.join(KINDS)}.")
    ] = ",".join(KINDS),
    seconds: Annotated[float, typer.Option(help="How long cases begin, all kinds together.")] = 120,
    cases: Annotated[
        int, typer.Option(help="Cases of each kind, at most; 0 is as many as there is time for.")
    ] = 0,
    seed: Annotated[
        str, typer.Option(help="Seed of the first round: a number; empty is a new one.")
    ] = "",
    target: Annotated[str, typer.Option(help="The only target; text and images only.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    """Runs random cases; exit status 1 if one fails, 2 if the request makes no sense."""
    try:
        first = _seed_of(seed)
        if seconds <= 0:
            raise ValueError(
                f"expected a time limit above 0 seconds, got {seconds:g}; pass SECONDS=120"
            )
        if jobs < 1 or cases < 0:
            raise ValueError(
                f"expected at least one process and no negative number of cases, got {jobs} and {cases}"
            )
        from fuzz.rounds import cases_of

        kinds = [name.strip() for name in kind.split(",")]
        for name in kinds:
            cases_of(name, target or None)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    ok = [_run(name, first, cases, seconds / len(kinds), target or None, jobs) for name in kinds]
    raise typer.Exit(0 if all(ok) else 1)


def _seed_of(given: str) -> int:
    """The seed that was asked for, or a new one."""
    if not given:
        return random.SystemRandom().randrange(10**9)
    if not given.isdecimal():
        raise ValueError(
            f"expected a whole number as seed, got {given!r}; pass SEED=123, or leave it out for a new one"
        )
    return int(given)


def _run(kind: str, first: int, cases: int, seconds: float, target: str | None, jobs: int) -> bool:
    """Runs rounds of one kind until one fails, all cases are run or the time is over; prints what came of them."""
    from fuzz.rounds import CASES_PER_ROUND, Round, play, prepare

    begun, deadline = time.monotonic(), time.monotonic() + seconds
    sizes: Iterator[int] = itertools.repeat(CASES_PER_ROUND)
    if cases:
        whole, rest = divmod(cases, CASES_PER_ROUND)
        sizes = iter([CASES_PER_ROUND] * whole + [rest] * bool(rest))
    numbers, total, failed = itertools.count(first), Round(kind, first), list[Round]()
    counts: collections.Counter[str] = collections.Counter()
    # Nothing has run in this process yet, so that a fork is safe; a fresh process would import everything again.
    context = multiprocessing.get_context("fork")
    with futures.ProcessPoolExecutor(jobs, context, initializer=prepare) as pool:
        waiting: set[futures.Future[Round]] = set()
        while True:
            while len(waiting) < jobs and not failed and time.monotonic() < deadline:
                size = next(sizes, 0)
                if not size:
                    break
                waiting.add(pool.submit(play, kind, next(numbers), size, deadline, target))
            if not waiting:
                break
            done, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
            for one in (future.result() for future in done):
                total.num_cases += one.num_cases
                counts.update(one.counts)
                failed += [one] if one.failure else []
    others = "".join(f", {num} {name}" for name, num in sorted(counts.items()))
    print(f"{kind}: {total.num_cases} cases from seed {first}, {len(failed)} failed{others}; "
          f"{time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
    for one in failed:
        print(
            f"\n{one.failure}\nAgain: make fuzz KIND={kind} SEED={one.number} CASES={CASES_PER_ROUND}",
            flush=True,
        )
    return not failed


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app()
