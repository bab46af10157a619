"""This module counts what answers of one way of decoding cost, and compares them with the baseline's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.intervals import interval, resample, spread, wilson
from dflash_hf.bench.questions import Key

# The definitions of the numbers, as the report prints them.
DEFINITIONS = {
    "tokens/s": "New tokens over the seconds of the calls that made them, prefill included; the rows of a batch share "
    "a call's seconds.",
    "decode tokens/s": "The same without the prefill: its time, and its one token per text.",
    "TTFT": "Time to first token: seconds from the call until its first token.",
    "TPOT": "Time per output token behind the first one, as servers report it: (latency − TTFT) / (tokens − 1), per "
    "text.",
    "TPOT, whole": "Latency over all tokens, the prefill included, per text.",
    "verify": "One forward of the target over a block of proposals, counted per row of a batch.",
    "acceptance length": "Tokens committed per verify, the bonus token included, pooled over all verifies; the token "
    "that comes from the prefill belongs to none.",
    "z-lab's acceptance length": "Mean over texts of each text's own mean: short texts weigh as much as long ones.",
    "vLLM's acceptance length": "1 + accepted tokens / drafts: a verify without a proposal is no draft, and accepted "
    "tokens beyond the end of a text count.",
    "SGLang's acceptance length": "New tokens / verifies: the prefill's token counts, its forward does not.",
    "acceptance at a position": "Joint: share of drafts whose proposals were accepted up to this position (vLLM's "
    "acceptance_at_pos_i). Conditional: share of those accepted up to the position before that also were here; a "
    "draft that was too short to check a position does not count, nor a tree whose accepted path ended in a leaf "
    "before it.",
    "speed-up": "Ratio of tokens/s to the baseline's over the questions that both answered, with the 95 % interval of "
    "a paired bootstrap over questions, drawn within each set.",
    "the draft's own speed-up": "The same ratio to this package's own decoding without the draft, of the method "
    "undrafted: what the draft itself brings.",
    "same text": "Share of answers whose tokens all equal the baseline's (their text, where a server does not tell "
    "its tokens).",
    "margin": "At the first token that differs: how far the worse of the two lies below the best one in the target's "
    "own logits in float32, over the same tokens before it. Near 0 it is a tie that rounding decides.",
    "accuracy": "Share of questions answered right, the mean over repeats, with Wilson's 95 % interval; what failed, "
    "or ended within its thought, is not right.",
}


def measure(answers: Sequence[Answer], bin_tokens: int) -> dict[str, Any]:
    """Counts the cost of answers of one way of decoding, as seconds, tokens and ratios; `None` for what is not known.

    Args:
        answers: Answers to any sets. Failed answers are only counted.
        bin_tokens (`int`): Tokens per bin of the numbers along a text.
    """
    turns = [turn for answer in answers for turn in answer.turns]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    new_tokens = sum(turn.new_tokens for turn in turns)
    seconds = sum(turn.wall_time for turn in turns)
    decode = np.array([decode_part(turn) for turn in turns]).reshape(-1, 2).sum(axis=0)
    return {
        "questions": len({answer.key for answer in answers}),
        "answers": sum(not answer.has_failed for answer in answers),
        "failures": sum(errors.values()),
        "failure_reasons": dict(errors.most_common()),
        "texts": len(turns),
        "cut_at_limit": sum(turn.finish_reason == "length" for turn in turns),
        "ended_in_thought": sum(turn.ends_in_thought for turn in turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "new_tokens": new_tokens,
        "wall_seconds": seconds,
        "tokens_per_second": ratio(new_tokens, seconds),
        "decode_tokens_per_second": ratio(*decode),
        "latency": spread([turn.latency for turn in turns]),
        "ttft": spread([turn.ttft for turn in turns if turn.ttft is not None]),
        "tpot": spread(
            [
                (t.latency - t.ttft) / (t.new_tokens - 1)
                for t in turns
                if t.ttft is not None and t.new_tokens > 1
            ]
        ),
        "tpot_whole": spread([turn.latency / turn.new_tokens for turn in turns if turn.new_tokens]),
        "acceptance": _acceptance(turns, bin_tokens),
    }


def decode_part(turn: Turn) -> tuple[float, float]:
    """Returns the number of tokens of a turn after the first one, and the seconds that they took.

    Both are 0 if the TTFT is not known or the turn is empty.
    """
    if turn.ttft is None or not turn.new_tokens:
        return 0.0, 0.0
    share = turn.wall_time / turn.latency if turn.latency else 0.0
    return turn.new_tokens - 1.0, (turn.latency - turn.ttft) * share


def ratio(part: float, whole: float) -> float | None:
    """Returns a ratio, or `None` if `whole` is 0."""
    return float(part / whole) if whole else None


def _acceptance(turns: list[Turn], bin_tokens: int) -> dict[str, Any] | None:
    """Returns what was committed and accepted, by all definitions; `None` if nothing was drafted."""
    drafted = [(turn, turn.committed) for turn in turns if turn.committed is not None]
    committed = [count for _, counts in drafted for count in counts]
    if not committed:
        return _server_acceptance(turns)
    means = [float(np.mean(counts)) for _, counts in drafted if counts]
    drafts = draft_counts(turns)
    accepted = drafts[:, 0]
    proposed = drafts[:, 1]
    places = by_position(drafts)
    joint = [right / len(drafts) for right, _ in places]
    conditional = [ratio(right, tried) for right, tried in places]
    return {
        "acceptance_length": sum(committed) / len(committed),
        "acceptance_length_zlab": float(np.mean(means)),
        "acceptance_length_vllm": 1 + int(accepted.sum()) / len(drafts) if len(drafts) else None,
        "acceptance_length_sglang": sum(turn.new_tokens for turn, _ in drafted) / len(committed),
        "num_verifies": len(committed),
        "num_drafts": len(drafts),
        "num_draft_tokens": int(proposed.sum()),
        "num_accepted_tokens": int(accepted.sum()),
        "acceptance_at_pos": joint,
        "conditional_acceptance_at_pos": conditional,
        "along_text": _along_text([counts for _, counts in drafted], bin_tokens),
    }


def _server_acceptance(turns: list[Turn]) -> dict[str, Any] | None:
    """Returns the acceptance from a server's own counters, by vLLM's names.

    For SGLang, the acceptance length is the mean of the values that the server reported after each call.
    """
    told = [turn.counters for turn in turns if turn.counters]
    if not told:
        return None
    sums: Counter[str] = Counter()
    for counters in told:
        sums.update(counters)
    depth = sum(name.startswith("num_accepted_tokens_at_pos_") for name in sums)
    right = [sums[f"num_accepted_tokens_at_pos_{position}"] for position in range(depth)]
    drafts = sums["num_drafts"]
    means = [row["acceptance_length"] for row in told if "acceptance_length" in row]
    return {
        **dict.fromkeys(("acceptance_length", "acceptance_length_zlab", "num_verifies")),
        "along_text": [],
        "acceptance_length_vllm": 1 + sums["num_accepted_tokens"] / drafts if drafts else None,
        "acceptance_length_sglang": float(np.mean(means)) if means else None,
        **{
            name: int(sums[name])
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        },
        "acceptance_at_pos": [ratio(count, drafts) or 0.0 for count in right],
        "conditional_acceptance_at_pos": [
            ratio(count, before) for count, before in zip(right, [drafts, *right], strict=False)
        ],
    }


def by_position(drafts: Any) -> list[tuple[int, int]]:
    """Returns, for each position of the block, how many verifies accepted its proposal, and how many checked it.

    Args:
        drafts (int array of shape `(verifies, 3)`): The result of [`draft_counts`].
    """
    accepted = drafts[:, 0]
    checked = drafts[:, 2]
    places: list[tuple[int, int]] = []
    for position in range(int(checked.max(initial=0))):
        tried = (accepted >= position) & (checked > position)
        places.append((int((accepted > position).sum()), int(tried.sum())))
    return places


def draft_counts(turns: Iterable[Turn]) -> Any:
    """Returns tokens accepted, tokens proposed and positions checked, for every verify that had a proposal.

    Returns:
        `numpy.ndarray` of shape `(drafts, 3)`, int64.
    """
    counts: list[tuple[int, int, int]] = []
    for turn in turns:
        if turn.accepted is None or turn.proposed is None:
            continue
        # In a chain, each proposal has its own position.
        checked = turn.proposed if turn.checked is None else turn.checked
        verifies = zip(turn.accepted, turn.proposed, checked, strict=True)
        counts += [verify for verify in verifies if verify[1] > 0]
    return np.array(counts, dtype=np.int64).reshape(-1, 3)


def _along_text(texts: list[list[int]], bin_tokens: int) -> list[dict[str, Any]]:
    """Returns tokens per verify, by the place in the text where the verify began. The prefill's token comes first."""
    starts = [1 + np.cumsum([0, *counts[:-1]]) for counts in texts if counts]
    bins = np.concatenate(starts) // bin_tokens
    verifies = np.bincount(bins)
    sums = np.bincount(bins, weights=np.concatenate([counts for counts in texts if counts]))
    return [
        {
            "from_token": number * bin_tokens,
            "verifies": int(count),
            "tokens_per_verify": float(total / count),
        }
        for number, (count, total) in enumerate(zip(verifies, sums, strict=True))
        if count
    ]


