"""Layer-wise push: carries what decoding and prefilling workers tell each other, over this kvd or two."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from kvd.geometry.rank import Rank
from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.fairness.budget import ALL, FairShare
from kvd.service.handlers.forwarding import ask_client, ask_peer, is_ours, tell_workers
from kvd.service.handlers.hosts import local_claimant, refuse_impostor
from kvd.service.handlers.senders import registered, scheduler_of
from kvd.service.peers.trust import identity_of
from kvd.service.sockets.events import Detail
from kvd.service.sockets.router import Caller
from kvd.wire.frame import encode, kind_of
from kvd.wire.identity import Endpoint
from kvd.wire.limits import LONGEST_ID
from kvd.wire.push import (
    PACKED_BYTES,
    BlockRun,
    PushAnnounce,
    PushDone,
    PushKept,
    PushKey,
    PushMessage,
    PushProgress,
    PushWithdraw,
)
from kvd.wire.reply import Ok

MAX_UNDERWAY = 4096
"""Most messages that wait for workers or other kvds at a time."""
MAX_UNDERWAY_OF_ONE = 1024
"""Of one user, or one host or key; well below `limits.MAX_TASKS_CONNECTION`, so its other requests get through."""
MAX_IDS_UNDERWAY = 4 << 20
"""Most block ids in them, which take some 40 bytes each; a single message may have more when it is alone."""
MAX_IDS_UNDERWAY_OF_ONE = 2 << 20
MOST_PUSHED = 4 << 20
"""Blocks of all groups in one message, 32 MiB where they are worked with: a million tokens in 64 groups of 16."""
LONGEST_SECONDS = 86400.0
"""How long a decoder may wait for a push."""
LONGEST_CAUSE = 500
"""Characters of a failure's cause that go into an event."""


async def from_worker(daemon: Daemon, caller: Caller, message: PushMessage) -> Ok:
    """A local worker's message, for workers of this kvd or of another. Raises `RequestRefused`."""
    key, sent = message.key, None
    if isinstance(message, PushProgress):
        sender, rank, receiver, endpoint = key.prefiller, message.source, key.decoder, key.decoder_endpoint
        if (sent := message.sent) is not None:
            message = msgspec.structs.replace(message, sent=None)
    else:
        sender, rank, receiver, endpoint = key.decoder, key.rank, key.prefiller, key.prefiller_endpoint
        here = msgspec.structs.replace(key, decoder_endpoint=daemon.myself.endpoint)
        message = msgspec.structs.replace(message, key=here)
    with _counted(daemon, message, sender, receiver):
        _check_sender(daemon, caller, message, sender, rank)
        with _place(daemon, caller, message):
            if is_ours(daemon, endpoint):
                await _ask_workers(daemon, _receivers(daemon, message), message)
            else:
                await _pass_on(daemon, message, endpoint)
    if daemon.tracing is not None and sent is not None and isinstance(message, PushProgress):
        daemon.tracing.push_ended(message, sent)
    return Ok()


async def from_peer(daemon: Daemon, caller: Caller, message: PushMessage) -> Ok:
    """A message that another kvd passed on: it is for workers here, or for none. Raises `RequestRefused`."""
    key = message.key
    here, there = (
        (key.decoder, key.prefiller) if isinstance(message, PushProgress) else (key.prefiller, key.decoder)
    )
    with _counted(daemon, message, here, there):
        workers = tuple(_receivers(daemon, message))
        await _check_host(daemon, caller, message)  # that may take long: it needs no place
        with _place(daemon, caller, message):
            await _ask_workers(daemon, workers, message)
    return Ok()


def kept(daemon: Daemon, caller: Caller, message: PushKept) -> Ok:
    """A scheduler's word for the workers of its engine. Raises `RequestRefused` for anyone else."""
    scheduler_of(daemon, caller, message.engine_id)
    tell_workers(daemon, message.engine_id, message)
    return Ok()


@contextmanager
def _counted(daemon: Daemon, message: PushMessage, here: str, there: str) -> Iterator[None]:
    """Check a message; count how carrying it went, and tell of what operators look for."""
    try:
        _check(message)
        yield
    except RequestRefused:
        daemon.counters["push.refused"] += 1
        raise
    _tell(daemon, message, here, there)


