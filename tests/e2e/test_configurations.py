"""What people run vLLM with, a configuration at a time: handed over, answered as by one engine alone, and by stock too.

`make e2e-matrix` runs it and writes what came of each into docs/matrix.md.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment, engine_id, engines
from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.engines.probing import probed
from kvctl.engines.stock import stock_address, stock_engine
from kvctl.processes.daemons import Kvd, two_hosts
from kvctl.processes.errors import EngineGone, EngineStartFailed
from kvd.topology.compat import compare
from kvd.topology.stock.rules import with_stock_rules
from kvd.wire.transfer import TransferRecord
from tests.support import nursery
from tests.support.adapters import write_adapter
from tests.support.asked import Said, ask, said
from tests.support.configurations import COLUMNS, CONFIGURATIONS, WORKS, Setup
from tests.support.configured import connector, second_nodes, two_specs
from tests.support.daemons import wait_for
from tests.support.deployments import HYBRID_BLOCK, PATIENT_KVD, prompt_of, transfers
from tests.support.engine_calls import engine_metrics, reset_prefix_cache
from tests.support.odd_models import dtype_of

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(1800)]

ANSWER = 12
BLOCK = 128
DRAFTS = "spec_decode_num_accepted_tokens"
LOADED = "external_prefix_cache_hits"
CACHED = "prompt_tokens_cached"
MACHINE_LACKS = "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"
UNANSWERED = 60.0
SECONDS = 600.0
"""An engine has them to start, and a request to be answered: the machine may be busy with other things."""


@dataclass(frozen=True)
class Pair:
    """Two engines with a connector; ``hosts`` are the kvds of ours."""

    setup: Setup
    prefill: EngineProcess
    decode: EngineProcess
    hosts: tuple[Kvd, Kvd] | None
    request: Mapping[str, Any]

    def ask(
        self,
        engine: EngineProcess,
        prompt: Sequence[int],
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Future[Any]:
        """A request with what the configuration adds to each."""
        more = {**self.request, **more}
        return ask(engine, prompt, max_tokens, params, **more)

    def alone(self, prompt: Sequence[int], **more: Any) -> tuple[Said, int]:
        """What the decoder computes by itself, and of how many drafts; both engines forget it again."""
        before = self.counted(DRAFTS)
        answer = said(self.ask(self.decode, prompt, ANSWER, **more), SECONDS)
        drafts = self.counted(DRAFTS) - before
        self.forget()
        return answer, drafts

    def forget(self) -> None:
        """Empty both prefix caches."""
        for engine in (self.prefill, self.decode):
            wait_for(partial(reset_prefix_cache, engine), SECONDS)

    def counted(self, name: str) -> int:
        """One of the decoder's counters."""
        return int(engine_metrics(self.decode, SECONDS).values.get(f"vllm:{name}", 0))


@dataclass(frozen=True)
class Refusal:
    """Engines that do not start: why, and their logs."""

    log: str


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair | Refusal]:
    setup: Setup = request.param
    folder = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack:
        specs = two_specs(setup.configuration, folder)
        hosts = None
        if setup.connector == "KvdConnector":
            hosts = stack.enter_context(two_hosts(folder, PATIENT_KVD))
        seconds = stack.enter_context(second_nodes(setup, specs, hosts, folder))
        configs = [connector(setup, role, hosts, folder) for role in (0, 1)]
        start = stack.enter_context(engines(nursery.start))
        begun = [start(replace(s, kv_transfer_config=c)) for s, c in zip(specs, configs, strict=True)]
        try:
            for engine in begun:
                engine.wait_ready(SECONDS)
        except EngineStartFailed as refused:
            yield Refusal("\n".join([str(refused), logs(*specs), *map(read, seconds)]))
            return
        more = dict(setup.configuration.request)
        if "adapter" in more:
            more["adapter"] = write_adapter(specs[0].model, folder / "adapter", seed=more["adapter"])
        yield Pair(setup, begun[0], begun[1], hosts, more)


RUN = [row for row in CONFIGURATIONS if not row.by_hand]


# The column is part of the pair's parameter: with a second parameter pytest would end the pair with each test.
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(Setup(row, name, column), id=f"{row}-{column.replace(' ', '_')}")
        for row in RUN
        for column, (name, _) in COLUMNS.items()
    ],
    indirect=True,
)
def test_what_comes_of_a_configuration(
    pair: Pair | Refusal, record_property: Callable[[str, object], None], request: Any
) -> None:
    setup: Setup = request.node.callspec.params["pair"]
    row, column = setup.configuration, setup.column
    expected = row.expected(column)
    if isinstance(pair, Refusal) and MACHINE_LACKS in pair.log:
        pytest.skip(f"this machine's CPU: {MACHINE_LACKS}")
    came = "does not start" if isinstance(pair, Refusal) else asked(pair, column)
    said_of_it = expected.split("`")[1] if "`" in expected else row.lacks
    if said_of_it:
        log = pair.log if isinstance(pair, Refusal) else logs(pair.prefill.spec, pair.decode.spec)
        assert said_of_it in log, came
    kind = expected.partition(":")[0]
    assert kind == "not run" or said_of_it == row.lacks != "" or came.partition(":")[0] == kind, came
    record_property("found", expected)


