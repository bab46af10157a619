"""What every test runs under: offline, a cache folder of its own, one torch thread, a steady clock, `gpu` tests only
where there is a GPU, engines of its own, no deprecated call of ours, and no kernel given up unseen, whose reference
would be compared with itself.
"""

import atexit
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from typing import Any

# Before anything imports huggingface_hub or torch: both read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The user's own has tables of `dflash-hf tune`: they would change what is decoded, and be replaced by other ones.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="dflash-hf-home-")

import pytest

from helpers.deprecations import DeprecationLog

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

# No torch here: the process that only deals the tests out to two others need not load it.


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leaves what is imported, which stays for good, out of every search for garbage: those took four seconds."""
    gc.disable()
    result = yield
    gc.freeze()
    # Ten times as rarely as Python does by itself: tests keep little that has to be searched for.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    return result


@pytest.fixture(scope="module", autouse=True)
def little_to_search() -> None:
    """Leaves what earlier files hold for good out of searches for garbage: Transformers' trainer makes one per run."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="marked gpu, and torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """For models this small, more of them only get in each other's way."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Generator[None]:
    """Typer's runner builds all commands anew at every call, for 40 ms; loads nothing for tests that do without it."""
    runner: Any = sys.modules.get("typer.testing")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(runner, "_get_command"):
            patch.setattr(runner, "_get_command", functools.cache(runner._get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Generator[None]:
    """Every client of httpx reads all certificates anew, for 30 ms; loads nothing for tests that do without it."""
    transport: Any = sys.modules.get("httpx._transports.default")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(transport, "create_ssl_context"):
            patch.setattr(
                transport, "create_ssl_context", functools.cache(transport.create_ssl_context)
            )
        yield


@pytest.fixture(scope="session", autouse=True)
def no_seeds_for_devices() -> Generator[None]:
    """Without a device each `manual_seed` keeps two texts of the whole stack for when there is one, for 0.5 ms."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what a run chooses not depend on the machine: trees and their widths are chosen by equal times.

    So most steps have a draft, of changing width. By modelled costs a run on a CPU, as a user has it (`users_costs`),
    would decode tiny models without a draft: their layers are too few.
    """
    from helpers.widths import SteadyTimes, known_in_half

    monkeypatch.setattr("dflash_hf.generation.options.StepTimes", SteadyTimes)
    monkeypatch.setattr("dflash_hf.generation.options._known_costs", known_in_half)


@pytest.fixture
def users_costs(steady_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a run choose as a user's does, in every dtype."""
    from helpers.widths import known_costs

    monkeypatch.setattr("dflash_hf.generation.options._known_costs", known_costs)


@pytest.fixture
def whole_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every verify be as wide as it may: by default it is as wide as pays.

    For tests that count or compare the steps of trees; those of chains have `helpers.whole_blocks`.
    """
    from helpers.whole_blocks import CHOOSING, widest

    for module in CHOOSING:
        monkeypatch.setattr(module, "choose_widths", widest)


@pytest.fixture(autouse=True)
def deprecations() -> Generator[DeprecationLog]:
    """Fails a test in which this package called what Transformers' log says is deprecated."""
    upstream: Any = sys.modules.get("transformers.utils.logging")
    if upstream is not None:
        upstream.warning_once.cache_clear()  # what was said once in an earlier test is said again
    log = DeprecationLog("dflash_hf")
    logger = logging.getLogger("transformers")
    logger.addHandler(log)
    yield log
    logger.removeHandler(log)
    assert not log.messages


@pytest.fixture(autouse=True)
def captured_again() -> Generator[None]:
    """Ends what `helpers.static.set_engine` has begun; loads nothing for tests that do without it."""
    yield
    if "helpers.static" in sys.modules:
        sys.modules["helpers.static"].capture_again()


@pytest.fixture(autouse=True)
def kernels_that_run() -> Generator[None]:
    """Fails a test in which a kernel could not be launched, so that its reference ran in its place."""
    yield
    kernels = sys.modules.get("dflash_kernels")
    operations = [] if kernels is None else [getattr(kernels, name) for name in kernels.__all__]
    given_up = {operation.reference.__name__: operation.failures.copy() for operation in operations}
    for operation in operations:
        operation.failures.clear()
    assert not any(given_up.values()), given_up
