"""docs/upstream-tests.md says what `tests.upstream.adapted` has, and what that names is there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import pytest

from tests.support.daemons import ROOT
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
