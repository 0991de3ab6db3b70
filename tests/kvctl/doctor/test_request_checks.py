"""Real schedulers' halves and kvds, a router that drops the params, and what doctor makes of it on either host."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from kvctl.cli.settings import Settings
from kvctl.doctor.request_checks import request_checks
from kvd.client.session import KvdSession
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.wire.identity import Endpoint, EngineFacts, LeaseKey
from kvd.wire.lease import LeaseClaim
from kvd.wire.outcomes import GetOutcomes, Outcomes
from kvd.wire.query import ListEngines
from kvd.worker.settings import ConnectorSettings
from tests.kvctl.conftest import SERVED, FakeDaemon
from tests.support.daemons import Daemon, daemons, facts, session, wait_for, worker
from tests.support.rigs.half import LLAMA, PREFILL_HERE, Request

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

REQUESTS = 8


@contextlib.contextmanager
def half(kvd: Daemon, engine: EngineFacts) -> Iterator[SchedulerHalf]:
    """The scheduler's half of an engine beside a kvd, with a worker."""
    with session(kvd, worker(engine)):
        opened = functools.partial(KvdSession, directory=kvd.directory)
        made = SchedulerHalf(ConnectorSettings(lease_seconds=200.0), engine, LLAMA, "recompute", opened)
        try:
            wait_for(lambda: made._session.state.engine_generation)
            yield made
        finally:
            made.close()


def served(engine: SchedulerHalf, name: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
    """vLLM's calls for one request that is computed here; what its answer carries."""
    request = Request(name, params)
    engine.new_request(request)
    assert engine.matched_tokens(request, 0) == (0, False)
    request.num_computed_tokens = 10
    return engine.finished(request, ((1, 2, 3),), completed=True)[1]


def requests(run: Run, kvd: Daemon) -> dict[str, dict[str, str]]:
    outcome = run("doctor", "--quick", "-o", "json", "--runtime-dir", kvd.directory)
    return {c["code"]: c for c in json.loads(outcome.out)["checks"] if "DISAGGREGATED" in c["code"]}


def test_params_that_a_router_drops_are_seen_on_either_host_and_more_with_a_link(run: Run) -> None:
    with (
        daemons(2) as (here, there),
        half(there, facts("p", role="prefill")) as prefiller,
        half(here, facts("d", role="decode")) as decoder,
    ):
        for number in range(REQUESTS):
            assert served(prefiller, f"r{number}", PREFILL_HERE)
            served(decoder, f"s{number}", None)
        alone = wait_for(lambda: requests(run, here).get("NOT_DISAGGREGATED"), 20.0)
        assert (alone["reason"], alone["state"]) == ("NO_PARAMS", "failed")
        assert alone["found"].startswith(f"d: {REQUESTS} of {REQUESTS} prompts of the last 60 s (100% of")
        kept = wait_for(lambda: requests(run, there).get("NOT_DISAGGREGATED"), 40.0)
        assert (kept["reason"], kept["state"]) == ("UNCLAIMED", "failed")
        with session(here, worker(facts("other"))) as asker:  # from now on the kvds have a link
            key = LeaseKey(engine_id="p", request_id="?", endpoint=there.endpoint)
            asker.call(LeaseClaim(key=key, reader="r"), 5.0).result(10)
        linked = wait_for(lambda: requests(run, here)["NOT_DISAGGREGATED"])
        assert linked["reason"] == "ROUTER_DROPS_PARAMS"
        assert f"nobody claims what is kept by p ({REQUESTS})" in linked["found"]


def test_with_little_or_nothing_to_tell_it_is_well(daemon: FakeDaemon) -> None:
    [check] = request_checks(Settings(runtime_dir=str(daemon.directory)))
    assert (check.code, check.state) == ("DISAGGREGATED", "ok")
    assert check.found == "in the last 60 s 0 prefills were kept or pushed here and 38 loaded"
    assert daemon.asked == [GetOutcomes(seconds=60.0, peers=True), ListEngines()]


def test_linked_hosts_are_not_counted_as_this_one(daemon: FakeDaemon) -> None:
    there = msgspec.structs.replace(SERVED[0], engine_id="q", endpoint=Endpoint("10.0.0.9", 7766))
    daemon.answers[GetOutcomes] = lambda _: Outcomes(rows=(*SERVED, there))
    [check] = request_checks(Settings(runtime_dir=str(daemon.directory)))
    assert "38 loaded" in check.found


def test_an_idle_host_is_not_judged(daemon: FakeDaemon) -> None:
    idle = msgspec.structs.replace(SERVED[0], lately=())
    daemon.answers[GetOutcomes] = lambda _: Outcomes(rows=(idle,))
    [check] = request_checks(Settings(runtime_dir=str(daemon.directory)))
    assert (check.code, check.state) == ("DISAGGREGATED", "skipped")
    assert check.found.startswith("no request came to this host's engines in the last 60 s")
