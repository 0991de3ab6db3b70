"""The Status document: what `kvctl status` prints."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import age, span
from kvctl.cli.units import Count, Seconds, Time, filled
from kvctl.views.engines import endpoint_name
from kvctl.views.registry import View, moment
from kvctl.views.screen import Cell, Column, ScreenPart, Styled, TextTable, facts, number, state, table
from kvd.errors import joined
from kvd.wire import query


class Peer(Struct, frozen=True, kw_only=True):
    """Another kvd as the asked one sees it."""

    endpoint: Annotated[str | None, Meta(description="host:port")]
    kvd_id: str
    state: Annotated[
        str,
        Meta(description="connecting, up, down, or untrusted: it is to be linked, without a trusted key"),
    ]
    rtt: Annotated[Seconds, Meta(description="round trip of the last ping, in seconds")]
    since: Annotated[Time, Meta(description="last change of state")]
    reason: Annotated[str, Meta(description="why it is not up; empty where it is, or nothing is known")]
    hint: Annotated[str, Meta(description="what to do about that")]


class Refusal(Struct, frozen=True, kw_only=True):
    """A key that was not let in."""

    key: Annotated[str, Meta(description="empty: another key of this kvd is expected than it has")]
    address: Annotated[str, Meta(description="where it came from; of IPv6 the network")]
    times: Count
    last: Annotated[Time, Meta(description="the last attempt")]
    was: Annotated[str, Meta(description="the place that it was trusted for until it was revoked")]


class KeysInForce(Struct, frozen=True, kw_only=True):
    """How this kvd tells other hosts apart."""

    identity: Annotated[
        Literal["none", "shared", "per host"],
        Meta(description="by no key; by none from those that hold the same pair; by a key for each"),
    ]
    public: Annotated[str, Meta(description="its own public key; empty without keys")]
    trusted: Annotated[Count, Meta(description="keys that are let in")]
    key_file: str
    list_file: Annotated[
        str, Meta(description="where the trusted keys stand; empty where the pair is shared")
    ]
    error: Annotated[str, Meta(description="why that file cannot be read now; empty while it can")]


class MembershipNow(Struct, frozen=True, kw_only=True):
    """From where this kvd learns which others there are."""

    source: Annotated[str, Meta(description="static (peer.connect alone), dns, etcd")]
    state: Annotated[str, Meta(description="waiting for its first answer, known, or away")]
    age: Annotated[Seconds, Meta(description="how long it has been in that state, in seconds")]
    reason: Annotated[str, Meta(description="why it is away; empty while it is not")]
    members: Annotated[Count, Meta(description="other kvds that this one links to, used or not")]
    vanished: Annotated[
        Count, Meta(description="of them those that the source names no more; their links work")
    ]
    other_key: Annotated[
        Count, Meta(description="not linked, since the source tells another key than is expected")
    ]


class Status(Struct, frozen=True, kw_only=True):
    """One kvd at one moment."""

    kvd_id: str
    generation: Annotated[str, Meta(description="new at each start of kvd")]
    version: str
    pid: int
    host: str
    started: Time
    runtime_dir: str
    endpoint: Annotated[str | None, Meta(description="host:port of its peer socket; null when it has none")]
    draining: bool
    ledger_away: Annotated[str, Meta(description="why its ledger cannot be written now; empty while it can")]
    comparing: Annotated[
        str, Meta(description="why no engine can be introduced to another one; empty while they can")
    ]
    keys: Annotated[KeysInForce | None, Meta(description="null when it has no peer socket")]
    membership: Annotated[MembershipNow | None, Meta(description="null of an earlier version of kvd")]
    peers: tuple[Peer, ...]
    refused: Annotated[
        tuple[Refusal, ...], Meta(description="keys that were not let in of late, the last 16")
    ]
    counters: Annotated[dict[str, Count], Meta(description="they only grow while this kvd lives")]
    gauges: Annotated[dict[str, float], Meta(description="values of now")]


def status_document(status: query.KvdStatus) -> Status:
    """The document of kvd's answer."""
    return filled(
        Status,
        status,
        started=moment(status.started),
        endpoint=endpoint_name(status.endpoint),
        keys=filled(KeysInForce, status.keys) if status.keys is not None else None,
        membership=filled(MembershipNow, status.membership) if status.membership is not None else None,
        peers=tuple(
            filled(
                Peer,
                peer,
                endpoint=endpoint_name(peer.endpoint),
                rtt=max(0.0, peer.rtt),
                since=moment(peer.since),
            )
            for peer in status.peers
        ),
        refused=tuple(filled(Refusal, one, last=moment(time.time() - one.age)) for one in status.refused),
    )


