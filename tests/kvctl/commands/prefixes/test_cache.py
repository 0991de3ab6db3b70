"""`kvctl cache`: the engines here first, then others by their hints; filtered, sorted, and where there is none."""

from __future__ import annotations

import json

from kvd.wire.prefixes.cache import CacheList, CacheRow, ListCaches, PrefixesGiven
from tests.kvctl.conftest import FakeDaemon, Run


def test_engines_are_listed_filtered_and_sorted(run: Run, daemon: FakeDaemon) -> None:
    def names(*words: str) -> list[str]:
        return run("cache", *words, "-o", "name", "--socket", daemon.directory).out.split()

    assert names() == ["decode-0", "decode-1", "prefill-1"]
    assert names("--filter", "engine=prefill*") == ["prefill-1"]
    assert names("--sort", "host") == ["decode-0", "decode-1", "prefill-1"]
    document = json.loads(run("cache", "-o", "json", "--socket", daemon.directory).out)
    assert document["kind"] == "Caches"
    unknown = run("cache", "--filter", "engine=nope", "--socket", daemon.directory)
    assert "none of 3 has" in unknown.err


def test_engines_of_other_users_are_counted_and_not_shown(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListCaches] = lambda _: CacheList((CacheRow(engine_id="secret", hidden=True),))
    outcome = run("cache", "--socket", daemon.directory)
    assert "secret" not in outcome.out + outcome.err
    assert "engines of other users are not shown" in outcome.err
    assert "no engine" not in outcome.err


def test_where_nobody_shares_it_says_how_to(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListCaches] = lambda _: CacheList(())
    outcome = run("cache", "--socket", daemon.directory)
    assert outcome.code == 0
    assert '"prefixes": "on"' in outcome.err


def test_an_engine_that_turns_reads_down_is_seen_without_being_asked_for(
    run: Run, daemon: FakeDaemon
) -> None:
    assert "BUSY" not in run("cache", "--socket", daemon.directory).out
    row = CacheRow(engine_id="p", given=PrefixesGiven(told=4, busy=31))
    daemon.answers[ListCaches] = lambda _: CacheList((row,))
    header, line = run("cache", "--socket", daemon.directory).out.splitlines()
    assert line.split()[header.split().index("BUSY")] == "31"
    assert json.loads(run("cache", "-o", "json", "--socket", daemon.directory).out)["caches"][0]["busy"] == 31
