"""The prefilling side of layer-wise push on one worker: from vLLM's hooks and decoders' messages to the senders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvd.shown import logger
from kvd.wire.agent import HeldPeer
from kvd.wire.codes import RefusalCode
from kvd.wire.push import PushAnnounce, PushDone, PushKept, PushWithdraw
from kvd.wire.reply import Ok, Refused, refusal
from kvd.worker.context import WorkerContext
from kvd.worker.orders import StepOrders
from kvd.worker.peers.held import Evict
from kvd.worker.push.computed import Outgoing
from kvd.worker.push.sender import Sender
from kvd.worker.push.sent_blocks import received_blocks
from kvd.worker.staging import Stager
from kvd.worker.streams.event import StreamEvent

log = logger(__name__)

MOST_SENDERS = 1024
"""Decoding engines that one worker pushes to: a thread and a lane each, kept while that engine is there."""
CODE: RefusalCode = "KVD-CONNECTOR-PUSH"
"""The code of what a worker refuses here."""


class Pushing:
    """All that one prefilling worker pushes.

    `begin`, `saved` and `stepped` are called in vLLM's step, `sent` after it; `on_message` and
    `on_peer_changed` on the session's thread. None of them waits for anything.
    """

    def __init__(
        self,
        context: WorkerContext,
        record_event: Callable[[], StreamEvent | None],
        stager: Stager | None = None,
    ) -> None:
        """``record_event`` gives what tells when the device has come as far as now, None where it is there already.

        With a ``stager`` layers are copied to where decoders read them before these hear of them.
        """
        self._context = context
        self._stager = stager
        hooks = sum(group.kind != "mamba" for group, _ in context.topology.worker.layers.values())
        self._outgoing = Outgoing(record_event, hooks)
        self._lock = threading.Lock()
        self._senders: dict[str, Sender] = {}
        self._generation = ""
        self._closed = False
        """The senders are the session's thread's, but for `stop` and `join`."""

    # --- vLLM's step ---

    def begin(self, orders: StepOrders) -> bool:
        """Before a step, and before it overwrites blocks of what was preempted. Whether it computes anything pushed."""
        if not orders.pushes and not orders.push_ends:
            return False
        return self._outgoing.begin(orders.pushes, orders.push_ends)

    def saved(self, layer: str) -> None:
        """A layer of the step that `begin` announced holds its KV."""
        self._outgoing.saved(layer)

    def stepped(self) -> None:
        """The step that `begin` announced has run."""
        self._outgoing.stepped(self._context.topology.worker.layers)

    def sent(self) -> set[str]:
        """Requests whose blocks are needed no longer, each once."""
        return self._outgoing.sent(time.monotonic())

    def abandon(self) -> set[str]:
        """Requests whose blocks are held, and will be sent to nobody any more: after `join`."""
        return self._outgoing.abandon()

    # --- the session's thread ---

    def on_message(self, message: PushAnnounce | PushWithdraw | PushDone) -> Ok | Refused:
        """A decoding worker's message."""
        key = message.key
        if key.prefiller != self._context.engine_id:
            return _refused(
                f"this is a worker of {self._context.engine_id}, the message is for {key.prefiller}"
            )
        if isinstance(message, PushAnnounce) and (refused := self._stale(message)):
            return refused
        sender = self._sender(key.decoder)
        if isinstance(sender, Refused):
            return sender
        if isinstance(message, PushAnnounce) and not self._outgoing.announced(
            key.transfer_id, key.decoder, key.rank, sender.wake, by_layer=self._by_layer(message)
        ):
            return refusal(
                code=CODE,
                message=f"too many transfers are announced: {key.transfer_id} is one more",
                hint="send it again",
            )
        sender.take(message)
        return Ok()

    def kept(self, message: PushKept) -> None:
        """The scheduler's word on a request that has ended, ahead of its next step."""
        blocks = {sent.group: received_blocks(sent) for sent in message.blocks}
        self._outgoing.kept(message.transfer_id, message.request_id, blocks)

    def on_peer_changed(self, engine_id: str) -> None:
        """Another generation of a decoder is registered, or none: that ends what the one before was owed."""
        with self._lock:
            sender = self._senders.get(engine_id)
            self._part_from_gone()
        if sender is not None:
            sender.on_peer_changed()

    def held(self) -> list[HeldPeer]:
        """What the senders hold of decoders just now."""
        with self._lock:
            senders = list(self._senders.values())
        return [one for sender in senders for one in sender.held()]

    def evict(self, decoder: str, order: Evict) -> None:
        """Close the lanes to a decoder: begin that."""
        with self._lock:
            sender = self._senders.get(decoder)
        if sender is not None:
            sender.evict(order)

    # --- the end ---

    def stop(self) -> None:
        """Give up whatever is under way: begin that."""
        with self._lock:
            self._closed = True
            senders = list(self._senders.values())
        self._outgoing.stop()
        for sender in senders:
            sender.stop()

    def join(self, until: float) -> list[str]:
        """Wait for the senders, to time.monotonic() ``until``. The decoders whose lanes may still be at work."""
        with self._lock:
            senders = list(self._senders.values())
        self._outgoing.join(until)
        return [sender.decoder for sender in senders if not sender.join(until - time.monotonic())]

    # --- private ---

    def _stale(self, message: PushAnnounce) -> Refused | None:
        """Refuse what was announced to another life of this engine."""
        # Ours does not change while we live; a kvd that was just started names it only when all workers are back.
        self._generation = self._context.session().state.engine_generation or self._generation
        wanted = message.generations[0]
        if not self._generation or wanted == self._generation:
            return None
        return _refused(
            f"{self._context.engine_id} is generation {self._generation}, announced to was generation {wanted}"
        )

    def _by_layer(self, message: PushAnnounce) -> bool:
        """What is written or copied for a decoder goes layer by layer; one that reads by itself reads whole steps.

        Each read within a step would take a turn of it, and once it has run they take a fraction of that together. Of
        the last step of several it reads some layers ahead (`kvd.worker.push.marks`).
        """
        return bool(message.window) or self._stager is not None

    def _sender(self, decoder: str) -> Sender | Refused:
        with self._lock:
            if self._closed:
                return _refused(f"{self._context.engine_id} shuts down")
            if sender := self._senders.get(decoder):
                return sender
            self._part_from_gone()
            if len(self._senders) >= MOST_SENDERS:
                return refusal(
                    code=CODE,
                    message=f"{len(self._senders)} decoders are pushed to by {self._context.engine_id}, which is as"
                    f" many as one prefiller takes: {decoder} is one more",
                    hint="give this decoder another prefiller, or let it pull; room is made when a decoder ends",
                )
            made = self._senders[decoder] = Sender(decoder, self._context, self._outgoing, self._stager)
            return made

    def _part_from_gone(self) -> None:
        """End the senders to decoders that are gone and owed nothing. Only this thread gives them anything to do."""
        for decoder, sender in list(self._senders.items()):
            if self._context.topology.find(decoder) is None and sender.idle:
                sender.stop()
                del self._senders[decoder]


def _refused(message: str) -> Refused:
    return refusal(code=CODE, message=message, final=True)
