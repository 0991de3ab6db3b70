"""What adds up a worker's KV in host memory."""

from __future__ import annotations

import ctypes

import numpy as np

from kvd.geometry.model import WorkerGeometry
from kvd.topology.checksums.sums import InMemory, Summer


def in_host_memory(geometry: WorkerGeometry) -> Summer:
    """What adds up the pages of a worker whose regions are all in this process's memory."""
    return InMemory(
        [
            np.ctypeslib.as_array((ctypes.c_uint8 * region.length).from_address(region.address))
            for region in geometry.regions
        ]
    )
