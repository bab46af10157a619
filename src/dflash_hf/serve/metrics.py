"""This module counts for Prometheus, with vLLM's names and meanings, so that vLLM's dashboards can be used."""

from __future__ import annotations

import time

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.requests import Request
from starlette.responses import Response

from dflash_hf.serve.engine import Counts

NAMES = ("model_name", "engine")
# Limits of the buckets, in seconds.
FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The counters of a server.

    Args:
        model (`str`): The name of the model for clients.
    """

    def __init__(self, model: str) -> None:
        self.labels = (model, "0")
        self.registry = CollectorRegistry()
        self.waiting = self._gauge("num_requests_waiting", "Answers without a token yet.")
        self.running = self._gauge("num_requests_running", "Answers with a first token.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.new_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self.asked_tokens = self._counter("prefix_cache_queries", "Tokens of prompts looked up.")
        self.kept_tokens = self._counter("prefix_cache_hits", "Tokens of prompts found kept.")
        self.drafts = self._counter("spec_decode_num_drafts", "Verifies with proposals.")
        self.proposed = self._counter("spec_decode_num_draft_tokens", "Proposals checked.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Proposals accepted.")
        self.accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposals accepted at each position.",
            (*NAMES, "position"),
            registry=self.registry,
        )
        self.ended = Counter(
            "vllm:request_success",
            "Answers by the reason of their end.",
            (*NAMES, "finished_reason"),
            registry=self.registry,
        )
        self.first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN)
        self.whole = self._histogram("e2e_request_latency_seconds", WHOLE)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, NAMES, registry=self.registry).labels(*self.labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, NAMES, registry=self.registry).labels(*self.labels)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = "Seconds since the request came."
        found = Histogram(f"vllm:{name}", text, NAMES, registry=self.registry, buckets=buckets)
        return found.labels(*self.labels)

    def page(self, _: Request) -> Response:
        """Returns the page that Prometheus reads."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Tracked:
    """The state of one answer in the counters: it waits, then it runs, then it has ended."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.since = time.perf_counter()
        self.state = metrics.waiting
        self.has_ended = False
        self.state.inc()

    def begin(self) -> None:
        """Counts the first token. Later tokens and tokens after the end change nothing."""
        is_first = self.state is self.metrics.waiting
        # A token may still come from the engine after a client has disconnected.
        if is_first and not self.has_ended:
            self.state.dec()
            self.state = self.metrics.running
            self.state.inc()
            self.metrics.first_token.observe(time.perf_counter() - self.since)

    def end(self, reason: str, num_prompt_tokens: int, num_tokens: int, counts: Counts) -> None:
        """Counts an answer that has ended, unless it has already been counted as aborted."""
        if self.has_ended:
            return
        metrics = self.metrics
        self._leave(reason)
        metrics.whole.observe(time.perf_counter() - self.since)
        metrics.prompt_tokens.inc(num_prompt_tokens)
        metrics.new_tokens.inc(num_tokens)
        metrics.asked_tokens.inc(num_prompt_tokens)
        metrics.kept_tokens.inc(counts.num_kept_tokens)
        metrics.drafts.inc(sum(tried > 0 for tried in counts.proposed))
        metrics.proposed.inc(sum(counts.proposed))
        metrics.accepted.inc(sum(counts.accepted))
        for position in range(max(counts.accepted, default=0)):
            number = sum(accepted > position for accepted in counts.accepted)
            metrics.accepted_at.labels(*metrics.labels, str(position)).inc(number)

    def abort(self) -> None:
        """Counts an answer as aborted because nobody waits for it any more, unless it has ended."""
        if not self.has_ended:
            self._leave("abort")

    def _leave(self, reason: str) -> None:
        self.has_ended = True
        self.state.dec()
        self.metrics.ended.labels(*self.metrics.labels, reason).inc()
