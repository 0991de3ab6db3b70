"""The demo's middle: what runs (engines or simulated workers alike), requests through it, and what came of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NoReturn

from kvctl.cli.units import Mode
from kvctl.demo.screen import Board
from kvctl.engines.cards import engine_geometry
from kvctl.engines.pairs import described
from kvctl.ledger.statistics import posted
from kvctl.processes.daemons import Kvd
from kvctl.processes.errors import EngineError, WorkerFailed
from kvctl.views.demo import Demo, DemoRequest
from kvctl.views.topology.document import Topology, pair_document
from kvd.wire.query import EngineList, GetStatus, KvdStatus, ListEngines
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList

ASKED: Mapping[str, str] = {"KVD_ACCESS_HOSTS": "*"}
"""Settings of both kvds: each answers operators at the other one, so that --fleet shows both."""
PAUSE = 0.2
"""Seconds between two pairs of requests that are sent on and on."""
LEDGER_SECONDS = 5.0
"""How long to wait for what workers report on their own time: the ledger's rows, the release of leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """What became of one request. ``problem`` is empty where all is well; lengths are in tokens.

    ``handed_over`` is what the ledger has as the remote request's id; empty where nothing was handed over.
    """

    name: str
    prompt_tokens: int
    external_tokens: int
    output_tokens: int
    handed_over: str
    equal: bool
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Two hosts that are up.

    ``serve`` takes a request, by its number, through both engines; it may be called from several threads. ``prompts``
    are the lengths of the first ones in tokens, and again of those after them.
    """

    prefill_host: Kvd
    decode_host: Kvd
    model: str
    mode: Mode
    simulated: bool
    prompts: Sequence[int]
    serve: Callable[[int], DemoOutcome]


def waves(requests: int) -> list[list[int]]:
    """Which requests go together: the first alone (it shakes hands), another alone, then two at a time."""
    alone = [[number] for number in range(min(2, requests))]
    return alone + [list(range(first, min(first + 2, requests))) for first in range(len(alone), requests, 2)]


def send_requests(running: Running, board: Board) -> list[DemoOutcome]:
    """Send all requests, wave by wave. Never raises for a request that failed: it says so."""
    served: list[DemoOutcome] = []
    # Not a `with` block: after an interruption its threads end only once the engines are stopped.
    threads = ThreadPoolExecutor(2)
    try:
        for wave in waves(len(running.prompts)):
            started: list[Future[DemoOutcome]] = []
            for number in wave:
                board.begin(f"request-{number}", f"request {number + 1}, {running.prompts[number]} tokens")
                started.append(threads.submit(_serve, running, number, board))
            wait(started)
            served += [future.result() for future in started]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    return served


def keep_sending(running: Running, told: Callable[[int, DemoOutcome], None]) -> NoReturn:
    """Send further requests, two at a time, until the process is interrupted; ``told`` of each that has ended."""
    threads = ThreadPoolExecutor(2)
    try:
        for first in itertools.count(len(running.prompts), 2):
            wait(started := [threads.submit(_served, running, number) for number in (first, first + 1)])
            for number, future in enumerate(started, first):
                told(number, future.result())
            time.sleep(PAUSE)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    raise AssertionError("numbers end")


def summarize(running: Running, served: Sequence[DemoOutcome], began: float) -> Demo:
    """The document: what was served, joined with what the kvds know. ``began`` is in monotonic seconds.

    Raises `kvd.client.errors.ClientError` where a kvd does not answer.
    """
    # Blocks that are pushed are under no lease: nobody comes for them.
    leases = len(served) if running.mode == "pull" else 0
    rows = _ledger(running.decode_host, {one.handed_over for one in served if one.handed_over})
    requests = tuple(_document(one, rows.get(one.handed_over, [])) for one in served)
    return Demo(
        ok=all(request.equal and not request.problem for request in requests),
        mode=running.mode,
        simulated=running.simulated,
        model=running.model,
        seconds=time.monotonic() - began,
        bytes=sum(request.bytes for request in requests),
        leases_released=_leases_released(running.prefill_host, leases),
        requests=requests,
        topology=_topology(running.decode_host),
    )


def _served(running: Running, number: int) -> DemoOutcome:
    try:
        return running.serve(number)
    except (EngineError, WorkerFailed, TimeoutError) as error:
        return DemoOutcome(
            name=f"request-{number + 1}",
            prompt_tokens=running.prompts[number % len(running.prompts)],
            external_tokens=0,
            output_tokens=0,
            handed_over="",
            equal=False,
            problem=str(error) or type(error).__name__,
        )


def _serve(running: Running, number: int, board: Board) -> DemoOutcome:
    one = _served(running, number)
    good = one.equal and not one.problem
    note = f"{one.external_tokens} tokens of KV from the prefiller" if good else one.problem.splitlines()[0]
    board.end(f"request-{number}", note, good=good)
    return one


def _document(one: DemoOutcome, rows: Sequence[LedgerRow]) -> DemoRequest:
    records = [row.record for row in rows]
    problem = one.problem
    if not problem:
        misses = [record.cause for record in records if record.state != "done"]
        if not records:
            problem = "no transfer of it stands in the ledger"
        elif misses:
            problem = f"a transfer missed: {misses[0]}"
        elif one.external_tokens != one.prompt_tokens - 1:
            problem = (
                f"KV of {one.external_tokens} tokens was used where {one.prompt_tokens - 1} were prefilled"
            )
        elif not one.equal:
            problem = "the output differs"
    return DemoRequest(
        request=one.name,
        prompt_tokens=one.prompt_tokens,
        external_tokens=one.external_tokens,
        output_tokens=one.output_tokens,
        bytes=sum(record.bytes for record in records),
        copies=sum(record.coalesced_descriptors for record in records),
        remote_ranks=tuple(dict.fromkeys(rank for record in records for rank in record.remote_ranks)),
        # Workers of one engine shake hands and move bytes at the same time: the slowest is what the request waited for.
        handshake_seconds=max((record.stages.get("handshake", 0.0) for record in records), default=0.0),
        transfer_seconds=max((posted(record) for record in records), default=0.0),
        equal=one.equal,
        problem=problem,
    )


def _ledger(host: Kvd, wanted: set[str]) -> dict[str, list[LedgerRow]]:
    """The ledger's rows by the prefiller's request id, once all wanted ones are there or time is up."""
    until = time.monotonic() + LEDGER_SECONDS
    while True:
        found: dict[str, list[LedgerRow]] = {}
        answer = host.ask(ListTransfers(limit=1000))
        if isinstance(answer, TransferList):
            for row in answer.rows:
                found.setdefault(row.record.remote_request_id, []).append(row)
        if wanted <= found.keys() or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _leases_released(host: Kvd, wanted: int) -> int:
    until = time.monotonic() + LEDGER_SECONDS
    while True:
        answer = host.ask(GetStatus())
        released = answer.counters.get("leases.released", 0) if isinstance(answer, KvdStatus) else 0
        if released >= wanted or time.monotonic() > until:
            return released
        time.sleep(0.05)


def _topology(host: Kvd) -> Topology:
    """Every pair of a local engine and a peer's, as `kvctl describe-topology` shows it."""
    answer = host.ask(ListEngines(cards=True))
    rows = answer.rows if isinstance(answer, EngineList) else ()
    known = [row for row in rows if row.card is not None]
    pairs = [
        described(engine_geometry(local), engine_geometry(peer))
        for local in known
        for peer in known
        if local.local and not peer.local
    ]
    return Topology(pairs=tuple(map(pair_document, pairs)))