def logs(*specs: EngineSpec) -> str:
    """What engines said."""
    return "\n".join(read(spec.log_path) for spec in specs)


def read(log: Path) -> str:
    """A log, of a process that may write to it."""
    return log.read_text(errors="replace")


def asked(pair: Pair, column: str) -> str:
    """What comes of a configuration's prompts, for each data-parallel rank."""
    row = pair.setup.configuration
    way = _continued if row.continued else _each
    try:
        for seed in range(max(row.ranks)):
            if (came := way(pair, column, seed)) != WORKS:
                return came
    except TimeoutError:
        return "no answer"
    except (EngineGone, RuntimeError) as ended:
        return f"error: {ended}"
    return described(pair) if pair.hosts is not None else WORKS


def described(pair: Pair) -> str:
    """What `kvctl describe-topology` shows of the engines: each worker reads, and is read from."""
    row, hosts = pair.setup.configuration, pair.hosts
    assert hosts is not None
    command = [sys.executable, "-m", "kvctl", "--runtime-dir", str(hosts[1].directory), "describe-topology"]
    done = subprocess.run(
        [*command, "-o", "json"], check=False, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        return f"not described: {done.stderr}"
    readers, sources = set(), set()
    for shown in json.loads(done.stdout)["pairs"]:
        local, remote = shown["local"], shown["remote"]
        if local["engine_id"].split("_dp")[0] != engine_id(hosts[1]):
            continue  # of two engines that do both, the other way
        assert shown["compatible"], shown
        assert (
            len({read["local_rank"] for read in shown["reads"]}) == local["tp"] * local["pp"] == row.workers
        )
        assert len({read["remote_rank"] for read in shown["reads"]}) == remote["tp"] * remote["pp"]
        readers.add(local["engine_id"])
        sources.add(remote["engine_id"])
    assert (len(sources), len(readers)) == row.ranks or not row.ranks_named
    return WORKS


def _each(pair: Pair, column: str, seed: int) -> str:
    """Prompts of which no engine knows anything."""
    row = pair.setup.configuration
    for tokens in row.lengths:
        prompts = [prompt_of(tokens, seed=seed + number) for number in range(row.at_once)]
        alone = [pair.alone(prompt) for prompt in prompts]
        if "picture" in pair.request:
            assert (
                pair.alone(prompts[0], picture=pair.request["picture"] + 1)[0].token_ids
                != alone[0][0].token_ids
            )
        if (came := _asked(pair, column, prompts, seed, alone)) != WORKS:
            return came
    return WORKS


def _continued(pair: Pair, column: str, seed: int) -> str:
    """Prompts of which both engines have in their caches what was asked before.

    In bfloat16 other workers add up to other tokens: there what is right is what comes with empty caches.
    """
    row = pair.setup.configuration
    longest, had = prompt_of(max(row.lengths), seed=seed), 0
    prompts = [longest[:tokens] for tokens in row.lengths]
    expected = []
    for prompt in prompts:
        if dtype_of(row.model) == "bfloat16":
            expected.append((_handed_over(pair, column, prompt, None, None)[1], 0))
            pair.forget()
        else:
            expected.append(pair.alone(prompt))
    for prompt, right in zip(prompts, expected, strict=True):
        if (came := _asked(pair, column, [prompt], seed, [right], had)) != WORKS:
            return came
        had = len(prompt)
    return WORKS


def _asked(
    pair: Pair,
    column: str,
    prompts: Sequence[list[int]],
    seed: int,
    alone: Sequence[tuple[Said, int]],
    had: int = 0,
) -> str:
    """What comes of prompts at the same time; of each the decoder's cache has what it had ``had``, in whole blocks."""
    row = pair.setup.configuration
    assert [(said.error, len(said.token_ids)) for said, _ in alone] == [("", ANSWER)] * len(prompts)
    ranks = [seed % ranks if ranks > 1 and row.ranks_named else None for ranks in row.ranks]
    counters = (LOADED, CACHED, DRAFTS)
    before = [pair.counted(name) for name in counters]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: _handed_over(pair, column, prompt, *ranks), prompts))
    for (_, decoded), (expected, _) in zip(answers, alone, strict=True):
        if decoded.error:
            return f"error: {decoded.error}"
        if decoded.token_ids != expected.token_ids:
            return f"wrong answer: {decoded.token_ids} for {expected.token_ids}"
    loaded, cached, accepted = (pair.counted(n) - b for n, b in zip(counters, before, strict=True))
    wanted = sum(len(prompt) + row.more_tokens - 1 for prompt in prompts)
    if cached < wanted or (not had and loaded < wanted) or pair.counted("nixl_num_failed_transfers"):
        return f"computed again: {loaded} tokens came of {wanted}, {cached} were not computed"
    block = HYBRID_BLOCK if row.model == "qwen3.5-gdn" else BLOCK
    if loaded > wanted + len(prompts) - had // block * block:  # vLLM counts the last one too
        return f"moved again: {loaded} tokens came of {wanted}, of which {had} were there"
    if accepted < sum(drafts for _, drafts in alone):
        return f"{accepted} drafts are accepted, {alone} where nothing is handed over"
    for (name, _), prompt in zip(answers, prompts, strict=True):
        if (
            pair.hosts is not None
            and (came := _recorded(pair, column, name, len(prompt) + row.more_tokens)) != WORKS
        ):
            return came
    return WORKS


