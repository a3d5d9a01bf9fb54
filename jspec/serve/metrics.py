"""Counters of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jspec.serve.engine import Engine
from jspec.serve.request import Result

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """The metrics of one engine; ``registry`` is what is exposed."""

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()

        def make(kind, name: str, text: str, **options):
            return kind(f"jspec_{name}", text, registry=self.registry, **options)

        self._ended = make(
            Counter, "requests", "requests that ended", labelnames=["reason"]
        )
        self._refused = make(
            Counter, "refused", "requests not taken", labelnames=["status"]
        )
        self._prompt = make(Counter, "prompt_tokens", "tokens of prompts")
        self._shared = make(
            Counter, "shared_prompt_tokens", "tokens of prompts known from others"
        )
        self._new = make(Counter, "completion_tokens", "tokens emitted")
        self._rounds = make(Counter, "request_rounds", "rounds of requests, summed")
        self._proposed = make(Counter, "proposed_tokens", "drafts proposed")
        self._accepted = make(Counter, "accepted_tokens", "drafts accepted")
        self._first = make(
            Histogram, "first_token_seconds", "until the first token", buckets=_SECONDS
        )
        self._whole = make(
            Histogram, "request_seconds", "until the end", buckets=_SECONDS
        )
        running = make(Gauge, "running", "requests in slots")
        running.set_function(lambda: engine.load[0])
        waiting = make(Gauge, "waiting", "requests in the queue")
        waiting.set_function(lambda: engine.load[1])
        rounds = make(Gauge, "engine_rounds", "rounds of the whole batch")
        rounds.set_function(lambda: engine.rounds)

    def refused(self, status: int) -> None:
        """Counts a request that was turned away."""
        self._refused.labels(str(status)).inc()

    def ended(self, result: Result) -> None:
        """Counts a request and what it did."""
        self._ended.labels(result.finish_reason).inc()
        self._prompt.inc(result.prompt_tokens)
        self._shared.inc(result.shared)
        self._new.inc(len(result.tokens))
        self._rounds.inc(result.stats.rounds)
        self._proposed.inc(result.stats.proposed)
        self._accepted.inc(result.stats.accepted)
        self._whole.observe(result.seconds)
        if result.first_token is not None:
            self._first.observe(result.first_token)
