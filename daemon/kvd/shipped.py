"""Files that come with the programs: the unit, the default configuration, pages of docs/, scripts of completion.

An installed package has them beside it, a checkout where they are kept.
"""

from __future__ import annotations

from pathlib import Path

INSTALLED = Path(__file__).parent / "share"
CHECKOUT = Path(__file__).parents[2]
PLACES = {
    "kvd.yaml": "configs/kvd.yaml",
    "systemd": "configs/systemd",
    "completions": "completions",
    "docs": "docs",
}
"""Each with its place in a checkout; pyproject.toml puts them into the wheel by the same names."""


def shipped(name: str) -> Path:
    """Where a file or folder of `PLACES` is."""
    installed = INSTALLED / name
    return installed if installed.exists() else CHECKOUT / PLACES[name]
