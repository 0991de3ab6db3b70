"""The options that every command has, and how a command function gets them as one `Settings`.

They may stand before or after the command's name: ``kvctl -o json engines`` and ``kvctl engines -o json`` are the same.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer

from kvctl.cli import parsing
from kvctl.cli.settings import COLOR_MODES, DRAWINGS, OUTPUT_FORMATS, Given, Settings, resolve

Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        "-w",
        metavar="SECONDS",
        parser=parsing.seconds,
        help="Ask again every so many seconds until Ctrl-C.",
    ),
]


DrawnSettings = Annotated[Settings, DRAWINGS]
"""The settings of a command whose answer can also be had as a drawing."""


def common(
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="|".join(OUTPUT_FORMATS),
            help="Form of the answer on stdout. [KVCTL_OUTPUT]",
        ),
    ] = None,
    color: Annotated[
        str | None,
        typer.Option(
            "--color",
            metavar="|".join(COLOR_MODES),
            help="Colour; auto: on a terminal only. [KVCTL_COLOR, NO_COLOR]",
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="SECONDS", help="How long to wait for an answer. [KVCTL_TIMEOUT; 5s]"
        ),
    ] = None,
    runtime_dir: Annotated[
        str | None,
        typer.Option("--runtime-dir", metavar="DIR", help="Directory of kvd's sockets. [KVCTL_RUNTIME_DIR]"),
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(
            "--socket", metavar="ADDRESS", help="kvd's socket itself: a path or ipc://... [KVCTL_SOCKET]"
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="FILE", help="Defaults in YAML. [KVCTL_CONFIG; ~/.config/kvctl/config.yaml]"
        ),
    ] = None,
) -> Given:
    """The common options as one level of settings."""
    return Given(
        output=output, color=color, timeout=timeout, runtime_dir=runtime_dir, socket=socket, config=config
    )


COMMON = inspect.signature(common, eval_str=True).parameters


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as typer sees it: its ``settings`` parameter unfolded into the common options.

    A function without a ``settings`` parameter is returned as it is.
    """
    drawings = _drawings(function)

    def settle(context: typer.Context, given: Given) -> Settings:
        before = context.obj if isinstance(context.obj, Given) else Given()
        return resolve((given, before), os.environ, drawings)

    return _unfolded(function, "settings", settle, drawings)


def with_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the function that takes the options before the command: its ``given`` is one level of settings."""
    return _unfolded(function, "given", lambda _, given: given)


def _drawings(function: Callable[..., Any]) -> tuple[str, ...]:
    """The drawings that a command can answer with, from the annotation of its ``settings``."""
    own = inspect.signature(function, eval_str=True).parameters.get("settings")
    return getattr(own.annotation, "__metadata__", ((),))[0] if own else ()


def _output(drawings: tuple[str, ...]) -> inspect.Parameter:
    """The parameter ``output``, with the drawings among its values."""
    kind, option = get_args(COMMON["output"].annotation)
    option = copy.copy(option)
    option.metavar = "|".join((*OUTPUT_FORMATS, *drawings))
    return COMMON["output"].replace(annotation=Annotated[kind, option])


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

    @functools.wraps(function)
    def command(context: typer.Context, **values: Any) -> None:
        given = common(**{name: values.pop(name) for name in COMMON})
        if "context" in own:
            values["context"] = context
        function(**{folded: fold(context, given)}, **values)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.values() if p.name not in (folded, "context")]
    shared = {**COMMON, "output": _output(drawings)}
    parameters = [context, *kept, *shared.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
