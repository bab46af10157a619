"""Triton kernels for the DFlash decode step, each beside the plain torch function that defines it.

Level 0 of the project: this package knows torch and Triton, and neither Transformers nor `dflash_hf`. An operation is
a folder `<op>/` with `reference.py` (the definition), `kernel.py` (Triton) and a public function in `__init__.py` that
picks one of the two. There is no operation yet; `dflash_hf.ops`, the only module that may import this package, uses
torch.
"""

__all__: list[str] = []
