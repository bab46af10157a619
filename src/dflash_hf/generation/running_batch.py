"""A batch that runs on while requests come and go ("continuous batching"), with a draft.

A new request is prefilled between two steps, a chunk at a time, and its row joins those that are running. Rows that
have ended, or were cancelled, leave. The text of every row is what `generate` gives for its prompt alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.devices import device_errors_explained, eagerly
from dflash_hf.errors import is_a, one_line, require
from dflash_hf.generation.accept import may_keep_state
from dflash_hf.generation.arguments import Settings
from dflash_hf.generation.checks import check_is_draft
from dflash_hf.generation.decode import keep_for_next_call, no_gradients
from dflash_hf.generation.generate import answer_with, unwrapped
from dflash_hf.generation.joining import RowSettings, begin_batch, join, leave
from dflash_hf.generation.kept_prefixes import KeptPrefixes
from dflash_hf.generation.logprobs import logprobs_of
from dflash_hf.generation.options import choose_engine
from dflash_hf.generation.prefill import Prefill, begin_prefill
from dflash_hf.generation.request import Request
from dflash_hf.generation.request_stats import Finished, NewTokens, RequestStats
from dflash_hf.generation.run import Run
from dflash_hf.generation.sampling import new_seed
from dflash_hf.generation.step import step
from dflash_hf.generation.user_cache import NoUserCache
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.fast_layers import fast_whole_run
from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.support import changing_ropes
from dflash_hf.undo import calling

logger: Any = logging.get_logger(__name__)
EAGER = "a running batch decodes eagerly: steps are captured for rows that stay"
# What `add` says by itself, or what cannot be one row's.
NOT_SETTINGS = (
    "inputs",
    "input_ids",
    "attention_mask",
    "assistant_model",
    "streamer",
    "stopping_criteria",
    "inputs_embeds",
    "position_ids",
    "pixel_values",
    "return_dict_in_generate",
    CACHE_NAME,
)


@dataclass(slots=True, kw_only=True)
class _Row:
    """A request that waits, is prefilled, or runs."""

    id: int
    request: Request
    inputs: dict[str, Any]  # keywords for the target's prefill, as `generate` prepared them
    seed: Tensor | None  # [], int64: of the sampling noise; greedy requests have none
    length: int  # tokens of prompt and answer, at most
    num_logprobs: int = -1  # of the most likely tokens at each place; -1 for none at all
    end_ids: list[int] = field(default_factory=list[int])  # known once its prefill has begun
    on_tokens: Callable[[NewTokens], None] | None = None
    added: float = field(default_factory=time.perf_counter)
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def settings(self) -> RowSettings:
        """What is said of this row alone."""
        return RowSettings(self.request.processors, self.end_ids, self.seed, self.length)

    def note_logprobs(self, logits: Tensor, token_ids: list[int]) -> None:
        """Notes log-probabilities of new tokens if the request asks for them; `logits` `[T, V]` are the target's."""
        if self.num_logprobs >= 0:
            self.stats.logprobs += logprobs_of(logits, token_ids, self.num_logprobs)


