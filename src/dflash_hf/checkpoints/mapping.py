"""This module defines a checkpoint format as data: a table of config keys for both directions, and names of weights.

A new format is a module with one `CheckpointFormat`. If one key alone does not determine a value (RoPE, kinds of
layers), `read_rest` and `write_rest` of the format handle it. Nothing here opens a file or builds a model, and no
other part of the project reads a foreign config.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from dflash_hf.checkpoints.files import FLOAT_DTYPES
from dflash_hf.checkpoints.quantised import Stored, scheme_of
from dflash_hf.configuration_dflash import MAX_LAYERS, DFlashConfig
from dflash_hf.errors import is_a, one_line, require, shown

# The fields that the class adds to Transformers' base config, in their order.
_INHERITED = {inherited.name for inherited in fields(PreTrainedConfig)}
FIELDS = tuple(own.name for own in fields(DFlashConfig) if own.name not in _INHERITED)
# Fields that may get another value once the draft's target is known.
OF_THE_TARGET = (
    "vocab_size",
    "num_target_layers",
    "raw_input_embeddings",
    "own_embed_tokens",
    "own_lm_head",
)
REQUIRED: Any = object()  # marks a key that the config has to contain


@dataclass(frozen=True, slots=True)
class Key:
    """One field of `DFlashConfig`, and the place where a format keeps it."""

    ours: str
    default: Any  # the meaning of an absent (or null) key in this format, or REQUIRED
    places: tuple[str, ...]  # where the key may be; "a.b" is b in the section a
    # Whether the key is left out if it has the default (for keys that few checkpoints have)
    optional: bool = False
    written: int = 0  # index of the place where the key is written


class Neutral(NamedTuple):
    """A key of an unsupported variant, with the values that do not change anything and the meaning of other values."""

    values: tuple[Any, ...]
    meaning: str  # names the reader of the key too, as a clause of its own


def plain_keys(
    defaults: Mapping[str, Any], section: str = "", optional: bool = False
) -> tuple[Key, ...]:
    """Returns keys that have one place each, under our own names. `section` includes its dot."""
    return tuple(
        Key(name, default, (section + name,), optional) for name, default in defaults.items()
    )


# The keys of a Qwen3 decoder, with the defaults of `Qwen3Config`.
QWEN3_KEYS: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), REQUIRED
    ),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "head_dim": 128,
}
QWEN3_THETA = 10000.0


def qwen3_layers(config: DFlashConfig) -> dict[str, Any]:
    """Returns the keys of a Qwen3 config about a draft's layers, and its keys that are the same for all drafts."""
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


