"""`kvd init`: what it makes, what it leaves alone, and that a kvd starts with it."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvd.client.errors import ClientError
from kvd.client.operator import connect
from kvd.keys import read_pair, read_trusted
from kvd.service.config import load
from kvd.service.errors import ConfigError, StartError
from kvd.service.init import init, with_settings
from kvd.service.run import checked
from kvd.shipped import shipped
from kvd.wire.query import GetStatus
from tests.support.daemons import wait_for

USER_ADDED = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("useradd", path="/usr/sbin:/usr/bin") is None,
    reason="adding a user takes root and useradd",
)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A host's root directory with nobody but root in it."""
    etc = tmp_path / "image" / "etc"
    etc.mkdir(parents=True)
    (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (etc / "group").write_text("root:x:0:\n")
    (etc / "shadow").touch()
    return etc.parent


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user who is not root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in ("KVD_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return {"HOME": str(tmp_path / "home"), "XDG_RUNTIME_DIR": str(tmp_path / "session")}


def files(below: Path) -> dict[str, bytes]:
    return {str(path.relative_to(below)): path.read_bytes() for path in below.rglob("*") if path.is_file()}


def steps(told: str) -> list[tuple[str, str]]:
    """What was done, and with what."""
    done = told.partition("next:\n")[0].splitlines()[1:]
    return [(line[2:12].strip(), line[14:].split(",")[0].split(":")[0]) for line in done]


@USER_ADDED
def test_a_host_gets_a_user_keys_settings_and_a_unit(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(image)
    assert init(["--root", str(image), "--dry-run"]) == 0
    promised = steps(capsys.readouterr().out)
    assert files(image) == before
    assert {done for done, _ in promised} == {"would make"}

    assert init(["--root", str(image), "--listen", "0.0.0.0:7766", "--advertise", "10.0.0.7:7766"]) == 0
    made = capsys.readouterr().out
    assert steps(made) == [("made", what) for _, what in promised]
    assert "systemctl enable --now kvd" in made
    etc = image / "etc"
    [user] = [line.split(":") for line in (etc / "passwd").read_text().splitlines() if line[:4] == "kvd:"]
    assert (user[5], user[6]) == ("/var/lib/kvd", "/usr/sbin/nologin")
    assert "\nkvd:" in (etc / "group").read_text()
    assert read_trusted(etc / "kvd/trusted.keys") == ()
    assert len(read_pair(etc / "kvd/host.keys").public) == 40
    assert (etc / "kvd/host.keys").stat().st_uid == int(user[2])
    config = load(etc / "kvd/kvd.yaml", {})
    assert (config.peer.listen, config.peer.advertise) == ("0.0.0.0:7766", "10.0.0.7:7766")
    assert config.peer.curve.key_file == "/etc/kvd/host.keys", "as it is called inside"
    unit = (etc / "systemd/system/kvd.service").read_text()
    [start] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert Path(start.removeprefix("ExecStart=").split()[0]).exists(), "no PATH has to find it"

    written = files(image)
    assert init(["--root", str(image), "--listen", "10.0.0.9:1"]) == 0
    again = capsys.readouterr().out
    assert files(image) == written
    assert {done for done, _ in steps(again)} == {"left alone"}
    assert "--listen was not written into it" in again


def test_users_and_groups_that_are_in_no_list_of_all_are_found_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As sssd has it, which tells of a user who is asked for, and lists none."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwall", list)
    monkeypatch.setattr(grp, "getgrall", list)
    init(["--dry-run", "--user", "daemon"])
    assert ("left alone", "user daemon") in steps(capsys.readouterr().out)
    init(["--dry-run", "--user", "daemon", "--group", "no-such-group"])
    assert "user daemon exists, and no group no-such-group" in capsys.readouterr().out


def test_a_unit_of_a_package_or_another_is_left_alone(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (image / "etc/passwd").open("a") as users:
        users.write(f"kvd:x:{os.geteuid()}:999::/var/lib/kvd:/usr/sbin/nologin\n")
    packaged = image / "usr/lib/systemd/system/kvd.service"
    packaged.parent.mkdir(parents=True)
    packaged.write_text("[Service]\n")
    init(["--root", str(image)])
    assert f"kvd.service: {packaged} is there" in capsys.readouterr().out
    assert not (image / "etc/systemd").exists()
    packaged.unlink()
    other = image / "etc/systemd/system/kvd.service"
    other.parent.mkdir(parents=True)
    other.write_text("[Service]\n")
    init(["--root", str(image)])
    assert "is another than this kvd would make" in capsys.readouterr().out
    assert other.read_text() == "[Service]\n"


def test_a_kvd_starts_with_what_a_user_without_root_gets(
    own: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert init(["--listen", "127.0.0.1:0"], own) == 0
    told = capsys.readouterr().out
    settings = tmp_path / "home/.config/kvd/kvd.yaml"
    config = load(settings, {})
    assert config.directory == tmp_path / "session/kvd"
    assert config.state_directory == tmp_path / "home/.local/state/kvd"
    checked(config)
    assert f"export KVD_RUNTIME_DIR={config.directory}" in told
    unit = (tmp_path / "home/.config/systemd/user/kvd.service").read_text()
    assert "User=" not in unit
    assert (settings.parent / "host.keys").stat().st_mode & 0o777 == 0o600
    with subprocess.Popen(
        [sys.executable, "-m", "kvd.service", "--config", str(settings)], stderr=subprocess.PIPE, text=True
    ) as kvd:

        def answers() -> bool:
            assert kvd.poll() is None, kvd.stderr and kvd.stderr.read()
            try:
                with connect(config.directory, 5.0) as operator:
                    return bool(operator.ask(GetStatus()))
            except ClientError:
                return False

        try:
            wait_for(answers, 20.0)
        finally:
            kvd.kill()


def test_what_a_user_may_not_make_is_one_line_with_the_next_step(own: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the home should be")
    with pytest.raises(StartError, match=r"cannot make .*home/\.config/kvd") as raised:
        init([], own)
    assert "--dry-run" in raised.value.hint


def test_an_address_that_is_none_is_told_before_anything_is_made(image: Path) -> None:
    before = files(image)
    with pytest.raises(ConfigError, match="--listen: '7766' is not host:port"):
        init(["--root", str(image), "--listen", "7766"])
    assert files(image) == before


def test_settings_are_put_where_they_stand_and_nothing_else_changes() -> None:
    text = shipped("kvd.yaml").read_text()
    changed = with_settings(text, {"metrics.listen": "127.0.0.1:9402", "peer.curve.key_file": "/k"})
    before, after = yaml.safe_load(text), yaml.safe_load(changed)
    before["metrics"]["listen"], before["peer"]["curve"]["key_file"] = "127.0.0.1:9402", "/k"
    assert after == before
    assert len(changed.splitlines()) == len(text.splitlines()), "comments stay"
    with pytest.raises(StartError, match=r"no peer\.lisden"):
        with_settings(text, {"peer.lisden": "x"})


def test_the_command_has_it(capsys: pytest.CaptureFixture[str], image: Path) -> None:
    from kvd.service.main import run

    with pytest.raises(SystemExit) as ended:
        run(["init", "--dry-run", "--root", str(image)])
    assert ended.value.code == 0
    assert "nothing is changed" in capsys.readouterr().out
