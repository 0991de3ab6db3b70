"""Takes out of a geometry and of ids what must not leave the host: addresses, paths, names of requests."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import PurePath

from kvd.geometry.model import EngineGeometry, Region, WorkerGeometry

ALIGN = 1 << 21
"""Bytes. Regions that did not adjoin are put apart by at least so much, as the pages of real allocations are."""


def without_addresses(engine: EngineGeometry) -> EngineGeometry:
    """The engine on made-up addresses: what touched or overlapped still does, nothing else is told of their places.

    A model named by its path keeps the last part of it.
    """
    facts = {name: _bare(value) if isinstance(value, str) else value for name, value in engine.facts.items()}
    return dataclasses.replace(
        engine,
        model=_bare(engine.model),
        workers=tuple(_moved(worker) for worker in engine.workers),
        facts=facts,
    )


def digest(text: str, salt: bytes) -> str:
    """A name for ``text`` that is the same within one trace and cannot be guessed back: the salt is thrown away."""
    return hashlib.blake2b(text.encode(), digest_size=8, key=salt).hexdigest()


def _moved(worker: WorkerGeometry) -> WorkerGeometry:
    order = sorted(range(len(worker.regions)), key=lambda i: worker.regions[i].address)
    regions: dict[int, Region] = {}
    old_end = new_end = 0
    shift = 0
    for i in order:
        region = worker.regions[i]
        if not regions or region.address > old_end:
            shift = -(-(new_end + 1) // ALIGN) * ALIGN + region.address % 4096 - region.address
        regions[i] = Region(region.address + shift, region.length, region.device)
        old_end = max(old_end, region.address + region.length)
        new_end = old_end + shift
    return dataclasses.replace(worker, regions=tuple(regions[i] for i in range(len(worker.regions))))


def _bare(name: str) -> str:
    return PurePath(name).name if name.startswith(("/", "~", "./", "../")) else name
