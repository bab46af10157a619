"""The namespace that the operations are registered in; the Kernel Hub's builder puts one of its own in this place."""


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the qualified name of an operation: `"argmax"` is `"dflash_kernels::argmax"`."""
    return f"dflash_kernels::{op_name}"


__all__ = ["add_op_namespace_prefix"]
