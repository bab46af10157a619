"""Targets that several processes hold together, each with a share of every layer (tensor parallelism)."""

from __future__ import annotations

from typing import Any

import transformers
from torch import distributed
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from dflash_hf.errors import require
from dflash_hf.layer_configs import attention_sizes
from dflash_hf.pair.answers import Processor
from dflash_hf.pair.loading import checked_files, config_of_target, load_weights


class _Groups(DistributedConfig):
    """Several groups of processes, each of which holds a whole target.

    Transformers takes the groups for replicas and would wrap their weights in FSDP too, which adds up the gradients of
    replicas. A target is frozen and has none.
    """

    @property
    def dp_size(self) -> int:
        """Number of replicas that are wrapped in FSDP."""
        return 1


def load_shared_target(
    target: str, dtype: str, num_ranks: int
) -> tuple[PreTrainedModel, Processor]:
    """Loads this process's share of a target, on its own device, and what encodes the target's prompts.

    All processes that were launched call it, `num_ranks` or a multiple of it. Those that follow one another are a
    group, which holds the target together.

    Args:
        target (`str`): The target's folder or Hub id.
        dtype (`str`): A torch dtype's name, or `"auto"` for the one in which the target was saved.
        num_ranks (`int`): The number of processes of a group.

    Raises:
        ValueError: If the target's sizes are no multiples of `num_ranks`, Transformers is too old for several groups,
            or one of the reasons of [`load_target`].
    """
    model_class, processor = checked_files(target, dtype, "auto")
    check_sizes(config_of_target(target), num_ranks)
    shares: Any = DistributedConfig(tp_size=num_ranks)
    num_groups = distributed.get_world_size() // num_ranks
    if num_groups > 1:
        require(
            hasattr(DistributedConfig, "dp_replicate_size"),
            "a Transformers whose DistributedConfig has dp_replicate_size for several targets at once",
            transformers.__version__,
            f"update it, or start {num_ranks} processes",
        )
        options: dict[str, Any] = {"dp_replicate_size": num_groups}
        shares = _Groups(tp_size=num_ranks, **options)
    model = load_weights(model_class, target, dtype=dtype, distributed_config=shares)
    return model, processor


def check_sizes(config: PreTrainedConfig, num_ranks: int) -> None:
    """Refuses a target whose heads or vocabulary cannot be divided among so many processes.

    Raises:
        ValueError: With the number that cannot be divided.
    """
    text: Any = config.get_text_config(decoder=True)
    numbers = [("tokens in the vocabulary", text.vocab_size)]
    for sizes in attention_sizes(text):
        numbers += [("attention heads", sizes.heads), ("key/value heads", sizes.groups)]
    for name, number in numbers:
        require(
            number % num_ranks == 0,
            f"a number of {name} that --tensor-parallel-size {num_ranks} divides",
            number,
            "give a divisor of it, or load the whole target in each process",
        )
