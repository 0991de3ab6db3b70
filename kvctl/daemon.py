"""Everything that kvctl says to a kvd, of this host or another: connecting, asking, and what its failures mean here."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from kvctl.cli.settings import Settings
from kvctl.errors import (
    CheckFailed,
    DaemonUnreachable,
    KvctlError,
    NotPermitted,
    PeerTimeout,
    RefusedError,
    UsageError,
)
from kvd.client import errors as client
from kvd.client.operator import Operator, connect
from kvd.wire import query
from kvd.wire.frame import Message, kind_of
from kvd.wire.limits import MOST_ROWS
from kvd.wire.names import SOCKET_NAME, runtime_dir
from kvd.wire.outcomes import GetOutcomes, OutcomeRow, Outcomes

if TYPE_CHECKING:
    from kvctl.fleet.asking import FleetAnswers
    from kvctl.fleet.known import KnownHosts
    from kvd.client.remote import RemoteKvd, RemoteOperator

T = TypeVar("T")
Answer = TypeVar("Answer", bound=Message)
OnePage = TypeVar("OnePage", query.EngineList, query.WorkerList, query.LeaseList, Outcomes)
PagedQuestion: TypeAlias = query.ListEngines | query.ListWorkers | query.ListLeases | GetOutcomes
MOST_PAGES = 4096
"""Of one listing: twice what `MOST_LISTED` rows take in pages of 64."""
MOST_LISTED = MOST_ROWS
"""Rows of one listing, over all its pages."""
MOST_LISTED_RANKS = 1 << 20
"""Ranks of the engines of one listing: 16,384 engines of 64 workers."""


def directory(settings: Settings) -> Path:
    """The runtime directory of this host's kvd. Raises `UsageError` for an address that is not its local socket."""
    if settings.socket is None:
        return runtime_dir(settings.runtime_dir)
    path = Path(settings.socket.removeprefix("ipc://"))
    if "://" in str(settings.socket).removeprefix("ipc://") or (
        path.name != SOCKET_NAME and not path.is_dir()
    ):
        raise UsageError(
            f"--socket: {settings.socket!r} is not the path of a {SOCKET_NAME}",
            "kvctl talks to the kvd of its own host: give /run/kvd/kvd.sock or the like",
        )
    return path if path.is_dir() else path.parent


@contextmanager
def connected(settings: Settings) -> Iterator[Operator | RemoteOperator]:
    """A connection to the kvd, of this host or of --host; what goes wrong in the block comes out as a `KvctlError`."""
    if settings.host is None and settings.remote is None:
        if settings.context_typed:
            raise UsageError(
                f"--context {settings.context} names hosts, and neither --host nor --fleet asks one",
                "--fleet asks all of them, --host HOST one; without --context it is this host's kvd",
            )
        with connected_here(settings) as operator:
            yield operator
        return
    from kvd.client.remote import RemoteOperator

    kvd = settings.remote or known_hosts(settings).of(str(settings.host))
    # One deadline for all that is asked: a host with ever further pages would be given the timeout for each.
    deadline = settings.deadline or time.monotonic() + settings.timeout
    try:
        with RemoteOperator(kvd, settings.timeout, deadline) as afar:
            yield afar
    except client.ClientError as error:
        raise _translated_afar(error, kvd) from error


@contextmanager
def connected_here(settings: Settings) -> Iterator[Operator]:
    """The same to the kvd of this host alone, which also has events. Raises `UsageError` for --host."""
    refuse_afar(settings)
    place = directory(settings)
    try:
        with connect(place, settings.timeout) as operator:
            yield operator
    except client.ClientError as error:
        raise _translated(error, place) from error


def where(settings: Settings) -> str:
    """The kvd that is asked, as somebody would name it."""
    return settings.host if settings.host is not None else str(directory(settings))


def refuse_afar(settings: Settings) -> None:
    """Raise `UsageError` where --host names another host: what is to be done here is done on its own host alone."""
    if settings.host is not None:
        raise UsageError(
            f"--host {settings.host}: this command is about its own host alone",
            "leave --host and KVCTL_HOST out, or type it on that host",
        )


