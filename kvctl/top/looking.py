"""One look at a kvd: what moves there now. It is asked at most once a second, with bounded questions."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvctl import daemon
from kvctl.cli import numbers
from kvctl.cli.units import filled
from kvctl.ledger.statistics import quantile, took
from kvctl.views.engines import EngineDocument, engine_document
from kvctl.views.registry import moment
from kvctl.views.top import EngineLoad, InFlight, MissLoad, PairLoad, Top
from kvctl.views.transfers.document import transfer_document
from kvd.client.errors import ProtocolError, RefusedByDaemon, TimedOut
from kvd.wire.outcomes import GetOutcomes, OutcomeCount, Outcomes
from kvd.wire.query import (
    EngineList,
    EngineRow,
    GetStatus,
    KvdStatus,
    LeaseList,
    LeaseRow,
    ListEngines,
    ListLeases,
)
from kvd.wire.reply import Request
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList

if TYPE_CHECKING:
    from kvctl.cli.settings import Settings
    from kvd.client.operator import Operator
    from kvd.client.remote import RemoteOperator

WINDOW = 60.0
"""Seconds over which engines, pairs and misses are counted, where kvd told of all of them; else fewer."""
LEAST_WINDOW = 1.0
"""Seconds over which they are counted however many there are: a shorter one says nothing of a second."""
RATE_SECONDS = 10.0
"""Seconds over which all of kvd's bytes and transfers are: short enough to see something begin and end."""
FIRST_ROWS, NEXT_ROWS, KEPT_ROWS = 500, 2000, 5000
"""Transfers that are asked for at first, later, and that are kept to count from."""
SHOWN_TRANSFERS = 200
LEASES = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """kvd's counters at one moment, in monotonic seconds."""

    at: float
    transfers: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen, and what the next look goes on from: rows newest first, samples oldest first.

    ``complete_since`` is the Unix time since which no row is missing: of many transfers only the newest are asked for.
    """

    top: Top
    generation: str
    rows: tuple[LedgerRow, ...]
    samples: tuple[Sample, ...]
    complete_since: float = 0.0


@dataclass(frozen=True, slots=True)
class _Answers:
    """What kvd said; None where it did not, and why in ``missing``."""

    status: KvdStatus
    engines: EngineList | None
    outcomes: Outcomes | None
    leases: LeaseList | None
    transfers: TransferList | None
    missing: tuple[str, ...]


def look(settings: Settings, before: Look | None = None) -> Look:
    """Ask kvd once. Raises `KvctlError` where it does not answer at all; what it refuses is said in the document."""
    with daemon.connected(settings) as operator:
        status = daemon.put(operator, GetStatus(), KvdStatus)
        if before is not None and before.generation != status.generation:
            before = None  # another kvd: what it counts, and perhaps its ledger, begins anew
        answers = _answers(operator, status, before)
    rows, complete_since = _rows(answers.transfers, before)
    counters = status.counters
    sample = Sample(time.monotonic(), counters.get("transfers.done", 0), counters.get("transfers.bytes", 0))
    samples = (
        *(one for one in (before.samples if before else ()) if one.at > sample.at - RATE_SECONDS),
        sample,
    )
    top = _top(answers, rows, samples, complete_since)
    return Look(top, status.generation, rows, samples, complete_since)


def _answers(operator: Operator | RemoteOperator, status: KvdStatus, before: Look | None) -> _Answers:
    missing: list[str] = []

    def asked(what: str, message: Request, answer: type[daemon.Answer]) -> daemon.Answer | None:
        try:
            return daemon.put(operator, message, answer)
        except (RefusedByDaemon, TimedOut, ProtocolError) as error:
            missing.append(f"{what}: {error.message}")
            return None

    last = before.rows[0].seq if before and before.rows else 0
    question = ListTransfers(limit=NEXT_ROWS if last else FIRST_ROWS, after=last)
    engines = asked("engines", ListEngines(), EngineList)
    outcomes = asked("requests", GetOutcomes(seconds=WINDOW), Outcomes)
    leases = asked("leases", ListLeases(limit=LEASES), LeaseList)
    transfers = asked("transfers", question, TransferList)
    if engines is not None and engines.more:
        missing.append(f"engines beyond the first {len(engines.rows)}: kvctl engines lists all")
    if transfers is not None and transfers.hidden:
        missing.append(daemon.hidden(transfers.hidden, "transfers of other users' engines are not shown"))
    return _Answers(status, engines, outcomes, leases, transfers, tuple(missing))


def _rows(answer: TransferList | None, before: Look | None) -> tuple[tuple[LedgerRow, ...], float]:
    """The newest rows, without a gap among them, and since when they are complete."""
    kept, since = (before.rows, before.complete_since) if before else ((), 0.0)
    new = answer.rows if answer else ()
    if answer and answer.more and new:  # of those between these and what was kept there are some more
        return new, _at(new[-1])
    if len(rows := new + kept) > KEPT_ROWS:
        return rows[:KEPT_ROWS], max(since, _at(rows[KEPT_ROWS - 1]))
    return rows, since


def _at(row: LedgerRow) -> float:
    return row.recorded or row.record.started


def _top(
    answers: _Answers, rows: tuple[LedgerRow, ...], samples: tuple[Sample, ...], complete_since: float
) -> Top:
    status, leases = answers.status, answers.leases
    flights = _flights(leases.rows) if leases else ()
    now = numbers.now().timestamp()
    window = min(WINDOW, max(LEAST_WINDOW, now - complete_since))
    lately = [row for row in rows if _at(row) >= now - window]
    moved, done = _rates(samples, lately, window)
    return filled(
        Top,
        status,
        time=numbers.now(),
        started=moment(status.started),
        window=window,
        bytes_per_second=moved,
        transfers_per_second=done,
        misses=sum(row.record.state == "miss" for row in lately),
        leases_open=leases.open if leases else int(status.gauges.get("leases.open", 0)),
        in_flight_total=leases.given + leases.taken - (len(leases.rows) - len(flights))
        if leases
        else int(status.gauges.get("leases.readers", 0)),
        pushes=int(status.gauges.get("pushes.underway", 0)),
        engines=_engines(answers, lately, window),
        pairs=_pairs(lately, window),
        in_flight=flights,
        transfers=tuple(transfer_document(row) for row in rows[:SHOWN_TRANSFERS]),
        miss_codes=_misses(status.counters, rows, lately),
        not_answered=answers.missing,
    )


def _rates(samples: tuple[Sample, ...], lately: list[LedgerRow], window: float) -> tuple[float, float]:
    """Bytes and transfers a second: by kvd's counters, at the first look by its records."""
    first, last = samples[0], samples[-1]
    if (passed := last.at - first.at) > 0:
        return max(0, last.bytes - first.bytes) / passed, max(0, last.transfers - first.transfers) / passed
    done = [row.record for row in lately if row.record.state == "done"]
    return sum(record.bytes for record in done) / window, len(done) / window


