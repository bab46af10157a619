"""What a checkpoint format is: a table of config keys, read in both directions, and the weights it names otherwise.

A new format is a module with one `CheckpointFormat`. Values that one key alone does not determine (RoPE, kinds of
layers) go through its `read_rest` and `write_rest`. Nothing here opens a file or builds a model, and no other part of
the project looks into a foreign config.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from dflash_hf.checkpoints.files import FLOAT_DTYPES
from dflash_hf.configuration_dflash import MAX_LAYERS, DFlashConfig
from dflash_hf.errors import is_a, one_line, require, shown

# What the class adds to Transformers' base config, so to say the schema, in its order.
_INHERITED = {inherited.name for inherited in fields(PreTrainedConfig)}
FIELDS = tuple(own.name for own in fields(DFlashConfig) if own.name not in _INHERITED)
REQUIRED: Any = object()  # marks a key that the config has to contain


@dataclass(frozen=True, slots=True)
class Key:
    """One field of `DFlashConfig` and where a format keeps it."""

    ours: str
    default: Any  # what an absent (or null) key means in this format, or REQUIRED
    places: tuple[str, ...]  # where it may stand; "a.b" is b in the section a
    # Whether to leave it out when it has the default (a key that few checkpoints carry)
    optional: bool = False
    written: int = 0  # in which of the places it is written


def plain_keys(
    defaults: Mapping[str, Any], section: str = "", optional: bool = False
) -> tuple[Key, ...]:
    """Returns keys that stand in one place, under our own names, in a `section` with its dot."""
    return tuple(
        Key(name, default, (section + name,), optional) for name, default in defaults.items()
    )


# A Qwen3 decoder's keys, with the defaults of `Qwen3Config`.
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
    """Returns what a Qwen3 config says of a draft's layers, and of what drafts have or have not."""
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
    """A format's `config.json`, keeping account of what has been read.

    `section` is the one key whose value is a dictionary with keys of its own, if there is one. `weights` are there, by
    our names, for formats that say with a weight what others say with a key.
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
        self.unread = set(self.values)

    def take(self, *places: str, default: Any = REQUIRED, kind: type | None = None) -> Any:
        """Returns what the first of `places` that is present says, else the default; null means absent.

        Raises `ValueError` if two places disagree, none is there and there is no default, or the type is not `kind`.
        """
        self.unread.difference_update(places)
        stated = {
            place: self.values[place] for place in places if self.values.get(place) is not None
        }
        name = " or ".join(places)
        file = "the checkpoint's config.json"
        if not stated:
            if default is REQUIRED:
                raise ValueError(
                    f"expected {name} in {file}, got neither a value nor a default; add it"
                )
            return copy.copy(default)  # a list of the table must not end up in a config
        value = next(iter(stated.values()))
        agrees = all(other == value for other in stated.values())
        require(agrees, "one value", stated, f"make {file} agree with itself")
        if kind is not None:
            require(is_a(value, kind), f"{name} of type {kind.__name__} in {file}", value, "fix it")
        return value

    def take_dtype(self) -> str | None:
        """Takes the name of the type of the weights: not the draft's function, but what `dtype="auto"` means."""
        dtype: Any = self.take("dtype", "torch_dtype", default=None)
        # Which Transformers does not know
        if isinstance(dtype, str):
            dtype = dtype.removeprefix("torch.")
        floats = [str(known).removeprefix("torch.") for known in FLOAT_DTYPES.values()]
        require(dtype in (None, *floats), f"dtype in {floats}", dtype, "fix it")
        return dtype

    def take_num_layers(self, *places: str, default: Any = REQUIRED) -> int:
        """Takes the number of draft layers, which other fields are as long as, and so has to be one that can be."""
        number: int = self.take(*places, default=default, kind=int)
        require(
            1 <= number <= MAX_LAYERS,
            f"{' or '.join(places)} from 1 to {MAX_LAYERS}",
            number,
            "fix it",
        )
        return number

    def take_layers(self, *windows: str, section: str = "") -> dict[str, Any]:
        """Takes the fields `num_hidden_layers`, `layer_types` (absent, by `Qwen3Config`'s rule) and `sliding_window`.

        The window may stand in any of `windows`, the others in the section (with its dot).
        """
        num_layers = self.take_num_layers(f"{section}num_hidden_layers")
        window = self.take(*windows, default=None)
        layer_types: list[Any] | None = self.take(f"{section}layer_types", default=None, kind=list)
        use_window = self.take(f"{section}use_sliding_window", default=None)
        first_sliding = self.take(f"{section}max_window_layers", default=28, kind=int)
        if layer_types is None:
            full = num_layers
            if use_window and window is not None:
                full = min(max(first_sliding, 0), num_layers)
            layer_types = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
        elif use_window is False and "sliding_attention" in layer_types:
            raise ValueError(
                f"expected {section}use_sliding_window true or absent beside layer_types {shown(layer_types)}, got "
                "false; make the checkpoint's config.json agree with itself"
            )
        return {
            "num_hidden_layers": num_layers,
            "layer_types": layer_types,
            "sliding_window": window,
        }

    def take_rope(self, default_theta: float, section: str = "") -> dict[str, Any]:
        """Returns `rope_parameters`, from that key (Transformers 5) or from `rope_theta` and `rope_scaling` (before).

        `default_theta` is what the format means where it states none; the section has its dot.
        """
        fix = "fix the checkpoint's config.json"
        given = {
            **self.take(
                f"{section}rope_parameters", f"{section}rope_scaling", default={}, kind=dict
            )
        }
        stated_kinds = [given.pop("type", None), given.pop("rope_type", None)]
        kinds = [kind for kind in stated_kinds if kind is not None]
        require(all(kind == kinds[0] for kind in kinds), "one rope_type", kinds, fix)
        theta = self.take(f"{section}rope_theta", default=None)
        thetas = [value for value in (given.pop("rope_theta", None), theta) if value is not None]
        require(all(value == thetas[0] for value in thetas), "one rope_theta", thetas, fix)
        name = "partial_rotary_factor"
        partial = [given.pop(name, None), self.take(section + name, default=None)]
        partial = [value for value in partial if value not in (None, 1.0)]
        unknown = sorted(given.keys() - ROPE_KEYS - IMAGE_ROPE_KEYS)
        if unknown or partial:
            raise ValueError(
                f"expected a RoPE over whole heads with known parameters, got {name} {shown(partial)} and the "
                f"parameters {shown(unknown)}; this variant is not supported"
            )
        kinds.append("default")
        thetas.append(default_theta)
        return {
            "rope_type": kinds[0],
            "rope_theta": thetas[0],
            **{name: value for name, value in given.items() if name in ROPE_KEYS},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """A checkpoint format, as data. What it cannot express is what it does not read back."""

    name: str  # in save_draft(format=...)
    matches: Callable[[Mapping[str, Any]], bool]  # recognises a parsed config.json by its content
    keys: tuple[Key, ...] = ()  # fields with a key of their own
    # Fields that the format's readers need, so that None cannot be written
    needs: tuple[str, ...] = ()
    # Weights that they name otherwise -> our name
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    section: str = ""  # see ConfigReader
    # Reads the fields that need more than one key.
    read_rest: Callable[[ConfigReader], dict[str, Any]]
    # Writes those, and the constants of the format.
    write_rest: Callable[[DFlashConfig], dict[str, Any]]
    # Yields "field = value (reason)" per field that could be written and read again, and other readers misunderstand.
    refuse: Callable[[DFlashConfig], Iterator[str]] = lambda config: iter(())
    # Keys of unsupported variants -> the values under which they do nothing.
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    ignored: frozenset[str] = frozenset()  # keys that make no difference to a draft
    # Weights not loaded: copies of the target's, or what follows from others
    dropped: frozenset[str] = frozenset()
    # Returns, by the format's names, weights that follow from the draft's, to be saved too.
    derive: Callable[[DFlashConfig, Mapping[str, Tensor]], dict[str, Tensor]] = (
        lambda config, weights: {}
    )
    # Whether drafts bring an embedding and a head: all, none, or (None) some
    has_vocabulary: bool | None = None
    # Writes the target's name and architectures into a written config.
    name_target: Callable[[dict[str, Any], str, list[str]], None] = (
        lambda written, name, architectures: None
    )

    def read_config(
        self, config: Mapping[str, Any], weights: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        """Returns the fields of `DFlashConfig` that a parsed `config.json` states or implies beside these weights.

        Raises `ValueError` if a key is unknown, missing, contradicts another or belongs to an unsupported variant.
        """
        reader = ConfigReader(config, self.section, weights)
        reader.unread -= self.ignored
        for key, allowed in self.neutral.items():
            what = f"{key} absent or in {allowed} in the checkpoint's config.json"
            value = reader.take(key, default=allowed[0])
            require(value in allowed, what, value, "this variant of DFlash is not supported")
        values = {key.ours: reader.take(*key.places, default=key.default) for key in self.keys}
        values |= {"dtype": reader.take_dtype(), **self.read_rest(reader)}
        if reader.unread:  # ignoring one could change what the draft computes
            raise ValueError(
                f"expected only known keys in a config.json of the format {self.name!r}, got also "
                f"{shown(sorted(reader.unread))}; they belong to a variant that is not supported"
            )
        return values

    def write_config(
        self, config: DFlashConfig, dtype: str, weights: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        """Returns this format's `config.json` for a draft whose `weights` (our names) are stored as `dtype`.

        Raises `ValueError`, naming the fields, if the format cannot express it.
        """
        wrong = [
            f"{name} = None (its readers need it)"
            for name in self.needs
            if getattr(config, name) is None
        ]
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
            raise ValueError(
                f"expected a draft that the format {self.name!r} can express, got {'; '.join(wrong)}; "
                "save it in the format 'dflash'"
            )
        return out

    def our_name(self, theirs: str) -> str:
        """Returns our name of one of this format's weights."""
        return self.renamed.get(theirs, theirs)

    def their_name(self, ours: str) -> str:
        """Returns this format's name of one of our weights."""
        return next((theirs for theirs, own in self.renamed.items() if own == ours), ours)


def make_config(values: Mapping[str, Any]) -> DFlashConfig:
    """Builds the config of what a format said; raises `ValueError` for wrong types and fields that contradict."""
    for name, value in values.items():
        # One entry per layer, and perhaps the embeddings; checking the types of a million takes seconds.
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
        *(
            "rope_type",
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "truncate",
        ),
        *(
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "low_freq_factor",
            "high_freq_factor",
        ),
    }
)
# A target's image axes, copied into some drafts' configs. A draft's positions are plain indices: they do nothing.
IMAGE_ROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
# What configs of Transformers carry about other things than a draft's function.
COMMON_IGNORED = frozenset(
    {
        *(
            "_commit_hash",
            "_name_or_path",
            "name_or_path",
            "architectures",
            "auto_map",
            "model_type",
            "dtype",
        ),
        *(
            "torch_dtype",
            "transformers_version",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "id2label",
        ),
        *(
            "label2id",
            "problem_type",
            "chunk_size_feed_forward",
            "is_encoder_decoder",
            "tie_word_embeddings",
        ),
        *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    }
)
