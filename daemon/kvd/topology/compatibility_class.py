"""The compatibility class of an engine: a short word that says "these fit" of engines that share it.

It is made of all that `kvd.topology.compat` may refuse two engines for: the facts that are fatal there, in the one form
in which they are compared, and what the layers hold. Sizes, layouts, block sizes, versions and names that mean the same
do not count. So engines of one class fit; engines of two may fit as well, where only one of them tells a fact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kvd.geometry.content import added, content_of
from kvd.geometry.model import EngineGeometry
from kvd.topology.compat import FACT_RULES, FactValue, meaning

PREFIX = "k1-"
"""The way in which a class is made: those of another way are never equal to it."""


def compatibility_class(engine: EngineGeometry) -> str:
    """The class of an engine; empty while workers are missing."""
    if not engine.workers or len(engine.workers) < engine.world_size:
        return ""
    stages = {worker.rank.pp: content_of(worker.groups) for worker in engine.workers}
    return class_of(engine.model, engine.facts, added(stages.values()))


def class_of(model: str, facts: Mapping[str, FactValue], content: int) -> str:
    """The class of an engine with these facts, backend included, whose layers hold ``content``."""
    told: dict[str, FactValue] = {**({"model": model} if model else {}), **facts}
    fatal = {name: meaning(name, told) for name in told if name in FACT_RULES and FACT_RULES[name].fatal}
    if told.get("weights") is not None:
        fatal.pop("model", None)  # names do not decide, weights do
    text = repr((sorted(fatal.items()), content)).encode()
    return PREFIX + hashlib.blake2b(text, digest_size=6).hexdigest()
