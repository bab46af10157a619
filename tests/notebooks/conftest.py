"""One process for all notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.source_tree import ROOT


@pytest.fixture(scope="session")
def kernel() -> Iterator[Any]:
    """Each notebook begins with no variables and in a folder of its own, and torch is loaded."""
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    # As NotebookClient has it
    manager.client_class = "jupyter_client.asynchronous.AsyncKernelClient"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("NOTEBOOK_REHEARSAL", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        manager.start_kernel(extra_arguments=["--HistoryManager.hist_file=:memory:"])
    yield manager
    manager.shutdown_kernel(now=True)
