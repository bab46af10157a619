"""What a user may set about decoding with a draft: `draft.generation_config`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from transformers import GenerationConfig

from dflash_hf.errors import is_a, require, shown

Engine = Literal["auto", "eager", "cuda_graph"]
Proposal = Literal["auto", "argmax", "shared_noise", "sample"]


class DFlashGenerationConfig(GenerationConfig):
    r"""
    Options of the draft, carried the way Transformers carries an assistant's: on `draft.generation_config`.

    Args:
        block_size (`int`, *optional*): Tokens per block, the anchor included; at most the checkpoint's, which is the
            default. Smaller blocks draft fewer tokens.
        verify_width (`int` or `"auto"`, *optional*): How many tokens of the block the target checks in one forward,
            the anchor included; at most `block_size` (one more for a draft that samples from the anchor). Exact at any
            width. `"auto"` chooses anew before each step, by what was accepted so far and by what steps of each width
            take.
        engine (`str`, defaults to `"auto"`): `"eager"` launches every operation of a step from the host, over exactly
            as many keys as there are. `"cuda_graph"` captures the step over fixed buffers once per shape and replays
            it; what cannot be captured runs eagerly, with the reason in the log. `"auto"` is `"cuda_graph"` on CUDA
            and `"eager"` elsewhere. Buffers and graphs are kept for the next call; [`~dflash_hf.free_buffers`] frees
            them.
        proposal (`str`, defaults to `"auto"`): How tokens are proposed when sampling. `"shared_noise"` adds to the
            draft's scores the very noise the target will sample with, `"argmax"` proposes the draft's most likely
            token, `"sample"` draws from the draft and accepts by rejection. All three are exact; `"auto"` is
            `"argmax"`, measured better than `"shared_noise"` on the same texts of the bundled pair (docs/log.md). With
            a DFlash 2 draft each rule chooses among the selector's candidates, behind the tokens proposed so far.
        compile_layers (`bool`, defaults to `False`): Fuse the pointwise parts of the target's layers (norms, RoPE,
            activations, residuals) with `torch.compile` during a verify, under the engine `"cuda_graph"`, but for
            layers whose attention the package's kernels compute. The first call of a shape compiles, which takes a
            while; nothing of the model stays changed, and what cannot be compiled runs as it is, with the reason in
            the log. Not measured on a GPU yet.
        synchronize (`bool`, defaults to `False`): Wait for the accelerator before each reading of the clock, so that
            the times in [`SpeculativeStats`] are each part's own. It slows decoding; a CPU has nothing to wait for.
        kwargs: Fields of [`~transformers.GenerationConfig`].

    Raises:
        ValueError: If an option has a value it does not know.
    """

    def __init__(self, /, **kwargs: Any) -> None:
        self.block_size: int | None = kwargs.pop("block_size", None)
        self.verify_width: int | Literal["auto"] | None = kwargs.pop("verify_width", None)
        self.engine: Engine = kwargs.pop("engine", "auto")
        self.proposal: Proposal = kwargs.pop("proposal", "auto")
        self.compile_layers: bool = kwargs.pop("compile_layers", False)
        self.synchronize: bool = kwargs.pop("synchronize", False)
        super().__init__(**kwargs)
        self.validate_options()

    def validate_options(self, max_block_size: int | None = None, sample_from_anchor: bool = False) -> None:
        """Checks the options, also against a checkpoint's block size.

        Args:
            max_block_size (`int`, *optional*): The block size the draft was trained with.
            sample_from_anchor (`bool`): Whether the draft proposes as many tokens as its block has slots.

        Raises:
            ValueError: On the first option that cannot be honoured.
        """
        for name, allowed in (("engine", get_args(Engine)), ("proposal", get_args(Proposal))):
            require(getattr(self, name) in allowed, f"{name} in {allowed}", getattr(self, name), "leave it at 'auto'")
        for name in ("compile_layers", "synchronize"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"True or False as {name}", value, "leave it out")
        size, width = self.block_size, self.verify_width
        count = "a number of tokens, at least 1,"
        require(size is None or (is_a(size, int) and size >= 1), f"{count} as block_size", size, "leave it out")
        if max_block_size is not None:
            further = "leave it out: a draft cannot propose further than it was trained to"
            fits = size is None or size <= max_block_size
            require(fits, f"block_size at most {max_block_size} (the draft's)", size, further)
        if width is None or width == "auto":
            return
        require(is_a(width, int) and width >= 1, f"{count} or 'auto' as verify_width", width, "leave it out")
        block_size = max_block_size if size is None else size
        if block_size is not None:
            # What the draft can do is known only with its checkpoint; without it, a width of one more is let through.
            widest = block_size + (sample_from_anchor or max_block_size is None)
            what = f"verify_width between 1 and {widest} (block size {shown(block_size)})"
            require(width <= widest, what, width, "leave it out: the target can only check tokens that were proposed")
