"""Two real engines whose requests belong to traces: both sides' spans are children of the client's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment, engine_id
from kvctl.demo.engine_spec import EngineSpec
from tests.support.collectors import Collector, Span, collector
from tests.support.daemons import wait_for
from tests.support.deployments import PATIENT, PATIENT_KVD, counter, deploy, found_out, prompt_of
from tests.support.tiny_models import write_model
from tests.support.traced_requests import ask_traced

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODES = ("pull", "push")
TOKENS = 300
SECONDS = 300.0
CONSUMER, PRODUCER = 5, 4
"""Kinds of span, as OTLP numbers them."""


@dataclass(frozen=True)
class Traced:
    """The engines with their kvds, and the collector that both and vLLM tell."""

    its: Collector
    engines: Deployment

    def ask(self, mode: str, prompt: list[int], header: str) -> list[int]:
        """The decoder's tokens, as a router has them made that hands on the header."""
        prefill, decode = self.engines.prefill, self.engines.decode
        if mode == "push":
            there, here = self.engines.push_params(uuid.uuid4().hex)
            prefilling = ask_traced(prefill, prompt, 1, there, header)
            decoded = ask_traced(decode, prompt, 8, here, header).result(SECONDS)
            prefilling.result(SECONDS)
        else:
            params = ask_traced(prefill, prompt, 1, PREFILL_PARAMS, header).result(SECONDS)["params"]
            decoded = ask_traced(decode, prompt, 8, params, header).result(SECONDS)
        return list(decoded["token_ids"])

    def alone(self, prompt: list[int]) -> list[int]:
        """What the decoder says by itself."""
        return list(ask_traced(self.engines.decode, prompt, 8).result(SECONDS)["token_ids"])

    def loaded(self) -> int:
        """Loads that are done."""
        return counter(self.engines.decode_host, "transfers.done")

    def names(self, span: Span) -> list[str]:
        """The children of a span."""
        return [child.name.removeprefix("kv_transfer.") for child in self.its.children(span)]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    model = write_model("llama", folder / "models")
    with collector() as its:
        specs = [
            EngineSpec(
                model=model,
                work_dir=folder / name,
                log_path=folder / f"{name}.log",
                max_model_len=2048,
                enable_prefix_caching=False,
                arguments={"otlp_traces_endpoint": its.url},
                env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},  # vLLM takes gRPC otherwise
                cache_dir=found_out(folder),
            )
            for name in ("prefill", "decode")
        ]
        settings = {**PATIENT_KVD, "KVD_TRACING_ENDPOINT": its.url}
        with deploy(
            folder, *specs, mode="push", extra=PATIENT, settings=settings, ready_timeout=600.0
        ) as engines:
            yield Traced(its, engines)


def new_trace() -> tuple[str, str, str]:
    """A header, and the ids of the trace and of the client's span in it."""
    trace, client = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    return f"00-{trace}-{client}-01", trace, client


@pytest.mark.parametrize("mode", MODES)
def test_both_sides_spans_are_children_of_the_clients(traced: Traced, mode: str) -> None:
    header, trace, client = new_trace()
    prompt = prompt_of(TOKENS, seed=MODES.index(mode))
    tokens = traced.ask(mode, prompt, header)
    prefiller, decoder = traced.its.sides(trace, 60.0)
    assert (prefiller.parent, decoder.parent) == (client, client)
    assert (prefiller.kind, decoder.kind) == (PRODUCER, CONSUMER)
    assert (prefiller.error, decoder.error) == (None, None)
    told: dict[str, Any] = decoder.attributes
    assert prefiller.attributes["kv_transfer.engine"] == engine_id(traced.engines.prefill_host)
    assert told["kv_transfer.engine"] == engine_id(traced.engines.decode_host)
    assert told["kv_transfer.peer_engine"] == prefiller.attributes["kv_transfer.engine"]
    assert (told["kv_transfer.mode"], told["kv_transfer.state"]) == (mode, "done")
    assert told["kv_transfer.bytes"] > 0
    assert prefiller.resource["service.instance.id"] != decoder.resource["service.instance.id"]
    if mode == "pull":
        assert traced.names(prefiller) == ["unclaimed", "read"]
        assert {"queued", "plan", "post"} <= set(traced.names(decoder))
        assert told["kv_transfer.remote_request_id"] == prefiller.attributes["gen_ai.request.id"]
    else:
        assert traced.names(prefiller) == ["wait", "wire"]
        assert {"queued", "announce", "wait", "wire"} <= set(traced.names(decoder))
    # One host, so one clock: the decoder read while the prefiller kept, or was sent to.
    assert prefiller.begin < decoder.end
    assert decoder.begin < prefiller.end
    assert tokens == traced.alone(prompt)


