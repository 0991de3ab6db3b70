"""The worker's half: registers the KV memory, loads what the scheduler ordered, reports what became of it.

Everything that takes time happens on the lanes' threads and the session's; what vLLM calls within a step only
moves things between queues. A step that computes nothing may give a load a moment to end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvd.backends.contract import Backend
from kvd.client.errors import ClientError
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import WorkerGeometry
from kvd.topology.checksum import Summer
from kvd.topology.plan import Plan
from kvd.wire.checksum import GetSums
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import Endpoint, EngineCard, EngineFacts, WorkerCard
from kvd.wire.push import PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.registration import RegisterWorker
from kvd.wire.reply import Ok
from kvd.wire.transfer import ReportTransfers, TransferRecord
from kvd.worker.cause import REQUEST_OVER, SHUTTING_DOWN, Cause, from_error, refusal_code
from kvd.worker.checksums.comparing import Checking
from kvd.worker.checksums.pages import in_host_memory
from kvd.worker.checksums.summing import Summing
from kvd.worker.misses import concerns
from kvd.worker.orders import Fault, LoadOrder, StageOrder, StepOrders, StepOutcomes
from kvd.worker.pull.load import Load, record
from kvd.worker.pull.reader import PeerLane
from kvd.worker.push.announce import Here, push_key, withdraw
from kvd.worker.push.arrival import Arrival, record_arrival
from kvd.worker.push.prefiller import Pushing
from kvd.worker.push.receiver import PeerArrivals
from kvd.worker.remote import RemotePrefill
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings
from kvd.worker.slow_paths import Paths
from kvd.worker.staging import stager
from kvd.worker.stream_event import StreamEvent, no_event
from kvd.worker.streams import Gate
from kvd.worker.watchdog import Watch

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long a closing worker waits for its lanes, all together."""


