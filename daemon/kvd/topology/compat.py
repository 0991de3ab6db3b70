"""Whether two engines fit, factor by factor: what differs, whether that can be handled, and at what cost.

What decides is the plan: a factor fails only where no plan can be made or where its bytes would mean something else on
the other side. Every other difference is shown with its cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvd.geometry.model import EngineGeometry, Group, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.errors import TopologyError
from kvd.topology.plan import Plan, plan_worker

FactValue = str | int | float | bool | None
_FINGERPRINT = re.compile(r"([a-z]\d+)-[0-9a-f]{16}$")


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that two engines were compared by.

    ``ok`` is false only where the difference cannot be handled. ``fatal`` says whether a difference in this factor
    could ever stop transfers; ``note`` is the reason or the cost of the difference, empty where there is none.
    ``alike`` says of two unequal values that they are no difference: two names of one thing, one side that does not
    tell, or figures that follow from others.
    """

    name: str
    local: str
    remote: str
    ok: bool
    note: str = ""
    fatal: bool = False
    alike: bool = False

    @property
    def same(self) -> bool:
        """Whether both sides have one value."""
        return self.local == self.remote

    @property
    def differs(self) -> bool:
        """Whether the two engines differ in this, fatally or not."""
        return not self.ok or not (self.same or self.alike)


@dataclass(frozen=True, slots=True)
class FactRule:
    """What a difference in one of `EngineGeometry.facts` means."""

    fatal: bool
    note: str


FACT_RULES: dict[str, FactRule] = {
    "model": FactRule(fatal=True, note="another model's keys and values mean nothing here"),
    "weights": FactRule(fatal=True, note="keys and values made with other weights mean nothing here"),
    "config": FactRule(
        fatal=True, note="the models are configured differently: their keys and values differ"
    ),
    "weights_source": FactRule(fatal=False, note="told in different ways"),
    "dtype": FactRule(fatal=False, note="weights differ in precision: outputs may differ slightly"),
    "quantization": FactRule(fatal=False, note="weights differ in precision: outputs may differ slightly"),
    "cache_dtype": FactRule(fatal=True, note="bytes of one type cannot be read as the other"),
    "kv_heads": FactRule(fatal=True, note="the models have different heads"),
    "head_size": FactRule(fatal=True, note="the models have heads of different size"),
    "layers": FactRule(fatal=False, note="layers are matched by name: see `layer names`"),
    "layout": FactRule(fatal=False, note="rearranged by the plan; more and smaller copies"),
    "attention_backend": FactRule(fatal=False, note="differs only in layout, which the plan rearranges"),
    "speculative_tokens": FactRule(
        fatal=False, note="scratch blocks do not move; states of unlike size fail under `plan`"
    ),
    "prefill_lookahead": FactRule(
        fatal=False, note="a decoder computes as many of the last tokens as its prefiller leaves to it"
    ),
    "prefix_caching": FactRule(fatal=False, note="each side keeps its own prefix cache"),
    "prefix_hashes": FactRule(fatal=False, note="prefixes are shared between engines with one value alone"),
    "mamba_cache_mode": FactRule(fatal=False, note="only the running state moves, which both modes keep"),
    "hybrid_group_kinds": FactRule(fatal=False, note="layers are matched by name, not by group"),
    "load_failure_policy": FactRule(fatal=False, note="each side's own; only the reading side's matters"),
    "vllm_version": FactRule(fatal=False, note="geometry is exchanged, so versions may differ; upgrade soon"),
    "connector_version": FactRule(fatal=False, note="the wire's own version is checked at the handshake"),
    "backend": FactRule(fatal=True, note="what one backend offers another cannot read: set the same on both"),
    "backend_version": FactRule(fatal=False, note="engines of unlike versions usually talk; untested"),
    "transfer_mode": FactRule(fatal=True, note="one side would wait for the other to begin"),
    "connector": FactRule(fatal=True, note="each connector speaks its own handshake: use one on both sides"),
    "handshake": FactRule(
        fatal=False, note="the other generation's metadata is read only if the hashes agree"
    ),
    "compatibility_hash": FactRule(fatal=True, note="the hash of about a dozen factors differs"),
    "block_size": FactRule(fatal=False, note="blocks of the reading side are filled from several"),
    "kernel_block_size": FactRule(fatal=False, note="see `block_size`"),
    "regions": FactRule(fatal=False, note=""),
    "bytes_per_block": FactRule(fatal=False, note="of one rank, all layers; follows from the other factors"),
    "state_bytes": FactRule(fatal=False, note="states are split otherwise, or are of other types"),
    "memory": FactRule(fatal=False, note="KV is copied between host and device memory"),
    "hybrid_manager": FactRule(fatal=False, note="windows keep other blocks on the two sides"),
}
"""Every fact that has a meaning here, in the order in which it is shown."""

