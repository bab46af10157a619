"""This module names the namespace of the operations.

The Kernel Hub's builder replaces this module by one of its own.
"""


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the qualified name of an operation. For example, `"argmax"` becomes `"dflash_kernels::argmax"`."""
    return f"dflash_kernels::{op_name}"


__all__ = ["add_op_namespace_prefix"]