@contextmanager
def _place(daemon: Daemon, caller: Caller, message: PushMessage) -> Iterator[None]:
    """Hold a place for a message, among those of its user or host, while others are asked. Raises `RequestRefused`."""
    blocks = message.blocks if isinstance(message, PushAnnounce) else ()
    # What takes the memory of an id: a quarter of a run, or 40 bytes of packed ones.
    ids = sum(len(sent.ids) + 4 * len(sent.runs) + len(sent.packed) // 40 for sent in blocks)
    shares = (
        FairShare(
            (caller.uid, caller.key), "of this user or host", MAX_UNDERWAY_OF_ONE, MAX_IDS_UNDERWAY_OF_ONE
        ),
        FairShare(ALL, "in all", MAX_UNDERWAY, MAX_IDS_UNDERWAY),
    )
    if full := daemon.push_places.full(shares, ids):
        raise RequestRefused("KVD-BUSY", full, hint="send it again")
    daemon.push_places.take(shares, ids)
    try:
        yield
    finally:
        daemon.push_places.give_back(shares, ids)


def _tell(daemon: Daemon, message: PushMessage, here: str, there: str) -> None:
    key = message.key

    def emit(what: str, **detail: Detail) -> None:
        daemon.events.emit(
            f"push.{what}", key.transfer_id, engine=here, peer=there, rank=str(key.rank), attempt=key.attempt,
            **detail,
        )  # fmt: skip

    match message:
        case PushDone():
            daemon.counters["push.done"] += 1
        case PushAnnounce():
            daemon.counters["push.announced"] += 1
            emit("announced", tokens=message.tokens, computed=message.computed)
        case PushWithdraw():
            daemon.counters["push.withdrawn"] += 1
            emit("withdrawn")
        case PushProgress():
            daemon.counters["push.progress"] += 1
            if message.failed:
                daemon.counters["push.failed"] += 1
                emit("failed", source=str(message.source), cause=message.failed[:LONGEST_CAUSE])


# --- what is refused ---


def _check(message: PushMessage) -> None:
    key = message.key
    named = (("transfer_id", key.transfer_id), ("prefiller", key.prefiller), ("decoder", key.decoder))
    for what, text in named:
        if not text or len(text) > LONGEST_ID:
            raise RequestRefused(
                "KVD-BAD-PUSH",
                f"{what} of a {kind_of(message)} has {len(text)} characters, wanted are 1 to {LONGEST_ID}",
                final=True,
            )
    if isinstance(message, PushProgress):
        _check_blocks(key, [there.blocks for there in message.there if there.blocks is not None])
    if not isinstance(message, PushAnnounce):
        return
    _check_blocks(key, message.blocks)
    wrong = ""
    if not all(message.generations):
        wrong = f"with generations {message.generations}, both must be named"
    elif len({sent.group for sent in message.blocks}) < len(message.blocks):
        wrong = "with a group that stands twice"
    elif not 0 < message.seconds <= LONGEST_SECONDS:
        wrong = f"for {message.seconds} s, wanted are up to {LONGEST_SECONDS:g}"
    elif not 0 <= message.computed <= message.tokens:
        wrong = f"with {message.computed} of {message.tokens} tokens computed"
    if wrong:
        raise RequestRefused("KVD-BAD-PUSH", f"transfer {key.transfer_id!r} is announced {wrong}", final=True)


def _check_blocks(key: PushKey, blocks: Sequence[BlockRun]) -> None:
    """A few bytes of runs may stand for any number of blocks, for which the worker makes room."""
    total, wrong = sum(sent.count for sent in blocks), ""
    if total > MOST_PUSHED:
        wrong = f"{total} blocks, at most {MOST_PUSHED} are taken"
    elif odd := [sent for sent in blocks if len(sent.packed) % PACKED_BYTES]:
        wrong = f"blocks packed into {len(odd[0].packed)} bytes, each takes {PACKED_BYTES}"
    if wrong:
        raise RequestRefused("KVD-BAD-PUSH", f"transfer {key.transfer_id!r} names {wrong}", final=True)


def _check_sender(daemon: Daemon, caller: Caller, message: PushMessage, engine_id: str, rank: Rank) -> None:
    client = registered(daemon, caller)
    if client.engine.engine_id != engine_id or client.rank != rank:
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{client.name} cannot send a {kind_of(message)} of {engine_id}/{rank}",
            hint="each worker speaks for itself",
            final=True,
        )
    if isinstance(message, PushAnnounce) and not _was_given(daemon, client, message.key):
        raise RequestRefused(
            "KVD-NOT-DESCRIBED",
            f"engine {engine_id!r} was not given the card of {message.key.prefiller!r}, which is another user's",
            hint="its scheduler asks for that peer first",
        )
    if isinstance(message, PushAnnounce) and _over(daemon, engine_id, message.generations[1]):
        now = daemon.registry.engines[engine_id].generation
        raise RequestRefused(
            "KVD-OWN-GENERATION",
            f"engine {engine_id!r} is generation {now or '(not complete)'}, the announcement is of generation"
            f" {message.generations[1]}",
            hint="its card changed when a worker was replaced; restart the engine as a whole",
            final=True,
        )


