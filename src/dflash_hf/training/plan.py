"""What a training will take, from configs alone: steps, peak memory of a device, operations. Nothing is loaded.

Memory is counted as the step runs: what is kept from step to step, and on top of it the largest of three moments: the
target's forward, the draft's forward and backward, the optimizer's update. Constants are bytes per element of what a
moment holds; `tests/training/test_plan.py` compares with a step that runs under fake tensors.

Symbols: `N` context tokens of a batch, `Q` slots of its blocks, `D` hidden, `I` MLP, `L` taps, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import require
from dflash_hf.layer_configs import attention_sizes, layer_values
from dflash_hf.modeling_dflash import DFlashDraftModel

GB = 2**30
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Transformers renamed it: the name that this release prefers first.
KINDS_OF_CHECKPOINTING = sorted(
    ("activation", "gradient"),
    key=lambda name: not hasattr(TrainingArguments, f"{name}_checkpointing"),
)
# Beside what is counted: the CUDA context, cuBLAS's workspaces, what the allocator cannot use.
RESERVED = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of a training's options and data decides what it takes.

    Args:
        per_device_train_batch_size, gradient_accumulation_steps, num_anchors, chunk_blocks, optim, num_train_epochs,
            max_steps: As in the training arguments.
        world_size (`int`): Devices that train together, each with all of the draft.
        block_size (`int`): Slots per block.
        max_length (`int`): Tokens of the longest sequence.
        checkpointing (`bool`): Whether the draft's layers are computed again in the backward pass.
        mixed_precision (`bool`): Whether the draft computes in bfloat16, with weights in float32.
    """

    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    num_anchors: int = 512
    block_size: int = 16
    max_length: int = 3072
    chunk_blocks: int = 128
    checkpointing: bool = False
    mixed_precision: bool = True
    optim: str = "adamw_torch_fused"
    num_train_epochs: float = 6.0
    max_steps: int = -1

    @classmethod
    def of(cls, args: Any, max_length: int, block_size: int) -> Sizes:
        """Reads them out of `DFlashTrainingArguments`."""
        found: dict[str, Any] = {item.name: getattr(args, item.name, None) for item in fields(cls)}
        found |= {"max_length": max_length, "block_size": args.block_size or block_size}
        found["checkpointing"] = any(
            getattr(args, f"{name}_checkpointing", False) for name in KINDS_OF_CHECKPOINTING
        )
        found["mixed_precision"] = (
            getattr(args, "bf16", False) or getattr(args, "mixed_precision", "no") == "bf16"
        )
        found["optim"] = str(getattr(args.optim, "value", args.optim))
        return cls(**found)


