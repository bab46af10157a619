"""Drafts of other layouts inside `generate`: own embedding, head and vocabulary, proposals from the anchor, tap -1.

The oracle is plain `generate`. A draft made out of the target itself shows that a proposal lands on the right token:
its acceptance is what it has to be, not merely its text.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_hf import DFlashDraftModel
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.parts import find_target
from helpers.whole_blocks import use_whole_blocks
from tiny import VOCAB, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

pytestmark = pytest.mark.same_on_every_release

KEPT = torch.tensor([3, 4, 5, 8, 11, 12, 17, 20, 21, 22, 30, 31, 33, 40, 47, 52, 53, 60, 62])
OWN: dict[str, Any] = {"own_embed_tokens": True, "own_lm_head": True}
REDUCED = {**OWN, "draft_vocab_size": len(KEPT)}
VARIANTS: dict[str, dict[str, Any]] = {
    "own": OWN,
    "own head": {"own_lm_head": True},
    "own embedding": {"own_embed_tokens": True},
    "reduced": REDUCED,
    "from the anchor": {"sample_from_anchor": True},
    "speculators": {
        **REDUCED,
        "sample_from_anchor": True,
        "window_from_anchor": True,
        "target_layer_ids": [-1, 2],
    },
    "deepspec": {
        **OWN,
        "sample_from_anchor": True,
        "target_layer_ids": [-1, 0, 3],
        "layer_types": None,
    },
    "only the embeddings": {"target_layer_ids": [-1]},
}
# (block size, verify width); None is the widest there is.
WIDTHS = [(8, None), (8, 3), (2, None), (1, 1)]


def draft_for(target: Any, overrides: dict[str, Any], block_size: int = 8) -> DFlashDraftModel:
    """A random draft whose reduced vocabulary, if it has one, is `KEPT`."""
    draft = tiny_draft(target, block_size, **overrides)
    if draft.d2t is not None:
        draft.d2t.copy_(KEPT - torch.arange(len(KEPT)))
    return draft


def set_widths(draft: DFlashDraftModel, block_size: int, width: int | None) -> None:
    """Sets both options."""
    draft.generation_config.block_size = block_size
    draft.generation_config.verify_width = width


@cache
def plain_text(lengths: tuple[int, ...]) -> Tensor:
    """What plain `generate` says."""
    return tiny_target("gemma3").generate(
        **prompts(list(lengths), 1), max_new_tokens=10, do_sample=False
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy(variant: str) -> None:
    """A variant takes each width with one of the two batches: every two of the three meet."""
    target = tiny_target("gemma3")
    draft = draft_for(target, VARIANTS[variant])
    for place, (block_size, width) in enumerate(WIDTHS):
        lengths = ([7], [5, 12, 2])[(place + list(VARIANTS).index(variant)) % 2]
        set_widths(draft, block_size, width)
        plain = plain_text(tuple(lengths))
        out = target.generate(
            **prompts(lengths, 1), max_new_tokens=10, do_sample=False, assistant_model=draft
        )
        assert torch.equal(out, plain), (lengths, block_size, width)


@pytest.mark.parametrize("variant", ["from the anchor", "speculators"])
def test_greedy_with_a_draft_that_is_partly_right(variant: str) -> None:
    """One slot more than the block is verified, and rejected from."""
    target = tiny_target("qwen3-sliding")
    inputs = prompts([4, 9, 6], 3)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    for seed, block_size in enumerate((8, 5, 1)):
        oracle = oracle_draft(
            target, truth_of(inputs, plain), seed, block_size, **VARIANTS[variant]
        )
        out = target.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=oracle)
        assert torch.equal(out, plain)
        assert oracle.last_stats.num_proposed == block_size
        # All of a block's proposals have been right at least once: the last one is at slot `block_size - 1`.
        assert max(itertools.chain(*oracle.last_stats.num_accepted)) == block_size


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_sampled_text_at_every_block_size(variant: str) -> None:
    target = tiny_target("qwen3")
    inputs = prompts([4, 9], 3)
    texts: list[Tensor] = []
    for rule, (block_size, width) in (
        *(("shared_noise", widths) for widths in WIDTHS),
        ("argmax", WIDTHS[0]),
    ):
        draft = draft_for(target, VARIANTS[variant])
        set_widths(draft, block_size, width)
        draft.generation_config.proposal = rule
        torch.manual_seed(11)
        settings: dict[str, Any] = {
            "max_new_tokens": 8,
            "do_sample": True,
            "top_k": 20,
            "temperature": 0.8,
        }
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
    assert all(torch.equal(texts[0], text) for text in texts)


class Copy(DFlashDraftModel):
    """A draft whose states before its head are given from outside: the target's own, in the tests below."""

    states: Tensor

    def forward_block(self, noise_embeds: Tensor, cache: Any, context: Any = None) -> Tensor:
        """Runs the real forward, for its writes, and returns the given state in every slot."""
        super().forward_block(noise_embeds, cache, context)
        return self.states.expand(noise_embeds.shape[0], noise_embeds.shape[1], -1)


