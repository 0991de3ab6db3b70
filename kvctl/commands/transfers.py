"""`kvctl transfers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
import typer

from kvctl import daemon
from kvctl.cli.option_kinds import choice
from kvctl.cli.options import FiltersOption, FleetOption, LongListSettings, WatchOption
from kvctl.cli.parsing import near_misses, typed_duration
from kvctl.cli.talk import say
from kvctl.errors import UsageError
from kvctl.fleet.asking import FleetAnswers
from kvctl.ledger import options
from kvctl.ledger.known import refuse_unknown
from kvctl.ledger.rows import rows
from kvctl.ledger.statistics import ORDERS
from kvctl.views.fleet.transfers import FleetGroups, FleetTransfers, fleet_transfer
from kvctl.views.fleet.unanswered import HOST, show_fleet
from kvctl.views.fleet.unanswered import asked as of_fleet
from kvctl.views.output import show_repeatedly
from kvctl.views.picking import Picking, picking
from kvctl.views.transfers.document import TransferDocument, Transfers, transfer_columns, transfer_document
from kvctl.views.transfers.groups import GROUPINGS, TransferGroups, grouped
from kvd.backends.registry import ADAPTERS
from kvd.wire.transfer import ListTransfers, TransferList

SECTION = "Look"
EXAMPLES = (
    "kvctl transfers --state miss --since 1h",
    "kvctl transfers --by pair --since 10m",
    "kvctl transfers --engine decode-0 --sort slowest -n 5",
)
AS_THEY_COME: dict[str, Callable[[TransferDocument], int]] = dict.fromkeys(ORDERS, lambda _: 0)
"""Orders in which kvd itself gives them."""
LAST, LAST_GROUPED = 20, 10_000
ELSEWHERE = "it has what engines of this host loaded; what a prefiller here gave is in the ledger of the decoder's host"


def transfers(  # noqa: PLR0913 (options)
    settings: LongListSettings,
    *,
    last: Annotated[
        int | None, options.last_option(f"At most so many. [{LAST}; with --by the newest {LAST_GROUPED}]")
    ] = None,
    engine: options.EngineOption = "",
    peer: options.PeerOption = "",
    request: options.RequestOption = "",
    state: options.StateOption = None,
    code: options.CodeOption = None,
    backend: options.BackendOption = "",
    checksum: options.ChecksumOption = None,
    since: options.SinceOption = None,
    slower_than: options.SlowerThanOption = None,
    filters: FiltersOption = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="COLUMN", help="Which come first; also newest, slowest, largest. [newest]"
        ),
    ] = "newest",
    by: Annotated[
        str | None, choice("--by", GROUPINGS, help="Count them together, one line for each.")
    ] = None,
    source: options.FromOption = "",
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """The newest KV transfers in kvd's ledger.

    TIME is from the scheduler's claim to the report, RATE that of the bytes on the wire. With -o jsonl --watch each
    transfer is printed once, as it comes. With --fleet of the ledgers of all known hosts; exit code 4 where some did
    not answer.
    """
    if fleet and source:
        raise UsageError("--fleet asks hosts, and --from names a trace", "leave one of them out")
    asked = options.question(
        engine=engine,
        peer=peer,
        request=request,
        state=state,
        code=code,
        backend=backend,
        since=since,
        slower_than=slower_than,
    )
    columns = [*transfer_columns((), wide=True), *([HOST] if fleet else [])]
    wanted = picking(columns, filters, sort, AS_THEY_COME)
    asked = msgspec.structs.replace(asked, order=sort if sort in ORDERS else "newest")
    most = last or (LAST_GROUPED if by else LAST)
    looked_at = max(most, LAST_GROUPED) if wanted else most
    seen = 0

    def fetch() -> Transfers | TransferGroups:
        nonlocal seen
        follow = watch is not None and settings.output == "jsonl" and not by
        since_then = msgspec.structs.replace(asked, after=seen if follow else 0)
        answer = rows(
            settings, since_then, LAST_GROUPED if follow and seen else looked_at, source, checksum or ""
        )
        if not answer.rows and watch is None:
            refuse_unknown(settings, source, engine, peer)
        documents = wanted.of(transfer_document(row) for row in answer.rows)
        if not documents and not seen and (told := _nothing(asked, checksum, source, answer, wanted)):
            say(told)
        if by:
            return grouped(_those(answer, documents), by)
        if follow:
            # Lines that follow each other read best in the order of events.
            documents = documents[::-1]
            seen = max((seen, *(row.seq for row in answer.rows)))
        elif wanted:
            documents = documents[:most]
        return Transfers(total=answer.total, transfers=documents)

    def fetch_all() -> FleetTransfers | FleetGroups:
        found = daemon.fleet(settings, lambda one: rows(one, asked, looked_at, checksum=checksum or ""))
        body = _whole(found, asked.order, wanted, most, by)
        _say_if_none(found, body, watched=watch is not None)
        return body

    if fleet:
        show_fleet(fetch_all, settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)


def _whole(
    found: FleetAnswers[TransferList], sort: str, wanted: Picking, most: int, by: str | None
) -> FleetTransfers | FleetGroups:
    """The first rows of all ledgers together. Numbers of different ledgers do not compare: newest is by the clock."""
    every = [(host, row) for host, answer in found.answers.items() for row in answer.rows]
    if sort == "newest":
        every.sort(key=lambda one: -one[1].record.started)
    else:
        every.sort(key=lambda one: ORDERS[sort](one[1]))
    total = sum(answer.total for answer in found.answers.values())
    documents = wanted.of(fleet_transfer(host, transfer_document(row)) for host, row in every)
    more = len(documents) > most or any(answer.more for answer in found.answers.values())
    if by:
        kept = {(one.host, one.seq) for one in documents[:most]}
        first = tuple(row for host, row in every if (host, row.seq) in kept)
        answer = TransferList(rows=first, total=total, more=more)
        return FleetGroups(groups=grouped(answer, by), **of_fleet(found))
    return FleetTransfers(total=total, transfers=documents[:most], **of_fleet(found))


def _say_if_none(
    found: FleetAnswers[TransferList], body: FleetTransfers | FleetGroups, *, watched: bool
) -> None:
    if (
        watched
        or not found.answers
        or (body.groups.groups if isinstance(body, FleetGroups) else body.transfers)
    ):
        return
    ledgers = "the ledgers of the hosts that answered"
    total = sum(answer.total for answer in found.answers.values())
    say(f"none of the {total} transfers in {ledgers} matches" if total else f"{ledgers} hold no transfer yet")


def _those(answer: TransferList, documents: Iterable[TransferDocument]) -> TransferList:
    kept = {one.seq for one in documents}
    return msgspec.structs.replace(answer, rows=tuple(row for row in answer.rows if row.seq in kept))


def _nothing(
    asked: ListTransfers, checksum: str | None, source: str, answer: TransferList, wanted: Picking
) -> str:
    """What was looked for in vain, and what to look for instead; empty where all else is said already."""
    if answer.rows:
        return f"none of the first {len(answer.rows)} transfers has {wanted}"
    where = f"trace {source!r}" if source else "the ledger"
    if not answer.total:
        return (
            f"{where} holds no transfer yet"
            + f"; {ELSEWHERE}" * (not source)
            + "; kvctl doctor says what may keep requests from being handed over"
        )
    given = {
        "--engine": asked.engine_id,
        "--peer": asked.peer,
        "--request": asked.request_id,
        "--state": asked.state,
        "--code": asked.code,
        "--backend": asked.backend,
        "--checksum": checksum,
        "--since": asked.within and typed_duration(asked.within),
        "--slower-than": asked.slower_than and typed_duration(asked.slower_than),
    }
    filters = " ".join(f"{option} {value}" for option, value in given.items() if value)
    if answer.hidden and not filters:
        return ""
    which = "those of your own engines" if answer.hidden else f"the {answer.total} transfers in {where}"
    found = f"none of {which} matches {filters}"
    if asked.request_id:
        found += f"; vLLM adds to ids: --filter 'request={asked.request_id}*' finds those that begin so"
    if asked.backend and asked.backend not in ADAPTERS:
        found += f"; there is no backend {asked.backend!r}, {near_misses(asked.backend, ADAPTERS)}"
    return f"{found}; leave out one of these, or see what there is with kvctl transfers --by pair, code or backend"
