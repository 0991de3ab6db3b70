"""Turns what an operator typed into values: durations, rates, counts, choices; names wrong ones and near misses.

All of them are parsers for options. They raise `ValueError` that names the text; `kvctl.cli.loading` names the option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

_PREFIXES = {
    "": 1.0,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?) *(?:([KMGT]i?)?(B|bit|b)?(?:/s|ps)?)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]i?)?B?")
_DASHED_KEY = re.compile(r"-[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{39}")
_LONG_OPTION = re.compile(r"--[a-z-]+(=.*)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def near_misses(value: str, known: Iterable[str]) -> str:
    """What to say after a wrong ``value``: the near misses among ``known``, else all of them."""
    names = list(known)
    return meant(value, names) or (f"choose from {', '.join(names)}" if names else "")


def meant(value: str, known: Iterable[str]) -> str:
    """The near misses alone, empty where nothing is near: of names that are too many to list, or listed elsewhere."""
    names = {name.lower(): name for name in known}
    close = get_close_matches(value.lower(), names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(names[name] for name in close)}?" if close else ""


def number_or_zero(text: str) -> float:
    """A number; 0 for a text that is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def seconds(text: str) -> float:
    """A duration in seconds, above zero: ``5``, ``0.5``, ``500ms``, ``2m``, ``1d``."""
    number, factor = text, 1.0
    for unit, length in _UNITS.items():
        if text.endswith(unit):
            number, factor = text.removesuffix(unit), length
            break
    value = number_or_zero(number) * factor
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a duration above zero; write 5, 0.5, 500ms, 2m, 1h or 1d")
    return value


def typed_duration(seconds: float) -> str:
    """A duration as somebody would type it: ``1d``, ``90s``, ``250ms``."""
    whole = [name for name, length in _UNITS.items() if seconds >= length and seconds % length == 0]
    unit = whole[-1] if whole else "s" if seconds >= 1 else "ms"
    return f"{seconds / _UNITS[unit]:g}{unit}"


def bandwidth(text: str) -> float:
    """A bandwidth in bytes per second, above zero: ``50GB/s``, ``400Gbit/s``, ``12.5GiB/s``, ``1e9``."""
    found = _BANDWIDTH.fullmatch(text.strip())
    value = 0.0
    if found:
        number, prefix, unit = found.groups()
        value = float(number) * _PREFIXES[prefix or ""] * (0.125 if unit in ("b", "bit") else 1.0)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a bandwidth above zero; write 50GB/s, 400Gbit/s or 12.5GiB/s")
    return value


def size(text: str) -> int:
    """A number of bytes above zero: ``512MiB``, ``2G``, ``65536``."""
    found = _SIZE.fullmatch(text.strip())
    value = int(float(found.group(1)) * _PREFIXES[found.group(2) or ""]) if found else 0
    if value < 1:
        raise ValueError(f"{text!r} is not a number of bytes above zero; write 512MiB, 2GiB or 65536")
    return value


def parse_choice(text: str, known: tuple[str, ...]) -> str:
    """``text`` if it is one of ``known``; the error has the near misses."""
    if text in known:
        return text
    near = meant(text, known)
    raise ValueError(f"{text!r} is not one of {', '.join(known)}" + (f"; {near}" if near else ""))


def one_of(*known: str) -> Callable[[str], str]:
    """The parser of a choice."""
    return lambda text: parse_choice(text, known)


def some_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """The parser of choices with commas between them."""
    return lambda text: tuple(dict.fromkeys(parse_choice(part.strip(), known) for part in text.split(",")))


def share(text: str) -> float:
    """A part of something, above zero and at most 1."""
    value = number_or_zero(text)
    if not 0 < value <= 1:
        raise ValueError(f"{text!r} is no share; write a number above 0 and at most 1")
    return value


def count(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is not a whole number above zero")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers above zero with commas between them."""
    return tuple(dict.fromkeys(count(part.strip()) for part in text.split(",")))


def cuda_devices(text: str) -> tuple[int | None, int | None]:
    """One device, or two with a comma: numbers of CUDA devices, None for the host's memory."""
    found = [_device(part.strip()) for part in text.split(",")]
    if len(found) > 2:
        raise ValueError(f"{text!r} names {len(found)} devices; there are two sides")
    return found[0], found[-1]


def chosen_devices(given: object) -> tuple[int | None, int | None]:
    """What `cuda_devices` made of an option; typer takes no tuples as annotations. Not given: the host's memory."""
    return given if isinstance(given, tuple) else (None, None)


def _device(text: str) -> int | None:
    kind, _, number = text.partition(":")
    if text == "cpu":
        return None
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ValueError(f"{text!r} is no device; write cpu, cuda or cuda:1")
    return int(number or "0")


def watched(arguments: Iterable[str]) -> list[str]:
    """Arguments in which a bare ``-w`` or ``--watch``, before another option or at the end, is every two seconds."""
    given = list(arguments)
    options = given[: given.index("--")] if "--" in given else given
    bare = [
        at
        for at, one in enumerate(options)
        if one in ("-w", "--watch") and (at + 1 == len(given) or given[at + 1].startswith("-"))
    ]
    return ["--watch=2" if at in bare else one for at, one in enumerate(given)]


def keys_as_values(arguments: Iterable[str]) -> list[str]:
    """Arguments in which a public key that begins with ``-`` is no option: a blank before it, which keys do without.

    Only below ``kvctl keys``, where no option has the 40 characters of a key.
    """
    given = list(arguments)
    if "keys" not in given:
        return given
    return [
        f" {one}" if _DASHED_KEY.fullmatch(one) and not _LONG_OPTION.fullmatch(one) else one for one in given
    ]
