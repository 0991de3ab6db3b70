"""What the workers of measured engines can be asked for besides: sums of KV blocks, and what stock connectors counted.

vLLM makes `Measured` a base of its worker class (`worker_extension_cls`); methods are called by
`ask_workers`. Nothing here costs a step anything until `kvb_watch` was called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.digest import Sums, digest, span_of
from benchmarks.gpu.lanes import watch_lanes, watch_steps
from benchmarks.gpu.poison import BYTE, fill, leftover, watch_choices
from kvd.backends import zeroing

_ZERO = zeroing.zero


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _watch_loads(half: Any, look: Callable[[Any], None]) -> None:
    """Have good loads looked at before a step can use them."""
    noted, join = half._reporting.note, half.in_step.join  # noqa: SLF001

    def watched_note(load: Any) -> None:
        """In the step that sees its end; the scheduler hears of it after that, by whichever way."""
        if load.cause is None and not load.order.in_step:
            look(load)
        noted(load)

    def watched_join() -> None:
        """Before a step is queued that uses loads: what is queued on its stream from then on runs behind them."""
        loads = list(half.in_step._begun)  # noqa: SLF001
        join()
        for load in loads:
            if load.cause is None and load.dropped is None:
                look(load)

    half._reporting.note, half.in_step.join = watched_note, watched_join  # noqa: SLF001


class Measured:
    """Methods added to vLLM's worker."""

    def kvb_watch(self, sums: bool) -> bool:
        """From now on note what is loaded and pushed; ``sums``: of whatever is loaded, before a step can use it."""
        half = _connector()._worker  # noqa: SLF001 - there is no public way in
        self._kvb_take_sums = sums
        if getattr(self, "_kvb_loads", None) is not None:
            return False
        self._kvb_loads: list[dict[str, Any]] = []
        self._kvb_pushes: dict[str, Any] = {}
        begin = half.pushing.begin

        def look(load: Any) -> None:
            at, poisoned = time.monotonic(), getattr(self, "_kvb_poisoned", False)
            found = _load(half.geometry, load.order, sums=self._kvb_take_sums, poisoned=poisoned)
            self._kvb_loads.append({"at": at, **found})

        def watched_begin(orders: Any) -> bool:
            for step in orders.pushes:
                if step.groups:
                    self._kvb_pushes[step.transfer_id] = {str(g): list(b) for g, b in step.groups.items()}
            return bool(begin(orders))

        half.pushing.begin = watched_begin
        _watch_loads(half, look)
        return True

    def kvb_fill(self, poisoned: bool) -> int:
        """Fill the KV memory with what is not a number, or with zeros; loads say from now on what of it they left."""
        self._kvb_poisoned = poisoned
        return fill(_connector()._worker.geometry, BYTE if poisoned else 0)  # noqa: SLF001

    def kvb_zeroing(self, on: bool) -> bool:
        """Whether this worker zeroes what loads do not write, from now on."""
        zeroing.zero = _ZERO if on else _zero_nothing  # type: ignore[assignment]  # a function for a function
        return True

    def kvb_watch_choices(self) -> bool:
        """From now on note how clear each step's choice of a token was."""
        if getattr(self, "_kvb_choices", None) is not None:
            return False
        self._kvb_choices = watch_choices(self.model_runner.model)  # type: ignore[attr-defined]  # of vLLM's worker
        return True

    def kvb_choices(self) -> list[tuple[int, float, bool]]:
        """What was noted since the last question: token, distance to the second best, not a number."""
        return self._kvb_choices()

    def kvb_answer(self) -> bool:
        """Say that there is somebody."""
        return True

    def kvb_connected(self, engine_id: str) -> bool:
        """Whether this worker knows that engine, and its probe has ended."""
        half = _connector()._worker  # noqa: SLF001
        thread = half._peers.pull_threads.get(engine_id)  # noqa: SLF001
        return bool(thread and thread.lanes.now and thread.probing.posted and not thread.probing.on)

    def kvb_joined(self) -> bool:
        """Whether all layers of a block stand side by side in this worker's memory."""
        runner = self.model_runner  # type: ignore[attr-defined]  # of vLLM's worker, which this is mixed into
        return getattr(runner, "cross_layers_kv_cache", None) is not None

    def kvb_loads(self) -> list[dict[str, Any]]:
        """The loads that ended well since the last question: request, tokens, spans by group, sums."""
        found, self._kvb_loads = self._kvb_loads, []
        return found

    def kvb_pushed(self, transfer_id: str) -> dict[str, Any]:
        """The blocks of a prompt that was computed here to be pushed, by group."""
        found: dict[str, Any] = self._kvb_pushes.pop(transfer_id, {})
        return found

    def kvb_watch_moves(self) -> bool:
        """From now on note when lanes have moved bytes and when pushed steps ended."""
        if getattr(self, "_kvb_moves", None) is not None:
            return False
        self._kvb_moves: list[dict[str, Any]] = []
        half = _connector()._worker  # noqa: SLF001
        watch_lanes(half, self._kvb_moves)
        watch_steps(half, self._kvb_moves)
        return True

    def kvb_moves(self) -> list[dict[str, Any]]:
        """What was noted since the last question."""
        found = list(self._kvb_moves)
        del self._kvb_moves[: len(found)]
        return found

    def kvb_sums(self, blocks: dict[str, Any], spans: dict[str, Any]) -> Sums:
        """The sums of blocks, each (first, ids) by group, over spans of tokens."""
        geometry = _connector()._worker.geometry  # noqa: SLF001
        return digest(
            geometry,
            {int(g): (first, ids) for g, (first, ids) in blocks.items()},
            {int(g): (begin, end) for g, (begin, end) in spans.items()},
        )

    def kvb_geometry(self) -> list[dict[str, Any]]:
        """The groups of this worker's cache: kind, block size, layers, bytes of a page and of its content."""
        geometry = _connector()._worker.geometry  # noqa: SLF001
        return [
            {
                "group": group.index,
                "kind": group.kind,
                "block_size": group.block_size,
                "layers": len(group.layers),
                "page_bytes": group.layers[0].page.size,
                "page_stride": group.layers[0].stride,
                "device": geometry.regions[group.layers[0].region].device,
            }
            for group in geometry.groups
        ]

    def kvb_watch_stock(self) -> bool:
        """From now on keep what vLLM's own connector counts of its transfers."""
        connector = _connector()
        if getattr(self, "_kvb_stats", None) is not None:
            return False
        self._kvb_stats: list[dict[str, Any]] = []
        ask = connector.get_kv_connector_stats

        def watched() -> Any:
            found = ask()
            if found is not None:
                self._kvb_stats.append({name: list(values) for name, values in found.data.items()})
            return found

        connector.get_kv_connector_stats = watched
        return True

    def kvb_stock_stats(self) -> dict[str, list[float]]:
        """What was counted since the last question, one number a transfer."""
        _connector().get_kv_connector_stats()
        found: dict[str, list[float]] = {}
        for stats in self._kvb_stats:
            for name, values in stats.items():
                found.setdefault(name, []).extend(float(value) for value in values)
        self._kvb_stats = []
        return found


def _zero_nothing(*_: object) -> None:
    """In place of `zeroing.zero`: what was in a block before stays."""


def _load(geometry: Any, order: Any, *, sums: bool, poisoned: bool = False) -> dict[str, Any]:
    """One load that has ended: what stands in its blocks now."""
    blocks = {g: (first, list(ids)) for g, (first, ids) in order.groups.items()}
    groups = {group.index: group for group in geometry.groups}
    spans = {g: span_of(groups[g], held, order.tokens) for g, held in blocks.items()}
    return {
        "request_id": order.request_id,
        "tokens": order.tokens,
        "spans": {str(g): span for g, span in spans.items()},
        "leftover": leftover(geometry, blocks, spans) if poisoned else {},
        "sums": digest(geometry, blocks, spans) if sums else {},
    }
