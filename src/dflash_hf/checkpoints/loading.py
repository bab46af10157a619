"""This module makes drafts, loads them in any known format, and saves them in our own format.

Only safetensors files are loaded, and no code of the checkpoint runs. The formats are tables in
`dflash_hf.checkpoints`. Transformers itself handles files, devices and dtypes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, logging
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.checkpoints.files import (
    FLOAT_DTYPES,
    PathOrRepo,
    StoredTensor,
    find_file,
    read_config,
    read_json,
    stored_tensors,
    unshared,
)
from dflash_hf.checkpoints.formats import detect_format
from dflash_hf.checkpoints.fresh import Tokenizer, fresh_config, set_first_values
from dflash_hf.checkpoints.mapping import CONFIDENCE_WEIGHTS, FIELDS, CheckpointFormat, make_config
from dflash_hf.checkpoints.quantised import Stored, dequantised, scheme_of
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import listed, one_line, require
from dflash_hf.generation_config import DFlashGenerationConfig

logger: Any = logging.get_logger(__name__)
# The arguments of `from_pretrained` that say where the files are.
HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
# A file with an embedding of the draft's own for the mask token, as a pickle.
MASK_FILE = "mask_embedding.pt"
# Names of the tensors that layers of quantised checkpoints have instead of a weight, or beside it.
QUANTISED = (
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_shape",
    "weight_zero_point",
    "input_scale",
    "qweight",
    "qzeros",
    "scales",
    "absmax",
)


class Checkpoint(NamedTuple):
    """The content of a draft's files, except the values of weights, which have not been loaded."""

    raw: dict[str, Any]  # its config.json
    form: CheckpointFormat
    config: DFlashConfig  # with the caller's overrides
    stored: dict[str, Stored]  # all weights, by the names in the files
    found: dict[str, Stored]  # the weights that are loaded, by our names
    quantised_bits: (
        int | None
    )  # bits per number in the files; `None` if the weights are not quantised


