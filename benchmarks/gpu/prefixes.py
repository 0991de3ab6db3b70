"""A prompt that another engine holds, against computing it: read from that one's GPU, or through both hosts' memory."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from benchmarks.gpu.asking import ANSWER_SECONDS, fresh
from benchmarks.gpu.correctness import about
from benchmarks.gpu.fleet import FIRST_RUNNER, Fleet, Pair, PairSpec
from benchmarks.gpu.losing import tried
from benchmarks.gpu.timing import introduce
from benchmarks.serving.in_host import SERVE
from benchmarks.serving.ledger import loads_since, newest
from benchmarks.serving.stages import DEPLOYED
from kvctl.demo.engine import EngineProcess
from kvd.wire.identity import HERE
from kvd.wire.prefixes.cache import CacheList, ListCaches

TOLD_SECONDS = 10.0
STORED_SECONDS = 1.0
"""How long the `p2p` tier is given to copy a prompt to its host's memory: it tells nobody when it has."""
SHARED = {"prefixes": "on"}
Params = Mapping[str, Any]


def pairs(fleet: Fleet) -> list[PairSpec]:
    """Ours by two backends, and vLLM's tier, which needs a GPU; in small blocks and in large ones."""
    small, large = fleet.sizes.blocks
    made = _spec(fleet, "dense", room=8.0, eager=fleet.device != "cuda")
    ours = functools.partial(made, options=SHARED)
    if fleet.device != "cuda":
        return [ours(way=way, block=small) for way in ("direct", "nixl")]
    pairs = [ours(way="direct", block=small), ours(way="nixl", block=small), made(way="p2p", block=small)]
    return [*pairs, ours(way="direct", block=large), made(way="p2p", block=large)]


def kinds(fleet: Fleet) -> list[PairSpec]:
    """Pairs of other models; vLLM on CPUs keeps no prefixes of MLA."""
    names = ("mla", "gemma3") if fleet.device == "cuda" else ("gemma3",)
    made = functools.partial(_spec, fleet, longest=fleet.sizes.middle, options=SHARED)
    return [made(kind)(way=way) for kind in names for way in ("direct", "nixl")]


def _spec(fleet: Fleet, kind: str, **more: Any) -> Callable[..., PairSpec]:
    deployed = DEPLOYED if fleet.device == "cuda" else {}
    return functools.partial(
        PairSpec,
        kind=kind,
        mode="pull",
        turns=True,
        caching=True,
        gpus=fleet.apart,
        env=FIRST_RUNNER | {"PYTHONHASHSEED": "0"},
        arguments={**deployed, "prefix_caching_hash_algo": "sha256"},
        **more,
    )


def measure(fleet: Fleet, running: Sequence[Pair]) -> dict[str, list[str]]:
    """All lengths by all pairs, in turns within each round; a round of each length before them does not count."""
    wrong: dict[str, list[str]] = {}
    for pair in running:
        tried(fleet, pair, "introduce", functools.partial(_ready, fleet, pair, fleet.sizes.all))
    for tokens in fleet.sizes.all:
        for number in range((3 if fleet.quick else 6) + 1):
            for pair in running:
                work = functools.partial(_round, fleet, pair, tokens, number)
                if not tried(fleet, pair, f"prefix {tokens} {number}", work):
                    wrong.setdefault(pair.spec.name, []).append(f"{tokens} {number}")
    return wrong


def each(fleet: Fleet, pair: Pair) -> list[str]:
    """Two lengths, read twice each after a first time that does not count; those of which something was wrong."""
    lengths = fleet.sizes.short, fleet.sizes.middle
    tried(fleet, pair, "introduce", functools.partial(_ready, fleet, pair, lengths))
    rounds = [(tokens, number) for tokens in lengths for number in range(3)]
    return [
        f"{tokens} {number}"
        for tokens, number in rounds
        if not tried(fleet, pair, "read", functools.partial(_round, fleet, pair, tokens, number))
    ]


