"""Which transport UCX really used: it writes what it chose for each connection and operation into its log."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

# "lane.0f3a1b2c intra-node cfg#1" heads both the line of a connection and the table of an operation on it.
_CONNECTION = re.compile(r"(\S+) (?:intra|inter)-node cfg#(\d+)(.*)")
_LANES = re.compile(r"\b(rma|rma_am|am)\(([^)]*)\)")
_LAST_ROW = re.compile(r"\|\s*\S*\.\.inf \| ([^|]*) \| ([^|]*?)\s*\|")
_TITLES = {"read": "remote memory read by ucp_get*", "write": "remote memory write by ucp_put*"}


def ucx_environment(log: Path) -> dict[str, str]:
    """Variables that make UCX write its choices to ``log``; an operator's own ones stay."""
    wanted = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(log)}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def ucx_transport(log: str, agents: str, operation: str) -> str:
    """What long copies of that operation used on the connections of agents whose name matches a regular expression.

    UCX writes through a buffer: the whole is there once its process has ended.

    The configuration of UCX's table for the operation where it printed one, as ``cma/memory``; else all transports of
    the connection; empty where the log says neither.
    """
    tables: dict[str, str] = {}
    lanes: dict[str, str] = {}
    current = title = ""
    for line in log.splitlines():
        if found := _CONNECTION.search(line):
            agent, number, rest = found.groups()
            current, title = f"{agent}#{number}", ""
            if not re.match(agents, agent):
                current = ""
            elif parts := dict(_LANES.findall(rest)):
                lanes[current] = parts.get("rma") or parts.get("am") or parts.get("rma_am", "")
        elif " self cfg#" in line:
            current = title = ""
        elif current and "| remote memory" in line:
            title = line
        elif current and _TITLES[operation] in title and (row := _LAST_ROW.search(line)):
            tables[current] = row.group(2).strip()
    return ", ".join(sorted(set((tables or lanes).values())))


def has_rdma(infiniband: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether this host has an RDMA device."""
    return infiniband.is_dir() and any(infiniband.iterdir())


def is_slow(transport: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether bytes went over plain TCP although nobody asked for nothing else."""
    asked = set(environment.get("UCX_TLS", "all").split(","))
    return "tcp/" in transport and "cma" not in transport and not asked <= {"tcp", "self"}
