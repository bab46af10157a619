"""One case against plain `generate`: texts, streamers, outputs and caches of every turn, and what is left behind.

Greedy text is compared with plain `generate`'s. Sampled text under `argmax` and `shared_noise` is the same at every
width, so it is compared with a run that verifies one token at a time; under `sample` with a second run.
"""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from hypothesis import reject
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from dflash_hf.block.cache_name import CACHE_NAME
from fuzz.cases import EOS, Case, Turn
from fuzz.pieces import Seen, hooks_that_call, on_engine, settings_of, within
from fuzz.targets import (
    LEARNED,
    NUM_POSITIONS,
    RECURRENT,
    ROUNDED,
    TIE,
    Oracle,
    arm,
    draft_of,
    left_behind,
    target_of,
)
from helpers.turns import check_caches
from helpers.vision import WORDS, vision_prompts
from tiny import VOCAB, prompts

# What docs/generate.md says is refused and a case may run into.
REFUSED = (
    "expected no padding between tokens with a target that has sliding windows",
    "expected left-padded prompts",
    "expected rows of at most",
    "expected num_tree_nodes of at most",
)
# Output, and what the criterion, the streamer and the processor that were given have seen.
Outcome = tuple[Any, Seen]
# What happened besides passing, for the summary.
counts: collections.Counter[str] = collections.Counter()


def check(case: Case) -> None:
    """Runs a case.

    Raises:
        AssertionError: If anything differs from plain `generate`, or something is left behind.
    """
    target = target_of(case.target)
    before = left_behind(target)
    conversation = Conversation(case, target)
    for turn in case.turns:
        if not conversation.take(turn):
            break
    check_left(before, left_behind(target))


