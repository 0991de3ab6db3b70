"""Members by etcd: each kvd writes where it is, under a lease of 10 s, and reads where the others are.

``/kvd/v1/CLUSTER/hosts/HOST`` has a `HostValue`. Nothing else of kvd's ever goes to etcd. Whatever becomes of etcd,
what was known stays known (`members`), and this kvd's own key is written anew once etcd is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import msgspec

from kvd.addresses import join_address
from kvd.service.membership.etcd_client import (
    EtcdAway,
    EtcdClient,
    EtcdCompacted,
    EtcdLeaseUnknown,
    EtcdManyChanges,
    EtcdTooLarge,
)
from kvd.service.membership.etcd_messages import (
    LONGEST_KEY,
    LONGEST_VALUE,
    HostValue,
    KeyValue,
    LeaseAnswer,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseRevoke,
    LeaseRevoked,
    Put,
    PutAnswer,
    Range,
    RangeAnswer,
    Streamed,
    WatchCreate,
    WatchEvent,
    WatchQuestion,
)
from kvd.service.membership.etcd_settings import EtcdAccess, is_word
from kvd.service.membership.members import Taker
from kvd.service.membership.told import MOST_MEMBERS, ToldHost, Untold, place, shortly
from kvd.service.slices import paced
from kvd.service.sockets.resolver import Resolver
from kvd.wire.identity import Endpoint

LEASE_SECONDS = 10
KEEP_SECONDS = 3.0
"""How often the lease is begun anew: three may fail."""
STOP_SECONDS = 0.5
"""How long the end of kvd waits for etcd to take the lease back."""
PUT_SECONDS = 1.0
"""Shortest pause between two writes: two kvds of one name must not keep etcd busy."""
FULL_SECONDS = 30.0
"""How often all hosts are read, whatever the watch told."""
TELL_SECONDS = 0.1
"""Shortest pause between two lists of hosts that members are told."""
PAUSE_SECONDS = (0.2, 2.0)
"""First and longest pause before hosts are read again after a failure."""
PAGE_KEYS = 256
MOST_KEYS = 2 * MOST_MEMBERS
MOST_BYTES = 16 << 20
"""Keys, and bytes of keys and values, that are read of all hosts."""


@dataclass(frozen=True, slots=True)
class EtcdSelf:
    """This kvd as it writes itself: its key in etcd, and the value under it."""

    prefix: bytes
    name: str
    endpoint: Endpoint
    generation: str
    value: bytes

    @property
    def key(self) -> bytes:
        """Where its value stands."""
        return self.prefix + self.name.encode()


@dataclass(frozen=True, slots=True)
class EtcdHost:
    """A key under which a host may stand: the host, or why it is none.

    ``ours``: it is what this kvd wrote, with a ``lease`` that may be another.
    """

    told: ToldHost | None
    wrong: str
    ours: bool
    lease: int


@dataclass(slots=True)
class EtcdView:
    """What is known of etcd now: all hosts by their names, and how our own key and the questions fare.

    ``read``: all hosts were read once. ``full``: none had to be left out then. ``written``: our key stands there under
    ``lease``, for all that is known.
    """

    hosts: dict[str, EtcdHost] = field(default_factory=dict)
    full: bool = False
    read: bool = False
    lease: int = 0
    written: bool = False
    write_again: asyncio.Event = field(default_factory=asyncio.Event)
    read_again: asyncio.Event = field(default_factory=asyncio.Event)
    tell: asyncio.Event = field(default_factory=asyncio.Event)
    trouble: str = ""
    """Why our own key cannot be kept there."""


def ourselves(
    cluster: str, name: str, endpoint: Endpoint, generation: str, key: str, version: str
) -> EtcdSelf:
    """What this kvd writes of itself."""
    value = HostValue(
        address=join_address(endpoint.host, endpoint.port), generation=generation, key=key, version=version
    )
    prefix = f"/kvd/v1/{cluster}/hosts/".encode()
    return EtcdSelf(prefix, name, endpoint, generation, msgspec.json.encode(value))


def read_host(kv: KeyValue, me: EtcdSelf) -> tuple[str, EtcdHost]:
    """The name of a host and what stands under it, which anybody may have written."""
    key = kv.key[:LONGEST_KEY].decode("utf-8", "replace")
    name = key[len(me.prefix) :]
    told, wrong = None, ""
    if len(kv.key) > LONGEST_KEY or not is_word(name):
        wrong = "its name is none of a host"
    elif len(kv.value) > LONGEST_VALUE:
        wrong = f"its value has {len(kv.value):,} bytes, at most {LONGEST_VALUE:,} are taken"
    else:
        try:
            value = msgspec.json.decode(kv.value, type=HostValue)
            told = ToldHost(place(value.address), value.key, value.generation, name)
        except msgspec.MsgspecError as error:
            wrong = f"its value is none of a kvd: {shortly(str(error))}"
        except Untold as untold:
            wrong = str(untold)
    why = f"{shortly(key)} is left out: {wrong}" if wrong else ""
    return name, EtcdHost(told, why, kv.value == me.value, kv.lease)


def change(hosts: dict[str, EtcdHost], event: WatchEvent, me: EtcdSelf) -> tuple[str, EtcdHost]:
    """Change the hosts by one event, and return whom it is about. There are never more than `MOST_KEYS`."""
    name, host = read_host(event.kv, me)
    if event.type == "DELETE":
        hosts.pop(name, None)
    elif name in hosts or len(hosts) < MOST_KEYS:
        hosts[name] = host
    return name, host


async def follow(me: EtcdSelf, access: EtcdAccess, resolver: Resolver, taker: Taker) -> None:
    """Until cancelled: keep our own key in etcd, and tell of all others."""
    async with EtcdClient(access, resolver) as client:
        view = EtcdView()
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in (_hold, _read):
                    tasks.create_task(work(me, client, view, taker))
                tasks.create_task(_tell(me, view, taker))
        except asyncio.CancelledError:
            await _give_up_lease(client, view)
            raise


# --- our own key ---


async def _hold(me: EtcdSelf, client: EtcdClient, view: EtcdView, taker: Taker) -> None:
    while True:
        view.write_again.clear()
        try:
            await _keep(me, client, view)
        except EtcdAway as away:
            taker.away(str(away))
            view.trouble = str(away)
            view.read_again.set()  # the watch may hang as well
        else:
            if view.trouble:
                view.trouble = ""
                view.tell.set()
        await asyncio.sleep(PUT_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_SECONDS - PUT_SECONDS):
                await view.write_again.wait()


async def _keep(me: EtcdSelf, client: EtcdClient, view: EtcdView) -> None:
    """The lease lives on, or is another one, and our key stands under it. Raises `EtcdAway`."""
    if view.lease:
        kept = await client.ask(LeaseKeepAlive(lease=view.lease), Streamed[LeaseAnswer])
        if kept.result is None or kept.result.seconds <= 0:
            view.lease = 0
    if not view.lease:
        granted = await client.ask(LeaseGrant(seconds=LEASE_SECONDS), LeaseAnswer)
        view.lease, view.written = granted.lease, False
    if not view.written:
        view.written = True  # what is seen from now on may be otherwise
        try:
            await client.ask(Put(key=me.key, value=me.value, lease=view.lease), PutAnswer)
        except EtcdLeaseUnknown:
            view.lease = 0
            raise
        except EtcdAway:
            view.written = False
            raise


async def _give_up_lease(client: EtcdClient, view: EtcdView) -> None:
    """This kvd stops: with its lease its key goes now. Where etcd does not answer soon, both go when that ran out."""
    if not view.lease or view.trouble:
        return
    with contextlib.suppress(EtcdAway, TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await client.ask(LeaseRevoke(lease=view.lease), LeaseRevoked)


def _see_ours(me: EtcdSelf, view: EtcdView, taker: Taker) -> None:
    """Have our key written again where something else stands there, or nothing."""
    if not view.written:
        return
    ours = view.hosts.get(me.name)
    if ours is not None and ours.ours and ours.lease == view.lease:
        return
    if ours is not None and ours.told is not None and ours.told.endpoint != me.endpoint:
        taker.wrong(
            f"the kvd at {ours.told.endpoint} writes the key of this host, {shortly(me.name)}: give each host a name of"
            " its own (membership.etcd.host)",
            "name",
        )
    view.written = False
    view.write_again.set()


# --- the others ---


async def _read(me: EtcdSelf, client: EtcdClient, view: EtcdView, taker: Taker) -> None:
    pause = PAUSE_SECONDS[0]
    while True:
        began = time.monotonic()
        try:
            view.read_again.clear()
            revision = await _read_all(me, client, view, taker)
            await _watch(me, client, view, taker, revision)
        except (EtcdCompacted, EtcdManyChanges):
            pass  # all is read anew
        except EtcdAway as away:
            taker.away(str(away))
        if time.monotonic() - began > PAUSE_SECONDS[1]:
            pause = PAUSE_SECONDS[0]
        await asyncio.sleep(pause)
        pause = min(pause * 2, PAUSE_SECONDS[1])


async def _read_all(me: EtcdSelf, client: EtcdClient, view: EtcdView, taker: Taker) -> int:
    """Read all hosts, page by page, as they were at one revision, which is returned. Raises `EtcdAway`."""
    hosts: dict[str, EtcdHost] = {}
    start, revision, size, limit, more = me.prefix, 0, 0, PAGE_KEYS, True
    while more and len(hosts) < MOST_KEYS and size < MOST_BYTES:
        ask = Range(key=start, range_end=_after(me.prefix), limit=limit, revision=revision)
        try:
            answer = await client.ask(ask, RangeAnswer)
        except EtcdTooLarge:
            if limit == 1:
                raise
            limit //= 16
            continue
        revision = revision or answer.header.revision
        async for kv in paced(answer.kvs):
            name, host = read_host(kv, me)
            hosts[name] = host
            size += len(kv.key) + len(kv.value)
        more = answer.more and bool(answer.kvs)
        if more:
            start = answer.kvs[-1].key + b"\0"
    view.hosts, view.full, view.read = hosts, not more, True
    if more:
        taker.wrong(f"more than {len(hosts):,} hosts stand there, which are all that is read", "many")
    _see_ours(me, view, taker)
    view.tell.set()
    async for host in paced(hosts.values()):
        if host.wrong:
            taker.wrong(host.wrong)
    return revision


async def _watch(me: EtcdSelf, client: EtcdClient, view: EtcdView, taker: Taker, revision: int) -> None:
    """Take note of changes after ``revision``, until it is time to read all again. Raises `EtcdAway`."""

    async def watch() -> None:
        create = WatchCreate(key=me.prefix, range_end=_after(me.prefix), start_revision=revision + 1)
        async with contextlib.aclosing(client.watch(WatchQuestion(create_request=create))) as answers:
            async for answer in answers:
                await _take(me, view, taker, answer.events)

    moved = client.moved
    watching = asyncio.create_task(watch())
    again = asyncio.create_task(view.read_again.wait())
    try:
        await asyncio.wait([watching, again], timeout=FULL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and client.moved == moved:
            watching.result()
    finally:
        for task in (watching, again):
            task.cancel()
        await asyncio.gather(watching, again, return_exceptions=True)


async def _take(me: EtcdSelf, view: EtcdView, taker: Taker, events: tuple[WatchEvent, ...]) -> None:
    ours = False
    async for event in paced(events):
        name, host = change(view.hosts, event, me)
        ours |= name == me.name
        if host.wrong and event.type != "DELETE":
            taker.wrong(host.wrong)
        view.tell.set()
    if ours:
        _see_ours(me, view, taker)


async def _tell(me: EtcdSelf, view: EtcdView, taker: Taker) -> None:
    """Members hear of all hosts but this one, soon after something changed, and not too often."""
    while True:
        await view.tell.wait()
        view.tell.clear()
        if not view.read:
            continue
        told = [host.told for host in view.hosts.values() if host.told is not None]
        others = [one for one in told if one.endpoint != me.endpoint and one.generation != me.generation]
        taker.take(others, full=view.full, trouble=view.trouble)
        await asyncio.sleep(TELL_SECONDS)


def _after(prefix: bytes) -> bytes:
    """The first key behind all that begin with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
