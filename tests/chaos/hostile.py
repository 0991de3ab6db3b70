"""`python -m tests.chaos.hostile`: valid messages in wrong orders and amounts, from many connections at once.

It attacks a kvd of its own, on its local and its peer socket, and says how an honest client fared meanwhile. The exit
status is 1 where kvd was felled, failed at a message (``errors.internal``), or does not serve afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from pathlib import Path

import zmq

from kvd.wire.frame import MESSAGES
from kvd.wire.names import socket_address
from kvd.wire.reply import Reply
from tests.chaos.messages import message
from tests.support.attacked import assert_unfelled, attacked, attacking
from tests.support.daemons import Daemon, daemons, facts, session, worker

CONNECTIONS = 12
MOST_AT_ONCE = 200
LEAVES = 0.002
"""How often a client goes away, and another one comes, in the middle of everything."""
KEPT_MS = 20
"""How long a client that reads waits for its answers."""
LINES = 60
"""Lines of kvd's faults that are shown."""
REQUESTS = tuple(name for name, kind in MESSAGES.items() if not issubclass(kind, Reply))


def send_all(directory: Path, port: int, seed: int, count: int) -> None:
    """Send so many messages, for the most part requests; of some of them wait for the answers."""
    dice = random.Random(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    addresses = (socket_address(directory), f"tcp://127.0.0.1:{port}")
    clients = [_client(context, dice.choice(addresses)) for _ in range(CONNECTIONS)]
    left = count
    while left > 0:
        number = dice.randrange(CONNECTIONS)
        if dice.random() < LEAVES:
            clients[number].close()
            clients[number] = _client(context, dice.choice(addresses))
        client = clients[number]
        kinds = (
            [dice.choice(REQUESTS)]
            if dice.random() < 0.3
            else REQUESTS
            if dice.random() < 0.95
            else tuple(MESSAGES)
        )
        reads = dice.random() < 0.8
        for _ in range(min(left, dice.randint(1, MOST_AT_ONCE))):
            frame, _kind = message(dice, kinds)
            left -= 1
            with contextlib.suppress(zmq.Again):  # kvd takes no more of this one for now
                client.send(frame, zmq.NOBLOCK)
            if reads:
                _read(client)
        if reads and client.poll(KEPT_MS):
            _read(client)
    context.destroy(linger=200)


def _read(client: zmq.Socket[bytes]) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            client.recv(zmq.NOBLOCK)


def _client(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    client = context.socket(zmq.DEALER)
    client.linger = 0
    client.connect(address)
    return client


def outcome(kvd: Daemon, seed: int, count: int, seconds: float) -> str:
    """Attack a kvd and look at it afterwards. Raises `AssertionError`."""
    began = time.monotonic()
    with attacked(kvd) as watch:
        with attacking(send_all, kvd.directory, kvd.port, seed, count) as attacker:
            assert attacker.wait(seconds), f"{count} messages were not sent within {seconds:g} s"
        verdict = watch.verdict()
    took = time.monotonic() - began
    assert_unfelled(verdict)
    counters = kvd.status().counters
    failed = {name: number for name, number in counters.items() if name.startswith("errors.") and number}
    assert not failed, f"{failed}; seed {seed}:\n{_faults(kvd.log)}"
    with session(kvd, worker(facts("honest"))) as honest:
        honest.wait(lambda state: bool(state.engine_generation), 10.0)
    return f"{count} messages in {took:.0f} s, seed {seed}: {verdict}"


def _faults(log: str) -> str:
    """The tracebacks of a log, up to the next line of its own."""
    shown: list[str] = []
    within = False
    for line in log.splitlines():
        if " ERROR " in line[:40]:
            within = True
        elif " kvd.service" in line[:60]:
            within = False
        if within:
            shown.append(line[:300])
    return "\n".join(shown[:LINES])


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50_000, help="messages (50000)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the most that they may take (3600)")
    given = parser.parse_args(arguments)
    with daemons() as (kvd,):
        try:
            sys.stdout.write(outcome(kvd, given.seed, given.count, given.seconds) + "\n")
        except AssertionError as error:
            sys.stdout.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
