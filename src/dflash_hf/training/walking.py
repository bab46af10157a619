"""This module computes the walked acceptance: the acceptance length over the target's own text, without decoding.

All anchors are evaluated at once. Decoding does not visit every anchor: after `n` accepted tokens, the next anchor is
`n + 1` tokens further on. So the mean over all anchors is a different number. The walk visits the same anchors as
decoding, and gives the number of tokens that `generate` commits at each verify.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_hf.block.tree import DraftTree, TreeBuilder, new_nodes
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target
from dflash_hf.training.anchors import all_anchors
from dflash_hf.training.collators import Batch, collate, sorted_batches
from dflash_hf.training.example import Example, example_lengths
from dflash_hf.training.features import FeatureCache
from dflash_hf.training.forward import logits_of, run_blocks, target_features
from dflash_hf.training.loss import block_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkedAcceptance:
    """The numbers of tokens that greedy decoding with a draft would commit if all verifies had one width.

    Args:
        committed (`list[list[int]]`): For each row, the number of tokens committed at each verify, including the bonus
            token, answer after answer. The first token of an answer comes from the prefill and is not counted.
    """

    committed: list[list[int]]

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens committed per verify, over all verifies of all rows. 0 if there is no verify."""
        num_verifies = sum(len(row) for row in self.committed)
        return sum(sum(row) for row in self.committed) / num_verifies if num_verifies else 0.0


def walk(num_accepted: Sequence[int], first: int, last: int) -> list[int]:
    """Walks one answer as decoding does and returns the tokens committed at each verify.

    Args:
        num_accepted (sequence of `int`): For each index, the number of draft tokens that are accepted if this index is
            the anchor. It has at least `last` entries.
        first (`int`): The index of the first anchor, which is the first token of the answer.
        last (`int`): The index of the last token of the answer: its end token, or the last token within the limit.
            Tokens that a verify would commit beyond this index are cut off.
    """
    committed: list[int] = []
    anchor = first
    while anchor < last:
        committed.append(min(num_accepted[anchor] + 1, last - anchor))
        anchor += committed[-1]
    return committed


def answers_of(example: Example) -> list[tuple[int, int]]:
    """Returns the indices of the first and the last token of each answer in an example, in order."""
    found: list[tuple[int, int]] = []
    start = 0
    for is_answer, tokens in itertools.groupby(example.loss_mask):
        end = start + len(list(tokens))
        if is_answer:
            found.append((start, end - 1))
        start = end
    return found


@torch.no_grad()
def accepted_at_anchors(
    draft: DFlashDraftModel,
    target: Target,
    batch: Batch,
    features: Tensor | None = None,
    *,
    block_size: int | None = None,
    verify_width: int | None = None,
    chunk_anchors: int = 32,
    is_tree: bool = False,
) -> Tensor:
    """Counts, for every valid anchor, the greedy draft tokens that agree with the target's own text.

    Args:
        draft, target: The draft and the target, in eval mode.
        batch ([`Batch`]): The target's own greedy answers, padded on the right.
        features (`torch.Tensor` of shape `[B, S, L * D]`, *optional*): The tapped states of the batch, if they are
            known already.
        block_size (`int`, *optional*): The width of the draft's block. By default, it is the draft's own.
        verify_width (`int`, *optional*): The width of the verify, including the anchor. By default, it is
            `block_size`, or `block_size + 1` if the anchor's slot also proposes a token (`sample_from_anchor`).
        chunk_anchors (`int`): Blocks per row and forward.
        is_tree (`bool`): Whether the verified tokens form a tree. The tree is built from the draft's scores alone.

    Returns:
        `torch.Tensor` of shape `[B, S]`, int64, on the CPU: The number of accepted draft tokens, below `verify_width`,
        and 0 where there is no anchor.

    Raises:
        ValueError: If a width is out of range.
    """
    config = draft.config
    ahead = int(config.sample_from_anchor)  # see `block_labels`
    block_size = config.block_size if block_size is None else block_size
    widest = block_size + ahead
    verify_width = widest if verify_width is None else verify_width
    if not 2 <= block_size <= config.block_size or not 1 <= verify_width <= widest:
        raise ValueError(
            f"expected 2 <= block_size <= {config.block_size} and 1 <= verify_width <= {widest}, got "
            f"{block_size} and {verify_width}; use the draft's block or a smaller one"
        )
    if verify_width == 1:  # nothing is proposed
        return torch.zeros_like(batch.input_ids)
    batch = batch.to(draft.fc.weight.device)
    if features is None:
        deep = config.tap_after_deepstack
        features = target_features(
            target, config.target_layer_ids, batch, after_deepstack=deep
        ).taps
    # The head runs only over the slots whose proposals a verify of this width would check.
    slots = slice(1 - ahead, verify_width - ahead)
    anchors = all_anchors(batch.loss_mask.cpu(), block_size)
    logits = logits_of(draft, target)
    accepted = torch.zeros_like(batch.input_ids)
    for start in range(0, anchors.indices.shape[1], chunk_anchors):
        part = anchors.select(start, start + chunk_anchors).to(batch.input_ids.device)
        labels = block_labels(batch, part, ahead)
        truth = labels.ids.masked_fill(~labels.mask, -1)[:, :, slots]
        hidden = run_blocks(draft, target, batch, features, part)
        # Each block becomes a row.
        hidden = hidden.view(-1, block_size, hidden.shape[-1])[:, slots]
        heads = batch.input_ids.gather(1, part.indices).flatten()
        if is_tree:
            right = _along_tree(draft, hidden, logits(hidden), heads, truth.flatten(0, 1)).view_as(
                part.indices
            )
        else:
            proposals = draft.best_path(hidden, logits(hidden), heads)
            proposals = proposals.view(*part.indices.shape, verify_width - 1).to(hidden.device)
            right = (proposals == truth).cumprod(dim=-1).sum(dim=-1)
        accepted.scatter_add_(1, part.indices, right * part.keep)
    return accepted.cpu()