def copy_of(target: Any, **overrides: Any) -> Copy:
    """A draft with a reduced copy of the target's head, and one fixed state."""
    made = draft_for(target, overrides)
    draft = Copy(made.config).to(target.dtype).eval()
    draft.load_state_dict(made.state_dict())
    if draft.lm_head is not None:
        kept = KEPT if draft.d2t is not None else slice(None)
        draft.lm_head.weight.data = target.get_output_embeddings().weight.data[kept].clone()
    draft.states = torch.randn(1, 1, target.config.hidden_size, dtype=target.dtype)
    return draft


def test_a_reduced_head_proposes_the_tokens_of_its_offsets() -> None:
    target = tiny_target("qwen3")
    draft = copy_of(target, **REDUCED)
    full = target.get_output_embeddings()(draft.states)[0, 0]
    logits = draft.compute_logits(draft.states, torch.nn.Identity())[0, 0]
    assert torch.allclose(logits[KEPT], full[KEPT], atol=1e-12)
    left_out = torch.ones(VOCAB, dtype=torch.bool)
    left_out[KEPT] = False
    assert bool((logits[left_out] == -torch.inf).all())
    assert int(logits.argmax()) == int(KEPT[full[KEPT].argmax()])


@pytest.mark.parametrize("from_anchor", [False, True])
def test_which_slots_propose(from_anchor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The anchor's slot and not the last one where the draft samples from the anchor; also in a shorter block."""
    target = tiny_target("qwen3")
    draft = draft_for(target, {"sample_from_anchor": from_anchor})
    set_widths(draft, 5, 4)
    made: list[Tensor] = []
    used: list[Tensor] = []
    forward_block, compute_logits = draft.forward_block, draft.compute_logits
    monkeypatch.setattr(
        draft, "forward_block", lambda *args: made.append(forward_block(*args)) or made[-1]
    )
    monkeypatch.setattr(
        draft, "compute_logits", lambda *args: used.append(args[0]) or compute_logits(*args)
    )
    target.generate(**prompts([5], 2), max_new_tokens=6, do_sample=False, assistant_model=draft)
    assert made
    for states, given in zip(made, used, strict=True):
        assert torch.equal(given, states[:, :3] if from_anchor else states[:, 1:4])


@pytest.mark.parametrize(
    "overrides", [{}, {"sample_from_anchor": True}, {**OWN, "sample_from_anchor": True}]
)
def test_shared_noise_is_that_of_the_proposed_position(
    overrides: dict[str, Any],
) -> None:
    """Where target and draft find all tokens equally likely the noise alone decides, and every proposal stands."""
    target: Any = tiny_target("qwen3")
    target.model.norm.weight.data.zero_()
    draft = draft_for(target, overrides)
    draft.norm.weight.data.zero_()
    draft.generation_config.proposal = "shared_noise"
    use_whole_blocks(draft)
    torch.manual_seed(1)
    target.generate(
        **prompts([5, 8], 2),
        max_new_tokens=1 + 2 * 9,
        do_sample=True,
        top_k=0,
        assistant_model=draft,
    )
    width = draft.config.num_proposals(8)
    assert all(counts[0] == width for counts in draft.last_stats.num_accepted)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_rejection_has_the_targets_distribution(from_anchor: bool) -> None:
    """`draft_probs` are over the target's vocabulary: the joint distribution of two tokens comes out right."""
    target = tiny_target("qwen3")
    draft = copy_of(target, **REDUCED, sample_from_anchor=from_anchor)
    draft.generation_config.proposal = "sample"
    set_widths(draft, 3, None)
    rows = 2000
    inputs = {name: tensor.expand(rows, -1) for name, tensor in prompts([5], 2).items()}
    torch.manual_seed(5)
    settings: dict[str, Any] = {
        "max_new_tokens": 3,
        "do_sample": True,
        "top_k": 6,
        "temperature": 1.0,
    }
    out = target.generate(**inputs, **settings, assistant_model=draft, return_dict_in_generate=True)
    assert out.speculative.acceptance_length > 1.05  # some proposals stand, some are redrawn
    torch.manual_seed(6)
    plain = target.generate(**inputs, **settings)
    counts = []
    for text in (out.sequences, plain):
        pairs = text[:, -3] * VOCAB * VOCAB + text[:, -2] * VOCAB + text[:, -1]
        counts.append(torch.bincount(pairs, minlength=VOCAB**3).double())
    ours, theirs = counts
    common = ours + theirs >= 20
    statistic = float((((ours - theirs) ** 2) / (ours + theirs))[common].sum())
    freedom = int(common.sum())
    assert freedom > 30
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_tap_minus_one_is_the_embedding_everywhere() -> None:
    """Against Transformers' `hidden_states[0]`, also where the embedding is scaled (Gemma)."""
    for family in ("qwen3", "gemma3"):
        target = tiny_target(family)
        ids = prompts([9], 4)["input_ids"]
        expected = target(ids, output_hidden_states=True).hidden_states
        found = find_target(target)
        with Taps(found.layers, [2, -1]).open() as taps:
            target(ids)
            recorded = taps.take()
        assert torch.equal(recorded, torch.cat([expected[3], expected[0]], dim=-1))
        assert not found.layers[0]._forward_pre_hooks


def test_context_of_tap_minus_one_reaches_the_draft() -> None:
    """What `generate` writes as context, in prefill and verify, equals one pass over the finished text."""
    target = tiny_target("gemma3")
    draft = draft_for(target, VARIANTS["deepspec"])
    use_whole_blocks(draft)
    inputs = prompts([7], 1)
    seen: list[Tensor] = []

    def note(module: Any, args: Any, output: Tensor) -> None:
        seen.append(output)

    draft.hidden_norm.register_forward_hook(note)
    out = target.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=draft)
    with Taps(find_target(target).layers, [-1, 0, 3]).open() as taps:
        target(out)
        whole = draft.project_context(taps.take())
    assert torch.allclose(seen[0], whole[:, :7], atol=1e-12)
    accepted = [1, *(n for n in draft.last_stats.num_committed[0])]
    start = 7
    # Before the first verify there is no new context yet.
    for states, count in zip(seen[2:-1], accepted[1:], strict=False):
        assert torch.allclose(states[:, :count], whole[:, start : start + count], atol=1e-12)
        start += count


