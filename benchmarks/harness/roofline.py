"""What a step has to read and compute, from the pair's own weights; and the figures that are derived from its time.

Formulas are in benchmarks/README.md. Everything counts what has to be done once: nothing here is measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from dflash_hf.layer_configs import AttentionSizes, attention_sizes, layer_values
from dflash_hf.target_model.parts import find_target

from .pair import Pair

# Acceptance lengths, bonus included, as a verify of this many tokens would show them.
ACCEPTANCES = (3.0, 4.5, 6.5)
REFERENCE_WIDTH = 16
Verdict = Literal["pass", "FAIL", "unmeasured"]


def expected_experts(experts: int, chosen: int, tokens: int) -> float:
    """Returns how many of a layer's experts are expected to be read when `tokens` tokens go to `chosen` each.

    `E (1 - (1 - k/E)^T)`: every token chooses evenly and alone. Derived; a trained router may choose less evenly.
    """
    return experts * (1 - (1 - chosen / experts) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes that are read, and operations of matrix products and attention (two per multiply and add).

    Args:
        target_weights, draft_weights, draft_head (`float`): Bytes of weights; the head is read by both forwards.
        target_cache, draft_cache (`float`): Bytes of keys and values, the block's own included.
        flops (`float`): Operations.
    """

    target_weights: float
    draft_weights: float = 0.0
    draft_head: float = 0.0
    target_cache: float
    draft_cache: float = 0.0
    flops: float

    @property
    def bytes(self) -> float:
        """Bytes that are read of weights and caches, over all parts."""
        return (
            self.target_weights
            + self.draft_weights
            + self.draft_head
            + self.target_cache
            + self.draft_cache
        )

    def to_dict(self) -> dict[str, float]:
        """Returns the parts, their sum and the operations, for a record."""
        return {
            **{name: round(value) for name, value in asdict(self).items()},
            "total": round(self.bytes),
        }


def target_weights(pair: Pair, tokens: int) -> tuple[float, float]:
    """Returns the bytes of the target's weights that a forward of `tokens` tokens reads, and the operations with them.

    Every weight once, but: of an embedding a row per token, which counts as nothing, unless it is the head too; no
    vision tower; of the experts as many as [`expected_experts`] says.
    """
    found = find_target(pair.target)
    skipped = {id(weight) for weight in found.embedding.parameters()} - {
        id(p) for p in found.head.parameters()
    }
    num_bytes = 0.0
    flops = 0.0
    for name, weight in pair.target.named_parameters():
        if id(weight) in skipped or "visual." in name:
            continue
        share_read = 1.0
        share_used = 1.0
        if ".experts." in name:
            experts = found.config.num_experts
            chosen = found.config.num_experts_per_tok
            share_read = expected_experts(experts, chosen, tokens) / experts
            share_used = chosen / experts
        num_bytes += weight.numel() * weight.element_size() * share_read
        if weight.dim() > 1:
            flops += 2 * weight.numel() * tokens * share_used
    return num_bytes, flops


def step_work(pair: Pair, context: int, batch: int, width: int) -> Work:
    """Returns what a draft and a verify of `width` tokens read and compute.

    Args:
        pair (`Pair`): The models; on `meta` they do as well.
        context (`int`): Tokens of context, summed over rows.
        batch (`int`): Rows.
        width (`int`): Tokens that are verified per row.
    """
    plain = forward_work(pair, context, batch, width)
    draft = pair.draft
    block = pair.block_size
    itemsize = draft.dtype.itemsize
    head = sum(weight.numel() for weight in _head(pair).parameters())
    own = [weight for weight in draft.parameters() if weight.dim() > 1]
    projection = draft.fc.weight.numel()
    cached = 2 * len(draft.layers) * draft.config.num_key_value_heads * draft.config.head_dim
    # Context and block go through the key and value projections together; the projection of taps is the context's.
    kv = sum(
        weight.numel()
        for name, weight in draft.named_parameters()
        if name.endswith(("k_proj.weight", "v_proj.weight"))
    )
    products = (
        (sum(w.numel() for w in own) - projection) * block
        + (projection + kv) * width
        + head * (block - 1)
    )
    config = draft.config
    scores = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return Work(
        target_weights=plain.target_weights,
        draft_weights=sum(weight.numel() * weight.element_size() for weight in draft.parameters()),
        draft_head=head * itemsize,
        target_cache=plain.target_cache,
        draft_cache=cached * itemsize * (context + batch * block),
        flops=plain.flops + 2 * batch * products + scores * block * (context + batch * block),
    )


