"""HTTP for machines, and who may ask for it how."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

from tests.support.daemons import daemons, facts, session, worker


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        try:
            return client.recv(4096)
        except ConnectionResetError:
            return b""


def test_pages_and_garbage() -> None:
    port = free_port()
    with daemons() as (kvd,):
        kvd.kill()
        kvd.environment = {"KVD_METRICS_LISTEN": f"127.0.0.1:{port}"}
        kvd.start()
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/readyz") == (200, "ready\n")
        assert get(port, "/else")[0] == 404
        with session(kvd, worker(facts("e"))):
            code, text = get(port, "/metrics")
        assert code == 200
        lines = text.splitlines()
        assert "kvd_engines_ready 1" in lines
        assert "kvd_received_register_worker_total 1" in lines
        for line in lines:
            assert line.startswith("# TYPE kvd_") or len(line.rsplit(" ", 1)) == 2
        assert raw(port, b"\x00\xff" * 100_000) == b""
        assert raw(port, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert raw(port, b"POST / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405")
        assert get(port, "/healthz")[0] == 200
        assert "Traceback" not in kvd.log
