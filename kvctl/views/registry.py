"""What all documents share: ``kind`` and ``schema_version`` around a struct, the registry of kinds, the JSON Schemas.

A list document holds its items under one field; as JSON lines each item stands on its own line with its own kind.
Numbers are in base units (bytes, seconds), times are RFC 3339 in UTC.
"""

from __future__ import annotations

import importlib
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

SCHEMA_VERSION = 1


class Kind(NamedTuple):
    """One kind of document: its name, ``module:struct``, and for lists the field of the items and their kind."""

    name: str
    target: str
    items: str = ""
    item_kind: str = ""

    def struct(self) -> type[msgspec.Struct]:
        """The struct that the document is made of."""
        module, name = self.target.split(":")
        found: type[msgspec.Struct] = getattr(importlib.import_module(f"kvctl.views.{module}"), name)
        return found


KINDS = (
    Kind("Engines", "engines:Engines", "engines", "Engine"),
    Kind("Engine", "engines:Engine"),
    Kind("Workers", "workers:Workers", "workers", "Worker"),
    Kind("Worker", "workers:Worker"),
    Kind("Transfers", "transfers.document:Transfers", "transfers", "Transfer"),
    Kind("Transfer", "transfers.document:Transfer"),
    Kind("TransferGroups", "transfers.groups:TransferGroups", "groups", "TransferGroup"),
    Kind("TransferGroup", "transfers.groups:TransferGroup"),
    Kind("WholeTransfer", "transfers.whole:WholeTransfer"),
    Kind("Slow", "slow:Slow", "pairs", "SlowPair"),
    Kind("SlowPair", "slow:SlowPair"),
    Kind("Trace", "trace:Trace"),
    Kind("Traces", "trace:Traces", "traces", "KeptTrace"),
    Kind("KeptTrace", "trace:KeptTrace"),
    Kind("Status", "status:Status"),
    Kind("Event", "event:Event"),
    Kind("Doctor", "doctor:Doctor", "checks", "Check"),
    Kind("Check", "doctor:Check"),
    Kind("Topology", "topology.document:Topology", "pairs", "Pair"),
    Kind("Pair", "topology.document:Pair"),
    Kind("Diff", "diff:Diff"),
    Kind("Geometry", "geometry:Geometry"),
    Kind("ForcedMiss", "forced_miss:ForcedMiss", "requests", "ForcedRequest"),
    Kind("ForcedRequest", "forced_miss:ForcedRequest"),
    Kind("ClearedOrders", "forced_miss:ClearedOrders"),
    Kind("Verification", "verification:Verification", "runs", "VerifiedRun"),
    Kind("VerifiedRun", "verification:VerifiedRun"),
    Kind("Demo", "demo:Demo", "requests", "DemoRequest"),
    Kind("DemoRequest", "demo:DemoRequest"),
    Kind("Benchmark", "benchmark:Benchmark"),
    Kind("HandshakeBenchmark", "handshake:HandshakeBenchmark"),
    Kind("Replay", "replay:Replay"),
    Kind("Version", "version:Version"),
    Kind("Kinds", "kinds:Kinds", "kinds", "KindName"),
    Kind("KindName", "kinds:KindName"),
    Kind("Error", "error:Error"),
)


def kind_named(name: str) -> Kind:
    """The kind of that name. Raises `KeyError`."""
    return {kind.name: kind for kind in KINDS}[name]


def kind_names() -> tuple[str, ...]:
    """All kinds, in the order of the registry."""
    return tuple(kind.name for kind in KINDS)


def kind_of(body: msgspec.Struct) -> Kind:
    """The kind whose struct ``body`` is."""
    return kind_named(type(body).__name__)


def wrapped(body: msgspec.Struct) -> dict[str, Any]:
    """The whole document as plain values: ``kind``, ``schema_version``, then the struct's fields."""
    return {"kind": kind_of(body).name, "schema_version": SCHEMA_VERSION, **msgspec.to_builtins(body)}


def lines(body: msgspec.Struct) -> list[dict[str, Any]]:
    """The documents that stand for ``body`` as JSON lines: one for each item of a list, else itself."""
    kind = kind_of(body)
    return [wrapped(item) for item in getattr(body, kind.items)] if kind.items else [wrapped(body)]


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a kind. Raises `KeyError` when there is none of that name."""
    kind = kind_named(name)
    schema = msgspec.json.schema(kind.struct())
    definitions = schema["$defs"]
    root = definitions.pop(kind.struct().__name__)
    head = {"kind": {"const": name}, "schema_version": {"const": SCHEMA_VERSION}}
    result = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "title": name,
        "properties": {**head, **root["properties"]},
        "required": [*head, *root.get("required", ())],
    }
    return {**result, "$defs": definitions} if definitions else result


def moment(unix: float) -> datetime:
    """A Unix time in seconds as a time in UTC."""
    return datetime.fromtimestamp(unix, UTC)
