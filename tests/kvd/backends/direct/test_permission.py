"""The rules that keep one process from another's memory, each with its sentence and its cure."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvd.backends.direct import backend as direct
from kvd.backends.direct.permission import Rules, refusal, rules
from kvd.backends.direct.process import Process
from kvd.geometry.model import Region

HERE = Process(boot="b", pid_namespace=1, user_namespace=2, uid=1000, pid=10, started=5)
THERE = msgspec.structs.replace(HERE, pid=11)


@pytest.mark.parametrize(
    ("there", "mine", "dumpable", "allows", "says"),
    [
        ({}, Rules(0, capable=False), True, False, ""),
        ({}, Rules(1, capable=False), True, True, ""),
        ({"uid": 0}, Rules(2, capable=True), False, False, ""),
        ({}, Rules(3, capable=True), True, True, "ptrace_scope is 3"),
        ({}, Rules(2, capable=False), True, True, "ptrace_scope is 2 and this worker has no CAP_SYS_PTRACE"),
        ({"uid": 7}, Rules(0, capable=False), True, True, "uid 7 and this worker as uid 1000"),
        ({"user_namespace": 9}, Rules(0, capable=True), True, True, "user namespace 9 and this worker in 2"),
        ({}, Rules(0, capable=False), False, True, "not dumpable"),
        ({}, Rules(1, capable=False), True, False, "ptrace_scope is 1 and the peer does not admit readers"),
    ],
)
def test_the_first_rule_in_the_way_is_named(
    there: dict[str, int], mine: Rules, dumpable: bool, allows: bool, says: str
) -> None:
    found = refusal(HERE, msgspec.structs.replace(THERE, **there), mine, dumpable=dumpable, allows=allows)
    assert (found is None) == (not says)
    if found is not None:
        assert says in found.why
        assert "set backend auto" in found.cure


def test_rules_are_read_from_the_kernel(tmp_path: Path) -> None:
    scope, status = tmp_path / "ptrace_scope", tmp_path / "status"
    scope.write_text("2\n")
    status.write_text("Name:\tx\nCapEff:\t0000000000080000\n")
    assert rules(scope, status) == Rules(2, capable=True)
    status.write_text("Name:\tx\nCapEff:\t0000000000040000\n")
    assert rules(tmp_path / "no-yama", status) == Rules(0, capable=False)


@pytest.mark.parametrize(
    ("scope", "options", "asks", "warns"),
    [
        (0, {}, False, ""),
        (1, {}, True, ""),
        (1, {"allow_readers": False}, False, "ptrace_scope is 1"),
        (3, {}, False, "ptrace_scope is 3"),
    ],
)
def test_a_home_admits_readers_where_yama_would_not_and_says_what_keeps_them_out(
    scope: int,
    options: dict[str, bool],
    asks: bool,
    warns: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(direct, "rules", lambda: Rules(scope, capable=False))
    monkeypatch.setattr(direct, "allow_tracers", ask)
    memory = np.zeros(4096, np.uint8)
    backend = direct.open_backend("worker", options=options)
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    backend.close()
    assert bool(asked) is asks
    assert (warns in caplog.text) if warns else not caplog.text
