"""The one schema of a DFlash draft: `checkpoints` turns every layout into it, and nothing else parses configs."""

# No `from __future__ import annotations` here: @strict skips fields whose annotation is a string.
import math
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from dflash_hf.errors import one_line, shown
from dflash_hf.positions import build_target_layer_ids

# Kind of RoPE -> the numbers it cannot do without.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Far above any draft; what lies beyond is a damaged file, and building it would end in a memory error.
MAX_LAYERS = 1024
MAX_SIZE = 2**20
MAX_VOCABULARY = 2**24
# There the target's logits of one block, `[block_size, vocabulary]` in float32, take 0.6 GB with Qwen3's vocabulary,
# and verifying it is a prefill: nobody gains by proposing that much. Published drafts have 8 to 32.
MAX_BLOCK_SIZE = 1024
MAX_CANDIDATES = 1024  # the selector scores each with each of the slot before
LAYER_TYPES = ("full_attention", "sliding_attention")


class _AsTheTarget:
    """A value that a draft does not have of its own: equal to whatever the target has."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "the target's"


@strict
class DFlashConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`]. The defaults are those of a draft for Qwen3-8B.

    Args:
        vocab_size (`int`, *optional*): Vocabulary of the target, also of the draft's embedding if it has one; `None`
            means not stated.
        draft_vocab_size (`int`, *optional*): Rows of the draft's own head, where they are fewer than `vocab_size`: it
            proposes those tokens only, and its buffer `d2t` says which (row `i` is token `i + d2t[i]`). `None` means
            all.
        own_embed_tokens, own_lm_head (`bool`): Whether the draft brings an embedding (its raw rows fill the block) and
            a head of its own. It uses the target's otherwise.
        hidden_size (`int`): Width of the draft, equal to the width of the target's embedding.
        target_hidden_size (`int`, *optional*): Width of each tapped state; defaults to `hidden_size`.
        intermediate_size (`int`): Width of the MLP.
        num_hidden_layers (`int`): Number of draft layers.
        num_attention_heads, num_key_value_heads, head_dim (`int`): Attention shape.
        hidden_act (`str`): Activation of the gated MLP.
        rms_norm_eps (`float`): Epsilon of every norm.
        rope_parameters (`dict`, *optional*): The draft's own RoPE: `rope_theta`, `rope_type` in default, linear, yarn,
            llama3 and that type's fields. Positions are plain indices, also for vision targets.
        max_position_embeddings (`int`): Longest sequence the draft was made for, in tokens.
        attention_bias (`bool`): Whether the four attention projections carry a bias.
        attention_dropout (`float`): Dropout on attention weights in training.
        layer_types (`list[str]`, *optional*): `full_attention` or `sliding_attention` per layer; default all full.
        sliding_window (`int`, *optional*): Positions seen looking back, the query included (`q - k < sliding_window`);
            set to `None` where no layer slides.
        window_from_anchor (`bool`): Sliding layers see the last `sliding_window` tokens before the anchor from every
            slot of the block, and the block without a limit (speculators' rule), instead of counting from each query.
        is_causal (`bool` or `list[bool]`, *optional*): Whether attention inside the block is causal, per layer.
            `None` means causal in sliding layers and bidirectional in full ones (z-lab's rule).
        block_size (`int`): Block length, the anchor included: `block_size - 1` tokens are proposed, or `block_size`
            with `sample_from_anchor`.
        sample_from_anchor (`bool`): Whether each slot predicts the token after its own position, so that the anchor's
            slot proposes too, instead of the token at its own position.
        mask_token_id (`int`): Token whose embedding fills the block after the anchor.
        num_target_layers (`int`, *optional*): Depth of the target the draft was trained for; `None` means not stated.
        target_layer_ids (`list[int]`, *optional*): 0-based target layers whose outputs are tapped; -1 is what the
            first layer is given (the embeddings).
        tap_after_deepstack (`bool`): Whether a tap of a layer after which DeepStack adds features of a picture has
            them in it: in the rows of picture tokens only. Drafts are trained without, as by SpecForge; SGLang taps
            without, vLLM with them.
        raw_input_embeddings (`bool`): Look rows up in the embedding weight instead of calling the target's embedding
            module, which for some targets scales or normalises (Muse needs the raw rows, Gemma the scaled ones).
        input_embedding_scale (`float`): Factor on the block's embeddings.
        output_multiplier (`float`): Factor on the draft's logits.
        final_logit_softcapping (`float`, *optional*): Soft cap on the draft's logits.
        conv_kernel_size, conv_group_size (`int`, *optional*): DFlash 2's convolution around each sublayer: its taps,
            and the neighbouring channels that share a dynamic kernel. `None` means no convolution.
        selector_rank, selector_top_k (`int`, *optional*): DFlash 2's selector of paths: the width of its codebooks,
            and the candidates per slot. `None` means no selector.
        initializer_range (`float`): Standard deviation of fresh weights.

    Raises:
        ValueError: If fields contradict each other; the message names the field.
    """

    model_type = "dflash"
    default_theta = 1_000_000.0
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (Transformers' own form)
    # Pipelines compare them with the target's, to see whether the two share a tokenizer. Not fields: never saved.
    bos_token_id = _AsTheTarget()
    eos_token_id = _AsTheTarget()
    pad_token_id = _AsTheTarget()

    vocab_size: int | None = 151936
    draft_vocab_size: int | None = None
    own_embed_tokens: bool = False
    own_lm_head: bool = False
    hidden_size: int = 4096
    target_hidden_size: int | None = None
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float | int = 1e-6
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    window_from_anchor: bool = False
    is_causal: bool | list[bool] | None = None
    block_size: int = 16
    sample_from_anchor: bool = False
    mask_token_id: int = 151669
    num_target_layers: int | None = 36
    target_layer_ids: list[int] | None = None
    tap_after_deepstack: bool = False
    raw_input_embeddings: bool = False
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_sizes()
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        self.raw_input_embeddings = self.raw_input_embeddings or self.own_embed_tokens  # it is a plain one
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if "sliding_attention" not in self.layer_types:
            self.sliding_window, self.window_from_anchor = None, False
        if self.is_causal is None:
            self.is_causal = [kind == "sliding_attention" for kind in self.layer_types]
        elif isinstance(self.is_causal, bool):
            self.is_causal = [self.is_causal] * self.num_hidden_layers
        if self.target_layer_ids is None:
            if self.num_target_layers is None:
                raise ValueError(
                    "expected target_layer_ids or num_target_layers, got neither; say which target layers are tapped"
                )
            self.target_layer_ids = build_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self._check_rope()
        super().__post_init__(**kwargs)
        self._check()

    def _check_sizes(self) -> None:
        """Raises unless every size and scale can be built with: the first thing, before any list is as long as one."""
        sizes = ("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
        sizes += ("num_key_value_heads", "conv_kernel_size", "conv_group_size", "selector_rank")
        limits = {
            **dict.fromkeys(sizes, MAX_SIZE),
            **dict.fromkeys(("vocab_size", "draft_vocab_size", "max_position_embeddings"), MAX_VOCABULARY),
            "block_size": MAX_BLOCK_SIZE,
            "selector_top_k": MAX_CANDIDATES,
            "num_hidden_layers": MAX_LAYERS,
            "num_target_layers": MAX_LAYERS,
            "sliding_window": 2**62,
        }
        for name, limit in limits.items():
            value: int | None = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ValueError(f"expected {name} from 1 to {limit}, got {shown(value)}; mend it")
        for name in ("rms_norm_eps", "initializer_range", "attention_dropout", "input_embedding_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"expected a finite {name} >= 0, got {shown(getattr(self, name))}; mend it")
        for name in ("output_multiplier", "final_logit_softcapping"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ValueError(f"expected a finite {name}, got {shown(getattr(self, name))}; mend it")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"expected hidden_act in {sorted(ACT2FN)}, got {shown(self.hidden_act)}; mend it")

    def _check_rope(self) -> None:
        """Raises unless the RoPE is of a known kind and has the numbers that this kind needs."""
        rope = self.rope_parameters or {}
        kind = rope.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            raise ValueError(
                f"expected rope_type in {tuple(ROPE_TYPES)}, got {shown(kind)}; a draft's RoPE may not depend on the "
                "length of the call"
            )
        stated = {name for name, value in rope.items() if value is not None and name not in ("rope_type", "truncate")}
        # A rope_theta that is left out gets Transformers' default; one that is null would be computed with.
        for name in sorted({*ROPE_TYPES[kind], *stated, *({"rope_theta"} & rope.keys())}):
            value = rope.get(name)
            # Transformers computes with all of them; of the numbers only mscale and its like may be 0.
            smallest = 0 if name.startswith("mscale") else 1e-12
            if not isinstance(value, int | float) or isinstance(value, bool) or not smallest <= value < 1e12:
                raise ValueError(
                    f"expected a positive number as {one_line(name)} of the RoPE, got {shown(value)}; mend it"
                )

    def _check(self) -> None:
        """Raises the first contradiction found among the fields, as one sentence."""
        assert self.layer_types is not None  # filled in above, as the next two
        assert self.target_layer_ids is not None
        assert isinstance(self.is_causal, list)
        slides = "sliding_attention" in self.layer_types
        reduced = self.draft_vocab_size is not None
        checks: list[tuple[bool, str, object, str]] = [
            (
                self.block_size >= 2 - self.sample_from_anchor,
                "block_size >= 2",
                self.block_size,
                "a block holds the anchor and one proposal",
            ),
            (
                self.mask_token_id >= 0 and (self.vocab_size is None or self.mask_token_id < self.vocab_size),
                f"mask_token_id in [0, {self.vocab_size})",
                self.mask_token_id,
                "it must index the embedding",
            ),
            (
                self.vocab_size is not None or not (self.own_embed_tokens or self.own_lm_head),
                "vocab_size beside own_embed_tokens or own_lm_head",
                self.vocab_size,
                "say how many tokens the target has",
            ),
            (
                not reduced or (self.own_lm_head and (self.draft_vocab_size or 0) < (self.vocab_size or 0)),
                f"draft_vocab_size below vocab_size = {self.vocab_size}, and own_lm_head",
                self.draft_vocab_size,
                "a reduced vocabulary needs a head of its own",
            ),
            (
                self.num_attention_heads % self.num_key_value_heads == 0,
                "num_attention_heads a multiple of num_key_value_heads",
                (self.num_attention_heads, self.num_key_value_heads),
                "mend one of them",
            ),
            (self.head_dim % 2 == 0, "an even head_dim", self.head_dim, "RoPE turns pairs of channels"),
            (
                len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= set(LAYER_TYPES),
                f"layer_types with {self.num_hidden_layers} entries out of {LAYER_TYPES}",
                self.layer_types,
                "one entry per draft layer",
            ),
            (
                len(self.is_causal) == self.num_hidden_layers,
                f"is_causal with {self.num_hidden_layers} entries",
                self.is_causal,
                "one entry per draft layer",
            ),
            (
                not slides or self.sliding_window is not None,
                "a positive sliding_window where layer_types has sliding_attention",
                self.sliding_window,
                "set sliding_window",
            ),
            (
                len(self.target_layer_ids) > 0 and min(self.target_layer_ids, default=-1) >= -1,
                "at least one target_layer_id, all >= -1",
                self.target_layer_ids,
                "ids are 0-based layers whose output is tapped, and -1 the embeddings",
            ),
            (
                self.num_target_layers is None or max(self.target_layer_ids, default=0) < self.num_target_layers,
                f"target_layer_ids below num_target_layers = {self.num_target_layers}",
                self.target_layer_ids,
                "mend one of them",
            ),
            *self._dflash2_checks(),
        ]
        for good, expected, got, action in checks:
            if not good:
                raise ValueError(f"expected {expected}, got {shown(got)}; {action}")

    def _dflash2_checks(self) -> list[tuple[bool, str, object, str]]:
        """The checks of what DFlash 2 adds, in the form of those of `_check`."""
        conv, selector = (
            (self.conv_kernel_size, self.conv_group_size),
            (self.selector_rank, self.selector_top_k),
        )
        together = "they only mean something together"
        checks: list[tuple[bool, str, object, str]] = [
            ((conv[0] is None) == (conv[1] is None), "conv_kernel_size and conv_group_size", conv, together),
            ((selector[0] is None) == (selector[1] is None), "selector_rank and selector_top_k", selector, together),
            (
                self.hidden_size % (self.conv_group_size or 1) == 0,
                f"conv_group_size that divides hidden_size = {self.hidden_size}",
                self.conv_group_size,
                "every group has as many channels",
            ),
            (
                self.selector_top_k is None or self.vocab_size is not None,
                "vocab_size beside selector_top_k",
                self.vocab_size,
                "the selector has a row per token",
            ),
            (
                self.selector_top_k is None or self.selector_top_k <= (self.vocab_size or 0),
                f"selector_top_k up to {self.vocab_size}",
                self.selector_top_k,
                "candidates are tokens of the vocabulary",
            ),
        ]
        return checks

    @property
    def is_dflash2(self) -> bool:
        """Whether the draft has what DFlash 2 adds: a convolution, a selector, or both."""
        return self.conv_kernel_size is not None or self.selector_rank is not None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Builds the config from its own `config.json`; other layouts go through `DFlashDraftModel.from_pretrained`.

        Raises:
            ValueError: If the dictionary belongs to another model type: its keys would be taken for ours.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"expected model_type {cls.model_type!r}, got {shown(model_type)}; read the config of a draft in "
                "another layout as DFlashDraftModel.from_pretrained(path).config"
            )
        return super().from_dict(config_dict, **kwargs)

    def attention_kind(self, layer_idx: int) -> tuple[int | None, bool, bool]:
        """Returns `(window, causal, from_anchor)` of one layer: what [`positions.visible`] needs to know about it."""
        assert self.layer_types is not None
        assert isinstance(self.is_causal, list)
        slides = self.layer_types[layer_idx] == "sliding_attention"
        return self.sliding_window if slides else None, self.is_causal[layer_idx], self.window_from_anchor and slides

    def num_proposals(self, block_size: int) -> int:
        """Returns how many tokens a block of `block_size` slots proposes; one more can be verified at once."""
        return block_size if self.sample_from_anchor else block_size - 1


__all__ = ["DFlashConfig"]
