"""This module finds the parts of a target model: its decoder layers, embedding and head, and its end tokens.

Everything is found from the model itself, never from its name or a key path.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dflash_hf.cache.recurrence import Recurrence, Rule, find_recurrence
from dflash_hf.checkpoints.fresh import vocabulary_of
from dflash_hf.devices import Inventory, execution_device
from dflash_hf.errors import require
from dflash_hf.target_model import user_code


@dataclass(frozen=True, slots=True)
class Target:
    """An instance holds the parts of a target that drafting needs."""

    model: PreTrainedModel  # the model on which `generate` was called
    parts: Inventory  # its modules with their weights, buffers and changes
    facts: Facts  # the same object until the modules, their classes or the config change
    config: PreTrainedConfig  # its text config
    layers: tuple[nn.Module, ...]  # decoder layers; layer `i` is the `i`-th
    embedding: nn.Module  # input embedding of text tokens
    head: nn.Module  # output head, hidden states to logits
    decoder: nn.Module  # the module that holds the list of layers and runs them
    # The modules from the model down to the decoder, whose forwards call each other
    path: tuple[nn.Module, ...]
    # The recurrent parts whose states can be restored, by layer index.
    recurrences: dict[int, Recurrence]

    @property
    def device(self) -> torch.device:
        """The device of the input ids: the device on which the embedding computes, also while its weights are
        offloaded.
        """
        return execution_device(self.embedding)

    def position_ids(self, indices_BW: Tensor, delta: Tensor) -> Tensor:
        """Returns the positions of a verify: `[B, W]`, or `[rows, B, W]` under M-RoPE; no host sync.

        Positions beyond the end of a table of positions become its last row. They belong to proposals after the last
        token that can be looked up, and such proposals cannot be kept: see `Rows.reach`.

        Args:
            indices_BW (`torch.Tensor` of shape `[B, W]`, int64): Index of each token in its row.
            delta (`torch.Tensor` of shape `[B]` or `[rows, B]`, int64): Position minus index.
        """
        # Under M-RoPE, `delta` has a row each for time, height and width, and the indices are broadcast to all of
        # them.
        positions = indices_BW + delta[..., None]
        num = self.facts.num_positions
        if num is None:
            return positions
        return positions.clamp_max(num - 1)

    @property
    def takes_inference_mode(self) -> bool:
        """Returns True if all weights are plain tensors. Some quantised weights fail in torch's inference mode."""
        tensors = [*self.parts.weights, *self.parts.buffers]
        kinds = set(map(type, tensors))
        return kinds <= {torch.Tensor, nn.Parameter, type(None)}

    @property
    def is_unmodified(self) -> bool:
        """Returns True if no code of the user runs in the forwards of its modules, as they were found."""
        return user_code.is_unmodified(self.parts)

    @property
    def has_layers(self) -> bool:
        """Returns False for a target of which only the vocabulary was loaded. Its layers cannot be run."""
        # Offloaded weights are on the meta device too, and are loaded when a layer runs
        is_offloaded = getattr(self.model, "hf_device_map", None) is not None
        return is_offloaded or not any(weight.is_meta for weight in self.model.parameters())

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding, which is the number of ids that can be looked up."""
        weight: Any = self.embedding.weight
        return int(weight.shape[0])


class ChangingRope(NamedTuple):
    """An instance describes a RoPE whose frequencies depend on the largest position of a call, in
    one kind of layers.
    """

    kind: str  # type of the RoPE
    boundary: int  # a call whose positions are all below this has the first frequencies
    is_settled: bool  # whether all calls beyond it have the same frequencies


class Facts(NamedTuple):
    """An instance holds facts that follow from a model's modules and config.

    They are found again if one of these changes.
    """

    modules: list[weakref.ref[nn.Module]]  # all modules, in order
    kinds: list[type]  # their classes, which may be changed in place (as FSDP does)
    config: PreTrainedConfig  # the text config
    config_values: dict[str, Any]  # a copy of its values, because a config may be changed in place
    # The indices of the decoder layers, of the module that runs them, and of the target's embedding and head.
    layers: list[int]
    decoder: int
    embedding: int
    head: int
    path: list[int]  # the modules from the model down to the decoder
    recurrences: dict[int, tuple[Rule, int]]  # per layer, its rule and the index of its module
    num_positions: int | None  # rows of the table of positions, if there is one
    ropes: list[ChangingRope]  # its RoPEs that change with the length of a call
    # Number of weights of the layers. Embeddings are not counted, because only a few rows are looked up. A vision
    # tower is not counted, because it runs only in the prefill.
    num_weights: int


# All references are weak, so that a model is freed as soon as the user drops it.
_known: weakref.WeakKeyDictionary[PreTrainedModel, Facts] = weakref.WeakKeyDictionary()


def find_target(model: PreTrainedModel) -> Target:
    """Finds the parts of a causal or vision-language model. Raises `ValueError` if a part cannot be found.

    The facts that follow from its modules and its text config are found once. They are found again if a module is
    another object (wrapped, replaced, with an adapter), or if a value of the config has changed.
    """
    config = model.config.get_text_config(decoder=True)
    parts = Inventory.of(model)
    # Modules are compared one by one in every call, which takes less time than finding the facts again.
    facts = _known.get(model)
    modules = parts.modules
    kinds = list(map(type, parts.modules))
    if (
        facts is None
        or facts.config is not config
        or not _is_same(facts.config_values, vars(config))
        or facts.kinds != kinds
        or [module() for module in facts.modules] != modules
    ):
        facts = _find_facts(model, modules, config)
        _known[model] = facts
    return Target(
        model=model,
        parts=parts,
        facts=facts,
        config=config,
        layers=tuple(modules[index] for index in facts.layers),
        embedding=modules[facts.embedding],
        head=modules[facts.head],
        decoder=modules[facts.decoder],
        path=tuple(modules[index] for index in facts.path),
        recurrences={
            layer: Recurrence(rule, modules[index])
            for layer, (rule, index) in facts.recurrences.items()
        },
    )


def _find_facts(
    model: PreTrainedModel, modules: list[nn.Module], config: PreTrainedConfig
) -> Facts:
    embedding, head = vocabulary_of(model)
    name = type(model).__name__
    # Drafting reads the number of its rows and its dtype. In some quantised embeddings, `weight` is a method.
    has_weight = isinstance(getattr(embedding, "weight", None), Tensor)
    require(
        has_weight,
        f"{name} with an input embedding that has a tensor named weight",
        type(embedding).__name__,
        "put an nn.Embedding in its place or drop the draft",
    )
    num_layers = getattr(config, "num_hidden_layers", None)
    # The list of layers is recognised by its length and by the layers' submodules, because its name differs between
    # models.
    lists = [
        module
        for module in modules
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and all(
            any(hasattr(layer, name) for name in ("self_attn", "attn", "mlp"))
            or find_recurrence(layer) is not None
            for layer in module
        )
    ]
    # A vision tower may have as many layers as the text decoder.
    own = [layers for layers in lists if _text_config_of(layers) is config] or lists
    if not own:
        raise ValueError(
            f"expected a list of {num_layers} decoder layers inside {name}, found none; not supported"
        )
    list_of_layers = own[0]
    layers = list(list_of_layers)
    decoder = next(
        module for module in modules if any(child is list_of_layers for child in module.children())
    )
    # Modules are stored by their index, because the facts must not keep the model.
    places = dict[nn.Module, int]()
    for index, module in enumerate(modules):
        places.setdefault(module, index)
    recurrences = dict[int, Recurrence]()
    for index, layer in enumerate(layers):
        recurrence = find_recurrence(layer)
        if recurrence is not None:
            recurrences[index] = recurrence
    return Facts(
        modules=[weakref.ref(module) for module in modules],
        kinds=list(map(type, modules)),
        config=config,
        config_values=_copied(vars(config)),
        layers=[places[layer] for layer in layers],
        decoder=places[decoder],
        embedding=places[embedding],
        head=places[head],
        path=[places[module] for module in path_to(model, decoder)],
        recurrences={layer: (one.rule, places[one.module]) for layer, one in recurrences.items()},
        num_positions=_num_positions(decoder, config, embedding),
        ropes=_changing_ropes(config),
        num_weights=sum(map(num_weights, layers)),
    )


def _copied(value: Any) -> Any:
    """Returns a value of a config with copies of its containers, because containers may be changed in place."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(one) for one in value]
    if isinstance(value, set):
        return set(value)
    return value


