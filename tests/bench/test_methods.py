"""Every way of decoding gives plain `generate`'s text, and tells its steps as they were."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from transformers.cache_utils import StaticLayer

from dflash_hf.bench.answers import Turn
from dflash_hf.bench.cells import Cell, Options
from dflash_hf.bench.methods import WAYS, Models, local_method
from dflash_hf.bench.run import check_draft
from dflash_hf.bench.timing import Marks
from dflash_hf.bench.zlab import zlab_way
from dflash_hf.generation.checks import check_static_stock
from dflash_hf.generation_config import DFlashGenerationConfig, over_stored
from dflash_hf.pair.answers import changed, encode_prompt

NEW = 64


def skip_without(name: str) -> None:
    """Skips where what a way of decoding needs is not installed."""
    if name == "zlab":
        pytest.importorskip("dflash", reason="z-lab's package is not installed")
    if name == "stock-static":
        try:
            check_static_stock()
        except ValueError as error:
            pytest.skip(str(error))


def ask(models: Models, name: str, texts: list[str], seed: int = 0, **options: Any) -> list[Turn]:
    """Asks one way of decoding."""
    way = zlab_way(models) if name == "zlab" else WAYS[name]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    given = Options(**{"batch": len(texts), "max_new_tokens": NEW, **options})
    return local_method(way, models)(conversations, given, seed)


@pytest.fixture(scope="module")
def truth(models: Models, held_out: list[str]) -> list[list[int]]:
    """The tokens that plain `generate` answers each question with, asked alone and without the module under test."""
    found: list[list[int]] = []
    model: Any = models.target
    for text in held_out:
        inputs = encode_prompt(models.processor, text, models.target.device)
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        found.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return found


@pytest.mark.parametrize("name", ["plain", "plain-static", "dflash", "undrafted"])
def test_batches_are_plain_texts(
    name: str, models: Models, held_out: list[str], truth: list[list[int]]
) -> None:
    turns = ask(models, name, held_out, verify_width=6 if name == "dflash" else None)
    assert [turn.token_ids for turn in turns] == truth
    tokenizer: Any = models.processor
    ends = {turn.finish_reason for turn in turns}
    assert ends == {"stop", "length"}, "some answers should end, and some be cut"
    for turn, ids, text in zip(turns, truth, held_out, strict=True):
        assert turn.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert turn.new_tokens == len(ids)
        assert (turn.finish_reason == "stop") == (ids[-1] == tokenizer.eos_token_id)
        alone = encode_prompt(models.processor, text, models.target.device)["input_ids"]
        assert turn.prompt_tokens == alone.shape[1]
        assert turn.ttft is not None
        assert 0 < turn.ttft < turn.latency
        assert turn.wall_time == pytest.approx(turn.latency / len(held_out))
        assert (turn.committed is None) == (name != "dflash")


def test_rows_of_a_batch_have_their_own_steps(
    models: Models, held_out: list[str], truth: list[list[int]]
) -> None:
    for turn, ids, text in zip(
        ask(models, "dflash", held_out, verify_width=6), truth, held_out, strict=True
    ):
        (alone,) = ask(models, "dflash", [text], verify_width=6)
        assert (turn.committed, turn.accepted, turn.proposed) == (
            alone.committed,
            alone.accepted,
            alone.proposed,
        )
        assert turn.committed is not None
        assert turn.accepted is not None
        assert turn.proposed == [5] * len(turn.committed)
        assert 1 + sum(turn.committed) == len(ids)
        assert [count + 1 for count in turn.accepted[:-1]] == turn.committed[:-1]


def test_widths_that_follow_the_run_say_what_was_proposed(
    models: Models, held_out: list[str]
) -> None:
    (turn,) = ask(models, "dflash", held_out[:1], verify_width="auto")
    assert models.draft is not None
    stats: Any = models.draft.last_stats
    assert turn.proposed == [width - 1 for width in stats.verify_widths]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("num_tree_nodes", [0, 8])
def test_positions_are_those_that_were_checked(
    num_tree_nodes: int, models: Models, held_out: list[str]
) -> None:
    (turn,) = ask(models, "dflash", held_out[:1], num_tree_nodes=num_tree_nodes)
    assert models.draft is not None
    stats: Any = models.draft.last_stats
    assert turn.accepted is not None
    assert turn.proposed is not None
    assert [turn.checked] == stats.num_checked
    if num_tree_nodes == 0:
        assert turn.checked == turn.proposed
        return
    assert turn.proposed == [7] * len(turn.accepted)
    for accepted, checked in zip(turn.accepted, turn.checked, strict=True):
        assert checked in (accepted, accepted + 1)


@pytest.mark.parametrize("opener", ["<think>\n", "<think>\n\n</think>\n\n", ""])
def test_a_thought_that_the_template_opens_is_noticed(opener: str, models: Models) -> None:
    tokenizer = copy.deepcopy(models.processor)
    template: Any = tokenizer.chat_template
    tokenizer.chat_template = template + opener
    thinking = dataclasses.replace(models, processor=tokenizer)
    # Rows of different lengths: the shorter one is padded.
    turns = ask(thinking, "plain", ["Compute 1 + 2.", "Hello, who are you?"], max_new_tokens=2)
    assert {turn.begins_in_thought for turn in turns} == {opener == "<think>\n"}


@pytest.mark.parametrize("name", ["stock", "stock-static", "zlab", "assistant", "lookup"])
def test_one_row_at_a_time(
    name: str, models: Models, held_out: list[str], truth: list[list[int]]
) -> None:
    skip_without(name)
    # Of the last two one is cut at the limit, and one ends.
    assert [ids[-1] == models.processor.eos_token_id for ids in truth[-2:]] == [False, True]
    for text, ids in zip(held_out[-2:], truth[-2:], strict=True):
        (turn,) = ask(models, name, [text])
        assert turn.token_ids == ids
        assert turn.ttft is not None
        assert 0 < turn.ttft < turn.latency
        assert turn.committed is not None
        assert turn.accepted is not None
        assert turn.proposed is not None
        assert len(turn.committed) == len(turn.accepted) == len(turn.proposed)
        first = len(ids) - sum(turn.committed)
        assert first == 1 if name in ("stock", "stock-static", "zlab") else first >= 1
        for committed, accepted, proposed in zip(
            turn.committed, turn.accepted, turn.proposed, strict=True
        ):
            assert committed - 1 <= accepted <= proposed
        assert [count + 1 for count in turn.accepted[:-1]] == turn.committed[:-1]
        # The target itself: it is right about all that it proposes
        if name == "assistant" and turn.accepted:
            assert turn.accepted == turn.proposed


@pytest.mark.parametrize("name", ["stock", "stock-static", "zlab"])
def test_peers_run_our_draft(name: str, models: Models, held_out: list[str]) -> None:
    skip_without(name)
    for block_size in (None, 6):
        shared: dict[str, Any] = {"block_size": block_size, "max_new_tokens": 40}
        (theirs,) = ask(models, name, held_out[:1], **shared)
        (ours,) = ask(models, "dflash", held_out[:1], verify_width=block_size or 16, **shared)
        assert theirs.committed == ours.committed


def test_static_caches_are_refused_where_transformers_cannot_crop_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StaticLayer, "is_croppable", True, raising=False)
    check_static_stock()
    monkeypatch.setattr(StaticLayer, "is_croppable", False)
    with pytest.raises(
        ValueError, match="expected a Transformers whose own assisted decoding takes static caches"
    ):
        check_static_stock()


def test_points_in_time_are_in_the_stream_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: Any = None) -> None:
            streams.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"of {device}")
    Marks(torch.device("cuda", 1)).mark()
    assert streams == ["of cuda:1"]


def test_options_of_the_draft_are_put_back(models: Models, held_out: list[str]) -> None:
    assert models.draft is not None
    before = models.draft.generation_config.to_dict(), models.draft.config.to_dict()
    for name in ("dflash", "stock"):
        ask(
            models,
            name,
            held_out[:1],
            block_size=4,
            verify_width=3,
            proposal="sample",
            temperature=0.7,
            max_new_tokens=12,
        )
    assert (models.draft.generation_config.to_dict(), models.draft.config.to_dict()) == before
    assert "_get_candidate_generator" not in vars(models.target)


STORED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "width": ({"num_assistant_tokens": 4}, {"verify_width": 3}),
    "follows": ({"num_assistant_tokens": 4}, {"verify_width": "auto"}),
    "tree": ({"num_assistant_tokens": 4}, {"num_tree_nodes": 6}),
    "no tree": ({"num_tree_nodes": 6}, {"verify_width": 3}),
    "no width": ({"verify_width": 3}, {"num_tree_nodes": 6}),
}


@pytest.mark.parametrize("name", STORED)
def test_a_given_width_or_tree_takes_the_place_of_a_stored_one(
    name: str, models: Models, held_out: list[str], truth: list[list[int]]
) -> None:
    stored, given = STORED[name]
    own = models.loaded_draft.generation_config
    cell = Cell(model_id="any", method="dflash", options=Options(**given))
    with changed(own, **stored):
        check_draft(cell, {"auto": models})
        (turn,) = ask(models, "dflash", held_out[:1], **given)
        assert own.num_assistant_tokens == stored.get("num_assistant_tokens")
    assert turn.token_ids == truth[0]


def test_what_does_not_contradict_a_width_or_a_tree_is_kept() -> None:
    kept = DFlashGenerationConfig(num_assistant_tokens=4)
    assert over_stored(kept, {"num_tree_nodes": 0}) == {"num_tree_nodes": 0}
    assert over_stored(kept, {"block_size": 8}) == {"block_size": 8}
    follows = DFlashGenerationConfig(verify_width="auto", num_tree_nodes=0)
    for given in ({"verify_width": 4}, {"num_tree_nodes": 6}):
        # 0 nodes are a chain, which every width fits.
        with changed(follows, **over_stored(follows, given)):
            left = {"verify_width": "auto", "num_tree_nodes": 0, **given}
            assert {name: getattr(follows, name) for name in left} == left


def test_a_stored_width_beyond_a_given_block_is_told_before_anything_is_asked(
    models: Models,
) -> None:
    cell = Cell(model_id="any", method="dflash", options=Options(block_size=4))
    own = models.loaded_draft.generation_config
    refused = pytest.raises(ValueError, match="expected verify_width between 1 and 4")
    with changed(own, verify_width=8), refused:
        check_draft(cell, {"auto": models})


@pytest.mark.parametrize("name", ["plain", "dflash", "stock", "lookup"])
def test_sampling_follows_the_seed_alone(name: str, models: Models, held_out: list[str]) -> None:
    def sampled(seed: int) -> list[int]:
        torch.rand(seed + 1)  # whatever was drawn before
        options = {"verify_width": 4} if name == "dflash" else {}
        return ask(
            models,
            name,
            held_out[:1],
            seed,
            temperature=5.0,
            top_p=0.95,
            max_new_tokens=12,
            **options,
        )[0].token_ids

    first = sampled(0)
    assert sampled(0) == first
    assert any(sampled(seed) != first for seed in (1, 2, 3))


# What a checkpoint may say about sampling, each value so that next to nothing is left to draw from
OF_A_CHECKPOINT = [
    ("min_p", 0.9),
    ("top_k", 1),
    ("top_p", 0.01),
    ("typical_p", 0.01),
    ("epsilon_cutoff", 0.9),
    ("eta_cutoff", 0.9),
    ("top_h", 0.01),
]


def drawn(models: Models, name: str, text: str) -> list[int]:
    """Tokens that are drawn from all that there are."""
    return ask(models, name, [text], 3, temperature=5.0, max_new_tokens=6)[0].token_ids


@pytest.fixture(scope="module")
def own(models: Models, held_out: list[str]) -> dict[str, list[int]]:
    """What is drawn where the checkpoint says nothing about sampling."""
    return {name: drawn(models, name, held_out[0]) for name in ("plain", "dflash")}


@pytest.mark.parametrize(("setting", "value"), OF_A_CHECKPOINT)
def test_a_checkpoints_sampling_settings_do_not_count(
    setting: str,
    value: float,
    models: Models,
    held_out: list[str],
    own: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models.target.generation_config, setting, value, raising=False)
    for name, tokens in own.items():
        assert drawn(models, name, held_out[0]) == tokens


def test_several_rows_of_a_method_for_one_are_refused(models: Models, held_out: list[str]) -> None:
    with pytest.raises(ValueError, match="expected one row, got 2"):
        ask(models, "lookup", held_out[:2])


def test_conversations_that_cannot_be_encoded(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        models.processor, "chat_template", "{{ raise_exception('no role system here') }}"
    )
    with pytest.raises(
        ValueError, match="that the chat template takes, got TemplateError: no role system here"
    ):
        models.encode([[{"role": "system", "content": "x"}]])
    monkeypatch.setattr(models.processor, "chat_template", None)
    tokenizer: Any = models.processor
    inputs = models.encode(
        [[{"role": "user", "content": "four words stand here"}], [{"role": "user", "content": "x"}]]
    )
    for ids, mask, text in zip(
        inputs["input_ids"], inputs["attention_mask"], ("four words stand here", "x"), strict=True
    ):
        assert ids[mask.bool()].tolist() == tokenizer(text).input_ids
        assert mask[-1] == 1
