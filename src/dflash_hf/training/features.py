"""This module stores the target's features on disk, for targets that are slow or do not fit beside the training.

The features of an example are the target's outputs for this example alone: one row without padding. They are read back
bit for bit. The features of a padded batch differ from them by rounding, because a product of other shapes is summed
in another order.

A folder holds `features.json`, which names the target and the settings, and one safetensors file for each example. The
name of a file follows from the content of its example. So the same folder serves examples in any order, and only the
missing examples are computed.

With the dtype "float8", the states are rounded, and a file has `scales` beside its `taps` (see [`to_float8`]).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import logging

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.data.row_files import read_object
from dflash_hf.devices import mesh_of
from dflash_hf.errors import one_line, require
from dflash_hf.target_model.parts import Target
from dflash_hf.training.collators import Batch, collate
from dflash_hf.training.example import Example, example_lengths
from dflash_hf.training.forward import Features, target_features
from dflash_hf.training.identity import target_identity
from dflash_hf.training.served_features import ServedFeatures

logger: Any = logging.get_logger(__name__)

SETTINGS_FILE = "features.json"
PARTS = ("taps", "scales", "next_ids", "next_log_probs")
FLOAT8 = torch.float8_e4m3fn
# "auto" is the target's dtype.
FeatureDtype = Literal["auto", "float8"]


def bytes_per_token(
    config: DFlashConfig,
    dtype: torch.dtype,
    num_likely: int = 0,
    feature_dtype: FeatureDtype = "auto",
) -> int:
    """Returns how many bytes on disk the features of a token take.

    For five taps of Qwen3-8B, these are 40,960 bytes in bfloat16 and 20,490 bytes in float8.

    Args:
        dtype (`torch.dtype`): The target's dtype.
    """
    width = int(config.target_hidden_size)
    tap_bytes = width * dtype.itemsize
    if feature_dtype == "float8":
        tap_bytes = width * FLOAT8.itemsize + dtype.itemsize
    return len(config.target_layer_ids) * tap_bytes + 8 * num_likely


def to_float8(states: Tensor, num_taps: int) -> tuple[Tensor, Tensor]:
    """Returns states rounded to float8, and the scales by which [`from_float8`] multiplies the rounded numbers.

    Each tap of each token has its own scale. The scale maps the largest number of the tap to 448, the largest number
    of float8. So an outlier makes only the small numbers of its own tap and token less exact.

    Args:
        states (`torch.Tensor` of shape `[T, L * D]`): The states, in any floating dtype.
        num_taps (`int`): The number of taps `L`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Numbers `[T, L * D]` in float8_e4m3fn, and scales `[T, L]` in the states'
        dtype. Both are useless where a state is infinite or NaN.
    """
    largest = torch.finfo(FLOAT8).max
    taps = states.unflatten(-1, (num_taps, -1))
    # The scale is above 0 in a tap of zeros too. It is not subnormal, because such a number has fewer digits.
    smallest = torch.finfo(states.dtype).tiny
    scales = (taps.abs().amax(dim=-1) / largest).clamp_min(smallest)
    # The quotient is computed in float32: in bfloat16 it would be rounded twice.
    wide = torch.promote_types(states.dtype, torch.float32)
    numbers = taps.to(wide) / scales.to(wide)[..., None]
    # If a scale was rounded down, the largest number of its tap is above the limit.
    numbers = numbers.clamp(-largest, largest)
    return numbers.to(FLOAT8).flatten(-2), scales


def from_float8(numbers: Tensor, scales: Tensor) -> Tensor:
    """Returns the states `[T, L * D]`, in the dtype of the scales `[T, L]`, from numbers `[T, L * D]` in float8."""
    taps = numbers.to(scales.dtype).unflatten(-1, (scales.shape[-1], -1))
    return (taps * scales[..., None]).flatten(-2)


class FeatureCache:
    """A folder with the features of examples.

    Args:
        folder (path): The folder. It is created when it is first written to.
        dtype (`str`): How the states are stored: `"auto"` in the target's dtype, `"float8"` rounded to 8 bits. They
            are read back in the target's dtype in both cases.
    """

    def __init__(self, folder: str | os.PathLike[str], dtype: FeatureDtype = "auto") -> None:
        self.folder = Path(folder)
        self.dtype: FeatureDtype = dtype
        self._checked: set[str] = set()

    def write(
        self,
        target: Target,
        config: DFlashConfig,
        examples: Sequence[Example],
        *,
        num_likely: int = 0,
        num_writers: int = 1,
    ) -> None:
        """Runs the target over every example that is not in the folder yet. After an error, the written files stay.

        Several processes may write different examples at the same time. Processes that hold one target together get
        the same examples, and the first of these processes writes.

        Args:
            config (`DFlashConfig`): The draft's config. It says which layers are tapped.
            num_likely (`int`): How many of the target's most likely next tokens to store per position, if the
                objective or the labels need them (see `batch_loss`). If the folder stores more of them already, the
                new files get this larger number.
            num_writers (`int`): How many processes write to this disk at the same time, each as much as this one.

        Raises:
            ValueError: If the folder holds features of another target, of other taps or of another dtype, if the disk
                has too little room for all of them, or if states have no finite value in float8.
            OSError: If a file cannot be written, for example because the disk has become full.
        """
        num_likely = self._begin(target, config, examples, num_likely, num_writers)
        mesh = mesh_of(target.model)
        for example in examples:
            is_missing = example not in self
            if mesh is not None:
                is_missing = _said_by_the_first(is_missing, mesh)
            if not is_missing:
                continue
            got = "none of an example, and the target's layers are on a server"
            what = f"features of every example in {self.folder}"
            require(target.has_layers, what, got, "write them first, with --feature-server")
            features = features_alone(target, config, example, num_likely)
            if mesh is None or mesh.get_local_rank() == 0:
                self._save_features(example, features, config)

    def write_served(
        self,
        target: Target,
        config: DFlashConfig,
        examples: Sequence[Example],
        servers: Sequence[OpenAIClient],
        *,
        num_writers: int = 1,
    ) -> None:
        """Lets servers compute the features that are not in the folder yet. See also [`write`].

        Args:
            target ([`Target`]): The target that the servers run. Its layers are not needed here.
            servers (sequence of [`OpenAIClient`]): The servers, as [`ServedFeatures`] takes them.
            num_writers (`int`): See [`write`].

        Raises:
            ValueError: In the cases of [`write`] and [`ServedFeatures.compute`].
            OSError: If a file cannot be written, for example because the disk has become full.
        """
        self._begin(target, config, examples, num_likely=0, num_writers=num_writers)

        def keep(example: Example, states: Tensor) -> None:
            self._save_features(example, Features(taps=states[None]), config)

        served = ServedFeatures(servers, config, target.model.dtype)
        served.compute(self.missing(examples), keep)

    def missing(self, examples: Sequence[Example]) -> Iterator[Example]:
        """Yields the examples that are not in the folder."""
        return (example for example in examples if example not in self)

    def _begin(
        self,
        target: Target,
        config: DFlashConfig,
        examples: Sequence[Example],
        num_likely: int,
        num_writers: int,
    ) -> int:
        """Checks the folder and the room on the disk, writes the settings, and returns the `num_likely` to store."""
        settings = _settings(target, config, num_likely)
        is_old = self.is_begun
        if is_old:
            self._compare(settings, num_likely)
            num_likely = int(self._settings()["num_likely"])
        size = bytes_per_token(config, target.model.dtype, num_likely, self.dtype)
        lengths = example_lengths(examples)
        tokens = sum(lengths)
        missing = tokens
        # Lengths may be known without building the examples. To look for its file, an example must be built.
        if any(self.folder.glob("*.safetensors")):
            pairs = zip(examples, lengths, strict=True)
            missing = sum(length for example, length in pairs if example not in self)
        needed = missing * size * num_writers
        free = free_bytes(self.folder)
        logger.warning(
            f"the features of {len(examples)} examples take {size / 1000:.1f} kB a token, "
            f"{tokens * size / 1e9:.2f} GB in all, in {self.folder}"
        )
        what = f"room for {needed / 1e9:.2f} GB of features in {self.folder}"
        require(
            needed <= free,
            what,
            f"{free / 1e9:.2f} GB",
            "choose another folder, or train without the cache",
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not is_old:
            settings["feature_dtype"] = self.dtype
            self._save(
                SETTINGS_FILE,
                lambda path: path.write_text(json.dumps(settings, indent=2), encoding="utf-8"),
            )
        return num_likely

    @property
    def is_begun(self) -> bool:
        """True if the folder has settings, so features may have been written to it."""
        return (self.folder / SETTINGS_FILE).exists()

    def check(self, target: Target, config: DFlashConfig, *, num_likely: int = 0) -> None:
        """Refuses a folder that was written with another target, dtype or other taps, or with too few next tokens.

        Raises:
            ValueError: If one of these settings differs. The message names it.
        """
        self._compare(_settings(target, config, num_likely), num_likely)

    def _compare(self, settings: Mapping[str, object], num_likely: int) -> None:
        """Refuses a folder that was written with other settings, or with too few next tokens."""
        found = self._settings()
        stored = found.get("feature_dtype")
        what = f"features with feature_dtype {self.dtype!r} in {self.folder / SETTINGS_FILE}"
        action = f"use feature_dtype {stored}, or write them into another folder"
        require(stored == self.dtype, what, stored, action)
        action = "use the target they were written with, or write them into another folder"
        for name, value in settings.items():
            got = found.get(name)
            is_good = (
                isinstance(got, int) and got >= num_likely if name == "num_likely" else got == value
            )
            require(
                is_good,
                f"features with {name} {value!r} in {self.folder / SETTINGS_FILE}",
                got,
                action,
            )

    def _settings(self) -> dict[str, Any]:
        path = self.folder / SETTINGS_FILE
        action = "delete the folder and write it again"
        try:
            return read_object(path, action)
        except OSError as error:
            raise ValueError(
                f"expected settings of features in {path}, got {one_line(error)}; {action}"
            ) from error

    def read(self, examples: Sequence[Example], batch: Batch) -> Features:
        """Returns the features of a batch on the CPU. At padding, they are 0.

        Args:
            examples (sequence of [`Example`]): The examples from which the batch was collated, in order.
            batch ([`Batch`]): The batch, padded on the right or packed.

        Raises:
            ValueError: If an example is missing, or its file is truncated, changed or of another dtype.
        """
        starts = torch.zeros_like(batch.input_ids) if batch.starts is None else batch.starts
        places = [
            (row, start)
            for row, real in enumerate(batch.attention_mask)
            for start in starts[row, real].unique().tolist()
        ]
        parts: dict[str, Tensor] = {}
        for example, (row, start) in zip(examples, places, strict=True):
            for name, value in self._read(example).items():
                if name not in parts:
                    parts[name] = value.new_zeros(*batch.input_ids.shape, value.shape[-1])
                parts[name][row, start : start + len(value)] = value
        if "next_ids" in parts:
            parts["next_ids"] = parts["next_ids"].to(torch.long)
        return Features(**parts)

    def __contains__(self, example: Example) -> bool:
        return self._path(example).exists()

    def _path(self, example: Example) -> Path:
        return self.folder / f"{example_key(example)}.safetensors"

    def _read(self, example: Example) -> dict[str, Tensor]:
        """Reads the taps and next tokens of an example. The first time, they are compared with their checksum."""
        path = self._path(example)
        got = f"none of an example of {len(example.input_ids)} tokens"
        require(
            path.exists(), f"features of every example in {self.folder}", got, "write them first"
        )
        what = f"whole features in {path}"
        action = "delete the file and write it again"
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                found = {part: file.get_tensor(part) for part in PARTS if part in names}
                wanted = (file.metadata() or {}).get("checksum")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"expected {what}, got {one_line(error)}; {action}") from error
        if path.name not in self._checked:
            require(
                wanted == _checksum(found.values()), what, "other bytes than were written", action
            )
            self._checked.add(path.name)
        stored = "float8" if "scales" in found else "auto"
        what = f"{self.dtype} features in {path}"
        action = f"read a folder of {stored} features with that dtype, or delete the file and write it again"
        require(stored == self.dtype, what, stored, action)
        if stored == "float8":
            found["taps"] = from_float8(found["taps"], found.pop("scales"))
        return found

    def _save_features(self, example: Example, features: Features, config: DFlashConfig) -> None:
        path = self._path(example)
        features = features.to(torch.device("cpu"))
        parts = {"taps": features.taps[0].contiguous()}
        if self.dtype == "float8":
            numbers, scales = to_float8(features.taps[0], len(config.target_layer_ids))
            # Infinity and NaN cannot be stored, and rounding may push a dtype's largest numbers beyond its range.
            is_finite = bool(from_float8(numbers, scales).isfinite().all())
            length = len(example.input_ids)
            what = f"states of an example of {length} tokens that are finite in float8"
            action = "use feature_dtype auto, or leave the example out"
            require(is_finite, what, "inf or nan", action)
            parts = {"taps": numbers, "scales": scales}
        if features.next_ids is not None and features.next_log_probs is not None:
            parts["next_ids"] = features.next_ids[0].to(torch.int32)
            parts["next_log_probs"] = features.next_log_probs[0].contiguous()
        metadata = {"checksum": _checksum(parts.values())}
        self._save(path.name, lambda partial: save_file(parts, partial, metadata=metadata))

    def _save(self, name: str, write: Callable[[Path], object]) -> None:
        """Writes a file completely or not at all."""
        # The name is random: processes in containers on two nodes may have the same process id.
        path = self.folder / f"{name}.{uuid.uuid4().hex}.partial"
        try:
            write(path)
            path.replace(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"expected room for {self.folder / name}, got {one_line(error)}; make some and run again, what is "
                "written already stays"
            ) from error
        finally:
            path.unlink(missing_ok=True)


def features_alone(
    target: Target, config: DFlashConfig, example: Example, num_likely: int = 0
) -> Features:
    """Returns the features of one example alone, as they are written to the folder."""
    return target_features(
        target,
        config.target_layer_ids,
        collate([example]),
        after_deepstack=config.tap_after_deepstack,
        num_likely=num_likely,
    )


def example_key(example: Example) -> str:
    """Returns a digest of the parts of an example that its features depend on."""
    digest = hashlib.sha256(
        _bytes(torch.tensor(example.input_ids, dtype=torch.int64, device="cpu"))
    )
    for name, value in sorted(example.model_inputs.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(_bytes(value))
    if "token_type_ids" in example.model_inputs:  # the types in answers depend on the loss mask
        digest.update(bytes(example.loss_mask))
    return digest.hexdigest()[:32]


def _said_by_the_first(is_missing: bool, mesh: DeviceMesh) -> bool:
    """Returns the value of a mesh's first process. The others may already see a file that this process has written."""
    group = mesh.get_group()
    said = torch.tensor([is_missing], dtype=torch.long, device=mesh.device_type)
    distributed.broadcast(said, distributed.get_global_rank(group, 0), group=group)
    return bool(said.item())


def _settings(target: Target, config: DFlashConfig, num_likely: int) -> dict[str, object]:
    """Returns the settings on which features depend."""
    return {
        # The identity of a target does not include the dtype, but features depend on it.
        "target": " ".join([*target_identity(target.model).values(), str(target.model.dtype)]),
        "target_layer_ids": list(config.target_layer_ids),
        "tap_after_deepstack": config.tap_after_deepstack,
        "num_likely": num_likely,
    }


def free_bytes(folder: Path) -> int:
    """Returns the free bytes of the disk on which a folder is or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _checksum(tensors: Iterable[Tensor]) -> str:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(_bytes(tensor), value)
    return f"{value:08x}"


def _bytes(tensor: Tensor) -> Any:
    """Returns the bytes of a tensor in memory, as a NumPy array."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()
