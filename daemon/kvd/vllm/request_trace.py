"""The trace that a request of vLLM's belongs to: W3C's header ``traceparent``, as it is taken and as it travels on."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvd.vllm.vllm_types import VllmRequest

HEADER = "traceparent"
LONGEST_HEADER = 512
"""Characters of it as a client may send it: what a later version of W3C's adds is cut off."""
_GIVEN = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


def traceparent_of(request: VllmRequest) -> str:
    """Whose child the spans of a request are (`kvd.wire.limits.TraceParent`).

    vLLM keeps the headers of a trace if it was started with ``--otlp-traces-endpoint``, and drops them otherwise.
    """
    headers = getattr(request, "trace_headers", None)
    return sampled_parent(headers) if headers else ""


def sampled_parent(headers: object) -> str:
    """The traceparent of a request with these headers.

    Empty for headers without one, for what is none by W3C's rules, and for a trace that its caller does not sample.
    """
    given = headers.get(HEADER) if isinstance(headers, Mapping) else None
    if not isinstance(given, str) or len(given) > LONGEST_HEADER:
        return ""
    found = _GIVEN.fullmatch(given.strip(" \t"))
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return ""
    if not found["trace"].strip("0") or not found["span"].strip("0") or not int(found["flags"], 16) & 1:
        return ""
    return f"00-{found['trace']}-{found['span']}-01"
