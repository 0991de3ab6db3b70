"""`kvctl schema`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvctl.cli.parsing import meant
from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.views.kinds import kinds_document
from kvctl.views.output import plain_text, show
from kvctl.views.registry import json_schema, views

SECTION = "About kvctl"
EXAMPLES = (
    "kvctl schema",
    "kvctl schema transfer",
)


def schema(
    settings: Settings,
    *,
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="Topology, Engines ...; none: list them.")
    ] = None,
) -> None:
    """The JSON Schema of a document that kvctl prints.

    The schema itself is printed as JSON, or as YAML with -o yaml.
    """
    if kind is None:
        show(kinds_document(), settings)
        return
    known = {name.lower(): name for name in views()}
    if kind.lower() not in known:
        near = meant(kind, known.values())
        raise UsageError(
            f"no document of kind {kind!r}" + (f"; {near}" if near else ""), "kvctl schema lists them"
        )
    form = settings.output if settings.output in ("yaml", "jsonl") else "json"
    sys.stdout.write(plain_text(json_schema(known[kind.lower()]), replace(settings, output=form)))
