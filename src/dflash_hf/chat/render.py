"""Answers, statistics and races as HTML: pure functions from what a chat remembers to text for the page.

Whatever a person or a model wrote goes through `escape`. Classes are styled in `page.css`; sizes that follow from
numbers travel as custom properties (`--n`), so that the style sheet decides what they look like.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from dflash_hf.chat.conversation import Answer, Conversation, Run, Turn
from dflash_hf.chat.examples import Example
from dflash_hf.chat.model import Lane, Race

MAX_COLUMNS = 48  # verifies that the strip shows: the newest
LONGEST_REPLAY = 12.0  # seconds; a slower race is replayed faster, which the page says

# The page's templates read `${}` and `{{}}`; text must never reach them as such.
_TEMPLATE = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escape(text: str) -> str:
    """Makes text safe inside HTML, attributes included."""
    return html.escape(text, quote=True).translate(_TEMPLATE)


def history(turns: Iterable[Turn]) -> str:
    """Turns one under the other."""
    return "".join(turn_block(turn) for turn in turns)


def turn_block(turn: Turn) -> str:
    """A question with its pictures, and its answer."""
    pictures = "".join(
        f'<figure><img src="{picture.thumbnail}" alt="{escape(picture.name)}">'
        f"{f'<figcaption>{escape(picture.note)}</figcaption>' if picture.note else ''}</figure>"
        for picture in turn.pictures
    )
    shown = f'<div class="df-pictures">{pictures}</div>' if pictures else ""
    text = f"<p>{escape(turn.text)}</p>" if turn.text.strip() else ""
    return f'<section class="df-turn"><div class="df-user">{shown}{text}</div>{answer_block(turn.answer)}</section>'


def answer_block(answer: Answer) -> str:
    """An answer: its text, coloured run by run if a draft was used, and one line of numbers."""
    body = runs_text(answer.runs) if answer.drafted else f"<span>{escape(answer.text)}</span>"
    cursor = '<span class="df-cursor" aria-hidden="true"></span>' if answer.state in ("waiting", "running") else ""
    error = f'<p class="df-error">{escape(answer.error)}</p>' if answer.error else ""
    return (
        f'<div class="df-answer" data-state="{answer.state}"><div class="df-text">{body}{cursor}</div>{error}'
        f'<div class="df-meta">{_meta(answer)}</div></div>'
    )


def runs_text(runs: list[Run], delays: bool = False) -> str:
    """Text as chips, one per run: the prefill's token, then each verify's, its bonus token marked.

    Args:
        runs (`list[Run]`): In order.
        delays (`bool`): With each run's time, for the replay of a race.
    """
    parts: list[str] = []
    for index, run in enumerate(runs):
        if not run.text and not run.bonus:
            continue
        time = f";--t:{run.seconds:.4f}" if delays else ""
        accepted = f"<span>{escape(run.text)}</span>" if run.text else ""
        bonus = f'<b class="df-bonus">{escape(run.bonus)}</b>' if run.bonus else ""
        kind, title = ("df-run", _title(index, run)) if index else ("df-first", "from the prefill")
        parts.append(
            f'<span class="{kind}" style="--n:{run.num_tokens}{time}" title="{title}">{accepted}{bonus}</span>'
        )
    return "".join(parts)


def _title(index: int, run: Run) -> str:
    own = ", the last one the target's own" if run.num_tokens > run.num_accepted else ""
    return f"forward {index}: {run.num_tokens} token{'s' * (run.num_tokens != 1)}{own}"


def _meta(answer: Answer) -> str:
    """The line under an answer."""
    if answer.state == "waiting":
        return "<span>waiting for another conversation's answer …</span>" if answer.seconds == 0 else ""
    if not answer.runs:
        return {"running": "reading the prompt …", "stopped": "stopped before the first token"}.get(answer.state, "")
    forwards = len(answer.runs)
    facts = [
        f"{answer.num_tokens} tokens",
        f"{forwards} forward{'s' * (forwards != 1)}",
        f"{answer.tokens_per_second:.0f} tokens/s",
    ]
    if not answer.drafted:
        facts.append("without the draft")
    if answer.state == "stopped":
        facts.append("stopped")
    if answer.num_cached_tokens:
        facts.append(f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens from the cache")
    return "".join(f"<span>{fact}</span>" for fact in facts)


def statistics(answer: Answer | None) -> str:
    """The panel beside the chat: why this answer is fast."""
    if answer is None or not answer.runs:
        return (
            '<div class="df-empty"><p>Ask something. Every coloured run of the answer is what <em>one</em> forward of '
            "the target wrote: tokens of the draft that it agreed with, and one of its own.</p></div>"
        )
    live = ' data-live="true"' if answer.state == "running" else ""
    figures = [
        ("tokens/s", f"{answer.tokens_per_second:.0f}", "prefill included"),
        ("per forward", f"{answer.acceptance_length:.1f}" if answer.verifies else "–", "acceptance length"),
        ("forwards", f"{len(answer.runs)}", f"for {answer.num_tokens} tokens"),
    ]
    if not answer.drafted:
        figures[1] = ("per forward", "1", "without the draft")
    tiles = "".join(
        f'<div class="df-figure"><strong>{value}</strong><span>{name}</span><small>{note}</small></div>'
        for name, value, note in figures
    )
    charts = _strip(answer) + _positions(answer) if answer.drafted and answer.verifies else ""
    return f'<div class="df-stats"{live}><div class="df-figures">{tiles}</div>{charts}</div>'


def _strip(answer: Answer) -> str:
    """One column per verify, newest right, and beside it how often each height occurs, on the same axis."""
    size = answer.block_size
    shown = answer.verifies[-MAX_COLUMNS:]
    first = len(answer.verifies) - len(shown) + 1
    columns = "".join(
        f'<li style="--a:{run.num_tokens - bool(run.bonus or run.num_tokens > run.num_accepted)};'
        f'--b:{int(run.num_tokens > run.num_accepted)}" title="{_title(first + index, run)}"></li>'
        for index, run in enumerate(shown)
    )
    counts = answer.histogram()
    most = max(counts) or 1
    bars = "".join(
        f'<li style="--share:{count / most:.3f}" title="{count} forwards committed {length} tokens">'
        f"{f'<i>{count}</i>' if count else ''}</li>"
        for length, count in reversed(list(enumerate(counts, 1)))
    )
    mean = answer.acceptance_length
    cut = f"newest {len(shown)} of {len(answer.verifies)}, " if first > 1 else ""
    return (
        f'<figure class="df-chart" style="--k:{size}"><figcaption>Tokens committed by each forward'
        f'<small>{cut}how often each</small></figcaption><div class="df-plot">'
        f'<ol class="df-axis"><li style="--y:{size}">{size}</li><li style="--y:{size // 2}">{size // 2}</li>'
        f'<li style="--y:1">1</li></ol>'
        f'<ol class="df-strip" style="--columns:{max(len(shown), 20)}">{columns}</ol>'
        f'<ol class="df-histogram">{bars}</ol>'
        f'<div class="df-mean" style="--y:{mean:.2f}"><span>mean {mean:.1f}</span></div></div></figure>'
    )


def _positions(answer: Answer) -> str:
    """The share of verifies that accepted the proposal at each position."""
    shares = answer.acceptance_per_position()
    bars = "".join(
        f'<li style="--share:{share:.3f}" title="proposal {position}: accepted in {share:.0%} of the forwards">'
        f"<i>{share * 100:.0f}</i><span>{position}</span></li>"
        for position, share in enumerate(shares, 1)
    )
    return (
        '<figure class="df-chart"><figcaption>Accepted at each position of the block'
        f'<small>% of forwards</small></figcaption><ol class="df-positions">{bars}</ol></figure>'
    )


LEGEND = (
    '<ul class="df-legend" aria-label="Legend">'
    '<li><span class="df-key df-key-first"></span>prefill</li>'
    '<li><span class="df-key df-key-run"></span>accepted from the draft</li>'
    '<li><span class="df-key df-key-bonus"></span>the target’s own</li></ul>'
)


def race_lanes(race: Race | None) -> str:
    """Both lanes and the verdict; when it is done, both are replayed side by side at the pace that was measured."""
    if race is None:
        return (
            '<p class="df-hint">Answers your last question again: first by plain <code>generate</code>, then with the '
            "draft. One after the other, so that neither slows the other down, and greedy; then both are replayed "
            "side by side.</p>"
        )
    slowest = max(race.plain.seconds, race.drafted.seconds, 1e-9)
    pace = max(1.0, slowest / LONGEST_REPLAY)
    lanes = "".join(_lane(lane, race, slowest, pace) for lane in (race.plain, race.drafted))
    verdict = _verdict(race, pace)
    return f'<div class="df-race" data-state="{race.state}">{verdict}<div class="df-lanes">{lanes}</div></div>'


def _lane(lane: Lane, race: Race, slowest: float, pace: float) -> str:
    name = "with the draft" if lane.drafted else "plain generate"
    kind = "df-lane-draft" if lane.drafted else "df-lane-plain"
    speed = f"{lane.num_tokens / lane.seconds:.0f} tokens/s" if lane.seconds and lane.num_tokens else lane.state
    text = ""
    if race.state == "done":
        runs = lane.runs if lane.drafted else _words(lane.runs)
        text = f'<div class="df-lane-text">{runs_text(runs, delays=True)}</div>'
    return (
        f'<div class="df-lane {kind}" data-state="{lane.state}" style="--share:{lane.seconds / slowest:.4f};'
        f'--seconds:{lane.seconds:.4f};--pace:{pace:.3f}">'
        f"<header><b>{name}</b><span>{lane.seconds:.2f} s</span></header>"
        f'<div class="df-bar"><i></i></div><footer><span>{lane.num_tokens} tokens</span><span>{speed}</span></footer>'
        f"{text}</div>"
    )


def _words(runs: list[Run]) -> list[Run]:
    """Plain tokens joined in fours: one element per token is many for a long text."""
    groups = [runs[index : index + 4] for index in range(0, len(runs), 4)]
    return [
        Run(
            text="".join(run.text for run in group),
            bonus="",
            num_tokens=sum(run.num_tokens for run in group),
            num_accepted=0,
            seconds=group[-1].seconds,
        )
        for group in groups
    ]


def _verdict(race: Race, pace: float) -> str:
    if race.state in ("waiting", "running"):
        doing = "waiting for another conversation's answer" if race.state == "waiting" else "timing"
        lane = race.drafted if race.plain.state == "done" else race.plain
        which = "" if race.state == "waiting" else (" the draft" if lane.drafted else " plain generate")
        return f'<p class="df-verdict" data-live="true">{doing}{which} …</p>'
    if race.state != "done":
        return f'<p class="df-verdict">{escape(race.error) or "stopped"}</p>'
    if race.identical:
        text = f'<em class="df-same">identical</em> all {len(race.plain.ids)} tokens are the same'
    else:
        text = (
            f'<em class="df-differs">not identical</em> the first difference is token {race.first_difference}: at '
            "this precision two tokens were nearly tied, and forwards of different widths round differently"
        )
    note = "" if pace == 1.0 else f"<small>replayed at {pace:.1f} times the pace</small>"
    return f'<p class="df-verdict"><strong>{race.ratio:.1f}×</strong><span>{text}{note}</span></p>'


def welcome(takes_pictures: bool, examples: list[Example]) -> str:
    """What stands in the place of a conversation before there is one; `page.js` asks an example that is clicked."""
    more = " Add pictures with the button on the left, or paste or drop them." if takes_pictures else ""
    buttons = "".join(
        f'<button type="button" data-df-example="{escape(example.text)}">'
        + "".join(f'<img src="{picture}" alt="">' for picture in example.pictures)
        + f"<span>{escape(example.text)}</span></button>"
        for example in examples
    )
    return (
        '<div class="df-welcome"><h2>Same text, fewer forwards</h2><p>The answer comes in coloured runs: each run is '
        f'one forward of the target.{more}</p><div class="df-examples">{buttons}</div></div>'
    )


def notice(sentence: str) -> str:
    """A sentence about what could not be done; nothing for an empty one."""
    if not sentence:
        return ""
    return f'<p class="df-notice" role="alert">{escape(sentence[:1].upper() + sentence[1:])}</p>'


def header(target: str, draft: str, block_size: int) -> str:
    """The top of the page."""
    return (
        '<header class="df-header"><h1>DFlash <span>chat</span></h1>'
        f'<p><span title="{escape(target)}">{escape(_short(target))}</span><i>+</i>'
        f'<span title="{escape(draft)}">{escape(_short(draft))}</span><i>block of {block_size}</i></p>'
        '<button type="button" data-df-theme aria-label="Light or dark">◐</button></header>'
    )


def _short(place: str) -> str:
    """The last two parts of a path or Hub id."""
    return "/".join(place.rstrip("/").split("/")[-2:])


def current(conversation: Conversation) -> str:
    """The newest turn."""
    return turn_block(conversation.turns[-1]) if conversation.turns else ""


__all__ = [
    "LEGEND",
    "answer_block",
    "current",
    "escape",
    "header",
    "history",
    "notice",
    "race_lanes",
    "runs_text",
    "statistics",
    "turn_block",
    "welcome",
]
