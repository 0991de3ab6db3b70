"""What would move bytes between engines of two hosts, by what their workers told kvd when they registered.

What only a transfer engine knows when it connects is found out by reading a few megabytes of one engine there
(`kvctl.doctor.peer_reads`), of each kind of pair that this host reads. The other direction is to be read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import msgspec

from kvctl.doctor.checks import checked
from kvctl.doctor.peer_reads import PeerRead, ReadFrom
from kvctl.views.doctor import Check
from kvd.backends.auto.metadata import read_both
from kvd.backends.direct.card import read_card
from kvd.backends.envelope import decoded, unpack
from kvd.backends.errors import BackendError
from kvd.backends.registry import ADAPTERS, MEASURED
from kvd.geometry.codec import decode_worker
from kvd.geometry.errors import GeometryError
from kvd.shown import few
from kvd.wire.identity import WorkerCard
from kvd.wire.query import EngineRow

ONE_HOST = frozenset(kind for kind, adapter in ADAPTERS.items() if adapter.one_host)
"""Backends that do not leave their host."""
UNPROBED = "not probed: kvctl doctor --peer there, without --quick, reads from here"

_peer = partial(checked, "peer")


class PairTransport(NamedTuple):
    """What would move bytes from one engine to another. With a ``trouble`` nothing would, for that reason.

    ``engine`` is the backend that would, empty where that is not known.
    """

    transport: str
    trouble: str = ""
    engine: str = ""


class ReadingPair(NamedTuple):
    """Two engines, and which of them is there."""

    reader: EngineRow
    source: EngineRow
    source_there: bool

    @property
    def name(self) -> str:
        """As it stands in checks."""
        return f"{self.reader.engine.engine_id} from {self.source.engine.engine_id}"


class WorkerTold(NamedTuple):
    """What a worker told of how it transfers; workers of one engine mostly tell the same.

    ``engine`` is the transfer engine: the backend itself, or the one behind it. ``protocol`` is Mooncake's. ``boot`` is
    of the host where the worker may be read directly, else empty. ``missing`` says why it has no engine, ``unread`` why
    what it told cannot be read.
    """

    backend: str
    memory: str = ""
    engine: str = ""
    protocol: str = ""
    boot: str = ""
    missing: str = ""
    unread: str = ""


class _Protocol(msgspec.Struct, frozen=True):
    protocol: str


class _Behind(msgspec.Struct, frozen=True):
    engine: str


ReadProbe = Callable[[ReadFrom], PeerRead]
"""Reads some bytes of a worker there."""


def transport_checks(
    mine: Sequence[EngineRow], theirs: Sequence[EngineRow], place: str, probe: ReadProbe | None = None
) -> Iterator[Check]:
    """One check for all pairs between which the same would move bytes. ``probe`` reads from one there of each."""
    here, there = _ready(mine), _ready(theirs)
    blind = [row.engine.engine_id for row in (*here, *there) if row.card is None]
    told = {id(row): told_by(row) for row in (*here, *there)}
    pairs: dict[PairTransport, list[ReadingPair]] = {}
    for one, other in product(here, there):
        for pair in (ReadingPair(one, other, source_there=True), ReadingPair(other, one, source_there=False)):
            if pair.reader.card and pair.source.card and _reads(pair.reader, pair.source):
                pairs.setdefault(way(told[id(pair.source)], told[id(pair.reader)]), []).append(pair)
    if blind:
        unknown = f"kvd shows no card of {few(blind)}, so what moves their bytes is not known"
        yield _peer("skipped", "PEER_TRANSPORT", unknown)
    elif not pairs:
        nobody = f"no engine here reads from one at {place}, and none there from one here"
        yield _peer("skipped", "PEER_TRANSPORT", nobody)
    for found, alike in pairs.items():
        names = few([pair.name for pair in alike])
        if found.trouble:
            yield _peer(
                "failed", "PEER_TRANSPORT", f"{names}: {found.trouble}",
                'start both with "backend": "auto", or with one transfer engine: docs/backends/index.md',
            )  # fmt: skip
        else:
            yield _probed(found, names, alike, probe)


def _probed(found: PairTransport, names: str, alike: Sequence[ReadingPair], probe: ReadProbe | None) -> Check:
    source = next((pair.source for pair in alike if pair.source_there), None)
    if probe is None or source is None or not (reads := _read_from(found.engine, source)):
        return _peer("ok", "PEER_TRANSPORT", f"{names}: {found.transport}; {UNPROBED}")
    read = probe(reads)
    if read.failed:
        return _peer(
            "failed", "PEER_TRANSPORT",
            f"{names}: {found.transport}; nothing could be read of {source.engine.engine_id}: {read.told}",
            "may this host reach that one on the ports of the transfer engine? kvctl doctor on both looks at the engine"
            " itself, kvctl benchmark --to at both together",
        )  # fmt: skip
    return _peer("ok", "PEER_TRANSPORT", f"{names}: {found.transport}; {read.told}")


def _read_from(engine: str, source: EngineRow) -> ReadFrom | None:
    """How kvctl reads from the engine's first worker; None where only another worker can."""
    if source.card is None or engine not in MEASURED:
        return None
    worker = source.card.workers[0]
    metadata = worker.metadata
    if worker.backend == "auto":
        both = read_both(metadata)
        metadata = both.direct_metadata if engine == "direct" else both.engine_metadata
    protocol = "" if engine == "direct" else _told(worker).protocol
    return ReadFrom(engine, protocol, metadata, worker)


