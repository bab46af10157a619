"""Sampling with a draft: one text at every block size, and the target's distribution under every proposal rule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from dflash_hf.draft_model.dflash2 import follow_path
from dflash_hf.generation import candidate_generator
from dflash_hf.generation.sampling import NoiseKey, gumbel_noise
from dflash_hf.ops import exponential_noise
from helpers.half import half
from helpers.whole_blocks import use_whole_blocks
from tiny import (
    DFLASH2,
    DSPARK,
    oracle_draft,
    prompts,
    shallow_target,
    tiny_draft,
    tiny_target,
    truth_of,
)

pytestmark = pytest.mark.same_on_every_release

# Of a distribution of three tokens: `test_a_wrong_distribution_fails_that_test` says that they are enough.
NUM_SAMPLES = 12_000

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warpers": {"temperature": 0.7, "top_k": 10, "top_p": 0.9},
    "hot": {"temperature": 1.7, "top_k": 0, "min_p": 0.05},
    "prefix": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
    },
}


# The kinds of drafts that choose their tokens differently.
KINDS: dict[str, dict[str, Any]] = {"dflash": {}, "dflash 2": DFLASH2, "dspark": DSPARK}
# Block sizes and widths that a text is compared at, beside one token at a time.
SIZES = {
    "dflash": [(4, 4), (16, 5)],
    "dflash 2": [(16, 16), (16, 5)],
    "dspark": [(16, 16), (16, 5)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_text_at_every_block_size_and_width(setting: str, kind: str) -> None:
    """A case takes two of the four of rule and size: every two of setting, kind, rule and size meet in one."""
    rules = ["shared_noise", "argmax"]
    if (list(SETTINGS).index(setting) + list(KINDS).index(kind)) % 2:
        rules.reverse()
    target = shallow_target("qwen3")
    inputs = prompts([4, 9, 6], 3)
    texts = []
    draft = tiny_draft(target, 16, **KINDS[kind])
    for rule, (block_size, width) in [("argmax", (1, 1)), *zip(rules, SIZES[kind], strict=True)]:
        draft.generation_config.block_size = block_size
        draft.generation_config.verify_width = width
        draft.generation_config.proposal = rule
        torch.manual_seed(11)
        texts.append(
            target.generate(
                **inputs,
                max_new_tokens=10,
                do_sample=True,
                assistant_model=draft,
                eos_token_id=9,
                **SETTINGS[setting],
            )
        )
    assert all(torch.equal(texts[0], text) for text in texts)
    torch.manual_seed(12)
    other = target.generate(
        **inputs, max_new_tokens=10, do_sample=True, assistant_model=draft, **SETTINGS[setting]
    )
    assert not torch.equal(texts[0], other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_with_a_draft_that_is_partly_right(kind: str) -> None:
    target = shallow_target("gemma3")
    inputs = prompts([4, 9, 6], 3)
    draft = tiny_draft(target, 16)
    draft.generation_config.block_size = 1
    torch.manual_seed(4)
    ref = target.generate(
        **inputs, max_new_tokens=20, do_sample=True, top_k=5, assistant_model=draft
    )
    for seed, block_size in enumerate((2, 7, 16)):
        oracle = oracle_draft(target, truth_of(inputs, ref), seed, block_size, **KINDS[kind])
        torch.manual_seed(4)
        out = target.generate(
            **inputs, max_new_tokens=20, do_sample=True, top_k=5, assistant_model=oracle
        )
        assert torch.equal(out, ref)
        # Rejected noise would be visible here: the oracle knows the samples, so only its wrong slots are refused.
        assert oracle.last_stats.acceptance_length > 1.2


def test_greedy_leaves_the_random_state_alone() -> None:
    target = shallow_target("qwen2")
    state = torch.random.get_rng_state()
    target.generate(
        **prompts([5], 0), max_new_tokens=9, do_sample=False, assistant_model=tiny_draft(target)
    )
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    draft = tiny_draft(target)
    torch.random.set_rng_state(before)
    target.generate(**prompts([5], 0), max_new_tokens=9, do_sample=False, assistant_model=draft)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.random.set_rng_state(state)


def joint_distribution(
    target: Any, prompt: list[int], temperature: float, top_k: int
) -> torch.Tensor:
    """The exact distribution of three tokens, `[V, V, V]`, by enumerating every prefix."""
    size = target.config.vocab_size

    def next_distribution(rows: torch.Tensor) -> torch.Tensor:
        scores = target(rows).logits[:, -1].float() / temperature
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
        return scores.softmax(-1)

    with torch.no_grad():
        start = torch.tensor([prompt])
        pairs = torch.tensor(list(itertools.product(range(size), repeat=2)))
        one = next_distribution(start)[0]
        two = next_distribution(torch.cat([start.expand(size, -1), torch.arange(size)[:, None]], 1))
        three = next_distribution(torch.cat([start.expand(size**2, -1), pairs], 1)).view(
            size, size, size
        )
    return one[:, None, None] * two[:, :, None] * three


def smallest_target() -> Any:
    """A target of eight tokens and a layer, for thousands of rows: what is drawn is tested, not how it is made."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return tiny_target(
        "qwen2", vocab_size=8, num_hidden_layers=1, initializer_range=0.35, **sizes
    ).float()


