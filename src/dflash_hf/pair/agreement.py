"""This module finds where two answers of one target differ, and whether rounding explains the difference.

All comparisons of the package use this definition. A verify is a wider forward than a step of plain decoding, and
rounds in another order. If two tokens are nearly as good, either of them may get the best score. This is a tie if a
more exact computation than the target's own finds the worse token at most as far below the best one as the target's
rounding reaches.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from dflash_hf.devices import Inventory, execution_devices, free_memory, is_compiled, is_offloaded
from dflash_hf.generation.sampling import NoiseKey, gumbel_noise, new_seed

logger: Any = logging.get_logger(__name__)

HALF = (torch.bfloat16, torch.float16)
# The widest margin of a tie, in `eps * size` of the target's dtype. In half precision, only values that are stored
# between operations are rounded. In single and double precision, sums are rounded too. docs/numerics.md has the errors
# that were measured.
HALF_TIE = 2.0
FULL_TIE = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of comparing two answers."""

    sentence: str  # the whole result in words; here tokens count from 1
    # Index, from 0, of the first token that differs. `None` if the answers are identical.
    token: int | None = None
    # How far the worse of the two tokens lies below the best token of the vocabulary. The scores are logits after the
    # logits processors. For sampled answers, the noise is added to them. The margin is `None` if one answer ends where
    # the other goes on, or if one of the tokens was ruled out.
    margin: float | None = None
    tolerance: float | None = None  # the widest margin that is a tie
    measured_in: str | None = None  # dtype in which the margin was computed
    # Whether rounding explains the difference. `None` if that cannot be said.
    is_tie: bool | None = None

    @property
    def identical(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.token is None

    @property
    def holds(self) -> bool:
        """Whether the answers are the same as far as the target's dtype can tell: identical, or different at a tie."""
        return self.identical or self.is_tie is True

    def to_dict(self) -> dict[str, Any] | None:
        """Returns the comparison as plain values, for JSON; `None` if the answers are identical."""
        if self.identical:
            return None
        return asdict(self)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Returns the first index at which two answers differ, or one of them has ended; `None` if they are identical."""
    pairs = enumerate(itertools.zip_longest(first, second))
    return next((index for index, (a, b) in pairs if a != b), None)


def agreement(
    target: PreTrainedModel,
    inputs: dict[str, Tensor],
    plain: Sequence[int],
    drafted: Sequence[int],
    *,
    reference: PreTrainedModel | None = None,
    seed: int | None = None,
    **settings: Any,
) -> Agreement:
    """Compares two answers to a prompt. If they differ, measures by how much.

    The scores at the first difference come from plain `generate`, which continues the prompt and the tokens that both
    answers begin with. So images, positions and logits processors are the same as in decoding.

    Args:
        target (`PreTrainedModel`): The model that wrote both answers.
        inputs (`dict[str, torch.Tensor]`): The prompt as the target took it, one row: `input_ids` and `attention_mask`
            `[1, S]`, and the inputs of its images.
        plain, drafted (sequence of `int`): Tokens of the answers, including end tokens but no padding.
        reference (`PreTrainedModel`, *optional*): The model from [`reference_for`]. Pass it if you compare many
            answers. By default it is made when it is needed, and dropped afterwards.
        seed (`int`, *optional*): The seed that was given to `torch.manual_seed` before each of two sampled answers.
            Both answers were decoded with a draft, one of them with block size 1, and each alone in its batch.
        settings: Arguments of the `generate` calls, for sampling and logits processors. Lengths do not matter.

    Raises:
        ValueError: If `inputs` has several rows, or the answers are sampled and differ and there is no `seed`.
    """
    index = first_difference(plain, drafted)
    if index is None:
        return Agreement(sentence="identical")
    differs = f"differs from token {index + 1} on"
    rows = inputs["input_ids"].shape[0]
    if rows != 1:
        raise ValueError(
            f"expected the inputs of one prompt, got those of {rows}; compare answers one by one"
        )
    sampled = bool(settings.get("do_sample", target.generation_config.do_sample))
    if sampled and seed is None:
        raise ValueError(
            "expected the seed of sampled answers, got none; give what torch.manual_seed was given"
        )
    if index in (len(plain), len(drafted)):
        sentence = f"{differs}, where one answer ends and the other goes on"
        return Agreement(sentence=sentence, token=index, is_tie=False)
    if not sampled:
        seed = None
    if reference is None:
        reference = reference_for(target)
    scores, size = _scores(reference, inputs, plain[:index], seed, settings)
    margin = float(scores.max() - scores[[plain[index], drafted[index]]].min())
    widest = FULL_TIE
    if target.dtype in HALF:
        widest = HALF_TIE
    tolerance = widest * torch.finfo(target.dtype).eps * size
    is_tie: bool | None = margin <= tolerance
    if not is_tie and sampled and bool(scores.isneginf().any()):
        is_tie = None  # rounding may also have moved the edge of what top-k or top-p leaves
    what = "two logits"
    if sampled:
        what = "two logits with their noise"
    if is_tie is None:
        why = "whether by rounding cannot be said where top-k or top-p cut tokens off"
    elif is_tie:
        why = f"where {what} tie within rounding"
    else:
        why = f"where {what} do not tie within rounding to {_name(target.dtype)}"
    measured = ""
    if reference.dtype in HALF:
        measured = f" in {_name(reference.dtype)}"
    shown_margin = None
    if math.isfinite(margin):
        shown_margin = margin
    return Agreement(
        sentence=f"{differs}, {why} (margin {margin:.2g}{measured})",
        token=index,
        margin=shown_margin,
        tolerance=tolerance,
        measured_in=_name(reference.dtype),
        is_tie=is_tie,
    )


def reference_for(target: PreTrainedModel) -> PreTrainedModel:
    """Returns the model that measures margins: a float32 copy of a target in half precision, else the target itself.

    The copy is made on the target's device. There is no copy if it would take more than half of the free memory there,
    or if the weights are not plain tensors on one device. Then the log says why, and the target itself measures
    margins.
    """
    if target.dtype not in HALF:
        return target
    reason = _no_copy(target)
    if reason is not None:
        logger.warning(
            f"Margins are measured in {_name(target.dtype)}: {reason}, so there is no float32 copy."
        )
        return target
    # `deepcopy` takes these tensors as already copied. So it makes no second model in half precision on the way.
    copies: dict[int, Any] = {id(buffer): _widened(buffer) for buffer in target.buffers()}
    for weight in target.parameters():
        copies[id(weight)] = nn.Parameter(_widened(weight.detach()), requires_grad=False)
    return copy.deepcopy(target, copies)


def _widened(tensor: Tensor) -> Tensor:
    if tensor.dtype in HALF:
        return tensor.float()
    return tensor.clone()


def _no_copy(target: PreTrainedModel) -> str | None:
    """Returns the reason why a target gets no float32 copy; `None` if it gets one."""
    parts = Inventory.of(target)
    devices = execution_devices(parts)
    if is_offloaded(target) or len(devices) > 1:
        return "the target is not all on one device"
    if is_compiled(parts):
        return "the target is compiled"
    if getattr(target.config, "quantization_config", None) is not None:
        return "the target is quantised"
    if any(hasattr(weight, "device_mesh") for weight in target.parameters()):
        return "the target is shared among processes"
    needed = 4 * sum(weight.numel() for weight in target.parameters())
    free = free_memory(next(iter(devices)))
    if free is not None and needed > free / 2:
        return f"{needed / 1e9:.1f} GB would be more than half of the {free / 1e9:.1f} GB that are free"
    return None


@torch.no_grad()
def _scores(
    reference: PreTrainedModel,
    inputs: dict[str, Tensor],
    begun: Sequence[int],
    seed: int | None,
    settings: dict[str, Any],
) -> tuple[Tensor, float]:
    """Returns the scores `[V]` (float64) that choose the token after `begun`, and the size of the logits there.

    The size is the larger of two numbers: the best logit, and its distance from the median. It is scaled as the scores
    are. Rounding of stored values grows with the first number, and errors of the hidden states grow with the second.
    The first number alone is not enough, because a target may have its best logits near 0.
    """
    model: Any = reference
    ids = inputs["input_ids"]
    tail = torch.tensor([list(begun)], dtype=ids.dtype, device=ids.device)
    row: dict[str, Any] = {}
    for name, value in inputs.items():
        row[name] = value
        if value.shape != ids.shape:
            continue
        behind = torch.full_like(tail, name == "attention_mask", dtype=value.dtype)
        if name == "input_ids":
            behind = tail
        row[name] = torch.cat([value, behind], dim=1)
    options = {**settings, "max_new_tokens": 1, "return_dict_in_generate": True}
    accelerators: list[torch.device] = []
    if ids.device.type != "cpu":
        accelerators.append(ids.device)
    with torch.random.fork_rng(accelerators, device_type=ids.device.type):
        out: Any = model.generate(**row, **options, output_scores=True, output_logits=True)
        logits = out.logits[0][0].double()
        scores = out.scores[0][0].double()
        size = float(torch.maximum(logits.max().abs(), logits.max() - logits.median()))
        if seed is None:
            return scores, size
        torch.manual_seed(seed)
        key = NoiseKey.of(new_seed(ids.device), num_rows=1)
    position = row["attention_mask"].sum(dim=1, keepdim=True)
    noise = gumbel_noise(key, position, torch.arange(len(scores), device=ids.device))[0, 0]
    return scores + noise, size / (
        settings.get("temperature") or model.generation_config.temperature or 1.0
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
