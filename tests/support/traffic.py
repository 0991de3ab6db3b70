"""Transfers as far as kvds see them, one after the other: a lease, a claim from afar, a record, a release."""

from __future__ import annotations

import threading
import uuid
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.reply import Ok
from kvd.wire.transfer import ReportTransfers, TransferRecord
from tests.support.daemons import Daemon, facts, scheduler, session, wait_for, worker
from tests.support.lender import Lender

SECONDS = 10.0
"""For each of a transfer's steps."""
ENGINES = ("p", "d")
"""Whose KV moves, from the first to the second."""


class Traffic:
    """Engine ``p`` on one kvd and ``d`` on another, which reads from it time and again. ``lost`` says what failed.

    ``pause`` lies between two transfers, in seconds. After one that failed the next one is begun all the same.
    """

    def __init__(self, prefilling: Daemon, decoding: Daemon, *, pause: float = 0.0) -> None:
        self.done, self.lost = 0, list[str]()
        self._begun = 0
        self._pause = pause
        self._stack, self._ends = ExitStack(), threading.Event()
        enter = self._stack.enter_context
        self._incarnation = uuid.uuid4().hex
        enter(session(prefilling, worker(facts("p"))))
        self._lender = enter(Lender(prefilling))
        self._worker = enter(session(decoding, worker(facts("d"), incarnation=self._incarnation)))
        self._chief = enter(session(decoding, scheduler(facts("d"))))
        self._thread = threading.Thread(target=self._run, name="traffic")

    def goes_on(self, more: int = 20, seconds: float = 60.0) -> None:
        """Return when so many more transfers went through. Raises `AssertionError` where one of them was lost."""
        before, lost = self.done, len(self.lost)
        wait_for(lambda: len(self.lost) > lost or self.done >= before + more, seconds)
        assert self.lost[lost:] == []

    def _run(self) -> None:
        while not self._ends.wait(self._pause):
            self._begun += 1
            try:
                self._transfer(f"r{self._begun}")
            except Exception as error:  # noqa: BLE001 - the test says what it was
                self.lost.append(f"transfer {self._begun}: {error!r}")
            else:
                self.done += 1

    def _transfer(self, name: str) -> None:
        key, reader = self._lender.open(name), uuid.uuid4().hex
        claimed = self._chief.call(LeaseClaim(key=key, reader=reader), SECONDS).result(SECONDS)
        assert isinstance(claimed, LeaseClaimed), claimed
        assert claimed.seconds > 0, claimed
        record = TransferRecord(
            transfer_id=reader, request_id=name, local_engine="d", local_rank="tp0", remote_engine="p",
            remote_generation="g", remote_request_id=name, backend="direct", mode="pull", bytes=10, state="done",
        )  # fmt: skip
        report = ReportTransfers(incarnation=self._incarnation, records=(record,))
        assert self._worker.call(report, SECONDS).result(SECONDS) == Ok()
        assert self._chief.call(LeaseRelease(key=key, reader=reader), SECONDS).result(SECONDS) == Ok()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._stack.close()
