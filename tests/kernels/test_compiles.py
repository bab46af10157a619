"""Every kernel compiles for every kind of GPU, without one: what the interpreter accepts the compiler need not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.source_tree import ROOT

# KB of shared memory in a multiprocessor, of which every program takes one more than it asks for; one of them may have
# a KB less than all.
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
NUM_KERNELS = {
    "attention": 9 * 2 + 2,
    "argmax": 2,
    "gumbel": 6,
    "build_tree": 4,
    "context_kv": 1,
    "follow_tree": 2,
    "gated_linear": 3,
    "keep_path": 1,
    "linears": 5,
    "norm_rope_write": 2,
    "rms_norm": 2,
    "add_norm": 1,
    "rope_angles": 1,
    "silu_mul": 1,
    "top_tokens": 2 * 3,
    "accept_and_prepare": 3,
}
# Launches of each kernel over contexts of several lengths.
NUM_GROWING = {
    "_block_attention_kernel": 4,
    "_context_kv_kernel": 2,
    "_keep_path_kernel": 2,
    "_build_tree_kernel": 2,
    "_accept_and_prepare_kernel": 2,
}
# Bytes of stack per thread: Triton 3.6 keeps a word or two there where 3.7 does not.
MOST_STACK = 16
# Attention with each size of heads; with and without a tree, a window, a soft cap and sinks.
SOME = "verify|256, window"
# Of the same branches as a smaller and a larger one: two words of ancestors are a loop's middle, between one and four.
BETWEEN = "attention, most splits|attention, tree of 128|build_tree, 64|build_tree, 128"
MOST = f"^(?!{BETWEEN})"
NUM_NONE = dict.fromkeys(NUM_KERNELS, 0)
NUM_BETWEEN = {**NUM_NONE, "attention": 2 * 2, "build_tree": 2}
NUM_MOST = {name: number - NUM_BETWEEN[name] for name, number in NUM_KERNELS.items()}
# Which kernels are compiled -> how many there are.
NUMS = {
    "": NUM_KERNELS,
    MOST: NUM_MOST,
    BETWEEN: NUM_BETWEEN,
    SOME: {**NUM_NONE, "attention": 3 * 2},
}
# CUDA's `cosf` and `sinf` keep six words and more there, for angles beyond 105,615: others never touch them.
STACK_OF_ANGLES = 32


def compiled(which: dict[int, str], cache: Path) -> dict[int, list[dict[str, Any]]]:
    """What the script says of the kernels whose name matches that of their capability, compiled anew."""
    words = [word for capability, name in which.items() for word in (name, str(capability))]
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "kernels/torch-ext", "tests"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/compile_kernels.py"), *words],
        # An inherited path goes first: it may hold another release of Triton.
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), paths])),
            "TRITON_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(run.stdout.splitlines()[-1])
    return {int(capability): kernels for capability, kernels in found.items()}


# Attention alone has tensor cores' instructions, which differ between 90, 100 and the others: 80, 86 and 89 have those
# of 120, and its memory or more.
@pytest.mark.parametrize(
    "which",
    [
        {90: MOST, 100: SOME, 120: SOME},
        pytest.param({90: BETWEEN}, marks=pytest.mark.slow),
        pytest.param(dict.fromkeys((80, 86, 89), ""), marks=pytest.mark.slow),
        pytest.param(dict.fromkeys((100, 120), ""), marks=pytest.mark.slow),
    ],
    ids=["most for 90", "others for 90", "all before it", "all behind it"],
)
def test_kernels_compile_and_fit_shared_memory_and_registers(
    which: dict[int, str], tmp_path: Path
) -> None:
    found = compiled(which, tmp_path)
    assert found.keys() == which.keys()
    for capability, kernels in found.items():
        nums = {name: sum(name in kernel["case"] for kernel in kernels) for name in NUM_KERNELS}
        assert nums == NUMS[which[capability]]
        for kernel in kernels:
            check(kernel, capability)


def check(kernel: dict[str, Any], capability: int) -> None:
    """What one kernel needs is there."""
    # Attention fits its blocks to the memory; others take the same everywhere.
    memory = SHARED[capability] if "attention" in kernel["case"] else min(SHARED.values())
    assert kernel["shared"] <= (memory - 1) * 1024, (capability, kernel)
    if "float32" in kernel["case"]:
        return
    most_stack = STACK_OF_ANGLES if kernel["case"] == "rope_angles" else MOST_STACK
    assert kernel["stack"] <= most_stack, (capability, kernel)
    if "verify" in kernel["case"] or "draft" in kernel["case"]:
        # Two programs of 4 warps in a multiprocessor of 65,536 registers, whose shared memory they share.
        assert 2 * (kernel["shared"] + 1024) <= SHARED[capability] * 1024, (capability, kernel)


@pytest.mark.slow
def test_a_growing_context_compiles_once(tmp_path: Path) -> None:
    """Compiling takes seconds: neither the slots that are read nor the splits that follow from them may ask for it.

    Nor may the slots that there are, the columns of the text, or the rows.
    """
    hashes: dict[str, list[str]] = {}
    for kernel in compiled({90: "growing"}, tmp_path)[90]:
        hashes.setdefault(kernel["kernel"], []).append(kernel["hash"])
    # It holds the partial results of all splits in registers.
    hashes.pop("_reduce_kernel", None)
    nums = {name: len(found) for name, found in hashes.items()}
    assert nums == NUM_GROWING
    assert {name: len(set(found)) for name, found in hashes.items()} == dict.fromkeys(
        NUM_GROWING, 1
    )
