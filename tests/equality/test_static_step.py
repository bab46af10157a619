"""The step over fixed buffers, uncaptured and replayed from a tape, gives the text of plain `generate`.

A tape stands in for a CUDA graph (`helpers/static.py`): what is tested is everything but CUDA's own capture.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, TextStreamer
from transformers.generation.stopping_criteria import StoppingCriteria

from dflash_hf import DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation.buffers import kept_buffers
from dflash_hf.generation.graphs import Graphs
from helpers.half import half, pairs
from helpers.static import Tape, engine_of, set_engine, tensor_oracle, use_tapes
from helpers.vision import VISION, Grid, shallow_vision_target, vision_prompts
from helpers.whole_blocks import use_whole_blocks
from tiny import DFLASH2, DSPARK, FAMILIES, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 14
LENGTHS = {"one": [9], "three": [4, 11, 7]}
# Seed -> block and width. A case takes one: they take turns over families, rows and engines.
SIZES = [(2, 2), (8, 8), (8, 3), (16, 9)]
CASES = [("one", "static"), ("one", "cuda_graph"), ("three", "static"), ("three", "cuda_graph")]
# Their eager experts count tokens on the host, as capture forbids: it runs with those that do not, in float32.
EXPERTS = ("qwen3-moe", "gpt-oss")


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are tapes, and buckets are short enough for a run to pass through several."""
    use_tapes(monkeypatch, smallest_bucket=16)


@cache
def target_of(family: str) -> PreTrainedModel:
    return shallow_target(family)


@cache
def plain(
    family: str, batch: str, has_float_experts: bool
) -> tuple[PreTrainedModel, dict[str, Tensor], Tensor]:
    """A target, prompts, and what plain `generate` makes of them."""
    target, inputs = target_of(family), prompts(LENGTHS[batch], 0)
    if has_float_experts:
        target = shallow_target(family).float()
        target.set_experts_implementation("batched_mm")
    return target, inputs, target.generate(**inputs, max_new_tokens=NEW, do_sample=False)


@cache
def picture_target_of(family: str) -> PreTrainedModel:
    return shallow_vision_target(family)


def greedy_checked(
    target: PreTrainedModel, draft: DFlashDraftModel, inputs: dict, ref: Tensor, **settings: Any
) -> None:
    """Decodes twice, the second time over kept buffers that are full of the first."""
    engine = engine_of(draft)
    for _ in range(2):
        out = target.generate(**inputs, **settings, assistant_model=draft)
        assert torch.equal(out, ref)
        assert draft.last_stats.engine == engine
    assert len(kept_buffers(draft)) == 1


@pytest.mark.parametrize(
    ("batch", "family", "engine"), half(list(LENGTHS), list(FAMILIES), ["static", "cuda_graph"])
)
def test_every_family_gives_the_plain_text(batch: str, family: str, engine: Any) -> None:
    target, inputs, ref = plain(family, batch, engine == "cuda_graph" and family in EXPERTS)
    seed = (CASES.index((batch, engine)) + list(FAMILIES).index(family)) % len(SIZES)
    block_size, width = SIZES[seed]
    draft = tensor_oracle(target, truth_of(inputs, ref), seed, block_size)
    draft.generation_config.verify_width = width
    set_engine(draft, engine)
    greedy_checked(target, draft, inputs, ref, max_new_tokens=NEW, do_sample=False)
    assert 1.0 < draft.last_stats.acceptance_length < width, "the oracle has to be partly right"
    assert (Tape.num_replays > 0) == (engine == "cuda_graph")


KINDS: dict[str, dict[str, Any]] = {
    "dflash 2": DFLASH2,
    "dspark": {**DSPARK, "sample_from_anchor": True},
    "from the anchor": {"sample_from_anchor": True},
    "window from the anchor": {"window_from_anchor": True},
    "taps the embeddings": {"target_layer_ids": [-1, 1]},
}


@pytest.mark.parametrize(
    ("kind", "engine", "batch"), half(KINDS, ["static", "cuda_graph"], list(LENGTHS))
)
def test_every_kind_of_draft_gives_the_plain_text(
    kind: dict[str, Any], engine: Any, batch: str
) -> None:
    target, seed = target_of("qwen3-sliding"), list(LENGTHS).index(batch)
    inputs = prompts(LENGTHS[batch], seed)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, ref), seed, 5, **kind)
    set_engine(draft, engine)
    greedy_checked(target, draft, inputs, ref, max_new_tokens=NEW, do_sample=False)
    assert draft.last_stats.acceptance_length > 1.0


PICTURES: dict[str, list[list[Grid]]] = {
    "one picture": [[(4, 4)]],
    "mixed batch": [[(4, 4)], [], [(2, 8), (6, 4)]],
}


