"""Which process a worker is, so that nobody reads another one's memory under its number."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvd.backends.direct.calls import readable
from kvd.backends.errors import WorkerUnreachable

NAME = "direct"
READS_ONLY = "as what it wrote could land after the peer gave the memory up"
_PROC = Path("/proc")


class Process(msgspec.Struct, frozen=True):
    """One process of one boot of one kernel.

    ``pid`` counts in the pid namespace with inode ``pid_namespace``; ``started`` is in clock ticks since the boot, and
    with ``pid`` names the process even where its number is used again.
    """

    boot: str
    pid_namespace: int
    user_namespace: int
    uid: int
    pid: int
    started: int


def this_process() -> Process:
    """The process that asks.

    Raises:
        OSError: there is no /proc, or no namespaces in it.
    """
    return Process(
        boot=(_PROC / "sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=(_PROC / "self/ns/pid").stat().st_ino,
        user_namespace=(_PROC / "self/ns/user").stat().st_ino,
        uid=os.geteuid(),
        pid=os.getpid(),
        started=started(os.getpid()),
    )


def started(pid: int) -> int:
    """When a process started, in clock ticks since the boot: field 22 of its stat, see proc_pid_stat(5).

    Raises:
        OSError: there is no such process.
    """
    # The second field is a name in brackets, which may hold spaces and brackets of its own.
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


def on_this_host(here: Process, there: Process) -> None:
    """Refuse a peer whose process number means nothing here.

    Raises:
        WorkerUnreachable: another host or another pid namespace, naming both.
    """
    if there.boot != here.boot:
        raise WorkerUnreachable(
            f"the peer is on another host: boot id {there.boot} there and {here.boot} here",
            backend=NAME,
            hint="set backend auto or a transfer engine on both sides",
        )
    if there.pid_namespace != here.pid_namespace:
        raise WorkerUnreachable(
            f"the peer is in pid namespace {there.pid_namespace} and this worker in {here.pid_namespace}",
            backend=NAME,
            hint="start both with the host's pid namespace (docker --pid=host, Kubernetes hostPID or"
            " shareProcessNamespace), or set backend auto",
        )


def hold(peer: Process) -> int:
    """A pidfd of the peer, which the caller closes; `ended` asks it.

    Raises:
        WorkerUnreachable: the process is gone, or its number is another's by now.
    """
    try:
        pidfd = os.pidfd_open(peer.pid)
    except ProcessLookupError:
        raise WorkerUnreachable(f"process {peer.pid} of the peer is gone", backend=NAME) from None
    except OSError as error:
        raise WorkerUnreachable(f"process {peer.pid} cannot be watched: {error}", backend=NAME) from None
    try:
        # With the pidfd open first, a number that is used again between the two lines shows as ended.
        since = started(peer.pid)
        gone = ended(pidfd)
    except OSError:
        since, gone = 0, True
    if since == peer.started and not gone:
        return pidfd
    os.close(pidfd)
    if gone:
        raise WorkerUnreachable(f"process {peer.pid} of the peer is gone", backend=NAME)
    raise WorkerUnreachable(
        f"process {peer.pid} is not the peer any more: it started at tick {since}, the peer at {peer.started}",
        backend=NAME,
        hint="the peer ended and its number was used again; its new card comes with the next handshake",
    )


def ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended, whatever became of its number."""
    return readable(pidfd)