def _is_same(kept: Any, value: Any) -> bool:
    """Returns True if a value of a config is equal to its copy, which [`_copied`] has made.

    An object that is not a plain value is the same only if it is the same object, because a tensor's `==` gives a
    tensor.
    """
    # This is never true of containers, because they were copied.
    if kept is value:
        return True
    if isinstance(value, dict):
        return (
            isinstance(kept, dict)
            and kept.keys() == value.keys()
            and all(_is_same(kept[key], one) for key, one in value.items())
        )
    if isinstance(value, list | tuple):
        return (
            isinstance(kept, list) and len(kept) == len(value) and all(map(_is_same, kept, value))
        )
    is_plain = isinstance(value, str | int | float | set)
    return is_plain and type(kept) is type(value) and kept == value


def num_weights(module: nn.Module) -> int:
    """Returns the number of weights that a module uses, at least 1.

    The weights of a linear layer are counted by its sizes, because quantised weights are packed and may be buffers.
    """
    num = 0
    for part in Inventory.of(module).modules:
        # The dictionaries are read directly for speed, because every call counts the draft's layers and the heads.
        own = part.__dict__
        rows = own.get("out_features")
        columns = own.get("in_features")
        # An adapter's layer states the sizes of the layer inside it, and that layer is counted itself.
        is_around_another = "base_layer" in own["_modules"]
        if isinstance(rows, int) and isinstance(columns, int) and not is_around_another:
            num += rows * columns
        else:
            weights = own["_parameters"].values()
            num += sum(weight.numel() for weight in weights if weight is not None)
    return max(num, 1)


