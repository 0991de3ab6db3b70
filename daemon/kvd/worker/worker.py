"""The worker's half: registers the KV memory, loads what the scheduler ordered, reports what became of it.

Everything that takes time happens on the lanes' threads and the session's; what vLLM calls within a step only
moves things between queues. A step that computes nothing may give a load a moment to end. One that uses its own loads
posts them, and waits until they are (`kvd.worker.in_step`).
"""

from __future__ import annotations

import functools
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable

from kvd.backends.contract import Backend, serving_threads
from kvd.client.cards import CardReader
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import WorkerGeometry
from kvd.shown import logger
from kvd.topology.checksums.sums import Summer
from kvd.topology.errors import OwnEngine
from kvd.topology.transfer_topology import TransferTopology
from kvd.wire.agent import MOST_HELD, DropPeer, GetHeld, HeldPeers
from kvd.wire.card_parts import ToldCard
from kvd.wire.checksum import GetSums
from kvd.wire.errors import BadCard
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import Endpoint, EngineFacts, WorkerCard
from kvd.wire.lease import LeaseConfirmed
from kvd.wire.push import PushAnnounce, PushDone, PushKept, PushProgress, PushWithdraw
from kvd.wire.registration import RegisterWorker
from kvd.wire.reply import Ok
from kvd.worker.cause import REQUEST_OVER, SHUTTING_DOWN, Cause
from kvd.worker.checksums.comparing import Checking
from kvd.worker.checksums.pages import in_host_memory
from kvd.worker.checksums.summing import Summing
from kvd.worker.context import WorkerContext, engine_geometry
from kvd.worker.ends import LoadEnds
from kvd.worker.errors import ConnectorError
from kvd.worker.host.locality import locality
from kvd.worker.host.read_cost import ReadCost
from kvd.worker.in_step import InStepLoads, StreamOf, token_bytes
from kvd.worker.load import Load
from kvd.worker.orders import Fault, StageOrder, StepOrders, StepOutcomes
from kvd.worker.peer_threads import PeerThreads
from kvd.worker.peers.followed import register
from kvd.worker.peers.handshake import ask_for_peer, complete
from kvd.worker.peers.held import Evict
from kvd.worker.peers.slow_paths import Paths
from kvd.worker.push.announce import push_key, withdraw
from kvd.worker.push.prefiller import Pushing
from kvd.worker.remote import RemotePrefill
from kvd.worker.reporting import Reporting, Results
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings, home_kvd
from kvd.worker.staging import stager
from kvd.worker.step_loads import StepLoads
from kvd.worker.streams.event import StreamEvent, no_event
from kvd.worker.tally import TransferTally

log = logger(__name__)

CLOSE_SECONDS = 5.0
"""How long a closing worker waits for its lanes, all together."""
INTRODUCED_SECONDS = 30.0
"""How long the rest of a large card is asked for that kvd told unasked."""


