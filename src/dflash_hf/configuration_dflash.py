"""The one schema of a DFlash draft: `checkpoints` turns every layout into it, and nothing else parses configs."""

# No `from __future__ import annotations` here: @strict skips fields whose annotation is a string.
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from dflash_hf.positions import build_target_layer_ids

ROPE_TYPES = ("default", "linear", "yarn", "llama3")
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
        vocab_size (`int`, *optional*): Vocabulary of the target (the draft uses the target's embedding and head);
            `None` means not stated.
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
        is_causal (`bool` or `list[bool]`, *optional*): Whether attention inside the block is causal, per layer.
            `None` means causal in sliding layers and bidirectional in full ones (z-lab's rule).
        block_size (`int`): Block length, the anchor included: `block_size - 1` tokens are proposed.
        mask_token_id (`int`): Token whose embedding fills the block after the anchor.
        num_target_layers (`int`, *optional*): Depth of the target the draft was trained for; `None` means not stated.
        target_layer_ids (`list[int]`, *optional*): 0-based target layers whose outputs are tapped.
        raw_input_embeddings (`bool`): Look rows up in the embedding weight instead of calling the target's embedding
            module, which for some targets scales or normalises (Muse needs the raw rows, Gemma the scaled ones).
        input_embedding_scale (`float`): Factor on the block's embeddings.
        output_multiplier (`float`): Factor on the draft's logits.
        final_logit_softcapping (`float`, *optional*): Soft cap on the draft's logits.
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
    hidden_size: int = 4096
    target_hidden_size: int | None = None
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | list[bool] | None = None
    block_size: int = 16
    mask_token_id: int = 151669
    num_target_layers: int | None = 36
    target_layer_ids: list[int] | None = None
    raw_input_embeddings: bool = False
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if "sliding_attention" not in self.layer_types:
            self.sliding_window = None
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
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        """Raises the first contradiction found among the fields, as one sentence."""
        assert self.layer_types is not None  # filled in above, as the next two
        assert self.target_layer_ids is not None
        assert isinstance(self.is_causal, list)
        rope = self.rope_parameters or {}
        checks: list[tuple[bool, str, object, str]] = [
            (self.block_size >= 2, "block_size >= 2", self.block_size, "a block holds the anchor and one proposal"),
            (
                self.mask_token_id >= 0 and (self.vocab_size is None or self.mask_token_id < self.vocab_size),
                f"mask_token_id in [0, {self.vocab_size})",
                self.mask_token_id,
                "it must index the target's embedding",
            ),
            (
                self.num_attention_heads % max(self.num_key_value_heads, 1) == 0 and self.num_key_value_heads > 0,
                "num_attention_heads a multiple of num_key_value_heads",
                (self.num_attention_heads, self.num_key_value_heads),
                "mend one of them",
            ),
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
                "sliding_attention" not in self.layer_types or (self.sliding_window or 0) > 0,
                "a positive sliding_window where layer_types has sliding_attention",
                self.sliding_window,
                "set sliding_window",
            ),
            (
                len(self.target_layer_ids) > 0 and min(self.target_layer_ids, default=-1) >= 0,
                "at least one target_layer_id, all >= 0",
                self.target_layer_ids,
                "ids are 0-based layers whose output is tapped",
            ),
            (
                self.num_target_layers is None or max(self.target_layer_ids, default=0) < self.num_target_layers,
                f"target_layer_ids below num_target_layers = {self.num_target_layers}",
                self.target_layer_ids,
                "mend one of them",
            ),
            (
                rope.get("rope_type", "default") in ROPE_TYPES,
                f"rope_type in {ROPE_TYPES}",
                rope.get("rope_type"),
                "a draft's RoPE may not depend on the length of the call",
            ),
        ]
        for good, expected, got, action in checks:
            if not good:
                raise ValueError(f"expected {expected}, got {got!r}; {action}")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Builds the config from its own `config.json`; other layouts go through `DFlashDraftModel.from_pretrained`.

        Raises:
            ValueError: If the dictionary belongs to another model type: its keys would be taken for ours.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"expected model_type {cls.model_type!r}, got {model_type!r}; read the config of a draft in another "
                "layout as DFlashDraftModel.from_pretrained(path).config"
            )
        return super().from_dict(config_dict, **kwargs)

    def attention_kind(self, layer_idx: int) -> tuple[int | None, bool]:
        """Returns `(window, causal)` of one layer: what [`positions.visible`] needs to know about it."""
        assert self.layer_types is not None
        assert isinstance(self.is_causal, list)
        window = self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None
        return window, self.is_causal[layer_idx]


__all__ = ["DFlashConfig"]
