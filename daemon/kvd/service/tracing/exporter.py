"""The thread that brings spans to the collector. The only module that imports OpenTelemetry, where it is configured.

A collector that is away, slow or stopped holds up this thread alone. What does not fit into the queue meanwhile is
counted, and so is what the collector did not take.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvd.service.tracing.spans import NAME, TransferSpan
from kvd.service.tracing.tracing import DROPPED, EXPORTED, FAILED, Tracing

log = logging.getLogger(__name__)

MOST_AT_ONCE = 128
"""Transfers in one request to the collector: some 80 KB."""
END_SECONDS = 1.0
"""How long the end of kvd waits for what the collector has yet to take."""
_PROPAGATOR = TraceContextTextMapPropagator()
_KINDS = {"decoder": SpanKind.CONSUMER, "prefiller": SpanKind.PRODUCER}


class _Finished(SpanProcessor):
    """Keeps spans that have ended until they are taken."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanThread:
    """Empties what waits in a `Tracing`, until it is closed. Never raises, whatever the collector does."""

    def __init__(self, tracing: Tracing, resource: dict[str, str]) -> None:
        """``resource`` says who tells of these spans; the environment (``OTEL_RESOURCE_ATTRIBUTES``) adds to it."""
        self._tracing = tracing
        for name in (EXPORTED, FAILED, DROPPED):  # from now on two threads count
            tracing.counters[name] += 0
        self._finished = _Finished()
        provider = TracerProvider(ALWAYS_ON, Resource.create(resource), shutdown_on_exit=False)
        provider.add_span_processor(self._finished)
        self._tracer = provider.get_tracer("kvd", resource["service.version"])
        settings = tracing.settings
        self._exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=settings.timeout_seconds)
        # It says each time that the collector is away, and how often it tries again; here it is said once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._away = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvd-tracing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Bring away what waits, as far as that takes no longer than `END_SECONDS`."""
        self._closing = True
        with contextlib.suppress(queue.Full):  # then it is awake, and looks
            self._tracing.waiting.put_nowait(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while True:
            taken = [self._tracing.waiting.get()]
            while len(taken) < MOST_AT_ONCE and not self._tracing.waiting.empty():
                taken.append(self._tracing.waiting.get())
            batch = [one for one in taken if one is not None]
            if batch:
                self._bring(batch)
            if self._closing and self._tracing.waiting.empty():
                return

    def _bring(self, batch: Sequence[TransferSpan]) -> None:
        why = "the collector does not take them"
        try:
            for one in batch:
                self._make(one)
            spans, self._finished.spans = self._finished.spans, []
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - kvd serves on, whatever a collector does to its client
            done, why = False, f"{type(error).__name__}: {error}"
            self._finished.spans = []
        self._tracing.counters[EXPORTED if done else FAILED] += len(batch)
        if done and self._away:
            log.info("spans reach %s again", self._tracing.settings.endpoint)
        elif not done and not self._away:
            log.warning("spans do not reach %s: %s", self._tracing.settings.endpoint, why)
        self._away = not done

    def _make(self, one: TransferSpan) -> None:
        span = self._tracer.start_span(
            NAME,
            context=_PROPAGATOR.extract({"traceparent": one.parent}),
            kind=_KINDS[one.side],
            attributes={"kv_transfer.side": one.side, **one.attributes},
            start_time=_nanoseconds(one.begin),
        )
        if one.error:
            span.set_status(Status(StatusCode.ERROR, one.error))
        inside = set_span_in_context(span)
        for name, begin, end in one.children:
            child = self._tracer.start_span(f"{NAME}.{name}", context=inside, start_time=_nanoseconds(begin))
            child.end(_nanoseconds(end))
        span.end(_nanoseconds(one.end))


def _nanoseconds(unix: float) -> int:
    return int(unix * 1e9)
