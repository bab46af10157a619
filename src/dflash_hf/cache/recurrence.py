"""This module knows the recurrent layers whose states can be restored exactly, and how each runs
over a block again.

A recurrent state cannot be cropped. So a verify leaves the state unchanged and records the block: the inputs of the
layer's convolution, and the projections from which its gates are computed. When the number of tokens that each row
keeps is known, the layer's own rule runs over the block again, from the state before the block. The gates of the other
tokens are set so that these tokens do not change the state. No weight matrix is read twice, every row has its own
number of kept tokens, and every shape is fixed.

Shapes: `L` layers of one kind and size, `B` rows, `W` tokens of a block, `C` channels of the convolution, `k` columns
of its window, `G` recorded numbers per token.
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
    """An instance is the recurrent part of one decoder layer: its rule, and the module that keeps the state."""

    rule: Rule
    module: nn.Module


class RecordedBlock(NamedTuple):
    """An instance holds the recorded tensors of a block, over which a rule runs again."""

    modules: Sequence[Any]  # the `L` modules, which have the same sizes
    # [L, B, C, k + W]: the convolution's window before the block, followed by the block's inputs
    inputs: Tensor
    projections: Tensor  # [L, B, W, G]: one projection after the other
    states: Tensor  # [L, B, ...]: the states before the block, which are not changed
    is_kept: Tensor  # [B, W], bool


class Rule:
    """A rule describes one kind of recurrence: where its inputs are found, and how it runs over a block again.

    In this base class, the convolution's window is the whole state, which needs no replay.
    """

    # The name that messages use.
    name: ClassVar[str]
    # The attributes that the module must have besides its projections.
    attributes: ClassVar[tuple[str, ...]]
    # The functions that the module's forward must call.
    functions: ClassVar[tuple[str, ...]]
    # The name of the convolution in the module.
    convolution: ClassVar[str] = "conv1d"
    # Whether the module writes into the state that it is given, if its input is a single token.
    writes_state: ClassVar[bool] = False

    def projections(self, module: Any) -> dict[str, int]:
        """Returns the names of the submodules from whose outputs the gates are computed.

        The value of each name is the number of its last output columns that are used.
        """
        return {}

    def replay(self, block: RecordedBlock) -> Tensor:
        """Returns the states after the kept tokens, in the shape `[L, B, ...]` of `block.states`."""
        return block.states

    def why_not(self, module: nn.Module) -> str | None:
        """Returns what a module lacks that its class has in the supported releases, or `None` if it lacks nothing."""
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
            # A quantised projection may not state its size. Then the size is not checked.
            size = getattr(projection, "out_features", num)
            if size < num:
                return f"a {kind} whose projection {name} gives {size} numbers instead of {num}"
        return None


class GatedDelta(Rule):
    """This rule is the gated delta rule after a short convolution, as in Qwen3.5, Qwen3.5-MoE and Qwen3-Next."""

    name = "gated delta nets (Qwen3.5, Qwen3.5-MoE, Qwen3-Next)"
    attributes = (
        "A_log",
        "dt_bias",
        "activation",
        "key_dim",
        "head_k_dim",
        "head_v_dim",
        "num_k_heads",
        "num_v_heads",
    )
    functions = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")

    def projections(self, module: Any) -> dict[str, int]:
        """Returns the names and sizes of the projections of write strength and decay."""
        return {"in_proj_b": module.num_v_heads, "in_proj_a": module.num_v_heads}

    def gates(self, module: Any, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Returns write strength and decay `[L, B, W, H]` before their nonlinearities."""
        strength, decay = projected.split(module.num_v_heads, dim=-1)
        return strength, decay

    def replay(self, block: RecordedBlock) -> Tensor:
        """Returns the states after the kept tokens.

        The other tokens neither decay (`g = 0`) nor write (`beta = 0`).
        """
        first = block.modules[0]
        # 1. Run the convolution, [L, B, W, C]. Its first channels are the queries, which do not change the state.
        mixed = _convolved(block, self.convolution, skip=first.key_dim)
        # The dimension of layers is merged with the rows, so the rule runs once over L * B rows.
        mixed = mixed.flatten(0, 1)
        value_dim = mixed.shape[-1] - first.key_dim
        key, value = mixed.split([first.key_dim, value_dim], dim=-1)
        key_heads = (first.num_k_heads, first.head_k_dim)
        value_heads = (first.num_v_heads, first.head_v_dim)
        key = key.unflatten(-1, key_heads)
        value = value.unflatten(-1, value_heads)
        if first.num_k_heads != first.num_v_heads:
            # Before Transformers 5.23, the rule does not repeat the keys itself.
            num_repeats = first.num_v_heads // first.num_k_heads
            key = key.repeat_interleave(num_repeats, dim=2)
        # 2. Compute the gates by the formulas of the modules. A token that is not kept may hold NaN. A product with 0
        # would keep the NaN, and `where` does not.
        strength, decay = self.gates(first, block.projections)
        log_rate = _stacked(block.modules, "A_log")[:, None, None]
        bias = _stacked(block.modules, "dt_bias")[:, None, None]
        is_kept = block.is_kept[..., None]
        # The rate is in float32, as in the modules, because the state decays by a product over all tokens.
        rate = -log_rate.float().exp()
        step = F.softplus(decay.float() + bias)
        g = torch.where(is_kept, rate * step, 0.0)
        beta = torch.where(is_kept, strength.sigmoid(), 0.0)
        # 3. Run the module's own rule from the states before the block.
        run = _function(first, "torch_chunk_gated_delta_rule")
        _, after = run(
            key,  # takes the place of the queries, whose output is dropped
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
    """This rule is the gated delta rule with both gates in one projection, grouped by key head, as in Qwen3-Next."""

    def projections(self, module: Any) -> dict[str, int]:
        """Returns the name and size of the one projection of write strength and decay."""
        return {"in_proj_ba": 2 * module.num_v_heads}

    def gates(self, module: Any, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Returns write strength and decay `[L, B, W, H]` before their nonlinearities."""
        # Each key head has first the strengths of its value heads, and then their decays.
        two_gates = (module.num_k_heads, 2, -1)
        by_head = projected.unflatten(-1, two_gates)
        strength, decay = by_head.unbind(dim=-2)
        return strength.flatten(-2), decay.flatten(-2)


class ShortConvolution(Rule):
    """This rule is a gated short convolution, whose window is the whole state, as in LFM2."""

    name = "short convolutions (LFM2, LFM2-MoE)"
    attributes = ("conv_kernel_size",)
    functions = ("causal_conv1d_fn",)
    convolution = "conv"


class Mamba2(Rule):
    """This rule is Mamba-2's selective state space after a short convolution, as in Bamba and Granite hybrids."""

    name = "Mamba-2 (Bamba, Granite-MoE-hybrid)"
    attributes = (
        "A_log",
        "dt_bias",
        "activation",
        "intermediate_size",
        "ssm_state_size",
        "n_groups",
        "head_dim",
        "num_heads",
        "chunk_size",
        "time_step_limit",
    )
    functions = ("mamba2_chunk_scan", "causal_conv1d_fn")
    writes_state = True

    def projections(self, module: Any) -> dict[str, int]:
        """Returns the name of the only projection, and the number of its last columns, which are the time steps."""
        return {"in_proj": module.num_heads}

    def why_not(self, module: nn.Module) -> str | None:
        """Returns what a module lacks, or that it clamps time steps, or `None` if neither applies."""
        unlimited = (0.0, float("inf"))
        limit = getattr(module, "time_step_limit", unlimited)
        if tuple(limit) != unlimited:
            return (
                f"time steps clamped to {tuple(limit)}, which Transformers does for several tokens at once and not "
                "for one, so that no verify can equal plain decoding"
            )
        return super().why_not(module)

    def replay(self, block: RecordedBlock) -> Tensor:
        """Returns the states `[L, B, H, ...]` after the kept tokens. The other tokens have a time step of zero."""
        first = block.modules[0]
        num, batch, width = block.projections.shape[:3]
        # 1. Run the convolution. Its last channels are the projections that read the state, which are not needed.
        mixed = _convolved(block, self.convolution)
        group_dim = first.n_groups * first.ssm_state_size
        sizes = [first.intermediate_size, group_dim, group_dim]
        values, into, _ = mixed.split(sizes, dim=-1)
        # 2. Compute the time steps. The scan applies softplus to them, which is exactly 0 for -inf.
        is_rejected = ~block.is_kept[..., None]
        no_step = float("-inf")
        steps = block.projections.masked_fill(is_rejected, no_step)

        # 3. Run the scan. It takes a rate per head, and layers differ in their rates. So it runs once over the heads
        # of all layers, [B, W, L * H, E].
        def side_by_side(tensor: Tensor, size: int) -> Tensor:
            by_row = tensor.permute(1, 2, 0, 3)
            return by_row.reshape(batch, width, -1, size)

        into = side_by_side(into, first.ssm_state_size)
        log_rates = _stacked(block.modules, "A_log").flatten()
        # The rates are in float32, as in the modules.
        rates = -torch.exp(log_rates.float())
        steps_by_row = steps.permute(1, 2, 0, 3)
        states_by_row = block.states.transpose(0, 1)
        states = states_by_row.flatten(1, 2)
        scan = _function(first, "mamba2_chunk_scan")
        _, after = scan(
            side_by_side(values, first.head_dim),
            steps_by_row.flatten(2),
            rates,
            into,
            into,  # takes the place of the projections that read the state, whose output is dropped
            chunk_size=first.chunk_size,
            D=None,
            z=None,
            return_final_states=True,
            dt_bias=_stacked(block.modules, "dt_bias").flatten(),
            dt_softplus=True,
            initial_states=states,
            dt_limit=first.time_step_limit,
        )
        by_layer = after.unflatten(1, (num, -1))
        return by_layer.transpose(0, 1)


# RULES maps the name of a module's class to its rule. Attributes would not be enough, because classes with the same
# attributes compute different things.
_GATED_DELTA = GatedDelta()
_SHORT_CONVOLUTION = ShortConvolution()
_MAMBA_2 = Mamba2()
RULES: dict[str, Rule] = {
    "Qwen3_5GatedDeltaNet": _GATED_DELTA,
    "Qwen3_5MoeGatedDeltaNet": _GATED_DELTA,
    "Qwen3NextGatedDeltaNet": GroupedGatedDelta(),
    "Lfm2ShortConv": _SHORT_CONVOLUTION,
    "Lfm2MoeShortConv": _SHORT_CONVOLUTION,
    "BambaMixer": _MAMBA_2,
    "GraniteMoeHybridMambaLayer": _MAMBA_2,
}


def supported() -> str:
    """Returns the kinds of recurrent layers whose states can be restored, as text for messages."""
    # Several classes share a rule. Each name comes once, in the order of the table.
    names = dict.fromkeys(rule.name for rule in RULES.values())
    return ", ".join(names)


def find_recurrence(layer: nn.Module) -> Recurrence | None:
    """Returns the recurrent part of a decoder layer, or `None` if it has none whose states can be restored."""
    for module in layer.modules():
        # A subclass of a known class has the same rule.
        for kind in type(module).__mro__:
            if kind.__name__ in RULES:
                return Recurrence(RULES[kind.__name__], module)
    return None


def _function(module: nn.Module, name: str) -> Any:
    """Returns the function that the module's own forward finds under a name, or `None`."""
    # Transformers may put a fast kernel under the same name into the globals of the forward's module.
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__globals__.get(name)


def _parameter(module: nn.Module, name: str) -> Tensor:
    """Returns a parameter, also if accelerate keeps it elsewhere between calls."""
    value: Tensor = getattr(module, name)
    # Offloaded weights are on the meta device, and are loaded while their module runs.
    if value.device.type == "meta":
        with brought_in(module):
            value = getattr(module, name)
    return value


def _stacked(modules: Sequence[Any], name: str) -> Tensor:
    """Returns one parameter of all modules, stacked: `[L, ...]`."""
    return torch.stack([_parameter(module, name) for module in modules])


def _convolved(block: RecordedBlock, name: str, skip: int = 0) -> Tensor:
    """Returns the convolved inputs of all modules, without the first `skip` channels: `[L, B, W, C - skip]`."""
    first = block.modules[0]
    width = block.is_kept.shape[1]
    convolutions = [getattr(module, name) for module in block.modules]
    # The convolution is depthwise. So one call runs the convolutions of all layers, side by side as channels.
    inputs_of_rest = block.inputs[:, :, skip:]
    by_row = inputs_of_rest.transpose(0, 1)
    inputs = by_row.flatten(1, 2)
    # A depthwise weight is [C, 1, k].
    weights = [_parameter(convolution, "weight").squeeze(1) for convolution in convolutions]
    weight = torch.cat([of_layer[skip:] for of_layer in weights])
    bias = None
    if convolutions[0].bias is not None:
        biases = [_parameter(convolution, "bias") for convolution in convolutions]
        bias = torch.cat([of_layer[skip:] for of_layer in biases])
    convolve = _function(first, "causal_conv1d_fn")
    mixed = convolve(inputs, weight, bias, activation=first.activation)
    # The first columns belong to the window and are dropped. The convolution needed them only to look back.
    of_block = mixed[..., -width:]
    by_layer = of_block.unflatten(1, (len(convolutions), -1))
    return by_layer.permute(1, 0, 3, 2)
