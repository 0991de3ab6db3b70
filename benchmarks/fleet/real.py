"""What a fleet of real kvds does: until all are linked, until all are warm, what that costs, and a tenth of it dying.

Times are by the fleet's clock (`benchmarks.fleet.slow_clock`), as kvds themselves saw them; processor times are real.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.fleet import slow_clock
from benchmarks.fleet.engines import Engine, registered, role_of
from benchmarks.fleet.hosts import Host, fleet, statuses
from benchmarks.fleet.seen import Seen, Watch
from kvctl.bench.handshake import processor_seconds
from kvd.service.peers.link import QUIET_SECONDS
from kvd.wire.frame import Message, encode
from kvd.wire.handshake import Ping, Pong
from kvd.wire.identity import Endpoint
from kvd.wire.query import EngineList, ListEngines

KINDS = ("handshake.done", "peer.", "engine.lost")
LEASE_SECONDS = 5.0
KNOWN_SECONDS = 15.0
"""For all to know of a death, by the fleet's clock."""
WAIT_SECONDS = 3600.0
"""For anything else, on the wall."""
ENVELOPE = 9
"""Bytes of ZMTP around a frame of over 255 bytes; 2 around a shorter one."""


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A tenth of the hosts die at one moment, half killed and half stopped: these stay silent, as without power.

    ``known`` is until every other kvd calls every one of them down, in seconds, over all pairs; ``lateness`` how long
    after their time leases ended that dead decoders had claimed.
    """

    killed: int
    stopped: int
    survivors: int
    pairs: int
    unknown: int
    known_median: float
    known_p99: float
    known_most: float
    wrongly_down: int
    leases: int
    lateness_most: float
    processor: float


class Churn(msgspec.Struct, frozen=True, kw_only=True):
    """One decoding engine goes and comes back, alone.

    Seconds until all that may prefill for it were told, and it was told of them. ``processor`` is what both cost all
    hosts, beyond what they take anyway.
    """

    left: float
    joined: float
    partners: int
    processor: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Sizes in bytes, times in seconds; ``processor`` and ``messages`` are of one host, for each second."""

    hosts: int
    workers: int
    slower: float
    window: float
    load: float
    linked: float
    warm: float
    introductions: int
    introduction_processor: float
    etcd: bool = False
    churn: Churn
    processor: float
    messages: float
    kinds: Mapping[str, float]
    message_bytes: Mapping[str, int]
    bytes: float
    lag: float
    rss: float
    pss: float
    kernel: float
    death: Death


def mesh(number: int, places: Sequence[Endpoint]) -> Mapping[str, str]:
    """Every kvd knows all others."""
    others = ",".join(str(place) for at, place in enumerate(places) if at != number)
    return {"KVD_PEER_CONNECT": others, "KVD_LIVENESS_SETTLE_SECONDS": "1"}


def measure(count: int, workers: int, window: float, *, etcd: bool = False) -> Figures:
    """All of it, on hosts that are started here. Raises `SystemExit` where something does not happen at all."""
    with ExitStack() as stack:
        settings = stack.enter_context(found_by_etcd()) if etcd else mesh
        hosts = stack.enter_context(fleet(count, settings))
        pids = [host.pid for host in hosts]
        _say(f"{count} kvds serve")
        linked = _linked(hosts)
        _say(f"all linked after {linked:.2f} s")
        with Watch(hosts, KINDS) as watch:
            spent, began = processor_seconds(pids), time.time()
            engines = registered(hosts, workers)
            introductions = _warm(watch, hosts)
            warm = max(seen.time for seen in watch.events if seen.kind == "handshake.done") - began
            spent = processor_seconds(pids) - spent
            _say(f"{introductions} introductions within {warm:.2f} s, {spent:.1f} s of processor")
            time.sleep(QUIET_SECONDS)  # links that were asked just now are pinged as if they were used
            processor, kinds, lag = _steady(hosts, window)
            _say(f"a host takes {processor:.3f} s of processor a second")
            sizes = _sizes(hosts[0], engines)
            rss, pss = _memory(pids)
            # What introducing cost beyond the looks and pings that went on meanwhile.
            own = max(0.0, spent - processor * count * warm)
            churn = _churn(hosts, engines, watch, processor)
            _say(f"an engine leaves within {churn.left:.2f} s and is back within {churn.joined:.2f} s")
            death = _death(hosts, engines, watch, processor)
            for engine in engines:
                engine.close()
        return Figures(
            hosts=count,
            workers=workers,
            slower=slow_clock.CLOCK.slower,
            window=window,
            load=os.getloadavg()[0],
            linked=linked,
            warm=warm,
            introductions=introductions,
            introduction_processor=own / max(1, introductions),
            etcd=etcd,
            churn=churn,
            processor=processor,
            messages=sum(kinds.values()),
            kinds=kinds,
            message_bytes=sizes,
            bytes=_bytes(kinds, sizes),
            lag=lag,
            rss=rss,
            pss=pss,
            kernel=_kernel(pids),
            death=death,
        )


