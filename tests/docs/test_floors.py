"""The floors of docs/architecture.md are the layers that lint-imports holds the code to."""

from __future__ import annotations

import re
import tomllib
from itertools import groupby

from tests.support.daemons import ROOT

ROW = re.compile(r"^\| (\d) \| ((?:`[\w.]+`(?:, )?)+) \|", re.MULTILINE)


def test_the_table_and_the_contract_have_the_same_floors() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().split("## Floors and rooms")[1].split("\n## ")[0]
    rows = [(int(number), re.findall(r"`([\w.]+)`", names)) for number, names in ROW.findall(page)]
    assert [number for number, _ in rows] == sorted(number for number, _ in rows)
    told = {
        number: sorted(name for _, names in found for name in names)
        for number, found in groupby(rows, key=lambda row: row[0])
    }
    assert told.pop(6) == ["kvctl"]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (floors,) = [one for one in contracts if one.get("containers") == ["kvd"]]
    assert floors["exhaustive"]
    held = [sorted(f"kvd.{name}" for name in layer.split(" | ")) for layer in floors["layers"]]
    assert list(reversed(held)) == [told[number] for number in sorted(told)]
