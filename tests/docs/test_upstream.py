"""docs/upstream-tests.md says what `tests.upstream.adapted` has, and what that names is there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from kvd.wire.transfer import ChecksumResult, LedgerRow, ListTransfers, TransferList, TransferRecord
from tests.support.daemons import ROOT
from tests.support.ledgers import record
from tests.upstream import ledger
from tests.upstream.adapted import (
    ADAPTATIONS,
    FETCHED,
    FILES,
    SERVED,
    SERVED_ADAPTATIONS,
    UNFIT,
    Adaptation,
    Unfit,
)
from tests.upstream.ledger import unexplained, unmoved, unused

PAGE = ROOT / "docs" / "upstream-tests.md"


def adapted(what: Mapping[str, Adaptation]) -> str:
    rows = [f"| {one.what} | {one.now} | {one.why} |" for one in what.values()]
    return "\n".join(["| theirs | here | why |", "|---|---|---|", *rows, ""])


def unfit() -> str:
    rows = [
        f"| `{file.name}` | {', '.join(map('`{}`'.format, one.names))} | {one.why} | {instead(one)} |"
        for file, unfit in UNFIT.items()
        for one in unfit
    ]
    head = "| file | tests | why not | what wants the like of KvdConnector |"
    return "\n".join([head, "|---|---|---|---|", *rows, ""])


def instead(one: Unfit) -> str:
    return f"`{one.instead}`" if one.instead else "none"


TABLES = {"units": adapted(ADAPTATIONS), "served": adapted(SERVED_ADAPTATIONS), "unfit": unfit()}


def section(name: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?<=<!-- {name}, WRITE_DOCS=1 pytest tests/docs/test_upstream.py -->\n).*?(?=<!-- end -->)",
        re.DOTALL,
    )


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_made_from_the_list(name: str) -> None:
    written = PAGE.read_text()
    now = section(name).sub(lambda _match: TABLES[name], written, count=1)
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(now)
    assert section(name).search(written)
    assert PAGE.read_text() == now


def test_what_is_there_instead_is_there() -> None:
    names = {one.instead for unfit in UNFIT.values() for one in unfit if one.instead}
    named = {name: name.split("::") for name in names}
    assert len(named) > 3
    assert [
        name for name, (path, test) in named.items() if f"\ndef {test}(" not in (ROOT / path).read_text()
    ] == []


def test_setup_fetches_what_is_run() -> None:
    setup = (ROOT / ".ci" / "setup").read_text()
    files = [*FILES, *(file for files in SERVED.values() for file in files)]
    assert [file.name for file in files if file.stem not in setup] == []
    assert str(FETCHED.relative_to(ROOT)) in setup


def test_a_record_is_a_load_that_came_or_a_miss_with_a_reason() -> None:
    came, missed = record(1), replace(record(2, "miss"), code="LEASE_ENDED", cause="too late")
    differs = replace(record(3), checksum=ChecksumResult(state="differs"))
    empty = replace(record(4), bytes=0)
    found = [came, missed, differs, empty]
    assert unexplained([came], {}) == []
    assert [line.split()[0:2] for line in unexplained(found, {})] == [
        ["miss", "LEASE_ENDED"],
        ["done", "-"],
        ["done", "-"],
    ]
    known = {"LEASE_ENDED": "a test waits for it", "FORCED": "a test orders it"}
    assert len(unexplained(found, known)) == 2
    assert unused(found, known) == ["FORCED"]


def test_the_ledger_has_the_tokens_that_vllm_counts_and_their_last_one_may_be_computed_again() -> None:
    loads = [replace(record(number), tokens=100) for number in range(2)]
    for tokens in (0, 200, 202):
        assert unmoved(loads, tokens) == []
    assert unmoved(loads, 203) == ["2 loads brought 200 tokens, vLLM counts 203"]
    assert unmoved([replace(record(3, "miss"), tokens=100)], 1) == ["0 loads brought 0 tokens, vLLM counts 1"]


def test_all_of_two_ledgers_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "PAGE", 2)
    hosts = [FakeKvd([record(number) for number in range(count)]) for count in (0, 5)]
    assert [one.request_id for one in ledger.records(hosts)] == ["r4", "r3", "r2", "r1", "r0"]  # type: ignore[arg-type]


@dataclass
class FakeKvd:
    """A kvd with these records, the first with number 1."""

    rows: list[TransferRecord]

    def ask(self, asked: ListTransfers) -> TransferList:
        last = asked.before - 1 if asked.before else len(self.rows)
        first = max(0, last - asked.limit)
        found = [LedgerRow(n + 1, self.rows[n]) for n in range(first, last)]
        return TransferList(rows=tuple(reversed(found)), total=len(self.rows), more=first > 0)
