"""`kvctl ports`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import KvctlError, UsageError
from kvctl.processes.listening import OpenSocket, ancestry, command, ephemeral, listeners, overlap, programs
from kvctl.views.output import show
from kvctl.views.setting_up.ports import ListeningSocket, PortFinding, Ports
from kvd.addresses import join_address, split_address
from kvd.wire import query
from kvd.wire.names import EVENTS_NAME, SOCKET_NAME

SECTION = "Set up"
EXAMPLES = (
    "kvctl ports",
    "kvctl ports --all --kvd-config ./kvd.yaml",
)
KVD_SETTINGS = Path("/etc/kvd/kvd.yaml")
VLLM_PORT = 8000
"""Where `vllm serve` listens if nothing is said."""
SIDE_CHANNELS = (
    ("NixlConnector", "VLLM_NIXL_SIDE_CHANNEL_PORT", 5600),
    ("MooncakeConnector", "VLLM_MOONCAKE_BOOTSTRAP_PORT", 8998),
)
"""Stock connectors, the variable that says where a rank 0 listens, and where without it."""


@dataclass(frozen=True, slots=True)
class Want:
    """A port that somebody is set to listen on. ``pid`` 0: a process that is not known, perhaps not started yet."""

    who: str
    pid: int
    host: str
    port: int
    setting: str


def ports(
    settings: Settings,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Sockets of other programs, too.")] = False,
    kvd_settings: Annotated[
        Path | None,
        typer.Option(
            "--kvd-config", metavar="FILE", help=f"kvd's settings. [{KVD_SETTINGS} where it exists]"
        ),
    ] = None,
) -> None:
    """Who listens where on this host, and what collides.

    Shows the sockets of kvd, of engines that it knows and of other vLLM processes, with --all those of every program.
    What kvd.yaml and the command lines of vLLM ask for is held against them, so that a port that is taken is seen
    before somebody fails for it. Exit code 1 where two want one port. Other users' processes are seen by root alone.
    """
    status, workers = _known(settings)
    open_sockets = listeners()
    wants = [*_of_kvd(kvd_settings, status), *_of_vllm()]
    findings = [*_taken(wants, open_sockets), *_twice(wants), *_shared(open_sockets, wants), *_early(wants)]
    named = {want.pid: want.who for want in wants if want.pid}
    rows = [_row(one, status, workers, named, wants) for one in open_sockets]
    colliding = {one.port for one in findings}
    shown = [
        row
        for row in rows
        if (everything and (row.port or row.what)) or row.what or row.port in colliding - {0}
    ]
    unseen = sum(not row.pids for row in shown)
    if unseen and os.geteuid() != 0:
        say(f"{unseen} of these sockets are other users': root sees whose")
    if not shown:
        say("neither kvd nor vLLM listens on this host; --all shows every program")
    show(Ports(sockets=tuple(shown), findings=tuple(findings)), settings)
    if any(one.state == "failed" for one in findings):
        raise typer.Exit(1)


def _known(settings: Settings) -> tuple[query.KvdStatus | None, dict[int, str]]:
    """What kvd says of itself, and what the processes are that registered with it."""
    daemon.refuse_afar(settings)
    try:
        status = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
        rows = daemon.workers(settings)
    except KvctlError as error:
        say(f"no kvd says which sockets are whose: {error.message}")
        return None, {}
    local = (row for row in rows if row.at is None and row.state != "gone")
    return status, {row.pid: f"{row.engine_id} {row.rank or row.kind}" for row in local}


# --- who wants which port ---


def _of_kvd(given: Path | None, status: query.KvdStatus | None) -> Iterator[Want]:
    path = given or KVD_SETTINGS
    if not path.exists():
        if given:
            raise UsageError(f"--kvd-config: no such file: {path}")
        return
    import yaml

    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        say(f"{path} was not read: {' '.join(str(error).split())}")
        return
    for section in ("peer", "metrics"):
        part = tree.get(section) if isinstance(tree, dict) else None
        listen = part.get("listen") if isinstance(part, dict) else None
        try:
            host, port = split_address(str(listen or ""))
        except ValueError:
            continue  # empty, or what `kvd --check-config` names
        if port:
            setting = f"{section}.listen in {path}"
            yield Want("kvd", status.pid if status else 0, host, port, setting)


def _of_vllm() -> Iterator[Want]:
    """What the command lines of vLLM's servers ask for. Ranks behind the first take ports above."""
    for one in programs("vllm"):
        if "serve" not in one.words and not any("vllm.entrypoints" in word for word in one.words):
            continue
        who = _option(one.words, "--served-model-name") or _model(one.words)
        who = f"vLLM of {who}" if who else "vLLM"
        text = _option(one.words, "--port")
        port = int(text) if text.isdecimal() else VLLM_PORT
        if "--headless" not in one.words and 0 < port < 65536:
            yield Want(who, one.pid, _option(one.words, "--host") or "0.0.0.0", port, "--port")  # noqa: S104
        for connector, variable, usual in SIDE_CHANNELS:
            if any(f'"{connector}"' in word for word in one.words):
                text = one.environment.get(variable, "")
                port = int(text) if text.isdecimal() else usual
                if 0 < port < 65536:
                    yield Want(who, one.pid, "0.0.0.0", port, variable)  # noqa: S104


