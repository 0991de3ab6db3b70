"""What is taken off the wire: types of fields with their limits, and how many bytes each kind of message may have.

The decoder checks them before it builds anything, so that a message of some bytes never costs seconds or gigabytes.
They are far above what an engine of 4,096 workers with 80 layers, or a kvd with 10,000 engines, needs. Every field of
every message has such a type (a test looks).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

MOST = (1 << 63) - 1
"""The largest whole number: what SQLite and signed 64 bits hold."""
LONGEST_ID = 512
"""Characters of an id. Those that vLLM and routers make have less than 200."""
LONGEST_INCARNATION = 64
"""Characters of an incarnation; vLLM's workers make theirs of 32. All of an engine's are hashed in one turn."""
LONGEST_TEXT = 16_384
"""Characters of a cause, a reason or a message. kvd makes them shorter; so did no kvd before it."""
LONGEST_SECONDS = 1e12
"""No duration and no Unix time is larger. NaN and the infinities lie outside of it."""
MOST_RANKS = 65_536
"""Workers of an engine. The largest that is planned for has 4,096."""
MOST_LAYERS = 1024
"""Layers of one KV cache group."""
MOST_GROUPS = 256
"""KV cache groups of a model; hybrid ones have ten."""
MOST_LEASES_OPENED = 128
"""Leases in one `LeaseOpened`: kvd opens so many within 20 ms. A scheduler sends one by one."""
MOST_LEASES_HELD = 4096
"""Leases, and claims, that a scheduler lists when it registers. Each keeps at least a block, for a minute or so."""
MOST_LEASE_READERS = 16
"""Readers of a lease that an operator is shown by name."""
MOST_RECORDS = 128
"""Records in one report: kvd takes so many within some 20 ms."""
MOST_BLOCKS = 1 << 20
"""Blocks of a request in one KV cache group: 16 million tokens in blocks of 16."""
MOST_ROWS = 131_072
"""Rows of an answer to an operator: more than the ranks of an engine or the engines of a kvd."""
MOST_ENGINES = 16_384
"""Engines that a ping or its answer names."""
MOST_FACTS = 256
"""Facts of an engine, stages of a transfer, moments of it."""
MOST_COUNTERS = 16_384
"""Counters of a kvd."""

Id: TypeAlias = Annotated[str, Meta(max_length=LONGEST_ID)]
"""Of an engine, a request, a transfer, a process; also the name of a layer, a backend or a kind."""
Incarnation: TypeAlias = Annotated[str, Meta(max_length=LONGEST_INCARNATION)]
"""Of a worker or a scheduler: new at each start of its process."""
Text: TypeAlias = Annotated[str, Meta(max_length=LONGEST_TEXT)]
"""For people; and the path of a model."""
Whole: TypeAlias = Annotated[int, Meta(ge=-MOST - 1, le=MOST)]
"""A whole number of either sign, such as one that stands for "none" below zero."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
Number: TypeAlias = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Any finite number."""
Seconds: TypeAlias = Annotated[float, Meta(ge=-LONGEST_SECONDS, le=LONGEST_SECONDS)]
"""A duration, also one that is over (below zero), or a Unix time."""
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Size: TypeAlias = Annotated[int, Meta(ge=-MOST_RANKS, le=MOST_RANKS)]
"""Of an engine in one direction. What is below one is refused by whoever knows what it is about, in words."""
Blob: TypeAlias = Annotated[bytes, Meta(max_length=2 << 20)]
"""What another floor reads: a geometry, or what a backend exported for its peers. Real ones have some 100 KB."""
Secret: TypeAlias = Annotated[bytes, Meta(max_length=256)]
Fact: TypeAlias = Text | Whole | Number | bool | None
Facts: TypeAlias = Annotated[dict[Id, Fact], Meta(max_length=MOST_FACTS)]
TraceParent: TypeAlias = Annotated[
    str, Meta(max_length=55, pattern=r"\A(00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01)?\Z")
]
"""Whose child the spans of a transfer are, as W3C writes it; empty where its caller samples no trace of it."""
Spans: TypeAlias = Annotated[dict[Id, Seconds], Meta(max_length=MOST_FACTS)]
"""Durations or moments by name."""

KIB, MIB = 1 << 10, 1 << 20
SMALL = 64 * KIB
"""Bytes of a message that is not in `BYTES`: a heartbeat, a question, an acknowledgement. It has ids and numbers."""
BYTES = {
    # A card is a geometry (at most 1 MiB, 12 KB for 80 layers) and what the backend exported.
    "register_worker": 4 * MIB,
    # Leases and claims that are held: 4,096 of each, also with the longest ids.
    "register_scheduler": 6 * MIB,
    "lease_opened": 256 * KIB,
    "report_transfers": 4 * MIB,  # a record has up to 4,096 runs of blocks on each side, 64 KB
    # Blocks of a request, and the window that they lie in. A million tokens are 65,536 blocks: 330 KB for each group.
    "push_announce": 4 * MIB,
    "push_progress": 4 * MIB,
    "get_sums": MIB,
    # The hashes of a prompt: a million tokens in blocks of 16 have 2 MB of them. And the blocks in which it is held.
    "find_prefix": 3 * MIB,
    "prefix_found": 4 * MIB,
    "tell_hints": 2 * MIB,  # 65,536 tags that came, and as many that went
    "get_hints": 512 * KIB,
    "hints_told": 4 * MIB,
    # The same between the kvds of one engine: a card, what a worker asks or is asked, a part of a peer's card.
    "join_worker": 4 * MIB,
    "part_alive": 4 * MIB,
    "part_heard": 2 * MIB,
    "from_worker": 5 * MIB,
    "for_worker": 8 * MIB,
    "sums": 8 * MIB,  # 8 bytes for each block, layer and field that is compared
    # Which engines are in use, or ready: a pair of ids for each.
    "ping": MIB,
    "pong": 4 * MIB,
    # Cards of workers, 12 KB each with 80 layers; what is larger comes in parts.
    "engine_described": 16 * MIB,
    # To a client: the cards of all workers of an engine. 4,096 of them with 80 layers each have 50 MB.
    "peer_ready": 64 * MIB,
    "kept_engine": 64 * MIB,
    "report_served": 256 * KIB,
    "served": 16 * MIB,
    # What operators are shown: a row for each engine, worker, transfer.
    "engines": 64 * MIB,
    "workers": 64 * MIB,
    "leases": 8 * MIB,
    "engines_draining": 16 * MIB,
    "transfers": 64 * MIB,
    "status": 4 * MIB,
    # What a worker holds of its peers: 4,096 of them with the longest ids have 5 MB.
    "held_peers": 8 * MIB,
    "agents": 64 * MIB,
    "evicted": 64 * MIB,
    # Tokens of a prompt that is looked for; an engine with what it gave and took, by 256 others.
    "look_up_tokens": MIB,
    "find_holders": MIB,
    "holders": 16 * MIB,
    "caches": 64 * MIB,
    # Requests that wait at an engine, and what became of each.
    "force_plan": 4 * MIB,
    "report_forced": 4 * MIB,
    "forced": 16 * MIB,
    "forced_cleared": MIB,
    # Of an earlier kvd: it lists every engine's name. What kvd sends now has 1,000 characters.
    "refused": 4 * MIB,
}
"""Bytes that a message of some kind may have, by its tag."""
LARGEST = max(BYTES.values())
"""Bytes of the largest message of all, which clients have to take."""
MOST_FOR_DAEMON = 16 * MIB
"""Bytes of a message that a kvd takes at all: the larger kinds are its own answers."""
FOR_CLIENTS = frozenset(
    {
        "kept_engine",
        "served",
        "workers",
        "leases",
        "engines_draining",
        "transfers",
        "status",
        "forced",
        "agents",
        "evicted",
        "caches",
        "holders",
    }
)
"""What a kvd tells clients and is told by nobody: large ones of these are not looked at."""
FOR_CLIENTS_AND_LINKS = FOR_CLIENTS | {"engines", "engine_described", "peer_ready"}
"""The same for who connects to a kvd. Another kvd that was asked may answer with the last three."""
MOST_WHOLE_WORKERS = 512
"""Workers of a card that is not in parts, as a kvd takes it. Each has facts, and 256 of these in 1 KB are as many
objects: 16 MiB of them took 2 s and 240 MB to decode. Kvds tell cards in parts."""


def bytes_allowed(kind: str) -> int:
    """Bytes that a message of this kind may have."""
    return BYTES.get(kind, SMALL)
