"""`kvctl trace export`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer

from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import CheckFailed, UsageError
from kvctl.ledger import options

SECTION = "Commands"
EXAMPLES = (
    "kvctl trace export incident.trace.zst --since 1h --hash-requests",
    "kvctl trace export --engine decode-0 --slower-than 500ms | gzip >slow.trace.gz",
)
LAST = 10_000


def export(  # noqa: PLR0913 (options)
    settings: Settings,
    *,
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Named .gz or .zst it is packed; none: stdout.")
    ] = "-",
    last: Annotated[int | None, options.last_option(f"The newest so many. [{LAST}]")] = None,
    engine: options.EngineOption = "",
    peer: options.PeerOption = "",
    request: options.RequestOption = "",
    state: options.StateOption = None,
    backend: options.BackendOption = "",
    since: options.SinceOption = None,
    slower_than: options.SlowerThanOption = None,
    hash_requests: Annotated[
        bool, typer.Option("--hash-requests", help="Write digests in place of the ids of requests.")
    ] = False,
) -> None:
    """Write transfers of the ledger as a trace.

    JSON lines, see docs/trace.md. Causes of misses are left out: their texts may name hosts.
    """
    from kvctl.ledger.exporting import export_trace, gather
    from kvctl.ledger.known import refuse_unknown

    if file == "-" and sys.stdout.isatty():
        raise UsageError(
            "a trace is a file, and stdout is a terminal", "name a FILE, or redirect stdout into one"
        )
    asked = options.question(
        engine=engine,
        peer=peer,
        request=request,
        state=state,
        backend=backend,
        since=since,
        slower_than=slower_than,
    )
    gathered = gather(settings, msgspec.structs.replace(asked, blocks=True), last or LAST)
    if not gathered.rows:
        refuse_unknown(settings, "", engine, peer)
        raise CheckFailed(
            "no transfer that may be seen matches, so there is no trace",
            "kvctl transfers shows what there is",
        )
    with _destination(file) as out:
        export_trace(gathered, out, hashed=hash_requests)
    say(gathered.told)


@contextlib.contextmanager
def _destination(file: str) -> Iterator[BinaryIO]:
    from kvctl.ledger.trace_files import failed
    from kvd.trace.errors import TraceError
    from kvd.trace.streams import writing

    if file == "-":
        yield sys.stdout.buffer
        return
    try:
        with writing(Path(file).expanduser()) as out:
            yield out
    except TraceError as error:
        raise failed(error) from None
