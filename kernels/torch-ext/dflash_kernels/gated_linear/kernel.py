"""`gated_linear` in Triton: its kernel stands beside that of `linears`, with which it shares its parts."""

from __future__ import annotations

from torch import Tensor

from ..linears.kernel import launch_gated
from ..operation import Given


def launch(given: Given) -> Tensor:
    """Returns the gated product `[..., N]` in the dtype of `states`, by one launch."""
    return launch_gated(given)


__all__ = ["launch"]
