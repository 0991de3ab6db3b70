# ruff: noqa: INP001 - a script, in no package
"""Holds each Kubernetes manifest of a folder against the schemas of the oldest and the newest version we name."""

from __future__ import annotations

import sys
from pathlib import Path

import kubernetes_validate
import yaml

VERSIONS = ("1.29", "1.33", "1.37")
"""From the first with sidecars that need no switch; docs/kubernetes.md names them."""


def main(folder: Path) -> int:
    """Check them all; the exit status is 1 when one does not hold."""
    wrong = 0
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            for version in VERSIONS:
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    wrong += 1
                    place = ".".join(map(str, error.path))
                    print(f"{path}: {document['kind']} at {place}, Kubernetes {version}: {error.message}")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
