"""Codes of misses: a closed list, each explained where operators read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvd.backends.errors import BackendError
from kvd.client.errors import RefusedByDaemon
from kvd.topology.errors import TopologyError
from kvd.wire.miss import MISS_CODES, MISS_MEANINGS, MissCode, known_code
from kvd.wire.reply import Refused
from kvd.worker.cause import Cause, code_of, from_error, refusal_code, text_of

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
    assert pickle.loads(pickle.dumps(cause)) == cause  # noqa: S301 (our own)
    assert str(cause) == "not complete within its 3.0 s"


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ("KVD-PEER-UNREACHABLE", "PEER_AWAY"),
        ("KVD-PEER-GENERATION", "PEER_GONE"),
        ("KVD-INCOMPATIBLE", "PEER_REFUSED"),
        ("KVD-BUSY", "PEER_AWAY"),
        ("KVD-DRAINING", "PEER_AWAY"),
    ],
)
def test_a_peer_that_restarted_is_gone_whoever_says_so(refusal: str, code: MissCode) -> None:
    assert refusal_code(RefusedByDaemon(Refused(code=refusal, message="no"))) == code


def test_messages_carry_a_causes_text_and_code_and_of_none_nothing() -> None:
    assert (text_of(None), code_of(None)) == ("", "")
    cause = Cause("not complete within its 3.0 s", "TOO_LATE")
    assert (text_of(cause), code_of(cause)) == ("not complete within its 3.0 s", "TOO_LATE")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (TopologyError("block 9 of 8"), "DOES_NOT_FIT", "read: block 9 of 8"),
        (BackendError("no lane"), "TRANSFER_FAILED", "read: no lane"),
        (ZeroDivisionError("oh"), "INTERNAL", "read: ZeroDivisionError: oh"),
    ],
)
def test_the_code_of_an_error_is_that_of_its_kind(error: Exception, code: MissCode, text: str) -> None:
    cause = from_error(error, "read")
    assert cause == Cause(text, code)