def check_left(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Compares what `left_behind` said before and after a call.

    Raises:
        AssertionError: Naming what has changed.
    """
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"left behind: {changed}"


class Conversation:
    """A case on its way: what has been said, and two caches of it, plain `generate`'s and ours.

    Args:
        case (`Case`): The case.
        target (`PreTrainedModel`): Its target.
    """

    def __init__(self, case: Case, target: PreTrainedModel) -> None:
        self.case, self.target = case, target
        self.extra: dict[str, Any] = {}
        if case.pictures:
            rows = [list(row) for row in case.pictures]
            inputs = vision_prompts(target, case.target, rows, case.seed, words=case.lengths)
            self.extra = {
                k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")
            }
        else:
            inputs = prompts(list(case.lengths), case.seed)
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        if case.holes and self.ids.shape[1] > 4:
            self.mask[0, -3] = 0
        self.caches: list[Cache | None] = [self._new_cache(), self._new_cache()]
        self.draws = torch.Generator().manual_seed(case.seed)

    def _new_cache(self) -> Cache | None:
        if self.case.cache == "dynamic" or (
            self.case.cache == "bare" and _needs_config(self.target)
        ):
            return DynamicCache(config=self.target.config)
        if self.case.cache == "bare":
            return DynamicCache()
        if self.case.cache == "static":
            return StaticCache(config=self.target.config, max_cache_len=160)
        return None

    def take(self, turn: Turn) -> bool:
        """Runs a turn both ways and compares; returns whether the conversation can go on."""
        fitted = self.fitted(turn)
        if fitted is None:
            return False
        turn = fitted
        self.type(turn.typed)
        if self._ended_early() and self._grows_with_pictures() and self.case.target in RECURRENT:
            # Padding has gone into that row's states, which the whole conversation leaves out
            return False
        given = self.given(turn)
        if turn.rule == "sample" and turn.draft == "dflash2":
            # What its selector proposes, and so what is drawn, follows from the draft's context, which is in ours.
            self.caches[0] = within(self.case.context, lambda: copy.deepcopy(self.caches[1]))
        theirs, truth = self.reference(turn, given, self.caches[0])
        if turn.rule == "sample":
            theirs = self.drafted(turn, given, self.caches[0], truth)
        ours = self.drafted(turn, given, self.caches[1], truth)
        sequences = sequences_of(ours[0])
        if not torch.equal(sequences, sequences_of(theirs[0])):
            self._check_tie(turn, sequences_of(theirs[0]), sequences, given)
            counts["near tie"] += 1
            return False
        counts["trees"] += turn.nodes is not None
        is_one = sequences.shape[0] == 1
        if turn.streamer:
            assert ours[1].streamer.tokens(is_one) == theirs[1].streamer.tokens(is_one)
            assert ours[1].streamer.num_ends == theirs[1].streamer.num_ends == 1
        if turn.criterion == "rows":
            assert ours[1].rows.shown == theirs[1].rows.shown
        assert ours[1].allowed.shown <= theirs[1].allowed.shown, "a processor saw a rejected token"
        if turn.outputs:
            check_outputs(
                ours[0], theirs[0], given["input_ids"].shape[1], turn, self._grows_with_pictures()
            )
        self._check_caches(turn, ours[0], theirs[0])
        answer = sequences[:, given["input_ids"].shape[1] :]
        # The prefill's token, then what the verifies have committed.
        assert (
            max(1 + sum(row) for row in self.draft(turn).last_stats.num_committed)
            == answer.shape[1]
        )
        self._append(answer, turn)
        return sequences.shape[0] == self.ids.shape[0]

    def type(self, num: int) -> None:
        """Adds tokens of the user's to every row."""
        new = torch.randint(
            3,
            WORDS if self.case.pictures else VOCAB - 1,
            (self.ids.shape[0], num),
            generator=self.draws,
        )
        self._extend(new, torch.ones_like(new))

    def _append(self, answer: Tensor, turn: Turn) -> None:
        """Adds the answers: real up to their first end of sequence."""
        if answer.shape[0] != self.ids.shape[0]:
            return
        ended = torch.isin(answer, torch.tensor(EOS[: turn.eos] or (-1,))).long().cumsum(dim=1)
        real = torch.cat([torch.ones_like(ended[:, :1]), 1 - ended[:, :-1].clamp_max(1)], dim=1)
        self._extend(answer, real)

    def _extend(self, ids: Tensor, mask: Tensor) -> None:
        self.ids = torch.cat([self.ids, ids], dim=1)
        self.mask = torch.cat([self.mask, mask], dim=1)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self.extra:
                kinds = self.extra[name]
                self.extra[name] = torch.cat([kinds, kinds.new_zeros(ids.shape)], dim=1)

    def given(self, turn: Turn) -> dict[str, Any]:
        """The inputs of a call: the whole conversation, or what the cache does not have."""
        cache = self.caches[1]
        past = 0 if cache is None else int(cache.get_seq_length())
        ids = self.ids if turn.whole or not past or self.case.pictures else self.ids[:, past:]
        extra = self.extra
        if past and self.case.pictures and not self._grows_with_pictures():
            extra = {name: value for name, value in extra.items() if name == "token_type_ids"}
        mask = nn.functional.pad(self.mask, (0, self.case.ahead), value=1)
        return {"input_ids": ids, "attention_mask": mask, **extra}

    def _ended_early(self) -> bool:
        """Whether an earlier turn has left padding behind a row's end."""
        return self.caches[1] is not None and bool((self.mask[:, :-1] > self.mask[:, 1:]).any())

    def _grows_with_pictures(self) -> bool:
        """Whether a conversation in a cache is given with all its images again, as Qwen's positions need them.

        Plain `generate` cannot take that: it is given the whole conversation and no cache.
        """
        return (
            self.case.target.startswith("qwen")
            and bool(self.case.pictures)
            and len(self.case.turns) > 1
        )

    def call(
        self,
        turn: Turn,
        given: dict[str, Any],
        cache: Cache | None,
        around: AbstractContextManager[Any] | None = None,
        **more: Any,
    ) -> Outcome:
        """Calls `generate`; returns its output, and what its pieces have seen."""
        settings, seen = settings_of(turn)
        if self.case.cache == "returned":
            settings["return_dict_in_generate"] = True
        if cache is not None:
            settings[CACHE_NAME] = cache
        if turn.rule is not None:
            settings["num_return_sequences"] = self.case.copies
        torch.manual_seed(self.case.seed)
        hooks = hooks_that_call(self.target) if self.case.context == "hooks" else nullcontext()
        with hooks, around or nullcontext():
            return self.target.generate(**given, **settings, **more), seen

    def draft(self, turn: Turn) -> Oracle:
        """The draft of a turn."""
        return draft_of(self.case.target, turn.draft)

    def fitted(self, turn: Turn) -> Turn | None:
        """A turn that the target can take, or `None` if it has no positions left for any."""
        if self.case.target in RECURRENT:
            turn = replace(turn, nodes=None)
        if self.case.target not in LEARNED:
            return turn
        room = NUM_POSITIONS - self.ids.shape[1] - turn.typed
        return replace(turn, new=min(turn.new, room)) if room > 0 else None

    def reference(
        self, turn: Turn, given: dict[str, Any], cache: Cache | None
    ) -> tuple[Outcome, list[list[int]]]:
        """What a call with the draft must give, and the rows' tokens; advances the cache but under `sample`."""
        draft, truth = self.draft(turn), [[0]] * self.ids.shape[0]
        options: Any = draft.generation_config
        arm(draft, truth, self.case.seed, turn.rule)
        try:
            if turn.rule is None:
                cache = None if self._grows_with_pictures() else cache
                found = within(self.case.context, lambda: self.call(turn, given, cache))
            else:
                options.proposal, options.engine = turn.rule, "eager"
                options.block_size, options.verify_width, options.num_tree_nodes = (
                    turn.block,
                    1,
                    None,
                )
                cache = copy.deepcopy(cache) if turn.rule == "sample" else cache
                found = within(
                    self.case.context, lambda: self.call(turn, given, cache, assistant_model=draft)
                )
        except Exception as error:
            # What plain `generate` does not take is no case.
            if turn.rule is not None and not _is_refusal(error):
                self._expect_failure(
                    lambda: self.call(turn, given, copy.deepcopy(self.caches[0])), error
                )
            counts[f"not a case: {type(error).__name__}"] += 1
            reject()
        return found, self._truth(sequences_of(found[0]), given)

    def drafted(
        self,
        turn: Turn,
        given: dict[str, Any],
        cache: Cache | None,
        truth: list[list[int]],
        around: AbstractContextManager[Any] | None = None,
    ) -> Outcome:
        """Calls `generate` with the draft, which knows the rows' tokens; advances the cache."""
        draft = self.draft(turn)
        options: Any = draft.generation_config
        arm(draft, truth, self.case.seed, turn.rule, turn.nodes)
        with on_engine(turn, self.case.context, draft):
            options.block_size, options.verify_width = turn.block, turn.width
            options.num_tree_nodes, options.proposal = turn.nodes, turn.rule or "auto"
            options.draft_window = turn.window
            try:
                return within(
                    self.case.context,
                    lambda: self.call(turn, given, cache, around, assistant_model=draft),
                )
            except ValueError as error:
                if not _is_refusal(error):
                    raise
                counts["refused"] += 1
                reject()

    def _expect_failure(self, plain: Callable[[], Any], error: Exception) -> None:
        """Raises what a run with a draft has raised, if plain `generate` takes the same call."""
        try:
            within(self.case.context, plain)
        except Exception:
            return
        raise error

    def _truth(self, sequences: Tensor, given: dict[str, Any]) -> list[list[int]]:
        """Each row's real tokens, answer included; the answer's padding does no harm."""
        answer = sequences[:, given["input_ids"].shape[1] :]
        copies = sequences.shape[0] // self.ids.shape[0]
        ids, mask = (tensor.repeat_interleave(copies, dim=0) for tensor in (self.ids, self.mask))
        return [
            row[keep.bool()].tolist() + new.tolist()
            for row, keep, new in zip(ids, mask, answer, strict=True)
        ]

    def _check_caches(self, turn: Turn, ours: Any, theirs: Any) -> None:
        """Compares the caches that were passed in or are returned, which the next turn goes on from."""
        if self.case.cache == "returned":
            self.caches = [theirs[CACHE_NAME], ours[CACHE_NAME]]
        if self.caches[1] is None:
            return
        if self._grows_with_pictures():
            self.caches[0] = copy.deepcopy(self.caches[1])
            return
        assert self.caches[0] is not None
        self.compare(self.caches[1], self.caches[0], sequences_of(ours).shape[0])

    def compare(self, ours: Cache, theirs: Cache, rows: int) -> None:
        """Compares two caches of the conversation, with so many rows; what stands for padding nobody looks at."""
        if self.case.target in ROUNDED:
            return
        new = int(theirs.get_seq_length()) - self.mask.shape[1]
        columns = nn.functional.pad(self.mask, (0, new), value=1)
        check_caches(ours, theirs, columns.repeat_interleave(rows // self.mask.shape[0], dim=0))

    def _check_tie(self, turn: Turn, theirs: Tensor, ours: Tensor, given: dict[str, Any]) -> None:
        """Lets a text differ where plain `generate`'s two scores are equal within what the target's dtype rounds."""
        assert theirs.shape[0] == ours.shape[0], "another number of rows"
        message = f"expected {theirs.tolist()}, got {ours.tolist()}"
        assert self.case.target in ROUNDED, message
        width = min(theirs.shape[1], ours.shape[1])
        differs = (theirs[:, :width] != ours[:, :width]).any(dim=0).nonzero()
        assert len(differs), message
        settings, _ = settings_of(replace(turn, outputs=("output_scores",), streamer=False))
        assert turn.rule is None, message
        out: Any = self.target.generate(**{**given, "input_ids": self.ids}, **settings)
        column = int(differs[0])
        scores = out.scores[column - given["input_ids"].shape[1]]
        for row in range(theirs.shape[0]):
            gap = scores[row, theirs[row, column]] - scores[row, ours[row, column]]
            assert abs(float(gap)) < TIE, f"{message} (a gap of {float(gap):.2g})"


def check_outputs(ours: Any, theirs: Any, columns: int, turn: Turn, is_whole: bool = False) -> None:
    """Scores, logits and hidden states: as plain `generate`'s as long as a row runs, zeros after it.

    Where plain `generate` was given the `whole` conversation, its first hidden states are also of what a cache had.
    """
    padding = (theirs.sequences[:, columns:] == 0).long()
    # From where on there is nothing but padding: a row may end earlier, by a padding token that it has chosen itself.
    ends = padding.shape[1] - padding.flip(1).cumprod(dim=1).sum(dim=1)
    for name in turn.outputs:
        mine, plain = (getattr(out, name.removeprefix("output_")) for out in (ours, theirs))
        assert len(mine) == len(plain)
        for token, (a, b) in enumerate(zip(mine, plain, strict=True)):
            for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
                if is_whole and token == 0 and x.dim() == 3:
                    y = y[:, -x.shape[1] :]
                assert x.shape == y.shape
                assert x.dtype == y.dtype
                for row in range(x.shape[0]):
                    if token >= int(ends[row]) and not bool(x[row].any()):
                        continue
                    torch.testing.assert_close(x[row], y[row], rtol=1e-4, atol=1e-5)


def sequences_of(out: Any) -> Tensor:
    """The tokens of what `generate` has returned."""
    return out if isinstance(out, Tensor) else out.sequences


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, ValueError) and any(re.match(text, str(error)) for text in REFUSED)


def _needs_config(target: PreTrainedModel) -> bool:
    """Returns True if a cache must be told which layers keep a state or slide."""
    return any(
        type(layer) is not DynamicLayer for layer in DynamicCache(config=target.config).layers
    )
