"""Whatever the widths of the verifies, the text is plain `generate`'s, and so is a kept cache."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel, RunningBatch, iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation import buffers, joining, running_batch, step
from dflash_hf.generation.buffers import kept_buffers
from dflash_hf.generation.choice_costs import candidate_widths
from dflash_hf.generation.host_reads import NoHostReads
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation.widths import _kept_choosers
from helpers.half import pairs
from helpers.static import Tape, TapeStep, set_engine, tensor_oracle, use_tapes
from helpers.vision import shallow_vision_target, vision_prompts
from helpers.widths import RandomWidths, use_random_widths
from tiny import (
    DFLASH2,
    DSPARK,
    FAMILIES,
    oracle_draft,
    prompts,
    shallow_target,
    tiny_draft,
    truth_of,
)

pytestmark = pytest.mark.same_on_every_release

NEW = 18
LENGTHS = {"one": [9], "three": [4, 11, 7]}
ENGINES = ["eager", "static", "cuda_graph"]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@cache
def target_of(family: str) -> PreTrainedModel:
    return shallow_target(family)


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are tapes, in buckets that a run passes through two of."""
    use_tapes(monkeypatch, smallest_bucket=32)


def oracle(
    target: PreTrainedModel,
    inputs: dict[str, Tensor],
    ref: Tensor,
    seed: int,
    engine: Any,
    **kind: Any,
) -> Any:
    """A partly right draft with `"auto"` widths."""
    draft = tensor_oracle(target, truth_of(inputs, ref), seed, **kind)
    set_engine(draft, engine)
    draft.generation_config.verify_width = "auto"
    return draft


def check_widths(draft: DFlashDraftModel, least: int = 2) -> None:
    """The run must have had several widths, and told them."""
    stats = draft.last_stats
    assert len(set(stats.verify_widths)) >= least
    assert len(stats.verify_widths) == max(len(row) for row in stats.num_accepted)
    for row in stats.num_accepted:
        assert all(
            0 <= right < width for right, width in zip(row, stats.verify_widths, strict=False)
        )


# All of them are run by `-m slow`: what is left out meets the same code in another family or batch. Of three families,
# every two of batch, family and engine meet.
OFTEN = ("qwen3-sliding", "gemma3", "gpt-oss")


def is_often(batch: str, family: str, engine: str) -> bool:
    if (batch, engine) == ("three", "static"):
        return True
    places = list(LENGTHS).index(batch), ENGINES.index(engine)
    return family in OFTEN and not (sum(places) + OFTEN.index(family)) % 2


RUNS = [
    pytest.param(
        batch, family, engine, marks=[] if is_often(batch, family, engine) else pytest.mark.slow
    )
    for batch in LENGTHS
    for family in FAMILIES
    for engine in (
        "eager",
        "static",
        *(("cuda_graph",) if family in ("qwen3-sliding", "gemma3") else ()),
    )
]


@pytest.mark.parametrize(("batch", "family", "engine"), RUNS)
def test_every_family_gives_the_plain_text(
    batch: str, family: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(family)
    widths: list[int] = []
    for seed, block_size in enumerate((5, 16)):
        use_random_widths(monkeypatch, seed)
        inputs = prompts(LENGTHS[batch], seed)
        ref = target.generate(**inputs, **GREEDY)
        draft = oracle(target, inputs, ref, seed, engine, block_size=block_size)
        for _ in range(2):  # the second time over kept buffers
            assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
            assert draft.last_stats.engine == engine
        assert draft.last_stats.acceptance_length > 1.0
        check_widths(draft)
        widths += draft.last_stats.verify_widths
    assert len(set(widths)) > 4
    assert (Tape.num_replays > 0) == (engine == "cuda_graph")


KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash 2": DFLASH2,
    "dspark": DSPARK,
    "from the anchor": {"sample_from_anchor": True},
    "window from the anchor": {"window_from_anchor": True},
    "taps the embeddings": {"target_layer_ids": [-1, 1]},
}


