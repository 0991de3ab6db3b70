"""Real transfer engines, moving real bytes between processes of their own; and one that cannot."""

from __future__ import annotations

import pytest

from kvctl.doctor import backend_checks as of_backends
from kvctl.doctor.backend_checks import backend_checks


def test_each_engine_that_is_installed_moves_bytes_and_says_by_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_backends, "MEASURED", ("nixl", "direct"))
    found = {check.code: check for check in backend_checks() if check.state != "warning"}
    assert {check.state for check in found.values()} == {"ok"}
    assert "8.00 MiB from one process to another over" in found["DIRECT"].found
    assert "every byte right" in found["NIXL"].found


def test_a_slow_path_is_a_warning_with_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_backends, "MEASURED", ("nixl",))
    monkeypatch.setenv("UCX_TLS", "tcp,self,rc")
    slow, moved = backend_checks()
    assert (slow.code, slow.state, moved.state) == ("SLOW_PATH", "warning", "ok")
    assert "UCX_TLS" in slow.found


def test_one_that_cannot_fails_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_backends, "MEASURED", ("nixl",))
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "none9")
    [found] = backend_checks()
    assert (found.code, found.state) == ("NIXL", "failed")
    assert "NIXL_ERR_BACKEND" in found.found
    assert "--backend nixl" in found.hint


def test_one_that_is_not_installed_is_left_out_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_backends, "MEASURED", ("mooncake",))
    monkeypatch.setattr(of_backends, "available", lambda: {"mooncake": "not installed: install x"})
    [found] = backend_checks()
    assert (found.code, found.state, found.hint) == ("MOONCAKE", "skipped", "pip install 'kvctl[mooncake]'")
