"""How much the sockets take at a time: connections, bytes, turns. Each number with its reason."""

from __future__ import annotations

import resource
from dataclasses import dataclass

TURN_SECONDS = 0.002
"""How long connections are served before timers and other tasks get their turn: a flood must not starve the clocks."""
LEAST_TURN_SECONDS = 0.0001
"""And how long at least, where the rest of a turn took long: 2 ms of messages may ask for 60 ms of work in tasks."""
MESSAGES_A_STEP = 4
"""Most messages that one connection has handled before the next one is served."""
READ_BYTES = 8 << 10
"""Bytes read at a time where nothing larger has begun. So much of every connection may wait for its turn."""
LONG_READ_BYTES = 256 << 10
"""Bytes read at a time of a frame that has begun and is larger."""
SMALL_FRAME = 8 << 10
"""A frame of more bytes needs a reservation: thousands of clients may each have begun a small one."""

INCOMING_BYTES = 64 << 20
"""Most bytes of larger frames that are here and not handled yet, of all clients: four messages of the largest kind."""
INCOMING_USER_BYTES = 48 << 20
"""Of that for one user, or one host or key."""
INCOMING_PROCESS_BYTES = 32 << 20
"""Of that for one process. A frame that is larger than a share comes when nothing else of that share is here."""
FRAME_SECONDS = 5.0
"""How long a larger frame may take to arrive once its bytes are reserved: others wait for them."""
FRAME_LATE = 3
"""So often it may take as long again, where bytes of it are here that kvd itself has not come to read."""

UNSENT_PAUSE_BYTES = 256 << 10
"""Who leaves so much unread is read from no more until it has: the answers to its questions would only add to it."""
UNSENT_BYTES = 64 << 20
"""Most that waits to be sent on one connection, besides one message. Only what kvd sends unasked gets there."""
UNSENT_TOTAL_BYTES = 64 << 20
"""Most that waits to be sent in all. Over it connections end, of users with over three quarters of it first."""
UNREAD_SECONDS = 10.0
"""Who reads nothing of what waits for it for so long has its connection ended; a client that lives makes another."""
STOPPED_SECONDS = 1.0
"""Sweeps that are late by more mean that kvd stood still: for as long again nobody is judged by the clock."""

HANDSHAKE_SECONDS = 3.0
"""How long a connection may take until it has said what it is."""
BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted (the kernel's own limit is 4096 too)."""
ACCEPTS_A_TURN = 64
ACCEPT_PAUSE_SECONDS = 0.005
"""Pause after a full turn of accepting: 12,800 a second, which costs less than half of a processor."""
NO_DESCRIPTORS_PAUSE_SECONDS = 0.1

MAX_CONNECTIONS = 18_432
"""Connections in all, where the limit of open files allows. 10,000 clients of one host, all of one user, fit in."""
MAX_SUBSCRIBERS = 256
"""Connections to the socket for events: tools of operators. Each event is matched with each of them."""
RESERVED_DESCRIPTORS = 256
"""Open files that connections never take: ledger, log, metrics, the loop, names being resolved."""
MAX_LINKS = 2048
"""Other kvds that this one dials."""

MAX_TOPICS = 256
MAX_TOPIC_BYTES = 256
EVENTS_UNSENT_BYTES = 1 << 20
"""Events that wait for one reader; it loses further ones and sees the gap in their numbers."""
EVENTS_UNSENT_TOTAL_BYTES = 32 << 20
"""Events that wait for all readers; over it readers lose their connections, by the same rule as clients."""

MAX_TASKS = 13_312
"""Most requests of one socket that wait for something at a time; further ones are refused."""
MAX_TASKS_CONNECTION = 1536
"""More than the 1,024 messages of pushes that may wait (`handlers.pushes`): a handshake beside them gets through."""
MAX_TASKS_PROCESS = 2560
MAX_TASKS_USER_KIND = 8704
"""Of one kind of message of one user: 64 engines start together, 128 workers and a scheduler of each ask for a peer."""
MAX_TASKS_KIND = 10_240
"""Of one kind of message: questions about engines leave room for claims and records, whoever asks them."""
MAX_TASKS_USER = 11_264
MAX_WAITING_BYTES = 48 << 20
"""Bytes of the requests of one socket that wait for something: three quarters of `INCOMING_BYTES`. What waits for a
disk or a worker leaves room for what arrives."""
MAX_WAITING_USER_BYTES = 32 << 20
"""Of that for one user, or one host or key; two thirds of `INCOMING_USER_BYTES`."""
MAX_WAITING_PROCESS_BYTES = 16 << 20
"""For one process: half of `INCOMING_PROCESS_BYTES`."""


@dataclass(frozen=True, slots=True)
class ConnectionCounts:
    """Most connections to each socket, and most links to other kvds."""

    local: int
    peer: int
    events: int
    links: int


def connection_counts(descriptors: int | None = None) -> ConnectionCounts:
    """What the limit of open files allows (None: this process's): kvd must never run out of descriptors.

    A client may cost two: its connection, and the descriptor by which kvd learns that its process ended.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if descriptors is None else descriptors
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    links = min(MAX_LINKS, limit // 8)
    free = limit - min(RESERVED_DESCRIPTORS, limit // 4) - links
    most = min(MAX_CONNECTIONS, free // 2)
    events = min(MAX_SUBSCRIBERS, most // 16)
    peer = most * 3 // 16
    return ConnectionCounts(most - peer - events, peer, events, links)


def share_of(most: int) -> int:
    """Connections of one user or one address, of ``most``: workers often are all of one user, others need a rest."""
    return most * 3 // 4
