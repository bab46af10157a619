"""Counts a step's kernels, and the memory it takes besides its buffers, from the operations that it is made of.

The rule, the same for every tree that is compared:

* operations are counted below what torch itself takes apart (`linear` is a product, `reshape` a copy or nothing);
* views, aliases and uninitialised memory are none;
* our own operations count what they launch at most (`OWN`: attention with the sum over its splits is two);
* an operation that first copies what it changes is two (`COPYING`), a sort or a `topk` is `SORTING`: what torch's
  radix sort of a wide row comes to at most;
* everything else is one. A product is one too: whether cuBLAS cuts it into two is not known here, and a cast, a fill
  and a copy on the device are launches like any other.

Memory is that of the tensors that operations return, and what those of ours that choose tokens (`CHOOSING`) take for
themselves inside; what attention takes for its splits is not seen.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACE = "dflash_kernels::"
# Launches of our own operations, where it is not one.
OWN = {"block_attention": 2, "argmax": 2, "gumbel_argmax": 2, "top_tokens": 2}
# Buffers that one launch of `keep_path` takes.
BUFFERS = 32
# Those that choose keep so many bytes of so many columns of a row: the best as one int64, or the greatest of a block,
# which is shorter where more than 15 tokens are asked for, and a sum.
CHOOSING = {
    "argmax": [(8, 4096)],
    "gumbel_argmax": [(8, 2048)],
    "top_tokens": [(4, 512), (4, 4096)],
}
FEW = 15
SHORT = {512: 128}
COPYING = {
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "masked_fill",
    "masked_scatter",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "select_scatter",
    "slice_scatter",
}
SORTING = dict.fromkeys(("sort", "topk", "argsort", "kthvalue"), 16)
NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "_unsafe_view",
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution"}


def num_launches(func: Any, args: Sequence[Any] = ()) -> int:
    """Returns the kernels of one call of an ATen operation or one of ours, by the rule above.

    Args:
        func (`torch._ops.OpOverload`): The operation, not one that torch takes apart.
        args (sequence): What it is called with.
    """
    full = func._schema.name
    name = full.removeprefix("aten::")
    if full == f"{NAMESPACE}keep_path":
        return -(-len(args[2]) // BUFFERS)
    if full.startswith(NAMESPACE):
        return OWN.get(full.removeprefix(NAMESPACE), 1)
    if name in NOTHING or _is_view(func):
        return 0
    if name in COPYING:
        return 2
    return SORTING.get(name, 1)


def _is_view(func: Any) -> bool:
    """Returns True if an operation changes nothing, and returns memory that it was given, or no tensor."""
    returns = func._schema.returns
    return not func._schema.is_mutable and all(
        r.alias_info is not None or "Tensor" not in str(r.type) for r in returns
    )


class CountLaunches(TorchDispatchMode):
    """Counts launches and temporary memory of what runs under it, by the parts of a step.

    Tokens are chosen from the draft's logits on, and in the whole of the part `"decide"`.

    Args:
        vocab_size (`int`): A product as wide as this makes logits.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.part = ""
        # Per part and operation: calls, and kernels.
        self.calls: Counter[tuple[str, str]] = Counter()
        self.kernels: Counter[tuple[str, str]] = Counter()
        # Bytes that are alive, the most that were, and the most that were while tokens were chosen, beyond what was
        # alive when the logits had been made.
        self.alive = 0
        self.peak = 0
        self.choosing = 0
        self._vocab_size = vocab_size
        self._logits_at: int | None = None

    def enter(self, part: str) -> None:
        """Begins a part of the step: `"draft"`, `"verify"` or `"decide"`."""
        self.part = part
        self._logits_at = None
        if part == "decide":
            self._logits_at = self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks where a tensor of a subclass is; is no operation
            return func(*args, **kwargs)
        # Under inference mode an operation that is made of others arrives here whole.
        with self:
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        self._count(name, num_launches(func, args))
        self._watch(name, [*_tensors((args, kwargs))], [*_tensors(out)])
        return out

    def _count(self, name: str, launches: int) -> None:
        if not launches:
            return
        self.calls[self.part, name] += 1
        self.kernels[self.part, name] += launches

    def _watch(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        """Counts new memory, and forgets it when it is freed."""
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and not tensor.is_cpu:
                known.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        scratch = 0
        for size, columns in CHOOSING.get(name.removeprefix(NAMESPACE), ()):
            if made[0].shape[-1] > FEW:
                columns = SHORT.get(columns, columns)
            scratch += size * math.prod(given[0].shape[:-1]) * -(-given[0].shape[-1] // columns)
        self.peak = max(self.peak, self.alive + scratch)
        if self.part == "draft" and name in PRODUCTS and made[0].shape[-1] == self._vocab_size:
            self._logits_at = self.alive
        if self._logits_at is not None:
            self.choosing = max(self.choosing, self.alive + scratch - self._logits_at)

    def _free(self, num_bytes: int) -> None:
        self.alive -= num_bytes

    @property
    def num_kernels(self) -> int:
        """Kernels that were launched, over all operations."""
        return sum(self.kernels.values())

    def rows(self) -> list[dict[str, Any]]:
        """A row per operation, the one with most kernels first."""
        names = sorted({name for _, name in self.calls})
        rows = [
            {
                "operation": name,
                "calls": sum(num for (_, other), num in self.calls.items() if other == name),
                "kernels": sum(num for (_, other), num in self.kernels.items() if other == name),
                **{part: num for (part, other), num in self.kernels.items() if other == name},
            }
            for name in names
        ]
        return sorted(rows, key=lambda row: -row["kernels"])


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