def smallest_draft(target: Any, block_size: int, **options: Any) -> Any:
    """A draft as small."""
    sizes = {
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    }
    layers = {"layer_types": ["full_attention"], "target_layer_ids": [0]}
    return tiny_draft(target, block_size, **layers, **sizes, **options)


def chi_square(rule: str, block_size: int, kind: str, top_k: int = 6) -> tuple[float, int, float]:
    """Samples many times; returns the statistic of three tokens, its degrees of freedom, and the acceptance."""
    # Rows of one call: rows are independent, and row numbers are part of the noise's key.
    target = smallest_target()
    draft = smallest_draft(target, block_size, **KINDS[kind])
    draft.generation_config.proposal = rule  # type: ignore[assignment]
    # For so many rows no draft pays.
    use_whole_blocks(draft)
    rows, temperature = NUM_SAMPLES, 1.5
    settings = {"max_new_tokens": 4, "do_sample": True, "temperature": temperature, "top_k": top_k}
    distribution = joint_distribution(target, [3, 5, 4], temperature, top_k)
    inputs = {"input_ids": torch.tensor([[3, 5, 4]]).repeat(rows, 1)}
    torch.manual_seed(1)
    out = target.generate(**inputs, **settings, assistant_model=draft)
    distribution = distribution.flatten()
    code = (out[:, 3] * 8 + out[:, 4]) * 8 + out[:, 5]
    counts = torch.bincount(code, minlength=512).double()
    assert counts[distribution == 0].sum() == 0
    # Cells with fewer than five expected counts are pooled, as the chi-square approximation asks.
    big = distribution * rows >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    expected = torch.cat([distribution[big], distribution[~big].sum()[None]]).double() * rows
    statistic = float(((observed - expected) ** 2 / expected.clamp_min(1e-9)).sum())
    return statistic, len(observed) - 1, draft.last_stats.acceptance_length


@pytest.mark.parametrize(
    ("block_size", "rule", "kind"), half([2, 4], ["shared_noise", "argmax", "sample"], list(KINDS))
)
def test_three_tokens_follow_the_targets_joint_distribution(
    rule: str, block_size: int, kind: str
) -> None:
    statistic, freedom, acceptance = chi_square(rule, block_size, kind)
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    assert 1.02 < acceptance < block_size


def test_forgetting_the_drafted_prefix_fails_that_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A path's distribution has to be conditional: tokens were not drawn from that of the best predecessor.
    def forgetful(candidates: torch.Tensor, scores: torch.Tensor, best: torch.Tensor) -> Any:
        return follow_path(candidates, scores, best)[0], scores[:, :, 0]

    monkeypatch.setattr(candidate_generator, "follow_path", forgetful)
    statistic, freedom, _ = chi_square("sample", 4, "dflash 2")
    assert statistic > freedom + 8 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("rule", "nodes"), [("shared_noise", 0), ("argmax", 7), ("sample", 0)])
