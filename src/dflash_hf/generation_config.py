"""What a user may set about decoding with a draft: `draft.generation_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from transformers import GenerationConfig

from dflash_hf.errors import one_line, shown

Engine = Literal["auto", "eager", "static", "cuda_graph"]
Proposal = Literal["auto", "argmax", "shared_noise", "sample"]

_COUNT, _NUMBER, _SWITCH, _NAME, _LIST = (int,), (int, float), (bool,), (str,), (list, tuple)
# Transformers' class says nothing of types, compares and stores. Fields that are not here may be what it accepts.
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "max_cache_len", "top_k"),
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "num_beam_groups"),
            *("num_assistant_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
            *("assistant_lookbehind", "target_lookbehind", "prefill_chunk_size", "pad_token_id", "bos_token_id"),
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            *("max_time", "temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
            *("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "guidance_scale"),
            *("assistant_confidence_threshold", "assistant_ensemble_weight", "penalty_alpha", "diversity_penalty"),
        ),
        _NUMBER,
    ),
    **dict.fromkeys(
        (
            *("do_sample", "use_mtp", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing"),
            *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "is_assistant"),
            *("return_dict_in_generate", "disable_compile", "low_memory"),
        ),
        _SWITCH,
    ),
    **dict.fromkeys(("cache_implementation", "num_assistant_tokens_schedule", "speculation_type"), _NAME),
    **dict.fromkeys(("transformers_version", "_commit_hash"), _NAME),
    "_from_model_config": _SWITCH,
    "early_stopping": (bool, str),
    **dict.fromkeys(("stop_strings", "dola_layers"), (str, *_LIST)),
    **dict.fromkeys(("eos_token_id", "decoder_start_token_id"), (int, *_LIST)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), (int, *_LIST)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"), _LIST),
    **dict.fromkeys(("constraints", "exponential_decay_length_penalty"), _LIST),
    "sequence_bias": (dict, *_LIST),
    "cache_config": (dict,),
}


class DFlashGenerationConfig(GenerationConfig):
    r"""
    Knobs of the draft, carried the way Transformers carries an assistant's: on `draft.generation_config`.

    Args:
        block_size (`int`, *optional*): Tokens per block, the anchor included; at most the checkpoint's, which is the
            default. Smaller blocks draft fewer tokens.
        verify_width (`int` or `"auto"`, *optional*): How many tokens of the block the target checks in one forward,
            the anchor included; at most `block_size` (one more for a draft that samples from the anchor), which is the
            default. Exact at any width. `"auto"` chooses anew before each step, by what was accepted so far and by
            what steps of each width take: for batches so large that a wide verify costs more than it brings.
        engine (`str`, defaults to `"auto"`): `"eager"` launches every operation of a step from the host, over exactly
            as many keys as there are. `"cuda_graph"` captures the step over fixed buffers once per shape and replays
            it; what cannot be captured runs eagerly, with the reason in the log. `"auto"` is `"cuda_graph"` on CUDA
            and `"eager"` elsewhere. `"static"` is the step of `"cuda_graph"` uncaptured, on any device: for tests and
            for finding out what a graph does. Buffers and graphs are kept for the next call;
            [`~dflash_hf.free_buffers`] frees them.
        proposal (`str`, defaults to `"auto"`): How tokens are proposed when sampling. `"shared_noise"` adds to the
            draft's scores the very noise the target will sample with, `"argmax"` proposes the draft's most likely
            token, `"sample"` draws from the draft and accepts by rejection. All three are exact; `"auto"` is
            `"argmax"`, measured better than `"shared_noise"` on the same texts of the bundled pair (docs/log.md). With
            a DFlash 2 draft each rule chooses among the selector's candidates, behind the tokens proposed so far.
        compile_layers (`bool`, defaults to `False`): Fuse the pointwise parts of the target's layers (norms, RoPE,
            activations, residuals) with `torch.compile` during a verify, under the engines `"cuda_graph"` and
            `"static"`. The first call of a shape compiles, which takes a while; nothing of the model stays changed,
            and what cannot be compiled runs as it is, with the reason in the log. Not measured on a GPU yet.
        synchronize (`bool`, defaults to `False`): Wait for the accelerator before each reading of the clock, so that
            the times in [`SpeculativeStats`] are each part's own. It slows decoding; a CPU has nothing to wait for.
        kwargs: Fields of [`~transformers.GenerationConfig`].

    Raises:
        ValueError: If a knob has a value it does not know, a field a value of another type, or a name is none that a
            field can have.
    """

    def __init__(self, /, **kwargs: Any) -> None:
        self.block_size: int | None = kwargs.pop("block_size", None)
        self.verify_width: int | Literal["auto"] | None = kwargs.pop("verify_width", None)
        self.engine: Engine = kwargs.pop("engine", "auto")
        self.proposal: Proposal = kwargs.pop("proposal", "auto")
        self.compile_layers: bool = kwargs.pop("compile_layers", False)
        self.synchronize: bool = kwargs.pop("synchronize", False)
        self._check_fields(kwargs)
        try:
            super().__init__(**kwargs)
        except (TypeError, AttributeError, KeyError, ValueError) as error:  # whatever comparing such values leads to
            raise ValueError(
                f"expected fields that GenerationConfig takes, got some that it does not ({one_line(error)}); leave "
                "them out"
            ) from error
        self.validate_knobs()

    @classmethod
    def _check_fields(cls, fields: Mapping[str, Any]) -> None:
        """Raises unless every name can be that of a field, and every value is of its field's type.

        Transformers sets an attribute of each name that it does not know: one of a method would take its place.
        """
        for name, value in fields.items():
            is_private = name.startswith("_") and name not in TYPES
            if not name.isidentifier() or is_private or hasattr(cls, name):
                raise ValueError(
                    f"expected names of settings of generation, got {shown(name)}, which is none; leave it out"
                )
            kinds = TYPES.get(name)
            if kinds is None or value is None:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"expected {name} of type {expected}, got {shown(value)}; leave it out")

    def validate_knobs(self, max_block_size: int | None = None, sample_from_anchor: bool = False) -> None:
        """Checks the knobs, also against a checkpoint's block size.

        Args:
            max_block_size (`int`, *optional*): The block size the draft was trained with.
            sample_from_anchor (`bool`): Whether the draft proposes as many tokens as its block has slots.

        Raises:
            ValueError: On the first knob that cannot be honoured.
        """
        if self.engine not in get_args(Engine):
            raise ValueError(f"expected engine in {get_args(Engine)}, got {shown(self.engine)}; leave it at 'auto'")
        if self.proposal not in get_args(Proposal):
            raise ValueError(
                f"expected proposal in {get_args(Proposal)}, got {shown(self.proposal)}; leave it at 'auto'"
            )
        for name in ("compile_layers", "synchronize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"expected True or False as {name}, got {shown(getattr(self, name))}; leave it out")
        block_size = self.block_size if self.block_size is not None else max_block_size
        if self.block_size is not None:
            if not _is_count(self.block_size):
                raise ValueError(
                    f"expected a number of tokens, at least 1, as block_size, got {shown(self.block_size)}; leave "
                    "it out"
                )
            if max_block_size is not None and self.block_size > max_block_size:
                raise ValueError(
                    f"expected block_size at most {max_block_size} (the draft's), got {shown(self.block_size)}; "
                    "leave it out: a draft cannot propose further than it was trained to"
                )
        if self.verify_width is None or self.verify_width == "auto":
            return
        if not _is_count(self.verify_width):
            raise ValueError(
                f"expected a number of tokens, at least 1, or 'auto' as verify_width, got {shown(self.verify_width)}; "
                "leave it out"
            )
        # What the draft can do is known only with its checkpoint; without it, a width of one more is let through.
        widest = None if block_size is None else block_size + (sample_from_anchor or max_block_size is None)
        if widest is not None and self.verify_width > widest:
            raise ValueError(
                f"expected verify_width between 1 and {widest} (block size {shown(block_size)}), got "
                f"{shown(self.verify_width)}; "
                "leave it out: the target can only check tokens that were proposed"
            )


def _is_count(value: object) -> bool:
    """Whether a value is a number of tokens, at least one; `True` is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


__all__ = ["DFlashGenerationConfig"]
