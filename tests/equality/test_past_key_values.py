"""A cache passed in or asked for: advanced as plain `generate` advances it, and the next turn goes on from it.

Every turn is compared with plain `generate` on a cache of its own: the text, then the cache itself. That the draft
still sees the whole conversation shows in its states: each block it runs is compared with one forward over the text.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.generation import BaseStreamer

from dflash_hf.cache import RaggedCache
from dflash_hf.generation import kept_cache
from tiny import VOCAB, OracleDraft, draft_config, prompts, tiny_draft, tiny_target

NEW = 14
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
MakeCache = Callable[[PreTrainedModel], Cache]
CACHES: dict[str, MakeCache] = {
    "dynamic": lambda target: DynamicCache(config=target.config),
    "no-config": lambda target: DynamicCache(),
    "static": lambda target: StaticCache(config=target.config, max_cache_len=120),
}


class Recording(OracleDraft):
    """Keeps every block it runs, as the draft counts."""

    def forward_block(self, noise_embeds: Tensor, cache: RaggedCache, context: Any = None) -> Tensor:
        hidden = super().forward_block(noise_embeds, cache, context)
        assert cache.block is not None
        self.blocks.append((cache.block.lengths.clone(), noise_embeds.clone(), hidden.clone()))
        return hidden


def recording_draft(target: PreTrainedModel, block_size: int = 6, **overrides: Any) -> Recording:
    torch.manual_seed(0)
    return Recording(draft_config(target, block_size, **overrides)).to(target.dtype).eval()


def arm(draft: Recording, truth: list[list[int]], seed: int) -> None:
    """Starts a turn: what the oracle knows, and no blocks yet."""
    draft.arm(truth, seed)
    draft.blocks = []


def real_tokens(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def answer_mask(ids: Tensor, mask: Tensor, eos: list[int] | None) -> Tensor:
    """The mask of a conversation `ids` whose prompt had `mask`: an answer is real up to its first EOS."""
    answer = ids[:, mask.shape[1] :]
    ended = torch.isin(answer, torch.tensor(eos or [-1])).long().cumsum(dim=1)
    real = torch.cat([torch.ones_like(ended[:, :1]), 1 - ended[:, :-1].clamp_max(1)], dim=1)
    return torch.cat([mask, real], dim=1)


def next_turn(ids: Tensor, mask: Tensor, seed: int, num: int = 5) -> tuple[Tensor, Tensor]:
    """A conversation with `num` more tokens of the user's in every row."""
    new = torch.randint(3, VOCAB - 1, (ids.shape[0], num), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)


