"""What the installed vLLM does with a load that failed, read from its own source, and what is safe on it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

from kvd.vllm.errors import UnsupportedBuild
from kvd.vllm.memory.groups import GroupFacts, has_state, keeps_prefix

ReportChannel = Literal["blocks", "request", "scheduler", "none"]

SCHEDULER = "kvd.vllm.builds.recovering.recovering_scheduler"
"""The scheduler for builds whose own hears only of bad blocks, and only of one group's."""

_SCHEDULER = "v1/core/sched/scheduler.py"
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
_AGGREGATOR = "distributed/kv_transfer/kv_connector/utils.py"
_RUNNERS = ("v1/worker/kv_connector_model_runner_mixin.py", "v1/worker/gpu/kv_connector.py")


@dataclass(frozen=True, slots=True)
class BuildFact:
    """Whether something holds of a build, and where in its source that was read."""

    holds: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Build:
    """What one vLLM does with KV that comes from outside. Each annotation says what it means when it holds."""

    split_asserts: Annotated[BuildFact, "asserts that no token is external where it aligns chunks to states"]
    claims_wedge: Annotated[BuildFact, "aligns asynchronous claims too, whose empty chunk stops the queue"]
    takes_bad_blocks: Annotated[
        BuildFact, "recovers asynchronous loads from their bad blocks, with one group"
    ]
    takes_failed_requests: Annotated[BuildFact, "recovers a failed load as a whole request, with any groups"]
    frees_failed: Annotated[
        BuildFact, "frees the blocks of a request whose load left it no tokens, and computes it anew"
    ]


MEANINGS: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Build, include_extras=True).items()
}
"""What each fact of a `Build` means when it holds."""


@dataclass(frozen=True, slots=True)
class Safety:
    """How loads are safe here: by which channel a failed one is reported. With ``refused``, they are not, and why."""

    channel: ReportChannel
    refused: str = ""

    @property
    def says(self) -> str:
        """In one line, as ``kvctl status`` shows it."""
        return self.refused or _SAYS[self.channel]


_SAYS: dict[ReportChannel, str] = {
    "blocks": "failed loads are reported by block",
    "request": "failed loads are reported by request",
    "scheduler": f"failed loads are reported by block to {SCHEDULER}, which finds the request",
    "none": "loads nothing",
}


@functools.cache
def probe(root: Path | None = None) -> Build:
    """Read what a vLLM does from the source under ``root``, its package folder; of the installed one if not given.

    Raises `UnsupportedBuild` where there is no source to read.
    """
    where = _installed() if root is None else root
    scheduler = _Source.read(where, _SCHEDULER)
    return Build(
        split_asserts=_split_asserts(scheduler),
        claims_wedge=_claims_wedge(scheduler),
        takes_bad_blocks=_takes_bad_blocks(scheduler),
        takes_failed_requests=_takes_failed_requests(where, scheduler),
        frees_failed=_frees_failed(scheduler),
    )


@functools.cache
def completes_hits(root: Path | None = None) -> bool:
    """Whether a vLLM may be told that loads bring the states which its own cache lacks.

    It then takes a prefix that its attention has for a hit, whose states are to come with the load behind it. Where
    nothing is loaded in the end it must fall back to what all groups have, else it would go on without a state. Raises
    `UnsupportedBuild` where there is no source to read.
    """
    scheduler = _Source.read(_installed() if root is None else root, _SCHEDULER)
    return any(
        {_DIVERGED, _EXTERNAL} <= _names(node.test)
        and any("get_computed_blocks" in _names(left) for left in node.body)
        for node in ast.walk(scheduler.tree)
        if isinstance(node, ast.If)
    )


@functools.cache
def tells_of_sleep(root: Path | None = None) -> bool:
    """Whether a vLLM tells its connector before KV memory is unmapped (sleep mode), and when it is mapped again.

    Raises `UnsupportedBuild` where there is no source to read.
    """
    base = _Source.read(_installed() if root is None else root, _BASE)
    return all(base.function(name) for name in ("unregister_kv_caches", "restore_kv_caches"))


def safety(build: Build, groups: Sequence[GroupFacts], *, loads: bool = True, scheduler: str = "") -> Safety:
    """How loads of these groups are safe on this build, or why they are not.

    Safe means that a load which failed is never taken for one that came, that it ends no engine, and that no request
    waits for it for ever. ``loads`` is false for an engine that only prefills. ``scheduler`` is the path of the
    scheduler that is configured, empty for vLLM's own.
    """
    if not loads:
        return Safety("none")
    if has_state(groups):
        for name in ("split_asserts", "claims_wedge"):
            fact: BuildFact = getattr(build, name)
            if fact.holds:
                return _refuse(f"this vLLM {MEANINGS[name]} ({fact.evidence})")
    if keeps_prefix(groups):
        if build.takes_bad_blocks.holds:
            return Safety("blocks")
        return _refuse(f"this vLLM has no way to hear of bad blocks ({build.takes_bad_blocks.evidence})")
    return _whole(build, groups, scheduler)


def _whole(build: Build, groups: Sequence[GroupFacts], scheduler: str) -> Safety:
    """Where nothing of a failed load can be kept."""
    if build.takes_failed_requests.holds:
        return Safety("request")
    ours = build.takes_bad_blocks.holds and build.frees_failed.holds
    if ours and scheduler == SCHEDULER:
        return Safety("scheduler")
    kinds = ", ".join(g.kind for g in groups)
    return _refuse(
        f"this vLLM has no way to hear that a whole load failed ({build.takes_failed_requests.evidence}), and a model"
        f" with {len(groups)} KV cache group(s) ({kinds}) needs it: what did not arrive would be used in silence",
        f"add --scheduler-cls {SCHEDULER}, or {_OTHERWISE}" if ours else _OTHERWISE,
    )


