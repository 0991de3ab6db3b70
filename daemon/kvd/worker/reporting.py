"""What a worker tells vLLM with a step: which loads and sends ended, and for the scheduler's half why loads missed."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.worker.load import Load
from kvd.worker.orders import StepOutcomes


@dataclass(slots=True)
class Results:
    """What ended since the last step.

    ``failed`` of models with one group comes with the blocks that hold nothing good; ``lost_blocks`` are all that a
    failed load was to fill.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    lost_blocks: set[int] = field(default_factory=set)


class Reporting:
    """What ended and is not told yet; used in vLLM's step alone.

    Loads that are complete are told with the step, or to whoever asks for them before it. One that was not asked for in
    time is told with the step after. Misses are told with the step only: that is where vLLM recovers from them. Of
    loads that their own step uses vLLM is told nothing.
    """

    def __init__(self) -> None:
        self.results = Results()
        self._outcomes = StepOutcomes()
        self._complete: list[Load] = []
        self._in_step: list[Load] = []
        self.asked_early = False
        """Whether somebody asks before each step that loads are under way in."""

    def note(self, load: Load) -> None:
        """A load has ended."""
        if load.order.in_step:
            self._in_step.append(load)
            return
        if load.cause is None:
            self._complete.append(load)
            return
        request_id = load.order.request_id
        self.results.received.add(request_id)
        self.results.failed.add(request_id)
        self.results.bad_blocks |= load.bad_blocks
        self.results.lost_blocks |= load.order.block_ids
        _note_outcome(self._outcomes, load)

    @property
    def waits(self) -> bool:
        """Whether something waits for the step to tell it."""
        return bool(self.results.sent or self.results.received or self._complete)

    @property
    def expects(self) -> bool:
        """Whether complete loads wait to be asked for, or it is not known yet that somebody asks."""
        return bool(self._complete) or not self.asked_early

    def hold(self) -> list[Load]:
        """Complete loads for this step to tell. Where somebody asks early, those noted after this are left to that."""
        held, self._complete = self._complete, []
        return held

    def tell(self, held: list[Load]) -> Results:
        """The step's results, with those ``held`` loads. Clears them."""
        if not self.asked_early:
            held = [*held, *self.hold()]
        for load in held:
            self.results.received.add(load.order.request_id)
            _note_outcome(self._outcomes, load)
        told, self.results = self.results, Results()
        return told

    def tell_early(self) -> tuple[set[str], StepOutcomes]:
        """The complete loads that were not told, with their outcomes; from now on they are asked for before a step."""
        self.asked_early = True
        outcomes = StepOutcomes()
        if not self._complete:
            return set(), outcomes
        loads = self.hold()
        for load in loads:
            _note_outcome(outcomes, load)
        return {load.order.request_id for load in loads}, outcomes

    def tell_in_step(self) -> StepOutcomes:
        """What became of loads that the step which ordered them uses, misses too. Clears them."""
        loads, self._in_step = self._in_step, []
        outcomes = StepOutcomes()
        for load in loads:
            _note_outcome(outcomes, load)
        return outcomes

    def outcomes(self, read_cost: float = 0.0) -> StepOutcomes:
        """The outcomes of what `tell` told, with the ``read_cost`` since the last ones. Clears them."""
        outcomes = self._outcomes
        outcomes.read_cost += read_cost
        if outcomes:
            self._outcomes = StepOutcomes()
        return outcomes

    def inherit(self, results: Results, outcomes: StepOutcomes) -> None:
        """Tell this with the next step."""
        self.results, self._outcomes = results, outcomes


def _note_outcome(outcomes: StepOutcomes, load: Load) -> None:
    request_id = load.order.request_id
    outcomes.loads[request_id] = load.cause
    outcomes.quiesced[request_id] = load.times.ended
    if load.cause:
        outcomes.prefixes[request_id] = load.prefix
