"""One Mooncake engine: typed errors, registration, a mark that proves whose it is, a destruction that is checked."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvd.addresses import is_loopback
from kvd.backends.contract import Operation
from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.errors import BackendError, BackendUnavailable, RegistrationError
from kvd.backends.last_reference import check_destroyed
from kvd.backends.mooncake.library import LOG, NAME, MooncakeLibrary, engine_environment, told
from kvd.backends.mooncake.listener import end_wait
from kvd.backends.mooncake.mark import EngineMark
from kvd.backends.mooncake.options import NVLINK, MooncakeOptions
from kvd.backends.regions import joined
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

WAITING = 0
COMPLETED = 1

_KNOCK_S = 0.2
_POSTS: Mapping[Operation, str] = {
    "read": "batch_transfer_async_read",
    "write": "batch_transfer_async_write",
}
_COPIES: Mapping[Operation, str] = {
    "read": "batch_transfer_sync_read",
    "write": "batch_transfer_sync_write",
}
# Mooncake gives 0 where it took nothing, and -1 in the type of its numbers where it cannot reach the peer.
_NO_NUMBERS = frozenset({0, 2**64 - 1})


class MooncakeEngine:
    """Owns Mooncake's engine and is the only one to refer to it.

    ``session`` is what peers call it. ``mark`` is what a peer reads to know that it talks to this engine and not to a
    later one on the same port.
    """

    def __init__(
        self, library: MooncakeLibrary, options: MooncakeOptions, regions: Sequence[Region], mark: EngineMark
    ) -> None:
        """``options`` name the protocol, not auto."""
        self._gone: weakref.ref[Any] | None = None
        self.mark = mark
        self._device = cuda_driver.ordinal(regions)
        cuda_driver.enter(
            self._device
        )  # Mooncake copies with what it finds current in the thread, here and below
        self._engine: Any = library.engine()
        with engine_environment(options.protocol, options.progress_timeout_s):
            failed = self._engine.initialize(
                options.host, "P2PHANDSHAKE", told(options.protocol), options.device_name
            )
        if failed:
            self._engine = None
            raise BackendUnavailable(
                f"Mooncake's engine does not start on {options.host} with {options.protocol}: it answered {failed}",
                backend=NAME,
                hint=LOG,
            )
        self._port = int(self._engine.get_rpc_port())
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.session = f"{host}:{self._port}"
        try:
            if options.protocol == NVLINK:
                # A region's handle stands for its whole allocation; and a batch hides which of it was refused.
                self._register_each(dict.fromkeys(cuda_driver.allocation(r) for r in (*regions, mark.region)))
            else:
                self._register([*joined(regions), mark.region])
        except BackendError:
            self.destroy()
            raise

    def post(self, operation: Operation, session: str, local: int, remote: int, length: int) -> int | None:
        """Start to copy one piece; its number, or None where Mooncake did not take it.

        Returns at once, but for the first post to a session, which asks the peer for its memory: a peer that is stopped
        holds that up for a minute. The GIL is released.
        """
        cuda_driver.enter(self._device)
        number = int(getattr(self._engine, _POSTS[operation])(session, [local], [remote], [length]))
        return None if number in _NO_NUMBERS else number

    def copy(self, operation: Operation, session: str, rows: Descriptors) -> bool:
        """Copy all rows; returns when that is over, with whether they all were. The GIL is released."""
        cuda_driver.enter(self._device)
        columns = [rows.local, rows.remote, rows.length]
        copying = getattr(self._engine, f"{_COPIES[operation]}_arrays", None)  # since 0.3.14
        if copying is not None:
            failed = copying(session, *(np.ascontiguousarray(column, np.uint64) for column in columns))
        else:
            failed = getattr(self._engine, _COPIES[operation])(session, *(c.tolist() for c in columns))
        return not failed

    def status(self, number: int) -> int:
        """`WAITING`, `COMPLETED`, or below 0: failed. Looks once; ask no more once it is not `WAITING`."""
        return int(self._engine.transfer_check_status(number))

    def destroy(self) -> None:
        """Destroy Mooncake's engine: none of its bytes, in or out, moves any more. Call again to look again.

        What it has queued on a GPU is waited for.

        Raises:
            BackendError: something still refers to it, so it lives and its transfers may still write; or the device
                could not be waited for.
        """
        cuda_driver.enter(self._device)
        if self._gone is None:
            if self._engine is None:
                return
            end_wait(self._port)
            self._gone = weakref.ref(self._engine)
            self._engine = None
        hint = "keep no Mooncake object outside kvd.backends.mooncake.engine"
        check_destroyed(self._gone, f"engine {self.session}", backend=NAME, hint=hint)
        cuda_driver.settle(self._device)

    def _register(self, regions: Sequence[Region]) -> None:
        addresses, lengths = [r.address for r in regions], [r.length for r in regions]
        failed = self._engine.batch_register_memory(addresses, lengths)
        if not failed:
            return
        self._register_each(regions)  # to name the one that Mooncake does not take
        raise RegistrationError(f"{len(regions)} regions: Mooncake answered {failed}", backend=NAME, hint=LOG)

    def _register_each(self, regions: Iterable[Region]) -> None:
        for region in regions:
            refused = self._engine.register_memory(region.address, region.length)
            if refused:
                raise RegistrationError(
                    f"region at {region.address:#x}, {region.length} bytes, device {region.device}: Mooncake answered "
                    f"{refused}",
                    backend=NAME,
                    hint=f"see `kvctl doctor` on memlock limits and peer memory; {LOG}",
                )


def knock(session: str, otherwise: str) -> str:
    """What became of a session, from whether its port still takes connections; waits 0.2 s at most.

    ``otherwise`` is what may be wrong where it does.
    """
    host, _, port = session.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
    except ConnectionRefusedError:
        why = "the peer's process ended or closed its memory"
        elsewhere = ", or it is on another host and needs VLLM_HOST_IP or the option host"
        return f"nothing listens at {session} any more: {why}{elsewhere if is_loopback(host.strip('[]')) else ''}"
    except (OSError, ValueError) as error:
        return f"{session} cannot be reached: {error}"
    return f"{session} still takes connections: {otherwise}"
