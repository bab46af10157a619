"""This module defines the output of a call beside its text: statistics, and the scores, logits and states asked for.

Definitions. A *verify* is one forward of the target over a block. It is counted once for every row that was still
running. A verify *accepts* the longest prefix of the proposals that equals the target's own tokens. It *commits* this
prefix and one more token of the target (the bonus token), cut at an end-of-sequence token and at the length limit.
`acceptance_length` is the mean number of tokens committed per verify, including the bonus token, over all verifies of
all rows. The first token of an answer comes from the prefill and belongs to no verify.

Other projects use the same name for other numbers. [`SpeculativeStats.acceptance_length_as`] computes their numbers
from the same counts. One row corresponds to one of their *responses* or *requests*:

| who | acceptance length | difference from this package |
|---|---|---|
| z-lab `dflash` 0.1.0 | mean over responses of the mean committed per verify | short answers weigh the same |
| vLLM | `1 + accepted / drafts` | accepted tokens beyond the end count, verifies without proposals do not |
| SGLang | `completion_tokens / verify_ct` | the prefill's token counts, its forward does not |
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dflash_hf.generation.state import Reported, ReportedTree
from dflash_hf.plot_style import BLUE, ORANGE, legend_above, module_of_research, new_figure, styled

Definition = Literal["zlab", "vllm", "sglang"]
Part = Literal["prepare", "prefill", "draft", "verify", "accept", "rest"]


@dataclass(slots=True, kw_only=True)
class SpeculativeStats:
    """Statistics of one `generate` call.

    Args:
        num_committed (`list[list[int]]`): For each row, the number of tokens committed by each verify, including the
            bonus token.
        num_accepted (`list[list[int]]`): For each row, the number of matching proposals of each verify before a cut.
        num_checked (`list[list[int]]`): For each row, the number of positions of the block that each verify checked.
            In a chain, each proposal has one position. In a tree, these are the accepted positions, and the next one
            unless the accepted path ended in a leaf. If the list is empty, all verifies were chains.
        num_proposed (`int`): Maximum number of proposals checked per verify (`verify_width - 1`).
        verify_widths (`list[int]`): Number of tokens checked by each verify, the anchor included: one number per step,
            for all rows that were still running. The number is 1 for a token decoded without a draft, which counts as
            a verify too. If the list is empty, the number was always `num_proposed + 1`.
        num_target_forwards (`int`): Number of forwards of the target, including the prefill. With CUDA graphs,
            it also counts the extra step that was started before the host knew that all rows had ended.
        num_draft_forwards (`int`): Number of the draft's forwards over a block.
        prepare_seconds (`float`): Wall time in seconds from the call to the prefill: Transformers' preparation.
        prefill_seconds (`float`): Seconds of the prefill, up to the first token.
        draft_seconds (`float`): Seconds of the forwards of the draft, the newest context included.
        verify_seconds (`float`): Seconds of the forwards of the target over blocks. Under the engine `"cuda_graph"`,
            the draft and the acceptance count here too.
        accept_seconds (`float`): Seconds of logits processors, of choosing and accepting tokens, of stopping criteria,
            and of reading the counts on the host.
        rest_seconds (`float`): Seconds of the streamer (in `accept_seconds` if rows advance together) and the output.
            The six parts follow one another without gaps. The host does not wait for an accelerator. So without
            `draft.generation_config.synchronize`, only the sum of the six means something there.
        engine (`str`): Engine that ran: `"eager"` or `"cuda_graph"`. `"static"` is the step of `"cuda_graph"` without
            a capture, which only tests and benchmarks use.
        proposal (`str`): Proposal rule that ran; `"greedy"` without sampling.
        num_tried_by_node, num_accepted_by_node (`list[int]`): If trees were verified (the default for most targets),
            how many verifies, summed over rows, tried and accepted each node of the tree, without the anchor. The most
            likely node comes first.
        num_tried_from_text, num_accepted_from_text (`int`): How many of these nodes came from an earlier place in the
            text, and not from the draft.
        cache_bytes (`int`): Size of the target's and the draft's K/V buffers, in bytes.
        float8_bytes (`int`): Size of the draft's copy in FP8, the head included, in bytes; 0 if there is none.
    """

    num_committed: list[list[int]] = field(default_factory=list)
    num_accepted: list[list[int]] = field(default_factory=list)
    num_checked: list[list[int]] = field(default_factory=list)
    num_proposed: int = 0
    verify_widths: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    num_draft_forwards: int = 0
    prepare_seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    rest_seconds: float = 0.0
    engine: str = "eager"
    proposal: str = "greedy"
    cache_bytes: int = 0
    float8_bytes: int = 0
    num_tried_by_node: list[int] = field(default_factory=list)
    num_accepted_by_node: list[int] = field(default_factory=list)
    num_tried_from_text: int = 0
    num_accepted_from_text: int = 0

    def count(
        self,
        numbers: Sequence[int],
        reported: Reported,
        running: Sequence[int],
        width: int,
        tree: ReportedTree | None,
        nodes: Sequence[Sequence[int]],
    ) -> None:
        """Counts a verify. Rows that had ended before it are not counted.

        Args:
            numbers (`list[int]`): The number in the request of each row of the state.
            reported (`Reported`): The numbers that the verify has reported.
            running (`list[int]`): The rows of the state that were running.
            width (`int`): Number of tokens that it has verified.
            tree (`ReportedTree`, *optional*): The tree that it has verified; `None` for a chain.
            nodes (`list[list[int]]`): The nodes of the tree that each of these rows has accepted; empty for a chain.
        """
        self.verify_widths.append(width)
        for row in running:
            num_accepted = reported.accepted[row]
            # In a chain, every proposal is checked.
            num_checked = width - 1
            if tree is not None:
                num_checked = _num_checked(tree, row, num_accepted)
            number = numbers[row]
            self.num_committed[number].append(reported.committed[row])
            self.num_accepted[number].append(num_accepted)
            self.num_checked[number].append(num_checked)
        if tree is not None:
            self._count_nodes(running, width, tree, nodes)

    def _count_nodes(
        self,
        running: Sequence[int],
        width: int,
        tree: ReportedTree,
        nodes: Sequence[Sequence[int]],
    ) -> None:
        """Counts the accepted nodes of each running row in a verify of `width` nodes, and the sources of its nodes."""
        # Node 0 is the anchor, which is not counted. The lists grow with the widest verify so far.
        num_missing = width - 1 - len(self.num_tried_by_node)
        missing = [0] * num_missing
        self.num_tried_by_node.extend(missing)
        self.num_accepted_by_node.extend(missing)
        for node in range(1, width):
            self.num_tried_by_node[node - 1] += len(running)
        for row, accepted in zip(running, nodes, strict=True):
            sources = tree.sources[row]
            self.num_tried_from_text += sum(sources)
            for node in accepted:
                self.num_accepted_by_node[node - 1] += 1
                self.num_accepted_from_text += sources[node]

    def start_run(self, num_rows: int, num_proposed: int, proposal: str) -> None:
        """Starts to count a run of this number of rows, after its prefill."""
        # Each row has its own list, because rows end at different steps.
        self.num_committed = [[] for _ in range(num_rows)]
        self.num_accepted = [[] for _ in range(num_rows)]
        self.num_checked = [[] for _ in range(num_rows)]
        self.num_proposed = num_proposed
        # The prefill is one forward of the target.
        self.num_target_forwards = 1
        self.proposal = proposal

    @property
    def num_verifies(self) -> int:
        """Number of verifies, summed over rows."""
        # A row is counted as long as it runs: one step over three running rows is three verifies.
        return sum(len(row) for row in self.num_committed)

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens generated, summed over rows, including each row's first token, which the prefill gives."""
        num_rows = len(self.num_committed)
        num_verified = sum(sum(row) for row in self.num_committed)
        return num_rows + num_verified

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens committed per verify, the bonus token included, over all rows; 0 without verifies."""
        return _mean([count for row in self.num_committed for count in row])

    @property
    def acceptance_length_per_row(self) -> list[float]:
        """The acceptance length of each row."""
        return [_mean(row) for row in self.num_committed]

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the call of `generate` to its first token (TTFT)."""
        return self.prepare_seconds + self.prefill_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole call: the sum of the six parts."""
        return sum(getattr(self, f"{part}_seconds") for part in get_args(Part))

    def acceptance_length_as(self, definition: Definition) -> float:
        """Returns tokens per verify as another project defines them, from the same counts; 0 if nothing was verified.

        Args:
            definition (`str`): `"zlab"`, `"vllm"` or `"sglang"`; see the table at the top of this module.

        Raises:
            ValueError: If the definition is not known.
        """
        if definition not in get_args(Definition):
            raise ValueError(
                f"expected a definition in {get_args(Definition)}, got {definition!r}; name one of them"
            )
        if not self.num_verifies:
            return 0.0
        # The mean of the rows' means: a short answer weighs as much as a long one.
        # Source: dflash/benchmark.py::_print_decode_summary.
        if definition == "zlab":
            return _mean([_mean(row) for row in self.num_committed if row])
        # Source: vllm/v1/spec_decode/metrics.py. In vLLM, a verify of one token has no proposals and does not count.
        if definition == "vllm":
            return 1.0 + _mean([count for count, tried in self._checked() if tried])
        # SGLang: the prefill's token belongs to the answer, but the prefill's forward is no verify.
        return self.num_new_tokens / self.num_verifies

    def acceptance_per_position(
        self, conditional: bool = False, row: int | None = None
    ) -> list[float]:
        """Share of verifies in which the proposal at each position was accepted, first proposal first.

        The joint shares (the default) are what vLLM reports per position. A verify that was too narrow for a position
        is not counted in the conditional share there. The joint share is then the product of the conditional shares.
        If the accepted path of a tree ended in a leaf, the verify is not counted after the leaf in the conditional
        shares. In the joint shares it counts as an end, because the draft chose the depth of its paths.

        Args:
            conditional (`bool`): Divide by the verifies that accepted all proposals before the position, instead of by
                all verifies.
            row (`int`, *optional*): One row; default: all rows pooled.

        Returns:
            `list[float]`: `num_proposed` values. A conditional share is 0 if no verify came to its position.
        """
        if conditional:
            return [_share(reached, tried) for reached, tried in self._reached_and_tried(row)]
        counts = self._checked(row)
        joint = 1.0
        joint_shares: list[float] = []
        is_complete = True
        reached = len(counts)
        for position in range(self.num_proposed):
            # Verifies that reached this position: all before it was accepted, and the block was wide enough.
            tried = sum(count >= position and checked > position for count, checked in counts)
            # Once a verify was too narrow for a position, the share of all verifies is not exact any more.
            is_complete = is_complete and tried == reached
            reached = sum(count > position for count, _ in counts)
            share = _share(reached, tried)
            if is_complete:
                joint = _share(reached, len(counts))
            else:
                joint = joint * share
            joint_shares.append(joint)
        return joint_shares

    def _reached_and_tried(self, row: int | None) -> list[tuple[int, int]]:
        """Returns, for each position, how many verifies accepted its proposal, and how many checked it."""
        accepted = [num for nums in _rows_of(self.num_accepted, row) for num in nums]
        # Statistics that were created by hand may lack these positions.
        if self.num_checked:
            checked = [num for nums in _rows_of(self.num_checked, row) for num in nums]
        else:
            checked = [num for _, num in self._checked(row)]
        counts: list[tuple[int, int]] = []
        for position in range(self.num_proposed):
            both = zip(accepted, checked, strict=True)
            tried = sum(right >= position and num > position for right, num in both)
            reached = sum(right > position for right in accepted)
            counts.append((reached, tried))
        return counts

    def _checked(self, row: int | None = None) -> list[tuple[int, int]]:
        """Returns the numbers of proposals that each verify has accepted and checked, for one row or for all rows."""
        rows = range(len(self.num_accepted)) if row is None else [row]
        found: list[tuple[int, int]] = []
        for index in rows:
            found.extend(zip(self.num_accepted[index], self.proposed_of(index), strict=True))
        return found

    def proposed_of(self, row: int) -> list[int]:
        """Returns how many proposals each verify of a row checked."""
        num_verifies = len(self.num_accepted[row])
        # Statistics that were created by hand may lack the widths.
        if not self.verify_widths:
            return [self.num_proposed] * num_verifies
        # A row that has ended is in fewer verifies than there were steps.
        return [width - 1 for width in self.verify_widths[:num_verifies]]

    def acceptance_histogram(self, row: int | None = None) -> list[int]:
        """Counts the verifies of one row or all rows by their number of committed tokens: 0 to `num_proposed + 1`."""
        rows = _rows_of(self.num_committed, row)
        # A verify commits at most all proposals and a bonus token.
        num_lengths = self.num_proposed + 2
        return [sum(counts.count(length) for counts in rows) for length in range(num_lengths)]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers, for JSON: counts per row and verify, and the means of these."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_length_per_row": self.acceptance_length_per_row,
            "num_verifies": self.num_verifies,
            "num_new_tokens": self.num_new_tokens,
            "time_to_first_token": self.time_to_first_token,
            "total_seconds": self.total_seconds,
            "acceptance_length_as": {
                name: self.acceptance_length_as(name) for name in get_args(Definition)
            },
            "acceptance_per_position": self.acceptance_per_position(),
            "conditional_acceptance_per_position": self.acceptance_per_position(conditional=True),
            "acceptance_histogram": self.acceptance_histogram(),
            **asdict(self),
        }

    def to_frame(self) -> Any:
        """Returns one line per row and verify as a `pandas.DataFrame`.

        The columns are `row`, `verify` (both from 0), `num_tried` (proposals checked), `num_accepted`, `num_committed`
        and `num_new` (number of tokens of the row after this verify, the prefill's token included).

        Raises:
            ImportError: If pandas is not installed; `pip install 'dflash-hf[research]'`.
        """
        columns = ["row", "verify", "num_tried", "num_accepted", "num_committed", "num_new"]
        lines: list[tuple[int, ...]] = []
        for row, committed in enumerate(self.num_committed):
            # The prefill's token counts as new.
            num_new = 1
            for verify, (accepted, tried) in enumerate(self._checked(row)):
                num_new += committed[verify]
                lines.append((row, verify, tried, accepted, committed[verify], num_new))
        return module_of_research("pandas").DataFrame(lines, columns=columns)

    def plot(self) -> Any:
        """Draws the acceptance per position (joint and conditional) beside the histogram of committed tokens.

        A position that no verify has reached has no conditional acceptance, and so no point.

        Returns:
            `matplotlib.figure.Figure`: The figure. It is not registered with pyplot, so a notebook shows it only once,
                as the value of a cell.

        Raises:
            ImportError: If matplotlib is not installed; `pip install 'dflash-hf[research]'`.
        """
        joint = self.acceptance_per_position()
        counts = enumerate(self._reached_and_tried(None), start=1)
        conditional = [
            (place, _share(reached, tried)) for place, (reached, tried) in counts if tried
        ]
        histogram = self.acceptance_histogram()
        positions = range(1, len(joint) + 1)
        with styled():
            figure = new_figure(8.0, 2.8)
            left, right = figure.subplots(1, 2)
            left.bar(positions, joint, color=BLUE, label="joint: all up to here")
            left.plot(
                [place for place, _ in conditional],
                [share for _, share in conditional],
                color=ORANGE,
                marker="o",
                label="given all before",
            )
            left.set(xlabel="position in the block", ylabel="share accepted", ylim=(0.0, 1.05))
            # A verify commits at least one token, so there is no bar at 0.
            right.bar(range(1, len(histogram)), histogram[1:], color=BLUE)
            right.axvline(
                self.acceptance_length, color=ORANGE, label=f"mean {self.acceptance_length:.2f}"
            )
            right.set(xlabel="tokens committed by a verify", ylabel="verifies")
            for axes in (left, right):
                axes.xaxis.get_major_locator().set_params(integer=True)
                legend_above(axes)
            right.yaxis.get_major_locator().set_params(integer=True)
        return figure


class Stopwatch:
    """Adds wall time to the parts of a run. Each lap takes all time since the last lap, so the parts sum to the whole.

    A call began when `time.perf_counter()` was `started`. Before each reading of the clock, accelerators in `devices`
    are synchronized.
    """

    def __init__(
        self, stats: SpeculativeStats, started: float, devices: Sequence[torch.device]
    ) -> None:
        self.stats = stats
        self.last = started
        self.devices = [device for device in devices if device.type != "cpu"]

    def lap(self, part: Part) -> None:
        """Adds the time since the last lap to one part."""
        # Without the wait, the time of queued work would count for a later part that waits for it.
        for device in self.devices:
            torch.accelerator.synchronize(device)
        now = time.perf_counter()
        name = f"{part}_seconds"
        seconds = getattr(self.stats, name) + now - self.last
        setattr(self.stats, name, seconds)
        # The next part begins where this part ends, so no time is lost between them.
        self.last = now


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """The output of `generate` with `return_dict_in_generate=True` and a DFlash draft.

    `scores`, `logits` and `hidden_states` have plain `generate`'s shapes, one entry per new token. Plain `generate`
    continues to feed padding to a finished row. Here a finished row does not run, and its entries after its end are
    zeros.

    Args:
        speculative (`SpeculativeStats`): Statistics of the run.
    """

    speculative: SpeculativeStats | None = None


class Recorder:
    """Collects the scores, logits and hidden states that a call asks for, only those of committed tokens, by row."""

    def __init__(self, generation_config: GenerationConfig, rows: int) -> None:
        wanted = bool(generation_config.return_dict_in_generate)
        self.has_scores = wanted and bool(generation_config.output_scores)
        self.has_logits = wanted and bool(generation_config.output_logits)
        self.has_hidden_states = wanted and bool(generation_config.output_hidden_states)
        self.is_on = self.has_scores or self.has_logits or self.has_hidden_states
        # Hidden states of the prefill, `[B, S, D]` per layer. They are the first token's entry without a change.
        self.first_hidden_states: tuple[Tensor, ...] | None = None
        # For each name and row, pieces `[tokens, ...]` in order.
        self._pieces = defaultdict[str, list[list[Tensor]]](lambda: [[] for _ in range(rows)])

    def add(
        self, scores: Tensor, outputs_logits: Tensor, hidden_states: Any, num_committed: list[int]
    ) -> None:
        """Stores the columns that each row has committed in one decision.

        `scores` are the processed scores and `outputs_logits` the target's own logits, both `[B, C, V]`.
        `hidden_states` has one tensor `[B, C, D]` per layer. For the first token it is `None`.
        """
        given: dict[str, Tensor] = {}
        if self.has_scores:
            # Transformers makes scores float32. A user's processor may make them float64.
            given["scores"] = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.has_logits:
            given["logits"] = outputs_logits.to(torch.float32)
        if self.has_hidden_states:
            given |= {f"layer {index}": states for index, states in enumerate(hidden_states or ())}
        for name, values in given.items():
            for row, num in enumerate(num_committed):
                if num:
                    # Only the committed columns are copied, so that the whole tensor of the step can be freed.
                    piece = values[row, :num].clone()
                    self._pieces[name][row].append(piece)

    def collected(self) -> dict[str, Any]:
        """Returns the keyword arguments of the output: tuples with one entry per new token."""
        found: dict[str, Any] = {}
        layers: list[tuple[Tensor, ...]] = []
        for name, rows in self._pieces.items():
            if name in ("scores", "logits"):
                found[name] = _joined(rows)
            else:
                # The names are in the order in which `add` got the layers.
                layers.append(_joined(rows))
        if self.has_hidden_states:
            # Plain `generate` has one tuple of layers per token, `[B, 1, D]` each.
            later = [
                tuple(states[:, None] for states in token) for token in zip(*layers, strict=True)
            ]
            found["hidden_states"] = (self.first_hidden_states, *later)
        return found


def _num_checked(tree: ReportedTree, row: int, num_accepted: int) -> int:
    """Returns how many positions of the block a verify has checked in a row in which it accepted `num_accepted` nodes.

    These are the accepted positions, and the next one unless the accepted path has ended in a leaf.
    """
    last = tree.path[row][num_accepted]
    # The anchor is the first entry. It is its own parent, but it is no proposal.
    has_child = last in tree.parents[row][1:]
    return num_accepted + has_child


def _joined(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Returns one tensor `[B, ...]` per new token, from each row's pieces `[n, ...]`; ended rows have zeros."""
    some = next(pieces[0] for pieces in rows if pieces)
    tokens = [[token for piece in pieces for token in piece] for pieces in rows]
    padding = torch.zeros_like(some[0])
    # Each tensor has its own memory. Views of all tokens could not be reshaped, and would be saved with all tokens.
    return tuple(torch.stack(column) for column in zip_longest(*tokens, fillvalue=padding))


def _rows_of(counts: list[list[int]], row: int | None) -> list[list[int]]:
    """Returns the counts of one row, or of all."""
    if row is None:
        return counts
    return [counts[row]]


def _share(num: int, total: int) -> float:
    """Returns the share `num / total`; 0 if `total` is 0."""
    if not total:
        return 0.0
    return num / total


def _mean(values: Sequence[float]) -> float:
    """Returns the mean; 0 if there are no values."""
    if not values:
        return 0.0
    return sum(values) / len(values)