def _option(words: Sequence[str], name: str) -> str:
    for at, word in enumerate(words):
        if word == name:
            return "".join(words[at + 1 : at + 2])
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return ""


def _model(words: Sequence[str]) -> str:
    if "serve" in words:
        after = words[words.index("serve") + 1 :]
        if after and not after[0].startswith("-"):
            return after[0]
    return _option(words, "--model")


# --- what collides ---


def _taken(wants: Iterable[Want], sockets: Sequence[OpenSocket]) -> Iterator[PortFinding]:
    for want in wants:
        for one in sockets:
            if one.port != want.port or not overlap(one.host, want.host) or not one.pids:
                continue
            if any(want.pid in ancestry(pid) or _is_kvd(pid, want) for pid in one.pids):
                continue
            who = f"{command(one.pids[0]) or 'a process'} (pid {one.pids[0]})"
            yield PortFinding(
                code="PORT_TAKEN",
                state="failed",
                port=want.port,
                found=f"{want.who} is to listen on {want.port} ({want.setting}), and {who} does at"
                f" {join_address(one.host, one.port)}",
                hint="end that process, or give one of them another port",
            )
            break


def _is_kvd(pid: int, want: Want) -> bool:
    """Whether a process is a kvd that does not answer: whose settings these are is not known then."""
    return want.who == "kvd" and not want.pid and command(pid) == "kvd"


def _twice(wants: Sequence[Want]) -> Iterator[PortFinding]:
    for one, other in combinations(wants, 2):
        same_tree = one.pid in ancestry(other.pid) or other.pid in ancestry(one.pid)
        both = (one.setting, other.setting)
        if one.port == other.port and overlap(one.host, other.host) and (both[0] != both[1] or not same_tree):
            yield PortFinding(
                code="PORT_TWICE",
                state="failed",
                port=one.port,
                found=f"{one.who}{_pid(one)} ({one.setting}) and {other.who}{_pid(other)} ({other.setting}) are both"
                f" to listen on {one.port}",
                hint="give one of them another port",
            )


def _pid(want: Want) -> str:
    return f", pid {want.pid}," if want.pid else ""


def _shared(sockets: Sequence[OpenSocket], wants: Iterable[Want]) -> Iterator[PortFinding]:
    """Two programs behind one port, which the kernel lets those have that ask for it: each gets some connections."""
    ours = {want.port for want in wants}
    for one, other in combinations([one for one in sockets if one.port in ours and one.pids], 2):
        if one.port == other.port and overlap(one.host, other.host) and not set(one.pids) & set(other.pids):
            first, second = ancestry(one.pids[0]), ancestry(other.pids[0])
            if first[0] in second or second[0] in first or first[1:2] == second[1:2] != ():
                continue  # one server of several processes
            yield PortFinding(
                code="PORT_SHARED",
                state="warning",
                port=one.port,
                found=f"pid {one.pids[0]} at {join_address(one.host, one.port)} and pid {other.pids[0]} at"
                f" {join_address(other.host, other.port)} share a port: each gets some of the connections",
                hint="end the one that is not meant",
            )


def _early(wants: Iterable[Want]) -> Iterator[PortFinding]:
    span = ephemeral()
    for want in wants:
        if span and span[0] <= want.port <= span[1]:
            yield PortFinding(
                code="PORT_EPHEMERAL",
                state="warning",
                port=want.port,
                found=f"{want.who} is to listen on {want.port} ({want.setting}), which the kernel may have given to an"
                f" outgoing connection before ({span[0]} to {span[1]})",
                hint=f"take one below, or sysctl net.ipv4.ip_local_reserved_ports={want.port}",
            )


# --- the rows ---


def _row(
    one: OpenSocket,
    status: query.KvdStatus | None,
    workers: dict[int, str],
    named: dict[int, str],
    wants: Sequence[Want],
) -> ListeningSocket:
    return ListeningSocket(
        host=one.host,
        port=one.port,
        path=one.path,
        pids=one.pids,
        process=command(one.pids[0]) if one.pids else "",
        what=_what(one, status, workers, named, wants),
    )


def _what(
    one: OpenSocket,
    status: query.KvdStatus | None,
    workers: dict[int, str],
    named: dict[int, str],
    wants: Sequence[Want],
) -> str:
    if status is not None and status.pid in one.pids:
        if one.path:
            names = {SOCKET_NAME: "kvd, for workers and kvctl", EVENTS_NAME: "kvd, events"}
            return names.get(Path(one.path).name, "kvd")
        return "kvd, for other kvds" if one.port == status.endpoint.port else "kvd, metrics"
    if one.path:
        return ""
    above = {pid: ancestry(pid) for pid in one.pids}
    for want in wants:
        if want.pid and want.port == one.port and any(want.pid in pids for pids in above.values()):
            return f"{want.who}, {'HTTP' if want.setting == '--port' else want.setting}"
    for pid in one.pids:
        if pid in workers:
            return f"{workers[pid]}, its transfer engine or vLLM's own"
    known = next((named[pid] for pids in above.values() for pid in pids if pid in named), "")
    return known or "vLLM, not registered with this kvd" * any(
        command(pid).startswith("VLLM::") for pid in one.pids
    )
