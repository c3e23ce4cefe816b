"""A node's /metrics: its counters in the shape of baton/metrics.py, and the endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from baton.engine.stats import EngineStats
from baton.errors import ConfigError
from baton.handles import NodeLoad
from baton.metrics import EngineTotals, NodeSnapshot, TransferTotals
from kv_transfer.connector import Connector


def snapshot(load: NodeLoad, stats: EngineStats, connector: Connector) -> NodeSnapshot:
    """One scrape. Any thread; reads plain integers only."""
    transfer = connector.stats
    fetches = {"ok": transfer.fetches, **dict(transfer.failures)}
    return NodeSnapshot(
        load=load,
        engine=EngineTotals(
            steps=stats.num_steps,
            prefill_chunks=stats.num_prefill_chunks,
            prompt_tokens=stats.num_prompt_tokens,
            generation_tokens=stats.num_generated_tokens,
            prefix_queries=stats.num_prefix_query_tokens,
            prefix_hits=stats.num_prefix_hit_tokens,
            preemptions=stats.num_preemptions,
        ),
        transfer=TransferTotals(
            sent_bytes=sum(dict(transfer.bytes_sent).values()),
            received_bytes=sum(dict(transfer.bytes_received).values()),
            exports=transfer.exports,
            active_exports=connector.active_exports,
            export_bytes=connector.export_bytes,
            fetches=fetches,
        ),
    )


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """/metrics on a thread of its own, while the context lasts."""

    server: WSGIServer
    thread: Thread

    @classmethod
    def start(cls, registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
        """Raises ConfigError if the port cannot be bound."""
        try:
            server, thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"cannot bind the metrics port {host}:{port}: {error}", field="metrics_port"
            ) from error
        return cls(server, thread)

    @property
    def port(self) -> int:
        return self.server.server_port

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