def known_hosts(settings: Settings) -> KnownHosts:
    """The hosts of the context in use, else those that this host's kvd knows. Raises `KvctlError`."""
    from kvctl.fleet import contexts, known

    if name := settings.context or contexts.in_use():
        return known.of_context(name, contexts.named(name))
    try:
        with connected_here(replace(settings, host=None)) as operator:
            return known.of_kvd(put(operator, query.GetStatus(), query.KvdStatus))
    except DaemonUnreachable as error:
        if error.code != client.Unreachable.code:
            raise
        raise DaemonUnreachable(
            f"{error.message}, and no context is in use: other hosts and their keys are known from one of the two",
            "start kvd here, or write a context: kvctl context --help",
            error.code,
        ) from error


def fleet(settings: Settings, fetch: Callable[[Settings], T]) -> FleetAnswers[T]:
    """What ``fetch`` gives for each known host, asked side by side by one deadline. Raises `KvctlError`.

    This host's kvd is asked over its own socket where no context is in use.
    """
    from kvctl.fleet.asking import running_seconds, seconds_for_hosts, side_by_side
    from kvd.addresses import join_address

    if settings.host is not None:
        raise UsageError("--fleet asks all hosts, and --host one", "leave one of them out")
    seconds = settings.timeout if settings.timeout_given else seconds_for_hosts(running_seconds())
    deadline = time.monotonic() + seconds
    hosts = known_hosts(replace(settings, timeout=seconds))
    common = replace(settings, timeout=seconds, deadline=deadline)
    asked: dict[str, Callable[[], T]] = {}
    if hosts.own is not None:
        asked[join_address(*hosts.own)] = partial(fetch, common)
    for place in hosts.places:
        asked[join_address(*place)] = partial(_fetch_from, hosts, place, common, fetch)
    if not asked:
        raise UsageError(f"{hosts.source} knows no host", "kvctl context --help says how to name some")
    return side_by_side(asked, deadline)


def _fetch_from(
    hosts: KnownHosts, place: tuple[str, int], settings: Settings, fetch: Callable[[Settings], T]
) -> T:
    return fetch(replace(settings, remote=hosts.at(place)))


def ask(settings: Settings, message: Message, answer: type[Answer]) -> Answer:
    """One question on a connection of its own. Raises `KvctlError`."""
    with connected(settings) as operator:
        return put(operator, message, answer)


def engines(settings: Settings, *, cards: bool = False) -> tuple[query.EngineRow, ...]:
    """All engines that kvd knows. Raises `KvctlError`."""
    listed = pages(settings, query.ListEngines(cards=cards), query.EngineList)
    return tuple(row for page in listed for row in page.rows)


def workers(settings: Settings) -> tuple[query.WorkerRow, ...]:
    """All workers and schedulers. Raises `KvctlError`."""
    listed = pages(settings, query.ListWorkers(), query.WorkerList)
    return tuple(row for page in listed for row in page.rows)


def outcomes(settings: Settings, asked: GetOutcomes) -> tuple[OutcomeRow, ...]:
    """How requests were served, at all engines. Raises `KvctlError`."""
    return tuple(row for page in pages(settings, asked, Outcomes) for row in page.rows)


def pages(settings: Settings, question: PagedQuestion, answer: type[OnePage]) -> Iterator[OnePage]:
    """All pages of the answer to a question, on one connection. Raises `KvctlError`, also beyond a limit."""
    asked_after = {question.after}
    rows = ranks = 0
    with connected(settings) as operator:
        while True:
            page = put(operator, question, answer)
            rows += len(page.rows)
            if isinstance(page, query.EngineList):
                ranks += sum(len(row.ranks) for row in page.rows)
            _check_listed(operator, len(asked_after), rows, ranks)
            yield page
            if not page.more:
                return
            if page.more in asked_after:
                raise client.ProtocolError(
                    f"{who(operator)} lists the same rows again: page {len(asked_after)} leads back to one before",
                    hint="look at that host: its kvd is broken, or is none",
                )
            asked_after.add(page.more)
            question = msgspec.structs.replace(question, after=page.more)


def _check_listed(operator: Operator | RemoteOperator, pages: int, rows: int, ranks: int) -> None:
    limits = ((pages, MOST_PAGES, "pages"), (rows, MOST_LISTED, "rows"), (ranks, MOST_LISTED_RANKS, "ranks"))
    for found, most, what in limits:
        if found > most:
            raise client.AnswerTooLarge(
                f"{who(operator)} listed {found:,} {what}, and would go on; at most {most:,} are taken",
                hint="look at that host: a kvd that is well lists less",
            )


