"""Versions of this distribution that its own history has, to be run beside this one."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.daemons import ROOT
from tests.support.servers import CALM


@dataclass(frozen=True)
class Release:
    """A version: where its packages lie, what its kvd and connector speak, and the schema of its ledger."""

    name: str
    root: Path
    wire: int
    contract: int
    ledger: int

    @property
    def environment(self) -> dict[str, str]:
        """What makes a Python process take this version's packages; they come before those that are installed."""
        paths = [CALM["PYTHONPATH"], str(self.root / "daemon"), str(self.root)]
        return {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class Commit:
    """A version that somebody may have installed from this history."""

    name: str
    commit: str
    wire: int
    contract: int
    ledger: int

    def __str__(self) -> str:
        return self.name

    def unpacked(self, folder: Path) -> Release:
        """Its files in a folder of their own. Skips the test where this checkout does not have that history."""
        git = ("git", "-C", str(ROOT))
        try:
            subprocess.run(
                [*git, "cat-file", "-e", f"{self.commit}^{{commit}}"], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            pytest.skip(f"commit {self.commit} is not here: not a clone, or a shallow one")
        made = folder / self.commit[:8]
        command = [*git, "archive", self.commit, "daemon/kvd", "kvctl", "configs"]
        packed = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(made, filter="data")
        return Release(self.name, made, self.wire, self.contract, self.ledger)


THIS = Release("this version", ROOT, wire=2, contract=2, ledger=3)
WIRE_BEFORE = Commit(
    "the last of wire 1", "f120b5cd056fc5b0746d2b794ea584a8c60f39ff", wire=1, contract=1, ledger=1
)
"""Its params are of contract 1, too."""
FIRST_OF_THIS_WIRE = Commit(
    "the first of this wire", "61d21c83a5c3fb65bf9b9727eb537571be19b75f", wire=2, contract=2, ledger=2
)
"""The oldest whose params are whole: 2 has a digest and a seal."""
FIRST_WITH_CLASSES = Commit(
    "the first with classes", "515a8f5f7e28caf5c62825a642924d403bd1ebc3", wire=2, contract=2, ledger=3
)
