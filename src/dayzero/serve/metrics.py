"""What `/metrics` shows, in Prometheus' text format: requests, latencies and tokens counted here, gauges of the engine.

Engine figures are read when scraped, from the last statistics it sent; its counters restart with it.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from dayzero.core.generation import EngineStats
from dayzero.serve.engine_link import EngineLink

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# Metric -> (what it is, how it is read off the statistics).
ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "dayzero_engine_requests_waiting": ("Requests queued in the engine", lambda stats: stats.waiting),
    "dayzero_engine_requests_running": ("Requests the engine works on", lambda stats: stats.running),
    "dayzero_engine_steps": ("Model steps since the engine started", lambda stats: stats.steps),
    "dayzero_engine_step_seconds": ("Seconds spent in model steps since the engine started", lambda stats: stats.step_seconds),
    "dayzero_engine_prefill_tokens": ("Prompt tokens computed since the engine started", lambda stats: stats.prefill_tokens),
    "dayzero_engine_decode_tokens": ("Tokens decoded since the engine started", lambda stats: stats.decode_tokens),
    "dayzero_engine_reused_tokens": ("Prompt tokens taken from the prefix cache", lambda stats: stats.reused_tokens),
    "dayzero_engine_preemptions": ("Requests put back for want of cache blocks", lambda stats: stats.preemptions),
}


class Metrics:
    """A registry of its own per server, so that two servers may live in one process."""

    def __init__(self, link: EngineLink) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("dayzero_requests", "Requests by how they ended", ["endpoint", "outcome"], registry=registry)
        self.open_requests = Gauge("dayzero_requests_open", "HTTP requests being answered", registry=registry)
        self.prompt_tokens = Counter("dayzero_prompt_tokens", "Prompt tokens of accepted requests", registry=registry)
        self.cached_tokens = Counter("dayzero_cached_prompt_tokens", "Prompt tokens that were reused", registry=registry)
        self.generated_tokens = Counter("dayzero_generated_tokens", "Tokens generated", registry=registry)
        self.ttft_s = Histogram("dayzero_time_to_first_token_seconds", "From the parsed request to its first token",
                                buckets=LATENCY_BUCKETS_S, registry=registry)  # fmt: skip
        self.tpot_s = Histogram("dayzero_time_per_output_token_seconds", "Between tokens of one choice, its mean",
                                buckets=LATENCY_BUCKETS_S, registry=registry)  # fmt: skip
        self.request_s = Histogram("dayzero_request_seconds", "Whole requests that were answered", ["endpoint"],
                                   buckets=LATENCY_BUCKETS_S, registry=registry)  # fmt: skip
        self.registry.register(_EngineCollector(link))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """The engine's gauges, made when they are asked for."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def collect(self) -> Iterator[GaugeMetricFamily]:
        link, stats = self._link, self._link.stats
        yield _gauge("dayzero_engine_up", "1 while the engine takes requests", float(link.state == "ready"))
        yield _gauge("dayzero_engine_restarts", "Restarts of the engine process", link.restarts)
        yield _gauge("dayzero_engine_requests_open", "Choices sent to the engine and not finished", link.num_open)
        meaning = "Seconds since the engine last computed or gave a token while requests are open"
        yield _gauge("dayzero_engine_seconds_without_progress", meaning, link.stalled_s)
        if stats is None or link.state != "ready":
            return
        for name, (meaning, read) in ENGINE_GAUGES.items():
            yield _gauge(name, meaning, read(stats))
        meaning = "Cache blocks: all, held by requests, kept for reuse"
        blocks = GaugeMetricFamily("dayzero_cache_blocks", meaning, labels=["state"])
        blocks.add_metric(["total"], stats.blocks_total)
        blocks.add_metric(["referenced"], stats.blocks_referenced)
        blocks.add_metric(["cached"], stats.blocks_cached)
        yield blocks


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=value)
