"""A KvdConnector whose prefiller has its memory overwritten when a test wants it to: after a prompt was added up.

An engine gets it by ``kv_connector_module_path``. While the folder that the environment names has a file ``overwrite``,
one byte of the last block of each prompt is changed, before the step's result is known to anybody.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path

from kvd.worker.checksums.summing import Summing
from kvd.worker.orders import block_lists

FOLDER = "KVCTL_TEST_OVERWRITE"


def environment(folder: Path) -> Mapping[str, str]:
    """What an engine needs in its environment; the file is to be made in ``folder``."""
    places = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, places))}


def _stepped(summing: Summing) -> None:
    coming = [order.name for order in summing._coming]
    _really_stepped(summing)
    if not coming or not Path(os.environ[FOLDER], "overwrite").exists():
        return
    for name in coming:
        kept = summing._kept[name]
        while not kept.done:
            time.sleep(0.001)
        geometry = summing._geometry
        group = geometry.groups[-1]
        block = int(block_lists(kept.order.groups)[group.index].ids[0])
        address = geometry.page_address(group.layers[-1], block) + group.layers[-1].page.fields[0].offset
        byte = ctypes.c_uint8.from_address(address + 1)
        byte.value ^= 0x40


if FOLDER in os.environ:  # in an engine; a test only looks up the names
    from kvd.vllm.connector import KvdConnector  # noqa: F401 - vLLM looks it up here

    _really_stepped = Summing.stepped
    setattr(Summing, "stepped", _stepped)  # noqa: B010 - mypy knows methods only as what they were