CACHE_DTYPE_NAMES = {
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3fn": "float8_e4m3",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
"""Names of one type that mean the same, from vLLM's ``cache_dtype`` and torch."""


def compare(local: EngineGeometry, remote: EngineGeometry, plans: Sequence[Plan] = ()) -> tuple[Factor, ...]:
    """Every factor that decides whether ``local`` can read from ``remote``, facts first and the plan last.

    Of an engine without workers, which a stock connector's handshake alone may be, facts and sizes are all there is.
    ``plans`` are those of all local workers where the caller has made them; else one of each pipeline stage is made.

    Never raises `TopologyError`: what cannot be planned is a factor that failed. A fact that only one side tells is
    shown with "unknown" on the other and does not fail.
    """
    numbers = (
        _numbers(
            "tp", local.tp, remote.tp, "shards are intersected: a rank reads from several, or shares one"
        ),
        _numbers("pp", local.pp, remote.pp, "each layer is read from the stage that has it"),
        _numbers("dcp", local.dcp, remote.dcp, "tokens are gathered from the ranks that hold them"),
    )
    if not (local.workers and remote.workers):
        return (*_facts(local, remote), *numbers)
    return (
        *_facts(local, remote),
        *numbers,
        _complete(local, remote),
        _layer_names(local, remote),
        _groups(local, remote),
        _block_sizes(local, remote),
        _plan(local, remote, {plan.local_rank: plan for plan in plans}),
    )


def compatible(factors: tuple[Factor, ...]) -> bool:
    """Whether no factor failed."""
    return all(factor.ok for factor in factors)


def _facts(local: EngineGeometry, remote: EngineGeometry) -> Iterator[Factor]:
    here, there = ({"model": e.model, **e.facts} if e.model else e.facts for e in (local, remote))
    others = sorted((here.keys() | there.keys()) - FACT_RULES.keys())
    for name in (*FACT_RULES, *others):
        if name in here or name in there:
            yield _fact(name, here, there)


def _fact(name: str, here: dict[str, FactValue], there: dict[str, FactValue]) -> Factor:
    mine, theirs = _shown(here.get(name), name in here), _shown(there.get(name), name in there)
    rule = FACT_RULES.get(name, FactRule(fatal=False, note=""))
    if name not in here or name not in there:
        return Factor(name, mine, theirs, ok=True, note="only one side tells", fatal=rule.fatal, alike=True)
    if mine == theirs:
        return Factor(name, mine, theirs, ok=True, fatal=rule.fatal)
    if (excuse := _excuse(name, here, there)) is not None:
        return Factor(name, mine, theirs, ok=True, note=excuse[0], fatal=rule.fatal, alike=excuse[1])
    if meaning(name, here) == meaning(name, there):
        return Factor(
            name, mine, theirs, ok=True, note="two names of one thing", fatal=rule.fatal, alike=True
        )
    return Factor(name, mine, theirs, ok=not rule.fatal, note=rule.note, fatal=rule.fatal)


def _excuse(name: str, here: dict[str, FactValue], there: dict[str, FactValue]) -> tuple[str, bool] | None:
    """Why two unequal values of what tells models apart do not count, and whether they are alike; None where they do.

    What the weights are decides, not what a model is called.
    """
    weights = [facts.get("weights") for facts in (here, there)]
    told = None not in weights and not _incomparable(*map(str, weights))
    equal = told and weights[0] == weights[1]
    match name:
        case "model" if told:
            return "names do not decide, `weights` does", equal
        case "config" if equal and "setting" in (here.get("weights_source"), there.get("weights_source")):
            return "not compared: `weights` says on both sides that they are the same", True
        case "weights_source":
            return "", equal
        case "weights" | "config" if _incomparable(str(here[name]), str(there[name])):
            return "made in two ways, which cannot be compared", False
    return None


def _incomparable(mine: str, theirs: str) -> bool:
    """Whether both are fingerprints (``w1-0123456789abcdef``), made in different ways."""
    versions = [found[1] for text in (mine, theirs) if (found := _FINGERPRINT.match(text))]
    return len(set(versions)) == 2


def _shown(value: FactValue, known: bool) -> str:
    if not known:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)


def meaning(name: str, facts: Mapping[str, FactValue]) -> str:
    """A fact's value in the one form in which two of them can be compared."""
    value = _shown(facts[name], known=True)
    if name == "model":
        # The same model is often served from a hub name on one side and from a folder on the other.
        return value.rstrip("/").rsplit("/", 1)[-1].lower()
    if name == "cache_dtype":
        if value == "auto":
            value = _shown(facts.get("dtype"), "dtype" in facts)
        value = value.removeprefix("torch.")
        return CACHE_DTYPE_NAMES.get(value, value)
    return value


