"""A decoder believes of params what the prefiller said, and nothing that was changed on the way."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from kvd.client.session import SessionState
from kvd.vllm.params import finished_prefill, read_remote_prefill
from kvd.vllm.prompt.seal import is_sealed, sealed
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.worker.cause import code_of, text_of
from kvd.worker.remote import RemotePrefill
from tests.support.rigs.bench import KEY, prefill
from tests.support.rigs.desk import PEER, Desk, claimed

SENT = prefill(((5, 6),), lease_opened=1_700_000_000.1234567)
SAID = "these are not the params that prefiller p gave (kvd_seal does not hold): hand them on unchanged"
CHANGES: dict[str, Any] = {
    "remote_block_ids": [[900, 901]],
    "remote_request_id": "another",
    "kvd_first_blocks": [1],
    "kvd_host": "elsewhere",
    "kvd_port": 8,
    "remote_num_tokens": 7,
    "kvd_lease_seconds": 3e7,
    "kvd_lease_opened": 4e9,
    "kvd_checksum": 1,
    "kvd_digest": "00",
    "kvd_seal": "00",
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("known", [True, False])
def test_nothing_is_claimed_with_params_that_were_changed(name: str, known: bool) -> None:
    desk = Desk(known=known, **{name: CHANGES[name]})
    if not known:
        desk.peer(PEER)
        desk.advance()
    assert (code_of(desk.claim.cause), SAID in text_of(desk.claim.cause)) == ("BAD_PARAMS", True)
    desk.claims.end(desk.claim, "miss")
    assert (desk.script.asked(LeaseClaim), desk.script.told(LeaseRelease)) == ([], [])


def test_a_lease_of_a_year_is_not_believed_while_kvd_is_away() -> None:
    desk = Desk(kvd_lease_seconds=3e7)
    desk.script.state = SessionState(
        connected=False, kvd_generation="k-1", engine_generation="gen-1", host="me", port=9
    )
    assert SAID in text_of(desk.advance().cause)


def test_params_as_they_were_given_are_claimed() -> None:
    desk = Desk(remote_host="10.0.0.1", remote_port=8100, tp_size=8, note="a router's")
    desk.lease(claimed(20.0))
    assert not desk.advance().pending
    assert not desk.claim.cause


@pytest.mark.parametrize("field", RemotePrefill.__struct_fields__)
def test_every_field_is_sealed(field: str) -> None:
    before = getattr(SENT, field)
    more: Any = "x" if isinstance(before, str) else ((7,),) if isinstance(before, tuple) else 1
    after = before + more
    assert is_sealed(KEY, SENT)
    assert not is_sealed(KEY, msgspec.structs.replace(SENT, **{field: after}))


def test_blocks_cannot_be_moved_from_one_group_to_another() -> None:
    two = prefill(((5,), (6, 7)))
    assert not is_sealed(KEY, msgspec.structs.replace(two, blocks=((5, 6), (7,))))


def test_another_key_makes_another_seal() -> None:
    assert not is_sealed(bytes(32), SENT)
    assert sealed(bytes(32), SENT).seal != SENT.seal


@pytest.mark.parametrize("numbers", ["30", "30.0", "up", "down"])
def test_a_seal_holds_however_a_router_writes_numbers(numbers: str) -> None:
    """Some parsers of JSON give a number back that differs in its last bit."""

    def through(value: Any) -> Any:
        if isinstance(value, (dict, list)):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            made = {name: through(part) for name, part in parts}
            return made if isinstance(value, dict) else list(made.values())
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if numbers == "30":
            return int(value) if value == int(value) else value
        if numbers == "30.0" or isinstance(value, int):
            return float(value)
        return math.nextafter(value, math.inf if numbers == "up" else -math.inf)

    params = through(json.loads(json.dumps(finished_prefill(SENT, tp=1, pp=1, dcp=1))))
    assert is_sealed(KEY, read_remote_prefill(params))


def test_a_seal_of_text_that_is_none_is_no_exception() -> None:
    assert not is_sealed(KEY, msgspec.structs.replace(SENT, seal="\u00e9"))
