"""How requests of the local engines were served: the schedulers' totals, cut into steps of the last minutes.

The prefilling side does not see whether anybody reads what it keeps. Its kvd does: each lease belongs to the step in
which it was opened, and to those that nobody claimed until somebody does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally, beyond
from kvd.wire.identity import EngineFacts
from kvd.wire.limits import MOST
from kvd.wire.outcomes import OTHER, OutcomeCount, OutcomeKey, OutcomeRow, ReportOutcomes

STEP_SECONDS = 5.0
STEPS = 60
"""Steps that are kept: five minutes."""
CLAIM_SECONDS = 10.0
"""A lease that is younger may still be claimed: the request is on its way to a decoder, or waits there for its turn."""
MOST_WAITING = 65_536
"""Most leases of an engine that are remembered as not claimed."""
MOST_WAITING_IN_ALL = 131_072
"""The same of all engines: 25 MB. Beyond it an engine that opens more forgets its own oldest ones."""
MOST_NUMBERS_OF_UID = 262_144
"""Most numbers that are kept for the engines of one user, some 250 bytes each; 64 busy ones have 40,000."""
MOST_NUMBERS = 393_216
"""The same of all users."""
MOST_KEYS = 128
"""Most outcomes with their codes that are told apart for an engine; they are labels of a metric."""


@dataclass(slots=True)
class _Step:
    number: int
    counts: Counter[OutcomeKey] = field(default_factory=Counter)
    tokens: Counter[OutcomeKey] = field(default_factory=Counter)
    leases: int = 0
    claimed: int = 0


@dataclass(slots=True)
class _Engine:
    """``reported`` is what its scheduler, of that incarnation, said last.

    ``waiting`` are leases that nobody claimed, by the hash of their ids. ``numbers`` is how many are kept of all that.
    """

    incarnation: str = ""
    reported: dict[OutcomeKey, tuple[int, int]] = field(default_factory=dict)
    total: _Step = field(default_factory=lambda: _Step(0))
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=STEPS))
    waiting: OrderedDict[int, int] = field(default_factory=OrderedDict)
    uid: int = -1
    numbers: int = 0

    def step(self, now: float) -> _Step:
        """The one that ``now`` belongs to."""
        number = int(now // STEP_SECONDS)
        if not self.steps or self.steps[-1].number != number:
            self.steps.append(_Step(number))
        return self.steps[-1]

    def between(self, first: float, last: float) -> Iterator[_Step]:
        """Steps that began at ``first`` or later and ended at ``last`` or earlier."""
        for step in self.steps:
            if step.number * STEP_SECONDS >= first and (step.number + 1) * STEP_SECONDS <= last:
                yield step


class OutcomeCounts:
    """All local engines' counts. Methods are for the event loop; ``now`` is time.monotonic()."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._numbers: Tally[int] = Tally()
        self._waiting = 0

    def report(self, incarnation: str, report: ReportOutcomes, now: float, uid: int = -1) -> None:
        """A scheduler's totals, of which only what is new counts.

        Raises `RequestRefused` where too much is kept already for the engines of its user, or of all.
        """
        engine = self._engine(report.engine_id)
        self._make_room(engine, uid, 3 * len(report.totals) + len(report.known))
        if engine.incarnation != incarnation:
            engine.incarnation, engine.reported = incarnation, _sums(report.known)
        step = engine.step(now)
        for key, (requests, tokens) in _sums(report.totals).items():
            before = engine.reported.get(key, (0, 0))
            engine.reported[key] = (requests, tokens)
            named = (
                key if key in engine.total.counts or len(engine.total.counts) < MOST_KEYS else (key[0], OTHER)
            )
            for counted in (step, engine.total):
                counted.counts[named] += max(0, requests - before[0])
                counted.tokens[named] += max(0, tokens - before[1])
        self._count(engine, uid)

    def _make_room(self, engine: _Engine, uid: int, wanted: int) -> None:
        while full := self._full(engine, uid, wanted):
            if not engine.steps:
                raise RequestRefused(
                    "KVD-TOO-MANY",
                    f"{wanted} numbers of an engine are not taken: {full}",
                    hint="run fewer engines, or report fewer codes",
                )
            engine.steps.popleft()
            self._count(engine, uid)

    def _full(self, engine: _Engine, uid: int, wanted: int) -> str:
        more = max(0, wanted - len(engine.reported) - len(engine.total.counts))
        return beyond(self._numbers, "numbers of engines", uid, more, (MOST_NUMBERS_OF_UID, MOST_NUMBERS))

    def _count(self, engine: _Engine, uid: int) -> None:
        self._numbers.add(engine.uid, -engine.numbers)
        steps = sum(len(step.counts) for step in engine.steps)
        engine.uid, engine.numbers = uid, len(engine.reported) + len(engine.total.counts) + steps
        self._numbers.add(uid, engine.numbers)

    def opened(self, engine_id: str, request_ids: Iterable[str], now: float) -> None:
        """Leases that were opened just now, and not said again."""
        engine = self._engine(engine_id)
        step = engine.step(now)
        self._waiting -= len(engine.waiting)
        for request_id in request_ids:
            engine.waiting[hash(request_id)] = step.number
            step.leases += 1
            engine.total.leases += 1
        most = max(0, min(MOST_WAITING, MOST_WAITING_IN_ALL - self._waiting))
        while len(engine.waiting) > most or next(iter(engine.waiting.values()), step.number) < (
            step.number - STEPS
        ):
            engine.waiting.popitem(last=False)
        self._waiting += len(engine.waiting)

    def claimed(self, engine_id: str, request_id: str) -> None:
        """Somebody claims a lease; only the first one counts, and only of a lease that was opened here."""
        engine = self._engines.get(engine_id)
        number = engine.waiting.pop(hash(request_id), None) if engine is not None else None
        if engine is None or number is None:
            return
        self._waiting -= 1
        engine.total.claimed += 1
        for step in reversed(engine.steps):
            if step.number == number:
                step.claimed += 1
                return

    @property
    def engine_ids(self) -> Collection[str]:
        """The engines of which anything was counted."""
        return self._engines.keys()

    def row(self, facts: EngineFacts, seconds: float, now: float) -> OutcomeRow:
        """One engine's counts of the last ``seconds``, in whole steps."""
        engine = self._engines.get(facts.engine_id) or _Engine()
        lately = _Step(0)
        for step in engine.between(now - seconds - STEP_SECONDS, now + STEP_SECONDS):
            lately.counts.update(step.counts)
            lately.tokens.update(step.tokens)
        old = now - CLAIM_SECONDS
        for step in engine.between(old - seconds - STEP_SECONDS, old):
            lately.leases += step.leases
            lately.claimed += step.claimed
        return OutcomeRow(
            engine_id=facts.engine_id,
            role=facts.role,
            model=facts.model,
            seconds=seconds,
            lately=_counts(lately),
            totals=_counts(engine.total),
            leases=lately.leases,
            unclaimed=lately.leases - lately.claimed,
            leases_total=engine.total.leases,
            claimed_total=engine.total.claimed,
        )

    def forget(self, engine_id: str) -> None:
        """That engine is not known any more."""
        if (engine := self._engines.pop(engine_id, None)) is not None:
            self._waiting -= len(engine.waiting)
            self._numbers.add(engine.uid, -engine.numbers)

    def _engine(self, engine_id: str) -> _Engine:
        return self._engines.setdefault(engine_id, _Engine())


def _sums(counts: Iterable[OutcomeCount]) -> dict[OutcomeKey, tuple[int, int]]:
    return {(count.outcome, count.code): (count.requests, count.tokens) for count in counts}


def _counts(step: _Step) -> tuple[OutcomeCount, ...]:
    return tuple(
        # Nearly 2**63 requests, reported twice, must not make the answer one that cannot be encoded.
        OutcomeCount(key[0], key[1], min(requests, MOST), min(step.tokens[key], MOST))
        for key, requests in sorted(step.counts.items())
        if requests
    )
