"""Targets with recurrent layers: the text, the states after every step, and the caches are plain `generate`'s.

The oracle is right for a random part of each block: a draft that is never or always right hides mistakes here.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dflash_hf import iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.recurrent import RecurrentGroup
from dflash_hf.generation import step as step_module
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.collators import Batch
from dflash_hf.training.forward import target_features
from helpers.hybrid import fresh_states, relative_error, use_float64_rules, watch_states
from helpers.static import Tape, set_engine, tensor_oracle, use_tapes
from tiny import HYBRIDS, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

NEW = 14
LENGTHS = {"one": [9], "three": [4, 11, 7]}
BLOCKS = [2, 8, 16]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@cache
def target_of(family: str) -> PreTrainedModel:
    return tiny_target(family)


@cache
def plain(family: str, batch: str, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Prompts, and what plain `generate` makes of them."""
    inputs = prompts(LENGTHS[batch], seed)
    return inputs, target_of(family).generate(**inputs, **GREEDY)


def check_greedy(family: str, batch: str, block_size: int, seed: int) -> float:
    """Compares the text, returns the acceptance length."""
    inputs, ref = plain(family, batch, seed)
    draft = oracle_draft(target_of(family), truth_of(inputs, ref), seed, block_size)
    assert torch.equal(
        target_of(family).generate(**inputs, **GREEDY, assistant_model=draft), ref
    ), (block_size, seed)
    return draft.last_stats.acceptance_length


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_equals_plain_generate(family: str, batch: str) -> None:
    # Every block size meets every family, and every number of rows.
    first = list(HYBRIDS).index(family)
    sizes = [BLOCKS[first % 3]] if batch == "one" else [BLOCKS[(first + by) % 3] for by in (1, 2)]
    for block_size in sizes:
        assert 1.0 < check_greedy(family, batch, block_size, 0) < block_size, (
            "the oracle has to be partly right"
        )
    assert len(set(plain(family, batch, 0)[1][:, -NEW:].flatten().tolist())) > 8, (
        "repetitions would hide errors"
    )


@pytest.mark.slow
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_equals_plain_generate_fifty_times(family: str, batch: str, block_size: int) -> None:
    lengths = [check_greedy(family, batch, block_size, seed) for seed in range(50)]
    assert 1.0 < sum(lengths) / len(lengths) < block_size


def test_an_oracle_shows_states_that_keep_what_was_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the tests here would miss if the oracle were not partly right: it is what they are for."""
    replay = RecurrentGroup.replay

    def all_kept(self: RecurrentGroup, lengths: Tensor) -> None:
        self.lengths.copy_(torch.where(lengths > self.lengths, lengths - self.plan.width, lengths))
        replay(self, lengths)

    monkeypatch.setattr(RecurrentGroup, "replay", all_kept)
    inputs, ref = plain("qwen3.5", "three", 0)
    draft = oracle_draft(target_of("qwen3.5"), truth_of(inputs, ref), 0, 8)
    assert not torch.equal(
        target_of("qwen3.5").generate(**inputs, **GREEDY, assistant_model=draft), ref
    )


# ---- states


@pytest.mark.parametrize("precise", [False, True], ids=["as Transformers computes", "float64"])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "lfm2", "bamba"])
def test_states_after_every_step_are_those_of_a_fresh_forward(
    family: str, precise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights of 0.25 make 1.7e-5 of the float32 rule's roundings in plain decoding too, from layer to layer.
    target = tiny_target(family, initializer_range=0.25 if precise else 0.1)
    if precise:
        use_float64_rules(monkeypatch, target)
    inputs = prompts([4, 11, 7], 1)
    ref = target.generate(**inputs, **GREEDY)
    seen = watch_states(monkeypatch)
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 8)
    texts = truth_of(inputs, ref)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    errors, fresh = [], {}
    for lengths, layers in seen:
        for row, length in enumerate(lengths):
            if (row, length) not in fresh:
                fresh[row, length] = fresh_states(target, texts[row][:length])
            for index, (window, state) in layers.items():
                wanted = fresh[row, length][index]
                errors.append(relative_error(window[row], wanted[0]))
                if state is not None:
                    assert wanted[1] is not None
                    errors.append(relative_error(state[row], wanted[1]))
    assert len(fresh) > 10
    assert max(errors) < (1e-9 if precise else 5e-6), max(errors)


def test_memory_is_one_state_and_one_block_per_layer_and_row() -> None:
    target, rows, width = target_of("qwen3.5"), 3, 8
    inputs, _ = plain("qwen3.5", "three", 0)
    draft = tiny_draft(target, width)
    whole = target.generate(**inputs, **GREEDY, assistant_model=draft)
    slots = inputs["input_ids"].shape[1] + NEW + width
    assert whole.shape[1] == slots - width
    keys = 2 * 2 * 16 * 8 * slots  # keys and values, heads, head size, float64
    drafted = sum(2 * 2 * 8 * 8 * n for n in (11 + width, slots))
    channels, heads = 2 * 2 * 8 + 4 * 6, 4
    state = heads * 8 * 6 * 4  # float32
    noted = (channels * (4 + width) + 2 * heads * width) * 8
    counted = 8 * (rows + width + 4)  # lengths, and two aranges
    recurrent = 3 * rows * (state + noted) + counted
    assert draft.last_stats.cache_bytes == rows * (keys + drafted) + recurrent


def test_the_prefills_states_are_given_back() -> None:
    target = find_target(target_of("qwen3.5"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        filled = target.model(ids, use_cache=True)[CACHE_NAME]
    RaggedCache.take_prefill(filled, torch.arange(3)[None], 12, 4, recurrences=target.recurrences)
    for index in target.recurrences:
        layer = filled.layers[index]
        assert layer.conv_states == layer.recurrent_states == {0: None}
        assert not filled.has_previous_state(index)


@pytest.mark.same_on_every_release
def test_a_replay_is_a_small_part_of_a_verify(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Thread time on a CPU, which other programs do not lengthen."""
    layer_types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    target = tiny_target("qwen3.5", layer_types=layer_types, num_hidden_layers=8).float()
    spent = {"replay": 0.0, "verify": 0.0}

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = function(*args, **kwargs)
            spent[name] += time.thread_time() - started
            return result

        return run

    inputs = prompts([9], 0)
    draft = tiny_draft(target, 16)
    settings = {**GREEDY, "max_new_tokens": 4}
    target.generate(**inputs, **settings, assistant_model=draft)
    monkeypatch.setattr(RecurrentGroup, "replay", timed("replay", RecurrentGroup.replay))
    monkeypatch.setattr(step_module, "verify", timed("verify", step_module.verify))
    for _ in range(10):
        target.generate(**inputs, **settings, assistant_model=draft)
    share = spent["replay"] / spent["verify"]
    with capsys.disabled():
        print(
            f"\nreplay: {share:.1%} of a verify's thread time, 6 linear and 2 full layers, block 16"
        )
    assert share < 0.4


