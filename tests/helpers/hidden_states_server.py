"""A server that stores hidden states as vLLM's `ExampleHiddenStatesConnector` does, of a target in this process."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from helpers.http_threads import running

WRITING_SECONDS = 0.05  # for which a file is locked and not written yet


class HiddenStatesServer:
    """Answers `/v1/models` and `/v1/completions`.

    Args:
        target (`PreTrainedModel`): It is run.
        folder (`Path`): Where the files are written.
        layer_ids (`list[int]`): As vLLM counts them: 0 is the embedding's output.
        max_length (`int`): Longest prompt; longer ones are refused with status 400.
    """

    def __init__(
        self, target: PreTrainedModel, folder: Path, layer_ids: list[int], max_length: int = 10_000
    ) -> None:
        self.target = target
        self.folder = folder
        self.layer_ids = layer_ids
        self.max_length = max_length
        self.num_requests = 0
        self.failures = 0  # requests that end with status 500 before the others
        self._lock = threading.Lock()

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns status and reply to a request for a completion."""
        ids = body["prompt"]
        if len(ids) > self.max_length:
            return 400, {"error": {"message": f"the prompt has {len(ids)} tokens"}}
        with self._lock:
            self.num_requests += 1
            number = self.num_requests
            if self.failures > 0:
                self.failures -= 1
                return 500, {"error": {"message": "out of order"}}
            with torch.no_grad():
                output: Any = self.target(torch.tensor([ids]), output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer][0] for layer in self.layer_ids], dim=1)
        path = self.folder / f"cmpl-{number}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids)}
        threading.Thread(target=self._write, args=(tensors, path, lock)).start()
        reply = {"choices": [{"text": "x"}]}
        return 200, {**reply, "kv_transfer_params": {"hidden_states_path": str(path)}}

    def _write(self, tensors: dict[str, torch.Tensor], path: Path, lock: int) -> None:
        time.sleep(WRITING_SECONDS)
        save_file(tensors, path)
        os.close(lock)


@contextmanager
def serving(server: HiddenStatesServer) -> Generator[str]:
    """Runs a server, and gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "target"}]})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._send(*server.reply(json.loads(self.rfile.read(length))))

        def _send(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(http):
        yield f"http://127.0.0.1:{http.server_port}"
