"""Command lines whose whole output is kept in tests/golden, by the name of their file."""

from __future__ import annotations

LINES: dict[str, tuple[str, ...]] = {
    "status": ("status", "status -o wide", "status -o yaml"),
    "top": ("top --once", "top --once -o wide", "top -o json"),
    "engines": (
        "engines",
        "engines -o wide",
        "engines -o name",
        "engines --local -o json",
        "engines --state gone",
        "engines --state redy",
    ),
    "workers": (
        "workers",
        "workers -o wide",
        "workers -o jsonl",
        "workers --engine prefill-1",
        "workers --engine decode-1",
    ),
    "drain": (
        "drain",
        "drain -o wide",
        "drain decode-0 --wait",
        "drain nobody",
        "drain decode-0 --undo --wait",
    ),
    "leases": ("leases", "leases -o wide", "leases -o name", "leases release nobody"),
    "transfers": (
        "transfers",
        "transfers -o wide",
        "transfers --by pair",
        "transfers --code NOPE",
        "transfers --since 10x",
    ),
    "transfer": ("transfer cmpl-2", "transfer cmpl-2 -o wide", "transfer nothing", "transfer"),
    "slow": ("slow", "slow -o wide"),
    "events": ("events -n 2 --timeout 5", "events transfer.miss -n 1 --timeout 5 -o json", "events nope"),
    "describe-topology": (
        "describe-topology --model qwen3-32b --local tp=4 --remote tp=2",
        "describe-topology --model qwen3-32b --local tp=1 --remote tp=2 -o mermaid",
        "describe-topology --model nothing",
    ),
    "diff": ("diff decode-0 prefill-1", "diff decode-0 nobody"),
    "force-miss": ("force-miss --waiting", "force-miss cmpl-99 --yes"),
    "schema": ("schema Worker",),
    "kvctl": ("engine", "--nope", "engines --nope", "engines extra"),
}
"""They are typed at the fake daemon of `tests.kvctl.conftest`."""

HELP = (
    *(name for name in LINES if name != "kvctl"),
    "demo",
    "doctor",
    "completion",
    "version",
    "keys trust",
)
"""Commands whose help is kept, for terminals of 80 columns; the list of commands stands in docs/cli.md."""
SCREENS: dict[str, int | None] = {"80 columns": 80, "140 columns": 140, "a pipe": None}
"""What stdout is: a terminal of so many columns and 24 lines, or none."""
