"""Flags win over KVCTL_* variables, which win over the config file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvctl.cli.settings import DEFAULT_TIMEOUT, KVDS, Given, Settings, resolve
from kvctl.errors import UsageError
from kvd.service.config import Config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def settle(*flags: Given, **environ: str) -> Settings:
    return resolve(flags, {"XDG_CONFIG_HOME": "/nonexistent", **environ})


def test_without_anything_the_defaults_hold() -> None:
    assert settle() == Settings()
    assert settle().timeout == DEFAULT_TIMEOUT


def test_each_level_wins_over_the_one_below(config: Path) -> None:
    config.write_text("output: yaml\ntimeout: 9\ncolor: never\n")
    settings = settle(Given(output="json"), KVCTL_OUTPUT="wide", KVCTL_TIMEOUT="2m", KVCTL_CONFIG=str(config))
    assert (settings.output, settings.timeout, settings.color) == ("json", 120.0, "never")


def test_an_option_after_the_command_wins_over_one_before() -> None:
    assert settle(Given(output="json"), Given(output="yaml", color="always")) == Settings(
        output="json", color="always"
    )


def test_one_level_decides_where_the_daemon_is(config: Path) -> None:
    config.write_text("socket: /file/kvd.sock\n")
    named = str(config)
    assert settle(Given(runtime_dir="/flag"), KVCTL_SOCKET="/variable/kvd.sock").runtime_dir == "/flag"
    assert settle(Given(runtime_dir="/flag"), KVCTL_SOCKET="/variable/kvd.sock").socket is None
    assert settle(KVCTL_RUNTIME_DIR="/variable", KVCTL_CONFIG=named) == Settings(runtime_dir="/variable")
    assert settle(KVCTL_CONFIG=named) == Settings(socket="/file/kvd.sock")


def test_the_usual_config_file_may_be_absent_a_named_one_may_not(tmp_path: Path) -> None:
    assert resolve((), {"XDG_CONFIG_HOME": str(tmp_path)}) == Settings()
    with pytest.raises(UsageError, match=r"KVCTL_CONFIG: no such file: /nonexistent/x\.yaml"):
        settle(KVCTL_CONFIG="/nonexistent/x.yaml")


def test_the_usual_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "kvctl").mkdir()
    (tmp_path / "kvctl" / "config.yaml").write_text("output: json\n")
    assert resolve((), {"XDG_CONFIG_HOME": str(tmp_path)}).output == "json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("outptu: json", "unknown key 'outptu'; did you mean output"),
        ("state_dir: /x", "unknown key 'state_dir'; that is a setting of kvd "),
        ("output: jsn", "output in .*config.yaml: 'jsn' is not one of .*did you mean json"),
        ("timeout: never", "timeout in .*config.yaml: 'never' is not a duration"),
        ("timeout: [1]", "timeout is \\[1\\], not a text or a number"),
        ("- output", "holds a list"),
        ("{", "is not YAML"),
    ],
)
def test_a_wrong_config_file_says_what_is_wrong_where(config: Path, text: str, said: str) -> None:
    config.write_text(text)
    with pytest.raises(UsageError, match=said):
        settle(KVCTL_CONFIG=str(config))


def test_every_setting_of_kvd_is_known_for_one() -> None:
    assert {*KVDS, "runtime_dir"} == {field.name for field in msgspec.structs.fields(Config)}


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(UsageError, match="KVCTL_TIMEOUT: '0' is not a duration above zero"):
        settle(KVCTL_TIMEOUT="0")


def test_of_several_mistakes_the_colour_is_named_first_and_the_timeout_last() -> None:
    for wrong, named in (
        (Given(color="x", output="x", timeout="x"), "--color"),
        (Given(output="x", timeout="x"), "--output"),
    ):
        with pytest.raises(UsageError, match=named):
            settle(wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5), ("0.5", 0.5), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("3s", 3), ("1d", 86400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert settle(Given(timeout=text)).timeout == seconds


def test_no_color_turns_auto_into_never_and_nothing_else() -> None:
    assert settle(NO_COLOR="1").color == "never"
    assert settle(NO_COLOR="").color == "auto"
    assert settle(Given(color="always"), NO_COLOR="1").color == "always"
