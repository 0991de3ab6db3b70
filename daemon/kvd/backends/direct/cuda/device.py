"""The direct backend on one GPU: what it shares of the device, and its lanes. Needs torch and Triton, when used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.backends.cuda.driver import CudaError
from kvd.backends.cuda.ipc import Driver, driver
from kvd.backends.direct.card import CudaCard
from kvd.backends.direct.cuda.copies import CudaCopier, engine
from kvd.backends.direct.cuda.lane import CudaLane
from kvd.backends.direct.cuda.memory import ipc_namespace, mappings, share, unshare
from kvd.backends.direct.process import NAME, Process
from kvd.backends.errors import BackendError, RegistrationError
from kvd.backends.regions import parse_device
from kvd.geometry.model import Region


class CudaSide:
    """One device, with a worker's memory on it shared."""

    def __init__(self, device: Driver, card: CudaCard, ctas: int) -> None:
        self._device = device
        self._ctas = ctas
        self.card = card

    def lane(
        self, name: str, here: Process, regions: Sequence[Region], closed: Callable[[CudaLane], None]
    ) -> CudaLane:
        """A fresh lane, with a stream of its own."""
        ordinal = self._device.ordinal
        copier = CudaCopier(engine(ordinal), self._ctas)
        return CudaLane(name, here, regions, self._device, mappings(ordinal), copier, closed)

    def close(self) -> None:
        """Share no more. What readers have mapped stays theirs."""
        unshare(self.card.memory)


def open_device(name: str, regions: Sequence[Region], ctas: int) -> CudaSide:
    """The device ``name`` with ``regions`` of it shared, and its kernels compiled.

    Raises:
        RegistrationError: not a device of CUDA, no Triton, or memory that cannot be shared.
    """
    try:
        kind, ordinal = parse_device(name)
        if kind != "cuda":
            raise RegistrationError(f"memory of {name} cannot be registered: cpu and cuda only", backend=NAME)
        device = driver(ordinal)
    except (BackendError, CudaError, OSError) as error:
        raise RegistrationError(f"memory of {name} cannot be registered: {error}", backend=NAME) from None
    memory = share(device, regions)
    try:
        engine(ordinal)
    except Exception as error:  # whatever a compiler says
        unshare(memory)
        raise RegistrationError(
            f"the kernel for direct reads does not work on {name}: {type(error).__name__}: {error}",
            backend=NAME,
            hint="it needs torch with CUDA, and Triton with a C compiler",
        ) from error
    return CudaSide(device, CudaCard(device.uuid, ipc_namespace(), memory), ctas)
