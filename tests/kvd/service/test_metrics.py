"""HTTP for machines, and who may ask for it how."""

from __future__ import annotations

import errno
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvd.service.metrics import render
from kvd.wire.identity import Endpoint
from kvd.wire.outcomes import OutcomeCount, OutcomeRow
from kvd.wire.query import KvdStatus, PeerRow
from tests.support.daemons import ROOT, daemons, facts, session, wait_for, worker
from tests.support.ports import free_port


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def raw(port: int, request: bytes) -> bytes:
    """What is answered to these bytes: nothing where the connection is closed, at whatever moment."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            return client.recv(4096)
        except OSError as error:
            if error.errno not in {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}:
                raise
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


NONE_COMPARES = """
import os, sys
if "kvd.service.peers.comparer.process" in sys.orig_argv:
    os._exit(1)
"""


def test_a_kvd_that_can_start_nothing_to_compare_engines_is_not_ready_until_it_can(tmp_path: Path) -> None:
    port, forbids = free_port(), tmp_path / "sitecustomize.py"
    forbids.write_text(NONE_COMPARES)
    with daemons() as (kvd,):
        kvd.kill()
        python = os.pathsep.join(str(place) for place in (tmp_path, ROOT / "daemon", ROOT))
        kvd.environment = {"KVD_METRICS_LISTEN": f"127.0.0.1:{port}", "PYTHONPATH": python}
        kvd.start()
        wait_for(lambda: get(port, "/readyz")[0] == 503)
        assert get(port, "/readyz")[1].startswith("no process to compare engines can be started: ")
        assert get(port, "/healthz")[0] == 200, "it serves what it can"
        assert kvd.status().gauges["handshakes.prepared"] == 0
        forbids.unlink()
        wait_for(lambda: get(port, "/readyz") == (200, "ready\n"))
        assert kvd.status().gauges["handshakes.prepared"] == 1


STRANGE = ('a"b', "a\\b", "a\nb", "a\r\x1b\u2028b", "kvd.x-y", "", "\x00")


def test_the_page_can_be_read_whatever_names_others_choose() -> None:
    names = [f"{family}.{name}" for family in ("refused", "misses", "checksums", "x") for name in STRANGE]
    status = KvdStatus(
        kvd_id='k"\n', generation="g", version="1", pid=1, host="h", started=0.0, runtime_dir="/", endpoint=Endpoint(),
        counters=dict.fromkeys([*names, "refused.KVD-A-B", "refused.KVD-A_B"], 1), gauges={},
        peers=tuple(
            PeerRow(endpoint=Endpoint(name, 1), kvd_id="k", state="up", rtt=0.1, since=0.0) for name in STRANGE
        ),
    )  # fmt: skip
    served = [
        OutcomeRow(
            engine_id=name, role="both", model="m", seconds=1.0, totals=(OutcomeCount("plain", name, 1, 2),),
            leases_total=1,
        )
        for name in STRANGE
    ]  # fmt: skip
    text = render(status, served)
    families = list(text_string_to_metric_families(text))
    samples = [(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples]
    assert len(samples) == len(set(samples)), "a series stands there twice"
    assert len(families) == len({family.name for family in families}) == text.count("# TYPE ")
    assert {s.value for f in families for s in f.samples if s.name == "kvd_refused_kvd_a_b_total"} == {2.0}
    assert all(ord(character) >= 32 for line in text.split("\n") for character in line)
