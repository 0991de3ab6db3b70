"""Why a load was a miss, in one word that stays the same: for counters, filters and alarms."""

from __future__ import annotations

from typing import Literal, get_args

MissCode = Literal[
    "PROMPT_MISMATCH",
    "PROMPT_UNCHECKED",
    "BAD_PARAMS",
    "PEER_REFUSED",
    "PEER_AWAY",
    "PEER_GONE",
    "LEASE_ENDED",
    "PREFIX_LOST",
    "PREFILL_ENDED",
    "DOES_NOT_FIT",
    "TOO_LATE",
    "TRANSFER_FAILED",
    "CHECKSUM_MISMATCH",
    "FORCED",
    "DRAINING",
    "REQUEST_OVER",
    "SHUTDOWN",
    "INTERNAL",
    "UNKNOWN",
]
MISS_MEANINGS: dict[MissCode, str] = {
    "PROMPT_MISMATCH": "the prompt here is not the one that was prefilled",
    "PROMPT_UNCHECKED": "the prefiller's key is not known here, so its prompt could not be compared",
    "BAD_PARAMS": "kv_transfer_params cannot be used: they are incomplete, of another connector, or contradict",
    "PEER_REFUSED": "kvd refused the other engine: it does not fit, or nobody knows it",
    "PEER_AWAY": "a kvd or the other engine did not answer in time",
    "PEER_GONE": "the other engine ended or restarted: it is not of the generation that was asked for",
    "LEASE_ENDED": "the prefiller no longer keeps the blocks",
    "PREFIX_LOST": "an engine that held the prefix needed its blocks while they were read",
    "PREFILL_ENDED": "the prefiller aborted the request, preempted it, or was never sent it",
    "DOES_NOT_FIT": "the blocks of the two sides do not fit together",
    "TOO_LATE": "the load was not complete within its time",
    "TRANSFER_FAILED": "the backend could not move the bytes",
    "CHECKSUM_MISMATCH": "the bytes that came are not those that were computed",
    "FORCED": "an operator ordered the miss",
    "DRAINING": "one of the two engines is draining, and takes nothing new",
    "REQUEST_OVER": "nobody waited for the load any more: the request ended",
    "SHUTDOWN": "this engine was shutting down",
    "INTERNAL": "an unexpected error here; the log has more",
    "UNKNOWN": "its reporter gave none: a connector of an earlier version",
}
"""Every code with what it means; the list is closed, and a name is never used for anything else."""
MISS_CODES: frozenset[str] = frozenset(get_args(MissCode))


def known_code(code: str) -> MissCode:
    """The code of a miss: UNKNOWN where its reporter gave none of ours. What is no miss has an empty code instead."""
    return code if code in MISS_CODES else "UNKNOWN"  # type: ignore[return-value]
