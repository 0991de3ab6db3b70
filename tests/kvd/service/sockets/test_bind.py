"""A socket of this host has its mode before anybody can connect."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from kvd.service.sockets.bind import bind_unix


@pytest.mark.parametrize("mode", [0o660, 0o600])
def test_a_socket_that_listens_has_its_mode_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    path, modes, listen = tmp_path / "s.sock", list[int](), socket.socket.listen

    def look(one: socket.socket, backlog: int) -> None:
        modes.append(stat.S_IMODE(path.stat().st_mode))
        listen(one, backlog)

    monkeypatch.setattr(socket.socket, "listen", look)
    bind_unix(path, mode).close()
    assert modes == [mode]
    assert stat.S_IMODE(path.stat().st_mode) == mode