def _was_given(daemon: Daemon, client: Client, key: PushKey) -> bool:
    """Whether a decoder here may have a prefiller here write for it: of its own user, or known to fit."""
    engine = daemon.registry.engines.get(key.prefiller)
    ours = is_ours(daemon, key.prefiller_endpoint) and engine is not None
    return not ours or local_claimant(daemon, client, key.prefiller).knows


async def _check_host(daemon: Daemon, caller: Caller, message: PushMessage) -> None:
    """A decoder's words come from the host that it is on, and so do a prefiller's. Raises `RequestRefused`.

    The workers compare the endpoints with those of their own transfers: a word about a transfer of another host's is
    none. What is announced is to be written to, so its decoder has to be there, as that host itself describes it.
    """
    key = message.key
    if isinstance(message, PushProgress):
        what = f"progress of transfer {key.transfer_id!r} of engine {key.prefiller!r}"
        refuse_impostor(daemon, caller, key.prefiller_endpoint, what)
        return
    what = f"a {kind_of(message)} of transfer {key.transfer_id!r} for engine {key.decoder!r}"
    refuse_impostor(daemon, caller, key.decoder_endpoint, what)
    if isinstance(message, PushAnnounce) and identity_of(daemon.keys) == "per host":
        await daemon.handshakes.located(key.decoder, key.decoder_endpoint, message.generations[1])


def _receivers(daemon: Daemon, message: PushMessage) -> Iterable[Client]:
    key = message.key
    if isinstance(message, PushProgress):
        return (_decoder(daemon, key.decoder, key.rank),)
    generation = ""
    if isinstance(message, PushAnnounce):
        generation = message.generations[0]
    elif isinstance(message, PushWithdraw):
        generation = message.generation
    engine = daemon.registry.ready(key.prefiller)
    if engine is None:
        raise _absent(daemon, key.prefiller, generation)
    return tuple(daemon.registry.at(key.prefiller, generation or engine.generation).workers.values())


def _decoder(daemon: Daemon, engine_id: str, rank: Rank) -> Client:
    engine = daemon.registry.engines.get(engine_id)
    if engine is not None and (rank in engine.workers or engine.state == "ready"):
        return engine.worker(rank)
    raise _absent(daemon, engine_id, "")


def _absent(daemon: Daemon, engine_id: str, generation: str) -> RequestRefused:
    """Not all of it is here: for good, or until its workers have registered with a kvd that has just started."""
    refusal = daemon.registry.not_ready(engine_id)
    refusal.final = _over(daemon, engine_id, generation)
    return refusal


def _over(daemon: Daemon, engine_id: str, generation: str) -> bool:
    engine = daemon.registry.engines.get(engine_id)
    gone = engine is not None and engine.state == "gone"
    return gone or daemon.registry.ended(engine_id, generation)


# --- the way ---


async def _pass_on(daemon: Daemon, message: PushMessage, endpoint: Endpoint) -> None:
    what = f"transfer {message.key.transfer_id!r}"
    if not isinstance(message, PushProgress) and message.key.decoder_endpoint.host == "":
        raise RequestRefused(
            "KVD-NO-WAY-BACK",
            f"{what}: this kvd has no peer socket, so nothing can come back from {endpoint}",
            hint="set peer.listen in the configuration of this kvd",
            final=True,
        )
    size, limit = len(encode(message)), daemon.config.peer.max_message_bytes
    if size + 16 > limit:  # the id of the request comes on top; a larger frame would cost the connection
        raise RequestRefused(
            "KVD-TOO-LARGE",
            f"{what}: the {kind_of(message)} has {size} bytes, peer.max_message_bytes is {limit}",
            hint="raise peer.max_message_bytes on both kvds",
            final=True,
        )
    await ask_peer(daemon, endpoint, what, message, Ok)


async def _ask_workers(daemon: Daemon, workers: Iterable[Client], message: PushMessage) -> None:
    """Ask all at once; the first refusal that is final, else the first, is the answer of them all."""
    answers = await asyncio.gather(*(_refusal_of(daemon, worker, message) for worker in workers))
    if refusals := [answer for answer in answers if answer is not None]:
        raise next((refusal for refusal in refusals if refusal.final), refusals[0])


async def _refusal_of(daemon: Daemon, worker: Client, message: PushMessage) -> RequestRefused | None:
    try:
        await ask_client(daemon, worker, message, Ok)
    except RequestRefused as refusal:
        return refusal
    return None