class DFlashPreTrainedModel(PreTrainedModel):
    """Holds the attributes that Transformers asks of a model class, and loads drafts in every known format."""

    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    # Names of speculators' format. Which weights a checkpoint may hold is checked before, for each format.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^t2d$",
        r"^d2t$",
        r"^verifier_",
        r"^confidence_head",
    ]
    _no_split_modules = [  # noqa: RUF012  (Transformers' own form)
        "DFlashDecoderLayer",
        "DFlash2Layer",
        "DFlashGemma4Layer",
        "DFlashLagunaLayer",
    ]
    _skip_keys_device_placement = [CACHE_NAME]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def get_input_embeddings(self) -> Any:
        """Returns the draft's own embedding, or `None` if the draft uses the target's. FSDP calls this method."""
        return getattr(self, "embed_tokens", None)

    def _supports_logits_to_keep(self) -> bool:
        """Raises `ValueError`: Transformers' own assisted decoding calls this in a `generate` that knows no drafts."""
        raise ValueError(
            "expected a generate that knows DFlash drafts, got Transformers' own (kept from before the import of "
            "dflash_hf, or after disable()); import dflash_hf first and call model.generate(...) again"
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: PathOrRepo | None, *model_args: Any, **kwargs: Any
    ) -> Self:
        """Loads a draft from a folder or the Hub, in any format that `checkpoints` knows.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`, *optional*): Folder or Hub id. `None` builds a draft
                from `config` and `state_dict`, as in Transformers.
            model_args: Passed to the model.
            kwargs: Arguments of [`~transformers.PreTrainedModel.from_pretrained`] and overrides of fields of
                [`DFlashConfig`]. The default `dtype="auto"` is the config's `dtype`, or the dtype of the stored
                weights if the config has none. `generation_config` replaces the stored one. `trust_remote_code` has no
                effect.

        Returns:
            The draft, in eval mode, with its `generation_config`; with `output_loading_info=True` also Transformers'
            report.

        Raises:
            ValueError: If the format is unknown; if the config has keys that are unknown or contradict each other; if
                a weight is missing, unknown or has the wrong shape or type; if a vocabulary map points outside the
                vocabulary; if the weights are not (whole) safetensors files; or if `generation_config` is of another
                class. All of that is checked before any weight is loaded. After loading, if a weight is NaN or
                infinite.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *model_args, **kwargs)
        path = pretrained_model_name_or_path
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError(
                "expected use_safetensors=True or nothing, got False; only safetensors are loaded"
            )
        for ours in ("trust_remote_code", "ignore_mismatched_sizes"):
            kwargs.pop(ours, None)
        generation_config = kwargs.pop("generation_config", None)
        # A plain config has no options of drafts. Without this check, the error would come only after loading weights.
        is_right = generation_config is None or isinstance(
            generation_config, DFlashGenerationConfig
        )
        kind = type(generation_config).__name__
        advice = "pass dflash_hf.DFlashGenerationConfig(...), or leave it out"
        require(is_right, "a DFlashGenerationConfig as generation_config", kind, advice)
        # Transformers would also load the adapter, without any check.
        adapter = find_file(path, ADAPTER_CONFIG_NAME, hub)
        advice = "merge the adapter into the draft's weights, or take its files away"
        require(not adapter, f"a draft without an adapter in {path}", ADAPTER_CONFIG_NAME, advice)
        checkpoint = cls._checked(path, hub, kwargs, model_args)
        if CONFIDENCE_WEIGHTS & checkpoint.stored.keys():
            logger.warning_once(
                f"The confidence head of {path} is not used: how many tokens a step verifies follows verify_width."
            )
        asked = kwargs.get("dtype") or kwargs.get("torch_dtype") or "auto"
        if asked == "auto" and checkpoint.config.dtype is None:
            # Transformers would take the dtype of the first tensor, even if this tensor is not loaded.
            kinds = (FLOAT_DTYPES.get(one.dtype) for one in checkpoint.found.values())
            kwargs["dtype"] = next(filter(None, kinds))
        renamed = {
            f"^{re.escape(one.name)}$": name
            for name, one in checkpoint.found.items()
            if one.name != name
        }
        kwargs |= {
            "config": checkpoint.config,
            "key_mapping": renamed or None,
            "use_safetensors": True,
        }
        files: PathOrRepo | None = path
        if not all(isinstance(one, StoredTensor) for one in checkpoint.found.values()):
            # Some weights are made from what is stored: they are dequantised, or parts of a larger weight.
            kwargs |= {
                "key_mapping": None,
                "state_dict": {name: one.read() for name, one in checkpoint.found.items()},
            }
            for name in (*HUB_ARGUMENTS, "variant"):
                kwargs.pop(name, None)
            files = None
        result: Any = super().from_pretrained(files, *model_args, **kwargs)
        draft = result
        if kwargs.get("output_loading_info"):
            draft = result[0]
        # Transformers leaves no name in the config if the weights came from this function.
        draft.config.name_or_path = str(path)
        _check_finite(draft, path)
        if generation_config is None and checkpoint.form.name == DFlashConfig.model_type:
            generation_config = _read_generation_config(path, hub)
        draft.generation_config = generation_config or DFlashGenerationConfig()
        draft.generation_config.validate_options(
            draft.config.block_size, draft.config.sample_from_anchor
        )
        return result

    @classmethod
    def _checked(
        cls,
        path: PathOrRepo,
        hub: Mapping[str, Any],
        kwargs: dict[str, Any],
        model_args: Sequence[Any] = (),
    ) -> Checkpoint:
        """Reads the files of a checkpoint and checks that they fit one another.

        Removes `config`, `key_mapping` and overrides of the config from `kwargs`. These arguments are those of
        [`~DFlashPreTrainedModel.from_pretrained`]. Raises the `ValueError`s that it raises before it loads weights.
        """
        given: PreTrainedConfig | PathOrRepo | None = kwargs.pop("config", None)
        source = path
        if isinstance(given, str | PathLike):
            source = given
        raw = read_config(source, hub)
        pickled = find_file(path, MASK_FILE, hub)
        what = f"a draft in {path} whose blocks are filled with the target's row of the mask token"
        advice = "vLLM and SGLang take that row from this file of MiMo's, which is not supported"
        require(not pickled, what, MASK_FILE, advice)
        in_files = stored_tensors(path, hub, kwargs.get("variant"))
        stored: dict[str, Stored] = {**in_files}
        try:
            scheme = scheme_of(raw)
            quantised_bits = None
            if scheme is not None:
                stored = dequantised(in_files, scheme, path)
                quantised_bits = scheme.num_bits
            form = detect_format(raw)
            stored = form.take_apart(stored, raw)
            found = dict[str, Stored]()
            renamed: dict[str, str] = kwargs.pop("key_mapping", None) or {}
            for name, tensor in stored.items():
                for pattern, replacement in renamed.items():
                    name = re.sub(pattern, replacement, name)
                if name not in form.dropped:
                    found[form.our_name(name)] = tensor
            values = form.read_config(raw, frozenset(found))
            if isinstance(given, PreTrainedConfig):
                what = "a DFlashConfig as config"
                right_call = f"dflash_hf.load_draft({str(path)!r})"
                advice = f"leave it out, and load the draft with {right_call}"
                require(isinstance(given, DFlashConfig), what, type(given).__name__, advice)
                config = cast(DFlashConfig, copy.deepcopy(given))
            else:
                config = make_config(
                    values | {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
                )
        except ValueError as error:
            raise ValueError(f"{error} (in config.json of {source})") from error
        _check_weights(found, cls._shapes(config, model_args), form, path)
        _check_vocabulary(stored, config, path)
        return Checkpoint(raw, form, config, stored, found, quantised_bits)

    @classmethod
    def _shapes(
        cls, config: DFlashConfig, model_args: Sequence[Any] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the weights of a draft with this config."""
        with torch.device("meta"):
            state = cls(copy.deepcopy(config), *model_args).state_dict()
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        num_hidden_layers: int = 5,
        block_size: int = 16,
        num_taps: int = 5,
        target_layer_ids: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        tokenizer: Tokenizer | None = None,
        draft_token_ids: Sequence[int] | None = None,
        **fields: Any,
    ) -> Self:
        """Makes a fresh draft for a target, which has to be trained.

        The draft follows the published recipes, and uses the target's embedding and head. Heads, RoPE, epsilon and the
        width of the MLP come from the target's text config. Taps are spread as in z-lab's drafts. Attention is full.
        Cross entropy begins near `log V`.

        Args:
            target (`PreTrainedModel`): The target. It is not changed.
            num_hidden_layers (`int`): Layers of the draft.
            block_size (`int`): Slots of a block, the anchor included.
            num_taps (`int`): Number of the target's layers that are tapped. A shallow target may have fewer taps.
            target_layer_ids (sequence of `int`, *optional*): The layers that are tapped, instead of `num_taps`.
            mask_token_id (`int`, *optional*): The token that fills a block. It must occur in no text. The default is a
                token that the tokenizer does not use. The log says which token this is.
            tokenizer (`PreTrainedTokenizerBase` or `ProcessorMixin`, *optional*): The target's tokenizer. It is needed
                if there is no `mask_token_id`.
            draft_token_ids (sequence of `int`, *optional*): Tokens of a reduced vocabulary
                ([`~training.frequent_tokens`]). The draft then has its own head with the rows of these tokens.
            fields: Other fields of [`DFlashConfig`]: `sample_from_anchor`, `own_embed_tokens` and `own_lm_head` (both
                begin as copies of the target's), `layer_types` and `sliding_window`, DFlash 2's ...

        Returns:
            The draft, in float32 on the CPU, in training mode.

        Raises:
            ValueError: If there is no token to fill blocks with; if the target has no embedding or head that a draft
                could use; or if a field is unknown, describes the target, or contradicts another field.
        """
        fields |= {"num_hidden_layers": num_hidden_layers, "block_size": block_size}
        fields |= {"target_layer_ids": target_layer_ids, "mask_token_id": mask_token_id}
        draft = cls(fresh_config(target, fields, num_taps, tokenizer, draft_token_ids)).float()
        set_first_values(draft, target, draft_token_ids)
        return draft

    def save_pretrained(self, save_directory: PathOrRepo, *args: Any, **kwargs: Any) -> None:
        """Saves the draft in our own format, with its `generation_config`. `save_draft` writes the other formats.

        Args:
            save_directory (`str` or `os.PathLike`): The folder.
            args, kwargs: Arguments of [`~transformers.PreTrainedModel.save_pretrained`]. With `push_to_hub=True`, also
                those of `push_to_hub`.

        Raises:
            ValueError: If the draft's weights are quantised, if it holds adapters, or if an argument says how the Hub
                makes a repository and `push_to_hub` does not have this argument.
        """
        # From here on, positional arguments are under their names.
        save_names = list(signature(super().save_pretrained).parameters)[1:]
        kwargs |= zip(save_names, args, strict=False)
        push_to_hub = kwargs.pop("push_to_hub", False)
        if push_to_hub:
            _check_hub_arguments(self, kwargs)
        check_plain(self)
        # Names are right if the caller has gathered the weights, or if Transformers saves only the adapters.
        has_state = kwargs.get("state_dict") is not None
        if not has_state and not getattr(self, "_hf_peft_config_loaded", False):
            self._check_names()
        # Otherwise, Transformers would undo the renaming of weights that were loaded from another format.
        kwargs["save_original_format"] = False
        embedding = getattr(self, "embed_tokens", None)
        head = getattr(self, "lm_head", None)
        is_shared = embedding is not None and head is not None and head.weight is embedding.weight
        if is_shared and not has_state:
            kwargs["state_dict"] = unshared(self.state_dict())
        super().save_pretrained(save_directory, **kwargs)
        is_main = kwargs.get("is_main_process", True)
        if is_main:
            self.generation_config.save_pretrained(save_directory)
        # The upload comes last, when all files are known to be good. It saves the draft again, into its own folder.
        if push_to_hub and is_main:
            kwargs.setdefault("repo_id", Path(save_directory).name)
            hub_names = kwargs.keys() & signature(self.push_to_hub).parameters
            self.push_to_hub(**{name: kwargs[name] for name in hub_names})

    def _check_names(self) -> None:
        """Raises `ValueError` if weights have other names than a loaded draft's. Adapters around them cause this."""
        others = sorted(self.state_dict().keys() ^ self._shapes(self.config).keys())
        advice = "merge adapters into the weights (merge_and_unload of PEFT), or save the adapters"
        require(not others, "a draft without adapters to save", listed(others), advice)