def who(operator: Operator | RemoteOperator) -> str:
    """Who answers, as a message names it."""
    return "kvd" if isinstance(operator, Operator) else f"the kvd at {operator.kvd.place}"


def hidden(count: int, what: str) -> str:
    """What is said of what kvd does not show to this user: ``count`` of something, ``what`` of it."""
    who = "root, the user of kvd and members of its orders.group see all"
    return f"{count} {what}: kvd's setting access.read is own; {who}"


def put(operator: Operator | RemoteOperator, message: Message, answer: type[Answer]) -> Answer:
    """One question on an open connection. Raises `kvd.client.errors.ClientError`, also when the answer is another."""
    got = operator.ask(message)
    if not isinstance(got, answer):
        raise client.ProtocolError(
            f"{who(operator)} answered with {kind_of(got)} where {answer.__struct_config__.tag} was expected",
            hint="kvctl and kvd should be of one version",
        )
    return got


_MEANINGS: dict[str, type[KvctlError]] = {
    "KVD-NOT-PERMITTED": NotPermitted,
    "KVD-FORCE-UNKNOWN": CheckFailed,
    "KVD-FORCE-LATE": CheckFailed,
    "KVD-EVICT-UNKNOWN": CheckFailed,
    "KVD-LEASE-UNKNOWN": CheckFailed,
    "KVD-ORDER-UNKNOWN": CheckFailed,
    "KVD-FORCE-PART": UsageError,
    "KVD-BAD-ORDER": UsageError,
    # kvd would answer and cannot: nothing was refused for safety or policy.
    "KVD-LEDGER": CheckFailed,
    "KVD-INTERNAL": CheckFailed,
}
"""Refusals that are something else to an operator."""


_HINTS = {
    "KVD-NOT-TAKEN": "simulated engines take no orders: try it on vLLM's, or with kvctl demo without --simulate"
}
"""What to do about refusals that say nothing of it themselves."""


def _refused(error: client.ClientError) -> KvctlError | None:
    """What a refusal of kvd's means here; None of what is none, or of a message that it cannot read."""
    if not isinstance(error, client.RefusedByDaemon) or error.code.startswith("KVD-WIRE"):
        return None
    if error.code in _MEANINGS:
        return _MEANINGS[error.code](error.message, error.hint, error.code)
    return RefusedError(error.message, error.hint or _HINTS.get(error.code, ""), error.code)


def _translated_afar(error: client.ClientError, kvd: RemoteKvd) -> KvctlError:
    if error.code == "KVD-NOT-HERE":
        return RefusedError(
            f"the kvd at {kvd.place} is not asked that from another host", "type it on that host", error.code
        )
    if isinstance(error, client.KeyNotTrusted):
        return NotPermitted(error.message, error.hint, error.code)
    return _refused(error) or PeerTimeout(error.message, error.hint, error.code)


def _translated(error: client.ClientError, place: Path) -> KvctlError:
    if refused := _refused(error):
        return refused
    if isinstance(error, client.SocketNotPermitted):
        return NotPermitted(error.message, _who_may(place), error.code)
    return DaemonUnreachable(error.message, error.hint, error.code)


def _who_may(place: Path) -> str:
    """Who may use the socket: taken from the outermost part of its path that shuts this user out."""
    socket = place / SOCKET_NAME
    if os.access(socket, os.W_OK):  # so it is the other one that is closed
        return "kvd's setting access.read is own: events are for root and the user of kvd, become one of them"
    needed = dict.fromkeys(reversed(socket.parents), os.X_OK) | {socket: os.W_OK}
    shut = next((path for path, access in needed.items() if not os.access(path, access)), socket)
    try:
        status = shut.stat()
    except OSError:
        return f"{shut} cannot even be looked at: become root"
    mode = stat.S_IMODE(status.st_mode)
    may = f"user {_name(shut.owner, status.st_uid)}"
    if mode & 0o070:
        may += f" and group {_name(shut.group, status.st_gid)}"
    return f"{shut} is open to {may} (mode {mode:04o}): become one of them, or root"


def _name(look_up: Callable[[], str], number: int) -> str:
    try:
        return look_up()
    except KeyError:
        return str(number)
