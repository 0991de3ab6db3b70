"""How a benchmark is shown."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from kvctl.views.measuring.benchmark import (
    Benchmark,
    Ceiling,
    Measurement,
    benchmark_plot,
    quantiles,
)
from kvctl.views.reports.benchmark import benchmark_page

RATIOS = {"tcp": 3.25, "memcpy": 0.25, "large": 0.75}
STAGES = ("plan", "prepare", "post", "wire", "complete")
MEASURED = Measurement(
    backend="direct",
    operation="read",
    transport="",
    tokens=64,
    concurrency=1,
    fragmentation="random",
    rounds=1,
    bytes=4096,
    descriptors=2,
    verified=True,
    bytes_per_second=1e9,
    stages={name: quantiles([0.001]) for name in STAGES},
    ceilings=tuple(
        Ceiling(name=name, bytes_per_second=1e9, ratio=ratio)  # type: ignore[arg-type]
        for name, ratio in RATIOS.items()
    ),
)
BODY = Benchmark(
    model="m",
    local="d",
    remote="p",
    local_rank="tp0",
    remote_ranks=("tp0",),
    memory=1 << 20,
    blocks=(4, 4),
    devices=("cpu",),
    to="",
    cores=2,
    load=0.5,
    started=datetime(2024, 1, 1, tzinfo=UTC),
    seconds=1.0,
    measurements=(MEASURED,),
    warnings=(),
    notes=(),
)


def test_each_ceiling_has_its_own_column_in_whatever_order_they_come() -> None:
    page = benchmark_page(BODY)
    assert page.index("/MEMCPY") < page.index("/LARGE") < page.index("/TCP")
    assert page.index("0.25") < page.index("0.75") < page.index("3.25")


def test_the_line_of_the_ceiling_is_not_taken_for_the_rate() -> None:
    faster = msgspec.structs.replace(MEASURED.ceilings[2], bytes_per_second=4e9)
    body = msgspec.structs.replace(
        BODY, measurements=(msgspec.structs.replace(MEASURED, ceilings=(*MEASURED.ceilings[:2], faster)),)
    )
    assert benchmark_plot(body).rstrip().endswith("954 MiB/s of 3.73 GiB/s")
    assert "954 MiB/s of 3.73 GiB/s" in benchmark_page(body)
