"""What one message costs a kvd, of processor time and bytes, and what it costs when nobody asks: for the model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.fleet import slow_clock
from benchmarks.fleet.engines import registered
from benchmarks.fleet.hosts import Host, fleet
from benchmarks.fleet.real import Figures
from kvctl.bench.handshake import processor_seconds
from kvd.client.remote import RemoteKvd, RemoteOperator
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, Ping
from kvd.wire.query import ListEngines

QUESTIONS = 1000
NETWORK = 79
IDLE_SECONDS = 10.0
SECONDS = 600.0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kvd. Seconds of a processor: ``idle`` in each second, the others for each of what they are called.

    ``ping`` and ``look`` are both ends together, as one host asks as often as it is asked. Bytes: ``ping_bytes`` and
    ``look_bytes`` are a question with its answer, and ``name_bytes`` more for each engine that the answer names;
    ``memory`` is that of a kvd alone, ``peer_memory`` for each other host and ``worker_memory`` for each further worker
    of its engine.
    """

    idle: float
    ping: float
    look: float
    introduction: float
    down: float
    ping_bytes: float
    look_bytes: float
    name_bytes: float
    memory: float
    peer_memory: float
    worker_memory: float


def measured(runs: Sequence[Figures]) -> Costs:
    """From two kvds that are asked and left alone, and from fleets of at least two sizes."""
    smallest, largest = min(runs, key=_hosts), max(runs, key=_hosts)
    apart = max(1, largest.hosts - smallest.hosts)
    with fleet(2, lambda *_: {}, NETWORK) as hosts:
        idle = _idle(hosts)
        engine = registered(hosts[:1], 1)[0]
        ping = _asked(hosts[0], Ping(kvd_id="asking", kvd_generation="g"))
        look = _asked(hosts[0], ListEngines())
        one = _card_bytes(hosts[0], engine.facts.engine_id)
        engine.close()
        eight = registered(hosts[1:], 8)[0]
        more = (_card_bytes(hosts[1], eight.facts.engine_id) - one) / 7
        eight.close()
    # What messages cost in all is of the largest fleet; how it is shared among the two kinds, of the two kvds here.
    alone = largest.kinds["ping"] * ping + largest.kinds["list_engines"] * look
    times = max(0.0, largest.processor - idle) / alone
    names = (largest.hosts - smallest.hosts) / 2
    grown = largest.message_bytes["list_engines"] - smallest.message_bytes["list_engines"]
    return Costs(
        idle=idle,
        ping=times * ping,
        look=times * look,
        introduction=largest.introduction_processor,
        down=largest.death.processor,
        ping_bytes=largest.message_bytes["ping"],
        look_bytes=largest.message_bytes["list_engines"] - grown / max(1, names) * largest.hosts / 2,
        name_bytes=grown / max(1, names),
        memory=smallest.rss - (largest.rss - smallest.rss) / apart * smallest.hosts,
        peer_memory=max(0.0, largest.rss - smallest.rss) / apart,
        worker_memory=more,
    )


def _hosts(run: Figures) -> int:
    return run.hosts


def _idle(hosts: Sequence[Host]) -> float:
    """Seconds of a processor in a second by the slow clock, of a kvd that nobody asks."""
    pids = [host.pid for host in hosts]
    spent, began = processor_seconds(pids), slow_clock.wall()
    slow_clock.pause(IDLE_SECONDS)
    taken = slow_clock.wall() - began
    return (processor_seconds(pids) - spent) / len(pids) / taken * slow_clock.CLOCK.slower


def _asked(host: Host, question: Message) -> float:
    """Seconds of its processor for each answer."""
    kvd = RemoteKvd(host.endpoint.host, host.endpoint.port)
    with RemoteOperator(kvd, SECONDS) as asking:
        asking.ask(question)
        spent = processor_seconds([host.pid])
        for _ in range(QUESTIONS):
            asking.ask(question)
        return (processor_seconds([host.pid]) - spent) / QUESTIONS


def _card_bytes(host: Host, engine_id: str) -> int:
    kvd = RemoteKvd(host.endpoint.host, host.endpoint.port)
    question = DescribeEngine(engine_id=engine_id, kvd_id="asking", kvd_generation="g")
    with RemoteOperator(kvd, SECONDS) as asking:
        answer = asking.ask(question)
    if not isinstance(answer, EngineDescribed):
        raise SystemExit(f"host {host.number} answered {answer}")
    return sum(len(worker.geometry) + len(worker.metadata) + 256 for worker in answer.card.workers)
