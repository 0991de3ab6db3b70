"""Two hosts: whether their kvds reach each other, with which keys, and what else must go together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from kvctl import daemon
from kvctl.cli.numbers import span
from kvctl.cli.settings import Settings
from kvctl.doctor.checks import checked
from kvctl.doctor.peer_reads import read_from
from kvctl.doctor.peer_transports import ONE_HOST, transport_checks
from kvctl.errors import KvctlError, UsageError
from kvctl.processes.supervisor import start_again
from kvctl.views.doctor import Check
from kvctl.views.engines import endpoint_name
from kvd.addresses import join_address
from kvd.backends.registry import ADAPTERS
from kvd.client.errors import Unreachable
from kvd.wire.query import EngineList, EngineRow, GetStatus, KvdStatus, ListEngines, PeerRow, WorkerRow

ROUNDS = 5
"""Questions by which clocks are compared: the quickest answer says it best."""
MOST_SKEW = 1.0
"""Seconds between two clocks from which on times of two hosts side by side mislead."""
IDENTITIES = {"none": "not in use", "shared": "shared by all hosts", "per host": "a pair for each host"}

_peer = partial(checked, "peer")


@dataclass(frozen=True)
class Compared:
    """How far another kvd's clock is ahead of this host's, give or take ``uncertainty``; both in seconds."""

    ahead: float
    uncertainty: float


@dataclass(frozen=True)
class PeerAnswer:
    """What the other kvd answered: ``status`` None where it does not tell operators of this host."""

    place: str
    seconds: float
    status: KvdStatus | None = None
    clock: Compared | None = None
    workers: tuple[WorkerRow, ...] = ()
    engines: tuple[EngineRow, ...] = ()


def peer_checks(settings: Settings, host: str, *, probe: bool = True) -> Iterator[Check]:
    """The checks; with ``probe`` some bytes are read of engines there.

    Raises `UsageError` for a host that is not known, `KvctlError` where this host's kvd is away.
    """
    with daemon.connected_here(settings) as operator:
        mine = daemon.put(operator, GetStatus(), KvdStatus)
    if endpoint_name(mine.endpoint) is None:
        yield _peer(
            "failed", "PEER_NO_SOCKET", f"{mine.kvd_id} has no peer socket: no other host reaches it, or is reached",
            f"set peer.listen in kvd.yaml, then start it again: {start_again(mine.pid)}",
        )  # fmt: skip
        return
    place = join_address(*daemon.known_hosts(settings).place(host))
    if place == endpoint_name(mine.endpoint):
        raise UsageError(f"--peer: {host!r} is this host itself", "name another one, or leave --peer out")
    afar = replace(settings, host=place)
    try:
        asked = _asked(afar, place)
    except KvctlError as error:
        yield _unanswered(error, mine, place)
        yield from _there(mine, place, None)
        return
    yield _peer(
        "ok", "PEER_ANSWERS", f"the kvd at {place} answers kvctl of this host in {span(asked.seconds)}"
    )
    yield from _there(mine, place, asked.status)
    yield from _of_theirs(settings, mine, asked, probe=probe)


def _asked(afar: Settings, place: str) -> PeerAnswer:
    try:
        with daemon.connected(afar) as operator:
            rounds = []
            for _ in range(ROUNDS):
                sent, began = time.time(), time.monotonic()
                status = daemon.put(operator, GetStatus(), KvdStatus)
                seconds = time.monotonic() - began
                rounds.append((seconds, status.clock - sent - seconds / 2 if status.clock else None))
        seconds, ahead = min(rounds, key=lambda one: one[0])
        clock = None if ahead is None else Compared(ahead, seconds / 2)
        rows = daemon.workers(afar), daemon.engines(afar, cards=True)
        return PeerAnswer(place, seconds, status, clock, *rows)
    except KvctlError as error:
        if error.code != "KVD-NOT-PERMITTED":
            raise
    began = time.monotonic()
    daemon.ask(afar, ListEngines(), EngineList)
    return PeerAnswer(place, time.monotonic() - began)


def _unanswered(error: KvctlError, mine: KvdStatus, place: str) -> Check:
    if isinstance(error, UsageError):
        return _peer("failed", "PEER_KEY_UNKNOWN", error.message, error.hint)
    if error.code == "KVD-KEY-NOT-TRUSTED":
        public = mine.keys.public if mine.keys is not None else "KEY"
        return _peer(
            "failed", "PEER_KEY", error.message,
            f"there, type kvctl keys trust '{public}' {endpoint_name(mine.endpoint)} --replace; then compare what kvctl"
            " keys show prints there and here",
        )  # fmt: skip
    asks = (
        f"there: does kvd run (systemctl status kvd), and does peer.listen name that port? Between: may this host"
        f" reach {place}?"
    )
    more = "" if error.code == Unreachable.code else f" {error.hint}"  # that asks the same
    return _peer("failed", "PEER_SILENT", error.message, f"{asks}{more}".strip())


def _there(mine: KvdStatus, place: str, theirs: KvdStatus | None) -> Iterator[Check]:
    """From this host's kvd to theirs."""
    row = _row(mine, place, theirs.kvd_id if theirs else "")
    what = f"this host's kvd to {place}"
    if row is None:
        yield _peer(
            "skipped", "PEER_THERE", f"{what}: they are not linked, no engine here has asked for one there",
            f"peer.connect: [{place}] in kvd.yaml links them ahead of the first request",
        )  # fmt: skip
    else:
        yield _linked(
            row, "PEER_THERE", what, f"kvctl events and the log of this host's kvd tell more of {place}"
        )


