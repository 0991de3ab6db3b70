"""One request through both engines of a pair, in each of the ways, as a router would send it; and what became of it."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.fleet import Pair
from kvctl.demo.deployment import PREFILL_PARAMS
from kvctl.demo.engine import Answer
from kvctl.demo.models import prompt
from kvd.wire.query import GetStatus
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord

Mode = Literal["pull", "push"]
ANSWER_SECONDS = 30.0
LEDGER_SECONDS = 5.0
_seeds = itertools.count(1000)


@dataclass(frozen=True, slots=True)
class Asked:
    """Both answers; ``handed_over`` is what the decoder's ledger calls the prefiller's part, ``params`` what it got.

    ``prefilled_at`` is the time.monotonic() at which the prefiller's answer was here.
    """

    prefilled: Answer
    decoded: Answer
    handed_over: str
    params: Mapping[str, Any]
    prefilled_at: float

    @property
    def error(self) -> str:
        """Empty, or what went wrong with either half."""
        return self.prefilled.error or self.decoded.error


def fresh(tokens: int) -> list[int]:
    """A prompt that was never there before in this run."""
    return prompt(next(_seeds), tokens)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what each engine answers alone that computes the last token as its own step.

    ``in_pieces`` is the decoder's answer, ``there`` the prefiller's, None where its last token is another one. Engines
    tune some of vLLM's kernels for themselves, which then may round otherwise.
    """

    prompt: list[int]
    in_pieces: tuple[int, ...]
    there: tuple[int, ...] | None = None


def question(pair: Pair, tokens: int, answer: int) -> Question:
    """A prompt that was never there before, of ``tokens`` tokens.

    Its last token is the one with which the decoder itself goes on after all the others: so its answer to those, from
    the second token on, is the answer to the prompt, computed in the pieces in which it is computed after a hand-over.
    """
    most = fresh(tokens - 1)
    said = alone(pair, most, answer + 1)
    if said.error or len(said.token_ids) != answer + 1:
        raise RuntimeError(f"the decoder alone gave {len(said.token_ids)} tokens: {said.error}")
    there = pair.prefill.submit(most, answer + 1).result(ANSWER_SECONDS)
    same = not there.error and there.token_ids[:1] == said.token_ids[:1]
    return Question(
        [*most, said.token_ids[0]],
        tuple(said.token_ids[1:]),
        tuple(there.token_ids[1:]) if same else None,
    )


def ask(pair: Pair, mode: Mode, tokens: Sequence[int], answer: int) -> Asked:
    """Prefill on one engine, decode on the other. Raises `TimeoutError` and `EngineGone`."""
    ways = {"stock-nixl": _stock_nixl, "stock-mooncake": _stock_mooncake}
    way = ways.get(pair.spec.way, _push if mode == "push" else _pull)
    return way(pair, tokens, answer)


def alone(pair: Pair, tokens: Sequence[int], answer: int) -> Answer:
    """The decoder's own answer, nothing loaded."""
    return pair.decode.submit(tokens, answer).result(ANSWER_SECONDS)


def records(pair: Pair, handed_over: str, workers: int = 1) -> list[TransferRecord]:
    """The decoder's ledger about one request: a record for each of its workers, once they are there."""
    until = time.monotonic() + LEDGER_SECONDS
    while True:
        answer = pair.hosts[1].ask(ListTransfers(any_id=handed_over, limit=50))
        found = [row.record for row in answer.rows] if isinstance(answer, TransferList) else []
        if len(found) >= workers or time.monotonic() > until:
            return found
        time.sleep(0.01)


def push_params(pair: Pair, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes along with a prompt to the prefiller and to the decoder in mode push."""
    status: Any = pair.hosts[0].ask(GetStatus())
    both = {"transfer_mode": "push", "kvd_transfer_id": transfer_id}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, **both},
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            **both,
            "remote_engine_id": pair.ids[0],
            "remote_host": status.endpoint.host,
            "remote_port": status.endpoint.port,
            "kvd_contract": 2,
        },
    )


def _push(pair: Pair, tokens: Sequence[int], answer: int) -> Asked:
    transfer_id = uuid.uuid4().hex
    there, here = push_params(pair, transfer_id)
    # The decoder first: its blocks are then known when the prefill begins, as on a router that sends both at once.
    decoding = pair.decode.submit(tokens, answer, here)
    prefilled = pair.prefill.submit(tokens, 1, there).result(ANSWER_SECONDS)
    at = time.monotonic()
    return Asked(prefilled, decoding.result(ANSWER_SECONDS), transfer_id, here, at)


def _pull(pair: Pair, tokens: Sequence[int], answer: int) -> Asked:
    return _after_prefill(pair, tokens, answer, dict(PREFILL_PARAMS))


def _stock_nixl(pair: Pair, tokens: Sequence[int], answer: int) -> Asked:
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return _after_prefill(pair, tokens, answer, {**PREFILL_PARAMS, **nothing})


def _after_prefill(pair: Pair, tokens: Sequence[int], answer: int, there: dict[str, Any]) -> Asked:
    prefilled = pair.prefill.submit(tokens, 1, there).result(ANSWER_SECONDS)
    at = time.monotonic()
    here = dict(prefilled.kv_transfer_params or {})
    here.pop(
        "remote_prefill_cached_tokens", None
    )  # vLLM's, of the prefiller's cache: would hide the decoder's loads
    decoded = pair.decode.submit(tokens, answer, here or None).result(ANSWER_SECONDS)
    return Asked(prefilled, decoded, str(here.get("remote_request_id", "")), here, at)


def _stock_mooncake(pair: Pair, tokens: Sequence[int], answer: int) -> Asked:
    transfer_id = f"xfer-{uuid.uuid4().hex}"
    with urllib.request.urlopen(f"{pair.bootstrap}/query", timeout=5) as reply:  # noqa: S310 - loopback
        engine_id = json.loads(reply.read())["0"]["engine_id"]
    there = {**PREFILL_PARAMS, "transfer_id": transfer_id}
    here = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": pair.bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }
    prefilled = pair.prefill.submit(tokens, 1, there).result(ANSWER_SECONDS)
    at = time.monotonic()
    decoded = pair.decode.submit(tokens, answer, here).result(ANSWER_SECONDS)
    return Asked(prefilled, decoded, transfer_id, here, at)
