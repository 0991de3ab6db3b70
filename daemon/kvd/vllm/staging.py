"""Staged engines (`kvd.backends.staged`): what peers may read is copied to where they read it before they hear of it.

Of a pull that is at the end of the step which computes the prompt's last token: vLLM hands out a step's result when all
workers have ended it, so the router cannot know of the prefill before. Of a push it is layer by layer, in the sender.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvd.backends.contract import Home, StagingHome
from kvd.geometry.model import WorkerGeometry
from kvd.topology.blocks import BlockList, offered
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import concatenate
from kvd.topology.plan import plan_worker
from kvd.topology.push import compile_chunk, plan_push
from kvd.vllm.groups import GroupFacts
from kvd.vllm.orders import PutOut, plain
from kvd.vllm.outgoing import Ready
from kvd.vllm.pushes import table_in
from kvd.vllm.requests import Request, Scheduled, Table

_LOOK_S = 50e-6


@dataclass(slots=True)
class _Prefill:
    """A request that is prefilled here for a pull; ``put`` are its blocks by group, once the workers have the order."""

    request: Request
    put: dict[int, BlockList] = field(default_factory=dict)


class PutOuts:
    """The scheduler's part: which prefills end with a step, and with which blocks. Touched by its steps only."""

    def __init__(self, groups: Sequence[GroupFacts], table: Callable[[str], Table | None]) -> None:
        """``table`` gives a request's block ids where a step's output does not."""
        self._groups = tuple(groups)
        self._table = table
        self._active: dict[str, _Prefill] = {}

    def begin(self, request: Request) -> None:
        """A request arrived that is to be prefilled here and pulled."""
        self._active[request.request_id] = _Prefill(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request is one of them."""
        return request_id in self._active

    def take(self, output: Scheduled | None) -> list[PutOut]:
        """What is to be put out when the coming step has run."""
        found: list[PutOut] = []
        if output is None:
            return found
        preempted = output.preempted_req_ids or frozenset()
        for request_id, prefill in self._active.items():
            if request_id in preempted:
                prefill.put = {}
            request, count = prefill.request, output.num_scheduled_tokens.get(request_id, 0)
            if prefill.put or not count or request.num_computed_tokens + count < request.num_prompt_tokens:
                continue
            table = table_in(output, request_id, self._table)
            if table is not None:
                prefill.put = self._offered(table)
                found.append(PutOut(request_id, plain(prefill.put), request.num_prompt_tokens))
        return found

    def finished(self, request_id: str, table: Table) -> bool:
        """A request ended with these blocks. Whether peers can read what they hold of its prompt."""
        prefill = self._active.pop(request_id, None)
        if prefill is None or not prefill.put:
            return False
        total = prefill.request.num_prompt_tokens
        return all(
            self._was_put(index, blocks, prefill.put.get(index), total)
            for index, blocks in self._offered(table).items()
        )

    def _was_put(self, index: int, now: BlockList, put: BlockList | None, total: int) -> bool:
        """Whether all blocks before the prompt's end are those that were put out; a window may have moved on since."""
        if put is None:
            return False
        group = self._groups[index]
        if group.kind == "mamba":
            return now.ids.tolist() == put.ids.tolist()
        end = min(now.first + len(now.ids), -(-total // group.block_size))
        if end <= now.first:
            return True
        ours = now.ids[: end - now.first].tolist()
        return now.first >= put.first and ours == put.ids[now.first - put.first : end - put.first].tolist()

    def _offered(self, table: Table) -> dict[int, BlockList]:
        return {
            index: offered(group.kind, table[index], group.scratch_blocks)
            for index, group in enumerate(self._groups)
        }


class Stager:
    """A worker's part: copies blocks of this worker to where its peers read them."""

    def __init__(self, home: StagingHome, geometry: WorkerGeometry, mark: Callable[[], Ready | None]) -> None:
        """``mark`` gives what tells when the device has come as far as now, None where it is there already."""
        self._home = home
        self._mark = mark
        # What a worker would read of itself is every byte that a peer may read of it.
        self._plan = plan_worker(geometry, (geometry,), (geometry,))
        self._layers = plan_push(geometry, (geometry,), (geometry,), geometry.rank)

    def put_out(self, orders: Sequence[PutOut]) -> None:
        """Copy these prefills once the device has computed them, and return when they are there.

        Raises `BackendError` where the device fails: what peers would read is not what was computed.
        """
        if not orders:
            return
        ready = self._mark()
        while ready is not None and not ready():
            time.sleep(_LOOK_S)
        for order in orders:
            blocks = order.block_lists()
            found = compile_plan(self._plan, blocks, blocks, tokens=order.tokens)
            self._home.put_out(concatenate(list(found.values())))

    def put_out_layers(
        self, blocks: Mapping[int, BlockList], layers: Mapping[str, tuple[int, int]], total: int
    ) -> None:
        """Copy what these layers hold of tokens from the first to the last number given, of ``total``; as `put_out`.

        ``blocks`` are the request's by group. Raises `BackendError` or `TopologyError`.
        """
        parts = [
            compile_chunk(self._layers[name], blocks, blocks, total=total, first=first, last=last)
            for name, (first, last) in layers.items()
        ]
        self._home.put_out(concatenate([part for part in parts if len(part)]))


def stager(home: Home, geometry: WorkerGeometry, mark: Callable[[], Ready | None]) -> Stager | None:
    """The stager of a worker whose peers read a copy of its memory; None where they read the memory itself."""
    return Stager(home, geometry, mark) if isinstance(home, StagingHome) else None
