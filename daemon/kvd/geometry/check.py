"""Whether a geometry is consistent with itself: every field inside its region for every block, every layer in one group."""

from __future__ import annotations

from kvd.geometry.errors import BadGeometry, LayerInTwoGroups
from kvd.geometry.model import Field, Group, Layer, WorkerGeometry


def check_worker(worker: WorkerGeometry) -> None:
    """Raise `BadGeometry` or `LayerInTwoGroups` where the description cannot be true; names what and both values."""
    if worker.num_blocks < 1:
        raise BadGeometry(f"a worker must have at least one block, this one has {worker.num_blocks}")
    owner: dict[str, int] = {}
    for position, group in enumerate(worker.groups):
        if group.index != position:
            raise BadGeometry(f"group at position {position} says it is group {group.index}")
        if group.block_size < 1:
            raise BadGeometry(f"group {group.index}: block size {group.block_size}, must be at least 1")
        for layer in group.layers:
            if (other := owner.setdefault(layer.name, group.index)) != group.index:
                raise LayerInTwoGroups(f"layer {layer.name} stands in group {other} and in group {group.index}")
            _check_layer(worker, group, layer)


def _check_layer(worker: WorkerGeometry, group: Group, layer: Layer) -> None:
    where = f"layer {layer.name} (group {group.index})"
    if not 0 <= layer.region < len(worker.regions):
        raise BadGeometry(f"{where}: region {layer.region} of {len(worker.regions)}")
    region = worker.regions[layer.region]
    if layer.offset < 0 or layer.stride < 1:
        raise BadGeometry(f"{where}: offset {layer.offset} and stride {layer.stride} must not be negative or zero")
    for fld in layer.page.fields:
        _check_field(where, fld)
        last = layer.offset + (worker.num_blocks - 1) * layer.stride + fld.end
        if last > region.length:
            raise BadGeometry(
                f"{where}: field {fld.name} of block {worker.num_blocks - 1} ends at byte {last} of a region of {region.length}"
            )


def _check_field(where: str, fld: Field) -> None:
    if fld.itemsize < 1 or fld.offset < 0 or not fld.axes:
        raise BadGeometry(f"{where}: field {fld.name} has item size {fld.itemsize}, offset {fld.offset}, {len(fld.axes)} axes")
    total = dict(fld.shape)
    for label in fld.labels:
        axes = fld.axes_of(label)
        if any(a.extent < 1 or a.step < 1 or a.stride < 0 or a.start < 0 for a in axes):
            raise BadGeometry(f"{where}: field {fld.name} has a bad axis {label}: {axes}")
        last = sum(a.start + (a.extent - 1) * a.step for a in axes)
        if label not in total:
            raise BadGeometry(f"{where}: field {fld.name} has an axis {label} and no such label in its shape {fld.shape}")
        if last >= total[label]:
            raise BadGeometry(f"{where}: field {fld.name} reaches {label} {last} of {total[label]}")
