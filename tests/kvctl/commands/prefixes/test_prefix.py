"""`kvctl prefix`: what is asked for tokens, a file and a hash, and what is no question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvd.wire.frame import Message
from kvd.wire.prefixes.cache import FindHolders, HolderList, HolderRow, LookedUp
from tests.kvctl.conftest import FakeDaemon, Run


@pytest.fixture
def asked(daemon: FakeDaemon) -> list[FindHolders]:
    """What the kvd was asked, in its order; one engine holds something, one nothing, one is another user's."""
    given: list[FindHolders] = []

    def answer(message: Message) -> Message:
        assert isinstance(message, FindHolders)
        given.append(message)
        found = LookedUp(tokens=0 if message.block_hash else 2, blocks=(1, 0))
        rows = HolderRow(engine_id="holds", found=found), HolderRow(engine_id="other", hidden=True)
        return HolderList((*rows, HolderRow(engine_id="none", found=LookedUp())))

    daemon.answers[FindHolders] = answer
    return given


def test_tokens_are_asked_for_from_the_line_and_from_a_file(
    run: Run, daemon: FakeDaemon, asked: list[FindHolders], tmp_path: Path
) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[1, 15043,\n 3186]\n")
    for words in (("--tokens", "1,15043,3186"), ("--file", file)):
        outcome = run("prefix", *words, "-o", "json", "--socket", daemon.directory)
        assert outcome.code == 0, outcome.err
        body = json.loads(outcome.out)
        assert [row["engine_id"] for row in body["holders"]] == ["holds", "none"]
        assert "engines of other users are not shown" in outcome.err
    assert [one.tokens for one in asked] == [(1, 15043, 3186)] * 2


def test_a_block_is_asked_for_by_its_hash(run: Run, daemon: FakeDaemon, asked: list[FindHolders]) -> None:
    assert run("prefix", "0x" + "ab" * 32, "--socket", daemon.directory).code == 0
    assert [one.block_hash for one in asked] == [b"\xab" * 32]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no prompt was given; it takes one"),
        (("ab" * 32, "--tokens", "1"), "2 of BLOCK_HASH, --tokens and --file were given"),
        (("abc",), "'abc' is no hash of a block"),
        (("--tokens", "1,two"), "'two' is no token id"),
        (("--tokens", ""), "the prompt has no tokens"),
        (("--tokens", "[]"), "the prompt has no tokens"),
        (("--file", "/dev/null"), "the prompt has no tokens"),
        (("--file", "/nowhere/ids"), "cannot read /nowhere/ids: No such file or directory"),
        (("--tokens", ",".join(["1"] * 1_000_001)), "the prompt has 1,000,001 tokens"),
    ],
)
def test_what_is_no_question_is_2_and_asks_nobody(
    run: Run, daemon: FakeDaemon, asked: list[FindHolders], words: tuple[str, ...], said: str
) -> None:
    outcome = run("prefix", *words, "--socket", daemon.directory)
    assert (outcome.code, outcome.out, asked) == (2, "", [])
    assert said in outcome.err


def test_where_nobody_shares_it_says_how_to(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[FindHolders] = lambda _: HolderList(())
    outcome = run("prefix", "--tokens", "1", "--socket", daemon.directory)
    assert outcome.code == 0
    assert '"prefixes": "on"' in outcome.err
