"""`kvctl version`."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated

import typer

from kvctl.cli.settings import Settings
from kvd.installed import own_version

if TYPE_CHECKING:
    from kvctl.views.version import AnsweringKvd

SECTION = "About kvctl"
EXAMPLES = (
    "kvctl version",
    "kvctl version --client -o json",
)


def version(
    settings: Settings, *, client: Annotated[bool, typer.Option("--client", help="Do not ask kvd.")] = False
) -> None:
    """The versions of kvctl, of the wire and of kvd.

    A kvd that does not answer is no error here.
    """
    from kvctl.views.output import show
    from kvctl.views.version import Version
    from kvd.wire.frame import WIRE_VERSION

    body = Version(
        kvctl=own_version(),
        python=platform.python_version(),
        wire_version=WIRE_VERSION,
        daemon=None if client else _daemon(settings),
    )
    show(body, settings)


def _daemon(settings: Settings) -> AnsweringKvd | None:
    from kvctl import daemon
    from kvctl.errors import DaemonUnreachable, NotPermitted, PeerTimeout
    from kvctl.views import version as documents
    from kvd.wire import query

    try:
        status = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
    except (DaemonUnreachable, NotPermitted, PeerTimeout):
        return None
    return documents.AnsweringKvd(
        version=status.version, kvd_id=status.kvd_id, address=daemon.where(settings)
    )
