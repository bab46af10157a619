"""This module answers a chat's messages with the pair, run by run, and races the draft against plain `generate`.

All runs are in one thread, one at a time, because two runs at once would spoil each other's times. A second caller
waits and may stop waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import InferenceThread
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.chat.branches import BROKEN, VerifiedTree
from dflash_hf.chat.conversation import Answer, Conversation, Run, Settings, Turn
from dflash_hf.chat.images import ChatImage
from dflash_hf.data.image_files import ImageError
from dflash_hf.errors import require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.agreement import agreement
from dflash_hf.pair.answers import Processor, encode_prompt, tokenizer_of, without_draft

MAX_CHARACTERS = 200_000
MAX_IMAGES = 16  # of a conversation
# Seconds between two updates of the page. A page must not slow down the run that it times.
TICK = 0.08
RACE_TICK = 0.5
MANY_RUNS = 100  # with so many runs in an answer, updates come half as often

Race = tuple[Answer, Answer]  # of the target alone, and with the draft
logger: Any = logging.get_logger(__name__)


class RunStreamer(BaseStreamer):
    """Notes what `generate` commits, for the thread that reads the answer. Ends the run once `stop` is set."""

    def __init__(
        self, answer: Answer, stop: threading.Event, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.answer = answer
        self.stop = stop
        self.tokenizer = tokenizer
        self.started = 0.0
        self.ended = 0.0
        # The prompt first, then committed tokens. Each entry has its time, and the tree that was verified.
        self._arrived: list[tuple[Any, float, VerifiedTree | None]] = []
        self._tree: VerifiedTree | None = None  # of the tokens that come next

    def put_tree(self, **tree: list[int]) -> None:
        """Notes the tree of the verify whose tokens come next, as a [`TreeReport`] of one row."""
        self._tree = VerifiedTree(**tree)

    def put(self, value: Any) -> None:
        """Notes tokens and their time. Once `stop` is set, raises `CancelledError`, which ends `generate`."""
        if self.stop.is_set():
            raise CancelledError
        self._arrived.append((value, time.perf_counter() - self.started, self._tree))
        self._tree = None

    def end(self) -> None:
        """Does nothing, because the thread that called `generate` knows when it returns."""

    def update(self) -> None:
        """Adds the tokens that have arrived to the answer."""
        answer = self.answer
        if self.started:
            answer.state = "running"
            answer.seconds = (self.ended or time.perf_counter()) - self.started
        for value, seconds, tree in self._arrived[1 + len(answer.runs) :]:
            ids = value.reshape(-1).tolist()
            # The last token of a verify counts as the target's own. The run's statistics correct this at the end.
            is_verify = answer.drafted and bool(answer.runs)
            split = len(ids) - is_verify
            run = Run(
                text="",
                bonus="",
                num_tokens=len(ids),
                num_accepted=is_verify * split,
                seconds=seconds,
            )
            if tree is not None:
                run.tried = tree.read(answer.ids, len(ids), self.tokenizer)
            answer.runs.append(run)
            run.text = self._read(ids[:split])
            run.bonus = self._read(ids[split:])
        if not answer.stats:
            return
        for run, accepted in zip(answer.runs[1:], answer.stats.num_accepted[0], strict=False):
            # The end of the answer has cut the run, so its last token was proposed too.
            if accepted >= run.num_tokens:
                run.text = run.text + run.bonus
                run.bonus = ""
            run.num_accepted = accepted

    def _read(self, ids: list[int]) -> str:
        """Adds ids to the answer. Returns their text up to the last whole character, without special tokens."""
        # All ids are decoded each time, because a token's text may depend on the tokens before it.
        self.answer.ids += ids
        whole = str(self.tokenizer.decode(self.answer.ids, skip_special_tokens=True)).rstrip(BROKEN)
        return whole[len(self.answer.text) :]


def in_turn(
    thread: InferenceThread, streamer: RunStreamer, call: Callable[[], None], tick: float
) -> Generator[Answer]:
    """Calls something in a thread once the thread is free. Yields the answer while it grows, and once at its end.

    If the call raises an exception, the answer's state and error say so. Leaving the iterator tells the call to end.
    The iterator does not wait for this, and also not if a run is stopped while no tokens come, because a prefill may
    take long. Updates become less frequent as the answer grows, because a page draws the whole answer each time, and
    does not react to buttons meanwhile.
    """
    answer = streamer.answer
    stop = streamer.stop

    def work() -> None:
        if stop.is_set():
            raise CancelledError
        call()

    run = thread.submit(work)
    try:
        while not wait([run], tick * (1 + len(answer.runs) / MANY_RUNS)).done:
            streamer.update()
            if stop.is_set() and (streamer.ended or not answer.runs):
                break
            yield answer
    finally:
        if not run.done():
            stop.set()
    streamer.update()
    error: BaseException | None = CancelledError()
    if run.done():
        error = run.exception()
    if error is None:
        answer.state = "done"
    elif isinstance(error, CancelledError):
        answer.state = "stopped"
    else:
        answer.state = "failed"
    if isinstance(error, ValueError):
        answer.error = str(error)
    elif answer.state == "failed":
        logger.error("A run of the chat failed.", exc_info=error)
        answer.error = f"The run failed ({type(error).__name__}); the server's log says more. The chat goes on."
    yield answer


class ChatModel:
    """A target with its draft and its processor or tokenizer. Raises `ValueError` without a chat template."""

    def __init__(
        self, target: PreTrainedModel, draft: DFlashDraftModel, encoder: Processor
    ) -> None:
        self.target: Any = target
        self.draft = draft
        self.encoder = encoder
        self.tokenizer = tokenizer_of(encoder)
        self.takes_images = encoder is not self.tokenizer
        templates = [getattr(encoder, "chat_template", None), self.tokenizer.chat_template]
        action = "choose one that was trained for chats, or use dflash-hf generate"
        require(
            any(templates),
            "a target with a chat template",
            f"{target.name_or_path} without one",
            action,
        )
        config = target.config.get_text_config(decoder=True)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 2**31)
        # The most tokens of a step. If the anchor's slot proposes too, as in DSpark, this is one more than the slots.
        block_size = draft.generation_config.block_size or draft.config.block_size
        self.block_size = draft.config.num_proposals(block_size) + 1
        self.facts = (
            f"{_count(self.target.num_parameters())} parameters · {str(target.dtype).removeprefix('torch.')} · "
            f"{str(target.device).upper()} · the draft has {_count(draft.num_parameters())}"
        )
        self.thread = InferenceThread()

    def check_message(self, conversation: Conversation, text: str, images: Sequence[Any]) -> None:
        """Raises `ValueError` for a message that must be refused. Its images need not have been read for this."""
        if not text.strip() and not images:
            raise ValueError("expected a question, got an empty message; write something")
        number = len(text) + len(conversation.system)
        if number > MAX_CHARACTERS:
            limit = f"{MAX_CHARACTERS:,} characters, system prompt included"
            raise ValueError(f"expected a message of at most {limit}, got {number:,}; shorten it")
        if images and not self.takes_images:
            raise ImageError(
                "expected a text, got an image: this target reads text only; remove the image"
            )
        total = len(images) + sum(len(turn.images) for turn in conversation.turns)
        if total > MAX_IMAGES:
            raise ValueError(
                f"expected at most {MAX_IMAGES} images in a conversation, got {total}; start a new chat"
            )

    def encode(self, conversation: Conversation, max_new_tokens: int) -> dict[str, Tensor]:
        """Returns the conversation as inputs of one row, as the processor or tokenizer makes them.

        Raises `ValueError` if conversation and answer are too long together, and `ImageError` if the processor refuses
        an image.
        """
        try:
            inputs = encode_prompt(
                self.encoder, conversation.messages(self.takes_images), self.target.device
            )
        # Earlier turns have passed, and a text alone is not refused, so the newest images must be the reason.
        except ValueError as error:
            if not conversation.turns[-1].images:
                raise
            raise ImageError(str(error)) from error
        num_tokens = inputs["input_ids"].shape[1]
        room = self.max_length - max_new_tokens
        if num_tokens > room:
            limit = f"{max(room, 0):,} tokens, beside an answer of {max_new_tokens:,}"
            do = "shorten the message, lower the most tokens of an answer, or start a new chat"
            raise ValueError(
                f"expected a conversation of at most {limit}, got {num_tokens:,}; {do}"
            )
        return inputs

    def ask(
        self,
        conversation: Conversation,
        text: str,
        images: list[ChatImage],
        settings: Settings,
        again: bool = False,
    ) -> Generator[Answer]:
        """Adds a turn and answers it. Yields the answer whenever there is more of it, and once at its end.

        With `again`, the turn replaces the newest one. The run ends if the iterator is left or the conversation's
        `stop` is set, for a page also before this call. The turn stays with the part of its answer that exists. Raises
        `ValueError` at the call if the message is refused. The conversation is then as before.
        """
        before = replace(conversation)
        if again:
            before.turns = conversation.turns[:-1]
        self.check_message(before, text, images)
        answer = Answer(drafted=settings.use_draft, block_size=self.block_size)
        turns = [*before.turns, Turn(text=text, images=images, answer=answer)]
        inputs = self.encode(replace(before, turns=turns), settings.max_new_tokens)
        conversation.turns = turns
        conversation.begin()
        return self._run(conversation, answer, inputs, settings)

    def race(
        self, conversation: Conversation, turns: list[Turn], max_new_tokens: int
    ) -> Generator[Race]:
        """Answers the newest turn again, by plain `generate` and then with the draft. Yields both as they grow.

        Both answers are greedy, because Transformers' own sampler uses other random numbers. They use no cache of
        earlier turns. The conversation's `stop` ends the race. This package's own loop without the draft is timed too.
        Raises `ValueError` at the call if there is no question yet.
        """
        if not turns:
            raise ValueError(
                "expected a question to race on, got an empty conversation; ask something first"
            )
        settings = Settings(max_new_tokens=max_new_tokens)
        conversation.begin()
        inputs = self.encode(replace(conversation, turns=turns), max_new_tokens)
        plain, drafted = (
            Answer(drafted=use_draft, block_size=self.block_size) for use_draft in (False, True)
        )

        def run() -> Generator[Race]:
            for answer, other in ((plain, None), (drafted, plain)):
                with closing(self._run(conversation, answer, inputs, settings, other)) as running:
                    yield from ((plain, drafted) for _ in running)
                if answer.state != "done":
                    return

        return run()

    def _run(
        self,
        conversation: Conversation,
        answer: Answer,
        inputs: dict[str, Tensor],
        settings: Settings,
        plain: Answer | None = None,
    ) -> Generator[Answer]:
        """Fills the answer of the newest turn, or one of a race (without a cache). Compares it with `plain`."""
        answer.num_prompt_tokens = inputs["input_ids"].shape[1]
        streamer = RunStreamer(answer, conversation.stop, self.tokenizer)
        is_turn = any(answer is turn.answer for turn in conversation.turns[-1:])

        def call() -> None:
            options = settings.for_generate()
            options["tokenizer"] = self.tokenizer  # for stop strings of the target's config
            cache = None
            if answer.drafted:
                options["assistant_model"] = self.draft
            # The cache is looked up only now, because an earlier run that was left may have advanced it.
            if answer.drafted and is_turn:
                cache = self._cache_for(conversation, inputs)
                options[CACHE_NAME] = cache
                answer.num_cached_tokens = cache.get_seq_length()
            self.draft.last_stats = None
            streamer.started = time.perf_counter()
            try:
                # `.cpu()` waits for an accelerator.
                ids = self.target.generate(**inputs, **options, streamer=streamer).cpu()
            finally:
                streamer.ended = time.perf_counter()
                answer.stats = self.draft.last_stats
            if cache is not None:
                conversation.cache = cache, ids[:, : cache.get_seq_length()]
            if plain is not None:  # this is not part of the call's time
                answer.undrafted_seconds = self._undrafted_seconds(inputs, options, streamer.stop)
                own = ids[0, answer.num_prompt_tokens :].tolist()
                answer.agreement = agreement(
                    self.target,
                    inputs,
                    plain.ids,
                    own,
                    do_sample=False,
                    tokenizer=self.tokenizer,
                )

        tick = RACE_TICK
        if is_turn:
            tick = TICK
        return in_turn(self.thread, streamer, call, tick)

    def _undrafted_seconds(
        self, inputs: dict[str, Tensor], options: dict[str, Any], stop: threading.Event
    ) -> float:
        """Returns the seconds of the same call without a draft. Raises `CancelledError` if it is stopped."""
        ignored = Answer(drafted=True, block_size=1)
        streamer = RunStreamer(ignored, stop, self.tokenizer)
        with without_draft(self.draft):
            started = time.perf_counter()
            self.target.generate(**inputs, **options, streamer=streamer).cpu()
            return time.perf_counter() - started

    def _cache_for(self, conversation: Conversation, inputs: dict[str, Tensor]) -> DynamicCache:
        """Returns the conversation's cache if the new inputs continue it, and an empty cache otherwise.

        In two cases the whole conversation is prefilled again: a template may render earlier turns differently
        (thinking models drop their thoughts), or the positions of a family may not follow from `image_grid_thw`, and
        the family then takes only new images.
        """
        if conversation.cache is not None:
            cache, then = conversation.cache
            now = inputs["input_ids"].cpu()
            goes_on = then.shape[1] < now.shape[1] and torch.equal(then, now[:, : then.shape[1]])
            if goes_on and (
                "image_grid_thw" in inputs
                or not any(turn.images for turn in conversation.read_turns)
            ):
                return cache
            logger.info(
                "The conversation is prefilled anew: its beginning is not what the cache holds."
            )
        return DynamicCache(config=self.target.config)


def _count(number: int) -> str:
    """Returns a number of parameters as people write it: two digits, and M or B."""
    digits = number / 1e6
    letter = "M"
    if number >= 1e9:
        digits = number / 1e9
        letter = "B"
    decimals = 0
    if digits < 10:
        decimals = 1
    return f"{digits:.{decimals}f} {letter}"
