"""Loads whose request computes in the very step that orders them, and what happens where such a load is a miss.

vLLM waits for a load in steps of its own: one orders it, a later one uses it. Where the device itself can wait for the
bytes (`kvd.worker.in_step`), and it does not take long, vLLM is told that they are there. The step is then prepared and
queued while they come.

**What may come of it.** The claim beside which it runs may be refused, or a transfer may fail. What the step computed
of that request is then worth nothing. Nobody has seen it: the verdict is asked for before the step's results are taken
(`kvd.vllm.early`). Of a miss the request is taken back (`kvd.vllm.taking_back`). It loses its blocks and what was
computed, and begins anew like any that is preempted; its claim is over.

**Who else may use such blocks.** vLLM gives them their hashes when the load is ordered. Until the verdict, a request
whose cached tokens may be of that load is not scheduled, and of a miss the hashes are taken away. So nobody reads what
did not come.

**Whose load it cannot be.** One that is pushed, or read from a prefix cache, which is checked afterwards; one whose KV
is added up; one that is claimed again; any where misses fail the request. They come between steps, as ever.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvd.shown import logger
from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.scheduler.claim import Claim
from kvd.vllm.scheduler.claims import Claims
from kvd.vllm.scheduler.freed_blocks import FreedBlocks
from kvd.vllm.vllm_types import BlockTable, VllmRequest, wants_prompt_logprobs, wants_seed
from kvd.worker.cause import Cause
from kvd.worker.orders import ClaimAnswer, LoadOrder, StepOutcomes
from kvd.worker.remote import RemotePrefill
from kvd.worker.settings import ConnectorSettings

log = logger(__name__)

MOST_SECONDS, MOST_BUSY_SECONDS = 5e-3, 1.5e-3
"""The longest load that a step is put behind, and the longest for which others wait, whose tokens it computes too. To
prepare a step takes about as long as the latter."""
LOOK_SECONDS = 500e-6
"""Between two looks at a claim whose answer is waited for."""
ANSWER_SECONDS = 20e-3
"""How long a step's results wait for the answers on its claims; they take a millisecond, and the step some more."""
END_SECONDS = 15.0
"""How long they wait for the end of a load that was given up: as long as closing its lane may take."""
HOLD_OFF_SECONDS = 10.0
"""After a claim that was not answered in time, how long no load is used in its step: each would make others wait."""
UNANSWERED = Cause(
    f"its claim was not answered within {ANSWER_SECONDS * 1e3:g} ms of the step that used it (see `kvctl status`)",
    "PEER_AWAY",
)


class WorkersLoads(Protocol):
    """What is asked of an engine's only worker (`kvd.worker.in_step.InStepLoads`)."""

    def takes(self, prefill: RemotePrefill, tokens: int, most_seconds: float) -> bool:
        """Whether a load of so many tokens can be used in the step that orders it, and takes no longer than that."""

    def stands(self, request_id: str) -> bool:
        """Whether the load of a request is known to be good. Waits for no answer."""

    def ended(self, wait: float) -> StepOutcomes:
        """What became of loads that have ended since this was last asked; one is given ``wait`` seconds."""

    def let_go(self, request_id: str) -> None:
        """Its step is over."""

    def answered(self, answers: Iterable[ClaimAnswer]) -> None:
        """How claims were answered."""

    def drop(self, request_id: str) -> None:
        """Nobody uses it any more."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A load whose step is under way: its request's ``blocks`` and prompt, of which ``computed`` tokens were here."""

    blocks: frozenset[int]
    prompt: Sequence[int] | None
    computed: int


