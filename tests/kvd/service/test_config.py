"""Settings: every key of the example file is real, and every mistake is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
import yaml

from kvd.keys import write_pair
from kvd.service.config import Config, load
from kvd.service.errors import ConfigError
from kvd.wire.limits import MOST_FOR_DAEMON
from tests.support.daemons import ROOT

EXAMPLE = ROOT / "configs" / "kvd.yaml"


def check(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, {})
    return f"{error.value.message} | {error.value.hint}"


def test_no_file_means_the_defaults() -> None:
    assert load(None, {}) == Config()


def test_the_example_shows_every_setting_with_its_default() -> None:
    def compare(struct: type[msgspec.Struct], tree: dict[str, object]) -> None:
        hints = get_type_hints(struct)
        assert set(tree) == set(hints)
        for name, kind in hints.items():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                below = tree[name]
                assert isinstance(below, dict)
                compare(kind, below)

    compare(Config, yaml.safe_load(EXAMPLE.read_text()))
    assert load(EXAMPLE, {}) == Config()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("peers:\n  listen: x", ["kvd.yaml, line 1", "'peers'", "known here: access, drain_seconds"]),
        ("\npeer:\n  lisen: ''", ["line 3", "'peer.lisen'", "listen"]),
        ("peer: 5", ["line 1", "peer is 5", "section"]),
        ("leases:\n  max_seconds: soon", ["line 2", "leases.max_seconds", "'soon'", "float"]),
        ("ledger:\n  max_rows: 0", ["line 2", "ledger.max_rows", "0"]),
        ("local:\n  queue: 9\npeer:\n  queue: 0", ["line 4", "peer.queue is 0"]),
        ("peer:\n  listen: ''\n  curve: {\n   key: x}", ["line 4", "'peer.curve.key'"]),
        ("'ledger':\n  ? max_rows\n  : no", ["line 2", "ledger.max_rows is False"]),
        ("log_level: loud", ["line 1", "log_level", "'loud'"]),
        ("peer:\n  listen: nowhere", ["peer.listen", "'nowhere'", "host:port"]),
        ("peer:\n  connect: [a:1, 'b']", ["peer.connect", "'b'"]),
        ("liveness:\n  silent_seconds: 20", ["silent_seconds is 20", "gone_seconds is 10"]),
        ("a: [", ["line 1", "not YAML"]),
        ("- a", ["list"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, wanted: list[str]) -> None:
    message = check(tmp_path, text)
    for part in wanted:
        assert part in message


@pytest.mark.parametrize("section", ["local", "peer"])
def test_a_message_size_above_what_is_decoded_counts_as_that_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, section: str
) -> None:
    path = tmp_path / "kvd.yaml"
    path.write_text(f"{section}:\n  max_message_bytes: 67108864\n")
    assert load(path, {}) == Config()
    assert (
        f"{path}, line 2: {section}.max_message_bytes is 67108864, of which {MOST_FOR_DAEMON} count"
        in caplog.text
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}/none: No such file"):
        load(tmp_path / "none", {})


def test_variables_override_the_file_and_flags_both(tmp_path: Path) -> None:
    path = tmp_path / "kvd.yaml"
    path.write_text("peer:\n  listen: 127.0.0.1:1\nledger:\n  max_rows: 5\n")
    variables = {"KVD_PEER_LISTEN": "127.0.0.1:2", "KVD_LEDGER_MAX_ROWS": "7", "KVD_PEER_CONNECT": "a:1,b:2"}
    config = load(path, variables, {"peer.listen": "127.0.0.1:3"})
    assert (config.peer.listen, config.ledger.max_rows, config.peer.connect) == (
        "127.0.0.1:3",
        7,
        ("a:1", "b:2"),
    )


def refused(environment: dict[str, str], path: Path | None = None, **flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, environment, {key.replace("__", "."): value for key, value in flags.items()})
    return error.value.message


def test_a_mistake_in_a_variable_or_flag_is_not_the_files(tmp_path: Path) -> None:
    path = tmp_path / "kvd.yaml"
    path.write_text("ledger:\n  max_rows: 5\nliveness:\n  gone_seconds: 4\n")
    assert refused({"KVD_LEDGER_MAX_ROWS": "many"}, path).startswith(
        "$KVD_LEDGER_MAX_ROWS: ledger.max_rows is 'many'"
    )
    assert refused({"KVD_LOG_LEVEL": "loud"}).startswith("$KVD_LOG_LEVEL: log_level is 'loud'")
    assert refused({}, path, log_level="loud").startswith("the command line: log_level is 'loud'")
    assert refused({"KVD_LIVENESS_SILENT_SECONDS": "9"}, path) == (
        f"$KVD_LIVENESS_SILENT_SECONDS and {path}, line 4: liveness.silent_seconds is 9, liveness.gone_seconds is 4:"
        " it must be the larger"
    )


def test_a_variable_that_is_empty_names_no_peer() -> None:
    assert load(None, {"KVD_PEER_CONNECT": ""}).peer.connect == ()


def kvd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvd.service", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_settings_with_which_kvd_does_not_start_are_not_good(tmp_path: Path) -> None:
    wide = tmp_path / "kvd.yaml"
    wide.write_text("peer:\n  listen: 0.0.0.0:17768\n")
    done = kvd("--check-config", "--config", str(wide))
    assert (done.returncode, "key_file is not set" in done.stderr) == (2, True), done.stderr
    write_pair(pair := tmp_path / "host.keys")
    wide.write_text(f"peer:\n  listen: 0.0.0.0:17768\n  curve:\n    key_file: {pair}\n")
    done = kvd("--check-config", "--config", str(wide))
    assert (done.returncode, "set peer.advertise" in done.stderr) == (2, True), done.stderr


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("peer:\n  port: 5\n")
    done = kvd("--config", str(tmp_path / "bad.yaml"))
    assert done.returncode == 2
    assert "line 2: no setting is called 'peer.port'" in done.stderr
    assert done.stderr.splitlines()[0].endswith(" [KVD-SETTINGS]")
    assert "Traceback" not in done.stderr
    assert kvd("--check-config", "--config", str(EXAMPLE)).returncode == 0
    assert kvd("--version").stdout.startswith("kvd ")


def test_places_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    long = kvd("--runtime-dir", str(tmp_path / ("x" * 120)))
    assert (long.returncode, "at most 107" in long.stderr) == (2, True)
    tmp_path.chmod(0o777)
    opened = kvd("--runtime-dir", str(tmp_path))
    assert (opened.returncode, "mode 0777" in opened.stderr) == (2, True)
    assert opened.stderr.splitlines()[0].endswith(" [KVD-START]")


def test_a_peer_socket_on_the_network_needs_keys(tmp_path: Path) -> None:
    done = kvd("--runtime-dir", str(tmp_path / "r"), "--listen", "0.0.0.0:0")
    assert done.returncode == 2
    assert "not loopback" in done.stderr
    assert "--new-keys" in done.stderr


def test_keys_that_cannot_be_written_come_with_the_next_step(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "peer.keys"
    absent = kvd("--new-keys", str(file))
    assert (absent.returncode, f"mkdir -p {file.parent}" in absent.stderr) == (2, True)
    file.parent.mkdir()
    assert kvd("--new-keys", str(file)).returncode == 0
    again = kvd("--new-keys", str(file))
    assert (again.returncode, "never written over" in again.stderr) == (2, True)
    assert "it exists [KVD-KEY-FILE]\n" in again.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prot", "5"), "unrecognized arguments: --prot 5"),
        (("--log-level", "loud"), "invalid choice: 'loud'"),
        (("init", "--group"), "--group: expected one argument"),
    ],
)
def test_a_flag_that_is_wrong_is_an_error_like_others(flags: tuple[str, ...], said: str) -> None:
    done = kvd(*flags)
    wrong, following = done.stderr.splitlines()
    assert (done.returncode, said in wrong, wrong.endswith(" [KVD-SETTINGS]")) == (2, True, True), done.stderr
    assert re.fullmatch(r"kvd: next: `kvd( init)? --help` has the flags", following)


def test_a_variable_that_is_misspelt_is_named_with_the_one_that_was_meant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(None, {"KVD_PEER_LISEN": "127.0.0.1:1", "KVD_LOG_LEVEL": "info", "KVD_HOME": "x", "PEER": "y"})
    [told] = [record.getMessage() for record in caplog.records]
    assert (
        told == "$KVD_PEER_LISEN sets nothing, no setting of kvd is called so: did you mean KVD_PEER_LISTEN?"
    )
