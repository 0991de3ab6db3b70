"""How this host's kvd is run, by systemd or by hand, and so how it is started again and where its log is."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
UNIT = "kvd"
"""The unit of configs/systemd: what is said where nothing can be seen of kvd's process."""


def start_again(pid: int) -> str:
    """What to do to start the kvd of that process anew."""
    if unit := _unit(pid):
        return f"systemctl restart {unit}"
    return f"end process {pid}, and start kvd as it was started"


def its_log(pid: int) -> str:
    """Where that kvd writes its log."""
    if unit := _unit(pid):
        return f"journalctl -u {unit}"
    try:
        written = (PROC / str(pid) / "fd" / "2").readlink()
    except OSError:
        return "where its stderr goes"
    return f"{written}" if written.is_file() else "where its stderr goes"


def _unit(pid: int) -> str:
    """The unit that a kvd belongs to; empty where it was started by hand."""
    process = PROC / str(pid)
    try:
        if b"kvd" not in (process / "cmdline").read_bytes():
            return UNIT  # in another PID namespace, and this one is somebody else
        name = (process / "cgroup").read_text().strip().rpartition("/")[2]
    except OSError:
        return UNIT
    return name.removesuffix(".service") if name.endswith(".service") and not name.startswith("user@") else ""