def _of_theirs(settings: Settings, mine: KvdStatus, asked: PeerAnswer, *, probe: bool) -> Iterator[Check]:
    """What only their kvd knows."""
    here, theirs = endpoint_name(mine.endpoint) or "", asked.status
    local = replace(settings, host=None)
    engines = daemon.engines(local, cards=True)
    reads = partial(read_from, address=mine.endpoint.host) if probe else None
    if theirs is None:
        yield _peer(
            "warning", "PEER_ACCESS", f"the kvd at {asked.place} does not tell operators of this host how it is",
            f"there, name {here} in access.hosts of kvd.yaml; or type kvctl doctor --peer {here} there",
        )  # fmt: skip
        # Of those that engines here have met, this host's kvd has the cards.
        known = [row for row in engines if not row.local and endpoint_name(row.endpoint) == asked.place]
        there = [msgspec.structs.replace(row, local=True) for row in known]
        yield from transport_checks(engines, there, asked.place, reads)
        return
    row = _row(theirs, here, mine.kvd_id)
    what = f"the kvd at {asked.place} to this host's"
    if row is None:
        yield _peer(
            "skipped", "PEER_BACK", f"{what}: they are not linked, no engine there has asked for one here",
            f"peer.connect: [{here}] in kvd.yaml there links them ahead of the first request",
        )  # fmt: skip
    else:
        yield _linked(
            row, "PEER_BACK", what, f"does {here} lead to this host from there? See peer.advertise here"
        )
    yield from _keys(mine, theirs, asked.place)
    yield _clock(asked)
    yield from _versions(mine, theirs, asked.place)
    yield from _backends(daemon.workers(local), asked)
    yield from transport_checks(engines, asked.engines, asked.place, reads)


def _row(status: KvdStatus, place: str, kvd_id: str) -> PeerRow | None:
    """The link to a place: of two, as an address and a name are, the one that is up."""
    found = [
        row
        for row in status.peers
        if endpoint_name(row.endpoint) == place or (kvd_id and row.kvd_id == kvd_id)
    ]
    return min(found, key=lambda row: row.state != "up", default=None)


def _linked(row: PeerRow, code: str, what: str, hint: str) -> Check:
    if row.state == "up":
        return _peer("ok", code, f"{what}: linked, {span(row.rtt)} there and back")
    why = f": {row.reason}" if row.reason else ""
    return _peer("failed", code, f"{what}: {row.state}{why}", row.hint or hint)


