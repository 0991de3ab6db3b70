"""The lines that install work with Debian's own Python, which takes no packages, and put kvd where its unit looks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/deploy.md"])
def test_kvd_goes_into_an_environment_and_is_linked_to_where_systemd_looks(page: str) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [lines] = [block.splitlines() for block in blocks if "pip install kvctl" in block]
    environment = lines[0].split()[3]
    assert lines[0].startswith("python3 -m venv /")
    assert lines[1].startswith(f"{environment}/bin/pip install kvctl")
    assert lines[2] == f"ln -s {environment}/bin/kvd {environment}/bin/kvctl /usr/local/bin/"
    unit = (ROOT / "configs" / "systemd" / "kvd.service").read_text()
    assert "ExecStart=/usr/bin/env kvd\n" in unit
    assert "PATH=" not in unit, "systemd's own has /usr/local/bin"
