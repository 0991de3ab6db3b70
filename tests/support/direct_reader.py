"""Tries to reach a direct peer as another user; prints one JSON line: the error's message and hint, or nothing.

Arguments: the uid to become, the peer's metadata in hex.
"""

import json
import os
import sys

import numpy as np

from kvd.backends.direct.backend import open_backend  # before another user may not read our modules
from kvd.backends.errors import BackendError
from kvd.geometry.model import Region


def main() -> None:
    uid, metadata = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    memory = np.zeros(4096, np.uint8)
    backend = open_backend("reader", options={})
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    told = []
    try:
        backend.lane("one").add("peer", metadata)
    except BackendError as error:
        told = [error.message, error.hint]
    print(json.dumps(told))  # noqa: T201
    backend.close()


if __name__ == "__main__":
    main()