def _engines(answers: _Answers, lately: list[LedgerRow], window: float) -> tuple[EngineLoad, ...]:
    came: Counter[str] = Counter()
    went: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for row in lately:
        came[row.record.local_engine] += row.record.bytes
        went[row.record.remote_engine] += row.record.bytes
        missed[row.record.local_engine] += row.record.state == "miss"
    served = {row.engine_id: row.lately for row in (answers.outcomes.rows if answers.outcomes else ())}

    def document(row: EngineRow) -> EngineDocument:
        counts: tuple[OutcomeCount, ...] = served.get(row.engine.engine_id, ()) if row.local else ()
        return engine_document(row, counts)

    return tuple(
        EngineLoad(
            engine=document(row),
            bytes_in=came[row.engine.engine_id],
            bytes_out=went[row.engine.engine_id],
            bytes_in_per_second=came[row.engine.engine_id] / window,
            bytes_out_per_second=went[row.engine.engine_id] / window,
            misses=missed[row.engine.engine_id],
        )
        for row in (answers.engines.rows if answers.engines else ())
    )


def _pairs(lately: list[LedgerRow], window: float) -> tuple[PairLoad, ...]:
    pairs: dict[tuple[str, str], list[LedgerRow]] = {}
    for row in lately:
        pairs.setdefault((row.record.remote_engine, row.record.local_engine), []).append(row)
    loads = (_pair(*names, rows, window) for names, rows in pairs.items())
    return tuple(sorted(loads, key=lambda pair: (-pair.bytes, pair.remote_engine, pair.local_engine)))


def _pair(remote: str, local: str, rows: list[LedgerRow], window: float) -> PairLoad:
    times = [took(row.record) for row in rows]
    moved = sum(row.record.bytes for row in rows)
    return PairLoad(
        remote_engine=remote,
        local_engine=local,
        transfers=len(rows),
        misses=sum(row.record.state == "miss" for row in rows),
        bytes=moved,
        bytes_per_second=moved / window,
        seconds_p50=quantile(times, 0.5),
        seconds_p99=quantile(times, 0.99),
    )


def _flights(rows: tuple[LeaseRow, ...]) -> tuple[InFlight, ...]:
    """Of a lease between two engines of this kvd, which it knows from both sides, the reader's."""
    taken = {(row.engine_id, row.request_id) for row in rows if row.reader}
    return tuple(
        InFlight(
            remote_engine=row.engine_id,
            local_engine=row.reader,
            request_id=row.request_id,
            seconds=row.age,
            left=row.left,
            readers=row.readers,
        )
        for row in rows
        if row.reader or (row.engine_id, row.request_id) not in taken
    )


def _misses(
    counters: dict[str, int], rows: tuple[LedgerRow, ...], lately: list[LedgerRow]
) -> tuple[MissLoad, ...]:
    totals = {
        n.removeprefix("misses."): count for n, count in counters.items() if n.startswith("misses.") and count
    }
    newest: dict[str, LedgerRow] = {}
    for row in rows:
        if row.record.state == "miss":
            newest.setdefault(row.record.code or "miss", row)
    seen = Counter(row.record.code or "miss" for row in lately if row.record.state == "miss")
    loads = (_miss(code, seen[code], totals.get(code, 0), newest.get(code)) for code in {*totals, *seen})
    return tuple(sorted(loads, key=lambda miss: (-miss.lately, -miss.total, miss.code)))


def _miss(code: str, lately: int, total: int, newest: LedgerRow | None) -> MissLoad:
    cause, request = (newest.record.cause, newest.record.request_id) if newest else ("", "")
    return MissLoad(code=code, lately=lately, total=total, cause=cause, request_id=request)
