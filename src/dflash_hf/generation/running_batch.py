"""This module runs a batch that requests join and leave while it decodes ("continuous batching"), with a draft.

A new request is prefilled between two steps, one chunk at a time. Then its row joins the running rows. Rows that have
ended or were cancelled leave. The text of every row is the text that `generate` gives for its prompt alone. Captured
steps have fixed buffers with places for rows (`places.py`); eager steps have buffers that grow (`joining.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.devices import Inventory, device_errors_explained, eagerly
from dflash_hf.errors import one_line, require
from dflash_hf.generation.checks import check_is_draft
from dflash_hf.generation.cuda_graph import EAGER
from dflash_hf.generation.decode import keep_chooser, no_gradients
from dflash_hf.generation.generate import unwrapped, unwrapped_target
from dflash_hf.generation.joining import begin_batch, failed_of, join, leave
from dflash_hf.generation.kept_prefixes import KeptPrefixes
from dflash_hf.generation.places import Places, choose_num_places, run_captured
from dflash_hf.generation.prefill import Prefill, begin_prefill
from dflash_hf.generation.request import Request
from dflash_hf.generation.request_stats import NewTokens, RequestStats
from dflash_hf.generation.row_answers import Answers
from dflash_hf.generation.row_requests import Row, check_sizes, prepare_row
from dflash_hf.generation.run import Run, look_at_models, make_room
from dflash_hf.generation.sampling import RowProcessors
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation.step import step
from dflash_hf.generation.user_cache import NoUserCache
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.fast_layers import fast_whole_run
from dflash_hf.target_model.parts import find_target
from dflash_hf.undo import calling

T = TypeVar("T")
logger: Any = logging.get_logger(__name__)
# For steps that choose their tokens without the host. No row asks for the logits of such a step.
NO_LOGITS = torch.empty(1, 0, 0, device="cpu")


class RunningBatch:
    """Requests that are decoded together. They join and leave between two steps. Use it from one thread only.

    Requests begin in the order in which they were added. Between two steps, at most `prefill_chunk_size` tokens of
    prompts go through the target.

    Args:
        model (`PreTrainedModel`): The target, on one process.
        draft (`DFlashDraftModel`): Its draft. `draft.generation_config` holds for all rows. Do not change it while a
            row runs.
        max_rows (`int`): Maximum number of rows that run at once.
        max_tokens (`int`, *optional*): Maximum number of tokens in the caches: the number of rows times the length of
            the longest row, its answer included. A request waits until it fits in beside the running rows. With this
            argument, steps are always eager, because fixed buffers have places for `max_rows` rows of the same length.
        prefill_chunk_size (`int`): Maximum number of prompt tokens between two steps. An image is in one chunk.
        max_kept_bytes (`int`): Maximum size of the keys and values that are kept of the last texts. A request that
            begins with a kept text continues from it. If target or draft has sliding windows or recurrent layers, only
            a whole kept text can be used. If a prompt shares only a part, the batch keeps this part as its own text.

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
        check_sizes(max_rows, max_tokens, prefill_chunk_size, max_kept_bytes)
        self.model = unwrapped_target(model)
        self.draft = draft
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.prefill_chunk_size = prefill_chunk_size
        # Noted when a prompt was last worked on, because the user may change modules and hooks between requests.
        self._target = find_target(self.model)
        self._draft_parts = Inventory.of(draft)
        self._next_id = 0
        self._is_stepping = False
        self._answers = Answers()
        self._kept = KeptPrefixes(max_kept_bytes)
        self._waiting: deque[Row] = deque()
        self._prefilled: tuple[Row, Prefill] | None = None
        self._running: dict[int, Row] = {}  # by the places of the rows in the run
        self._run: Run | None = None  # None while no row runs
        # Number of places in fixed buffers for running and prefilled rows, if steps are to be captured; else 0.
        self._num_places = 0
        self._places: Places | None = None  # kept for the next rows while no row runs

    @property
    def num_running(self) -> int:
        """Number of requests that have their first token, but not their last."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a first token, including the one that is being prefilled."""
        return len(self._waiting) + (self._prefilled is not None)

    @property
    def ids(self) -> list[int]:
        """Requests that have not ended: first the running ones, then the waiting ones in the order of [`add`]."""
        return [row.id for row in self._rows()]

    @property
    def ended(self) -> dict[int, RequestStats]:
        """Statistics of the requests that the last step has ended, by id."""
        return self._answers.ended

    def add(
        self,
        input_ids: Tensor | Sequence[int],
        *,
        max_new_tokens: int,
        seed: int | None = None,
        stop_token_ids: Tensor | Sequence[int] = (),
        on_tokens: Callable[[NewTokens], None] | None = None,
        num_logprobs: int = -1,
        **settings: Any,
    ) -> int:
        """Adds a request; it waits until [`step`] takes it in.

        Args:
            input_ids (`torch.Tensor` of shape `[n]` or `[1, n]`, or sequence of `int`): The prompt. With images, for
                the targets in `row_requests.IMAGE_ROWS`, pass what the processor makes beside them: `pixel_values`,
                `image_grid_thw` and `mm_token_type_ids`.
            max_new_tokens (`int`): Maximum number of tokens of the answer.
            seed (`int`, *optional*): Seed for sampling. The text is the text that `generate` gives after
                `torch.manual_seed(seed)`. By default the seed is drawn from torch's global generator.
            stop_token_ids (`torch.Tensor` or sequence of `int`): Tokens that end the answer, beside the target's own
                end tokens.
            on_tokens (callable, *optional*): Called within [`step`] with each [`NewTokens`] of this request.
            num_logprobs (`int`): With 0 or more, the statistics have log-probabilities from the target's own scores,
                for each new token and for this number of the most likely tokens at its position. -1 asks for none.
            settings: Settings of `generate` for this request, such as `do_sample`, `temperature`, `top_k`, `top_p`,
                `min_p`, `repetition_penalty`, `eos_token_id`, `logits_processor`, `generation_config`.

        Returns:
            `int`: The id of the request.

        Raises:
            ValueError: If the request is refused. Nothing has changed then.
        """
        # Every refusal comes before the request is stored, so that a stored request cannot be refused later.
        row = prepare_row(
            self.model,
            self.draft,
            input_ids,
            max_new_tokens=max_new_tokens,
            max_tokens=self.max_tokens,
            seed=seed,
            stop_token_ids=stop_token_ids,
            on_tokens=on_tokens,
            num_logprobs=num_logprobs,
            settings=settings,
        )
        row.id = self._next_id
        self._next_id += 1
        self._waiting.append(row)
        return row.id

    def stats_of(self, id: int) -> RequestStats:
        """Returns the statistics of a request that has not ended; they change with it. Else raises `ValueError`."""
        found = [row.stats for row in self._rows() if row.id == id]
        what = "the id of a request that has not ended"
        require(bool(found), what, id, "look into ended after the step that ends it")
        return found[0]

    def cancel(self, id: int) -> bool:
        """Ends a request without another token; returns False if none has this id, or if it has ended already."""
        is_there = self._leave_out(id)
        if is_there and not self._is_stepping:
            self._answers.drop(id)
        return is_there

    def _leave_out(self, id: int) -> bool:
        """Removes a request; returns False if no request has this id."""
        for row in self._waiting:
            if row.id == id:
                self._waiting.remove(row)
                return True
        if self._prefilled is not None and self._prefilled[0].id == id:
            self._prefilled = None
            return True
        for place, row in self._running.items():
            if row.id == id:
                assert self._run is not None
                # The row counts as ended, and leaves the batch like a row whose text has ended.
                self._run.rows.reported.done[place] = 1
                with no_gradients(self._target, runs_user_code=False):
                    self._drop_finished()
                return True
        return False

    def step(self) -> list[NewTokens]:
        """Prefills waiting requests, up to one chunk of prompts, and runs one step over all rows.

        Returns:
            `list[NewTokens]`: New tokens, in this order: the first tokens of requests that have been prefilled, then
            the tokens of the step. A request may have both. The list is empty if nothing waits or runs.

        `on_tokens` gets first tokens before the step. A request that is cancelled there takes no part in the step.

        If a logits processor of one request raises, or if there is no memory for a row, this request ends with
        "error". The others continue.

        Raises:
            ValueError: If it is called within a step, by `on_tokens`.
            Exception: Any error of the target, the draft or a callback. An error in a prefill ends this request. An
                error in a step over the rows ends all rows that ran. [`ids`] has the requests that continue. An error
                in `on_tokens` ends no request. If it is raised for a first token, the next call makes the step. Each
                `on_tokens` has been called with the tokens before the error. The next call first returns the tokens
                that were found before the error, even if nothing is left to run.
        """
        what = "one step after the other"
        do = "call step once the last one has returned, not in on_tokens"
        require(not self._is_stepping, what, "a step within a step", do)
        self._is_stepping = True
        try:
            self._answers.begin()
            self._run_step()
        finally:
            self._is_stepping = False
        return self._answers.take()

    def _run_step(self) -> None:
        """Takes in waiting requests, runs one step over all rows, and passes the new tokens to the callbacks."""
        try:
            if self._prefilled is not None or self._fits_next():
                self._look_at_models()
                self._with_forwards(self._take_in)
                # A first token does not wait for the step over all rows.
                self._answers.call_back()
            if self._run is not None:
                self._with_forwards(self._advance)
        finally:
            # Tokens found before an error are passed on too, because rows that continue would otherwise miss them.
            self._answers.call_back()

    def _look_at_models(self) -> None:
        """Updates the models that the batch, its run and a prefill know, because the user may have changed them."""
        self._target = find_target(self.model)
        self._draft_parts = Inventory.of(self.draft)
        if self._run is not None:
            look_at_models(self._run)
        if self._prefilled is not None:
            generator = self._prefilled[1].generator
            generator.request = self._as_now(generator.request)

    def _as_now(self, request: Request) -> Request:
        """Returns the same request with the models that were noted last."""
        return replace(request, target=self._target, draft_parts=self._draft_parts)

    def _with_forwards(self, work: Callable[[], None]) -> None:
        """Calls `work`, in which forwards run. Callbacks of requests are called outside of it."""
        calls_user_code = any(row.calls_user_code for row in self._rows())
        runs_user_code = calls_user_code or not self._target.is_unmodified
        with (
            calling(),
            device_errors_explained(),
            # A compiled part runs its original code, because compiled code calls no hooks.
            eagerly(self._target.parts, self._draft_parts),
            # Gradients are off before fast layers are chosen, because fast layers have no gradients.
            no_gradients(self._target, runs_user_code),
            # User code between two forwards may call the target, and must find it unchanged.
            nullcontext() if calls_user_code else fast_whole_run(self._target),
        ):
            work()

    # ---- requests that wait

    def _take_in(self) -> None:
        """Prefills requests in the order in which they came, with at most one chunk of tokens altogether."""
        num_left = self.prefill_chunk_size
        while num_left > 0:
            if self._prefilled is None:
                if not self._fits_next():
                    return
                self._begin(self._waiting.popleft())
                continue
            row, begun = self._prefilled
            # An error in this prefill ends only this request.
            self._prefilled = None
            filling = begun.filling
            num_seen = filling.seen
            num_tokens = num_left
            if num_seen < row.num_to_share:
                num_tokens = min(num_left, row.num_to_share - num_seen)
            filling.run_chunk(num_tokens, row.images)
            num_left -= filling.seen - num_seen
            if filling.seen == row.num_to_share:
                self._kept.keep_shared(begun, row.images)
            if filling.is_done:
                self._join(row, begun)
            else:
                self._prefilled = (row, begun)

    def _fits_next(self) -> bool:
        """Returns True if a request waits, and if it fits beside the running rows."""
        if not self._waiting or len(self._running) >= self.max_rows:
            return False
        if self.max_tokens is None or not self._running:
            return True
        # In the buffers, every row is as long as the longest row, and they stay so long if that row leaves.
        assert self._run is not None
        lengths = [row.length for row in (*self._running.values(), self._waiting[0])]
        return len(lengths) * max(*lengths, self._run.room) <= self.max_tokens

    def _begin(self, row: Row) -> None:
        """Begins a prefill. If there is no memory, or if the request is refused only now, the request ends."""
        # Errors of the request's processors are stored, as they are beside other rows.
        own = RowProcessors([row.request.processors], [row.seed is not None])
        # The models may have changed while the request waited.
        request = replace(self._as_now(row.request), processors=own)
        self._kept.look_at(request, is_alone=self._run is None)
        row.state = self._kept.state
        if self._run is None:
            self._num_places = choose_num_places(request, self.max_rows, self.max_tokens)
        begin = partial(
            begin_prefill,
            request,
            row.inputs,
            NoUserCache(),
            seed=row.seed,
            num_places=self._num_places,
            max_rows=self.max_rows,
        )
        try:
            begun = self._with_room(begin)
            try:
                # The target need not compute the tokens of an earlier text again.
                row.stats.num_kept_tokens = self._kept.go_on(begun, row.images)
                row.num_to_share = self._kept.num_to_share(begun, row.images)
            except torch.OutOfMemoryError:
                # A part of the kept text may have been copied. So the prefill begins again, without kept texts.
                self._kept.drop_all()
                begun = self._with_room(begin)
        except ValueError as error:
            self._answers.fail(row, error)
            return
        row.end_ids = begun.prompts.eos_ids.tolist()
        self._prefilled = (row, begun)

    def _join(self, row: Row, begun: Prefill) -> None:
        """Turns a prefill that is done into a run, reports its first token, and adds its row to the batch."""
        try:
            run = self._with_room(begun.finish)
            # A verify has one set of further inputs for all rows.
            what = "a target whose steps take no further inputs"
            require(not run.extra, what, list(run.extra), "call generate for this request alone")
        except ValueError as error:
            self._answers.fail(row, error)
            return
        failed = failed_of(run)
        if failed:
            self._answers.break_off(row, failed[0])
            return
        first = int(run.state.anchor[0])
        row.note_logprobs(begun.filling.last_logits, [first])
        # The pixels of images are not needed any more.
        row.inputs = {}
        # The next requests may begin with the same system prompt, before this request ends.
        self._kept.keep(run, 0, run.state.ids[0].tolist(), row.images)
        row.stats.first_token_seconds = time.perf_counter() - row.added
        is_last = bool(run.rows.reported.done[0])
        # A row whose answer has only one token does not join.
        if not is_last:
            try:
                self._add_run(row, run)
            except ValueError as error:
                self._answers.fail(row, error)
                return
        self._answers.add(row, [first], is_last)

    def _add_run(self, row: Row, run: Run) -> None:
        """Adds a run of one row to the batch."""
        try:
            if self._run is None:
                self._choose_buffers(row, run)
            place = self._put(row, run)
        # If there is no room for a row, it is refused before the batch changes.
        except ValueError:
            raise
        except BaseException:
            # The row may have been added to some parts of the batch, but not to others.
            self._end_all()
            raise
        self._running[place] = row

    def _put(self, row: Row, run: Run) -> int:
        """Puts the row of a run beside the running rows; returns its place."""
        if self._run is None and self._places is None:
            begin_batch(run, row.settings)
            self._run = run
            return 0
        if self._places is not None:
            place = self._places.add(run, row.settings)
            self._run = self._places.run
            return place
        assert self._run is not None
        settings = [each.settings for each in (*self._running.values(), row)]
        self._with_room(partial(join, self._run, run, settings, self.max_rows, self.max_tokens))
        return len(self._running)

    def _choose_buffers(self, row: Row, run: Run) -> None:
        """Sets the places of a batch that begins with the row of `run`; no places if its steps are eager."""
        if self._places is not None and self._places.fits(run, self._num_places):
            self._places.begin(run)
            # If there is no memory for such rows at all places, the batch can still be eager.
            with suppress(OutOfRoomError):
                self._places.make_room_for(run, row.settings)
                return
        # The old places are freed first, because the new places may need their memory.
        self._places = None
        if not self._num_places:
            return
        try:
            self._places = Places(run, self._num_places)
        except OutOfRoomError as error:
            logger.warning_once(EAGER.format(reason=one_line(error)))

    def _with_room(self, make: Callable[[], T]) -> T:
        """Returns the result of `make`. If it has no room, frees what no row needs, and tries again."""
        try:
            return make()
        except OutOfRoomError:
            if self._run is None and self._places is not None:
                self._places = None
            elif not self._kept.drop_all():
                raise
        return make()

    # ---- rows that run

    def _advance(self) -> None:
        """Runs one step over all rows, and drops the rows that have ended."""
        self._make_room()
        run = self._run
        if run is None:
            return
        stats = run.stats
        # The statistics are only of the present rows, so that they do not grow with the number of steps.
        stats.verify_widths.clear()
        stats.start_run(len(run.rows.numbers), stats.num_proposed, stats.proposal)
        # The time between steps and the time of prefills do not count for the step.
        run.watch.last = time.perf_counter()
        try:
            captured = self._captured_step()
            if captured is None:
                logits, committed = step(run)
                # For a tree, these tokens are in the order of the accepted path.
                tokens = run.state.tokens.tolist()
            else:
                committed, tokens = run_captured(captured)
                logits = NO_LOGITS.expand(len(tokens), -1, -1)
            self._report_step(run, logits, committed, tokens)
        except BaseException:
            # An interrupted step may have advanced some rows.
            self._end_all()
            raise
        self._drop_finished()

    def _captured_step(self) -> StaticStep | None:
        """Returns the captured step over the running rows; `None` if the step has to be eager."""
        if self._places is None:
            return None
        for row in self._running.values():
            if row.needs_host:
                logger.warning_once(
                    EAGER.format(reason=f"while there is a row with {row.needs_host}")
                )
                return None
        return self._places.captured()

    def _make_room(self) -> None:
        """Grows the caches for the next step if necessary. While there is no memory, ends the longest row."""
        while self._run is not None:
            lengths = self._run.rows.reported.lengths
            try:
                if self._places is None:
                    make_room(self._run)
                else:
                    self._places.make_room()
                return
            # After this error, no row has changed.
            except OutOfRoomError as error:
                # Rows do not need the kept texts, so these are dropped first.
                if self._kept.drop_all():
                    continue
                # The other rows need less memory.
                longest = lengths.index(max(lengths))
                self._answers.break_off(self._running[longest], error)
                self._run.rows.reported.done[longest] = 1
                self._drop_finished()
            except BaseException:
                # Some buffers may have grown, but not others.
                self._end_all()
                raise

    def _report_step(
        self, run: Run, logits: Tensor, committed: list[int], tokens: list[list[int]]
    ) -> None:
        """Reports the new tokens of every row after a step.

        Args:
            run (`Run`): The run.
            logits (`torch.Tensor` of shape `[B, W, V]`): The target's logits; `[B, 0, 0]` if no row asks for them.
            committed (`list[int]`): Number of committed tokens of each row.
            tokens (`list[list[int]]`): The chosen tokens of each row, the committed tokens first.
        """
        failed = failed_of(run)
        if run.state.is_tree and any(row.num_logprobs >= 0 for row in self._running.values()):
            logits = run.state.along_path(logits)
        for place, row in self._running.items():
            if place in failed:
                # The tokens of this row were chosen without its processors.
                self._answers.break_off(row, failed[place])
                run.rows.reported.done[place] = 1
                continue
            row.stats.proposed.append(run.state.width - 1)
            # Proposals after the end of a text count as accepted in the report, but they are not part of the text.
            row.stats.accepted.append(min(run.rows.reported.accepted[place], committed[place]))
            new = tokens[place][: committed[place]]
            row.note_logprobs(logits[place], new)
            is_last = bool(run.rows.reported.done[place])
            # Kept before the row leaves, because another row moves to its place. Not kept if the target has changed.
            if is_last and row.state is self._kept.state:
                self._kept.keep(run, place, run.state.ids[place].tolist(), row.images)
            self._answers.add(row, new, is_last)

    def _drop_finished(self) -> None:
        """Drops the rows that have ended."""
        run = self._run
        assert run is not None
        done = run.rows.reported.done
        ended = [place for place in self._running if done[place]]
        if not ended:
            return
        try:
            self._let_go(run, ended)
        except BaseException:
            # The rows may have left some parts of the batch, but not others.
            self._end_all()
            raise

    def _let_go(self, run: Run, ended: list[int]) -> None:
        """Removes the rows at these places, which have ended."""
        if self._places is not None:
            self._places.free(ended)
        elif run.finished:
            keep_chooser(run)
        else:
            places = leave(run, [row.settings for row in self._running.values()])
            self._running = {new: self._running[old] for new, old in enumerate(places)}
            return
        for place in ended:
            del self._running[place]
        if not self._running:
            self._run = None

    def _end_all(self) -> None:
        """Removes all running rows and their buffers."""
        if self._run is not None:
            keep_chooser(self._run)
        self._run = None
        self._running = {}
        # An interrupted step may have left the buffers half-written.
        self._places = None

    def _rows(self) -> list[Row]:
        """Returns the requests that have not ended; see [`ids`]."""
        found = list(self._running.values())
        if self._prefilled is not None:
            found.append(self._prefilled[0])
        return found + list(self._waiting)
