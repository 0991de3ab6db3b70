"""What an operator should know of a pair of engines: codes, messages and what to do about each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvd.geometry.model import EngineGeometry, Page
from kvd.geometry.rank import Rank
from kvd.installed import UNINSTALLED
from kvd.topology.compat import Factor, groups_of
from kvd.topology.cost import RequestCost
from kvd.topology.plan import Plan
from kvd.topology.reads import ReadShape

Severity = Literal["error", "warning", "info"]

SMALL_COPY = 8192
"""Bytes. Below this the cost of a descriptor outweighs that of its bytes on every engine measured (field-notes.md)."""

MANY_SEGMENTS = 8
"""Copies out of one page of one layer from which layouts, not sharding, are to blame."""

MANY_COPIES = 100_000
"""Copies of one request from which their number alone is worth a word."""

FULL_SPEED = 256 << 10
"""Bytes of a copy below which GPUs' engines pay by the copy (docs/gpu.md)."""

MANY_LAYERS = 8
"""Copies of one block from which it is worth a word that its layers stand apart."""

UNEVEN = 1.25
"""A rank that carries this many times the average decides alone how long a request takes."""

ONE_ID = 'set "weights" in kv_connector_extra_config of both to one id'
"""What to do where the engines' own comparison of weights is not to count."""

FAILED: dict[str, tuple[str, str]] = {
    "workers": ("RANK_NOT_REGISTERED", "wait for the missing ranks, or look why they did not start"),
    "plan": (
        "TP_UNSUPPORTED",
        "choose parallel sizes that divide each other, and the same model and types",
    ),
    "groups": ("BLOCK_GEOMETRY", "start both sides with or without --disable-hybrid-kv-cache-manager"),
    "model": (
        "COMPAT_MISMATCH",
        f"serve the same model on both sides; if it is one under two names, {ONE_ID}",
    ),
    "weights": (
        "COMPAT_MISMATCH",
        f"load the same checkpoint on both sides; if their KV may be exchanged all the same, {ONE_ID}",
    ),
    "config": (
        "COMPAT_MISMATCH",
        f"compare the models' config.json, --hf-overrides, --max-model-len; if the difference may be, {ONE_ID}",
    ),
    "cache_dtype": ("COMPAT_MISMATCH", "set the same --kv-cache-dtype on both sides"),
    "backend": ("COMPAT_MISMATCH", "set the same backend in kv_connector_extra_config on both sides"),
    "compatibility_hash": (
        "COMPAT_MISMATCH",
        "make vLLM, model, types and attention backend of both sides the same",
    ),
    "block_size": ("BLOCK_GEOMETRY", "set one --block-size on both sides"),
    "regions": (
        "BLOCK_GEOMETRY",
        "serve the same model with the same layers and hybrid cache manager setting",
    ),
    "layout": ("LAYOUT_MISMATCH", "set one VLLM_KV_CACHE_LAYOUT on both sides"),
    "tp": ("TP_UNSUPPORTED", "choose tensor parallel sizes of which one divides the other"),
    "dcp": ("TP_UNSUPPORTED", "choose context parallel sizes of which one divides the other"),
    "transfer_mode": (
        "COMPAT_MISMATCH",
        "set the same transfer mode in kv_connector_extra_config on both sides",
    ),
}
"""Code and hint of each factor that failed; of all others `COMPAT_MISMATCH`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing. ``code`` is stable; ``hint`` says what to do."""

    code: str
    severity: Severity
    message: str
    hint: str


OfGroup = tuple[int, Finding]
"""A finding that is about one group, and the group's index, which its message does not name."""