def _keys(mine: KvdStatus, theirs: KvdStatus, place: str) -> Iterator[Check]:
    one, other = mine.keys, theirs.keys
    if one is None or other is None:
        return
    # Without a key of its own this host is nobody that was shut out: rows without one are of others.
    shut = next((row for row in theirs.refused if one.public and row.key == one.public), None)
    if shut is not None:
        yield _peer(
            "warning", "PEER_KEYS", f"{place} did not let this host's key in, last {span(shut.age)} ago",
            f"there, type kvctl keys trust '{one.public}' {endpoint_name(mine.endpoint)}",
        )  # fmt: skip
    elif one.identity != other.identity:
        yield _peer(
            "warning", "PEER_KEYS",
            f"keys are {IDENTITIES[one.identity]} here, and {IDENTITIES[other.identity]} at {place}",
            "make a pair for each host, on both: kvctl keys generate, docs/deploy.md",
        )  # fmt: skip
    else:
        yield _peer("ok", "PEER_KEYS", f"keys are {IDENTITIES[one.identity]} on both, each is let in")


def _clock(asked: PeerAnswer) -> Check:
    found = asked.clock
    if found is None:
        return _peer(
            "skipped", "PEER_CLOCK", f"the kvd at {asked.place} is of a version that does not tell its time"
        )
    told = (
        f"the clock at {asked.place} is {span(abs(found.ahead))} {'ahead' if found.ahead >= 0 else 'behind'}"
    )
    told += f", give or take {span(found.uncertainty)}"
    if abs(found.ahead) - found.uncertainty > MOST_SKEW:
        return _peer(
            "warning", "PEER_CLOCK", told,
            "have both follow one time server (chronyc tracking, timedatectl): no lease depends on it, and times of"
            " ledgers, events and logs mislead",
        )  # fmt: skip
    return _peer("ok", "PEER_CLOCK", told)


def _versions(mine: KvdStatus, theirs: KvdStatus, place: str) -> Iterator[Check]:
    if theirs.installed and theirs.installed != theirs.version:
        yield _peer(
            "warning", "PEER_VERSION",
            f"the kvd at {place} was started with {theirs.version}, and {theirs.installed} is installed there",
            "start it again there: systemctl restart kvd; workers register again",
        )  # fmt: skip
    elif mine.version != theirs.version:
        yield _peer(
            "warning", "PEER_VERSION", f"kvd is {mine.version} here and {theirs.version} at {place}",
            "upgrade the older one; what two versions may do together stands in docs/versions.md",
        )  # fmt: skip
    else:
        yield _peer("ok", "PEER_VERSION", f"both kvds are {mine.version}")


def _backends(mine: tuple[WorkerRow, ...], asked: PeerAnswer) -> Iterator[Check]:
    here, there = _names(mine), _names(asked.workers)
    if not here or not there:
        which = asked.place if here else "this host"
        yield _peer(
            "skipped", "PEER_BACKENDS", f"no worker of {which} is registered, so its backends are not known"
        )
        return
    common = [name for name in here if name in there]
    crossing = [name for name in common if name not in ONE_HOST]
    if crossing:
        yield _peer("ok", "PEER_BACKENDS", f"workers of both use {', '.join(map(_over, crossing))}")
    elif common:
        yield _peer(
            "failed", "PEER_BACKENDS", f"workers of both use {', '.join(common)}, which does not leave its host",
            'start engines of both with "backend": "auto", or with a transfer engine: docs/backends/index.md',
        )  # fmt: skip
    else:
        yield _peer(
            "failed", "PEER_BACKENDS",
            f"workers use {', '.join(here)} here and {', '.join(there)} at {asked.place}: none of both",
            'start engines of both with one "backend" in kv_connector_extra_config',
        )  # fmt: skip


def _names(rows: tuple[WorkerRow, ...]) -> list[str]:
    return sorted(
        {row.backend for row in rows if row.kind == "worker" and row.backend and row.state != "gone"}
    )


def _over(backend: str) -> str:
    adapter = ADAPTERS.get(backend)
    transport = adapter.transports[0] if adapter else ""
    return f"{backend} over {transport}" if transport else f"{backend} over what it finds"
