"""The scheduler's half: what to claim, what to load, which blocks to keep for whom.

It runs inside vLLM's scheduling step and therefore never waits. It asks other parties early (for a handshake and a
claim on the lease as soon as the request arrives), and looks at the answers later. The scheduler passes over a request
until its answers are in, or until their time is up and it is computed here. If the prefiller is known already, the load
begins at once. It, or the results of the step that uses it, waits for the answers (`.beside`, `.in_step`).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvd.backends.registry import stages
from kvd.shown import logger
from kvd.topology.blocks import BlockList
from kvd.vllm.memory.groups import GroupFacts, has_state, keeps_prefix, offered_by_group
from kvd.vllm.params import finished_prefill, wants_prefill_here, wants_remote_prefill
from kvd.vllm.prefixes.sharing import Prefixes
from kvd.vllm.prompt.digest import new_key
from kvd.vllm.prompt.parts import prompt_of
from kvd.vllm.prompt.seal import sealed
from kvd.vllm.request_trace import traceparent_of
from kvd.vllm.scheduler.claim import Claim, ClaimState
from kvd.vllm.scheduler.claims import Claims
from kvd.vllm.scheduler.completed_prefills import CompletedPrefills
from kvd.vllm.scheduler.draining import DECLINED, Draining
from kvd.vllm.scheduler.freed_blocks import FreedBlocks
from kvd.vllm.scheduler.in_step import InStep
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.vllm.scheduler.leases import Lease, Leases, longest
from kvd.vllm.scheduler.load_order import load_order, other_state
from kvd.vllm.scheduler.miss_plan import DecodingEngine
from kvd.vllm.scheduler.misses import Forced
from kvd.vllm.scheduler.pushes import KEPT_SECONDS, Pushes, kept_message, wants_push_here
from kvd.vllm.scheduler.sampling import Sampling
from kvd.vllm.scheduler.served import Served
from kvd.vllm.scheduler.unloaded import deliver_unloaded
from kvd.vllm.vllm_types import VllmRequest, VllmStep, drop_last_tokens, lookahead_of, wants_prompt_logprobs
from kvd.wire.frame import Message
from kvd.wire.identity import EngineFacts
from kvd.wire.limits import LONGEST_ID
from kvd.wire.outcomes import NotOffered, Outcome
from kvd.wire.registration import OpenReader, RegisterScheduler
from kvd.worker.cause import code_of
from kvd.worker.orders import LoadOrder, StageOrder, StepOrders, StepOutcomes
from kvd.worker.remote import RemotePrefill
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings, home_kvd
from kvd.worker.tally import TransferTally

log = logger(__name__)


class SchedulerHalf:
    """One engine's scheduler: claims on remote prefills where it decodes, leases on own blocks where it prefills."""

    def __init__(
        self,
        settings: ConnectorSettings,
        engine: EngineFacts,
        groups: Sequence[GroupFacts],
        policy: str,
        open_session: Callable[[Callable[[], Any], Callable[[Message], Message | None]], SessionProtocol],
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.groups = tuple(groups)
        self.policy = policy
        self.incarnation = uuid.uuid4().hex
        self._lookahead, self._digest_key = lookahead_of(engine.facts), new_key()
        self.tally = TransferTally()
        self._leases = Leases(settings.lease_grace, self.tally.expire)
        self._tables: dict[str, Callable[[], Sequence[Sequence[int]]]] = {}
        self._pushes = Pushes(settings, self.groups, self._table, self._digest, self._kept)
        self._staged = CompletedPrefills(self.groups, self._table)
        self._sampling, self.freed_blocks = Sampling(settings, self.groups, self._table), FreedBlocks()
        self._orders: list[LoadOrder] = []
        self._dropped: list[str] = []
        self._known = KnownPeers()
        self._draining = Draining(lambda: (self._pushes.under_way, self._claims.loading))
        self._generation = ""
        keeps = keeps_prefix(self.groups)
        facts = DecodingEngine(
            engine.engine_id, self.incarnation, policy, settings.mode, len(self.groups), keeps, engine.role
        )
        self._forced = Forced(facts)
        # Where vLLM keeps the prefix that came, nothing is left to claim; a request that failed has ended.
        self._whole_again = policy == "recompute" and not keeps
        self._readers: Callable[[float], tuple[OpenReader, ...]] = lambda _now: ()
        self.prefixes = Prefixes(
            settings, engine, self.groups, lambda: self._session,
            lambda *found: self._claims.begin_found(*found),  # noqa: PLW0108 - both come below
        )  # fmt: skip
        self._session = open_session(self._card, self._on_message)
        self._claims = Claims(settings, engine.engine_id, self._session, self._known)
        self._readers = self._claims.readers
        self._forced.connect(self._claims.all, self._session.deliver)
        self._served = Served(engine.engine_id, self._session.deliver)
        self.in_step = InStep(settings, policy, groups, self.freed_blocks, self._claims, self.loads_ended)

    # --- both sides ---

    def new_request(self, request: VllmRequest) -> None:
        """A request arrived: begin what will need time."""
        if self._prefills(request):
            if wants_prompt_logprobs(request):
                return
            if not self._draining.takes(request.request_id):
                self._pushes.decline(request)
                return
            # A decoder is told how much was computed of what it pulls; of what is pushed it knows by the facts.
            if left := max(int(has_state(self.groups)), self._lookahead):
                drop_last_tokens(request, left)
            if wants_push_here(request.kv_transfer_params):
                self._pushes.begin(request)
            elif stages(self.settings.backend):
                self._staged.begin(request)
            self._sampling.begin(request, self._pushes.name(request.request_id))
        elif wants_remote_prefill(request.kv_transfer_params):
            self._forced.arrived(request)
            params, parent = request.kv_transfer_params or {}, traceparent_of(request)
            prompt, state = prompt_of(request), has_state(self.groups)
            self._claims.begin(request.request_id, params, prompt, state=state, traceparent=parent)
            if self._draining.closed and self.policy != "fail":
                self._claims.decline(request.request_id, DECLINED)

    def step_orders(self, output: VllmStep | None = None) -> StepOrders:
        """What the workers have to do in the coming step, which computes ``output``. Clears what it hands out."""
        scheduled = output.num_scheduled_tokens if output is not None else ()
        self.prefixes.step(output)
        for claim in self._claims.renew(time.monotonic(), scheduled):
            self._not_loaded(claim)
        pushes, push_ends = self._pushes.take(output)
        number, marked, loads = self.freed_blocks.scheduled(self._orders, output)
        dropped, self._orders, self._dropped = self._dropped, [], []
        return StepOrders(
            number=number,
            marked=marked,
            sums=self._sampling.take(output),
            pushes=pushes,
            push_ends=push_ends,
            stage=[StageOrder(*found) for found in self._staged.take(output)],
            loads=loads,
            answered=self._claims.take_answered(),
            dropped=dropped,
            faults=self._forced.take(output),
            declined=self._claims.take_declined(),
            freed=self._leases.take_freed(time.monotonic(), self._closed_by_us),
            idle=output is not None and not output.num_scheduled_tokens,
        )

    def close(self) -> None:
        """End the session with kvd."""
        self._session.close()

    # --- decoding side ---

    def matched_tokens(self, request: VllmRequest, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be loaded, and whether this happens between steps.

        (None, False): not known yet, ask again. (0, False): nothing; the request is computed here. Else within the step
        (`kvd.vllm.scheduler.in_step`). The same claim is made once: a request whose load failed is offered less of it,
        or nothing. A claim under way counts for one that is answered where its load may begin beside it.
        """
        params = request.kv_transfer_params
        ours = (remote := wants_remote_prefill(params)) or wants_push_here(params)
        if self.in_step.waits(request, computed) or (not ours and self.prefixes.asks(request, computed)):
            return None, False
        claim = self._claims.get(request.request_id)
        if not remote:
            self._pushes.cached(request.request_id, computed)
            if self._prefills(request):
                self._served.settle(request.request_id)
            else:
                tokens = request.num_prompt_tokens - max(computed, claim.tokens if claim else 0)
                self._served.plain(request.request_id, params, tokens)
        elif claim is None:
            self.new_request(request)
            claim = self._claims.get(request.request_id)
        if claim is None or not claim.waiting:
            return 0, False
        self._claims.advance(claim, time.monotonic())
        if claim.pending and not self._claims.may_begin(claim):
            return None, False
        count = claim.tokens - computed
        if claim.cause and self.policy != "fail":
            log.warning("request %s is computed here: %s", request.request_id, claim.cause)
            self._served.decided(request.request_id, "refused", count, claim.cause.code)
            self._forced.spared(request.request_id, f"nothing was to be loaded: {claim.cause}")
            self._write_down(claim)
            self._claims.end(claim, "miss")
            return 0, False
        if count <= 0:
            self._forced.spared(request.request_id, "nothing was to be loaded: its prompt is cached here")
            self._served.decided(request.request_id, "cached", 0)
            self._claims.end(claim, "done")
            return 0, False
        claim.computed = computed
        return self.in_step.offer(claim, request, count)

    def allocated(
        self, request: VllmRequest, table: Sequence[Sequence[int]], external: int, cached: Sequence[int] = ()
    ) -> None:
        """The blocks for a claim are allocated, the first ``cached`` of each group cached ones: order the load."""
        claim = self._claims.get(request.request_id)
        if claim is None or not claim.waiting:
            return
        if external <= 0:
            self._not_loaded(claim)
            return
        claim.cause = claim.cause or other_state(claim, self.groups, external)
        self._claims.order_load(claim)
        if claim.cause:
            self._served.decided(request.request_id, "refused", external, claim.cause.code)
        fault = None if claim.cause else self._forced.fault(claim)
        after = self.freed_blocks.last_use
        order = load_order(claim, self.groups, table, external, self.settings, fault, cached, after)
        self._orders.append(order)
        self.in_step.ordered(request, order, table)

    def _not_loaded(self, claim: Claim) -> None:
        """Nothing will be loaded of a claim: vLLM computes its request, or has another connector load it."""
        why = claim.cause or "vLLM did not ask for its load"
        log.info("of request %s nothing is loaded: %s", claim.request_id, why)
        self._forced.spared(claim.request_id, f"nothing was to be loaded: {why}")
        outcome: Outcome = "refused" if claim.cause else "unused"
        self._served.decided(claim.request_id, outcome, claim.tokens - claim.computed, code_of(claim.cause))
        if claim.cause:
            self._write_down(claim)
        self._claims.end(claim, "miss" if claim.cause else "done")

    def _write_down(self, claim: Claim) -> None:
        """No worker will report this miss."""
        at = (self.engine.engine_id, self.settings.backend, self.incarnation)
        self.tally.note(deliver_unloaded(claim, self._session, *at))

    def loads_ended(self, finished: set[str], outcomes: StepOutcomes | None) -> None:
        """Workers reported: note causes, and release the lease of what is finished on all of them."""
        if outcomes:
            self._claims.note(outcomes)
            self.prefixes.read_cost(outcomes.read_cost)
        for request_id in finished:
            if claim := self._claims.get(request_id):
                wanted_still = claim.state is ClaimState.LOADING
                if claim.cause and wanted_still:
                    log.warning("load of request %s missed: %s", request_id, claim.cause)
                quiesced = outcomes.quiesced.get(request_id, 0.0) if outcomes else 0.0
                self._forced.load_ended(request_id, claim.cause, quiesced)
                if wanted_still:
                    here = max(claim.computed, claim.kept if claim.cause else 0)
                    outcome: Outcome = "refused" if claim.refused else "missed" if claim.cause else "loaded"
                    self._served.decided(request_id, outcome, claim.tokens - here, code_of(claim.cause))
                if self._whole_again and claim.cause and self._claims.again(claim):
                    log.info("of request %s the first %d tokens are claimed again", request_id, claim.tokens)
                    continue
                self._claims.end(claim, "miss" if claim.cause else "done")

    # --- prefilling side ---

    def _prefills(self, request: VllmRequest) -> bool:
        """Whether a request is prefilled here for a decoder. A decoder does that for nobody, whoever asks it."""
        return self.engine.role != "decode" and wants_prefill_here(request.kv_transfer_params)

    def holds(self, request_id: str, table: Callable[[], Sequence[Sequence[int]]]) -> None:
        """A request has blocks: ``table`` gives them by group as they are when it is called."""
        if any(room.knows(request_id) for room in (self._staged, self._pushes, self._sampling)):
            self._tables[request_id] = table

    @property
    def holds_pushed(self) -> bool:
        """Whether blocks of a pushed request are held, so that the engine has to keep stepping."""
        return self._pushes.pending

    def sent(self, request_ids: set[str]) -> None:
        """All workers are done with the blocks of these requests: vLLM frees them now."""
        self._pushes.sent(request_ids)

    def finished(
        self, request: VllmRequest, block_ids: Sequence[Sequence[int]], *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. (True, params) where its blocks are kept for a decoder, else (False, None)."""
        self._tables.pop(request.request_id, None)
        self.in_step.ending(request.request_id)
        self._served.forget(request.request_id)
        staged = self._staged.finished(request.request_id, block_ids)
        summed = self._sampling.finished(request.request_id, block_ids, completed=completed)
        self.prefixes.finished(request)
        self._forced.over(request)
        turned_away = self._draining.over(request.request_id)
        if claim := self._claims.get(request.request_id):
            if claim.state is ClaimState.LOADING:  # its load is on the way, and nobody waits for it any more
                self._dropped.append(request.request_id)
            self._claims.request_over(claim)
            self.in_step.over(request.request_id, block_ids)
            if not claim.checked:  # else it may be prefilled here all the same, from there on
                return False, None
        if self._pushes.knows(request.request_id):
            return self._pushed_whole(request, block_ids, completed=completed), None
        if not self._prefills(request) or not completed:
            return False, None
        if wants_prompt_logprobs(request):
            why = "its decoder computes it too, for its prompt's log probabilities"
            return self._not_offered(request, "PROMPT_LOGPROBS", why)
        if turned_away:
            return self._not_offered(request, "DRAINING", "this engine is draining")
        if wants_push_here(request.kv_transfer_params):  # nobody will ask for it
            return self._not_offered(request, "NOT_PUSHED", "it was to be pushed and could not be")
        if stages(self.settings.backend) and not staged:
            return self._not_offered(request, "NOT_COPIED", "its blocks are not those copied for it")
        return self._offer(request, block_ids, summed=summed)

    def _offer(
        self, request: VllmRequest, block_ids: Sequence[Sequence[int]], *, summed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a prefill for whoever claims it; ``summed``: its blocks are added up."""
        if len(request.request_id) > LONGEST_ID:
            return self._not_offered(request, "ID_TOO_LONG", f"kvd takes ids of {LONGEST_ID} characters")
        state = self._session.state
        # Ours does not change while we live; a kvd that was just started names it only when all workers are back.
        self._generation = state.engine_generation or self._generation
        if not self._generation and state.kvd_generation:
            return self._not_offered(request, "WORKERS_MISSING", "kvd still misses workers of this engine")
        if not self._generation:
            return self._not_offered(request, "NO_KVD", "no kvd has answered yet")
        blocks = offered_by_group(self.groups, block_ids).values()
        if not any(len(b.ids) for b in blocks):
            return self._not_offered(request, "NO_BLOCKS", "it has none")
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._served.count("offered", tokens)
        seconds, request_id, parent = self.settings.lease_seconds, request.request_id, traceparent_of(request)
        self._leases.open(request_id, seconds, sum(len(b.ids) for b in blocks), time.monotonic(), parent)
        self._session.deliver(
            f"lease {request_id}",
            lambda: self._leases.opened_message(self.engine.engine_id, request_id, time.monotonic()),
            seconds,
        )
        prefill = RemotePrefill(
            engine_id=self.engine.engine_id, request_id=request_id, generation=self._generation,
            host=state.host, port=state.port, tokens=tokens,
            blocks=tuple(tuple(b.ids.tolist()) for b in blocks), first_blocks=tuple(b.first for b in blocks),
            lease_seconds=seconds, lease_opened=time.time(),
            checksum=summed, digest=self._digest(request, tokens),
        )  # fmt: skip
        sizes = {"tp": self.engine.tp, "pp": self.engine.pp, "dcp": self.engine.dcp}
        told = self._draining.told(state.compatibility_class)
        return True, finished_prefill(sealed(self._digest_key, prefill), **sizes, told=told)

    def _pushed_whole(
        self, request: VllmRequest, block_ids: Sequence[Sequence[int]], *, completed: bool
    ) -> bool:
        sends = self._pushes.finished(request.request_id, block_ids, completed=completed)
        if completed:
            self._served.count(
                "pushed" if sends else "not_offered", request.num_prompt_tokens, "" if sends else "NOT_PUSHED"
            )
        return sends

    def _kept(self, transfer_id: str, request_id: str, lists: Mapping[int, BlockList]) -> None:
        self._session.call(kept_message(self.engine.engine_id, transfer_id, request_id, lists), KEPT_SECONDS)

    def _not_offered(self, request: VllmRequest, code: NotOffered, why: str) -> tuple[bool, None]:
        log.warning("request %s is not offered to a decoder: %s", request.request_id, why)
        self._served.count("not_offered", request.num_prompt_tokens, code)
        return False, None

    def _digest(self, request: VllmRequest, tokens: int) -> str:
        return prompt_of(request).digest(self._digest_key, tokens)

    def _table(self, request_id: str) -> Sequence[Sequence[int]] | None:
        table = self._tables.get(request_id)
        return table() if table is not None else None

    def _closed_by_us(self, lease: Lease) -> None:
        told = self._leases.closed_message(self.engine.engine_id, lease)
        self._session.deliver(f"closed {lease.request_id}", told)

    # --- on the session's thread ---

    def _card(self) -> RegisterScheduler:
        now = time.monotonic()
        leases, more = self._leases.presented(self.engine.engine_id, now)
        for delivery in more:
            self._session.deliver(*delivery)
        self.prefixes.registering()
        return RegisterScheduler(
            engine=self.engine, incarnation=self.incarnation, pid=os.getpid(), policy=self.policy,
            leases=leases, readers=longest(self._readers(now)), complete=not more,
            digest_key=self._digest_key, home=home_kvd(self.settings.home), draining=self._draining.left,
        )  # fmt: skip

    def _on_message(self, message: Message) -> Message | None:
        answer = self._leases.on_message(message, time.monotonic()) or self._forced.asked(message)
        answer = answer or self._draining.asked(message) or self.prefixes.answer(message)
        if answer is None:
            self._known.on_message(message)
        return answer
