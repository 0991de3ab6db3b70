"""The root of every floor's errors.

KvdError                     code, message, hint
├── geometry.GeometryError   a KV cache that cannot be described
├── topology.TopologyError   two sides that cannot be mapped onto each other
├── zmtp.ZmtpError           a connection whose bytes break the protocol or a limit
├── wire.WireError           a frame that cannot be taken, parts that make no card
├── keys.KeyFileError        a file of keys that cannot be used
├── trace.TraceError         a trace that cannot be read or written
├── backends.BackendError    a transfer engine said no
├── client.ClientError       a request to kvd that got no good answer
├── worker.ConnectorError    the connector cannot do what it was asked to do
└── service.ServiceError     something that the daemon cannot do
"""

from __future__ import annotations


class KvdError(Exception):
    """``code`` is stable; ``message`` names the values that disagree; ``hint`` is the next step, or empty."""

    code = "KVD"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
