"""Real deployments for the end-to-end tests: two kvds, two vLLM engines, one tiny model."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from kvctl.cli.units import Mode
from kvctl.demo.deployment import Deployment, engine_id, engines, launch
from kvctl.demo.engine import EngineAnswer
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd, two_hosts
from kvd.wire.order import AllWaiting, ForceMiss, ForcePlan
from kvd.wire.query import EngineList, GetStatus, KvdStatus, ListEngines
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord
from tests.support import nursery
from tests.support.daemons import wait_for
from tests.support.engine_calls import engine_metrics
from tests.support.processor import FLOAT32_STATES
from tests.support.tiny_models import ARGUMENTS, MODELS, NO_PREFIX_CACHING, write_model


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A random prompt, the same for the same arguments."""
    rng = random.Random(f"{tokens}/{seed}")
    return [rng.randrange(10, 500) for _ in range(tokens)]


def transfers_of(deployment: Deployment, prefilled: EngineAnswer, ranks: int = 1) -> list[TransferRecord]:
    """What the decoder's ledger has on one pull, once all of its ``ranks`` workers have reported."""
    return handed_over(deployment, (prefilled.kv_transfer_params or {})["remote_request_id"], ranks)


def handed_over(deployment: Deployment, name: str, ranks: int = 1) -> list[TransferRecord]:
    """The same by name: the prefiller's request id of a pull, the transfer id of a push (`Asked.handed_over`)."""

    def look() -> list[TransferRecord] | None:
        found = [one for one in transfers(deployment.decode_host) if one.remote_request_id == name]
        return found if len(found) >= ranks else None

    try:
        return wait_for(look, 60.0)
    except AssertionError as error:
        # What was computed instead of loaded has no record; the engines say why.
        said = [
            line
            for engine in (deployment.prefill, deployment.decode)
            for line in engine.spec.log_path.read_text(errors="replace").splitlines()
            if "WARNING" in line or "ERROR" in line
        ]
        raise AssertionError(f"{name} has no {ranks} records: {error}\n" + "\n".join(said[-20:])) from None


def transfers(host: Kvd, limit: int = 100) -> list[TransferRecord]:
    """A ledger's newest transfers, newest first."""
    return [row.record for row in cast("TransferList", host.ask(ListTransfers(limit=limit))).rows]


def counter(host: Kvd, name: str) -> int:
    """One of a kvd's counters."""
    return cast("KvdStatus", host.ask(GetStatus())).counters.get(name, 0)


def leased(deployment: Deployment, count: int = 1) -> None:
    """Wait until the prefiller's kvd has so many leases: one that it has not heard of cannot be claimed."""

    def look() -> bool:
        rows = cast("EngineList", deployment.prefill_host.ask(ListEngines())).rows
        return sum(row.leases for row in rows if row.local) == count

    wait_for(look, 180.0)


HYBRID_BLOCK = 640 if FLOAT32_STATES else 384
"""Tokens of a block of the tiny Gated DeltaNet model, which follow from the size of its states. Where steps are no
multiple of it vLLM 0.32 answers by itself otherwise once a prompt is in its prefix cache."""

PATIENT = {"handshake_timeout": 200.0, "lease_seconds": 500.0, "load_timeout": 200.0}
"""Connector settings for machines that stand still for a minute or two; a test that is about one of them sets it."""


PATIENT_KVD = {"KVD_PEER_HANDSHAKE_SECONDS": "30"}
"""The same for kvds: one that gives a peer up after five seconds has the decoder compute the prompt itself."""


def found_out(folder: Path) -> Path:
    """vLLM's cache of what it found out about model classes: one for all modules of a run, beside their folders.

    Finding out takes a process that imports vLLM. Processes that share a run (pytest-xdist's) share what they find.
    """
    run = folder.parent
    return (run.parent if run.name.startswith("popen-gw") else run) / "vllm-cache"


def loading(deployment: Deployment) -> bool:
    """Whether a load is under way on the decoder."""
    order = ForceMiss(engine_id=engine_id(deployment.decode_host), target=AllWaiting())
    plan = cast("ForcePlan", deployment.decode_host.ask(order))
    return any(request.loading for request in plan.requests)


def nothing_is_left(deployment: Deployment) -> None:
    """No request runs or waits on the decoder, and every block is free."""
    metrics = engine_metrics(deployment.decode)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    assert [metrics.values[name] for name in names] == [0, 0]
    assert metrics.free_blocks == metrics.num_blocks


@contextlib.contextmanager
def deploy(
    work_dir: Path,
    prefill: EngineSpec,
    decode: EngineSpec,
    *,
    mode: Mode = "pull",
    extra: Mapping[str, Any] | None = None,
    settings: Mapping[str, str] | None = None,
    ready_timeout: float = 300.0,
) -> Iterator[Deployment]:
    """Start two kvds and two engines and wait until all are ready; end them all on the way out.

    Arguments as for `launch` and `two_hosts`; ``ready_timeout`` is in seconds for each engine.
    """
    with two_hosts(work_dir, settings) as hosts, engines(nursery.start) as start:
        deployment = launch(start, hosts, prefill, decode, mode=mode, extra=extra)
        for engine in (deployment.prefill, deployment.decode):
            engine.wait_ready(ready_timeout)
        yield deployment


@contextlib.contextmanager
def running(
    model: str,
    folder: Path,
    *,
    tp: tuple[int, int] = (1, 1),
    mode: Mode = "pull",
    extra: Mapping[str, Any] | None = None,
    prefill: Mapping[str, Any] | None = None,
    **both: Any,
) -> Iterator[Deployment]:
    """A deployment of ``model``, with ``tp`` workers of the prefiller and of the decoder.

    ``extra`` are connector settings of both engines, further arguments go into both engines' specs, ``prefill`` into
    that of the prefiller alone.
    """
    path = write_model(model, folder / "models")
    fields: dict[str, Any] = {
        "model": path,
        "dtype": MODELS[model].dtype,
        "arguments": ARGUMENTS.get(model, {}),
        "max_model_len": 2048,
        "enable_prefix_caching": model not in NO_PREFIX_CACHING,
        "cache_dir": found_out(folder),
        **both,
    }
    specs = [
        EngineSpec(
            work_dir=folder / name,
            log_path=folder / f"{name}.log",
            forced_first_tokens=name == "decode",
            tensor_parallel_size=ranks,
            **{**fields, **((prefill or {}) if name == "prefill" else {})},
        )
        for name, ranks in zip(("prefill", "decode"), tp, strict=True)
    ]
    settings = {**PATIENT, **(extra or {})}
    with deploy(folder, specs[0], specs[1], mode=mode, extra=settings, settings=PATIENT_KVD) as deployment:
        yield deployment
