"""The trace that a request of vLLM's belongs to."""

from __future__ import annotations

from kvd.vllm.vllm_types import VllmRequest
from kvd.wire.trace_context import sampled_parent


def traceparent_of(request: VllmRequest) -> str:
    """Whose child the spans of a request are (`kvd.wire.trace_context.TraceParent`).

    vLLM keeps the headers of a trace if it was started with ``--otlp-traces-endpoint``, and drops them otherwise.
    """
    headers = getattr(request, "trace_headers", None)
    return sampled_parent(headers) if headers else ""
