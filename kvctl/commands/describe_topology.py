"""`kvctl describe-topology`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvctl.cli.option_kinds import number
from kvctl.cli.options import DrawnSettings, FleetOption, WatchOption
from kvctl.cli.parsing import bandwidth
from kvctl.cli.talk import say
from kvctl.engines.pair_options import ModelOption, planned_pair
from kvctl.engines.pairs import described, suggested
from kvctl.engines.sources import EngineId, load_pair, ready_row, source, tell_if_away
from kvctl.errors import UsageError
from kvctl.views.output import show_repeatedly
from kvctl.views.topology.document import PairDocument, Topology, pair_document
from kvctl.views.topology.localities import worker_localities
from kvd.geometry.model import EngineGeometry

if TYPE_CHECKING:
    from kvctl.cli.settings import Settings
    from kvd.wire.query import EngineRow

SECTION = "Compare engines"
EXAMPLES = (
    "kvctl describe-topology decode-0 prefill-1",
    "kvctl describe-topology --model qwen3-32b --local tp=4 --remote tp=8",
    "kvctl describe-topology --fleet -o wide",
)


Pairs = list[tuple[EngineGeometry, EngineGeometry]]


def describe_topology(  # noqa: PLR0913 (options)
    settings: DrawnSettings,
    *,
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENGINE [FROM]]",
            help="One: only pairs that it is part of. Two: ENGINE reads from FROM, whatever their roles.",
        ),
    ] = None,
    model: ModelOption = None,
    local: Annotated[
        str | None,
        typer.Option(
            "--local",
            "--to",
            metavar="ENGINE",
            help="The reading engine; of --model its options: tp=4,block_size=64.",
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            "--remote",
            "--from",
            metavar="ENGINE",
            help="The engine read from; of --model its options.",
        ),
    ] = None,
    tokens: Annotated[int, number("--tokens", help="Tokens of the request. [8192]")] = 8192,
    link: Annotated[
        float | None,
        typer.Option(
            "--bandwidth", metavar="RATE", parser=bandwidth, help="Of each rank's link, say 50GB/s: how long?"
        ),
    ] = None,
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """Who reads which bytes of KV cache from whom.

    For every pair of engines that kvd knows: which rank reads from which, heads, bytes and separate copies a block,
    what one request costs, and what to know of it. A pair is a decoding engine and a prefilling one of the same model;
    two named ones are compared whatever they are. A name may also be a geometry file or a model with its options
    (qwen3-32b:tp=4,layout=HND). --model with --local and --remote is short for two of those and asks no kvd.
    nixl://HOST:5600 and mooncake://HOST:8998 ask stock connectors of vLLM, without any kvd. With -o wide also each
    single read and the factors that agree. With --fleet the pairs of all known hosts, engines that are alike told of
    once. Exit code 1 when a pair shown does not fit, 4 where some hosts did not answer.
    """
    named = engines or []
    if fleet:
        _show_fleet(settings, named, (model, local, remote), PairQuestion(tokens, link, watch))
        return
    if model is None and (local is not None or remote is not None):
        named, local, remote = _both_named(named, local, remote), None, None
    chosen = _chosen(settings, named, (model, local, remote))
    live = model is None and all(isinstance(source(name), EngineId) for name in named)
    if live:
        from kvctl import daemon

    def document(a: EngineGeometry, b: EngineGeometry) -> PairDocument:
        pair = described(a, b, tokens=tokens)
        if live:
            from kvctl.ledger.measured_paths import measured

            pair = replace(pair, findings=(*pair.findings, *measured(settings, a, b)))
        return pair_document(pair, link)

    def fetch() -> Topology:
        pairs = chosen()
        engine_ids = {engine.engine_id for pair in pairs for engine in pair} if live else set()
        return Topology(
            pairs=tuple(document(a, b) for a, b in pairs),
            workers=worker_localities(daemon.workers(settings), engine_ids) if engine_ids else (),
        )

    if not all(pair.compatible for pair in show_repeatedly(fetch, settings, watch).pairs):
        raise typer.Exit(1)


class PairQuestion(NamedTuple):
    """What is to be told of each pair, and how often."""

    tokens: int
    link: float | None
    watch: float | None


def _show_fleet(
    settings: Settings,
    named: list[str],
    options: tuple[str | None, str | None, str | None],
    wanted: PairQuestion,
) -> None:
    """Raises `UsageError` for what is no engine of a kvd, `HostsUnanswered`, and 1 as an exit code as on one host."""
    from kvctl import daemon
    from kvctl.engines.fleet_pairs import caches_of, fleet_pairs
    from kvctl.views.engines import endpoint_name
    from kvctl.views.fleet.topology import FleetTopology, fleet_pair
    from kvctl.views.fleet.unanswered import asked, show_fleet

    if any(options) or len(named) > 2 or not all(isinstance(source(name), EngineId) for name in named):
        raise UsageError(
            "--fleet is about engines that kvds know: at most two, by their ids",
            "leave --fleet out for models, files and addresses",
        )

    def fetch() -> FleetTopology:
        found = daemon.fleet(settings, lambda one: daemon.engines(one, cards=True))
        # An engine on several hosts is told of by its home alone.
        rows = {
            host: [
                row
                for row in listed
                if row.local and ((home := endpoint_name(row.endpoint)) == host or home not in found.answers)
            ]
            for host, listed in found.answers.items()
        }
        documents = []
        for pair in fleet_pairs(rows, named):
            described_pair = described(*caches_of(pair), tokens=wanted.tokens)
            documents.append(
                fleet_pair(pair_document(described_pair, wanted.link), *(kind.engines for kind in pair))
            )
        if not documents and not found.missing:
            say(
                f"no pair of engines to describe: {_why_none([row for listed in rows.values() for row in listed])}"
            )
        return FleetTopology(pairs=tuple(documents), **asked(found))

    if not all(pair.compatible for pair in show_fleet(fetch, settings, wanted.watch).pairs):
        raise typer.Exit(1)


def _both_named(engines: list[str], local: str | None, remote: str | None) -> list[str]:
    """The pair that --to and --from name, or --local and --remote. Raises `UsageError` for half of one."""
    if local is None or remote is None or engines:
        raise UsageError(
            "--from and --to name a pair together, and no engine beside them; where --local and --remote are"
            " options of a model, give --model as well"
        )
    return [local, remote]


def _chosen(
    settings: Settings, named: list[str], options: tuple[str | None, str | None, str | None]
) -> Callable[[], Pairs]:
    """How to get the pairs (reader, source) that were asked for. Raises `UsageError` for what does not go together."""
    pair = planned_pair(named, *options)
    if pair is not None:
        return lambda: [pair]
    if len(named) > 2:
        raise UsageError(f"a pair has two engines, and {named[2]!r} is a third")
    if len(named) == 2:
        return lambda: [load_pair(named, settings)]
    if named and not isinstance(source(named[0]), EngineId):
        raise UsageError(f"{named[0]!r} is no engine of kvd, so it takes a second one to read from")
    return lambda: _from_kvd(settings, named[0] if named else None)


def _from_kvd(settings: Settings, engine_id: str | None) -> Pairs:
    """The pairs that roles and models suggest, of all engines or of one; why there are none is told on stderr."""
    from kvctl import daemon
    from kvctl.engines.cards import engine_geometry

    rows = daemon.engines(settings, cards=True)
    pairs = list(suggested(rows, ready_row(rows, engine_id) if engine_id else None))
    if not pairs:
        say(f"no pair of engines to describe: {_why_none(rows)}")
    tell_if_away(*(row for pair in pairs for row in pair))
    return [(engine_geometry(a), engine_geometry(b)) for a, b in pairs]


def _why_none(rows: Sequence[EngineRow]) -> str:
    if not rows:
        return "kvd knows no engine; start one that registers with it, then see kvctl engines"
    ready = [row for row in rows if row.card is not None]
    seen = ", ".join(
        f"{row.engine.engine_id} ({row.engine.role}, {row.engine.model}, {row.state})" for row in rows
    )
    if len(ready) < len(rows):
        return f"of {seen} only {len(ready)} can be described; see kvctl engines -o wide"
    return f"{seen} are no decoder and prefiller of one model; name two to compare them all the same"
