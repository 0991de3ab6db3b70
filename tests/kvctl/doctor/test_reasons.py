"""From counters to a finding: each row of the table once, and what is no finding."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.doctor.losses import FORCED
from kvctl.doctor.reasons import FAILS_FROM, LEAST_REQUESTS, REASONS, WARNS_FROM, not_handed_over
from kvd.wire.identity import Endpoint
from kvd.wire.miss import MISS_CODES
from kvd.wire.outcomes import OutcomeCount, OutcomeRow

AWAY = Endpoint("10.0.0.7", 7766)
TOKENS = 1000
"""Of each request."""


def engine(
    name: str,
    role: Any,
    leases: tuple[int, int] = (0, 0),
    *,
    away: bool = False,
    model: str = "m",
    tokens: int = TOKENS,
    **outcomes: int,
) -> OutcomeRow:
    """One with so many requests of each outcome (``refused__BAD_PARAMS`` with a code), leases and unclaimed ones."""
    lately = []
    for key, requests in outcomes.items():
        outcome, _, code = key.partition("__")
        lately.append(OutcomeCount(outcome, code, requests, requests * tokens))  # type: ignore[arg-type]
    return OutcomeRow(
        engine_id=name,
        role=role,
        model=model,
        seconds=60.0,
        lately=tuple(lately),
        leases=leases[0],
        unclaimed=leases[1],
        endpoint=AWAY if away else Endpoint(),
    )


def reasons(*rows: OutcomeRow) -> list[tuple[str, str]]:
    return [(finding.found.partition(":")[0], finding.reason) for finding in not_handed_over(rows)]


KEEPS = engine("p", "prefill", (40, 40), away=True, offered=40)
"""A prefiller on another host, of whose prefills nobody claims one."""

TABLE = [
    # the decoder gets no params
    ("OTHER_PARAMS", engine("d", "decode", plain__OTHER_PARAMS=20), ()),
    ("ROLES", engine("d", "decode", plain__ASKED_TO_PREFILL=20), ()),
    ("ROUTER_DROPS_PARAMS", engine("d", "decode", plain=20), (KEEPS,)),
    ("ROUTER_DROPS_PARAMS", engine("d", "both", plain=20), (KEEPS,)),
    (
        "ROUTER_ASKS_FOR_NO_HANDOVER",
        engine("d", "decode", plain=20),
        (engine("p", "prefill", away=True, plain=20),),
    ),
    (
        "PREFILLER_KEEPS_NOTHING",
        engine("d", "decode", plain=20),
        (engine("p", "prefill", away=True, not_offered__NO_KVD=20),),
    ),
    ("ROUTER_ASKS_NO_PREFILLER", engine("d", "decode", plain=20), (engine("p", "prefill", away=True),)),
    (
        "ROUTER_PASSES_BY",
        engine("d", "decode", plain=20, loaded=5),
        (engine("p", "prefill", (5, 0), away=True, offered=5),),
    ),
    ("NO_PARAMS", engine("d", "decode", plain=20), ()),
    ("NOBODY_ASKS", engine("d", "both", plain=20), ()),
    # it gets params that are of no use
    ("PROMPT_MISMATCH", engine("d", "decode", refused__PROMPT_MISMATCH=20, loaded=20), ()),
    ("PROMPT_UNCHECKED", engine("d", "decode", refused__PROMPT_UNCHECKED=20), ()),
    ("BAD_PARAMS", engine("d", "both", refused__BAD_PARAMS=20), ()),
    ("DOES_NOT_FIT", engine("d", "decode", refused__PEER_REFUSED=20), ()),
    ("PEER_AWAY", engine("d", "decode", refused__PEER_AWAY=20), ()),
    ("PREFILLER_ENDED", engine("d", "decode", missed__PEER_GONE=20), ()),
    ("LEASE_ENDED", engine("d", "decode", refused__LEASE_ENDED=20), ()),
    ("LOADS_MISS", engine("d", "decode", missed__TRANSFER_FAILED=20, loaded=3), ()),
    ("REFUSED", engine("d", "decode", refused__INTERNAL=20), ()),
    ("UNUSED", engine("d", "decode", unused=20), ()),
    # the prefiller's work is of no use
    ("ROUTER_ASKS_FOR_NO_HANDOVER", engine("p", "prefill", plain=20), ()),
    ("ROLES", engine("p", "prefill", plain=20), (engine("q", "prefill", (20, 20), away=True, offered=20),)),
    (
        "ROUTER_DROPS_PARAMS",
        engine("p", "prefill", (40, 40), offered=40),
        (engine("d", "decode", away=True, plain=40),),
    ),
    (
        "DECODER_REFUSES",
        engine("p", "both", (40, 40), offered=40),
        (engine("d", "both", away=True, refused__BAD_PARAMS=40),),
    ),
    ("UNCLAIMED", engine("p", "both", (40, 40), offered=40), ()),
    ("NO_KVD", engine("p", "prefill", not_offered__WORKERS_MISSING=20), ()),
    ("DRAINING", engine("p", "prefill", not_offered__DRAINING=20), ()),
    ("NOT_PUSHED", engine("p", "prefill", not_offered__NOT_PUSHED=20), ()),
    ("NOT_KEPT", engine("p", "prefill", not_offered__NOT_COPIED=20), ()),
]


@pytest.mark.parametrize(("reason", "here", "others"), TABLE)
def test_each_pattern_has_its_reason(reason: str, here: OutcomeRow, others: tuple[OutcomeRow, ...]) -> None:
    [finding] = not_handed_over((here, *others))
    assert (finding.found.partition(":")[0], finding.reason) == (here.engine_id, reason)
    assert finding.found.startswith(f"{here.engine_id}: 20 of " if here.role == "decode" else here.engine_id)
    assert finding.hint


def test_every_row_of_the_table_is_tried_here() -> None:
    assert {reason for reason, _, _ in TABLE} == {reason.name for reason in REASONS}


def test_the_codes_of_the_table_are_those_of_misses() -> None:
    codes = {n.code for _, here, _ in TABLE for n in here.lately if n.outcome in ("refused", "missed")}
    assert codes <= MISS_CODES
    assert FORCED in MISS_CODES


def test_a_finding_says_how_many_of_how_many_and_who_else_shows_it() -> None:
    [finding] = not_handed_over((engine("d", "decode", plain=30, loaded=10), KEEPS))
    assert finding.found == (
        "d: 30 of 40 prompts of the last 60 s (75% of their tokens) were computed here, not loaded: they come without"
        " kv_transfer_params, and nobody claims what is kept by p (40)"
    )
    assert "unchanged" in finding.hint


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (engine("d", "decode", loaded=40, cached=3), engine("p", "prefill", (40, 0), offered=40)),
        (engine("p", "prefill", pushed=40), engine("d", "decode", loaded=40)),
        (engine("d", "decode", plain=LEAST_REQUESTS - 1),),
        (engine("d", "decode", plain=9, loaded=91),),
        (engine("p", "prefill", (100, 9), offered=100),),
        (engine("d", "decode", missed__FORCED=40, loaded=40),),
        (engine("d", "both", loaded=10, plain=1000),),
        (engine("d", "both", (10, 0), offered=10, plain=1000),),
        (engine("d", "decode", away=True, plain=40),),
    ],
    ids=[
        "nothing", "pull", "push", "few", "a small share", "few unclaimed", "ordered misses",
        "short prompts stay with a decoder", "and with a prefiller", "another host's",
    ],
)  # fmt: skip
def test_what_is_no_finding(rows: tuple[OutcomeRow, ...]) -> None:
    assert not_handed_over(rows) == []


def test_short_prompts_that_are_computed_in_place_do_no_harm() -> None:
    short = engine("d", "decode", tokens=5, plain=500).lately
    long = engine("d", "decode", tokens=4000, loaded=50).lately
    row = engine("d", "decode")
    assert (
        not_handed_over(
            [type(row)(engine_id="d", role="decode", model="m", seconds=60.0, lately=short + long)]
        )
        == []
    )


def test_it_warns_and_from_half_of_the_tokens_on_it_fails() -> None:
    def states(lost: int) -> list[bool]:
        return [
            f.state == "failed"
            for f in not_handed_over((engine("d", "decode", plain=lost, loaded=100 - lost),))
        ]

    assert states(int(100 * WARNS_FROM) - 1) == []
    assert states(int(100 * WARNS_FROM)) == states(int(100 * FAILS_FROM) - 1) == [False]
    assert states(int(100 * FAILS_FROM)) == [True]


def test_an_engine_of_both_roles_that_nobody_asks_may_be_meant_to_serve_alone() -> None:
    [finding] = not_handed_over((engine("d", "both", plain=100),))
    assert finding.state == "warning"


def test_engines_of_other_models_tell_nothing() -> None:
    other = engine("p", "prefill", (40, 40), away=True, model="other", offered=40)
    assert reasons(engine("d", "decode", plain=40), other) == [("d", "NO_PARAMS")]


def test_both_sides_on_one_host_are_named_both() -> None:
    rows = (engine("p", "prefill", (40, 40), offered=40), engine("d", "decode", plain=40))
    assert reasons(*rows) == [("p", "ROUTER_DROPS_PARAMS"), ("d", "ROUTER_DROPS_PARAMS")]


def test_prefills_of_a_minute_ago_count_when_no_new_ones_came() -> None:
    assert reasons(engine("p", "prefill", (40, 40))) == [("p", "UNCLAIMED")]


def test_engines_of_one_model_under_two_names_are_known_by_their_weights() -> None:
    decoder, other = (
        engine("d", "decode", plain=40),
        engine("p", "prefill", (40, 40), away=True, model="m2", offered=40),
    )
    [finding] = not_handed_over((decoder, other), {"d": "w1", "p": "w1"})
    assert finding.reason == "ROUTER_DROPS_PARAMS"
    same_name = engine("p", "prefill", (40, 40), away=True, offered=40)
    [finding] = not_handed_over((decoder, same_name), {"d": "w1", "p": "w2"})
    assert finding.reason == "NO_PARAMS"
