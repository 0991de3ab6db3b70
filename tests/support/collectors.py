"""OpenTelemetry collectors on loopback: they take OTLP over HTTP as real ones do, and keep the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.daemons import wait_for

PATH = "/v1/traces"


@dataclass(frozen=True)
class Span:
    """A span as it came; ids are hexadecimal, times are Unix seconds. ``error`` is its status, if that is one."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin: float
    end: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    error: str | None


@dataclass
class Collector:
    """A collector. While ``hold`` is not set it answers nothing; ``status`` is what it answers with."""

    port: int
    spans: list[Span] = field(default_factory=list)
    requests: int = 0
    status: int = 200
    hold: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Where it takes spans."""
        return f"http://127.0.0.1:{self.port}{PATH}"

    def of(self, trace: str, name: str = "") -> list[Span]:
        """What came of a trace, in the order in which it began."""
        found = [span for span in tuple(self.spans) if span.trace == trace and name in ("", span.name)]
        return sorted(found, key=lambda span: span.begin)

    def sides(self, trace: str, seconds: float = 20.0) -> tuple[Span, Span]:
        """The prefiller's and the decoder's span of a transfer, once both are here."""

        def look() -> tuple[Span, ...]:
            found = self.of(trace, "kv_transfer")
            sides = ("prefiller", "decoder")
            both = tuple(
                span for side in sides for span in found if span.attributes["kv_transfer.side"] == side
            )
            return both if len(both) == 2 else ()

        prefiller, decoder = wait_for(look, seconds)
        return prefiller, decoder

    def children(self, span: Span) -> list[Span]:
        """The spans below one."""
        return [other for other in self.of(span.trace) if other.parent == span.id]

    def take(self, body: bytes) -> None:
        """Keep what one request brings."""
        for told in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(told.resource.attributes)
            self.spans += [
                Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    _attributes(span.attributes),
                    resource,
                    span.status.message if span.status.code == 2 else None,
                )
                for scope in told.scope_spans
                for span in scope.spans
            ]


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """A collector that serves until the end, at any port or at that one."""
    made = Collector(port)
    made.hold.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.requests += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.hold.wait()
            if made.status == 200:
                made.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(made.status if self.path == PATH else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_: object) -> None:
            """A client that went away is no fault here."""

    with Server(("127.0.0.1", port), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            made.hold.set()
            server.shutdown()
            thread.join()


def _attributes(told: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in told}
