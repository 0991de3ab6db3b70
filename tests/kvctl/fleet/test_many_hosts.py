"""As many hosts as a test bears: a few real kvds under hundreds of addresses, with keys, and silent ones among them."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvctl.fleet import asking
from kvctl.fleet.known import KnownHosts
from kvd.addresses import HostPort
from kvd.keys import TrustedKey, read_pair, write_pair, write_trusted
from tests.kvctl.conftest import Run
from tests.support.daemons import Daemon, facts, session, worker
from tests.support.ports import free_port

HOSTS, KVDS, STOPPED, DEAF = 256, 4, 5, 5
SECONDS = 10
"""For hosts to answer in a test: a machine that runs other tests may give kvctl a tenth of a processor."""
PROCESSOR_SECONDS = 2.0
"""What kvctl may take of one for all of it, its start included."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the context ``all``: 256 hosts, of which five are stopped and five take connections in silence."""
    folder = tmp_path_factory.mktemp("many")
    desk = folder / "desk"
    desk.mkdir()
    write_pair(desk / "host.keys")
    operator = read_pair(desk / "host.keys").public
    with contextlib.ExitStack() as stack:
        lines: list[TrustedKey] = []
        first_port = free_port("0.0.0.0", KVDS + 2)  # noqa: S104 - as kvds listen here
        for number in range(KVDS + 1):
            stopped = number == KVDS
            daemon = stack.enter_context(_kvd(folder / f"d{number}", first_port + number, operator))
            card = worker(facts(f"engine-{number}", role="decode"))
            stack.enter_context(session(daemon, card))
            key = read_pair(folder / f"d{number}" / "host.keys").public
            count = STOPPED if stopped else (HOSTS - STOPPED - DEAF + KVDS - 1) // KVDS
            lines += [
                TrustedKey(key, f"127.66.{number}.{at + 1}", first_port + number) for at in range(count)
            ]
            if stopped:
                daemon.signal(signal.SIGSTOP)
                stack.callback(daemon.signal, signal.SIGCONT)
        lines = [*lines[: HOSTS - STOPPED - DEAF], *lines[-STOPPED:]]
        for at in range(DEAF):
            place = (f"127.66.99.{at + 1}", first_port + KVDS + 1)
            stack.enter_context(socket.create_server(place, backlog=64))
            lines.append(TrustedKey(lines[0].key, *place))
        write_trusted(desk / "trusted.keys", lines)
        config = folder / "config" / "kvctl"
        config.mkdir(parents=True)
        hosts = [line.place for line in lines]
        (config / "contexts.yaml").write_text(
            f"contexts: {{all: {{keys: {desk}, hosts: {json.dumps(hosts)}}}}}\n"
        )
        yield folder / "config"


@contextlib.contextmanager
def _kvd(folder: Path, port: int, operator: bytes) -> Iterator[Daemon]:
    folder.mkdir()
    write_pair(folder / "host.keys")
    write_trusted(folder / "trusted.keys", [TrustedKey(operator, "127.0.0.1", 1)])
    environment = {
        "KVD_PEER_CURVE_KEY_FILE": str(folder / "host.keys"),
        "KVD_PEER_CURVE_AUTHORIZED_KEYS": str(folder / "trusted.keys"),
        "KVD_PEER_ADVERTISE": f"127.0.0.1:{port}",
        "KVD_ACCESS_HOSTS": "*",
    }
    daemon = Daemon(folder / "d", (), environment, port=port, host="0.0.0.0")  # noqa: S104 - all of loopback; it has keys
    try:
        yield daemon.start()
    finally:
        daemon.kill()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("engines",), ("transfers",), ("status",), ("leases",), ("slow",)])
def test_hundreds_of_hosts_are_asked_for_little_and_the_silent_ones_are_named(
    process: Run, fleet: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(fleet))
    spent, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    answer = process(*words, "--fleet", "--context", "all", "-o", "json", "--timeout", f"{SECONDS}s")
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.code == 4, answer.err
    body = json.loads(answer.out)
    assert body["hosts"] == HOSTS
    silent = [one["host"] for one in body["unanswered"]]
    assert len(silent) == STOPPED + DEAF, answer.err
    assert seconds < SECONDS + 5.0
    processor = after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime
    assert processor < PROCESSOR_SECONDS


def test_hosts_have_what_kvctls_start_left_of_a_second_and_a_half() -> None:
    assert asking.seconds_for_hosts(0.0) == asking.FLEET_SECONDS
    assert asking.seconds_for_hosts(0.3) == pytest.approx(1.2)
    assert asking.seconds_for_hosts(30.0) == asking.LEAST_SECONDS  # as --watch asks again


def test_a_process_knows_how_long_it_has_been_running() -> None:
    first = asking.running_seconds()
    began = time.monotonic()
    assert first > 0
    assert asking.running_seconds() - first == pytest.approx(time.monotonic() - began, abs=0.5)


def test_the_key_of_one_host_of_thousands_is_found_without_looking_at_all_others(tmp_path: Path) -> None:
    write_pair(tmp_path / "pair")
    pair = read_pair(tmp_path / "pair")
    places: list[HostPort] = [(f"10.0.{at // 250}.{at % 250}", 7766) for at in range(8192)]
    trusted = tuple(TrustedKey(b"%040d" % at, *place) for at, place in enumerate(places))
    known = KnownHosts(tuple(places), pair, trusted, "context 'all'")
    began = time.process_time()
    assert [known.at(place).server for place in places] == [line.key for line in trusted]
    assert time.process_time() - began < 1.0  # 8,192 times 8,192 are ten seconds
