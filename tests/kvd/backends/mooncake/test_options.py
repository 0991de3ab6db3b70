"""What Mooncake is told of options, the host and its environment, and how memory is cut into pieces for it."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.backends.errors import (
    BackendError,
    BackendUnavailable,
)
from kvd.backends.mooncake.engine import knock
from kvd.backends.mooncake.host import advertised_host, check_host
from kvd.backends.mooncake.library import MooncakeLibrary, engine_environment, prepare_environment
from kvd.backends.mooncake.options import mooncake_options, protocol_for
from kvd.backends.mooncake.pieces import cut
from kvd.geometry.model import Region
from tests.kvd.backends.mooncake.test_backend import rows

pytest.importorskip("mooncake", exc_type=ImportError)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"colour": 1}, "unknown option colour for mooncake; known are protocol, device_name, host"),
        ({"protocol": "bogus"}, "protocol is 'bogus'; it is auto, tcp, rdma or nvlink"),
        ({"device_name": None}, "device_name is None; it is text"),
        ({"host": 5}, "host is 5; it is an address"),
        ({"connect_timeout_s": 0}, "connect_timeout_s is 0; it is a number above 0"),
        ({"in_flight": 1025}, "in_flight is 1025; it is a whole number from 1 to 1024"),
        ({"in_flight": True}, "in_flight is True"),
        ({"piece_bytes": 1.5}, "piece_bytes is 1.5; it is a whole number from 4096"),
        ({"progress_timeout_s": 0}, "progress_timeout_s is 0; it is none or a whole number from 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BackendError, match=says):
        mooncake_options(options)


def test_advertised_host() -> None:
    assert advertised_host({"VLLM_HOST_IP": "10.1.2.3"}) == "10.1.2.3"
    assert mooncake_options({"host": "h"}).host == "h"
    assert mooncake_options({}).host
    assert advertised_host({})
    assert ":" in advertised_host({"MC_USE_IPV6": "1"})
    for host in ("10.1.2.3", "prefill-7.example"):
        check_host(host, {})
    check_host("fd00::1", {"MC_USE_IPV6": "1"})
    for host, environ, says in (
        ("fd00::1", {}, "IP version 6, and MC_USE_IPV6 is not set"),
        ("10.1.2.3", {"MC_USE_IPV6": "1"}, "IP version 4, and MC_USE_IPV6 is set"),
        ("10.1.2.3:9", {}, "without a port"),
    ):
        with pytest.raises(BackendError, match=says):
            check_host(host, environ)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root")
@pytest.mark.parametrize(
    ("environ", "addresses", "found"),
    [
        ("{}", ("10.77.0.1/24",), "10.77.0.1"),
        ("{'MC_USE_IPV6': '1'}", ("10.77.0.1/24", "fd00:77::1/64"), "fd00:77::1"),
        ("{}", (), "127.0.0.1"),
    ],
)
def test_without_a_default_route_it_is_an_address_of_the_host_all_the_same(
    environ: str, addresses: tuple[str, ...], found: str
) -> None:
    """In a network of its own: a host that reaches some others and nobody beyond."""
    given = "".join(f"ip addr add {address} dev eth9; " for address in addresses)
    wire = "ip link add eth9 type veth peer name eth8; ip link set eth8 up; ip link set eth9 up"
    setup = f"ip link set lo up; {wire}; {given}"
    ask = f"from kvd.backends.mooncake.host import advertised_host; print(advertised_host({environ}))"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-ec", f'{setup} exec "$0" -c "$1"', sys.executable, ask],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == found, done.stderr


def test_a_peer_that_named_loopback_is_told_from_one_that_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert knock(f"127.0.0.1:{port}", "why") == f"127.0.0.1:{port} still takes connections: why"
    assert "or it is on another host and needs VLLM_HOST_IP" in knock(f"127.0.0.1:{port}", "why")


def test_environment_before_import() -> None:
    bare: dict[str, str] = {}
    prepare_environment(bare)
    assert bare == {"MC_LOG_LEVEL": "ERROR"}
    loud = {"MC_LOG_LEVEL": "INFO", "MC_LOG_DIR": "/tmp/logs"}  # noqa: S108
    prepare_environment(loud)
    assert loud == {"MC_LOG_LEVEL": "INFO"}
    with pytest.raises(BackendUnavailable, match="MC_USE_TENT=1"):
        prepare_environment({"MC_USE_TENT": "1"})


def test_environment_of_an_engine(tmp_path: Path) -> None:
    """The protocol is what was asked for, or an error: never another one in silence."""
    (tmp_path / "mlx5_0").touch()
    missing = tmp_path / "missing"
    for given in ({}, {"MC_FORCE_TCP": "yes"}):
        environ = dict(given)
        with engine_environment("tcp", 7, environ=environ, infiniband=tmp_path):
            assert environ["MC_FORCE_TCP"] == "1"
        timeouts = {"MC_TCP_STATUS_TIMEOUT_SEC": "7", "MC_TCP_PROGRESS_TIMEOUT_SEC": "7"}
        assert environ == given | timeouts
    environ = {"MC_INTRANODE_NVLINK": "1"}
    with engine_environment("tcp", None, environ=environ, infiniband=missing):
        assert environ == {"MC_FORCE_TCP": "1"}
    assert environ == {"MC_INTRANODE_NVLINK": "1"}
    environ = {}
    with engine_environment("nvlink", None, environ=environ, infiniband=missing):
        assert environ == {"MC_INTRANODE_NVLINK": "1"}
    assert environ == {}
    with engine_environment("rdma", None, environ={}, infiniband=tmp_path):
        pass
    for protocol, environ, devices, says in (
        ("rdma", {}, missing, "missing is empty"),
        ("rdma", {"MC_FORCE_TCP": "1"}, tmp_path, "MC_FORCE_TCP is set: Mooncake would use tcp"),
        ("rdma", {"MC_INTRANODE_NVLINK": "1"}, tmp_path, "Mooncake would use nvlink"),
        ("nvlink", {"MC_FORCE_TCP": "1"}, missing, "MC_FORCE_TCP is set: Mooncake would use tcp"),
    ):
        with (
            pytest.raises(BackendUnavailable, match=says),
            engine_environment(protocol, None, environ=environ, infiniband=devices),
        ):
            pass


def test_what_suits_the_memory(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").touch()
    missing = tmp_path / "missing"
    host, gpu = [Region(4096, 1)], [Region(4096, 1, "cuda:1")]
    built, plain = MooncakeLibrary(None, "", cuda=True, nvlink=True), MooncakeLibrary(None, "", cuda=True)
    for regions, library, environ, devices, protocol in (
        (host, built, {"MC_INTRANODE_NVLINK": "1"}, tmp_path, "tcp"),
        (gpu, built, {}, tmp_path, "rdma"),
        (gpu, built, {}, missing, "nvlink"),
        (gpu, plain, {}, missing, "tcp"),
        (gpu, built, {"MC_INTRANODE_NVLINK": "1"}, tmp_path, "nvlink"),
        (gpu, plain, {"MC_INTRANODE_NVLINK": "1"}, missing, "tcp"),
        (gpu, built, {"MC_FORCE_TCP": "1"}, tmp_path, "tcp"),
    ):
        assert protocol_for(regions, library, environ, devices) == protocol


def test_pieces_cover_the_same_bytes() -> None:
    whole = rows((0, 9000, 10), (100, 5000, 4096), (20000, 30000, 8193))
    assert cut(whole, 1 << 20) is whole
    pieces = cut(whole, 4096)
    assert list(zip(*(c.tolist() for c in (pieces.local, pieces.remote, pieces.length)), strict=True)) == [
        (0, 9000, 10),
        (100, 5000, 4096),
        (20000, 30000, 4096),
        (24096, 34096, 4096),
        (28192, 38192, 1),
    ]
