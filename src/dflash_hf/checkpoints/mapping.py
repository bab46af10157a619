"""What a checkpoint format is: a table of config keys and a table of weights, each read in both directions.

A new format is a module with one `CheckpointFormat`. Values that one key alone does not determine (RoPE, kinds of
layers) go through its `read_rest` and `write_rest`. Nothing here opens a file or builds a model, and no other part of
the project looks into a foreign config.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import UnionType
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from dflash_hf.configuration_dflash import MAX_LAYERS, DFlashConfig
from dflash_hf.errors import one_line, require, shown

# What the class adds to Transformers' base config, so to say the schema, in its order.
_INHERITED = {inherited.name for inherited in fields(PreTrainedConfig)}
FIELDS = tuple(own.name for own in fields(DFlashConfig) if own.name not in _INHERITED)


class Stated(Enum):
    """Marks a key that the config has to contain."""

    REQUIRED = "required"


REQUIRED = Stated.REQUIRED


@dataclass(frozen=True, slots=True)
class Key:
    """One field of `DFlashConfig` and where a format keeps it.

    Args:
        ours (`str`): The field.
        default: What an absent (or null) key means in this format, or `REQUIRED`.
        places (`tuple[str, ...]`): Where it may stand, in the order of lookup; `"a.b"` is `b` in the section `a`. By
            default under our own name.
        written (`str`, *optional*): Where it is written; defaults to the last of `places`.
        optional (`bool`): Whether to leave it out when it has the default (a key that few checkpoints carry).
        must_state (`bool`): Whether the format's readers need it, so that `None` cannot be written.
    """

    ours: str
    default: Any = REQUIRED
    places: tuple[str, ...] = ()
    written: str | None = None
    optional: bool = False
    must_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", self.places or (self.ours,))


def plain_keys(defaults: Mapping[str, Any], section: str = "", **options: Any) -> tuple[Key, ...]:
    """Returns keys that stand in one place, under our own names.

    Args:
        defaults (`Mapping[str, Any]`): Field -> what its absence means.
        section (`str`): The section that they stand in, with its dot.
        options: Further fields of `Key`.
    """
    return tuple(Key(name, default, (section + name,), **options) for name, default in defaults.items())


# A Qwen3 decoder's keys, with the defaults of `Qwen3Config`.
QWEN3_KEYS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), REQUIRED),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
QWEN3_HEAD_DIM = 128
QWEN3_THETA = 10000.0


class ConfigReader:
    """A format's `config.json`, keeping account of what has been read.

    Args:
        config (`Mapping`): The parsed file.
        section (`str`, *optional*): The one key whose value is a dictionary with keys of its own.
        weights (`frozenset[str]`): Our names of the checkpoint's weights, for formats that say with a weight what
            others say with a key.
    """

    def __init__(
        self, config: Mapping[str, Any], section: str | None = None, weights: frozenset[str] = frozenset()
    ) -> None:
        self.weights = weights
        self._values = dict(config)
        inner = self._values.pop(section, None) if section is not None else None
        if inner is not None and not isinstance(inner, Mapping):
            raise ValueError(
                f"expected {section} to be a dictionary in the checkpoint's config.json, got {shown(inner)}; fix it"
            )
        self._values.update({f"{section}.{key}": value for key, value in (inner or {}).items()})
        self._unread = set(self._values)

    def take(self, *places: str, default: Any = REQUIRED, kind: type | UnionType | None = None) -> Any:
        """Returns what the first of `places` that is present says; null means absent.

        Args:
            places (`str`): Where to look, in this order.
            default: What is returned if it is nowhere.
            kind (`type`, *optional*): What type it has to have. A field of `DFlashConfig` is checked there, too.

        Raises:
            ValueError: If two places disagree, none is there and there is no default, or the type is another.
        """
        self._unread -= set(places)
        stated = {place: self._values[place] for place in places if self._values.get(place) is not None}
        name, file = " or ".join(places), "the checkpoint's config.json"
        if not stated:
            if default is REQUIRED:
                raise ValueError(f"expected {name} in {file}, got neither a value nor a default; add it")
            return copy.copy(default)  # a list of the table must not end up in a config
        value = next(iter(stated.values()))
        agrees = all(other == value for other in stated.values())
        require(agrees, "one value", stated, f"make {file} agree with itself")
        if kind is not None:
            is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            require(is_kind, f"{name} of type {getattr(kind, '__name__', kind)} in {file}", value, "fix it")
        return value

    def take_num_layers(self, *places: str, default: Any = REQUIRED) -> int:
        """Returns the number of draft layers, which other fields are as long as.

        Raises:
            ValueError: As `take`, and if it is none that a draft can have.
        """
        number: int = self.take(*places, default=default, kind=int)
        require(1 <= number <= MAX_LAYERS, f"{' or '.join(places)} from 1 to {MAX_LAYERS}", number, "fix it")
        return number

    def take_layer_types(self, num_layers: int, window: Any, section: str = "") -> list[Any]:
        """Returns the kind of each layer; where `layer_types` is absent, by `Qwen3Config`'s rule.

        Args:
            num_layers (`int`): Number of draft layers.
            window: The sliding window, if any.
            section (`str`): The section that the keys stand in, with its dot.

        Raises:
            ValueError: If a layer slides beside `use_sliding_window: false`.
        """
        layer_types: list[Any] | None = self.take(f"{section}layer_types", default=None, kind=list)
        use_window = self.take(f"{section}use_sliding_window", default=None)
        first_sliding = self.take(f"{section}max_window_layers", default=28, kind=int)
        if layer_types is None:
            full = num_layers if window is None or not use_window else min(max(first_sliding, 0), num_layers)
            return ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
        if use_window is False and "sliding_attention" in layer_types:
            raise ValueError(
                f"expected {section}use_sliding_window true or absent beside layer_types {shown(layer_types)}, got "
                "false; make the checkpoint's config.json agree with itself"
            )
        return layer_types

    def take_rope(self, default_theta: float, section: str = "") -> dict[str, Any]:
        """Returns `rope_parameters`, from that key (Transformers 5) or from `rope_theta` and `rope_scaling` (before).

        Args:
            default_theta (`float`): What the format means where it states none.
            section (`str`): The section that the keys stand in, with its dot.

        Raises:
            ValueError: If the two spellings disagree, or there is a parameter that is not known.
        """
        fix = "fix the checkpoint's config.json"
        given = {**self.take(f"{section}rope_parameters", f"{section}rope_scaling", default={}, kind=dict)}
        kinds = [kind for name in ("type", "rope_type") if (kind := given.pop(name, None)) is not None]
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
        return {
            "rope_type": kinds[0] if kinds else "default",
            "rope_theta": thetas[0] if thetas else default_theta,
            **{name: value for name, value in given.items() if name in ROPE_KEYS},
        }

    def take_present(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns what stands under those of `names` that are present, null included."""
        self._unread.difference_update(names)
        return {name: self._values[name] for name in names if name in self._values}

    def discard(self, keys: frozenset[str]) -> None:
        """Marks keys as read that make no difference to the draft."""
        self._unread -= keys

    def check_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Accepts fields of variants that are not supported, as long as they are switched off.

        Raises:
            ValueError: If one is switched on.
        """
        for key, allowed in neutral.items():
            what = f"{key} absent or in {allowed} in the checkpoint's config.json"
            value = self.take(key, default=None)
            require(value is None or value in allowed, what, value, "this variant of DFlash is not supported")

    def finish(self, name: str) -> None:
        """Refuses keys that nothing has read: ignoring one could change what the draft computes.

        Raises:
            ValueError: Listing them.
        """
        if self._unread:
            raise ValueError(
                f"expected only known keys in a config.json of the format {name!r}, got also "
                f"{shown(sorted(self._unread))}; they belong to a variant that is not supported"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """A checkpoint format, as data. What it cannot express is what it does not read back.

    Args:
        name (`str`): Its name in `save_draft(format=...)`.
        matches (`Callable`): Recognises a parsed `config.json` by its content.
        weights (`Mapping[str, str]`): Their name of each weight -> ours; `{}` stands for the index of the layer.
        keys (`tuple[Key, ...]`): Fields with a key of their own.
        section (`str`, *optional*): See `ConfigReader`.
        read_rest (`Callable`): Reads the fields that need more than one key.
        write_rest (`Callable`): Writes those, and the constants of the format.
        refuse (`Callable`): Yields a sentence part `"field = value (reason)"` per field that it could write down and
            read again, and that its other readers do not understand.
        neutral (`Mapping[str, tuple]`): Keys of unsupported variants -> the values under which they do nothing.
        ignored (`frozenset[str]`): Keys that make no difference to a draft.
        dropped (`frozenset[str]`): Weights that are not loaded: copies of the target's, or what follows from others.
        derive (`Callable`): Returns, by the format's names, weights that follow from the draft's, to be saved too.
        has_vocabulary (`bool`, *optional*): Whether drafts bring an embedding and a head: all, none, or (`None`) some.
        name_target (`Callable`, *optional*): Writes the target's name and architectures into a written config.
    """

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    weights: Mapping[str, str]
    keys: tuple[Key, ...]
    section: str | None = None
    read_rest: Callable[[ConfigReader], dict[str, Any]]
    write_rest: Callable[[DFlashConfig], dict[str, Any]]
    refuse: Callable[[DFlashConfig], Iterator[str]] = lambda config: iter(())
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    ignored: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    derive: Callable[[DFlashConfig, Mapping[str, Tensor]], dict[str, Tensor]] = lambda config, weights: {}
    has_vocabulary: bool | None = None
    name_target: Callable[[dict[str, Any], str, list[str]], None] | None = None

    def read_config(self, config: Mapping[str, Any], weights: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Returns the fields of `DFlashConfig` that a parsed `config.json` of this format states or implies.

        Args:
            config (`Mapping`): The parsed file.
            weights (`frozenset[str]`): Our names of the weights beside it.

        Raises:
            ValueError: If a key is unknown, missing, contradicts another or belongs to an unsupported variant.
        """
        reader = ConfigReader(config, self.section, weights)
        reader.discard(self.ignored)
        reader.check_neutral(self.neutral)
        values = {key.ours: reader.take(*key.places, default=key.default) for key in self.keys}
        values.update(self.read_rest(reader))
        reader.finish(self.name)
        return values

    def write_config(self, config: DFlashConfig, dtype: str, weights: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Returns this format's `config.json` for a draft.

        Args:
            config (`DFlashConfig`): Of the draft.
            dtype (`str`): What its weights are stored as.
            weights (`frozenset[str]`): Our names of them.

        Raises:
            ValueError: Naming the fields that the format cannot express.
        """
        unstated = [key.ours for key in self.keys if key.must_state and getattr(config, key.ours) is None]
        wrong = [f"{name} = None (its readers need it)" for name in unstated]
        out: dict[str, Any] = {"dtype": dtype}
        if not wrong:
            for key in self.keys:
                value = getattr(config, key.ours)
                if key.optional and value == key.default:
                    continue
                section, _, name = (key.written or key.places[-1]).rpartition(".")
                (out.setdefault(section, {}) if section else out)[name] = value
            for name, value in self.write_rest(config).items():
                out[name] = {**out[name], **value} if name == self.section and name in out else value
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
        """Returns our name of one of this format's weights; names that it does not know stay as they are."""
        return _translated(theirs, self.weights) or theirs

    def their_name(self, ours: str) -> str:
        """Returns this format's name of one of our weights.

        Raises:
            ValueError: If the format has no such weight.
        """
        name = _translated(ours, {own: theirs for theirs, own in self.weights.items()})
        require(name is not None, f"a weight of the format {self.name!r}", ours, "save it in the format 'dflash'")
        return str(name)


def _translated(name: str, table: Mapping[str, str]) -> str | None:
    """What a table of weights, in which `{}` stands for the index of a layer, has for a name."""
    index = re.search(r"(?<=\.)\d+(?=\.)", name)
    pattern = name if index is None else f"{name[: index.start()]}{{}}{name[index.end() :]}"
    found = table.get(pattern)
    return None if found is None else found.replace("{}", index.group() if index else "")


def make_config(values: Mapping[str, Any]) -> DFlashConfig:
    """Builds the config from what a format said.

    Raises:
        ValueError: If a value has the wrong type, or fields contradict each other.
    """
    for name, value in values.items():
        # One entry per layer, and perhaps the embeddings; checking the types of a million takes seconds.
        if isinstance(value, list):
            require(len(value) <= MAX_LAYERS + 1, f"{name} with up to {MAX_LAYERS + 1} entries", len(value), "fix it")
    try:
        return DFlashConfig(**values)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(
            f"expected a valid draft config, got one that says: {one_line(error)}; fix the checkpoint's config.json"
        ) from error


ROPE_KEYS = frozenset(
    {
        *("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "truncate"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
    }
)
# A target's image axes, copied into some drafts' configs. A draft's positions are plain indices: they do nothing.
IMAGE_ROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})


