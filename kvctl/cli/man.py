"""Man pages from the command line itself, which docs/cli.md quotes: one for kvctl, one for each command."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from kvctl.cli.discovery import Row
from kvctl.cli.loading import LazyGroup, load
from kvctl.errors import EXIT_CODES


def man_pages(group: LazyGroup, version: str) -> dict[str, str]:
    """All pages of section 1 by file name; imports every command."""
    return {f"{'-'.join(words)}.1": text for words, text in _pages(group, ("kvctl",), group.rows, version)}


def plain_page(name: str, section: int, summary: str, version: str, parts: Iterable[tuple[str, str]]) -> str:
    """A page of texts that are laid out already, each under its heading."""
    lines = [*_head(name, section, summary, version)]
    for heading, text in parts:
        lines += [f".SH {heading.upper()}", ".nf", *map(_plain, text.rstrip().split("\n")), ".fi"]
    return "\n".join(lines) + "\n"


def _pages(
    command: Any, words: tuple[str, ...], rows: tuple[Row, ...], version: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    yield words, _page(command, words, rows, version)
    for row in rows:
        yield from _pages(load(row), (*words, row.name), row.rows, version)


def _page(command: Any, words: tuple[str, ...], rows: tuple[Row, ...], version: str) -> str:
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    with command.make_context(" ".join(words), [], resilient_parsing=True) as context:
        usage = " ".join(command.collect_usage_pieces(context))
    lines = [*_head("-".join(words), 1, paragraphs[0].rstrip("."), version), ".SH SYNOPSIS"]
    lines += [f".B {_plain(' '.join(words))}", _choices(usage)]
    if paragraphs[1:]:
        lines.append(".SH DESCRIPTION")
        lines += [line for text in paragraphs[1:] for line in (".PP", _plain(" ".join(text.split())))]
    if rows:
        lines.append(".SH COMMANDS")
        lines += [line for row in rows for line in (".TP", f".B {_plain(row.name)}", _plain(row.summary))]
    lines.append(".SH OPTIONS")
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            lines += [".TP", _signature(parameter), _plain(parameter.help or "")]
    if examples := getattr(command, "examples", ()):
        lines += [".SH EXAMPLES", ".nf", *map(_plain, examples), ".fi"]
    lines.append(".SH EXIT STATUS")
    lines += [line for code, meaning in EXIT_CODES for line in (".TP", f".B {code}", _plain(meaning))]
    above = ["\\fBkvctl\\fR(1)"] * (len(words) > 1)
    below = [f"\\fB{_plain('-'.join((*words, row.name)))}\\fR(1)" for row in rows]
    lines += [".SH SEE ALSO", ",\n".join([*above, *below, "\\fBkvd\\fR(8)"])]
    return "\n".join(lines) + "\n"


def _head(name: str, section: int, summary: str, version: str) -> Iterator[str]:
    yield f'.TH "{_plain(name.upper())}" {section} "" "kvctl {version}"'
    yield ".ad l"  # else words are spread until both edges are straight
    yield ".SH NAME"
    yield f"{_plain(name)} \\- {_plain(summary)}"


def _signature(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"\\fI{_choices(parameter.metavar or parameter.name.upper())}\\fR"
    names = ", ".join(f"\\fB{_plain(name)}\\fR" for name in (*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} \\fI{_choices(parameter.metavar or 'TEXT')}\\fR"


def _choices(text: str) -> str:
    """The same of ``one|another|a third``, in which a line may end after each."""
    return _plain(text).replace("|", "|\\:")


def _plain(text: str) -> str:
    """Text as roff shows it as it is: no escapes, no requests, dashes that can be copied."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
