"""Errors of the connector that only the side of vLLM raises.

ConnectorError (`kvd.worker.errors`)
├── BadParams       kv_transfer_params of a request that cannot be used
└── UnsupportedBuild  this vLLM or this engine configuration cannot be served, with the reason
"""

from __future__ import annotations

from kvd.worker.errors import ConnectorError


class BadParams(ConnectorError):
    """kv_transfer_params of a request: missing, of a wrong type, or of another engine."""

    code = "KVD-CONNECTOR-PARAMS"


class UnsupportedBuild(ConnectorError):
    """This vLLM or this engine configuration cannot be served."""

    code = "KVD-CONNECTOR-BUILD"