class RunningBatch:
    """Requests that are decoded together; they join and leave between two steps. To be used from one thread.

    First come, first served: requests begin in the order of [`add`]. Between two steps, at most `prefill_chunk_size`
    tokens of prompts go through the target.

    Args:
        model (`PreTrainedModel`): The target, on one process.
        draft (`DFlashDraftModel`): Its draft. `draft.generation_config` holds for all rows, and stays as it is while
            any of them runs.
        max_rows (`int`): Rows that run at once, at most.
        max_tokens (`int`, *optional*): Tokens that the caches hold at once, at most: rows times the longest of them,
            its answer included. A request waits until it fits in beside those that run.
        prefill_chunk_size (`int`): Tokens of prompts between two steps, at most.
        max_kept_bytes (`int`): Size of the keys and values that are kept of the last texts, at most. A request that
            begins with the tokens of one goes on from it; where the target has sliding windows, with all of them.

    Raises:
        ValueError: If the target, the pair or an argument is refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        draft: DFlashDraftModel,
        *,
        max_rows: int = 8,
        max_tokens: int | None = None,
        prefill_chunk_size: int = 256,
        max_kept_bytes: int = 0,
    ) -> None:
        draft = unwrapped(draft)
        check_is_draft(draft)
        for name, value in (
            ("max_rows", max_rows),
            ("max_tokens", max_tokens),
            ("prefill_chunk_size", prefill_chunk_size),
        ):
            is_fine = (name == "max_tokens" and value is None) or _is_count(value)
            require(is_fine, f"{name} of at least 1", value, "pass a whole number")
        is_size = is_a(max_kept_bytes, int) and max_kept_bytes >= 0
        require(is_size, "max_kept_bytes of at least 0", max_kept_bytes, "pass a whole number")
        self.model = model
        self.draft = draft
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.prefill_chunk_size = prefill_chunk_size
        # Statistics of the requests that the last step has ended, by id.
        self.ended: dict[int, RequestStats] = {}
        self._next_id = 0
        self._kept = KeptPrefixes(max_kept_bytes)
        self._waiting: deque[_Row] = deque()
        self._prefilled: tuple[_Row, Prefill] | None = None
        self._running: list[_Row] = []  # in the order of the run's rows
        self._run: Run | None = None  # none while no row runs
        self._found: list[tuple[_Row, NewTokens]] = []  # of the last step

    @property
    def num_running(self) -> int:
        """Requests that have their first token and not their last one."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a first token, the one that is being prefilled included."""
        return len(self._waiting) + (self._prefilled is not None)

    @property
    def ids(self) -> list[int]:
        """Requests that have not ended, those that run first, then in the order in which they came."""
        return [row.id for row in self._rows()]

    def add(
        self,
        input_ids: Tensor | Sequence[int],
        *,
        max_new_tokens: int,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        on_tokens: Callable[[NewTokens], None] | None = None,
        num_logprobs: int = -1,
        **settings: Any,
    ) -> int:
        """Adds a request; it waits until [`step`] takes it in.

        Args:
            input_ids (`torch.Tensor` of shape `[n]` or `[1, n]`, or sequence of `int`): The prompt.
            max_new_tokens (`int`): Tokens of the answer, at most.
            seed (`int`, *optional*): Of sampled text: that of `generate` behind `torch.manual_seed(seed)`. By default
                it is drawn from torch's global generator.
            stop_token_ids (sequence of `int`): Tokens that end the answer, beside the target's own end tokens.
            on_tokens (callable, *optional*): Called within [`step`] with each [`NewTokens`] of this request.
            num_logprobs (`int`): With 0 or more, the statistics have log-probabilities from the target's own scores:
                of each new token, and of so many of the most likely tokens at its place. -1 is for none.
            settings: Settings of `generate` for this request, such as `do_sample`, `temperature`, `top_k`, `top_p`,
                `min_p`, `repetition_penalty`, `eos_token_id`, `logits_processor`, `generation_config`.

        Returns:
            `int`: The id of the request.

        Raises:
            ValueError: If the request is refused; nothing is changed then.
        """
        # Everything is refused before anything is kept: a request that is not there cannot fail later.
        ids = self._checked_ids(input_ids)
        require(
            _is_count(max_new_tokens), "max_new_tokens of at least 1", max_new_tokens, "correct it"
        )
        is_seed = seed is None or (is_a(seed, int) and -(2**63) <= seed < 2**64)
        require(is_seed, "a seed that torch.manual_seed takes, or None", seed, "correct it")
        num_tokens = find_target(self.model).vocab_size
        is_number = is_a(num_logprobs, int) and -1 <= num_logprobs <= num_tokens
        what = f"num_logprobs from -1 to {num_tokens}"
        require(is_number, what, num_logprobs, "pass a whole number")
        length = ids.shape[1] + max_new_tokens
        self._check_length(length)
        refused = [name for name in NOT_SETTINGS if settings.get(name) is not None]
        require(not refused, "settings of one row of text", refused, "leave them out")
        arguments = dict(settings)
        if stop_token_ids:
            # Setting end tokens replaces the target's own, and these are to be added.
            own: Any = Settings(self.model, arguments)["eos_token_id"]
            arguments["eos_token_id"] = [*_as_list(own), *map(int, stop_token_ids)]
        arguments |= {
            "input_ids": ids,
            # Given, because `generate` would take a pad token in a prompt for padding.
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": max_new_tokens,
            "return_dict_in_generate": False,
        }
        generate = cast(Any, self.model).generate
        # Transformers prepares processors and limits as for `generate`; nothing runs yet.
        request, inputs = answer_with(_prepared, generate, self.model, self.draft, arguments)
        _check_joins(request)
        noise: Tensor | None = None
        # Drawn now, so that seeds follow the order of requests and not that of their prefills.
        if request.config.do_sample:
            noise = _seed_of(seed, request.input_ids.device)
        row = _Row(
            id=self._next_id,
            request=request,
            inputs=inputs,
            seed=noise,
            length=length,
            num_logprobs=num_logprobs,
            on_tokens=on_tokens,
        )
        row.stats.num_prompt_tokens = ids.shape[1]
        self._next_id += 1
        self._waiting.append(row)
        return row.id

    def stats_of(self, id: int) -> RequestStats:
        """Returns the statistics of a request that has not ended; they go on with it."""
        return next(row.stats for row in self._rows() if row.id == id)

    def cancel(self, id: int) -> bool:
        """Ends a request without another token; returns False if there is none of this id, as behind its end."""
        for row in self._waiting:
            if row.id == id:
                self._waiting.remove(row)
                return True
        if self._prefilled is not None and self._prefilled[0].id == id:
            self._prefilled = None
            return True
        for place, row in enumerate(self._running):
            if row.id == id:
                assert self._run is not None
                # The row counts as ended, and leaves as one does that has come to its end.
                self._run.rows.reported.done[place] = 1
                with no_gradients(row.request.target):
                    self._drop_finished()
                return True
        return False

    def step(self) -> list[NewTokens]:
        """Takes waiting requests in, as far as a chunk of prompts goes, and runs one step over all rows.

        Returns:
            `list[NewTokens]`: What it has brought, in the order in which it came: first tokens of requests that have
            been prefilled, then the tokens of the step. A request may have both. Empty if nothing waits or runs.

        Raises:
            Exception: Whatever the target, the draft or a callback raises. In a prefill it ends that request, in a
                step over the rows all that ran: [`ids`] names those that go on. Each `on_tokens` has been called
                with the tokens before it; an error in one ends no request.
        """
        self.ended = {}
        self._found = []
        rows = self._rows()
        if not rows:
            return []
        target = rows[0].request.target
        try:
            with (
                calling(),
                device_errors_explained(),
                # Compiled parts run as they were before torch.compile: they call no hooks.
                eagerly(target.parts, rows[0].request.draft_parts),
                fast_whole_run(target),
                no_gradients(target),
            ):
                self._take_in()
                self._advance()
        finally:
            # Also what came before an error: rows that go on would miss it.
            self._call_back()
        return [new for _, new in self._found]

    # ---- requests that wait

    def _take_in(self) -> None:
        """Prefills requests in the order in which they came, at most a chunk of tokens together."""
        num_left = self.prefill_chunk_size
        while num_left > 0:
            if self._prefilled is None:
                if not self._fits_next():
                    return
                self._begin(self._waiting.popleft())
                continue
            row, begun = self._prefilled
            # An error ends this request, and the others go on.
            self._prefilled = None
            filling = begun.filling
            num_seen = filling.seen
            filling.run_chunk(num_left)
            num_left -= filling.seen - num_seen
            if filling.is_done:
                self._join(row, begun)
            else:
                self._prefilled = (row, begun)

    def _fits_next(self) -> bool:
        """Returns True if there is a next request, and room for it beside the rows that run."""
        if not self._waiting or len(self._running) >= self.max_rows:
            return False
        if self.max_tokens is None or not self._running:
            return True
        # Buffers are as long for every row as for the longest.
        lengths = [row.length for row in (*self._running, self._waiting[0])]
        return len(lengths) * max(lengths) <= self.max_tokens

    def _begin(self, row: _Row) -> None:
        """Begins a prefill; what has no room in memory, or is refused only now, ends the request."""
        try:
            begun = begin_prefill(row.request, row.inputs, NoUserCache(), seed=row.seed)
        except ValueError as error:
            self._fail(row, error)
            return
        # Tokens of an earlier text need not go through the target again.
        row.stats.num_kept_tokens = self._kept.go_on(begun)
        row.end_ids = begun.prompts.eos_ids.tolist()
        self._prefilled = (row, begun)

    def _join(self, row: _Row, begun: Prefill) -> None:
        """Makes a run of a prefill that has seen its prompt, reports its first token, and adds it to the batch."""
        try:
            run = begun.finish()
            # A verify has one set of further inputs for all rows.
            what = "a target whose steps take no further inputs"
            require(not run.extra, what, list(run.extra), "call generate for this request alone")
        except ValueError as error:
            self._fail(row, error)
            return
        first = int(run.state.anchor[0])
        row.note_logprobs(begun.filling.last_logits, [first])
        # Others may come with the same system prompt before this one ends.
        self._kept.keep(run, 0, run.state.ids[0].tolist())
        row.stats.first_token_seconds = time.perf_counter() - row.added
        is_last = bool(run.rows.reported.done[0])
        # An answer of one token joins nothing.
        if is_last:
            keep_for_next_call(run)
            self._report(row, [first], is_last)
            return
        try:
            self._add_run(row, run)
        except ValueError as error:
            self._fail(row, error)
            return
        self._report(row, [first], is_last)

    def _add_run(self, row: _Row, run: Run) -> None:
        """Adds a run of one row to the batch."""
        if self._run is None:
            begin_batch(run, row.settings)
            self._run = run
            self._running = [row]
            return
        # The row's run ends here: what its widths have shown is for the next one.
        keep_for_next_call(run)
        rows = [*self._running, row]
        settings = [each.settings for each in rows]
        try:
            join(self._run, run, settings, self.max_rows)
        # A row that has no room is refused before the batch is changed.
        except ValueError:
            raise
        except BaseException:
            # The row may be there in a part of the batch.
            self._end_all()
            raise
        self._running = rows

    def _fail(self, row: _Row, error: ValueError) -> None:
        """Ends a request that could not be prefilled."""
        row.stats.error = one_line(error)
        self._end(row, NewTokens(row.id, [], "error"))

    # ---- rows that run

    def _advance(self) -> None:
        """Runs one step over all rows, and goes on without those that have ended."""
        run = self._run
        if run is None:
            return
        stats = run.stats
        # Of the rows that are there now: a batch that never ends keeps no counts of every step.
        stats.verify_widths.clear()
        stats.start_run(len(self._running), stats.num_proposed, stats.proposal)
        # Neither the time between steps nor that of prefills is a step's.
        run.watch.last = time.perf_counter()
        try:
            logits, committed = step(run)
        except BaseException:
            # A step that was cut short may have moved some rows on.
            self._end_all()
            raise
        # In the order of the path where trees are verified.
        tokens = run.state.tokens.tolist()
        if run.state.is_tree and any(row.num_logprobs >= 0 for row in self._running):
            logits = run.state.along_path(logits)
        for place, row in enumerate(self._running):
            row.stats.proposed.append(run.state.width - 1)
            # Proposals behind the end of a text were accepted, and are no part of it.
            row.stats.accepted.append(min(run.rows.reported.accepted[place], committed[place]))
            new = tokens[place][: committed[place]]
            row.note_logprobs(logits[place], new)
            is_last = bool(run.rows.reported.done[place])
            # Kept before the row leaves: another one goes to its place.
            if is_last:
                self._kept.keep(run, place, run.state.ids[place].tolist())
            self._report(row, new, is_last)
        self._drop_finished()

    def _drop_finished(self) -> None:
        """Goes on without the rows that have ended."""
        run = self._run
        assert run is not None
        if run.finished:
            keep_for_next_call(run)
            self._end_all()
            return
        if not any(run.rows.reported.done):
            return
        places = leave(run, [row.settings for row in self._running])
        self._running = [self._running[place] for place in places]

    def _end_all(self) -> None:
        """Lets go of everything that runs."""
        self._run = None
        self._running = []

    # ---- what is reported

    def _report(self, row: _Row, token_ids: list[int], is_last: bool) -> None:
        """Reports the new tokens of a row."""
        row.stats.num_new_tokens += len(token_ids)
        if not is_last:
            self._found.append((row, NewTokens(row.id, token_ids, None)))
            return
        finished: Finished = "length"
        # Also where the last token that was allowed is an end token.
        if token_ids[-1] in row.end_ids:
            finished = "stop"
        self._end(row, NewTokens(row.id, token_ids, finished))

    def _end(self, row: _Row, new: NewTokens) -> None:
        """Reports the end of a request."""
        row.stats.seconds = time.perf_counter() - row.added
        self.ended[row.id] = row.stats
        self._found.append((row, new))

    def _call_back(self) -> None:
        """Hands each request its new tokens; raises the first error of a callback once all have been called."""
        errors: list[Exception] = []
        for row, new in self._found:
            if row.on_tokens is None:
                continue
            try:
                row.on_tokens(new)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _rows(self) -> list[_Row]:
        """Returns the requests that have not ended; see [`ids`]."""
        found = list(self._running)
        if self._prefilled is not None:
            found.append(self._prefilled[0])
        return found + list(self._waiting)

    # ---- what is refused

    def _checked_ids(self, input_ids: Tensor | Sequence[int]) -> Tensor:
        """Returns a prompt as `[1, n]` int64 on the target's device."""
        ids = torch.as_tensor(input_ids, device="cpu")
        if ids.dim() == 1:
            ids = ids[None]
        is_row = ids.dim() == 2 and ids.shape[0] == 1 and ids.numel() > 0
        is_whole = not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
        what = "input_ids of one prompt, [n] or [1, n] whole numbers with n of at least 1"
        require(is_row and is_whole, what, f"{ids.dtype} {list(ids.shape)}", "pass one prompt")
        low, high = map(int, ids.aminmax())
        # An embedding on a GPU reports an id out of range by failing for good.
        num = find_target(self.model).vocab_size
        is_known = low >= 0 and high < num
        require(is_known, f"token ids from 0 to {num - 1}", f"{low} to {high}", "correct them")
        return ids.to(torch.long)

    def _check_length(self, length: int) -> None:
        """Refuses a request that has no room even alone, or more tokens than the target has positions."""
        # Said now and not in the prefill, where the request would have waited for nothing.
        limits = [self.max_tokens, find_target(self.model).facts.num_positions]
        for limit in limits:
            fits = limit is None or length <= limit
            what = f"a prompt and an answer of together at most {limit} tokens"
            require(fits, what, length, "shorten the prompt or lower max_new_tokens")


