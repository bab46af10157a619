"""Where a kernel cannot be built or does not fit, its definition runs instead: once said, and the text is the same."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dflash_kernels
from dflash_hf import ops
from dflash_kernels import accept_and_prepare, argmax, block_attention
from helpers.engine import GREEDY, pair
from helpers.kernel_checks import INTERPRETED, OPERATIONS
from helpers.source_tree import ROOT
from helpers.static import use_tapes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test has made fail works again, and devices are asked anew."""
    yield
    for name in OPERATIONS:
        getattr(dflash_kernels, name).failures.clear()
    ops._can_launch.cache_clear()


def no_compiler() -> Exception:
    return RuntimeError(
        "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs."
    )


def does_not_fit() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(116736, 101376, "shared memory")


def does_not_compile() -> Exception:
    from triton.compiler.errors import CompilationError

    return CompilationError("def kernel(): pass", None, "no such thing")  # pyright: ignore[reportArgumentType]


def compiler_fails() -> Exception:
    return subprocess.CalledProcessError(1, ["gcc", "main.c"])


def wrong_image() -> Exception:
    return RuntimeError(
        "Triton Error [CUDA]: no kernel image is available for execution on the device"
    )


KINDS: list[Callable[[], Exception]] = [
    no_compiler,
    does_not_fit,
    does_not_compile,
    compiler_fails,
    wrong_image,
]


class Failing:
    """Has an operation's launches raise; counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, operation: Any, error: Exception) -> None:
        self.num = 0
        module = importlib.import_module(".kernel", operation.reference.__module__)

        def launch(given: Any) -> Any:
            self.num += 1
            raise error

        monkeypatch.setattr(module, "launch", launch)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "dflash_kernels.operation"]


@pytest.mark.parametrize("device", [INTERPRETED])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_kernel_that_cannot_run_is_tried_once(
    kind: Callable[[], Exception],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing(monkeypatch, argmax, kind())
    logits = torch.randn(3, 50, device=device)
    for _ in range(3):
        assert torch.equal(argmax(logits), logits.argmax(-1))
    assert failing.num == 1
    assert len(said(caplog)) == 1
    assert said(caplog)[0].startswith(
        f"argmax runs in torch on cpu, its kernel cannot: {type(kind()).__name__}"
    )


@pytest.mark.parametrize("device", [INTERPRETED])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError(
            "Triton Error [CUDA]: operation failed due to a previous error during capture"
        ),
        KeyboardInterrupt(),
        TypeError("a fault of ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_fault_of_the_kernel_is_raised(
    error: Exception, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(monkeypatch, argmax, error)
    with pytest.raises(type(error)):
        argmax(torch.zeros(3, device=device))
    assert not argmax.failures


@pytest.mark.parametrize("device", [INTERPRETED])
@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
@pytest.mark.parametrize(
    ("operation", "kernels"),
    [(argmax, {"argmax"}), (accept_and_prepare, {"argmax", "accept_and_prepare"})],
    ids=["the first", "another"],
)
def test_a_run_goes_on_in_torch(
    operation: Any,
    kernels: set[str],
    engine: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a CPU that counts as a GPU: without the first kernel no other is tried, without another the rest go on."""
    use_tapes(monkeypatch)
    target, draft, inputs, wanted = pair(engine)
    failing = Failing(monkeypatch, operation, no_compiler())
    tried: set[str] = set()
    for name in OPERATIONS:
        kernel = importlib.import_module(f"dflash_kernels.{name}.kernel")

        def noted(given: Any, name: str = name, launch: Any = kernel.launch) -> Any:
            tried.add(name)
            return launch(given)

        monkeypatch.setattr(kernel, "launch", noted)
    monkeypatch.setattr(ops, "_is_recent", lambda device: True)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), wanted)
        assert draft.last_stats.engine == engine
    assert failing.num == 1
    assert tried == kernels
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("device", [INTERPRETED])
def test_an_attention_that_does_not_fit_gives_way_to_torchs_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_is_recent", lambda device: True)
    states = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16, device=device)
    assert ops.use_kernel(ops.block_attention, states, states, states)
    block_attention.failures[CPU] = "OutOfResources"
    assert not ops.use_kernel(ops.block_attention, states, states, states)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "Triton"],
)
def test_memory_that_has_run_out_once_leaves_kernels_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_is_recent", lambda device: True)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    logits = torch.zeros(1, 8)

    def no_memory(operation: Any, logits: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(argmax), "__call__", no_memory)
        with pytest.raises(type(error), match="out of memory"):
            ops.use_kernel(argmax, logits)
    assert ops.use_kernel(argmax, logits)


def test_amd_gpus_run_in_torch_alone_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Builds of torch for ROCm name them `cuda` and give them capabilities as recent as NVIDIA's."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.3")
    # With a memory of its own, which ends with the test.
    monkeypatch.setattr(ops, "_is_recent", functools.cache(ops._is_recent.__wrapped__))
    for _ in range(2):
        assert not ops._is_recent(device)
    (record,) = [record for record in caplog.records if record.name == "dflash_hf.ops"]
    assert record.getMessage() == (
        "decoding steps run in torch alone: cuda:0 is a device of ROCm, and the kernels are for CUDA"
    )


def test_what_triton_itself_misses_ends_in_torch(tmp_path: Path) -> None:
    """Triton's own driver, which builds a module in C at its first use, where it thinks that there is a GPU.

    It has the library of CUDA first, and no compiler; then, in a process of its own, not that library either.
    """
    source = """
import multiprocessing, os, shutil, sys, torch
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from dflash_kernels import argmax, operation
assert shutil.which("gcc") is shutil.which("cc") is shutil.which("clang") is None
CudaDriver.is_active = staticmethod(lambda: True)
argmax._covers = lambda *_: True

def run(environment):
    os.environ.update(environment)
    logits = torch.randn(3, 50)
    for _ in range(2):
        assert torch.equal(argmax._run(logits), logits.argmax(-1))
    print(argmax.failures, flush=True)

for environment in ({"TRITON_LIBCUDA_PATH": sys.argv[1]}, {}):
    process = multiprocessing.get_context("fork").Process(target=run, args=(environment,))
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    (tmp_path / "libcuda.so.1").touch()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")
    }
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "kernels/torch-ext"))
    run = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)],
        env={
            **environment,
            "PATH": "/nowhere",
            "PYTHONPATH": os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), paths])),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    no_compiler_said, no_library_said = run.stdout.splitlines()
    assert "Failed to find C compiler" in no_compiler_said
    assert "libcuda.so cannot found" in no_library_said or torch.cuda.is_available()
    assert run.stderr.count("argmax runs in torch on cpu, its kernel cannot") == 2
