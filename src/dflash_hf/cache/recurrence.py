"""Which recurrent layers can be taken back exactly, and how: all that is known of their families.

A recurrent state cannot be cropped. So a verify leaves it as it was and notes what the layer made of the block: what
goes into its convolution, and the projections that its gates come from. Once it is known how many tokens each row
keeps, the layer's own rule runs over the block again from the state before it, with gates that make the other tokens
leave no trace: no weight matrix is read twice, every row has its own count, every shape is fixed.

Shapes: `L` layers alike, `B` rows, `W` tokens of a block, `C` channels of the convolution, `k` of its window,
`G` noted numbers per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_hf.devices import brought_in

_RELEASES = "Transformers 5.16 to 5.24 have it"


class Recurrence(NamedTuple):
    """The recurrent part of one decoder layer: what kind it is, and the module that keeps the state."""

    rule: Rule
    module: nn.Module


class Noted(NamedTuple):
    """What is known of a block over which a rule runs again."""

    modules: Sequence[Any]  # the `L` modules, alike in every size
    inputs: Tensor  # [L, B, C, k + W]: the convolution's window before the block, and what the block put in
    projections: Tensor  # [L, B, W, G]: one after the other
    states: Tensor  # [L, B, ...]: before the block; not changed
    kept: Tensor  # [B, W], bool: which tokens stay


class Rule:
    """One kind of recurrence: where its inputs are found and how it runs over a block again.

    Here the convolution's window is the whole state, and the cache sees all there is.
    """

    # As users know it.
    name: ClassVar[str]
    # What the module must have besides its projections, and the functions that its forward must be using.
    attributes: ClassVar[tuple[str, ...]]
    functions: ClassVar[tuple[str, ...]]
    # The convolution's place in the module.
    convolution: ClassVar[str] = "conv1d"
    # Whether the module writes into the state that it is handed where it is given a single token.
    writes_state: ClassVar[bool] = False

    def projections(self, module: Any) -> dict[str, int]:
        """Returns the submodules whose outputs the gates come from, with the number of last columns that count."""
        return {}

    def replay(self, block: Noted) -> Tensor:
        """Returns the states after the tokens that are kept."""
        return block.states

    def why_not(self, module: nn.Module) -> str | None:
        """Says what a module lacks that its class has in the releases that are known, or `None`."""
        kind = type(module).__name__
        for name in (*self.attributes, self.convolution):
            if not hasattr(module, name):
                return f"a {kind} without {name}; {_RELEASES}"
        for name in self.functions:
            if not callable(_function(module, name)):
                return f"a {kind} whose code does not use {name}; {_RELEASES}"
        for name, num in self.projections(module).items():
            projection = getattr(module, name, None)
            if not isinstance(projection, nn.Module):
                return f"a {kind} without the projection {name} (renamed, fused or hidden by a quantisation)"
            size = getattr(projection, "out_features", num)
            if size < num:
                return f"a {kind} whose projection {name} gives {size} numbers instead of {num}"
        return None


class GatedDelta(Rule):
    """Gated delta rule behind a short convolution: Qwen3.5, Qwen3.5-MoE, Qwen3-Next."""

    name = "gated delta nets (Qwen3.5, Qwen3.5-MoE, Qwen3-Next)"
    attributes = (
        *("A_log", "dt_bias", "activation"),
        *("key_dim", "head_k_dim", "head_v_dim", "num_k_heads", "num_v_heads"),
    )
    functions = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")

    def projections(self, module: Any) -> dict[str, int]:
        """Write strength and decay."""
        return {"in_proj_b": module.num_v_heads, "in_proj_a": module.num_v_heads}

    def gates(self, module: Any, noted: Tensor) -> tuple[Tensor, Tensor]:
        """Returns write strength and decay `[L, B, W, H]` before their nonlinearities."""
        return noted.split(module.num_v_heads, dim=-1)  # pyright: ignore[reportReturnType]

    def replay(self, block: Noted) -> Tensor:
        """With `g = 0` and `beta = 0` on the tokens that go: no decay, nothing written. Queries leave no trace."""
        first = block.modules[0]
        mixed = _convolved(block, self.convolution, skip=first.key_dim)
        key, value = mixed.flatten(0, 1).split([first.key_dim, mixed.shape[-1] - first.key_dim], dim=-1)
        key = key.unflatten(-1, (first.num_k_heads, first.head_k_dim))
        value = value.unflatten(-1, (first.num_v_heads, first.head_v_dim))
        if first.num_k_heads != first.num_v_heads:  # before 5.23 the rule does not do that by itself
            key = key.repeat_interleave(first.num_v_heads // first.num_k_heads, dim=2)
        strength, decay = self.gates(first, block.projections)
        rate, bias = (_stacked(block.modules, name)[:, None, None] for name in ("A_log", "dt_bias"))
        kept = block.kept[..., None]
        # As in the modules' own code; a `where` keeps out what tokens that go may hold.
        g = torch.where(kept, -rate.float().exp() * F.softplus(decay.float() + bias), 0.0)
        beta = torch.where(kept, strength.sigmoid(), 0.0)
        _, after = _function(first, "torch_chunk_gated_delta_rule")(
            key,
            key,
            value,
            g=g.flatten(0, 1),
            beta=beta.flatten(0, 1),
            initial_state=block.states.flatten(0, 1),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return after.view_as(block.states)


class GroupedGatedDelta(GatedDelta):
    """The same with both gates in one projection, key head by key head: Qwen3-Next."""

    def projections(self, module: Any) -> dict[str, int]:
        """Write strength and decay together."""
        return {"in_proj_ba": 2 * module.num_v_heads}

    def gates(self, module: Any, noted: Tensor) -> tuple[Tensor, Tensor]:
        """Takes them apart: per key head first the strengths of its value heads, then their decays."""
        strength, decay = noted.unflatten(-1, (module.num_k_heads, 2, -1)).unbind(dim=-2)
        return strength.flatten(-2), decay.flatten(-2)


class ShortConvolution(Rule):
    """A gated short convolution: the window is the whole state. LFM2."""

    name = "short convolutions (LFM2, LFM2-MoE)"
    attributes = ("conv_kernel_size",)
    functions = ("causal_conv1d_fn",)
    convolution = "conv"


class Mamba2(Rule):
    """Mamba-2's selective state space behind a short convolution: Bamba, Granite hybrids."""

    name = "Mamba-2 (Bamba, Granite-MoE-hybrid)"
    attributes = (
        *("A_log", "dt_bias", "activation", "intermediate_size", "ssm_state_size"),
        *("n_groups", "head_dim", "num_heads", "chunk_size", "time_step_limit"),
    )
    functions = ("mamba2_chunk_scan", "causal_conv1d_fn")
    writes_state = True

    def projections(self, module: Any) -> dict[str, int]:
        """The time steps: the last columns of the only projection."""
        return {"in_proj": module.num_heads}

    def why_not(self, module: nn.Module) -> str | None:
        """Besides what every kind needs: Transformers clamps time steps in a block, not in a single token."""
        limit = getattr(module, "time_step_limit", (0.0, float("inf")))
        if tuple(limit) != (0.0, float("inf")):
            return (
                f"time steps clamped to {tuple(limit)}, which Transformers does for several tokens at once and not "
                "for one, so that no verify can equal plain decoding"
            )
        return super().why_not(module)

    def replay(self, block: Noted) -> Tensor:
        """With a time step of zero on the tokens that go; the layers side by side as heads, whose rates differ."""
        first = block.modules[0]
        num, batch, width = block.projections.shape[:3]
        mixed = _convolved(block, self.convolution)
        groups = first.n_groups * first.ssm_state_size
        values, into, _ = mixed.split([first.intermediate_size, groups, groups], dim=-1)
        # softplus gives exactly 0 for it.
        steps = block.projections.masked_fill(~block.kept[..., None], float("-inf"))

        def side_by_side(tensor: Tensor, size: int) -> Tensor:
            return tensor.permute(1, 2, 0, 3).reshape(batch, width, -1, size)

        into = side_by_side(into, first.ssm_state_size)
        _, after = _function(first, "mamba2_chunk_scan")(
            side_by_side(values, first.head_dim),
            steps.permute(1, 2, 0, 3).flatten(2),
            -torch.exp(_stacked(block.modules, "A_log").flatten().float()),
            into,
            into,
            chunk_size=first.chunk_size,
            D=None,
            z=None,
            return_final_states=True,
            dt_bias=_stacked(block.modules, "dt_bias").flatten(),
            dt_softplus=True,
            initial_states=block.states.transpose(0, 1).flatten(1, 2),
            dt_limit=first.time_step_limit,
        )
        return after.unflatten(1, (num, -1)).transpose(0, 1)