class WorkerHalf:
    """One worker: its registered memory, its session with kvd, its lanes."""

    def __init__(  # noqa: PLR0913 - what a worker is made of, in one place
        self,
        settings: ConnectorSettings,
        engine: EngineFacts,
        geometry: WorkerGeometry,
        siblings: tuple[WorkerGeometry, ...],
        backend: Backend,
        open_session: Callable[
            [Callable[[], RegisterWorker], Callable[[Message], Message | None]], SessionProtocol
        ],
        record_event: Callable[[], StreamEvent | None] = no_event,
        summer_of: Callable[[WorkerGeometry], Summer] = in_host_memory,
        *,
        memory: object,
        stream_of: StreamOf | None = None,
    ) -> None:
        """``record_event`` records an event on the memory's device, ``summer_of`` adds up pages there.

        ``stream_of`` gives its stream of now. ``memory`` owns what ``geometry`` points to, and stays while it is used.
        """
        self._memory = memory
        self.settings = settings
        self.engine = engine
        self.geometry = geometry
        self.incarnation = uuid.uuid4().hex
        self.topology = TransferTopology(engine_geometry(engine, geometry, siblings), geometry.rank)
        """Every remote engine that this worker knows."""
        self.tally = TransferTally()
        self._reader = CardReader(self.topology.local.workers)  # of all peers: many are like one before
        self._backend = backend
        self._reporting = Reporting()
        backend.register(geometry.regions)
        self._read_cost = ReadCost(serving_threads(backend) if settings.prefixes == "on" else frozenset())
        self._stager = stager(backend, geometry, record_event)
        self._staging: list[StageOrder] = []
        summer = functools.cache(lambda: summer_of(geometry))
        self._summing = Summing(geometry, summer, record_event)
        self._checking = Checking(self.topology, summer, lambda: self._session)
        paths = Paths(geometry.regions[0].device if geometry.regions else "cpu")
        self._ends = LoadEnds(
            engine.engine_id, self.incarnation, settings.backend, geometry, lambda: self._session, self._checking,
            paths, self.tally,
        )  # fmt: skip
        self._context = WorkerContext(
            settings, self.topology, backend, lambda: self._session, self._ends, self._register
        )
        self.pushing = Pushing(self._context, record_event, self._stager)
        probed = paths.probed if settings.probe and engine.role != "prefill" else None
        self._peers = PeerThreads(self._context, probed)
        self.in_step = InStepLoads(
            self._peers, self._ends, self._reporting, self._note, stream_of, token_bytes(geometry)
        )
        ready = self._proceed, self._refuse_unannounced, self.in_step.begun
        self.loads = StepLoads(geometry, record_event, self._ends, *ready)
        card = WorkerCard(
            engine=engine,
            rank=self._context.rank,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            backend=settings.backend,
            geometry=encode_worker(geometry),
            metadata=backend.metadata(),
        )
        home, stands = home_kvd(settings.home), locality(geometry.regions)
        self._session = open_session(
            lambda: RegisterWorker(card, parts=True, home=home, locality=stands, outlines=True),
            self._on_message,
        )

    # --- within a step: never waits, but in one that computes nothing, and for its own loads to be posted ---

    def bound(self, orders: StepOrders) -> None:
        """Before the step's forward is queued: loads must wait for what is queued already, and not for more."""
        self.loads.bound(orders)
        self._read_cost.step(time.monotonic())

    def start(self, orders: StepOrders) -> None:
        """Begin the loads of this step, and pass on what the prefilling side may free."""
        self._reporting.results.sent.update(orders.freed)
        self._summing.begin(orders)
        self._staging = orders.stage
        self._ends.step(idle=orders.idle)
        if orders.loads or orders.answered or orders.dropped:
            self._order_loads(orders)
        self.in_step.join()
        for request_id, fault in orders.faults:
            self._fail(request_id, fault)
        for transfer_id, prefill in orders.declined:
            self._decline(transfer_id, prefill)

    def _order_loads(self, orders: StepOrders) -> None:
        self.loads.begin(orders)
        self.loads.answered(orders.answered)
        for request_id in orders.dropped:
            self._drop(request_id)

    def _proceed(self, load: Load) -> None:
        remote = self.topology.find(load.order.prefill.engine_id)
        if remote is not None and load.order.prefill.generation in ("", remote.generation):
            if not self.in_step.post(load):
                self._hand_over(load)
        elif load.order.in_step:  # whose step cannot wait for that
            self._refuse_unannounced(load, Cause("its prefiller has just been forgotten here", "PEER_GONE"))
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

        Where that is nothing and loads are under way, one of them is given ``wait`` seconds to end. Where `complete`
        is asked, that waits, and this tells of complete loads that were not asked for in time.
        """
        held = self._reporting.hold()
        self._look(0.0 if held or self._reporting.asked_early else wait)
        results = self._reporting.tell(held)
        results.sent |= self._summing.unsummed(self.pushing.sent())
        return results

    def _note(self, ended: Iterable[Load]) -> None:
        for load in ended:
            self.loads.over(load)
            self._reporting.note(load)

    def _look(self, wait: float) -> None:
        """Take note of what ended, also of loads whose name another one has by now."""
        self._note(self._ends.take(wait if self.loads.begun and not self._reporting.waits else 0.0))

    def outcomes(self) -> StepOutcomes | None:
        """Causes for the scheduler's half, of what `results` reported, and what peers' reads cost. Clears them."""
        return self._reporting.outcomes(self._read_cost.look(time.monotonic())) or None

    # --- before a step, where its scheduler is at hand ---

    def begin_ahead(self, orders: StepOrders, wait: float) -> bool:
        """Do what a step that is scheduled says of loads; when it begins it says no more of them.

        Whether loads begin. They are given ``wait`` seconds to be posted.
        """
        self.loads.ahead(orders)
        self._order_loads(orders)
        loads, orders.loads, orders.answered, orders.dropped = orders.loads, [], [], []
        self.loads.give_time(loads, wait)
        return bool(loads)

    @property
    def expects(self) -> bool:
        """Whether to ask `complete`: a load is under way, or complete and not reported, or nobody asked before."""
        return bool(self.loads.begun) or self._reporting.expects

    def complete(self, wait: float = 0.0) -> tuple[set[str], StepOutcomes]:
        """The loads that are complete and were not reported; ``wait`` as for `results`. Asked before a step."""
        self._look(wait)
        return self._reporting.tell_early()

    def complete_soon(self, *, idle: bool) -> tuple[set[str], StepOutcomes]:
        """`complete`, but waits for a load that is due soon; where not ``idle``, for one that is nearly there."""
        now = time.monotonic()
        return self.complete(self.loads.worth_waiting(now) if idle else self.loads.nearly_there(now))

    # --- the end ---

    def retire(self) -> tuple[Results, StepOutcomes]:
        """Close because the memory goes; gives what is yet to be reported, for the `inherit` of whoever is next.

        Raises `ConnectorError` where the memory must stay.
        """
        if stuck := self.close():
            raise ConnectorError(
                f"the KV memory cannot be given up: transfers are stuck ({', '.join(stuck)}) and may still touch it",
                hint="stop this engine and start it again",
            )
        self._reporting.results = self.results()
        for load in list(self.loads.begun.values()):
            self._ends.refuse(load, SHUTTING_DOWN)
        results = self.results()
        results.sent |= self.pushing.abandon()
        return results, self._reporting.outcomes()

    def inherit(self, results: Results, outcomes: StepOutcomes) -> None:
        """Report this with the next step: it is of a half whose memory this one has now."""
        self._reporting.inherit(results, outcomes)

    def close(self) -> list[str]:
        """Give up loads, destroy lanes and the backend, say goodbye to kvd; in about `CLOSE_SECONDS`.

        Gives the threads that may still touch memory. Where a lane's thread is stuck in the backend, that and the
        memory stay: pulling memory from under a call that is at work would crash the process, and its end is near.
        """
        self._peers.stop()
        self.pushing.stop()
        self._summing.stop()
        self._checking.stop()
        until = time.monotonic() + CLOSE_SECONDS
        self.loads.close(until)
        stuck = self._peers.join(until) + self.pushing.join(until)
        self._peers.close()
        self._ends.close(until)
        self._session.close()
        stuck += [work.name for work in (self._summing, self._checking) if not work.join(until)]
        if stuck:
            log.error("shutting down with lanes at work (%s): the memory stays registered", ", ".join(stuck))
        else:
            self._backend.close()
        return stuck

    # --- loads ---

    def _hand_over(self, load: Load) -> None:
        if cause := load.dropped or self._peers.begin(load):
            self._refuse_unannounced(load, cause)

    def _drop(self, request_id: str) -> None:
        """Nobody waits for this load any more."""
        if load := self.loads.begun.get(request_id):
            load.drop(REQUEST_OVER)
            self._ends.give_up(load)
            self._peers.drop(load)

    def _fail(self, request_id: str, fault: Fault) -> None:
        """This load under way is to miss, if it still is."""
        if (load := self.loads.begun.get(request_id)) is None or not fault.concerns(self.geometry):
            return
        if load.order.transfer_id and fault.when == "layers":
            load.fault = fault  # seen when the next layer arrives
        else:
            load.drop(fault.cause)
            self._peers.give_up(load)

    def _decline(self, transfer_id: str, prefill: RemotePrefill) -> None:
        """Nothing of that push is wanted here: its prefiller need not wait for our announcement."""
        withdraw(self._session, push_key(self._context, transfer_id, prefill), prefill.generation)

    def _refuse_unannounced(self, load: Load, cause: Cause) -> None:
        """It ends before its prefiller heard of it, and need not keep blocks for it any longer."""
        if load.order.transfer_id:
            self._decline(load.order.transfer_id, load.order.prefill)
        self._ends.refuse(load, cause)

    # --- peers, on the session's thread ---

    def _ask_for_peer(self, load: Load) -> None:
        prefill, asked = load.order.prefill, time.monotonic()

        def answered(found: ToldCard | Cause) -> None:
            load.times.handshake_seconds = time.monotonic() - asked
            if isinstance(found, Cause):
                self._refuse_unannounced(load, found)
            else:
                self._on_peer_ready(found)
                self._hand_over(load)

        question = GetPeer(
            local_engine=self.engine.engine_id,
            engine_id=prefill.engine_id,
            endpoint=Endpoint(prefill.host, prefill.port),
            generation=prefill.generation,
        )
        ask_for_peer(self._session, question, max(0.1, load.deadline - asked), answered)

    def _register(self, card: ToldCard) -> None:
        self._on_peer_changed(register(self.topology, card, self._reader).engine_id)

    def _on_peer_changed(self, engine_id: str) -> None:
        self._peers.on_peer_changed(engine_id)
        self.pushing.on_peer_changed(engine_id)

    def _on_peer_ready(self, card: ToldCard) -> None:
        """A peer that kvd introduces: its lane connects ahead of the first load."""
        engine_id = register(self.topology, card, self._reader).engine_id
        self._peers.pull_thread(engine_id)
        self._on_peer_changed(engine_id)

    def _on_introduced(self, told: PeerReady) -> None:
        def answered(found: ToldCard | Cause) -> None:
            try:
                if isinstance(found, Cause):
                    log.warning("%s; the first request asks again", found.text)
                else:
                    self._on_peer_ready(found)
            except OwnEngine as error:
                log.error("%s", error)  # noqa: TRY400 - the message says it all

        try:
            complete(lambda: self._session, told, INTRODUCED_SECONDS, answered)
        except BadCard as error:
            log.error("kvd introduced a peer: %s", error.message)  # noqa: TRY400 - as above

    def _on_message(self, message: Message) -> Message | None:
        match message:
            case PeerReady():
                self._on_introduced(message)
            case PeerGone():
                self.topology.forget_remote_engine(message.engine_id, message.generation, message.reason)
                self._on_peer_changed(message.engine_id)
            case PushAnnounce() | PushWithdraw() | PushDone():
                return self.pushing.on_message(message)
            case PushKept():
                self.pushing.kept(message)
            case PushProgress():
                self._peers.on_progress(message)
                return Ok()
            case LeaseConfirmed():
                self._ends.confirmed(message.reader, message.seconds - self.settings.lease_margin)
            case GetSums():
                return self._summing.answer(message)
            case GetHeld() | DropPeer():
                return self._holding(message)
        return None

    def _holding(self, message: GetHeld | DropPeer) -> HeldPeers:
        """What is held of peers, before anything of it is given up."""
        held = HeldPeers((*self._peers.held(), *self.pushing.held())[:MOST_HELD])
        if isinstance(message, DropPeer):
            cause = Cause(message.cause or "an operator had its lane closed", "FORCED")
            order = Evict(message.generation, cause if message.force else None)
            self._peers.evict(message.engine_id, order)
            self.pushing.evict(message.engine_id, order)
        return held