def _alike(*names: str) -> dict[str, str]:
    """A table of weights that are named as ours are."""
    return {name: name for name in names}


# The body is named alike in every format known.
BODY_WEIGHTS = _alike(
    "norm.weight",
    "layers.{}.input_layernorm.weight",
    "layers.{}.post_attention_layernorm.weight",
    *(f"layers.{{}}.self_attn.{projection}_proj.weight" for projection in "qkvo"),
    "layers.{}.self_attn.q_norm.weight",
    "layers.{}.self_attn.k_norm.weight",
    *(f"layers.{{}}.mlp.{projection}_proj.weight" for projection in ("gate", "up", "down")),
)
BODY_BIASES = _alike(*(f"layers.{{}}.self_attn.{projection}_proj.bias" for projection in "qkvo"))
# What the features of the target go through; Muse has other names for it.
FEATURE_WEIGHTS = _alike("fc.weight", "hidden_norm.weight")
# What a draft has that does not use the target's embedding and head.
OWN_VOCABULARY_WEIGHTS = _alike("embed_tokens.weight", "lm_head.weight")
# Which tokens a head of a reduced vocabulary knows.
REDUCED_WEIGHTS = _alike("d2t")
# What DFlash 2 adds. Named alike wherever it is known; the codebooks are bare parameters, without `.weight`.
DFLASH2_WEIGHTS = _alike(
    *(
        f"layers.{{}}.{place}_conv.{weight}"
        for place in ("attention", "mlp")
        for weight in ("base_kernel", "kernel_projection.weight")
    ),
    "candidate_selector.hidden_projection.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)

# What configs of Transformers carry about other things than a draft's function.
COMMON_IGNORED = frozenset(
    {
        *("_commit_hash", "_name_or_path", "name_or_path", "architectures", "auto_map", "model_type", "dtype"),
        *("torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "id2label"),
        *("label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "tie_word_embeddings"),
        *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    }
)