@pytest.mark.parametrize(("kind", "engine", "batch"), pairs(KINDS, ENGINES, list(LENGTHS)))
def test_every_kind_of_draft_gives_the_plain_text(
    kind: dict[str, Any], engine: Any, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seed = target_of("qwen3-sliding"), list(LENGTHS).index(batch)
    use_random_widths(monkeypatch, seed + 2)
    inputs = prompts(LENGTHS[batch], seed)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle(target, inputs, ref, seed, engine, block_size=6, **kind)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    check_widths(draft)


@pytest.mark.parametrize(
    ("setting", "kind", "engine", "proposal", "batch"),
    [
        ("warpers", "dflash", "eager", "shared_noise", "one"),
        ("warpers", "dflash", "eager", "argmax", "three"),
        ("warpers", "dflash", "static", "shared_noise", "three"),
        ("warpers", "dflash", "static", "argmax", "one"),
        ("warpers", "dflash", "cuda_graph", "shared_noise", "one"),
        ("warpers", "dflash", "cuda_graph", "argmax", "three"),
        ("prefix", "dflash", "eager", "shared_noise", "three"),
        ("prefix", "dflash", "static", "argmax", "one"),
        ("warpers", "dflash 2", "eager", "argmax", "one"),
        ("warpers", "dflash 2", "static", "shared_noise", "three"),
    ],
)
def test_a_sampled_text_is_the_one_of_a_fixed_width(
    kind: str, setting: str, proposal: Any, engine: Any, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("qwen3")
    extra: dict[str, Any] = (
        {"repetition_penalty": 1.3} if setting == "prefix" else {"temperature": 0.8, "top_p": 0.9}
    )
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 64)
    seed = list(LENGTHS).index(batch)
    inputs = prompts(LENGTHS[batch], seed)
    draft = tiny_draft(target, 6, **KINDS[kind])
    settings = {"max_new_tokens": NEW, "do_sample": True, "top_k": 20, "eos_token_id": [9], **extra}
    draft.generation_config.proposal = proposal
    torch.manual_seed(5)
    ref = target.generate(**inputs, **settings, assistant_model=draft)
    knowing = oracle(target, inputs, ref, seed, engine, block_size=6, **KINDS[kind])
    knowing.generation_config.proposal = proposal
    use_random_widths(monkeypatch, seed + 2)
    torch.manual_seed(5)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=knowing), ref)
    check_widths(knowing)


