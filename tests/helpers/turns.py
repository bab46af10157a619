"""Conversations on a cache that is kept, for tests: a turn with a draft beside the same turn without, compared.

Every turn is compared with plain `generate` on a cache of its own: the text, then the cache itself. That the draft
still sees the whole conversation shows in its states: each block it runs is compared with one forward over the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import LinearAttentionLayer

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from helpers.hybrid import check_recurrent
from tiny import VOCAB, OracleDraft, draft_config, prompts, tiny_target

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

    def forward_block(
        self, noise_embeds: Tensor, cache: RaggedCache, context: Any = None
    ) -> Tensor:
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
    new = torch.randint(
        3, VOCAB - 1, (ids.shape[0], num), generator=torch.Generator().manual_seed(seed)
    )
    return torch.cat([ids, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)


def check_caches(ours: Cache, plain: Cache, columns: Tensor | None = None) -> None:
    """Keys, values and lengths of every layer; `columns` `[B, C]` says which of the cache's columns count."""
    assert len(ours.layers) == len(plain.layers)
    for a, b in zip(ours.layers, plain.layers, strict=True):
        assert type(a) is type(b)
        if isinstance(a, LinearAttentionLayer):
            check_recurrent(a, b, 1e-9)
            continue
        assert int(a.get_seq_length()) == int(b.get_seq_length())
        for name in ("keys", "values"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.shape == y.shape
            assert y.is_inference() or not x.is_inference()
            seen = (
                x.new_ones(x.shape[0], x.shape[2]) if columns is None else columns[:, -x.shape[2] :]
            )
            # Behind what a static layer holds is scratch.
            seen = nn.functional.pad(seen, (0, x.shape[2] - seen.shape[1]))
            difference = (x - y).abs() * seen[:, None, :, None]
            assert difference.max() < 1e-9 * y.abs().max()


@torch.no_grad()
def check_blocks(
    draft: Recording, target: PreTrainedModel, truth: list[list[int]], offsets: list[int]
) -> None:
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
    check_draft: bool = True,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Runs a turn with and without a draft and compares; returns the conversation after it."""
    past = int(caches[1].get_seq_length())
    given = {"input_ids": ids if whole else ids[:, past:], "attention_mask": mask}
    ref = target.generate(**given, **{**GREEDY, **settings}, **{CACHE_NAME: caches[0]})
    ids = torch.cat([ids, ref[:, given["input_ids"].shape[1] :]], dim=1)
    eos = settings.get("eos_token_id")
    after = answer_mask(ids, mask, eos)
    truth, offsets = real_tokens(ids, after), offsets or [0] * ids.shape[0]
    # The oracle goes by the draft's own count.
    arm(draft, [row[offset:] for row, offset in zip(truth, offsets, strict=True)], seed)
    out = target.generate(
        **given, **{**GREEDY, **settings}, **{CACHE_NAME: caches[1]}, assistant_model=draft
    )
    assert torch.equal(out, ref)
    assert draft.last_stats.acceptance_length > 1.2
    check_caches(caches[1], caches[0])
    if check_draft:
        check_blocks(draft, target, truth, offsets)
    return ids, after


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
