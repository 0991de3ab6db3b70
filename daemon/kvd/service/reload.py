"""SIGHUP: settings are read again, and what may change at run time changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from kvd.service.config import RELOADABLE, Config
from kvd.service.daemon import Daemon
from kvd.service.errors import ConfigError
from kvd.service.log import FAULT_CODE
from kvd.service.notify import Notifier

log = logging.getLogger(__name__)

READ_SECONDS = 10.0
"""How long the settings may take to be read: their disk may hang."""


async def reloading(
    daemon: Daemon, told: asyncio.Event, read: Callable[[], Config], notifier: Notifier
) -> None:
    """Until cancelled: put new settings in force whenever ``told`` is set. Settings that cannot be read change nothing.

    The service manager waits for the end of each reload, so whatever happens it is told of one.
    """
    while True:
        await told.wait()
        told.clear()
        notifier.reloading()
        try:
            status = _taken(daemon, await _on_thread(read))
        except Exception as error:
            expected = isinstance(error, ConfigError)
            why = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            status = f"NOT reloaded: {why}"
            log.log(
                logging.ERROR,
                "%s; the old settings stay",
                status,
                exc_info=None if expected else error,
                extra={"code": getattr(error, "code", FAULT_CODE)},
            )
            daemon.counters["reloads.failed"] += 1
        notifier.ready(status)


def _taken(daemon: Daemon, new: Config) -> str:
    """Put them in force, as far as that goes without a restart; what to tell of it."""
    changed = {f for f in Config.__struct_fields__ if getattr(new, f) != getattr(daemon.config, f)}
    status = "settings reloaded"
    if fixed := changed - RELOADABLE:
        status = f"reloaded, but these need a restart: {', '.join(sorted(fixed))}"
    daemon.config = msgspec.structs.replace(daemon.config, **{f: getattr(new, f) for f in RELOADABLE})
    daemon.liveness.settings = new.liveness
    daemon.registry.settled = daemon.myself.started + new.liveness.settle_seconds
    daemon.leases.settings = new.leases
    daemon.ledger.settings = new.ledger
    logging.getLogger("kvd").setLevel(new.log_level.upper())
    daemon.counters["reloads.done"] += 1
    log.info("%s", status)
    return status


async def _on_thread(read: Callable[[], Config]) -> Config:
    """What ``read`` gives. Raises what it raises, and `ConfigError` where it takes too long."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Config] = loop.create_future()

    def tell(call: Callable[[], None]) -> None:
        if not answer.done():
            call()

    def work() -> None:
        try:
            config = read()
        except Exception as error:  # noqa: BLE001 (whatever it is, the loop says so)
            raised = error
            done = lambda: answer.set_exception(raised)  # noqa: E731
        else:
            done = lambda: answer.set_result(config)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # kvd has ended meanwhile
            loop.call_soon_threadsafe(tell, done)

    # Not an executor's: the end of kvd would wait for it.
    threading.Thread(target=work, name="kvd-settings", daemon=True).start()
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await answer
    except TimeoutError:
        raise ConfigError(
            f"the settings could not be read within {READ_SECONDS:g} s", hint="see their disk"
        ) from None
