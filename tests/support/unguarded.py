"""KvdConnector that reports given-up loads without destroying their lanes while ``$TEST_UNGUARDED`` is there.

For tests only, named as ``kv_connector_module_path``: it shows what the guard is for: bytes in memory that vLLM
has given to another request.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from kvd.backends.contract import Lane, State, Transfer
from kvd.vllm import KvdConnector
from kvd.worker.pull.reader import PullThread

__all__ = ["KvdConnector"]

_close = PullThread._close


def _let_live(self: PullThread) -> tuple[Lane, str] | None:
    if not Path(os.environ["TEST_UNGUARDED"]).exists():
        return _close(self)
    lane, self.lanes.now = self.lanes.now, None
    if lane is not None:
        transfers = [transfer for load in self._active for transfer in load.pieces.transfers]
        threading.Thread(target=_poll_on, args=(lane, transfers), daemon=True).start()
    return None


def _poll_on(lane: Lane, transfers: list[Transfer]) -> None:
    """As a lane does that stays in use for others."""
    while any(transfer.state is State.PENDING for transfer in transfers):
        for transfer in transfers:
            if transfer.state is State.PENDING:
                lane.poll(transfer)
        time.sleep(0.001)


PullThread._close = _let_live  # type: ignore[method-assign]
