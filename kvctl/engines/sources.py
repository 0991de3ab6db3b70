"""Where a geometry comes from: an engine of the running kvd, a model with options, or a file; all named by one text.

``decode-0`` is an engine, ``qwen3-32b:tp=4`` a preset, ``models/x/config.json:tp=4`` a model's configuration and
``decode.yaml`` a geometry file. What ends like a file, or is a folder, is one; then come presets; the rest are engines.
``nixl://HOST:PORT`` is the engine behind a stock connector (`kvctl.engines.stock`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvctl.cli.parsing import meant, near_misses
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.engines.models import (
    SUFFIXES,
    config_shape,
    preset_named,
    preset_names,
    preset_shape,
    read_document,
)
from kvctl.engines.options import EngineOptions, parse_engine_options
from kvctl.engines.stock import StockAddress, stock_address, stock_engine
from kvctl.errors import CheckFailed, DaemonUnreachable, KvctlError, PeerTimeout, UsageError
from kvd.geometry.config import engine_from_shape
from kvd.geometry.errors import GeometryError, UnevenShard
from kvd.geometry.families import ModelShape
from kvd.geometry.model import EngineGeometry

if TYPE_CHECKING:
    from kvd.wire.query import EngineRow


@dataclass(frozen=True)
class EngineId:
    """An engine that the running kvd is asked for."""

    name: str


EngineSource = EngineGeometry | EngineId | StockAddress
_BLOCK_SIZE = re.compile(r":.*\bblock[-_]size=(\d+)")


def load(texts: Sequence[str], settings: Settings) -> tuple[EngineGeometry, ...]:
    """The geometry of each source; kvd is asked once, and only if an engine is among them.

    Raises `UsageError` for what is no source at all, `CheckFailed` for one that cannot be described, and what asking
    kvd raises.
    """
    sources = [source(text) for text in texts]
    named = [found.name for found in sources if isinstance(found, EngineId)]
    rows = _ask(named, settings) if named else ()
    engines = []
    for found in sources:
        if isinstance(found, EngineId):
            engines.append(_geometry(rows, found))
        elif isinstance(found, StockAddress):
            engines.append(stock_engine(found, settings.timeout))
        else:
            tell_block_size(found)
            engines.append(found)
    return tuple(engines)


def load_pair(texts: Sequence[str], settings: Settings) -> tuple[EngineGeometry, EngineGeometry]:
    """The two of a pair: the reading engine and the one it reads from. Raises as `load`."""
    here, there = load(texts, settings)
    return here, there


def source(text: str) -> EngineSource:
    """What ``text`` names; nobody is asked. Raises `UsageError` and `CheckFailed`, see `load`."""
    if stock := stock_address(text):
        return stock
    head, colon, tail = text.rpartition(":")
    name, typed = (head, tail) if colon and "=" in tail else (text, "")
    if not typed and not _is_path(name) and preset_named(name) is None:
        return EngineId(name)
    return planned(name, typed)


def planned(name: str, options: str) -> EngineGeometry:
    """The engine that serves the model ``name``, a preset or a path, with ``options`` as typed; or that of a file.

    Raises `UsageError` and `CheckFailed`, see `load`.
    """
    if not _is_path(name):
        return from_model(preset_shape(name), name, parse_engine_options(options))
    path = Path(name).expanduser()
    return _from_file(path / "config.json" if path.is_dir() else path, name, options)


def _is_path(name: str) -> bool:
    path = Path(name).expanduser()
    return path.suffix in SUFFIXES or path.is_dir()


def from_model(model: ModelShape, name: str, options: EngineOptions) -> EngineGeometry:
    """The engine that serves a model. Raises `CheckFailed` where it cannot be split so."""
    label = f"{name}:{options.text}" if options.text else name
    try:
        return engine_from_shape(model, options.parallel, options.cache, engine_id=label)
    except UnevenShard as error:
        raise CheckFailed(
            f"{label}: {error}", "TP_UNSUPPORTED: choose sizes of which one divides the other", error.code
        ) from None
    except GeometryError as error:
        raise CheckFailed(f"{label}: {error}", "see docs/topology.md for the options", error.code) from None


def tell_block_size(engine: EngineGeometry) -> None:
    """Say where the blocks of a model's engine are not of the size that was typed, which its id has."""
    typed = _BLOCK_SIZE.search(engine.engine_id)
    sizes = {g.block_size for w in engine.workers for g in w.groups if g.kind != "mamba"}
    if typed and sizes.isdisjoint({int(typed[1]), int(typed[1]) * engine.dcp}):
        say(
            f"{engine.engine_id}: blocks have {max(sizes)} tokens and not {typed[1]}: vLLM makes a page of attention as"
            " large as a state of this model"
        )


