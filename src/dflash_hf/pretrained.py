"""Loading and saving a draft: any known layout in, our own out. Safetensors only, and no code of the checkpoint runs.

The layouts themselves are tables in `dflash_hf.checkpoints`; files, devices and dtypes are Transformers' own business.
"""

from __future__ import annotations

import copy
from os import PathLike
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from dflash_hf.checkpoints import FIELDS, CheckpointFormat, detect_format, make_config
from dflash_hf.configuration_dflash import DFlashConfig
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
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012  (Transformers' own form)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Self:
        """Loads a draft in our own, z-lab's or Transformers' layout from a folder or the Hub.

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
                weight is missing, unknown or has the wrong shape, or the weights are not (whole) safetensors files.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *model_args, **kwargs)
        path = pretrained_model_name_or_path
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        _check_safetensors(path, kwargs.pop("use_safetensors", None), hub.get("subfolder") or "")
        given: PreTrainedConfig | str | PathLike[str] | None = kwargs.pop("config", None)
        config, layout = _read_config(path, given, kwargs, hub)
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
                f"expected whole safetensors files in {path}, got one that cannot be read ({error}); download it again"
            ) from error
        draft, report = loaded
        _check_report(report, layout, path)
        if generation_config is None and layout.name == DFlashConfig.model_type:
            generation_config = _read_generation_config(path, hub)
        draft.generation_config = generation_config or DFlashGenerationConfig()
        draft.generation_config.validate_knobs(draft.config.block_size)
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
) -> tuple[DFlashConfig, CheckpointFormat]:
    """Returns the draft's config and the layout; takes overrides of config fields out of `kwargs`."""
    source = given if isinstance(given, str | PathLike) else path
    raw, _ = DFlashConfig.get_config_dict(source, **hub)
    layout = detect_format(raw)
    fields = layout.read_config(raw)
    if isinstance(given, PreTrainedConfig):
        if not isinstance(given, DFlashConfig):
            raise ValueError(f"expected a DFlashConfig as config, got a {type(given).__name__}; leave it out")
        return copy.deepcopy(given), layout
    # Not the draft's function, and still needed: what "auto" means.
    fields["dtype"] = raw.get("dtype", raw.get("torch_dtype"))
    overrides = {name: kwargs.pop(name) for name in FIELDS & kwargs.keys()}
    return make_config(fields | overrides), layout


def _check_safetensors(path: str | PathLike[str], use_safetensors: bool | None, subfolder: str) -> None:
    """Refuses folders without safetensors in a sentence; for a Hub repository Transformers has one of its own."""
    if use_safetensors is False:
        raise ValueError("expected use_safetensors=True or nothing, got False; only safetensors are loaded")
    folder = Path(path) / subfolder
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        files = sorted(file.name for file in folder.iterdir())
        raise ValueError(
            f"expected safetensors weights in {folder}, got {files}; convert the checkpoint: reading a pickle file "
            "can run code, so none is loaded"
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
            f"{'; '.join(wrong)}; check that its config.json belongs to these weights"
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
    loaded = DFlashGenerationConfig.from_pretrained(str(Path(file).parent))
    assert isinstance(loaded, DFlashGenerationConfig)
    return loaded


__all__ = ["DFlashPreTrainedModel"]
