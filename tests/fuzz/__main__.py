"""`python -m tests.fuzz --count N`: so many inputs for each decoder, and for the protocol below them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--count", type=int, default=1_000_000, metavar="N", help="for each (default: a million)"
    )
    given, further = parser.parse_known_args()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--timeout",
        "7200",
        *further,
        str(Path(__file__).parent),
    ]
    return subprocess.run(
        command, env={**os.environ, "KVD_FUZZ_INPUTS": str(given.count)}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
