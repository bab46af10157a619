"""FP8 where there is none: products of rounded numbers, summed in float32, as the package defines them."""

from __future__ import annotations

import pytest

from dflash_hf.generation import float8


def use_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every device multiply in FP8, by the definition of `torch._scaled_mm`'s row scales."""
    monkeypatch.setattr(float8, "scaled_linear", float8.scaled_linear_in_float32)
    monkeypatch.setattr(float8, "why_not", lambda device: None)
