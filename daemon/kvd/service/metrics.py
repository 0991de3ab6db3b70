"""HTTP for machines: /metrics in Prometheus' text format, /healthz and /readyz."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from kvd.service.slices import Slices, paced
from kvd.service.sockets.acceptor import network_of
from kvd.shown import escaped
from kvd.wire.identity import Role
from kvd.wire.outcomes import OutcomeCount, OutcomeRow
from kvd.wire.prefixes.cache import PrefixesTaken
from kvd.wire.query import KvdStatus

REQUEST_SECONDS = 5.0
"""How long a connection lives, to the last byte of its answer."""
MAX_HEAD_BYTES = 8192
_HEAD_ENDS = re.compile(rb"\n\r?\n")
MAX_CONNECTIONS = 64
MAX_CONNECTIONS_HOST = 16
"""Of one address. Over both the oldest connection goes: of that address, or of the one that has most."""
ACCEPTS_A_TURN = 16
"""Connections that are accepted in one turn of the loop, and that the kernel keeps until then."""


class EngineTold(NamedTuple):
    """An engine of this host as metrics tell of it."""

    engine_id: str
    role: Role
    compatibility_class: str
    draining: bool


class Told(NamedTuple):
    """What the metrics of a moment are made of."""

    status: KvdStatus
    served: Sequence[OutcomeRow] = ()
    engines: Sequence[EngineTold] = ()
    prefixes: Sequence[tuple[str, PrefixesTaken]] = ()


MetricsPage = tuple[int, str]
Now = Callable[[], Awaitable[Told]]
MakePage = Callable[[str], Awaitable[MetricsPage]]
Visits = dict[Hashable, dict[asyncio.WriteTransport, None]]
"""Connections that are open, by address, the oldest first."""
_LABELS = {"checksums": "result", "misses": "code", "traced": "result"}
"""Counters of which the part behind the dot is a label, by the part before it."""
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


def render(
    status: KvdStatus,
    served: Sequence[OutcomeRow] = (),
    engines: Sequence[EngineTold] = (),
    prefixes: Sequence[tuple[str, PrefixesTaken]] = (),
) -> str:
    """Counters as ``kvd_*_total``, gauges as ``kvd_*``; peers and engines are labels."""
    return "".join(_lines(Told(status, served, engines, prefixes)))


def _lines(told: Told) -> Iterator[str]:
    """Each line by itself: of many engines there are tens of thousands, and others get their turns in between."""
    for line in _each(told):
        yield f"{line}\n"


def _each(told: Told) -> Iterator[str]:
    status = told.status
    yield from _counters(status)
    for name, value in sorted(status.gauges.items()):
        metric = f"kvd_{_metric(name)}"
        yield f"# TYPE {metric} gauge"
        yield f"{metric} {value:g}"
    if status.peers:
        yield "# TYPE kvd_peer_up gauge"
        for p in status.peers:
            yield f'kvd_peer_up{{peer="{_label(str(p.endpoint))}"}} {int(p.state == "up")}'
        yield "# TYPE kvd_peer_rtt_seconds gauge"
        for p in status.peers:
            yield f'kvd_peer_rtt_seconds{{peer="{_label(str(p.endpoint))}"}} {p.rtt:g}'
    yield from _served(told.served)
    yield from _prefixes(told.prefixes)
    if told.engines:
        yield "# TYPE kvd_engine_info gauge"
        for e in told.engines:
            yield (
                f'kvd_engine_info{{engine="{_label(e.engine_id)}",role="{e.role}",'
                f'compatibility_class="{e.compatibility_class}"}} 1'
            )
        yield "# TYPE kvd_engine_draining gauge"
        for e in told.engines:
            yield f'kvd_engine_draining{{engine="{_label(e.engine_id)}"}} {int(e.draining)}'
    yield "# TYPE kvd_build_info gauge"
    yield f'kvd_build_info{{version="{_label(status.version)}",kvd_id="{_label(status.kvd_id)}"}} 1'


def _counters(status: KvdStatus) -> list[str]:
    """Each series once, its family once: two names that differ in what a metric's name cannot hold are added up."""
    families: dict[str, Counter[str]] = {}
    for name, count in sorted(status.counters.items()):
        family, _, rest = name.partition(".")
        label = _LABELS.get(family, "")
        series = families.setdefault(f"kvd_{_metric(family if label else name)}_total", Counter())
        series[f'{{{label}="{_label(rest)}"}}' if label else ""] += count
    lines: list[str] = []
    for metric, series in families.items():
        lines += [
            f"# TYPE {metric} counter",
            *(f"{metric}{labels} {count}" for labels, count in series.items()),
        ]
    return lines


