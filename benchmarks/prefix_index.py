"""What hints on prefixes cost: memory, the work of a kvd, messages and bytes in a fleet, and a hint that is wrong.

    PYTHONPATH=daemon:. python -m benchmarks.prefix_index [--hosts 256] [--engines 8] [--rate 20000]

The fleet is a model: what its messages take to encode, decode and keep is measured in this process, for a kvd that
follows all others, and then multiplied. Its engines have full caches and compute without a pause what nobody holds,
``--rate`` tokens a second each: of every prefix that comes another one goes. A wrong hint is asked for in two real kvds
on loopback.
"""

# ruff: noqa: INP001, S101, T201 - a script in a folder of scripts

from __future__ import annotations

import argparse
import os
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from kvd.client.session import KvdSession
from kvd.service.prefixes.following import LEAST_PAUSE, MOST_ANSWERS
from kvd.service.prefixes.hints import Hints
from kvd.service.prefixes.tags import PromptTags
from kvd.vllm.prefixes.boundaries import Boundaries
from kvd.vllm.prefixes.telling import HINT_SECONDS
from kvd.wire.frame import decode, encode
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.prefix import HASH_BYTES, FindPrefix
from kvd.wire.prefixes.hints import TAG_BYTES, EngineHints, GetHints, HintChange, HintsTold, KnownHints
from kvd.wire.query import GetStatus, KvdStatus
from tests.support.daemons import Daemon, daemons, wait_for
from tests.support.prefix_holders import found, holding, introduce, question, reading, sharing

BLOCK, LEAST = 16, 256
EVERY = LEAST // BLOCK
MILLION = 1_000_000
ENGINE = "meta-llama-3-70b-instruct-deployment-0-5f7c9d6b8-x2x4q"


class Model(NamedTuple):
    """A fleet: engines on each host, with caches of so many tokens, and the tokens that each computes in a second."""

    hosts: int
    engines: int
    cache: int
    rate: float


def main() -> None:
    """Run all of it and print tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hosts", type=int, default=256)
    options.add_argument("--engines", type=int, default=8)
    options.add_argument("--cache", type=int, default=MILLION)
    options.add_argument("--rate", type=float, default=20_000.0)
    options.add_argument("--questions", type=int, default=200)
    chosen = options.parse_args()
    memory()
    fleet(Model(chosen.hosts, chosen.engines, chosen.cache, chosen.rate))
    wrong_hint(chosen.questions)


def memory() -> None:
    """Of a million blocks of 16 tokens."""
    print(f"| a million blocks of {BLOCK} tokens, a hint for each {LEAST} tokens | MB |\n|---|---|")
    tags = MILLION // EVERY
    held = [os.urandom(HASH_BYTES) + bytes(4) for _ in range(tags)]
    room = grown(lambda: boundaries(held))
    print(f"| the engine's scheduler | {room / 1e6:.1f} |")
    blob = os.urandom(tags * TAG_BYTES)
    known(blob)  # numpy keeps some things from its first use on
    print(f"| its kvd, and each kvd that follows it | {grown(lambda: known(blob)) / 1e6:.2f} |")


def boundaries(held: list[bytes]) -> Boundaries:
    """A scheduler's notes of these blocks, all of them told."""
    made = Boundaries(1, BLOCK, EVERY)
    for name in held:
        made.add(bytes(bytearray(name)), LEAST)
    made.taken(made.change().version)
    return made


def known(blob: bytes) -> Hints:
    """What a kvd knows of an engine here with these tags."""
    hints = Hints(Counter())
    assert hints.take((HERE, "a"), "g", change(1, 0, blob)) == 1
    return hints


def change(version: int, since: int, added: bytes, dropped: bytes = b"") -> HintChange:
    """A change of an engine's hints."""
    return HintChange(
        version=version, since=since, hash_tokens=BLOCK, every=EVERY, added=added, dropped=dropped
    )


def grown(make: Callable[[], object]) -> int:
    """Bytes that what is made takes."""
    tracemalloc.start()
    kept = make()
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return now


