"""This module gets the tapped states of a target from vLLM servers, for targets that do not fit beside the training.

A server is started with `--speculative-config '{"method": "extract_hidden_states", ...}'` and the connector
`ExampleHiddenStatesConnector` (docs/training.md has the whole command). A request has the tokens of an example as its
prompt. For each request, the server writes a safetensors file with `hidden_states` `[T, L, D]` and `token_ids` `[T]`,
and its reply names the file. Until the file is complete, the server holds a lock on the file `PATH.lock` beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.data.openai_client import OpenAIClient, run_async
from dflash_hf.errors import listed, one_line, require
from dflash_hf.training.example import Example
from dflash_hf.training.server_pool import Job, OtherPromptError, ServerPool, ended

# The limit bounds the files that are not read yet, because they may be in memory (/dev/shm).
REQUESTS_AT_ONCE = 32
LONGEST_WRITE = 60.0  # seconds that a server may take to write a file
LOCK_CHECK = 0.02  # seconds between two checks of a lock
# These token ids exist in every vocabulary. Requests for their states check that a server works as expected.
SHORT_TEXT = (1, 2, 3, 4)


def layer_ids(config: DFlashConfig) -> list[int]:
    """Returns the tapped layers as vLLM counts them: 0 is the embedding's output, and 1 is the output of layer 0."""
    return [layer + 1 for layer in config.target_layer_ids]


@dataclass(slots=True, kw_only=True)
class FeatureJob(Job):
    """An example whose states are requested."""

    example: Example


class ServedFeatures:
    """Lets servers compute the tapped states of examples.

    Args:
        servers (sequence of [`OpenAIClient`]): The servers that run the target.
        config ([`DFlashConfig`]): The draft's config. It says how many layers are tapped, and their width.
        dtype (`torch.dtype`): The dtype of the returned states, which is the target's dtype.
    """

    def __init__(
        self, servers: Sequence[OpenAIClient], config: DFlashConfig, dtype: torch.dtype
    ) -> None:
        self.servers = servers
        self.shape = (len(config.target_layer_ids), int(config.target_hidden_size))
        self.dtype = dtype
        self.start = (
            "start vllm serve with the options of docs/training.md, and with "
            f'"eagle_aux_hidden_state_layer_ids": {layer_ids(config)}'
        )
        self._refused: list[str] = []

    def check(self) -> None:
        """Requests the states of a short text from each server.

        Raises:
            ValueError: If a server does not answer or stores no states, or if the number or width of the stored layers
                is not that of the draft's taps. This check cannot see which layers the server stores.
        """

        async def ask() -> None:
            for server in self.servers:
                async with server:
                    await self._states(server, SHORT_TEXT)

        try:
            run_async(ask)
        except (httpx.HTTPError, ValueError) as error:
            raise ended(self.servers, error) from error

    def compute(self, examples: Iterable[Example], keep: Callable[[Example, Tensor], None]) -> None:
        """Lets the servers compute the states of all examples, in any order.

        Args:
            examples (iterable of [`Example`]): The examples. They must be text without images.
            keep (callable): It is called with each example and its states, `[T, L * D]`, on the CPU. If it raises
                `ValueError`, the example counts as refused.

        Raises:
            ValueError: If an example has images, no server answers any more, or a server refuses an example.
        """
        self._refused = []
        num_jobs = 0

        async def ask(server: OpenAIClient, job: FeatureJob) -> None:
            states = await self._states(server, job.example.input_ids)
            try:
                keep(job.example, states)
            except ValueError as error:  # another request would give the same states
                raise OtherPromptError(str(error)) from error

        async def ask_again(server: OpenAIClient) -> None:
            await self._states(server, SHORT_TEXT)

        def jobs() -> Iterator[FeatureJob]:
            nonlocal num_jobs
            for example in examples:
                action = "load the target, without --feature-server"
                others = listed(sorted(example.model_inputs))
                what = "examples of text for --feature-server"
                require(not example.model_inputs, what, others, action)
                num_jobs += 1
                yield FeatureJob(example=example)

        async def run() -> None:
            pool = ServerPool(
                self.servers, REQUESTS_AT_ONCE, ask=ask, check=ask_again, give_up=self._give_up
            )
            await pool.run(jobs())

        run_async(run)
        if self._refused:
            raise ValueError(
                f"expected the states of {num_jobs} examples, got {len(self._refused)} refusals "
                f"({self._refused[0]}); if they are too long, start the server with a larger --max-model-len, or "
                "lower --max-length"
            )

    def _give_up(self, job: FeatureJob, reason: str) -> None:
        self._refused.append(f"{len(job.example.input_ids)} tokens: {reason}")

    async def _states(self, server: OpenAIClient, token_ids: Sequence[int]) -> Tensor:
        """Returns the tapped states `[T, L * D]` of some tokens, and removes the server's file."""
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0}
        reply = await server.complete(body)
        stored = reply.get("kv_transfer_params") or {}
        path = stored.get("hidden_states_path")
        what = f"kv_transfer_params with hidden_states_path in the answer of {server.url}"
        if not isinstance(path, str):
            raise OtherPromptError(f"expected {what}, got {listed(sorted(reply))}; {self.start}")
        tensors = await asyncio.to_thread(read_file, Path(path), server.url)
        states = tensors.get("hidden_states")
        ids = tensors.get("token_ids")
        if states is None or ids is None or ids.tolist() != list(token_ids):
            got = listed(sorted(tensors))
            raise OtherPromptError(
                f"expected hidden_states and the token_ids that were sent in {path}, got {got}; {self.start}"
            )
        wanted = (len(token_ids), *self.shape)
        if tuple(states.shape) != wanted:
            raise OtherPromptError(
                f"expected hidden states of shape {wanted} (tokens, layers, width) of {server.url}, got "
                f"{tuple(states.shape)}; {self.start}"
            )
        return states.flatten(1).to(self.dtype)


def read_file(path: Path, url: str) -> dict[str, Tensor]:
    """Waits until a server's file is complete, reads it, and removes it with its lock.

    Raises:
        OtherPromptError: If the file does not exist or cannot be read. Another request would not help.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        wait_for_writer(lock)
        tensors = load_file(path)
        path.unlink()
        lock.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise OtherPromptError(
            f"expected the file {path} that {url} has written, got {one_line(error)}; run the training where the "
            "server's shared_storage_path can be read and written"
        ) from error
    return tensors


def wait_for_writer(lock: Path) -> None:
    """Waits until a server releases a lock. Returns immediately if there is no lock.

    Raises:
        ValueError: If the server holds the lock for more than a minute. The example is then requested again.
    """
    if not lock.exists():
        return
    import fcntl

    deadline = time.monotonic() + LONGEST_WRITE
    with lock.open() as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                is_late = time.monotonic() > deadline
                what = f"a file of hidden states within {LONGEST_WRITE:.0f} s"
                require(not is_late, what, f"a lock on {lock}", "look at the server's log")
                time.sleep(LOCK_CHECK)
