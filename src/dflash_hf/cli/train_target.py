"""This module holds the target of a training run, which the preflight loads and a stage takes."""

from __future__ import annotations

from transformers import PreTrainedModel

from dflash_hf.bench.run import Processes
from dflash_hf.cli.train_settings import TrainSettings
from dflash_hf.pair.answers import Processor
from dflash_hf.pair.loading import load_target
from dflash_hf.pair.shared_target import load_shared_target
from dflash_hf.pair.vocabulary import load_vocabulary


class TargetOnce:
    """The target of a run. It is loaded once by the preflight, and passed to the first stage that needs it."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self._loaded: list[tuple[PreTrainedModel, Processor]] = []

    def look(self) -> tuple[PreTrainedModel, Processor]:
        """Returns the target and its processor or tokenizer, and keeps both for the next call."""
        if not self._loaded:
            self._loaded.append(self._load())
        return self._loaded[0]

    def take(self) -> tuple[PreTrainedModel, Processor]:
        """Returns the target and its processor or tokenizer, without keeping them, so that the stage can free them."""
        self.look()
        return self._loaded.pop()

    def drop(self) -> None:
        """Frees a target that no stage has taken."""
        self._loaded.clear()

    def _load(self) -> tuple[PreTrainedModel, Processor]:
        settings = self.settings
        num_ranks = settings.tensor_parallel_size
        if num_ranks > 1:
            return load_shared_target(settings.target, settings.dtype, num_ranks)
        # Each of several processes has its own device.
        device_map = Processes(settings.device).device_map
        load = load_vocabulary if settings.feature_server else load_target
        return load(settings.target, settings.dtype, device_map)