def _ready(fleet: Fleet, pair: Pair, lengths: Sequence[int]) -> None:
    if pair.spec.way != "p2p":
        introduce(fleet, pair)
    for tokens in lengths:
        for engine in pair.engines:
            engine.submit(fresh(tokens), 2).result(60.0)


def _round(fleet: Fleet, pair: Pair, tokens: int, number: int) -> bool:
    """One prompt, by its holder twice, then by the reader; and another one, which the reader computes.

    Gives whether both answer alike, and the reader computed of it as little as the holder the second time.

    It is ``tokens`` long and one more, which is computed: whole blocks are held. The holder's second answer is computed
    in the pieces in which the reader computes: after what is held.
    """
    prompt, (given, taken) = fresh(tokens + 1), _params(pair)
    ours = pair.spec.way != "p2p"
    before = newest(pair) if ours else 0
    times = {"computed there": _asked(pair.prefill, prompt, given)}
    times["held there"] = _asked(pair.prefill, prompt, given)
    _wait_until_told(pair)
    times["read"] = _asked(pair.decode, prompt, taken)
    times["computed"] = _asked(pair.decode, fresh(tokens + 1), None)
    loads = list(loads_since(pair, before, ()).values()) if ours else []
    there, here = (_answer(engine, prompt) for engine in (pair.prefill, pair.decode))
    fleet.report.note(
        "prefix",
        **about(pair, "pull", tokens),
        note="steady" if number else "warm",
        equal=there == here,
        load=loads[0] if loads else None,
        **times,
    )
    return there == here and times["read"]["cached"] == times["held there"]["cached"] > 0


def _params(pair: Pair) -> tuple[Params | None, Params | None]:
    """What goes along with a prompt to its holder and to the reader: nothing with ours, who finds out by itself."""
    if pair.spec.way != "p2p":
        return None, None
    name = uuid.uuid4().hex
    host, _, port = pair.bootstrap.removeprefix("http://").partition(":")
    reads = {"kv_request_id": name, "remote_host": host, "remote_port": int(port)}
    return {"decode": {"kv_request_id": name}}, {"prefill": reads}


def _asked(engine: EngineProcess, prompt: Sequence[int], params: Params | None) -> dict[str, Any]:
    """Seconds to the first token, from the engine's receipt, and tokens that it did not compute; with its moments."""
    request = {"id": uuid.uuid4().hex, "prompt_token_ids": list(prompt), "max_tokens": 1}
    found = engine.call(SERVE, {**request, "kv_transfer_params": params}).result(ANSWER_SECONDS)
    answered = found["tokens"][0][0]
    moments = {name: found[name] for name in ("got", "queued", "scheduled", "first")} | {"answered": answered}
    return {"seconds": answered - found["got"], "cached": found["cached"], "moments": moments}


def _answer(engine: EngineProcess, prompt: Sequence[int]) -> tuple[int, ...]:
    """What it says to a prompt whose blocks it has by now, read or computed."""
    return tuple(engine.submit(prompt, 16).result(ANSWER_SECONDS).token_ids)


def _wait_until_told(pair: Pair) -> None:
    """Until the reader's kvd knows what the holder holds, and for as long as the tier is given.

    Of the tier nothing is heard. Engines of all ways rest as long: one that rested is slower. Raises `TimeoutError`.
    """
    time.sleep(STORED_SECONDS)
    if pair.spec.way == "p2p":
        return
    until = time.monotonic() + TOLD_SECONDS
    while not _is_told(pair):
        if time.monotonic() > until:
            raise TimeoutError(f"the reader's kvd was not told of the prefix within {TOLD_SECONDS:g} s")
        time.sleep(0.02)


def _is_told(pair: Pair) -> bool:
    """A kvd that follows no other one yet asks all of its engines: so nothing need be told then."""
    there, here = (cast("CacheList", host.ask(ListCaches())).rows for host in pair.hosts)
    own = next(row for row in there if (row.engine_id, row.endpoint) == (pair.ids[0], HERE))
    if own.held is None or own.held.untold or own.hints is None:
        return False
    known = [row.hints.version for row in here if row.engine_id == pair.ids[0] and row.hints is not None]
    return all(version == own.hints.version for version in known)
