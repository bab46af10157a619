"""Loading and saving a draft: any known layout in, our own out. Safetensors only, and no code of the checkpoint runs.

The layouts themselves are tables in `dflash_hf.checkpoints`; files, devices and dtypes are Transformers' own business.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from dflash_hf.checkpoints import FIELDS, CheckpointFormat, detect_format, make_config
from dflash_hf.checkpoints.files import (
    FLOAT_DTYPES,
    StoredTensor,
    check_no_adapter,
    read_config,
    read_json,
    stored_tensors,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import listed, one_line, shown
from dflash_hf.generation_config import DFlashGenerationConfig

# The arguments of `from_pretrained` that say which files are meant.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class DFlashPreTrainedModel(PreTrainedModel):
    """Names what Transformers asks of a model class, and loads drafts in every known layout."""

    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    # Of speculators' layout; which weights a checkpoint may hold is checked before, layout by layout.
    _keys_to_ignore_on_load_unexpected = [r"^t2d$", r"^d2t$", r"^verifier_"]  # noqa: RUF012
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012  (Transformers' own form)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Self:
        """Loads a draft in any layout that `checkpoints` knows from a folder or the Hub.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`, *optional*): Folder or Hub id. `None` builds a draft
                from `config` and `state_dict`, as in Transformers.
            model_args: Handed to the model.
            kwargs: Arguments of [`~transformers.PreTrainedModel.from_pretrained`] and overrides of fields of
                [`DFlashConfig`]. `dtype="auto"`, the default, is the config's `dtype`, and where it has none the
                one in which the weights are stored; `generation_config` replaces the stored one; `trust_remote_code`
                has no effect.

        Returns:
            The draft, in eval mode, with its `generation_config`; with `output_loading_info=True` also Transformers'
            report.

        Raises:
            ValueError: If the layout is unknown, its config has keys that are unknown or contradict each other, a
                weight is missing, unknown or has the wrong shape or type, a vocabulary map points outside the
                vocabulary, or the weights are not (whole) safetensors files. All of that is found before any weight
                is loaded. Afterwards, if a weight is NaN or infinite.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *model_args, **kwargs)
        path = pretrained_model_name_or_path
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError("expected use_safetensors=True or nothing, got False; only safetensors are loaded")
        check_no_adapter(path, hub)
        stored = stored_tensors(path, kwargs.get("variant"), hub)
        given: PreTrainedConfig | str | PathLike[str] | None = kwargs.pop("config", None)
        config, layout = _read_config(path, given, kwargs, hub, stored)
        if stored and not kwargs.get("key_mapping"):  # with one, the report below has to do
            with torch.device("meta"):
                expected = cls(copy.deepcopy(config), *model_args).state_dict()
            _check_stored(stored, {name: tuple(tensor.shape) for name, tensor in expected.items()}, layout, path)
            _check_vocabulary(stored, config, path)
        for ours in ("trust_remote_code", "ignore_mismatched_sizes"):
            kwargs.pop(ours, None)
        with_report = kwargs.pop("output_loading_info", False)
        generation_config = kwargs.pop("generation_config", None)
        try:
            loaded: Any = super().from_pretrained(
                path,
                *model_args,
                config=config,
                key_mapping=layout.key_mapping() | (kwargs.pop("key_mapping", None) or {}) or None,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # so that they are reported to us with the others
                output_loading_info=True,
                **kwargs,
            )
        except SafetensorError as error:
            raise ValueError(
                f"expected whole safetensors files in {path}, got one that cannot be read ({one_line(error)}); "
                "download it again"
            ) from error
        draft, report = loaded
        report["unexpected_keys"] = [
            name for name in report["unexpected_keys"] if name not in _dropped(layout, config)
        ]
        _check_report(report, layout, path)
        _check_finite(draft, path)
        if generation_config is None and layout.name == DFlashConfig.model_type:
            generation_config = _read_generation_config(path, hub)
        draft.generation_config = generation_config or DFlashGenerationConfig()
        draft.generation_config.validate_knobs(draft.config.block_size, draft.config.sample_from_anchor)
        result: Any = (draft, report) if with_report else draft
        return result

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Saves the draft in our own layout, `generation_config` included; `save_draft` writes the others.

        Args:
            save_directory (`str` or `os.PathLike`): The folder.
            args, kwargs: Arguments of [`~transformers.PreTrainedModel.save_pretrained`].
        """
        # Transformers would undo the renames of a draft that was loaded from another layout.
        kwargs["save_original_format"] = False
        push_to_hub = kwargs.pop("push_to_hub", False)
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.generation_config.save_pretrained(save_directory)
        if push_to_hub:  # only now is everything there; it saves once more, into a folder of its own
            names = ("commit_message", "create_pr", "token", "revision", "private")
            self.push_to_hub(
                kwargs.get("repo_id", Path(save_directory).name), **{n: kwargs[n] for n in names if n in kwargs}
            )


def _read_config(
    path: str | PathLike[str],
    given: PreTrainedConfig | str | PathLike[str] | None,
    kwargs: dict[str, Any],
    hub: dict[str, Any],
    stored: Mapping[str, StoredTensor],
) -> tuple[DFlashConfig, CheckpointFormat]:
    """Returns the draft's config and the layout; takes overrides of config fields out of `kwargs`."""
    source = given if isinstance(given, str | PathLike) else path
    raw = read_config(source, hub)
    try:
        layout = detect_format(raw)
        fields = layout.read_config(raw, frozenset(stored))
        if isinstance(given, PreTrainedConfig):
            if not isinstance(given, DFlashConfig):
                raise ValueError(f"expected a DFlashConfig as config, got a {type(given).__name__}; leave it out")
            return copy.deepcopy(given), layout
        # Not the draft's function, and still needed: what "auto" means.
        given_types = {raw[name] for name in ("dtype", "torch_dtype") if isinstance(raw.get(name), str)}
        if len(given_types) > 1:
            raise ValueError(
                f"expected one value as dtype and torch_dtype, got {shown(sorted(given_types))}; mend one of them"
            )
        fields["dtype"] = raw.get("dtype", raw.get("torch_dtype"))
        if not (fields["dtype"] is None or _dtype_of(fields["dtype"]) in FLOAT_DTYPES.values()):
            raise ValueError(
                f"expected dtype in {[str(dtype).removeprefix('torch.') for dtype in FLOAT_DTYPES.values()]}, got "
                f"{shown(fields['dtype'])}; mend it"
            )
        overrides = {name: kwargs.pop(name) for name in FIELDS & kwargs.keys()}
        return make_config(fields | overrides), layout
    except ValueError as error:
        raise ValueError(f"{error} (in config.json of {source})") from error


def _dtype_of(name: object) -> object:
    """The torch dtype of that name, if there is one."""
    return getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None


def _dropped(layout: CheckpointFormat, config: DFlashConfig) -> frozenset[str]:
    """Weights that are left out on load; with the whole vocabulary that is also the map of a reduced one."""
    return layout.dropped | ({"d2t"} if layout.dropped and config.draft_vocab_size is None else set())


def _check_stored(
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    layout: CheckpointFormat,
    path: str | PathLike[str],
) -> None:
    """Raises unless the files hold exactly the expected weights, in floating point (and maps in integers)."""
    found = {layout.our_name(name): tensor for name, tensor in stored.items() if name not in layout.dropped}
    if "d2t" not in expected and layout.dropped:
        found.pop("d2t", None)
    wrong = [f"missing {layout.their_name(name)}" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"unknown {found[name].name}" for name in sorted(found.keys() - expected.keys())]
    for name, shape in sorted(expected.items()):
        tensor = found.get(name)
        if tensor is not None and tensor.shape != shape:
            wrong.append(f"{tensor.name} of shape {tensor.shape} instead of {shape}")
        elif tensor is not None and tensor.dtype not in (("I64",) if name == "d2t" else FLOAT_DTYPES):
            wrong.append(f"{tensor.name} of type {tensor.dtype}")
    if {"F16", "BF16"} <= {tensor.dtype for tensor in found.values()}:
        wrong.append("weights of both types F16 and BF16")
    if wrong:
        raise ValueError(
            f"expected exactly the weights of a draft in the layout {layout.name!r} in {path}, got "
            f"{listed(wrong, '; ')}; check that its config.json belongs to these weights"
        )


def _check_vocabulary(stored: Mapping[str, StoredTensor], config: DFlashConfig, path: str | PathLike[str]) -> None:
    """Raises unless `d2t` names different tokens of the target's vocabulary, and `t2d`, if there, the same ones."""
    offsets = stored.get("d2t")
    if offsets is None:
        return
    values = offsets.read()
    if config.draft_vocab_size is None:
        if bool(values.any()):
            raise ValueError(
                f"expected d2t in {offsets.file} absent or zero beside a draft_vocab_size of the whole vocabulary, "
                "got offsets; make config and weights agree"
            )
        return
    assert config.vocab_size is not None
    ids = values + torch.arange(values.shape[0], device=values.device)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"expected d2t in {offsets.file} to point inside the vocabulary of {config.vocab_size} tokens (row i is "
            f"token i + d2t[i]), got tokens from {int(ids.min())} to {int(ids.max())}; check that config.json in "
            f"{path} belongs to these weights"
        )
    marks = torch.zeros(config.vocab_size, dtype=torch.bool, device=values.device)
    marks[ids] = True
    if int(marks.sum()) != ids.shape[0]:
        raise ValueError(
            f"expected d2t in {offsets.file} to name every token once, got repetitions; download it again"
        )
    theirs = stored.get("t2d")
    if theirs is not None and not torch.equal(theirs.read().to(torch.bool), marks):
        raise ValueError(
            f"expected t2d in {theirs.file} to mark the tokens that d2t names, got others; download it again"
        )


def _check_report(report: dict[str, Any], layout: CheckpointFormat, path: str | PathLike[str]) -> None:
    """Raises unless every weight was there, with the right shape, and nothing else."""
    wrong = [f"missing {layout.their_name(name)}" for name in sorted(report["missing_keys"])]
    wrong += [f"unknown {name}" for name in sorted(report["unexpected_keys"])]
    wrong += [
        f"{layout.their_name(name)} of shape {tuple(got)} instead of {tuple(expected)}"
        for name, got, expected in sorted(report["mismatched_keys"])
    ]
    wrong += report["error_msgs"]
    if wrong:
        raise ValueError(
            f"expected exactly the weights of a draft in the layout {layout.name!r} in {path}, got "
            f"{listed(wrong, '; ')}; check that its config.json belongs to these weights"
        )


def _check_finite(draft: torch.nn.Module, path: str | PathLike[str]) -> None:
    """Raises if a weight is NaN or infinite: texts would stay right, with nothing accepted and no word of why.

    One more pass over the weights, where they are and without a copy of them: a sum is finite only if its terms are.
    Loading has read and written each of these bytes already, so that this is never most of its time.
    """
    wrong: list[str] = []
    for name, tensor in draft.named_parameters():
        # Offloaded weights are not here, and quantised ones have sums of their own.
        if tensor.is_meta or type(tensor) is not torch.nn.Parameter or not tensor.is_floating_point():
            continue
        dtype = torch.float32 if tensor.element_size() < 4 else tensor.dtype  # where no sum of weights overflows
        if not bool(tensor.detach().sum(dtype=dtype).isfinite()):
            wrong.append(name)
    if not wrong:
        return
    is_narrow = any(draft.get_parameter(name).dtype == torch.float16 for name in wrong)
    advice = "load it with dtype=torch.float32 if float16 is too narrow for it, or " if is_narrow else ""
    raise ValueError(
        f"expected finite weights in {path}, got NaN or infinite values in {listed(wrong)}; {advice}export or "
        "download it again"
    )


def _read_generation_config(path: str | PathLike[str], hub: dict[str, Any]) -> DFlashGenerationConfig | None:
    """Returns the stored knobs, or `None` where there are none (offline: where none are cached)."""
    file = cached_file(
        path,
        GENERATION_CONFIG_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    if file is None:
        return None
    try:
        loaded = DFlashGenerationConfig(**read_json(Path(file)))
        loaded.to_json_string()
    except ValueError as error:
        raise ValueError(f"{error} (in {GENERATION_CONFIG_NAME} of {path})") from error
    except (TypeError, LookupError, AttributeError, RecursionError) as error:  # what could not be saved or printed
        raise ValueError(
            f"expected settings of generation in {file}, got some that GenerationConfig cannot write "
            f"({one_line(error)}); leave them out"
        ) from error
    return loaded


__all__ = ["DFlashPreTrainedModel"]