def _handed_over(
    pair: Pair, column: str, prompt: list[int], prefiller: int | None, decoder: int | None
) -> tuple[str, Said]:
    """The prompt's way through both engines, as a router's: what ours calls it, and the answer.

    Raises `TimeoutError` where there is none; where that is known nobody waits long.
    """
    name = uuid.uuid4().hex
    seconds = UNANSWERED if pair.setup.configuration.expected(column).startswith("no answer") else SECONDS
    if pair.hosts is not None and COLUMNS[column][1] == "push":
        there, here = Deployment(*pair.hosts, pair.prefill, pair.decode, "push").push_params(name)
        if prefiller is not None:
            here["remote_engine_id"] += f"_dp{prefiller}"
        prefilling = pair.ask(pair.prefill, prompt, 1, there, rank=prefiller)
        decoding = pair.ask(pair.decode, prompt, ANSWER, here, rank=decoder)
        computed(said(prefilling, seconds))
        return name, said(decoding, seconds)
    # Stock push knows a request by the id that the router gave both engines.
    prefilled = said(pair.ask(pair.prefill, prompt, 1, PREFILL_PARAMS, name=name, rank=prefiller), seconds)
    computed(prefilled)
    params = dict(prefilled.params or {})
    params.pop("remote_prefill_cached_tokens", None)  # else counted in the place of what was loaded
    decoded = said(pair.ask(pair.decode, prompt, ANSWER, params, name=name, rank=decoder), seconds)
    return str(params.get("remote_request_id", "")), decoded


def computed(prefilled: Said) -> None:
    """Raises `RuntimeError` with why a prefill failed."""
    if prefilled.error:
        raise RuntimeError(prefilled.error)


def _recorded(pair: Pair, column: str, name: str, tokens: int) -> str:
    """What the decoder's ledger says: all of its workers have all of their part, or why not."""
    row, hosts = pair.setup.configuration, pair.hosts
    assert hosts is not None

    def look() -> list[TransferRecord] | None:
        found = [one for one in transfers(hosts[1]) if one.remote_request_id == name]
        return found if len(found) == row.workers or any(one.state == "miss" for one in found) else None

    records = wait_for(look, SECONDS)
    missed = [record.cause for record in records if record.state == "miss"]
    if not missed:
        assert all(record.bytes > 0 for record in records)
        assert row.continued or all(record.tokens >= tokens - 1 for record in records)
    assert {record.mode for record in records} == {column}
    if missed:
        return f"computed again: {missed[0]}"
    moved, expected = sum(record.bytes for record in records), row.token_bytes * -(-tokens // BLOCK) * BLOCK
    return WORKS if not expected or moved == expected else f"{moved} bytes moved instead of {expected}"


UNEQUAL_BLOCKS = next(row for row in RUN if row.name == "blocks of 32 to 128")


@pytest.mark.parametrize(
    "pair", [pytest.param(Setup(UNEQUAL_BLOCKS, "NixlConnector"), id="blocks_of_32_to_128")], indirect=True
)
def test_stock_listeners_are_described_and_compared_and_serve_on_after_a_thousand_questions(
    pair: Pair | Refusal,
) -> None:
    assert isinstance(pair, Pair)
    places = []
    for engine in (pair.prefill, pair.decode):
        port = engine.spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        place = stock_address(f"nixl://127.0.0.1:{port}:model={engine.spec.model}")
        assert place is not None
        places.append(place)
    source, reader = map(stock_engine, places)
    assert [engine.engine_id.split("_")[0] for engine in (source, reader)] == ["stock-0", "stock-1"]
    factors = {f.name: f for f in with_stock_rules(compare(reader, source), reader, source)}
    assert factors["compatibility_hash"].same
    assert (factors["block_size"].local, factors["block_size"].remote) == ("128", "32")
    assert factors["dtype"].local == factors["dtype"].remote == dtype_of(UNEQUAL_BLOCKS.model)
    assert all(factor.ok for factor in factors.values()), factors
    for place in places:
        answers = probed(place, 1000, 5.0)
        assert (len(answers.seconds), len(answers.engines), answers.error) == (1000, 1, None)
    # The decoder's own handshake comes after all of these: had the listener ended, nothing would be loaded.
    before = pair.counted("external_prefix_cache_hits")
    _, decoded = _handed_over(pair, "pull", prompt_of(700, seed=0), None, None)
    assert (decoded.error, len(decoded.token_ids)) == ("", ANSWER)
    assert pair.counted("external_prefix_cache_hits") > before
