"""Errors of the connector.

ConnectorError
├── BadSettings     kv_connector_extra_config has something that cannot be used
├── BadParams       kv_transfer_params of a request that cannot be used
└── UnsupportedBuild  this vLLM or this engine configuration cannot be served, with the reason
"""

from __future__ import annotations


class ConnectorError(Exception):
    """The connector cannot do what it was asked to do."""

    code = "KVD-CONNECTOR"


class BadSettings(ConnectorError):
    """kv_connector_extra_config: an unknown name or an unusable value."""

    code = "KVD-CONNECTOR-SETTINGS"


class BadParams(ConnectorError):
    """kv_transfer_params of a request: missing, of a wrong type, or of another engine."""

    code = "KVD-CONNECTOR-PARAMS"


class UnsupportedBuild(ConnectorError):
    """This vLLM or this engine configuration cannot be served."""

    code = "KVD-CONNECTOR-BUILD"
