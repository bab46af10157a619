"""What tests of recurrent targets need: the rules in float64, states of a fresh forward, and a look into a run's.

Transformers' rules cast to float32 whatever the model's dtype. `use_float64_rules` puts loops over the tokens in their
place, written from the recurrences' definitions, so that states can be compared to many digits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.recurrent import RecurrentGroup
from dflash_hf.target_model.parts import find_target


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token: decay the state, then move what a key reads towards its value."""
    times = value.shape[2] // key.shape[2]
    query, key = (tensor.repeat_interleave(times, dim=2) for tensor in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (query, key))
    batch, length, heads, size = key.shape
    state = (
        value.new_zeros(batch, heads, size, value.shape[3])
        if initial_state is None
        else initial_state.to(value)
    )
    outputs: list[Tensor] = []
    for t in range(length):
        state = state * g[:, t].exp()[..., None, None]
        error = value[:, t] - (state * key[:, t, :, :, None]).sum(dim=2)
        state = state + key[:, t, :, :, None] * (error * beta[:, t, :, None])[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(dim=2) * size**-0.5)
    return torch.stack(outputs, dim=1), state if output_final_state else None


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """Mamba-2's recurrence token by token: `state = exp(dt A) state + dt x B`, read with `C`."""
    times = hidden_states.shape[2] // B.shape[2]
    into, out = (tensor.repeat_interleave(times, dim=2) for tensor in (B, C))
    steps = F.softplus(dt if dt_bias is None else dt + dt_bias)
    batch, length, heads, size = hidden_states.shape
    state = hidden_states.new_zeros(batch, heads, size, B.shape[-1])
    state = state if initial_states is None else initial_states.to(state)
    outputs: list[Tensor] = []
    for t in range(length):
        step = steps[:, t, :, None, None]
        state = (
            state * (step * A[:, None, None]).exp()
            + step * hidden_states[:, t, :, :, None] * into[:, t, :, None]
        )
        outputs.append((state * out[:, t, :, None]).sum(dim=-1))
    read = torch.stack(outputs, dim=1)
    read = read if D is None else read + D[:, None] * hidden_states
    return (read, state) if return_final_states else read


def selective_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """One token of the same, the state changed in place."""
    assert D is not None
    assert dt_bias is not None
    out, after = selective_scan(
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        D[:, 0],
        dt_bias[:, 0],
        state,
        return_final_states=True,
    )
    state.copy_(after)
    return out[:, 0]


_FLOAT64 = {
    "torch_chunk_gated_delta_rule": gated_delta,
    "torch_recurrent_gated_delta_rule": gated_delta,
    "mamba2_chunk_scan": selective_scan,
    "mamba2_selective_state_update": selective_step,
}


def use_float64_rules(monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel) -> None:
    """Has a target's recurrent layers compute in its dtype, and so do norms: float32 rounds by the width of a call."""
    recurrent = [recurrence.module for recurrence in find_target(target).recurrences.values()]
    for module in recurrent:
        code = sys.modules[type(module).__module__]
        for name, function in _FLOAT64.items():
            if hasattr(code, name):
                monkeypatch.setattr(code, name, function)
    for kind in {type(module) for module in target.modules()}:
        if kind.__name__.endswith("RMSNorm"):
            monkeypatch.setattr(kind, "forward", norm)
        elif kind.__name__.endswith("RMSNormGated") and not hasattr(recurrent[0], "ssm_state_size"):
            monkeypatch.setattr(kind, "forward", gated_norm)


def norm(self: Any, hidden_states: Tensor) -> Tensor:
    """The decoders' norm; Qwen3.5's and Qwen3-Next's weights are counted from 1 and have another name for epsilon."""
    eps, weight = (
        (self.eps, 1 + self.weight)
        if hasattr(self, "eps")
        else (self.variance_epsilon, self.weight)
    )
    return hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + eps) * weight


def gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The norm behind a gated delta rule."""
    scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * hidden_states * scale * F.silu(gate)


def watch_states(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[list[int], dict[int, tuple[Tensor, Tensor | None]]]]:
    """Returns a list that runs fill: after every replay the rows' lengths, and windows and states by layer."""
    seen: list[tuple[list[int], dict[int, tuple[Tensor, Tensor | None]]]] = []
    replay = RecurrentGroup.replay

    def watched(self: RecurrentGroup, lengths: Tensor) -> None:
        replay(self, lengths)
        states = [None] * len(self.indices) if self.states is None else list(self.states.clone())
        layers = dict(
            zip(self.indices, zip(self.windows.clone(), states, strict=True), strict=True)
        )
        seen.append((lengths.tolist(), layers))

    monkeypatch.setattr(RecurrentGroup, "replay", watched)
    return seen


@torch.no_grad()
def fresh_states(
    target: PreTrainedModel, tokens: list[int]
) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Windows and states by layer after one forward over a row's tokens alone."""
    layers = target(torch.tensor([tokens]), use_cache=True)[CACHE_NAME].layers
    return {
        index: (layers[index].conv_states[0][0], _row(layers[index].recurrent_states[0]))
        for index in find_target(target).recurrences
    }


def _row(states: Tensor | None) -> Tensor | None:
    return None if states is None else states[0]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The greatest difference, relative to the greatest number wanted."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def check_recurrent(ours: Any, plain: Any, tolerance: float) -> None:
    """Compares a recurrent layer of two ordinary caches."""
    assert ours.has_previous_state == plain.has_previous_state
    assert ours.conv_kernel_size == plain.conv_kernel_size
    for name in ("conv_states", "recurrent_states"):
        for x, y in _pairs(getattr(ours, name).values(), getattr(plain, name).values()):
            assert x.shape == y.shape
            assert x.dtype == y.dtype
            assert y.is_inference() or not x.is_inference()
            assert relative_error(x, y) < tolerance


def _pairs(
    ours: Iterable[Tensor | None], plain: Iterable[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    pairs = list(zip(ours, plain, strict=True))
    assert all((x is None) == (y is None) for x, y in pairs)
    return [(x, y) for x, y in pairs if x is not None and y is not None]
