"""This module defines the parts that DFlash 2 adds to a draft: a convolution around each sublayer, and a selector of
paths.

The slots of a block are drafted at once, so a slot knows little about the proposals of its neighbours. With the
convolution, a slot sees the few slots before it. The selector scores pairs of neighbouring proposals, so that a walk
from the anchor chooses tokens that fit each other. Like the model, this module does not decode: it has no acceptance
and no sampling.

Shapes: `B` rows, `K` slots, `D` hidden size, `C` candidates per slot, `R` rank, `V` vocabulary. Source: z-lab
`dflash/model.py` 0.1.0, `GroupedDynamicCausalConv` and `CandidateSelector`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.draft_model.layers import DFlashDecoderLayer, Projector


class GroupedDynamicConvolution(nn.Module):
    """This module convolves the slots of a block before and after a sublayer, with kernels that depend on the slot.

    The formula is `y_t[c] = sum_o (base[o, c] + dynamic_t[o, c // group_size]) * x_{t - o}[c]`, where `x` before the
    block is 0. There is one dynamic kernel for the input and one for the output. Both are projected from the
    sublayer's normed input. A new module is the identity: `base` is 1 at tap 0 and 0 elsewhere, and `dynamic` is 0.

    Args:
        hidden_size (`int`): Number of channels, a multiple of `group_size`.
        kernel_size (`int`): Number of taps: the slot itself and the slots before it.
        group_size (`int`): Number of neighbouring channels that share a dynamic kernel.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.group_size = group_size
        # Channels share dynamic kernels, because a dynamic kernel for every channel would be as large as another MLP.
        num_groups = hidden_size // group_size
        # There are two kernels of each sort, one for the input and one for the output.
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
        """Returns the convolved output of the sublayer, which runs over the convolved states.

        Args:
            states (`torch.Tensor` of shape `[B, N * K, D]`): The sublayer's normed input, block after block.
            sublayer (callable): Maps states `[B, N * K, D]` to states of the same shape.
            block_size (`int`): `K`. The convolution does not cross from one block into the next.

        Returns:
            `torch.Tensor` of shape `[B, N * K, D]`.
        """
        blocks = states.unflatten(1, (-1, block_size))
        # Both kernels come from the input, so one product computes both: [B, N, K, 2, taps, groups].
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
            # The padding is put before the block and shifts its slots by `tap`.
            shifted = nn.functional.pad(grouped, (0, 0, 0, 0, tap, 0))
            earlier = shifted[:, :, :num_slots]
            # The kernels are not added before the product, because z-lab's code rounds in this order.
            of_slot = dynamic[..., tap, :, None]
            out = out + base[tap] * earlier + of_slot * earlier
        return out.flatten(-2)


class DFlash2Layer(DFlashDecoderLayer):
    """A DFlash 2 layer has a convolution around each sublayer."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size = config.hidden_size
        # The check of the config has made sure that both sizes are stated if a draft has these layers.
        kernel_size = config.conv_kernel_size or 1
        group_size = config.conv_group_size or 1
        self.attention_conv = GroupedDynamicConvolution(size, kernel_size, group_size)
        self.mlp_conv = GroupedDynamicConvolution(size, kernel_size, group_size)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, projector: Projector, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on the states `[B, N * K, D]` of blocks, as [`DFlashDecoderLayer`] does.

        The convolutions change only the states of the block. The context's keys and values are projected from features
        that no layer changes.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, N * K, D]`): Output of the layer before, or the embeddings in
                the first layer.
            residual (`torch.Tensor`, *optional*): Residual stream to which `hidden_states` have not been added yet. It
                is `None` in the first layer.
            projector (`Projector`): Makes the operands of attention.
            block_size (`int`): `K`. The convolution does not cross from one block into the next.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Output of the MLP's convolution, and the residual stream to which it
            has not been added yet.
        """

        def attention(states: Tensor) -> Tensor:
            return self.self_attn(states, projector)

        if residual is None:
            stream = hidden_states
            normed = self.input_layernorm(hidden_states)
        else:
            normed, stream = self.input_layernorm(hidden_states, residual)
        # The sublayer is passed to the convolution, because the convolution works on both its input and its output.
        hidden_states = self.attention_conv(normed, attention, block_size)
        normed, stream = self.post_attention_layernorm(hidden_states, stream)
        hidden_states = self.mlp_conv(normed, self.mlp, block_size)
        return hidden_states, stream


