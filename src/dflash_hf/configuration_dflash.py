"""This module defines the config of a DFlash draft.

The package `checkpoints` converts every format into this config, and no other code parses configs.
"""

# No `from __future__ import annotations` here: @strict skips fields whose annotation is a string.
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Optional, Self, TypeVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.block.positions import build_target_layer_ids
from dflash_hf.errors import is_a, one_line, require

T = TypeVar("T")
# These are the types of fields that `__post_init__` fills in. Type checkers and readers of a config see the filled
# type. At run time @strict checks the value that was given, which may be `None`.
if TYPE_CHECKING:
    Filled = Annotated[T, "None stands for the default"]
    PerLayer = list[bool]
else:
    Filled = Optional
    PerLayer = bool | list[bool] | None
FILLED_IN: Any = None
# The window of a layer, whether the layer is causal, and whether the window counts from the anchor.
AttentionKind = tuple[int | None, bool, bool]

# Maps each kind of RoPE to the numbers that it needs.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Gemma 4's layers may rotate only a part of each head.
GEMMA4_ROPE_TYPES = {**ROPE_TYPES, "proportional": ("partial_rotary_factor",)}
# These limits are far above the sizes of any draft. A greater number means a damaged file, and a model of such a size
# would end in a memory error.
MAX_LAYERS = 1024
MAX_SIZE = 2**20
MAX_VOCABULARY = 2**24
# The target's logits of a block of this size, `[block_size, vocabulary]` in float32, take 0.6 GB with Qwen3's
# vocabulary, and its verify is as slow as a prefill. Published drafts have blocks of 8 to 32 tokens.
MAX_BLOCK_SIZE = 1024
# The selector scores every pair of candidates of neighbouring slots.
MAX_CANDIDATES = 1024
# A tree of a DSpark draft chooses among this number of tokens for each slot. Published blocks have 7 or 8 slots. So a
# tree with as many nodes as a chain lacks none of the likeliest paths.
MARKOV_CANDIDATES = 8
LAYER_TYPES = ("full_attention", "sliding_attention")
LAYER_FAMILIES = ("qwen3", "gemma4", "laguna")


class _AsTheTarget:
    """An instance stands for a value that a draft takes from its target. It equals every other value."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "the target's"


def check_own(values: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a `config.json` of AngelSpec, whose `model_type` is "dflash" too.

    In AngelSpec's file `num_target_layers` is the number of taps. So no value of such a file may be read as a value of
    this package.
    """
    theirs = sorted({"target_num_hidden_layers", "rope_theta", "rope_scaling"} & values.keys())
    what = "a config of this package's under model_type 'dflash'"
    action = (
        "it is another project's layout (AngelSpec's) under the same model_type, and not supported"
    )
    require(not theirs, what, theirs, action)


def _is_below(value: int, limit: int | None) -> bool:
    """Returns True if a value is below a limit, or if the limit is `None`."""
    return limit is None or value < limit


def narrowed(kind: AttentionKind, draft_window: int | None) -> AttentionKind:
    """Returns the kind of a layer after `draft_window` has narrowed its window, if that window is wider.

    If the layer has no window of its own, `draft_window` counts from the anchor. So all slots of a block see the same
    context.
    """
    window, causal, from_anchor = kind
    is_full = window is None
    is_narrowed = draft_window is not None and (is_full or window > draft_window)
    if is_narrowed:
        return draft_window, causal, from_anchor or is_full
    return kind


