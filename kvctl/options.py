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

from kvctl import parsing
from kvctl.settings import COLOR_MODES, OUTPUT_FORMATS, Given, resolve

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
    signature = inspect.signature(function, eval_str=True)
    if "settings" not in signature.parameters:
        return function
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "settings"]

    @functools.wraps(function)
    def command(context: typer.Context, **values: Any) -> None:
        nearest = common(**{name: values.pop(name) for name in COMMON})
        before = context.obj if isinstance(context.obj, Given) else Given()
        function(resolve((nearest, before), os.environ), **values)

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *own, *COMMON.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
