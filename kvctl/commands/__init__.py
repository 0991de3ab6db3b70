"""The commands: one row each, so that `kvctl --help` can list them without importing any.

To add a command, write ``kvctl/commands/NAME.py`` with one function whose first parameter is ``settings: Settings``,
and give it a row here. The row's text is the first line of the function's docstring (a test compares them).
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One command: its name, ``module:function``, the line in the list of commands."""

    name: str
    target: str
    summary: str


COMMANDS = (
    Row("status", "kvctl.commands.status:status", "How this host's kvd is: peers, counters, gauges."),
    Row("engines", "kvctl.commands.engines:engines", "The engines that kvd knows, local ones and peers'."),
    Row("workers", "kvctl.commands.workers:workers", "The local workers and schedulers registered with kvd."),
    Row("transfers", "kvctl.commands.transfers:transfers", "The newest KV transfers in kvd's ledger."),
    Row("events", "kvctl.commands.events:events", "Follow what happens, one event a line."),
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
    Row("demo", "kvctl.demo.command:demo", "Two small engines, a kvd between them, and a transfer."),
    Row("schema", "kvctl.commands.schema:schema", "The JSON Schema of a document that kvctl prints."),
    Row("completion", "kvctl.commands.completion:completion", "A completion script for bash, zsh or fish."),
    Row("version", "kvctl.commands.version:version", "The versions of kvctl, of the wire and of kvd."),
)
