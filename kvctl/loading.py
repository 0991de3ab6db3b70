"""The command group that imports a command only when it is used."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

from kvctl.commands import COMMANDS, Row
from kvctl.errors import KvctlError, UsageError
from kvctl.options import with_settings
from kvctl.parsing import near_misses


class LazyGroup(TyperGroup):
    """Lists the rows of `kvctl.commands` without importing them, and loads the one that was called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        del ctx
        return [row.name for row in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported now; ``None`` when there is none of that name."""
        del ctx
        return next((load(row) for row in COMMANDS if row.name == cmd_name), None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` begin with. Raises `UsageError` with the near misses."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            raise UsageError(f"no command {args[0]!r}; {near_misses(args[0], names)}", "see kvctl --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, from the table alone."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(row.name, row.summary) for row in COMMANDS])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The exit codes and where settings come from; the paragraphs of the epilog as they were written."""
        del ctx
        formatter.write_paragraph()
        formatter.write((self.epilog or "") + "\n")


def load(row: Row) -> Any:
    """The click command of a row. Raises `KvctlError` when its module cannot be imported."""
    module_name, function_name = row.target.split(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise KvctlError(
            f"kvctl {row.name} is not available here: {error}",
            "install kvctl with all of its packages",
        ) from error
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name=row.name, context_settings=CONTEXT_SETTINGS)(with_settings(function))
    return typer.main.get_command(app)


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
