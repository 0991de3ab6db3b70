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
        "engines -o folded",
        "engines --filter state=partial --sort since",
        "engines --filter stat=partial",
        "engines --sort nope",
    ),
    "workers": (
        "workers",
        "workers -o wide",
        "workers -o jsonl",
        "workers -o folded",
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
    "leases": ("leases", "leases -o wide", "leases -o name", "leases -o folded", "leases release nobody"),
    "transfers": (
        "transfers",
        "transfers -o wide",
        "transfers -o folded",
        "transfers --filter from=prefill-? --sort bytes",
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
    "explain": ("explain PEER_DOWN", "explain PROMPT_MISMATCH -o wide", "explain KVD-BUZY"),
    "trace": (
        "trace export t.gz --since 1000d",
        "trace show t.gz",
        "trace import t.gz --name monday",
        "trace show",
        "trace show nothing",
        "trace export /dev/null --request nothing",
    ),
    "export-geometry": ("export-geometry decode-9", "export-geometry none.json"),
    "probe": ("probe nixl://127.0.0.1:1", "probe http://127.0.0.1:1"),
    "benchmark": (
        "benchmark --model nothing",
        "benchmark --model qwen3-32b --local tp=4 --backend nope",
        "benchmark --to nowhere",
    ),
    "replay": ("replay none.gz", "replay none.gz --speed fast"),
    "serve": ("serve", "serve here:none"),
    "demo": ("demo --mode sideways", "demo --dir /dev/null/x --simulate"),
    "verify": ("verify", "verify --endpoint nowhere --prefill nowhere"),
    "connector-config": (
        "connector-config --role prefill",
        "connector-config --role decode --mode push --set load_timeout=10 -o yaml",
        "connector-config --role decode --set load_time=10",
    ),
    "install-files": ("install-files --dry-run --root root --prefix /usr --programs /usr/bin",),
    "keys": (
        "keys generate --key-file host.keys --list trusted.keys",
        "keys show --key-file host.keys --list trusted.keys",
        "keys trust 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7' 10.0.0.8:7766 --list trusted.keys",
        "keys revoke 10.0.0.8:7766 --list trusted.keys",
        "keys revoke 10.0.0.8:7766 --list trusted.keys",
        "keys trust short 10.0.0.8:7766 --list trusted.keys",
    ),
    "wait": (
        "wait kvd",
        "wait engine/decode-0 kvd -o json",
        "wait engine/prefill-0 --timeout 300ms",
        "wait decode-0",
    ),
    "completion": ("completion tcsh",),
    "version": ("version", "version -o json", "version --client"),
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
