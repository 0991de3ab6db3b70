"""`python -m tests.chaos.run`: one fault after the other on two hosts, and what must hold after each.

One line for each fault, with the seed that repeats it; the exit status is 1 where something did not hold. Takes root.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvd.client.errors import ClientError
from kvd.wire.transfer import ListTransfers, TransferList
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.wire import NoNamespaces, wired
from tests.chaos.world import LEASE_SECONDS, Host, World, world

BACK_SECONDS = 10.0
"""After a fault a request is served as before within so many seconds."""
TAIL_SECONDS = 15.0
"""All that waits is delivered then: sessions repeat what was refused each 5 s at the latest."""
LEASE_BOUND = LEASE_SECONDS + 10.0
LINES = 30
"""Lines of each kvd's log, without the usual, that are shown where something did not hold."""
LASTS = (0.3, 4.0)


@dataclass(frozen=True)
class Outcome:
    """One fault: what it was, how long until all was back, what did not hold."""

    fault: str
    host: str
    seed: int
    back: float
    acknowledged: int
    broken: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "; ".join(self.broken) or "ok"
        return (
            f"{self.fault:22} host {self.host}  seed {self.seed:<6} back after {self.back:5.2f} s  "
            f"{self.acknowledged:5} records  {verdict}"
        )


def run_fault(seed: int, fault: Fault) -> Outcome:
    """One fault on hosts of its own. Raises `NoNamespaces`."""
    dice = random.Random(seed)
    with wired(seed) as wire, world(wire, dice) as here:
        _until(lambda: here.seen.acknowledged, BACK_SECONDS)
        time.sleep(0.5)
        host = here.decode if fault.ledger else dice.choice(here.hosts)
        side = "ab"[here.hosts.index(host)]
        with fault.strike(here, host, dice):
            time.sleep(dice.uniform(*LASTS) if fault.lasts else 0.0)
        mended = time.monotonic()
        here.pause()
        broken = []
        if not _until(here.request, BACK_SECONDS):
            broken.append(
                f"no request is served as before within {BACK_SECONDS:g} s, but for {here.failing}: {_state(here)}"
            )
        back = time.monotonic() - mended
        here.go_on()
        time.sleep(0.5)
        here.pause()
        if not _until(lambda: not here.undelivered(), TAIL_SECONDS):
            broken.append(f"not delivered within {TAIL_SECONDS:g} s: {here.undelivered()[:5]}")
        broken += _records(here, mended if not fault.keeps else 0.0)
        if not _until(lambda: not _leases(here), LEASE_BOUND):
            broken.append(f"{_leases(here)} leases are left {LEASE_BOUND:g} s after all were released")
        broken += here.seen.wrong
        if broken:
            sys.stderr.write("".join(f"--- kvd {h.network.address}\n{_told(h)}\n" for h in here.hosts))
        here.go_on()
        return Outcome(fault.name, side, seed, back, len(here.seen.acknowledged), tuple(broken))


def _until(look: Callable[[], object], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not look():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _records(here: World, since: float) -> list[str]:
    """What is wrong about the ledger: records that were acknowledged after ``since`` are there, and none is twice."""
    found: list[str] = []
    after = 0
    try:
        while True:
            page = here.decode.kvd.ask(ListTransfers(limit=10_000, before=after))
            assert isinstance(page, TransferList)
            found += [row.record.transfer_id for row in page.rows]
            if not page.more or not page.rows:
                break
            after = page.rows[-1].seq
    except ClientError as error:
        return [f"the ledger cannot be asked: {error.message}"]
    wanted = {name for name, at in here.seen.acknowledged.items() if at > since}
    lost, twice = wanted - set(found), len(found) - len(set(found))
    broken = [f"{len(lost)} of {len(wanted)} acknowledged records are lost"] if lost else []
    return broken + ([f"{twice} records are there twice"] if twice else [])


def _leases(here: World) -> int:
    here.free()
    try:
        return here.lender.holds()
    except (ClientError, KeyError):
        return -1


def _told(host: Host) -> str:
    unusual = [line for line in host.kvd.log.splitlines() if ".events: " not in line]
    return "\n".join(unusual[-LINES:])


def _state(here: World) -> str:
    told = [f"{session.state}" for session in here.sessions if not session.state.connected]
    for host in here.hosts:
        try:
            status = host.kvd.status(2.0)
            peers = [f"{peer.endpoint} {peer.state}" for peer in status.peers]
            away = f", ledger: {status.ledger_away}" if status.ledger_away else ""
            told.append(f"kvd {host.network.address} serves, peers {peers}{away}")
        except AssertionError:
            told.append(f"kvd {host.network.address} does not answer: {host.kvd.log[-2000:]}")
    return "; ".join(told)


def main(arguments: list[str] | None = None) -> int:
    """The command. 0: all held; 1: something did not; 3: no namespaces here."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="the first fault's; each next one's is one higher"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often all faults strike")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="of these faults: " + ", ".join(f.name for f in FAULTS),
    )
    given = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    if not faults:
        parser.error(f"no such fault: {', '.join(given.only)}")
    failed = 0
    for number in range(given.rounds * len(faults)):
        try:
            outcome = run_fault(given.seed + number, faults[number % len(faults)])
        except NoNamespaces as reason:
            sys.stderr.write(f"{reason}\n")
            return 3
        failed += bool(outcome.broken)
        sys.stdout.write(f"{outcome}\n")
        sys.stdout.flush()
        if outcome.broken:
            sys.stdout.write(
                f"    again: python -m tests.chaos.run --only {outcome.fault} --seed {outcome.seed}\n"
            )
    sys.stdout.write(f"{given.rounds * len(faults)} faults, {failed} after which something did not hold\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
