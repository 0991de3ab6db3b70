"""A plugin of vLLM's that has Dynamo take KvdConnector: its prefill handler refuses connectors that it does not know.

vLLM loads the plugins of all installed distributions in each of its processes, before it makes an engine.
"""

from __future__ import annotations

import importlib

from kvd.shown import logger

log = logger(__name__)

TABLE = "dynamo.vllm.kv_connector_protocols"
LIKE = "NixlConnector"
"""The entry whose way is ours: the prefiller's answer brings the params, and the decoder gets them unchanged."""


def register() -> None:
    """Add KvdConnector to Dynamo's table of connectors; does nothing where Dynamo is not installed."""
    try:
        protocols = importlib.import_module(TABLE).KV_CONNECTOR_PROTOCOLS
    except ImportError:
        return
    except AttributeError:
        protocols = {}
    if LIKE not in protocols:
        log.warning(
            "Dynamo has no table of connectors with %s in %s: it will refuse KvdConnector", LIKE, TABLE
        )
        return
    protocols.setdefault("KvdConnector", protocols[LIKE])