@contextmanager
def found_by_etcd() -> Iterator[Callable[[int, Sequence[Endpoint]], Mapping[str, str]]]:
    """Settings of kvds that find each other by an etcd, which runs meanwhile, by the clock on the wall."""
    from kvd.service.membership import etcd as following
    from tests.support.etcd_kvds import settings
    from tests.support.etcds import etcd

    following.LEASE_SECONDS = math.ceil(following.LEASE_SECONDS * slow_clock.CLOCK.slower)
    with etcd() as server:
        yield lambda number, _: settings(
            server, KVD_MEMBERSHIP_ETCD_HOST=f"h{number}", KVD_LIVENESS_SETTLE_SECONDS="1"
        )


def _linked(hosts: Sequence[Host]) -> float:
    """Until each kvd has a link to each other one, from when the last one served."""
    began, ends = time.monotonic(), slow_clock.wall() + WAIT_SECONDS
    left = list(hosts)
    while left:
        found = zip(left, statuses(left), strict=True)
        left = [host for host, status in found if status.gauges["peers.up"] < len(hosts) - 1]
        if slow_clock.wall() > ends:
            raise SystemExit(f"{len(left)} of {len(hosts)} kvds have not all their links")
        slow_clock.pause(0.2)
    return time.monotonic() - began


def _warm(watch: Watch, hosts: Sequence[Host]) -> int:
    """Until each decoding engine and each prefilling one have been handed each other; how many handshakes that took."""
    decoding = sum(role_of(host.number) == "decode" for host in hosts)
    wanted = 2 * decoding * (len(hosts) - decoding)
    if not watch.until(lambda seen: _handshakes(seen) >= wanted, WAIT_SECONDS):
        raise SystemExit(f"only {_handshakes(watch.events)} of {wanted} introductions")
    return _handshakes(watch.events)


def _handshakes(seen: Sequence[Seen]) -> int:
    return sum(one.kind == "handshake.done" for one in seen)


def _steady(hosts: Sequence[Host], window: float) -> tuple[float, Mapping[str, float], float]:
    """Of a host and for each second: processor time, and messages that came from peers by kind. And the worst lag."""
    pids = [host.pid for host in hosts]
    before, began, spent = _received(hosts), time.monotonic(), processor_seconds(pids)
    time.sleep(window)
    spent, seconds = processor_seconds(pids) - spent, time.monotonic() - began
    after = _received(hosts)
    taken = time.monotonic() - began
    kinds = {kind: (after[kind] - before[kind]) / len(hosts) / taken for kind in ("ping", "list_engines")}
    lag = max(status.gauges["loop.lag_seconds"] for status in statuses(hosts))
    return spent / len(hosts) / seconds, kinds, lag


def _received(hosts: Sequence[Host]) -> Counter[str]:
    found: Counter[str] = Counter()
    for status in statuses(hosts):
        for name, count in status.counters.items():
            family, _, kind = name.partition(".")
            if family == "received":
                found[kind] += count
    return found


def _sizes(host: Host, engines: Sequence[Engine]) -> Mapping[str, int]:
    """Bytes of each question of peers together with its answer, as this host's kvd sends and answers them."""
    me = host.status()
    using = tuple(
        (engine.facts.engine_id, engine.scheduler.state.engine_generation) for engine in engines[1:2]
    )
    ping: Message = Ping(kvd_id=me.kvd_id, kvd_generation=me.generation, using=using, known=("engine-0000",))
    pong = Pong(kvd_id=me.kvd_id, kvd_generation=me.generation, ready=using)
    listed = host.ask(ListEngines(), EngineList)
    own = msgspec.structs.replace(listed, rows=tuple(row for row in listed.rows if row.local))
    pairs: dict[str, tuple[Message, Message]] = {"ping": (ping, pong), "list_engines": (ListEngines(), own)}
    return {
        kind: sum(len(frame) + (ENVELOPE if len(frame) > 255 else 2) for frame in map(_framed, pair))
        for kind, pair in pairs.items()
    }


def _framed(message: Message) -> bytes:
    return encode(message, 1 << 20)