def ready_row(rows: Sequence[EngineRow], engine_id: str) -> EngineRow:
    """The engine of that id. Raises `UsageError` when kvd knows none, `PeerTimeout` when it is not complete."""
    row = known_row(rows, engine_id, "a file or a model needs its path, a preset its name")
    if row.card is None:
        raise PeerTimeout(
            f"engine {engine_id!r} is {row.state}, with {len(row.ranks)} of {row.engine.world_size} workers"
            + (f": {row.reason}" if row.reason else ""),
            f"see kvctl workers --engine {engine_id}",
        )
    return row


def tell_if_away(*rows: EngineRow) -> None:
    """Say which of these engines are described as they were, since they are there no more or do not answer."""
    for row in {row.engine.engine_id: row for row in rows}.values():
        if row.state not in ("ready", "partial"):
            why = f": {row.reason}" if row.reason else ""
            say(f"engine {row.engine.engine_id!r} is {row.state}, and is described as it was{why}")


def known_row(rows: Sequence[EngineRow], engine_id: str, else_: str = "") -> EngineRow:
    """The engine of that id. Raises `UsageError` when kvd knows none; ``else_``: what else may have been meant."""
    row = next((row for row in rows if row.engine.engine_id == engine_id), None)
    if row is None:
        known = [row.engine.engine_id for row in rows]
        raise UsageError(
            f"kvd knows no engine {engine_id!r}; {near_misses(engine_id, known) or 'it knows none at all'}",
            "; ".join(filter(None, ("kvctl engines lists them", else_))),
        )
    return row


def _from_file(path: Path, name: str, options: str) -> EngineGeometry:
    from kvctl.engines.geometry_file import engine_of, is_geometry

    plain = read_document(path)
    if not isinstance(plain, dict):
        raise UsageError(
            f"{path} holds a {type(plain).__name__}, neither a geometry nor a model's configuration"
        )
    if not is_geometry(plain):
        return from_model(config_shape(plain, path), name, parse_engine_options(options))
    if options:
        raise UsageError(f"{path} is a geometry file: its engine is what it is, without {options!r}")
    try:
        return engine_of(plain)
    except GeometryError as error:
        raise UsageError(f"{path}: {error}", "write it anew with kvctl export-geometry", error.code) from None


def _geometry(rows: Sequence[EngineRow], engine: EngineId) -> EngineGeometry:
    from kvctl.engines.cards import engine_geometry

    row = ready_row(rows, engine.name)
    tell_if_away(row)
    return engine_geometry(row)


def _ask(names: Sequence[str], settings: Settings) -> Sequence[EngineRow]:
    from kvctl import daemon

    try:
        return daemon.engines(settings, cards=True)
    except DaemonUnreachable as error:
        raise _meant(names, error) from error


def _meant(names: Sequence[str], error: KvctlError) -> KvctlError:
    """Without a kvd a name that is nearly a preset's was probably meant to be one."""
    for name in names:
        if guess := meant(name, preset_names()):
            return DaemonUnreachable(
                f"{name!r} is no preset ({guess}) and no file, and as for engines, {error.message}",
                error.hint,
                error.code,
            )
    return error
