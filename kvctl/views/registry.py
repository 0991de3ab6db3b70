"""Every document that kvctl prints: each module here declares its own as ``VIEWS``, how they look among them.

A document is a struct; ``kind`` and ``schema_version`` stand around it. A list document holds its items under one
field; as JSON lines each item stands on its own line with its own kind. Numbers are in base units (bytes, seconds),
times are RFC 3339 in UTC.

To add a document, write ``kvctl/views/NAME.py`` with its struct, a function that makes its screen, and ``VIEWS``.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

import kvctl.views
from kvctl.cli.units import SCHEMA_VERSION
from kvctl.views.screen import ScreenPart


class View(NamedTuple):
    """One kind of document: its struct, and ``screen(body, wide)``, how it looks at a terminal.

    A list has the name of the ``items``' field and their struct ``item``, which is a kind of its own. ``drawings`` make
    text of it by the name of an output format; `named` is one of them. The kind's name is the struct's.
    """

    struct: type[msgspec.Struct]
    screen: Callable[[Any, bool], ScreenPart] | None = None
    items: str = ""
    item: type[msgspec.Struct] | None = None
    drawings: Mapping[str, Callable[[Any], str]] = {}


def named(items: str, of: Callable[[Any], str]) -> dict[str, Callable[[Any], str]]:
    """The drawing of a list as the names of its items, one a line."""
    return {"name": lambda body: "".join(f"{of(item)}\n" for item in getattr(body, items))}


def kind_of(struct: type[msgspec.Struct]) -> str:
    """The kind of a struct: its name, without the ``Document`` that keeps it apart from what it is about."""
    return struct.__name__.removesuffix("Document")


def view_of(body: msgspec.Struct) -> View:
    """How ``body`` is shown."""
    module = type(body).__module__
    places = (module, module.rpartition(".")[0])
    declared: list[View] = [view for name in places for view in getattr(sys.modules[name], "VIEWS", ())]
    return next(view for view in declared if view.struct is type(body))


def views() -> dict[str, View]:
    """All views by kind, in the order of the alphabet; imports every module of views."""
    walked = pkgutil.walk_packages(kvctl.views.__path__, "kvctl.views.")
    names = (module.name for module in walked if module.name != "kvctl.views.drawing")
    found = (view for name in names for view in getattr(importlib.import_module(name), "VIEWS", ()))
    kinds = {kind_of(view.struct): view for view in found}
    items = {kind_of(view.item): View(view.item) for view in kinds.values() if view.item}
    return dict(sorted((items | kinds).items()))


def wrapped(body: msgspec.Struct) -> dict[str, Any]:
    """The whole document as plain values: ``kind``, ``schema_version``, then the struct's fields."""
    return {
        "kind": kind_of(type(body)),
        "schema_version": SCHEMA_VERSION,
        **msgspec.to_builtins(body),
    }


def lines(body: msgspec.Struct) -> list[dict[str, Any]]:
    """The documents that stand for ``body`` as JSON lines: one for each item of a list, else itself."""
    view = view_of(body)
    return [wrapped(item) for item in getattr(body, view.items)] if view.items else [wrapped(body)]


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a kind. Raises `KeyError` when there is none of that name."""
    struct = views()[name].struct
    schema = msgspec.json.schema(struct)
    definitions = schema["$defs"]
    root = definitions.pop(struct.__name__)
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
    """A Unix time in seconds as a time in UTC; of one beyond the years 1 to 9999, the end that is nearer."""
    return datetime.fromtimestamp(min(max(unix, _FIRST), _LAST), UTC)


_FIRST = datetime(1, 1, 2, tzinfo=UTC).timestamp()
_LAST = datetime(9999, 12, 30, tzinfo=UTC).timestamp()  # a day less, so that it is a time in any zone
