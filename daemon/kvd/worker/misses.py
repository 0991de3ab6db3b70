"""What a forced miss does to a worker's load: which worker it concerns, and what of the load is not read."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.geometry.model import WorkerGeometry
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.plan import plan_layers
from kvd.worker.orders import Fault
from kvd.worker.pull.load import Load, Slice
from kvd.worker.push.arrival import Arrival


def concerns(fault: Fault, geometry: WorkerGeometry) -> bool:
    """Whether a worker's part of the load is to miss: it has that rank, and holds that layer or group."""
    rank = geometry.rank
    if fault.rank not in (None, rank):
        return False
    named = fault.group is not None or bool(fault.layer)
    return not named or bool(withheld(fault, geometry))


def withheld(fault: Fault, geometry: WorkerGeometry) -> frozenset[str]:
    """The layers that are not to arrive on this worker."""
    return frozenset(
        layer.name
        for group in geometry.groups
        for layer in group.layers
        if (fault.group is not None or fault.layer)
        and fault.group in (None, group.index)
        and fault.layer in ("", layer.name)
    )


def hold_back(
    load: Load,
    fault: Fault,
    local: WorkerGeometry,
    siblings: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
) -> None:
    """Leave out of a planned load what is not to arrive: the named layers, else the second half of its slices.

    Of a single slice it is the second half of the copies: the first slice of a planned load is compiled.
    An empty slice at the end stands for what is missing, so that the load is never whole.

    Raises `TopologyError` where the blocks do not fit.
    """
    missing, order = withheld(fault, local), load.order
    if not missing and len(load.slices) > 1:
        kept = load.slices[: len(load.slices) // 2]
        load.slices = [*kept, Slice(kept[-1].end, order.tokens, {})]
        return
    rest = Slice(order.computed, order.tokens, {})
    if not missing:
        halves = {
            source: Copies(_first_half(copies)) for source, copies in (load.slices[0].copies or {}).items()
        }
        load.slices = [Slice(0, order.computed, halves), rest]
        return
    blocks, theirs = order.block_lists(), order.prefill.block_lists()
    parts: dict[int, list[Descriptors]] = {}
    for layer, plan in plan_layers(local, siblings, remotes).items():
        if layer not in missing:
            for source, rows in compile_plan(plan, blocks, theirs, tokens=order.tokens).items():
                parts.setdefault(source, []).append(rows)
    load.slices = [
        Slice(0, order.computed, {source: Copies(concatenate(rows)) for source, rows in parts.items()}),
        rest,
    ]


def strikes(fault: Fault, arrival: Arrival, geometry: WorkerGeometry) -> bool:
    """Whether the moment has come at which a pushed load is to be given up."""
    if not arrival.left:
        return True
    if fault.when == "flight":
        return bool(arrival.taken)
    missing = withheld(fault, geometry)
    if missing:
        return all(layer in missing for _, layer in arrival.left)
    return bool(arrival.first)


def _first_half(copies: Copies) -> Descriptors:
    """At least one descriptor, where there is any."""
    rows = [copies.descriptors, *([copies.selection.descriptors()] if copies.selection is not None else [])]
    whole = concatenate(rows)
    count = (len(whole) + 1) // 2
    return Descriptors(whole.local[:count], whole.remote[:count], whole.length[:count])
