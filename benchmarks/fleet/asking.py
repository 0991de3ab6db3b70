"""`kvctl ... --fleet` typed by a person: real kvds with a key each, some of them silent, and how long it takes.

Half of the silent hosts are kvds that were stopped; their kernels take connections. The others are sockets that accept
and say nothing. The kvds go by a slow clock, so that hundreds that idle leave the processor to kvctl; kvctl does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.fleet import slow_clock
from benchmarks.fleet.engines import SECONDS, Engine, registered
from benchmarks.fleet.hosts import PORT, address, fleet, folder
from kvd.keys import TrustedKey, read_pair, write_pair, write_trusted
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Ok
from kvd.wire.transfer import ReportTransfers, TransferRecord

NETWORK = 78
COMMANDS: Mapping[str, Sequence[str]] = {
    "engines": ("engines",),
    "engines, wide": ("engines", "-o", "wide"),
    "transfers": ("transfers",),
    "transfers --by pair": ("transfers", "--by", "pair"),
    "workers": ("workers",),
    "leases": ("leases",),
    "status": ("status",),
    "slow": ("slow",),
    "describe-topology": ("describe-topology",),
    "doctor": ("doctor",),
}
RECORDS = 20
"""Transfers in each host's ledger."""
UNANSWERED = 4
"""kvctl's exit code where some hosts did not answer."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One command: seconds until it ended, by the clock on the wall, and those of a processor that kvctl had."""

    command: str
    seconds: float
    fastest: float
    processor: float
    rows: int
    unanswered: int


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """All commands, each ``rounds`` times: medians."""

    hosts: int
    silent: int
    rounds: int
    load: float
    commands: tuple[Answered, ...]


def ask(count: int, silent: int, rounds: int, only: Sequence[str] = ()) -> Asked:
    """Start the hosts and ask them. Raises `SystemExit` where an answer is not what it should be."""
    with contextlib.ExitStack() as stack:
        keys = stack.enter_context(folder())
        _write_keys(keys, count)
        deaf = range(count - silent // 2, count)
        kvds = stack.enter_context(fleet(deaf.start, lambda number, _: _settings(keys, number), NETWORK))
        for number in deaf:
            stack.enter_context(_deaf(number))
        stopped = kvds[: silent - len(deaf)]
        speaking = kvds[len(stopped) :]
        for engine in registered(speaking, 1):
            stack.callback(engine.close)
            _record(engine)
        for host in stopped:
            host.signal(signal.SIGSTOP)
        found = []
        for name in only or COMMANDS:
            found.append(_typed(name, keys, rounds, silent))
            sys.stderr.write(f"{found[-1]}\n")
        return Asked(
            hosts=count, silent=silent, rounds=rounds, load=os.getloadavg()[0], commands=tuple(found)
        )


def _write_keys(folder: Path, count: int) -> None:
    """A pair for each host and one for the operator; each host trusts the operator, who trusts all."""
    desk = folder / "desk"
    desk.mkdir(parents=True)
    write_pair(desk / "host.keys")
    operator = read_pair(desk / "host.keys").public
    lines = []
    for number in range(count):
        own = folder / str(number)
        own.mkdir()
        write_pair(own / "host.keys")
        write_trusted(own / "trusted.keys", [TrustedKey(operator, "127.0.0.1", 1)])
        lines.append(TrustedKey(read_pair(own / "host.keys").public, address(number, NETWORK), PORT))
    write_trusted(desk / "trusted.keys", lines)
    home = folder / "config" / "kvctl"
    home.mkdir(parents=True)
    places = json.dumps([str(Endpoint(line.host, line.port)) for line in lines])
    (home / "contexts.yaml").write_text(f"contexts: {{all: {{keys: {desk}, hosts: {places}}}}}\n")


def _settings(keys: Path, number: int) -> Mapping[str, str]:
    return {
        "KVD_PEER_CURVE_KEY_FILE": str(keys / str(number) / "host.keys"),
        "KVD_PEER_CURVE_AUTHORIZED_KEYS": str(keys / str(number) / "trusted.keys"),
        "KVD_ACCESS_HOSTS": "*",
    }


@contextlib.contextmanager
def _deaf(number: int) -> Iterator[None]:
    with socket.create_server((address(number, NETWORK), PORT), backlog=64):
        yield  # the kernel takes connections; nobody answers


def _record(engine: Engine) -> None:
    """Transfers in a host's ledger, from its neighbour."""
    now, host = time.time(), engine.host
    records = tuple(
        TransferRecord(
            transfer_id=f"t{host.number}-{one}",
            request_id=f"r{host.number}-{one}",
            local_engine=f"engine-{host.number:04}",
            local_rank="tp0",
            remote_engine=f"engine-{host.number ^ 1:04}",
            remote_generation="0123456789abcdef",
            remote_request_id=f"p{host.number}-{one}",
            backend="nixl",
            mode="pull",
            state="done",
            started=now - one,
            bytes=1 << 20,
            stages={"queued": 0.001, "post": 0.001, "wire": 0.02},
        )
        for one in range(RECORDS)
    )
    report = ReportTransfers(incarnation=engine.worker, records=records)
    answer = engine.sessions[0].call(report, SECONDS).result(SECONDS)
    if not isinstance(answer, Ok):
        raise SystemExit(f"host {host.number} recorded nothing: {answer}")


def _typed(name: str, keys: Path, rounds: int, silent: int) -> Answered:
    words = [sys.executable, "-m", "kvctl", *COMMANDS[name], "--fleet", "--context", "all"]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("KVD_", "KVCTL_"))}
    environment = plain | {"XDG_CONFIG_HOME": str(keys / "config"), "COLUMNS": "160"}
    seconds, processor = [], []
    rows = 0
    for _ in range(rounds):
        spent, began = resource.getrusage(resource.RUSAGE_CHILDREN), slow_clock.wall()
        out = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        seconds.append(slow_clock.wall() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime)
        if out.returncode != (UNANSWERED if silent else 0):
            raise SystemExit(f"kvctl {name} ended with {out.returncode}: {out.stderr[-2000:]}")
        rows = len(out.stdout.splitlines())
        told = out.stderr
    return Answered(
        command=name,
        seconds=sorted(seconds)[rounds // 2],
        fastest=min(seconds),
        processor=sorted(processor)[rounds // 2],
        rows=rows,
        unanswered=int(told.split(" of ")[0].rsplit(" ", 1)[-1]) if silent else 0,
    )
