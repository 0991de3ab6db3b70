"""What is wrong on all known hosts, as far as their kvds can tell: each is asked the same, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.doctor import kvd_checks, request_checks, transfer_checks
from kvctl.doctor.checks import checked
from kvctl.fleet.asking import FleetAnswers
from kvctl.views.doctor import Check
from kvd.addresses import split_address
from kvd.wire.identity import Endpoint
from kvd.wire.outcomes import GetOutcomes, OutcomeRow
from kvd.wire.query import EngineRow, GetStatus, KvdStatus, WorkerRow
from kvd.wire.transfer import ListTransfers, TransferList


@dataclass(frozen=True)
class KvdAnswers:
    """What one kvd answered."""

    status: KvdStatus
    engines: tuple[EngineRow, ...]
    workers: tuple[WorkerRow, ...]
    transfers: TransferList
    served: tuple[OutcomeRow, ...]


def fleet_checks(settings: Settings) -> tuple[FleetAnswers[KvdAnswers], dict[str, list[Check]]]:
    """The answers, and the checks by host. Raises `KvctlError` where it is not known whom to ask."""
    found = daemon.fleet(settings, _told)
    versions = Counter(one.status.version for one in found.answers.values())
    return found, {
        host: [*_checks(host, found.answers), *version_checks(one.status.version, versions)]
        for host, one in found.answers.items()
    }


def _told(settings: Settings) -> KvdAnswers:
    """Its own requests alone: a kvd that asked its peers would wait for the one that is silent."""
    status = daemon.ask(settings, GetStatus(), KvdStatus)
    return KvdAnswers(
        status=status if settings.remote is None else msgspec.structs.replace(status, pid=0),
        engines=tuple(row for row in daemon.engines(settings) if row.local),
        workers=daemon.workers(settings),
        transfers=daemon.ask(settings, ListTransfers(limit=transfer_checks.LOOKED_AT), TransferList),
        served=daemon.outcomes(settings, GetOutcomes(seconds=request_checks.LATELY_SECONDS)),
    )


def _checks(host: str, answers: Mapping[str, KvdAnswers]) -> list[Check]:
    one = answers[host]
    served = [*one.served]
    engines = [*one.engines]
    for name, other in answers.items():
        if name != host:
            served += [
                msgspec.structs.replace(row, endpoint=Endpoint(*split_address(name))) for row in other.served
            ]
            engines += other.engines
    return [
        *kvd_checks.checks_of(one.status, one.engines, one.workers),
        *transfer_checks.checks_of(one.transfers),
        *request_checks.checks_of(served, engines),
    ]


def version_checks(mine: str, versions: Counter[str]) -> list[Check]:
    """A check where a kvd is of another version than most, as where an upgrade left its host out."""
    most, count = versions.most_common(1)[0]
    if versions[mine] == count:
        return []
    return [
        checked(
            "kvd", "warning", "FLEET_VERSION", f"kvd is {mine}, and {count} of {versions.total()} are {most}",
            "upgrade it, then restart it: what two versions may do together stands in docs/versions.md",
        )
    ]  # fmt: skip