class InStep:
    """Used while vLLM schedules, and takes results, which is one thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        policy: str,
        groups: Sequence[GroupFacts],
        freed_blocks: FreedBlocks,
        claims: Claims,
        told: Callable[[set[str], StepOutcomes], None],
    ) -> None:
        """``told`` is told what became of loads, as of any other."""
        # A peer that reads a prefix here goes by its hash.
        self._allowed = policy == "recompute" and settings.in_step == "auto" and settings.prefixes == "off"
        self._block_sizes = tuple(group.block_size for group in groups)
        self._freed = freed_blocks
        self._claims = claims
        self._claims.expect(self._expects)
        self._told = told
        self._loads: WorkersLoads | None = None
        self._most_seconds = 0.0
        self._under_way = 0
        self._idle = False
        self._not_before = 0.0
        self._known: dict[str, StepOutcomes] = {}
        """What became of loads, of which nobody was told."""
        self._gone: set[str] = set()
        """The unsettled whose requests have ended."""
        self.settled: list[str] = []
        """Since the last step was scheduled."""
        self._due: list[str] = []
        """To be told when the next one is."""
        self.unsettled: dict[str, Unsettled] = {}
        """By request: those of steps whose results were not taken."""

    # --- as a step is scheduled ---

    def at_hand(self, loads: WorkersLoads, *, busy: bool, under_way: int) -> None:
        """A step is about to be scheduled, by who can take requests back.

        ``busy``: others compute in it. So many before it are ``under_way``.
        """
        self._under_way, self._idle = under_way, not busy
        self._loads = loads
        # An answer goes out while the step is scheduled that follows it; whoever is told then takes Python's lock.
        due, self._due, self.settled = self._due, self.settled, []
        if due:
            self._tell(due)
        self._most_seconds = MOST_BUSY_SECONDS if busy else MOST_SECONDS

    def answers(self) -> list[ClaimAnswer]:
        """How claims were answered beside which loads run, as far as no worker was told."""
        return self._claims.new_answers(time.monotonic())

    def offer(self, claim: Claim, request: VllmRequest, count: int) -> tuple[int, bool]:
        """What vLLM is told of ``count`` tokens that can be loaded, and whether they come between steps.

        Else the request's last token is left to the step.
        """
        fewer = min(count, request.num_prompt_tokens - 1 - claim.computed)
        claim.in_step = fewer > 0 and self._suits(claim, request, fewer)
        if self._idle and not claim.in_step:
            self._claims.ask_aloud(claim)  # no step comes before which the scheduler would look
        return (fewer, False) if claim.in_step else (count, True)

    def waits(self, request: VllmRequest, computed: int) -> bool:
        """Whether the ``computed`` cached tokens of a request may be of a load that may not stand."""
        return any(self._may_share(request, computed, one) for one in self.unsettled.values())

    def ordered(self, request: VllmRequest, order: LoadOrder, table: BlockTable) -> None:
        """A load is ordered: take note of it where its step uses it. ``table`` has all blocks of the request."""
        if order.in_step:
            blocks = frozenset(itertools.chain.from_iterable(table))
            self.unsettled[order.request_id] = Unsettled(blocks, request.prompt_token_ids, order.computed)

    def ending(self, request_id: str) -> None:
        """A request is about to end: tell what became of its load, if that is settled."""
        if request_id in self._known and request_id not in self.unsettled:
            self._tell([request_id])

    def over(self, request_id: str, table: BlockTable) -> None:
        """A request has ended; where its load is not settled, before its step's results were taken.

        Nobody uses the load. But others may still find its blocks, which may hold nothing good: ``table`` has them.
        """
        if request_id in self.unsettled and self._loads is not None:
            one, now = self.unsettled[request_id], itertools.chain.from_iterable(table)
            self.unsettled[request_id] = dataclasses.replace(one, blocks=one.blocks.union(now))
            self._gone.add(request_id)
            self._loads.drop(request_id)
            self._told({request_id}, self._known.pop(request_id, StepOutcomes({request_id: None})))

    # --- as a step's results are taken ---

    def missed(self, scheduled: Container[str]) -> dict[str, frozenset[int]]:
        """The requests of a step whose loads are misses, or that are gone, and the blocks of each load."""
        used = {name: one.blocks for name, one in self.unsettled.items() if name in scheduled}
        until = time.monotonic() + ANSWER_SECONDS
        missed = {name: blocks for name, blocks in used.items() if not self._stands(name, until)}
        self._tell(missed)  # vLLM will ask for them in the next step
        return missed

    def tell(self) -> None:
        """Tell at once what became of all loads that are settled."""
        self._tell([*self._due, *self.settled])
        self._due, self.settled = [], []

    def _tell(self, request_ids: Iterable[str]) -> None:
        if self._loads is not None:
            self._note(self._loads.ended(0.0))
        for request_id in request_ids:
            if outcomes := self._known.pop(request_id, None):
                if self._loads is not None:
                    self._loads.let_go(request_id)
                self._told({request_id}, outcomes)

    def _stands(self, request_id: str, until: float) -> bool:
        """Whether the load of an unsettled request is good, once that is known; it is settled then."""
        if request_id in self._gone:
            self._gone.remove(request_id)
            self._known.pop(request_id, None)
            del self.unsettled[request_id]
            return False
        given_up = False
        while request_id not in self._known:
            self._look(request_id)
            if self._loads is None or self._loads.stands(request_id):
                self._note(StepOutcomes({request_id: None}, {request_id: time.monotonic()}))
                break
            self._loads.let_go(request_id)
            self._note(self._loads.ended(LOOK_SECONDS))
            if time.monotonic() > until:
                self._give_up(request_id, again=given_up)
                until, given_up = time.monotonic() + END_SECONDS, True
        del self.unsettled[request_id]
        self.settled.append(request_id)
        return self._known[request_id].loads[request_id] is None

    def _note(self, outcomes: StepOutcomes) -> None:
        """Loads have ended. Of those that were settled before nobody wants to know any more."""
        for request_id, cause in outcomes.loads.items():
            if request_id in self.unsettled:
                known = self._known[request_id] = StepOutcomes({request_id: cause})
                known.quiesced[request_id] = outcomes.quiesced.get(request_id, 0.0)
                if request_id in outcomes.prefixes:
                    known.prefixes[request_id] = outcomes.prefixes[request_id]

    def _look(self, request_id: str) -> None:
        """Look whether the claim was answered."""
        claim = self._claims.get(request_id)
        if claim is not None and claim.beside and self._loads is not None:
            self._loads.answered(self._claims.answers(claim, time.monotonic()))

    def _give_up(self, request_id: str, *, again: bool) -> None:
        """Nobody knows in time whether it stands: it is a miss.

        Raises `RuntimeError` where it does not end: its blocks may still be written, and nobody can be given them.
        """
        if again or self._loads is None:
            raise RuntimeError(
                f"the load of request {request_id} was given up and has not ended in {END_SECONDS:g} s: its device or"
                " its lane hangs, and its blocks may still be written; start this engine again"
            )
        self._not_before = time.monotonic() + HOLD_OFF_SECONDS
        self._loads.answered([ClaimAnswer(request_id, 0.0, UNANSWERED)])

    # --- what suits ---

    def _expects(self, claim: Claim, request: VllmRequest) -> bool:
        """Whether the load of a claim that is new may be used in its step, as far as is known before that."""
        return self._takes(claim, request, min(claim.tokens, request.num_prompt_tokens - 1), MOST_SECONDS)

    def _suits(self, claim: Claim, request: VllmRequest, tokens: int) -> bool:
        if not self._takes(claim, request, tokens, self._most_seconds):
            return False
        blocks = sum([-(-tokens // size) + 1 for size in self._block_sizes])
        # Else the load would wait for steps under way, and its own step for it.
        return not self._under_way or self._freed.spares(blocks, self._under_way)

    def _takes(self, claim: Claim, request: VllmRequest, tokens: int, most_seconds: float) -> bool:
        if not self._allowed or self._loads is None or time.monotonic() < self._not_before:
            return False
        if claim.transfer_id or claim.checked or claim.again or claim.prefill.checksum:
            return False
        # Of a miss vLLM would give the prompt's log probabilities without a token, and go on drawing at another seed.
        if wants_prompt_logprobs(request) or wants_seed(request):
            return False
        return self._loads.takes(claim.prefill, tokens, most_seconds)

    def _may_share(self, request: VllmRequest, computed: int, load: Unsettled) -> bool:
        """Cached blocks are found from the front on: one of the load only behind all that was there before it."""
        reach = load.computed + min(self._block_sizes)
        if computed < reach:
            return False
        mine, theirs = request.prompt_token_ids, load.prompt
        return mine is None or theirs is None or mine[:reach] == theirs[:reach]
