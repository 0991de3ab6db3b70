"""Kinds of options that many commands have, so that each is declared in a line; ``more`` is as for `typer.Option`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.models import OptionInfo

from kvctl.cli.parsing import count, one_of, seconds, size, some_of

_option: Callable[..., OptionInfo] = typer.Option


def choice(name: str, known: Iterable[str], **more: Any) -> OptionInfo:
    """One of some words."""
    return _option(name, metavar="|".join(known), parser=one_of(*known), **more)


def choices(name: str, known: Iterable[str], **more: Any) -> OptionInfo:
    """Some words, with commas between them."""
    return _option(name, metavar=",".join(known), parser=some_of(*known), **more)


def number(*names: str, **more: Any) -> OptionInfo:
    """A whole number above zero."""
    return _option(*names, metavar="N", parser=count, **more)


def memory_size(*names: str, **more: Any) -> OptionInfo:
    """A number of bytes, such as 512MiB."""
    return _option(*names, metavar="SIZE", parser=size, **more)


def duration(*names: str, **more: Any) -> OptionInfo:
    """A span of time, in seconds where no unit is given."""
    return _option(*names, **{"metavar": "DURATION", "parser": seconds} | more)
