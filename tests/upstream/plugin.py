"""The plugin of pytest that has vLLM's own tests run against KvdConnector. Nothing of theirs is edited: it wraps.

`tests.upstream.adapted` says what is adapted and which tests do not apply. A name there that vLLM's tests do not have,
and an adaptation that none of them used, are errors: the list says what is so.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from kvctl.processes.daemons import two_hosts
from tests.support.tiny_models import write_model
from tests.upstream.adapted import ADAPTATIONS, BOTH_WAYS, FETCHED, FILES, MISSES, SEVERAL, UNFIT, UNITS
from tests.upstream.engines import Around, answered, present
from tests.upstream.ledger import records, unclaimed, unexplained, unused

AROUND = pytest.StashKey[Around]()
USED = pytest.StashKey[Counter[str]]()
LEFT_OUT = pytest.StashKey[list[str]]()
LEDGERS = pytest.StashKey[list[str]]()
STACK = pytest.StashKey[contextlib.ExitStack]()
PACKAGE = ".".join(UNITS.parts)
STATS_NAMES = {
    "NixlConnector": "KvdConnector",
    "transfer_duration": "xfer_seconds",
    "post_duration": "post_seconds",
    "bytes_transferred": "bytes",
    "num_descriptors": "descriptors",
    "num_failed_transfers": "failed",
    "num_kv_expired_reqs": "expired",
}
"""Words of the tests of statistics, and those of `kvd.vllm.metrics` for them."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_test: vLLM's own mark")
    stack = config.stash[STACK] = contextlib.ExitStack()
    used = config.stash[USED] = Counter()
    config.stash[LEFT_OUT] = []
    config.stash[LEDGERS] = []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-")))
    utils = importlib.import_module(f"{PACKAGE}.utils")
    hosts = stack.enter_context(two_hosts(folder))
    around = Around(write_model("llama", folder / "models"), hosts, dict(vars(utils)))
    config.stash[AROUND] = around
    stack.callback(around.everywhere.close)
    vars(utils).update(create_vllm_config=_configs(around, used), create_scheduler=_schedulers(around, used))
    doubles = ModuleType(f"{PACKAGE}.test_nixl_connector")
    vars(doubles).update(
        FakeNixlConnectorWorker=type("FakeNixlConnectorWorker", (), {"REMOTE_ENGINE_ID": ""}),
        FakeNixlWrapper=type("FakeNixlWrapper", (), {}),
    )
    sys.modules[doubles.__name__] = doubles


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[STACK].close()


@pytest.fixture(autouse=True)
def _ends_with_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Schedulers of a test, and the cards of their workers, leave with it."""
    around = request.config.stash[AROUND]
    with contextlib.ExitStack() as around.in_test:
        yield


def _configs(around: Around, used: Counter[str]) -> Callable[..., Any]:
    stock = around.utils["create_vllm_config"]

    @wraps(stock)
    def create_vllm_config(*args: Any, **given: Any) -> Any:
        bound = signature(stock).bind(*args, **given)
        bound.apply_defaults()
        named = dict(bound.arguments)
        if named["kv_connector"] == "NixlConnector":
            used.update({"model": 1, "connector": 1, "role": named["kv_role"] == "kv_consumer"})
            return around.config(around.hosts[1], **named)
        extra = named["kv_connector_extra_config"]
        for child in extra["connectors"]:
            if child["kv_connector"] == "MockHMAConnector":
                used["child"] += 1
                child.update(kv_connector="KvdConnector", kv_connector_module_path="kvd.vllm")
        used["model"] += 1
        return stock(**{**named, "model": str(around.model)})

    return create_vllm_config


def _schedulers(around: Around, used: Counter[str]) -> Callable[..., Any]:
    stock = around.utils["create_scheduler"]

    @wraps(stock)
    def create_scheduler(*args: Any, **given: Any) -> Any:
        scheduler = stock(*args, **given)
        if type(scheduler.connector).__name__ != "KvdConnector":
            return scheduler
        present(scheduler, around.in_test)
        used["worker"] += 1
        add = scheduler.add_request

        def add_request(request: Any) -> None:
            loads = (request.kv_transfer_params or {}).get("do_remote_prefill")
            if loads:
                request.kv_transfer_params = around.prefilled(scheduler, request)
            add(request)
            if loads:
                answered(scheduler, request)
                used.update(("params", "answer"))

        scheduler.add_request = add_request
        return scheduler

    return create_scheduler


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not apply, and have the tests of statistics speak of KvdConnector's."""
    out: list[pytest.Item] = []
    stay: list[pytest.Item] = []
    found: set[tuple[Path, str]] = set()
    for item in items:
        file = _file(item)
        name = getattr(item, "originalname", item.name)
        unfit = next((one for one in UNFIT[file] if name in one.names), None)
        found.add((file, name))
        (stay if unfit is None else out).append(item)
        cls = getattr(item, "cls", None)
        if file == SEVERAL and cls is not None and "Stats" in cls.__name__ and unfit is None:
            _speaks_of_ours(item)
            config.stash[USED]["stats"] += 1
        if file == BOTH_WAYS:
            config.stash[USED]["nixl's doubles"] = 1
    collected = {file for file, _ in found}
    named = {(file, name) for file in collected for one in UNFIT[file] for name in one.names}
    if gone := sorted(f"{file}::{name}" for file, name in named - found):
        raise pytest.UsageError(
            f"tests.upstream.adapted names tests that vLLM does not have: {', '.join(gone)}"
        )
    config.stash[LEFT_OUT] += sorted({getattr(item, "originalname", item.name) for item in out})
    items[:] = stay
    config.hook.pytest_deselected(items=out)


def _file(item: pytest.Item) -> Path:
    """A test's file among those that were fetched; pytest has followed the links to it."""
    return item.path.relative_to(FETCHED.resolve())


def _speaks_of_ours(item: Any) -> None:
    from kvd.vllm.metrics import KvdTransferStats

    item.module.NixlKVConnectorStats = KvdTransferStats
    function = item.function
    function.__code__ = _worded(function.__code__)


def _worded(constant: Any) -> Any:
    """A constant of a function, and its code, in the words of `STATS_NAMES`."""
    if isinstance(constant, str):
        return STATS_NAMES.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(map(_worded, constant))
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(map(_worded, constant.co_consts)))
    return constant


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a kvd knows what nobody explains, and where all files ran and no test used an adaptation."""
    hosts, loads = session.config.stash[AROUND].hosts, session.config.stash[USED]["answer"]
    found = records(hosts)
    rows = [*unexplained(found, MISSES), *unclaimed(hosts[0], loads)]
    said = f"{loads} loads, whose bytes a test says; {len(found)} records of workers; {len(rows)} lines unexplained"
    session.config.stash[LEDGERS] += [said, *rows]
    if rows and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    files = set(map(_file, session.items))
    idle = [name for name in ADAPTATIONS if not session.config.stash[USED][name]] + unused(found, MISSES)
    if idle and files == set(FILES) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[LEFT_OUT].append(f"and these adaptations were used by none: {', '.join(idle)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("adapted, and how often")
    for name, count in config.stash[USED].items():
        terminalreporter.line(f"{count:4}  {ADAPTATIONS[name].what}: {ADAPTATIONS[name].now}")
    terminalreporter.section("what the kvds know")
    for line in config.stash[LEDGERS]:
        terminalreporter.line(line)
    terminalreporter.section("does not apply (docs/upstream-tests.md says why)")
    for name in config.stash[LEFT_OUT]:
        terminalreporter.line(name)
