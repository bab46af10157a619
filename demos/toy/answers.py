"""The target's own answers, cached under build/ in files named after its weights and the prompts."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

CACHE_DIR: Final = Path(__file__).resolve().parents[2] / "build" / "toy_draft"


def cached_answers(
    target_dir: Path,
    name: str,
    references: Sequence[list[int]],
    write: Callable[[], list[list[int]]],
) -> list[dict[str, Any]]:
    """Return one row a prompt: `answer` (ids), and `as_reference`, whether it is what the generator would say.

    Args:
        target_dir (`Path`): Folder of the target; its weights decide the file.
        name (`str`): What the prompts are; decides the file too.
        references (sequence of lists of `int`): Reference answers.
        write (callable): Lets the target answer; called where there is no file yet.
    """
    weights = hashlib.blake2b(
        (target_dir / "model.safetensors").read_bytes(), digest_size=8
    ).hexdigest()
    cache = CACHE_DIR / f"answers-{weights}-{name}.jsonl"
    if not cache.is_file():
        answers = write()
        cache.parent.mkdir(parents=True, exist_ok=True)
        scratch = cache.with_suffix(".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            for answer, reference in zip(answers, references, strict=True):
                file.write(
                    json.dumps({"answer": answer, "as_reference": answer == reference}) + "\n"
                )
        scratch.replace(cache)
    with cache.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def counts_of(text: str, kinds: Sequence[str]) -> dict[str, int]:
    """Return how many prompts of each kind a text like `500` or `500,talk=1800` asks for."""
    parts = [part.rpartition("=") for part in text.split(",")]
    named = {kind: int(number) for kind, _, number in parts}
    if unknown := named.keys() - {"", *kinds}:
        raise ValueError(
            f"expected kinds among {', '.join(kinds)}, got {', '.join(unknown)}; use one of them."
        )
    return {kind: named.get(kind, named.get("", 0)) for kind in kinds}


def name_of(split: str, counts: Mapping[Any, int], first: int) -> str:
    """Return the name of a set of prompts, for `cached_answers`."""
    return f"{split}-{'_'.join(f'{kind}{count}' for kind, count in counts.items())}-{first}"
