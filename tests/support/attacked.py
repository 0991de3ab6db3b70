"""Whether a kvd can be felled: an honest client beside an attacker, and what it saw.

    def flood(directory: Path) -> None: ...            # at module level; runs in a process of its own

    def test_a_flood() -> None:
        with daemons() as (kvd,), attacked(kvd) as watch:
            attack(flood, kvd.directory, seconds=2.0)  # or `with attacking(flood, kvd.directory):`
        assert_unfelled(watch.verdict())

`tests/support/pinger.py` says how latencies are measured.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.support.daemons import ROOT, Daemon
from tests.support.pinger import LAST_SECONDS, Pings

PING_SECONDS = 0.050
"""Another client's ping takes no longer during an attack, for 99 of 100."""
CROWDED = 10
"""Of what one ping waited for a processor this part is granted to all, beside what is taken out of each of them: where
so many others run, what kvd computes takes longer too. Three times as long as elsewhere is the most."""
RSS_BYTES = 300 << 20
NICER = 5
"""An attacker gets less of the processor than those that it attacks: what a kvd does is measured, not what it gets."""
START_SECONDS = 30.0


@dataclass(frozen=True)
class Verdict:
    """How a kvd fared: latencies of an honest client's pings in seconds, and its most memory in bytes.

    ``waited`` is the most that was taken out of a latency for the machine's sake, in seconds.
    """

    p50: float
    p99: float
    worst: float
    rss_peak: int
    alive: bool
    unanswered: int
    pings: int
    waited: float

    def __str__(self) -> str:
        life = "alive" if self.alive else "DEAD"
        times = ", ".join(
            f"{name} {seconds * 1000:.1f} ms"
            for name, seconds in (("p50", self.p50), ("p99", self.p99), ("worst", self.worst))
        )
        return (
            f"{life}; {self.pings} pings: {times}; {self.unanswered} unanswered; "
            f"RSS at most {self.rss_peak / 2**20:.0f} MiB (not counted: {self.waited * 1000:.1f} ms of no processor)"
        )


class Watch:
    """An honest client at work; `verdict` ends it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._verdict: Verdict | None = None
        arguments = ("tests.support.pinger", str(daemon.directory), str(daemon.pid))
        self._process = _python(*arguments)
        if _line(self._process) != b"pinging\n":
            self.close()
            raise AssertionError(f"the honest client did not begin: kvd {daemon.directory}\n{daemon.log}")

    def verdict(self) -> Verdict:
        """What was seen until now, or until it was asked for first. Answers may come for two seconds more."""
        if self._verdict is None:
            out, _ = self._process.communicate(timeout=LAST_SECONDS + START_SECONDS)
            assert self._process.returncode == 0, "the honest client failed"
            assert self._daemon.process is not None
            self._verdict = _judged(msgspec.json.decode(out, type=Pings), self._daemon.process.poll() is None)
        return self._verdict

    def close(self) -> None:
        """End it, whatever it saw."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def attacked(daemon: Daemon) -> Iterator[Watch]:
    """An honest client of ``daemon``, from before the block to its end, or to `Watch.verdict` in it."""
    watch = Watch(daemon)
    try:
        yield watch
        watch.verdict()
    finally:
        watch.close()


def assert_unfelled(verdict: Verdict, *, ping_seconds: float = PING_SECONDS, rss: int = RSS_BYTES) -> None:
    """kvd lives, answered others in time, and stayed small. The figures stand in the message, and with -s on stderr."""
    sys.stderr.write(f"\nmeasured: {verdict}\n")
    assert verdict.alive, f"kvd ended: {verdict}"
    assert verdict.pings > verdict.unanswered, f"nothing was measured: {verdict}"
    assert verdict.p99 <= ping_seconds + min(verdict.waited / CROWDED, 2 * ping_seconds), (
        f"kvd kept others waiting over {ping_seconds * 1000:g} ms: {verdict}"
    )
    assert verdict.rss_peak <= rss, f"kvd took over {rss >> 20} MiB: {verdict}"


class Attacker:
    """A ``process`` that runs one function."""

    def __init__(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.name = function.__name__
        self.process = _python("tests.support.attacked", _module(function), function.__qualname__)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(arguments, self.process.stdin)
            self.process.stdin.close()
        if _line(self.process) != b"attacking\n":
            self.end()
            raise AssertionError(f"{self.name} did not begin; its standard error says why")

    def wait(self, seconds: float) -> bool:
        """Whether the function returned within so many seconds."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        assert code == 0, (
            f"{self.name} failed; its standard error says why: an attack that fails shows nothing"
        )
        return True

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def attacking(function: Callable[..., object], *arguments: Any) -> Iterator[Attacker]:
    """A process that calls a module-level function, from its first statement to the end of the block.

    Arguments are pickled. The function may return before the end, but must not raise: then the block fails.
    """
    attacker = Attacker(function, arguments)
    try:
        yield attacker
        attacker.wait(0.0)
    finally:
        attacker.end()


def attack(function: Callable[..., object], *arguments: Any, seconds: float) -> bool:
    """Run a function as an attacker for so many seconds at most; whether it returned by itself."""
    with attacking(function, *arguments) as attacker:
        return attacker.wait(seconds)


def _module(function: Callable[..., object]) -> str:
    """Where to import it from, also where its module is the program."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = sys.modules["__main__"].__spec__
    assert spec is not None
    return spec.name


def _python(*arguments: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(ROOT / "daemon"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def _judged(pings: Pings, alive: bool) -> Verdict:
    times = sorted(pings.latencies) or [0.0]

    def at(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))]

    return Verdict(
        p50=at(0.5),
        p99=at(0.99),
        worst=times[-1],
        rss_peak=pings.rss_peak,
        alive=alive,
        unanswered=pings.unanswered,
        pings=len(pings.latencies),
        waited=pings.waited,
    )


def _main() -> None:
    module, name = sys.argv[1:3]
    function = getattr(importlib.import_module(module), name)
    arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 (the test that started this process wrote it)
    os.nice(NICER)
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    function(*arguments)


if __name__ == "__main__":
    _main()