def test_they_stand_beside_vllms_own(traced: Traced) -> None:
    header, trace, client = new_trace()
    traced.ask("pull", prompt_of(TOKENS, seed=10), header)
    traced.its.sides(trace, 60.0)
    wait_for(lambda: len(traced.its.of(trace, "llm_request")) == 2, 60.0)
    assert {span.parent for span in traced.its.of(trace, "llm_request")} == {client}


def test_a_miss_is_told_with_its_code_also_where_no_worker_heard_of_it(traced: Traced) -> None:
    header, trace, client = new_trace()
    prefill, decode = traced.engines.prefill, traced.engines.decode
    other = ask_traced(prefill, prompt_of(TOKENS, seed=20), 1, PREFILL_PARAMS, header).result(SECONDS)
    prompt = prompt_of(TOKENS, seed=21)
    tokens = ask_traced(decode, prompt, 8, other["params"], header).result(SECONDS)["token_ids"]
    (span,) = wait_for(lambda: [s for s in traced.its.of(trace, "kv_transfer") if s.error], 60.0)
    assert (span.parent, span.attributes["kv_transfer.side"]) == (client, "decoder")
    assert span.attributes["kv_transfer.rank"] == "scheduler"
    assert span.attributes["kv_transfer.miss_code"] == "PROMPT_MISMATCH"
    assert tokens == traced.alone(prompt)


HOSTILE = {
    "not sampled": "00-{trace}-{client}-00",
    "of no version": "ff-{trace}-{client}-01",
    "no trace": f"00-{'0' * 32}-{{client}}-01",
    "huge": "01-{trace}-{client}-01-" + "a" * 100_000,
    "words": "'; DROP TABLE transfers; --",
}


@pytest.mark.parametrize("mode", MODES)
def test_what_belongs_to_no_sampled_trace_is_loaded_and_not_told_of(traced: Traced, mode: str) -> None:
    before = [span.id for span in traced.its.spans if span.name == "kv_transfer"]
    for number, header in enumerate(["", *HOSTILE.values()]):
        _, trace, client = new_trace()
        prompt = prompt_of(TOKENS, seed=30 + 10 * MODES.index(mode) + number)
        loaded = traced.loaded()
        tokens = traced.ask(mode, prompt, header.format(trace=trace, client=client))
        wait_for(lambda loaded=loaded: traced.loaded() > loaded, 60.0)  # type: ignore[misc]
        assert tokens == traced.alone(prompt)
    header, trace, _ = new_trace()
    traced.ask(mode, prompt_of(TOKENS, seed=60 + MODES.index(mode)), header)
    traced.its.sides(trace, 60.0)  # what was there to tell has come when this has
    told = [span for span in traced.its.spans if span.name == "kv_transfer" and span.id not in before]
    assert {span.trace for span in told} == {trace}


def test_a_collector_that_does_not_answer_costs_no_request_anything(traced: Traced) -> None:
    header, trace, _ = new_trace()
    traced.its.hold.clear()
    try:
        for seed in range(70, 74):
            loaded = traced.loaded()
            traced.ask("pull", prompt_of(TOKENS, seed=seed), header)
            wait_for(lambda loaded=loaded: traced.loaded() > loaded, 60.0)  # type: ignore[misc]
        assert not traced.its.of(trace, "kv_transfer")
    finally:
        traced.its.hold.set()
    wait_for(lambda: traced.its.of(trace, "kv_transfer"), 60.0)