def _served(rows: Sequence[OutcomeRow]) -> Iterator[str]:
    """How requests were served, by engine, outcome and code (`kvd.wire.outcomes`); and leases that were claimed."""
    counts = [(row, count) for row in rows for count in row.totals]
    engines = [row for row in rows if row.leases_total]

    def outcome(row: OutcomeRow, count: OutcomeCount) -> str:
        engine, code = _label(row.engine_id), _label(count.code)
        return f'{{engine="{engine}",role="{row.role}",outcome="{count.outcome}",code="{code}"}}'

    yield from _family(
        "kvd_requests_served_total", (f"{outcome(row, count)} {count.requests}" for row, count in counts)
    )
    yield from _family(
        "kvd_prompt_tokens_served_total", (f"{outcome(row, count)} {count.tokens}" for row, count in counts)
    )
    for name, of in (
        ("kvd_prefills_kept_total", attrgetter("leases_total")),
        ("kvd_prefills_claimed_total", attrgetter("claimed_total")),
    ):
        yield from _family(name, (f'{{engine="{_label(row.engine_id)}"}} {of(row)}' for row in engines))


def _prefixes(taken: Sequence[tuple[str, PrefixesTaken]]) -> Iterator[str]:
    """What engines here read of others' prefix caches, by the engine that they read from."""

    def label(engine: str, one: PrefixesTaken) -> str:
        return f'engine="{_label(engine)}",source="{_label(one.source)}"'

    yield from _family(
        "kvd_prefix_reads_total",
        (
            f'{{{label(engine, one)},result="{result}"}} {count}'
            for engine, one in taken
            for result, count in (("used", one.reads), ("lost", one.lost))
        ),
    )
    for name, of in (
        ("kvd_prefix_read_tokens_total", attrgetter("tokens")),
        ("kvd_prefix_read_bytes_total", attrgetter("bytes")),
    ):
        yield from _family(name, (f"{{{label(engine, one)}}} {of(one)}" for engine, one in taken))


def _family(name: str, samples: Iterator[str]) -> Iterator[str]:
    """The series of a counter, if there is any."""
    for number, sample in enumerate(samples):
        if not number:
            yield f"# TYPE {name} counter"
        yield f"{name}{sample}"


async def page(path: str, told: Told) -> MetricsPage:
    """The status code and the text for a path."""
    status = told.status
    if path == "/metrics":
        return 200, "".join([line async for line in paced(_lines(told))])
    if path == "/readyz":
        why = "draining" if status.draining else escaped(status.comparing)
        return (503, f"{why}\n") if why else (200, "ready\n")
    return 404, "there is /metrics, /healthz and /readyz\n"


async def listen(host: str, port: int, now: Now) -> asyncio.Server:
    """A listening server; ``now`` is called for each request. Raises `OSError` where the address cannot be had."""
    visits: Visits = {}
    pages = Slices()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whose = network_of(writer.get_extra_info("peername"))

        async def made(path: str) -> MetricsPage:
            async with pages.turn(
                (whose, "")
            ):  # else as many are made in one turn of the loop as are asked for
                if writer.transport.is_closing():
                    raise ConnectionAbortedError
                return await page(path, await now())

        _enter(visits, whose, writer.transport)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await _answer(reader, writer, made)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever talks nonsense, or nothing at all, or does not read, gets the connection closed
        finally:
            _leave(visits, whose, writer.transport)
            writer.transport.abort()  # else it lives until all was read, which may be never

    return await asyncio.start_server(connected, host, port, limit=MAX_HEAD_BYTES, backlog=ACCEPTS_A_TURN)


def _enter(visits: Visits, whose: Hashable, transport: asyncio.WriteTransport) -> None:
    """Count a connection, and end another one where these are too many."""
    own = visits.setdefault(whose, {})
    own[transport] = None
    if len(own) > MAX_CONNECTIONS_HOST:
        most = whose
    elif sum(map(len, visits.values())) > MAX_CONNECTIONS:
        most = max(visits, key=lambda host: len(visits[host]))
    else:
        return
    oldest = next(iter(visits[most]))
    _leave(visits, most, oldest)
    oldest.abort()


def _leave(visits: Visits, whose: Hashable, transport: asyncio.WriteTransport) -> None:
    if (own := visits.get(whose)) is not None:
        own.pop(transport, None)
        if not own:
            del visits[whose]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, made: MakePage) -> None:
    head = (await _head(reader)).partition(b"\n")[0].decode("latin-1").split()
    if len(head) != 3 or not head[2].startswith("HTTP/1."):
        code, text = 400, "not HTTP/1\n"
    elif head[0] not in ("GET", "HEAD"):
        code, text = 405, "GET and HEAD only\n"
    elif (path := head[1].partition("?")[0]) == "/healthz":
        code, text = 200, "ok\n"
    else:
        code, text = await made(path)
    body = text.encode()
    writer.write(
        f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    )
    if not head or head[0] != "HEAD":
        writer.write(body)
    await writer.drain()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The head of a request. Raises `asyncio.IncompleteReadError`, also where it has more bytes than are taken."""
    head = bytearray()
    while _HEAD_ENDS.search(head) is None:
        chunk = await reader.read(MAX_HEAD_BYTES - len(head)) if len(head) < MAX_HEAD_BYTES else b""
        if not chunk:
            raise asyncio.IncompleteReadError(bytes(head), None)
        head += chunk
    return bytes(head)


def _metric(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name).lower()


def _label(text: str) -> str:
    return escaped(text).replace("\\", r"\\").replace('"', r"\"")
