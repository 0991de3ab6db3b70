"""Engines behind stock connectors: do their listeners answer, who are they, and do they fit?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from kvctl.doctor.checks import checked
from kvctl.engines.pairs import described
from kvctl.engines.probing import probed
from kvctl.engines.stock import StockAddress, stock_address, stock_engine
from kvctl.errors import KvctlError, UsageError
from kvctl.stock.bounded import StockGarbage, StockSilent, StockUnreachable
from kvctl.views.doctor import Check, CheckState
from kvd.addresses import is_loopback
from kvd.geometry.model import EngineGeometry

PROBES = 3
LOSES_RECEIVES = ((0, 24), (0, 30))
"""Versions of vLLM, from and before, that lose failed receives of several groups: docs/builds.md."""

_stock = partial(checked, "transfers")


def stock_checks(from_: str, to: str, timeout: float) -> Iterator[Check]:
    """The checks of a pair: ``to`` reads from ``from_``. Raises `UsageError` for what is no address of a connector."""
    engines = []
    for text in (from_, to):
        address = stock_address(text)
        if address is None:
            raise UsageError(
                f"{text!r} is no address of a stock connector",
                "write nixl://HOST:5600 or mooncake://HOST:8998",
            )
        checks, engine = _one(address, timeout)
        yield from checks
        engines.append(engine)
    source, reader = engines
    if source is None or reader is None:
        yield _stock("skipped", "STOCK_PAIR", "one of the two cannot be described, so they are not compared")
        return
    yield from _pair(reader, source)


def _one(address: StockAddress, timeout: float) -> tuple[list[Check], EngineGeometry | None]:
    """What is to be said of one address, and its engine where it can be described."""
    found = probed(address, PROBES, timeout)
    if found.error is not None:
        return [_unanswered(address, found.error)], None
    checks = [
        _stock("ok", "LISTENER", f"{address.text} answers handshakes, in {max(found.seconds) * 1000:.0f} ms")
    ]
    if len(found.engines) > 1 and address.scheme == "nixl":
        checks.append(
            _stock(
                "failed", "PEER_REINCARNATED",
                f"{address.text} was {' and '.join(dict.fromkeys(name for name, _ in found.engines))} within"
                f" {PROBES} questions, with other memory each time",
                "is it restarting, or do two engines or a balancer stand behind one address? Each needs its own",
            )
        )  # fmt: skip
    if is_loopback(address.host):
        checks.append(
            _stock(
                "warning", "ADVERTISED_HOST_LOOPBACK",
                f"{address.text} was asked on this host itself: a decoder elsewhere that is told {address.host} asks"
                " itself",
                "where decoders run on other hosts, set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that they reach",
            )
        )  # fmt: skip
    try:
        engine = stock_engine(address, timeout)
    except UsageError:
        raise
    except KvctlError as error:
        return [*checks, _stock("failed", _code(error), error.message, error.hint)], None
    return [*checks, *_build(address, engine)], engine


def _unanswered(address: StockAddress, error: KvctlError) -> Check:
    code = "PORT_CLASH" if isinstance(error, StockGarbage) else "LISTENER_DEAD"
    return _stock("failed", code, f"{address.text}: {error.message}", error.hint, error.code)


def _code(error: KvctlError) -> str:
    """The code that a hint begins with, where that names the situation."""
    if isinstance(error, (StockUnreachable, StockSilent)):
        return "LISTENER_DEAD"
    named = re.match(r"[A-Z]+(?:_[A-Z]+)+(?=:)", error.hint)
    return named[0] if named else "STOCK_MODEL"


def _build(address: StockAddress, engine: EngineGeometry) -> Iterator[Check]:
    """A build that goes on with memory that was never written, where a load of several groups failed."""
    told = re.match(r"(\d+)\.(\d+)", str(engine.facts.get("vllm_version", "")))
    if told is None or not engine.workers:
        return
    version, groups = (int(told[1]), int(told[2])), len(engine.workers[0].groups)
    if LOSES_RECEIVES[0] <= version < LOSES_RECEIVES[1] and groups > 1:
        yield _stock(
            "warning", "FAIL_OPEN_BUILD",
            f"{address.text} runs vLLM {engine.facts['vllm_version']} with {groups} cache groups: it loses failed"
            " receives, and answers 200 with text of memory that nobody wrote",
            "upgrade to vLLM 0.30, or see docs/builds.md",
        )  # fmt: skip


def _pair(reader: EngineGeometry, source: EngineGeometry) -> Iterator[Check]:
    pair = described(reader, source)
    for finding in pair.findings:
        if finding.severity != "info":
            state: CheckState = "failed" if finding.severity == "error" else "warning"
            yield _stock(state, finding.code, finding.message, finding.hint)
    if pair.compatible and not any(finding.severity == "error" for finding in pair.findings):
        unknown = (
            "" if reader.workers and source.workers else ", as far as the handshake tells; model= tells more"
        )
        yield _stock("ok", "STOCK_PAIR", f"{reader.engine_id} can read from {source.engine_id}{unknown}")