class Plan:
    """What a training will take, from configs alone.

    Args:
        target (`PreTrainedConfig`): The target's config.
        draft (`DFlashConfig`): The draft's.
        sizes ([`Sizes`]): The options.
        num_examples (`int`, *optional*): Sequences to train on.
        mean_length (`float`, *optional*): Their mean length in tokens; `max_length` where it is not known.
        target_dtype (`str`, *optional*): The target's dtype, such as `"bfloat16"`; default what its config says.

    Attributes:
        steps (`int`, *optional*): Optimizer steps, as the trainer counts them; `None` where the number of examples is
            not known.
        bytes_by_part (`dict[str, int]`): What the fullest moment of a step holds on one device, part by part.
        peak_bytes (`int`): Their sum.
        target_flops, draft_flops (`float`): Operations of one step on one device, sequences being of mean length.
    """

    def __init__(
        self,
        target: PreTrainedConfig,
        draft: DFlashConfig,
        sizes: Sizes,
        *,
        num_examples: int | None,
        mean_length: float | None = None,
        target_dtype: str | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.sizes = sizes
        self.model = meta_model(target)
        with torch.device("meta"):
            self.drafted = DFlashDraftModel(draft)
        self.width = bytes_of(target, target_dtype)
        self.steps = sizes.max_steps if sizes.max_steps > 0 else None
        if self.steps is None and num_examples is not None:
            batches = math.ceil(
                math.ceil(num_examples / sizes.per_device_train_batch_size) / sizes.world_size
            )
            steps = max(1, math.ceil(batches / sizes.gradient_accumulation_steps))
            self.steps = math.ceil(sizes.num_train_epochs * steps)
        self.bytes_by_part = self.memory(sizes)
        self.peak_bytes = sum(self.bytes_by_part.values())
        self.target_flops, self.draft_flops = self._flops(mean_length or sizes.max_length)

    def hours(self, flops_per_second: float) -> float | None:
        """Returns how long the training takes at least, on a device that does so many operations a second."""
        if self.steps is None:
            return None
        return self.steps * (self.target_flops + self.draft_flops) / flops_per_second / 3600

    def memory(self, sizes: Sizes) -> dict[str, int]:
        """Returns `bytes_by_part` under some options; sequences are as long as the longest."""
        text: Any = self.target.get_text_config(decoder=True)
        draft = self.draft
        drafted = self.drafted
        width = self.width
        weights = sum(p.numel() for p in drafted.parameters())
        matrices = sum(p.numel() for p in drafted.parameters() if p.ndim == 2)
        tokens = sizes.per_device_train_batch_size * sizes.max_length
        blocks = sizes.per_device_train_batch_size * min(
            sizes.num_anchors, max(1, sizes.max_length - 1)
        )
        slots = blocks * sizes.block_size
        depth = draft.num_hidden_layers
        kept = {
            "target": weights_of(self.target, self.model, width),
            "draft in float32": 4 * weights,
            "optimizer": 4 * matrices + 8 * (weights - matrices)
            if sizes.optim == "muon"
            else 8 * weights,
        }
        gradients = {"gradients": 4 * weights}
        kept |= gradients if sizes.gradient_accumulation_steps > 1 else {}
        kept |= {"gradients being sent": 4 * weights} if sizes.world_size > 1 else {}
        features = tokens * len(draft.target_layer_ids) * draft.target_hidden_size
        context = tokens * draft.hidden_size
        copies = {"bfloat16 copies of the draft": 2 * weights} if sizes.mixed_precision else {}
        # As the target gave them and in float32; under autocast the backward pass keeps a copy of its own.
        given = width + 4 + (2 if sizes.mixed_precision else 0)
        layer = _layer_bytes(draft, tokens, slots, sizes.mixed_precision)
        # What stays of a layer that is computed again is its input.
        layers = depth * 4 * slots * draft.hidden_size if sizes.checkpointing else depth * layer
        ends = 8 * slots * draft.hidden_size + 6 * context
        rows = min(blocks, sizes.chunk_blocks) * (sizes.block_size - 1)
        logits = rows * text.vocab_size * (8 + 2 * width)
        states = 8 * blocks * (sizes.block_size - 1) * draft.hidden_size
        moments: list[dict[str, int]] = [
            {
                "features": 2 * width * features,
                "a layer of the target": tokens * width * _widest_of(text),
            },
            {
                **copies,
                "features": given * features,
                "activations": layers + ends,
                "head": logits + states,
            },
            # Where the layers ran at once, each one's activations make room for its gradients.
            {
                **copies,
                "features": given * features,
                "activations": layers + ends + layer,
                **gradients,
            }
            if sizes.checkpointing
            else {},
            # AdamW that is not fused makes a list of its denominators.
            {**gradients, "update": 4 * weights if sizes.optim == "adamw_torch" else 0},
        ]
        if sizes.gradient_accumulation_steps > 1:
            moments = [
                {name: size for name, size in moment.items() if name != "gradients"}
                for moment in moments
            ]
        fullest = max(moments, key=lambda moment: sum(moment.values()))
        return {name: size for name, size in (kept | fullest).items() if size}

    def _flops(self, mean_length: float) -> tuple[float, float]:
        """The operations of a step on one device, of the target and of the draft.

        Two operations per weight and token forward, four more backward, and two where a layer is computed again; the
        target runs up to its last tapped layer. Of a mixture of experts all are counted, which is too many.
        """
        text: Any = self.target.get_text_config(decoder=True)
        sizes = self.sizes
        draft = self.draft
        model = self.model
        rows = sizes.per_device_train_batch_size * sizes.gradient_accumulation_steps
        tokens = rows * mean_length
        blocks = rows * min(sizes.num_anchors, max(1.0, mean_length - 1))
        slots = blocks * sizes.block_size
        share = (max(draft.target_layer_ids) + 1) / text.num_hidden_layers
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        tables = {id(found.weight) for found in ends if found is not None}
        inside = sum({id(p): p.numel() for p in model.parameters() if id(p) not in tables}.values())
        queries = sum(layer.heads * layer.size for layer in attention_sizes(text))
        attention = 2 * queries * mean_length  # causal: half of all pairs
        theirs = share * tokens * (2 * inside + attention)
        factor = 8 if sizes.checkpointing else 6
        keys = 2 * draft.num_key_value_heads * draft.head_dim * draft.hidden_size
        projected = (
            draft.num_hidden_layers * keys
            + len(draft.target_layer_ids) * draft.target_hidden_size * draft.hidden_size
        )
        per_layer = sum(
            p.numel() for name, p in self.drafted.named_parameters() if name.startswith("layers.")
        )
        width = draft.num_attention_heads * draft.head_dim * draft.num_hidden_layers
        seen = mean_length / 2 + sizes.block_size
        head = (
            6
            * (sizes.block_size - 1)
            * blocks
            * draft.hidden_size
            * (draft.draft_vocab_size or text.vocab_size)
        )
        ours = factor * (slots * per_layer + tokens * projected + 2 * slots * width * seen) + head
        return theirs, ours


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a target without weights."""
    takes_images = type(config) in AutoModelForImageTextToText._model_mapping
    with torch.device("meta"):
        return (AutoModelForImageTextToText if takes_images else AutoModelForCausalLM).from_config(
            config
        )


def _layer_bytes(draft: DFlashConfig, tokens: int, slots: int, mixed: bool) -> int:
    """What one layer of the draft keeps for its backward pass: normed states, queries, keys, values, the MLP's."""
    queries, keys = (
        count * draft.head_dim for count in (draft.num_attention_heads, draft.num_key_value_heads)
    )
    # In bfloat16: residual, norm and their weight's input in float32, and a copy for each projection.
    hidden, mlp, query, key, context, written = (
        (26, 8, 16, 12, 4, 12) if mixed else (24, 16, 28, 24, 0, 24)
    )
    block = (
        hidden * draft.hidden_size + mlp * draft.intermediate_size + query * queries + key * keys
    )
    return slots * block + tokens * (context * draft.hidden_size + written * keys)


def _widest_of(text: Any) -> int:
    """Elements per token that a layer of the target holds at once, without a gradient."""
    names = ("intermediate_size", "moe_intermediate_size")
    mlp = max(width or 0 for name in names for width in layer_values(text, name))
    return 4 * text.hidden_size + 3 * mlp


def bytes_of(config: PreTrainedConfig, dtype: str | None = None) -> int:
    """Returns the bytes of one number of a model, from its config or from what is asked for."""
    stated: Any = config.dtype if dtype in (None, "auto") else dtype
    return DTYPE_BYTES.get(str(stated).removeprefix("torch."), 4)


def weights_of(config: PreTrainedConfig, model: nn.Module, width: int) -> int:
    """Returns the bytes of a target's weights; of a quantised one, about."""
    quantised: Any = getattr(config, "quantization_config", None) or {}
    quantised = quantised if isinstance(quantised, dict) else quantised.to_dict()
    counts = {id(p): p.numel() for p in model.parameters()}
    if not quantised:
        return width * sum(counts.values())
    bits = quantised.get("bits") or (4 if quantised.get("load_in_4bit") else 8)
    linear = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear)
    }
    # A scale and an offset for every 32 to 128 weights.
    return int(
        sum(linear.values()) * bits / 8 * 1.1
        + width * sum(v for k, v in counts.items() if k not in linear)
    )


