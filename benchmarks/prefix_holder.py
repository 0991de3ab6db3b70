"""What an engine under full load keeps of its throughput while another engine reads prefixes out of its cache.

    python -m benchmarks.prefix_holder [--rounds 16] [--tokens 2048] [--tcp] [--model llama-wide]

Three real vLLM engines on CPUs. The *holder* has requests of its own, as many as its steps take, all of the same
length: the same work in each turn, with prompts that nobody holds. The *reader* does one of three things meanwhile,
again and again:

rest      nothing
control   reads prefixes out of the third engine's cache, which has nothing else to do
read      reads prefixes of the same length out of the holder's cache

Where the holder turns a read down the reader computes. In *control* it computes as many of its own, as many as in the
first turn of *read* in that round.

Of these the holder has the first core to itself; the reader, the third engine, kvds and this process share the second.
So reading costs the reader the same in *control* and in *read*, in time and in caches, and read over control is what it
costs the holder to be read. Turns are rest, read, control, control, read, rest. A ratio is the median of those within a
round. Tokens a second are of the clock; tokens for a second on the processor do not count when others had the core.

At the end the holder has no requests, and is read all the same: what that takes of processors, over what it takes when
it rests, is what a read costs. Nothing else is in that figure, so a busy machine changes it least.

The model's bytes go as the transport has them go. Without ``--tcp`` UCX copies from process to process, on the
reader's core: as little of the holder's processor as with GPUs that read each other's memory. With it the holder's
own thread writes them to a socket.
"""

# ruff: noqa: INP001, T201 - a script in a folder of scripts

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import cast

from benchmarks.prefix_chats import WIDE
from kvctl.demo.engine import EngineAnswer, EngineProcess
from kvd.wire.prefixes.cache import CacheList, ListCaches
from tests.support.deployments import prompt_of
from tests.support.engine_calls import reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.sharing import Sharing, sharing
from tests.support.tiny_models import MODELS

HOLDER, OTHER, READER = "holder", "other", "reader"
REST, CONTROL, READ = "rest", "control", "read"
TURNS = (REST, READ, CONTROL, CONTROL, READ, REST)
SEEDS = {OTHER: 1, HOLDER: 2}
"""Of the prompts that each of them holds."""
REQUESTS, BATCHES, PROMPT, ANSWER, BLOCK = 8, 12, 256, 64, 128
"""So many at once, so many times; the rest in tokens."""
CACHE_BYTES = 512 << 20
UNHELD = count(1 << 20)
"""Seeds of prompts that nobody holds."""
SECONDS = 300.0


@dataclass(frozen=True)
class Turn:
    """The holder's work of one turn: seconds of the clock and on processors; prefixes read or computed meanwhile."""

    wall: float
    cpu: float
    came: tuple[bool, ...]
    """Of each prefix whether it was read."""

    @property
    def reads(self) -> int:
        """How many were."""
        return sum(self.came)

    @property
    def rate(self) -> float:
        """Tokens a second that the holder generated."""
        return REQUESTS * BATCHES * ANSWER / self.wall

    @property
    def per_cpu(self) -> float:
        """Tokens that it generated in a second on the processor."""
        return REQUESTS * BATCHES * ANSWER / self.cpu


def answered(answer: EngineAnswer) -> EngineAnswer:
    """The answer if it is one."""
    if answer.error or answer.num_cached_tokens is None:
        sys.exit(f"an engine did not answer: {answer.error or 'no tokens'}")
    return answer


def on_processor(engine: EngineProcess) -> float:
    """Seconds on a processor so far: of vLLM's front end, its scheduler and its worker."""
    pids = engine_pids(engine)
    every = (pids.host, pids.core, *pids.workers)
    # How Linux numbers the clock of a process.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in every if pid is not None)


def pin(running: Sharing) -> None:
    """The holder on one core, everything else on the other."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    kvds = {kvd.process.pid for kvd in running.hosts.values()}
    elsewhere = [*kvds, os.getpid()]
    elsewhere += [pid for name in (OTHER, READER) for pid in engine_pids(running.engines[name]).all]
    for core, pids in ((first, engine_pids(running.engines[HOLDER]).all), (second, elsewhere)):
        for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), {core})


@contextlib.contextmanager
def reading(
    running: Sharing, source: str | None, tokens: int, mix: Sequence[bool] = (True,)
) -> Iterator[list[int]]:
    """Read what ``source`` holds, again and again, if there is one. Gives the tokens of each read.

    Of ``mix``, again from the beginning after its end, each says whether to read, or to compute what nobody holds.
    """
    if source is None:
        yield []
        return
    reader = running.engines[READER]
    ends, read = threading.Event(), list[int]()

    def go_on() -> None:
        for reads in cycle(mix):
            if ends.is_set():
                return
            prompt = held_prompt(source, tokens) if reads else prompt_of(tokens + 1, seed=next(UNHELD))
            read.append(answered(reader.submit(prompt, 1).result(SECONDS)).num_cached_tokens or 0)
            while not reset_prefix_cache(reader):
                pass

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield read
    finally:
        ends.set()
        thread.join()


def held_prompt(source: str, tokens: int) -> list[int]:
    """What an engine holds for the reader."""
    return prompt_of(tokens + 1, seed=SEEDS[source])


def turn(running: Sharing, doing: str, tokens: int, seed: int, mix: Sequence[bool]) -> Turn:
    """One turn; ``seed`` makes the holder's own prompts ones that nobody has seen."""
    holder = running.engines[HOLDER]
    source = {CONTROL: OTHER, READ: HOLDER}.get(doing)
    for name in SEEDS:
        answered(running.engines[name].submit(held_prompt(name, tokens), 1).result(SECONDS))
    running.settle()
    prompts = [
        prompt_of(PROMPT, seed=1000 + seed * REQUESTS * BATCHES + at) for at in range(REQUESTS * BATCHES)
    ]
    with reading(running, source, tokens, mix) as read:
        while source and len(read) < 2:  # it reads by now
            time.sleep(0.01)
        busy = turned_down(running)
        already, cpu, began = len(read), on_processor(holder), time.perf_counter()
        for answer in [holder.submit(prompt, ANSWER) for prompt in prompts]:
            if answered(answer.result(SECONDS)).num_cached_tokens:
                sys.exit("somebody held what was to be new")
        wall, cpu, came = time.perf_counter() - began, on_processor(holder) - cpu, read[already:]
    if set(came) - {0, tokens}:
        sys.exit(f"a part of the prefix was read: {sorted(set(came))} of {tokens} tokens")
    if doing == READ and came.count(0) > turned_down(running) - busy:
        sys.exit(
            f"{came.count(0)} prefixes were not found, and the holder turned down {turned_down(running) - busy}"
        )
    return Turn(wall, cpu, tuple(map(bool, came)))