def _along_tree(
    draft: DFlashDraftModel, hidden: Tensor, logits_BDV: Tensor, heads: Tensor, truth_BD: Tensor
) -> Tensor:
    """Returns how many true tokens of each block are accepted, `[B]`, in a tree with as many tokens as the chain."""
    batch, depth = truth_BD.shape
    device = logits_BDV.device
    num_choices = draft.config.num_candidates or logits_BDV.shape[-1]
    trees = TreeBuilder(depth + 1, depth, num_choices, device)
    nodes = new_nodes(batch, depth + 1, device)
    block = torch.zeros(batch, depth + 1, dtype=torch.long, device=device)
    candidates, scores = draft.transitions(hidden, logits_BDV, heads)
    trees.build(scores, nodes, block, candidates)
    return DraftTree.of(nodes).agree(block, truth_BD.to(device)).to(truth_BD.device)


def walked_acceptance(
    draft: DFlashDraftModel,
    target: Target,
    examples: Sequence[Example],
    *,
    block_size: int | None = None,
    verify_width: int | None = None,
    batch_size: int = 8,
    is_tree: bool = False,
    cache: FeatureCache | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> WalkedAcceptance:
    """Walks every answer of every example as greedy `generate` would, with one call for each answer.

    All verifies have one width. Each verify checks a chain, or a tree if `is_tree`.

    Args:
        draft (`DFlashDraftModel`): The draft. It runs in eval mode, and its own mode is restored at the end.
        target (`Target`): The target, in eval mode.
        examples (sequence of [`Example`]): The target's own greedy answers.
        block_size, verify_width (`int`, *optional*): See `accepted_at_anchors`.
        batch_size (`int`): Examples per forward.
        is_tree (`bool`): See `accepted_at_anchors`.
        cache ([`FeatureCache`], *optional*): The stored tapped states of all examples. By default, the target runs.
        on_batch (callable, *optional*): It is called after each batch with the number of examples done so far.
    """
    committed: list[list[int]] = [[] for _ in examples]
    done = 0
    was_training = draft.training
    draft.eval()
    try:
        for chosen in sorted_batches(range(len(examples)), example_lengths(examples), batch_size):
            part = [examples[i] for i in chosen]
            batch = collate(part)
            features = None
            if cache is not None:
                features = cache.read(part, batch).taps.to(draft.fc.weight.device)
            accepted = accepted_at_anchors(
                draft,
                target,
                batch,
                features,
                block_size=block_size,
                verify_width=verify_width,
                is_tree=is_tree,
            )
            for index, example, row in zip(chosen, part, accepted.tolist(), strict=True):
                for first, last in answers_of(example):
                    committed[index] += walk(row, first, last)
            done += len(chosen)
            if on_batch is not None:
                on_batch(done)
    finally:
        draft.train(was_training)
    return WalkedAcceptance(committed=committed)
