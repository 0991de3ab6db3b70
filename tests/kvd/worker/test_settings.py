"""kv_connector_extra_config: what is not understood is named, with what it may be."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.wire.identity import HERE, Endpoint
from kvd.worker.errors import BadSettings
from kvd.worker.settings import ConnectorSettings, home_kvd, read_settings


def test_nothing_given_is_all_defaults() -> None:
    assert read_settings({}) == ConnectorSettings()


def test_what_is_given_is_taken() -> None:
    settings = read_settings({"runtime_dir": "/x", "lease_seconds": 5, "backend_options": {"num_threads": 1}})
    assert (settings.runtime_dir, settings.lease_seconds) == ("/x", 5.0)
    assert settings.backend_options == {"num_threads": 1}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lease": 3}, "lease is no setting; there are runtime_dir, backend, backend_options, mode"),
        (
            {"weights": ""},
            'weights is \'\'; it must be "auto", "off" or a name of 1 to 128 printable characters',
        ),
        ({"weights": " a"}, "weights is ' a'; it must be"),
        ({"weights": "a\n"}, "weights is 'a\\n'; it must be"),
        ({"weights": "a" * 129}, 'it must be "auto", "off" or a name of 1 to 128'),
        ({"weights": None}, "weights is None; it must be a string"),
        ({"mode": "both"}, 'mode is \'both\'; it must be one of "pull", "push"'),
        ({"backend": None}, "backend is None; it must be a string"),
        ({"runtime_dir": 3}, "runtime_dir is 3; it must be a string or null"),
        ({"backend_options": []}, "backend_options is []; it must be an object"),
        ({"load_timeout": "20s"}, "load_timeout is '20s'; it must be a number"),
        ({"load_timeout": True}, "load_timeout is True; it must be a number"),
        ({"load_timeout": "20s"}, "it must be a number from 0.01 to 86400 seconds"),
        (
            {"kv_checksum": 0},
            'kv_checksum is 0; it must be one of "off", "all" or a whole number from 1 to 2.14748e+09 requests',
        ),
        ({"load_timeout": 0}, "load_timeout is 0; it must be a number from 0.01 to 86400 seconds"),
        (
            {"lease_seconds": float("nan")},
            "lease_seconds is nan; it must be a number from 0.1 to 86400 seconds",
        ),
        ({"handshake_timeout": float("inf")}, "handshake_timeout is inf; it must be a number from"),
        ({"clock_skew": -1}, "clock_skew is -1; it must be a number from 0 to"),
        ({"lease_grace": -0.5}, "lease_grace is -0.5; it must be a number from 0 to"),
        ({"piece_bytes": 0}, "piece_bytes is 0; it must be a whole number from 1 to 1.09951e+12 bytes"),
        ({"probe": 1}, "probe is 1; it must be true or false"),
        ({"piece_bytes": 1.5}, "piece_bytes is 1.5; it must be a whole number"),
        ({"home": ""}, "home is ''; it must be \"auto\", HOST or HOST:PORT"),
        ({"home": "a b"}, "home is 'a b'; it must be"),
        ({"home": "a:70000"}, "home is 'a:70000'; it must be"),
        ({"home": "http://a:1"}, "home is 'http://a:1'; it must be"),
        ({"lease_margin": 30}, "lease_margin is 30 and lease_seconds 30; the margin must be smaller"),
    ],
)
def test_a_bad_entry_names_itself_and_what_it_may_be(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings) as raised:
        read_settings(extra)
    assert said in str(raised.value)


def test_all_bad_entries_are_named_at_once() -> None:
    with pytest.raises(BadSettings, match=r"mode is 'x'.*; leese is no setting.*; load_timeout is -1"):
        read_settings({"mode": "x", "leese": 1, "load_timeout": -1})


@pytest.mark.parametrize(
    ("home", "kvd"),
    [
        ("auto", None),
        ("here", HERE),
        ("head", Endpoint("head", 0)),
        ("head:7766", Endpoint("head", 7766)),
        ("10.0.0.1", Endpoint("10.0.0.1", 0)),
        ("fd00::1", Endpoint("fd00::1", 0)),
        ("[fd00::1]:7766", Endpoint("fd00::1", 7766)),
    ],
)
def test_a_home_is_the_kvd_of_a_host(home: str, kvd: Endpoint | None) -> None:
    assert home_kvd(read_settings({"home": home}).home) == kvd