# What can be lowered, in the order in which it costs least: down to which number it is halved, or the one value that
# takes less.
LOWER: dict[str, Any] = {
    "checkpointing": True,
    "per_device_train_batch_size": 1,
    "chunk_blocks": 16,
    "num_anchors": 64,
    "optim": "muon",
    "max_length": 1024,
}


def check_fits(found: Plan, device_bytes: int) -> None:
    """Refuses a training that will not fit a device, and says which options to lower and to what.

    Raises:
        ValueError: If it does not fit; with options under which it does, where there are any.
    """
    room = int(device_bytes * (1 - RESERVED))
    if found.peak_bytes <= room:
        return
    advice = "take a larger device, a smaller target dtype, or fewer layers"
    for sizes, said in _lowered(found.sizes):
        if (lower := sum(found.memory(sizes).values())) <= room:
            advice = f"with {said} it takes {lower / GB:.1f} GB"
            break
    largest = max(found.bytes_by_part, key=lambda name: found.bytes_by_part[name])
    require(
        False,
        f"a training within {room / GB:.1f} GB ({device_bytes / GB:.1f} GB without what CUDA itself takes)",
        f"one of {found.peak_bytes / GB:.1f} GB, {found.bytes_by_part[largest] / GB:.1f} of them {largest}",
        advice,
    )


def _lowered(sizes: Sizes) -> Iterator[tuple[Sizes, str]]:
    """Options that take less and less, each with the words that ask for them."""
    said: dict[str, Any] = {}
    for name, last in LOWER.items():
        is_halved = type(last) is int
        value = getattr(sizes, name)
        while value > last if is_halved else value != last:
            value = value // 2 if is_halved else last
            changed = {name: value}
            if name == "per_device_train_batch_size":
                changed["gradient_accumulation_steps"] = 2 * sizes.gradient_accumulation_steps
            sizes = replace(sizes, **changed)
            said |= (
                {f"{KINDS_OF_CHECKPOINTING[0]}_checkpointing": "true"}
                if name == "checkpointing"
                else changed
            )
            yield (
                sizes,
                " ".join(f"--{option.replace('_', '-')} {value}" for option, value in said.items()),
            )
