"""This module loads targets that several processes share, each with a part of every layer (tensor parallelism)."""

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
    """The config of several groups of processes, each of which holds a whole target.

    Transformers takes the groups for replicas. It would also wrap their weights in FSDP, which adds up the gradients
    of replicas. That is not needed, because a target is frozen and has no gradients.
    """

    @property
    def dp_size(self) -> int:
        """Number of replicas that are wrapped in FSDP."""
        return 1


def load_shared_target(
    target: str, dtype: str, num_ranks: int
) -> tuple[PreTrainedModel, Processor]:
    """Loads this process's part of a target onto its own device, with the processor or tokenizer of the target.

    All processes that were launched must call this function. Their number is `num_ranks` or a multiple of it. Every
    `num_ranks` consecutive processes are a group that holds the target together.

    Args:
        target (`str`): The target's folder or Hub id.
        dtype (`str`): Name of a torch dtype, or `"auto"` for the dtype in which the target was saved.
        num_ranks (`int`): Number of processes of a group.

    Raises:
        ValueError: If the target's sizes are no multiples of `num_ranks`, if Transformers is too old for several
            groups, or for one of the reasons of [`load_target`].
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
    """Refuses a target whose heads or vocabulary cannot be divided among `num_ranks` processes.

    Raises:
        ValueError: If a number is not divisible. The message names this number.
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