def way(source: Sequence[WorkerTold], reader: Sequence[WorkerTold]) -> PairTransport:
    """How workers that told this read from others: the first pair between which nothing would move decides."""
    ways = dict.fromkeys(_between(one, other) for one, other in product(source, reader))
    bad = next((found for found in ways if found.trouble), None)
    known = {found.engine for found in ways}
    return bad or PairTransport(
        " or ".join(found.transport for found in ways), engine=known.pop() if len(known) == 1 else ""
    )


def told_by(row: EngineRow) -> tuple[WorkerTold, ...]:
    """What the workers of an engine told, each kind once."""
    return tuple(dict.fromkeys(_told(worker) for worker in (row.card.workers if row.card else ())))


def _ready(rows: Sequence[EngineRow]) -> list[EngineRow]:
    return [row for row in rows if row.local and row.state == "ready"]


def _reads(reader: EngineRow, source: EngineRow) -> bool:
    one, other = reader.engine, source.engine
    alike = one.model == other.model and one.engine_id != other.engine_id
    return alike and one.role != "prefill" and other.role != "decode"


def _told(worker: WorkerCard) -> WorkerTold:
    found = WorkerTold(worker.backend, engine=worker.backend)
    try:
        devices = {region.device for region in decode_worker(worker.geometry).regions}
        found = found._replace(memory="host" if devices <= {"cpu"} else "GPU")
        return _read(found, worker.backend, worker.metadata)
    except (BackendError, GeometryError) as error:
        return found._replace(unread=error.message)


def _read(found: WorkerTold, backend: str, metadata: bytes) -> WorkerTold:
    """With what stands in the metadata of that backend. Raises `BackendError`."""
    if backend == "mooncake":
        blob = unpack(metadata, backend=backend).blob
        return found._replace(protocol=decoded(blob, _Protocol, backend=backend).protocol)
    if backend == "direct":
        return found._replace(boot=read_card(metadata)[1].process.boot)
    if backend == "staged":
        blob = unpack(metadata, backend=backend).blob
        behind = decoded(blob, _Behind, backend=backend, decode=msgspec.msgpack.decode)
        return found._replace(engine=behind.engine)
    if backend == "auto":
        both = read_both(metadata)
        found = found._replace(engine=both.engine, missing=both.no_engine)
        if not both.no_engine:
            found = _read(found, both.engine, both.engine_metadata)
        return found if both.no_direct else _read(found, "direct", both.direct_metadata)
    return found


def _between(source: WorkerTold, reader: WorkerTold) -> PairTransport:
    if source.backend != reader.backend:
        return PairTransport(
            "", f"one uses {source.backend} and the other {reader.backend}: nothing moves between them"
        )
    if unread := source.unread or reader.unread:
        return PairTransport(f"{source.backend}, over what is not known: {unread}")
    backend, memory = source.backend, f"from {source.memory} to {reader.memory} memory"
    if source.boot and source.boot == reader.boot:
        return PairTransport(f"direct {memory}, as both kvds are of one host", engine="direct")
    if backend in ONE_HOST:
        return PairTransport("", f"both use {backend}, which does not leave its host")
    if missing := source.missing or reader.missing:
        return PairTransport("", f"both use {backend}, and one has no transfer engine behind it: {missing}")
    if source.engine != reader.engine:
        return PairTransport("", f"both use {backend}, with {source.engine} and {reader.engine} behind it")
    if source.protocol != reader.protocol:
        return PairTransport(
            "", f"{source.engine} uses {source.protocol} on one side, {reader.protocol} on the other"
        )
    over = source.protocol or "what it chooses when it connects"
    behind = f" behind {backend}" if backend != source.engine else ""
    return PairTransport(
        f"{source.engine}{behind} {memory}, over {over}", engine="" if backend == "staged" else source.engine
    )
