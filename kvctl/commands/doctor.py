"""`kvctl doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.options import FleetOption
from kvctl.cli.settings import Settings
from kvctl.doctor.whole import whole_checks
from kvctl.errors import UsageError
from kvctl.views.doctor import Check, doctor_document
from kvctl.views.output import show

SECTION = "Look"
EXAMPLES = (
    "kvctl doctor --peer 10.0.0.8:7766",
    "kvctl doctor --fleet",
    "kvctl doctor -o jsonl | jq -r 'select(.state == \"failed\") | .code'",
)


def doctor(
    settings: Settings,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Have no transfer engine move bytes, which takes seconds.")
    ] = False,
    from_: Annotated[
        str,
        typer.Option("--from", metavar="ADDRESS", help="Of a pair with stock connectors: nixl://HOST:5600."),
    ] = "",
    to: Annotated[str, typer.Option("--to", metavar="ADDRESS", help="The engine that reads from it.")] = "",
    peer: Annotated[
        str,
        typer.Option("--peer", metavar="HOST[:PORT]", help="This host and that one: links, keys, clocks."),
    ] = "",
    fleet: FleetOption = False,
) -> None:
    """What is wrong on this host, and what to do about it.

    Looks at kvd and the engines that it knows, at their requests and transfers of late, at the host, and has each
    transfer engine that is installed move some bytes between two processes. With --from and --to it looks at two
    engines behind stock connectors of vLLM instead, and needs no kvd. With --fleet it asks the kvds of all known hosts
    what they can tell: of themselves, their engines, requests and transfers. With --peer it looks at this host and
    another one: whether their kvds reach each other, keys, clocks, versions, backends, transports, and reads some bytes
    of an engine there. A warning is something worth doing. Exit code 1 where a check failed, transfers do not work
    then; 4 where some hosts did not answer.
    """
    if fleet:
        _show_fleet(settings, (quick, from_, to, peer))
        return
    if from_ or to:
        _show(list(_stock_pair(settings, from_, to)), settings)
        return
    daemon.refuse_afar(settings)
    if peer:
        from kvctl.doctor.peer_checks import peer_checks

        _show(list(peer_checks(settings, peer, probe=not quick)), settings)
        return
    _show(whole_checks(settings, quick=quick), settings)


def _show_fleet(settings: Settings, others: tuple[object, ...]) -> None:
    """Raises `UsageError` beside options of this host alone, `HostsUnanswered`, and 1 as an exit code."""
    from kvctl.doctor.fleet_checks import fleet_checks
    from kvctl.views.fleet.doctor import FleetDoctor, fleet_doctor_checks
    from kvctl.views.fleet.unanswered import asked, show_fleet

    if any(others):
        raise UsageError(
            "--fleet asks kvds, and --quick, --from, --to and --peer are about what is looked at from here",
            "leave --fleet out, or them",
        )

    def fetch() -> FleetDoctor:
        found, checks = fleet_checks(settings)
        return FleetDoctor(**fleet_doctor_checks(checks), **asked(found))

    if show_fleet(fetch, settings, None).failed:
        raise typer.Exit(1)


def _show(checks: list[Check], settings: Settings) -> None:
    document = doctor_document(checks)
    show(document, settings)
    if document.failed:
        raise typer.Exit(1)


def _stock_pair(settings: Settings, from_: str, to: str) -> Iterator[Check]:
    """Raises `UsageError` for half a pair."""
    from kvctl.doctor.stock_checks import stock_checks

    if not (from_ and to):
        missing = "--from" if to else "--to"
        raise UsageError(
            f"--from and --to name a pair together; {missing} is missing", f"give {missing} as well"
        )
    return stock_checks(from_, to, settings.timeout)
