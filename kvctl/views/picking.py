"""Rows of a listing that somebody asks for by its columns: --filter COLUMN=VALUE and --sort COLUMN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from kvctl.cli.parsing import near_misses
from kvctl.errors import UsageError
from kvctl.views.screen import Column, cell_of, natural, plain

Item = TypeVar("Item")


class Wanted(NamedTuple):
    """A column, as `column_name` has it, and the pattern that its cells must match."""

    column: str
    pattern: str

    def __str__(self) -> str:
        return f"{self.column}={self.pattern}"


def column_name(column: Column[Any]) -> str:
    """What a column is called on the command line: ``held-by`` for HELD BY."""
    return column.header.lower().replace(" ", "-")


@dataclass(frozen=True)
class Picking:
    """Which rows of a listing are wanted, and in which order. ``words`` are orders with names of their own."""

    columns: Sequence[Column[Any]]
    wanted: tuple[Wanted, ...]
    sort: str | None
    words: Mapping[str, Callable[[Any], Any]]

    def __bool__(self) -> bool:
        """Whether rows must be had before it is known which are wanted."""
        return bool(self.wanted) or (self.sort is not None and self.sort not in self.words)

    def __str__(self) -> str:
        return " and ".join(map(str, self.wanted))

    def of(self, items: Iterable[Item]) -> tuple[Item, ...]:
        """The wanted ones of ``items``, in order."""
        filters = [(_column("--filter", one.column, self.columns), one.pattern) for one in self.wanted]
        found = [item for item in items if all(_matches(item, *one) for one in filters)]
        if self.sort is None:
            return tuple(found)
        if self.sort in self.words:
            return tuple(sorted(found, key=self.words[self.sort]))
        return _by(found, _column("--sort", self.sort, self.columns))


def picking(
    columns: Sequence[Column[Any]],
    filters: Iterable[str] | None,
    sort: str | None = None,
    words: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Picking:
    """What --filter and --sort ask for. Raises `UsageError` for what is no filter, and for unknown columns."""
    made = Picking(columns, tuple(map(_wanted, filters or ())), sort, words or {})
    for one in made.wanted:
        _column("--filter", one.column, columns)
    if sort is not None and sort not in made.words:
        _column("--sort", sort, columns, made.words)
    return made


def _wanted(text: str) -> Wanted:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(
            f"--filter: {text!r} is not COLUMN=VALUE", "write for instance 'state=ready' or 'engine=decode-*'"
        )
    return Wanted(_normal(name), value)


def _matches(item: Any, column: Column[Any], pattern: str) -> bool:
    return fnmatchcase(plain(cell_of(column.of(item))), pattern)


def _by(items: Sequence[Item], column: Column[Any]) -> tuple[Item, ...]:
    """The items by one column: text from A to Z, numbers with the greatest first; last what has nothing there."""

    def key(item: Item) -> Any:
        return natural(plain(cell_of(column.of(item)))) if column.by is None else column.by(item)

    known = sorted((item for item in items if key(item) is not None), key=key, reverse=column.right)
    return (*known, *(item for item in items if key(item) is None))


def _column(option: str, name: str, columns: Sequence[Column[Any]], words: Iterable[str] = ()) -> Column[Any]:
    known = {column_name(column): column for column in columns}
    found = known.get(_normal(name))
    if found is None:
        every = list(dict.fromkeys((*known, *words)))
        meant = near_misses(_normal(name), every)
        told = f"; {meant}" if meant.startswith("did you") else ""
        raise UsageError(f"{option}: there is no column {name!r}{told}", f"columns are {', '.join(every)}")
    return found


def _normal(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")
