"""The FleetWorkers document: what `kvctl workers --fleet` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvctl.cli.units import filled
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import HOST, FleetOf, unanswered_screen
from kvctl.views.registry import View, named
from kvctl.views.screen import ScreenPart
from kvctl.views.workers import Worker, worker_columns, worker_name


class FleetWorker(Worker, frozen=True, kw_only=True):
    """One process, as the kvd of its own host sees it."""

    host: Annotated[str, Meta(description="host:port at which its kvd was asked")]


class FleetWorkers(FleetOf, frozen=True, kw_only=True):
    """The workers and schedulers of all known hosts."""

    workers: tuple[FleetWorker, ...]


def fleet_worker(host: str, worker: Worker) -> FleetWorker:
    """A process with its host."""
    return filled(FleetWorker, worker, host=host)


def fleet_workers_screen(body: FleetWorkers, wide: bool) -> ScreenPart:
    """One process a line, with the columns in which they differ, all of them when wide."""
    name, *others = worker_columns(body.workers, wide)
    return [
        differing(body.workers, name, HOST, *others, whole=wide),
        *unanswered_screen(body.unanswered),
    ]


VIEWS = (View(FleetWorkers, fleet_workers_screen, "workers", FleetWorker, named("workers", worker_name)),)
