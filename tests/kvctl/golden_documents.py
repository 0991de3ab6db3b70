"""Documents of commands whose answers depend on the host or take long, with figures as they come about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from kvctl.views.demo import Demo, DemoRequest
from kvctl.views.doctor import Check, doctor_document
from kvctl.views.first_aid.bundle import Bundle, Bundled
from kvctl.views.fleet.engines import FleetEngine, FleetEngines
from kvctl.views.fleet.unanswered import UnansweredHost
from kvctl.views.measuring.benchmark import Benchmark, Ceiling, Measurement, Quantiles, Warned
from kvctl.views.measuring.replay import LeftOut, RecordedFigures, Replay, Variant
from kvctl.views.probe import Probe
from kvctl.views.setting_up.ports import ListeningSocket, PortFinding, Ports
from kvctl.views.topology.document import Topology
from kvctl.views.verification import Verification, VerifiedRun
from kvd.wire.identity import Role

BEGAN = datetime(2026, 11, 18, 11, 0, tzinfo=UTC)
DOCTOR = doctor_document(
    [
        Check(code="KVD", about="kvd", state="ok", found="kvd-node7 0.1.0, pid 911, up 3m19s"),
        Check(
            code="PEER_DOWN",
            about="kvd",
            state="warning",
            found="kvd at 10.0.0.8:7766 is down: it does not let this host's key in",
            hint="there, type kvctl keys trust 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7' 10.0.0.7:7766",
        ),
        Check(code="ENGINES", about="engines", state="ok", found="2 ready: decode-0, prefill-1"),
        Check(
            code="NOT_DISAGGREGATED",
            reason="ROUTER_DROPS_PARAMS",
            about="transfers",
            state="failed",
            found="decode-0: 40 of 40 prompts of the last 60 s (100% of their tokens) were computed where they were to"
            " be decoded",
            hint="have the router send the prefiller's kv_transfer_params on, unchanged: docs/routers.md",
        ),
        Check(code="RDMA", about="host", state="skipped", found="no RDMA adapter"),
    ]
)
PORTS = Ports(
    sockets=(
        ListeningSocket(
            host="",
            port=0,
            path="/run/kvd/kvd.sock",
            pids=(911,),
            process="kvd",
            what="kvd, for workers and kvctl",
        ),
        ListeningSocket(
            host="10.0.0.7", port=7766, path="", pids=(911,), process="kvd", what="kvd, for other kvds"
        ),
        ListeningSocket(
            host="0.0.0.0",  # noqa: S104 - what is shown
            port=5600,
            path="",
            pids=(4240, 4242),
            process="VLLM::EngineCore",
            what="vLLM of Qwen/Qwen3-8B, VLLM_NIXL_SIDE_CHANNEL_PORT",
        ),
        ListeningSocket(host="::", port=8000, path="", pids=(), process="", what=""),
    ),
    findings=(
        PortFinding(
            code="PORT_TAKEN",
            state="failed",
            port=9108,
            found="kvd is to listen on 9108 (metrics.listen in /etc/kvd/kvd.yaml), and node_exporter (pid 77) does at"
            " 127.0.0.1:9108",
            hint="end that process, or give one of them another port",
        ),
    ),
)
BUNDLE = Bundle(
    file="kvctl-bundle-node7-20261118T111000Z.tar.gz",
    made=BEGAN,
    host="node7",
    kvctl="0.1.0",
    has_not="keys, tokens, prompts or KV",
    has="names of hosts, engines and requests",
    members=(
        Bundled(name="doctor.json", what="kvctl doctor --quick", bytes=5_321, sha256="ab" * 32, left_out=""),
        Bundled(name="journal.txt", what="kvd's log", bytes=0, sha256="", left_out="journalctl is not here"),
    ),
)


def _quantiles(middle: float) -> Quantiles:
    return Quantiles(p50=middle, p90=middle * 1.5, p99=middle * 4)


def _measurement(backend: str, **changes: Any) -> Measurement:
    told: dict[str, Any] = {
        "operation": "read",
        "transport": "cma",
        "tokens": 8192,
        "concurrency": 4,
        "fragmentation": "contiguous",
        "rounds": 15,
        "bytes": 536870912,
        "descriptors": 4096,
        "verified": True,
        "bytes_per_second": 2.1e9,
        "stages": {
            name: _quantiles(seconds)
            for name, seconds in (
                ("plan", 0.0004),
                ("prepare", 0.0011),
                ("post", 0.24),
                ("wire", 0.0),
                ("complete", 0.00006),
            )
        },
        "ceilings": tuple(
            Ceiling(name=name, bytes_per_second=2.1e9 / ratio, ratio=ratio)  # type: ignore[arg-type]
            for name, ratio in (("memcpy", 0.31), ("large", 0.97), ("tcp", 1.6))
        ),
    }
    return Measurement(backend=backend, **(told | changes))


BENCHMARK = Benchmark(
    model="qwen3-32b",
    local="qwen3-32b:tp=4",
    remote="qwen3-32b:tp=8",
    local_rank="tp0",
    remote_ranks=("tp0", "tp1"),
    memory=1 << 30,
    blocks=(512, 1024),
    devices=("cpu",),
    to="",
    cores=16,
    load=0.7,
    started=BEGAN,
    seconds=42.0,
    measurements=(
        _measurement("nixl"),
        _measurement("direct", fragmentation="runs-of-4", descriptors=1024, bytes_per_second=6.4e9),
    ),
    warnings=(
        Warned(
            code="NOISY", message="five rounds of nixl differ by more than half: something else runs here"
        ),
    ),
    notes=("mooncake: it is not installed",),
)
RECORDED = RecordedFigures(
    transfers=1000,
    bytes=64 << 30,
    descriptors=240_000,
    backends=("nixl",),
    seconds=_quantiles(0.03),
    stages={name: _quantiles(0.004) for name in ("queued", "handshake", "post", "wire")},
    bytes_per_second=2.4e9,
)
REPLAY = Replay(
    trace="incident.trace.zst",
    models=("Qwen/Qwen3-8B",),
    pace="at the original times",
    scale=1.0,
    to="",
    memory=2 << 30,
    cores=16,
    load=0.4,
    started=BEGAN,
    took=61.0,
    recorded=RECORDED,
    variants=tuple(
        Variant(
            name=name,
            backend=backend,
            coalesced=True,
            environment={},
            transport="cma",
            transfers=1000,
            bytes=64 << 30,
            descriptors=240_000,
            verified=True,
            late=_quantiles(0.0001),
            seconds=_quantiles(0.02),
            stages={stage: _quantiles(0.005) for stage in ("plan", "prepare", "post", "wire", "complete")},
            bytes_per_second=speed,
            dominant="wire",
            dominant_share=0.62,
        )
        for name, backend, speed in (("nixl", "nixl", 2.2e9), ("direct", "direct", 6.1e9))
    ),
    winner="direct",
    left_out=(LeftOut(transfers=3, reason="of engines whose geometry is not in the trace"),),
    notes=(),
)
DEMO = Demo(
    ok=False,
    mode="pull",
    simulated=False,
    model="Llama, 2 layers",
    seconds=38.0,
    bytes=3 << 20,
    leases_released=2,
    requests=(
        DemoRequest(
            request="cmpl-8ed2bb737f480ee5a1b2c3d4e5f6-0-93b25bba",
            prompt_tokens=768,
            external_tokens=768,
            output_tokens=16,
            bytes=3 << 19,
            copies=6,
            remote_ranks=("tp0", "tp1"),
            handshake_seconds=0.021,
            transfer_seconds=0.0042,
            equal=True,
            problem="",
        ),
        DemoRequest(
            request="cmpl-2",
            prompt_tokens=512,
            external_tokens=0,
            output_tokens=16,
            bytes=0,
            copies=0,
            remote_ranks=(),
            handshake_seconds=0.0,
            transfer_seconds=0.0,
            equal=False,
            problem="none of its 512 prompt tokens came from the prefiller",
        ),
    ),
    topology=Topology(pairs=()),
)
VERIFICATION = Verification(
    endpoint="http://d:8000",
    prefill="http://p:8000",
    router="",
    model="Qwen/Qwen3-8B",
    engine_id="decode-0",
    prompts=1,
    max_tokens=16,
    references_differ=1,
    wrong=1,
    runs=(
        VerifiedRun(
            prompt=0,
            prompt_tokens=512,
            run="reuse",
            request_id="cmpl-1",
            equals=("reuse",),
            differs_at=None,
            expected=None,
            got=None,
            load="done",
            recovery=None,
            cause="",
        ),
        VerifiedRun(
            prompt=0,
            prompt_tokens=512,
            run="flight",
            request_id="cmpl-2",
            equals=(),
            differs_at=7,
            expected=17,
            got=None,
            load="missed",
            recovery=0.25,
            cause="forced by an operator",
        ),
    ),
)
PROBE = Probe(
    address="nixl://prefill-0.example.internal:5600",
    asked=1000,
    answered=1000,
    engines=1,
    engine_ids=("8a0c1b7e-6f5d-4c3b-9a28-17e0d4c5b6a7",),
    median=0.0021,
    p99=0.0084,
    longest=0.031,
    code="",
    message="",
    hint="",
)
ROLES: tuple[tuple[Role, int], ...] = (("decode", 400), ("prefill", 100))
LARGE = FleetEngines(
    hosts=64,
    unanswered=(
        UnansweredHost(
            host="10.0.0.9:7766",
            code="KVD-TIMEOUT",
            reason="the kvd at 10.0.0.9:7766 did not answer in time",
            hint="",
        ),
    ),
    engines=tuple(
        FleetEngine(
            engine_id=f"{role}-{n}",
            generation=f"{n:016x}",
            model="Qwen/Qwen3-8B",
            role=role,
            tp=2,
            pp=1,
            dcp=1,
            groups=1,
            place="local",
            state="partial" if n == 77 else "ready",
            since=BEGAN + timedelta(seconds=n % 9),
            world_size=2,
            ranks=("tp0",) if n == 77 else ("tp0", "tp1"),
            scheduler=True,
            policy="recompute",
            leases=0,
            endpoint=None,
            served={},
            peers=(),
            compatibility_class="",
            draining=False,
            reason="1 of 2 workers is missing" if n == 77 else "",
            facts={},
            host=f"10.0.0.{n % 64 + 10}:7766",
        )
        for role, count in ROLES
        for n in range(count)
    ),
)
DOCUMENTS = {
    "doctor": DOCTOR,
    "ports": PORTS,
    "bundle": BUNDLE,
    "benchmark": BENCHMARK,
    "replay": REPLAY,
    "demo": DEMO,
    "verify": VERIFICATION,
    "probe": PROBE,
    "engines": LARGE,
}
"""By the command that prints them."""
