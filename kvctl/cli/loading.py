"""The command group that imports a command only when it is used."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from kvctl.cli.discovery import Row
from kvctl.cli.options import with_settings
from kvctl.cli.parsing import near_misses
from kvctl.errors import KvctlError, UsageError


class Examples:
    """Has a command's examples at the end of its help, as they are to be typed: no line of them is broken."""

    examples: tuple[str, ...] = ()

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples, then the epilog."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
        super().format_epilog(ctx, formatter)  # type: ignore[misc]


class LazyCommand(Examples, TyperCommand):
    """A command with examples."""


class LazyGroup(TyperGroup):
    """Lists its rows without importing the commands, and loads the one that was called."""

    rows: tuple[Row, ...] = ()

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        del ctx
        return [row.name for row in self.rows]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported now; ``None`` when there is none of that name."""
        del ctx
        return next((load(row) for row in self.rows if row.name == cmd_name), None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` begin with. Raises `UsageError` with the near misses."""
        names = self.list_commands(ctx)
        if args[:1] == ["help"]:  # as other programs have it
            if not args[1:]:
                sys.stdout.write(f"{ctx.get_help()}\n")
                ctx.exit()
            args = [*args[1:], "--help"]
        if args and args[0] not in names and not args[0].startswith("-"):
            raise UsageError(
                f"no command {args[0]!r}; {near_misses(args[0], names)}", f"see {ctx.command_path} --help"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, section by section, from the rows alone."""
        del ctx
        for section, rows in groupby(self.rows, lambda row: row.section):
            with formatter.section(section):
                formatter.write_dl([(row.name, row.summary) for row in rows])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The exit codes and where settings come from; the paragraphs of the epilog as they were written."""
        del ctx
        if not self.epilog:
            return
        formatter.write_paragraph()
        formatter.write(self.epilog + "\n")


def group_of(rows: tuple[Row, ...], examples: tuple[str, ...] = ()) -> type[LazyGroup]:
    """The group that lists these rows."""
    return type("Group", (Examples, LazyGroup), {"rows": rows, "examples": examples})


def load(row: Row) -> Any:
    """The click command of a row. Raises `KvctlError` when its module cannot be imported."""
    try:
        module = importlib.import_module(row.module)
    except ImportError as error:
        raise KvctlError(
            f"kvctl {row.name} is not available here: {error}",
            "install kvctl with all of its packages",
        ) from error
    function, examples = getattr(module, row.module.rpartition(".")[2]), module.EXAMPLES
    unfolded = with_settings(function)
    if row.rows:
        above = group_of(row.rows, examples)
        app = typer.Typer(name=row.name, cls=above, add_completion=False, rich_markup_mode=None)
        app.callback(invoke_without_command=True, context_settings=CONTEXT_SETTINGS)(unfolded)
        return quick(typer.main.get_command(app), unfolded)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    below = type("Command", (LazyCommand,), {"examples": examples})
    app.command(name=row.name, cls=below, context_settings=CONTEXT_SETTINGS)(unfolded)
    return quick(typer.main.get_command(app), unfolded)


def quick(command: Any, function: Callable[..., Any]) -> Any:
    """``command``, made of ``function``, with parameters that take their values as they are or from their ``parser``.

    typer itself asks pydantic about every parameter, given or not, which takes longer than all else at the start.
    """
    wanted = inspect.signature(function, eval_str=True).parameters
    for parameter in command.params:
        _described(parameter)
        kind, info = get_args(wanted[parameter.name].annotation) or (None, None)
        parser = getattr(info, "parser", None)
        if parser is not None or kind in TEXTS:
            parameter.process_value = _value_of(parameter, parser)
    made = command.get_help_option

    def help_option(context: Any) -> Any:
        option = made(context)
        if option is not None:
            # Its only effect is that of being given.
            thorough = option.process_value
            option.process_value = lambda context, value: thorough(context, value) if value else value
        return option

    command.get_help_option = help_option
    return command


def _described(parameter: Any) -> None:
    """Help has a parameter as it was declared: no names of Python's types, and a default once, in [...]."""
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: ""  # noqa: ARG005 (typer's name)
        parameter._usage_display_name = lambda: parameter.metavar or parameter.name.upper()  # noqa: SLF001
    if "[" in (parameter.help or ""):
        parameter.show_default = False


TEXTS = (str, str | None, list[str] | None)
"""Annotations whose values are what the operator typed."""


def _value_of(parameter: Any, parser: Callable[[Any], Any] | None) -> Callable[[Any, Any], Any]:
    thorough = parameter.process_value

    def process(context: Any, value: Any) -> Any:
        if value is None or value == ():
            # Of a value that is missing typer knows better what to say.
            return thorough(context, value) if parameter.required else value
        if parser is None or not isinstance(value, str | list | tuple):
            return value  # what was typed, or a default
        try:
            return parser(value) if isinstance(value, str) else [parser(one) for one in value]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return process


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
