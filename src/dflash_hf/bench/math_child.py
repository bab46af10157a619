"""The other side of scores of mathematics in [`dflash_hf.bench.scores`]: asks math-verify, one answer a line.

It is started by its path in an interpreter of its own and imports nothing of this package. There math-verify's time
limits work, which are signals and need a main thread; what they do not interrupt can be killed, and memory is limited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys

MEMORY = 4 * 2**30


def main() -> None:
    """Answers each line `[reference, answer]` of stdin by `true` or `false` on stdout, after a first `"ready"`."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Windows has no limits, macOS not this one
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)  # a time limit is an answer here: wrong
    extraction = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    _write("ready")
    for line in sys.stdin:
        reference, answer = (parse(text, extraction) for text in json.loads(line))
        _write(verify(reference, answer))


def _write(reply: str | bool) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