@strict
class DFlashConfig(PreTrainedConfig):
    r"""
    This is the configuration of a [`DFlashDraftModel`]. The defaults are those of a draft for Qwen3-8B.

    Args:
        vocab_size (`int`, *optional*): Size of the target's vocabulary, and of the draft's own embedding if it has
            one. `None` means that the size is not stated.
        draft_vocab_size (`int`, *optional*): Number of rows of the draft's own head, if this number is lower than
            `vocab_size`. The draft proposes only these tokens. Its buffer `d2t` names them: row `i` is the token
            `i + d2t[i]`. `None` means that the draft can propose all tokens.
        own_embed_tokens, own_lm_head (`bool`): Whether the draft has an embedding and a head of its own. Otherwise it
            uses those of the target. A draft's own embedding is a plain table, whose raw rows fill the block.
        hidden_size (`int`): Width of the draft, equal to the width of the target's embedding.
        target_hidden_size (`int`, *optional*): Width of each tapped state. The default is `hidden_size`.
        intermediate_size (`int`): Width of the MLP.
        num_hidden_layers (`int`): Number of draft layers.
        layer_family (`str`): The model family whose layers the draft has. `"qwen3"` has a norm before each sublayer.
            `"gemma4"` has a norm before and after each sublayer, normed values, attention scores without a scale, and
            a stored factor on each output. `"laguna"` has Qwen3's layers with a gate on each head, a norm for each
            tap, and a norm of the context in each layer.
        keys_are_values (`bool`): Whether the key projection also computes the values, as in Gemma 4's full layers.
        num_attention_heads, num_key_value_heads, head_dim (`int`): Number of query heads, number of key/value heads,
            and size of a head.
        hidden_act (`str`): Activation of the gated MLP.
        rms_norm_eps (`float`): Epsilon of every norm.
        rope_parameters (`dict`, *optional*): The draft's own RoPE. The fields are `rope_theta`, `rope_type` and the
            fields of this type. The type is default, linear, yarn or llama3. Gemma 4's layers may also have the type
            proportional. With a `partial_rotary_factor`, the default type rotates only the first channels of each
            head. Positions are plain indices, also for vision targets.
        max_position_embeddings (`int`): Longest sequence in tokens that the draft was made for.
        attention_bias (`bool`): Whether the four attention projections have a bias.
        attention_dropout (`float`): Dropout on attention weights in training.
        attention_sink_bias (`bool`): Whether each query head has an attention sink, as in gpt-oss. A sink is a learned
            score that takes part in the softmax and has no value.
        attention_value_scale (`float`): Factor on the attention's values of both context and block.
        layer_types (`list[str]`, *optional*): `full_attention` or `sliding_attention` for each layer. By default all
            layers are full.
        sliding_window (`int`, *optional*): Number of positions that a query sees when it looks back, itself included
            (`q - k < sliding_window`). It is set to `None` if no layer has a sliding window.
        window_from_anchor (`bool`): Whether the window of sliding layers counts from the anchor and not from each
            query. Then every slot of a block sees the last `sliding_window` tokens before the anchor, and the window
            hides nothing of the block (speculators' rule).
        is_causal (`bool` or `list[bool]`, *optional*): Whether attention inside the block is causal, one value for all
            layers or one per layer. `None` means causal in sliding layers and bidirectional in full layers (z-lab's
            rule).
        block_size (`int`): Length of a block, including the anchor. The draft proposes `block_size - 1` tokens, or
            `block_size` tokens with `sample_from_anchor`.
        sample_from_anchor (`bool`): Whether each slot predicts the token after its own position, and not the token at
            its own position. With this setting, the anchor's slot proposes a token too.
        mask_token_id (`int`): Token whose embedding fills the slots after the anchor.
        num_target_layers (`int`, *optional*): Number of layers of the target that the draft was trained for. `None`
            means that the number is not stated.
        target_layer_ids (`list[int]`, *optional*): 0-based ids of the target's layers whose outputs are tapped. -1 is
            the input of the first layer, which is the embeddings. The default is derived from `num_target_layers`.
        tap_after_deepstack (`bool`): Whether a tap includes the image features that DeepStack adds after the tapped
            layer. These features change only the states of image tokens. SpecForge trains drafts without them, SGLang
            taps without them, and vLLM taps with them.
        raw_input_embeddings (`bool`): Whether rows are read from the embedding's weight, and the target's embedding
            module is not called. For some targets this module scales or normalises. Muse needs the raw rows, and Gemma
            the scaled rows.
        input_embedding_scale (`float`): Factor on the block's embeddings.
        output_multiplier (`float`): Factor on the draft's logits.
        final_logit_softcapping (`float`, *optional*): Soft cap on the draft's logits.
        conv_kernel_size, conv_group_size (`int`, *optional*): Sizes of DFlash 2's convolution around each sublayer:
            the taps of its kernel, and the number of neighbouring channels that share a dynamic kernel. `None` means
            no convolution.
        selector_rank, selector_top_k (`int`, *optional*): Sizes of DFlash 2's selector of paths: the width of its
            codebooks, and the number of candidates per slot. `None` means no selector.
        markov_rank (`int`, *optional*): Rank of DSpark's Markov head. The head adds a vector to the logits of a slot.
            This vector depends on the token before the slot. `None` means no Markov head.
        initializer_range (`float`): Standard deviation of newly initialised weights.

    Raises:
        ValueError: If fields contradict each other. The message names the field.
    """

    model_type = "dflash"
    default_theta = 1_000_000.0
    keys_to_ignore_at_inference = [CACHE_NAME]  # noqa: RUF012  (Transformers' own form)
    # Pipelines compare these ids with the target's ids, to see whether the two models share a tokenizer. The ids are
    # no fields of the config, so they are never saved.
    bos_token_id = _AsTheTarget()
    eos_token_id = _AsTheTarget()
    pad_token_id = _AsTheTarget()

    vocab_size: int | None = 151936
    draft_vocab_size: int | None = None
    own_embed_tokens: bool = False
    own_lm_head: bool = False
    hidden_size: int = 4096
    target_hidden_size: Filled[int] = FILLED_IN
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    layer_family: str = "qwen3"
    keys_are_values: bool = False
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float | int = 1e-6
    rope_parameters: Filled[dict[str, Any]] = FILLED_IN
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    attention_sink_bias: bool = False
    attention_value_scale: float | int = 1.0
    layer_types: Filled[list[str]] = FILLED_IN
    sliding_window: int | None = None
    window_from_anchor: bool = False
    is_causal: PerLayer = FILLED_IN
    block_size: int = 16
    sample_from_anchor: bool = False
    mask_token_id: int = 151669
    num_target_layers: int | None = 36
    target_layer_ids: Filled[list[int]] = FILLED_IN
    tap_after_deepstack: bool = False
    raw_input_embeddings: bool = False
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    markov_rank: int | None = None
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        # Sizes are checked first, because some defaults below are lists whose length is a size.
        self._check_sizes()
        # A draft's own head never shares the weight of its embedding, whatever a file says.
        self.tie_word_embeddings = False
        num_layers = self.num_hidden_layers
        self._fill_in("target_hidden_size", self.hidden_size)
        # A vocabulary of all tokens is not reduced, and needs no offsets.
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        # A draft's own embedding is a plain table.
        self.raw_input_embeddings = self.raw_input_embeddings or self.own_embed_tokens
        self._fill_in("layer_types", ["full_attention"] * num_layers)
        # A window that no layer has would make two equal drafts differ.
        if "sliding_attention" not in self.layer_types:
            self.sliding_window = None
            self.window_from_anchor = False
        # One value applies to all layers. Without a value, layers with a sliding window are causal.
        is_causal: Any = self.is_causal
        if isinstance(is_causal, bool):
            self.is_causal = [is_causal] * num_layers
        self._fill_in("is_causal", [kind == "sliding_attention" for kind in self.layer_types])
        if not self._is_given("target_layer_ids"):
            if self.num_target_layers is None:
                raise ValueError(
                    "expected target_layer_ids or num_target_layers, got neither; say which target layers are tapped"
                )
            self.target_layer_ids = build_target_layer_ids(self.num_target_layers, num_layers)
        # This check comes before Transformers standardises the RoPE, because Transformers computes with any value that
        # it finds.
        self._check_rope()
        super().__post_init__(**kwargs)
        rope = self.rope_parameters
        # A factor of 1 has no effect, and would make two equal drafts differ.
        if rope["rope_type"] != "proportional" and rope.get("partial_rotary_factor") in (None, 1.0):
            self.rope_parameters = {
                name: value for name, value in rope.items() if name != "partial_rotary_factor"
            }
        self._check_agreement()

    def _is_given(self, name: str) -> bool:
        """Returns True if a field was given.

        The field is read as it was given, which may be `None`. Its declared type does not allow `None`.
        """
        return vars(self)[name] is not None

    def _fill_in(self, name: str, default: object) -> None:
        """Sets a field to a default if it was not given."""
        if not self._is_given(name):
            setattr(self, name, default)

    def _check_sizes(self) -> None:
        """Raises `ValueError` unless every size and scale is within its limits, and the activation is known."""
        sizes = (
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "head_dim",
            "num_key_value_heads",
            "conv_kernel_size",
            "conv_group_size",
            "selector_rank",
            "markov_rank",
        )
        limits = {
            **dict.fromkeys(sizes, MAX_SIZE),
            "vocab_size": MAX_VOCABULARY,
            "draft_vocab_size": MAX_VOCABULARY,
            "max_position_embeddings": MAX_VOCABULARY,
            "block_size": MAX_BLOCK_SIZE,
            "selector_top_k": MAX_CANDIDATES,
            "num_hidden_layers": MAX_LAYERS,
            "num_target_layers": MAX_LAYERS,
            # A wide window costs nothing: published configs write a great number for no window. Indices are int64.
            "sliding_window": 2**62,
        }
        # A size that is not stated is not checked.
        stated = [name for name in limits if self._is_given(name)]
        for name in stated:
            limit = limits[name]
            value: int = getattr(self, name)
            require(1 <= value <= limit, f"{name} from 1 to {limit}", value, "fix it")
        for name in (
            "rms_norm_eps",
            "initializer_range",
            "attention_dropout",
            "input_embedding_scale",
        ):
            number: float = getattr(self, name)
            require(0 <= number < math.inf, f"a finite {name} >= 0", number, "fix it")
        for name in ("output_multiplier", "final_logit_softcapping", "attention_value_scale"):
            factor: float | None = getattr(self, name)
            require(math.isfinite(factor or 0.0), f"a finite {name}", factor, "fix it")
        activations = sorted(ACT2FN)
        is_known = self.hidden_act in ACT2FN
        require(is_known, f"hidden_act in {activations}", self.hidden_act, "fix it")

    def _check_rope(self) -> None:
        """Raises `ValueError` unless the type of the RoPE is known and the RoPE has the numbers
        that this type needs.
        """
        # The values are read as they were given. Transformers fills in the rest afterwards.
        rope: dict[str, Any] = vars(self)["rope_parameters"] or {}
        kind = rope.get("rope_type", "default")
        kinds = ROPE_TYPES
        if self.layer_family == "gemma4":
            kinds = GEMMA4_ROPE_TYPES
        known = isinstance(kind, str) and kind in kinds
        length = "a draft's RoPE may not depend on the length of the call"
        require(known, f"rope_type in {tuple(kinds)}", kind, length)
        # The other types rotate whole heads. They would ignore the factor, or compute too few angles because of it.
        part = rope.get("partial_rotary_factor")
        takes_parts = kind == "proportional" or (kind == "default" and self.layer_family == "qwen3")
        is_right = takes_parts or part in (None, 1.0)
        require(is_right, "a RoPE over whole heads", f"partial_rotary_factor {part}", "fix it")
        stated = {
            name
            for name, value in rope.items()
            if value is not None and name not in ("rope_type", "truncate")
        }
        checked = {*kinds[kind], *stated}
        # If rope_theta is left out, it gets Transformers' default. But Transformers would compute with a rope_theta
        # that is null.
        if "rope_theta" in rope:
            checked.add("rope_theta")
        for name in sorted(checked):
            value: Any = rope.get(name)
            # Transformers computes with all of these numbers. Only mscale and mscale_all_dim may be 0.
            smallest = 1e-12
            if name.startswith("mscale"):
                smallest = 0
            is_right = is_a(value, int, float) and smallest <= value < 1e12
            require(is_right, f"a positive number as {one_line(name)} of the RoPE", value, "fix it")
        require((part or 0) <= 1, "partial_rotary_factor up to 1", part, "fix it")

    def _check_agreement(self) -> None:
        """Raises `ValueError` unless the fields of attention, layers, taps, tokens, DFlash 2 and DSpark agree."""
        self._check_layer_family()
        self._check_attention()
        self._check_taps()
        self._check_vocabulary()
        self._check_dflash2()
        self._check_dspark()

    def _check_layer_family(self) -> None:
        """Raises `ValueError` unless the layer family is known, and its layers have all that the config asks for."""
        require(
            self.layer_family in LAYER_FAMILIES,
            f"layer_family in {LAYER_FAMILIES}",
            self.layer_family,
            "fix it",
        )
        has_none = self.layer_family == "qwen3" or self.conv_kernel_size is None
        what = f"no convolution (conv_kernel_size) beside layer_family {self.layer_family!r}"
        require(has_none, what, self.conv_kernel_size, "DFlash 2 has them around Qwen3's layers")
        is_plain = not self.attention_sink_bias and self.attention_value_scale == 1.0
        what = f"no attention_sink_bias or attention_value_scale beside layer_family {self.layer_family!r}"
        got = (self.attention_sink_bias, self.attention_value_scale)
        require(self.layer_family == "qwen3" or is_plain, what, got, "Qwen3's layers have them")
        fits = self.layer_family == "gemma4" or not self.keys_are_values
        what = "keys_are_values beside layer_family 'gemma4'"
        require(fits, what, self.layer_family, "the other layers have both")

    def _check_attention(self) -> None:
        """Raises `ValueError` unless the fields of the block, the heads, the layer types and the causality agree."""
        block = "a block holds the anchor and one proposal"
        # If the anchor's slot proposes a token, a block of one slot is enough.
        proposes = self.num_proposals(self.block_size) >= 1
        require(proposes, "block_size >= 2", self.block_size, block)
        num_heads = self.num_attention_heads
        num_groups = self.num_key_value_heads
        what = "num_attention_heads a multiple of num_key_value_heads"
        require(num_heads % num_groups == 0, what, (num_heads, num_groups), "fix one of them")
        pairs = "RoPE turns pairs of channels"
        require(self.head_dim % 2 == 0, "an even head_dim", self.head_dim, pairs)
        turned = self.rotary_dim
        what = f"a partial_rotary_factor of an even number of channels out of {self.head_dim}"
        require(turned > 0 and turned % 2 == 0, what, turned, pairs)
        kinds = self.layer_types
        is_causal = self.is_causal
        count = self.num_hidden_layers
        per_layer = "one entry per draft layer"
        known = len(kinds) == count and set(kinds) <= set(LAYER_TYPES)
        require(known, f"layer_types with {count} entries out of {LAYER_TYPES}", kinds, per_layer)
        has_all = len(is_causal) == count
        require(has_all, f"is_causal with {count} entries", is_causal, per_layer)
        # Without a window, the kind of a sliding layer would be the same as the kind of a full layer.
        has_window = self.sliding_window is not None or "sliding_attention" not in kinds
        what = "a positive sliding_window where layer_types has sliding_attention"
        require(has_window, what, self.sliding_window, "set sliding_window")

    def _check_taps(self) -> None:
        """Raises `ValueError` unless every tap is a layer of the target or the embeddings."""
        taps = self.target_layer_ids
        depth = self.num_target_layers
        are_layers = "ids are 0-based layers whose output is tapped, and -1 the embeddings"
        # An empty list fails as well, because its default is below every valid id.
        lowest = min(taps, default=-2)
        require(lowest >= -1, "at least one target_layer_id, all >= -1", taps, are_layers)
        what = f"target_layer_ids below num_target_layers = {depth}"
        require(_is_below(max(taps), depth), what, taps, "fix one of them")

    def _check_vocabulary(self) -> None:
        """Raises `ValueError` unless the vocabularies, the mask token and the draft's own embedding and head agree."""
        size = self.vocab_size
        reduced = self.draft_vocab_size
        mask = self.mask_token_id
        # The mask token is looked up in the embedding like any other token. An id beyond the embedding would fail in a
        # kernel.
        in_range = mask >= 0 and _is_below(mask, size)
        indices = "at least 0" if size is None else f"in [0, {size})"
        require(in_range, f"mask_token_id {indices}", mask, "it must index the embedding")
        is_stated = size is not None or not (self.own_embed_tokens or self.own_lm_head)
        what = "vocab_size beside own_embed_tokens or own_lm_head"
        require(is_stated, what, size, "say how many tokens the target has")
        if reduced is None:
            return
        # The target's head has a row for every token, so it would also score the tokens that the draft cannot propose.
        has_head = self.own_lm_head and reduced < (size or 0)
        what = f"draft_vocab_size below vocab_size = {size}, and own_lm_head"
        require(has_head, what, reduced, "a reduced vocabulary needs a head of its own")

    def _check_dflash2(self) -> None:
        """Raises `ValueError` unless the convolution and the selector have all their fields, and these fit the other
        sizes.
        """
        together = "they only mean something together"
        for first, second in (
            ("conv_kernel_size", "conv_group_size"),
            ("selector_rank", "selector_top_k"),
        ):
            pair = (getattr(self, first), getattr(self, second))
            is_complete = self._is_given(first) == self._is_given(second)
            require(is_complete, f"{first} and {second}", pair, together)
        group = self.conv_group_size
        what = f"conv_group_size that divides hidden_size = {self.hidden_size}"
        divides = self.hidden_size % (group or 1) == 0
        require(divides, what, group, "every group has as many channels")
        top_k = self.selector_top_k
        if top_k is None:
            return
        # The codebooks have a row per token, so the size of the vocabulary must be known.
        size = self.vocab_size or 0
        what = "vocab_size beside selector_top_k"
        require(
            size > 0, what, self.vocab_size, "give it, because the selector has a row per token"
        )
        fits = top_k <= size
        what = f"selector_top_k up to {size}"
        require(fits, what, top_k, "candidates are tokens of the vocabulary")

    def _check_dspark(self) -> None:
        """Raises `ValueError` unless a draft with a Markov head states its vocabulary and has no selector."""
        if self.markov_rank is None:
            return
        size = self.vocab_size or 0
        what = "vocab_size beside markov_rank"
        require(size > 0, what, self.vocab_size, "the head has a row per token")
        what = "no selector_rank beside markov_rank"
        two = "a selector and a Markov head would both choose the path; leave one of them out"
        require(self.selector_rank is None, what, self.selector_rank, two)

    @property
    def num_candidates(self) -> int | None:
        """Number of candidates per slot of a tree, if the scores depend on the token before a slot;
        `None` otherwise.
        """
        if self.markov_rank is None:
            return self.selector_top_k
        num_tokens = self.draft_vocab_size or self.vocab_size or 0
        return min(MARKOV_CANDIDATES, num_tokens)

    @property
    def rotary_dim(self) -> int:
        """Number of channels of each head that the RoPE rotates. These are the first channels of the head."""
        rope = self.rope_parameters
        # The other types have an angle for each channel, which may be zero.
        if rope["rope_type"] != "default":
            return self.head_dim
        return int(self.head_dim * (rope.get("partial_rotary_factor") or 1.0))

    @property
    def is_dspark(self) -> bool:
        """True if the draft has the part that DSpark adds: a Markov head."""
        return self._is_given("markov_rank")

    @property
    def is_dflash2(self) -> bool:
        """True if the draft has a part that DFlash 2 adds: a convolution, a selector, or both."""
        return self._is_given("conv_kernel_size") or self._is_given("selector_rank")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Builds the config from a `config.json` of this package.

        `DFlashDraftModel.from_pretrained` reads other formats.

        Raises:
            ValueError: If the dictionary belongs to another model type or another project, whose keys would be read
                wrongly.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        # `PreTrainedConfig.from_dict` accepts the keys of any model, and uses this class's defaults for the rest.
        elsewhere = "read the config of a draft in another format as DFlashDraftModel.from_pretrained(path).config"
        require(
            model_type == cls.model_type, f"model_type {cls.model_type!r}", model_type, elsewhere
        )
        check_own(config_dict)
        return super().from_dict(config_dict, **kwargs)

    def attention_kind(self, layer_idx: int) -> AttentionKind:
        """Returns `(window, causal, from_anchor)` of one layer, as [`positions.visible`] takes them."""
        causal = self.is_causal[layer_idx]
        # Layers of one kind share their masks. So the kind of a full layer must not contain the window of the sliding
        # layers.
        if self.layer_types[layer_idx] == "sliding_attention":
            return self.sliding_window, causal, self.window_from_anchor
        return None, causal, False

    def num_proposals(self, block_size: int) -> int:
        """Returns the number of tokens that a block of `block_size` slots proposes.

        A verify runs over one token more, the anchor.
        """
        # The anchor's slot proposes the token after the anchor.
        if self.sample_from_anchor:
            return block_size
        return block_size - 1
