"""The ids of pushes on the decoder: each is one request's."""

from __future__ import annotations

from kvd.vllm.errors import BadParams

KEPT = 900.0
"""Seconds for which an id is remembered after its claim has ended: late words about it would pass for another's."""


class TransferIds:
    """Touched by the scheduler's step only.

    A request that is refused its id owns no transfer, so nothing that becomes of it can end another one's push; and a
    prefiller never hears of one id from two requests of a decoder.
    """

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
        self._ended: dict[tuple[str, str], float] = {}

    def take(self, prefiller: str, transfer_id: str, now: float) -> None:
        """The id is the caller's from ``now``, time.monotonic() seconds. Raises `BadParams` where it is another's."""
        name = prefiller, transfer_id
        while self._ended and now - next(iter(self._ended.values())) > KEPT:
            del self._ended[next(iter(self._ended))]
        if name in self._held or name in self._ended:
            raise BadParams(
                f"transfer {transfer_id} of prefiller {prefiller} is or was another request's: the router has to draw a"
                " new kvd_transfer_id for each request, also when it asks again"
            )
        self._held.add(name)

    def end(self, prefiller: str, transfer_id: str, now: float) -> None:
        """Its claim has ended."""
        name = prefiller, transfer_id
        if name in self._held:
            self._held.remove(name)
            self._ended[name] = now