@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
def test_rejection_is_the_eager_loops_at_the_same_widths(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text depends on the widths."""
    target, inputs = target_of("qwen3"), prompts([4, 11, 7], 4)
    draft = tiny_draft(target, 6)
    draft.generation_config.verify_width, draft.generation_config.proposal = "auto", "sample"
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.5}
    use_random_widths(monkeypatch, 3)
    set_engine(draft, engine)
    torch.manual_seed(5)
    out = target.generate(**inputs, **settings, assistant_model=draft)
    check_widths(draft)
    played = iter(draft.last_stats.verify_widths)
    monkeypatch.setattr(RandomWidths, "next_choice", lambda self: (next(played), False))
    set_engine(draft, "eager")
    torch.manual_seed(5)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), out)


class Silent(BaseStreamer):
    """Takes what it gets: with several rows they advance together then."""

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["criterion", "scores", "streamer"])
def test_what_the_host_decides_and_collects(
    what: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_random_widths(monkeypatch, 2)
    target, inputs = target_of("qwen3"), prompts([4, 11, 7], 3)
    settings: dict[str, Any] = {
        **GREEDY,
        "pad_token_id": 0,
        "eos_token_id": [9],
        "return_dict_in_generate": True,
    }
    if what == "criterion":
        settings["stopping_criteria"] = [lambda ids, scores: torch.full((3,), ids.shape[1] >= 30)]
    elif what == "scores":
        settings |= {"output_logits": True, "eos_token_id": None}
    elif what == "streamer":
        settings["streamer"] = Silent()
    ref = target.generate(**{**inputs, **settings, "streamer": None})
    draft = oracle(target, inputs, ref.sequences, 3, engine)
    out = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(out.sequences, ref.sequences)
    if what == "scores":
        assert len(out.logits) == len(ref.logits)
        torch.testing.assert_close(out.logits[5], ref.logits[5].float(), rtol=1e-5, atol=1e-5)
    check_widths(draft)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_kept_cache_is_plain_generates(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, inputs = target_of("qwen3-sliding"), prompts([5, 9], 1)
    settings: dict[str, Any] = {
        "max_new_tokens": 13,
        "do_sample": False,
        "eos_token_id": [9],
        "pad_token_id": 0,
    }
    plain = DynamicCache(config=target.config)
    ref = target.generate(**inputs, **settings, **{CACHE_NAME: plain})
    for seed in range(4):
        use_random_widths(monkeypatch, seed)
        ours = DynamicCache(config=target.config)
        draft = oracle(target, inputs, ref, 1, engine)
        assert torch.equal(
            target.generate(**inputs, **settings, **{CACHE_NAME: ours}, assistant_model=draft), ref
        )
        for layer, other in zip(plain.layers, ours.layers, strict=True):
            torch.testing.assert_close(layer.keys[1], other.keys[1], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(layer.values[1], other.values[1], rtol=1e-9, atol=1e-9)
        check_widths(draft)


@pytest.mark.parametrize("engine", ENGINES)
def test_images_give_the_plain_text(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_random_widths(monkeypatch, 1)
    target = shallow_vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 4)], [], [(2, 8), (6, 4)]], 0)
    inputs = {
        name: t.to(target.dtype) if t.is_floating_point() else t for name, t in inputs.items()
    }
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle(target, inputs, ref, 0, engine)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    check_widths(draft)


def test_the_drafts_context_is_the_one_of_a_fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the draft's logits decide, a hole or a stale row of its context would change what it proposes."""
    target, inputs = target_of("qwen3"), prompts([4, 11, 7], 4)
    draft = tiny_draft(target, 8)
    seen: dict[str, dict[tuple[int, int], Tensor]] = {}
    forward, found = type(draft).forward_block, dict[tuple[int, int], Tensor]()

    def watched(self: Any, embeds: Tensor, cache: Any, context: Any = None) -> Tensor:
        hidden = forward(self, embeds, cache, context)
        for row, length in enumerate(cache.block.lengths.tolist()):
            found[row, length] = hidden[row]
        return hidden

    monkeypatch.setattr(type(draft), "forward_block", watched)
    for name, engine, width in (
        ("wide", "eager", 8),
        ("eager", "eager", "auto"),
        ("static", "static", "auto"),
    ):
        use_random_widths(monkeypatch, 7)
        set_engine(draft, engine)
        draft.generation_config.verify_width = width
        found.clear()
        target.generate(**inputs, **GREEDY, assistant_model=draft)
        seen[name] = dict(found)
    for name in ("eager", "static"):
        shared = seen[name].keys() & seen["wide"].keys()
        assert len(shared) > 20
        for key in shared:
            torch.testing.assert_close(seen[name][key], seen["wide"][key], rtol=1e-9, atol=1e-9)


# ---- what capture needs


def test_nothing_moves_when_the_width_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 128)
    use_random_widths(monkeypatch, 5)
    target, inputs = target_of("qwen3-sliding"), prompts([4, 11, 7], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle(target, inputs, ref, 0, "static")
    places: set[tuple[Any, ...]] = set()
    launch = StaticStep.launch

    def watched(self: StaticStep, bound: int) -> Any:
        with NoHostReads():
            out = launch(self, bound)
        places.add(tuple((t.data_ptr(), t.shape, t.stride()) for t in self.run.buffers.owned()))
        return out

    monkeypatch.setattr(StaticStep, "launch", watched)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    check_widths(draft, 3)
    assert len(places) == 1


def test_stale_columns_behind_a_narrow_verify_are_never_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stands behind the width in ids, tokens and tapped states may be anything that is a number."""
    use_random_widths(monkeypatch, 5)
    target, inputs = target_of("qwen3-sliding"), prompts([4, 11, 7], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle(target, inputs, ref, 0, "static")
    launch, num_narrow = StaticStep.launch, 0

    def spoiled(self: StaticStep, bound: int) -> Any:
        nonlocal num_narrow
        out, run = launch(self, bound), self.run
        width, states = run.state.width, run.buffers.newest.columns
        num_narrow += width < states.shape[1]
        run.state.whole_block[:, width:] = 5
        run.state.whole_tokens[:, width:] = 9
        states[:, width:] = 1e3
        return out

    monkeypatch.setattr(StaticStep, "launch", spoiled)
    settings = {**GREEDY, "eos_token_id": [9], "pad_token_id": 0}
    ref = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert num_narrow > 3


# ---- the choice itself, in a run


def test_graphs_come_widest_first_and_useless_ones_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, inputs = target_of("qwen3"), prompts([4, 11, 7], 0)
    ref = target.generate(**inputs, **GREEDY)
    for knee, useful in ((100, [16]), (8, [16, 12, 8]), (1, candidate_widths(16))):
        monkeypatch.setattr(
            TapeStep, "measure", lambda self, tape, knee=knee: max(1.0, tape.graph.width / knee)
        )
        draft = oracle(target, inputs, ref, 0, "cuda_graph", block_size=16)
        TapeStep.captured, TapeStep.widths = [], []
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        sizes = list(zip(TapeStep.captured, TapeStep.widths, strict=True))
        bounds = sorted(set(TapeStep.captured), reverse=True)
        expected = [(bounds[0], width) for width in candidate_widths(16)]
        assert len(bounds) > 1
        assert sizes == expected + [(bound, width) for bound in bounds[1:] for width in useful]
        (graphs,) = [kept.graphs for kept in kept_buffers(draft)]
        (captured,) = graphs.captured.values()
        assert set(captured) == {(bound, width) for bound in bounds for width in useful}
        assert set(draft.last_stats.verify_widths) <= set(useful)
        again = target.generate(**inputs, **GREEDY, assistant_model=draft)
        assert torch.equal(again, ref)
        assert len(TapeStep.captured) == len(sizes), "what widths cost is kept with the graphs"


def run_of(
    target: Any, draft: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]
) -> Any:
    """Generates with these costs of widths; returns the statistics."""
    monkeypatch.setattr(TapeStep, "measure", lambda self, tape: costs[tape.graph.width])
    target.generate(**inputs, max_new_tokens=90, do_sample=False, assistant_model=draft)
    return draft.last_stats


def test_a_run_verifies_as_wide_as_its_acceptance_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    target, inputs = target_of("qwen3"), prompts([4, 11, 7], 0)
    ref = target.generate(**inputs, max_new_tokens=90, do_sample=False)
    costs = {16: 11.0, 12: 10.5, 8: 8.0, 6: 6.0, 4: 4.0, 3: 3.5, 2: 3.0, 1: 1.0}
    monkeypatch.setattr("dflash_hf.generation.choice_costs.MIN_SAVING", 0.01)
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 256)  # one graph per width is enough here
    never_right = tiny_draft(target, 16)
    always_right = oracle(target, inputs, ref, 0, "cuda_graph", block_size=16)
    # The oracle's: all slots are right
    monkeypatch.setattr("torch.floor", lambda drawn: torch.full_like(drawn, 99.0))
    never_right.generation_config.engine, never_right.generation_config.verify_width = (
        "cuda_graph",
        "auto",
    )
    widths = run_of(target, never_right, inputs, monkeypatch, costs).verify_widths
    assert widths[0] == 16
    assert widths.count(1) > 0.9 * len(widths), "tried again after 2, 4, 8 ... steps"
    stats = run_of(target, always_right, inputs, monkeypatch, costs)
    assert set(stats.verify_widths[4:]) == {16}


def test_a_block_with_no_choice_has_none() -> None:
    target, inputs = target_of("qwen3"), prompts([4], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle(target, inputs, ref, 0, "eager", block_size=8)
    draft.generation_config.block_size = 1
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert set(draft.last_stats.verify_widths) == {1}
    assert draft.last_stats.num_draft_forwards == 0


def test_the_eager_loop_times_itself() -> None:
    target, inputs = target_of("qwen3"), prompts([4, 11, 7], 0)
    ref = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    draft = oracle(target, inputs, ref, 0, "eager", block_size=16)
    draft.generation_config.verify_width = "auto"
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=draft), ref
    )
    widths = draft.last_stats.verify_widths
    assert widths[0] == 16
    assert set(widths) <= set(candidate_widths(16))


class Interrupts(BaseStreamer):
    """Stops a run at its fifth token, as a user who has read enough."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def put(self, value: Tensor) -> None:
        self.num_tokens += value.numel()
        if self.num_tokens > 10:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def test_a_run_that_is_stopped_leaves_what_its_widths_have_shown() -> None:
    target, inputs = target_of("qwen3"), prompts([6], 0)
    draft = tiny_draft(target, 8)
    draft.generation_config.verify_width = "auto"
    set_engine(draft, "eager")
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **GREEDY, assistant_model=draft, streamer=Interrupts())
    (chooser,) = _kept_choosers[draft][target].values()
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert [*_kept_choosers[draft][target].values()] == [chooser]