class ConfigReader:
    """Reads the `config.json` of a format, and records which keys have been read.

    `section` is the one key whose value is a dictionary with its own keys, if the format has one. `weights` are the
    weights of the checkpoint by our names. Some formats say by a weight what other formats say by a key.
    """

    def __init__(self, config: Mapping[str, Any], section: str, weights: frozenset[str]) -> None:
        self.weights = weights
        self.values = dict(config)
        inner = self.values.pop(section, None)
        if inner is None:
            inner = {}
        what = f"{section} to be a dictionary in the checkpoint's config.json"
        require(isinstance(inner, Mapping), what, inner, "fix it")
        self.values |= {f"{section}.{key}": value for key, value in inner.items()}
        # A key with the value null has the same meaning as an absent key.
        self.unread = {key for key, value in self.values.items() if value is not None}

    def stated(self, *places: str) -> dict[str, Any]:
        """Returns place -> value for those of `places` that have a value. All `places` count as read."""
        self.unread.difference_update(places)
        values = {place: self.values.get(place) for place in places}
        return {place: value for place, value in values.items() if value is not None}

    def take(self, *places: str, default: Any = REQUIRED, kind: type | None = None) -> Any:
        """Returns the value at the first of `places` that is present, else the default. Null means absent.

        Raises `ValueError` if two places disagree, if no place has a value and there is no default, or if the value is
        not of type `kind`.
        """
        stated = self.stated(*places)
        name = " or ".join(places)
        file = "the checkpoint's config.json"
        if not stated:
            if default is REQUIRED:
                raise ValueError(
                    f"expected {name} in {file}, got neither a value nor a default; add it"
                )
            return copy.copy(default)  # a list of the table must not end up in a config
        value = agreed(stated)
        if kind is not None:
            require(is_a(value, kind), f"{name} of type {kind.__name__} in {file}", value, "fix it")
        return value

    def take_dtype(self) -> str | None:
        """Takes the name of the weights' dtype. It does not change the draft's function, only what `"auto"` means."""
        dtype: Any = self.take("dtype", "torch_dtype", default=None)
        # Transformers does not know the prefix.
        if isinstance(dtype, str):
            dtype = dtype.removeprefix("torch.")
        floats = [str(known).removeprefix("torch.") for known in FLOAT_DTYPES.values()]
        require(dtype in (None, *floats), f"dtype in {floats}", dtype, "fix it")
        return dtype

    def take_markov_rank(
        self, *places: str, kinds: tuple[str, ...], default: int = 0
    ) -> int | None:
        """Takes the rank of a DSpark draft's Markov head from `places`; `None` without a head.

        `kinds` are places that may say the kind of the head. Raises `ValueError` if this is not DeepSpec's vanilla
        kind.
        """
        rank: int = self.take(*places, default=default, kind=int)
        head: Any = self.take(*kinds, default="vanilla")
        what = f"{' or '.join(kinds)} 'vanilla' in the checkpoint's config.json"
        is_known = rank == 0 or head == "vanilla"
        action = "DeepSpec's own code reads the gated and the recurrent head; here they are not supported"
        require(is_known, what, head, action)
        if rank == 0:
            return None
        return rank

    def take_num_layers(self, *places: str, default: Any = REQUIRED) -> int:
        """Takes the number of draft layers. Other fields have this length, so the number must be a possible one."""
        number: int = self.take(*places, default=default, kind=int)
        require(
            1 <= number <= MAX_LAYERS,
            f"{' or '.join(places)} from 1 to {MAX_LAYERS}",
            number,
            "fix it",
        )
        return number

    def take_layers(self, *windows: str, section: str = "") -> dict[str, Any]:
        """Takes the fields `num_hidden_layers`, `layer_types` and `sliding_window`.

        If `layer_types` is absent, `Qwen3Config`'s rule applies. The window may be in any of `windows`. The other keys
        are in the section; `section` includes its dot.
        """
        num_layers = self.take_num_layers(f"{section}num_hidden_layers")
        window = self.take(*windows, default=None)
        # Qwen3Config itself writes false beside sliding layers. A window in another place is still meant.
        kept = self.stated(*windows).keys() - {f"{section}sliding_window"}
        layer_types: list[Any] | None = self.take(f"{section}layer_types", default=None, kind=list)
        use_window = self.take(f"{section}use_sliding_window", default=None)
        first_sliding = self.take(f"{section}max_window_layers", default=28, kind=int)
        if layer_types is None:
            full = num_layers
            if use_window and window is not None:
                full = min(max(first_sliding, 0), num_layers)
            layer_types = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
        elif use_window is False and "sliding_attention" in layer_types and not kept:
            raise ValueError(
                f"expected {section}use_sliding_window true or absent beside layer_types {shown(layer_types)}, got "
                "false; correct the contradiction in the checkpoint's config.json"
            )
        return {
            "num_hidden_layers": num_layers,
            "layer_types": layer_types,
            "sliding_window": window,
        }

    def take_layers_above(self, taps: Any) -> None:
        """Takes vLLM's own key for the taps, which is layer + 1. Raises `ValueError` if it disagrees with `taps`."""
        key = "eagle_aux_hidden_state_layer_ids"
        above: Any = self.take(key, default=None)
        if above is None:
            return
        are_lists = is_a(taps, list) and is_a(above, list)
        # A tap that is not a number is refused where the taps are read.
        agree = are_lists and above == [tap + 1 for tap in taps if is_a(tap, int)]
        action = "make the checkpoint's config.json agree with itself"
        require(agree, f"{key} one above the taps {shown(taps)}", above, action)

    def take_rope(
        self, default_theta: float, section: str = "", takes_parts: bool = False
    ) -> dict[str, Any]:
        """Returns `rope_parameters` from the key of this name (Transformers 5), from `rope_theta` and `rope_scaling`
        (older versions), or from both if they agree.

        `default_theta` is the format's theta if the config states none. `section` includes its dot. The RoPE may turn
        a part of each head only with `takes_parts`.
        """
        ropes: dict[str, dict[str, Any]] = {}
        for place in (f"{section}rope_parameters", f"{section}rope_scaling"):
            given: dict[str, Any] = self.take(place, default={}, kind=dict)
            if given:
                ropes[place] = _of_one_kind(place, given)
        # These two parameters may also be outside the dictionary.
        theta = self.stated(f"{section}rope_theta")
        partial = self.stated(f"{section}partial_rotary_factor")
        for place, given in ropes.items():
            theta[f"{place}.rope_theta"] = given.pop("rope_theta", None)
            partial[f"{place}.partial_rotary_factor"] = given.pop("partial_rotary_factor", None)
        theta = {place: value for place, value in theta.items() if value is not None}
        partial = {place: value for place, value in partial.items() if value is not None}
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": default_theta}
        if theta:
            rope["rope_theta"] = agreed(theta)
        names = {name for given in ropes.values() for name in given}
        for name in sorted(names):
            said = {f"{place}.{name}": given.get(name) for place, given in ropes.items()}
            rope[name] = agreed(said)
        stated = {name for name, value in rope.items() if value is not None}
        unknown = sorted(stated - ROPE_KEYS - IMAGE_ROPE_KEYS)
        if takes_parts and partial:
            rope["partial_rotary_factor"] = agreed(partial)
            partial = {}
        if unknown:
            raise ValueError(
                f"expected known parameters of a RoPE in {' or '.join(ropes)}, got also {shown(unknown)}; a RoPE that "
                "needs them is not supported here"
            )
        turned = {place: value for place, value in partial.items() if value != 1.0}
        if turned:
            raise ValueError(
                f"expected a RoPE over whole heads, got {beside(turned)}; a RoPE over a part of each head is "
                "supported in the format 'zlab'"
            )
        known = ROPE_KEYS | {"partial_rotary_factor"}
        return {name: value for name, value in rope.items() if name in known}


