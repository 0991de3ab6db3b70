"""Draws the Status document."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import age, span
from kvctl.views.status import Status
from kvctl.views.table import column_table, pairs_table, state


def status_screen(body: Status, wide: bool) -> RenderableType:
    """The daemon, its peers, its gauges and counters; counters that stand at zero only when wide."""
    parts: list[RenderableType] = [
        pairs_table(
            (
                ("kvd", f"{body.kvd_id} {body.version}, pid {body.pid} on {body.host}"),
                (
                    "state",
                    Text("draining", style="yellow") if body.draining else Text("serving", style="green"),
                ),
                ("up", age(body.started)),
                ("generation", body.generation),
                ("directory", body.runtime_dir),
                ("peer socket", body.endpoint or "none"),
            )
        )
    ]
    if body.peers:
        rows: list[list[str | Text]] = [
            [peer.endpoint or "-", peer.kvd_id or "-", state(peer.state), span(peer.rtt), age(peer.since)]
            for peer in body.peers
        ]
        parts += ["", column_table(["PEER", "KVD", "STATE", "RTT", "SINCE"], rows, right="RTT SINCE")]
    if body.gauges:
        gauges = [[name, f"{value:g}"] for name, value in sorted(body.gauges.items())]
        parts += ["", column_table(["GAUGE", "NOW"], gauges, right="NOW")]
    counters = [[name, str(count)] for name, count in sorted(body.counters.items()) if count or wide]
    if counters:
        parts += ["", column_table(["COUNTER", "TOTAL"], counters, right="TOTAL")]
    return Group(*parts)
