"""The commands: one row each, so that `kvctl --help` can list them without importing any.

To add a command, write ``kvctl/commands/NAME.py`` with one function whose first parameter is ``settings: Settings``,
and give it a row here. The row's text is the first line of the function's docstring (a test compares them).
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One command: its name, ``module:function``, the line in the list of commands.

    ``rows`` are the commands below it, where it is a group; the function then only says what they are about.
    """

    name: str
    target: str
    summary: str
    rows: tuple[Row, ...] = ()


COMMANDS = (
    Row("status", "kvctl.commands.status:status", "How this host's kvd is: peers, counters, gauges."),
    Row("engines", "kvctl.commands.engines:engines", "The engines that kvd knows, local ones and peers'."),
    Row("workers", "kvctl.commands.workers:workers", "The local workers and schedulers registered with kvd."),
    Row("transfers", "kvctl.commands.transfers:transfers", "The newest KV transfers in kvd's ledger."),
    Row(
        "transfer",
        "kvctl.commands.transfer:transfer",
        "One transfer whole: all workers' parts and when each did what.",
    ),
    Row("slow", "kvctl.commands.slow:slow", "What transfers spend their time on, and what to do about it."),
    Row(
        "trace",
        "kvctl.commands.trace:trace",
        "Recorded transfers as a file, enough to replay them elsewhere.",
        (
            Row("export", "kvctl.commands.trace_export:export", "Write transfers of the ledger as a trace."),
            Row(
                "import",
                "kvctl.commands.trace_import:import_trace",
                "Check a trace and keep it under a name.",
            ),
            Row(
                "show",
                "kvctl.commands.trace_show:show_trace",
                "What a trace holds; without a name, which there are.",
            ),
        ),
    ),
    Row("events", "kvctl.commands.events:events", "Follow what happens, one event a line."),
    Row("doctor", "kvctl.commands.doctor:doctor", "What is wrong on this host, and what to do about it."),
    Row(
        "describe-topology",
        "kvctl.commands.describe_topology:describe_topology",
        "Who reads which bytes of KV cache from whom.",
    ),
    Row("diff", "kvctl.commands.diff:diff", "Two engines compared factor by factor."),
    Row(
        "export-geometry",
        "kvctl.commands.export_geometry:export_geometry",
        "An engine's geometry as a file for describe-topology and diff.",
    ),
    Row(
        "benchmark",
        "kvctl.commands.benchmark:benchmark",
        "What this host's transfer engines can move of a model's KV.",
    ),
    Row(
        "force-miss",
        "kvctl.commands.force_miss:force_miss",
        "Have KV loads of a running engine miss, to see it recover.",
    ),
    Row(
        "verify",
        "kvctl.commands.verify:verify",
        "Answers of live engines with and without forced misses, compared token for token.",
    ),
    Row(
        "replay",
        "kvctl.commands.replay:replay",
        "Recorded transfers moved again, beside their record and in other ways.",
    ),
    Row("serve", "kvctl.commands.serve:serve", "The other side of a benchmark or replay between two hosts."),
    Row("demo", "kvctl.commands.demo:demo", "Two small engines, a kvd between them, and a transfer."),
    Row("schema", "kvctl.commands.schema:schema", "The JSON Schema of a document that kvctl prints."),
    Row("completion", "kvctl.commands.completion:completion", "A completion script for bash, zsh or fish."),
    Row("version", "kvctl.commands.version:version", "The versions of kvctl, of the wire and of kvd."),
)