def failing_code(kind: str) -> dict[str, Any]:
    """Code of the user's that raises an error at the first token."""

    def fail(*given: Any) -> None:
        raise KeyError("at the first token")

    class Fails(BaseStreamer):
        num_puts = 0

        def put(self, value: Tensor) -> None:
            self.num_puts += 1
            # The first call has the prompt, the next one the first token.
            if self.num_puts > 1:
                fail()

        def end(self) -> None: ...

    if kind == "streamer":
        return {"streamer": Fails()}
    return {kind: [fail]}


def a_pair_with_kept_widths() -> tuple[PreTrainedModel, DFlashDraftModel, dict[str, Tensor], Any]:
    target, inputs = target_of("qwen3"), prompts([6], 0)
    draft = tiny_draft(target, 8)
    set_engine(draft, "eager")
    # The shape of verifies that a call, a batch and `iterate` have in common.
    draft.generation_config.num_tree_nodes = 0
    draft.generation_config.verify_width = "auto"
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    (chooser,) = _kept_choosers[draft][target].values()
    return target, draft, inputs, chooser


@pytest.mark.parametrize("kind", ["streamer", "stopping_criteria", "logits_processor"])
def test_a_run_that_fails_at_its_first_token_leaves_what_earlier_ones_have_kept(kind: str) -> None:
    target, draft, inputs, chooser = a_pair_with_kept_widths()
    with pytest.raises(KeyError, match="at the first token"):
        target.generate(**inputs, **GREEDY, assistant_model=draft, **failing_code(kind))
    assert [*_kept_choosers[draft][target].values()] == [chooser]


