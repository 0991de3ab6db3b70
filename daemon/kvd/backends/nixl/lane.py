"""A NIXL lane: the way to one peer engine, one agent that goes away when a transfer on it is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.backends.contract import Operation, State, Transfer
from kvd.backends.envelope import Envelope, unpack
from kvd.backends.errors import BackendError, PeerMetadataError, PeerUnreachable, TransferRefused
from kvd.backends.nixl.agent import MEMORY, Agent
from kvd.backends.nixl.library import NAME
from kvd.backends.nixl.lists import PreparedLists
from kvd.backends.nixl.rows import parts
from kvd.backends.rows import checked
from kvd.backends.spans import Spans, parse_device
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Selection

_OPERATIONS: Mapping[Operation, str] = {"read": "READ", "write": "WRITE"}
_PAUSE_S = 5e-5  # polling without a pause starves UCX's own threads on a busy host


@dataclass(slots=True, eq=False)
class Parked:
    """An agent nobody will call again, with the handles of its unfinished transfers and of its prepared lists.

    Destroying an agent that has a read under way over tcp closes the connection under the peer's answer, and UCX in the
    *peer* may then abort the whole process ("ucp_request.inl: Fatal: unexpected error: Endpoint timeout"). Where every
    transport is software, only calls into the agent move bytes into our memory; so an agent without a progress thread
    that is never called again writes nothing, and keeps the peer's connection open.
    """

    agent: Agent
    handles: list[Any] = field(default_factory=list)
    lists: list[Any] = field(default_factory=list)

    def destroy(self) -> None:
        """Release and destroy after all.

        Raises:
            BackendError: the agent is still referred to.
        """
        self.agent.release(self.handles)
        self.agent.release(self.lists)
        self.agent.destroy(settle=True)


@dataclass(slots=True)
class _Peer:
    metadata: bytes
    agent: str
    spans: Spans
    lists: PreparedLists = field(default_factory=PreparedLists)


@dataclass(slots=True, eq=False)
class _Post:
    """What `Transfer.handle` points at: NIXL's handles, one for each pair of memory kinds; emptied by the lane."""

    handles: list[Any] = field(default_factory=list)