# ---- ways of decoding


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "lfm2", "bamba"])
def test_the_static_step_gives_the_plain_text(
    family: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=16)
    target = target_of(family)
    inputs, ref = plain(family, "three", 0)
    if family == "qwen3-next" and engine == "cuda_graph":  # eager experts count tokens on the host
        target = tiny_target(family).float()
        target.set_experts_implementation("batched_mm")
        ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8)
    set_engine(draft, engine)
    draft.generation_config.verify_width = 5
    for _ in range(2):  # the second time over buffers that are full of the first
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == engine
        assert 1.0 < draft.last_stats.acceptance_length < 5.0
    assert (Tape.num_replays > 0) == (engine == "cuda_graph")


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
def test_single_tokens_leave_the_states_alone(family: str, engine: Any) -> None:
    """Where a verify has one token, modules take their own path for single tokens, which writes in place."""
    inputs, ref = plain(family, "three", 0)
    draft = tiny_draft(target_of(family), 8)
    draft.generation_config.verify_width = 1
    set_engine(draft, engine)
    assert torch.equal(target_of(family).generate(**inputs, **GREEDY, assistant_model=draft), ref)


@pytest.mark.parametrize("proposal", ["shared_noise", "argmax", "sample"])
def test_sampling_gives_one_text_whatever_the_engine(proposal: Any) -> None:
    target = target_of("qwen3.5")
    inputs, _ = plain("qwen3.5", "three", 0)
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 20}
    texts: list[Tensor] = []
    cases = [(6, "eager"), (6, "static")]
    if proposal != "sample":
        cases.append((3, "eager"))
    for block_size, engine in cases:
        draft = tiny_draft(target, block_size)
        draft.generation_config.proposal = proposal
        set_engine(draft, engine)
        torch.manual_seed(5)
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
    assert torch.equal(texts[0], texts[1])
    if proposal != "sample":
        assert torch.equal(texts[0], texts[2]), "noise belongs to positions, not to blocks"


class Nudge(LogitsProcessor):
    """Prefers a token that follows from the number of calls: wrong unless called once per position."""

    calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores[:, 3 + self.calls % 50] += 1.0
        return scores


@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
def test_rows_in_step_keep_what_the_slowest_keeps(family: str) -> None:
    target, (inputs, _) = target_of(family), plain(family, "three", 0)
    ref = target.generate(**inputs, **GREEDY, logits_processor=LogitsProcessorList([Nudge()]))
    for engine in ("eager", "static"):
        draft = tensor_oracle(target, truth_of(inputs, ref), 1, 8)
        set_engine(draft, engine)
        processors = LogitsProcessorList([Nudge()])
        out = target.generate(
            **inputs, **GREEDY, logits_processor=processors, assistant_model=draft
        )
        assert torch.equal(out, ref)
        assert draft.last_stats.acceptance_length > 1.0


def test_processors_of_prefixes() -> None:
    target, (inputs, _) = target_of("qwen3.5"), plain("qwen3.5", "three", 0)
    settings = {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 8)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1.2


def test_iterate_commits_what_generate_does() -> None:
    target = target_of("qwen3.5")
    inputs, ref = plain("qwen3.5", "three", 0)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 6)
    rows: list[list[int]] = [[], [], []]
    for step in iterate(target, draft, **inputs, **GREEDY):
        # A pause may use the target for something else: nothing of it is noted.
        target.generate(torch.tensor([[9, 8, 7]]), max_new_tokens=2, do_sample=False)
        for row, committed in zip(rows, step.committed, strict=True):
            row += committed.tolist()
    assert rows == ref[:, inputs["input_ids"].shape[1] :].tolist()


def test_prefill_in_chunks_gives_plain_generates_text() -> None:
    target = target_of("qwen3.5")
    inputs = prompts([15, 23], 2)
    settings = {**GREEDY, "prefill_chunk_size": 7}
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 2, 8)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)


@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
def test_training_taps_a_recurrent_target(family: str) -> None:
    target, (inputs, _) = target_of(family), plain(family, "three", 0)
    real = inputs["attention_mask"].bool()
    features = target_features(
        find_target(target),
        [0, 2],
        Batch(input_ids=inputs["input_ids"], attention_mask=real, loss_mask=real),
        num_likely=1,
    )
    with torch.no_grad():
        states = target(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(features.taps, torch.cat([states[1], states[3]], dim=-1))
    assert features.next_ids is not None
