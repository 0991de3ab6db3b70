"""What decides between two engines of NixlConnector: the rules that it checks by itself at its handshake.

They are stricter than ours, whose plans rearrange what differs. They were read in vLLM 0.32; a reader compares its own
values with those of the engine that it reads from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvd.geometry.model import EngineGeometry
from kvd.topology.compat import Factor

CONNECTOR = "NixlConnector"
HASHED = (
    "vllm_version", "model", "dtype", "cache_dtype", "kv_heads", "head_size", "layers", "attention_backend",
    "hybrid_manager", "transfer_mode", "handshake",
)  # fmt: skip
"""Facts that NixlConnector's compatibility hash is made of."""


def with_stock_rules(
    factors: tuple[Factor, ...], local: EngineGeometry, remote: EngineGeometry
) -> tuple[Factor, ...]:
    """The factors of a pair as NixlConnector judges them, where both engines are of it; else as they are."""
    if any(engine.facts.get("connector") != CONNECTOR for engine in (local, remote)):
        return factors
    judged = {factor.name: factor for factor in _judged(factors, local, remote)}
    return tuple(judged.get(factor.name, factor) for factor in factors)


def _judged(factors: tuple[Factor, ...], local: EngineGeometry, remote: EngineGeometry) -> Iterator[Factor]:
    by_name = {factor.name: factor for factor in factors}
    latent = bool(local.workers) and all(g.kind == "mla" for g in local.workers[0].groups)
    judges: dict[str, Callable[[], str]] = {
        "compatibility_hash": lambda: _hash(by_name),
        "block_size": lambda: _block_size(local, remote),
        "layout": lambda: "" if latent else _layout(local, remote),
        "tp": lambda: _dividing("tensor parallel sizes", local.tp, remote.tp),
        "dcp": lambda: _dividing("context parallel sizes", local.dcp, remote.dcp),
        "regions": lambda: "both sides must register the same number of regions",
    }
    for name, judge in judges.items():
        factor = by_name.get(name)
        if factor is None or factor.same or factor.alike:
            continue
        wrong = judge()
        yield Factor(name, factor.local, factor.remote, not wrong, wrong or factor.note, fatal=True)
    # What the hash is made of cannot differ without it, however harmless it would be.
    hashes = by_name.get("compatibility_hash")
    for name in HASHED:
        factor = by_name.get(name)
        if factor and factor.differs and factor.ok and hashes and not hashes.same:
            note = "part of the compatibility hash: NixlConnector refuses the handshake"
            yield Factor(name, factor.local, factor.remote, ok=False, note=note, fatal=True)


def _hash(factors: Mapping[str, Factor]) -> str:
    differing = [name for name in HASHED if name in factors and factors[name].differs]
    unknown = [name for name in ("vllm_version", "dtype", "cache_dtype") if _unknown(factors.get(name))]
    if differing:
        return f"NixlConnector refuses the handshake; what differs is {', '.join(differing)}"
    if unknown:
        return "NixlConnector refuses the handshake, and the hash hides why: give model=, name=, vllm= of both sides"
    return "NixlConnector refuses the handshake: what differs is none of the factors shown, say a drafter"


def _unknown(factor: Factor | None) -> bool:
    return factor is None or "unknown" in (factor.local, factor.remote)


def _block_size(local: EngineGeometry, remote: EngineGeometry) -> str:
    mine, theirs = (
        int(str(e.facts.get("kernel_block_size", e.facts["block_size"]))) for e in (local, remote)
    )
    if mine % theirs:
        return f"a reader's blocks ({mine} tokens in the kernel) must be a multiple of those that it reads ({theirs})"
    if local.tp and remote.tp > local.tp:
        return "blocks may differ only where the reading side has as many tensor parallel ranks or more"
    return ""


def _layout(local: EngineGeometry, remote: EngineGeometry) -> str:
    if (local.facts["layout"], remote.facts["layout"]) == ("LBNHC", "LBHNC"):
        return "only with enable_permute_local_kv in the reading side's --kv-transfer-config"
    return "NixlConnector copies blocks as they are: both sides need one layout"


def _dividing(what: str, mine: int, theirs: int) -> str:
    if not mine or not theirs or mine % theirs == 0 or theirs % mine == 0:
        return ""
    return f"of the {what} one must divide the other"