def turned_down(running: Sharing) -> int:
    """Questions that the holder turned down so far, because reads had cost it too much."""
    return running.counted(HOLDER, "prefixes.busy")["prefixes.busy"]


def cost_of_a_read(running: Sharing, tokens: int, seconds: float) -> float:
    """Seconds on processors that a read takes of a holder which does nothing else."""
    holder = running.engines[HOLDER]
    taken = {}
    for source in (None, HOLDER):
        answered(holder.submit(held_prompt(HOLDER, tokens), 1).result(SECONDS))
        running.settle()
        with reading(running, source, tokens) as read:
            time.sleep(1.0)
            already, cpu, began = len(read), on_processor(holder), time.perf_counter()
            time.sleep(seconds)
            rate = (on_processor(holder) - cpu) / (time.perf_counter() - began)
            taken[source] = rate, (len(read) - already) / (time.perf_counter() - began)
    return (taken[HOLDER][0] - taken[None][0]) / taken[HOLDER][1]


def bytes_of_a_read(running: Sharing) -> float:
    """What each read of the holder's cache moved."""
    rows = cast("CacheList", running.hosts[READER].ask(ListCaches())).rows
    (taken,) = (one for row in rows for one in row.taken if one.source == HOLDER)
    return taken.bytes / taken.reads


def main() -> None:
    """Take the turns and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--rounds", type=int, default=16)
    options.add_argument("--tokens", type=int, default=16 * BLOCK)
    options.add_argument("--tcp", action="store_true")
    options.add_argument("--model", default=WIDE.name)
    chosen = options.parse_args()
    MODELS.setdefault(WIDE.name, WIDE)
    rounds: list[dict[str, list[Turn]]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        sharing(
            chosen.model,
            Path(folder),
            names=((HOLDER, OTHER), (READER,)),
            max_model_len=max(chosen.tokens + 2, PROMPT + ANSWER),
            max_num_seqs=REQUESTS,
            kv_cache_memory_bytes=CACHE_BYTES,
            extra={"prefix_least": BLOCK},
            env={"UCX_TLS": "tcp,self"} if chosen.tcp else {},
        ) as running,
    ):
        pin(running)
        for number in range(-1, chosen.rounds):  # the first warms up
            taken: dict[str, list[Turn]] = {doing: [] for doing in TURNS}
            for at, doing in enumerate(TURNS):
                mix = (taken[READ][0].came if doing == CONTROL else ()) or (True,)
                one = turn(running, doing, chosen.tokens, (number + 1) * len(TURNS) + at, mix)
                print(
                    f"{number} {doing}: {one.wall:.2f} s, on processors {one.cpu:.2f} s, {one.reads} reads,"
                    f" {len(one.came) - one.reads} computed",
                    file=sys.stderr,
                )
                taken[doing].append(one)
            rounds += [taken] if number >= 0 else []
        moved = bytes_of_a_read(running)
        cost = median(cost_of_a_read(running, chosen.tokens, 10.0) for _ in range(3))
    table(rounds, moved)
    print(
        f"\nA read of {chosen.tokens} tokens, {moved / 1e6:.1f} MB, takes {cost * 1e3:.2f} ms of the holder."
    )


def table(rounds: list[dict[str, list[Turn]]], moved: float) -> None:
    """Print what came of it."""
    print("| reader | holder's tokens a second | a second on the processor | reads a second | MB a second |")
    print("|---|---|---|---|---|")
    for doing in (REST, CONTROL, READ):
        turns = [one for taken in rounds for one in taken[doing]]
        rate = median(one.reads / one.wall for one in turns)
        print(
            f"| {doing} | {median(one.rate for one in turns):,.0f} | {median(one.per_cpu for one in turns):,.0f} "
            f"| {rate:.1f} | {rate * moved / 1e6:,.0f} |"
        )
    print("\n| ratio | tokens a second | half of the rounds | on the processor | half of the rounds |")
    print("|---|---|---|---|---|")
    for above, below in ((READ, CONTROL), (READ, REST), (CONTROL, REST)):
        cells = []
        for of in (lambda one: one.rate, lambda one: one.per_cpu):
            ratios = sorted(sum(map(of, taken[above])) / sum(map(of, taken[below])) for taken in rounds)
            quarter = len(ratios) // 4
            cells += [f"{median(ratios):.3f}", f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"]
        print(f"| {above} / {below} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
