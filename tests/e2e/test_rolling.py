"""Two hosts go from an earlier version to this one and back, one after the other, while clients ask: nothing fails."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from kvd.wire.transfer import TransferRecord
from tests.support.daemons import wait_for
from tests.support.deployments import prompt_of
from tests.support.openai_client import Reply
from tests.support.releases import FIRST_OF_THIS_WIRE, FIRST_WITH_CLASSES, THIS, WIRE_BEFORE, Commit, Release
from tests.support.rolling import CLIENTS, PREFILL, Fleet, Host, Load, decoded, prefilled, routed, scraped
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(3600)]

PROMPTS = 6
MANY = 8 * CLIENTS
"""Answers that are awaited after each step."""


@dataclass(frozen=True)
class Rolling:
    """The fleet, all of it of the earlier version, and what is right."""

    fleet: Fleet
    earlier: Release
    right: dict[tuple[int, ...], Reply]

    @property
    def alike(self) -> bool:
        """Whether both versions speak the same."""
        return (self.earlier.wire, self.earlier.contract) == (THIS.wire, THIS.contract)


@pytest.fixture(scope="module", params=[FIRST_OF_THIS_WIRE, FIRST_WITH_CLASSES, WIRE_BEFORE], ids=str)
def rolling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolling]:
    folder = tmp_path_factory.mktemp("roll")
    commit: Commit = request.param
    earlier = commit.unpacked(folder)
    hosts = Host.pair(folder, write_model("llama", folder / "models"))
    try:
        for host in hosts:
            host.start_kvd(earlier)
            host.start_engines(earlier)
            host.ready()  # the second one's engines find what vLLM found out for the first one's
        prompts = [tuple(prompt_of(300, seed=seed)) for seed in range(PROMPTS)]
        right = {prompt: decoded(hosts[0], prompt, None) for prompt in prompts}
        assert all(reply.status == 200 for reply in right.values())
        fleet = Fleet(hosts, folder, Load(right))
        url = fleet.router.enter_context(routed(hosts, folder))
        fleet.load.start(url)
        try:
            fleet.load.more(MANY, f"all are {earlier.name}")
            yield Rolling(fleet, earlier, right)
        finally:
            fleet.load.stop()
            fleet.router.close()
    finally:
        for host in hosts:
            host.close()


def test_no_request_fails_on_the_way_to_this_version_and_back(rolling: Rolling) -> None:
    """After each step hand-overs are tried in all directions, and each pair does what docs/versions.md says."""
    fleet = rolling.fleet
    for target in (THIS, rolling.earlier):
        for step in fleet.roll(target):
            fleet.load.more(MANY, step)
            if not step.endswith("are not yet"):
                for prefiller, decoder in pairs(fleet):
                    handed_over(rolling, prefiller, decoder)
        check_classes(rolling)
    fleet.load.stop()
    wrong = [
        one for one in fleet.load.answers if (one.reply.status, one.reply.choices) != (200, one.right.choices)
    ]
    assert not wrong, wrong[:5]
    assert len(fleet.load.answers) > 9 * MANY


def pairs(fleet: Fleet) -> list[tuple[Host, Host]]:
    one, other = fleet.hosts
    return [(one, other), (other, one), (one, one)]


def handed_over(rolling: Rolling, prefiller: Host, decoder: Host) -> None:
    """A pull and a push: loaded where both sides speak the same, else computed, with the cause in the ledger."""
    prompt, right = next(iter(rolling.right.items()))
    fits = rolling.alike or prefiller.engines == decoder.engines
    params = prefilled(prefiller, prompt)
    assert params["kvd_contract"] == prefiller.engines.contract  # type: ignore[union-attr]
    reply = decoded(decoder, prompt, params)
    assert (reply.status, reply.choices) == (200, right.choices)
    # Of params that cannot be read nothing is known but that: the record names no request of the prefiller's.
    if record := recorded(decoder, params["remote_request_id"] if fits else ""):
        told = (record.mode, record.state, record.code)
        assert told == (("pull", "done", "") if fits else ("pull", "miss", "BAD_PARAMS")), record
    name, reply = pushed(prefiller, decoder, prompt)
    assert (reply.status, reply.choices) == (200, right.choices)
    if record := recorded(decoder, name):
        told = (record.mode, record.state, record.code)
        assert told == (("push", "done", "") if fits else ("push", "miss", "PEER_AWAY")), record


def pushed(prefiller: Host, decoder: Host, prompt: tuple[int, ...]) -> tuple[str, Reply]:
    """The transfer's id, and the decoder's answer to a prompt that is pushed to it."""
    name = uuid.uuid4().hex
    both = {"transfer_mode": "push", "kvd_transfer_id": name}
    there = {**PREFILL, **both}
    here: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True, **both}
    here |= {"remote_engine_id": f"prefill-{prefiller.name}", "kvd_contract": 1}
    here |= {"remote_host": "127.0.0.1", "remote_port": prefiller.peer_port}
    with ThreadPoolExecutor(1) as beside:
        prefilling = beside.submit(prefilled, prefiller, prompt, there)
        reply = decoded(decoder, prompt, here)
        prefilling.result()
    return name, reply


def recorded(host: Host, name: str) -> TransferRecord | None:
    """What a decoder's ledger has of a transfer; None where its kvd and its engines are of a wire that is not ours."""
    if host.engines is None or host.engines.wire != THIS.wire:
        return None
    return wait_for(lambda: next((r for r in host.records() if r.remote_request_id == name), None), 60.0)


def check_classes(rolling: Rolling) -> None:
    """All engines are of one version: they fit, so they are of one class, wherever that is shown."""
    hosts = rolling.fleet.hosts
    told = {prefilled(host, next(iter(rolling.right))).get("kvd_compatibility_class") for host in hosts}
    if hosts[0].kvd != THIS:
        return
    shown = {host.engine(role).compatibility_class for host in hosts for role in ("prefill", "decode")}
    assert len(shown) == 1
    assert told == shown
    (name,) = shown
    assert name.startswith("k1-")
    for host in hosts:
        assert scraped(host.metrics).count(f'compatibility_class="{name}"') == 2
