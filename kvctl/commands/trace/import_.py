"""`kvctl trace import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.errors import RefusedError
from kvctl.views.output import show

SECTION = "Commands"
EXAMPLES = ("kvctl trace import incident.trace.zst --name monday",)


def import_(
    settings: Settings,
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The trace; - is stdin.")],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="What to call it; the file's own name if not given.")
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of one of that name.")] = False,
) -> None:
    """Check a trace and keep it under a name.

    Other commands then take the name: kvctl trace show NAME, kvctl transfers --from NAME. Traces stand in
    $KVCTL_TRACES, else in ~/.local/share/kvctl/traces. A trace that cannot be used is not taken: exit code 1.
    """
    from kvctl.ledger import trace_files
    from kvctl.views.trace import trace_document
    from kvd.trace.errors import TraceError
    from kvd.trace.read import read_trace
    from kvd.trace.streams import writing
    from kvd.trace.write import write_trace

    path = Path(file).expanduser()
    place = trace_files.place_of(name or _stem(path))
    if place.exists() and not replace:
        raise RefusedError(
            f"a trace {trace_files.label(place)!r} is there already", "give another --name, or --replace it"
        )
    try:
        trace = read_trace(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with writing(place) as out:
            write_trace(out, trace.header, trace.engines, trace.transfers)
    except TraceError as error:
        raise trace_files.failed(error) from None
    except OSError as error:
        raise trace_files.failed(TraceError(f"{place} cannot be written: {error.strerror}")) from None
    show(trace_document(trace, trace.transfers, trace_files.label(place)), settings)


def _stem(path: Path) -> str:
    name = path.name
    for ending in (".gz", ".zst", ".jsonl", ".json", ".trace"):
        name = name.removesuffix(ending)
    return name
