"""What doctor makes of the ledger, and of pairs of engines."""

from __future__ import annotations

import msgspec

from kvctl.cli.settings import Settings
from kvctl.doctor.transfer_checks import transfer_checks
from kvctl.views.doctor import Check
from kvd.wire import query
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList
from tests.kvctl.conftest import ENGINES, FakeDaemon, engine_row, ledger_row


def checks(daemon: FakeDaemon) -> dict[str, Check]:
    return {check.code: check for check in transfer_checks(Settings(runtime_dir=str(daemon.directory)))}


def ledger(daemon: FakeDaemon, *rows: LedgerRow) -> None:
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=rows, total=len(rows), more=False)


def test_misses_are_told_with_the_cause_that_most_of_them_name(daemon: FakeDaemon) -> None:
    causes = ("lease over", "lease over", "peer went away")
    ledger(
        daemon, *(ledger_row(n, state="miss", cause=cause) for n, cause in enumerate(causes)), ledger_row(9)
    )
    found = checks(daemon)["MISSES"]
    assert found.state == "warning"
    assert "3 of 4 were misses, 2 of them: lease over" in found.found


def test_a_miss_in_many_is_nothing_to_warn_of(daemon: FakeDaemon) -> None:
    ledger(daemon, ledger_row(1, state="miss", cause="x"), *(ledger_row(n) for n in range(2, 200)))
    found = checks(daemon)["LATELY"]
    assert (found.state, "1 of the last 199 missed" in found.found) == ("ok", True)


def test_misses_of_one_code_are_told_together_whatever_their_words(daemon: FakeDaemon) -> None:
    causes = (("request a: late", "TOO_LATE"), ("gone", "PEER_GONE"), ("request b: late", "TOO_LATE"))
    ledger(daemon, *(ledger_row(n, state="miss", cause=c, code=k) for n, (c, k) in enumerate(causes)))
    found = checks(daemon)["MISSES"]
    assert "3 of 3 were misses, 2 of them: TOO_LATE: request a: late" in found.found
    assert found.hint == "kvctl transfers --state miss --engine decode-0 --by code"


def test_params_of_another_prompt_are_a_finding_of_their_own_however_few(daemon: FakeDaemon) -> None:
    """One in a thousand is no failing deployment, and still somebody's answers that would have been wrong."""
    miss = {"state": "miss", "cause": "another prompt", "code": "PROMPT_MISMATCH"}
    wrong = [ledger_row(n, request_id=f"cmpl-{n // 2}", **miss) for n in (500, 501)]  # of two ranks
    ledger(daemon, *wrong, *(ledger_row(n) for n in range(400)))
    found = checks(daemon)["PROMPT_MISMATCH"]
    assert found.state == "warning"
    assert found.found.startswith(
        "1 of the last requests to decode-0 brought params of another prompt that prefill-1"
    )
    assert "cmpl-250 among them" in found.found
    assert "list of prompts" in found.hint
    assert "chat template" in found.hint
    assert "kvctl transfers --engine decode-0 --code PROMPT_MISMATCH" in found.hint


def test_without_any_there_is_no_such_finding(daemon: FakeDaemon) -> None:
    ledger(daemon, ledger_row(1, state="miss", cause="x", code="TOO_LATE"))
    assert "PROMPT_MISMATCH" not in checks(daemon)


def test_what_slow_warns_of_is_here_too_under_its_code(daemon: FakeDaemon) -> None:
    waits = {"queued": 0.0, "handshake": 0.9, "wire": 0.1}
    ledger(daemon, *(ledger_row(n, stages=waits) for n in range(20)))
    found = checks(daemon)["HANDSHAKE_ON_PATH"]
    assert (found.state, "peer.connect" in found.hint) == ("warning", True)
    assert found.found.startswith("prefill-1 to decode-0")


def test_an_empty_ledger_is_nothing_wrong(daemon: FakeDaemon) -> None:
    ledger(daemon)
    assert checks(daemon)["TRANSFERS"].state == "ok"


def test_pairs_that_fit_are_counted(daemon: FakeDaemon) -> None:
    assert checks(daemon)["PAIRS"].found == "pairs that fit: 1"


def test_a_pair_that_does_not_fit_fails_with_the_factor_and_both_values(daemon: FakeDaemon) -> None:
    rows = (ENGINES[0], engine_row("prefill-2", "prefill", 2, heads=4))
    daemon.answers[query.ListEngines] = lambda _: query.EngineList(rows=rows)
    found = checks(daemon)["COMPAT_MISMATCH"]
    assert found.state == "failed"
    assert found.found.startswith("decode-0 from prefill-2 cannot be read: ")
    assert "8 of head here and 4 there" in found.found
    assert found.hint == "kvctl diff decode-0 prefill-2"


def test_a_pair_with_a_card_that_cannot_be_read_fails_with_what_is_wrong(daemon: FakeDaemon) -> None:
    [prefill] = [row for row in ENGINES if row.engine.engine_id == "prefill-1"]
    assert prefill.card is not None
    spoilt = tuple(msgspec.structs.replace(worker, geometry=b"{}") for worker in prefill.card.workers)
    card = msgspec.structs.replace(prefill.card, workers=spoilt)
    rows = (ENGINES[0], msgspec.structs.replace(prefill, card=card))
    daemon.answers[query.ListEngines] = lambda _: query.EngineList(rows=rows)
    found = checks(daemon)["PAIR"]
    assert (found.state, found.found.startswith("decode-0 from prefill-1: ")) == ("failed", True)


def test_a_ledger_of_which_nothing_may_be_seen_is_not_called_well(daemon: FakeDaemon) -> None:
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(), total=6, hidden=6)
    found = checks(daemon)
    assert (found["TRANSFERS"].state, "none of your engines" in found["TRANSFERS"].found) == ("skipped", True)
    assert found["NOT_SHOWN"].found.startswith("6 transfers of other users' engines are not looked at")
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(ledger_row(1),), total=6, hidden=5)
    assert (checks(daemon)["NOT_SHOWN"].state, checks(daemon)["LATELY"].state) == ("skipped", "ok")
