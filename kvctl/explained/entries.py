"""The texts of all codes, one YAML file for each kind of code.

A code may stand in several files, as PROMPT_MISMATCH does: it is what a load misses with, what doctor finds, and a
reason why nothing is handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct


class CodeText(Struct, frozen=True, forbid_unknown_fields=True):
    """What is said of one code: what it means, why it comes about, what to look at, what to do.

    ``test`` is the test that brings it about; empty for the codes of families, with which nothing is answered.
    """

    says: str
    cause: str
    evidence: str
    next: str
    test: str


class Kind(NamedTuple):
    """One kind of code: the name of its file, who shows it, and the heading of its part of the page."""

    name: str
    shown_by: str
    heading: str


KINDS = (
    Kind("refusals", "an error", "Refusals: what kvd or an engine answers"),
    Kind("errors", "an error", "Errors of kvctl, clients, connector, backends and files"),
    Kind("misses", "kvctl transfers", "Why a load missed"),
    Kind("checks", "kvctl doctor", "Checks of kvctl doctor"),
    Kind("reasons", "kvctl doctor, in brackets", "Reasons of NOT_DISAGGREGATED"),
    Kind("ports", "kvctl ports", "Findings of kvctl ports"),
    Kind("slow", "kvctl slow", "Findings of kvctl slow"),
    Kind("topology", "kvctl describe-topology", "Findings of kvctl describe-topology"),
)
"""In the order in which they are shown."""


def texts(kind: Kind) -> dict[str, CodeText]:
    """The codes of a kind with their texts, in the order of the file."""
    return msgspec.yaml.decode(
        Path(__file__).with_name(f"{kind.name}.yaml").read_bytes(), type=dict[str, CodeText]
    )


def entries() -> Iterator[tuple[Kind, str, CodeText]]:
    """All of them, kind by kind."""
    for kind in KINDS:
        for code, text in texts(kind).items():
            yield kind, code, text


def codes() -> tuple[str, ...]:
    """Every code once, by name."""
    return tuple(sorted({code for _, code, _ in entries()}))
