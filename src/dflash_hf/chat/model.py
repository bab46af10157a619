"""The pair that a chat talks to: prompts, answers run by run, and the race against plain `generate`.

One run at a time: models share a machine's cores or its accelerator, and a time taken beside another run says nothing.
Whoever comes second waits, and can stop waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from dflash_hf.chat.conversation import Answer, Conversation, Run, Settings, State, Turn
from dflash_hf.chat.jobs import Job
from dflash_hf.chat.pictures import PictureError
from dflash_hf.chat.stream import Arrival, RunStreamer, RunText
from dflash_hf.cli.pair import load_pair
from dflash_hf.modeling_dflash import DFlashDraftModel

MAX_CHARACTERS = 200_000
MAX_PICTURES = 16  # of a conversation
TICK = 0.08  # seconds between two looks at a run
RACE_TICK = 0.3

logger: Any = logging.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Lane:
    """One of the two runs of a race.

    Args:
        drafted (`bool`): Whether it is the one with the draft.
        runs (`list[Run]`): Its text as it arrived; filled when the lane is through.
        ids (`list[int]`): Its tokens.
        num_tokens (`int`): Tokens so far.
        seconds (`float`): Time since its call, at the end the call's.
        state (`str`): `"waiting"`, `"running"` or `"done"`.
    """

    drafted: bool
    runs: list[Run] = field(default_factory=list[Run])
    ids: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    seconds: float = 0.0
    state: str = "waiting"


@dataclass(slots=True, kw_only=True)
class Race:
    """Plain `generate` and the same call with the draft, one after the other, greedy, prefill included.

    Args:
        plain, drafted (`Lane`): The two runs, in the order in which they are timed.
        state (`str`): `"waiting"` (for another conversation's run), `"running"`, `"done"`, `"stopped"`, `"failed"`.
        num_prompt_tokens (`int`): Tokens of the conversation before them.
        error (`str`): Why it failed.
    """

    plain: Lane = field(default_factory=lambda: Lane(drafted=False))
    drafted: Lane = field(default_factory=lambda: Lane(drafted=True))
    state: State = "waiting"
    num_prompt_tokens: int = 0
    error: str = ""

    @property
    def identical(self) -> bool:
        """Whether both wrote the same tokens."""
        return self.plain.ids == self.drafted.ids

    @property
    def first_difference(self) -> int:
        """Number, from 1, of the first token that differs; meaningful if they are not identical."""
        pairs = zip(self.plain.ids, self.drafted.ids, strict=False)
        same = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        return 1 + (min(len(self.plain.ids), len(self.drafted.ids)) if same is None else same)

    @property
    def ratio(self) -> float:
        """Plain seconds by drafted seconds."""
        return self.plain.seconds / self.drafted.seconds if self.drafted.seconds else 0.0


class ChatModel:
    """A target with its draft, ready to chat.

    Args:
        target (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        tokenizer (`PreTrainedTokenizerBase`): The target's, with a chat template.
        processor (*optional*): The target's, if it takes pictures.

    Raises:
        ValueError: If there is no chat template.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any = None,
    ) -> None:
        self.target: Any = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.processor = processor
        template = getattr(processor, "chat_template", None) or tokenizer.chat_template
        if template is None:
            raise ValueError(
                f"expected a target with a chat template, got {target.name_or_path} without one; choose one that was "
                "trained for chats, or use dflash-hf generate"
            )
        text_config = target.config.get_text_config(decoder=True)
        self.max_length = int(getattr(text_config, "max_position_embeddings", None) or 2**31)
        self.block_size = draft.generation_config.block_size or draft.config.block_size
        self._free = threading.Lock()

    @classmethod
    def load(cls, target: str, draft: str, dtype: str = "auto", device: str = "auto") -> ChatModel:
        """Loads a pair from folders or Hub ids, with the processor if the target takes pictures.

        Raises:
            ValueError: If something is not there or does not load.
        """
        try:
            model, assistant, encoder = load_pair(target, draft, dtype, device)
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"expected a processor for {target}, got: {reason}; install what it names") from error
        if isinstance(encoder, PreTrainedTokenizerBase):
            return cls(model, assistant, encoder)
        processor: Any = encoder
        return cls(model, assistant, processor.tokenizer, processor)

    @property
    def takes_pictures(self) -> bool:
        """Whether the target sees pictures."""
        return self.processor is not None

    def warm_up(self) -> None:
        """Answers a short prompt both ways: the first calls pay for loading code."""
        for use_draft in (False, True):
            conversation = Conversation()
            answer = self.ask(conversation, "Hello.", [], Settings(use_draft=use_draft, max_new_tokens=4))
            for _ in answer:
                pass

    def check_message(self, conversation: Conversation, text: str, pictures: list[Any]) -> None:
        """Refuses a message that cannot be answered, before anything is done with it.

        Raises:
            ValueError: If it is empty, too long, or has pictures that the target cannot see or too many.
        """
        if not text.strip() and not pictures:
            raise ValueError("expected a question, got an empty message; write something")
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"expected a message of at most {MAX_CHARACTERS:,} characters, got {len(text):,}; shorten it"
            )
        if pictures and not self.takes_pictures:
            raise PictureError("expected a text, got a picture: this target reads text only; remove the picture")
        total = len(pictures) + sum(len(turn.pictures) for turn in conversation.turns)
        if total > MAX_PICTURES:
            raise ValueError(
                f"expected at most {MAX_PICTURES} pictures in a conversation, got {total}; start a new chat"
            )

    def encode(self, conversation: Conversation, max_new_tokens: int) -> dict[str, Tensor]:
        """Turns the conversation into inputs of one row, as the processor or tokenizer makes them.

        Raises:
            PictureError: If the processor refuses a picture of the newest question.
            ValueError: If it is too long for the target with an answer of `max_new_tokens`.
        """
        messages = conversation.messages(in_parts=self.takes_pictures)
        encoder: Any = self.processor if self.takes_pictures else self.tokenizer
        try:
            encoded = encoder.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
        except ValueError as error:  # those before it passed, and a text alone is not refused
            raise PictureError(str(error)) if conversation.turns[-1].pictures else error from error
        inputs = {name: value.to(self.target.device) for name, value in encoded.items() if isinstance(value, Tensor)}
        num_tokens, room = inputs["input_ids"].shape[1], self.max_length - max_new_tokens
        if num_tokens > room:
            raise ValueError(
                f"expected a conversation of at most {max(room, 0):,} tokens (the target reads {self.max_length:,}, "
                f"of which {max_new_tokens:,} are kept for the answer), got {num_tokens:,}; shorten the message, "
                "lower the most tokens of an answer, or start a new chat"
            )
        return inputs

    def ask(self, conversation: Conversation, text: str, pictures: list[Any], settings: Settings) -> Generator[Answer]:
        """Adds a turn and answers it, yielding the answer whenever there is more of it, and once at its end.

        Leaving the iterator ends the run. The turn stays in the conversation with what there is of its answer.

        Args:
            conversation (`Conversation`): Changed in place. Its `stop` ends the run.
            text (`str`): The question.
            pictures (`list[Picture]`): Shown with it.
            settings (`Settings`): How to answer.

        Raises:
            ValueError: At the call, if the message is refused; the conversation is as before.
        """
        self.check_message(conversation, text, pictures)
        answer = Answer(drafted=settings.use_draft, block_size=self.block_size)
        conversation.turns.append(Turn(text=text, pictures=pictures, answer=answer))
        try:
            inputs = self.encode(conversation, settings.max_new_tokens)
        except BaseException:
            conversation.turns.pop()
            raise
        answer.num_prompt_tokens = inputs["input_ids"].shape[1]
        conversation.stop = threading.Event()
        return self._answer(conversation, answer, inputs, settings)

    def _answer(
        self, conversation: Conversation, answer: Answer, inputs: dict[str, Tensor], settings: Settings
    ) -> Generator[Answer]:
        streamer, text = RunStreamer(conversation.stop), RunText(self.tokenizer)

        def call() -> None:
            # Only now: a run that was left may have been advancing the cache until a moment ago.
            cache = self._cache_for(conversation, inputs) if settings.use_draft else None
            answer.num_cached_tokens = 0 if cache is None else int(cache.get_seq_length())
            self.draft.last_stats = None
            try:
                ids, answer.seconds = self._generate(inputs, settings, streamer, cache)
            finally:
                answer.stats = self.draft.last_stats
            if cache is not None:
                conversation.cache, conversation.cached_ids = cache, ids[:, : int(cache.get_seq_length())]

        with Job(self._free, conversation.stop, call) as job:
            for arrivals in job.watch(streamer, TICK):
                if job.state == "running":
                    answer.state = "running"
                    answer.seconds = time.perf_counter() - streamer.started
                answer.runs += [_run(text, arrival, settings.use_draft) for arrival in arrivals]
                yield answer
        answer.state, answer.error = ("failed" if job.state == "waiting" else job.state), job.error
        _settle(answer)
        yield answer

    def race(self, conversation: Conversation, max_new_tokens: int) -> Generator[Race]:
        """Answers the newest question again, by plain `generate` and then with the draft, and compares the tokens.

        Greedy: sampled texts of Transformers' own sampler use other random numbers. Neither run has a cache of
        earlier turns, and nothing else runs meanwhile.

        Raises:
            ValueError: At the call, if there is no question yet.
        """
        if not conversation.turns:
            raise ValueError("expected a question to race on, got an empty conversation; ask something first")
        inputs = self.encode(conversation, max_new_tokens)
        conversation.stop = threading.Event()
        return self._race(conversation, inputs, max_new_tokens)

    def _race(self, conversation: Conversation, inputs: dict[str, Tensor], max_new_tokens: int) -> Generator[Race]:
        race = Race(num_prompt_tokens=inputs["input_ids"].shape[1])
        lanes = [(lane, RunStreamer(conversation.stop)) for lane in (race.plain, race.drafted)]

        def call() -> None:
            for lane, streamer in lanes:
                settings = Settings(use_draft=lane.drafted, max_new_tokens=max_new_tokens)
                streamer.begin()
                lane.state = "running"
                ids, lane.seconds = self._generate(inputs, settings, streamer)
                lane.ids, lane.state = ids[0, inputs["input_ids"].shape[1] :].tolist(), "done"

        with Job(self._free, conversation.stop, call) as job:
            # Seldom, and with nothing but numbers: the page must not slow down what it times.
            while not job.over.wait(RACE_TICK):
                race.state = "waiting" if job.state == "waiting" else "running"
                for lane, streamer in lanes:
                    lane.num_tokens = streamer.num_tokens
                    if lane.state == "running":
                        lane.seconds = time.perf_counter() - streamer.started
                yield race
        for lane, streamer in lanes:
            text = RunText(self.tokenizer)
            lane.num_tokens = streamer.num_tokens
            lane.runs = [_run(text, arrival, lane.drafted) for arrival in streamer.drain(0.0)]
        race.state, race.error = job.state, job.error
        yield race

    def _generate(
        self, inputs: dict[str, Tensor], settings: Settings, streamer: RunStreamer, cache: DynamicCache | None = None
    ) -> tuple[Tensor, float]:
        """Calls `generate`; returns its ids `[1, S + new]` and the seconds it took."""
        extra: dict[str, Any] = {"assistant_model": self.draft} if settings.use_draft else {}
        if cache is not None:
            extra["past_key_values"] = cache
        streamer.begin()
        ids = self.target.generate(**inputs, **settings.for_generate(), **extra, streamer=streamer)
        ids = ids.cpu()  # waits for an accelerator
        return ids, time.perf_counter() - streamer.started

    def _cache_for(self, conversation: Conversation, inputs: dict[str, Tensor]) -> DynamicCache:
        """The conversation's cache, if the new inputs go on from it, else an empty one.

        A template may render earlier turns anew (thinking models drop their thoughts), and families whose positions do
        not follow from `image_grid_thw` take the new pictures only: both prefill the whole conversation.
        """
        then, now = conversation.cached_ids, inputs["input_ids"].cpu()
        if isinstance(conversation.cache, DynamicCache) and then is not None:
            goes_on = then.shape[1] < now.shape[1] and torch.equal(then, now[:, : then.shape[1]])
            if goes_on and ("image_grid_thw" in inputs or not conversation.pictures):
                return conversation.cache
            logger.info("The conversation is prefilled anew: its beginning is not what the cache holds.")
        return DynamicCache(config=self.target.config)


def _run(text: RunText, arrival: Arrival, drafted: bool) -> Run:
    """Makes a run of ids; under a draft its last token is taken for the target's own until the run's end tells."""
    is_verify = drafted and bool(text.ids)
    accepted, bonus = (arrival.ids[:-1], arrival.ids[-1:]) if is_verify else (arrival.ids, [])
    return Run(
        text=text.add(accepted) if accepted else "",
        bonus=text.add(bonus) if bonus else "",
        num_tokens=len(arrival.ids),
        num_accepted=len(accepted) if is_verify else 0,
        seconds=arrival.seconds,
    )


def _settle(answer: Answer) -> None:
    """Takes over what the run counted: a run cut at the end has no bonus token, its last one was proposed."""
    stats = answer.stats
    if stats is None:
        return
    for run, accepted in zip(answer.verifies, stats.num_accepted[0], strict=False):
        if accepted >= run.num_tokens:
            run.text, run.bonus = run.text + run.bonus, ""
        run.num_accepted = accepted


__all__ = ["MAX_CHARACTERS", "MAX_PICTURES", "ChatModel", "Lane", "Race"]
