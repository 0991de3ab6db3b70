"""Codes of misses: a closed list, each explained where operators read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvd.backends.errors import BackendError
from kvd.topology.errors import TopologyError
from kvd.wire.miss import MISS_CODES, MISS_MEANINGS, known_code
from kvd.worker.cause import NO_CAUSE, Cause, as_cause, code_of, from_error

PAGE = Path(__file__).resolve().parents[3] / "docs" / "transfers.md"


def test_every_code_has_a_meaning_and_stands_in_the_docs() -> None:
    assert set(MISS_MEANINGS) == MISS_CODES
    page = PAGE.read_text()
    assert [code for code, meaning in MISS_MEANINGS.items() if f"| `{code}` | {meaning} |" not in page] == []


@pytest.mark.parametrize("code", ["", "NO_SUCH", "prompt_mismatch", "X" * 10_000])
def test_what_is_no_code_is_unknown(code: str) -> None:
    assert known_code(code) == "UNKNOWN"


def test_a_cause_reads_as_its_text_and_keeps_its_code_between_processes() -> None:
    cause = Cause("not complete within its 3.0 s", "TOO_LATE")
    there = pickle.loads(pickle.dumps(cause))  # noqa: S301 (our own)
    assert (there, there.code) == ("not complete within its 3.0 s", "TOO_LATE")
    assert type(str(cause)) is str


def test_no_cause_has_no_code() -> None:
    assert (bool(NO_CAUSE), code_of(NO_CAUSE)) == (False, "")
    assert not pickle.loads(pickle.dumps(NO_CAUSE))  # noqa: S301 (our own)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (TopologyError("block 9 of 8"), "DOES_NOT_FIT", "read: block 9 of 8"),
        (BackendError("no lane"), "TRANSFER_FAILED", "read: no lane"),
        (ZeroDivisionError("oh"), "INTERNAL", "read: ZeroDivisionError: oh"),
    ],
)
def test_the_code_of_an_error_is_that_of_its_kind(error: Exception, code: str, text: str) -> None:
    cause = from_error(error, "read")
    assert (cause.code, cause) == (code, text)


def test_what_another_side_says_keeps_its_code() -> None:
    assert as_cause("they say so", "PROMPT_MISMATCH").code == "PROMPT_MISMATCH"
    assert as_cause("they say so", "something newer").code == "UNKNOWN"
