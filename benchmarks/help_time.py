"""Prints how long `kvctl --help` takes against an interpreter that only imports typer and rich.

The two are run in turn, so that a change of the machine's load falls on both; the middle of the runs counts.
`python benchmarks/help_time.py [RUNS]` ends with the ratio.
"""  # noqa: INP001 - a script, in no package

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "kvctl --help": [sys.executable, "-m", "kvctl", "--help"],
    "import typer, rich": [sys.executable, "-c", "import typer, rich"],
    "an empty program": [sys.executable, "-c", ""],
}


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main(runs: int) -> None:
    """Run everything ``runs`` times and print the medians and the ratio."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    lines = [f"{name:<20} {1000 * median:7.1f} ms" for name, median in medians.items()]
    help_time, imports, _ = medians.values()
    sys.stdout.write("\n".join([*lines, f"ratio {help_time / imports:.2f} (at most 1.5)", ""]))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
