"""`kvctl serve` and `--to`: the other side of a benchmark or replay on another host, or what stands for one here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from kvctl.bench.process import introduction
from kvctl.bench.remote import PROTOCOL
from kvctl.engines.sources import planned
from kvd.geometry.codec import worker_to_plain
from tests.kvctl.views.test_formats import check
from tests.support.networks import Network, two_networks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.kvctl.conftest import Run

SMALL = ("-m", "llama-3.1-8b", "--local", "tp=8", "--remote", "tp=4", "--tokens", "64", "--rounds", "1")
TRACE = Path(__file__).parents[3] / "examples" / "traces" / "gdn-tp1-to-tp2.jsonl.gz"
KVCTL = (sys.executable, "-m", "kvctl")


@contextlib.contextmanager
def serving(*options: str, before: Sequence[str] = ()) -> Iterator[str]:
    """A `kvctl serve`; gives where it listens. It must end by itself, in order, when it is interrupted."""
    process = subprocess.Popen(
        [*before, *KVCTL, "serve", *options], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r" on (\S+:\d+);", said)
        assert found, said
        yield found.group(1)
        os.killpg(process.pid, signal.SIGTERM)  # `unshare` does not hand it on
        assert process.wait(60) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def kvctl(*arguments: str, before: Sequence[str] = ()) -> dict[str, Any]:
    done = subprocess.run(
        [*before, *KVCTL, *arguments, "-o", "json"], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    check(document)
    return document


@contextlib.contextmanager
def client(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{address}")
        yield socket


def told(socket: zmq.Socket[bytes], command: object) -> dict[str, Any]:
    socket.send(command if isinstance(command, bytes) else json.dumps(command).encode())
    assert socket.poll(60_000)
    answer: dict[str, Any] = json.loads(socket.recv())
    return answer


def begin(blocks: int, **other: Any) -> dict[str, Any]:
    worker = planned("llama-3.1-8b", f"tp=8,num_blocks={blocks}").workers[0]
    who = introduction("source", "direct", {}, {"0": worker_to_plain(worker)}, None)
    return {"do": "begin", "who": who | other.pop("who", {}), "environment": {}} | other


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("127.0.0.1:0", "--memory", "64MiB") as found:
        yield found


def test_a_benchmark_and_a_replay_move_every_byte_from_there(address: str) -> None:
    document = kvctl("benchmark", *SMALL, "--concurrency", "1", "--backend", "direct", "--to", address)
    assert document["to"] == address
    assert all(row["verified"] for row in document["measurements"])
    replayed = kvctl("replay", str(TRACE), "--backend", "direct", "--concurrency", "4", "--to", address)
    assert (replayed["to"], replayed["variants"][0]["transfers"]) == (address, 16)


def test_more_memory_than_is_given_is_refused_with_both_numbers(run: Run, address: str) -> None:
    options = ("--concurrency", "1", "--tokens", "8192", "--memory", "1GiB", "--backend", "direct")
    done = run("benchmark", *SMALL[:-4], *options, "--to", address)
    assert done.code == 1
    assert "of memory there, and kvctl serve gives 64.0 MiB" in done.err


def test_what_is_no_command_is_answered_and_serving_goes_on(address: str) -> None:
    with client(address) as socket:
        for junk in (b"", b"\xff\xff", [1], {"do": 7}, {"do": "begin"}, begin(4, who={"workers": 5})):
            assert "error" in told(socket, junk)
        assert told(socket, {"do": "fill"}) == {"error": "the source has ended"}
        assert told(socket, {"do": "hello", "protocol": PROTOCOL})["memory"] == 64 << 20


def test_another_version_of_the_commands_is_refused_with_both(address: str) -> None:
    with client(address) as socket:
        answer = told(socket, {"do": "hello", "protocol": PROTOCOL + 1})
    assert f"version {PROTOCOL} of these commands " in answer["error"]
    assert f"here {PROTOCOL + 1}" in answer["error"]


def test_variables_that_could_load_a_library_are_not_set_from_elsewhere(address: str) -> None:
    with client(address) as socket:
        answer = told(socket, begin(4, environment={"LD_PRELOAD": "/tmp/x.so", "UCX_TLS": "tcp"}))  # noqa: S108
    assert answer["error"].startswith("LD_PRELOAD may not be set from elsewhere")


def test_one_is_served_at_a_time(address: str) -> None:
    with client(address) as first, client(address) as second:
        assert "workers" in told(first, begin(4))
        assert (
            "another benchmark is under way" in told(second, {"do": "hello", "protocol": PROTOCOL})["error"]
        )
        assert told(first, {"do": "unheard of"})["error"]
        assert told(first, {"do": "end"}) == {"log": ""}
        assert "workers" in told(second, begin(4))
        told(second, {"do": "end"})


def test_where_the_network_reaches_it_takes_keys(run: Run) -> None:
    done = run("serve", "0.0.0.0:0")
    assert done.code == 5
    assert "there is no --key-file" in done.err


BAD: Sequence[tuple[tuple[str, ...], int, str]] = (
    (("serve", "192.0.2.1:5690", "--key-file", "/nonexistent"), 2, "cannot read the keys in /nonexistent"),
    (("serve", "127.0.0.1:x"), 2, "is no HOST[:PORT]"),
    (("benchmark", *SMALL, "--to", "127.0.0.1:70000"), 2, "is no HOST[:PORT]"),
    (("benchmark", *SMALL, "--device", "gpu"), 2, "write cpu, cuda or cuda:1"),
    (("benchmark", *SMALL, "--device", "cpu,cpu,cpu"), 2, "there are two sides"),
)


@pytest.mark.parametrize(("arguments", "code", "words"), BAD)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


def test_nobody_there_is_exit_code_4_and_says_what_to_run(run: Run) -> None:
    done = run("benchmark", *SMALL, "--backend", "direct", "--to", "127.0.0.1:9")
    assert done.code == 4
    assert "run `kvctl serve 127.0.0.1:9` on that host" in done.err


def test_who_has_other_keys_gets_no_answer(run: Run, tmp_path: Path) -> None:
    mine, theirs = new_keys(tmp_path / "mine"), new_keys(tmp_path / "theirs")
    with serving("127.0.0.1:0", "--key-file", theirs) as address:
        done = run("benchmark", *SMALL, "--backend", "direct", "--to", address, "--key-file", mine)
    assert done.code == 4
    assert "give the same --key-file there" in done.err


def new_keys(path: Path) -> str:
    subprocess.run(
        [sys.executable, "-m", "kvd.service", "--new-keys", str(path)], check=True, capture_output=True
    )
    return str(path)


@pytest.fixture
def two_hosts() -> Iterator[tuple[Network, Network]]:
    with two_networks() as made:
        yield made


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_bytes_go_over_the_wire_between_two_hosts_with_keys(
    two_hosts: tuple[Network, Network], tmp_path: Path, backend: str
) -> None:
    pytest.importorskip(backend)
    here, there = two_hosts
    keys = new_keys(tmp_path / "keys")
    with serving(f"{there.address}:0", "--key-file", keys, before=there.before) as address:
        options = ("--concurrency", "1", "--fragmentation", "runs-of-4", "--backend", backend)
        document = kvctl(
            "benchmark", *SMALL, *options, "--to", address, "--key-file", keys, before=here.before
        )
        assert [row["operation"] for row in document["measurements"]] == ["read", "write"]
        assert all(row["verified"] and "tcp" in row["transport"] for row in document["measurements"])
        assert not any("go over tcp" in warning["message"] for warning in document["warnings"])
