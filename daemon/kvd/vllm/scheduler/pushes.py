"""The scheduler's side of layer-wise push on the prefiller: what each step computes of whom, and whose blocks stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvd.shown import logger
from kvd.topology.blocks import BlockList, window_start
from kvd.vllm.memory.groups import GroupFacts, has_state, offered_by_group
from kvd.vllm.params import short
from kvd.vllm.request_trace import traceparent_of
from kvd.vllm.scheduler.draining import NOT_PUSHED
from kvd.vllm.vllm_types import BlockTable, VllmRequest, VllmStep, table_in
from kvd.wire.push import PushKept
from kvd.worker.cause import ABORTED, Cause
from kvd.worker.orders import PushEnd, PushStep, plain
from kvd.worker.push.sent_blocks import sent_blocks
from kvd.worker.remote import LONGEST_NAME
from kvd.worker.settings import ConnectorSettings

log = logger(__name__)

KEPT_SECONDS = 1.0
"""How long the word that a push is complete is of use: the next step has it too."""


@dataclass(slots=True)
class _Push:
    """A request that is being computed; ``reached`` and ``firsts`` are as the workers were told last.

    ``cached`` of its tokens are in the engine's own cache as it is about to get blocks; None once it is scheduled.
    """

    transfer_id: str
    request: VllmRequest
    total: int
    reached: int = 0
    firsts: tuple[int, ...] = ()
    again: bool = False
    digest: str = ""
    traceparent: str = ""
    cached: int | None = None


class Pushes:
    """All requests that are pushed, from arrival until their blocks may go. Touched by the scheduler's step only."""

    def __init__(
        self,
        settings: ConnectorSettings,
        groups: Sequence[GroupFacts],
        table: Callable[[str], BlockTable | None] = lambda _request_id: None,
        digest: Callable[[VllmRequest, int], str] = lambda _request, _tokens: "",
        kept: Callable[[str, str, Mapping[int, BlockList]], object] = lambda *_told: None,
    ) -> None:
        """``table`` gives a request's block ids where a step's output does not, ``digest`` that of its first tokens.

        ``kept`` tells the workers ahead of the next step that a request's blocks stay, with those that are known last.
        """
        self._digest, self._kept = digest, kept
        self._settings = settings
        self._groups = tuple(groups)
        self._table = table
        self._active: dict[str, _Push] = {}
        self._held: dict[str, str] = {}
        self._steps: list[PushStep] = []
        self._ends: list[PushEnd] = []

    @property
    def under_way(self) -> int:
        """Requests that are pushed, or whose blocks are still held for that; on any thread."""
        return len(self._active) + len(self._held)

    @property
    def pending(self) -> bool:
        """Whether blocks of a finished request are still held, so that the engine has to keep stepping."""
        return bool(self._held)

    def begin(self, request: VllmRequest) -> None:
        """A request arrived that is to be prefilled here and pushed."""
        name = (request.kv_transfer_params or {}).get("kvd_transfer_id")
        cause = ""
        if self._settings.mode != "push":
            cause = f"transfer_mode is push and this engine's mode is {self._settings.mode}"
        elif not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            cause = f"kvd_transfer_id is {short(name)}, it must be a string of 1 to {LONGEST_NAME} characters"
        elif name in self._held.values() or any(p.transfer_id == name for p in self._active.values()):
            cause = f"kvd_transfer_id {short(name)} is another request's already"
        if cause:
            log.warning("request %s is not pushed: %s", request.request_id, cause)
        else:
            total = request.num_prompt_tokens
            digest, parent = self._digest(request, total), traceparent_of(request)
            self._active[request.request_id] = _Push(
                str(name), request, total, digest=digest, traceparent=parent
            )

    def decline(self, request: VllmRequest) -> None:
        """A request arrived that is to be pushed, while this engine drains: its decoder is told, and computes."""
        name = (request.kv_transfer_params or {}).get("kvd_transfer_id")
        mine = {*self._held.values(), *(push.transfer_id for push in self._active.values())}
        named = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name not in mine
        if named and wants_push_here(request.kv_transfer_params):
            self._ends.append(PushEnd(str(name), request.request_id, 0.0, NOT_PUSHED))

    def knows(self, request_id: str) -> bool:
        """Whether a request is pushed."""
        return request_id in self._active

    def name(self, request_id: str) -> str:
        """The transfer id of a request that is pushed, else nothing."""
        push = self._active.get(request_id)
        return push.transfer_id if push is not None else ""

    def cached(self, request_id: str, tokens: int) -> None:
        """A request is about to get blocks, of which the engine's own cache has the first ``tokens``."""
        if push := self._active.get(request_id):
            push.cached = tokens

    def take(self, output: VllmStep | None) -> tuple[list[PushStep], list[PushEnd]]:
        """What the coming step computes of pushed requests, and which of them ended since the last one."""
        steps, self._steps = self._steps, []
        ends, self._ends = self._ends, []
        if output is not None and self._active:
            preempted = output.preempted_req_ids or frozenset()
            for request_id, push in self._active.items():
                if request_id in preempted:
                    push.again, push.reached = True, 0
                if step := self._step(request_id, push, output):
                    steps.append(step)
        return steps, ends

    def finished(self, request_id: str, table: BlockTable, *, completed: bool) -> bool:
        """A pushed request ended. Whether its blocks stay until every worker reports it as sent."""
        push = self._active.pop(request_id)
        computed = push.request.num_computed_tokens
        if not completed or computed < push.total:
            few = Cause(f"only {computed} of its {push.total} tokens were computed", "PREFILL_ENDED")
            cause = few if completed else ABORTED
            self._ends.append(PushEnd(push.transfer_id, request_id, 0.0, cause))
            return False
        lists = self._last(push, table)
        if lists is not None:
            self._kept(push.transfer_id, request_id, lists)
        self._ends.append(PushEnd(push.transfer_id, request_id, self._settings.lease_seconds))
        self._held[request_id] = push.transfer_id
        return True

    def sent(self, request_ids: AbstractSet[str]) -> None:
        """All workers reported these: vLLM frees their blocks now."""
        for request_id in request_ids & self._held.keys():
            del self._held[request_id]

    # --- private ---

    def _step(self, request_id: str, push: _Push, output: VllmStep) -> PushStep | None:
        count = output.num_scheduled_tokens.get(request_id, 0)
        table = table_in(output, request_id, self._table) if count else None
        again = push.again
        if table is None:
            push.again = False
            return self._step_of(push, {}, 0, again=True) if again else None
        if push.reached >= push.total and not again:
            return None
        computed = push.request.num_computed_tokens
        push.reached = min(push.total, computed + count)
        # Another connector of a MultiConnector may load tokens in this very step. vLLM counts them as computed already.
        held = min(push.total, computed if push.cached is None else push.cached)
        push.again, push.cached = False, None
        # A state is certain to be the prompt's only when the request has ended.
        lists = {
            g: b for g, b in offered_by_group(self._groups, table).items() if self._groups[g].kind != "mamba"
        }
        push.firsts = tuple(lists[g].first if g in lists else 0 for g in range(len(self._groups)))
        return self._step_of(push, lists, held, again=again)

    def _step_of(self, push: _Push, lists: Mapping[int, BlockList], held: int, *, again: bool) -> PushStep:
        return PushStep(
            push.transfer_id,
            push.request.request_id,
            plain(lists),
            push.reached,
            push.total,
            again=again,
            held=held,
            sums=self._settings.samples(push.transfer_id),
            digest=push.digest,
            traceparent=push.traceparent,
        )

    def _last(self, push: _Push, table: BlockTable) -> Mapping[int, BlockList] | None:
        """The blocks as they are kept go out with a step, where that is not what workers know: states, lost windows.

        Gives those of states. None where blocks were lost: what workers know is wrong then, until that step.
        """
        lists = offered_by_group(self._groups, table)
        lost = any(
            push.firsts and self._needs(index, push.firsts[index], blocks.first, push.total)
            for index, blocks in lists.items()
        )
        if lost or has_state(self._groups):
            push.reached = push.total
            self._steps.append(self._step_of(push, lists, push.total, again=lost))
        return None if lost else {g: b for g, b in lists.items() if self._groups[g].kind == "mamba"}

    def _needs(self, index: int, first: int, now: int, total: int) -> bool:
        """Whether a decoder may need one of the blocks number ``first`` to ``now``, which are gone."""
        group = self._groups[index]
        if group.kind == "mamba" or now <= first:
            return False
        return group.window is None or now * group.block_size > window_start(group.kind, group.window, total)


def wants_push_here(params: object) -> bool:
    """Whether a request that is to be prefilled here is to be pushed."""
    return isinstance(params, Mapping) and params.get("transfer_mode") == "push"


def kept_message(
    engine_id: str, transfer_id: str, request_id: str, lists: Mapping[int, BlockList]
) -> PushKept:
    """The word that a pushed request has ended well, and which further blocks of it are kept, by group."""
    blocks = tuple(sent_blocks(lists).values())
    return PushKept(engine_id=engine_id, transfer_id=transfer_id, request_id=request_id, blocks=blocks)
