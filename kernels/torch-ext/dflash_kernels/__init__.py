"""This package holds Triton kernels for the DFlash decode step, each beside the plain torch
function that defines it.

This package is level 0 of the project. It imports torch and Triton, but neither Transformers nor `dflash_hf`. An
operation is a folder `<op>/` with its definition in `__init__.py` and the Triton kernel in `kernel.py`. `operation.py`
combines the two into one operation of `torch.library`. It runs the kernel on CUDA, or in Triton's interpreter, and the
definition elsewhere. Triton is imported when the first kernel is launched.

Shapes: `B` rows, `W` tokens of a block, `H`/`G` query/key heads, `E` head size, `R` slots of a row's ring, `L` layers.
"""

from .accept_and_prepare import accept_and_prepare
from .add_norm import add_norm
from .argmax import argmax
from .block_attention import block_attention
from .build_tree import build_tree
from .context_kv import context_kv
from .follow_tree import follow_tree
from .gated_linear import gated_linear
from .gumbel_argmax import gumbel_argmax
from .keep_path import keep_path
from .linears import linears
from .norm_rope_write import norm_rope_write
from .rms_norm import rms_norm
from .rope_angles import rope_angles
from .silu_mul import silu_mul
from .top_tokens import top_tokens

__all__ = [
    "accept_and_prepare",
    "add_norm",
    "argmax",
    "block_attention",
    "build_tree",
    "context_kv",
    "follow_tree",
    "gated_linear",
    "gumbel_argmax",
    "keep_path",
    "linears",
    "norm_rope_write",
    "rms_norm",
    "rope_angles",
    "silu_mul",
    "top_tokens",
]
