"""What the router, the demo and docs/routers.md say of a push is one thing, and the connector reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from examples.router import Prefiller, pull_params, push_params
from kvctl.demo.deployment import PREFILL_PARAMS, Deployment
from kvctl.processes.daemons import Kvd
from kvd.vllm.params import read_remote_push, wants_prefill_here, wants_push, wants_remote_prefill
from kvd.wire.identity import Endpoint
from tests.support.daemons import ROOT, daemons

PAGE = (ROOT / "docs" / "routers.md").read_text()
PREFILLER = Prefiller("http://10.0.0.7:8100", "prefill-0", "10.0.0.7", 7766)


def examples() -> list[dict[str, Any]]:
    """Every JSON object on the page."""
    found = []
    for block in re.findall(r"(?<=^```json\n).*?(?=^```$)", PAGE, re.MULTILINE | re.DOTALL):
        found += [json.loads(text) for text in block.split("\n\n")]
    return found


def test_the_page_shows_what_the_router_sends() -> None:
    pull, to_prefiller, to_decoder = examples()
    assert pull == {"max_tokens": 1, "stream": False, "kv_transfer_params": pull_params()}
    assert (to_prefiller, to_decoder) == push_params(to_prefiller["kvd_transfer_id"], PREFILLER)


def test_the_page_explains_every_entry() -> None:
    there, here = push_params("x", PREFILLER)
    push = PAGE.split("\n## Push\n")[1].split("\n## ")[0]
    assert {name for name in {**there, **here} if f"`{name}`" not in push} == set()


def test_the_demo_sends_the_same() -> None:
    assert pull_params() == PREFILL_PARAMS
    with daemons() as (daemon,):
        host: Any = Kvd("prefill", daemon.directory, Path(), daemon.process)  # type: ignore[arg-type]
        nobody: Any = None
        there = daemon.endpoint
        prefiller = Prefiller("", "prefill-engine", there.host, there.port)
        assert Deployment(host, nobody, nobody, nobody).push_params("x") == push_params("x", prefiller)


def test_the_connector_reads_it() -> None:
    there, here = push_params("x", PREFILLER)
    assert (wants_prefill_here(there), wants_remote_prefill(there), wants_push(there)) == (True, False, True)
    assert (wants_prefill_here(here), wants_remote_prefill(here), wants_push(here)) == (False, True, True)
    read = read_remote_push(here, own_engine_id="decode-0")
    assert (read.transfer_id, read.engine_id) == ("x", "prefill-0")
    assert Endpoint(read.host, read.port) == Endpoint("10.0.0.7", 7766)


def test_pull_is_no_push() -> None:
    assert not wants_push(pull_params())