def forward_work(pair: Pair, context: int, batch: int, width: int) -> Work:
    """Returns what one forward of the target over `width` tokens per row reads and computes; plain's step is width 1.

    Layers are full attention or recurrent in `shapes.SHAPES`. A recurrent one reads and writes its state, and its own
    operations are left out: they are few beside the weights'.
    """
    config: Any = find_target(pair.target).config
    layers = _attending(config)
    state = _state_size(config)
    weights, flops = target_weights(pair, batch * width)
    seen = context + batch * width
    # Numbers per token, over all layers
    keys = sum(layer.groups * layer.size for layer in layers)
    queries = sum(layer.heads * layer.size for layer in layers)
    itemsize = pair.target.dtype.itemsize
    return Work(
        target_weights=weights,
        target_cache=itemsize * (2 * keys * seen + 2 * batch * state),
        flops=flops + 4 * queries * width * seen,
    )


def _head(pair: Pair) -> nn.Module:
    """The head that scores the draft's states: its own, or the target's."""
    own: nn.Module | None = pair.draft.lm_head
    if own is not None:
        return own
    return find_target(pair.target).head


def memory_needed(pair: Pair, batch: int, context: int, new_tokens: int) -> int:
    """Estimates the bytes that a run needs: weights, keys and values, what a prefill of all rows at once computes.

    `weights + B L kv * 5/4 + B S (taps + 3 mlp + 6 hidden)`: buffers are rounded up by at most an eighth, and one
    layer at a time exists twice. Derived; what a device really needs shows only there.
    """
    config: Any = find_target(pair.target).config
    draft = pair.draft
    itemsize = pair.target.dtype.itemsize
    weights = sum(
        w.numel() * w.element_size() for m in (pair.target, draft) for w in m.parameters()
    )
    length = context + new_tokens + pair.block_size
    cached = 2 * sum(layer.groups * layer.size for layer in _attending(config))
    cached += 2 * len(draft.layers) * draft.config.num_key_value_heads * draft.config.head_dim
    mlp = max(
        *layer_values(config, "intermediate_size"),
        getattr(config, "moe_intermediate_size", 0) * _chosen(config),
    )
    states = draft.fc.in_features + 3 * mlp + 6 * config.hidden_size
    return weights + itemsize * (batch * length * cached * 5 // 4 + batch * context * states)


def _attending(config: Any) -> list[AttentionSizes]:
    """Returns the sizes of the layers that keep keys and values."""
    sizes = attention_sizes(config)
    kinds: list[str] = getattr(config, "layer_types", None) or ["full_attention"] * len(sizes)
    return [layer for layer, kind in zip(sizes, kinds, strict=True) if kind != "linear_attention"]


def _state_size(config: Any) -> int:
    """Returns the numbers in the recurrent states of a row, of all layers."""
    layers = config.num_hidden_layers - len(_attending(config))
    if not layers:
        return 0
    return (
        layers
        * config.linear_num_value_heads
        * config.linear_key_head_dim
        * config.linear_value_head_dim
    )


def _chosen(config: Any) -> int:
    return getattr(config, "num_experts_per_tok", None) or 0


def mean_length(probability: float, width: int) -> float:
    """Returns the tokens that a verify of `width` commits on average, bonus included, under geometric acceptance.

    Every proposal stands with the same probability if all before it do: `(1 - p^w) / (1 - p)`.
    """
    return sum(probability**index for index in range(width))


def geometric_probability(length: float, width: int = REFERENCE_WIDTH) -> float:
    """Returns the probability under which [`mean_length`] at `width` is `length`.

    Raises:
        ValueError: If no probability gives that.
    """
    if not 1 <= length <= width:
        raise ValueError(
            f"expected a mean length between 1 and {width}, got {length}; no acceptance gives that"
        )
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if mean_length(middle, width) < length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def length_at(length: float, width: int) -> float:
    """Returns what a mean length of verifies of 16 becomes at another width, under geometric acceptance."""
    return mean_length(geometric_probability(length), width)


def derived_speeds(batch: int, width: int, step_ms: float) -> dict[str, float]:
    """Returns tokens per second of all rows at each of `ACCEPTANCES`, as verifies of `width` would commit them."""
    return {f"at_{n:g}": round(batch * length_at(n, width) / step_ms * 1e3, 1) for n in ACCEPTANCES}


def verdict(value: float | None, limit: float, at_most: bool, judged: bool) -> Verdict:
    """Says whether a value keeps a floor; `unmeasured` where there is none or it was not measured where it counts."""
    if value is None or not judged:
        return "unmeasured"
    is_kept = value >= limit
    if at_most:
        is_kept = value <= limit
    return "pass" if is_kept else "FAIL"
