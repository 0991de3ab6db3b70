"""Settings of membership: what kvd does not start with, and what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.service.config import Config, load
from kvd.service.errors import ConfigError
from kvd.service.membership import sources


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
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, text: str, wanted: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        sources.check(settings(tmp_path, text))
    for part in wanted:
        assert part in f"{error.value.message} | {error.value.hint}"


def test_an_unknown_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source is 'zookeeper'"):
        settings(tmp_path, "membership: {source: zookeeper}")


def test_good_settings_are_good(tmp_path: Path) -> None:
    sources.check(Config())
    sources.check(
        settings(tmp_path, "peer: {listen: 'a:1'}\nmembership: {source: dns, dns: {name: 'fleet:1'}}")
    )
