"""What the kernel tests share: where they run, memory that shows a wrong write, and how near is near enough."""

import importlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import dflash_kernels
from dflash_hf import ops
from dflash_hf.target_model.fast_layers import fast_layers
from dflash_hf.target_model.parts import find_target

INTERPRETED = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="kernels run on a CPU in Triton's interpreter: make test-kernels",
    ),
)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [INTERPRETED, CUDA]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GUARD = 64
OPERATIONS = (
    "block_attention",
    "norm_rope_write",
    "context_kv",
    "argmax",
    "gumbel_argmax",
    "accept_and_prepare",
)
# How often these run depends on what a target is made of.
POINTWISE = ("rms_norm", "add_norm", "silu_mul", "rope_angles")
# Those that nothing uses before they were measured.
PRODUCTS = ("linears", "gated_linear")
# Those of steps that verify trees.
TREES = ("top_tokens", "build_tree", "follow_tree", "keep_path")


def ancestors_of(parents_BN: Tensor) -> Tensor:
    """The words of every node's ancestors in trees with these parents, as kernels take them: `[B, N, A]`."""
    batch, num = parents_BN.shape
    words = torch.zeros(batch, num, -(-num // 64), dtype=torch.long)
    for row, parents in enumerate(parents_BN.tolist()):
        for node, parent in enumerate(parents):
            if node:
                words[row, node] = words[row, parent]
            bit = torch.tensor(1).bitwise_left_shift(node % 64)
            words[row, node, node // 64] |= bit
    return words


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated and not written holds NaN, or the greatest integer."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class Guarded:
    """A contiguous tensor in the middle of a longer allocation; `whole` shows every write around it.

    Args:
        values (`torch.Tensor`): What the tensor holds at first.
    """

    def __init__(self, values: Tensor) -> None:
        self.whole = torch.full(
            (values.numel() + 2 * GUARD,), 77, dtype=values.dtype, device=values.device
        )
        self.tensor = self.whole[GUARD : GUARD + values.numel()].view(values.shape)
        self.tensor.copy_(values)

    def copy(self) -> "Guarded":
        """Returns another allocation with the same values."""
        return Guarded(self.tensor)


def assert_same_writes(
    ours: dict[str, Guarded], wanted: dict[str, Guarded], tolerance: float = 0.0
) -> None:
    """Both have written the same values to the same places, NaN where nothing was written, and nothing around."""
    for name, guarded in ours.items():
        scale = float(wanted[name].whole.float().nan_to_num().abs().max())
        torch.testing.assert_close(
            guarded.whole,
            wanted[name].whole,
            rtol=tolerance,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check_raises(call: Callable[[], Any], *words: str) -> None:
    """A call is refused in a sentence that names these."""
    with pytest.raises(ValueError, match=r"^expected .*, got .*; ") as error:
        call()
    for word in words:
        assert word in str(error.value)


class Calls:
    """How often each operation has run, as a kernel and by its reference.

    Args:
        monkeypatch (`pytest.MonkeyPatch`): Puts things back.
        operations (`tuple[str, ...]`): Those that are counted.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, operations: tuple[str, ...] = OPERATIONS
    ) -> None:
        self.kernels: Counter[str] = Counter()
        self.references: Counter[str] = Counter()
        for name in operations:
            bodies = getattr(dflash_kernels, name).op._backend_fns
            for device, body in bodies.items():
                monkeypatch.setitem(bodies, device, self._counted(name, body))
            if importlib.util.find_spec("triton"):
                kernel: Any = importlib.import_module(f"dflash_kernels.{name}.kernel")
                monkeypatch.setattr(kernel, "launch", self._counted_launch(name, kernel.launch))

    def _counted(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            before = self.kernels[name]
            out = body(*args)
            if self.kernels[name] == before:
                self.references[name] += 1
            return out

        return counting

    def _counted_launch(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def counting(given: Any) -> Any:
            self.kernels[name] += 1
            return launch(given)

        return counting

    def clear(self) -> None:
        """Forgets what has run so far."""
        self.kernels.clear()
        self.references.clear()

    def all(self) -> Counter[str]:
        """Both together."""
        return self.kernels + self.references


def find_out(target: Any) -> None:
    """Has the trials of a target's fast layers run, which call some operations, and not later."""
    with torch.no_grad(), ops.kernels(True), fast_layers(find_target(target)):
        pass


def calls_of(draft: Any, num_fused: int = 0, num_layers: int = 4) -> Counter[str]:
    """How often each operation must have run in the last call of a draft's target of `num_layers`, greedy or sampled.

    Of those, `num_fused` have attention like Qwen3's or Llama's, in a dtype in which it is known by what it computes.

    A step has context to write from the first one on; the prefill chooses and commits a token too; a selector chooses
    among candidates, not over the vocabulary, and along a Markov head each slot chooses by itself. Samples are drawn
    from logits, but for those behind a rejection.
    """
    stats, config = draft.last_stats, draft.config
    verifies, drafts = stats.num_target_forwards - 1, stats.num_draft_forwards
    assert drafts > 1
    chosen = drafts if config.selector_rank is None else 0
    if config.is_dspark:
        chosen = sum(width - 1 for width in stats.verify_widths)
    argmax, drawn = {
        "greedy": (1 + verifies + chosen, 0),
        "argmax": (chosen, 1 + verifies),
        "shared_noise": (0, 1 + verifies + chosen),
        "sample": (verifies + chosen, 1),
    }[stats.proposal]
    return +Counter(
        block_attention=verifies * num_layers + drafts * config.num_hidden_layers,
        norm_rope_write=drafts * config.num_hidden_layers + verifies * num_fused,
        context_kv=drafts,
        gumbel_argmax=drawn,
        argmax=argmax,
        accept_and_prepare=1 + verifies,
    )


def check_apart(check: Callable[[], None]) -> None:
    """Runs a check in a fork of this process, which a wrong address ends; what it raises is on stderr."""
    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0
