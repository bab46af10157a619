"""Requests for a running batch, a client that adds and cancels at random, and drafts that know a part."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel, RunningBatch
from dflash_hf.generation.run import Run
from helpers.static import TensorOracle
from tiny import VOCAB, OracleDraft, draft_config

END = 9
# The settings of a greedy request that has no others.
PLAIN = {"max_new_tokens", "eos_token_id", "do_sample"}


@dataclass
class Asked:
    """A request, and the answer that it has alone."""

    ids: Tensor
    settings: dict[str, Any]
    seed: int
    truth: list[int] = field(default_factory=list[int])
    images: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # by the processor's names


class BatchOracle(OracleDraft):
    """An oracle of the rows of a running batch, whichever are in it: right for a random part of each block."""

    batch: RunningBatch

    def rows_of(self, batch: int) -> list[int]:
        """Returns the request at each place of the batch; some request where there is none."""
        running = self.batch._running
        return [running[place].id if place in running else 0 for place in range(batch)]


def batch_oracle(target: PreTrainedModel, block_size: int = 8) -> BatchOracle:
    """Returns an oracle, to be armed with the requests' whole texts and told its batch."""
    torch.manual_seed(0)
    draft: Any = BatchOracle(draft_config(target, block_size))
    draft.to(target.dtype).eval()
    draft.arm([], 0)
    return draft


class PlaceOracle(TensorOracle):
    """An oracle of the rows of a running batch that reads nothing on the host: where its steps are captured."""

    places: Tensor  # [places], int64: the request at each one

    def follow(self, batch: RunningBatch) -> None:
        """Has it know which request is at which place of a batch."""
        places = torch.zeros(batch.max_rows, dtype=torch.long, device=self.device)
        self.register_buffer("places", places, persistent=False)
        put: Any = batch._put

        def noted(row: Any, run: Any) -> int:
            place = put(row, run)
            # Requests that come again have other ids.
            self.places[place] = row.id % len(self.known)
            return place

        batch._put = noted

    def known_rows(self, batch: int) -> Tensor:
        """Returns the request at each place of the batch."""
        return self.places[:batch]


def place_oracle(target: PreTrainedModel, block_size: int = 8) -> PlaceOracle:
    """Returns an oracle for captured steps, otherwise as [`batch_oracle`]."""
    torch.manual_seed(0)
    draft: Any = PlaceOracle(draft_config(target, block_size))
    return draft.to(target.dtype).eval()


def asked(
    lengths: list[int],
    seed: int,
    num_new: tuple[int, int] = (1, 40),
    kinds: tuple[dict[str, Any], ...] = ({"do_sample": False},),
) -> list[Asked]:
    """Returns random requests of these lengths; each is of one of the `kinds`."""
    chance = random.Random(seed)
    found: list[Asked] = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        ids = torch.randint(3, VOCAB - 1, (1, length), generator=generator)
        settings = {
            "max_new_tokens": chance.randint(*num_new),
            "eos_token_id": [END, END + 1],
            **chance.choice(kinds),
        }
        found.append(Asked(ids, settings, 50 * seed + number))
    return found


def answer_alone(target: Any, requests: list[Asked], draft: DFlashDraftModel | None = None) -> None:
    """Notes what each request is answered alone: by plain `generate`, or, for sampled texts, with a draft.

    Greedy requests of one length, without further settings, are rows of one call of plain `generate`, which pads none.
    """
    together: dict[tuple[int, tuple[int, ...]], list[Asked]] = {}
    for request in requests:
        is_greedy = request.settings.keys() == PLAIN and not request.settings["do_sample"]
        if is_greedy and not request.images:
            ends = tuple(request.settings["eos_token_id"] or ())
            together.setdefault((request.ids.shape[1], ends), []).append(request)
        else:
            _answer_one(target, request, draft)
    for (_, ends), rows in together.items():
        _answer_rows(target, rows, ends)


def _answer_one(target: Any, request: Asked, draft: DFlashDraftModel | None) -> None:
    torch.manual_seed(request.seed)
    given: dict[str, Any] = {"attention_mask": torch.ones_like(request.ids)}
    if request.settings.get("do_sample"):
        given["assistant_model"] = draft
    text = target.generate(request.ids, **given, **request.images, **request.settings)
    request.truth = text[0, request.ids.shape[1] :].tolist()


def _answer_rows(target: Any, rows: list[Asked], ends: tuple[int, ...]) -> None:
    """Answers prompts of one length, as far as the longest answer goes; each ends at its own end."""
    ids = torch.cat([one.ids for one in rows])
    longest = max(one.settings["max_new_tokens"] for one in rows)
    texts = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=longest,
        eos_token_id=list(ends) or None,
        do_sample=False,
    )
    for one, text in zip(rows, texts[:, ids.shape[1] :].tolist(), strict=True):
        length = next((at + 1 for at, token in enumerate(text) if token in ends), longest)
        one.truth = text[: min(length, one.settings["max_new_tokens"])]


def drive(
    batch: RunningBatch, requests: list[Asked], seed: int, cancelled: float = 0.0
) -> dict[str, int]:
    """Adds the requests at random steps, cancels a share of them at random ones, and checks every text.

    Returns how many were answered to the end and broken off, and how many rows ran together at most.
    """
    chance = random.Random(seed)
    # Tokens of an answer behind which it is broken off; 0 may still wait.
    breaks = dict[int, int]()
    for number, one in enumerate(requests):
        if chance.random() < cancelled:
            breaks[number] = chance.randrange(len(one.truth))
    if isinstance(batch.draft, BatchOracle):
        batch.draft.batch = batch
    if isinstance(batch.draft, PlaceOracle):
        batch.draft.follow(batch)
    if isinstance(batch.draft, BatchOracle | PlaceOracle):
        device = batch.draft.device
        batch.draft.arm([[*one.ids[0].tolist(), *one.truth] for one in requests], seed)
        batch.draft.to(device)
    texts: list[list[int]] = [[] for _ in requests]
    finished = dict[int, str]()
    num_added = 0
    broken = set[int]()
    most = 0
    while num_added < len(requests) or batch.ids:
        while num_added < len(requests) and chance.random() < 0.5:
            one = requests[num_added]
            settings: dict[str, Any] = {**one.images, **one.settings}
            assert batch.add(one.ids, seed=one.seed, **settings) == num_added
            num_added += 1
        for id, new, reason in batch.step():
            assert id not in finished
            assert id not in broken
            texts[id] += new
            if reason is not None:
                finished[id] = reason
        most = max(most, batch.num_running)
        for id in batch.ids:
            if id in breaks and len(texts[id]) >= breaks[id]:
                assert batch.cancel(id)
                assert not batch.cancel(id)
                broken.add(id)
    for number, one in enumerate(requests):
        if number in broken:
            assert texts[number] == one.truth[: len(texts[number])]
            continue
        assert texts[number] == one.truth, f"request {number} of {one.ids.shape[1]} tokens"
        ends = one.truth[-1] in one.settings["eos_token_id"]
        assert finished[number] == ("stop" if ends else "length")
    assert batch.num_running == batch.num_waiting == 0
    return {"answered": len(finished), "broken": len(broken), "most": most}


def make_infinite(run: Run, place: int) -> None:
    """Makes all keys, values and states of the row at a place infinite, as what a row leaves behind may be."""
    for cache in run.buffers.caches():
        for layer in cache.attention.values():
            for buffer in layer.buffers():
                buffer[place] = torch.inf
        for group in cache.groups:
            for buffer in (group.windows, group.states, group.blocks, group.projections):
                if buffer is not None:
                    buffer[:, place] = torch.inf
