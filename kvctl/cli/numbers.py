"""Numbers for people: sizes, rates, spans of time. Programs get base units, see `kvctl.views`."""

from __future__ import annotations

from datetime import UTC, datetime

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """Bytes in binary units with three digits: ``512 B``, ``1.50 KiB``, ``24.0 GiB``."""
    unit = 0
    while count >= 1024 and unit < len(_SIZES) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{_three_digits(count)} {_SIZES[unit]}"


def rate(bytes_per_second: float | None) -> str:
    """A rate, or a dash where it is not known."""
    return "-" if bytes_per_second is None else f"{size(bytes_per_second)}/s"


def span(seconds: float) -> str:
    """A span of time: ``850 us``, ``12.0 ms``, ``3.20 s``, ``4m10s``, ``2h05m``, ``3d04h``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    if seconds < 3600:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    if seconds < 86400:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    return f"{int(seconds // 86400)}d{int(seconds % 86400 // 3600):02d}h"


def counted(count: int, what: str) -> str:
    """So many of something: ``1 transfer``, ``3 transfers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def now() -> datetime:
    """The moment that ages are counted from."""
    return datetime.now(UTC)


def age(moment: datetime) -> str:
    """How long ago a moment was, in whole seconds below a minute."""
    seconds = max(0.0, (now() - moment).total_seconds())
    return f"{seconds:.0f}s" if seconds < 60 else span(seconds)


def clock(moment: datetime) -> str:
    """A moment as local time of day, with the day where it is not today."""
    local = moment.astimezone()
    today = local.date() == now().astimezone().date()
    return local.strftime("%H:%M:%S" if today else "%m-%d %H:%M:%S")


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
