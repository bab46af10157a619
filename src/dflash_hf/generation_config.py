"""This module defines the options of decoding with a draft: `draft.generation_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from transformers import GenerationConfig

from dflash_hf.block.tree import MAX_MATCHING
from dflash_hf.errors import is_a, one_line, require, shown
from dflash_hf.ops import MAX_NODES

Engine = Literal["auto", "eager", "cuda_graph"]
Proposal = Literal["auto", "argmax", "shared_noise", "sample"]

# Transformers' class checks only a few of its fields and stores any value in the others. For example, it accepts "hot"
# as a temperature. A file of a checkpoint may contain anything, so the types of the fields are listed here. Fields
# that are not listed may have any value that Transformers' class accepts.
_NAMES: dict[tuple[type, ...], tuple[str, ...]] = {
    (int,): (
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "num_beams",
        "max_cache_len",
        "top_k",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "num_return_sequences",
        "num_beam_groups",
        "num_assistant_tokens",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "prefill_chunk_size",
        "pad_token_id",
        "bos_token_id",
    ),
    (int, float): (
        "max_time",
        "temperature",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "length_penalty",
        "guidance_scale",
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "penalty_alpha",
        "diversity_penalty",
    ),
    (bool,): (
        "do_sample",
        "use_mtp",
        "use_cache",
        "renormalize_logits",
        "remove_invalid_values",
        "token_healing",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "is_assistant",
        "return_dict_in_generate",
        "disable_compile",
        "low_memory",
        "_from_model_config",
    ),
    (str,): (
        "cache_implementation",
        "num_assistant_tokens_schedule",
        "speculation_type",
        "transformers_version",
        "_commit_hash",
    ),
    (bool, str): ("early_stopping",),
    (str, list, tuple): ("stop_strings", "dola_layers"),
    (int, list, tuple): (
        "eos_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
    ),
    (list, tuple): (
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words_ids",
        "force_words_ids",
        "constraints",
        "exponential_decay_length_penalty",
    ),
    (dict, list, tuple): ("sequence_bias",),
    (dict,): ("cache_config",),
}
TYPES = {name: kinds for kinds, names in _NAMES.items() for name in names}
_COUNT = "a number of tokens, at least 1,"


def _is_number(value: Any, least: int, most: float = math.inf) -> bool:
    """Returns True for a whole number within bounds. `True` does not count as a number."""
    return is_a(value, int) and least <= value <= most


def _number(rows: Any) -> Any:
    """Returns a key of a table. If the key is the text of a number, this number is returned."""
    return int(rows) if isinstance(rows, str) and rows.isdecimal() else rows


def over_stored(stored: DFlashGenerationConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a user has given, and `None` for stored options that contradict them.

    Args:
        stored (`DFlashGenerationConfig`): The options that are stored with the draft.
        given (mapping): The given values by name. It has no entry for an option that was left out.
    """
    replaced: dict[str, Any] = {}
    width = given.get("verify_width")
    has_tree = bool(given.get("num_tree_nodes"))
    if width is not None or has_tree:
        replaced["num_assistant_tokens"] = None
    if width not in (None, "auto") and stored.num_tree_nodes:
        replaced["num_tree_nodes"] = None
    if has_tree and stored.verify_width != "auto":
        replaced["verify_width"] = None
    return {**replaced, **given}