class NixlLane:
    """The way to one peer engine: one agent. Calls from several threads wait for each other, `close` too."""

    def __init__(
        self,
        name: str,
        agent: Agent,
        regions: Sequence[Region],
        *,
        drain_s: float,
        park: Callable[[Parked], None] | None,
        closed: Callable[[NixlLane], None],
    ) -> None:
        self.name = name
        self._drain_s = drain_s
        self._park = park
        self._agent: Agent | None = agent
        self._open = True
        self._spans = Spans(regions)
        self._peers: dict[str, _Peer] = {}
        self._live: dict[_Post, Transfer] = {}
        self._unended = False  # a transfer ended without its bytes being known to have
        self._closed = closed
        self._lock = threading.Lock()

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. The same metadata again does nothing, other metadata takes its place.

        Raises:
            PeerMetadataError: not of this backend, of another minor release of NIXL, damaged, or already here under
                another name.
            PeerUnreachable: NIXL cannot connect to it.
        """
        with self._lock:
            agent = self._opened()
            known = self._peers.get(peer)
            if known and known.metadata == metadata:
                return
            envelope = unpack(metadata, backend=NAME)
            _same_release(agent.library.version, envelope.version)
            _known_devices(envelope)
            for other, held in self._peers.items():
                if held.agent == envelope.agent and other != peer:
                    raise PeerMetadataError(
                        f"agent {envelope.agent!r} is already known as {other!r}, cannot be {peer!r} too",
                        backend=NAME,
                    )
            if known:
                del self._peers[peer]
                agent.release(known.lists.take())
                agent.call(f"forget {peer}", "remove_remote_agent", known.agent)
            try:
                loaded = agent.call(f"add {peer}", "add_remote_agent", envelope.blob)
            except TransferRefused as refused:
                raise PeerUnreachable(refused.message, backend=NAME, hint=refused.hint) from None
            loaded = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            if loaded != envelope.agent:
                agent.call(f"forget {loaded}", "remove_remote_agent", loaded)
                raise PeerMetadataError(
                    f"metadata is of agent {envelope.agent!r} by its header and {loaded!r} by NIXL",
                    backend=NAME,
                )
            self._peers[peer] = _Peer(metadata, envelope.agent, Spans(envelope.regions))

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Post a transfer. With shared memory the call lasts as long as the copy, with the GIL released.

        An error before anything was posted is raised; one after that is a FAILED transfer, because part of it may still
        move.

        Raises:
            TransferRefused: unknown peer, closed lane, malformed columns, memory that is not registered.
        """
        with self._lock:
            agent, known = self._opened(), self._known(peer)
            rows = checked(descriptors, backend=NAME)
            transfer = Transfer(peer, rows.nbytes, len(rows), _Post())
            return self._post(agent, transfer, self._by_address(agent, known, rows, operation, peer))

    def submit_selection(self, peer: str, selection: Selection, operation: Operation = "read") -> Transfer:
        """Post a transfer of cells of a grid, which is prepared with its first selection; otherwise as `submit`.

        Raises:
            TransferRefused: as `submit`, or a cell that the grid does not have.
        """
        with self._lock:
            agent, known = self._opened(), self._known(peer)
            transfer = Transfer(peer, selection.nbytes, len(selection), _Post())
            lists = known.lists.of(agent, known.agent, selection.grid, self._spans, known.spans)
            if lists is None:
                making = self._by_address(
                    agent, known, checked(selection.descriptors(), backend=NAME), operation, peer
                )
            else:
                making = self._by_number(agent, lists, selection, operation, peer)
            return self._post(agent, transfer, making)

    def poll(self, transfer: Transfer) -> State:
        """Look once and update ``transfer``. Over tcp this is also what moves the bytes, with the GIL released."""
        with self._lock:
            if transfer.state is State.PENDING:
                if self._agent is None or not self._open or transfer.handle not in self._live:
                    self._end(transfer, State.FAILED, f"not a transfer of lane {self.name!r}")
                else:
                    self._step(self._agent, transfer, "check_xfer_state")
            return transfer.state

    def close(self) -> None:
        """End the lane. When this returns no byte of any of its transfers can land here any more. Idempotent.

        Transfers get ``drain_s`` seconds to end by themselves. If some don't, the agent is parked where the backend
        allows it (see `Parked`), else destroyed, and copies that a GPU has queued are waited for.

        Raises:
            BackendError: something outside this module holds NIXL's agent, so it still lives, or the GPU cannot be
                waited for: treat the memory of the lane's transfers as still being written.
        """
        with self._lock:
            agent, self._open = self._agent, False
            if agent is None:
                return
            self._drain(agent)
            self._unended = self._unended or bool(self._live)
            parked = Parked(agent) if self._live and self._park else None
            for transfer in list(self._live.values()):
                if parked:
                    parked.handles += transfer.handle.handles
                    transfer.handle.handles.clear()
                agent.release(transfer.handle.handles)
                self._end(transfer, State.FAILED, f"lane {self.name!r} was closed before the transfer ended")
            self._live.clear()
            lists = [handle for peer in self._peers.values() for handle in peer.lists.take()]
            self._peers.clear()
            if parked and self._park:
                parked.lists = lists
                self._park(parked)
            else:
                agent.release(lists)
                agent.destroy(settle=self._unended)
            self._agent = None
        self._closed(self)

    def _drain(self, agent: Agent) -> None:
        """Let transfers end: one that ended needs neither parking nor a cancellation that its peer would notice."""
        until = time.monotonic() + self._drain_s
        while self._live and time.monotonic() < until:
            for transfer in list(self._live.values()):
                self._step(agent, transfer, "check_xfer_state")
            time.sleep(_PAUSE_S)

    def _opened(self) -> Agent:
        if self._agent is None or not self._open:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=NAME)
        return self._agent

    def _known(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise TransferRefused(f"peer {peer!r} was not added to lane {self.name!r}", backend=NAME)
        return known

    def _by_address(
        self, agent: Agent, known: _Peer, rows: Descriptors, operation: Operation, peer: str
    ) -> Iterator[Any]:
        """NIXL's handles of a transfer made anew, one for each pair of memory kinds."""
        for part in parts(rows, self._spans, known.spans):
            local = agent.call("describe local memory", "get_xfer_descs", part.local, part.local_memory)
            remote = agent.call("describe remote memory", "get_xfer_descs", part.remote, part.remote_memory)
            doing = f"{operation} {len(part.local)} descriptors, peer {peer}"
            yield agent.call(doing, "initialize_xfer", _OPERATIONS[operation], local, remote, known.agent)

    @staticmethod
    def _by_number(
        agent: Agent, lists: list[Any], selection: Selection, operation: Operation, peer: str
    ) -> Iterator[Any]:
        """NIXL's handle of a transfer between two prepared lists."""
        if len(selection) or len(selection.remote):
            doing = f"{operation} {len(selection)} prepared descriptors, peer {peer}"
            yield agent.pick(doing, _OPERATIONS[operation], lists, selection.local, selection.remote)

    def _post(self, agent: Agent, transfer: Transfer, making: Iterator[Any]) -> Transfer:
        """Make all handles, then post them: what fails before the first post has moved nothing."""
        handles: list[Any] = transfer.handle.handles
        try:
            # No variable for a single handle: the traceback of a refusal would hold it, and with it the agent.
            handles.extend(making)
        except BackendError:
            agent.release(handles)
            raise
        transfer.posted = time.monotonic()
        self._live[transfer.handle] = transfer
        self._step(agent, transfer, "transfer")
        return transfer

    def _step(self, agent: Agent, transfer: Transfer, method: str) -> None:
        """Call a method that gives a state for each handle: DONE when none is under way, FAILED as soon as one is."""
        pending = False
        for handle in transfer.handle.handles:
            status = self._advance(agent, transfer, method, handle)
            if transfer.state is State.FAILED:
                return
            pending |= status == "PROC"
        if not pending:
            self._release(agent, transfer)
            self._end(transfer, State.DONE, "")

    def _advance(self, agent: Agent, transfer: Transfer, method: str, handle: Any) -> str:
        try:
            status = str(agent.call(f"transfer with {transfer.peer}", method, handle))
            reason = f"transfer with {transfer.peer}: NIXL answered {status}" if status == "ERR" else ""
        except BackendError as error:
            status, reason = "ERR", f"{error.message} ({error.hint})" if error.hint else error.message
        if reason:
            self._unended = True
            self._release(agent, transfer)
            self._end(transfer, State.FAILED, reason)
        return status

    def _release(self, agent: Agent, transfer: Transfer) -> None:
        self._live.pop(transfer.handle, None)
        agent.release(transfer.handle.handles)

    @staticmethod
    def _end(transfer: Transfer, state: State, reason: str) -> None:
        transfer.state, transfer.reason, transfer.ended = state, reason, time.monotonic()


def _same_release(here: str, there: str) -> None:
    """Metadata of one NIXL is read by another of the same minor release; beyond that NIXL promises nothing."""
    if here.split(".")[:2] != there.split(".")[:2]:
        raise PeerMetadataError(
            f"metadata is of NIXL {there} at the peer and this is NIXL {here}",
            backend=NAME,
            hint="install the same minor release of nixl on both hosts",
        )


def _known_devices(envelope: Envelope) -> None:
    for region in envelope.regions:
        if parse_device(region.device)[0] not in MEMORY:
            raise PeerMetadataError(
                f"agent {envelope.agent!r} has memory on {region.device!r}; NIXL knows {', '.join(MEMORY)}",
                backend=NAME,
            )