def test_widths_beyond_the_block_need_sample_from_anchor() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([5], 1)
    for overrides, limit in ((VARIANTS["own"], 8), (VARIANTS["deepspec"], 9)):
        draft = draft_for(target, overrides)
        draft.generation_config.verify_width = limit
        target.generate(**inputs, max_new_tokens=3, assistant_model=draft)
        draft.generation_config.verify_width = limit + 1
        with pytest.raises(
            ValueError, match=f"verify_width between 1 and {limit} .block size 8., got {limit + 1}"
        ):
            target.generate(**inputs, max_new_tokens=3, assistant_model=draft)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("own_embed_tokens", True),
        ("own_lm_head", True),
        ("sample_from_anchor", True),
        ("window_from_anchor", True),
        ("tap_after_deepstack", True),
        ("markov_rank", 4),
    ],
)
def test_transformers_own_path_is_refused(field: str, value: Any) -> None:
    target = tiny_target("qwen3")
    with pytest.raises(
        ValueError, match=f"speculation_type='dflash' can run, got '{field} in its config"
    ):
        target.generate(
            **prompts([5], 1),
            max_new_tokens=3,
            assistant_model=draft_for(target, {field: value}),
            speculation_type="dflash",
        )


@pytest.mark.parametrize("variant", ["own", "own embedding"])
def test_own_rows_are_resized_with_the_target(variant: str) -> None:
    target: Any = tiny_target("qwen3")
    draft = draft_for(target, VARIANTS[variant])
    target.resize_token_embeddings(VOCAB + 8)
    draft.resize_token_embeddings(VOCAB + 8)
    assert draft.embed_tokens is not None
    assert draft.embed_tokens.num_embeddings == draft.config.vocab_size == VOCAB + 8
    inputs = prompts([5, 12, 2], 1)
    plain = target.generate(**inputs, max_new_tokens=10, do_sample=False)
    out = target.generate(**inputs, max_new_tokens=10, do_sample=False, assistant_model=draft)
    assert torch.equal(out, plain)


@pytest.mark.parametrize(
    "variant",
    [
        VARIANTS["own head"],
        REDUCED,
        {"selector_rank": 8, "selector_top_k": 4},
        {"own_embed_tokens": True, "markov_rank": 8},
    ],
    ids=["own head", "reduced", "selector", "Markov head"],
)
def test_rows_of_a_training_are_not_resized(variant: dict[str, Any]) -> None:
    draft = draft_for(tiny_target("qwen3"), variant)
    with pytest.raises(ValueError, match=r"load a draft that was trained for the resized target"):
        draft.resize_token_embeddings(VOCAB + 8)
    assert draft.config.vocab_size == VOCAB
