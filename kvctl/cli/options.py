"""The options that every command has, and how a command function gets them as one `Settings`.

They may stand before or after the command's name: ``kvctl -o json engines`` and ``kvctl engines -o json`` are the same.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvctl.cli.option_kinds import duration
from kvctl.cli.settings import COLOR_MODES, DRAWINGS, FOLDED, NAMES, OUTPUT_FORMATS, Given, Settings, resolve

WatchOption = Annotated[
    float | None,
    duration(
        "--watch",
        "-w",
        metavar="SECONDS",
        help="Ask again every 2 s, or so many, until Ctrl-C; changes are marked.",
    ),
]


FleetOption = Annotated[
    bool,
    typer.Option(
        "--fleet", help="Ask all known hosts, side by side, for 1.5 s unless --timeout says otherwise."
    ),
]

FiltersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="COLUMN=VALUE",
        help="Only rows that have it in that column; * and ? stand for any. May be given again.",
    ),
]

DrawnSettings = Annotated[Settings, DRAWINGS]
"""The settings of a command whose answer can also be had as a drawing."""
ListSettings = Annotated[Settings, NAMES]
"""The settings of a command whose answer is a list of things with names."""
LongListSettings = Annotated[Settings, (*NAMES, *FOLDED)]
"""The same where the list may have hundreds of rows."""


def _common(drawings: tuple[str, ...]) -> dict[str, inspect.Parameter]:
    """The common options, each a text or None, by the fields of `Given`; ``output`` knows the ``drawings`` as well."""

    def option(name: str, metavar: str, text: str, *short: str) -> tuple[str, inspect.Parameter]:
        info = typer.Option(f"--{name.replace('_', '-')}", *short, metavar=metavar, help=text)
        kind = Annotated[str | None, info]
        return name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)

    forms = "|".join((*OUTPUT_FORMATS, *drawings))
    colors = "|".join(COLOR_MODES)
    return dict(
        (
            option("output", forms, "Form of the answer on stdout. [KVCTL_OUTPUT]", "-o"),
            option("color", colors, "Colour; auto: on a terminal only. [KVCTL_COLOR, NO_COLOR]"),
            option("timeout", "SECONDS", "How long to wait for an answer. [KVCTL_TIMEOUT; 5s]"),
            option("runtime_dir", "DIR", "Directory of kvd's sockets. [KVCTL_RUNTIME_DIR]"),
            option("socket", "ADDRESS", "kvd's socket itself: a path or ipc://... [KVCTL_SOCKET]"),
            option("host", "HOST[:PORT]", "Ask the kvd of that host. [KVCTL_HOST]"),
            option("context", "NAME", "Hosts and keys of that context. [KVCTL_CONTEXT; kvctl context]"),
            option("config", "FILE", "Defaults in YAML. [KVCTL_CONFIG; ~/.config/kvctl/config.yaml]"),
        )
    )


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as typer sees it: its ``settings`` parameter unfolded into the common options.

    A function without a ``settings`` parameter is returned as it is.
    """
    drawings = _drawings(function)

    def settle(context: typer.Context, given: Given) -> Settings:
        before = context.obj if isinstance(context.obj, tuple) else ()
        context.obj = (given, *before)  # for the commands below, where this is a group
        return resolve(context.obj, os.environ, drawings)

    return _unfolded(function, "settings", settle, drawings)


def with_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the function that takes the options before the command: its ``given`` is one level of settings."""
    return _unfolded(function, "given", lambda _, given: given)


def _drawings(function: Callable[..., Any]) -> tuple[str, ...]:
    """The drawings that a command can answer with, from the annotation of its ``settings``."""
    own = inspect.signature(function, eval_str=True).parameters.get("settings")
    return getattr(own.annotation, "__metadata__", ((),))[0] if own else ()


def _unfolded(
    function: Callable[..., Any],
    folded: str,
    fold: Callable[[typer.Context, Given], object],
    drawings: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """``function`` with the common options in place of its parameter ``folded``, which ``fold`` makes of them."""
    own = inspect.signature(function, eval_str=True).parameters
    if folded not in own:
        return function

    shared = _common(drawings)

    @functools.wraps(function)
    def command(called_in: typer.Context, **values: Any) -> None:
        given = Given(**{name: values.pop(name) for name in shared})
        if "context" in own:
            values["context"] = called_in
        function(**{folded: fold(called_in, given)}, **values)

    # Not called context, which is an option.
    context = inspect.Parameter("called_in", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.values() if p.name not in (folded, "context")]
    parameters = [context, *kept, *shared.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
