"""What is said of starting kvd again, and of its log, fits how it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.processes import supervisor
from kvctl.processes.supervisor import its_log, start_again


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel shows of process 7."""
    monkeypatch.setattr(supervisor, "PROC", tmp_path)
    (made := tmp_path / "7").mkdir()
    (made / "cmdline").write_bytes(b"/opt/kvd/bin/python\0/opt/kvd/bin/kvd\0")
    (made / "cgroup").write_text("0::/user.slice/user-0.slice/session-3.scope\n")
    (made / "fd").mkdir()
    return made


def test_a_kvd_of_a_unit_is_started_again_by_systemd(process: Path) -> None:
    (process / "cgroup").write_text("0::/system.slice/kvd-blue.service\n")
    assert (start_again(7), its_log(7)) == ("systemctl restart kvd-blue", "journalctl -u kvd-blue")


def test_one_that_was_started_by_hand_is_ended_by_its_number_and_its_log_is_the_file(process: Path) -> None:
    (log := process.parent / "kvd.log").touch()
    (process / "fd" / "2").symlink_to(log)
    assert start_again(7) == "end process 7, and start kvd as it was started"
    assert its_log(7) == str(log)
    (process / "fd" / "2").unlink()
    (process / "fd" / "2").symlink_to("/dev/null")
    assert its_log(7) == "where its stderr goes"


def test_where_nothing_is_seen_of_it_the_usual_unit_is_named(process: Path) -> None:
    (process / "cmdline").write_bytes(b"/sbin/other\0")
    for pid in (7, 8):
        assert (start_again(pid), its_log(pid)) == ("systemctl restart kvd", "journalctl -u kvd")
