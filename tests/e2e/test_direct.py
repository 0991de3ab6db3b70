"""Direct reads between two real engines on one host, without any transfer engine: outputs, and the way they went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvctl.demo.deployment import Deployment
from tests.support.deployments import prompt_of, running, transfers_of
from tests.support.engine_pids import engine_pids
from tests.support.forgetting import forget_prefixes

pytestmark = pytest.mark.e2e

ANSWER = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("llama", tmp_path_factory.mktemp("llama"), extra={"backend": "direct"}) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("qwen3.5-gdn", tmp_path_factory.mktemp("gdn"), extra={"backend": "auto"}) as deployment:
        yield deployment


def memfds(pids: Sequence[int]) -> set[int]:
    """Inodes of memfds for KV memory that these processes have mapped."""
    lines = [line.split() for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {int(line[4]) for line in lines if len(line) > 5 and line[5].startswith("/memfd:kvd-kv")}


@pytest.mark.matrix
@pytest.mark.parametrize("tokens", [100, 1000])
def test_llama_decodes_what_it_read_from_its_neighbour(llama: Deployment, tokens: int) -> None:
    prompt = prompt_of(tokens)
    alone = llama.decode.submit(prompt, ANSWER).result(120)
    forget_prefixes(llama.decode)

    asked = llama.ask(prompt, ANSWER)

    assert asked.decoded.error == ""
    assert asked.decoded.token_ids == alone.token_ids
    (record,) = transfers_of(llama, asked.prefilled)
    assert (record.state, record.backend, record.tokens) == ("done", "direct", tokens)


def test_the_decoder_has_mapped_the_prefillers_memory(gdn: Deployment) -> None:
    gdn.ask(prompt_of(50), 1)
    source, target = (memfds(engine_pids(engine).all) for engine in (gdn.prefill, gdn.decode))
    assert len(source) == 1
    assert source < target


@pytest.mark.parametrize("tokens", [300, 1000])
def test_a_hybrid_decodes_what_auto_read_directly(gdn: Deployment, tokens: int) -> None:
    prompt = prompt_of(tokens)
    alone = gdn.decode.submit_alone(prompt, ANSWER).result(120)
    forget_prefixes(gdn.decode)

    asked = gdn.ask(prompt, ANSWER)

    assert asked.decoded.error == ""
    assert asked.decoded.num_cached_tokens == tokens - 1
    assert asked.decoded.token_ids == alone.token_ids[1:]
    (record,) = transfers_of(gdn, asked.prefilled)
    assert (record.state, record.backend) == ("done", "direct")