def status_screen(body: Status, wide: bool) -> ScreenPart:
    """The daemon, its peers, its gauges and counters; counters that stand at zero only when wide."""
    parts: list[ScreenPart] = [
        facts(
            ("kvd", f"{body.kvd_id} {body.version}, pid {body.pid} on {body.host}"),
            ("state", Styled("draining", "yellow") if body.draining else Styled("serving", "green")),
            ("up", age(body.started)),
            *([("ledger", Styled(f"away: {body.ledger_away}", "yellow"))] if body.ledger_away else []),
            *([("engines", Styled(f"not introduced: {body.comparing}", "red"))] if body.comparing else []),
            ("generation", body.generation),
            ("directory", body.runtime_dir),
            ("peer socket", body.endpoint or "none"),
            *([("keys", _keys(body.keys))] if body.keys is not None else []),
            *_members(body.membership),
        )
    ]
    if body.peers:
        parts += [
            "",
            table(
                body.peers,
                Column("PEER", lambda peer: peer.endpoint or "-"),
                Column("KVD", lambda peer: peer.kvd_id or "-"),
                Column("STATE", lambda peer: state(peer.state)),
                number("RTT", lambda peer: span(peer.rtt) if peer.state == "up" else "-"),
                number("SINCE", lambda peer: age(peer.since)),
            ),
        ]
        parts += [
            Styled(
                f"{peer.endpoint} is {peer.state}: {joined(peer.reason, peer.hint)}",
                "yellow",
            )
            for peer in body.peers
            if peer.reason
        ]
    if body.refused:
        parts += [
            "",
            table(
                body.refused,
                Column("NOT LET IN", lambda one: one.address),
                Column("KEY", lambda one: one.key or "expects another key of this host"),
                number("TIMES", lambda one: str(one.times)),
                number("LAST", lambda one: age(one.last)),
                Column("REVOKED", lambda one: one.was or "-"),
            ),
        ]
    gauges = [(name, f"{value:g}") for name, value in sorted(body.gauges.items())]
    counters = [(name, str(count)) for name, count in sorted(body.counters.items()) if count or wide]
    for rows, headers in ((gauges, ("GAUGE", "NOW")), (counters, ("COUNTER", "TOTAL"))):
        if rows:
            parts += ["", TextTable(headers, rows, headers[1:])]
    return parts


def _keys(keys: KeysInForce) -> Cell:
    if keys.error:
        return Styled(f"{keys.trusted} trusted; the list is not read: {keys.error}", "yellow")
    if keys.identity == "per host":
        return f"one for each host, {keys.trusted} trusted"
    if keys.identity == "shared":
        return Styled("one pair for all hosts: they cannot be told apart", "yellow")
    return "none: peers cannot be told apart"


def _members(now: MembershipNow | None) -> list[tuple[str, Cell]]:
    """Nothing where there is no source: the table of peers says it all."""
    if now is None or now.source == "static":
        return []
    count = f"{now.members} by {now.source}"
    notes = [
        f"{now.source} names {now.vanished} of them no more" * bool(now.vanished),
        f"{now.other_key} not linked: another key is expected here" * bool(now.other_key),
    ]
    if now.state == "away":
        count += f", which is away since {span(now.age)}: {now.reason}"
    elif now.state == "waiting":
        count += ", which has not answered yet"
    told = "; ".join([count, *filter(None, notes)])
    well = now.state == "known" and not any(notes)
    return [("members", told if well else Styled(told, "yellow"))]


VIEWS = (View(Status, status_screen),)
