"""Errors of workers, and the root of the connector's.

ConnectorError
└── BadSettings     kv_connector_extra_config has something that cannot be used
"""

from __future__ import annotations

from kvd.errors import KvdError


class ConnectorError(KvdError):
    """The connector cannot do what it was asked to do."""

    code = "KVD-CONNECTOR"


class BadSettings(ConnectorError):
    """kv_connector_extra_config: an unknown name or an unusable value."""

    code = "KVD-CONNECTOR-SETTINGS"