def _numbers(name: str, mine: int, theirs: int, note: str) -> Factor:
    """Of a size that nobody told, 0, nothing is said."""
    if not mine or not theirs:
        note = "only one side tells" if mine or theirs else ""
        return Factor(name, str(mine or "unknown"), str(theirs or "unknown"), ok=True, note=note, alike=True)
    return Factor(name, str(mine), str(theirs), ok=True, note=note if mine != theirs else "")


def _complete(local: EngineGeometry, remote: EngineGeometry) -> Factor:
    here, there = (f"{len(e.workers)} of {e.world_size}" for e in (local, remote))
    ok = len(remote.workers) >= remote.world_size
    note = "" if ok else "the remote engine is not complete"
    return Factor("workers", here, there, ok, note, fatal=True, alike=len(local.workers) >= local.world_size)


def _layer_names(local: EngineGeometry, remote: EngineGeometry) -> Factor:
    mine, theirs = ({name for w in kinds(engine) for name in w.layers} for engine in (local, remote))
    missing, spare = sorted(mine - theirs), len(theirs - mine)
    note = f"{spare} layers of the remote side are not read" if spare else ""
    if missing:
        note = f"not on the remote side: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
    return Factor("layer names", str(len(mine)), str(len(theirs)), not missing, note, fatal=True)


def kinds(engine: EngineGeometry) -> Sequence[WorkerGeometry]:
    """One worker of each kind: those that were read as alike share one tuple of groups."""
    found: dict[int, WorkerGeometry] = {}
    for worker in engine.workers:
        found.setdefault(id(worker.groups), worker)
    return tuple(found.values())


def groups_of(engine: EngineGeometry) -> dict[int, Group]:
    """Each group of the engine by index, as the first worker that has layers of it describes it."""
    found: dict[int, Group] = {}
    for worker in engine.workers:
        for group in worker.groups:
            if group.index not in found or not found[group.index].layers:
                found[group.index] = group
    return dict(sorted(found.items()))


def _groups(local: EngineGeometry, remote: EngineGeometry) -> Factor:
    here, there = (", ".join(g.kind for g in groups_of(e).values()) for e in (local, remote))
    theirs = {layer.name: g for w in kinds(remote) for g in w.groups for layer in g.layers}
    for group in groups_of(local).values():
        for name in group.layer_names:
            other = theirs.get(name)
            if other is None or group.window is not None or group.kind == "mamba":
                continue
            if other.window is not None and other.kind in ("sliding_window", "chunked"):
                note = (
                    f"{name} needs every token here (full) and the remote side frees those that are"
                    f" {other.window} tokens back; give both sides the same hybrid KV cache manager setting"
                )
                return Factor("groups", here, there, ok=False, note=note, fatal=True)
    note = "" if here == there else "layers are matched by name, not by group"
    return Factor("groups", here, there, ok=True, note=note, fatal=True)


def block_tokens(group: Group) -> int:
    """Tokens that one block covers; 0 of a state, whatever the distance between two states that are kept."""
    return 0 if group.kind == "mamba" else group.block_size


def _block_sizes(local: EngineGeometry, remote: EngineGeometry) -> Factor:
    here, there = (
        ", ".join(str(block_tokens(g) or "state") for g in groups_of(e).values()) for e in (local, remote)
    )
    note = "" if here == there else "blocks are cut and joined by the plan; more descriptors"
    return Factor("block sizes", here, there, ok=True, note=note)


def _plan(local: EngineGeometry, remote: EngineGeometry, made: Mapping[Rank, Plan]) -> Factor:
    """Plan one worker of each pipeline stage of the local engine, unless it is among those ``made``."""
    stages: dict[int, WorkerGeometry] = {}
    for worker in local.workers:
        stages.setdefault(worker.rank.pp, worker)
    plans: list[Plan] = []
    for worker in stages.values():
        try:
            plans.append(made.get(worker.rank) or plan_worker(worker, local.workers, remote.workers))
        except TopologyError as error:
            return Factor(
                "plan",
                str(worker.rank),
                f"{len(remote.workers)} workers",
                ok=False,
                note=str(error),
                fatal=True,
            )
    ranks = ", ".join(str(plan.local_rank) for plan in plans)
    sources = sorted({plan.remote_ranks[i] for plan in plans for i in plan.sources})
    return Factor("plan", ranks, ", ".join(map(str, sources)), ok=True, fatal=True, alike=True)
