"""Reading out of UCX's log what moved the bytes."""

from __future__ import annotations

import pytest

from kvctl.bench.transport import is_slow, ucx_transport

LOG = """\
[1.5] [host:1:0]  ucp_worker.c:1 UCX  INFO    home-0.aa self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.5] [host:1:0]   | home-0.aa self cfg#0                                      |
[1.5] [host:1:0]   | remote memory read by ucp_get* into host memory from host |
[1.5] [host:1:0]   | 0..inf | zero-copy   | self/memory                        |
[1.5] [host:1:0]  ucp_worker.c:1 UCX  INFO    reader-0.read.bb intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.5] [host:1:0]   | reader-0.read.bb intra-node cfg#1                                |
[1.5] [host:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.5] [host:1:0]   | 0..8184 | short              | tcp/lo                           |
[1.5] [host:1:0]   | 8185..inf | zero-copy        | cma/memory                       |
[1.5] [host:1:0]  ucp_worker.c:1 UCX  INFO    reader-0.other.cc inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)  am(tcp/eth0)
"""


def test_the_table_of_the_operation_is_what_counts() -> None:
    assert ucx_transport(LOG, r"reader-\d+\.read\.", "read") == "cma/memory"


def test_without_a_table_it_is_the_connection() -> None:
    assert ucx_transport(LOG, r"reader-\d+\.read\.", "write") == "tcp/lo cma/memory"
    assert ucx_transport(LOG, r"reader-\d+\.other\.", "write") == "rc_mlx5/mlx5_0:1"


def test_an_agent_that_never_connected_has_none() -> None:
    assert ucx_transport(LOG, "nobody", "read") == ""
    assert ucx_transport("", "reader", "read") == ""


@pytest.mark.parametrize(
    ("transport", "asked", "slow"),
    [
        ("tcp/lo", {}, True),
        ("52% on tcp/lo and 48% on tcp/eth0", {"UCX_TLS": "all"}, True),
        ("tcp/lo", {"UCX_TLS": "tcp"}, False),
        ("tcp/lo cma/memory", {}, False),
        ("rc_mlx5/mlx5_0:1", {}, False),
        ("", {}, False),
    ],
)
def test_tcp_is_slow_unless_it_was_asked_for(transport: str, asked: dict[str, str], slow: bool) -> None:
    assert is_slow(transport, asked) is slow
