"""Prometheus metrics of the store; served on loopback if a port is configured."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, start_http_server


class Metrics:
    """All metrics, named once."""

    def __init__(self) -> None:
        self.puts = Counter("ckv_store_puts", "Puts by outcome", ["outcome"])
        self.gets = Counter("ckv_store_gets", "Reads by outcome", ["outcome"])
        self.bytes_in = Counter("ckv_store_written_bytes", "Payload bytes written")
        self.bytes_out = Counter("ckv_store_read_bytes", "Payload bytes read")
        self.evictions = Counter("ckv_store_evictions", "Nodes evicted under pressure")
        self.shrinks = Counter("ckv_store_shrinks", "Nodes shrunk under pressure")
        self.shrunk_bytes = Counter("ckv_store_shrunk_bytes", "Payload bytes of dropped tiers")
        self.spared = Counter(
            "ckv_store_spared", "Nodes neither shrunk nor evicted, by reason", ["step", "outcome"]
        )
        self.early_unlinks = Counter(
            "ckv_store_early_unlinks",
            "Dropped tiers and replaced nodes unlinked before their last read was over",
        )
        self.quota_refusals = Counter("ckv_store_quota_refusals", "Refusals, by limit", ["limit"])
        self.held = Gauge("ckv_store_held_bytes", "Payload bytes held and reserved")
        self.freeing = Gauge("ckv_store_freeing_bytes", "Those of them that will be unlinked")
        self.metadata_share = Gauge(
            "ckv_store_metadata_share", "Share of the space for metadata in use; 0 = no limit"
        )
        self.redis_evicts = Gauge("ckv_store_redis_evicts", "1 if Redis evicts keys by itself")
        self.running = Gauge("ckv_store_running_calls", "Calls that run now")
        self.errors = Counter("ckv_store_errors", "Calls refused, by code", ["code"])

    def serve(self, port: int) -> None:
        """Serve them over HTTP on 127.0.0.1."""
        start_http_server(port, addr="127.0.0.1")


METRICS = Metrics()
