"""Not-a-number in a worker's KV memory, what of it a load left behind, and how clear each step's choice was.

A block in which one byte pattern stands everywhere shows afterwards, element by element, what was not written. The
pattern is all ones: not a number in every float that KV caches use, and nothing that a model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu.digest import TOKEN, Blocks, Span, elements_of, memory_of, places_of
from kvd.geometry.model import Field, Group, Layer, WorkerGeometry

BYTE = 0xFF
SOME = 8
"""Layers that are named at most."""


def fill(geometry: WorkerGeometry, byte: int) -> int:
    """Fill the whole KV memory with a byte, but block 0 of each layer with zeros; how many bytes that were.

    Block 0 belongs to no request: vLLM lets entries of block tables point to it where there is nothing. To be called
    while the engine holds no block of its own.
    """
    memory = memory_of(geometry)
    for region in memory:
        region.fill_(byte)
    for group in geometry.groups:
        for layer in group.layers:
            for field in layer.page.fields:
                elements_of(memory[layer.region], layer, field, 1).zero_()
    settle(memory[0])
    return sum(int(region.shape[0]) for region in memory)


def leftover(
    geometry: WorkerGeometry, blocks: Mapping[int, Blocks], spans: Mapping[int, Span]
) -> dict[str, Any]:
    """How many elements of these blocks still hold the pattern.

    ``within`` are those that belong to tokens of the spans, or to a state: nobody wrote what was to be loaded.
    ``beyond`` are those of later tokens, which a kernel may read and multiply by zero.
    """
    memory = memory_of(geometry)
    found: dict[str, Any] = {"within": 0, "beyond": 0, "elements": 0, "layers": []}
    for group in geometry.groups:
        if group.index not in blocks:
            continue
        for layer in group.layers:
            for field in layer.page.fields:
                held, span = blocks[group.index], spans[group.index]
                within, beyond, elements = _left(memory[layer.region], group, layer, field, held, span)
                found["within"] += within
                found["beyond"] += beyond
                found["elements"] += elements
                if within + beyond and len(found["layers"]) < SOME:
                    found["layers"].append(f"{layer.name} {field.name}: {within} within, {beyond} beyond")
    return found


def _left(
    memory: Any, group: Group, layer: Layer, field: Field, held: Blocks, span: Span
) -> tuple[int, int, int]:
    import torch

    first, ids = held
    view = elements_of(memory, layer, field, 1 + max(ids, default=0))
    picked = view[torch.tensor(list(ids), device=memory.device, dtype=torch.int64)]
    pattern = BYTE if field.itemsize == 1 else -1
    places = places_of(field, len(ids))
    marked = (picked == pattern).permute(places.order).reshape(places.shares, places.tokens, -1)
    whole = int(marked.sum().item())
    if not any(axis.label == TOKEN for axis in field.axes):
        return whole, 0, int(marked.numel())
    base = first * group.block_size
    within = int(marked[:, max(0, span[0] - base) : span[1] - base].sum().item())
    return within, whole - within, int(marked.numel())


def watch_choices(model: Any) -> Callable[[], list[tuple[int, float, bool]]]:
    """From now on note how clear the choice of each step's last token is.

    Gives what hands over what was noted since it was last called: the best token, how far the second best stood below
    it, whether anything was not a number. It is empty on workers that see no logits.
    """
    noted: list[Any] = []
    compute = model.compute_logits

    def watched(*arguments: Any, **named: Any) -> Any:
        logits = compute(*arguments, **named)
        if logits is not None and len(logits):
            noted.append((logits[-1].float().topk(2), logits[-1].isnan().any()))
        return logits

    model.compute_logits = watched

    def handed_over() -> list[tuple[int, float, bool]]:
        found = [
            (int(best.indices[0]), float(best.values[0] - best.values[1]), bool(bad)) for best, bad in noted
        ]
        noted.clear()
        return found

    return handed_over


def settle(memory: Any) -> None:
    """Wait until the device has done what it was told: other streams and devices write there next."""
    if memory.is_cuda:
        import torch

        torch.cuda.synchronize(memory.device)
