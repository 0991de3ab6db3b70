"""Settings of membership: what kvd does not start with, and what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.service.config import Config, load
from kvd.service.errors import ConfigError
from kvd.service.membership import sources

ETCD = "peer: {listen: 'a:1'}\nmembership: {source: etcd"


def settings(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvd.yaml"
    path.write_text(text)
    return load(path, {})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("membership: {source: dns}", ["membership.source is dns", "peer.listen is not set"]),
        ("peer: {listen: 'a:1'}\nmembership: {source: dns}", ["membership.dns.name is not set", "svc.cluster.local"]),
        ("peer: {listen: 'a:1'}\nmembership: {source: dns, dns: {name: fleet}}", ["membership.dns.name", "'fleet'"]),
        ("peer: {listen: 'a:1'}\nmembership: {source: dns, dns: {name: 'fleet:0'}}", ["port 0"]),
        (f"{ETCD}}}", ["membership.etcd.endpoints is not set", "2379"]),
        (f"{ETCD}, etcd: {{endpoints: ['10.0.0.2:2379']}}}}", ["'10.0.0.2:2379' is no URL"]),
        (f"{ETCD}, etcd: {{endpoints: ['http://u:p@h:1']}}}}", ["is no URL"]),
        (f"{ETCD}, etcd: {{endpoints: ['http://h:99999']}}}}", ["is no URL"]),
        (f"{ETCD}, etcd: {{endpoints: ['http://h:1'], cluster: 'a/b'}}}}", ["membership.etcd.cluster", "'a/b'"]),
        (f"{ETCD}, etcd: {{endpoints: ['http://h:1'], host: '../x'}}}}", ["membership.etcd.host"]),
        (f"{ETCD}, etcd: {{endpoints: ['http://h:1'], cert_file: c}}}}", ["cert_file is set but", "key_file is not"]),
        (f"{ETCD}, etcd: {{endpoints: ['http://h:1'], user: u}}}}", ["user is set but", "password_file is not"]),
        (f"{ETCD}, etcd: {{endpoints: ['https://h:1'], ca_file: /none}}}}", ["/none", "No such file"]),
        (f"{ETCD}, etcd: {{endpoints: ['http://h:1'], user: u, password_file: /none}}}}", ["/none", "No such file"]),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, text: str, wanted: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        sources.check(settings(tmp_path, text))
    for part in wanted:
        assert part in f"{error.value.message} | {error.value.hint}"


def test_without_aiohttp_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError) as error:
        sources.check(settings(tmp_path, f"{ETCD}, etcd: {{endpoints: ['http://h:1']}}}}"))
    assert "pip install kvctl[etcd]" in error.value.hint


def test_an_unknown_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source is 'zookeeper'"):
        settings(tmp_path, "membership: {source: zookeeper}")


def test_good_settings_are_good(tmp_path: Path) -> None:
    sources.check(Config())
    sources.check(
        settings(tmp_path, "peer: {listen: 'a:1'}\nmembership: {source: dns, dns: {name: 'fleet:1'}}")
    )
    sources.check(settings(tmp_path, f"{ETCD}, etcd: {{endpoints: ['http://[::1]:2379', 'https://h']}}}}"))
