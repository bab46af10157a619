"""Every kernel compiles for Hopper, without a GPU: what the interpreter accepts the compiler need not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.source_tree import ROOT

# What a Hopper has for one program, and for two of them in a multiprocessor of 65,536 registers.
SHARED_BYTES = 227 * 1024
NUM_KERNELS = {
    "attention": 2 * 4 + 1,
    "argmax": 2,
    "gumbel": 4,
    "context_kv": 1,
    "norm_rope_write": 1,
    "rms_norm": 2,
    "add_norm": 1,
    "silu_mul": 1,
    "accept_and_prepare": 2,
}


def compiled(which: str, cache: Path) -> list[dict[str, Any]]:
    """What the script says of the kernels whose name contains `which`, compiled anew."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "kernels/torch-ext", "tests"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/compile_kernels.py"), which],
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
    return json.loads(run.stdout.splitlines()[-1])


def check(which: str, cache: Path) -> None:
    """As many kernels as there are, which fit and, in 16 bits, keep everything in registers."""
    found = compiled(which, cache)
    assert len(found) == NUM_KERNELS[which]
    for kernel in found:
        assert kernel["shared"] <= SHARED_BYTES, kernel
        if "verify" in kernel["case"] or "draft" in kernel["case"]:
            assert kernel["shared"] <= SHARED_BYTES // 2, kernel
        if "float32" not in kernel["case"]:
            # Triton 3.6 keeps a word or two on the stack where 3.7 does not.
            assert kernel["stack"] <= 16, kernel


@pytest.mark.parametrize("which", sorted(set(NUM_KERNELS) - {"attention"}))
def test_kernels_compile_for_hopper(which: str, tmp_path: Path) -> None:
    check(which, tmp_path)


@pytest.mark.slow
def test_attention_compiles_for_hopper(tmp_path: Path) -> None:
    check("attention", tmp_path)


@pytest.mark.slow
def test_a_growing_context_compiles_once(tmp_path: Path) -> None:
    """Compiling takes seconds: neither the slots that are read nor the splits that follow from them may ask for it."""
    found = [kernel for kernel in compiled("growing", tmp_path) if kernel["kernel"] == "_block_attention_kernel"]
    assert len(found) == 4
    assert len({kernel["hash"] for kernel in found}) == 1
