"""Where in the last step of a prompt those who read whole steps are told of the layers that are computed so far.

Every step before the last is read while the next one is computed; of the last step nothing would move before its end.
Each word and each read takes a turn of the interpreter from the step, so there are two of them: bytes move faster than
they are computed, and what is read after the first mark and after the second is there when the step ends. A prompt of
one step has no marks: it is over before they would be worth their price.
"""

from __future__ import annotations

import math

from kvd.worker.orders import PushStep

MARKS = (0.5, 0.8125)
"""Shares of a step's layers after which there is a mark. Of four equal steps 95 % of the bytes are told by the last."""
LEAST_SHARE = 0.05
"""Of a prompt: what its last step must compute of it to have marks."""


def mark_numbers(layers: int) -> frozenset[int]:
    """After how many of a step's ``layers`` there is a mark; never after all of them."""
    found = {min(layers - 1, math.ceil(share * layers)) for share in MARKS}
    return frozenset(number for number in found if number > 0)


def completes(step: PushStep, before: PushStep | None) -> bool:
    """Whether a step is the last of several of its prompt, and long enough for marks; ``before`` was the one before."""
    if before is None or before.request_id != step.request_id or step.again or not step.groups:
        return False
    if not 0 < before.reached < step.total <= step.reached:
        return False
    return step.reached - before.reached >= LEAST_SHARE * step.total