def _bytes(kinds: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """Sent and received by one host in a second: it asks as much as it is asked."""
    return 2 * sum(kinds[kind] * size for kind, size in sizes.items())


def _churn(hosts: Sequence[Host], engines: list[Engine], watch: Watch, steady: float) -> Churn:
    """The last engine goes, and comes back. Raises `SystemExit` where somebody is not told."""
    at = next(n for n in reversed(range(len(hosts))) if role_of(n) == "decode")
    name, partners = engines[at].facts.engine_id, sum(role_of(host.number) == "prefill" for host in hosts)
    pids = [host.pid for host in hosts]
    spent, began = processor_seconds(pids), time.monotonic()

    def told(kind: str, wanted: int, before: int, since: float) -> float:
        def these(seen: Sequence[Seen]) -> list[float]:
            return [
                one.time
                for one in seen[before:]
                if one.kind == kind and (one.subject == name or (one.host == at and kind == "handshake.done"))
            ]

        if not watch.until(lambda seen: len(these(seen)) >= wanted, KNOWN_SECONDS * slow_clock.CLOCK.slower):
            raise SystemExit(f"{kind} of {name} came to {len(these(watch.events))} of {wanted}")
        return max(these(watch.events)) - since

    before, since = len(watch.events), time.time()
    engines[at].close()
    left = told("engine.lost", partners, before, since)
    before, since = len(watch.events), time.time()
    engines[at] = registered([hosts[at]], len(engines[at].sessions) - 1)[0]
    joined = told("handshake.done", 2 * partners, before, since)
    extra = processor_seconds(pids) - spent - steady * len(hosts) * (time.monotonic() - began)
    return Churn(left=left, joined=joined, partners=partners, processor=max(0.0, extra))


def _memory(pids: Sequence[int]) -> tuple[float, float]:
    """Bytes that a kvd has in memory, and its share of those: medians."""
    found: list[tuple[int, int]] = []
    for pid in pids[:: max(1, len(pids) // 32)]:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        found.append((values["Rss"], values["Pss"]))
    return 1024 * median(rss for rss, _ in found), 1024 * median(pss for _, pss in found)


def _kernel(pids: Sequence[int]) -> float:
    """The part of their processor time that the kernel had, of all their life."""
    user = kernel = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        user, kernel = user + int(fields[11]), kernel + int(fields[12])
    return kernel / max(1, user + kernel)


def dying(count: int) -> list[int]:
    """The hosts that die: a tenth, half of them prefilling; at least one of each."""
    return [number for number in range(count) if number % 20 in (1, 10)]


def _death(hosts: Sequence[Host], engines: Sequence[Engine], watch: Watch, steady: float) -> Death:
    dead = dying(len(hosts))
    gone = {str(hosts[number].endpoint): number for number in dead}
    left = [host for host in hosts if host.number not in dead]
    opened = _lend(engines, dead)
    wanted = len(left) * len(dead)
    pids = [host.pid for host in left]
    before, spent, began, at = len(watch.events), processor_seconds(pids), time.time(), time.monotonic()
    for position, number in enumerate(dead):
        hosts[number].signal(signal.SIGSTOP if position // 2 % 2 else signal.SIGKILL)
    first: dict[tuple[int, str], float] = {}
    wrong = looked = 0

    def all_know(seen: list[Seen]) -> bool:
        nonlocal wrong, looked
        new = seen[before + looked :]
        looked += len(new)
        for one in new:
            if one.kind == "peer.down" and one.host not in dead:
                if one.subject in gone:
                    first.setdefault((one.host, one.subject), one.time - began)
                else:
                    wrong += 1
        return len(first) >= wanted

    watch.until(all_know, KNOWN_SECONDS * slow_clock.CLOCK.slower)
    extra = processor_seconds(pids) - spent - steady * len(left) * (time.monotonic() - at)
    known = sorted(first.values())
    lateness = _lateness(engines, opened)
    stopped = len([position for position in range(len(dead)) if position // 2 % 2])
    return Death(
        killed=len(dead) - stopped,
        stopped=stopped,
        survivors=len(left),
        pairs=wanted,
        unknown=wanted - len(known),
        known_median=median(known) if known else 0.0,
        known_p99=known[int(0.99 * (len(known) - 1))] if known else 0.0,
        known_most=known[-1] if known else 0.0,
        wrongly_down=wrong,
        leases=len(opened),
        lateness_most=max(lateness, default=0.0),
        processor=max(0.0, extra) / max(1, wanted),
    )


def _lend(engines: Sequence[Engine], dead: Sequence[int]) -> dict[int, float]:
    """Each prefilling host that lives keeps blocks, for a decoder that will die; until when, by host."""
    decoders = [engines[number] for number in dead if role_of(number) == "decode"]
    kept = {}
    for engine in engines:
        number = engine.host.number
        if role_of(number) == "prefill" and number not in dead and decoders:
            kept[number] = time.monotonic() + LEASE_SECONDS
            engine.open("kept", LEASE_SECONDS)
            decoders[number % len(decoders)].claim(engine.key("kept"), 0.0)
    return kept


def _lateness(engines: Sequence[Engine], opened: Mapping[int, float]) -> list[float]:
    """How long after its time each lease ended. Raises `SystemExit` for one that never does."""
    ends = slow_clock.wall() + 4 * LEASE_SECONDS * slow_clock.CLOCK.slower
    while any("kept" not in engines[number].ended for number in opened):
        if slow_clock.wall() > ends:
            raise SystemExit("a lease that a dead decoder had claimed does not end")
        slow_clock.pause(0.1)
    return [engines[number].ended["kept"][1] - until for number, until in opened.items()]


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S', time.localtime())} {text}, load {os.getloadavg()[0]:.1f}\n")
