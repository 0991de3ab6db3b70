"""A prefilling and a decoding host with a wire between them, as docs/deploy.md says: kvds with keys, `vllm serve`.

Both have a network of their own, the second one processes of its own too, so nothing but the wire leads from one to the
other. There is no default route.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.engine_spec import EngineSpec, environment
from kvd.client.errors import ClientError
from kvd.client.operator import connect
from kvd.wire.frame import Message
from kvd.wire.query import EngineList, GetStatus, KvdStatus, ListEngines
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord
from tests.support.daemons import wait_for
from tests.support.deployments import found_out, prompt_of
from tests.support.networks import Network, two_networks
from tests.support.servers import CALM, program, serve_words
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

KVD_PORT, HTTP_PORT = 7766, 8000
LOAD_SECONDS = 8.0
PULLED = {"do_remote_decode": True, "do_remote_prefill": False}
ASK = """
import sys, urllib.request
body = sys.stdin.buffer.read()
request = urllib.request.Request(sys.argv[1], body or None, {"Content-Type": "application/json"})
sys.stdout.buffer.write(urllib.request.urlopen(request, timeout=300).read())
"""


@dataclass(frozen=True)
class Host:
    """A host with its kvd and its server."""

    network: Network
    kvd: Path

    def asked(self, path: str, body: dict[str, Any] | None = None) -> str | None:
        """The server's answer to somebody on this host; None where there is none."""
        words = (sys.executable, "-c", ASK, f"http://{self.network.address}:{HTTP_PORT}{path}")
        text = "" if body is None else json.dumps(body)
        done = subprocess.run(
            [*self.network.beside, *words], input=text, capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else None

    def completed(self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> Any:
        """The answer to a prompt."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        text = self.asked("/v1/completions", body | ({"kv_transfer_params": params} if params else {}))
        assert text is not None
        return json.loads(text)

    def ask(self, message: Message) -> Message:
        """One question to its kvd, whose socket is a file that both hosts have."""
        with connect(self.kvd, 10.0) as operator:
            return operator.ask(message)

    def recorded(self, name: str) -> TransferRecord:
        """What became of a transfer, once its kvd's ledger has it: the prefiller's request id, or a push's own."""

        def look() -> TransferRecord | None:
            answer = self.ask(ListTransfers(limit=10))
            assert isinstance(answer, TransferList)
            return next((r.record for r in answer.rows if r.record.remote_request_id == name), None)

        return wait_for(look, 30.0)

    @property
    def engine_id(self) -> str:
        """Its engine, as its kvd knows it."""
        answer = self.ask(ListEngines())
        assert isinstance(answer, EngineList)
        (name,) = (row.engine.engine_id for row in answer.rows if row.local)
        return name

    def linked(self) -> bool:
        """Whether its kvd has a link to the other one."""
        with contextlib.suppress(ClientError):
            status = self.ask(GetStatus())
            return isinstance(status, KvdStatus) and any(peer.state == "up" for peer in status.peers)
        return False


Hosts = tuple[Host, Host]


@pytest.fixture(
    scope="module",
    params=["auto", pytest.param("mooncake", marks=pytest.mark.matrix)],
)
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """The prefilling host and the decoding one, both ready."""
    folder = tmp_path_factory.mktemp("h")
    model = write_model("llama", folder / "models")
    with contextlib.ExitStack() as stack:
        networks = stack.enter_context(two_networks())
        kvd = (sys.executable, "-m", "kvd.service")
        subprocess.run([*kvd, "--new-keys", folder / "keys"], check=True, capture_output=True)
        made = []
        for network, role in zip(networks, ("kv_producer", "kv_consumer"), strict=True):
            place = folder / role[3]
            place.mkdir(mode=0o750)
            made.append(Host(network, place))
            settings = {
                "listen": f"0.0.0.0:{KVD_PORT}",
                "advertise": f"{network.address}:{KVD_PORT}",
                "curve": {"key_file": str(folder / "keys")},
            }
            (place / "kvd.yaml").write_text(json.dumps({"peer": settings}))  # JSON is YAML
            words = [*kvd, "--config", str(place / "kvd.yaml"), "--runtime-dir", str(place)]
            stack.enter_context(program([*network.before, *words], place / "kvd.log"))
            config = {
                "kv_connector": "KvdConnector",
                "kv_connector_module_path": "kvd.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "runtime_dir": str(place),
                    "backend": request.param,
                    "mode": "push",
                    "load_timeout": LOAD_SECONDS,
                },
            }
            spec = EngineSpec(
                model=model,
                work_dir=place,
                log_path=place / "vllm.log",
                cache_dir=found_out(folder),
                env=CALM,
            )
            sockets = place / "t"
            sockets.mkdir()
            serve = serve_words(model, HTTP_PORT, config, host="0.0.0.0")  # noqa: S104 - of a network of its own
            stack.enter_context(program([*network.before, *serve], spec.log_path, environment(spec, sockets)))
        for host in made:
            wait_for(lambda host=host: host.asked("/health") is not None, 400.0)  # type: ignore[misc]
        yield made[0], made[1]


def pulled(hosts: Hosts, prompt: list[int]) -> dict[str, Any]:
    """What a prefiller gives for the decoder."""
    params: dict[str, Any] = hosts[0].completed(prompt, 1, PULLED)["kv_transfer_params"]
    return params


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def test_a_prompt_is_pulled_over_the_wire(hosts: Hosts) -> None:
    _, decoder = hosts
    prompt = prompt_of(700, seed=1)
    params = pulled(hosts, prompt)
    through = text_of(decoder.completed(prompt, 16, params))
    record = decoder.recorded(params["remote_request_id"])
    assert (record.state, record.mode, record.cause) == ("done", "pull", "")
    assert record.backend in ("nixl", "mooncake"), "not direct: nothing but the wire leads there"
    assert through == text_of(decoder.completed(prompt, 16))


def test_a_prompt_is_pushed_over_the_wire(hosts: Hosts) -> None:
    prefiller, decoder = hosts
    prompt = prompt_of(700, seed=2)
    both = {"transfer_mode": "push", "kvd_transfer_id": "pushed-1", "kvd_contract": 2}
    source = {
        "remote_engine_id": prefiller.engine_id,
        "remote_host": prefiller.network.address,
        "remote_port": KVD_PORT,
    }
    with ThreadPoolExecutor(1) as beside:
        beside.submit(prefiller.completed, prompt, 1, {**PULLED, **both})
        params = {"do_remote_decode": False, "do_remote_prefill": True, **both, **source}
        through = text_of(decoder.completed(prompt, 16, params))
    record = decoder.recorded("pushed-1")
    assert (record.state, record.mode, record.cause) == ("done", "push", "")
    assert through == text_of(decoder.completed(prompt, 16))


def test_a_wire_that_is_cut_costs_the_load_and_nothing_else(hosts: Hosts) -> None:
    """The prompt is computed; once the wire is mended the next one is loaded."""
    _, decoder = hosts
    prompt = prompt_of(700, seed=3)
    params = pulled(hosts, prompt)
    decoder.network.cut()
    try:
        through = text_of(decoder.completed(prompt, 16, params))
        record = decoder.recorded(params["remote_request_id"])
        assert record.state == "miss", record
    finally:
        decoder.network.mend()
    assert through == text_of(decoder.completed(prompt, 16))
    wait_for(decoder.linked, 60.0)
    states = []
    for seed in range(4, 7):  # a busy machine may take longer than a load has here
        prompt = prompt_of(700, seed=seed)
        params = pulled(hosts, prompt)
        through = text_of(decoder.completed(prompt, 16, params))
        assert through == text_of(decoder.completed(prompt, 16))
        states.append(decoder.recorded(params["remote_request_id"]).state)
        if states[-1] == "done":
            break
    assert states[-1] == "done", states
