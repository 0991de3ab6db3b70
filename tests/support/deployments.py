"""Real deployments for the end-to-end tests: two kvds, two vLLM engines, one tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from kvctl.demo.deployment import Deployment, deploy
from kvctl.demo.engine import Answer, EngineSpec
from kvctl.demo.kinds import MODELS
from kvctl.demo.models import write_model
from kvd.wire.transfer import ListTransfers, TransferRecord, Transfers
from tests.support.daemons import wait_for


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A random prompt, the same for the same arguments."""
    rng = random.Random(f"{tokens}/{seed}")
    return [rng.randrange(10, 500) for _ in range(tokens)]


def transfers_of(deployment: Deployment, prefilled: Answer, ranks: int = 1) -> list[TransferRecord]:
    """What the decoder's ledger has on one hand-over, once all of its ``ranks`` workers have reported."""
    request_id = (prefilled.kv_transfer_params or {})["remote_request_id"]

    def look() -> list[TransferRecord] | None:
        rows = cast("Transfers", deployment.decode_host.ask(ListTransfers(limit=100))).rows
        found = [row.record for row in rows if row.record.remote_request_id == request_id]
        return found if len(found) >= ranks else None

    return wait_for(look, 20.0)


PATIENT = {"handshake_timeout": 60.0, "lease_seconds": 120.0, "load_timeout": 60.0}
"""Connector settings for machines on which everything takes its time; a test that is about one of them sets it."""


@contextmanager
def running(
    model: str,
    folder: Path,
    *,
    tp: tuple[int, int] = (1, 1),
    extra: Mapping[str, Any] | None = None,
    **both: Any,
) -> Iterator[Deployment]:
    """A deployment of ``model``, with ``tp`` workers of the prefiller and of the decoder.

    ``extra`` are connector settings of both engines, further arguments go into both engines' specs.
    """
    path = write_model(model, folder / "models")
    specs = [
        EngineSpec(
            model=path,
            work_dir=folder / name,
            log_path=folder / f"{name}.log",
            dtype=MODELS[model].dtype,
            max_model_len=2048,
            enable_prefix_caching=MODELS[model].prefix_caching,
            forced_first_tokens=name == "decode",
            cache_dir=folder / "cache",
            tensor_parallel_size=ranks,
            **both,
        )
        for name, ranks in zip(("prefill", "decode"), tp, strict=True)
    ]
    with deploy(folder, specs[0], specs[1], extra={**PATIENT, **(extra or {})}) as deployment:
        yield deployment