@pytest.mark.parametrize(
    ("family", "rows", "engine"), pairs(list(VISION), PICTURES, ["static", "cuda_graph"])
)
def test_images_give_the_plain_text(family: str, rows: list[list[Grid]], engine: Any) -> None:
    target = picture_target_of(family)
    if engine == "cuda_graph" and family == "qwen3-vl-moe":
        target = shallow_vision_target(family).float()
        target.set_experts_implementation("batched_mm")
    inputs = vision_prompts(target, family, rows, 0)
    inputs = {
        name: t.to(target.dtype) if t.is_floating_point() else t for name, t in inputs.items()
    }
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8)
    set_engine(draft, engine)
    greedy_checked(target, draft, inputs, ref, max_new_tokens=NEW, do_sample=False)
    assert 1.0 < draft.last_stats.acceptance_length < 8.0


@pytest.mark.parametrize(
    ("num_ids", "engine", "seed"), half([1, 2, 11], ["static", "cuda_graph"], [0, 1])
)
def test_eos_inside_a_block_ends_the_row_there(num_ids: int, engine: Any, seed: int) -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 11, 7], seed)
    free = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    # Tokens that occur in the middle of some rows and, with many of them, ids that do not exist.
    eos = [int(free[0, -NEW + 3 + seed]), int(free[1, -5]), *range(100, 120)][:num_ids]
    settings = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": eos,
        "pad_token_id": 0,
    }
    ref = target.generate(**inputs, **settings)
    draft = tensor_oracle(target, truth_of(inputs, free), seed, 8)
    set_engine(draft, engine)
    greedy_checked(target, draft, inputs, ref, **settings)


@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
def test_length_limits_are_exact_at_every_offset(engine: Any) -> None:
    target = target_of("qwen3-sliding")
    inputs = prompts([5, 8], 1)
    free = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, free), 2, 8)
    set_engine(draft, engine)
    for new in [NEW, *range(1, NEW)]:
        out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
        assert torch.equal(out, free[:, : 8 + new])
    assert len(kept_buffers(draft)) == 1, "shorter runs fit into the buffers of the first"


WARPERS: dict[str, dict[str, Any]] = {
    "none": {},
    "usual": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "others": {"min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "renormalize_logits": True},
}


@pytest.mark.parametrize(
    ("kind", "proposal", "warpers", "engine"),
    pairs(
        {"dflash": {}, "dflash 2": DFLASH2, "dspark": DSPARK},
        ["shared_noise", "argmax", "sample"],
        WARPERS,
        ["static", "cuda_graph"],
    ),
)
def test_a_sampled_text_is_that_of_the_eager_loop(
    kind: Any, proposal: Any, warpers: Any, engine: Any
) -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 11, 7], 4)
    draft = tiny_draft(target, 6, **kind)
    draft.generation_config.proposal = proposal
    use_whole_blocks(draft)  # by default the eager loop follows the run, and captured steps do not
    texts: list[Tensor] = []
    for chosen in ("eager", engine, engine):
        set_engine(draft, chosen)
        torch.manual_seed(5)
        settings = {
            "max_new_tokens": NEW,
            "do_sample": True,
            "eos_token_id": [9],
            "pad_token_id": 0,
            **warpers,
        }
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
        assert draft.last_stats.engine == chosen
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_other_warpers_are_another_graph() -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 11, 7], 4)
    draft = tiny_draft(target, 6)
    set_engine(draft, "cuda_graph")
    for temperature in (0.7, 1.6, 0.7):
        texts: list[Tensor] = []
        for engine in ("eager", "cuda_graph"):
            set_engine(draft, engine)
            torch.manual_seed(5)
            settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": temperature}
            texts.append(target.generate(**inputs, **settings, assistant_model=draft))
        assert torch.equal(texts[0], texts[1])


class Nudge(LogitsProcessor):
    """Prefers a token that follows from the number of calls: wrong unless called once per position."""

    calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores[:, 3 + self.calls % 50] += 1.0
        return scores


