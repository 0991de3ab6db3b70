"""The prefilling side's checksums: of sampled requests, as soon as their prompt is computed, for whoever reads them.

A thread adds up the blocks that are handed over. They stay until it is done: those of a pull by their lease, those of a
push because the request is not reported as sent before.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvd.geometry.model import WorkerGeometry
from kvd.shown import logger
from kvd.topology.checksums.sums import (
    ALL_TOKENS,
    MOST_CLASSES,
    Classes,
    Summer,
    TokenSpan,
    Words,
    layer_sums,
)
from kvd.wire.checksum import GetSums, Sums, SumsOf
from kvd.wire.codes import RefusalCode
from kvd.wire.reply import Refused, refusal
from kvd.worker.orders import StepOrders, SumOrder, block_lists
from kvd.worker.streams.event import StreamEvent

log = logger(__name__)

MOST_REQUESTS = 4096
MOST_BYTES = 256 << 20
"""Requests, and bytes of sums, that are kept at most: the oldest go first."""
KEPT_SECONDS = 60.0
"""How long sums of a push are kept once its blocks are sent: the decoder asks when it has all of it."""
MOST_ANSWERED = 16 << 20
"""Bytes of sums in one answer; a worker of hundreds of layers with a state each has fewer."""
LOOK = 200e-6
"""Seconds between two looks whether the device has come so far."""
CODE: RefusalCode = "KVD-CONNECTOR-SUMS"
"""The code of what a worker refuses here."""


@dataclass(slots=True, eq=False)
class _RequestSums:
    """One request's sums. ``tables`` are by group: the number of the first block, and sums of (block, class, cell).

    ``over`` says why there are none, ``until`` is the time.monotonic() until which they are kept.
    """

    order: SumOrder
    event: StreamEvent | None
    classes: Classes
    tables: dict[int, tuple[int, Words]] = field(default_factory=dict)
    done: bool = False
    over: str = ""
    until: float = math.inf

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for _, table in self.tables.values())


class Summing:
    """The sums of one prefilling worker.

    `begin`, `stepped` and `unsummed` are called in vLLM's step, `answer` on the session's thread. None of them waits.
    The thread starts with the first order.
    """

    name = "checksums of prefills"

    def __init__(
        self,
        geometry: WorkerGeometry,
        summer: Callable[[], Summer],
        record_event: Callable[[], StreamEvent | None],
    ) -> None:
        """``record_event`` gives what tells when the device has come as far as now, None where it is there already."""
        self._geometry = geometry
        self._summer = summer
        self._record_event = record_event
        self._lock = threading.Lock()
        self._kept: dict[str, _RequestSums] = {}
        self._classes = ALL_TOKENS
        self._coming: list[SumOrder] = []
        self._held: set[str] = set()
        self._inbox: queue.Queue[_RequestSums | None] = queue.Queue()
        self._closing = False
        self._thread: threading.Thread | None = None

    # --- vLLM's step ---

    def begin(self, orders: StepOrders) -> None:
        """Before a step: note which prompts it computes to their end, and forget whose sums nobody will ask for."""
        self._coming = orders.sums.due
        if self._kept:
            with self._lock:
                for name in (*orders.freed, *orders.sums.dropped):
                    self._kept.pop(name, None)

    def stepped(self) -> None:
        """The step has run, or is queued on the device: what it computed may be added up when that has."""
        if not self._coming:
            return
        coming, self._coming = self._coming, []
        event, now = self._record_event(), time.monotonic()
        made = [_RequestSums(order, event, self._classes) for order in coming]
        with self._lock:
            self._tidy(now)
            self._kept.update((kept.order.name, kept) for kept in made)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvd-sums", daemon=True)
            self._thread.start()
        for kept in made:
            self._inbox.put(kept)

    def unsummed(self, sent: set[str]) -> set[str]:
        """Of requests that were pushed the ones whose blocks are needed no longer here either; others come later."""
        if not (sent or self._held):
            return sent
        self._held |= sent
        with self._lock:
            of_request = {kept.order.request_id: kept for kept in self._kept.values()}
            free = {name for name in self._held if name not in of_request or of_request[name].done}
            for name in free & of_request.keys():
                of_request[name].until = time.monotonic() + KEPT_SECONDS
        self._held -= free
        return free

    # --- the session's thread ---

    def answer(self, message: GetSums) -> Sums | Refused:
        """What a decoding worker asks for."""
        with self._lock:
            kept = self._kept.get(message.request_id)
        if kept is None:
            return _refused(f"no checksums are kept of request {message.request_id}")
        if not kept.done:
            return refusal(
                code=CODE,
                message=f"checksums of request {message.request_id} are not ready",
                hint="ask again",
            )
        if kept.over:
            return _refused(f"checksums of request {message.request_id} could not be made: {kept.over}")
        found: list[bytes] = []
        room = MOST_ANSWERED
        for wanted in message.wanted:
            sums = self._part(kept, wanted)
            if isinstance(sums, Refused):
                return sums
            found.append(sums.astype("<u8").tobytes())
            room -= len(found[-1])
            if room < 0:
                return _refused(
                    f"{len(message.wanted)} sums of request {message.request_id} are asked for at once,"
                    f" and an answer has at most {MOST_ANSWERED} bytes"
                )
        return Sums(tokens=kept.order.tokens, groups=tuple(found))

    def _part(self, kept: _RequestSums, wanted: SumsOf) -> Words | Refused:
        first, table = kept.tables.get(wanted.group, (0, None))
        low = wanted.first - first
        if table is None or low < 0 or wanted.blocks < 1 or low + wanted.blocks > len(table):
            have = "none" if table is None else f"{first}..{first + len(table) - 1}"
            last = wanted.first + wanted.blocks - 1
            return _refused(
                f"blocks {wanted.first}..{last} of group {wanted.group} are asked for, there is {have}"
            )
        if not 0 < wanted.run < 1 << 20 or not 0 <= wanted.which < wanted.period <= MOST_CLASSES:
            return _refused(f"class {wanted.which} of {wanted.period} with runs of {wanted.run} is asked for")
        asked = Classes(wanted.run, wanted.period)
        parts = kept.classes.parts(asked, wanted.which)
        if parts is None:
            finer = self._classes.finer(asked)
            if finer.period <= MOST_CLASSES:
                self._classes = finer
            return _refused(
                f"checksums of request {kept.order.name} do not tell the tokens of {wanted.period} ranks apart;"
                " those of later requests will"
            )
        sums: Words = table[low : low + wanted.blocks][:, parts].sum(axis=(0, 1))
        return sums

    # --- the end ---

    def stop(self) -> None:
        """End the thread: begin that."""
        self._closing = True
        self._inbox.put(None)

    def join(self, until: float) -> bool:
        """Wait for the thread's end to time.monotonic() ``until``. False where it still reads memory."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    # --- the thread ---

    def _run(self) -> None:
        while (kept := self._inbox.get()) is not None:
            try:
                self._add_up(kept, self._summer())
            except Exception as error:  # the thread must outlive any single request
                log.exception("checksums of request %s", kept.order.request_id)
                kept.over = f"{type(error).__name__}: {error}"
            kept.done = True

    def _add_up(self, kept: _RequestSums, summer: Summer) -> None:
        while kept.event is not None and not kept.event():
            time.sleep(LOOK)
        order = kept.order
        for index, blocks in block_lists(order.groups).items():
            group = self._geometry.groups[index]
            state = group.kind == "mamba"
            used = len(blocks.ids) if state else max(0, -(-order.tokens // group.block_size) - blocks.first)
            ids = blocks.ids[:used]
            if not len(ids):
                continue
            numbers = np.arange(len(ids), dtype=np.int64)
            firsts = numbers if state else (blocks.first + numbers) * group.block_size
            span = TokenSpan(0, len(ids)) if state else TokenSpan(0, order.tokens)
            tables = []
            for layer in group.layers:
                if self._closing or not self._wanted(kept):
                    kept.over = "nobody wants them any more"
                    return
                tables.append(
                    layer_sums(layer, summer, firsts=firsts, ids=ids, span=span, classes=kept.classes)
                )
            if tables:
                kept.tables[index] = (blocks.first, np.concatenate(tables, axis=2))

    def _wanted(self, kept: _RequestSums) -> bool:
        with self._lock:
            return self._kept.get(kept.order.name) is kept

    def _tidy(self, now: float) -> None:
        """With the lock held: let go of what is old or too much."""
        self._kept = {name: kept for name, kept in self._kept.items() if kept.until > now}
        size = sum(kept.nbytes for kept in self._kept.values())
        for name, kept in list(self._kept.items()):
            if size <= MOST_BYTES and len(self._kept) < MOST_REQUESTS:
                break
            size -= kept.nbytes
            del self._kept[name]


def _refused(message: str) -> Refused:
    return refusal(code=CODE, message=message, final=True)