def _prepared(request: Request, inputs: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
    """Stands where `decode` stands, and only returns what Transformers has prepared."""
    return request, inputs


def _check_joins(request: Request) -> None:
    """Refuses what a row that joins others cannot be: a `ValueError` names it."""
    target = request.target
    name = type(target.model).__name__
    alone = "generate it alone"
    what = "a target whose RoPE does not follow the length of the batch"
    require(not changing_ropes(target), what, name, alone)
    require(request.ranks.is_alone, "a target on one process", request.ranks.size, alone)
    num_rows = len(request.input_ids)
    require(num_rows == 1, "one row", num_rows, "add a request for every answer")
    own = [type(criterion).__name__ for criterion in request.own_criteria]
    what = "no stopping criteria but length and end tokens"
    require(not own, what, own, "cancel the request where it has to stop")
    # They are called with one row, and must not mind what else is decoded in between.
    keeping = [
        type(processor).__name__
        for processor in request.processors.processors
        if may_keep_state(processor)
    ]
    what = "logits processors that look at the row's tokens and scores alone (is_row_wise = True says so)"
    require(not keeping, what, keeping, alone)
    is_drawn = request.config.do_sample and request.draft.generation_config.proposal == "sample"
    what = "proposal 'argmax' or 'shared_noise' for sampled rows that run together"
    do = "change draft.generation_config.proposal"
    require(not is_drawn, what, "sample", do)
    if choose_engine(target, request.draft) != "eager":
        logger.warning_once(EAGER)


def _seed_of(seed: int | None, device: torch.device) -> Tensor:
    """Returns the seed of the noise that a run has behind `torch.manual_seed(seed)`; the random state stays."""
    if seed is None:
        return new_seed(device)
    generator = torch.Generator("cpu").manual_seed(seed)
    return new_seed(device, generator)


def _as_list(value: Any) -> list[int]:
    """Returns end tokens, given as one, several or none, as a list."""
    if value is None:
        return []
    return torch.as_tensor(value, device="cpu").reshape(-1).tolist()


def _is_count(value: object) -> bool:
    """Returns True for whole numbers above 0."""
    return isinstance(value, int) and is_a(value, int) and value > 0
