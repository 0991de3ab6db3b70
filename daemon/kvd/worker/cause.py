"""Why a load is a miss: text for people, a code for machines."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.backends.errors import BackendError
from kvd.client.errors import RefusedByDaemon
from kvd.geometry.errors import GeometryError
from kvd.topology.errors import TopologyError
from kvd.wire.codes import RefusalCode
from kvd.wire.miss import MissCode

UNREACHABLE: RefusalCode = "KVD-PEER-UNREACHABLE"
"""kvd's code for a peer's kvd that does not answer."""
UNKNOWN_YET: RefusalCode = "KVD-NOT-REGISTERED"
"""A kvd that has just been started: what was sent to the one before came to it ahead of our registration."""
NOT_NOW: tuple[RefusalCode, ...] = ("KVD-BUSY", "KVD-DRAINING")
"""kvd's codes for "ask again": too many wait already, or the kvd that was asked is being started again."""
OTHER_GENERATION: RefusalCode = "KVD-PEER-GENERATION"
"""kvd's code for an engine that restarted since it was named."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something is a miss; None where nothing is. Messages carry its `text_of` and `code_of`."""

    text: str
    code: MissCode

    def __str__(self) -> str:
        """As logs show it."""
        return self.text


ABORTED = Cause("the prefiller's request was aborted", "PREFILL_ENDED")
SHUTTING_DOWN = Cause("the engine is shutting down", "SHUTDOWN")
REQUEST_OVER = Cause("the request is over", "REQUEST_OVER")


def from_error(error: Exception, what: str = "") -> Cause:
    """An error as a cause, with the code of its kind; ``what`` failed stands before its text."""
    code: MissCode = "INTERNAL"
    if isinstance(error, (TopologyError, GeometryError)):
        code = "DOES_NOT_FIT"
    elif isinstance(error, BackendError):
        code = "TRANSFER_FAILED"
    text = str(error) or type(error).__name__
    if code == "INTERNAL":
        text = f"{type(error).__name__}: {error}"
    return Cause(f"{what}: {text}" if what else text, code)


def was_away(error: BaseException) -> bool:
    """Whether nobody answered, ours or the peer's kvd, or not yet; else the answer was no."""
    return not isinstance(error, RefusedByDaemon) or error.code in (UNREACHABLE, UNKNOWN_YET, *NOT_NOW)


def is_to_ask_again(error: BaseException) -> bool:
    """Whether kvd asks to be asked again soon."""
    return isinstance(error, RefusedByDaemon) and error.code in NOT_NOW


def refusal_code(error: BaseException) -> MissCode:
    """The code of a miss for want of a peer: nobody answered, the engine restarted, or kvd said no."""
    if was_away(error):
        return "PEER_AWAY"
    restarted = isinstance(error, RefusedByDaemon) and error.code == OTHER_GENERATION
    return "PEER_GONE" if restarted else "PEER_REFUSED"


def text_of(cause: Cause | None) -> str:
    """The text of a cause, "" where there is none."""
    return cause.text if cause else ""


def code_of(cause: Cause | None) -> str:
    """The code of a cause, "" where there is none."""
    return cause.code if cause else ""
