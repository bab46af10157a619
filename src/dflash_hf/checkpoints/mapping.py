"""What a checkpoint format is: a table of config keys and a table of weights, each read in both directions.

A new layout is a module with one `CheckpointFormat`. Values that one key alone does not determine (RoPE, kinds of
layers) go through its `read_rest` and `write_rest`. Nothing here opens a file or builds a model, and no other part of
the project looks into a foreign config.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from dflash_hf.configuration_dflash import MAX_LAYERS, DFlashConfig
from dflash_hf.errors import one_line, shown


class Stated(Enum):
    """Marks a key that the config has to contain."""

    REQUIRED = "required"


REQUIRED = Stated.REQUIRED


@dataclass(frozen=True, slots=True)
class Key:
    """One field of `DFlashConfig` and where a layout keeps it.

    Args:
        ours (`str`): The field.
        places (`tuple[str, ...]`): Where it may stand, in the order of lookup; `"a.b"` is `b` in the section `a`.
        default: What an absent (or null) key means in this layout, or `REQUIRED`.
        written (`str`, *optional*): Where it is written; defaults to the last of `places`.
        optional (`bool`): Whether to leave it out when it has the default (a key that few checkpoints carry).
        must_state (`bool`): Whether the layout's readers need it, so that `None` cannot be written.
    """

    ours: str
    places: tuple[str, ...]
    default: Any = REQUIRED
    written: str | None = None
    optional: bool = False
    must_state: bool = False


class ConfigReader:
    """A layout's `config.json`, keeping account of what has been read.

    Args:
        config (`Mapping`): The parsed file.
        section (`str`, *optional*): The one key whose value is a dictionary with keys of its own.
        weights (`frozenset[str]`): Names of the checkpoint's weights, for layouts that say with a weight what others
            say with a key.
    """

    def __init__(
        self, config: Mapping[str, Any], section: str | None = None, weights: frozenset[str] = frozenset()
    ) -> None:
        self.weights = weights
        self._values = dict(config)
        inner = self._values.pop(section, None) if section is not None else None
        if inner is not None and not isinstance(inner, Mapping):
            raise ValueError(
                f"expected {section} to be a dictionary in the checkpoint's config.json, got {shown(inner)}; mend it"
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
        if not stated:
            if default is REQUIRED:
                raise ValueError(
                    f"expected {' or '.join(places)} in the checkpoint's config.json, got neither a value nor a "
                    "default; add it"
                )
            return copy.copy(default)  # a list of the table must not end up in a config
        value = next(iter(stated.values()))
        if any(other != value for other in stated.values()):
            raise ValueError(
                f"expected one value, got {shown(stated)}; make the checkpoint's config.json agree with itself"
            )
        if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise ValueError(
                f"expected {' or '.join(places)} of type {getattr(kind, '__name__', kind)} in the checkpoint's "
                f"config.json, got {shown(value)}; mend it"
            )
        return value

    def take_num_layers(self, *places: str, default: Any = REQUIRED) -> int:
        """Returns the number of draft layers, which other fields are as long as.

        Raises:
            ValueError: As `take`, and if it is none that a draft can have.
        """
        number: int = self.take(*places, default=default, kind=int)
        if not 1 <= number <= MAX_LAYERS:
            raise ValueError(f"expected {' or '.join(places)} from 1 to {MAX_LAYERS}, got {shown(number)}; mend it")
        return number

    def take_present(self, names: frozenset[str]) -> dict[str, Any]:
        """Returns what stands under those of `names` that are present, null included."""
        self._unread -= names
        return {name: value for name, value in self._values.items() if name in names}

    def discard(self, keys: frozenset[str]) -> None:
        """Marks keys as read that make no difference to the draft."""
        self._unread -= keys

    def check_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Accepts fields of variants that are not supported, as long as they are switched off.

        Raises:
            ValueError: If one is switched on.
        """
        for key, allowed in neutral.items():
            value = self.take(key, default=None)
            if value is not None and value not in allowed:
                raise ValueError(
                    f"expected {key} absent or in {allowed} in the checkpoint's config.json, got {shown(value)}; this "
                    "variant of DFlash is not supported"
                )

    def finish(self, layout: str) -> None:
        """Refuses keys that nothing has read: ignoring one could change what the draft computes.

        Raises:
            ValueError: Listing them.
        """
        if self._unread:
            raise ValueError(
                f"expected only known keys in a config.json of the layout {layout!r}, got also "
                f"{shown(sorted(self._unread))}; they belong to a variant that is not supported"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """A checkpoint layout, as data.

    Args:
        name (`str`): Its name in `save_draft(layout=...)`.
        matches (`Callable`): Recognises a parsed `config.json` by its content.
        weights (`Mapping[str, str]`): Their name of each weight -> ours; `{}` stands for the index of the layer.
        keys (`tuple[Key, ...]`): Fields with a key of their own.
        section (`str`, *optional*): See `ConfigReader`.
        read_rest (`Callable`): Reads the fields that need more than one key.
        write_rest (`Callable`): Writes those, and the constants of the layout.
        refuse (`Callable`): Yields a sentence part `"field = value (reason)"` per field the layout cannot express.
        neutral (`Mapping[str, tuple]`): Keys of unsupported variants -> the values under which they do nothing.
        ignored (`frozenset[str]`): Keys that make no difference to a draft.
        dropped (`frozenset[str]`): Weights that are not loaded: copies of the target's, or what follows from others.
        derive (`Callable`): Returns, by the layout's names, weights that follow from the draft's, to be saved too.
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
    refuse: Callable[[DFlashConfig], Iterator[str]]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    ignored: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    derive: Callable[[DFlashConfig, Mapping[str, Tensor]], dict[str, Tensor]] = lambda config, weights: {}
    has_vocabulary: bool | None = None
    name_target: Callable[[dict[str, Any], str, list[str]], None] | None = None

    def read_config(self, config: Mapping[str, Any], weights: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Returns the fields of `DFlashConfig` that a parsed `config.json` of this layout states or implies.

        Args:
            config (`Mapping`): The parsed file.
            weights (`frozenset[str]`): Names of the weights beside it.

        Raises:
            ValueError: If a key is unknown, missing, contradicts another or belongs to an unsupported variant.
        """
        reader = ConfigReader(config, self.section, weights)
        reader.discard(self.ignored)
        reader.check_neutral(self.neutral)
        fields = {key.ours: reader.take(*key.places, default=key.default) for key in self.keys}
        fields.update(self.read_rest(reader))
        reader.finish(self.name)
        return fields

    def write_config(self, config: DFlashConfig, dtype: str) -> dict[str, Any]:
        """Returns this layout's `config.json` for a draft whose weights are stored as `dtype`.

        Raises:
            ValueError: Naming the fields that the layout cannot express.
        """
        unstated = (
            f"{key.ours} = None (its readers need it)"
            for key in self.keys
            if key.must_state and getattr(config, key.ours) is None
        )
        if wrong := [*unstated, *self.refuse(config)]:
            raise ValueError(
                f"expected a draft that the layout {self.name!r} can express, got {'; '.join(wrong)}; "
                "save it in the layout 'dflash'"
            )
        out: dict[str, Any] = {}
        for key in self.keys:
            value = getattr(config, key.ours)
            if key.optional and value == key.default:
                continue
            section, _, name = (key.written or key.places[-1]).rpartition(".")
            (out.setdefault(section, {}) if section else out)[name] = value
        for name, value in self.write_rest(config).items():
            out[name] = {**out[name], **value} if name == self.section and name in out else value
        return {**out, "dtype": dtype}

    def key_mapping(self) -> dict[str, str]:
        """Returns the renames that Transformers' `from_pretrained(key_mapping=...)` needs, as regular expressions."""
        renamed = {theirs: ours for theirs, ours in self.weights.items() if theirs != ours}
        return {
            "^" + re.escape(theirs).replace(r"\{\}", r"(\d+)") + "$": ours.replace("{}", r"\1")
            for theirs, ours in renamed.items()
        }

    def our_name(self, theirs: str) -> str:
        """Returns our name of one of this layout's weights; names that it does not know stay as they are."""
        index = re.search(r"(?<=\.)\d+(?=\.)", theirs)
        pattern = theirs if index is None else f"{theirs[: index.start()]}{{}}{theirs[index.end() :]}"
        name = self.weights.get(pattern)
        return theirs if name is None else name.replace("{}", index.group() if index else "")

    def their_name(self, ours: str) -> str:
        """Returns this layout's name of one of our weights.

        Raises:
            ValueError: If the layout has no such weight.
        """
        index = re.search(r"(?<=\.)\d+(?=\.)", ours)
        pattern = ours if index is None else f"{ours[: index.start()]}{{}}{ours[index.end() :]}"
        for theirs, name in self.weights.items():
            if name == pattern:
                return theirs.replace("{}", index.group()) if index else theirs
        raise ValueError(
            f"expected a weight of the layout {self.name!r}, got {shown(ours)}; save it in the layout 'dflash'"
        )


def refuse_fields(config: DFlashConfig, *names: str) -> Iterator[str]:
    """Yields a part of `CheckpointFormat.refuse` for each of these switches that is on."""
    for name in names:
        if value := getattr(config, name):
            yield f"{name} = {value} (it has no place for it)"


# What only our own layout says: readers of the others tap where they do.
OWN_FIELDS = ("tap_after_deepstack",)
# What only drafts of speculators and DeepSpec have.
FOREIGN_FIELDS = ("own_embed_tokens", "own_lm_head", "draft_vocab_size", "sample_from_anchor", "window_from_anchor")


def make_config(fields: Mapping[str, Any]) -> DFlashConfig:
    """Builds the config from what a layout said.

    Raises:
        ValueError: If a value has the wrong type, or fields contradict each other.
    """
    for name, value in fields.items():
        # One entry per layer, and perhaps the embeddings; checking the types of a million takes seconds.
        if isinstance(value, list) and len(value) > MAX_LAYERS + 1:
            raise ValueError(f"expected {name} with up to {MAX_LAYERS + 1} entries, got {len(value)}; mend it")
    try:
        return DFlashConfig(**fields)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(
            f"expected a valid draft config, got one that says: {one_line(error)}; mend the checkpoint's config.json"
        ) from error


ROPE_KEYS = frozenset(
    {
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
        "high_freq_factor",
    }
)
# A target's image axes, copied into some drafts' configs. A draft's positions are plain indices: they do nothing.
IMAGE_ROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})


