"""`kvctl export-geometry`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.engines.geometry_file import geometry_document
from kvctl.engines.sources import load
from kvctl.views.output import plain_text
from kvctl.views.registry import wrapped

SECTION = "Compare engines"
EXAMPLES = ("kvctl export-geometry decode-0 >decode-0.json",)


def export_geometry(
    settings: Settings,
    *,
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="An engine that kvd knows, or a model with options.")
    ],
) -> None:
    """An engine's geometry as a file for describe-topology and diff.

    Redirect it: kvctl export-geometry decode-0 >decode-0.json. It is printed as JSON, or as YAML with -o yaml.
    """
    [found] = load((engine,), settings)
    form = settings.output if settings.output in ("yaml", "jsonl") else "json"
    document = wrapped(geometry_document(found))
    sys.stdout.write(plain_text(document, replace(settings, output=form)))
