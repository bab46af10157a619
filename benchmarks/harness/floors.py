"""What a step cannot be faster than in eager mode: the bare forwards of draft and verify, each alone."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from dflash_hf.bench.timing import Marks
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.reentry import ragged_attention

from .pair import Pair


class BareForwards:
    """The two forwards of a step over ragged caches that hold `context` random tokens per row.

    Nothing else is timed: no embedding of the block, no argmax, no acceptance, no context K/V, no host read. The
    draft's includes the target's head over its slots; the verify's is the whole target over one block.

    Args:
        pair (`Pair`): The models.
        batch, context (`int`): Rows, and tokens each of them has.
    """

    def __init__(self, pair: Pair, batch: int, context: int) -> None:
        self.pair = pair
        self.batch = batch
        self.context = context
        self.draft_ms: list[float] = []
        self.verify_ms: list[float] = []
        width, draft, device = pair.block_size, pair.draft, pair.device
        self._target = find_target(pair.target)
        vocab = self._target.vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, vocab, (batch, context), generator=generator).to(device)
        positions = torch.arange(context, device=device).expand(batch, -1)
        self._lengths = positions[:, -1] + 1
        self._bound = self.context + width
        with torch.no_grad():
            filled = DynamicCache(config=self._target.config)
            pair.target(input_ids=ids, **{CACHE_NAME: filled}, use_cache=True, logits_to_keep=1)
            self._cache = RaggedCache.take_prefill(filled, positions, self._bound, width)
            self._draft_cache = RaggedCache(
                draft.cache_shapes(), batch=self.batch, max_length=self._bound, block=width
            )
            taps = torch.randn(self.batch, self.context, draft.fc.in_features, device=device).to(
                draft.dtype
            )
            draft.write_prompt(taps, positions, self._draft_cache)
            self._ids = ids[:, :1].expand(-1, width).contiguous()
            self._noise = draft.embed(self._ids, self._target.embedding).to(draft.dtype)

    def free(self) -> None:
        """Gives the caches back, so that the peak memory of later runs is not counted on top; nothing can run then."""
        del self._cache, self._draft_cache

    def draft(self) -> None:
        """Runs one forward of the draft over a block, its logits included, behind the context it was built with."""
        block = RaggedBlock.at(
            self._lengths, self.pair.block_size, self._bound, is_exact=self.batch == 1
        )
        self._draft_cache.begin(block)
        hidden = self.pair.draft.forward_block(self._noise, self._draft_cache)
        self.pair.draft.compute_logits(hidden[:, 1:], self._target.head)

    def verify(self) -> None:
        """Runs the target once over a block; under `ragged_attention`."""
        block = RaggedBlock.at(self._lengths, self.pair.block_size, self._bound)
        self._cache.begin(block)
        self.pair.target(
            input_ids=self._ids,
            position_ids=block.positions,
            **{CACHE_NAME: self._cache},
            use_cache=True,
            return_dict=True,
            ragged=self._cache,
        )

    @torch.inference_mode()
    def sample(self, count: int) -> None:
        """Times each forward `count` times, in turn, after one of each that is not timed."""
        with ragged_attention(self._target):
            for index in range(count + 1):
                for run, times in ((self.draft, self.draft_ms), (self.verify, self.verify_ms)):
                    marks = Marks(self.pair.device)
                    marks.mark()
                    run()
                    marks.mark()
                    times += marks.intervals() if index else []
