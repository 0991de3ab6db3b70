"""Whether a geometry is consistent with itself: fields inside their region for every block, layers in one group."""

from __future__ import annotations

from kvd.geometry.errors import BadGeometry, LayerInTwoGroups
from kvd.geometry.model import Axis, Field, Group, Layer, Page, WorkerGeometry

MAX_ELEMENTS = 1 << 28
"""Elements of one field in one page; real pages have less than a million. Planning lists them, so a peer may not claim
what would not fit in memory."""


def check_worker(worker: WorkerGeometry) -> None:
    """Raise `BadGeometry` or `LayerInTwoGroups` where the description cannot be true; names what and both values."""
    if worker.num_blocks < 1:
        raise BadGeometry(f"a worker must have at least one block, this one has {worker.num_blocks}")
    if min(worker.rank.tp, worker.rank.pp, worker.rank.dcp) < 0:
        raise BadGeometry(f"a worker cannot have rank {worker.rank}")
    for i, region in enumerate(worker.regions):
        if region.address < 0 or region.length < 1:
            raise BadGeometry(f"region {i} has address {region.address} and length {region.length}")
    owner: dict[str, int] = {}
    checked: set[Page] = set()
    for position, group in enumerate(worker.groups):
        _check_group(position, group)
        for layer in group.layers:
            where = f"layer {layer.name} (group {group.index})"
            if (other := owner.setdefault(layer.name, group.index)) != group.index:
                raise LayerInTwoGroups(
                    f"layer {layer.name} stands in group {other} and in group {group.index}"
                )
            if layer.page not in checked:
                _check_page(where, layer.page)
                checked.add(layer.page)
            _check_place(where, worker, layer)
        if len(set(group.layer_names)) != len(group.layers):
            raise BadGeometry(f"group {group.index} names a layer twice: {', '.join(group.layer_names)}")


def _check_group(position: int, group: Group) -> None:
    if group.index != position:
        raise BadGeometry(f"group at position {position} says it is group {group.index}")
    if group.block_size < 1:
        raise BadGeometry(f"group {group.index}: block size {group.block_size}, must be at least 1")
    if group.scratch_blocks < 0 or (group.window is not None and group.window < 1):
        raise BadGeometry(
            f"group {group.index}: window {group.window} and {group.scratch_blocks} scratch blocks"
        )


def _check_place(where: str, worker: WorkerGeometry, layer: Layer) -> None:
    if not 0 <= layer.region < len(worker.regions):
        raise BadGeometry(f"{where}: region {layer.region} of {len(worker.regions)}")
    region = worker.regions[layer.region]
    if layer.offset < 0 or layer.stride < 1:
        raise BadGeometry(
            f"{where}: offset {layer.offset} and stride {layer.stride} must not be negative or zero"
        )
    last = layer.offset + (worker.num_blocks - 1) * layer.stride + layer.page.end
    if last > region.length:
        raise BadGeometry(
            f"{where}: block {worker.num_blocks - 1} ends at byte {last} of a region of {region.length}"
        )


def _check_page(where: str, page: Page) -> None:
    if not page.fields:
        raise BadGeometry(f"{where}: a page without fields")
    if len(page.by_name) != len(page.fields):
        raise BadGeometry(f"{where}: two fields of one name among {', '.join(f.name for f in page.fields)}")
    for fld in page.fields:
        _check_field(f"{where}: field {fld.name}", fld)


def _check_field(where: str, fld: Field) -> None:
    if fld.itemsize < 1 or fld.offset < 0 or not fld.axes:
        raise BadGeometry(
            f"{where} has item size {fld.itemsize}, offset {fld.offset} and {len(fld.axes)} axes"
        )
    total = dict(fld.shape)
    if set(fld.labels) != set(total) or len(total) != len(fld.shape):
        raise BadGeometry(f"{where} has axes {', '.join(fld.labels)} and a shape of {fld.shape}")
    for label in fld.labels:
        axes = fld.axes_of(label)
        if any(a.extent < 1 or a.step < 1 or a.stride < 0 or a.start < 0 for a in axes):
            raise BadGeometry(f"{where} has a bad axis {label}: {axes}")
        last = sum(a.start + (a.extent - 1) * a.step for a in axes)
        if last >= total[label]:
            raise BadGeometry(f"{where} reaches {label} {last} of {total[label]}")
        if not _nested([(a.step, a.extent) for a in axes], 1):
            raise BadGeometry(f"{where} holds a {label} twice: {axes}")
    if fld.elements > MAX_ELEMENTS:
        raise BadGeometry(f"{where} has {fld.elements} elements in a page; at most {MAX_ELEMENTS} are taken")
    if not _nested([(a.stride, a.extent) for a in fld.axes], fld.itemsize):
        raise BadGeometry(f"{where} has two elements at one place: {_strides(fld.axes)}")


def _nested(steps: list[tuple[int, int]], unit: int) -> bool:
    """Whether (step, extent) pairs reach every point at most once: each step is past all that is inside it.

    Sufficient, and true of every tensor that is a permutation of a dense one with gaps.
    """
    inside = unit
    for step, extent in sorted(s for s in steps if s[1] > 1):
        if step < inside:
            return False
        inside += (extent - 1) * step
    return True


def _strides(axes: tuple[Axis, ...]) -> str:
    return ", ".join(f"{a.label} {a.extent} x {a.stride} bytes" for a in axes)