def fleet(model: Model) -> None:
    """What hints take of one kvd of that fleet."""
    others = model.hosts - 1
    pause = max(LEAST_PAUSE, others / MOST_ANSWERS)
    fresh = int(model.rate * pause / LEAST)
    hints = Hints(Counter())
    tags = model.cache // LEAST
    state = {
        (Endpoint(f"host-{host}.fleet.example", 7766), f"{ENGINE}-{host}-{engine}"): os.urandom(
            tags * TAG_BYTES
        )
        for host in range(others)
        for engine in range(model.engines)
    }
    for key, blob in state.items():
        assert hints.take(key, "0123456789abcdef", change(1, 0, blob)) == 1
    answers: list[bytes] = []
    questions: list[bytes] = []
    for host in range(others):
        keys = [key for key in state if key[0].host == f"host-{host}.fleet.example"]
        told = [
            EngineHints(
                engine_id=name,
                generation="0123456789abcdef",
                change=change(2, 1, os.urandom(fresh * TAG_BYTES), state[at, name][: fresh * TAG_BYTES]),
            )
            for at, name in keys
        ]
        answers.append(encode(HintsTold(engines=tuple(told)), host + 1))
        known = [KnownHints(engine_id=name, generation="0123456789abcdef", version=1) for _, name in keys]
        questions.append(encode(GetHints(known=tuple(known), after=pause), host + 1))
    began = time.process_time()
    for host, answer in enumerate(answers):
        message, _ = decode(answer)
        assert isinstance(message, HintsTold)
        for one in message.engines:
            where = Endpoint(f"host-{host}.fleet.example", 7766)
            assert hints.take((where, one.engine_id), one.generation, one.change) == 2
    taking = (time.process_time() - began) / pause
    telling = answering(model, questions, fresh, round(pause / HINT_SECONDS)) / pause
    size = (sum(map(len, answers)) + sum(map(len, questions))) / pause
    print(
        f"\n| {model.hosts} hosts with {model.engines} engines, caches of {model.cache:,} tokens,"
        f" {model.rate:,.0f} tokens/s computed by each | |\n|---|---|"
    )
    print(f"| engines that a kvd knows hints of | {len(state)} |")
    print(f"| hints of these | {hints.kept:,}, {hints.kept * TAG_BYTES / 1e6:.0f} MB |")
    print(f"| a kvd asks each other one every | {pause:.2f} s |")
    print(f"| questions and answers of one kvd, each way | {others / pause:.0f} /s of each |")
    print(f"| bytes of them, each way | {size / 1e6:.2f} MB/s |")
    print(f"| an answer | {statistics.mean(map(len, answers)) / 1e3:.1f} kB |")
    print(f"| taking what others tell | {taking:.3f} of a core |")
    print(f"| reading questions and writing answers | {telling:.3f} of a core |")
    looks = looking(hints, state)
    print(f"| whom to ask for a prompt of 16,000 tokens that nobody holds | {looks * 1e3:.2f} ms |")


def answering(model: Model, questions: list[bytes], fresh: int, changes: int) -> float:
    """Seconds of processor time to answer all these questions of what changed here in so many steps."""
    hints = Hints(Counter())
    names = [f"{ENGINE}-0-{engine}" for engine in range(model.engines)]
    for name in names:
        tags = os.urandom(model.cache // LEAST * TAG_BYTES)
        assert hints.take((HERE, name), "g", change(1, 0, tags)) == 1
        for at in range(changes):
            step = fresh // changes * TAG_BYTES
            new = change(at + 2, at + 1, os.urandom(step), tags[at * step : (at + 1) * step])
            assert hints.take((HERE, name), "g", new) == at + 2
    began = time.process_time()
    for one in questions:
        decode(one)
        told = [(name, hints.since(name, "g", 1)) for name in names]
        encode(
            HintsTold(
                engines=tuple(
                    EngineHints(engine_id=name, generation="0123456789abcdef", change=new)
                    for name, new in told
                    if new is not None
                )
            ),
            1,
        )
    return time.process_time() - began


def looking(hints: Hints, state: dict[tuple[Endpoint, str], bytes]) -> float:
    """Seconds of processor time to look through the hints of all engines, for one prompt."""
    prompt = os.urandom(16_000 // BLOCK * HASH_BYTES)
    times = []
    for _ in range(5):
        began = time.process_time()
        tags = PromptTags(prompt, BLOCK)
        for key in state:
            hint = hints.get(key, "0123456789abcdef")
            assert hint is not None
            hint.held(tags)
        times.append(time.process_time() - began)
    return statistics.median(times)


def wrong_hint(count: int) -> None:
    """How long a scheduler's question takes where no hint fits, where one is right, and where one is wrong."""
    print("\n| a scheduler asks its kvd who holds a prefix | median ms | slowest ms |\n|---|---|---|")
    with (
        daemons(2) as (here, there),
        reading(here) as asker,
        holding(here, sharing("near"), 32) as near,
        holding(there, sharing("far"), 32) as far,
    ):
        introduce(here, "near")
        introduce(here, "far", there.endpoint)
        holders, versions = {"near": near, "far": far}, {"near": 0, "far": 0}
        for hinted in ("", "near", "far"):
            for name, holder in holders.items():
                tags = b"h" * TAG_BYTES if name == hinted else b""
                versions[name] += 1
                assert holder.tell(whole(versions[name], tags), name) == versions[name]
            # The first question has the other host followed.
            found(asker, ask())
            wait_for(partial(knows, here, int(bool(hinted))), 30.0)
            time.sleep(1.0)
            for tokens in (32, 0) if hinted else (0,):
                near.tokens = far.tokens = tokens
                times = sorted(timed(asker, tokens) for _ in range(count))
                what = "no hint fits" if not hinted else "a right hint" if tokens else "a wrong hint"
                where = {"": "", "near": ", this host", "far": ", another host"}[hinted]
                print(f"| {what}{where} | {statistics.median(times):.2f} | {times[-1]:.1f} |")


def whole(version: int, tags: bytes) -> HintChange:
    """All hints of an engine."""
    return HintChange(version=version, since=0, hash_tokens=BLOCK, every=1, added=tags)


def ask() -> FindPrefix:
    """For a prefix of two blocks, of which nothing is cached."""
    return msgspec.structs.replace(question(), most=64, beyond=0)


def timed(asker: KvdSession, tokens: int) -> float:
    """Milliseconds until the answer, which has to be this one."""
    began = time.perf_counter()
    answer = found(asker, ask())
    took = (time.perf_counter() - began) * 1e3
    assert answer.tokens == tokens
    return took


def knows(kvd: Daemon, hints: int) -> bool:
    """Whether a kvd knows so many hints."""
    status = kvd.ask(GetStatus())
    assert isinstance(status, KvdStatus)
    return status.gauges["prefixes.tags"] == hints


if __name__ == "__main__":
    main()
