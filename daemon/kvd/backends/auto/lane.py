"""A lane of the auto backend: direct where every worker of the peer engine may be read so, else the transfer engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvd.backends.auto.metadata import NAME, Both, read_both
from kvd.backends.contract import (
    Backend,
    Holding,
    Lane,
    Operation,
    OrderedLane,
    State,
    Traits,
    Transfer,
    holdings_of,
    orders_streams,
    takes_selections,
)
from kvd.backends.direct.process import NAME as DIRECT
from kvd.backends.errors import BackendError, PeerMetadataError, TransferRefused, WorkerUnreachable
from kvd.backends.lanes import PeerLane
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Selection

_log = logging.getLogger(__name__)


class Backends:
    """The backends that `auto` stands for; either may be missing, with the reason.

    ``avoid`` holds for each peer's direct metadata with which a read failed why it did, so that the next lane takes the
    engine. ``told`` are the reasons that stand in the log already.
    """

    def __init__(self, engine_name: str) -> None:
        self.engine_name = engine_name
        self.direct: Backend | None = None
        self.engine: Backend | None = None
        self.no_direct = ""
        self.no_engine = ""
        self.avoid: dict[bytes, str] = {}
        self.told: set[str] = set()

    def tell(self, text: str) -> None:
        """Log it the first time."""
        if text not in self.told:
            self.told.add(text)
            _log.warning("%s", text)


@dataclass(frozen=True, slots=True)
class AutoPeer:
    """A worker: the metadata of both of its backends."""

    metadata: bytes
    both: Both


class AutoLane(PeerLane[AutoPeer]):
    """The way to one peer engine. The choice falls while its workers are added, and is one for all of them.

    With the first worker that cannot be read directly the whole lane turns to the transfer engine. Its transfers are
    those of the lane behind it that was chosen for them.
    """

    def __init__(self, name: str, backends: Backends, closed: Callable[[AutoLane], None]) -> None:
        super().__init__(name, NAME, closed)
        self._backends = backends
        self._direct = backends.direct.lane(name) if backends.direct else None
        self._engine: Lane | None = None
        self._why_not_direct = backends.no_direct

    @property
    def uses(self) -> str:
        """The backend that the next transfer goes by: ``direct`` or the engine's name."""
        return self._backends.engine_name if self._why_not_direct else DIRECT

    @property
    def traits(self) -> Traits:
        """Those of the backend that the next transfer goes by."""
        backend = self._backends.engine if self._why_not_direct else self._backends.direct
        return backend.traits if backend is not None else Traits()

    def holdings(self) -> tuple[Holding, ...]:
        """What both lanes behind this one hold: a direct lane that was given up for the engine still stands."""
        lanes = [lane for lane in (self._direct, self._engine) if lane is not None]
        found: dict[str, Holding] = {}
        for held in (held for lane in lanes for held in holdings_of(lane)):
            other = found.get(held.peer)
            found[held.peer] = held if other is None else held.joined(other)
        return tuple(found.values())

    def _connect(self, peer: str, metadata: bytes) -> None:
        both = read_both(metadata)
        if not self._why_not_direct:
            self._why_not_direct = self._add_direct(peer, both)
            if self._why_not_direct:
                self._backends.tell(
                    f"{peer} of {self.name} is not read directly but through {self._backends.engine_name}: "
                    f"{self._why_not_direct}"
                )
        if self._why_not_direct:
            others = {name: theirs.both for name, theirs in self._peers.items()}
            for name, theirs in {**others, peer: both}.items():
                self._add_engine(name, theirs)
        self._peers[peer] = AutoPeer(metadata, both)

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        return self._named(self._chosen().submit(peer, descriptors, operation))

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        """As `submit`, by number where the chosen backend takes numbers.

        Raises:
            BackendError: as `submit`.
        """
        with self._lock:
            self._known(peer)
            lane = self._chosen()
            if takes_selections(lane):
                return self._named(lane.submit_selection(peer, selection, operation))
            return self._named(lane.submit(peer, selection.descriptors(), operation))

    @property
    def precede(self) -> Callable[[Transfer, int], None]:
        """That of the lane behind this one (`kvd.backends.contract.OrderedLane`); AttributeError if it has none."""
        lane = self._engine if self._why_not_direct else self._direct
        if not orders_streams(lane):
            raise AttributeError("precede")
        return functools.partial(self._precede, lane)

    def _precede(self, lane: OrderedLane, transfer: Transfer, stream: int) -> None:
        lane.precede(transfer, stream)
        self._note_failure(transfer)

    def _named(self, transfer: Transfer) -> Transfer:
        transfer.backend = self.uses
        return transfer

    def poll(self, transfer: Transfer) -> State:
        """Look once and update ``transfer``."""
        with self._lock:
            if transfer.state is not State.PENDING:
                return transfer.state
            lane = self._direct if transfer.backend == DIRECT else self._engine
            if not self._open or lane is None:
                transfer.end(f"not a transfer of lane {self.name!r}")
                return transfer.state
            state = lane.poll(transfer)
            self._note_failure(transfer)
            return state

    def _note_failure(self, transfer: Transfer) -> None:
        """A peer that died is not reached by the engine either; for all other causes that is the way out."""
        failed = transfer.state is State.FAILED
        if failed and transfer.backend == DIRECT and transfer.peer in self._peers:
            self._backends.avoid[self._peers[transfer.peer].both.direct_metadata] = transfer.reason

    def close(self) -> None:
        """End the lanes behind this one. When this returns, no byte of any transfer can land any more. Idempotent.

        Raises:
            BackendError: as the lane behind it; call again.
        """
        with self._lock:
            self._open = False
            for lane in (self._direct, self._engine):
                if lane is not None:
                    lane.close()
        self._closed(self)

    def _add_direct(self, peer: str, both: Both) -> str:
        """Why this worker cannot be read directly, or nothing."""
        if both.no_direct:
            return f"at the peer: {both.no_direct}"
        if both.direct_metadata in self._backends.avoid:
            return f"it failed before: {self._backends.avoid[both.direct_metadata]}"
        if self._direct is None:
            return self._backends.no_direct
        try:
            self._direct.add(peer, both.direct_metadata)
        except BackendError as error:
            return error.with_hint
        return ""

    def _add_engine(self, peer: str, both: Both) -> None:
        backends, why = self._backends, self._why_not_direct
        if backends.engine is None:
            raise WorkerUnreachable(
                f"{peer} cannot be read directly ({why}), and there is no engine here: {backends.no_engine}",
                backend=NAME,
            )
        if both.no_engine or both.engine != backends.engine_name:
            missing = both.no_engine or f"its engine is {both.engine} and the one here {backends.engine_name}"
            raise PeerMetadataError(
                f"{peer} cannot be read directly ({why}), nor through an engine: {missing}",
                backend=NAME,
                hint="install and set the same engine on both sides",
            )
        if self._engine is None:
            self._engine = backends.engine.lane(self.name)
        self._engine.add(peer, both.engine_metadata)

    def _chosen(self) -> Lane:
        lane = self._engine if self._why_not_direct else self._direct
        if lane is None:
            raise TransferRefused(f"lane {self.name!r} reaches nobody: {self._why_not_direct}", backend=NAME)
        return lane