class DFlashGenerationConfig(GenerationConfig):
    r"""
    These are the options of the draft. They are fields of `draft.generation_config`, as an assistant's options are in
    Transformers.

    Args:
        block_size (`int`, *optional*): Tokens per block, the anchor included. The checkpoint's block size is the
            default and the maximum. Smaller blocks draft fewer tokens.
        verify_width (`int`, `"auto"` or `dict[int, int]`, *optional*): Number of tokens that the target checks in one
            forward, the anchor included. The maximum is `block_size` (one more for a draft that samples from the
            anchor). 1 is plain decoding. The text is exact at any width. `"auto"` chooses the width before each step,
            from the tokens accepted so far and from the times of steps of each width. While the draft does not pay,
            the run decodes without it. A table gives the width by the number of rows of the call: `{8: 16, 32: 8}`
            means 16 tokens for up to 8 rows, and 8 tokens for more rows. With a number, each verify is a chain, and
            the run drafts even if the draft does not pay.
            Default: the width follows the costs that [`~dflash_hf.tune`] has measured. Without these, it follows
            modelled costs on a CPU. On a GPU, it is then as with `"auto"` in float32, and the whole block in half
            precision. It is the whole block under `"sample"` and in [`~dflash_hf.iterate`]. Captured steps have a
            table of their own (docs/widths.md), because for a whole block of many rows a GPU takes longer to compute
            than to read.
        num_tree_nodes (`int` or `"auto"`, *optional*): Number of nodes of the tree that is verified, the anchor
            included, at most 256. The tree has the draft's most likely paths. It branches at positions at which the
            draft is unsure. It also has the tokens that followed the last few tokens earlier in the text. 0 means a
            chain, which has only the draft's first choices. The text is exact under `"argmax"` and `"shared_noise"`.
            `"sample"` verifies chains and refuses a tree. If `verify_width` is left out or `"auto"`, it chooses how
            many of the nodes are verified. `"auto"` allows up to four times as many nodes as a chain has tokens, in
            half precision and in captured steps too.
            Default: a tree with as many tokens as a chain would have. If `verify_width` is a table, the table gives
            this number. A chain is verified instead if the target has recurrent layers, if `verify_width` is a number,
            in [`~dflash_hf.iterate`], and under `"sample"`. If the width follows the run, an eager step may also
            verify the chain, while the chain pays more.
        max_matching_ngram_size (`int`, *optional*): Number of the last tokens that are searched for earlier in the
            text, for trees. 4 is the default and the maximum. 0 turns the search off.
        num_assistant_tokens (`int`, *optional*): Transformers' name for the number of tokens that an assistant
            proposes. `n` means a `verify_width` of `n + 1`, which counts the target's own token too.
        engine (`str`, defaults to `"auto"`): `"eager"` launches every operation of a step from the host. For each row,
            it reads as many keys as the longest row has. `"cuda_graph"` captures the step over fixed buffers once per
            shape and replays it. A step that cannot be captured runs eagerly, and the log has the reason. `"auto"` is
            `"cuda_graph"` on CUDA and `"eager"` elsewhere. Buffers and graphs are kept for the next call.
            [`~dflash_hf.free_buffers`] frees them.
        proposal (`str`, defaults to `"auto"`): How tokens are proposed in sampling. `"shared_noise"` adds to the
            draft's scores the same noise with which the target will sample. `"argmax"` proposes the draft's most
            likely token. `"sample"` draws from the draft and accepts by rejection. All three are exact. `"auto"` is
            `"argmax"`, which was measured to be better than `"shared_noise"` on the same texts of the bundled pair
            (docs/log-archive.md). With a DFlash 2 draft, each rule chooses among the selector's candidates, given the
            tokens proposed so far. With a DSpark draft, it chooses among all tokens, given the token proposed before.
        draft_dtype (`str`, *optional*): `"float8_e4m3fn"` computes blocks with a copy of the draft's linear layers and
            of the head in FP8, on CUDA devices of compute capability 8.9 or more. The text stays the target's, and
            slightly fewer proposals may be accepted. By default the weights are used as they are. Not timed on a GPU
            yet.
        draft_window (`int`, *optional*): Number of the newest tokens of a text that the draft sees, in layers that
            have a wider window or none. With such a window, a draft with full attention that was trained on short
            texts is right more often on long texts (docs/log-archive.md), and its cache is smaller. The text stays the
            target's.
            Default: each layer sees the same tokens as in training.
        synchronize (`bool`, defaults to `False`): Whether to wait for the accelerator before each reading of the
            clock. The times in [`SpeculativeStats`] are then exact for each part, and decoding is slower. On a CPU
            this changes nothing.
        kwargs: Fields of [`~transformers.GenerationConfig`].

    Raises:
        ValueError: If an option has an unknown value, if a field has a value of another type, or if a field cannot
            have this name.
    """

    def __init__(self, /, **kwargs: Any) -> None:
        self.block_size: int | None = kwargs.pop("block_size", None)
        self.verify_width: int | Literal["auto"] | dict[int, int] | None = kwargs.pop(
            "verify_width", None
        )
        if isinstance(self.verify_width, dict):
            # In JSON all keys are text.
            self.verify_width = {_number(rows): width for rows, width in self.verify_width.items()}
        self.num_tree_nodes: int | Literal["auto"] | None = kwargs.pop("num_tree_nodes", None)
        self.engine: Engine = kwargs.pop("engine", "auto")
        self.proposal: Proposal = kwargs.pop("proposal", "auto")
        self.draft_dtype: Literal["float8_e4m3fn"] | None = kwargs.pop("draft_dtype", None)
        self.draft_window: int | None = kwargs.pop("draft_window", None)
        self.synchronize: bool = kwargs.pop("synchronize", False)
        # Transformers sets an attribute for each name that it does not know. Such an attribute could replace a method.
        for name, value in kwargs.items():
            kinds = TYPES.get(name)
            is_public = not name.startswith("_") or kinds is not None
            is_free = name.isidentifier() and is_public and not hasattr(type(self), name)
            require(is_free, "names of settings of generation", name, "leave it out")
            if kinds is not None and value is not None:
                expected = " or ".join(kind.__name__ for kind in kinds)
                require(is_a(value, *kinds), f"{name} of type {expected}", value, "leave it out")
        try:
            super().__init__(**kwargs)
        # These are the errors that Transformers' checks of such values can raise.
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise ValueError(
                f"expected fields that GenerationConfig takes, got some that it does not ({one_line(error)}); leave "
                "them out"
            ) from error
        self.validate_options()

    @property
    def asked_width(self) -> int | Literal["auto"] | dict[int, int] | None:
        """The requested number of tokens per verify: `verify_width`, or `num_assistant_tokens` plus the target's own
        token.
        """
        proposed: Any = self.num_assistant_tokens
        if self.verify_width is None and proposed is not None:
            return proposed + 1
        return self.verify_width

    def validate_options(
        self, max_block_size: int | None = None, sample_from_anchor: bool = False
    ) -> None:
        """Checks the options, and also compares them with a checkpoint's block size if it is given.

        Args:
            max_block_size (`int`, *optional*): The block size with which the draft was trained.
            sample_from_anchor (`bool`): Whether the draft proposes as many tokens as its block has slots.

        Raises:
            ValueError: On the first option that cannot be honoured.
        """
        for name, allowed in (("engine", get_args(Engine)), ("proposal", get_args(Proposal))):
            require(
                getattr(self, name) in allowed,
                f"{name} in {allowed}",
                getattr(self, name),
                "leave it at 'auto'",
            )
        require(
            is_a(self.synchronize, bool),
            "True or False as synchronize",
            self.synchronize,
            "leave it out",
        )
        dtype = self.draft_dtype
        is_known = dtype in (None, "float8_e4m3fn")
        require(is_known, "draft_dtype left out or 'float8_e4m3fn'", dtype, "leave it out")
        window = self.draft_window
        is_known = window is None or _is_number(window, 1)
        require(is_known, f"{_COUNT} as draft_window", window, "leave it out")
        size = self.block_size
        is_known = size is None or _is_number(size, 1)
        require(is_known, f"{_COUNT} as block_size", size, "leave it out")
        if size and max_block_size:
            further = "leave it out: a draft cannot propose further than it was trained to"
            require(
                size <= max_block_size,
                f"block_size at most {max_block_size} (the draft's)",
                size,
                further,
            )
        nodes = self.num_tree_nodes
        is_chain = _is_number(nodes, 0, 0)
        # With one node, the tree would be only the anchor, and nothing would be proposed.
        is_known = nodes in (None, "auto") or is_chain or _is_number(nodes, 2, MAX_NODES)
        require(
            is_known,
            f"num_tree_nodes between 2 and {MAX_NODES}, 0 for a chain, or 'auto'",
            nodes,
            "leave it out",
        )
        longest = self.max_matching_ngram_size
        is_known = longest is None or _is_number(longest, 0, MAX_MATCHING)
        require(
            is_known,
            f"max_matching_ngram_size between 0 and {MAX_MATCHING}",
            longest,
            "leave it out",
        )
        proposed: Any = self.num_assistant_tokens
        is_known = proposed is None or _is_number(proposed, 0)
        require(is_known, "num_assistant_tokens of at least 0", proposed, "leave it out")
        is_one = proposed is None or self.verify_width is None
        both = "verify_width or num_assistant_tokens, which is the same without the target's token"
        require(is_one, both, "both", "leave one of them out")
        width = self.asked_width
        if width in (None, "auto"):
            return
        # With a tree, the run itself chooses how many of the nodes are verified.
        beside = (
            "verify_width left out or 'auto', and no num_assistant_tokens, beside num_tree_nodes"
        )
        require(not nodes, beside, width, "leave one of them out")
        # The limit of a draft is known only with its checkpoint. Without a checkpoint, one more token is allowed.
        has_one_more = sample_from_anchor or not max_block_size
        self._validate_widths(size or max_block_size, has_one_more)

    def _validate_widths(self, block_size: int | None, has_one_more: bool) -> None:
        """Checks the number or table of `asked_width` against a block size, if the block size is known."""
        width: Any = self.asked_width
        table: dict[Any, Any] = width if isinstance(width, dict) else {1: width}
        what = "a table of verify_width by rows, {rows: tokens}, of whole numbers from 1"
        is_table = bool(table) and all(_is_number(rows, 1) for rows in table)
        require(is_table, what, width, "leave it out")
        for one in table.values():
            require(_is_number(one, 1), f"{_COUNT} or 'auto' as verify_width", one, "leave it out")
            if block_size:
                widest = block_size + has_one_more
                what = f"verify_width between 1 and {widest} (block size {shown(block_size)})"
                require(
                    one <= widest,
                    what,
                    one,
                    "leave it out: the target can only check tokens that were proposed",
                )
