"""One small deployment on this machine: two "hosts", each with its own kvd and one engine, a prefiller and a decoder.

The hosts are separate runtime directories; their kvds speak to each other over loopback TCP, as they would between
machines. What a router does (docs/routers.md) is `Deployment.ask`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvctl.cli.units import Mode
from kvctl.demo.engine import EngineAnswer, EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd
from kvctl.processes.interruption import held, unwinding

PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router sends along with the prompt to the prefiller; in mode push there is more."""

Start = Callable[[EngineSpec], EngineProcess]


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """One prompt's way through both engines.

    ``handed_over`` is what the decoder's ledger calls it (``remote_request_id``); empty where nothing was handed over.
    """

    prefilled: EngineAnswer
    decoded: EngineAnswer
    handed_over: str


@dataclass(slots=True)
class Deployment:
    """Everything that runs; made by `launch`."""

    prefill_host: Kvd
    decode_host: Kvd
    prefill: EngineProcess
    decode: EngineProcess
    mode: Mode = "pull"

    def ask(self, prompt: Sequence[int], max_tokens: int, timeout: float = 120.0) -> AskedRequest:
        """Prefill on one engine, decode on the other, as a router would do it in this mode."""
        way = {"pull": self._pull, "push": self._push}[self.mode]
        return way(prompt, max_tokens, timeout)

    def push_params(self, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What goes along with the prompt to the prefiller and to the decoder in mode push, in any order.

        Raises `ClientError` where the prefiller's kvd does not answer.
        """
        there = self.prefill_host.endpoint()
        both = {"transfer_mode": "push", "kvd_transfer_id": transfer_id}
        source = {"remote_engine_id": engine_id(self.prefill_host), "kvd_contract": 2}
        return (
            {**PREFILL_PARAMS, **both},
            {"do_remote_decode": False, "do_remote_prefill": True, **both, **source}
            | {"remote_host": there.host, "remote_port": there.port},
        )

    def _push(self, prompt: Sequence[int], max_tokens: int, timeout: float) -> AskedRequest:
        transfer_id = uuid.uuid4().hex
        there, here = self.push_params(transfer_id)
        prefilling = self.prefill.submit(prompt, 1, there)
        decoding = self.decode.submit(prompt, max_tokens, here)
        return AskedRequest(prefilling.result(timeout), decoding.result(timeout), transfer_id)

    def _pull(self, prompt: Sequence[int], max_tokens: int, timeout: float) -> AskedRequest:
        prefilled = self.prefill.submit(prompt, 1, PREFILL_PARAMS).result(timeout)
        params = prefilled.kv_transfer_params
        if params is not None:
            # vLLM adds it so that the decoder can tell users of the prefiller's own cache hits, in the place of what it
            # loaded itself; here the latter is what counts.
            params = {name: value for name, value in params.items() if name != "remote_prefill_cached_tokens"}
        decoded = self.decode.submit(prompt, max_tokens, params).result(timeout)
        return AskedRequest(prefilled, decoded, str((params or {}).get("remote_request_id", "")))


def transfer_config(
    kvd: Kvd, engine_id: str, role: str, *, policy: str = "recompute", extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The kv_transfer_config of vLLM for an engine beside ``kvd``."""
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.vllm",
        "kv_role": role,
        "engine_id": engine_id,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"runtime_dir": str(kvd.directory), **(extra or {})},
    }


@contextlib.contextmanager
def engines(begin: Start = EngineProcess.start) -> Iterator[Start]:
    """A function that begins to start an engine; all that it started are ended on the way out, at the same time.

    After an exception there is no point in waiting long for an orderly end.
    """
    started: list[EngineProcess] = []

    def start(spec: EngineSpec) -> EngineProcess:
        with held():
            started.append(begin(spec))
        return started[-1]

    def end(kind: type[BaseException] | None, *_: object) -> None:
        if started:
            with ThreadPoolExecutor(len(started)) as threads:
                for engine in started:
                    threads.submit(engine.stop, 20.0 if kind is None else 1.0)

    with unwinding() as stack:
        stack.push(end)
        yield start


def launch(
    start: Start,
    hosts: tuple[Kvd, Kvd],
    prefill: EngineSpec,
    decode: EngineSpec,
    *,
    mode: Mode = "pull",
    extra: Mapping[str, Any] | None = None,
) -> Deployment:
    """Begin to start an engine on each host; `EngineProcess.wait_ready` tells when they are.

    ``extra`` are further connector settings for both engines. Specs come without a kv_transfer_config.
    """
    begun = []
    extra = {"mode": mode, **(extra or {})}
    for host, spec, role in zip(hosts, (prefill, decode), ("kv_producer", "kv_consumer"), strict=True):
        config = transfer_config(host, engine_id(host), role, extra=extra)
        begun.append(start(dataclasses.replace(spec, kv_transfer_config=config)))
    return Deployment(*hosts, begun[0], begun[1], mode)


def engine_id(host: Kvd) -> str:
    """The id of the engine on a host."""
    return f"{host.name}-engine"
