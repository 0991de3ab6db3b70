"""Engines that share prefixes: two hosts, some engines on each, none of which prefills for another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvctl.demo.deployment import engines, transfer_config
from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd, two_hosts
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import HERE
from kvd.wire.prefixes.cache import CacheList, CacheRow, ListCaches
from kvd.wire.query import EngineList, GetStatus, KvdStatus, ListEngines
from kvd.wire.transfer import TransferRecord
from tests.support import nursery
from tests.support.daemons import wait_for
from tests.support.deployments import PATIENT, PATIENT_KVD, found_out, transfers
from tests.support.tiny_models import ARGUMENTS, MODELS, write_model

SHARED = {**PATIENT, "prefixes": "on", "prefix_wait": 10.0, "prefix_least": 1}
"""Connector settings of engines that share prefixes, on machines that stand still for seconds."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What runs: engines by name, and the kvd of each."""

    engines: Mapping[str, EngineProcess]
    hosts: Mapping[str, Kvd]

    def introduce(self) -> None:
        """Hand every engine to all others, as kvd does by itself for neighbours and for kvds of its peer.connect."""
        for mine, host in self.hosts.items():
            for other, there in self.hosts.items():
                if mine != other:
                    where = HERE if host is there else there.endpoint()
                    host.ask(GetPeer(local_engine=mine, engine_id=other, endpoint=where))

    def lives(self, name: str) -> bool:
        """Whether the kvd of an engine has all of it."""
        rows = cast("EngineList", self.hosts[name].ask(ListEngines())).rows
        return any(
            row.local and row.scheduler and row.state == "ready" and row.engine.engine_id == name
            for row in rows
        )

    def settle(self) -> None:
        """Wait until each kvd knows what all engines hold. One that follows no other yet asks all of its engines.

        For that it needs its links, which one that begins again gets back some tenths of a second later.
        """
        wait_for(self._linked, 60.0)
        wait_for(self._settled, 60.0)

    def _linked(self) -> bool:
        answers = [cast("KvdStatus", host.ask(GetStatus())) for host in self.hosts.values()]
        peers = [peer for answer in answers for peer in answer.peers]
        return bool(peers) and all(peer.state == "up" for peer in peers)

    def _settled(self) -> bool:
        newest: dict[str, int] = {}
        others: list[CacheRow] = []
        for host in {id(host): host for host in self.hosts.values()}.values():
            for row in cast("CacheList", host.ask(ListCaches())).rows:
                if row.endpoint != HERE:
                    others.append(row)
                elif row.held is None or row.held.untold or row.hints is None:
                    return False
                else:
                    newest[row.engine_id] = row.hints.version
        return all(row.hints is not None and row.hints.version == newest.get(row.engine_id) for row in others)

    def hinted(self, name: str, holder: str) -> int:
        """Hints on what an engine holds that the kvd of another one knows."""
        rows = cast("CacheList", self.hosts[name].ask(ListCaches())).rows
        return sum(row.hints.tags for row in rows if row.engine_id == holder and row.hints is not None)

    def counted(self, name: str, *counters: str) -> dict[str, int]:
        """Counters of an engine's kvd."""
        status = cast("KvdStatus", self.hosts[name].ask(GetStatus()))
        return {counter: status.counters.get(counter, 0) for counter in counters}

    def read(self, name: str, holder: str) -> list[TransferRecord]:
        """What an engine has read of prefixes that another one holds, newest first."""
        return [
            record
            for record in transfers(self.hosts[name])
            if (record.local_engine, record.remote_engine) == (name, holder)
        ]

    def last_read(self, name: str, holder: str, before: int = 0) -> TransferRecord:
        """The newest, once there are more than ``before``."""
        return wait_for(
            lambda: self.read(name, holder)[:1] if len(self.read(name, holder)) > before else None, 30.0
        )[0]


@contextlib.contextmanager
def sharing(
    model: str,
    folder: Path,
    *,
    names: tuple[tuple[str, ...], tuple[str, ...]] = (("a", "b"), ("c", "d")),
    extra: Mapping[str, Any] | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    module: str = "kvd.vllm",
    **both: Any,
) -> Iterator[Sharing]:
    """Engines of ``model``, those of the first ``names`` on one host, the others on another.

    ``own`` are arguments of single engines, by name; ``module`` has the connector.
    """
    path = write_model(model, folder / "models")
    fields: dict[str, Any] = {
        "model": path,
        "dtype": MODELS[model].dtype,
        "arguments": ARGUMENTS.get(model, {}),
        "max_model_len": 2048,
        "forced_first_tokens": True,
        "cache_dir": found_out(folder),
        **both,
    }
    with two_hosts(folder, PATIENT_KVD) as hosts, engines(nursery.start) as start:
        begun: dict[str, EngineProcess] = {}
        where: dict[str, Kvd] = {}
        for host, here in zip(hosts, names, strict=True):
            for name in here:
                config = transfer_config(host, name, "kv_both", extra={**SHARED, **(extra or {})})
                config["kv_connector_module_path"] = module
                spec = EngineSpec(
                    work_dir=folder / name,
                    log_path=folder / f"{name}.log",
                    kv_transfer_config=config,
                    **{**fields, **(own or {}).get(name, {})},
                )
                begun[name], where[name] = start(spec), host
        for engine in begun.values():
            engine.wait_ready(300.0)
        running = Sharing(begun, where)
        running.introduce()
        yield running
