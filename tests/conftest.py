"""For all tests: what interrupts them, and what is made of those that a standstill of the machine made fail."""

import signal
import time
from collections.abc import Generator, Iterator
from functools import partial

import pytest

from tests.support.standstill import Standstill, lost_seconds, watching

STANDSTILLS = pytest.StashKey[list[Standstill]]()
BEGAN = pytest.StashKey[float]()
LOST_SECONDS = 2.0
"""What a core lost in a test that makes its failure say nothing: deadlines of a few seconds are over then."""

# A shell starts what runs in its background with SIGINT ignored, and children inherit that: Ctrl-C would do nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def standstills(request: pytest.FixtureRequest) -> Iterator[None]:
    with watching() as found:
        request.config.stash[STANDSTILLS] = found
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all for a second try: what failed while the machine stood still says nothing, the deadlines being over."""
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=1, condition=partial(_stood_still, item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a failure that the machine stood still meanwhile."""
    report = yield
    if report.failed and (still := _stood_still(item)):
        report.sections.append(("The machine stood still in this test", "\n".join(map(str, still))))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what made the first try of a test fail, as its second did not."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.line(report.longreprtext)
        for title, content in report.sections:
            terminalreporter.section(title, "-")
            terminalreporter.line(content)


def _stood_still(item: pytest.Item, _: object = None) -> list[Standstill]:
    """The standstills of the machine since a test began, its fixtures included, where they took enough in all."""
    found = [one for one in item.config.stash.get(STANDSTILLS, []) if one.ended > item.stash[BEGAN]]
    return found if lost_seconds(found) >= LOST_SECONDS else []
