"""Whether a geometry is consistent with itself: fields inside their region for every block, layers in one group.

The numbers of everything are looked at first: a description comes from another process or host, and what is checked
after that, or planned, must not take seconds. The limits are far above any model's.
"""

from __future__ import annotations

from kvd.geometry.errors import BadGeometry, LayerInTwoGroups
from kvd.geometry.model import Axis, Field, Group, Layer, Page, WorkerGeometry

MAX_ELEMENTS = 1 << 28
"""Elements of one field in one page; real pages have less than a million. Planning lists them, so a peer may not claim
what would not fit in memory."""
MAX_GROUPS = 256
"""KV cache groups. Hybrid models have ten."""
MAX_LAYERS = 1024
"""Layers of one worker, of all groups together. The deepest models have 130."""
MAX_REGIONS = 4096
"""Regions of memory: one or two for each layer."""
MAX_FIELDS = 64
"""Fields of one page: K and V, their scales, the parts of a state."""
MAX_FIELDS_IN_ALL = 2048
"""Fields of all kinds of page together. Models have two or three kinds."""
MAX_AXES = 32
"""Axes of one field. A page of kernel blocks has six."""
MAX_NAME = 512
"""Characters of a name: of a layer, a field, a type, a device."""
LARGEST = (1 << 63) - 1
"""The largest number of anything but an address: what 64 bits with a sign hold."""


def check_worker(worker: WorkerGeometry) -> None:
    """Raise `BadGeometry` or `LayerInTwoGroups` where the description cannot be true; names what and both values."""
    _check_numbers(worker)
    _check_head(worker)
    owner: dict[str, int] = {}
    checked: set[int] = set()  # by identity: to compare what a peer made alike could take long
    for position, group in enumerate(worker.groups):
        _check_group(position, group)
        for layer in group.layers:
            if (other := owner.setdefault(layer.name, group.index)) != group.index:
                raise LayerInTwoGroups(
                    f"layer {layer.name} stands in group {other} and in group {group.index}"
                )
            if id(layer.page) not in checked:
                _check_page(_named(group, layer), layer.page)
                checked.add(id(layer.page))
            _check_place(worker, group, layer)
        if len(set(group.layer_names)) != len(group.layers):
            raise BadGeometry(f"group {group.index} names a layer twice: {', '.join(group.layer_names)}")


def check_placed(worker: WorkerGeometry) -> None:
    """`check_worker` of one with groups that were found good for other regions and numbers of blocks."""
    _at_most("regions", len(worker.regions), MAX_REGIONS)
    _check_head(worker)
    for group in worker.groups:
        for layer in group.layers:
            _check_place(worker, group, layer)


def _check_head(worker: WorkerGeometry) -> None:
    if worker.num_blocks < 1:
        raise BadGeometry(f"a worker must have at least one block, this one has {worker.num_blocks}")
    if min(worker.rank.tp, worker.rank.pp, worker.rank.dcp) < 0:
        raise BadGeometry(f"a worker cannot have rank {worker.rank}")
    for i, region in enumerate(worker.regions):
        if region.address < 0 or region.length < 1 or region.address + region.length > 1 << 64:
            raise BadGeometry(f"region {i} has address {region.address} and length {region.length}")
        if len(region.device) > MAX_NAME:
            _check_texts(f"region {i}", region.device)


def _check_numbers(worker: WorkerGeometry) -> None:
    """How many there are of everything that is gone through below."""
    _at_most("groups", len(worker.groups), MAX_GROUPS)
    _at_most("regions", len(worker.regions), MAX_REGIONS)
    _at_most("layers", sum(len(group.layers) for group in worker.groups), MAX_LAYERS)
    pages = {id(layer.page): layer.page for group in worker.groups for layer in group.layers}
    for page in pages.values():
        _at_most("fields of a page", len(page.fields), MAX_FIELDS)
    _at_most("fields of all pages", sum(len(page.fields) for page in pages.values()), MAX_FIELDS_IN_ALL)
    for field in (field for page in pages.values() for field in page.fields):
        _at_most("axes of a field", len(field.axes), MAX_AXES)
        _at_most("sizes of a field", len(field.shape), MAX_AXES)


def _at_most(what: str, found: int, most: int) -> None:
    if found > most:
        raise BadGeometry(f"{found} {what}; at most {most} are taken")


def _check_texts(where: str, *texts: str) -> None:
    if (longest := max(map(len, texts))) > MAX_NAME:
        raise BadGeometry(f"{where[:MAX_NAME]}: a name of {longest} characters; at most {MAX_NAME} are taken")


def _check_range(where: str, *numbers: int) -> None:
    if max(numbers) > LARGEST:
        raise BadGeometry(f"{where}: a number of {max(numbers).bit_length()} bits; at most 63 are taken")


def _check_group(position: int, group: Group) -> None:
    if group.index != position:
        raise BadGeometry(f"group at position {position} says it is group {group.index}")
    if group.block_size < 1:
        raise BadGeometry(f"group {group.index}: block size {group.block_size}, must be at least 1")
    _check_range(f"group {group.index}", group.block_size, group.scratch_blocks, group.window or 0)
    if group.layers:
        _check_texts(f"group {group.index}", *group.layer_names)
    if group.scratch_blocks < 0 or (group.window is not None and group.window < 1):
        raise BadGeometry(
            f"group {group.index}: window {group.window} and {group.scratch_blocks} scratch blocks; "
            "a window is at least 1, scratch blocks are at least 0"
        )


def _named(group: Group, layer: Layer) -> str:
    return f"layer {layer.name} (group {group.index})"


def _check_place(worker: WorkerGeometry, group: Group, layer: Layer) -> None:
    if not 0 <= layer.region < len(worker.regions):
        raise BadGeometry(f"{_named(group, layer)}: region {layer.region} of {len(worker.regions)}")
    region = worker.regions[layer.region]
    if layer.offset > LARGEST or layer.stride > LARGEST or worker.num_blocks > LARGEST:
        _check_range(_named(group, layer), layer.offset, layer.stride, worker.num_blocks)
    if layer.offset < 0 or layer.stride < 1:
        raise BadGeometry(
            f"{_named(group, layer)}: offset {layer.offset} and stride {layer.stride} must not be negative or zero"
        )
    last = layer.offset + (worker.num_blocks - 1) * layer.stride + layer.page.end
    if last > region.length:
        raise BadGeometry(
            f"{_named(group, layer)}: block {worker.num_blocks - 1} ends at byte {last} of a region of {region.length}"
        )


def _check_page(where: str, page: Page) -> None:
    if not page.fields:
        raise BadGeometry(f"{where}: a page without fields")
    if len(page.by_name) != len(page.fields):
        raise BadGeometry(f"{where}: two fields of one name among {', '.join(f.name for f in page.fields)}")
    for fld in page.fields:
        _check_field(f"{where}: field {fld.name}", fld)


def _check_field(where: str, fld: Field) -> None:
    _check_texts(where, fld.name, fld.dtype, *(a.label for a in fld.axes), *(label for label, _ in fld.shape))
    axes_numbers = (number for a in fld.axes for number in (a.start, a.extent, a.step, a.stride))
    _check_range(where, fld.itemsize, fld.offset, *axes_numbers, *(size for _, size in fld.shape))
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
