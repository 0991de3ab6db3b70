"""``tp=4,pp=2,block_size=64``: what an operator types to say how an engine serves a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from kvctl.cli.parsing import near_misses, parse_choice
from kvctl.errors import UsageError
from kvd.geometry.config import CACHE_TYPES, ITEM_SIZES, KNOWN_LAYOUTS, LAYOUTS, CacheOptions, Parallel
from kvd.geometry.live import Packing

ZERO_ALLOWED = frozenset({"speculative_tokens"})
"""Numbers that may be 0; all others count things that an engine has at least one of."""

_YES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and cache options of an engine that need not run; ``text`` is how they were typed."""

    text: str
    parallel: Parallel
    cache: CacheOptions


def option_names() -> tuple[str, ...]:
    """Every name that may stand before a ``=``."""
    return tuple(field.name for kind in (Parallel, CacheOptions) for field in fields(kind))


def parse_engine_options(text: str) -> EngineOptions:
    """The options in ``name=value,name=value``; what is not said is vLLM's default.

    Raises `UsageError` that names the wrong name or value, with near misses.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in option_names():
            raise UsageError(f"no engine option {name!r}; {near_misses(name, option_names())}")
        if not equals or not value.strip():
            raise UsageError(f"engine option {name} has no value; write {name}=...")
        if name in values:
            raise UsageError(f"engine option {name} is given twice, the second time as {value.strip()!r}")
        values[name] = _value(name, value.strip())
    own = {field.name for field in fields(Parallel)}
    return EngineOptions(
        text=text,
        parallel=Parallel(**{name: value for name, value in values.items() if name in own}),
        cache=CacheOptions(**{name: value for name, value in values.items() if name not in own}),
    )


def _value(name: str, text: str) -> Any:
    try:
        return _READERS[_kind(name)](name, text)
    except ValueError as error:
        raise UsageError(f"engine option {name}: {error}") from None


def _kind(name: str) -> str:
    """The type of an option without its ``| None``, as it stands in the dataclass."""
    kinds = {field.name: str(field.type) for kind in (Parallel, CacheOptions) for field in fields(kind)}
    return kinds[name].removesuffix(" | None")


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or (int(text) == 0 and name not in ZERO_ALLOWED):
        least = "" if name in ZERO_ALLOWED else " above zero"
        raise ValueError(f"{text!r} is not a whole number{least}")
    return int(text)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    return tuple(_number(name, part) for part in text.split("+"))


def _flag(name: str, text: str) -> bool:
    if text.lower() not in _YES:
        raise ValueError(f"{text!r} is neither true nor false; write {name}=true")
    return _YES[text.lower()]


def _word(name: str, text: str) -> str:
    return parse_choice(text.upper() if name == "layout" else text, _WORDS.get(name, tuple(ITEM_SIZES)))


_WORDS = {
    "layout": (*LAYOUTS, *KNOWN_LAYOUTS),
    "cache_dtype": ("auto", *ITEM_SIZES, *CACHE_TYPES),
    "packing": get_args(Packing),
}
"""What the options that are no types may be."""


_READERS: dict[str, Callable[[str, str], Any]] = {
    "int": _number,
    "tuple[int, ...]": _numbers,
    "bool": _flag,
    "str": _word,
    "Packing": _word,
}
