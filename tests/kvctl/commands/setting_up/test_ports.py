"""`kvctl ports`: real sockets and processes of this host, and a kvd that says who they are."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvctl.commands.setting_up import ports as command
from kvctl.processes.listening import _unix, ephemeral, listeners
from kvd.wire.identity import Endpoint
from kvd.wire.query import GetStatus, ListWorkers, WorkerList
from tests.kvctl.conftest import STATUS, WORKERS
from tests.support.ports import free_port

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

SERVER = """
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in sockets), flush=True)
sys.stdin.read()
"""


@contextmanager
def server(
    *words: str, count: int = 1, program: str = SERVER, by: tuple[str, ...] = (), **environment: str
) -> Iterator[tuple[int, list[int]]]:
    """A process that listens on some ports, with further words on its command line: its pid and the ports.

    ``by`` is a command that runs it; the pid is that command's then.
    """
    arguments = [*by, sys.executable, "-c", program, str(count), *words]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        yield process.pid, [int(port) for port in process.stdout.readline().split()]
        process.communicate()


@pytest.fixture
def asked(run: Run, daemon: FakeDaemon, tmp_path: Path) -> Any:
    """The answer as plain values, with settings of kvd in a file."""

    def ask(*arguments: str, kvd: str = "", code: int = 0) -> dict[str, Any]:
        settings = tmp_path / "kvd.yaml"
        settings.write_text(kvd)
        outcome = run(
            "ports", "-o", "json", "--socket", daemon.directory, "--kvd-config", settings, *arguments
        )
        assert outcome.code == code, outcome.err + outcome.out
        document: dict[str, Any] = json.loads(outcome.out)
        return document

    return ask


def test_sockets_of_kvd_and_of_workers_are_named(asked: Any, daemon: FakeDaemon) -> None:
    me = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as peers, server() as (pid, [port]):
        at = peers.getsockname()[1]
        status = msgspec.structs.replace(STATUS, pid=me, endpoint=Endpoint("127.0.0.1", at))
        daemon.answers[GetStatus] = lambda _: status
        worker = msgspec.structs.replace(WORKERS[0], pid=pid)
        daemon.answers[ListWorkers] = lambda _: WorkerList(rows=(worker,))
        sockets = asked()["sockets"]
    by_port = {one["port"]: one for one in sockets}
    assert (by_port[at]["what"], by_port[at]["pids"]) == ("kvd, for other kvds", [me])
    assert by_port[port]["what"].startswith("decode-0 tp1")
    by_path = {one["path"]: one["what"] for one in sockets if one["path"]}
    assert by_path[str(daemon.directory / "kvd.sock")] == "kvd, for workers and kvctl"
    assert by_path[str(daemon.directory / "events.sock")] == "kvd, events"


def test_a_port_of_kvds_settings_that_another_program_has_is_a_failure(asked: Any) -> None:
    with server() as (pid, [port]):
        document = asked(kvd=f"peer: {{listen: '0.0.0.0:{port}'}}", code=1)
        [finding] = [one for one in document["findings"] if one["code"] == "PORT_TAKEN"]
        assert finding["port"] == port
        assert f"(pid {pid})" in finding["found"]
        assert "peer.listen in " in finding["found"]
        assert port in {one["port"] for one in document["sockets"]}
        elsewhere = asked(kvd=f"peer: {{listen: '192.0.2.77:{port}'}}")
    assert "PORT_TAKEN" not in {one["code"] for one in elsewhere["findings"]}


def test_two_stock_engines_with_one_side_channel_are_seen_before_the_second_fails(asked: Any) -> None:
    config = '--kv-transfer-config={"kv_connector":"NixlConnector"}'
    with (
        server("vllm", "serve", "/m/one", "--port", "18101", config) as (one, _),
        server("vllm", "serve", "/m/two", "--port", "18102", config) as (two, _),
    ):
        document = asked(code=1)
    [finding] = [one for one in document["findings"] if one["code"] == "PORT_TWICE"]
    assert finding["port"] == 5600
    assert f"vLLM of /m/one, pid {one}," in finding["found"]
    assert f"vLLM of /m/two, pid {two}," in finding["found"]


def test_engines_on_ports_of_their_own_collide_with_nobody(asked: Any) -> None:
    config = '--kv-transfer-config={"kv_connector":"NixlConnector"}'
    with (
        server("vllm", "serve", "/m/one", "--port", "18101", config, VLLM_NIXL_SIDE_CHANNEL_PORT="15601"),
        server("vllm", "serve", "/m/two", "--port", "18102", config, VLLM_NIXL_SIDE_CHANNEL_PORT="15602"),
    ):
        document = asked()
    assert [one for one in document["findings"] if one["state"] == "failed"] == []


def test_what_a_vllm_server_listens_on_is_named_by_what_it_was_told(asked: Any) -> None:
    port = free_port()
    listening = SERVER.replace("0)) for", f"{port})) for")
    arguments = [sys.executable, "-c", listening, "1", "vllm", "serve", "/m/x", f"--port={port}"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        document = asked()
        process.communicate()
    [row] = [one for one in document["sockets"] if one["port"] == port]
    assert (row["what"], row["pids"]) == ("vLLM of /m/x, HTTP", [process.pid])


def test_a_port_that_outgoing_connections_are_given_is_a_warning(asked: Any) -> None:
    span = ephemeral()
    assert span is not None
    document = asked(kvd=f"metrics: {{listen: '127.0.0.1:{span[1]}'}}")
    [finding] = [one for one in document["findings"] if one["port"] == span[1]]
    assert (finding["code"], finding["state"]) == ("PORT_EPHEMERAL", "warning")


def test_two_programs_behind_one_port_are_pointed_out(asked: Any) -> None:
    sharing = SERVER.replace(", 0)) for", ", int(sys.argv[2])), reuse_port=True) for")
    with server("0", program=sharing) as (one, [port]):
        # Of a shell of its own: two children of one process may be one server.
        with server(str(port), program=sharing, by=("sh", "-c", '"$@"; exit', "sh")) as (shell, _):
            document = asked(kvd=f"metrics: {{listen: '127.0.0.1:{port}'}}", code=1)
            [row] = [row for row in document["sockets"] if row["port"] == port and row["pids"] != [one]]
            [other] = row["pids"]
        alone = asked(kvd=f"metrics: {{listen: '127.0.0.1:{port}'}}", code=1)
    [finding] = [found for found in document["findings"] if found["code"] == "PORT_SHARED"]
    assert (finding["port"], finding["state"]) == (port, "warning")
    assert all(f"pid {pid} at 127.0.0.1:{port}" in finding["found"] for pid in (one, other))
    assert other != shell
    assert "PORT_SHARED" not in {found["code"] for found in alone["findings"]}


def test_processes_of_one_server_share_their_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        [mine] = [found for found in listeners() if os.getpid() in found.pids and found.port == port]
    want = command.Want("kvd", 0, "127.0.0.1", port, "peer.listen")
    child = dataclasses.replace(mine, pids=(os.getpid(), 1))
    assert list(command._shared([mine, child], [want])) == []


def test_without_a_kvd_the_rest_is_shown_and_said(run: Run, tmp_path: Path) -> None:
    with server() as (_, [port]):
        outcome = run("ports", "--all", "--runtime-dir", tmp_path / "none")
    assert f"127.0.0.1:{port}" in outcome.out
    assert "no kvd says which sockets are whose" in outcome.err
    missing = run("ports", "--kvd-config", tmp_path / "no.yaml", "--runtime-dir", tmp_path / "none")
    assert (missing.code, "no such file" in missing.err) == (2, True)


def test_addresses_of_both_families_are_read_as_they_were_bound() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        found = {(one.host, one.port) for one in listeners() if os.getpid() in one.pids}
        assert {four.getsockname()[:2], six.getsockname()[:2]} <= found


def test_whoever_names_a_socket_breaks_nobodys_answer(tmp_path: Path) -> None:
    """The kernel writes the names of sockets as they are: with newlines, blanks and words where numbers stand."""
    table = tmp_path / "unix"
    table.write_text(
        "Num RefCount Protocol Flags Type St Inode Path\n"
        "0: 2 0 10000 1 1 77 /run/my kvd/kvd.sock\n"
        "0: 2 0 10000 1 1 78 @\na\nb c d zz e f g h\n"
    )
    assert list(_unix(table)) == [("/run/my kvd/kvd.sock", 77), ("@", 78)]


def test_sockets_that_a_process_opens_by_the_dozen_are_one_row_unless_all_are_asked_for(
    run: Run, tmp_path: Path
) -> None:
    with server("vllm", "serve", "/m/x", count=12) as (pid, ports):
        shown, wide = (run("ports", *words, "--runtime-dir", tmp_path).out for words in ((), ("-o", "wide")))
    rows, all_rows = (
        [line for line in out.splitlines() if str(pid) in line.split()] for out in (shown, wide)
    )
    assert len(rows) == 1
    assert rows[0].startswith(f"127.0.0.1:{min(ports)}, 11 more")
    assert len(all_rows) == 12
