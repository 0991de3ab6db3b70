"""The entry point: the app, its global options, and how an error becomes an exit code and one line on stderr."""

from __future__ import annotations

import errno
import gc
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

import kvctl.commands
from kvctl import errors
from kvctl.cli.discovery import commands
from kvctl.cli.live_names import ASKED
from kvctl.cli.loading import CONTEXT_SETTINGS, group_of, quick
from kvctl.cli.options import with_given
from kvctl.cli.parsing import keys_as_values, watched
from kvctl.cli.settings import OUTPUT_FORMATS, Given, resolve

EPILOG = "\n".join(
    (
        "Exit codes:",
        *(f"  {code:<4} {meaning}" for code, meaning in errors.EXIT_CODES),
        "",
        "stdout is data, stderr is talk. A flag wins over its KVCTL_* variable, which",
        "wins over the config file. An error ends with its code in brackets:",
        "kvctl explain CODE says what is behind it and what to do.",
    )
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a file says that stdout leads to, and that takes no more."""


def root(
    context: typer.Context,
    given: Given,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print kvctl's version and exit.")] = False,
) -> None:
    """See and steer the KV cache transfers between vLLM engines."""
    if version:
        from kvd.installed import own_version

        typer.echo(f"kvctl {own_version()}")
        raise typer.Exit
    context.obj = (given,)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def group() -> Any:
    """The whole command line as a click group, commands not yet imported."""
    app = typer.Typer(
        name="kvctl",
        cls=group_of(commands("kvctl.commands", kvctl.commands.__path__)),
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    unfolded = with_given(root)
    app.callback(invoke_without_command=True, epilog=EPILOG, context_settings=CONTEXT_SETTINGS)(unfolded)
    return quick(typer.main.get_command(app), unfolded)


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    # Most commands are over before there is garbage worth looking for; at the usual 700 a fifteenth of their time is
    # spent on it.
    gc.set_threshold(50_000)
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [ASKED]:
        from kvctl.naming import answer

        sys.exit(answer(given[1:]))
    sys.exit(main(given))


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code. Whatever goes wrong is told on stderr, in one line."""
    try:
        status = _invoke(arguments)
        sys.stdout.flush()
    except errors.KvctlError as error:
        _tell(error, arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`kvctl events | head`), which is no fault. The interpreter flushes stdout once more on
        # its way out and must find a file that takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        away = errors.KvctlError(
            f"cannot write the answer: {error.strerror}", "make room, or write it elsewhere"
        )
        _tell(away, arguments)
        return away.exit_code
    return status


def _invoke(arguments: list[str]) -> int:
    try:
        command = group()
        with command.make_context("kvctl", keys_as_values(watched(arguments))) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        path = getattr(getattr(error, "ctx", None), "command_path", "kvctl")
        told = " ".join(error.format_message().split()).rstrip(".")
        form = (getattr(error, "option_name", None) or "").removeprefix("--")
        if form in OUTPUT_FORMATS:
            told = f"No such option: --{form}; did you mean -o {form}?"
        raise errors.UsageError(told, f"see {path} --help") from None
    return 0


def _tell(error: errors.KvctlError, arguments: list[str]) -> None:
    if _output_format(arguments) in ("json", "jsonl"):
        from kvctl.views.error import error_text

        sys.stderr.write(error_text(error) + "\n")
    else:
        from kvctl.cli.talk import say

        say(" ".join(error.told.split("\n")))


def _output_format(arguments: list[str]) -> str:
    """The output format as far as it can be told: the arguments themselves may be what is wrong."""
    flag = None
    for position, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument in ("-o", "--output"):
            flag = "".join(arguments[position + 1 : position + 2])
        elif argument.startswith("--output="):
            flag = argument.removeprefix("--output=")
        elif argument.startswith("-o"):
            flag = argument.removeprefix("-o")
    try:
        return resolve((Given(output=flag),), os.environ).output
    except errors.UsageError:
        return flag or "table"