def test_a_rows_text_does_not_depend_on_how_many_rows_there_are(rule: str, nodes: int) -> None:
    # What the distribution above says of thousands of rows, it says of one row and of four.
    target = smallest_target()
    draft = smallest_draft(target, 4)
    draft.generation_config.proposal = rule  # type: ignore[assignment]
    draft.generation_config.num_tree_nodes = nodes
    for seed in range(4):
        texts = []
        for rows in (64, 4, 1):
            torch.manual_seed(seed)
            inputs = {"input_ids": torch.tensor([[3, 5, 4]]).repeat(rows, 1)}
            texts.append(
                target.generate(
                    **inputs, max_new_tokens=9, do_sample=True, top_k=6, assistant_model=draft
                )
            )
        assert len({tuple(row) for row in texts[0].tolist()}) > 30
        assert torch.equal(texts[0][:4], texts[1])
        assert torch.equal(texts[0][:1], texts[2])


def test_a_wrong_distribution_fails_that_test() -> None:
    # The statistic has the power to see a distribution that is a little too cold.
    target = smallest_target()
    distribution, colder = (
        joint_distribution(target, [3, 5, 4], t, 6).flatten().double() for t in (1.5, 1.35)
    )
    big = distribution * NUM_SAMPLES >= 5
    statistic = float(((colder - distribution)[big] ** 2 / distribution[big]).sum() * NUM_SAMPLES)
    assert statistic > 4 * (2 * float(big.sum())) ** 0.5


class Counting(LogitsProcessor):
    """Remembers every prefix it was shown, and forbids what it has counted too often: stateful on purpose."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shown.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, len(self.shown) % scores.shape[1]] -= 50.0
        return scores


def test_a_stateful_processor_sees_what_generate_shows_it() -> None:
    target = shallow_target("llama")
    inputs = prompts([7], 2)
    plain, ours = Counting(), Counting()
    ref = target.generate(
        **inputs, max_new_tokens=14, do_sample=False, logits_processor=LogitsProcessorList([plain])
    )
    draft = oracle_draft(target, truth_of(inputs, ref), 5, 8)
    out = target.generate(
        **inputs,
        max_new_tokens=14,
        do_sample=False,
        logits_processor=LogitsProcessorList([ours]),
        assistant_model=draft,
    )
    assert torch.equal(out, ref)
    assert ours.shown == plain.shown
    assert draft.last_stats.acceptance_length > 1.5


def test_greedy_with_prefix_processors_in_a_batch() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([4, 9, 6], 8)
    settings: dict[str, Any] = {
        "max_new_tokens": 14,
        "do_sample": False,
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5], [7, 8]],
        "prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(64) if t % 5 != row],
    }
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 8)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1.5


def test_keyed_noise_is_exponential_independent_and_repeatable() -> None:
    key = torch.tensor(1234567)
    positions = torch.arange(40)[None].repeat(5, 1)
    tokens = torch.arange(500)
    noise = exponential_noise(key, positions, tokens)
    assert torch.equal(noise, exponential_noise(key, positions, tokens))
    assert torch.equal(noise[:, 7:8], exponential_noise(key, positions[:, 7:8], tokens))
    flat = noise.flatten().double()
    assert abs(flat.mean() - 1) < 0.01
    assert abs(flat.var() - 1) < 0.03
    quantiles = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99], dtype=torch.double)
    assert torch.allclose(1 - torch.exp(-flat.quantile(quantiles)), quantiles, atol=0.005)
    for left, right in (
        (noise[:, 1:], noise[:, :-1]),
        (noise[1:], noise[:-1]),
        (noise[..., 1:], noise[..., :-1]),
    ):
        pair = torch.stack([left.flatten(), right.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.015
    assert not torch.equal(noise, exponential_noise(key, positions, tokens, stream=1))
    assert torch.isfinite(gumbel_noise(NoiseKey.of(key, len(positions)), positions, tokens)).all()