# Class of the module -> its rule. By name, because what a class computes does not show in what it has.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), GatedDelta()),
    "Qwen3NextGatedDeltaNet": GroupedGatedDelta(),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), ShortConvolution()),
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer"), Mamba2()),
}


def supported() -> str:
    """Returns the kinds of recurrent layers that can be taken back, for sentences."""
    return ", ".join(dict.fromkeys(rule.name for rule in RULES.values()))


def find_recurrence(layer: nn.Module) -> Recurrence | None:
    """Returns the recurrent part of a decoder layer, if it has one of a kind that can be taken back."""
    for module in layer.modules():
        rule = next((RULES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in RULES), None)
        if rule is not None:
            return Recurrence(rule, module)
    return None


def _function(module: nn.Module, name: str) -> Any:
    """A function as the module's own forward finds it: a fast kernel where Transformers has chosen one."""
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__globals__.get(name)


def _parameter(module: nn.Module, name: str) -> Tensor:
    """A parameter, also while accelerate keeps it elsewhere."""
    value: Tensor = getattr(module, name)
    if value.device.type == "meta":
        with brought_in(module):
            value = getattr(module, name)
    return value


def _stacked(modules: Sequence[Any], name: str) -> Tensor:
    """One parameter of all modules `[L, ...]`."""
    return torch.stack([_parameter(module, name) for module in modules])


def _convolved(block: Noted, name: str, skip: int = 0) -> Tensor:
    """Runs the modules' convolutions in one call `[L, B, W, C - skip]`, without the first `skip` channels."""
    convolutions = [getattr(module, name) for module in block.modules]
    inputs = block.inputs[:, :, skip:]
    weight = torch.cat([_parameter(convolution, "weight").squeeze(1)[skip:] for convolution in convolutions])
    bias = None
    if convolutions[0].bias is not None:
        bias = torch.cat([_parameter(convolution, "bias")[skip:] for convolution in convolutions])
    first = block.modules[0]
    inputs = inputs.transpose(0, 1).flatten(1, 2)
    mixed = _function(first, "causal_conv1d_fn")(inputs, weight, bias, activation=first.activation)
    return mixed[..., -block.kept.shape[1] :].unflatten(1, (len(convolutions), -1)).permute(1, 0, 3, 2)