class TenTokens(StoppingCriteria):
    """Stops a row after ten tokens of its own."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.columns + 10)


@pytest.mark.parametrize(
    ("what", "batch", "engine"),
    pairs(
        ["prefix", "state", "criterion", "scores", "eta"], list(LENGTHS), ["static", "cuda_graph"]
    ),
)
def test_what_the_host_decides_is_decided_between_two_replays(
    what: str, batch: str, engine: Any
) -> None:
    target = target_of("qwen3")
    inputs = prompts(LENGTHS[batch], 3)

    def settings() -> dict[str, Any]:
        found: dict[str, Any] = {
            "max_new_tokens": NEW,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": [9],
        }
        if what == "prefix":
            found |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
        elif what == "state":
            found["logits_processor"] = [Nudge()]
        elif what == "criterion":
            found["stopping_criteria"] = [TenTokens(inputs["input_ids"].shape[1])]
        elif what == "scores":
            found |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
        return found

    ref = target.generate(**inputs, **settings())
    known = ref.sequences if what == "scores" else ref
    draft = tensor_oracle(target, truth_of(inputs, known), 3, 8)
    set_engine(draft, engine)
    for _ in range(2):
        out = target.generate(**inputs, **settings(), assistant_model=draft)
        assert torch.equal(out.sequences if what == "scores" else out, known)
        assert draft.last_stats.engine == engine
        if what == "scores":
            assert len(out.scores) == len(ref.scores)
            ends = (known[0, inputs["input_ids"].shape[1] :] != 0).sum()
            for column in range(int(ends)):
                torch.testing.assert_close(
                    out.logits[column][0], ref.logits[column][0].float(), rtol=1e-5, atol=1e-5
                )


class Words(TextStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.got.extend(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
def test_a_streamer_gets_the_text_one_step_behind(engine: Any) -> None:
    target = target_of("qwen3")
    inputs = prompts([9], 3)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, ref), 3, 8)
    set_engine(draft, engine)
    streamer = Words()
    target.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft, streamer=streamer
    )
    assert streamer.got == ref[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-sliding"])
def test_a_conversation_over_a_kept_cache_goes_on(family: str, engine: Any) -> None:
    target = target_of(family)
    first = prompts([5, 9], 1)
    settings: dict[str, Any] = {
        "max_new_tokens": 13,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    plain, ours = DynamicCache(config=target.config), DynamicCache(config=target.config)
    ref = target.generate(**first, **settings, **{CACHE_NAME: plain})
    draft = tensor_oracle(target, truth_of(first, ref.sequences), 1, 8)
    set_engine(draft, engine)
    out = target.generate(**first, **settings, **{CACHE_NAME: ours}, assistant_model=draft)
    for turn in range(2):
        assert torch.equal(out.sequences, ref.sequences)
        assert draft.last_stats.engine == engine
        context = ours.dflash_context
        going = [
            context.offset,
            context.positions,
            context.sample,
            *(t for pair in context.buffers for t in pair),
        ]
        staying = {tensor.data_ptr() for kept in kept_buffers(draft) for tensor in kept.owned()}
        assert not [tensor for tensor in going if tensor.data_ptr() in staying], (
            "the next call overwrites those"
        )
        more = torch.randint(3, 60, (2, 4), generator=torch.Generator().manual_seed(turn))
        ids = torch.cat([ref.sequences, more], dim=1)
        mask = torch.cat(
            [first["attention_mask"], torch.ones(2, ids.shape[1] - 9, dtype=torch.long)], dim=1
        )
        following = {"input_ids": ids, "attention_mask": mask}
        ref = target.generate(**following, **settings, **{CACHE_NAME: plain})
        # Another call in between fills the kept buffers with something else.
        target.generate(
            **prompts([12, 3], 7), max_new_tokens=9, do_sample=False, assistant_model=draft
        )
        draft.arm(truth_of(following, ref.sequences), turn)
        # The oracle's new text is not part of what is captured
        kept_buffers(draft)[0].graphs = Graphs()
        out = target.generate(**following, **settings, **{CACHE_NAME: ours}, assistant_model=draft)
        assert draft.last_stats.acceptance_length > 1.0
    for layer, other in zip(plain.layers, ours.layers, strict=True):
        torch.testing.assert_close(layer.keys[1], other.keys[1], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.values[1], other.values[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["static", "cuda_graph", "eager"])
def test_captured_steps_of_many_rows_verify_fewer_tokens_of_each(engine: str) -> None:
    target, inputs = target_of("qwen3"), prompts([*range(3, 13)], 0)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, ref), 3, 16)
    set_engine(draft, engine)
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )
    assert draft.last_stats.engine == engine
    assert draft.last_stats.num_proposed == (15 if engine == "eager" else 9)
    draft.generation_config.verify_width = {4: 16, 9: 5, 20: 3}
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )
    assert set(draft.last_stats.verify_widths) == {3}


@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
def test_no_step_begins_behind_the_one_that_reaches_the_limit(engine: str) -> None:
    target, inputs = target_of("qwen3"), prompts(LENGTHS["three"], 0)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, ref), 3, 8)
    set_engine(draft, engine)
    draft.generation_config.verify_width = 1
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )
    assert draft.last_stats.num_target_forwards == NEW, "each commits one token of every row"
