"""What a capture asks of torch and in which order, with a process's state in place of CUDA's.

`World` keeps what torch 2.11 keeps: a generator that believes a capture is under way until one ends well, an allocator
that does until it is told, pools that count their graphs, and a workspace of cuBLAS that belongs to a pool or to none.
What CUDA itself makes of it is in tests/gpu/test_graphs.py.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from dflash_hf.generation import capture as module
from dflash_hf.generation.capture import NotCapturableError, capture

DEVICE = torch.device("cpu", 0)
POOL = (0, 7)


class World:
    """Torch's side of captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.waits: list[tuple[Any, Any]] = []
        self.generator_is_captured = False
        self.recording: list[Any] = []
        self.num_graphs: dict[Any, int] = {}
        self.workspace: Any = "outside"
        self.streams: list[str] = ["default"]
        self.is_refusing = False
        self.ends_by_itself = False
        world = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                world.calls.append("new stream")

            def wait_stream(self, other: object) -> None:
                world.calls.append("wait")
                world.waits.append((self, other))

        class Graph:
            def reset(self) -> None:
                world.calls.append("reset")

        @contextmanager
        def graph(
            graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
        ) -> Generator[None]:
            assert capture_error_mode == "thread_local"
            assert isinstance(stream, Stream)
            world.calls.append("begin")
            assert not torch.is_inference_mode_enabled(), (
                "the generator's tensors would be those of inference mode"
            )
            assert not world.recording, "allocator: a capture is under way"
            world.generator_is_captured = True
            world.recording.append(pool)
            world.num_graphs[pool] = world.num_graphs.get(pool, 0) + 1
            failed: RuntimeError | None = None
            try:
                yield
            except RuntimeError as error:
                failed = error
            if failed is None or not world.is_refusing:
                world.calls.append("end")
                world.recording.remove(pool)
                world.generator_is_captured = False
            elif world.ends_by_itself:
                world.recording.remove(pool)
            if failed is not None:
                raise RuntimeError(
                    "CUDA error: operation failed due to a previous error"
                ) from failed

        def end(index: int, pool: Any) -> None:
            world.calls.append("end allocation")
            assert index == DEVICE.index
            if pool not in world.recording:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            world.recording.remove(pool)

        def release(index: int, pool: Any) -> None:
            world.calls.append("release")
            world.num_graphs[pool] -= 1

        def clear() -> None:
            world.calls.append("clear")
            world.workspace = None

        monkeypatch.setattr(module, "_refused", [])
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device))
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: world.calls.append("synchronize")
        )
        for name, function in (
            ("endAllocateToPool", end),
            ("releasePool", release),
            ("clearCublasWorkspaces", clear),
        ):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", function, raising=False)
        module._capture_stream.cache_clear()

    def multiply(self) -> str:
        """A product: it takes its workspace from where memory comes from now, if there is none."""
        self.calls.append("multiply")
        if self.workspace is None:
            self.workspace = self.recording[-1] if self.recording else "outside"
        return self.workspace


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Generator[World]:
    yield World(monkeypatch)
    module._capture_stream.cache_clear()


def test_the_workspace_of_a_graph_is_its_own(world: World) -> None:
    """Neither one that was there before, which others may free, nor one that is used outside afterwards."""
    _, out = capture(world.multiply, world.multiply, DEVICE, POOL)
    assert out == POOL
    assert world.workspace is None
    work = [call for call in world.calls if call not in ("new stream", "wait")]
    assert work == ["multiply", "clear", "begin", "multiply", "end", "clear"]
    assert world.multiply() == "outside"


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_capture_begins_outside_inference_mode(is_inference: bool, world: World) -> None:
    with torch.inference_mode(is_inference):
        _, out = capture(lambda: None, torch.is_inference_mode_enabled, DEVICE, POOL)
        assert torch.is_inference_mode_enabled() == is_inference
    assert out == is_inference


@pytest.mark.parametrize(
    "ends_by_itself", [False, True], ids=["torch 2.11", "a torch that ends it"]
)
def test_a_refused_capture_leaves_torch_as_it_was(ends_by_itself: bool, world: World) -> None:
    world.is_refusing, world.ends_by_itself = True, ends_by_itself

    def refused() -> None:
        world.multiply()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(
        NotCapturableError, match=r"^CUDA could not capture it .RuntimeError: CUDA error: op"
    ):
        capture(world.multiply, refused, DEVICE, POOL)
    assert not world.generator_is_captured
    assert not world.recording
    assert world.workspace is None
    # A graph that torch has counted, and not ended, it never counts off.
    assert world.num_graphs[POOL] == (1 if ends_by_itself else 0)
    order = [
        call
        for call in world.calls
        if call in ("synchronize", "end allocation", "release", "reset", "begin")
    ]
    released = [] if ends_by_itself else ["release"]
    assert order == ["begin", "synchronize", "end allocation", *released, "reset", "begin"]
    assert len(module._refused) == 1, "allocators ask it which stream is its"
    world.is_refusing = False
    assert capture(world.multiply, world.multiply, DEVICE, POOL)[1] == POOL


def test_what_a_failed_warm_up_has_launched_is_waited_for(world: World) -> None:
    def failing() -> None:
        world.multiply()
        raise NotCapturableError("a read on the host")

    with pytest.raises(NotCapturableError, match="a read on the host"):
        capture(failing, world.multiply, DEVICE, POOL)
    (side, current), (waiting, waited_for) = world.waits
    assert waiting is current
    assert waited_for is side
    assert "begin" not in world.calls


def test_an_older_torch_without_these_functions_captures(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("endAllocateToPool", "releasePool", "clearCublasWorkspaces"):
        monkeypatch.delattr(torch._C, f"_cuda_{name}")
    assert capture(world.multiply, world.multiply, DEVICE, POOL)[1] == "outside"


def test_a_device_that_has_failed_is_not_captured_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    with pytest.raises(
        RuntimeError,
        match="expected the steps to run on CUDA, got RuntimeError: CUDA error: an ill",
    ):
        capture(world.multiply, lambda: failed(DEVICE), DEVICE, POOL)
    assert world.calls.count("begin") == 1


def test_no_memory_is_said_as_it_is(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(*args: object, **kwargs: object) -> Generator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)

    def body() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        capture(world.multiply, body, DEVICE, POOL)
    assert world.workspace is None
