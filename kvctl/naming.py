"""Names of engines, hosts, leases and peers for the completion scripts, which ask on a press of Tab."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from kvctl.cli.live_names import offered, within_seconds
from kvctl.cli.settings import Settings, resolve


def answer(kinds: list[str]) -> int:
    """Write the names of these kinds. Whatever goes wrong, nothing is written: who presses Tab asked for no message."""
    try:
        within_seconds()
        settings = resolve((), os.environ)
        text = "".join(offered(KINDS[kind](settings)) for kind in kinds)
    except Exception:  # noqa: BLE001 (somebody is typing: no fault of ours may come in between)
        return 0
    sys.stdout.write(text)
    return 0


def _engines(settings: Settings) -> list[str]:
    from kvctl import daemon

    return [row.engine.engine_id for row in daemon.engines(settings)]


def _leases(settings: Settings) -> list[str]:
    from kvctl import daemon
    from kvd.wire.query import LeaseList, ListLeases

    pages = daemon.pages(settings, ListLeases(every=True), LeaseList)
    return [f"{row.engine_id}/{row.request_id}" for page in pages for row in page.rows]


def _agents(settings: Settings) -> list[str]:
    """What workers hold, as ENGINE@GENERATION."""
    from kvctl import daemon
    from kvd.wire.agent import AgentList, ListAgents

    held = (row.held for row in daemon.ask(settings, ListAgents(), AgentList).rows)
    return [f"{one.engine_id}@{one.generation}" for one in held if one is not None]


def _hosts(settings: Settings) -> list[str]:
    """The hosts of the context in use, else those of this host's kvd: its peers, where its keys cannot be read."""
    from kvctl import daemon
    from kvctl.errors import KvctlError
    from kvd.addresses import join_address
    from kvd.wire.query import GetStatus, KvdStatus

    try:
        return [join_address(*place) for place in daemon.known_hosts(settings).places]
    except KvctlError:
        status = daemon.ask(settings, GetStatus(), KvdStatus)
        return [join_address(peer.endpoint.host, peer.endpoint.port) for peer in status.peers]


KINDS: dict[str, Callable[[Settings], list[str]]] = {
    "agents": _agents,
    "engines": _engines,
    "hosts": _hosts,
    "leases": _leases,
}
"""What may be asked for."""
