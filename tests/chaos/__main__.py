"""`python -m tests.chaos`: faults, hostile messages and a soak, as `make chaos` and `make chaos-long` run them."""

from __future__ import annotations

import argparse
import subprocess
import sys

SHORT = (
    ("-m", "tests.chaos.run"),
    ("-m", "tests.chaos.hostile", "--count", "200000"),
    ("-m", "tests.chaos.soak", "--minutes", "1"),
)
LONG = (
    ("-m", "tests.chaos.run", "--rounds", "20", "--seed", "1000"),
    ("-m", "tests.fuzz", "--count", "1000000"),
    ("-m", "tests.chaos.hostile", "--count", "1000000"),
    ("-m", "tests.chaos.soak", "--minutes", "60"),
)


def main(arguments: list[str] | None = None) -> int:
    """The command: all parts run, also after one has failed. The exit status is 1 where one has."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--long", action="store_true", help="three hours of it")
    given = parser.parse_args(arguments)
    failed = []
    for words in LONG if given.long else SHORT:
        sys.stdout.write(f"\n== {' '.join(words[1:])}\n")
        sys.stdout.flush()
        if subprocess.run([sys.executable, *words], check=False).returncode:
            failed.append(words[1])
    sys.stdout.write(f"\nfailed: {', '.join(failed)}\n" if failed else "\nall held\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
