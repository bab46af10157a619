"""What DFlash 2 adds to a draft: a convolution around each sublayer, and a selector of paths through the block.

A block's slots are drafted at once, so each knows little of what its neighbours propose. The convolution lets a slot
see the few before it; the selector scores pairs of neighbouring proposals, so that a walk from the anchor picks tokens
that fit each other. Like the model, this module knows nothing of decoding: no acceptance, no sampling.

Shapes: `B` rows, `K` slots, `D` hidden, `C` candidates per slot, `R` rank, `V` vocabulary. Source: z-lab
`dflash/model.py` 0.1.0, `GroupedDynamicCausalConv` and `CandidateSelector`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.draft_model.layers import DFlashDecoderLayer, Projector


class GroupedDynamicConvolution(nn.Module):
    """Convolves the slots of a block before and after a sublayer, with kernels that depend on the slot.

    `y_t[c] = sum_o (base[o, c] + dynamic_t[o, c // group_size]) * x_{t - o}[c]`, where `x` before the block is 0. Both
    dynamic kernels, of the input and of the output, are projected from the sublayer's normed input. A new module is
    the identity: `base` is 1 at tap 0 and 0 elsewhere, `dynamic` is 0.

    Args:
        hidden_size (`int`): Channels, a multiple of `group_size`.
        kernel_size (`int`): Taps: the slot itself and the slots before it.
        group_size (`int`): Neighbouring channels that share a dynamic kernel.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.group_size = group_size
        # A dynamic kernel of every channel would be as large as another MLP.
        num_groups = hidden_size // group_size
        # Two kernels each, of the input and of the output.
        base_kernel = torch.empty(2, kernel_size, hidden_size)
        dynamic_size = 2 * kernel_size * num_groups
        self.base_kernel = nn.Parameter(base_kernel)
        self.kernel_projection = nn.Linear(hidden_size, dynamic_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights with which the convolution is the identity."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(
        self, states: Tensor, sublayer: Callable[[Tensor], Tensor], block_size: int
    ) -> Tensor:
        """Returns the convolution of `sublayer(convolution of states)`.

        Args:
            states (`torch.Tensor` of shape `[B, N * K, D]`): The sublayer's normed input, block after block.
            sublayer (callable): `[B, N * K, D]` to the same shape.
            block_size (`int`): `K`; nothing crosses from one block into the next.
        """
        blocks = states.unflatten(1, (-1, block_size))
        # Both kernels come from the input, so that one product gives both: [B, N, K, 2, taps, groups].
        kernels = self.kernel_projection(blocks)
        kernels = kernels.unflatten(-1, (2, self.kernel_size, -1))
        kernel_in, kernel_out = kernels.unbind(dim=3)
        base_in, base_out = self.base_kernel
        entering = self._convolve(blocks, base_in, kernel_in)
        # The sublayer takes all slots as one sequence.
        leaving = sublayer(entering.flatten(1, 2))
        leaving = leaving.unflatten(1, (-1, block_size))
        convolved = self._convolve(leaving, base_out, kernel_out)
        return convolved.flatten(1, 2)

    def _convolve(self, blocks: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
        """Returns `[B, N, K, D]` convolved along `K`, with kernels `[taps, D]` and `[B, N, K, taps, groups]`."""
        groups = (-1, self.group_size)
        grouped = blocks.unflatten(-1, groups)
        base = base.to(blocks.dtype).unflatten(-1, groups)
        num_slots = grouped.shape[2]
        out = torch.zeros_like(grouped)
        for tap in range(self.kernel_size):
            # The padding stands before the block and shifts its slots by `tap`.
            shifted = nn.functional.pad(grouped, (0, 0, 0, 0, tap, 0))
            earlier = shifted[:, :, :num_slots]
            # The kernels are not summed before the product: this is the order in which z-lab's code rounds.
            of_slot = dynamic[..., tap, :, None]
            out = out + base[tap] * earlier + of_slot * earlier
        return out.flatten(-2)


class DFlash2Layer(DFlashDecoderLayer):
    """A layer with a convolution around each sublayer."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size = config.hidden_size
        # The config is checked: where a draft has these layers, it states both sizes.
        kernel_size = config.conv_kernel_size or 1
        group_size = config.conv_group_size or 1
        self.attention_conv = GroupedDynamicConvolution(size, kernel_size, group_size)
        self.mlp_conv = GroupedDynamicConvolution(size, kernel_size, group_size)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, projector: Projector, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on the states `[B, N * K, D]` of blocks, as [`DFlashDecoderLayer`] does.

        Convolutions touch the block's states alone: the context's keys and values are projected from features that no
        layer changes.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, N * K, D]`): Output of the layer before, or the embeddings.
            residual (`torch.Tensor`, *optional*): Residual stream that `hidden_states` are not yet added to; `None` in
                the first layer.
            projector (`Projector`): Makes the operands of attention.
            block_size (`int`): `K`; nothing crosses from one block into the next.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Output of the MLP's convolution, and the residual stream that it is
            not yet added to.
        """

        def attention(states: Tensor) -> Tensor:
            return self.self_attn(states, projector)

        if residual is None:
            stream = hidden_states
            normed = self.input_layernorm(hidden_states)
        else:
            normed, stream = self.input_layernorm(hidden_states, residual)
        # The convolution takes the sublayer, because it works on both its input and its output.
        hidden_states = self.attention_conv(normed, attention, block_size)
        normed, stream = self.post_attention_layernorm(hidden_states, stream)
        hidden_states = self.mlp_conv(normed, self.mlp, block_size)
        return hidden_states, stream


class CandidateSelector(nn.Module):
    """Scores each of the head's best tokens behind each predecessor: `S_t(a, b) = U_t(b) + <A[a] * (W h_t), B[b]>`.

    `U_t` are the draft's logits at slot `t`, whose `top_k` largest are candidates, and `h_t` is its state after the
    final norm. In a new module `B` is 0, so that every score is the logit.

    Args:
        vocab_size (`int`): Rows of the two codebooks, `A` of predecessors and `B` of successors.
        hidden_size (`int`): Width of the states.
        rank (`int`): Width of the codebooks.
        top_k (`int`): Candidates per slot.
        initializer_range (`float`): Standard deviation of a new `A`.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, rank: int, top_k: int, initializer_range: float
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.initializer_range = initializer_range
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        # A row per token: `A` and `B` of the formula above.
        predecessors = torch.empty(vocab_size, rank)
        successors = torch.empty(vocab_size, rank)
        self.predecessor_codebook = nn.Parameter(predecessors)
        self.successor_codebook = nn.Parameter(successors)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weights with which every score is the logit, and the successors' codebook has a gradient."""
        # One codebook at 0 makes all pairs 0; with both at 0 neither would have a gradient.
        nn.init.normal_(self.predecessor_codebook, std=self.initializer_range)
        nn.init.zeros_(self.successor_codebook)

    def score(
        self, hidden_states: Tensor, predecessors: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores every candidate of a slot behind each of the given tokens.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., D]`): States after the final norm.
            predecessors (`torch.Tensor` of shape `[..., P]`, int64): Tokens that may stand before the slot.
            logits (`torch.Tensor` of shape `[..., V]`): The draft's logits; may be on another device.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[..., C]`, int64, best logit first, and scores
            `[..., P, C]` in float32 or wider, on the device of the logits.
        """
        # The candidates are the head's own best: a token that it does not like is not made likely by its neighbour.
        unary, candidates = logits.topk(self.top_k, dim=-1)
        return candidates, self._with_pairs(hidden_states, predecessors, unary, candidates)

    def forward(
        self, hidden_states: Tensor, logits: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores all transitions of a block at once; [`follow_path`] then walks through them.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): States of the slots after the anchor.
            logits (`torch.Tensor` of shape `[B, K, V]`): The draft's logits at these slots.
            anchors (`torch.Tensor` of shape `[B]`, int64): Tokens before the first slot.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[B, K, C]`, int64, and scores `[B, K, C, C]`:
            `scores[b, t, i, j]` is the score of candidate `j` at slot `t` behind candidate `i` of slot `t - 1`. At the
            first slot all `i` are the anchor.
        """
        unary, candidates = logits.topk(self.top_k, dim=-1)
        # The anchor stands in for the candidates of a slot before the first, so that all slots have one shape.
        anchors = anchors.to(candidates.device)
        before_first = anchors[:, None, None].expand(-1, 1, self.top_k)
        before_others = candidates[:, :-1]
        predecessors = torch.cat([before_first, before_others], dim=1)
        scores = self._with_pairs(hidden_states, predecessors, unary, candidates)
        return candidates, scores

    def _with_pairs(
        self, hidden_states: Tensor, predecessors: Tensor, unary: Tensor, candidates: Tensor
    ) -> Tensor:
        """Returns the candidates' logits `[..., C]` plus the scores of the pairs: `[..., P, C]`."""
        # The logits are where the target's head is, the codebooks where the draft is.
        device = hidden_states.device
        predecessors = predecessors.to(device)
        successors = candidates.to(device)
        # A bilinear form of low rank: a table of all pairs of tokens would not fit into memory.
        before = nn.functional.embedding(predecessors, self.predecessor_codebook)
        after = nn.functional.embedding(successors, self.successor_codebook)
        projected = self.hidden_projection(hidden_states)
        weighted = before * projected[..., None, :]
        pairs = weighted @ after.transpose(-1, -2)
        # The product may be in half precision, as its weights are; the sum is not.
        # Small differences of logits decide here; bfloat16 has steps of 1/16 at 16.
        dtype = torch.promote_types(unary.dtype, torch.float32)
        unary = unary.to(dtype)
        return unary[..., None, :] + pairs.to(unary.device, dtype)


def follow_path(candidates: Tensor, scores: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Walks from the anchor through a block along the decided transitions; no host sync.

    Args:
        candidates (`torch.Tensor` of shape `[B, K, C]`, int64): Candidates of each slot.
        scores (`torch.Tensor` of shape `[B, K, C, C]`): Scores from [`CandidateSelector`], warped or not.
        best (`torch.Tensor` of shape `[B, K, C]`, int64): The candidate that follows each one of the slot before.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The tokens of the path `[B, K]`, and the scores `[B, K, C]` that the
        candidates had at each of its slots, behind the path so far.
    """
    num_candidates = best.shape[-1]
    # The transitions were decided for all predecessors at once, so that the walk has no arithmetic.
    # At the first slot every row of scores is the anchor's; the walk begins with row 0.
    candidate = torch.zeros_like(best[:, 0, :1])
    before = []
    chosen = []
    for slot in range(best.shape[1]):
        before.append(candidate)
        # An index into the slot's candidates, not a token: a gather takes the place of a read on the host.
        following = best[:, slot]
        candidate = following.gather(1, candidate)
        chosen.append(candidate)
    path = torch.stack(chosen, dim=1)
    tokens = candidates.gather(2, path)
    # The scores behind a predecessor are a row of `[C, C]`.
    rows = torch.stack(before, dim=1)
    rows = rows[..., None].expand(-1, -1, 1, num_candidates)
    scores_on_path = scores.gather(2, rows)
    return tokens[..., 0], scores_on_path[:, :, 0]