# A method's answer, and the baseline's answer to the same question and repeat. Neither has failed.
Pair = tuple[Answer, Answer]


def speedup(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """Compares tokens per second over questions that both methods answered; `None` if there are none.

    Returns:
        `dict`: `questions`, and `ratio`, `low`, `high` of the whole calls. `decode` has the same of decoding alone.
    """
    if not pairs:
        return None
    sums = per_question(pairs)
    drawn = resample(
        sums, [dataset for dataset, _ in dict.fromkeys(answer.key for answer, _ in pairs)]
    )

    def one(column: int) -> dict[str, float | None]:
        low, high = interval(ratios(drawn[:, column : column + 4]))
        found = float(ratios(sums[:, column : column + 4].sum(axis=0)))
        return {"ratio": found if np.isfinite(found) else None, "low": low, "high": high}

    return {"questions": len(sums), **one(0), "decode": one(4)}


def per_question(pairs: Sequence[Pair]) -> Any:
    """Returns sums over the repeats of each question, in order, a float array of shape `(questions, 8)`.

    The columns are tokens and seconds of the method, the same of the baseline, and then all four without the prefills.
    """
    sums: dict[Key, Any] = {}
    for pair in pairs:
        whole = [[(turn.new_tokens, turn.wall_time) for turn in answer.turns] for answer in pair]
        decode = [[decode_part(turn) for turn in answer.turns] for answer in pair]
        parts = [
            np.array(part, dtype=np.float64).reshape(-1, 2).sum(axis=0)
            for part in (*whole, *decode)
        ]
        sums[pair[0].key] = sums.get(pair[0].key, 0.0) + np.concatenate(parts)
    return np.array(list(sums.values()))


def ratios(sums: Any) -> Any:
    """Returns the ratios of the tokens per second of two methods, from their sums of tokens and seconds `(..., 4)`.

    A ratio is not finite if a method took no time, or if the second one made no tokens.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mine = sums[..., 0] / sums[..., 1]
        theirs = sums[..., 2] / sums[..., 3]
        return np.where(np.isfinite(theirs), mine / theirs, np.nan)


def first_difference(answer: Answer, other: Answer) -> tuple[int, int | None] | None:
    """Returns the turn and the token at which two answers first differ, or `None` if they are the same.

    The token is `None` if only texts can be compared.
    """
    for number, (one, two) in enumerate(zip(answer.turns, other.turns, strict=False)):
        if not one.token_ids or not two.token_ids:
            if one.text != two.text:
                return number, None
        elif one.token_ids != two.token_ids:
            equal = [a == b for a, b in zip(one.token_ids, two.token_ids, strict=False)]
            # If all shared tokens are equal, the answers differ at the end of the shorter one.
            return number, [*equal, False].index(False)
    return None


def accuracy(scored: Sequence[tuple[Key, float]]) -> dict[str, Any] | None:
    """Returns the mean score over questions, after averaging repeats, with its interval; `None` without scores.

    Args:
        scored: The question and the score of each answer that has a score.
    """
    if not scored:
        return None
    means = mean_scores(scored)
    mean = float(np.mean(list(means.values())))
    low, high = wilson(mean, len(means))
    return {"questions": len(means), "mean": mean, "low": low, "high": high}


def mean_scores(scored: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Returns the mean score of each question over its repeats."""
    found: dict[Key, list[float]] = {}
    for key, score in scored:
        found.setdefault(key, []).append(score)
    return {key: float(np.mean(scores)) for key, scores in found.items()}
