"""The engines of a configuration of docs/matrix.md: what they are started with, and what runs on a second host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvctl.demo.deployment import engine_id, transfer_config
from kvctl.demo.engine_spec import EngineSpec, environment
from kvctl.processes.daemons import Kvd
from tests.support.configurations import Configuration, Setup
from tests.support.deployments import PATIENT, found_out
from tests.support.odd_models import dtype_of, write
from tests.support.ports import free_port
from tests.support.servers import CALM, serve_words, server
from tests.support.tiny_models import ARGUMENTS, NO_PREFIX_CACHING

PORTS = 4
LOOPBACK = "127.0.0.1"
Hosts = tuple[Kvd, Kvd] | None


def two_specs(row: Configuration, folder: Path) -> list[EngineSpec]:
    """Both engines without their connectors."""
    models = folder / "models"
    path = write(row.model, models)
    draft = {"model": str(write(row.draft, models))} if row.draft else {}
    specs = []
    for side, own in (("prefill", row.prefill), ("decode", row.decode)):
        arguments = {**ARGUMENTS.get(row.model, {}), **row.both, **own}
        if "speculative_config" in arguments:
            arguments["speculative_config"] = {**arguments["speculative_config"], **draft}
        if "nnodes" in arguments:
            arguments |= {"node_rank": 0, "master_addr": LOOPBACK, "master_port": free_ports()}
        specs.append(
            EngineSpec(
                model=path,
                work_dir=folder / side,
                log_path=folder / f"{side}.log",
                dtype=dtype_of(row.model),
                max_model_len=2048,
                max_num_batched_tokens=row.step,
                enable_prefix_caching=row.model not in NO_PREFIX_CACHING,
                cache_dir=found_out(folder),
                arguments=arguments,
                env={
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports()),
                },
            )
        )
    return specs


def free_ports() -> int:
    """The first of some: stock listens there, a data-parallel rank each."""
    return free_port(count=PORTS)


def connector(setup: Setup, role: int, hosts: Hosts, folder: Path, at: int | None = None) -> dict[str, Any]:
    """The kv_transfer_config of the prefiller (0) or the decoder (1), for its processes on the host ``at``."""
    row = setup.configuration
    if hosts is not None:
        extra = {**PATIENT, "mode": "push", "lease_seconds": row.lease}
        if "nnodes" in (row.prefill, row.decode)[role]:
            home = hosts[role].endpoint()
            extra["home"] = f"{home.host}:{home.port}"
        host = hosts[role if at is None else at]
        config = transfer_config(host, engine_id(hosts[role]), row.roles[role], extra=extra)
    else:
        config = {
            "kv_connector": setup.connector,
            "kv_role": row.roles[role],
            "engine_id": f"stock-{role}",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"num_threads": 1, "kv_lease_duration": row.lease},
        }
    return _with_another(config, row.beside, folder) if row.beside else config


def _with_another(config: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """A MultiConnector that asks the engine's own connector first, then that of a ``name``; one id is for both.

    The other one of both engines keeps what it saves in one place, so each of them loads what either has computed.
    """
    role = {"kv_role": config["kv_role"]}
    own = {key: value for key, value in config.items() if key != "engine_id"}
    other = {
        "kv_connector": name,
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "saved")},
    }
    return {
        **role,
        "kv_connector": "MultiConnector",
        "engine_id": config["engine_id"],
        "kv_load_failure_policy": config["kv_load_failure_policy"],
        "kv_connector_extra_config": {"connectors": [own, {**other, **role}]},
    }


@contextlib.contextmanager
def second_nodes(setup: Setup, specs: list[EngineSpec], hosts: Hosts, folder: Path) -> Iterator[list[Path]]:
    """What `vllm serve` runs on the second host of engines that are on two: beside the other engine's kvd; logs."""
    with contextlib.ExitStack() as stack:
        logs = []
        for role, spec in enumerate(specs):
            if "nnodes" not in spec.arguments:
                continue
            options = {
                **spec.arguments,
                "node_rank": 1,
                "headless": True,
                "seed": 0,
                "dtype": spec.dtype,
                "enable_prefix_caching": spec.enable_prefix_caching,
            }
            words = serve_words(spec.model, 0, connector(setup, role, hosts, folder, 1 - role), **options)
            logs.append(folder / f"{spec.work_dir.name}-second.log")
            stack.enter_context(server(words, logs[-1], _environment(spec, folder)))
        yield logs


def _environment(spec: EngineSpec, folder: Path) -> Mapping[str, str]:
    sockets = folder / f"{spec.work_dir.name}-second"
    sockets.mkdir()
    return environment(spec, sockets) | CALM
