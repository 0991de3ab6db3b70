"""The root of every error that a person may read, and how a message and its next step become one text.

KvdError                       code, message, hint
├── geometry.GeometryError     a KV cache that cannot be described
├── topology.TopologyError     two sides that cannot be mapped onto each other
├── zmtp.ZmtpError             a connection whose bytes break the protocol or a limit
├── wire.WireError             a frame that cannot be taken, parts that make no card
├── keys.KeyFileError          a file of keys that cannot be used
├── weights.WeightsUnreadable  files of a model that cannot be told apart by their contents
├── trace.TraceError           a trace that cannot be read or written
├── backends.BackendError      a transfer engine said no
├── client.ClientError         a request to kvd that got no good answer
├── worker.ConnectorError      the connector cannot do what it was asked to do
├── service.ServiceError       something that the daemon cannot do
├── kvctl.errors.KvctlError    what ends a command early; its classes have the exit codes
└── kvctl.processes.errors     a process of a demo or a benchmark that did not start, ended, or failed
"""

from __future__ import annotations


class KvdError(Exception):
    """``code`` is stable; ``message`` names the values that disagree; ``hint`` is the next step, or empty."""

    code = "KVD"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def with_hint(self) -> str:
        """The message and the next step, where there is one."""
        return joined(self.message, self.hint)


def joined(message: str, hint: str) -> str:
    """A message and its next step as one text; either may be empty."""
    return "; ".join(filter(None, (message, hint)))
