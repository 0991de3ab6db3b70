"""One request through both engines of a pair, in each of the ways, as a router would send it; and what became of it."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.fleet import Pair
from kvctl.demo.deployment import PREFILL_PARAMS
from kvctl.demo.engine import EngineAnswer
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

    prefilled: EngineAnswer
    decoded: EngineAnswer
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


@dataclass(frozen=True, slots=True)
class Legs:
    """What goes along with one prompt to both engines.

    ``there`` is the prefiller's, ``here`` the decoder's, or None where it is what the prefiller answers; ``at_once``:
    the decoder gets the prompt before the prefiller has answered. ``transfer_id`` is empty where nobody chose one.
    """

    there: Mapping[str, Any]
    here: Mapping[str, Any] | None = None
    transfer_id: str = ""
    at_once: bool = False

    def handed(self, answered: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
        """What the decoder gets, and what its ledger will call the prefiller's part."""
        if self.here is not None:
            return dict(self.here), self.transfer_id
        given = dict(answered or {})
        # vLLM's, of the prefiller's cache: would hide the decoder's loads
        given.pop("remote_prefill_cached_tokens", None)
        return given or None, str(given.get("remote_request_id", ""))


def legs_of(pair: Pair, mode: Mode) -> Callable[[], Legs]:
    """Makes the legs of each request of a pair. What it has to ask kvd or the prefiller for, it asks once."""
    if pair.spec.way == "stock-nixl":
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return lambda: Legs({**PREFILL_PARAMS, **nothing})
    if pair.spec.way == "stock-mooncake":
        return _stock_mooncake(pair)
    return _push(pair) if mode == "push" else lambda: Legs(PREFILL_PARAMS)


def ask(pair: Pair, mode: Mode, tokens: Sequence[int], answer: int) -> Asked:
    """Prefill on one engine, decode on the other. Raises `TimeoutError` and `EngineGone`."""
    legs = legs_of(pair, mode)()
    here, name = legs.handed(None)
    # The decoder first: its blocks are then known when the prefill begins, as on a router that sends both at once.
    decoding = pair.decode.submit(tokens, answer, here) if legs.at_once else None
    prefilled = pair.prefill.submit(tokens, 1, legs.there).result(ANSWER_SECONDS)
    at = time.monotonic()
    if decoding is None:
        here, name = legs.handed(prefilled.kv_transfer_params)
        decoding = pair.decode.submit(tokens, answer, here)
    return Asked(prefilled, decoding.result(ANSWER_SECONDS), name, here or {}, at)


def alone(pair: Pair, tokens: Sequence[int], answer: int) -> EngineAnswer:
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


def _push(pair: Pair) -> Callable[[], Legs]:
    status: Any = pair.hosts[0].ask(GetStatus())
    source = {
        "remote_engine_id": pair.ids[0],
        "remote_host": status.endpoint.host,
        "remote_port": status.endpoint.port,
        "kvd_contract": 2,
    }

    def made() -> Legs:
        both = {"transfer_mode": "push", "kvd_transfer_id": uuid.uuid4().hex}
        return Legs(
            {**PREFILL_PARAMS, **both},
            {"do_remote_decode": False, "do_remote_prefill": True, **both, **source},
            both["kvd_transfer_id"],
            at_once=True,
        )

    return made


def _stock_mooncake(pair: Pair) -> Callable[[], Legs]:
    with urllib.request.urlopen(f"{pair.bootstrap}/query", timeout=5) as reply:  # noqa: S310 - loopback
        engine_id = json.loads(reply.read())["0"]["engine_id"]

    def made() -> Legs:
        transfer_id = f"xfer-{uuid.uuid4().hex}"
        here = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": pair.bootstrap,
            "remote_engine_id": engine_id,
            "transfer_id": transfer_id,
        }
        return Legs({**PREFILL_PARAMS, "transfer_id": transfer_id}, here, transfer_id)

    return made