def read_rope(reader: ConfigReader, default_theta: float, prefix: str = "") -> dict[str, Any]:
    """Returns `rope_parameters`, from that key (Transformers 5) or from `rope_theta` and `rope_scaling` (before).

    Args:
        reader (`ConfigReader`): The config.
        default_theta (`float`): What the layout means where it states none.
        prefix (`str`): In front of the three keys, where they stand in a section.

    Raises:
        ValueError: If the two spellings disagree, or there is a parameter that is not known.
    """
    scaling = {**reader.take(f"{prefix}rope_parameters", f"{prefix}rope_scaling", default={}, kind=dict)}
    kinds = [kind for name in ("type", "rope_type") if (kind := scaling.pop(name, None)) is not None]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"expected one rope_type, got {shown(kinds)}; mend the checkpoint's config.json")
    theta = reader.take(f"{prefix}rope_theta", default=None)
    thetas = [value for value in (scaling.pop("rope_theta", None), theta) if value is not None]
    if any(value != thetas[0] for value in thetas):
        raise ValueError(f"expected one rope_theta, got {shown(thetas)}; mend the checkpoint's config.json")
    partial = [scaling.pop("partial_rotary_factor", None), reader.take(f"{prefix}partial_rotary_factor", default=None)]
    partial = [value for value in partial if value not in (None, 1.0)]
    unknown = sorted(scaling.keys() - ROPE_KEYS - IMAGE_ROPE_KEYS)
    if unknown or partial:
        raise ValueError(
            f"expected a RoPE over whole heads with known parameters, got partial_rotary_factor {shown(partial)} "
            f"and the parameters {shown(unknown)}; this variant is not supported"
        )
    kept = {name: value for name, value in scaling.items() if name in ROPE_KEYS}
    return {
        "rope_type": kinds[0] if kinds else "default",
        "rope_theta": thetas[0] if thetas else default_theta,
        **kept,
    }


