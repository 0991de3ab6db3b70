"""A worker's card as it is sent to its kvd: its geometry packed, where that is shorter."""

from __future__ import annotations

import msgspec

from kvd.geometry.packing import WORTH_PACKING, pack
from kvd.wire.registration import RegisterWorker


def packed(presented: RegisterWorker) -> RegisterWorker:
    """The same registration, with a packed geometry where there is much of it."""
    card = presented.card
    if presented.packed or len(card.geometry) < WORTH_PACKING:
        return presented
    return msgspec.structs.replace(
        presented, card=msgspec.structs.replace(card, geometry=pack(card.geometry)), packed=True
    )
