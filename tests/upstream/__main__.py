"""`python -m tests.upstream`: vLLM's own tests of connectors, with KvdConnector in the place of theirs.

docs/upstream-tests.md says what is adapted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.daemons import ROOT
from tests.upstream.adapted import FETCHED, FILES, SERVED


def run(plugin: str, files: Sequence[Path], environment: Mapping[str, str]) -> int:
    """Run files of theirs with a plugin of ours; pytest's exit status."""
    # `tests` is theirs as well as ours: a package that lies in two places, since neither has an __init__.py.
    paths = [str(FETCHED), str(ROOT), str(ROOT / "daemon"), os.environ.get("PYTHONPATH", "")]
    settings = ("-c", str(Path(__file__).with_name("pytest.ini")), "--rootdir", str(FETCHED))
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *settings,
        "-p",
        f"tests.upstream.{plugin}",
        *map(str, files),
    ]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "UCX_MODULES": "^ib", **environment}
    return subprocess.run(words, cwd=FETCHED, env={**os.environ, **ours}, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 where all passed, 1 where some did not, 2 where the tests are not there."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("--served", action="store_true", help="those of running servers too (minutes)")
    given = parser.parse_args(arguments)
    wanted = (*FILES, *(file for files in SERVED.values() for file in files))
    if missing := [path for path in wanted if not (FETCHED / path).exists()]:
        sys.stderr.write(f"{missing[0]} is not in {FETCHED}: run .ci/setup routers\n")
        return 2
    results = [run("plugin", FILES, {})]
    if given.served:
        from tests.upstream.served import servers

        for kind, files in SERVED.items():
            with servers(kind) as environment:
                results.append(run("served", files, environment))
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
