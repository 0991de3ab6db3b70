"""`kvctl keys` with real files, and with a kvd that follows them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.keys import read_pair, read_trusted, write_pair
from kvd.wire.query import GetStatus, PeerKeys, RefusedKey
from kvd.zmtp import curve
from tests.kvctl.conftest import STATUS
from tests.support.daemons import wait_for
from tests.support.hosts import hosts

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

NOBODY = ("--runtime-dir", "/nonexistent")


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """Public keys of three other hosts."""
    return [write_pair(tmp_path / f"other{number}").decode() for number in range(3)]


def lines(path: Path) -> list[tuple[str, str]]:
    return [(one.key.decode(), one.place) for one in read_trusted(path)]


def test_a_pair_is_made_once_for_its_owner_alone(run: Run, tmp_path: Path) -> None:
    pair, trusted = tmp_path / "host.keys", tmp_path / "trusted.keys"
    arguments = (*NOBODY, "keys", "generate", "--key-file", str(pair), "--list", str(trusted))
    made = run(*arguments, "-o", "json")
    assert made.code == 0
    assert pair.stat().st_mode & 0o777 == 0o600
    document = json.loads(made.out)
    assert (document["kind"], document["public"]) == ("HostKeys", read_pair(pair).public.decode())
    assert read_pair(pair).secret.decode() not in made.out + made.err
    assert "peer.curve.key_file" in made.err
    assert lines(trusted) == []
    again = run(*arguments)
    assert (again.code, "never written over" in again.err) == (5, True)
    absent = run(*NOBODY, "keys", "generate", "--key-file", str(tmp_path / "no" / "keys"))
    assert (absent.code, "mkdir -p" in absent.err) == (2, True)


def test_what_a_host_shows_is_what_others_trust(run: Run, tmp_path: Path) -> None:
    pair, trusted = tmp_path / "host.keys", tmp_path / "trusted.keys"
    run(*NOBODY, "keys", "generate", "--key-file", str(pair))
    shown = run(*NOBODY, "keys", "show", "--key-file", str(pair), "--list", str(trusted))
    assert shown.code == 0
    public = read_pair(pair).public.decode()
    assert f"kvctl keys trust '{public}' HOST:PORT" in shown.out
    assert "HOST:PORT is to be what peer.advertise says" in shown.err
    missing = run(*NOBODY, "keys", "show", "--key-file", str(tmp_path / "absent"))
    assert (missing.code, "kvctl keys generate" in missing.err) == (1, True)


def test_names_and_addresses_are_places(run: Run, tmp_path: Path, keys: list[str]) -> None:
    trusted = tmp_path / "trusted.keys"
    for place in ("h-1.example.org:7766", "10.0.0.8:1", "[fe80::1]:7766", "::1", "my_host"):
        assert run(*NOBODY, "keys", "trust", "--list", str(trusted), keys[0], place).code == 0
    assert len(lines(trusted)) == 5


def test_what_is_begun_under_a_closed_umask_can_be_read_by_the_user_of_kvd(run: Run, tmp_path: Path) -> None:
    pair, trusted = tmp_path / "host.keys", tmp_path / "trusted.keys"
    before = os.umask(0o077)
    try:
        run(*NOBODY, "keys", "generate", "--key-file", str(pair), "--list", str(trusted))
    finally:
        os.umask(before)
    assert trusted.stat().st_mode & 0o777 == 0o644


def test_a_key_file_that_is_none_is_named_with_what_it_lacks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("# nothing\n")
    (tmp_path / "f").chmod(0o600)
    told = run(*NOBODY, "keys", "show", "--key-file", str(tmp_path / "f"))
    assert "no line begins with public or secret" in told.err
    missing = run(*NOBODY, "keys", "trust", "--list", str(tmp_path / "no" / "list"), "K" * 40, "h")
    assert (missing.code, "mkdir -p" in missing.err) == (2, True)


def test_keys_are_trusted_once_and_replaced_only_when_told(run: Run, tmp_path: Path, keys: list[str]) -> None:
    trusted = tmp_path / "trusted.keys"
    trusted.write_text("# ours\n")
    arguments = (*NOBODY, "keys", "trust", "--list", str(trusted))
    assert run(*arguments, keys[0], "10.0.0.8:7766").code == 0
    assert run(*arguments, keys[1], "10.0.0.9").code == 0
    before = trusted.read_text()
    assert before.startswith("# ours\n")
    again = run(*arguments, keys[0], "10.0.0.8:7766")
    assert (again.code, "trusted already" in again.out) == (0, True)
    assert trusted.read_text() == before
    for place in ("10.0.0.8:7766", "10.0.0.8", "10.0.0.9:7766"):
        other = run(*arguments, keys[2], place)
        assert other.code == 5
        assert keys[2] in other.err
        assert keys["10.0.0.9" in place] in other.err
        assert "--replace" in other.err
    assert trusted.read_text() == before
    assert run(*arguments, keys[2], "10.0.0.8:7766", "--replace").code == 0
    assert lines(trusted) == [(keys[1], "10.0.0.9"), (keys[2], "10.0.0.8:7766")]


def test_what_is_no_key_or_no_place_is_refused_and_nothing_is_written(
    run: Run, tmp_path: Path, keys: list[str]
) -> None:
    trusted = tmp_path / "trusted.keys"
    arguments = (*NOBODY, "keys", "trust", "--list", str(trusted))
    for key, place, named in (
        ("short", "host:1", "found 5 characters"),
        (keys[0], "host:99999", "not host:port"),
        (keys[0], "two words", "3 words"),
        (keys[0][:-1] + "~", "host", "'~' is no character of Z85"),
        ("10.0.0.8:7766", keys[0], "the key comes first"),
        (keys[0], "http://10.0.0.8:7766", "neither a name nor an address"),
        (keys[0], "h3#x", "neither a name nor an address"),
        (keys[0], "HOST:PORT", "not host:port"),
    ):
        refused = run(*arguments, key, place)
        assert (refused.code, named in refused.err) == (2, True), refused.err
    assert not trusted.exists()
    trusted.write_text("rubbish\n")
    damaged = run(*arguments, keys[0], "host")
    assert (damaged.code, "line 1" in damaged.err) == (1, True)
    assert trusted.read_text() == "rubbish\n"


def test_a_key_is_revoked_by_itself_or_by_its_host_with_all_its_lines(
    run: Run, tmp_path: Path, keys: list[str]
) -> None:
    trusted = tmp_path / "trusted.keys"
    trusted.write_text(f"{keys[0]} a:1\n{keys[0]} b\n{keys[1]} c:1\n# end\n{keys[2]}\n")
    arguments = (*NOBODY, "keys", "revoke", "--list", str(trusted))
    assert run(*arguments, "b").code == 0
    assert lines(trusted) == [(keys[1], "c:1"), (keys[2], "")]
    assert run(*arguments, keys[2]).code == 0
    assert lines(trusted) == [(keys[1], "c:1")]
    assert "# end" in trusted.read_text()
    unknown = run(*arguments, "d")
    assert (unknown.code, "'d'" in unknown.err) == (1, True)


def test_nobody_is_said_to_be_revoked_where_the_list_is_not_there(run: Run, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.keys"
    gone = run(*NOBODY, "keys", "revoke", "--list", str(trusted), "10.0.0.8:7766")
    assert gone.code == 1
    assert "there is no file" in gone.err
    assert "still lets in" in gone.err
    assert f"touch {trusted}" in gone.err
    trusted.write_text("rubbish\n")
    assert "still lets in" in run(*NOBODY, "keys", "revoke", "--list", str(trusted), "10.0.0.8:7766").err


@pytest.mark.parametrize("what", [("show",), ("generate",), ("revoke", "h"), ("trust", "k", "h")])
def test_the_files_of_a_named_kvd_that_does_not_answer_are_not_guessed(
    run: Run, what: tuple[str, ...]
) -> None:
    asked = run(*NOBODY, "keys", *what)
    assert asked.code == 3
    assert "--list FILE" in asked.err
    assert "/etc/kvd" not in asked.out + asked.err


def test_a_list_that_every_user_may_write_is_not_used(run: Run, tmp_path: Path, keys: list[str]) -> None:
    trusted = tmp_path / "trusted.keys"
    trusted.write_text(f"{keys[0]} a:1\n")
    trusted.chmod(0o666)
    refused = run(*NOBODY, "keys", "trust", "--list", str(trusted), keys[1], "b:1")
    assert (refused.code, "chmod o-w" in refused.err) == (1, True)


def test_a_pipe_in_the_place_of_a_list_stops_nobody(run: Run, tmp_path: Path) -> None:
    os.mkfifo(trusted := tmp_path / "trusted.keys", 0o644)
    refused = run(*NOBODY, "keys", "revoke", "--list", str(trusted), "b:1")
    assert (refused.code, "no regular file" in refused.err) == (1, True)


def test_kvd_takes_note_and_the_command_says_so(run: Run) -> None:
    with hosts("near", "far") as fleet:
        near, far = fleet["near"], fleet["far"]
        here = ("--runtime-dir", str(near.daemon.directory))
        place = f"127.0.0.1:{far.daemon.port}"
        revoked = run(*here, "keys", "revoke", place, "-o", "json")
        assert revoked.code == 0, revoked.err
        assert json.loads(revoked.out)["in_force"]
        shown = json.loads(run(*here, "keys", "show", "-o", "json").out)
        assert (shown["public"], shown["trusted"]) == (near.pair.public.decode(), [])
        assert shown["line"] == f"{near.pair.public.decode()} 127.0.0.1:{near.daemon.port}"
        public = far.pair.public.decode()
        trusted = run(*here, "keys", "trust", public, place, "-o", "json")
        assert (trusted.code, json.loads(trusted.out)["in_force"]) == (0, True), trusted.err
        keys = json.loads(run(*here, "status", "-o", "json").out)["keys"]
        assert (keys["identity"], keys["trusted"]) == ("per host", 1)
        near.trusted.rename(away := near.trusted.with_name("away"))
        wait_for(lambda: near.counter("keys.unreadable"))
        told = run(*here, "keys", "show")
        assert (told.code, "kvd lets in the 1 keys that it read last" in told.err) == (0, True), told.err
        away.rename(near.trusted)
        public = near.pair.public.decode()
        (near.folder / "host.keys").unlink()
        made = run(*here, "keys", "generate")
        assert (made.code, "until it is started again" in made.err) == (0, True), made.err
        assert "set peer.curve.key_file" not in made.err
        near.new_pair()
        assert f"kvd runs with another pair, {public}" in run(*here, "keys", "show").err
        wait_for(lambda: "KEYS_PAIR" in run(*here, "doctor", "--quick", "-o", "json").out)
        assert f"{near.folder / 'host.keys'} holds the pair {near.pair.public.decode()}" in near.daemon.log
        near.trusted.write_text("rubbish\n")
        wait_for(lambda: "KEYS_UNREADABLE" in run(*here, "doctor", "--quick", "-o", "json").out)


def test_a_fleet_with_one_pair_has_no_list_to_show(run: Run) -> None:
    with hosts("near") as fleet:
        near = fleet["near"]
        near.daemon.kill()
        del near.daemon.environment["KVD_PEER_CURVE_AUTHORIZED_KEYS"]
        near.daemon.start()
        shown = run("--runtime-dir", str(near.daemon.directory), "keys", "show")
        assert "all hosts share this pair, and kvd follows no list" in shown.err


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_new_pair_is_given_to_the_user_that_kvd_runs_as(
    run: Run, daemon: FakeDaemon, tmp_path: Path
) -> None:
    os.chown(daemon.directory / "kvd.sock", 12345, -1)
    pair = tmp_path / "host.keys"
    made = run("--runtime-dir", str(daemon.directory), "keys", "generate", "--key-file", str(pair),
               "--list", str(tmp_path / "l"))  # fmt: skip
    assert (made.code, pair.stat().st_uid, pair.stat().st_mode & 0o777) == (0, 12345, 0o600)
    assert "chown" not in made.err


def test_a_key_that_begins_with_a_dash_is_taken_as_it_is_printed(
    run: Run, tmp_path: Path, keys: list[str]
) -> None:
    trusted, key = tmp_path / "trusted.keys", f"-v{keys[0][2:-5]}ohtlo"
    for one in (key, f"--{key[2:]}"):
        typed = run(*NOBODY, "keys", "trust", one, "10.0.0.9:7766", "--replace", "--list", str(trusted))
        assert typed.code == 0, typed.err
        assert lines(trusted) == [(one, "10.0.0.9:7766")]
    assert run(*NOBODY, "keys", "revoke", one, "--list", str(trusted)).code == 0
    assert lines(trusted) == []
    wrong = run(*NOBODY, "keys", "revoke", "-x", "--list", str(trusted))
    assert (wrong.code, "No such option" in wrong.err) == (2, True)


def test_no_pair_is_made_whose_public_key_looks_like_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = curve.generate()
    while made[0].startswith(b"-"):  # one key of 85 does
        made = curve.generate()
    drawn = iter([(b"-" + made[0][1:], b""), made])
    monkeypatch.setattr(curve, "generate", lambda: next(drawn))
    assert write_pair(tmp_path / "host.keys") == made[0]


def test_a_list_that_is_not_there_is_not_shown_as_an_empty_one(run: Run, tmp_path: Path) -> None:
    pair, trusted = tmp_path / "host.keys", tmp_path / "trusted.keys"
    write_pair(pair)
    arguments = (*NOBODY, "keys", "show", "--key-file", str(pair), "--list", str(trusted))
    assert f"no key: there is no file {trusted}" in run(*arguments).out
    assert json.loads(run(*arguments, "-o", "json").out)["error"] == f"there is no file {trusted}"
    trusted.touch()
    assert f"0 keys in {trusted}" in run(*arguments).out
    assert json.loads(run(*arguments, "-o", "json").out)["error"] == ""


def test_a_revoked_key_that_is_trusted_again_is_said_to_be_one(
    run: Run, tmp_path: Path, keys: list[str]
) -> None:
    trusted = tmp_path / "trusted.keys"
    arguments = (*NOBODY, "keys")
    assert run(*arguments, "trust", keys[0], "a:1", "--list", trusted).err == ""
    run(*arguments, "revoke", keys[0], "--list", trusted)
    again = run(*arguments, "trust", keys[0], "a:1", "--list", trusted)
    assert again.code == 0
    assert "this key was revoked here: 20" in again.err
    assert (
        f"when it was a:1; whoever has it is let in again. If it was stolen type kvctl keys revoke '{keys[0]}'"
        in again.err
    )
    assert run(*arguments, "trust", keys[0], "a:1", "--list", trusted).err == "", (
        "it is trusted, and was said once"
    )
    assert run(*arguments, "trust", keys[1], "a:1", "--replace", "--list", trusted).err == ""
    old = run(*arguments, "trust", keys[0], "b:1", "--list", trusted)
    assert "this key was revoked here" in old.err, "the other took its place"


def test_a_key_that_kvd_turns_away_as_revoked_is_said_to_be_one(
    run: Run, daemon: FakeDaemon, tmp_path: Path, keys: list[str]
) -> None:
    row = RefusedKey(key=keys[0], address="10.0.0.9", times=3, age=1.0, was="10.0.0.9:7766")
    status = msgspec.structs.replace(STATUS, refused=(row,))
    daemon.answers[GetStatus] = lambda _: status
    where = ("--socket", daemon.directory)
    told = run(*where, "keys", "trust", keys[0], "10.0.0.9:7766", "--list", tmp_path / "list")
    assert "this key was revoked here: it was 10.0.0.9:7766" in told.err


def test_one_key_for_two_places_is_said(run: Run, tmp_path: Path, keys: list[str]) -> None:
    trusted = tmp_path / "trusted.keys"
    run(*NOBODY, "keys", "trust", keys[0], "a:1", "--list", trusted)
    told = run(*NOBODY, "keys", "trust", keys[0], "a", "--list", trusted)
    assert (told.code, "the same key is trusted for a:1 as well" in told.err) == (0, True)


def test_who_may_not_write_the_list_or_the_pair_is_6(
    run: Run, tmp_path: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "trusted.keys"
    trusted.write_text(f"{keys[0]} a:1\n")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("kvd.keys.tempfile.mkstemp", denied)
    for what in (("trust", keys[1], "b:1"), ("revoke", "a:1")):
        told = run(*NOBODY, "keys", *what, "--list", trusted)
        assert (told.code, "type it as root, or as the user that kvd runs as" in told.err) == (6, True), (
            told.err
        )
        assert "name a file" not in told.err
    monkeypatch.setattr("kvd.keys.os.open", denied)
    told = run(*NOBODY, "keys", "generate", "--key-file", tmp_path / "pair", "--list", trusted)
    assert (told.code, "type it as root" in told.err) == (6, True), told.err


def test_whether_kvd_has_taken_note_is_not_known_where_it_does_not_answer(
    run: Run, tmp_path: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "trusted.keys"
    trusted.write_text(f"{keys[0]} a:1\n")
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "kvd.sock"))
        stopped.listen()
        monkeypatch.setenv("KVD_RUNTIME_DIR", str(tmp_path))
        hung = run("keys", "revoke", "a:1", "--list", trusted, "--timeout", "200ms")
        assert (hung.code, "not known whether it has taken note" in hung.out) == (0, True), hung
        assert "did not answer within 0.2 s" in hung.out
        asked = run("keys", "revoke", "a:1", "--timeout", "200ms")
        assert (asked.code, "/etc/kvd" in asked.err) == (3, False), asked.err


def test_a_list_that_kvd_does_not_follow_is_named_beside_the_one_that_it_does(
    run: Run, daemon: FakeDaemon, tmp_path: Path, keys: list[str]
) -> None:
    (tmp_path / "l").write_text(f"{keys[0]} a:1\n")
    where = ("--socket", daemon.directory, "keys", "revoke", "--list", tmp_path / "l")
    assert "follows no list of keys" in run(*where, "a:1").out
    follows = PeerKeys(
        identity="per host", public="", trusted=0, key_file="", list_file="/etc/kvd/trusted.keys"
    )
    daemon.answers[GetStatus] = lambda _: msgspec.structs.replace(STATUS, keys=follows)
    (tmp_path / "l").write_text(f"{keys[0]} a:1\n")
    assert "follows another file: /etc/kvd/trusted.keys" in run(*where, "a:1").out


def test_an_empty_or_missing_pair_is_told_what_helps(run: Run, tmp_path: Path) -> None:
    pair = tmp_path / "host.keys"
    where = (*NOBODY, "keys", "show", "--key-file", pair)
    assert "touch" not in run(*where).err
    pair.touch(0o600)
    assert f"`rm {pair}`, then `kvctl keys generate`" in run(*where).err


def test_a_port_that_is_too_large_is_said_to_be(run: Run, tmp_path: Path, keys: list[str]) -> None:
    told = run(*NOBODY, "keys", "trust", keys[0], "10.0.0.8:99999", "--list", tmp_path / "l")
    assert "99999 is no port, the last one is 65535" in told.err


def test_a_user_that_is_to_own_the_pair_and_does_not_exist_is_to_be_made_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there in (True, False):

        def user(_: str, there: bool = there) -> None:
            if not there:
                raise KeyError

        monkeypatch.setattr("kvctl.commands.keys.generate.pwd.getpwnam", user)
        told = run(
            *NOBODY, "keys", "generate", "--key-file", tmp_path / f"pair{there}", "--list", tmp_path / "l"
        ).err
        assert ("useradd --system" in told) is not there
