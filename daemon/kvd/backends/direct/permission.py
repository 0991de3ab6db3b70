"""Who may read whose memory, and why not: the kernel answers only EPERM, the operator needs the rule and the cure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvd.backends.direct.process import Process

_CAP_SYS_PTRACE = 19
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides, on the side that reads: Yama's scope (0 where there is no Yama) and CAP_SYS_PTRACE."""

    scope: int
    capable: bool


@dataclass(frozen=True, slots=True)
class ReadRefusal:
    """Why a worker may not be read, and what to do about it."""

    why: str
    cure: str


def rules(yama: Path = _YAMA, status: Path = _STATUS) -> Rules:
    """The rules as they are for this process."""
    try:
        scope = int(yama.read_text())
    except (OSError, ValueError):
        scope = 0
    effective = next(
        (line.split()[1] for line in status.read_text().splitlines() if line.startswith("CapEff:")), "0"
    )
    return Rules(scope, bool(int(effective, 16) >> _CAP_SYS_PTRACE & 1))


def refusal(
    here: Process, there: Process, mine: Rules, *, dumpable: bool, allows: bool
) -> ReadRefusal | None:
    """The first rule that may keep ``here`` from reading the memory of ``there``, or None where none of these does.

    For after the kernel refused: a reader in an ancestor of the peer's user namespace, say, is admitted. ``dumpable``
    and ``allows`` are the peer's: whether it lets its own user look into it, and whether it told Yama to admit any
    process. See ptrace(2), "Ptrace access mode checking".
    """
    other = "or set backend auto or a transfer engine on both sides"
    if mine.scope >= 3:
        return ReadRefusal(
            f"kernel.yama.ptrace_scope is {mine.scope}: no process may read another's memory",
            f"set it to 2 or less, which needs a new boot, or let the peer back its KV with memfd, {other}",
        )
    if here.user_namespace != there.user_namespace:
        return ReadRefusal(
            f"the peer is in user namespace {there.user_namespace} and this worker in {here.user_namespace}",
            f"start both in one user namespace, {other}",
        )
    if mine.capable:
        return None
    if mine.scope == 2:
        return ReadRefusal(
            "kernel.yama.ptrace_scope is 2 and this worker has no CAP_SYS_PTRACE",
            f"grant it, lower the scope with sysctl, or let the peer back its KV with memfd, {other}",
        )
    if here.uid != there.uid:
        return ReadRefusal(
            f"the peer runs as uid {there.uid} and this worker as uid {here.uid} without CAP_SYS_PTRACE",
            f"run both as one user, {other}",
        )
    if not dumpable:
        return ReadRefusal(
            "the peer is not dumpable (PR_SET_DUMPABLE is 0, or its program is not readable by its user)",
            f"start it without set-uid, file capabilities or PR_SET_DUMPABLE 0, {other}",
        )
    if mine.scope == 1 and not allows:
        return ReadRefusal(
            "kernel.yama.ptrace_scope is 1 and the peer does not admit readers",
            f"set the peer's backend option allow_readers to true, or kernel.yama.ptrace_scope to 0, {other}",
        )
    return None


def unknown() -> ReadRefusal:
    """What to say where the kernel refuses although the rules above admit."""
    return ReadRefusal(
        "the kernel refuses (EPERM): the peer has capabilities that this worker has not, or a security module or"
        " seccomp filter forbids it",
        "compare CapEff in /proc/PID/status of both, look for a denial in the kernel's log, or set backend auto",
    )
