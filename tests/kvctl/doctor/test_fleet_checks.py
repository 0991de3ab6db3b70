"""What is said of one kvd among many: of its version, and of requests that other hosts counted."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvctl.doctor.fleet_checks import version_checks
from kvctl.views.doctor import Check
from kvctl.views.drawing import as_text
from kvctl.views.fleet.doctor import FleetDoctor, fleet_doctor_checks, fleet_doctor_screen


def test_a_kvd_of_another_version_than_most_is_named() -> None:
    versions = Counter({"0.2.0": 63, "0.1.0": 1})
    (found,) = version_checks("0.1.0", versions)
    assert (found.code, found.state) == ("FLEET_VERSION", "warning")
    assert found.found == "kvd is 0.1.0, and 63 of 64 are 0.2.0"
    assert version_checks("0.2.0", versions) == []
    assert (
        version_checks("0.1.0", Counter({"0.2.0": 1, "0.1.0": 1})) == []
    )  # nobody knows which of them it is


def test_hosts_of_which_the_same_is_said_are_one_row() -> None:
    well = Check(code="KVD", about="kvd", state="ok", found="up")
    slow = Check(code="KVD_SLOW", about="kvd", state="warning", found="was busy for 3 s", hint="see the disk")
    checks = {f"10.0.0.{n}:7766": [well, slow] if n < 60 else [well] for n in range(64)}
    body = FleetDoctor(**fleet_doctor_checks(checks), hosts=64, unanswered=())
    text = as_text(fleet_doctor_screen(body, wide=False), 80).plain
    assert "10.0.0.{0..59}:7766" in text
    assert "x60" in text
    assert text.count("see the disk") == 1
    assert text.endswith("64 hosts, 4 of them well: 0 checks failed, 60 warn")
    assert max(map(len, text.splitlines())) <= 80
    every = as_text(fleet_doctor_screen(body, wide=True), 200).plain
    assert every.count("KVD_SLOW") == 61
    calm = msgspec.structs.replace(body, **fleet_doctor_checks({"a:1": [well]}), hosts=1)
    assert (
        as_text(fleet_doctor_screen(calm, wide=False), 80).plain == "nothing is wrong on 1 hosts in 1 checks"
    )
