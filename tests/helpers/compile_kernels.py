"""Compiles every kernel for a GPU without having one, and prints what each needs as JSON; run as a script.

    python compile_kernels.py [WHICH [CAPABILITY ...]] ... those whose name matches WHICH, for 90 (Hopper) by default
    python compile_kernels.py --table                  what all need on all, for benchmarks/results/kernel_resources.md

Launches are made with CPU tensors; in the place of each the compiled kernel is looked at. Not under
`TRITON_INTERPRET=1`. Needs nothing but Triton's own package, which holds ptxas and cuobjdump.
"""

import importlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Multiprocessors, and KB of shared memory that a program may have: A100, RTX 3090, L40S, H200, B200, RTX 5090.
CAPABILITIES = {
    80: (108, 163),
    86: (82, 99),
    89: (142, 99),
    90: (132, 227),
    100: (148, 227),
    120: (170, 99),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoDevice:
    """Stands where Triton expects a GPU's driver; nothing is ever launched.

    Args:
        capability (`int`): What to compile for, a key of `CAPABILITIES`.
    """

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target


def resources(compiled: Any) -> dict[str, int]:
    """Registers and stack bytes per thread, shared bytes per program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]),
        "shared": compiled.metadata.shared,
    }


def compile_all(which: str) -> list[dict[str, Any]]:
    """Compiles the kernels whose name matches `which`, at Qwen3-8B's shapes and, for attention, at harder ones."""
    found: list[dict[str, Any]] = []
    original = JITFunction.run
    case = ""

    def look(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = original(self, *args, grid=grid, warmup=True, **options)
        found.append(
            {"kernel": self.fn.__name__, "case": case, "hash": compiled.hash, **resources(compiled)}
        )

    with mock.patch.object(JITFunction, "run", look):
        for case, launch in launches().items():
            if re.search(which, case) and ("growing" in case) == ("growing" in which):
                launch()
    return found


def compile_for(which: str, capability: int) -> list[dict[str, Any]]:
    """As `compile_all`, for a capability; for a process of its own."""
    driver.set_active(NoDevice(capability))
    return compile_all(which)


def compile_on(which: str, capabilities: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Compiles for several capabilities, each in a process forked from this one: Triton keeps what it has compiled."""
    found: dict[int, list[dict[str, Any]]] = {}
    for capability in capabilities:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found[capability] = pool.apply(compile_for, (which, capability))
    return found


def launches() -> dict[str, Callable[[], Any]]:
    """Launches by name."""
    from dflash_kernels import (
        accept_and_prepare,
        add_norm,
        argmax,
        block_attention,
        build_tree,
        context_kv,
        follow_tree,
        gated_linear,
        gumbel_argmax,
        keep_path,
        linears,
        norm_rope_write,
        rms_norm,
        rope_angles,
        silu_mul,
        top_tokens,
    )
    from dflash_kernels.ancestors import num_words
    from dflash_kernels.block_attention import kernel
    from dflash_kernels.build_tree import NODE_PARTS

    # Sizes are chosen for the machine this runs on otherwise.
    num_processors, kilobytes = CAPABILITIES[int(driver.active.get_current_target().arch)]
    kernel.device_limits = lambda device: (num_processors, kilobytes * 1024)
    choose_num_splits = kernel.choose_num_splits
    batch, width, groups, size, layers, ring = 2, 16, 8, 128, 5, 2064
    lengths = torch.tensor([5, 900])

    half, full = torch.bfloat16, torch.float32

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def counts(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long)

    def launch(operation: Any, *arguments: Any) -> Callable[[], Any]:
        module: Any = importlib.import_module(".kernel", operation.reference.__module__)
        return lambda: module.launch(operation._named(arguments, {}))

    def attention(
        heads: int,
        size: int,
        dtype: torch.dtype,
        *rule: Any,
        splits: int | None,
        extent: int = ring,
        nodes: int = 0,
    ) -> Callable[[], Any]:
        """Over `extent` slots: the eager loop's verify reads as many as the longest row needs; of a tree's nodes."""
        num_tokens = nodes or width
        query = torch.zeros(batch, heads, num_tokens, size, dtype=dtype)
        key = torch.zeros(batch, ring, groups, size, dtype=dtype).transpose(1, 2)[:, :, :extent]
        sinks = torch.zeros(heads, dtype=dtype) if rule[-1] else None
        tree = (counts(batch, nodes), words(nodes)) if nodes else ()
        run = launch(block_attention, query, key, key, lengths, 0.1, *rule[:-1], sinks, *tree)

        def split() -> None:
            kernel.choose_num_splits = choose_num_splits if splits is None else lambda *_: splits
            run()

        return split

    def words(nodes: int) -> Tensor:
        """Of the ancestors in a tree of so many nodes, as a step has them."""
        return counts(num_words(nodes), batch, nodes).permute(1, 2, 0)

    def buffers(longest: int = ring, sliding: int = ring) -> list[Tensor]:
        """Of a cache whose first layers slide; the last one holds the whole row."""
        rings = [sliding] * (layers - 1) + [longest]
        return [zeros(batch, slots, groups, size) for slots in rings]

    angles = (zeros(batch, width, size), zeros(batch, width, size))
    heads = (
        zeros(batch, width, 32, size),
        zeros(batch, width, groups, size),
        zeros(batch, width, groups, size),
    )
    stacked = (zeros(batch, width, layers, 2, groups, size), zeros(layers, size))

    def state_of(tokens: int, rows: int = batch, columns: int = 999) -> list[Tensor]:
        """What a verify of so many tokens commits from, and to."""
        found = [counts(rows, tokens), counts(rows, tokens), counts(rows), counts(rows)]
        found += [counts(rows).bool(), counts(rows, columns), counts(rows, width)]
        return [*found, counts(rows, tokens), counts(5 + tokens, rows)]

    state = state_of(width)
    # The weights of queries, keys and values.
    attended = [zeros(4096, 4096), zeros(1024, 4096), zeros(1024, 4096)]
    verify = (True, None, False, None, False)  # causal, window, from_anchor, softcap, sinks

    def tree(nodes: int, states: int, columns: int = 2048) -> Callable[[], Any]:
        """Of so many nodes; a state is a candidate."""
        best, order = torch.zeros(
            2, batch, width - 1, states, min(nodes - 1, states if states > 1 else 63)
        )
        candidates = counts(batch, width - 1, states) if states > 1 else None
        parts = counts(NODE_PARTS + num_words(nodes), batch, nodes)
        given = (best, order.long(), parts, counts(batch, nodes), candidates)
        text = (counts(batch, columns), lengths, torch.zeros(2, 5))
        return launch(build_tree, *given, *text)

    def context(*rings: int) -> Callable[[], Any]:
        keys, values = buffers(*rings), buffers(*rings)
        return launch(context_kv, *stacked, *angles, lengths, keys, values, 1e-6)

    def path(times: int, *rings: int) -> Callable[[], Any]:
        moved = [*buffers(*rings), *buffers(*rings)] * times
        return launch(keep_path, counts(batch, width), counts(batch), moved)

    def follow(nodes: int) -> Callable[[], Any]:
        tree = (counts(batch, nodes), counts(batch, nodes), words(nodes))
        return launch(follow_tree, *tree, *(counts(batch, nodes) for _ in range(4)))

    return {
        "argmax": launch(argmax, zeros(batch, 15, 151936)),
        "gumbel": launch(
            gumbel_argmax, zeros(batch, 16, 151936), counts(), counts(batch, 16), None, 0.6, 0
        ),
        "gumbel, top-k": launch(
            gumbel_argmax,
            zeros(batch, 16, 151936),
            counts(),
            counts(batch, 16),
            torch.zeros(batch, 16),
            0.6,
            1,
        ),
        "gumbel, top-p": launch(
            gumbel_argmax,
            zeros(batch, 16, 151936),
            counts(),
            counts(batch, 16),
            torch.zeros(batch, 16),
            0.6,
            1,
            None,
            counts(batch, 16),
        ),
        "top_tokens": launch(top_tokens, zeros(batch, 15, 1, 151936), 15),
        "top_tokens, 63 of 262,208": launch(top_tokens, zeros(batch, 15, 1, 262208), 63),
        "top_tokens, candidates": launch(top_tokens, torch.zeros(batch, 15, 16, 16), 15),
        "context_kv": context(),
        "build_tree": tree(16, 1),
        "build_tree, 64 nodes of candidates": tree(64, 64),
        "build_tree, 128 nodes": tree(128, 1),
        "build_tree, 256 nodes of candidates": tree(256, 64),
        "follow_tree": follow(64),
        "follow_tree, 256 nodes": follow(256),
        "keep_path": path(3),
        "norm_rope_write": launch(
            norm_rope_write,
            *heads,
            zeros(size),
            zeros(size),
            *angles,
            lengths,
            buffers()[0],
            buffers()[0],
            1e-6,
        ),
        "norm_rope_write, no norm": launch(
            norm_rope_write, *heads, None, None, *angles, lengths, buffers()[0], buffers()[0], 0.0
        ),
        "rms_norm": launch(rms_norm, zeros(1, width, 4096), zeros(4096), 1e-6),
        "rms_norm of heads": launch(rms_norm, heads[0], zeros(size), 1e-6),
        "add_norm": launch(
            add_norm, zeros(1, width, 4096), zeros(1, width, 4096), zeros(4096), 1e-6
        ),
        "rope_angles": launch(
            rope_angles, counts(1, 2 * width), torch.zeros(size // 2), 1.0, torch.bfloat16
        ),
        "silu_mul": launch(silu_mul, zeros(1, width, 12288), zeros(1, width, 12288)),
        "linears, q, k and v": launch(linears, zeros(1, width, 4096), attended, [], None),
        "linears, biases, 32 rows": launch(
            linears, zeros(batch, width, 4096), attended, [zeros(len(w)) for w in attended], None
        ),
        "linears, residual": launch(
            linears, zeros(1, width, 12288), [zeros(4096, 12288)], [], zeros(1, width, 4096)
        ),
        "linears, ragged": launch(linears, zeros(1, 5, 1000), [zeros(77, 1000)], [], None),
        "linears, float32": launch(
            linears, torch.zeros(1, width, 4096), [torch.zeros(1024, 4096)], [], None
        ),
        "gated_linear": launch(
            gated_linear, zeros(1, width, 4096), zeros(12288, 4096), zeros(12288, 4096)
        ),
        "gated_linear, 32 rows": launch(
            gated_linear, zeros(batch, width, 4096), zeros(12288, 4096), zeros(12288, 4096)
        ),
        "gated_linear, float32": launch(
            gated_linear,
            torch.zeros(batch, width, 4096),
            torch.zeros(1024, 4096),
            torch.zeros(1024, 4096),
        ),
        "accept_and_prepare": launch(accept_and_prepare, *state, counts(3)),
        "accept_and_prepare, tree of 256": launch(accept_and_prepare, *state_of(256), counts(3)),
        "accept_and_prepare, counted elsewhere": launch(
            accept_and_prepare, *state, None, counts(batch)
        ),
        **{
            f"growing to {extent}": attention(32, 128, half, *verify, splits=None, extent=extent)
            for extent in (300, 501, 1024, 1777)
        },
        "growing ring": context(2064, 1040),
        "growing ring, longer": context(2065, 1040),
        "growing ring, path": path(1, 2064, 1040),
        "growing ring, longer path": path(1, 2065, 1040),
        "growing text": tree(16, 1, 2064),
        "growing text, longer": tree(16, 1, 2065),
        "growing state": launch(accept_and_prepare, *state_of(width, 16, 2064), counts(3)),
        "growing state, longer": launch(accept_and_prepare, *state_of(width, 2, 2065), counts(3)),
        "attention, verify": attention(32, 128, half, *verify, splits=16),
        "attention, draft, one split": attention(
            32, 128, half, False, None, False, None, False, splits=1
        ),
        "attention, 256, window, soft cap": attention(
            32, 256, half, True, 512, False, 50.0, False, splits=8
        ),
        "attention, 256, most splits": attention(8, 256, half, *verify, splits=kernel.MAX_SPLITS),
        "attention, most splits": attention(8, 128, half, *verify, splits=kernel.MAX_SPLITS),
        "attention, 64, from the anchor, sinks": attention(
            64, 64, half, True, 128, True, None, True, splits=8
        ),
        "attention, float32": attention(32, 128, full, *verify, splits=16),
        "attention, tree": attention(32, 128, half, *verify, splits=16, nodes=width),
        "attention, tree of 128": attention(32, 128, half, *verify, splits=2, nodes=128),
        "attention, tree of 256": attention(32, 128, half, *verify, splits=1, nodes=256),
        "attention, tree of 256, window": attention(
            64, 64, half, True, 128, False, None, True, splits=2, nodes=256
        ),
    }


def table() -> str:
    """Returns what every kernel needs on every capability, as a table."""
    lines = [
        "# What each kernel needs, compiled without a GPU\n",
        f"`python tests/helpers/compile_kernels.py --table`: Triton {triton.__version__}, torch {torch.__version__}, "
        f"Python {sys.version.split()[0]}, commit {_commit()}. Nothing was launched.",
        "Registers and bytes of stack per thread, KB of shared memory per program.\n",
        "| kernel | case | " + " | ".join(f"sm_{capability}" for capability in CAPABILITIES) + " |",
        "|---|---|" + "---|" * len(CAPABILITIES),
    ]
    rows: dict[tuple[str, str], list[str]] = {}
    for kernels in compile_on("", tuple(CAPABILITIES)).values():
        for kernel in kernels:
            key = (kernel["kernel"].strip("_"), kernel["case"])
            needs = f"{kernel['registers']} / {kernel['stack']} / {kernel['shared'] / 1024:.0f}"
            if "growing" not in kernel["case"]:
                rows.setdefault(key, []).append(needs)
    return "\n".join(
        [*lines, *(f"| {' | '.join([*key, *needs])} |" for key, needs in rows.items())]
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table())
        sys.exit()
    found: dict[int, list[dict[str, Any]]] = {}
    which = ""
    for word in [*sys.argv[1:], *["", "90"][len(sys.argv) - 1 :]]:
        if word.isdecimal():
            found |= compile_on(which, [int(word)])
        else:
            which = word
    print(json.dumps(found))