@pytest.mark.parametrize(
    ("module", "name"), [(running_batch, "step"), (joining, "use_settings")], ids=["step", "row"]
)
def test_a_batch_that_fails_leaves_what_earlier_runs_have_kept(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, inputs, chooser = a_pair_with_kept_widths()
    batch = RunningBatch(target, draft)
    batch.add(inputs["input_ids"][0], **GREEDY)

    def fail(*given: Any) -> None:
        raise KeyError("on the way")

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(KeyError, match="on the way"):
        batch.step()
    assert [*_kept_choosers[draft][target].values()] == [chooser]


def test_a_run_that_is_looked_at_leaves_what_earlier_ones_have_kept() -> None:
    target, draft, inputs, chooser = a_pair_with_kept_widths()
    for asked in (None, "auto"):
        draft.generation_config.verify_width = asked
        assert list(iterate(target, draft, **inputs, **GREEDY))
        assert [*_kept_choosers[draft][target].values()] == [chooser]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_run_that_is_left_half_way_leaves_what_earlier_ones_have_kept(num_steps: int) -> None:
    target, draft, inputs, chooser = a_pair_with_kept_widths()
    draft.generation_config.verify_width = "auto"
    steps = iterate(target, draft, **inputs, **GREEDY)
    for _ in range(num_steps):
        next(steps)
    steps.close()
    assert [*_kept_choosers[draft][target].values()] == [chooser]


# ---- where it is the default


def follows(target: Any, draft: Any, inputs: dict[str, Tensor], **settings: Any) -> bool:
    """Whether a run has had several widths, with nothing said about them."""
    draft.generation_config.verify_width = None
    target.generate(**inputs, **{**GREEDY, **settings}, assistant_model=draft)
    stats = draft.last_stats
    if stats.engine == "eager":
        assert stats.num_draft_forwards == sum(width > 1 for width in stats.verify_widths)
    return len(set(stats.verify_widths)) > 1


def test_widths_follow_the_run_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_random_widths(monkeypatch, 1)
    target, inputs = target_of("qwen3"), prompts([4, 11, 7], 0)
    draft = tiny_draft(target, 8)
    set_engine(draft, "eager")
    assert follows(target, draft, inputs)
    assert follows(target, draft, inputs, do_sample=True)
    draft.generation_config.proposal = "sample"
    assert follows(target, draft, inputs)
    assert not follows(target, draft, inputs, do_sample=True), (
        "rejection: another width, another text"
    )
    draft.generation_config.proposal = "auto"
    set_engine(draft, "static")
    assert not follows(target, draft, inputs), "steps that are captured"
    set_engine(draft, "eager")
    steps = list(iterate(target, draft, **inputs, **GREEDY))
    assert {step.tokens.shape[1] for step in steps[1:]} == {8}, "to be looked at"


@pytest.mark.usefixtures("users_costs")
def test_nothing_said_chooses_by_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision near ties turn with the width: runs of a call have the same widths, on whatever clocks."""
    inputs = prompts([4, 11, 7], 0)
    half: Any = shallow_target("qwen3").to(torch.bfloat16)
    whole = target_of("qwen3")
    seen: dict[str, set[tuple[int, ...]]] = {"half": set(), "whole": set(), "autocast": set()}
    for seed in range(3):
        # Clocks that lie, each in its own way.
        clock = random.Random(seed)
        monkeypatch.setattr("time.perf_counter", lambda clock=clock: clock.random() * 100)
        rounded = tiny_draft(half, 8)
        set_engine(rounded, "eager")
        half.generate(**inputs, **GREEDY, assistant_model=rounded)
        seen["half"].add(tuple(rounded.last_stats.verify_widths))
        # A second run of one draft begins as the first did: nothing of a run is kept.
        half.generate(**inputs, **GREEDY, assistant_model=rounded)
        seen["half"].add(tuple(rounded.last_stats.verify_widths))
        assert rounded not in _kept_choosers
        draft = tiny_draft(whole, 8)
        set_engine(draft, "eager")
        with torch.autocast("cpu", torch.bfloat16):
            whole.generate(**inputs, **GREEDY, assistant_model=draft)
        seen["autocast"].add(tuple(draft.last_stats.verify_widths))
        for _ in range(2):
            whole.generate(**inputs, **GREEDY, assistant_model=draft)
            seen["whole"].add(tuple(draft.last_stats.verify_widths))
        assert draft not in _kept_choosers
    for widths in seen.values():
        assert len(widths) == 1
        assert len(set(next(iter(widths)))) > 1


def test_one_sentence_says_that_a_draft_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(step.logger, "warning_once", said.append)
    target, inputs = target_of("qwen3"), prompts([4], 0)
    ref = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    for right in (False, True):
        draft: Any = (
            oracle(target, inputs, ref, 0, "cuda_graph", block_size=8)
            if right
            else tiny_draft(target, 8)
        )
        if right:
            monkeypatch.setattr("torch.floor", lambda drawn: torch.full_like(drawn, 99.0))
        draft.generation_config.engine, draft.generation_config.verify_width = "cuda_graph", "auto"
        monkeypatch.setattr(
            TapeStep, "measure", lambda self, tape: 1.0 if tape.graph.width == 1 else 2.0
        )
        target.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=draft)
    (sentence,) = said
    assert sentence.startswith("1.")
    assert "the draft does not pay here" in sentence


def test_single_tokens_wait_for_the_draft_until_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their context is written in one go: not at every step, and not less often than there is room for."""
    played = iter([1] * 21 + [8, 1, 1, 1, 8] + [1] * 30)
    use_random_widths(monkeypatch)
    monkeypatch.setattr(RandomWidths, "next_choice", lambda self: (next(played), False))
    target, inputs = target_of("qwen3"), prompts([9], 1)
    settings = {**GREEDY, "max_new_tokens": 26}
    ref = target.generate(**inputs, **settings)
    draft = tiny_draft(target, 8)
    set_engine(draft, "eager")
    draft.generation_config.verify_width = "auto"
    written: list[int] = []
    write = type(draft).write_context

    def watched(self: Any, context: Any, cache: Any) -> None:
        written.append(int(context.block.lengths[0]))
        write(self, context, cache)

    monkeypatch.setattr(type(draft), "write_context", watched)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert draft.last_stats.verify_widths[:23] == [1] * 21 + [8, 1]
    assert written == [9, 17, 30], "twice eight tokens; what the wide verify has left"


@pytest.mark.parametrize("own", ["propose", "accept"])
def test_iterate_gives_each_steps_own_width(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_random_widths(monkeypatch, 1)
    target: Any = target_of("qwen3")
    inputs = prompts([4, 11], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 8)
    draft.generation_config.verify_width = "auto"
    rules: dict[str, Any] = {"propose": lambda logits, anchor: logits.argmax(-1)}
    if own == "accept":
        rules = {
            "accept": lambda proposed, tokens, logits: (
                (proposed == tokens[:, :-1]).cumprod(1).sum(1)
            )
        }
    steps = list(iterate(target, draft, **inputs, **GREEDY, **rules))
    widths = [step.tokens.shape[1] for step in steps[1:]]
    assert (
        widths
        == [step.proposals.shape[1] + 1 for step in steps[1:]]
        == draft.last_stats.verify_widths
    )
    assert len(set(widths)) > 2
    for row in range(2):
        new = torch.cat([step.committed[row] for step in steps])
        assert torch.equal(new, ref[row, 11 : 11 + len(new)])