@dataclass(slots=True)
class Results:
    """What ended since the last step.

    ``failed`` of models with one group comes with the blocks that hold nothing good; ``lost_blocks`` are all that a
    failed load was to fill.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    lost_blocks: set[int] = field(default_factory=set)


class WorkerHalf:
    """One worker: its registered memory, its session with kvd, its lanes."""

    def __init__(
        self,
        settings: ConnectorSettings,
        engine: EngineFacts,
        geometry: WorkerGeometry,
        siblings: tuple[WorkerGeometry, ...],
        backend: Backend,
        open_session: Callable[
            [Callable[[], RegisterWorker], Callable[[Message], Message | None]], SessionProtocol
        ],
        mark: Callable[[], StreamEvent | None] = no_event,
        summer_of: Callable[[WorkerGeometry], Summer] = in_host_memory,
    ) -> None:
        """``mark`` makes stream events of the device that the memory is on, ``summer_of`` adds up pages there."""
        self.settings = settings
        self.engine = engine
        self.geometry = geometry
        self._siblings = siblings
        self.incarnation = uuid.uuid4().hex
        self._backend = backend
        self._lanes: dict[str, PeerLane] = {}
        self._arrivals: dict[str, PeerArrivals] = {}
        self._cards: dict[str, EngineCard] = {}
        self._known: dict[str, str] = {}
        self._begun: dict[str, Load] = {}
        self._closed = False
        self._mark = mark
        self._reached: StreamEvent | None = None
        self._gate = Gate(self._proceed, self._refuse_unannounced)
        self._lock = threading.Lock()
        self._paths = Paths(geometry.regions[0].device if geometry.regions else "cpu")
        self._probed = self._paths.probed if settings.probe and engine.role != "prefill" else None
        self._ended: queue.Queue[Load] = queue.Queue()
        self._results = Results()
        self._outcomes = StepOutcomes()
        backend.register(geometry.regions)
        self._stager = stager(backend, geometry, mark)
        self._staging: list[StageOrder] = []
        self.pushing = Pushing(
            engine.engine_id, backend, geometry, siblings, lambda: self._session, mark, self._stager
        )
        self._card = WorkerCard(
            engine=engine,
            rank=geometry.rank,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            backend=settings.backend,
            geometry=encode_worker(geometry),
            metadata=backend.metadata(),
        )
        summer = functools.cache(lambda: summer_of(geometry))
        self._summing = Summing(geometry, summer, mark)
        self._checking = Checking(geometry, summer, lambda: self._session, self._cards.get)
        self._watch = Watch(self._watch_lanes)
        self._session = open_session(lambda: RegisterWorker(self._card), self._pushed)

    # --- within a step: never waits, but in one that computes nothing ---

    def bound(self, orders: StepOrders) -> None:
        """Before the step's forward is queued: loads must wait for what is queued already, and not for more."""
        self._reached = self._mark() if orders.loads else None

    def start(self, orders: StepOrders) -> None:
        """Begin the loads of this step, and pass on what the prefilling side may free."""
        self._results.sent.update(orders.freed)
        self._summing.begin(orders)
        self._staging = orders.stage
        now = time.monotonic()
        for order in orders.loads:
            self._begin(order, now)
        for request_id in orders.dropped:
            self._drop(request_id)
        for request_id, fault in orders.faults:
            self._fail(request_id, fault)
        for transfer_id, prefill in orders.declined:
            self._decline(transfer_id, prefill)

    def _begin(self, order: LoadOrder, now: float) -> None:
        load = self._begun[order.request_id] = Load(order, received=now, deadline=now + order.seconds)
        if order.fault is not None and concerns(order.fault, self.geometry):
            load.fault = order.fault
        if order.refused:
            self._refuse_unannounced(load, order.refused)
        elif load.fault is not None and load.fault.when == "before":
            self._refuse_unannounced(load, load.fault.cause)
        elif order.seconds <= 0:
            self._refuse_unannounced(
                load, Cause("the lease on its blocks ran out before the load began", "LEASE_ENDED")
            )
        elif self._reached is not None:
            self._gate.put(load, self._reached)
        else:
            self._proceed(load)

    def _proceed(self, load: Load) -> None:
        if self._knows(load.order):
            self._hand_over(load)
        else:
            self._ask_for_peer(load)

    def stepped(self) -> None:
        """After the step's forward is queued. Waits for it on staged engines, and only where a prefill ends with it."""
        self._summing.stepped()
        if self._stager is not None:
            self._stager.stage(self._staging)
        self._staging = []

    def results(self, wait: float = 0.0) -> Results:
        """What ended since this was last asked. Clears it.

        Where that is nothing and loads are under way, one of them is given ``wait`` seconds to end.
        """
        for load in self._ends(wait):
            request_id = load.order.request_id
            self._begun.pop(request_id, None)
            self._results.received.add(request_id)
            self._outcomes.loads[request_id] = load.cause
            self._outcomes.quiesced[request_id] = load.ended
            if load.cause:
                self._results.failed.add(request_id)
                self._results.bad_blocks |= load.bad_blocks
                self._results.lost_blocks |= load.order.block_ids
                self._outcomes.prefixes[request_id] = load.prefix
        results, self._results = self._results, Results()
        results.sent |= self._summing.unsummed(self.pushing.sent())
        return results

    def _ends(self, wait: float) -> Iterator[Load]:
        with contextlib.suppress(queue.Empty):
            if wait and self._begun and not self._results.sent:
                yield self._ended.get(timeout=wait)
            while True:
                yield self._ended.get_nowait()

    def outcomes(self) -> StepOutcomes | None:
        """Causes for the scheduler's half, of what `results` reported. Clears them."""
        if not self._outcomes.loads:
            return None
        outcomes, self._outcomes = self._outcomes, StepOutcomes()
        return outcomes

    def close(self) -> None:
        """Give up loads, destroy lanes and the backend, say goodbye to kvd; in about `CLOSE_SECONDS`.

        Where a lane's thread is stuck in the backend the backend stays as it is: pulling memory from under a call
        that is at work would crash the process, and its end is near anyway.
        """
        with self._lock:
            self._closed = True
            lanes: list[PeerArrivals | PeerLane] = [*self._arrivals.values(), *self._lanes.values()]
        for lane in lanes:
            lane.stop()
        self.pushing.stop()
        self._summing.stop()
        self._checking.stop()
        until = time.monotonic() + CLOSE_SECONDS
        self._gate.close(until)
        stuck = [lane.engine_id for lane in lanes if not lane.join(until - time.monotonic())]
        stuck += self.pushing.join(until)
        self._watch.close()
        self._session.close()
        stuck += [work.name for work in (self._summing, self._checking) if not work.join(until)]
        if stuck:
            log.error("shutting down with lanes at work (%s): the memory stays registered", ", ".join(stuck))
        else:
            self._backend.close()

    # --- peers ---

    def _knows(self, order: LoadOrder) -> bool:
        known = self._known.get(order.prefill.engine_id)
        return known is not None and order.prefill.generation in ("", known)

    def _lane(self, engine_id: str) -> PeerLane | None:
        """The lane to a peer, made where it is the first; None once this worker closes."""
        with self._lock:
            lane = self._lanes.get(engine_id)
            if lane is None and not self._closed:
                lane = self._lanes[engine_id] = PeerLane(
                    engine_id, self._backend, self.geometry, self._siblings, self._load_ended,
                    piece_bytes=self.settings.piece_bytes, probed=self._probed,
                )  # fmt: skip
            return lane

    def _hand_over(self, load: Load) -> None:
        engine_id = load.order.prefill.engine_id
        way = self._peer_arrivals(engine_id) if load.order.transfer_id else self._lane(engine_id)
        if way is None or load.dropped:
            self._refuse_unannounced(load, load.dropped or SHUTTING_DOWN)
        else:
            way.load(load)
            self._watch.nudge()

    def _peer_arrivals(self, engine_id: str) -> PeerArrivals | None:
        """What a peer pushes here; None once this worker closes."""
        with self._lock:
            arrivals = self._arrivals.get(engine_id)
            if arrivals is None and not self._closed:
                arrivals = self._arrivals[engine_id] = PeerArrivals(
                    engine_id,
                    Here(
                        engine_id=self.engine.engine_id,
                        rank=self._card.rank,
                        backend=self._backend,
                        local=self.geometry,
                        siblings=self._siblings,
                        session=self._session,
                        announce_seconds=self.settings.handshake_timeout,
                        read_seconds=self.settings.load_timeout,
                        read=self._read,
                        ended=self._arrived,
                        refused=self._refuse,
                    ),
                )
                if engine_id in self._cards:
                    arrivals.know(self._cards[engine_id])
            return arrivals

    def _drop(self, request_id: str) -> None:
        """Nobody waits for this load any more."""
        load = self._begun.get(request_id)
        if load is None:
            return
        load.dropped = REQUEST_OVER
        if load.order.transfer_id:
            with self._lock:
                arrivals = self._arrivals.get(load.order.prefill.engine_id)
            if arrivals is not None:
                arrivals.drop(load)

    def _fail(self, request_id: str, fault: Fault) -> None:
        """This load under way is to miss, if it still is."""
        load = self._begun.get(request_id)
        if load is None or not concerns(fault, self.geometry):
            return
        if load.order.transfer_id and fault.when == "layers":
            load.fault = fault  # seen when the next layer arrives
            return
        load.dropped = fault.cause
        engine_id = load.order.prefill.engine_id
        with self._lock:
            way = (self._arrivals if load.order.transfer_id else self._lanes).get(engine_id)
        if isinstance(way, PeerArrivals):
            way.drop(load)
        elif way is not None:
            way.give_up(load)

    def _decline(self, transfer_id: str, prefill: RemotePrefill) -> None:
        """Nothing of that push is wanted here: its prefiller need not wait for our announcement."""
        key = push_key(self.engine.engine_id, self._card.rank, transfer_id, prefill)
        withdraw(self._session, key, prefill.generation)

    def _read(self, load: Load) -> None:
        """Read a part of what is pushed to a worker that reads by itself."""
        lane = self._lane(load.order.prefill.engine_id)
        if lane is None:
            self._refuse(load, SHUTTING_DOWN)
        else:
            lane.load(load)
            self._watch.nudge()

    def _watch_lanes(self, now: float) -> float:
        with self._lock:
            lanes: list[PeerArrivals | PeerLane] = [*self._arrivals.values(), *self._lanes.values()]
        return min((lane.watch(now) for lane in lanes), default=math.inf)

    def _ask_for_peer(self, load: Load) -> None:
        prefill = load.order.prefill
        asked = time.monotonic()
        future = self._session.call(
            GetPeer(
                local_engine=self.engine.engine_id,
                engine_id=prefill.engine_id,
                endpoint=Endpoint(prefill.host, prefill.port),
                generation=prefill.generation,
            ),
            max(0.1, load.deadline - asked),
        )

        def answered(done: Future[Message]) -> None:
            load.handshake = time.monotonic() - asked
            try:
                answer = done.result()
                if isinstance(answer, PeerReady):
                    self._learn(answer)
                    self._hand_over(load)
                else:
                    other = f"peer {prefill.engine_id}: kvd answered {type(answer).__name__}"
                    self._refuse_unannounced(load, Cause(other, "PEER_REFUSED"))
            except ClientError as error:
                no = Cause(f"peer {prefill.engine_id}: {error.message}", refusal_code(error))
                self._refuse_unannounced(load, no)
            except (
                Exception
            ) as error:  # a future swallows what its callback raises, and the request would wait
                log.exception("answer about peer %s", prefill.engine_id)
                self._refuse_unannounced(load, from_error(error, f"peer {prefill.engine_id}"))

        future.add_done_callback(answered)

    def _learn(self, ready: PeerReady) -> None:
        self.pushing.know(ready)
        engine_id = ready.peer.engine.engine_id
        lane = self._lane(engine_id)
        if lane is not None:
            with self._lock:
                self._cards[engine_id] = ready.peer
                arrivals = self._arrivals.get(engine_id)
            lane.know(ready.peer)
            if arrivals is not None:
                arrivals.know(ready.peer)
            # After the lane: a step that finds the peer known puts its load behind the card.
            self._known[engine_id] = ready.peer.generation

    def _pushed(self, message: Message) -> Message | None:
        """On the session's thread."""
        if isinstance(message, PeerGone):
            self.pushing.gone(message)
        if isinstance(message, PeerReady):
            self._learn(message)
        elif isinstance(message, (PushAnnounce, PushWithdraw, PushDone)):
            return self.pushing.pushed(message)
        elif isinstance(message, GetSums):
            return self._summing.answer(message)
        elif isinstance(message, PeerGone) and self._known.get(message.engine_id) == message.generation:
            self._known.pop(message.engine_id, None)
            with self._lock:
                self._cards.pop(message.engine_id, None)
                arrivals = self._arrivals.get(message.engine_id)
            if arrivals is not None:
                arrivals.gone(message.generation, message.reason)
            if lane := self._lane(message.engine_id):
                lane.gone(message.generation, message.reason)
        elif isinstance(message, PushProgress):
            if arrivals := self._arrivals.get(message.key.prefiller):
                arrivals.progress(message)
            return Ok()
        return None

    # --- ends ---

    def _refuse_unannounced(self, load: Load, cause: Cause) -> None:
        """It ends before its prefiller heard of it, and need not keep blocks for it any longer."""
        if load.order.transfer_id:
            self._decline(load.order.transfer_id, load.order.prefill)
        self._refuse(load, cause)

    def _refuse(self, load: Load, cause: Cause) -> None:
        load.cause = cause
        load.ended = time.monotonic()
        self._load_ended(load)

    def _load_ended(self, load: Load) -> None:
        """On a lane's thread, the watcher's or the session's: hand over to the step, and write it down."""
        if load.then is not None:
            load.then(load)
        else:
            self._checked(load, load.plan, functools.partial(record, load))

    def _arrived(self, arrival: Arrival) -> None:
        """On the thread of arrivals: as `_load_ended`."""
        self._checked(arrival.load, arrival.plan, functools.partial(record_arrival, arrival))

    def _checked(self, load: Load, plan: Plan | None, made: Callable[..., TransferRecord]) -> None:
        def ended() -> None:
            self._ended.put(load)
            self._write_down(load, made)

        if not self._checking.begin(load, plan, ended):
            ended()

    def _write_down(self, load: Load, made: Callable[..., TransferRecord]) -> None:
        try:
            entry = made(
                engine_id=self.engine.engine_id,
                rank=str(self.geometry.rank),
                backend=self.settings.backend,
                geometry=self.geometry,
            )
        except Exception:  # the load has ended all the same
            log.exception("no record of the load of %s", load.order.request_id)
            return
        self._paths.note(entry)
        self._session.deliver(
            f"transfer {entry.transfer_id} {load.ended}",
            ReportTransfers(incarnation=self.incarnation, records=(entry,)),
        )
