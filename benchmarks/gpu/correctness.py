"""Whether the decoder holds what the prefiller computed, byte for byte, and answers as it would have alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.asking import Asked, Mode, Question, alone, ask, question, records
from benchmarks.gpu.fleet import Pair
from benchmarks.gpu.report import Report
from kvd.wire.transfer import TransferRecord
from tests.support.engine_calls import ask_workers


def watch(pair: Pair) -> None:
    """Have both engines note the blocks of what they load and push."""
    for engine in pair.engines:
        ask_workers(engine, "kvb_watch", True)


def check(report: Report, pair: Pair, mode: Mode, tokens: int, answer: int) -> bool:
    """One request: sums of every layer on both sides, and the answer beside the decoder's own; whether bytes agree."""
    asks = question(pair, tokens, answer)
    ask_workers(pair.decode, "kvb_loads")  # forgets those before
    asked = ask(pair, mode, asks.prompt, answer)
    loads = [one for worker in ask_workers(pair.decode, "kvb_loads") for one in worker]
    found = records(pair, asked.handed_over, pair.spec.tp[1]) if asked.handed_over else []
    compared = compare(pair, mode, asked, loads) if loads else {"equal": False, "why": "nothing was loaded"}
    report.note(
        "correctness",
        **about(pair, mode, tokens),
        **compared,
        **record_fields(found),
        error=asked.error,
        answers=_answers(pair, asks, asked, answer),
    )
    verdict = "equal" if compared["equal"] else "DIFFERENT"
    why = f" {compared.get('why') or compared.get('different')}" if not compared["equal"] else ""
    report.say(
        f"{pair.spec.name} {mode} {tokens}: {compared.get('sums', 0)} sums {verdict}{why} {asked.error}"
    )
    return bool(compared["equal"])


def about(pair: Pair, mode: str, tokens: int) -> dict[str, Any]:
    """What every result of a pair says of it."""
    spec = pair.spec
    if pair.joined is None:
        pair.joined = any(ask_workers(pair.decode, "kvb_joined"))
    return {
        "kind": spec.kind,
        "way": spec.way,
        "mode": mode,
        "tokens": tokens,
        "block": spec.block,
        "gpus": spec.gpus,
        "tp": spec.tp,
        "eager": spec.eager,
        "options": spec.options,
        "joined": pair.joined,
    }


def record_fields(found: Sequence[TransferRecord]) -> dict[str, Any]:
    """What the ledger says of one request: its slowest worker's stages in seconds, the bytes of all."""
    if not found:
        return {"state": "no record"}
    slowest = max(found, key=lambda record: sum(record.stages.values()))
    return {
        "state": "miss" if any(r.state == "miss" for r in found) else "done",
        "cause": next((r.cause for r in found if r.cause), ""),
        "bytes": sum(r.bytes for r in found),
        "descriptors": sum(r.descriptors for r in found),
        "copies": sum(r.coalesced_descriptors for r in found),
        "stages": {name: round(seconds, 7) for name, seconds in slowest.stages.items()},
        "moments": {name: round(seconds, 7) for name, seconds in slowest.moments.items()},
        "backend": slowest.backend,
        "attempts": max(r.attempts for r in found),
    }


def first_difference(some: Sequence[int], others: Sequence[int]) -> int | None:
    """The first place where two answers differ, None where they do not."""
    if tuple(some) == tuple(others):
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others))
    )


def compare(pair: Pair, mode: Mode, asked: Asked, loads: list[dict[str, Any]]) -> dict[str, Any]:
    """The decoder's sums, taken when the load ended, against the prefiller's over the same tokens."""
    spans = loads[0]["spans"]
    blocks = _prefilled_blocks(pair, mode, asked, spans)
    if not blocks:
        return {"equal": False, "why": "the prefiller's blocks are not known"}
    there: dict[tuple[str, int], int] = {}
    for sums in ask_workers(pair.prefill, "kvb_sums", blocks, spans):
        there |= _flat(sums)
    here: dict[tuple[str, int], int] = {}
    unlike: set[str] = set()
    for load in loads:
        for key, value in _flat(load["sums"]).items():
            if here.setdefault(key, value) != value:
                unlike.add(f"{key[0]}: workers hold different bytes of the same")
    unlike |= {name for (name, index), value in here.items() if there.get((name, index)) != value}
    unlike |= {name for name, index in there.keys() - here.keys()}
    return {
        "equal": not unlike,
        "sums": len(here),
        "zero_sums": sum(value == 0 for value in here.values()),
        "layers": len({name.split()[0] for name, _ in here}),
        "different": sorted(unlike)[:20],
        "how_many_different": len(unlike),
        "loaded_tokens": loads[0]["tokens"],
    }


def _prefilled_blocks(pair: Pair, mode: Mode, asked: Asked, spans: dict[str, Any]) -> dict[str, Any]:
    """The prefiller's blocks by group, of the groups that were loaded."""
    if mode == "push":
        blocks: dict[str, Any] = ask_workers(pair.prefill, "kvb_pushed", asked.handed_over)[0]
    else:
        lists = zip(asked.params["kvd_first_blocks"], asked.params["remote_block_ids"], strict=True)
        blocks = {str(g): [first, list(ids)] for g, (first, ids) in enumerate(lists)}
    return {g: held for g, held in blocks.items() if g in spans}


def _flat(sums: dict[str, Any]) -> dict[tuple[str, int], int]:
    return {(name, index): value for name, pairs in sums.items() for index, value in pairs}


def _answers(pair: Pair, asks: Question, asked: Asked, answer: int) -> dict[str, Any]:
    """How the answer compares with the decoder's own, computed at once and computed in the same pieces."""
    got = asked.decoded.token_ids
    own = alone(pair, asks.prompt, answer).token_ids
    again = alone(pair, asks.prompt[:-1], answer + 1).token_ids[1:]
    return {
        "tokens": len(got),
        "first_difference": first_difference(got, own),
        "first_difference_in_pieces": first_difference(got, asks.in_pieces),
        "equals_prefiller_in_pieces": asks.there is not None and tuple(got) == asks.there,
        "alone_at_once_and_in_pieces": first_difference(own, asks.in_pieces),
        "alone_again": first_difference(again, asks.in_pieces),
        "both_alone": "unknown" if asks.there is None else first_difference(asks.there, asks.in_pieces),
        "cached_tokens": asked.decoded.num_cached_tokens,
        "distinct": len(set(got)),
    }