class CandidateSelector(nn.Module):
    """The selector scores the head's best tokens after each predecessor.

    The formula is `S_t(a, b) = U_t(b) + <A[a] * (W h_t), B[b]>`. `U_t` are the draft's logits at slot `t`, and the
    `top_k` tokens with the largest logits are its candidates. `h_t` is the slot's state after the final norm. In a new
    module `B` is 0, so every score equals the logit.

    Args:
        vocab_size (`int`): Number of rows of the two codebooks, `A` of predecessors and `B` of successors.
        hidden_size (`int`): Width of the states.
        rank (`int`): Width of the codebooks.
        top_k (`int`): Number of candidates per slot.
        initializer_range (`float`): Standard deviation of a new `A`.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, rank: int, top_k: int, initializer_range: float
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.initializer_range = initializer_range
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        # Both codebooks have a row per token. They are `A` and `B` of the formula above.
        predecessors = torch.empty(vocab_size, rank)
        successors = torch.empty(vocab_size, rank)
        self.predecessor_codebook = nn.Parameter(predecessors)
        self.successor_codebook = nn.Parameter(successors)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weights with which every score equals the logit, and the successors' codebook gets a gradient."""
        # With one codebook at 0, the scores of all pairs are 0. With both at 0, neither would get a gradient.
        nn.init.normal_(self.predecessor_codebook, std=self.initializer_range)
        nn.init.zeros_(self.successor_codebook)

    def score(
        self, hidden_states: Tensor, predecessors: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores every candidate of a slot after each of the given tokens.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., D]`): States after the final norm.
            predecessors (`torch.Tensor` of shape `[..., P]`, int64): Possible tokens before the slot.
            logits (`torch.Tensor` of shape `[..., V]`): The draft's logits. They may be on another device.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[..., C]`, int64, best logit first, and scores
            `[..., P, C]` in float32 or wider, on the device of the logits.
        """
        # The candidates are the best tokens of the head itself. So a token with a low logit cannot become likely
        # because of its neighbour.
        unary, candidates = logits.topk(self.top_k, dim=-1)
        return candidates, self._with_pairs(hidden_states, predecessors, unary, candidates)

    def forward(
        self, hidden_states: Tensor, logits: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores all transitions of a block at once. [`follow_path`] then walks through these scores.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): States of the slots after the anchor.
            logits (`torch.Tensor` of shape `[B, K, V]`): The draft's logits at these slots.
            anchors (`torch.Tensor` of shape `[B]`, int64): Tokens before the first slot.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[B, K, C]`, int64, and scores `[B, K, C, C]`, of which
            `[b, t, i, j]` is the score of candidate `j` at slot `t` after candidate `i` of slot `t - 1`. At the first
            slot every `i` stands for the anchor.
        """
        unary, candidates = logits.topk(self.top_k, dim=-1)
        # The anchor takes the place of the candidates before the first slot, so that all slots have the same shape.
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
        # The logits are on the device of the target's head, and the codebooks on the device of the draft.
        device = hidden_states.device
        predecessors = predecessors.to(device)
        successors = candidates.to(device)
        # This is a bilinear form of low rank, because a table of all pairs of tokens would not fit into memory.
        before = nn.functional.embedding(predecessors, self.predecessor_codebook)
        after = nn.functional.embedding(successors, self.successor_codebook)
        projected = self.hidden_projection(hidden_states)
        weighted = before * projected[..., None, :]
        pairs = weighted @ after.transpose(-1, -2)
        # The product has the dtype of its weights, which may be half precision. The sum is computed in float32 or
        # wider, because small differences of logits decide here, and bfloat16 has steps of 1/16 at 16.
        dtype = torch.promote_types(unary.dtype, torch.float32)
        unary = unary.to(dtype)
        return unary[..., None, :] + pairs.to(unary.device, dtype)


def follow_path(candidates: Tensor, scores: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Walks from the anchor through a block along the best transitions; no host sync.

    Args:
        candidates (`torch.Tensor` of shape `[B, K, C]`, int64): Candidates of each slot.
        scores (`torch.Tensor` of shape `[B, K, C, C]`): Scores from [`CandidateSelector`], warped or not.
        best (`torch.Tensor` of shape `[B, K, C]`, int64): Number of the best candidate of a slot after each candidate
            of the slot before.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The tokens of the path `[B, K]`, and the scores `[B, K, C]` that the
        candidates have at each slot, after the token that the path has before this slot.
    """
    num_candidates = best.shape[-1]
    # `best` holds the choice for every predecessor, so the walk needs no arithmetic. At the first slot all rows of
    # scores belong to the anchor, and the walk begins with row 0.
    candidate = torch.zeros_like(best[:, 0, :1])
    before = []
    chosen = []
    for slot in range(best.shape[1]):
        before.append(candidate)
        # `candidate` is an index into the slot's candidates and not a token. The gather makes a read on the host
        # unnecessary.
        following = best[:, slot]
        candidate = following.gather(1, candidate)
        chosen.append(candidate)
    path = torch.stack(chosen, dim=1)
    tokens = candidates.gather(2, path)
    # The scores after a predecessor are a row of `[C, C]`.
    rows = torch.stack(before, dim=1)
    rows = rows[..., None].expand(-1, -1, 1, num_candidates)
    scores_on_path = scores.gather(2, rows)
    return tokens[..., 0], scores_on_path[:, :, 0]