def _check_hub_arguments(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for arguments about making a repository on the Hub that `push_to_hub` does not take."""
    from huggingface_hub import HfApi

    made_with = signature(HfApi.create_repo).parameters.keys()
    others = sorted(given.keys() & made_with - signature(model.push_to_hub).parameters.keys())
    action = "make the repository first, with create_repo of huggingface_hub, and leave it out here"
    require(not others, "arguments of push_to_hub", listed(others), action)


def _check_weights(
    found: Mapping[str, Stored],
    expected: Mapping[str, tuple[int, ...]],
    form: CheckpointFormat,
    path: PathOrRepo,
) -> None:
    """Raises `ValueError` unless the files hold exactly the expected weights, as floats (and maps as integers)."""
    # Older versions of speculators wrote the map of a reduced vocabulary even for a whole vocabulary.
    names = set(found)
    if "t2d" in form.dropped and "d2t" not in expected:
        names.discard("d2t")
    wrong = [f"missing {form.their_name(name)}" for name in sorted(expected.keys() - names)]
    wrong += [f"unknown {found[name].name}" for name in sorted(names - expected.keys())]
    for name in sorted(names & expected.keys()):
        tensor = found[name]
        dtypes = set(FLOAT_DTYPES)
        if name == "d2t":
            dtypes = {"I64"}
        if tensor.shape != expected[name]:
            wrong.append(f"{tensor.name} of shape {tensor.shape} instead of {expected[name]}")
        elif tensor.dtype not in dtypes:
            wrong.append(f"{tensor.name} of type {tensor.dtype}")
    if {"F16", "BF16"} <= {tensor.dtype for tensor in found.values()}:
        wrong.append("weights of both types F16 and BF16")
    action = "check that its config.json belongs to these weights"
    if any(_is_quantised(tensor) for tensor in found.values()):
        action = "these weights are quantised: take the draft in bfloat16 or float32"
    if wrong:
        raise ValueError(
            f"expected exactly the weights of a draft in the format {form.name!r} in {path}, got "
            f"{listed(wrong, '; ')}; {action}"
        )


def foreign_weights(model: torch.nn.Module) -> list[str]:
    """Returns the kinds of weights that are tensors of another library, such as torchao, bitsandbytes or quanto."""
    kinds = {
        f"{type(weight).__module__.partition('.')[0]}.{type(weight).__name__}"
        for weight in model.parameters()
    }
    return sorted(kind for kind in kinds if not kind.startswith("torch."))


def check_plain(draft: torch.nn.Module) -> None:
    """Raises `ValueError` if a draft is wrapped, or if its weights are tensors of another library."""
    kind = type(draft).__name__
    advice = "merge adapters by merge_and_unload, and take a compiled draft as it was before"
    is_bare = isinstance(draft, DFlashPreTrainedModel)
    require(is_bare, "a DFlashDraftModel to save", kind, advice)
    others = foreign_weights(draft)
    advice = "save the draft as it was before it was quantised, and quantise it after loading"
    require(not others, "a draft with ordinary weights to save", listed(others), advice)


def _is_quantised(tensor: Stored) -> bool:
    """Returns True for a weight of a quantised layer, or for a tensor that belongs to one, such as scales or shape."""
    last = tensor.name.rpartition(".")[2]
    return last in QUANTISED or (last == "weight" and tensor.dtype not in FLOAT_DTYPES)


def _check_vocabulary(stored: Mapping[str, Stored], config: DFlashConfig, path: PathOrRepo) -> None:
    """Raises `ValueError` unless `d2t` names different tokens of the target's vocabulary, and `t2d` the same ones."""
    if "d2t" not in stored:
        return
    offsets = stored["d2t"].read()
    file = stored["d2t"].file
    size = config.vocab_size
    if not config.draft_vocab_size or not size:
        if bool(offsets.any()):
            raise ValueError(
                f"expected d2t in {file} absent or zero beside a draft_vocab_size of the whole vocabulary, got "
                "offsets; make config and weights agree"
            )
        return
    ids = offsets + torch.arange(offsets.shape[0], device=offsets.device)
    first = int(ids.min())
    last = int(ids.max())
    if first < 0 or last >= size:
        raise ValueError(
            f"expected d2t in {file} to point inside the vocabulary of {size} tokens (row i is token i + d2t[i]), got "
            f"tokens from {first} to {last}; check that config.json in {path} belongs to these weights"
        )
    marks = torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    if int(marks.sum()) != ids.shape[0]:
        raise ValueError(
            f"expected d2t in {file} to name every token once, got repetitions; download it again"
        )
    theirs = stored.get("t2d")
    if theirs is not None and not torch.equal(theirs.read().to(torch.bool), marks):
        raise ValueError(
            f"expected t2d in {theirs.file} to mark the tokens that d2t names, got others; download it again"
        )


def _check_finite(draft: torch.nn.Module, path: PathOrRepo) -> None:
    """Raises `ValueError` if a weight is NaN or infinite. Nothing would be accepted, without any message."""
    wrong: list[str] = []
    for name, tensor in draft.named_parameters():
        # Offloaded weights are not in memory, and quantised weights cannot be summed in this way.
        if (
            tensor.is_meta
            or type(tensor) is not torch.nn.Parameter
            or not tensor.is_floating_point()
        ):
            continue
        # A sum is finite only if its terms are, and needs no copy of them. It cannot overflow in these types.
        dtype = tensor.dtype
        if tensor.element_size() < 4:
            dtype = torch.float32
        if not bool(tensor.detach().sum(dtype=dtype).isfinite()):
            wrong.append(name)
    if not wrong:
        return
    is_narrow = any(draft.get_parameter(name).dtype == torch.float16 for name in wrong)
    advice = ""
    if is_narrow:
        advice = "load it with dtype=torch.float32 if float16 is too narrow for it, or "
    raise ValueError(
        f"expected finite weights in {path}, got NaN or infinite values in {listed(wrong)}; {advice}export or "
        "download it again"
    )


def _read_generation_config(path: PathOrRepo, hub: dict[str, Any]) -> DFlashGenerationConfig | None:
    """Returns the stored options, or `None` if there are none (offline: if none are cached)."""
    file = find_file(path, GENERATION_CONFIG_NAME, hub)
    if not file:
        return None
    try:
        loaded = DFlashGenerationConfig(**read_json(file))
        loaded.to_json_string()
    except ValueError as error:
        raise ValueError(f"{error} (in {GENERATION_CONFIG_NAME} of {path})") from error
    # These are the errors for options that could not be saved or printed.
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"expected settings of generation in {file}, got some that GenerationConfig cannot write "
            f"({one_line(error)}); leave them out"
        ) from error
    return loaded