# The body is named alike in every layout known.
BODY_WEIGHTS = {
    name: name
    for name in (
        "norm.weight",
        "layers.{}.input_layernorm.weight",
        "layers.{}.post_attention_layernorm.weight",
        *(f"layers.{{}}.self_attn.{projection}_proj.weight" for projection in "qkvo"),
        "layers.{}.self_attn.q_norm.weight",
        "layers.{}.self_attn.k_norm.weight",
        *(f"layers.{{}}.mlp.{projection}_proj.weight" for projection in ("gate", "up", "down")),
    )
}
BODY_BIASES = {name: name for name in (f"layers.{{}}.self_attn.{projection}_proj.bias" for projection in "qkvo")}
# What a draft has that does not use the target's embedding and head.
OWN_VOCABULARY_WEIGHTS = {name: name for name in ("embed_tokens.weight", "lm_head.weight", "d2t")}

# What DFlash 2 adds. Named alike wherever it is known; the codebooks are bare parameters, without `.weight`.
DFLASH2_WEIGHTS = {
    name: name
    for name in (
        *(
            f"layers.{{}}.{place}_conv.{weight}"
            for place in ("attention", "mlp")
            for weight in ("base_kernel", "kernel_projection.weight")
        ),
        "candidate_selector.hidden_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
    )
}
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# What configs of Transformers carry about other things than a draft's function.
COMMON_IGNORED = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
