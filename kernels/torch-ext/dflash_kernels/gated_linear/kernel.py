"""This module launches the kernel of `gated_linear`, which is beside the kernel of `linears` and shares its parts."""

from __future__ import annotations

from torch import Tensor

from ..linears.kernel import launch_gated
from ..operation import Given


def launch(given: Given) -> Tensor:
    """Returns the gated product `[..., N]` in the dtype of `states`, with one launch."""
    return launch_gated(given)


__all__ = ["launch"]