_OTHERWISE = "use vLLM 0.30 or later, or kv_role kv_producer"


def _refuse(reason: str, instead: str = _OTHERWISE) -> Safety:
    return Safety("none", f"{reason}; {instead}")


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedBuild("vLLM is not installed here; install it beside kvctl")
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True, slots=True)
class _Source:
    """A module of vLLM's, and all of its functions, the inner ones last."""

    name: str
    tree: ast.Module
    functions: list[ast.FunctionDef]

    @classmethod
    def read(cls, root: Path, path: str) -> _Source:
        try:
            tree = ast.parse((root / path).read_text())
        except (OSError, SyntaxError) as error:
            raise UnsupportedBuild(
                f"vLLM's {path} cannot be read, so what it does with failed loads is unknown: {error};"
                " install vLLM with its sources"
            ) from error
        return cls(path, tree, [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)])

    def function(self, name: str) -> ast.FunctionDef | None:
        return next((f for f in self.functions if f.name == name), None)

    def at(self, node: ast.stmt | ast.expr, *, holds: bool = True) -> BuildFact:
        """A fact that was read from this node: function and line."""
        around = [f.name for f in self.functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
        return BuildFact(holds, f"{around[-1] if around else ''}, {self.name}:{node.lineno}")

    def nowhere(self, what: str) -> BuildFact:
        return BuildFact(holds=False, evidence=f"no {what} in {self.name}")


def _names(node: ast.AST) -> set[str]:
    return {
        n.id if isinstance(n, ast.Name) else n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Name | ast.Attribute)
    }


_SPLIT = "_mamba_block_aligned_split"
_EXTERNAL = "num_external_computed_tokens"
_DIVERGED = "hit_diverged"


def _split_asserts(scheduler: _Source) -> BuildFact:
    split = scheduler.function(_SPLIT)
    if split is None:
        return scheduler.nowhere(_SPLIT)
    for node in ast.walk(split):
        if isinstance(node, ast.Assert) and _forbids_external(node.test):
            return scheduler.at(node)
    return scheduler.at(split, holds=False)


def _forbids_external(test: ast.expr) -> bool:
    """Whether an assertion lets no external token pass. One that asks for whole blocks of them does let some pass."""
    if _EXTERNAL not in _names(test):
        return False
    if isinstance(test, ast.BoolOp):
        parts = [_forbids_external(part) for part in test.values if _EXTERNAL in _names(part)]
        return any(parts) if isinstance(test.op, ast.And) else all(parts)
    remainders = (n for n in ast.walk(test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod))
    return not any(_EXTERNAL in _names(remainder.left) for remainder in remainders)


def _claims_wedge(scheduler: _Source) -> BuildFact:
    """An asynchronous claim schedules no tokens; aligned, that reads as "no chunk fits" and ends the step's queue."""
    calls = [
        n
        for n in ast.walk(scheduler.tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr == _SPLIT
        and _EXTERNAL in _names(n)
    ]
    if not calls:
        return scheduler.nowhere(f"call of {_SPLIT} with external tokens")
    branches = [b for n in ast.walk(scheduler.tree) if isinstance(n, ast.If) for b in _only_synchronous(n)]
    spared = {node for branch in branches for node in ast.walk(branch)}
    wedging = [call for call in calls if call not in spared]
    return scheduler.at((wedging or calls)[0], holds=bool(wedging))


def _only_synchronous(node: ast.If) -> list[ast.stmt]:
    """The branch that asynchronous loads never take, if there is one."""
    test = node.test
    every = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    if "not load_kv_async" in map(ast.unparse, every):
        return node.body
    return node.orelse if ast.unparse(test) == "load_kv_async" else []


def _takes_bad_blocks(scheduler: _Source) -> BuildFact:
    handler = scheduler.function("_handle_invalid_blocks")
    if handler is None:
        return scheduler.nowhere("_handle_invalid_blocks")
    return scheduler.at(handler, holds="WAITING_FOR_REMOTE_KVS" in _names(handler))


def _takes_failed_requests(root: Path, scheduler: _Source) -> BuildFact:
    """The report passes every worker's runner, the aggregator of the ranks, and the scheduler; each can lose it."""
    name = "failed_recving"
    for path in (*(p for p in _RUNNERS if (root / p).exists()), _AGGREGATOR):
        source = _Source.read(root, path)
        if not _hands_on(source, name):
            return source.nowhere(name)
    reads = (n for n in ast.walk(scheduler.tree) if isinstance(n, ast.Attribute) and n.attr == name)
    found = next(reads, None)
    return scheduler.at(found) if found is not None else scheduler.nowhere(name)


def _frees_failed(scheduler: _Source) -> BuildFact:
    """Of a request that failed and has no computed tokens, the blocks are given back before it is scheduled again."""
    name = "_update_waiting_for_remote_kv"
    handler = scheduler.function(name)
    if handler is not None and "failed_recving_kv_req_ids" in _names(handler):
        for node in ast.walk(handler):
            if isinstance(node, ast.If) and "num_computed_tokens" in _names(node.test):
                freed = next((left for left in node.orelse if "free" in _names(left)), None)
                if freed is not None:
                    return scheduler.at(freed)
    return scheduler.nowhere(f"{name} that frees")


def _hands_on(source: _Source, name: str) -> bool:
    return any(
        (isinstance(n, ast.keyword) and n.arg == name)
        or (isinstance(n, ast.Attribute) and n.attr == name and isinstance(n.ctx, ast.Store))
        for n in ast.walk(source.tree)
    )