def path_to(model: PreTrainedModel, part: nn.Module) -> list[nn.Module]:
    """Returns the modules from a model down to one of its submodules, including both."""
    name = next(name for name, module in model.named_modules() if module is part)
    path: list[nn.Module] = [model]
    # The model itself has the empty name.
    for child in filter(None, name.split(".")):
        path.append(path[-1].get_submodule(child))
    return path


def _num_positions(
    decoder: nn.Module, config: PreTrainedConfig, embedding: nn.Module
) -> int | None:
    """Returns the number of rows of a decoder's table of positions that can be looked up, or `None` if it has no
    table.

    Such a table is an embedding beside the token embedding. It is as wide as the hidden states and has the length that
    the config states.
    """
    for child in decoder.children():
        if (
            isinstance(child, nn.Embedding)
            and child is not embedding
            and child.embedding_dim == config.hidden_size
        ):
            # OPT does not use the first rows
            num = child.num_embeddings - getattr(child, "offset", 0)
            if num == getattr(config, "max_position_embeddings", None):
                return num
    return None


def _changing_ropes(config: PreTrainedConfig) -> list[ChangingRope]:
    """Returns the RoPEs of a target's layers whose frequencies depend on the largest position of a call.

    Each kind of layer may have its own RoPE. "dynamic" always compares this position with `max_position_embeddings`.
    "longrope" compares it with the original length. PhiMoE scales its RoPE by one of two numbers in the same way.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    of_layers = [one for one in rope.values() if isinstance(one, dict)]
    found: list[ChangingRope] = []
    for parameters in (rope, *of_layers):
        kind = parameters.get("rope_type") or "default"
        if "dynamic" in kind:
            found.append(ChangingRope(kind, int(config.max_position_embeddings), is_settled=False))
        elif kind == "longrope" or (kind != "default" and "long_mscale" in parameters):
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            boundary = int(original or config.max_position_embeddings)
            found.append(ChangingRope(kind, boundary, is_settled=True))
    return found


def _text_config_of(layers: nn.ModuleList) -> object:
    """Returns the config in the layers' attention, which distinguishes a text decoder from a vision tower of the same
    depth.
    """
    for module in layers.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            return config
    return None


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Returns the tokens that end a target's answers, from its generation config. The list may be empty."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        return []
    if isinstance(found, int):
        return [found]
    return list(found)


def up_to_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Returns an answer up to and including its first end token. The tokens after it are padding."""
    for at, token in enumerate(tokens):
        if token in ends:
            return tokens[: at + 1]
    return tokens
