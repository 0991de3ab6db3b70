"""A NIXL lane: the way to one peer engine, one agent that goes away when a transfer on it is given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.backends.contract import Holding, Operation, State, Transfer
from kvd.backends.envelope import Envelope, same_minor_release, unpack
from kvd.backends.errors import BackendError, PeerMetadataError, TransferRefused, WorkerUnreachable
from kvd.backends.lanes import EngineLane
from kvd.backends.nixl.agent import MEMORY, Agent
from kvd.backends.nixl.descriptors import parts
from kvd.backends.nixl.library import NAME
from kvd.backends.nixl.lists import PreparedLists
from kvd.backends.regions import RegisteredMemory, parse_device, well_formed
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Selection

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
class NixlPeer:
    """A worker: what NIXL calls it, its memory and its prepared lists."""

    metadata: bytes
    agent: str
    memory: RegisteredMemory
    lists: PreparedLists = field(default_factory=PreparedLists)


@dataclass(slots=True, eq=False)
class _Post:
    """What `Transfer.handle` points at: NIXL's handles, one for each pair of memory kinds; emptied by the lane."""

    handles: list[Any] = field(default_factory=list)


class NixlLane(EngineLane[NixlPeer, _Post]):
    """The way to one peer engine: one agent."""

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
        """Transfers that are given up get ``drain_s`` seconds to end by themselves.

        If some don't, the agent goes to ``park`` (see `Parked`) where that may be, else it is destroyed, and copies
        that a GPU has queued are waited for.
        """
        super().__init__(name, NAME, closed)
        self._drain_s = drain_s
        self._park = park
        self._agent: Agent | None = agent
        self._memory = RegisteredMemory(regions)
        self._unended = False  # a transfer ended without its bytes being known to have

    def _holding(self, name: str, known: NixlPeer) -> Holding:
        """What UCX maps of a peer it keeps to itself."""
        return Holding(name, known.memory.regions, known.memory.nbytes)

    def _connect(self, peer: str, metadata: bytes) -> None:
        agent = self._live_agent()
        envelope = unpack(metadata, backend=NAME)
        same_minor_release(agent.library.version, envelope.version, backend=NAME, engine="NIXL")
        _known_devices(envelope)
        for other, held in self._peers.items():
            if held.agent == envelope.agent and other != peer:
                raise PeerMetadataError(
                    f"agent {envelope.agent!r} is already known as {other!r}, cannot be {peer!r} too",
                    backend=NAME,
                )
        if known := self._peers.get(peer):
            del self._peers[peer]
            agent.release(known.lists.take())
            agent.call(f"forget {peer}", "remove_remote_agent", known.agent)
        try:
            loaded = agent.call(f"add {peer}", "add_remote_agent", envelope.blob)
        except TransferRefused as refused:
            raise WorkerUnreachable(refused.message, backend=NAME, hint=refused.hint) from None
        loaded = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if loaded != envelope.agent:
            agent.call(f"forget {loaded}", "remove_remote_agent", loaded)
            raise PeerMetadataError(
                f"metadata is of agent {envelope.agent!r} by its header and {loaded!r} by NIXL",
                backend=NAME,
            )
        self._peers[peer] = NixlPeer(metadata, envelope.agent, RegisteredMemory(envelope.regions))

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """With shared memory the call lasts as long as the copy, with the GIL released."""
        known = self._peers[peer]
        agent, rows = self._live_agent(), well_formed(descriptors, backend=NAME)
        transfer = Transfer(peer, rows.nbytes, len(rows), _Post())
        return self._post(agent, transfer, self._by_address(agent, known, rows, operation, peer))

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        """Post a transfer of cells of a grid, which is prepared with its first selection; otherwise as `submit`.

        Raises:
            TransferRefused: as `submit`, or a cell that the grid does not have.
        """
        with self._lock:
            agent, known = self._live_agent(), self._known(peer)
            transfer = Transfer(peer, selection.nbytes, len(selection), _Post())
            lists = known.lists.of(agent, known.agent, selection.grid, self._memory, known.memory)
            if lists is None:
                making = self._by_address(
                    agent, known, well_formed(selection.descriptors(), backend=NAME), operation, peer
                )
            else:
                making = self._by_number(agent, lists, selection, operation, peer)
            return self._post(agent, transfer, making)

    def _look(self, work: _Post, transfer: Transfer) -> None:  # noqa: ARG002 - the transfer has it
        """Over tcp this is also what moves the bytes, with the GIL released."""
        self._step(self._live_agent(), transfer, "check_xfer_state")

    def _stop(self, reason: str) -> None:
        agent = self._agent
        if agent is None:
            return
        self._drain(agent)
        self._unended = self._unended or bool(self._live)
        parked = Parked(agent) if self._live and self._park else None
        for post in list(self._live):
            if parked:
                parked.handles += post.handles
                post.handles.clear()
            agent.release(post.handles)
        self._end_all(reason)
        lists = [handle for peer in self._peers.values() for handle in peer.lists.take()]
        self._peers.clear()
        if parked and self._park:
            parked.lists = lists
            self._park(parked)
        else:
            agent.release(lists)
            agent.destroy(settle=self._unended)
        self._agent = None

    def _drain(self, agent: Agent) -> None:
        """Let transfers end: one that ended needs neither parking nor a cancellation that its peer would notice."""
        until = time.monotonic() + self._drain_s
        while self._live and time.monotonic() < until:
            for transfer in list(self._live.values()):
                self._step(agent, transfer, "check_xfer_state")
            time.sleep(_PAUSE_S)

    def _live_agent(self) -> Agent:
        self._opened()
        if self._agent is None:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=NAME)
        return self._agent

    def _by_address(
        self, agent: Agent, known: NixlPeer, rows: Descriptors, operation: Operation, peer: str
    ) -> Iterator[Any]:
        """NIXL's handles of a transfer made anew, one for each pair of memory kinds."""
        for part in parts(rows, self._memory, known.memory):
            local = agent.call("describe local memory", "get_xfer_descs", part.local, part.local_memory)
            remote = agent.call("describe remote memory", "get_xfer_descs", part.remote, part.remote_memory)
            doing = f"{operation} {len(part.local)} descriptors, peer {peer}"
            yield agent.call(doing, "initialize_xfer", _OPERATIONS[operation], local, remote, known.agent)

    @staticmethod
    def _by_number(
        agent: Agent, lists: list[Any], selection: Selection | BlockSelection, operation: Operation, peer: str
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
        self._step(agent, self._begin(transfer), "transfer")
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
            agent.release(transfer.handle.handles)
            self._end(transfer)

    def _advance(self, agent: Agent, transfer: Transfer, method: str, handle: Any) -> str:
        try:
            status = str(agent.call(f"transfer with {transfer.peer}", method, handle))
            reason = f"transfer with {transfer.peer}: NIXL answered {status}" if status == "ERR" else ""
        except BackendError as error:
            status, reason = "ERR", error.with_hint
        if reason:
            self._unended = True
            agent.release(transfer.handle.handles)
            self._end(transfer, reason)
        return status


def _known_devices(envelope: Envelope) -> None:
    for region in envelope.regions:
        if parse_device(region.device)[0] not in MEMORY:
            raise PeerMetadataError(
                f"agent {envelope.agent!r} has memory on {region.device!r}; NIXL knows {', '.join(MEMORY)}",
                backend=NAME,
            )