def check_caches(ours: Cache, plain: Cache, columns: Tensor | None = None) -> None:
    """Keys, values and lengths of every layer; `columns` `[B, C]` says which of the cache's columns count."""
    assert len(ours.layers) == len(plain.layers)
    for a, b in zip(ours.layers, plain.layers, strict=True):
        assert type(a) is type(b)
        assert int(a.get_seq_length()) == int(b.get_seq_length())
        for name in ("keys", "values"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.shape == y.shape
            assert not x.is_inference()
            seen = x.new_ones(x.shape[0], x.shape[2]) if columns is None else columns[:, -x.shape[2] :]
            difference = (x - y).abs() * seen[:, None, :, None]
            assert difference.max() < 1e-9 * y.abs().max()


@torch.no_grad()
def check_blocks(draft: Recording, target: PreTrainedModel, truth: list[list[int]], offsets: list[int]) -> None:
    """Every block equals one forward over each row's text from `offsets` on."""
    assert draft.blocks
    ids = draft.config.target_layer_ids
    features = []
    for row, offset in zip(truth, offsets, strict=True):
        states = target(torch.tensor([row]), output_hidden_states=True).hidden_states
        features.append(torch.cat([states[i + 1] for i in ids], dim=-1)[:, offset:])
    for lengths, noise, hidden in draft.blocks:
        for row, length in enumerate(lengths.tolist()):
            once = draft(noise[row : row + 1], features[row][:, :length]).last_hidden_state[0]
            assert (once - hidden[row]).abs().max() < 1e-9 * once.abs().max()


def turn(
    target: PreTrainedModel,
    draft: Recording,
    caches: tuple[Cache, Cache],
    ids: Tensor,
    mask: Tensor,
    *,
    seed: int = 0,
    whole: bool = True,
    offsets: list[int] | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Runs a turn with and without a draft and compares; returns the conversation after it."""
    past = int(caches[1].get_seq_length())
    given = {"input_ids": ids if whole else ids[:, past:], "attention_mask": mask}
    ref = target.generate(**given, **{**GREEDY, **settings}, past_key_values=caches[0])
    ids = torch.cat([ids, ref[:, given["input_ids"].shape[1] :]], dim=1)
    eos = settings.get("eos_token_id")
    after = answer_mask(ids, mask, eos)
    truth, offsets = real_tokens(ids, after), offsets or [0] * ids.shape[0]
    # The oracle goes by the draft's own count.
    arm(draft, [row[offset:] for row, offset in zip(truth, offsets, strict=True)], seed)
    out = target.generate(**given, **{**GREEDY, **settings}, past_key_values=caches[1], assistant_model=draft)
    assert torch.equal(out, ref)
    assert draft.last_stats.acceptance_length > 1.2
    check_caches(caches[1], caches[0])
    check_blocks(draft, target, truth, offsets)
    return ids, after


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "new"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("lengths", [[9], [4, 11, 7]], ids=["one", "three"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3-sliding", "gemma3", "mistral"])
def test_three_turns(family: str, lengths: list[int], kind: str, whole: bool) -> None:
    target = tiny_target(family)
    inputs = prompts(lengths, 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target)
    for seed in range(3):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, whole=whole)
        ids, mask = next_turn(ids, mask, seed)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "new"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_rows_that_end_early(family: str, kind: str, whole: bool) -> None:
    target = tiny_target(family)
    inputs = prompts([4, 11, 7], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target, 3)
    ends = []
    for seed in range(3):
        # Tokens that occur, so that some rows end and leave gaps of several blocks behind them.
        free = target.generate(input_ids=ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
        eos = [int(free[0, 2]), int(free[1, 6])]
        prompt = ids.shape[1]
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, whole=whole, eos_token_id=eos, pad_token_id=0)
        ends.append((mask[:, prompt:].sum(dim=1)).tolist())
        assert draft.last_stats.num_target_forwards > 1 + max(len(row) for row in draft.last_stats.num_committed)
        ids, mask = next_turn(ids, mask, seed)
    assert all(len(set(turn_ends)) > 1 for turn_ends in ends)


def test_rows_that_end_in_the_same_verify_at_different_tokens() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([4, 7], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (DynamicCache(), DynamicCache())
    draft = recording_draft(target, 8)
    free = target.generate(**inputs, **GREEDY)[:, ids.shape[1] :]
    eos = [int(free[0, 2]), int(free[1, 3])]
    ids, mask = turn(target, draft, caches, ids, mask, seed=10, eos_token_id=eos, pad_token_id=0)
    committed = draft.last_stats.num_committed
    assert (len(committed[0]), sum(committed[0])) == (1, 2)
    assert (len(committed[1]), sum(committed[1])) == (1, 3)
    # The first row's last token was no proposal: neither this verify nor a later one has run the target over it.
    assert draft.last_stats.num_accepted[0] == [1]
    ids, mask = next_turn(ids, mask, 1)
    turn(target, draft, caches, ids, mask)


def test_padding_that_is_called_real_is_attended_to_as_plain_generate_does() -> None:
    target = tiny_target("qwen3")
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
    caches = (DynamicCache(), DynamicCache())
    free = target.generate(ids, **GREEDY)
    settings = {**GREEDY, "eos_token_id": int(free[0, 9]), "pad_token_id": int(free[0, 9])}
    draft = tiny_draft(target)
    for seed in range(2):
        mask = torch.ones_like(ids)
        ref = target.generate(ids, attention_mask=mask, **settings, past_key_values=caches[0])
        out = target.generate(ids, attention_mask=mask, **settings, past_key_values=caches[1], assistant_model=draft)
        assert torch.equal(out, ref)
        check_caches(caches[1], caches[0])
        ids, _ = next_turn(ref, torch.ones_like(ref), seed)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_cache_that_is_returned_is_plain_generates(family: str) -> None:
    target = tiny_target(family)
    inputs = prompts([4, 11], 5)
    mask = inputs["attention_mask"]
    free = target.generate(**inputs, **GREEDY)
    settings = {**GREEDY, "return_dict_in_generate": True}
    if family == "qwen3":
        settings |= {"eos_token_id": int(free[0, 15]), "pad_token_id": 0}
    draft = recording_draft(target)
    plain = target.generate(**inputs, **settings)
    after = answer_mask(plain.sequences, mask, [settings["eos_token_id"]] if family == "qwen3" else None)
    arm(draft, real_tokens(plain.sequences, after), 1)
    ours = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(ours.sequences, plain.sequences)
    # Padding has no place in the run's cache, and plain `generate` fills it with what nothing may look at.
    columns = torch.ones(2, plain.sequences.shape[1] - 1)
    columns[:, : mask.shape[1]] = mask
    check_caches(ours.past_key_values, plain.past_key_values, columns)
    ids, mask = next_turn(plain.sequences, after, 2)
    caches = (plain.past_key_values, ours.past_key_values)
    given = {"input_ids": ids, "attention_mask": mask}
    ref = target.generate(**given, **GREEDY, past_key_values=caches[0])
    truth = real_tokens(ref, answer_mask(ref, mask, None))
    arm(draft, truth, 2)
    assert torch.equal(target.generate(**given, **GREEDY, past_key_values=caches[1], assistant_model=draft), ref)
    check_blocks(draft, target, truth, [0, 0])


def test_no_cache_is_kept_where_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    monkeypatch.setattr(kept_cache.KeptCache, "__init__", lambda *args: pytest.fail("made a cache to keep"))
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=tiny_draft(target))


@pytest.mark.parametrize("kind", CACHES)
def test_prefill_in_chunks(kind: str) -> None:
    target = tiny_target("qwen3-sliding")
    inputs = prompts([9, 15], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target)
    for seed in range(2):
        given = {"input_ids": ids, "attention_mask": mask}
        ref = target.generate(**given, **GREEDY, past_key_values=caches[0])
        truth = real_tokens(ref, answer_mask(ref, mask, None))
        arm(draft, truth, seed)
        settings = {**GREEDY, "prefill_chunk_size": 4}
        assert torch.equal(target.generate(**given, **settings, past_key_values=caches[1], assistant_model=draft), ref)
        check_caches(caches[1], caches[0])
        check_blocks(draft, target, truth, [0, 0])
        ids, mask = next_turn(ref, answer_mask(ref, mask, None), seed, num=11)


def test_embeddings_of_the_whole_conversation() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([9, 15], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (DynamicCache(), DynamicCache())
    draft = recording_draft(target)
    for seed in range(2):
        given = {"inputs_embeds": target.get_input_embeddings()(ids).detach(), "attention_mask": mask}
        ref = target.generate(**given, **GREEDY, past_key_values=caches[0])
        ids, mask = torch.cat([ids, ref], dim=1), torch.cat([mask, torch.ones_like(ref)], dim=1)
        truth = real_tokens(ids, mask)
        arm(draft, truth, seed)
        out = target.generate(**given, **GREEDY, past_key_values=caches[1], assistant_model=draft)
        assert torch.equal(out, ref)
        check_caches(caches[1], caches[0])
        check_blocks(draft, target, truth, [0, 0])
        ids, mask = next_turn(ids, mask, seed)


def first_turn(
    family: str, lengths: list[int], **overrides: Any
) -> tuple[PreTrainedModel, Recording, tuple[Cache, Cache], Any, Any]:
    """A target, its draft, and two caches after one turn with the draft and one without."""
    target = tiny_target(family)
    inputs = prompts(lengths, 3)
    caches = (DynamicCache(config=target.config), DynamicCache(config=target.config))
    draft = recording_draft(target, **overrides)
    ids, mask = turn(target, draft, caches, inputs["input_ids"], inputs["attention_mask"], seed=7)
    return target, draft, caches, ids, mask


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged about contexts that are left out."""
    messages: list[str] = []

    class Logger:
        warning_once = staticmethod(messages.append)

    monkeypatch.setattr(kept_cache, "logger", Logger)
    return messages


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_cache_without_context_gives_the_same_text(family: str, reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn(family, [4, 11, 7])
    del caches[1].dflash_context
    past = [int(row[: ids.shape[1] - 1].sum()) for row in mask]
    for seed in range(2):  # the second of these turns has the context of the first
        ids, mask = next_turn(ids, mask, seed)
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, offsets=past)
    assert len(reasons) == 1
    assert "not advanced with a draft" in reasons[0]


def test_a_plain_turn_in_between(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [4, 11, 7])
    ids, mask = next_turn(ids, mask, 1)
    for cache in caches:
        out = target.generate(input_ids=ids, attention_mask=mask, **GREEDY, past_key_values=cache)
    mask = answer_mask(out, mask, None)
    past = mask[:, :-1].sum(dim=1).tolist()
    ids, mask = next_turn(out, mask, 2)
    turn(target, draft, caches, ids, mask, offsets=past)
    assert "changed since" in reasons[0]


@pytest.mark.parametrize(("num", "kept"), [(3, True), (12, False)])
def test_a_cropped_cache(num: int, kept: bool, reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [4, 11, 7])
    for cache in caches:
        cache.crop(-num)
    past = (mask[:, : -num - 1]).sum(dim=1).tolist()
    ids, mask = next_turn(ids[:, : -num - 1], mask[:, : -num - 1], 3)
    # The draft has a sliding layer, whose ring holds a window and a block: it cannot go back further than that.
    turn(target, draft, caches, ids, mask, offsets=None if kept else past)
    assert bool(reasons) == (not kept)


def test_cropped_to_where_it_had_no_context_yet(reasons: list[str]) -> None:
    # No sliding layer: the draft's rings would have lost what was before.
    target, draft, caches, ids, mask = first_turn("qwen3", [9, 4], layer_types=["full_attention"] * 2)
    del caches[1].dflash_context
    past = mask[:, :-1].sum(dim=1).tolist()
    ids, mask = next_turn(ids, mask, 1)
    ids, mask = turn(target, draft, caches, ids, mask, offsets=past)
    num = ids.shape[1] - 9
    for cache in caches:
        cache.crop(9 - int(cache.get_seq_length()))
    ids, mask = ids[:, :-num], mask[:, :-num]
    past = mask.sum(dim=1).tolist()
    ids, mask = next_turn(ids, mask, 2)
    turn(target, draft, caches, ids, mask, offsets=past)
    assert len(reasons) == 2


def test_cropped_and_advanced_to_the_same_length_by_other_tokens(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [9])
    for cache in caches:
        cache.crop(-2)
        target(torch.tensor([[5, 7]]), past_key_values=cache)
    ids = torch.cat([ids[:, :-3], torch.tensor([[5, 7]])], dim=1)
    past = [ids.shape[1]]
    ids, mask = next_turn(ids, mask[:, :-1], 3)
    turn(target, draft, caches, ids, mask, offsets=past)
    assert "changed since" in reasons[0]


def test_one_row_that_cannot_use_its_context_leaves_the_others_theirs(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [4, 11, 7])
    # The second row's first tokens are masked now: all its positions move.
    first = int(mask[1].argmax())
    mask[1, first : first + 2] = 0
    ids, mask = next_turn(ids, mask, 4)
    given = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    ref = target.generate(**given, past_key_values=caches[0])
    arm(draft, [[], [], []], 0)
    assert torch.equal(target.generate(**given, past_key_values=caches[1], assistant_model=draft), ref)
    assert len(reasons) == 1
    # It counts from its first new tokens: the last one of the answer before, and the user's five.
    assert draft.blocks[0][0].tolist() == [int(mask[0].sum()), 6, int(mask[2].sum())]


def test_another_drafts_context_is_not_used(reasons: list[str]) -> None:
    target, _, caches, ids, mask = first_turn("qwen3", [9])
    past = [ids.shape[1] - 1]
    ids, mask = next_turn(ids, mask, 3)
    turn(target, recording_draft(target), caches, ids, mask, offsets=past)
    assert "another draft's" in reasons[0]


def test_copied_and_pickled_caches_keep_their_context(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("gemma3", [9, 4])
    buffer = io.BytesIO()
    torch.save(caches[1], buffer)
    buffer.seek(0)
    ids, mask = next_turn(ids, mask, 3)
    for cache in (copy.deepcopy(caches[1]), torch.load(buffer, weights_only=False)):
        turn(target, draft, (copy.deepcopy(caches[0]), cache), ids, mask)
    assert not reasons


@pytest.mark.parametrize("after", ["block_size", "verify_width"])
def test_knobs_may_change_between_turns(after: str, reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("gemma3", [9, 4])
    setattr(draft.generation_config, after, 3)
    for seed in range(2):
        ids, mask = next_turn(ids, mask, seed)
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed)
    assert not reasons


def test_windows_that_count_from_the_anchor_and_a_block_that_proposes_from_it(reasons: list[str]) -> None:
    target = tiny_target("qwen3")
    settings = {"window_from_anchor": True, "sample_from_anchor": True, "is_causal": True, "sliding_window": 5}
    draft = recording_draft(target, 4, **settings)
    caches = (DynamicCache(), DynamicCache())
    inputs = prompts([9, 15], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for seed in range(3):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed)
    assert not reasons


def test_a_verify_of_one_token_attaches_nothing(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [9])
    draft.generation_config.verify_width = 1
    ids, mask = next_turn(ids, mask, 1)
    given = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    out = [target.generate(**given, past_key_values=caches[0])]
    out.append(target.generate(**given, past_key_values=caches[1], assistant_model=draft))
    assert torch.equal(*out)
    check_caches(caches[1], caches[0])
    assert caches[1].dflash_context is None


def test_a_prefix_computed_once_serves_many_rows(reasons: list[str]) -> None:
    target = tiny_target("qwen3")
    draft = recording_draft(target)
    prefix = prompts([12], 5)["input_ids"]
    caches = (DynamicCache(), DynamicCache())
    target.generate(prefix, max_new_tokens=1, past_key_values=caches[0])
    target.generate(prefix, max_new_tokens=1, past_key_values=caches[1], assistant_model=draft)
    check_caches(caches[1], caches[0])
    for cache in caches:
        cache.batch_repeat_interleave(3)
    ids = prefix.repeat(3, 1)
    ids, mask = next_turn(ids, torch.ones_like(ids), 2)
    turn(target, draft, caches, ids, mask)
    assert not reasons


def test_num_return_sequences_with_an_empty_cache() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([9, 4], 5)
    cache, draft = DynamicCache(), tiny_draft(target)
    settings = {**GREEDY, "do_sample": True, "num_return_sequences": 2, "assistant_model": draft}
    torch.manual_seed(3)
    ref = target.generate(**inputs, **settings)
    torch.manual_seed(3)
    assert torch.equal(target.generate(**inputs, **settings, past_key_values=cache), ref)
    assert cache.layers[0].keys.shape[:3:2] == (4, ref.shape[1] - 1)
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        target.generate(**prompts([30, 30], 1), **GREEDY, past_key_values=cache, assistant_model=draft)


@pytest.mark.parametrize("proposal", ["argmax", "shared_noise", "sample"])
def test_a_sampled_turn_says_what_it_says_without_a_cache(proposal: str) -> None:
    target = tiny_target("gemma3")
    draft = tiny_draft(target)
    draft.generation_config.proposal = proposal
    inputs = prompts([9, 4], 5)
    cache = DynamicCache(config=target.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    settings = {"max_new_tokens": NEW, "do_sample": True, "assistant_model": draft}
    for seed in range(3):
        torch.manual_seed(seed)
        ref = target.generate(input_ids=ids, attention_mask=mask, **settings)
        committed = draft.last_stats.num_committed
        torch.manual_seed(seed)
        out = target.generate(input_ids=ids, attention_mask=mask, **settings, past_key_values=cache)
        assert torch.equal(out, ref)
        assert draft.last_stats.num_committed == committed
        ids, mask = next_turn(ref, answer_mask(ref, mask, None), seed)


def test_a_cache_that_records_its_past_can_be_rolled_back() -> None:
    target, draft, caches, ids, mask = first_turn("gemma3", [9, 4])
    for cache in caches:
        cache.activate_past_recording()
    ids, mask = next_turn(ids, mask, 1)
    try:
        target.generate(ids, attention_mask=mask, **GREEDY, past_key_values=copy.deepcopy(caches[0]))
    except RuntimeError:
        pytest.skip("plain generate of this Transformers cannot go on from a cache that records its past")
    ids, mask = turn(target, draft, caches, ids, mask)
    for cache in caches:
        cache.crop(-4)
    ids, mask = next_turn(ids[:, :-5], mask[:, :-5], 2)
    turn(target, draft, caches, ids, mask)


class Failing(BaseStreamer):
    """Raises at the n-th run of tokens."""

    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.after, self.error = after, error

    def put(self, value: Tensor) -> None:
        self.after -= 1
        if self.after < 0:
            raise self.error("on purpose")

    def end(self) -> None:
        """Is not reached."""


def contents(cache: Cache) -> list[Any]:
    """What a layer holds: everything but the scratch behind a static layer's length."""
    held: list[Any] = []
    for layer in cache.layers:
        length = int(layer.get_seq_length())
        tensors = [t if t is None else t.clone() for t in (layer.keys, layer.values)]
        if type(layer) is StaticLayer and layer.keys is not None:
            tensors = [t[:, :, :length] for t in tensors]
        held.append((length, *tensors))
    return held


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("after", "error"), [(1, RuntimeError), (4, KeyboardInterrupt)])
def test_an_error_leaves_the_cache_as_it_was(after: int, error: type[BaseException], kind: str, turns: int) -> None:
    target = tiny_target("gemma3")
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target)
    inputs = prompts([9], 2)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for seed in range(turns):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed)
        ids, mask = next_turn(ids, mask, seed)
    before, length = contents(caches[1]), int(caches[1].get_seq_length())
    arm(draft, [[]], 0)
    with pytest.raises(error, match="on purpose"):
        target.generate(
            ids, **GREEDY, past_key_values=caches[1], assistant_model=draft, streamer=Failing(after, error)
        )
    assert int(caches[1].get_seq_length()) == length
    now = contents(caches[1])
    assert len(now) == len(before)
    for a, b in zip(now, before, strict=True):
        assert a[0] == b[0]
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
    turn(target, draft, caches, ids, mask)


def quantised() -> Cache:
    class Layer(DynamicLayer):
        pass

    return Cache(layers=[Layer() for _ in range(4)])


def wrong_window(target: PreTrainedModel) -> Cache:
    return DynamicCache(config=tiny_target("qwen3-sliding").config)


def filled(target: PreTrainedModel, rows: int = 1, columns: int = 6) -> DynamicCache:
    cache = DynamicCache()
    target(torch.ones(rows, columns, dtype=torch.long), past_key_values=cache)
    return cache


def interrupted(target: PreTrainedModel) -> Cache:
    cache = filled(target)
    cache.layers[1].crop(-1)
    return cache


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], Any], int, str]] = {
    "tuple": (lambda target: ((torch.zeros(1), torch.zeros(1)),), 8, "DynamicCache or StaticCache"),
    "offloaded": (lambda target: DynamicCache(config=target.config, offloading=True), 8, "an offloaded cache"),
    "other layers": (lambda target: quantised(), 8, "got Layer in layer 0"),
    "other window": (wrong_window, 8, "to keep all tokens"),
    "other depth": (
        lambda target: DynamicCache(config=tiny_target("qwen3", num_hidden_layers=6).config),
        8,
        "4 layers",
    ),
    "other rows": (lambda target: filled(target, rows=2), 8, "1 rows"),
    "nothing new": (filled, 6, "whole conversation"),
    "new without a mask": (filled, 3, "whole conversation"),
    "interrupted": (interrupted, 8, "interrupted"),
    "too short": (lambda target: StaticCache(config=target.config, max_cache_len=20), 8, "room for the longest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_caches_that_cannot_be_continued_are_refused(case: str) -> None:
    target = tiny_target("qwen3")
    make, columns, match = REFUSED[case]
    cache = make(target)
    calls: list[int] = []
    target.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=match):
        target.generate(
            torch.ones(1, columns, dtype=torch.long),
            **GREEDY,
            past_key_values=cache,
            assistant_model=tiny_draft(target),
        )
    assert not calls


def test_a_mask_that_fits_neither_the_conversation_nor_its_new_part_is_refused() -> None:
    target = tiny_target("qwen3")
    with pytest.raises(ValueError, match="an attention_mask of 7"):
        target.generate(
            torch.ones(1, 3, dtype=torch.long),
            attention_mask=torch.ones(1, 7),
            **GREEDY,
            past_key_values=filled(target),
            assistant_model=tiny_draft(target),
        )


def test_a_static_cache_shorter_than_the_window_is_refused_when_it_would_overflow() -> None:
    target = tiny_target("mistral")
    cache = StaticCache(config=target.config, max_cache_len=8)
    with pytest.raises(ValueError, match="room for the longest"):
        target.generate(**prompts([4], 1), **GREEDY, past_key_values=cache, assistant_model=tiny_draft(target))


def test_gaps_under_sliding_windows_are_refused() -> None:
    target = tiny_target("gemma3")
    with pytest.raises(ValueError, match="sliding windows, which plain generate counts in columns"):
        target.generate(
            torch.full((1, 4), 5),
            attention_mask=torch.tensor([[1, 1, 0, 1]]),
            **GREEDY,
            assistant_model=tiny_draft(target),
        )


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gaps_under_full_attention_equal_plain_generate(family: str) -> None:
    target = tiny_target(family)
    inputs = prompts([9, 12], 1)
    inputs["attention_mask"][0, 5:8] = 0
    inputs["attention_mask"][1, 4] = 0
    ref = target.generate(**inputs, **GREEDY)
    draft = recording_draft(target)
    truth = real_tokens(ref, answer_mask(ref, inputs["attention_mask"], None))
    arm(draft, truth, 1)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    check_blocks(draft, target, truth, [0, 0])