def find(
    local: EngineGeometry,
    remote: EngineGeometry,
    factors: Sequence[Factor],
    plans: Sequence[Plan],
    request: RequestCost | None = None,
) -> tuple[Finding, ...]:
    """All findings of a pair, errors first.

    ``plans`` are those of all local workers, none where there is no plan; ``request`` tells how even the load is.
    """
    storms = tuple(_together(_small_copies(local, remote, plans)))
    found = [
        *_failures(factors),
        *storms,
        *(() if storms else _many_copies(request)),
        *_together(_layers_apart(local, plans)),
        *_uneven(request),
        *_layouts(factors, plans),
        *_together(_block_sizes(local, remote, plans)),
        *_together(_repeated(local, plans)),
        *_together(_partial_windows(local, remote)),
        *_idle_ranks(remote, plans),
        *_policy(local),
        *unknown_weights(local.engine_id, local.facts),
        *unknown_weights(remote.engine_id, remote.facts),
        *_versions(factors),
    ]
    return by_severity(found)


def by_severity(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings."""
    order: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(found, key=lambda f: order[f.severity]))


def _together(found: Iterable[OfGroup]) -> Iterator[Finding]:
    """One finding for all groups of which the same is to say, with the groups before the message."""
    groups: dict[Finding, list[int]] = {}
    for group, finding in found:
        groups.setdefault(finding, []).append(group)
    for finding, indices in groups.items():
        label = f"group {indices[0]}" if len(indices) == 1 else f"groups {', '.join(map(str, indices))}"
        yield replace(finding, message=f"{label}: {finding.message}")


def _failures(factors: Sequence[Factor]) -> Iterator[Finding]:
    failed = [factor for factor in factors if not factor.ok]
    for factor in failed:
        # That no plan can be made follows from every other failure; by itself it is about sizes.
        if factor.name != "plan" or len(failed) == 1:
            code, hint = FAILED.get(factor.name, ("COMPAT_MISMATCH", "make both sides agree"))
            message = f"{factor.name}: {factor.local} here, {factor.remote} there: {factor.note}"
            yield Finding(code, "error", message, hint)


def _small_copies(local: EngineGeometry, remote: EngineGeometry, plans: Sequence[Plan]) -> Iterator[OfGroup]:
    """Groups whose pages fall apart into many small copies."""
    groups = groups_of(local)
    worst: dict[int, tuple[int, int, int]] = {}
    for rank, read in _of_each_shape(plans):
        page = local.by_rank[rank].layers[read.layers[0]][1].page
        least = _least_copies(page, state=read.kind == "mamba")
        seen = (read.layer_segments, read.layer_bytes // max(1, read.layer_segments), least)
        worst[read.group] = max(worst.get(read.group, seen), seen)
    for group, (segments, size, least) in sorted(worst.items()):
        if segments >= MANY_SEGMENTS and size < SMALL_COPY:
            state = groups[group].kind == "mamba"
            best = "of a state that is split channel by channel" if state else "of HND"
            yield (
                group,
                Finding(
                    "DESCRIPTOR_STORM",
                    "warning",
                    f"a page of one layer is read in {segments} copies of {size} bytes on average,"
                    f" {segments // least}x the descriptors {best}",
                    _layout_hint(local, remote, state=state),
                ),
            )


def _of_each_shape(plans: Sequence[Plan]) -> Iterator[tuple[Rank, ReadShape]]:
    """One of all reads that are alike, with the local rank of it."""
    distinct = {id(plan.pattern): plan for plan in plans}.values()
    found = {id(read.shape): (plan.local_rank, read.shape) for plan in distinct for read in plan.reads}
    return iter(found.values())


def _least_copies(page: Page, *, state: bool) -> int:
    """In how few copies a shard of a page can move: one a field, but keys and values that stand mixed go together."""
    if state:
        return len(page.fields)
    fields = sorted(page.fields, key=lambda f: f.offset)
    return 1 + sum(later.offset >= first.end for first, later in itertools.pairwise(fields))


def _layout_hint(local: EngineGeometry, remote: EngineGeometry, *, state: bool) -> str:
    if state:
        return "set VLLM_SSM_CONV_STATE_LAYOUT=DS on both sides, or the same tensor parallel size"
    if local.tp != remote.tp:
        return "set VLLM_KV_CACHE_LAYOUT=HND on both sides: heads stand together, so a shard is one piece"
    return "give both sides the same attention backend and VLLM_KV_CACHE_LAYOUT"


def _many_copies(request: RequestCost | None) -> Iterator[Finding]:
    """A request that falls apart into very many small copies although none of its pages does."""
    if request is None or request.descriptors < MANY_COPIES:
        return
    mean = request.bytes // request.descriptors
    if mean < SMALL_COPY:
        yield Finding(
            "MANY_SMALL_COPIES",
            "warning",
            f"a request of {request.tokens} tokens is {request.descriptors} copies of {mean} bytes on average:"
            " posting them takes longer than moving the bytes",
            "set larger blocks (--block-size), the same on both sides; with decode context parallelism also"
            " --cp-kv-cache-interleave-size",
        )


def _layers_apart(local: EngineGeometry, plans: Sequence[Plan]) -> Iterator[OfGroup]:
    """Groups whose pages fit one to one, so that only the layers' places keep a lone block from being one copy."""
    if local.facts.get("transfer_mode") == "push" or _runs_on_cpus(local):
        return
    most: dict[int, tuple[int, int]] = {}
    for _, read in _of_each_shape(plans):
        copies = len(read.runs)
        if read.filling[1] == copies >= MANY_LAYERS and read.bytes_per_block < FULL_SPEED * copies:
            size = read.bytes_per_block // copies
            most[read.group] = max(most.get(read.group, (0, 0)), (copies, size))
    for group, (copies, size) in sorted(most.items()):
        yield (
            group,
            Finding(
                "LAYERS_APART",
                "info",
                f"a block that stands alone is {copies} copies of {size} bytes, since each layer has memory of its own;"
                " with all layers of a block together it is one",
                'set "outermost" to "block" in kv_connector_extra_config of both sides (vLLM 0.29 and later); 0.26 to'
                " 0.28 do it by themselves for pulls of one group, with VLLM_USE_V2_MODEL_RUNNER=0",
            ),
        )


def _runs_on_cpus(engine: EngineGeometry) -> bool:
    """Whether it is a live engine on CPUs, whose attention knows one layout only; a planned one has no devices."""
    devices = {region.device for worker in engine.workers for region in worker.regions}
    return "connector_version" in engine.facts and devices == {"cpu"}


def _uneven(request: RequestCost | None) -> Iterator[Finding]:
    """A rank of either side that carries much more than the average of its side."""
    if request is None:
        return
    for load, side, verb in (
        (request.bytes_by_rank, "remote", "sends"),
        (request.bytes_by_local_rank, "local", "takes"),
    ):
        rank, most = max(load.items(), key=lambda item: item[1], default=("", 0))
        ratio = most * len(load) / (sum(load.values()) or 1)
        if ratio >= UNEVEN:
            yield Finding(
                "UNEVEN_LOAD",
                "warning",
                f"{side} rank {rank} {verb} {ratio:.1f} times the average of its {len(load)} ranks:"
                " a request takes as long as its link",
                "choose parallel sizes that divide each other, or pipeline stages with an even share of the layers",
            )


def _layouts(factors: Sequence[Factor], plans: Sequence[Plan]) -> Iterator[Finding]:
    for factor in factors:
        if factor.name == "layout" and factor.differs and plans:
            yield Finding(
                "LAYOUT_MISMATCH",
                "info",
                f"pages are laid out {factor.local} here and {factor.remote} there; the plan rearranges them, while"
                " connectors that copy whole pages would deliver wrong values",
                "set one VLLM_KV_CACHE_LAYOUT on both sides: pages then move in fewer copies",
            )


def _block_sizes(local: EngineGeometry, remote: EngineGeometry, plans: Sequence[Plan]) -> Iterator[OfGroup]:
    """Groups whose blocks cover other numbers of tokens on the two sides; states have no blocks of tokens."""
    if not plans:
        return
    theirs = {layer.name: g for w in remote.workers for g in w.groups for layer in g.layers}
    for group in groups_of(local).values():
        other = theirs.get(group.layers[0].name) if group.layers else None
        if group.kind == "mamba" or other is None or group.block_size == other.block_size:
            continue
        yield (
            group.index,
            Finding(
                "BLOCK_GEOMETRY",
                "info",
                f"blocks of {group.block_size} tokens here and of {other.block_size} there; the plan"
                " cuts and joins them, at the price of more copies, where connectors that match blocks one to one fail",
                "set one --block-size on both sides; of hybrid models it follows from the tensor parallel size",
            ),
        )


def _repeated(local: EngineGeometry, plans: Sequence[Plan]) -> Iterator[OfGroup]:
    """Groups of which several local ranks need the same bytes: more ranks than KV heads, or latents."""
    if not plans:
        return
    for group in groups_of(local).values():
        if not group.layers or group.kind == "mamba":
            continue
        name = group.layers[0].name
        pages = [w.layers[name][1].page for w in local.workers if name in w.layers]
        copies = max(pages.count(page) for page in dict.fromkeys(pages))
        what = "latents" if group.kind == "mla" else "heads"
        if copies > 1:
            yield (
                group.index,
                Finding(
                    "REPEATED_READS",
                    "info",
                    f"{copies} local ranks hold the same {what}, so their bytes are moved {copies} times",
                    "set --decode-context-parallel-size on the local side, or give it fewer tensor parallel ranks",
                ),
            )


def _partial_windows(local: EngineGeometry, remote: EngineGeometry) -> Iterator[OfGroup]:
    theirs = {layer.name: g for w in remote.workers for g in w.groups for layer in g.layers}
    for group in groups_of(local).values():
        other = theirs.get(group.layers[0].name) if group.layers else None
        if group.window is None or other is None or group.block_size <= other.block_size:
            continue
        yield (
            group.index,
            Finding(
                "WINDOW_PARTIAL_BLOCK",
                "warning",
                f"blocks of {group.block_size} tokens are filled from blocks of {other.block_size}:"
                f" the first block of a window of {group.window} tokens may be filled only in part, since the remote"
                " side frees what left the window",
                "use the same block size on both sides, or no prefix caching on this one",
            ),
        )


def _idle_ranks(remote: EngineGeometry, plans: Sequence[Plan]) -> Iterator[Finding]:
    if not plans:
        return
    read = {plan.remote_ranks[i] for plan in plans for i in plan.sources}
    idle = [str(w.rank) for w in remote.workers if w.rank not in read]
    if idle:
        yield Finding(
            "IDLE_SOURCES",
            "info",
            f"{len(idle)} of {len(remote.workers)} remote ranks hold copies that nobody reads: {', '.join(idle[:4])}"
            f"{', ...' if len(idle) > 4 else ''}",
            "nothing to do; their network links carry none of the load",
        )


def _policy(local: EngineGeometry) -> Iterator[Finding]:
    if local.facts.get("load_failure_policy") == "fail":
        yield Finding(
            "LOAD_FAILURE_FAIL",
            "warning",
            "a failed load ends its request with an error: kv_load_failure_policy is fail, which is vLLM's default",
            "set kv_load_failure_policy to recompute in --kv-transfer-config of the reading side",
        )


def unknown_weights(engine_id: str, facts: Mapping[str, object]) -> Iterator[Finding]:
    """What is to be said of an engine that looked for its weights and found no fingerprint of them."""
    source = facts.get("weights_source", "off")
    if source != "off" and not facts.get("weights"):
        yield Finding(
            "WEIGHTS_UNKNOWN",
            "warning",
            f"which weights {engine_id} runs is {source}; another model under its name would pass for it",
            ONE_ID,
        )


def _versions(factors: Sequence[Factor]) -> Iterator[Finding]:
    for factor in factors:
        told = not {"unknown", UNINSTALLED} & {factor.local, factor.remote}
        if factor.name.endswith("_version") and not factor.same and told:
            yield Finding(
                "VERSION_SKEW",
                "info",
                f"{factor.name}: {factor.local} here, {factor.remote} there",
                "fine during a rolling upgrade; finish it",
            )