def _of_one_kind(place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a RoPE's parameters with its kind under one name. The name `type` is that of Transformers 4."""
    rope = dict(given)
    kinds = {f"{place}.{name}": rope.pop(name, None) for name in ("rope_type", "type")}
    kinds = {where: kind for where, kind in kinds.items() if kind is not None}
    rope["rope_type"] = "default"
    if kinds:
        rope["rope_type"] = agreed(kinds)
    return rope


def agreed(stated: Mapping[str, Any]) -> Any:
    """Returns the value that all places state. Raises `ValueError` with the places if they disagree."""
    values = list(stated.values())
    if any(value != values[0] for value in values):
        raise ValueError(
            f"expected one value, got {beside(stated)}; correct the contradiction in the checkpoint's config.json"
        )
    return values[0]


def beside(stated: Mapping[str, Any]) -> str:
    """Returns the values of some places as text."""
    return " beside ".join(f"{one_line(place)} = {shown(value)}" for place, value in stated.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """A checkpoint format, as data. A format cannot express a config that it does not read back unchanged."""

    name: str  # the argument of save_draft(format=...)
    matches: Callable[[Mapping[str, Any]], bool]  # recognises a parsed config.json by its content
    layer_families: tuple[str, ...] = ("qwen3",)  # families of layers that its drafts may have
    keys: tuple[Key, ...] = ()  # fields with a key of their own
    # Fields that the format's readers need, so that None cannot be written.
    needs: tuple[str, ...] = ()
    # The format's name of a weight -> our name, for weights with different names.
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    section: str = ""  # see ConfigReader
    takes_partial_ropes: bool = False  # whether a RoPE may turn only a part of each head
    # Reads the fields that need more than one key.
    read_rest: Callable[[ConfigReader], dict[str, Any]]
    # Writes these fields, and the constants of the format.
    write_rest: Callable[[DFlashConfig], dict[str, Any]]
    # Yields "field = value (reason)" per field that would be read back unchanged, but that other readers
    # misunderstand.
    refuse: Callable[[DFlashConfig], Iterator[str]] = lambda config: iter(())
    neutral: Mapping[str, Neutral] = field(default_factory=dict[str, Neutral])
    # Splits stored weights that hold several of ours, with the parsed config.json. `put_together` joins them again.
    take_apart: Callable[[dict[str, Stored], Mapping[str, Any]], dict[str, Stored]] = (
        lambda stored, config: stored
    )
    put_together: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = lambda weights: dict(
        weights
    )
    ignored: frozenset[str] = frozenset()  # keys that make no difference to a draft
    # Weights that are not loaded: copies of the target's, or weights that follow from others.
    dropped: frozenset[str] = frozenset()
    # Returns further weights to save, by the format's names. They follow from the draft's weights.
    derive: Callable[[DFlashConfig, Mapping[str, Tensor]], dict[str, Tensor]] = (
        lambda config, weights: {}
    )
    # Whether drafts have their own embedding and head: all drafts, none, or (None) some.
    has_vocabulary: bool | None = None
    # Writes the target's name and architectures into a written config.
    name_target: Callable[[dict[str, Any], str, list[str]], None] = (
        lambda written, name, architectures: None
    )

    def read_config(
        self, config: Mapping[str, Any], weights: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        """Returns the fields of `DFlashConfig` that a parsed `config.json` states or implies, together with `weights`.

        Raises `ValueError` if a key is unknown or missing, contradicts another key, or belongs to an unsupported
        variant.
        """
        # Weights of known schemes are dequantised when they are read. Other schemes are refused here.
        scheme_of(config)
        reader = ConfigReader(config, self.section, weights)
        reader.unread -= self.ignored
        for key, (allowed, meaning) in self.neutral.items():
            what = f"{key} absent or in {allowed} in the checkpoint's config.json"
            value = reader.take(key, default=allowed[0])
            require(value in allowed, what, value, f"not supported here: {meaning}")
        values = {key.ours: reader.take(*key.places, default=key.default) for key in self.keys}
        values |= {"dtype": reader.take_dtype(), **self.read_rest(reader)}
        if reader.unread:  # to ignore one of these keys could change what the draft computes
            raise ValueError(
                f"expected only known keys in a config.json of the format {self.name!r}, got also "
                f"{shown(sorted(reader.unread))}; remove a key only if the draft computes the same "
                "without it"
            )
        return values

    def write_config(
        self,
        config: DFlashConfig,
        dtype: str,
        weights: frozenset[str] = frozenset(),
        *,
        has_target: bool = True,
    ) -> dict[str, Any]:
        """Returns this format's `config.json` for a draft whose `weights` (our names) are stored as `dtype`.

        `has_target` says whether the target has filled in the values that the draft does not hold.

        Raises `ValueError`, which names the fields, if the format cannot express the draft.
        """
        wrong = [
            f"{name} = None (its readers need it)"
            for name in self.needs
            if getattr(config, name) is None
        ]
        if config.layer_family not in self.layer_families:
            # The config is not read back, because the format may refuse its RoPE without naming a field.
            wrong.append(
                f"layer_family = {config.layer_family!r} (its layers are {' or '.join(self.layer_families)})"
            )
        rope = config.rope_parameters
        if "partial_rotary_factor" in rope and not self.takes_partial_ropes:
            # The config is not read back in this case either.
            wrong.append(f"rope_parameters = {shown(rope)} (its readers turn whole heads)")
        out: dict[str, Any] = {"dtype": dtype}
        if not wrong:
            for key in self.keys:
                value = getattr(config, key.ours)
                if key.optional and value == key.default:
                    continue
                section, _, name = key.places[key.written].rpartition(".")
                if section:
                    out.setdefault(section, {})[name] = value
                else:
                    out[name] = value
            for name, value in self.write_rest(config).items():
                if name == self.section:
                    value = {**out.get(name, {}), **value}
                out[name] = value
            again = make_config(self.read_config(out, weights))
            wrong = [
                f"{name} = {shown(getattr(config, name))} (read back as {shown(getattr(again, name))})"
                for name in FIELDS
                if getattr(config, name) != getattr(again, name)
            ]
            wrong += self.refuse(config)
        if wrong:
            action = "save it in the format 'dflash'"
            is_of_the_target = any(field.startswith(OF_THE_TARGET) for field in wrong)
            if is_of_the_target and not has_target:
                action = f"give the target (--target), which may settle this, or {action}"
            raise ValueError(
                f"expected a draft that the format {self.name!r} can express, got {'; '.join(wrong)}; {action}"
            )
        return out

    def our_name(self, theirs: str) -> str:
        """Returns our name for one of this format's weights."""
        return self.renamed.get(theirs, theirs)

    def their_name(self, ours: str) -> str:
        """Returns this format's name for one of our weights."""
        return next((theirs for theirs, own in self.renamed.items() if own == ours), ours)


def make_config(values: Mapping[str, Any]) -> DFlashConfig:
    """Builds a draft's config from the fields that a format has read. Raises `ValueError` for invalid fields."""
    for name, value in values.items():
        # A list has one entry per layer, and perhaps one for the embeddings. To check a million types takes seconds.
        if isinstance(value, list):
            require(
                len(value) <= MAX_LAYERS + 1,
                f"{name} with up to {MAX_LAYERS + 1} entries",
                len(value),
                "fix it",
            )
    try:
        return DFlashConfig(**values)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(
            f"expected a valid draft config, got one that says: {one_line(error)}; fix the checkpoint's config.json"
        ) from error


ROPE_KEYS = frozenset(
    {
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "truncate",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "low_freq_factor",
        "high_freq_factor",
    }
)
# The image axes of a target's RoPE, copied into some drafts' configs. A draft's positions are plain indices, so these
# keys have no effect.
IMAGE_ROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
# DSpark's names of the Markov head's weights -> our names.
MARKOV_WEIGHTS = {
    "markov_head.markov_w1.weight": "markov_head.markov_w1",
    "markov_head.markov_w2.weight": "markov_head.markov_w2",
}
# Weights and keys of DSpark's confidence head. It says how many proposals to verify, and proposes no token.
CONFIDENCE_WEIGHTS = frozenset({"confidence_head.proj.weight", "confidence_head.proj.bias"})
CONFIDENCE_KEYS = frozenset(
    {
        "enable_confidence_head",
        "use_confidence_head",
        "confidence_head_with_markov",
        "confidence_head_alpha",
    }
)
# Keys of Transformers' configs that do not describe a draft's function.
COMMON_IGNORED = frozenset(
    {
        "_commit_hash",
        "_attn_implementation_autoset",
        "_name_or_path",
        "name_or_path",
        "architectures",
        "auto_map",
        "model_type",
        "dtype",
        "torch_dtype",
        "quantization_config",  # read before, by `scheme_of`
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
        "problem_type",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "tie_word_embeddings",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
    }
)
